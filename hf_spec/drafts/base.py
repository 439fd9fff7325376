"""What every kind of draft is to the loop: a ``Speculator`` that starts a ``Drafter`` for one ``generate`` call.

A speculator is what the user passes: weights or a rule, no conversation. A drafter is the state of one call. It is
given the accepted tokens and proposes what may come next. It does not know how its draft tokens are verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils.generic import ModelOutput

from ..device_tensors import cached_arange, to_list
from ..policy.acceptance import AcceptanceEstimator
from ..policy.base import DraftLengthPolicy, DraftSource
from ..policy.cost import ModelShape, shape_of
from ..policy.fixed import unbounded
from ..proposal import NO_PARENT, Proposal, ancestors_of, once
from ..scoring.names import CACHE
from ..scoring.plain import scored_vocabulary
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..scoring.graphs import Compiler
    from ..scoring.runner import ModelRunner
    from ..scoring.target_keys import TargetKeys


LAST_LOGITS_FROM = 16  # accepted tokens from which a drafter computes only the logits that it needs
SUM_TOLERANCE = 1e-3  # of a distribution that a user's own drafter works out, in whatever precision


@dataclass(frozen=True)
class DraftContext:
    """What one ``generate`` call tells a speculator before the first draft token.

    ``input_ids`` (batch, prompt) are left-padded where ``attention_mask`` (batch, prompt) is 0. The prompt may be
    empty (``inputs_embeds``). A draft without weights may propose before the target reads the prompt. Then the last
    token of the prompt is not in ``input_ids``: it is the first accepted token. ``features`` (batch, read, widths)
    are the target's hidden states at the layers the speculator asked for. Their last position is the prompt's. But
    the target may have read more than ``input_ids`` (embeddings) or less (a cache that was passed). ``log_probs``
    turns draft logits (..., vocabulary of the target) into the log-probabilities of draft tokens. The user's
    temperature, top-k, top-p, ... are applied once. Where only chains of the best tokens are wanted, it may return
    any scores in that order. ``sample``: sample draft tokens; otherwise take the best ones. ``compiler``: the call
    is compiled, and so is the drafter if it can be. ``policy``: a drafter that can tell how probably its draft
    tokens are accepted asks it how many to draft. ``runner`` is the target's own, for speculators with
    ``shares_target_cache``. ``target_keys``: the target's keys and values of committed tokens, to be read only;
    ``None`` where they cannot be read. ``source``: what an encoder-decoder target reads besides this text.
    ``generator`` is not used: draft tokens are drawn from torch's default one.
    """

    target: PreTrainedModel
    input_ids: Tensor
    attention_mask: Tensor
    features: Tensor | None
    config: SpeculationConfig
    log_probs: Callable[[Tensor], Tensor]
    sample: bool
    generator: torch.Generator | None = None
    compiler: Compiler | None = None
    policy: DraftLengthPolicy = field(default_factory=lambda: unbounded(AcceptanceEstimator()))
    runner: ModelRunner | None = None
    target_keys: TargetKeys | None = None
    source: Source | None = None

    @property
    def keep_drafting(self) -> Callable[[Tensor], bool] | None:
        """Return what to ask after each token of a chain, given its probabilities (rows,); ``None`` for nothing."""
        return self.policy.keep_drafting if self.policy.stops_early else None

    @once
    def vocabulary(self) -> int:
        """Return how many tokens the target's logits, and so what draft tokens are drawn from, are over."""
        return scored_vocabulary(self.target)

    @once
    def without_features(self) -> DraftContext:
        """Return the same without the prompt's features, which would stay in memory after the draft has read them.

        One object each time, so that graphs find what it knows already.
        """
        return replace(self, features=None)

    def prompts(self) -> list[list[int]]:
        """Return the prompts as numbers, without their padding, in one transfer."""
        pairs = torch.stack([self.input_ids, self.attention_mask.to(self.input_ids)], dim=1).tolist()
        return [[*compress(ids, mask)] for ids, mask in pairs]


