"""Write docs/reference.md: every public name with its signature and docstring, readable on GitHub, too.

python docs/make_reference.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference.md")
WIDTH = 100  # of a signature on one line
INTRODUCTION = """# Reference

Every public name with its signature and description. `help(hf_spec.SpeculationConfig)` shows the same. Names of
`hf_spec.training` need the extra `train`.

After `import hf_spec`, every model of transformers takes three more keywords:

```python
out = target.generate(
    **inputs,
    speculator=draft,  # a draft, a language model, "ngram", "mtp", "auto", a directory or Hub id; False for none
    num_speculative_tokens=4,  # left out: adaptive
    speculation_config=hf_spec.SpeculationConfig(tree="dynamic"),  # all other settings
    return_dict_in_generate=True,  # out.speculation then holds the statistics
)
```

This page is generated from the code by `python docs/make_reference.py`.
"""
SECTIONS = {
    "Generating": """SpeculationConfig SpeculativeDecoding SpeculativeOutput SpeculativeEncoderDecoderOutput
        SpeculationStats SpeculativeModel
        as_speculator set_speculator get_speculator last_speculation pure generate_many Completion RequestOutput
        pack packed unpack Packing invariant Invariance install uninstall""",
    "Drafts": """AutoDraftModel DraftModel Eagle3DraftModel EagleDraftModel PEagleDraftModel DFlashDraftModel
        DSparkDraftModel MedusaDraftModel MTPDraftModel TargetMtp EarlyExitSpeculator PlainSpeculator VanillaSpeculator
        TranslatedSpeculator NgramSpeculator HybridSpeculator known_drafts KnownDraft""",
    "Files of drafts": """inspect convert Format SpeculatorConfig Eagle3SpeculatorConfig EagleSpeculatorConfig
        PEagleSpeculatorConfig DFlashSpeculatorConfig DSparkSpeculatorConfig MedusaSpeculatorConfig
        MTPSpeculatorConfig drafts.features.FeatureSpeculatorConfig drafts.fusing.FusingSpeculatorConfig
        drafts.blocks.BlockSpeculatorConfig""",
    "A draft of your own": "Speculator Drafter DraftContext AcceptedTokens Proposal DraftOutput",
    "Training": """training.DraftTrainer training.DraftTrainingArguments training.prepare_dataset
        training.regenerate training.Endpoint training.new_draft training.count_tokens training.most_frequent
        training.DraftCollator training.cache_features training.FeatureCache training.measure training.unroll
        training.RolloutCallback training.train_on""",
}


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title, words in SECTIONS.items():
        names = [f"hf_spec.{name}" for name in words.split()]
        rows = [f"| [`{name}`](#{name}) | {summary(name)} |" for name in names]
        parts.append("\n".join([f"## {title}\n", "| name | what it is |", "|---|---|", *rows]) + "\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def entry(name: str) -> str:
    """Return the part of the page about one name: heading, signature, docstring, and the members of a class."""
    node, source = definition(name)
    lines = [f'<a id="{name}"></a>\n', f"### `{name}`\n", f"```py\n{declaration(name, node, source)}\n```\n"]
    lines.append(described(docstring(node)) + "\n")
    if members := [member(one, source) for one in public_functions(node) if docstring(one)]:
        lines += ["Members:\n", "\n".join(members) + "\n"]
    return "\n".join(lines)


# -- reading the code -------------------------------------------------------------------------------------------------


def definition(name: str) -> tuple[Any, str]:
    """Return the syntax tree of a public name's class or function, and the source of its module."""
    place, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(place), short)
    source = Path(inspect.getfile(sys.modules[found.__module__])).read_text(encoding="utf-8")
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [one for one in ast.parse(source).body if isinstance(one, kinds) and one.name == found.__name__]
    return nodes[-1], source


def docstring(node: Any) -> str:
    return ast.get_docstring(node) or ""


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith("property") for one in node.decorator_list)


def public_functions(node: Any) -> list[ast.FunctionDef]:
    if not isinstance(node, ast.ClassDef):
        return []
    return [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]


def parameters(given: ast.arguments, source: str) -> Iterator[str]:
    """Yield each parameter as the source has it, without ``self`` and ``cls``."""

    def written(one: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        text = stars + one.arg + (f": {segment(one.annotation, source)}" if one.annotation else "")
        if default is None:
            return text
        return text + (" = " if one.annotation else "=") + segment(default, source)

    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for place, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        if place > 0 or one.arg not in ("self", "cls"):
            yield written(one, default)
        if place + 1 == len(given.posonlyargs):
            yield "/"
    if given.vararg:
        yield written(given.vararg, None, "*")
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield written(one, default)
    if given.kwarg:
        yield written(given.kwarg, None, "**")


def segment(node: ast.AST, source: str) -> str:
    """Return the source of an expression on one line."""
    return re.sub(r"\s*\n\s*", " ", ast.get_source_segment(source, node) or "")


def signature(name: str, node: ast.FunctionDef, source: str, width: int) -> str:
    """Write a call; one that is wider than ``width`` has a line for each parameter."""
    found = list(parameters(node.args, source))
    result = f" -> {segment(node.returns, source)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(found)}){result}"
    if len(line) <= width:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in found) + f"){result}"


def declaration(name: str, node: Any, source: str) -> str:
    """Write a function's signature; of a class its bases, fields with their comments, and how it is made."""
    if isinstance(node, ast.FunctionDef):
        return signature(name, node, source, WIDTH)
    bases = ", ".join(segment(one, source) for one in node.bases)
    head = f"class {name}({bases})" if bases else f"class {name}"
    body = []
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and is_field(one):
            comment = source.splitlines()[(one.end_lineno or 1) - 1][one.end_col_offset :].strip()
            body.append(segment(one, source) + ("  " + comment if comment else ""))
        elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
            body += signature("def __init__", one, source, WIDTH).splitlines()
    return "\n    ".join([f"{head}:", *body]) if body else head


def is_field(node: ast.AnnAssign) -> bool:
    """Tell whether an annotated name of a class belongs to its instances, and to its users."""
    return not ast.unparse(node.target).startswith("_") and "ClassVar" not in ast.unparse(node.annotation)


# -- writing Markdown -------------------------------------------------------------------------------------------------


def summary(name: str) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    first = " ".join(docstring(definition(name)[0]).split("\n\n")[0].split())
    return code(re.split(r"(?<=[\w`)])\.(?: |$)|: ", first, maxsplit=1)[0]).replace("|", "\\|")


def code(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.S)


def described(text: str) -> str:
    """Turn a docstring into Markdown: its arguments become a list."""
    parts = []
    for paragraph in code(text).split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head in ("Args:", "Raises:"):
            entries = re.split(r"\n(?=\S)", textwrap.dedent(rest).strip())
            parts += ["**Errors:**"] if head == "Raises:" else []
            parts.append("\n".join(listed(one) for one in entries))
        else:
            parts.append(re.sub(r"^(Errors|Raises|Source|Shapes):", r"**\1:**", paragraph))
    return "\n\n".join(parts)


def listed(entry: str) -> str:
    """Return ``names: text`` of a docstring as an item of a list."""
    names, _, text = entry.partition(":")
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {' '.join(text.split())}"


def member(node: ast.FunctionDef, source: str) -> str:
    """Return a method or property as an item of a list, with its signature and docstring."""
    shown = node.name if is_property(node) else signature(node.name, node, source, 10_000)
    first, *others = described(docstring(node)).split("\n\n")
    item = f"- `{shown}`: {' '.join(first.split())}"
    return item + "".join("\n\n" + re.sub(r"^", "    ", one, flags=re.M) for one in others)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
