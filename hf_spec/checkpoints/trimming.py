"""Trim a draft to frequent tokens (FR-Spec, arXiv 2502.14856): fewer rows of its output layers, and d2t with t2d."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drafts.files import check_held, check_pickled
from ..drafts.modeling import DraftModel
from ..settings import is_int
from ..untrusted import check_ends


def trimmed(draft: DraftModel, ids: Sequence[int] | Tensor) -> Any:
    """Return a copy of ``draft`` that proposes the target's tokens ``ids`` only, in any order; q is 0 elsewhere.

    A draft that shares the target's output layer goes on sharing it, and uses these rows of it.

    Errors: a ValueError if the draft cannot have a vocabulary of its own or has one already, or for ids that repeat or
    are not in the target's vocabulary.
    """
    check_whole(draft)
    config = draft.config
    whole = config.layers.vocab_size
    if getattr(config, "scored_as_target", False) and config.shared_with_target and not draft._lent:
        raise ValueError(
            "the draft takes its vocabulary from its target: call draft.bind(target) first, or give convert the "
            "target (on the command line --target)"
        )
    kept = torch.as_tensor(ids, dtype=torch.long).sort().values
    if not len(kept) or int(kept[0]) < 0 or int(kept[-1]) >= whole or len(kept.unique()) < len(kept):
        raise ValueError(f"the vocabulary must list tokens of 0 to {whole - 1}, each of them once")
    if len(kept) == whole:
        raise ValueError(f"the vocabulary lists all {whole} tokens, so that nothing is trimmed; list fewer")
    smaller = copy.deepcopy(config)
    smaller.draft_vocab_size = len(kept)
    smaller.validate()
    model: Any = type(draft)
    made = model(smaller).to(draft.device, draft.dtype).eval()
    ends = {f"{name}.weight" for name, module in draft.named_modules() if _ends_in_vocabulary(draft, module)}
    own = draft.state_dict()
    weights = {name: one[kept.to(one.device)] if name in ends else one for name, one in own.items()}
    made.load_state_dict(weights | {name: one for name, one in made.state_dict().items() if name in ("d2t", "t2d")})
    made.set_vocabulary(kept)
    return made


def check_whole(draft: DraftModel) -> None:
    """Raise a ValueError if a draft cannot have a vocabulary of its own, or has one already."""
    config = draft.config
    whole = config.layers.vocab_size
    if not hasattr(config, "draft_vocab_size") or whole is None:
        raise ValueError(
            f"a draft of kind {config.speculators_model_type!r} proposes all tokens of its target: only EAGLE-3, "
            "P-EAGLE, DFlash, DSpark and Medusa drafts can be trimmed"
        )
    if draft.d2t is not None:
        raise ValueError(f"the draft proposes {len(draft.d2t)} of {whole} tokens already: trim the one it was made of")


def _ends_in_vocabulary(draft: DraftModel, module: nn.Module) -> bool:
    return any(module is layer for layer in draft.trained_heads)


def read_vocabulary(file: str | os.PathLike[str]) -> list[int]:
    """Read a list of token ids: JSON, or what ``torch.save`` wrote of a list or tensor, as FR-Spec's files.

    Errors: an OSError if the file cannot be read; a ValueError if it holds something else.
    """
    path = Path(file)
    check_ends(path)
    try:
        if path.suffix in (".pt", ".pth", ".bin"):
            check_pickled(path)
            found: Any = torch.load(path, weights_only=True)
            if isinstance(found, Tensor):
                check_held(path, {"ids": found})
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no file {path} with the tokens to keep; write a JSON list of token ids, or name how many"
        ) from error
    except OSError:
        raise
    except Exception as error:  # of JSON, UTF-8 or pickle
        raise ValueError(f"{path} holds no list of token ids: {error}") from error
    ids = found.flatten().tolist() if isinstance(found, Tensor) else found
    if not isinstance(ids, list) or not ids or not all(map(is_int, ids)):
        raise ValueError(f"{path} holds no list of token ids; write a JSON list of whole numbers")
    return ids


def frequent(texts: Sequence[Sequence[int]], size: int, vocabulary: int, always: Sequence[int] = ()) -> list[int]:
    """List the ``size`` most frequent tokens of ``texts``, in ascending order, ``always`` among them.

    Tokens that are equally frequent are taken by their ids: tokenizers give the lower ones to more frequent words.
    Errors: a ValueError for a ``size`` that is not between the number of ``always`` and the ``vocabulary``.
    """
    kept = dict.fromkeys(one for one in always if 0 <= one < vocabulary)
    check_size(size, vocabulary, len(kept))
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(torch.tensor(list(text), dtype=torch.long), minlength=vocabulary)[:vocabulary]
    counts[list(kept)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values.tolist()


def check_size(size: int, vocabulary: int, least: int = 1) -> None:
    """Raise a ValueError unless a draft can keep ``size`` of a ``vocabulary``, of which ``least`` must stay."""
    if not max(1, least) <= size < vocabulary:
        raise ValueError(
            f"a draft vocabulary of {size} tokens cannot be chosen from {vocabulary}; take {max(1, least)} to "
            f"{vocabulary - 1}"
        )
