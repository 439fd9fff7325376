"""A draft model and a history together: each sequence drafts from the better source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ...device_tensors import to_device, to_list
from ...policy.base import DraftSource, Estimate
from ...policy.cost import ModelShape
from ...policy.fixed import unbounded
from ...proposal import PAD_NODE, Proposal
from ...settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig, is_int
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator, network_of
from ..lazy import LazyDrafter
from .speculator import DEFAULT_HISTORY_SIZE, DEPTH, NgramSpeculator
from .suffix_decoding import Continuations, Path, calibrated, record_outcome, truncated


class HybridSpeculator(Speculator):
    """Propose with a ``draft``, and with a ``history`` wherever that promises more.

    In chains each sequence takes the draft tokens of which more are expected to be accepted. For the history that
    follows from their probabilities, for the draft from its latest acceptance. A draft that no sequence wants is not
    asked. In continuous batching it reads what it missed when another request joins. In trees the most probable draft
    tokens of the history join the draft's as branches, in addition to ``num_tree_tokens``. Every draft token is
    verified as what it is, sampled or copied. So the text has the target's distribution.

    Args:
        draft: whatever ``generate`` takes as ``speculator``, but for ``"ngram"``.
        history: a ``NgramSpeculator(history_size=...)``; by default one of 100,000 tokens.
        draft_tokens: the longest draft of ``draft``, by default the number it has alone, and all of a static tree.
            Only ``num_speculative_tokens`` bounds the history.

    Raises:
        ValueError, TypeError: for values outside these.
    """

    def __init__(self, draft: Any, history: NgramSpeculator | None = None, draft_tokens: int | None = None) -> None:
        history = NgramSpeculator(history_size=DEFAULT_HISTORY_SIZE) if history is None else history
        if not isinstance(history, NgramSpeculator) or history.history is None:
            raise TypeError(f"history must be a NgramSpeculator(history_size=...), got {history!r:.80}")
        if isinstance(draft, NgramSpeculator | HybridSpeculator) or draft == "ngram":
            raise ValueError("a HybridSpeculator needs a draft with weights; n-grams work alone")
        if draft is None or draft is False:
            raise TypeError(
                f"draft is {draft}: pass a draft model, a language model, 'mtp', or a path or Hub id of one"
            )
        if draft_tokens is not None and not (is_int(draft_tokens) and draft_tokens >= 1):
            raise ValueError(f"draft_tokens must be a whole number of at least 1, or None, got {draft_tokens!r}")
        self.draft, self.history, self.draft_tokens = draft, history, draft_tokens

    def with_draft(self, draft: Speculator) -> HybridSpeculator:
        """Return one with another object for the same draft, that shares the history."""
        if draft is self.draft:
            return self
        return HybridSpeculator(draft, self.history, self.draft_tokens)

    def estimates_acceptance(self, batch_size: int) -> bool:
        """Return True: the history knows the acceptance probability of its tokens."""
        return True

    def encodes(self, target: PreTrainedModel) -> bool:
        """Tell whether the draft model does."""
        return self._draft.encodes(target)

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether the draft's chains end where ``DraftContext.keep_drafting`` says so."""
        return self._draft.supports_early_stop

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        """Name the draft and the kind of history."""
        own = (*super().profile_key, self.draft_depth)
        return (*own, *self._draft.profile_key, *self.history.profile_key)

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List the forwards of the draft."""
        work, deepest = self._draft.draft_work(target), self.draft_depth
        return lambda length: work(min(length, deepest))

    @property
    def source(self) -> DraftSource:
        """Say what the draft is."""
        return self._draft.source

    @property
    def shares_target_cache(self) -> bool:
        """Tell whether the draft runs layers of the target."""
        return self._draft.shares_target_cache

    @property
    def model(self) -> Any:
        """Return the weights of the draft."""
        return network_of(self.draft)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Say what the draft reads."""
        return self._draft.feature_layers(target)

    @property
    def reads_target_keys(self) -> bool:
        """Tell whether the draft does."""
        return self._draft.reads_target_keys

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError with cause and cure if draft or history cannot serve ``target``."""
        self._draft.check(target, None if config is None else self._drafts_own(config))
        self.history.check(target)

    def defaults(self) -> SpeculationConfig:
        """Return the draft's settings, with chains deep enough for a history."""
        own = self._draft.defaults()
        return own if not isinstance(own.tree, str | None) else own.merge(num_speculative_tokens=DEPTH)

    def more_nodes(self, length: int) -> int:
        """Return the most nodes that the history adds to a tree."""
        return length

    def drafter(self, request: DraftContext) -> Drafter:
        """Index the prompts, and let the draft read them when it is first asked."""
        return HybridDrafter(self, request)

    def start_draft(self, request: DraftContext) -> LazyDrafter:
        """Make a lazy drafter of the draft, of which the hybrid says how much it drafts."""
        own = replace(request, config=self._drafts_own(request.config))
        return LazyDrafter(functools.partial(self._draft.drafter, own), unbounded(request.policy.acceptance))

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Let both take in the texts of a finished call."""
        self._draft.learn(texts)
        self.history.learn(texts)

    @property
    def draft_depth(self) -> int:
        """Return the draft model's longest draft."""
        own = self.draft_tokens or self._draft.defaults().num_speculative_tokens
        return own if isinstance(own, int) else DEFAULT_NUM_SPECULATIVE_TOKENS

    def depth_for(self, config: SpeculationConfig) -> int:
        """Return the draft model's longest draft in a call: all of a static tree that a user gave."""
        if self.draft_tokens is None and not isinstance(config.tree, str | None):
            return max(map(len, config.tree))
        return self.draft_depth

    def _drafts_own(self, config: SpeculationConfig) -> SpeculationConfig:
        count = config.num_speculative_tokens
        if not isinstance(count, int) or not isinstance(config.tree, str | None):
            return config
        return config.merge(num_speculative_tokens=min(count, self.draft_depth))

    @property
    def _draft(self) -> Speculator:
        if not isinstance(self.draft, Speculator):
            raise TypeError("hf_spec.as_speculator(hybrid, target) reads the draft of a HybridSpeculator for a target")
        return self.draft


