"""Write drafts in the layouts of other projects."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # which its list of names lacks
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.utils import logging

from ..drafts.files import SPECULATORS, Checkpoint, Files
from ..drafts.modeling import DraftModel
from .auto import AutoDraftModel
from .kinds import layouts
from .trimming import trimmed

logger = logging.get_logger(__name__)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str = "speculators",
    verifier: str | None = None,
    self_contained: bool = False,
    vocabulary: Sequence[int] | None = None,
    with_code: bool = False,
    **kwargs: Any,
) -> None:
    """Write the draft at ``src``, of any known format, to the directory ``dst`` in another layout.

    ``"speculators"``: what ``save_pretrained`` writes. ``"eagle3"``: the layout of SafeAILab, for llama.cpp and
    TensorRT-LLM. ``"sglang"``: the same with ``eagle_config``, for SGLang and vLLM. ``"native"``: an MTP layer under
    the names of its target, as ``mtp.safetensors``. Put it next to the target's own files, and name it in their index.
    ``"dflash"``: z-lab's, for block drafts. ``"deepspec"``: DeepSpec's, for DSpark drafts.

    ``verifier`` names the target in speculators files, where vLLM wants a Hub id. ``self_contained`` writes the
    embeddings and the output layer of ``target`` into a draft that shares them, for engines that cannot share them.
    ``vocabulary`` lists the tokens of the target that the draft may propose from now on (FR-Spec, arXiv 2502.14856).
    ``with_code`` writes the code, too, as ``save_pretrained(with_code=True)`` does, in the speculators layout alone.
    ``kwargs`` are those of ``AutoDraftModel.from_pretrained``, including ``target``.

    Errors: those of loading. A ValueError if the layout cannot express the draft, it cannot be trimmed, or
    ``verifier`` is neither a Hub id nor a directory. A FileExistsError if ``dst`` holds files. ``dst`` is written
    completely or not at all.
    """
    check_output(dst, to, verifier, with_code)
    draft = AutoDraftModel.from_pretrained(src, **kwargs)
    check_layout(draft, to)
    if verifier is not None:
        draft.config.speculators_config["verifier"]["name_or_path"] = verifier
    if self_contained:
        if kwargs.get("target") is None:
            raise ValueError(
                "self_contained=True needs target=, the model whose embeddings and output layer are copied"
            )
        draft.keep_borrowed()
    if vocabulary is not None:
        draft.sort_features()
        draft = trimmed(draft, vocabulary)
    export(draft, dst, to, with_code)


def check_output(dst: str | os.PathLike[str], to: str, verifier: str | None = None, with_code: bool = False) -> None:
    """Raise what ``convert`` raises for its options, before anything is read."""
    try:
        if verifier is not None and not os.path.isdir(verifier):
            validate_repo_id(verifier)
    except HFValidationError as error:
        raise ValueError(
            f"verifier is {verifier!r}, which is neither a name on the Hub, such as ORG/MODEL, nor a directory"
        ) from error
    if with_code and to != SPECULATORS.name:
        raise ValueError(
            f"with_code goes with to={SPECULATORS.name!r}, the layout that the code reads; {to!r} is for other "
            "programs, which read no code"
        )
    if to not in layouts():
        raise ValueError(f"to is {to!r}; it must be one of {layouts()}")
    path = Path(dst)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists; choose another directory or remove it")


def check_layout(draft: DraftModel, to: str) -> None:
    """Raise a ValueError if no layout, or not the layout ``to``, can express such a draft."""
    if getattr(draft.config, "quantization_config", None) is not None:
        raise ValueError(
            "the draft's weights are quantised, which no layout can express; convert the unquantised draft"
        )
    if to != SPECULATORS.name and to not in draft.layouts:
        kind = draft.config.speculators_model_type
        raise ValueError(f"a draft of kind {kind!r} has no {to} layout; use to='speculators'")


def export(draft: DraftModel, dst: str | os.PathLike[str], to: str = "speculators", with_code: bool = False) -> None:
    """Write a loaded draft in another layout, as ``convert`` does."""
    check_output(dst, to, with_code=with_code)
    check_layout(draft, to)
    path = Path(dst)
    draft.sort_features()
    files = None if to == SPECULATORS.name else draft.layouts[to](draft)
    if files is None and (found := draft.engines(draft.config, *_as_saved(draft)).get("speculators")):
        logger.warning_once(f"the speculators library {'; '.join(found)}")
    with written_at_once(path) as partial:
        if files is None:
            draft.save_pretrained(partial, with_code=with_code)
        else:
            _write(files, partial)


@contextlib.contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, renamed to ``path`` when all is written. Errors: an OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written, and nothing of it is kept ({error}); repeat the call") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _as_saved(draft: DraftModel) -> tuple[Checkpoint, str]:
    return Checkpoint("", draft.config.to_dict(), {}), SPECULATORS.name


def _write(files: Files, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in files.tensors.items()}
    save_file(tensors, path / files.weights, metadata={"format": "pt"})
    if files.config is not None:
        (path / "config.json").write_text(json.dumps(files.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
