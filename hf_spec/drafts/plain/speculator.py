"""Nothing is proposed: plain steps, by the loop and the cache of this package."""

from __future__ import annotations

from ...proposal import Proposal
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator


class PlainSpeculator(Speculator):
    """Propose nothing, so that every step is a plain step.

    The text is that of plain ``generate``. A batch of unequal prompts on a CPU gains: prompts are read in groups, and
    sequences attend to their own columns (docs/batches.md). A comparison with it shows what the draft alone gains.
    """

    def drafter(self, request: DraftContext) -> Drafter:
        """Start a drafter that proposes nothing."""
        return _PlainDrafter()


class _PlainDrafter(Drafter):
    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Propose nothing."""
        return Proposal.nothing(accepted.root)

    def keep_rows(self, rows: object) -> None:
        """Do nothing: nothing is kept of any row."""

    def join(self, other: Drafter) -> bool:
        """Take over the rows of ``other``, of which nothing is kept either."""
        return True
