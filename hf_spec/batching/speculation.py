"""Drafting, verification and statistics for the requests of one engine, independent of how the engine works."""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decode.draft_length import Situation, draft_length_policy
from ..drafts.base import AcceptedTokens, DraftContext, Drafter, Speculator, ask, refuse_trees
from ..drafts.ngram.beginnings import without_placeholders
from ..invariance.mode import is_invariant
from ..metrics import Counts, SpeculationStats
from ..parallel import ModelParallelGroup
from ..policy.base import MAX_LENGTH, StepObservation
from ..policy.fixed import unbounded
from ..proposal import Proposal, tree_from_paths
from ..scoring.features import Features
from ..scoring.plain import position_limit
from ..settings import SpeculationConfig
from ..verify.verifier import StepResult, Verifier, WarpedScores
from .drafting import Drafters, RequestProposal, Row, join_proposals
from .scheduling import are_same

# The processed scores (rows, ..., vocabulary) of raw logits of the same shape, by the settings of each request.
Warp = Callable[[Sequence[Any], Tensor], Tensor]


@dataclass(frozen=True)
class Scored:
    """One request of a forward, and the part of its proposal that was scored: the root alone in a plain step.

    At most ``remaining`` draft tokens may be emitted. ``last_tokens`` end the request.
    """

    row: Row
    proposal: RequestProposal
    remaining: int
    last_tokens: frozenset[int] | set[int]


@dataclass(frozen=True)
class Emitted:
    """The ``tokens`` that a step emits for one request, each after a node of ``path``, and their log-probabilities.

    ``accepted`` of them are draft tokens.
    """

    tokens: list[int]
    path: list[int]
    accepted: int
    log_probs: list[float] | None


@dataclass
class PlainRun:
    """Plain steps of the same ``requests``, one after the other, which are counted together.

    ``planned`` more of them need no new plan. ``steps`` were not counted yet; ``features`` are (rows, widths) of each.
    """

    rows: Sequence[Row]
    requests: list[Any]
    planned: int = 0
    steps: int = 0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    features: list[Tensor] = field(default_factory=list)


class _DraftLogProbs:
    """A function from draft logits to log-probabilities under the settings of the rows that are being drafted for.

    Drafters keep it as long as they live. So it refers neither to the engine nor to ``Drafters``: a reference cycle
    would keep the paged cache until Python collects cycles.
    """

    def __init__(self) -> None:
        self._scores: Callable[[Tensor], Tensor] | None = None

    @contextlib.contextmanager
    def asked(self, rows: Sequence[Row], warp: Warp) -> Iterator[None]:
        """Apply the settings of ``rows`` inside the context."""
        self._scores = functools.partial(warp, [row.request for row in rows])
        try:
            yield
        finally:
            self._scores = None

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.float()
        if self._scores is not None:  # else a drafter reads its backlog before it is joined, and its draft is not used
            scores = self._scores(scores)
        return scores.log_softmax(-1)


