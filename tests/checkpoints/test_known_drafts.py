"""Which public drafts there are for a target, and what ``speculator="auto"`` makes of those at hand."""

from __future__ import annotations

import json
import runpy
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_spec
from hf_spec import demo
from hf_spec.checkpoints import files, known, resolve
from hf_spec.checkpoints.kinds import DRAFT_MODELS
from hf_spec.checkpoints.known import known_drafts
from hf_spec.checkpoints.resolve import load_draft

ROOT = Path(__file__).parents[2]
KIND_NAMES = {model.config_class.speculators_model_type for model in DRAFT_MODELS} | {"vanilla", "gemma4_assistant"}


def test_every_entry_names_a_draft_of_a_kind_that_is_read() -> None:
    everything = known_drafts()
    assert len({(one.target, one.draft) for one in everything}) == len(everything) > 50
    for one in everything:
        assert one.target.count("/") == one.draft.count("/") == 1 and one.target != one.draft
        assert one.layout and one.licence != ""
        assert not one.is_read or one.kind in KIND_NAMES
    assert "eagle4" in {one.kind for one in everything if not one.is_read}  # listed all the same


def test_options_of_the_hub_say_where_the_format_is_looked_up(tmp_path: Path) -> None:
    shutil.copytree(demo.path("draft-medusa"), tmp_path / "all" / "medusa")
    target = AutoModelForCausalLM.from_pretrained(demo.path())
    draft = load_draft(tmp_path / "all", target, subfolder="medusa")
    assert draft.config.speculators_model_type == "medusa"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "qwen/qwen3-8b",
        "/somewhere/Qwen3-8B",
        "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/" + "0" * 40,
    ],
)
def test_a_target_is_known_by_id_directory_and_place_in_the_cache(name: str) -> None:
    found = known_drafts(name)
    assert found and {one.target for one in found} == {"Qwen/Qwen3-8B"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
    model.config._name_or_path = name
    assert known_drafts(model) == found


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "other/Qwen3-8B", "Qwen3", "", "/somewhere/Qwen3-8B-mine"])
def test_another_name_is_another_target(name: str) -> None:
    assert known_drafts(name) == []


def test_what_names_no_target_is_refused() -> None:
    with pytest.raises(TypeError, match="target is 5: pass a model"):
        known_drafts(5)  # type: ignore[arg-type]


def put_into_cache(cache: Path, repo: str, source: Path, without: str = "nothing") -> None:
    """Lay ``repo`` out as the Hub's client does, with the files of ``source``."""
    folder, commit = cache / f"models--{repo.replace('/', '--')}", "0" * 40
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for file in source.iterdir():
        if file.suffix != f".{without}":
            (snapshot / file.name).symlink_to(file)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [("me/half", "eagle3"), ("me/other", "vanilla"), ("me/draft", "eagle3"), ("me/last", "medusa")]
    table = tuple(known.KnownDraft("us/target", name, kind, "speculators", None) for name, kind in drafts)
    monkeypatch.setattr(known, "_table", lambda: table)


@pytest.fixture
def target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    model.config._name_or_path = "us/target"
    return model


@pytest.mark.usefixtures("entries")
def test_auto_is_the_first_known_draft_that_is_whole_and_fits(
    target: PreTrainedModel, cache: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"  # a language model with another vocabulary
    AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=77, num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    ).save_pretrained(other)
    put_into_cache(cache, "me/half", Path(demo.path("draft-eagle3")), without="safetensors")
    put_into_cache(cache, "me/other", other)
    put_into_cache(cache, "me/draft", Path(demo.path("draft-eagle3")))
    found = hf_spec.as_speculator("auto", target)
    assert isinstance(found, hf_spec.Eagle3DraftModel)
    assert hf_spec.as_speculator("auto", target) is found  # loaded once
    moved = hf_spec.as_speculator("auto", target.to(torch.bfloat16))
    assert isinstance(moved, hf_spec.Eagle3DraftModel) and moved.dtype == torch.bfloat16
    assert hf_spec.as_speculator("auto", target) is moved
    target.float()

    prompt = torch.tensor([[2, 300, 301, 302]])
    plain = target.generate(prompt, max_new_tokens=24, do_sample=False)  # type: ignore[operator]
    assert torch.equal(plain, target.generate(prompt, max_new_tokens=24, do_sample=False, speculator="auto"))  # type: ignore[operator]


