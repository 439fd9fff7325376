"""Formats of other packages: an installed one adds its own by an entry point, and broken ones break no others."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_spec import AutoDraftModel, convert, demo, inspect
from hf_spec.checkpoints.entry_points import added_formats

ACME = """
from hf_spec import Eagle3SpeculatorConfig, Format

def recognises(config, names):
    return config.get("model_type") == "acme"

def read(config, tensors):
    tensors = {name.removeprefix("acme."): tensor for name, tensor in tensors.items()}
    return Eagle3SpeculatorConfig.from_dict(config["draft"]), tensors

def keys(config, names):
    return {"model_type": "acme", "draft": config["draft"]}

FORMAT = Format("acme", recognises, read, weight_files=("acme.safetensors",), keys=keys)
"""
OTHERS = """
import dataclasses
from acme_drafts import FORMAT
from hf_spec import PlainSpeculator

def fails(*given):
    raise ZeroDivisionError("nobody expects it")

def makes_no_config(config, tensors):
    return dict(config), tensors

NO_FORMAT = PlainSpeculator()
GREEDY = dataclasses.replace(FORMAT, name="greedy", owner="Greed", recognises=lambda config, names: "greed" in config)
EVERYTHING = dataclasses.replace(FORMAT, name="everything", recognises=lambda config, names: True, read=fails)
SAME_NAME = dataclasses.replace(FORMAT, name="eagle3")
WITHIN = dataclasses.replace(FORMAT, name="within", inside_target=("layers.",))
CANNOT_SAY = dataclasses.replace(FORMAT, name="cannot-say", recognises=fails)
CANNOT_READ = dataclasses.replace(FORMAT, name="cannot-read", read=fails)
NO_CONFIG = dataclasses.replace(FORMAT, name="no-config", read=makes_no_config)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package with these entry points, as pip would leave it."""
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)

    def add(package: str, code: str, **points: str) -> None:
        module = package.replace("-", "_")
        (place / f"{module}.py").write_text(code, encoding="utf-8")
        folder = place / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[hf_spec.formats]", *lines, ""]), encoding="utf-8")
        importlib.invalidate_caches()
        added_formats.cache_clear()

    yield add
    for module in ("acme_drafts", "other_drafts"):
        sys.modules.pop(module, None)
    added_formats.cache_clear()


@pytest.fixture
def acme_files(tmp_path: Path) -> Path:
    """Write the family's EAGLE-3 draft as the package's project would."""
    draft: Any = AutoModel.from_pretrained(demo.path("draft-eagle3"), dtype=torch.float32)
    path = tmp_path / "acme"
    path.mkdir()
    save_file({f"acme.{name}": one for name, one in draft.state_dict().items()}, path / "acme.safetensors")
    config = {"model_type": "acme", "draft": draft.config.to_dict()}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_package_adds_the_format_of_its_drafts(
    install: Callable[..., None], acme_files: Path, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="no weights"):
        AutoDraftModel.from_pretrained(acme_files)
    install("acme-drafts", ACME, acme="acme_drafts:FORMAT")
    report = inspect(acme_files)
    assert (report.layout, report.problem) == ("acme (acme-drafts)", None)
    assert report.engines and all("does not read this format" in one[0] for one in report.engines.values())
    convert(acme_files, tmp_path / "ours")
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    expected = AutoModel.from_pretrained(demo.path("draft-eagle3"), dtype=torch.float32).state_dict()
    for path in (acme_files, tmp_path / "ours"):
        draft = AutoDraftModel.from_pretrained(path, target=target)
        assert all(torch.equal(draft.state_dict()[name], one) for name, one in expected.items())
    call = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    ids = torch.tensor([[1, 581, 614, 263, 453, 16, 442, 297, 263, 493]])
    out = target.generate(ids, speculator=str(acme_files), **call)
    assert torch.equal(out.sequences, target.generate(ids, **call).sequences) and out.speculation.accepted


def test_broken_entry_points_are_named_and_break_nothing(
    install: Callable[..., None], acme_files: Path, tmp_path: Path
) -> None:
    before = str(inspect(demo.path("draft-eagle3")))
    install("acme-drafts", ACME, acme="acme_drafts:FORMAT")
    broken = {"a1": "other_drafts:NO_FORMAT", "a2": "other_drafts:SAME_NAME", "a3": "other_drafts:WITHIN"}
    broken |= {"a4": "other_drafts:CANNOT_SAY", "a5": "other_drafts:missing", "a6": "no_such_module:FORMAT"}
    install("other-drafts", OTHERS, **broken, greedy="other_drafts:GREEDY")
    assert str(inspect(demo.path("draft-eagle3"))) == before
    assert inspect(acme_files).layout == "acme (acme-drafts)"  # though a format that cannot say is asked before
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    save_file({"w": torch.ones(1)}, unknown / "model.safetensors")
    (unknown / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no draft that hf_spec knows") as caught:
        inspect(unknown)
    said = str(caught.value)
    assert "acme of acme-drafts" in said and "greedy of Greed" in said
    for name, value in broken.items():
        assert f"the entry point '{name}' ({value}) of other-drafts" in said
    for why in ("is a PlainSpeculator", "name of another format, 'eagle3'", "inside_target", "nobody expects it"):
        assert why in said
    for why in ("ModuleNotFoundError", "AttributeError"):
        assert why in said


def test_our_formats_are_asked_first(install: Callable[..., None], acme_files: Path) -> None:
    before = str(inspect(demo.path("draft-eagle3")))
    install("acme-drafts", ACME)
    install("other-drafts", OTHERS, everything="other_drafts:EVERYTHING")
    assert str(inspect(demo.path("draft-eagle3"))) == before
    with pytest.raises(ValueError, match=r"read as everything: the entry point 'everything' .*nobody expects it"):
        AutoDraftModel.from_pretrained(acme_files)  # the control: what hf_spec does not know, it takes


@pytest.mark.parametrize(
    ("value", "why"), [("CANNOT_READ", "cannot read these files .*ZeroDivisionError"), ("NO_CONFIG", "gave a dict")]
)
def test_errors_of_reading_name_the_format(
    install: Callable[..., None], acme_files: Path, value: str, why: str
) -> None:
    install("acme-drafts", ACME)
    install("other-drafts", OTHERS, one=f"other_drafts:{value}")
    with pytest.raises(ValueError, match=f"read as {value.lower().replace('_', '-')}: .*{why}"):
        AutoDraftModel.from_pretrained(acme_files)
