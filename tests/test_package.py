"""What a user is given: the wheel, the public names, and documents that do what they say."""

from __future__ import annotations

import importlib
import inspect
import os
import pydoc
import re
import subprocess
import sys
import tarfile
import typing
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import mypy.api
import pytest
import torch
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig

import hf_spec
from hf_spec import demo, training

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def code_blocks(document: Path, language: str) -> list[str]:
    """List what is meant to be run."""
    return re.findall(
        rf"(?<!-->\n)^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    built = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return ZipFile(next(iter(built)))


def test_wheel_holds_the_package_and_nothing_else(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = {"hf_spec/py.typed", "hf_spec/demo/target/tokenizer.json"}
    for model in demo.MODELS:
        wanted |= {f"hf_spec/demo/{model}/{file}" for file in ("config.json", "model.safetensors")}
    wanted |= {str(file.relative_to(ROOT)) for file in (ROOT / "hf_spec").rglob("*.py")}
    assert wanted <= names
    assert {name.split("/")[0] for name in names} == {"hf_spec", f"hf_spec-{hf_spec.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_is_small_and_its_page_leads_somewhere(wheel: ZipFile) -> None:
    assert Path(str(wheel.filename)).stat().st_size <= 13 * 10**6
    page = wheel.read(f"hf_spec-{hf_spec.__version__}.dist-info/METADATA").decode()
    assert "](https://" in page and re.findall(r"\]\((?!https://|#)[^)]*\)", page) == []
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel.filename)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_sources_build_the_same_wheel(wheel: ZipFile, tmp_path: Path) -> None:
    built = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(next(iter(built))) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = WheelBuilder(str(sources)).build(directory=str(tmp_path), versions=["standard"])
    assert set(ZipFile(next(iter(again))).namelist()) == set(wheel.namelist())
    for wanted in ("README.md", ".mkdocs.yml", ".ci/run", "tests/conftest.py", "examples/train.yaml", "docs/index.md"):
        assert (sources / wanted).exists(), wanted


def test_versions_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    version, _, development = hf_spec.__version__.partition(".dev")
    assert f"## {cited['version']}\n" in changelog
    assert f"## {version}, not released\n" in changelog if development else version == cited["version"]


def test_the_site_builds_and_explains_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml"]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    names = [f"hf_spec.{name}" for name in hf_spec.__all__] + [f"hf_spec.training.{name}" for name in training.__all__]
    assert [name for name in names if f'id="{name}"' not in page] == []
    nav = yaml.load((ROOT / ".mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    pages = [
        page for part in nav for pages in part.values() for page in ([pages] if isinstance(pages, str) else pages)
    ]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_demo_family_is_small(wheel: ZipFile) -> None:
    sizes = [file.file_size for file in wheel.infolist() if file.filename.startswith("hf_spec/demo/")]
    assert sum(sizes) <= 11.5 * 10**6


def test_commands_exist(wheel: ZipFile) -> None:
    points = ConfigParser()
    points.read_string(wheel.read(f"hf_spec-{hf_spec.__version__}.dist-info/entry_points.txt").decode())
    assert set(points["console_scripts"]) == {"hf-spec"}
    for module, _, function in (command.partition(":") for command in points["console_scripts"].values()):
        assert callable(getattr(importlib.import_module(module), function))


def test_public_names_are_there_and_documented() -> None:
    assert len(set(hf_spec.__all__)) == len(hf_spec.__all__)
    assert [name for name in hf_spec.__all__ if not getattr(hf_spec, name).__doc__] == []


def test_a_script_may_have_the_name_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "hf-spec.py"
    script.write_text(
        "import hf_spec, inspect, transformers\n"
        "assert 'speculator' in inspect.signature(transformers.GenerationMixin.generate).parameters\n"
    )
    subprocess.run([sys.executable, script], check=True)


def test_generate_tells_its_keywords() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
    shown, plain = (inspect.signature(one) for one in (model.generate, GenerationMixin.generate._hf_spec_original))
    ours = set(shown.parameters) - set(plain.parameters)
    assert ours == {"speculator", "speculation_config", "num_speculative_tokens"}
    assert all(shown.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours)
    assert shown.return_annotation == plain.return_annotation
    told = pydoc.render_doc(model.generate)
    assert all(name in told for name in ours) and "SpeculationStats" in told
    typed = [inspect.signature(one).parameters for one in typing.get_overloads(hf_spec.SpeculativeModel.generate)]
    assert len(typed) == 2 and all(
        ours < set(one) < {*shown.parameters, "self", "return_dict_in_generate"} for one in typed
    )


TYPED = """
from typing import cast
from transformers import AutoModelForCausalLM
import hf_spec
model = cast(hf_spec.SpeculativeModel, AutoModelForCausalLM.from_pretrained("x"))
out = model.generate(speculator="ngram", return_dict_in_generate=True, max_new_tokens=3)
reveal_type(out.speculation)
reveal_type(model.generate(speculator=False))
model.generate(speculator=3)
model.generate(speculator="ngram", num_speculative_tokens="many")
out.speculations
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_keywords(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED, encoding="utf-8")
    out, _, _ = mypy.api.run([str(file), "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)])
    told = [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith(str(file))]
    assert 'note: Revealed type is "hf_spec.metrics.SpeculationStats | None"' in told
    assert 'note: Revealed type is "torch._C.LongTensor"' in told
    assert sum('No overload variant of "generate"' in line for line in told) == 2
    assert sum('"SpeculativeOutput" has no attribute "speculations"' in line for line in told) == 1


def test_readme_examples_run() -> None:
    names: dict[str, Any] = {}
    for block in code_blocks(ROOT / "README.md", "python"):
        exec(block, names)
    hf_spec.set_speculator(names["target"], None)
    prompt, text = names["inputs"].input_ids, names["out"].sequences
    assert torch.equal(text[:, : prompt.shape[1]], prompt)
    stats, new = names["out"].speculation, text.shape[1] - prompt.shape[1]
    assert stats.emitted == new - 1 + stats.first_tokens_in_steps


def test_ci_does_what_the_documents_say() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace(" --quiet", "").splitlines()
    (told,), (setup, *_) = (code_blocks(ROOT / name, "bash") for name in ("README.md", "CONTRIBUTING.md"))
    assert len(told.splitlines()) == 2 and told.splitlines()[-1] == "hf-spec demo"
    assert {line for line in setup.splitlines() if line.startswith("pip install")} <= set(ci)
    assert f"`{ci[-1]}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:hf_spec|tests|examples|docs)/[\w./-]+|[\w-]+/[\w/-]+\.py)`", text)
    folders = (ROOT, ROOT / "hf_spec")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
