"""What guesses for one engine, and what it knows of each request; nothing here depends on how the engine works."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decode.draft_length import Situation, draft_length_policy
from ..drafts.base import AcceptedTokens, DraftContext, Drafter, Speculator, ask, network_of
from ..metrics import Counts, Part, SpeculationStats
from ..parallel import ModelParallelGroup
from ..policy.base import MAX_LENGTH, DraftSource, StepObservation
from ..policy.fixed import unbounded
from ..proposal import Proposal, tree_from_paths
from ..scoring.features import Features
from ..settings import SpeculationConfig
from ..verify.verifier import StepResult, Verifier, WarpedScores
from .drafting import Drafters, Guess, Row, proposal_of

# The processed scores (rows, ..., vocabulary) of raw logits of the same shape, by the settings of each request.
Warp = Callable[[Sequence[Any], Tensor], Tensor]


@dataclass(frozen=True)
class Scored:
    """One request of a forward: ``room`` more guesses can become text, and ``last_tokens`` end it.

    ``guess`` is what of its guess was scored, the root alone where there was none.
    """

    row: Row
    guess: Guess
    room: int
    last_tokens: frozenset[int] | set[int]


@dataclass(frozen=True)
class Emitted:
    """What became text of one request: ``tokens``, which follow the nodes of ``path``, and how probable each was.

    ``accepted`` of them were guesses.
    """

    tokens: list[int]
    path: list[int]
    accepted: int
    log_probs: list[float] | None


class _DraftLogProbs:
    """Log-probabilities of draft logits under the settings of the rows whose drafter is asked just now.

    Drafters keep it for as long as they live. So it knows neither the engine nor what holds the drafters: a cycle
    would keep the paged cache until Python looks for cycles.
    """

    def __init__(self) -> None:
        self._scores: Callable[[Tensor], Tensor] | None = None

    @contextlib.contextmanager
    def asked(self, rows: Sequence[Row], warp: Warp) -> Iterator[None]:
        """Apply the settings of ``rows`` inside."""
        self._scores = functools.partial(warp, [row.request for row in rows])
        try:
            yield
        finally:
            self._scores = None

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.float()
        if self._scores is not None:  # else a drafter reads what it has put off, to be joined, and drafts in vain
            scores = self._scores(scores)
        return scores.log_softmax(-1)


class Speculation:
    """Guess, verify and count for the requests of one engine, one step for all that are in its batch.

    ``counts`` sums up over all requests, also those that are gone; ``draft_slots`` counts the requests that a drafter
    keeps something of. ``config`` follows from what the user ``asked`` for; ``sample``: the engine draws its tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        speculator: Speculator,
        config: SpeculationConfig,
        asked: SpeculationConfig | None,
        sample: bool,
    ) -> None:
        self.asked = asked
        self.model, self.speculator, self.sample = model, speculator, sample
        self._ranks = ModelParallelGroup(model)
        situation = Situation(model, speculator, sample, batch_size=1, prompt_length=1, way=("requests",))
        self.config, self.policy = draft_length_policy(config, asked, situation, self._ranks)
        self._source = DraftSource.NGRAM if network_of(speculator) is None else DraftSource.MODEL
        self.features = Features(model, speculator.feature_layers(model))
        self.counts = Counts()
        self._verifier = Verifier(self.config, sample)
        self._rows: dict[str, Row] = {}
        self._drafters = Drafters(model.device)
        self._draft_log_probs = _DraftLogProbs()
        # How many rows were last asked to guess, when, and whether drafts had to catch up.
        self._asked_for: tuple[int, float, bool] | None = None

    @property
    def most_guesses(self) -> int:
        """Return how many guesses a request has at most."""
        tree = self.config.tree
        if tree is None:
            return self.policy.longest
        return self.config.num_tree_tokens if isinstance(tree, str) else len(tree_from_paths(tree)[0])

    # -- requests -----------------------------------------------------------------------------------------------------

    def row(self, name: str, request: Any) -> Row:
        """Return what is known of a request; one that starts anew keeps nothing but its statistics."""
        row = self._rows.get(name)
        if row is None or row.request is not request:
            row = Row(name, request, SpeculationStats(1) if row is None else row.stats)
            self._rows[name] = row
        return row

    def fork(self, parent: str, name: str, request: Any) -> None:
        """Let a request that begins as a copy of another know what was read of their prompt."""
        if name not in self._rows and parent in self._rows:
            self.row(name, request).features = list(self._rows[parent].features)

    def keep(self, requests: dict[str, Any]) -> None:
        """Forget all but these ``requests``, by name."""
        self._rows = {name: row for name, row in self._rows.items() if requests.get(name) is row.request}
        self._drafters.keep(set(self._rows.values()))

    @property
    def draft_slots(self) -> int:
        """Count the requests that a drafter keeps something of."""
        return len(self._drafters.rows)

    def stats_of(self, name: str, finished: bool) -> SpeculationStats | None:
        """Return the statistics of a request that is not forgotten yet; its clock stops where it is ``finished``."""
        row = self._rows.get(name)
        if row is None:
            return None
        if finished:
            row.stats.finish()
            row.stats.draft_lengths = str(self.policy)
        return row.stats

    @contextlib.contextmanager
    def timed(self, part: Part, rows: Sequence[Row]) -> Iterator[None]:
        """Book the time spent inside on a ``part`` of the step that ``rows`` take together."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        for row in rows:
            row.stats.book(part, seconds)

    # -- verify -------------------------------------------------------------------------------------------------------

    def verify(self, scored: Sequence[Scored], logits: Tensor, warp: Warp, log_probs: bool) -> list[Emitted] | None:
        """Emit at least one token of each request, from its ``logits`` (rows, nodes, vocabulary).

        ``None``: a draft token may have spoilt them. One whose forward overflows does, for attention gives it no
        weight, but 0 * nan is nan.
        """
        emitted: list[Emitted | None] = [None] * len(scored)
        sampled = [one.guess.q is not None for one in scored]
        kinds = sorted(set(sampled))
        if len(kinds) > 1 and not bool((logits.amax(-1) < torch.inf).all()):  # those of one kind spoil the others, too
            return None
        for kind in kinds:  # sampled draft tokens are verified by another rule than deterministic ones
            index = [i for i, is_sampled in enumerate(sampled) if is_sampled == kind]
            some = [scored[i] for i in index]
            proposal = proposal_of([one.guess for one in some], logits.device)
            nodes = proposal.tokens.shape[1]
            own = logits[:, :nodes] if len(index) == len(scored) else logits[index, :nodes]
            scores = WarpedScores(own, functools.partial(warp, [one.row.request for one in some]))
            result = self._verifier(proposal, scores, functools.partial(_cut, some))
            if result is None:
                return None
            likelihoods = _log_probs(result, scores.at_all_nodes()).tolist() if log_probs else [None] * len(some)
            for number, (i, likelihood) in enumerate(zip(index, likelihoods, strict=True)):
                count = result.kept[number]
                path, accepted = list(result.nodes[number][:count]), result.accepted[number]
                emitted[i] = Emitted(result.emitted[number], path, accepted, likelihood and likelihood[:count])
        return [new for new in emitted if new is not None]

    # -- tell and ask -------------------------------------------------------------------------------------------------

    def became_text(
        self, scored: Sequence[Scored], emitted: Sequence[Emitted], features: Sequence[Tensor | None], alone: bool
    ) -> None:
        """Note what was ``emitted``; ``features`` (tokens, widths) stand at the nodes before each token.

        ``alone``: no prompt was read beside these requests, so that the clock says what the step takes.
        """
        counted = []
        for one, new, states in zip(scored, emitted, features, strict=True):
            row = one.row
            row.tell(new.tokens, states)
            if not row.stats.time_to_first_token:
                row.stats.prefilled(new.tokens)
                continue
            guesses, depth = one.guess.size, one.guess.depth
            row.stats.step([0], [guesses], [new.accepted], [len(new.tokens)], [depth], [new.tokens])
            reached = [1] * new.accepted + [0] * (depth - new.accepted)
            self.counts.add(Counts(1, guesses, new.accepted, len(new.tokens), [1] * depth, reached))
            counted.append((one.guess.depth, new.accepted))
        usual = alone and len(counted) == len(scored)
        self._timed(usual, [depth for depth, _ in counted], [accepted for _, accepted in counted])

    def _timed(self, usual: bool, offered: list[int], reached: list[int]) -> None:
        """Tell the policy what was accepted and, if it was a ``usual`` step of the rows that drafted, its seconds."""
        asked, self._asked_for = self._asked_for, None
        if not offered:
            return
        seconds = late = None
        if usual and asked is not None and asked[0] == len(offered):
            seconds, late = time.perf_counter() - asked[1], asked[2]
        self.policy.observe(StepObservation(max(offered), None if late else seconds, offered, reached))

    def propose(self, rows: Sequence[Row], rooms: Sequence[int], warp: Warp) -> None:
        """Let requests guess that go on; in each, ``rooms`` more guesses can become text.

        ``warp`` is not kept: it belongs to the engine, which keeps this object.
        """
        if not rows:
            return
        start, late = time.perf_counter(), False
        with self.timed("propose", rows):
            longest = min(self.policy.longest, MAX_LENGTH)
            estimate = self.policy.acceptance.estimate(self._source, len(rows), longest)
            self.policy.plan(len(rows), [estimate])
            limit = min(self.policy.planned, max(rooms))
            for row in rows:
                row.guess = None
            if limit > 0:
                ask = functools.partial(self._ask, dict(zip(rows, rooms, strict=True)), warp)
                late = self._drafters.propose(rows, limit, self._start, ask)
                for row in rows:
                    row.guess = row.guess and row.guess.first(1 + self.most_guesses)
        self._asked_for = len(rows), start, late

    def _ask(
        self,
        rooms: dict[Row, int],
        warp: Warp,
        drafter: Drafter,
        rows: list[Row],
        accepted: AcceptedTokens,
        limit: int,
    ) -> Proposal:
        with self._draft_log_probs.asked(rows, warp):
            proposal = self._ranks.broadcast_proposal(ask(drafter, accepted, limit))
        return proposal.truncate_rows([rooms.get(row, 0) for row in rows])

    def _start(self, row: Row) -> Drafter:
        """Start the drafter of one request behind the tokens of its prompt."""
        prompt = torch.tensor([row.request.initial_tokens], device=self.model.device)  # (1, prompt)
        features = torch.cat(row.features, dim=1) if row.features else None
        sample = self._verifier.takes_samples and self.config.sample_draft
        mask = torch.ones_like(prompt)
        asked = (self.model, prompt, mask, features, self.config, self._draft_log_probs, sample)
        request = DraftContext(*asked, policy=unbounded(self.policy.acceptance))
        return self.speculator.drafter(request)


def _cut(scored: Sequence[Scored], emitted: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens of each request up to the first that ends it, or that there is no room for."""
    kept = []
    for one, tokens in zip(scored, emitted, strict=True):
        within = tokens[: one.room + 1]
        kept.append(next((i for i, token in enumerate(within, 1) if token in one.last_tokens), len(within)))
    return kept


def _log_probs(result: StepResult, scores: Tensor) -> Tensor:
    """Return the log-probability of each emitted token under the processed ``scores``: (rows, tokens)."""
    rows = torch.arange(len(scores), device=scores.device)[:, None]
    return scores.log_softmax(-1)[rows, result.path, result.tokens]
