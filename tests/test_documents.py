"""What README and docs/ show runs as it stands there, and commands have the options that are written.

A block below ``<!-- not run: reason -->`` is checked for syntax and names. All blocks of a document share what the
ones before them named; ``target``, ``draft``, ``tokenizer`` and ``inputs`` are the demo family's from the start.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from test_public_api import parsers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_spec
from hf_spec import demo, training

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)
WORDY = {"changelog.md"}  # whose old entries have sentences of more than 25 words
REASONS = {
    "needs the Hub",
    "needs an accelerator",
    "needs minutes",
    "part of a program",
    "needs several processes",
    "needs a server",
}


class Block(NamedTuple):
    code: str
    reason: str | None


def blocks(document: Path, *languages: str) -> list[Block]:
    found = FENCE.finditer(document.read_text(encoding="utf-8"))
    return [Block(one["code"], one["reason"]) for one in found if one["language"] in languages]


def with_blocks(*languages: str) -> list[Path]:
    return [document for document in DOCUMENTS if blocks(document, *languages)]


@functools.cache
def loaded() -> tuple[Any, Any, Any]:
    models = (
        AutoModelForCausalLM.from_pretrained(demo.path(name), dtype=torch.float32)
        for name in ("target", "draft-vanilla")
    )
    return AutoTokenizer.from_pretrained(demo.path()), *models


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what documents take as given, in a directory with the files that they name."""
    monkeypatch.chdir(tmp_path)
    tokenizer, target, draft = copy.deepcopy(loaded())
    target.generation_config.max_length = 24
    stories = ["Once upon a time, there was", "One day, Lily and her mom", "Tom had a big red ball"]
    lines = [json.dumps({"prompt": story}) for story in stories]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = {"target": target, "model": target, "draft": draft, "tokenizer": tokenizer, "hf_spec": hf_spec}
    given |= {
        "inputs": tokenizer(stories[0], return_tensors="pt"),
        "prompts": [tokenizer(one).input_ids for one in stories],
    }
    given |= {"prompt": given["prompts"][0], "options": GenerationConfig(max_new_tokens=8, do_sample=False)}
    given |= {name: getattr(hf_spec, name) for name in hf_spec.__all__}
    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "StaticCache"):
        given[name] = getattr(transformers, name)
    return given | {"torch": torch}


@pytest.mark.parametrize("document", with_blocks("python"), ids=lambda path: path.name)
def test_python_blocks_run(document: Path, names: dict[str, Any]) -> None:
    for number, block in enumerate(blocks(document, "python")):
        where = f"{document.name}, block {number}"
        code = compile(block.code, where, "exec")
        if block.reason is None:
            exec(code, names)
        else:
            assert block.reason in REASONS, where
            assert unknown(block.code) == [], where


