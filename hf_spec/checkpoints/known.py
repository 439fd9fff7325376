"""A table of public drafts by target: ids and what their publishers say; nothing of it was tested here."""

from __future__ import annotations

import csv
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from ..configuration import hub_name

LOOKED_AT = "2026-11-26"  # when the table was last compared with what its sources say
TABLE = Path(__file__).with_name("known_drafts.csv")
# In a cache of the Hub a model is in models--ORG--NAME/snapshots/COMMIT.
CACHED = "models--"


@dataclass(frozen=True)
class KnownDraft:
    """A public draft: ``speculator=known.draft`` for the model ``target``.

    ``kind`` is the kind of draft, ``layout`` the format of its files. ``licence`` is None if its page names none; the
    target's licence may apply too. ``is_read`` tells whether hf_spec reads such files. Nobody of this project has run
    it. The output is the target's in any case, but its acceptance has yet to be measured.
    """

    target: str
    draft: str
    kind: str
    layout: str
    licence: str | None
    is_read: bool = True


def known_drafts(target: PreTrainedModel | str | os.PathLike[str] | None = None) -> list[KnownDraft]:
    """List public drafts for ``target``, a model, its Hub id or directory; all of them for ``None``.

    The best by published acceptance come first. The table is part of the package; the network is not used. A
    directory is compared by its name. Source: pages of the Hub and the projects' own lists, November 2026.
    """
    if target is None:
        return list(_table())
    if not (isinstance(target, str | os.PathLike) or hasattr(target, "config")):
        raise TypeError(f"target is {target!r:.80}: pass a model, its Hub id or directory, or None for all drafts")
    path = os.fspath(target) if isinstance(target, str | os.PathLike) else target.config.name_or_path or ""
    wanted = _name(path)
    return [known for known in _table() if _same(wanted, known.target)]


def cached(draft: str) -> Path | None:
    """Return the directory of ``draft``, or at least of its config, in the Hub's local cache; None if it is absent."""
    config = try_to_load_from_cache(draft, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@functools.cache
def _table() -> tuple[KnownDraft, ...]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_entry(row) for row in csv.DictReader(file))


def _entry(row: dict[str, str]) -> KnownDraft:
    licence, is_read = row.pop("licence") or None, row.pop("read") == "yes"
    return KnownDraft(**row, licence=licence, is_read=is_read)


def _name(path: str) -> str:
    """Return the Hub id, or the name of a directory."""
    places = Path(path).parts
    for place in places:
        if place.startswith(CACHED):
            return place.removeprefix(CACHED).replace("--", "/", 1)
    is_id = len(places) == 2 and not Path(path).exists()
    return "/".join(places) if is_id else places[-1] if places else ""


def hub_id(path: str) -> str:
    """Return the Hub id of a model that was loaded from ``path``, perhaps in the Hub's cache; "" for a directory."""
    return _name(path) if CACHED in path else hub_name(path) or ""


def share_a_name(path: str, target: str) -> bool:
    """Tell whether the model at ``path``, perhaps in the Hub's cache, has the name of ``target``, of any owner."""
    one, other = (_name(name).rpartition("/")[2].lower() for name in (path, target))
    return one == other


def _same(name: str, target: str) -> bool:
    full, wanted = target.lower(), name.lower()
    return wanted == full or ("/" not in wanted and wanted == full.split("/")[1])