def draft_log_probs(draft: Any, request: DraftContext, logits: Tensor) -> Tensor:
    """Turn logits (..., draft vocabulary) of ``draft`` into log-probabilities over the target's vocabulary."""
    whole: Tensor = draft.over_target(logits)
    if (missing := request.vocabulary - whole.shape[-1]) != 0:  # negative: the target's head knows fewer tokens
        whole = torch.nn.functional.pad(whole, (0, missing), value=-torch.inf)
    return request.log_probs(whole.to(request.input_ids.device)).to(logits.device)


@dataclass(frozen=True)
class AcceptedTokens:
    """The tokens that were emitted since the last proposal, or the last token of the prompt (see ``DraftContext``).

    ``tokens`` (batch, m) are right-padded, ``counts`` (batch,) of them count, at least one per row; the last one is
    the next root. ``features`` (batch, m, widths) stand EAGLE-wise: ``features[:, j]`` belong to the position *before*
    ``tokens[:, j]``, so they never look ahead (reference: EAGLE, arXiv 2401.15077). ``cpu_counts`` are the counts
    where nobody has to ask the accelerator for them, and ``cpu_tokens`` the tokens that count, if the sender has them.
    """

    tokens: Tensor
    counts: Tensor
    features: Tensor | None = None
    cpu_counts: Sequence[int] | None = None
    cpu_tokens: Sequence[Sequence[int]] | None = None

    @property
    def amounts(self) -> list[int]:
        """Return the counts as numbers."""
        return self.counts.tolist() if self.cpu_counts is None else list(self.cpu_counts)

    @property
    def emitted(self) -> list[list[int]]:
        """Return the tokens that count as numbers, row by row."""
        if self.cpu_tokens is not None:
            return [list(tokens) for tokens in self.cpu_tokens]
        moved = torch.cat([self.counts[:, None], self.tokens], dim=1).tolist()  # in one transfer
        return [tokens[:count] for count, *tokens in moved]

    @property
    def root(self) -> Tensor:
        """Return the last token of each row, (batch,)."""
        if self.tokens.shape[1] == 1:
            return self.tokens[:, 0]
        return self.last(self.tokens[:, :, None])[:, 0, 0]

    def last(self, states: Tensor) -> Tensor:
        """Pick from ``states`` (batch, m, width) those of each row's last token: (batch, 1, width)."""
        if self.cpu_counts is not None and len(set(self.cpu_counts)) == 1:
            return states[:, self.cpu_counts[0] - 1, None]
        # A graph must not cache on its inputs.
        index = self._last_index() if torch.compiler.is_compiling() else self._cached_last_index
        return states.gather(1, index.to(states.device).expand(-1, -1, states.shape[-1]))

    @once
    def _cached_last_index(self) -> Tensor:
        return self._last_index()

    def _last_index(self) -> Tensor:
        """Return the index of each row's last token, (batch, 1, 1); 0 in a row without any."""
        return (self.counts - 1).clamp(min=0)[:, None, None]

    def to(self, device: torch.device, dtype: torch.dtype) -> AcceptedTokens:
        """Move tokens and counts to ``device``, and the features to ``dtype``, too."""
        features = None if self.features is None else self.features.to(device, dtype)
        return replace(self, tokens=self.tokens.to(device), counts=self.counts.to(device), features=features)

    @classmethod
    def joined(cls, parts: Sequence[AcceptedTokens]) -> AcceptedTokens:
        """Put together the tokens of several steps of the same rows, the first one first."""
        if len(parts) == 1:
            return parts[0]
        first, width = parts[0], sum(part.tokens.shape[1] for part in parts)
        tokens = first.tokens.new_zeros(len(first.tokens), width)
        features = first.features
        if features is not None:
            features = features.new_zeros(len(features), width, features.shape[2])
        counts = torch.zeros_like(first.counts)
        for part in parts:  # what is padding of one part lies under the next one
            place = counts[:, None] + torch.arange(part.tokens.shape[1], device=counts.device)
            tokens.scatter_(1, place, part.tokens)
            if features is not None and part.features is not None:
                at = place.to(features.device)[:, :, None].expand(part.features.shape)
                features.scatter_(1, at, part.features)
            counts = counts + part.counts
        amounts = [sum(column) for column in zip(*(part.amounts for part in parts), strict=True)]
        emitted = [list(chain.from_iterable(row)) for row in zip(*(part.emitted for part in parts), strict=True)]
        return cls(tokens, counts, features, amounts, emitted)._narrow()

    def of(self, rows: Tensor) -> AcceptedTokens:
        """Keep some rows."""
        features = None if self.features is None else self.features[rows.to(self.features.device)]
        kept, amounts, emitted = to_list(rows), self.amounts, self.emitted
        amounts, emitted = [amounts[row] for row in kept], [emitted[row] for row in kept]
        return AcceptedTokens(self.tokens[rows], self.counts[rows], features, amounts, emitted)._narrow()

    def _narrow(self) -> AcceptedTokens:
        """Leave out the columns that count in no row: a draft would read them all the same."""
        width = max(self.amounts, default=0)
        features = None if self.features is None else self.features[:, :width]
        return replace(self, tokens=self.tokens[:, :width], features=features)