def unknown(code: str) -> list[str]:
    """List imports, names of ``hf_spec`` and keywords of calls of them that do not exist."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            found += [f"{node.module}.{one.name}" for one in node.names if not hasattr(module, one.name)]
        path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"hf_spec(\.\w+)+", path):
            value: Any = hf_spec
            for part in path.split(".")[1:]:
                value = getattr(value, part, None)
            found += [path] if value is None else []
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).removeprefix("hf_spec.")) in hf_spec.__all__:
            given = inspect.signature(getattr(hf_spec, name)).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in given.values()):
                found += [f"{name}({one.arg}=)" for one in node.keywords if one.arg and one.arg not in given]
    return found


def test_the_reference_is_generated_from_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    committed = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert committed == made["page"](), "the code has changed: run python docs/make_reference.py"
    names = [f"hf_spec.{name}" for name in hf_spec.__all__] + [f"hf_spec.training.{name}" for name in training.__all__]
    assert [name for name in names if f"\n### `{name}`\n" not in committed] == []


def test_names_that_do_not_exist_are_found() -> None:
    code = "from hf_spec import nonsense\nhf_spec.bogus(1)\nhf_spec.SpeculationConfig(tree=None, shape=1)"
    assert unknown(code) == ["hf_spec.nonsense", "SpeculationConfig(shape=)", "hf_spec.bogus"]


@pytest.mark.parametrize("document", with_blocks("sh", "bash"), ids=lambda path: path.name)
def test_commands_know_their_options(document: Path) -> None:
    known = parsers()
    for line in commands(document):
        words = shlex.split(line, comments=True)
        while words and (
            "=" in words[0] or words[0] in ("nohup", "nice", "accelerate", "launch", "torchrun", "python", "-m")
        ):
            words = words[1:]
        if words[:1] in (["hf-spec"], ["hf_spec"]) and len(words) > 1 and not words[1].startswith("-"):
            given = known[words[1]]._option_string_actions
            wrong = [word for word in words if word.startswith("--") and word.split("=")[0] not in given]
            takes_any = words[1] in ("train", "serve")  # the options of the Trainer, and of transformers serve
            assert wrong == [] or takes_any, line
        elif words and words[0].startswith("examples/"):
            source = (ROOT / words[0]).read_text(encoding="utf-8")
            assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == [], line


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"<!-- table:.*?<!-- end of table -->\n", "", text, flags=re.S).splitlines()) <= 150
    assert [one for one in sentences(text) if len(one.split()) > 25] == []


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name not in WORDY], ids=lambda path: path.name
)
def test_sentences_of_the_documents_are_short(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [one for one in sentences(text) if len(one.split()) > 25] == []


def test_every_page_has_an_example() -> None:
    pages = {path.name for path in DOCUMENTS if not FENCE.search(path.read_text(encoding="utf-8"))}
    assert pages <= {"changelog.md"}


def test_long_sentences_are_found() -> None:
    long = "word " * 25 + "end."
    assert sentences(f"# Title\n\n- {long} Short [one](two three)!\n\n| a | {long} |\n")[1:] == [
        long.strip(),
        "Short one!",
        "a",
        long.strip(),
    ]


def sentences(text: str) -> list[str]:
    """List the sentences outside of code; cells of tables, points of lists and titles end one."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "\n", text, flags=re.M | re.S)
    text = re.sub(r"!?\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    parts = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.|#+) |\||(?<=[.!?])[*_)\"]*\s", text, flags=re.M)
    return [" ".join(part.split()) for part in parts if re.search(r"\w", part)]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_llms_txt_names_every_page(name: str) -> None:
    listed = re.findall(r"\]\((\S+)\)", (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8"))
    assert [one for one in listed if one.endswith(f"/main/docs/{name}")], name


def commands(document: Path) -> list[str]:
    code = "\n".join(block.code for block in blocks(document, "sh", "bash")).replace("\\\n", " ")
    return [part.strip() for line in code.splitlines() for part in line.split("&&") if part.strip()]


def numbers_in_rows(document: str, beginning: str) -> list[list[float]]:
    """Read the numbers in the rows of ``document`` that begin with ``beginning``."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {beginning}[^|]*\|(.*)\|$", text, re.M)
    return [[float(cell) for cell in row.split("|")] for row in rows]


def test_shares_of_experts_are_computed() -> None:
    """A block of n tokens reads E (1 - (1 - k / E) ** n) of E experts, if each token takes k of them at random."""
    rows = numbers_in_rows("mixtures-of-experts.md", "(?:Mixtral|gpt-oss|Qwen3|DeepSeek)")
    assert len(rows) == 5
    for experts, per_token, *shares in rows:
        used = [experts * (1 - (1 - per_token / experts) ** tokens) for tokens in (2, 4, 6, 8, 16, 32, 64)]
        assert shares == [round(one / per_token, 1) for one in used]


def test_costs_after_long_texts_are_those_of_the_page_on_performance() -> None:
    """The first rows of four columns are those after 64 to 4,096 tokens."""
    rows = numbers_in_rows("long-contexts.md", "(?:float32:|bfloat16:)")
    for dtype, row in zip(("float32", "bfloat16"), rows, strict=True):
        plain, block = (
            next(row for row in numbers_in_rows("performance.md", f"{dtype}, {name}") if len(row) == 4)
            for name in ("plain", "6 nodes")
        )
        assert row == [round(one / other, 2) for one, other in zip(block, plain, strict=True)]
