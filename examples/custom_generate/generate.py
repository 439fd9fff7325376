"""Decode with a draft, loaded by name: ``model.generate(..., custom_generate="ORG/hf-spec", speculator=draft)``.

transformers executes this file in place of ``generate``, if the call says ``trust_remote_code=True``.
"""

from __future__ import annotations

from typing import Any

try:  # here, because transformers looks for imports that are not in a `try`, and would suggest another package
    import hf_spec
except ImportError as error:
    raise ImportError(
        "this way of decoding needs hf_spec: pip install git+https://github.com/hf-spec/hf_spec. A draft that was "
        "saved with_code=True needs no installation: pass the draft's own repository as custom_generate."
    ) from error


def generate(model: Any, speculator: Any = "auto", **kwargs: Any) -> Any:
    """Generate as ``model.generate(speculator=speculator, **kwargs)`` does once hf_spec is imported.

    ``speculator`` is a draft, a model, a path or Hub id, ``"ngram"``, ``"mtp"``, ``"early-exit"`` or ``"auto"``.
    """
    hf_spec.install()  # again, in case that it was undone
    # Not `model.generate`: where a model's repository has a folder custom_generate, that is this function.
    return type(model).generate(model, speculator=speculator, **kwargs)
