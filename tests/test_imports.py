"""Imports go one way: read them from the source and compare them with the layers of the design."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_spec"

# A module may import from its own layer and from those above it in this list. A name stands for its submodules too.
LAYERS = [
    ("proposal", "cache", "metrics", "configuration"),
    (
        "verification",
        "logits",
        "stopping",
        "architectures",
        "slots",
        "target",
        "recurrent",
        "drafts.base",
        "drafts.trees",
        "drafts.feedback",
        "drafts.modeling",
    ),
    ("drafts",),
    (
        "choice",
        "record",
        "selfcheck",
        "support",
        "text",
        "generation",
        "checkpoints",
        "mtp_formats",
        "conversion",
        "speculators",
    ),
    ("integration", "training", "hub", "bench", "cli", "__main__", "demo"),
]
# The only ones of the loop's layer that know which drafts exist.
KNOW_DRAFTS = ("checkpoints", "conversion", "speculators")
DRAFTS, LOOP = 2, 3
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
    """Find the layer that names ``module`` most closely; the package itself stands with the last."""
    levels = {name: level for level, names in enumerate(LAYERS) for name in names} | {ROOT: len(LAYERS) - 1}
    prefixes = (module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1))
    return next((levels[prefix] for prefix in prefixes if prefix in levels), None)


def problems(graph: dict[str, set[str]]) -> list[str]:
    found = []
    for module in sorted(graph.keys() - {ROOT}):
        level = layer(module)
        if level is None:
            found.append(f"{module} is in no layer: add it to LAYERS")
            continue
        for other in sorted(graph[module]):
            above = layer(other)
            if above is not None and above > level:
                found.append(f"{module} imports {other or 'the package'} of a higher layer")
            if above == level == DRAFTS:
                found.append(f"{module} imports {other}: drafts do not know each other")
            if above == DRAFTS and level == LOOP and module not in KNOW_DRAFTS:
                found.append(f"{module} imports {other}: the loop does not know which drafts exist")
            if other == "verification" and level == DRAFTS:
                found.append(f"{module} imports {other}: a draft does not know that it is verified")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"cycle: {' <- '.join(name or 'the package' for name in error.args[1])}")
    return found


def test_imports_go_one_way() -> None:
    graph = imports(PACKAGE)
    assert "configuration" in graph["drafts.base"]
    assert problems(graph) == []


ALLOWED = {
    "__init__.py": "from .integration import install\nfrom . import generation, drafts",
    "integration.py": "from .generation import loop\nfrom .training.trainer import Trainer",
    "cli.py": "import hf_spec\nfrom hf_spec import bench",
    "bench.py": "import torch, os.path\nfrom . import metrics",
    "generation.py": "from .drafts.base import Drafter\nfrom .speculators import as_speculator",
    "speculators.py": "from .drafts.ngram import NgramSpeculator",
    "metrics.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .generation import loop",
    "proposal.py": "",
    "verification.py": "from .proposal import Proposal",
    "drafts/__init__.py": "",
    "drafts/base.py": "from ..proposal import Proposal",
    "drafts/ngram.py": "from ..proposal import Proposal\nfrom .base import Drafter",
    "training/__init__.py": "from .trainer import Trainer",
    "training/trainer.py": "from ..drafts.ngram import NgramDrafter",
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
        ("metrics.py", "from .generation import loop", "metrics imports generation of a higher layer"),
        ("metrics.py", "def f():\n    import hf_spec.cli", "metrics imports cli of a higher layer"),
        ("metrics.py", "if not TYPE_CHECKING:\n    from . import bench", "metrics imports bench of a higher layer"),
        ("drafts/base.py", "from .. import install", "drafts.base imports the package of a higher layer"),
        ("drafts/base.py", "from . import ngram", "drafts.base imports drafts.ngram of a higher layer"),
        ("drafts/medusa.py", "from hf_spec.drafts import ngram", "drafts do not know each other"),
        ("drafts/__init__.py", "from .ngram import NgramDrafter", "drafts do not know each other"),
        ("drafts/ngram.py", "from ..verification import verify", "does not know that it is verified"),
        ("generation.py", "from .drafts.ngram import NgramDrafter", "the loop does not know which drafts exist"),
        (
            "generation.py",
            "from .checkpoints_missing import x\nfrom .hub import x",
            "generation imports hub of a higher",
        ),
        ("speculators.py", "from .generation import loop", "cycle: "),
        ("integration.py", "import hf_spec", "cycle: "),
        ("utils.py", "", "utils is in no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, problem: str) -> None:
    assert any(problem in found for found in planted(tmp_path, file, source))