@pytest.mark.usefixtures("entries", "cache")
def test_auto_is_ngrams_where_nothing_is_at_hand(target: PreTrainedModel) -> None:
    found = hf_spec.as_speculator("auto", target)
    assert isinstance(found, hf_spec.NgramSpeculator) and found.history is not None
    assert hf_spec.as_speculator("auto", target) is found  # what it remembers is not forgotten


def test_the_documents_list_what_the_package_does() -> None:
    rows = [
        f"| {one.target} | {one.draft} | {one.kind} | {one.layout} | {one.licence or '?'} | "
        f"{'yes' if one.is_read else 'no'} |"
        for one in known_drafts()
    ]
    page = (ROOT / "docs" / "known-drafts.md").read_text(encoding="utf-8")
    looked_at = date.fromisoformat(known.LOOKED_AT)
    assert f"Looked at on {looked_at.day} {looked_at:%B %Y}" in page
    written = page.splitlines()
    assert [line for line in written if line.startswith("| ") and "/" in line] == rows, json.dumps(rows, indent=1)


def test_the_readme_counts_drafts_of_the_kinds_that_it_names() -> None:
    count = sum(one.kind in ("eagle3", "dflash", "dspark") and one.is_read for one in known_drafts())
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert (
        f"an EAGLE-3, DFlash or DSpark draft: [{count} published ones](docs/known-drafts.md) that hf_spec reads"
        in readme
    )


def test_the_check_against_the_hub_tells_what_differs() -> None:
    tool = runpy.run_path(str(ROOT / "examples" / "check_known_drafts.py"))
    entries = [
        known.KnownDraft("us/target", f"us/{name}", "eagle3", "eagle", "mit") for name in ("same", "other", "gone")
    ]
    hub = {"us/same": "mit", "us/other": "apache-2.0", "us/target": None}

    def licence(name: str) -> str | None:
        if name not in hub:
            raise LookupError(f"{name}: not there")
        return hub[name]

    assert tool["differences"](entries[:1], licence) == []
    found = tool["differences"](entries, licence)
    assert found == ["us/other: its licence is apache-2.0, the table says mit", "us/gone: not there"]
    del hub["us/target"]
    assert tool["differences"](entries[:1], licence) == ["us/target: not there"]


def test_a_hub_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Offline by choice, and where nothing answers."""
    tool = runpy.run_path(str(ROOT / "examples" / "check_known_drafts.py"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for is_offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        assert tool["main"]() == 2
        assert capsys.readouterr().err.startswith("the Hub cannot be reached: ")


@pytest.mark.usefixtures("cache")
def test_auto_passes_over_drafts_that_are_not_read(
    target: PreTrainedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = known.KnownDraft("us/target", "me/draft", "eagle3", "speculators", None, is_read=False)
    put_into_cache(cache, "me/draft", Path(demo.path("draft-eagle3")))
    monkeypatch.setattr(known, "_table", lambda: (entry,))
    assert isinstance(hf_spec.as_speculator("auto", target), hf_spec.NgramSpeculator)


def test_auto_fetches_no_layers_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was loaded from another cache, or of another revision, has no files in the usual place."""
    asked: list[Any] = []
    monkeypatch.setattr(files, "cached_file", lambda path, name, **given: asked.append(given))
    for counts, there in ((False, False), (False, True), (True, False), (True, True)):
        asked.clear()
        target = build("llama", num_hidden_layers=2)
        target.config.name_or_path = "some-org/some-target"
        if counts:
            target.config.num_mtp_layers = 1
        monkeypatch.setattr(resolve, "is_cached", lambda path, there=there: there)
        assert isinstance(hf_spec.as_speculator("auto", target), hf_spec.NgramSpeculator)
        assert bool(asked) == (there and not counts) and all(given["local_files_only"] for given in asked)


def test_a_model_is_cached_with_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, file: str, hub: dict[str, Any]) -> str | None:
        assert hub == {"local_files_only": True}
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr(files, "_find", find)
    assert not files.is_cached("org/model")
    (tmp_path / "config.json").write_text("{}")
    assert not files.is_cached("org/model")
    (tmp_path / "model.safetensors").touch()
    assert files.is_cached("org/model")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    assert not files.is_cached("org/model")
    (tmp_path / "two.safetensors").touch()
    assert files.is_cached("org/model")