@dataclass
class DraftOutput(ModelOutput):
    """One step of a draft.

    ``logits`` are (batch, length, draft vocabulary). ``hidden_states`` (batch, length, hidden) are the input of the
    next step. The cache that was passed, grown by this step, has the name that transformers gives it.
    """

    logits: Tensor | None = None
    hidden_states: Tensor | None = None
    if CACHE == "cache":  # and past_key_values is a property
        cache: Cache | None = None
    else:
        past_key_values: Cache | None = None  # type: ignore[misc, unused-ignore]


class Drafter(ABC):
    """The state of a draft in one ``generate`` call.

    ``had_backlog`` tells whether the last proposal took longer than usual, because tokens of earlier plain steps had
    to be read first.
    """

    had_backlog = False

    @abstractmethod
    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read ``accepted`` and propose what follows: at most ``limit`` tokens deep, which may be 0."""

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` (indices into the current batch) only: the others are finished."""

    def join(self, other: Drafter) -> bool:
        """Take over the rows of ``other``, a drafter of the same speculator, after one's own.

        Return whether that is possible. By default it is not, and each drafter is asked by itself. All rows have
        something new when asked.
        """
        return False


def ask(drafter: Any, accepted: AcceptedTokens, limit: int) -> Proposal:
    """Let ``drafter`` propose, and look whether that is a proposal if it is a user's own.

    Numbers are looked at on a CPU alone, where nobody has to wait for them. Errors: a TypeError or ValueError that
    names the cure.
    """
    if type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]:  # it is ours, and tested
        found: Proposal = drafter.propose(accepted, limit)
        return found
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"Speculator.drafter returned {drafter!r:.80}; return an object of a subclass of hf_spec.Drafter."
        )
    name, proposal = f"{type(drafter).__name__}.propose", drafter.propose(accepted, limit)
    if not isinstance(proposal, Proposal):
        raise TypeError(
            f"{name} returned {proposal!r:.80}; return a hf_spec.Proposal, such as "
            "Proposal.chain(accepted.root, draft tokens) or Proposal.nothing(accepted.root)."
        )
    problem = _misshapen(proposal, len(accepted.tokens))
    if problem is None and proposal.tokens.device.type == "cpu":
        problem = _misguided(proposal, [new[-1] for new in accepted.emitted]) or _misdrawn(proposal)
    if problem is not None:
        raise ValueError(f"{name}: {problem}.")
    return proposal


