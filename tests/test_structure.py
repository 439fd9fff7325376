"""The measures of the house: no function above 60 lines, every public name explained, a warning for long files."""

from __future__ import annotations

import ast
import importlib
import inspect
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_spec"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 450, 60


def too_long(source: str) -> list[str]:
    functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {one.name: (one.end_lineno or 0) - one.lineno + 1 for one in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > LONGEST_FUNCTION]


def undocumented(module: ModuleType) -> list[str]:
    """Name what ``module`` defines and users may name, but has no docstring, not even that of what it overrides."""
    defined = {name: one for name, one in vars(module).items() if public(name) and defined_in(module, one)}
    found = {module.__name__: module} | defined  # torch's compiler adds names of its own: __resume_at_...
    for name, one in [*found.items()]:
        if inspect.isclass(one):
            members = {member for member, value in vars(one).items() if callable(value) or isinstance(value, property)}
            found |= {f"{name}.{member}": getattr(one, member) for member in members}
    return sorted(name for name, one in found.items() if ("." not in name or public(name)) and not inspect.getdoc(one))


def public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def defined_in(module: ModuleType, one: Any) -> bool:
    is_code = inspect.isclass(one) or inspect.isfunction(one)
    return is_code and one.__module__ == module.__name__ and public(one.__qualname__)


def module_of(file: Path) -> ModuleType:
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    return importlib.import_module(name)


@pytest.mark.clock  # without stand-ins for methods
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_measures(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    if (lines := source.count("\n")) > LONGEST_FILE:  # files are cut by concern, not by size
        warnings.warn(f"{file.relative_to(PACKAGE)} has {lines} lines: does a reader follow it?", stacklevel=1)
    assert too_long(source) == []
    if file.name != "__main__.py":  # which runs
        assert undocumented(module_of(file)) == []


def test_planted_violations_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "\n".join(f"    x = {i}" for i in range(LONGEST_FUNCTION))
    assert too_long(f"class A:\n  def f(self):\n{body}") == ["f: 61 lines"]
    assert too_long(f"def f():\n{body[: body.rindex(chr(10))]}") == []
    source = """
class Base:
    "Doc."
    def f(self):
        "Doc."
    def g(self): ...
class A(Base):
    "Doc."
    def f(self): ...
    def g(self): ...
    @property
    def p(self): ...
    def _h(self): ...
def k(): ...
def _k(): ...
"""
    (tmp_path / "planted.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert undocumented(importlib.import_module("planted")) == ["A.g", "A.p", "Base.g", "k", "planted"]
