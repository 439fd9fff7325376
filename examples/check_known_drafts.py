"""Compare the table of public drafts with the Hub: python examples/check_known_drafts.py

For every id of a target or draft: whether the Hub has it, and whether its licence is the one in the table. Ends with
1 if something differs. Needs the network; nothing is downloaded but the models' cards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError  # HTTPError: of its client, httpx or httpx2

from hf_spec import KnownDraft, known_drafts
from hf_spec.checkpoints.known import LOOKED_AT

Licence = Callable[[str], str | None]


def licence_on_the_hub(name: str) -> str | None:
    """Return the licence that the card of ``name`` gives. Errors: a LookupError if the Hub has no such model."""
    try:
        card = HfApi().model_info(name).card_data
    except RepositoryNotFoundError as error:
        raise LookupError(f"{name}: the Hub has no such model, or you may not read it") from error
    return getattr(card, "license_name", None) or getattr(card, "license", None)


def differences(entries: Iterable[KnownDraft], licence: Licence) -> list[str]:
    """List what differs between ``entries`` and the Hub, which ``licence`` asks."""
    found, targets = [], set()
    for one in entries:
        try:
            there = licence(one.draft)
        except LookupError as error:
            found.append(str(error))
        else:
            if there != one.licence:
                found.append(f"{one.draft}: its licence is {there}, the table says {one.licence}")
        targets.add(one.target)
    for name in sorted(targets):
        try:
            licence(name)
        except LookupError as error:
            found.append(str(error))
    return found


def main() -> int:
    entries = known_drafts()
    try:
        found = differences(entries, licence_on_the_hub)
    except (OSError, HTTPError) as error:
        print(f"the Hub cannot be reached: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"all {len(entries)} entries are as of {LOOKED_AT}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
