"""One file that holds the code of a draft: the modules of this package that it needs, in their own words.

The file keeps the source of each module as a string, and a finder imports them from there under a package name of
their own. So nothing is written twice, and an installed hf_spec of another version does no harm. Relative imports
become absolute ones: transformers would look for their files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
DECODING = "decode.entry"  # whose `generate` decodes with the draft
TRAINING = "unroll."  # needs the rest of hf_spec, too
PLACEHOLDER = "_hf_spec_bundle"  # stands for the name of the package until its digest is known
IMPORT = re.compile(r"^(\s*)from (\.+)([\w.]*) import\b", re.M)

TEXT = '''"""The draft {model} of hf_spec with all code that it needs. This file is generated: change hf_spec instead.

It is executed by ``AutoModel.from_pretrained(..., trust_remote_code=True)``. https://github.com/hf-spec/hf_spec
Apache License 2.0. Each module stands below under its name in the package hf_spec; the end of the file imports them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    raise ImportError("the code of this draft needs Python 3.11 or later")
PACKAGE = "{package}"
SOURCES = {{}}
{sources}

class Sources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """The finder and loader of the modules above."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if package != PACKAGE or module not in SOURCES:
            return None
        is_package = self.is_package(name)
        return importlib.machinery.ModuleSpec(name, self, origin=self.get_filename(name), is_package=is_package)

    def is_package(self, name):
        below = f"{{name}}.".partition(".")[2]
        return any(module.startswith(below) and module for module in SOURCES)

    def get_source(self, name):
        return SOURCES[name.partition(".")[2]]

    def get_filename(self, name):
        return f"{{name.replace('.', '/')}}.py"

    def whole(self):
        """Return this file, which a draft that is saved again writes once more."""
        return Path(__file__).read_text(encoding="utf-8")


if importlib.util.find_spec(PACKAGE) is None:  # another draft of the same kind may have brought it
    sys.meta_path.append(Sources())
{model} = importlib.import_module(f"{{PACKAGE}}.{module}").{model}
{config} = {model}.config_class
generate = importlib.import_module(f"{{PACKAGE}}.{decoding}").generate
# Where transformers looks for the file to copy.
{model}.__module__ = {config}.__module__ = __name__
{config}.code = {auto_map}
'''


def bundled(kind: type[Any], auto_map: dict[str, str]) -> str:
    """Return one file of Python with all modules that the class ``kind`` of drafts needs; always the same text.

    ``auto_map`` is what the config says of the file.
    """
    package, _, module = kind.__module__.partition(".")
    if package != PACKAGE or not module:
        raise ValueError(
            f"with_code: {kind.__name__} is defined in {kind.__module__}, outside of hf_spec, and its code cannot be "
            "brought along; save it without code, publish the module that defines it, and load it with "
            f"{kind.__name__}.from_pretrained"
        )
    sources = {name: absolute(name) for name in sorted(needed(module, DECODING))}
    digest = hashlib.sha256(repr((module, sources)).encode()).hexdigest()[:12]
    name = f"_hf_spec_{digest}"
    return TEXT.format(
        model=kind.__name__,
        config=kind.config_class.__name__,
        package=name,
        module=module,
        decoding=DECODING,
        auto_map=auto_map,
        sources="".join(_entry(one, text.replace(PLACEHOLDER, name)) for one, text in sources.items()),
    )


def _entry(name: str, source: str) -> str:
    """Write the source of a module as a raw string, as it stands in its file."""
    quotes = next((marks for marks in ("'''", '"""') if marks not in source), None)
    if quotes is None or source.endswith((quotes[0], "\\")):
        return f"SOURCES[{name!r}] = {source!r}\n"
    return f"\n# {'-' * 20} {name or 'the package'}\nSOURCES[{name!r}] = r{quotes}{source}{quotes}\n"


def needed(*modules: str) -> set[str]:
    """Return ``modules`` of this package with all that they import, and the packages around them.

    Not this module, and nothing that only training needs.
    """
    found: set[str] = {""}
    waiting = [*modules]
    while waiting:
        name = waiting.pop()
        if name in found or f"{PACKAGE}.{name}" == __name__ or name.startswith(TRAINING):
            continue
        found.add(name)
        waiting += [*_imported(name), name.rpartition(".")[0]]
    return found


@cache
def _imported(name: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, anywhere but for type checkers."""
    found = set()
    for node in _running(ast.parse(_source(name))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = _base(name, node.level, node.module or "")
            below = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {one if _exists(one) else base for one in below}
    return frozenset(found)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        children = iter(node.orelse)
    for child in children:
        yield from _running(child)


def _base(name: str, level: int, module: str) -> str:
    """Return the module of this package that ``from {level dots}{module} import`` means in the module ``name``."""
    above = name.split(".") if name else []
    if _spec(name).submodule_search_locations is None:
        above = above[:-1]
    above = above[: len(above) - level + 1]
    return ".".join([*above, *([module] if module else [])])


@cache
def absolute(name: str) -> str:
    """Return the source of the module ``name`` with absolute imports of the package ``PLACEHOLDER``."""

    def full(found: re.Match[str]) -> str:
        base = _base(name, len(found[2]), found[3])
        return f"{found[1]}from {'.'.join([PLACEHOLDER, *([base] if base else [])])} import"

    source = IMPORT.sub(full, _source(name))
    if any(isinstance(one, ast.ImportFrom) and one.level for one in ast.walk(ast.parse(source))):
        raise ValueError(f"with_code: {name} has a relative import that is not at the beginning of a line")
    return source


def _source(name: str) -> str:
    if not name:  # what `import hf_spec` itself does is left out
        return ""
    spec = _spec(name)
    source = spec.loader.get_source(spec.name) if hasattr(spec.loader, "get_source") else None
    if source is None:
        raise ValueError(f"with_code: the source of {spec.name} is not at hand; install hf_spec with its .py files")
    return str(source)


@cache
def _spec(name: str) -> Any:
    return importlib.util.find_spec(f"{PACKAGE}.{name}" if name else PACKAGE)


@cache
def _exists(name: str) -> bool:
    try:
        return _spec(name) is not None
    except ModuleNotFoundError:  # what should hold it is a module and no package
        return False
