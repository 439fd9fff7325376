"""Drafts that hf_spec does not read and that look like some that it reads: recognised, and refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..drafts.files import Checkpoint, is_speculators


class ForeignDraftError(ValueError):
    """An error for a draft of a kind that is known by name and that hf_spec does not read."""


@dataclass(frozen=True)
class Neighbour:
    """A kind of draft that is refused.

    ``said`` (a pattern, any case) is looked for in keys of a config and in values that name a class or a kind.
    ``tensors`` (another one) is looked for in names of tensors. Either is enough.
    """

    name: str
    said: str
    tensors: str
    why: str


# Their layers are DFlash's: without their own parts they would be read as another draft.
HEAD = "its head over the slots of a block is not implemented here"
NEIGHBOURS = (
    Neighbour(
        "EAGLE-4",
        "eagle-?4|efficient_lm_head",
        "efficient_lm_head",
        "its licence makes the source available and forbids competing offerings by rewriting or porting it",
    ),
    Neighbour("Domino", "domino|pure_draft_prefix_len", r"prefix_gru\.", HEAD),
    Neighbour("XPress", "xpress", r"refiner_head\.", HEAD),
    Neighbour("LiLiCorr", "lilicorr", "lilicorr", HEAD),
    Neighbour("FlashMap", "flashmap", "flashmap", HEAD),
    Neighbour(
        "Orthrus",
        "orthrus",
        r"[qkvo]_proj_diff\.",
        "it is a whole model that drafts by second projections in its own layers",
    ),
)
# An adapter: SGLang names it by --uno-lora-path.
UNO = Neighbour("Uno", r"(?<![a-z])uno(?![a-z])", "", "it is an adapter with which the target drafts for itself")
NAMING = ("architectures", "model_type", "projector_type", "speculators_model_type", "algorithm", "method")
CURE = "Serve it with the project that made it, or use another draft: hf_spec.known_drafts(target) lists some"


def refuse_neighbours(checkpoint: Checkpoint) -> None:
    """Raise a ForeignDraftError that names kind and reason if ``checkpoint`` is one that hf_spec does not read."""
    said, names = list(_sayings(checkpoint.config)), list(checkpoint.tensors)
    for one in NEIGHBOURS:
        if _found(one.said, said) or _found(one.tensors, names):
            raise _refusal(one, checkpoint.path)
    if "mask_hidden" in names and not is_speculators(checkpoint.config):  # otherwise taken for EAGLE-3 or EAGLE-1
        raise ForeignDraftError(
            f"{checkpoint.path} is a P-EAGLE draft in a flat layout, as SpecForge writes, and hf_spec reads P-EAGLE "
            f"in the layout of the speculators library only. {CURE}"
        )


def refuse_uno(path: str, adapter: Mapping[str, Any]) -> None:
    """Raise a ForeignDraftError if the adapter at ``path`` with its config is Uno's."""
    if _found(UNO.said, [path.replace("\\", "/").rpartition("/")[2], *adapter, str(adapter.get("task_type"))]):
        raise _refusal(UNO, path)


def _refusal(one: Neighbour, path: str) -> ForeignDraftError:
    found = f"{path} is a draft of the kind {one.name}, which hf_spec does not read: {one.why}"
    return ForeignDraftError(f"{found}. {CURE}")


def _found(pattern: str, words: list[str]) -> bool:
    return any(re.search(pattern, word, re.IGNORECASE) for word in words)


def _sayings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a config that have a value, inside others too, and the values that name a class or a kind."""
    for name, value in config.items():
        if value is None:
            continue
        yield name
        if name in NAMING:
            yield from map(str, value if isinstance(value, list) else [value])
        if isinstance(value, Mapping):
            yield from _sayings(value)