class Speculation:
    """Drafting, verification and statistics for the requests of one engine, one step for all in its batch.

    ``counts`` sums over all requests, also finished ones. ``config`` follows from what the user ``asked`` for.
    ``positions`` is the size of the target's position table, if it has one.
    ``sample`` tells whether the engine samples its tokens, and ``is_seeded`` whether it does so from a set seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        speculator: Speculator,
        config: SpeculationConfig,
        asked: SpeculationConfig | None,
        sample: bool,
        is_seeded: bool = False,
    ) -> None:
        self.asked, self.is_seeded = asked, is_seeded
        self.model, self.speculator, self.sample = model, speculator, sample
        self.positions = position_limit(model)
        self._ranks = ModelParallelGroup(model)
        situation = Situation(model, speculator, sample, 1, prompt_length=1, way=("requests",), has_seed=is_seeded)
        self.config, self.policy = draft_length_policy(config, asked, situation, self._ranks)
        self._source = speculator.source
        self.features = Features(model, speculator.feature_layers(model))
        self.counts = Counts()
        self._verifier = Verifier(self.config, sample)
        self._rows: dict[str, Row] = {}
        self._drafters = Drafters(model.device)
        self._draft_log_probs = _DraftLogProbs()
        self._run: PlainRun | None = None
        # Of the last drafting: the number of rows, its start in seconds, and whether a drafter had a backlog.
        self._last_plan: tuple[int, float, bool] | None = None
        self._kept: list[Any] = []  # the requests that ``keep`` was last told of
        self._aside: dict[str, SpeculationStats] = {}  # of requests that wait until they restart
        self._ended: collections.deque[list[int]] = collections.deque()  # texts to learn

    @property
    def max_draft_tokens(self) -> int:
        """Return the largest number of draft tokens of a request."""
        tree, longest = self.config.tree, self.policy.longest
        if tree is None:
            return longest
        nodes = self.config.num_tree_tokens if isinstance(tree, str) else len(tree_from_paths(tree)[0])
        return nodes + self.speculator.more_nodes(longest)

    # -- requests -----------------------------------------------------------------------------------------------------

    def row(self, name: str, request: Any) -> Row:
        """Return the state of a request; a restarted one keeps only its statistics."""
        row = self._rows.get(name)
        if row is None or row.request is not request:
            known = self._aside.pop(name, None) if row is None else row.stats
            if known is None or not getattr(request, "_true_initial_tokens", 0):  # not the id of one that has ended
                known = SpeculationStats(1)
                known.start = request.created_time  # it has waited, and parts of its prompt may have been read
            row = Row(name, request, known)
            self._rows[name] = row
        return row

    def fork(self, parent: str, name: str, request: Any) -> None:
        """Copy the features of the prompt from ``parent`` to a request that begins as its copy."""
        if name not in self._rows and parent in self._rows:
            self.row(name, request).features = list(self._rows[parent].features)

    def keep(self, requests: dict[str, Any], waiting: Collection[str] = ()) -> None:
        """Drop the state of all requests but these, by name; of those that wait to restart, keep the statistics."""
        if are_same(kept := list(requests.values()), self._kept):
            return
        self._end_run()
        self._kept = kept
        stats = self._aside | {name: row.stats for name, row in self._rows.items()}
        self._rows = {name: row for name, row in self._rows.items() if requests.get(name) is row.request}
        restart = {*requests, *waiting} - self._rows.keys()
        self._aside = {name: own for name, own in stats.items() if name in restart}
        self._drafters.keep(set(self._rows.values()))

    def learn_later(self, text: list[int]) -> None:
        """Let the engine's thread learn the whole text of a request that is cancelled; from any thread."""
        self._ended.append(text)

    def learn_ended(self) -> None:
        """Learn the texts that ``learn_later`` was told of."""
        while self._ended:
            self.speculator.learn(without_placeholders([self._ended.popleft()], self.model))

    @property
    def draft_slots(self) -> int:
        """Return the number of requests that a drafter holds state for."""
        return len(self._drafters.rows)

    def stats_of(self, name: str, finished: bool) -> SpeculationStats | None:
        """Return the statistics of a request that still has state; its time stops when it is ``finished``."""
        row = self._rows.get(name)
        if row is None:
            return None
        self._count_run()
        if finished:
            row.stats.finish()
            row.stats.draft_lengths, row.stats.invariant = str(self.policy), is_invariant(self.model)
        return row.stats

    # -- verify -------------------------------------------------------------------------------------------------------

    def verify(self, scored: Sequence[Scored], logits: Tensor, warp: Warp, log_probs: bool) -> list[Emitted] | None:
        """Emit at least one token of each request, from its ``logits`` (rows, nodes, vocabulary).

        Return ``None`` if a draft token may have made the logits of others NaN. That happens if its own forward
        overflows: attention gives it the weight 0, but 0 * nan is nan.
        """
        emitted: list[Emitted | None] = [None] * len(scored)
        sampled = [one.proposal.q is not None for one in scored]
        kinds = sorted(set(sampled))
        # All requests are packed into one forward, so one kind can make the logits of the other kind NaN.
        if len(kinds) > 1 and not bool((logits.amax(-1) < torch.inf).all()):
            return None
        for kind in kinds:  # sampled draft tokens are verified by another rule than deterministic ones
            index = [i for i, is_sampled in enumerate(sampled) if is_sampled == kind]
            some = [scored[i] for i in index]
            proposal = join_proposals([one.proposal for one in some], logits.device)
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

    # -- plain steps --------------------------------------------------------------------------------------------------

    def begins_plain_step(self, requests: Sequence[Any]) -> bool:
        """Tell whether the run of plain steps goes on with a batch of ``requests``; it ends if not."""
        if self._run is not None and are_same(requests, self._run.requests):
            return True
        self._end_run()
        return False

    def verify_roots(self, roots: Tensor, logits: Tensor, warp: Warp, log_probs: bool) -> tuple[Tensor, Tensor | None]:
        """Return the token after each of ``roots`` (rows,), and its log-probability if wanted, from ``logits``.

        The rows are those of the run; ``logits`` are (rows, 1, vocabulary).
        """
        assert self._run is not None
        scores = WarpedScores(logits, functools.partial(warp, self._run.requests))
        result = self._verifier(Proposal.nothing(roots), scores, _one_each)
        assert result is not None  # there is no draft token to blame
        return result.tokens[:, 0], _log_probs(result, scores.at_all_nodes())[:, 0] if log_probs else None

    def record_plain_step(self, features: Tensor | None, target_seconds: float, verify_seconds: float) -> None:
        """Record a step of the run; ``features`` are (1, rows, widths)."""
        run = self._run
        assert run is not None
        run.steps += 1
        self.counts.add_plain_steps(len(run.rows))
        run.target_seconds += target_seconds
        run.verify_seconds += verify_seconds
        if features is not None:
            run.features.append(features[0])
        none = [0] * len(run.rows)
        self._observe(True, none, none)

    def is_planned(self) -> bool:
        """Tell whether the next step is a plain one by an earlier plan, if the same requests take it."""
        if self._run is None or not self._run.planned:
            return False
        self._run.planned -= 1
        self._last_plan = len(self._run.rows), time.perf_counter(), False
        return True

    def _begin_run(self, rows: Sequence[Row], planned: int) -> None:
        """Let the next step be the first of ``planned`` plain ones; a run of the same rows goes on."""
        requests = [row.request for row in rows]
        if self._run is None or not are_same(requests, self._run.requests):
            self._end_run()
            self._run = PlainRun(rows, requests)
        self._run.planned = planned - 1

    def _end_run(self) -> None:
        self._count_run()
        self._run = None

    def _count_run(self) -> None:
        """Count the steps of the run so far in the statistics of its requests."""
        if (run := self._run) is None or not (steps := run.steps):
            return
        features = torch.stack(run.features, dim=1) if run.features else None  # (rows, steps, widths)
        for place, row in enumerate(run.rows):
            row.steps += steps
            if features is not None:
                row.unread_features.append(features[place].clone())  # a view would keep all features alive
            row.stats.target_seconds += run.target_seconds / len(run.rows)
            row.stats.verify_seconds += run.verify_seconds / len(run.rows)
            row.stats.plain_steps([0], [row.request.generated_tokens[-steps:]])
        run.steps, run.target_seconds, run.verify_seconds, run.features = 0, 0.0, 0.0, []

    # -- observe and draft --------------------------------------------------------------------------------------------

    def record_step(
        self,
        scored: Sequence[Scored],
        emitted: Sequence[Emitted],
        features: Sequence[Tensor | None],
        no_prompts: bool,
        target_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Record what was ``emitted``; ``features`` (tokens, widths) are those of the node before each token.

        ``no_prompts``: the forward read no prompt, so its time is that of a decoding step.
        """
        proposed, accepted = [], []
        for one, new, states in zip(scored, emitted, features, strict=True):
            row, stats = one.row, one.row.stats
            stats.target_seconds += target_seconds / len(scored)
            stats.verify_seconds += verify_seconds / len(scored)
            row.steps += 1
            if states is not None:
                row.unread_features.append(states)
            if not stats.time_to_first_token:
                stats.prefilled(new.tokens)
                continue
            size, depth = one.proposal.size, one.proposal.depth
            stats.step([0], [size], [new.accepted], [len(new.tokens)], [depth], [new.tokens])
            self.counts.add_step(size, new.accepted, len(new.tokens), depth)
            proposed.append(depth)
            accepted.append(new.accepted)
        self._observe(no_prompts and len(proposed) == len(scored), proposed, accepted)

    def _observe(self, is_timed: bool, proposed: list[int], accepted: list[int]) -> None:
        """Report a step to the policy; its seconds only if ``is_timed`` and the same rows drafted, without backlog."""
        last, self._last_plan = self._last_plan, None
        if not proposed:
            return
        seconds = None
        if is_timed and last is not None:
            rows, start, had_backlog = last
            seconds = time.perf_counter() - start if rows == len(proposed) and not had_backlog else None
        self.policy.observe(StepObservation(max(proposed), seconds, proposed, accepted))

    def propose(self, rows: Sequence[Row], remaining: Sequence[int], warp: Warp) -> bool:
        """Draft for requests that continue; of each, at most ``remaining`` draft tokens may be emitted.

        Return whether there are draft tokens. ``warp`` is not stored: it belongs to the engine, which refers to this
        object.
        """
        if not rows:
            return False
        start, had_backlog, drafts = time.perf_counter(), False, False
        longest = min(self.policy.longest, MAX_LENGTH)
        plan = self.policy.plan(len(rows), [self.policy.acceptance.estimate(self._source, len(rows), longest)])
        planned = self.policy.planned
        limit = min(planned, max(remaining))
        for row in rows:
            row.proposal = None
        if limit > 0:
            self._end_run()
            ask = functools.partial(self._ask, dict(zip(rows, remaining, strict=True)), warp)
            had_backlog = self._drafters.propose(rows, limit, self._start, ask)
            for row in rows:
                row.proposal = row.proposal and row.proposal.truncate(1 + self.max_draft_tokens)
                drafts |= row.proposal is not None and len(row.proposal.tokens) > 1
        if drafts:
            self._end_run()
        else:
            self._begin_run(rows, 1 if planned else plan.plain_steps)
        seconds = time.perf_counter() - start
        for row in rows:
            row.stats.propose_seconds += seconds / len(rows)
        self._last_plan = len(rows), start, had_backlog
        return drafts

    def _ask(
        self,
        remaining: dict[Row, int],
        warp: Warp,
        drafter: Drafter,
        rows: list[Row],
        accepted: AcceptedTokens,
        limit: int,
    ) -> Proposal:
        with self._draft_log_probs.asked(rows, warp):
            proposal = self._ranks.broadcast_proposal(ask(drafter, accepted, limit))
        if proposal.max_depth and self.config.tree is None:
            refuse_trees(proposal)
        return proposal.truncate_rows([remaining.get(row, 0) for row in rows])

    def _start(self, row: Row) -> Drafter:
        """Start the drafter of one request, which begins after its prompt."""
        prompt = torch.tensor([row.request.initial_tokens], device=self.model.device)  # (1, prompt)
        features = torch.cat(row.features, dim=1) if row.features else None
        sample = self._verifier.takes_samples and self.config.sample_draft
        mask = torch.ones_like(prompt)
        asked = (self.model, prompt, mask, features, self.config, self._draft_log_probs, sample)
        request = DraftContext(*asked, policy=unbounded(self.policy.acceptance))
        return self.speculator.drafter(request)


def _one_each(emitted: Sequence[Sequence[int]]) -> list[int]:
    return [1] * len(emitted)


def _cut(scored: Sequence[Scored], emitted: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens of each request are emitted: up to the first that ends it, or to its length limit."""
    kept = []
    for one, tokens in zip(scored, emitted, strict=True):
        within = tokens[: one.remaining + 1]
        kept.append(next((i for i, token in enumerate(within, 1) if token in one.last_tokens), len(within)))
    return kept


def _log_probs(result: StepResult, scores: Tensor) -> Tensor:
    """Return the log-probability of each emitted token under the processed ``scores``: (rows, tokens)."""
    rows = torch.arange(len(scores), device=scores.device)[:, None]
    return scores.log_softmax(-1)[rows, result.path, result.tokens]