def refuse_trees(proposal: Proposal) -> None:
    """Raise a ValueError unless ``proposal`` is a chain: a call without ``tree`` was only checked for chains."""
    if not proposal.is_chain:
        raise ValueError(
            "the drafter proposed a tree where the configuration promised chains, which are read differently: set "
            "tree=... in the SpeculationConfig, or build chains with Proposal.chain."
        )


def _misshapen(proposal: Proposal, rows: int) -> str | None:
    tokens, parents = proposal.tokens, proposal.parents
    if tokens.is_floating_point() or parents.is_floating_point():
        return f"tokens are {tokens.dtype} and parents {parents.dtype}; make both whole numbers"
    if tokens.ndim != 2 or len(tokens) != rows or parents.shape != tokens.shape:
        return (
            f"tokens have shape {tuple(tokens.shape)} and parents {tuple(parents.shape)}; make both (rows, 1 + "
            f"draft tokens), with {rows} rows here"
        )
    if (q := proposal.q) is not None:
        count = tokens.shape[1] - 1 if proposal.is_chain else min(q.shape[1] if q.ndim == 3 else 0, tokens.shape[1])
        if q.ndim != 3 or q.shape[:2] != (rows, count) or not q.is_floating_point():
            return (
                f"q has shape {tuple(q.shape)} and is {q.dtype}; make it float32, shape (rows, parents, vocabulary): "
                f"the distribution that the children of each parent were sampled from, here ({rows}, {count}, ...)"
            )
    return None


def _misguided(proposal: Proposal, roots: list[int]) -> str | None:
    if (own := proposal.root.tolist()) != roots:
        return (
            f"the roots are {own!r:.80}, but the texts end with {roots!r:.80}: other text would follow; begin with "
            "accepted.root"
        )
    if bool((proposal.tokens < 0).any()):
        return "there are negative tokens; fill up with tokens of the vocabulary, and say how many count in each row"
    if proposal.is_chain:
        return None
    later = proposal.parents[:, 1:]
    if bool((later == NO_PARENT).any()) or bool((later > cached_arange(later.shape[1], later.device)).any()):
        return "a draft token has no parent, or one that comes after it; put parents before their children"
    if not torch.equal(proposal.ancestors, ancestors_of(proposal.parents, later.shape[1])):
        return f"max_depth is {proposal.max_depth}, and a path has more draft tokens; make it the depth of the deepest"
    return None


def _misdrawn(proposal: Proposal) -> str | None:
    """Say what is wrong with ``q``, where draft tokens were sampled from it, or return ``None``."""
    if (q := proposal.q) is None:
        return None
    drawn = proposal.present.clone()
    drawn[:, 0] = False
    if proposal.deterministic is not None:
        drawn &= ~proposal.deterministic
    row, node = drawn.nonzero(as_tuple=True)
    parent = proposal.parents[row, node]
    if bool((parent >= q.shape[1]).any()):
        return f"q has {q.shape[1]} parents, and a draft token was sampled after a later one; make q longer"
    if bool((proposal.tokens[row, node] >= q.shape[2]).any()):
        return f"a draft token was sampled from q, which has {q.shape[2]} tokens, and is none of them"
    is_used = q.new_zeros(q.shape[:2], dtype=torch.bool)
    is_used[row, parent] = True
    used = q[is_used]
    cure = "q must be what the draft tokens were sampled from; if they are deterministic, leave q at None"
    if not bool((used >= 0).all()):  # nan is neither
        return f"q has negative numbers or nan; {cure}"
    sums = used.sum(-1)
    if not bool(((sums - 1).abs() <= SUM_TOLERANCE).all()):
        worst = float(sums[(sums - 1).abs().argmax()])
        return f"q sums to {worst:.4g} over the vocabulary, not to 1; {cure}"
    return None


