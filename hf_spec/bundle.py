"""The code of a draft next to its weights: which files it is, and how they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FILE = "modeling_hf_spec.py"
REQUIREMENTS = "torch\ntransformers>=5.17\n"
GENERATE = """\
# Decode with the draft of this repository: generate(..., custom_generate="ORG/DRAFT", speculator=draft).
#
# transformers executes this file in place of `generate`, if the call says `trust_remote_code=True`. It needs no
# installation of hf_spec: the draft brings the loop along, in modeling_hf_spec.py.

import sys


def generate(model, speculator=None, **kwargs):
    # Generate as `model.generate(speculator=speculator, **kwargs)` does where hf_spec is imported.
    home = sys.modules.get(type(speculator).__module__)
    if hasattr(home, "SOURCES"):
        return home.generate(model, speculator=speculator, **kwargs)
    if speculator is not None and "hf_spec" in sys.modules:
        return type(model).generate(model, speculator=speculator, **kwargs)
    raise TypeError(
        "pass speculator=draft, the draft that AutoModel.from_pretrained(..., trust_remote_code=True) loads from this "
        "repository; " + ("none was passed" if speculator is None else f"this is a {type(speculator).__name__}")
    )
"""


def auto_map(kind: type[Any]) -> dict[str, str]:
    """Return the ``auto_map`` of a config whose folder holds the code of ``kind``, a class of drafts."""
    stem = FILE.removesuffix(".py")
    return {"AutoConfig": f"{stem}.{kind.config_class.__name__}", "AutoModel": f"{stem}.{kind.__name__}"}


def remove_code(folder: str | os.PathLike[str]) -> None:
    """Remove the files of ``code_files`` from ``folder``, in which a draft was saved with its code before."""
    code, custom = Path(folder, FILE), Path(folder, "custom_generate")
    if not code.exists():
        return
    code.unlink()
    generate = custom / "generate.py"
    if generate.exists() and FILE in generate.read_text(encoding="utf-8"):
        generate.unlink()
        (custom / "requirements.txt").unlink(missing_ok=True)
        if not any(custom.iterdir()):
            custom.rmdir()


def code_files(kind: type[Any]) -> dict[str, str]:
    """Return the texts of the files, by name, with which drafts of ``kind`` load and decode without hf_spec.

    Errors: a ValueError for a class that is not of this package, or if its sources are not at hand.
    """
    loader: Any = __spec__ and __spec__.loader
    if hasattr(loader, "whole"):  # this module is itself a part of such a file
        whole = loader.whole()
    else:
        from .bundling import bundled  # which no bundle holds

        whole = bundled(kind, auto_map(kind))
    return {FILE: whole, "custom_generate/generate.py": GENERATE, "custom_generate/requirements.txt": REQUIREMENTS}
