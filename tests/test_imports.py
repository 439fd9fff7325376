"""Imports go one way: read them from the source and compare them with the layers of the design."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_spec"

# From the lowest to the highest: a folder, or a module beside the folders, imports only from its own layer and lower.
LAYERS = (
    (
        "bundle",
        "bundling",
        "config_keys",
        "device_tensors",
        "packing",
        "processes",
        "progress",
        "untrusted",
        "versions",
        "whole_files",
        "wrappers",
    ),
    ("parallel", "proposal", "sampling", "display", "metrics", "settings", "configuration"),
    ("scoring",),
    ("invariance",),
    ("policy",),
    ("drafts", "unroll"),  # a kind of draft unrolls itself for training by the functions of `unroll`
    ("verify",),
    ("decode",),
    ("checkpoints",),
    ("defaults",),
    ("batching",),
    ("integration", "training"),
    ("many",),
    ("bench", "demo", "serving"),
    ("doctor",),
    ("public",),
    ("cli", "__main__"),
)
DRAFTS = "drafts"  # each of its folders is a kind of draft, the modules beside them are what kinds share
ROOT = ""


def imports(package: Path) -> dict[str, set[str]]:
    """Map every module of ``package`` to those it imports, by names relative to it; the package itself is ROOT."""
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    graph = {}
    for name, file in files.items():
        parent = name if file.name == "__init__.py" else name.rpartition(".")[0]
        nodes = runtime_imports(ast.parse(file.read_text(encoding="utf-8")))
        graph[name] = {found for node in nodes for found in targets(node, parent, package.name, set(files))}
    return graph


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports below ``node``, inside functions too, save those for type checkers only."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from runtime_imports(child)


def targets(node: ast.Import | ast.ImportFrom, parent: str, package: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules of ``package`` that an import statement in the subpackage ``parent`` names."""
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    else:
        above = ".".join([package, parent] if parent else [package]).split(".")
        start = above[: len(above) - node.level + 1] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        paths = [f"{base}.{alias.name}" for alias in node.names]
        paths = [path if path.removeprefix(f"{package}.") in modules else base for path in paths]
    for path in paths:
        if path.split(".")[0] == package:
            yield path.removeprefix(package).removeprefix(".")


def layer(module: str) -> int | None:
    """Number the layer of ``module``; the package itself stands with the last."""
    top = module.split(".")[0]
    return next((level for level, names in enumerate(LAYERS) if top in names), None if top else len(LAYERS) - 1)


def kind(module: str) -> str | None:
    """Name the kind of draft whose folder holds ``module``; ``None`` for all that stands outside of one."""
    return ".".join(parts[:2]) if (parts := module.split("."))[0] == DRAFTS and len(parts) > 2 else None


def is_kind(module: str, graph: dict[str, set[str]]) -> bool:
    return module.count(".") == 1 and module.startswith(f"{DRAFTS}.") and any(kind(one) == module for one in graph)


def problems(graph: dict[str, set[str]]) -> list[str]:
    found = []
    for module in sorted(graph.keys() - {ROOT}):
        level = layer(module)
        if level is None:
            found.append(f"{module} is in no layer: add its folder to LAYERS")
            continue
        for other in sorted(graph[module]):
            above = layer(other)
            if above is not None and above > level:
                found.append(f"{module} imports {other or 'the package'} of a higher layer")
            inside = module.split(".")[0] == DRAFTS
            if inside and (kind(other) or is_kind(other, graph)) and not f"{other}.".startswith(f"{kind(module)}."):
                found.append(f"{module} imports {other}: drafts do not know each other")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"cycle: {' <- '.join(name or 'the package' for name in error.args[1])}")
    return found


def test_imports_go_one_way() -> None:
    graph = imports(PACKAGE)
    assert "settings" in graph["drafts.base"]
    assert kind("drafts.eagle3.modeling") == "drafts.eagle3" and is_kind("drafts.eagle3", graph)
    assert problems(graph) == []


ALLOWED = {
    "__init__.py": "from .integration import install\nfrom . import decode, drafts",
    "integration.py": "from .decode.loop import loop\nfrom .training.trainer import Trainer",
    "cli/__init__.py": "import hf_spec\nfrom hf_spec import bench",
    "bench/__init__.py": "import torch, os.path\nfrom .. import metrics",
    "metrics.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .decode.loop import loop",
    "proposal.py": "",
    "scoring/runner.py": "from ..proposal import Proposal",
    "decode/__init__.py": "",
    "drafts/__init__.py": "",
    "drafts/base.py": "from ..proposal import Proposal",
    "drafts/ngram/__init__.py": "",
    "drafts/ngram/index.py": "",
    "drafts/ngram/speculator.py": "from ...proposal import Proposal\nfrom .index import Index",
    "drafts/medusa/modeling.py": "from ..base import Drafter",
    "checkpoints/auto.py": "from ..drafts.ngram.speculator import NgramSpeculator",
    "decode/loop.py": "from ..drafts.base import Drafter",
    "decode/verification.py": "from ..proposal import Proposal",
    "training/__init__.py": "from .trainer import Trainer",
    "training/trainer.py": "from ..drafts.ngram import speculator",
}


def planted(folder: Path, file: str, source: str) -> list[str]:
    """List the problems of the allowed package with ``source`` added to one of its files."""
    for name, text in (ALLOWED | {file: f"{ALLOWED.get(file, '')}\n{source}"}).items():
        path = folder / "hf_spec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return problems(imports(folder / "hf_spec"))


def test_allowed_imports_are_no_problem(tmp_path: Path) -> None:
    assert planted(tmp_path, "proposal.py", "") == []


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("metrics.py", "from .decode.loop import loop", "metrics imports decode.loop of a higher layer"),
        ("metrics.py", "def f():\n    import hf_spec.cli", "metrics imports cli of a higher layer"),
        ("metrics.py", "if not TYPE_CHECKING:\n    from . import bench", "metrics imports bench of a higher layer"),
        ("scoring/runner.py", "from ..drafts import base", "scoring.runner imports drafts.base of a higher layer"),
        ("drafts/base.py", "from .. import install", "drafts.base imports the package of a higher layer"),
        ("drafts/base.py", "from . import ngram", "drafts do not know each other"),
        ("drafts/base.py", "from .ngram.speculator import x", "drafts do not know each other"),
        ("drafts/medusa/modeling.py", "from hf_spec.drafts import ngram", "drafts do not know each other"),
        ("drafts/medusa/modeling.py", "from ..ngram.index import Index", "drafts do not know each other"),
        ("drafts/__init__.py", "from .ngram import NgramDrafter", "drafts do not know each other"),
        (
            "drafts/ngram/speculator.py",
            "from ...decode.outputs import Record",
            "drafts.ngram.speculator imports decode.outputs of a higher layer",
        ),
        ("drafts/base.py", "from ..checkpoints import auto", "drafts.base imports checkpoints.auto of a higher layer"),
        ("decode/loop.py", "from ..training import x", "decode.loop imports training of a higher layer"),
        ("decode/loop.py", "from ..checkpoints import auto", "decode.loop imports checkpoints.auto of a higher layer"),
        ("drafts/ngram/index.py", "from .speculator import x", "cycle: "),
        ("integration.py", "import hf_spec", "cycle: "),
        ("utils.py", "", "utils is in no layer"),
        ("hub/__init__.py", "", "hub is in no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, problem: str) -> None:
    assert any(problem in found for found in planted(tmp_path, file, source))