class HybridDrafter(Drafter):
    """Ask the history first, then the draft for the rows that want it."""

    def __init__(self, speculator: HybridSpeculator, request: DraftContext) -> None:
        self._rows = speculator.history.texts(request).rows()
        self._draft = speculator.start_draft(request)
        self._draft_depth = speculator.depth_for(request.config)
        self._min_token_prob, self._policy = speculator.history.min_token_prob, request.policy
        self._calibration = request.policy.acceptance.calibration[DraftSource.NGRAM]
        self._begun = False  # the draft has drafted
        self._is_chain = request.config.tree is None
        self._width = 1 if self._is_chain else request.config.tree_topk
        self._last: list[tuple[Continuations, bool]] = []  # by row, the history's chain, and whether it was verified

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Take in ``accepted``, look up what may follow, and run the draft where that is not enough."""
        emitted = accepted.emitted
        for (texts, number), tokens in zip(self._rows, emitted, strict=True):
            texts.extend(number, tokens)
        for (continuations, was_verified), new in zip(self._last, emitted, strict=bool(self._last)):
            record_outcome(self._calibration, continuations, new, was_verified)
        self._last = []
        nodes = None if self._is_chain else limit
        found = [
            texts.continuations(number, limit, self._width, nodes, self._min_token_prob)
            for texts, number in self._rows
        ]
        if self._is_chain:
            return self._chains(accepted, limit, found)
        proposal = self._draft.propose(accepted, min(limit, self._draft_depth))
        return with_branches(proposal, found)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        kept = to_list(rows)
        self._rows = [self._rows[row] for row in kept]
        self._draft.keep_rows(rows)
        self._last = [self._last[row] for row in kept] if self._last else []

    def join(self, other: Drafter) -> bool:
        """Go on with the rows of ``other``, too, if the draft can; nothing is learnt from their last proposals."""
        assert isinstance(other, HybridDrafter)
        if not self._draft.join(other._draft):
            return False
        self._rows += other._rows
        self._last += [({}, False)] * len(other._rows) if self._last else []
        return True

    def _chains(self, accepted: AcceptedTokens, limit: int, found: list[Continuations]) -> Proposal:
        # Decided before the draft is asked: a token that it samples must not decide whether it counts.
        survival = [calibrated(continuations, self._calibration) for continuations in found]
        longest = min(limit, self._draft_depth)
        model = self._policy.acceptance.estimate(DraftSource.MODEL, len(found), longest)
        plan = self._policy.plan(len(found), [Estimate(DraftSource.NGRAM, survival), model])
        drafts = plan.source is DraftSource.MODEL
        drafted = self._draft.propose(accepted, min(longest, plan.model_length) if drafts else 0)
        self.had_backlog, self._begun = drafts and not self._begun, self._begun or drafts
        taken = [plan.length > 0 and source is DraftSource.NGRAM for source in plan.sources]
        found = [truncated(paths, plan.length) if takes else paths for paths, takes in zip(found, taken, strict=True)]
        self._last = list(zip(found, taken, strict=True))
        chains = [max(continuations, key=len, default=()) if takes else None for continuations, takes in self._last]
        return with_chains(drafted, chains)


def with_chains(proposal: Proposal, chains: Sequence[Path | None]) -> Proposal:
    """Put looked-up ``chains`` in those rows of ``proposal``, which holds chains."""
    lengths = [0 if chain is None else len(chain) for chain in chains]
    if not any(lengths):
        return proposal
    width, before = max(proposal.max_depth, *lengths), proposal.tokens.shape[1] - 1
    rows = [[n, *(chain or ()), *[0] * (width - n)] for n, chain in zip(lengths, chains, strict=True)]
    table = to_device(rows, proposal.tokens.device)  # (batch, 1 + width)
    taken, steps = table[:, :1] > 0, torch.arange(1 + width, device=table.device)
    parents = torch.where(steps > table[:, :1], PAD_NODE, steps - 1)
    continuations = torch.where(taken, table[:, 1:], functional.pad(proposal.tokens[:, 1:], (0, width - before)))
    parents = torch.where(taken, parents, functional.pad(proposal.parents, (0, width - before), value=PAD_NODE))
    tokens = torch.cat([proposal.root[:, None], continuations], dim=1)
    if proposal.q is None:
        return Proposal(tokens, parents, width, is_chain=True)
    q = functional.pad(proposal.q, (0, 0, 0, width - proposal.q.shape[1]))
    return Proposal(tokens, parents, width, q, is_chain=True, deterministic=taken.expand_as(tokens))


def with_branches(proposal: Proposal, found: Sequence[Continuations]) -> Proposal:
    """Add the looked-up paths in ``found`` to the trees of ``proposal``, after what they share."""
    if not any(found):
        return proposal
    rows = torch.stack([proposal.tokens, proposal.parents], dim=1).tolist()
    trees = [_grown(tokens, parents, paths) for (tokens, parents), paths in zip(rows, found, strict=True)]
    nodes, before = max(len(tokens) for tokens, _ in trees), proposal.tokens.shape[1]
    table = [
        [[*tokens, *[0] * (nodes - len(tokens))], [*parents, *[PAD_NODE] * (nodes - len(parents))]]
        for tokens, parents in trees
    ]
    tokens, parents = to_device(table, proposal.tokens.device).unbind(1)  # (batch, nodes)
    depth = max(proposal.max_depth, *(len(path) for paths in found for path in paths))
    if proposal.q is None:
        return Proposal(tokens, parents, depth)
    q = functional.pad(proposal.q, (0, 0, 0, nodes - proposal.q.shape[1]))
    deterministic = (torch.arange(nodes, device=tokens.device) >= before).expand_as(tokens)
    return Proposal(tokens, parents, depth, q, deterministic=deterministic)


def _grown(tokens: list[int], parents: list[int], paths: Continuations) -> tuple[list[int], list[int]]:
    """Return the tokens and parents of a row's tree with the nodes of ``paths`` that it lacks, after its own."""
    tokens, parents = tokens[:], parents[:]
    known: dict[Path, int] = {(): 0}
    names: dict[int, Path] = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] in names:
            names[node] = (*names[parents[node]], tokens[node])
            known.setdefault(names[node], node)
    for path in paths:
        if path not in known:
            known[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(known[path[:-1]])
    return tokens, parents
