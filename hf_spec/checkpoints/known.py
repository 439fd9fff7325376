"""Public drafts that are known of, by target: ids and what their publishers say, not what was tried here."""

from __future__ import annotations

import csv
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from ..configuration import hub_name

TABLE = Path(__file__).with_name("known_drafts.csv")
# Below a cache of the Hub a model lies in models--ORG--NAME/snapshots/COMMIT.
CACHED = "models--"


@dataclass(frozen=True)
class KnownDraft:
    """Name a public draft: ``speculator=known.draft`` for the model ``target``.

    ``kind`` is how it guesses, ``layout`` whose files it has. ``licence`` is None where its page names none; that of
    the target may bind beside it. Nobody of this project has run it: the text would be right all the same, but how
    many of its guesses are is to be measured.
    """

    target: str
    draft: str
    kind: str
    layout: str
    licence: str | None


def known_drafts(target: PreTrainedModel | str | os.PathLike[str] | None = None) -> list[KnownDraft]:
    """List public drafts for ``target``, a model, its Hub id or where it lies; all of them for ``None``.

    The best by published acceptance come first. Looks at a table in the package, not at the network. A directory is
    known by its name. Source: pages of the Hub and the projects' own lists, November 2026.
    """
    if target is None:
        return list(_table())
    path = os.fspath(target) if isinstance(target, str | os.PathLike) else target.config.name_or_path or ""
    wanted = _name(path)
    return [known for known in _table() if _same(wanted, known.target)]


def cached(draft: str) -> Path | None:
    """Return where the Hub's local cache has ``draft``, or at least its config; None if it has not."""
    config = try_to_load_from_cache(draft, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@functools.cache
def _table() -> tuple[KnownDraft, ...]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(KnownDraft(**row | {"licence": row["licence"] or None}) for row in csv.DictReader(file))


def _name(path: str) -> str:
    """Return the Hub id, or for a directory its name."""
    places = Path(path).parts
    for place in places:
        if place.startswith(CACHED):
            return place.removeprefix(CACHED).replace("--", "/", 1)
    is_id = len(places) == 2 and not Path(path).exists()
    return "/".join(places) if is_id else places[-1] if places else ""


def hub_id(path: str) -> str:
    """Return the Hub id of what was loaded from ``path``, perhaps the Hub's cache; "" for a directory."""
    return _name(path) if CACHED in path else hub_name(path) or ""


def share_a_name(path: str, target: str) -> bool:
    """Tell whether the model at ``path``, perhaps in the Hub's cache, is called as ``target`` is, whoever's it is."""
    one, other = (_name(name).rpartition("/")[2].lower() for name in (path, target))
    return one == other


def _same(name: str, target: str) -> bool:
    whole, wanted = target.lower(), name.lower()
    return wanted == whole or ("/" not in wanted and wanted == whole.split("/")[1])