class Speculator(ABC):
    """Start a ``Drafter`` per call. Draft models and rules alike implement these methods."""

    def estimates_acceptance(self, batch_size: int) -> bool:
        """Tell whether drafters of chains ask ``DraftContext.policy`` how many tokens to draft; not by default."""
        return False

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether chains of its drafters end where ``DraftContext.keep_drafting`` says so; not by default.

        On an accelerator whoever looks at a draft token waits for it.
        """
        return False

    @property
    def reads_target_keys(self) -> bool:
        """Tell whether its drafters read ``DraftContext.target_keys``, which continuous batching has not."""
        return False

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        """Name what step times and acceptance depend on besides the weights: drafts with one name share a profile."""
        return (type(self).__name__,)

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """Return a function that lists the forwards for so many draft tokens: one for each, none without weights."""
        network = network_of(self)
        shapes = [] if network is None else [shape_of(network)]
        return lambda length: shapes * length

    @property
    def source(self) -> DraftSource:
        """Say whether a model drafts or a text is searched: by default whether the draft has weights."""
        return DraftSource.NGRAM if network_of(self) is None else DraftSource.MODEL

    @property
    def shares_target_cache(self) -> bool:
        """Tell whether drafters run layers of the target over its own cache, ``DraftContext.runner``; not by default.

        Such a drafter starts after the prompt was read.
        """
        return False

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Say which ``hidden_states[i]`` of the target the drafter reads; none by default.

        i is what layer i is given, the number of layers what the last one gives, and -1 the same after the last norm.
        """
        return ()

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:  # noqa: B027
        """Raise a ValueError with cause and cure if this draft cannot serve ``target``, or not as ``config`` asks.

        By default it can.
        """

    def encodes(self, target: PreTrainedModel) -> bool:
        """Tell whether drafters read the source of ``target`` by an encoder of their own; not by default."""
        return False

    def defaults(self) -> SpeculationConfig:
        """Return the settings used where the user chose none."""
        return SpeculationConfig()

    def settings(self, config: SpeculationConfig | None = None, **changes: Any) -> SpeculationConfig:
        """Return the settings of a call: ``config``, or else this draft's ``defaults``, with some ``changes``.

        A ``num_speculative_tokens`` that is still ``None`` becomes the draft's, or the common one, except in a static
        tree, which is as deep as its paths. So do ``accept_k`` and ``accept_tolerance`` where
        ``acceptance="near_best"`` asks for them.
        """
        defaults = self.defaults()
        config = (defaults if config is None else config).merge(**changes)
        names = ["num_speculative_tokens"] if isinstance(config.tree, str | None) else []
        names += ["accept_k", "accept_tolerance"] if config.acceptance == "near_best" else []
        missing = {name: getattr(defaults, name) for name in names if getattr(config, name) is None}
        if missing.get("num_speculative_tokens", 1) is None:
            missing["num_speculative_tokens"] = DEFAULT_NUM_SPECULATIVE_TOKENS
        return config.merge(**missing)

    @abstractmethod
    def drafter(self, request: DraftContext) -> Drafter:
        """Start a drafter for one call."""

    def more_nodes(self, length: int) -> int:
        """Return how many nodes a proposal of this ``length`` may have beyond the ``tree`` that was asked for."""
        return 0

    @property
    def learns(self) -> bool:
        """Tell whether ``learn`` wants the texts, which are fetched from the device for it alone."""
        return type(self).learn is not Speculator.learn

    def learn(self, texts: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Learn from the texts of a finished call, one per row, prompt and output. By default nothing is kept of them.

        -1 stands in place of tokens that the target never writes, such as placeholders for parts of an image.
        Whoever decodes calls this once, from any thread, when the call is whole: not of calls that were abandoned.
        """


def network_of(speculator: Speculator) -> nn.Module | None:
    """Return the weights of the draft; ``None`` where there are none."""
    own = speculator if isinstance(speculator, nn.Module) else getattr(speculator, "model", None)
    return own if isinstance(own, nn.Module) else None
