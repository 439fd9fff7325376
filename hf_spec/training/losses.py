"""Losses and metrics of draft tokens: the objectives, the positions that count, and both computed in chunks.

In a text of n tokens a draft has n - 1 *positions*, one for each token but the first. Position i of step k has read
the tokens up to i+1+k and predicts token i+2+k. It is compared with the target's distribution at token i+1+k::

    predicted token          x2   x3   x4   x5
    step 0, position          0    1    2    3
    step 1, position          ·    0    1    2         a column: one distribution of the target,
    step 2, position          ·    ·    0    1         and the predictions of all steps that are compared with it

``answers`` marks the tokens that a draft will have to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

Objective = Literal["kl", "ce", "tv", "lk", "reverse_kl", "nll"]
Normalizer = Literal["token", "sequence", "draft_token"]
Outside = Literal["drop", "keep"]

LK_DECAY = 3.0  # how fast "lk" moves from KL to total variation as acceptance grows
SPARSE = 0.5  # if a smaller share of the predictions counts (block drafts), logits are computed for those alone


@lru_cache
def objective_terms(objective: str) -> dict[str, float]:
    """Return the weight of each term of an objective, such as ``"kl"`` or ``"0.1 ce + 0.9 tv"``.

    Errors: a ValueError if a term is none of ``Objective``, or a weight not a number above 0.
    """
    terms: dict[str, float] = {}
    for part in objective.split("+"):
        given, _, name = part.strip().rpartition(" ")
        try:
            weight = float(given or 1)
        except ValueError:
            name = ""
        else:
            if not 0 < weight < float("inf"):
                raise ValueError(f"objective is {objective!r}, where {name} weighs {given}; set a number above 0")
            terms[name] = terms.get(name, 0.0) + weight
        if name not in get_args(Objective):
            raise ValueError(
                f"objective is {objective!r}; choose one of {get_args(Objective)}, or a sum of some with weights, "
                "such as '0.1 ce + 0.9 tv'"
            )
    return terms


# -- which positions count --------------------------------------------------------------------------------------------


def counted_positions(answers: Tensor, steps: int, document_ids: Tensor | None = None) -> Tensor:
    """Mark the positions that count at each step, (steps, batch, length - 1), for ``answers`` (batch, length).

    A position counts if a drafter could be there: all tokens from the one that it starts after to the one that it
    predicts are answers of one document. The first token of an answer is never drafted, because prefill emits it.
    """
    answers = answers.bool()
    length = answers.shape[1]
    documents = torch.zeros_like(answers, dtype=torch.long) if document_ids is None else document_ids
    counted = answers[:, 1:] & (documents[:, 1:] == documents[:, :-1])  # the token that a position starts after
    by_step = []
    for step in range(steps):
        predicted = torch.zeros_like(counted)
        if step + 2 < length:
            same = documents[:, step + 2 :] == documents[:, : -step - 2]
            predicted[:, : length - step - 2] = answers[:, step + 2 :] & same
        counted = counted & predicted
        by_step.append(counted)
    return torch.stack(by_step)


def sample_anchors(
    answers: Tensor, document_ids: Tensor | None, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Sample at most ``count`` block roots per sequence among the ``answers`` (batch, length): (batch, length) bool.

    After each root there is at least one answer token to predict.
    """
    possible = counted_positions(answers, 1, document_ids)[0]  # (batch, length - 1); position i has root i + 1
    order = torch.rand(possible.shape, generator=generator).to(possible.device).masked_fill(~possible, -1.0)
    first = order.topk(min(count, possible.shape[1]), dim=1).indices
    sampled = torch.zeros_like(possible).scatter(1, first, True) & possible
    return functional.pad(sampled, (1, 0))


def position_weights(
    counted: Tensor, normalizer: Normalizer, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weight of each position (steps, batch, length - 1) and the divisor of each step's weights (steps,).

    ``"token"``, ``"draft_token"``: every position has the same weight. ``"sequence"``: every document has the same,
    whatever its length. Divisors of several batches are added, so that accumulated and distributed batches count as
    one.
    """
    if normalizer != "sequence":
        return counted.float(), counted.sum((1, 2)).float()
    if document_ids is None:
        document = torch.zeros(counted.shape[1:], dtype=torch.long, device=counted.device)
    else:
        change = functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
        document = change.long().cumsum(1)[:, :-1]  # (batch, length - 1), numbered from 0
    document = document.expand_as(counted)
    sizes = torch.zeros(*counted.shape[:2], counted.shape[2] + 1, dtype=torch.float32, device=counted.device)
    sizes = sizes.scatter_add(2, document, counted.float())  # (steps, batch, documents)
    weights = counted / sizes.gather(2, document).clamp(min=1)
    return weights, (sizes > 0).sum((1, 2)).float()


def chain_weights(confidence: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """Weight each prediction by the expected length of the chains that reach it (D-PACE): (steps, batch, length - 1).

    ``confidence`` is that of the draft in each draft token; ``smoothing`` moves it towards 1. A chain reaches token k
    with the product of the confidences up to k. The weight of token k is the sum of these products from k on. Only
    ``counted`` predictions take part.
    """
    moved = torch.where(counted, smoothing + (1 - smoothing) * confidence, 1)
    reached = moved.cumprod(0) * counted
    return reached.flip(0).cumsum(0).flip(0) * counted


# -- the loss, in chunks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a batch; all but ``losses`` are (steps, batch, length - 1).

    ``losses`` (steps,) are weighted sums. ``correct`` tells whether the draft's best token is the target's.
    ``overlap`` is the acceptance rate of a sampled draft token. ``inside`` tells whether the draft vocabulary has the
    target's best token. ``confidence`` is the draft's probability of the token that the objective wants, and
    ``selected`` that of the draft's selector, if it has one. Values at positions that do not count are meaningless.
    """

    losses: Tensor
    correct: Tensor
    overlap: Tensor
    confidence: Tensor
    selected: Tensor
    inside: Tensor

    def plus(self, losses: Tensor) -> StepMetrics:
        """Return these metrics with further ``losses`` (steps,)."""
        return replace(self, losses=self.losses + losses)


@dataclass(frozen=True)
class TargetDistribution:
    """The target's distributions at n positions; the first three are (n, draft vocabulary), the others (n,).

    ``log_p`` and ``p`` are normalised within the draft vocabulary; the losses compare these. ``p_of_all`` are the same
    tokens' probabilities among all tokens. ``best`` is the target's best token, and ``inside`` tells whether the
    position counts in the loss. ``best_draft_id`` is the draft id of the best token that the draft has, ``token`` that
    of the text's own token; -1 if the draft does not have it.
    """

    log_p: Tensor
    p: Tensor
    p_of_all: Tensor
    best: Tensor
    inside: Tensor
    best_draft_id: Tensor
    token: Tensor

    def at(self, picked: Any) -> TargetDistribution:
        """Return the distributions at some of the positions, by any index of tensors."""
        return TargetDistribution(*(getattr(self, field.name)[picked] for field in fields(self)))


@dataclass(frozen=True)
class _Columns:
    """The n columns of the picture above in which some prediction counts.

    ``text`` and ``column`` (n,) are the batch row and the column number. ``hidden`` (n, target hidden) are the
    target's last hidden states and ``tokens`` (n,) the predicted tokens of the text. ``weights`` (steps, n) are those
    of the predictions, 0 where a step has none. ``selector_weights`` and ``confidence_weights`` (steps, n) are those
    of the selector's and of the confidence's.
    """

    text: Tensor
    column: Tensor
    hidden: Tensor
    tokens: Tensor
    weights: Tensor
    selector_weights: Tensor
    confidence_weights: Tensor

    def positions(self, step: int, length: int) -> Tensor:
        """Return the position (n,) of ``step`` in each column; where there is none, any valid index (weight 0)."""
        return (self.column - step) % length


@dataclass(frozen=True)
class ChunkedLoss:
    """The loss between a draft's distributions and the target's, ``chunk`` positions of a step at a time.

    ``draft_head(step, states)`` gives logits over the draft vocabulary and ``target_head(hidden)`` over the target's.
    ``target_ids`` (draft vocabulary,) maps draft ids to target ids, ``None`` if they are the same. ``outside`` is for
    positions where the target's best token is not in the draft vocabulary: ``"drop"`` removes them from the loss and
    counts them as wrong; ``"keep"`` looks at the draft vocabulary alone, as the speculators library does.

    ``objective`` is one of these, or a weighted sum of some (see ``objective_terms``):

    - ``"kl"``: KL from the target's distribution to the draft's (EAGLE-3's soft cross-entropy, less a constant).
    - ``"ce"``: cross-entropy with the target's best token.
    - ``"tv"``: total variation, which is one minus the acceptance rate of a sampled draft token.
    - ``"lk"``: KL while acceptance is low and total variation when it is high, mixed by exp(-3 acceptance).
    - ``"reverse_kl"``: KL from the draft's distribution to the target's.
    - ``"nll"``: cross-entropy with the text's own token.

    ``confidence(states)`` is trained by binary cross-entropy, weighted by ``confidence_weight``, to predict the
    acceptance rate of a sampled draft token. ``smoothing``: see ``chain_weights``, which the confidence does not use.

    ``selector(states, logits, labels)`` is that of ``Unrolled``. It is trained by cross-entropy among its candidates,
    weighted by ``selector_weight``, to choose the token that the objective wants. Chains then weigh it by its own
    probabilities.

    ``temperature`` divides both logits of ``"kl"``, which is then multiplied by its square (JetSpec).
    """

    draft_head: Callable[[int, Tensor], Tensor]
    target_head: Callable[[Tensor], Tensor]
    target_ids: Tensor | None = None
    objective: str = "kl"
    outside: Outside = "drop"
    chunk: int = 256
    confidence: Callable[[Tensor], Tensor] | None = None
    confidence_weight: float = 1.0
    smoothing: float | None = None
    selector: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    selector_weight: float = 1.0
    temperature: float = 1.0

    def compute(
        self,
        states: Sequence[Tensor],
        hidden: Tensor,
        weights: Tensor,
        trained: Sequence[Tensor] = (),
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, StepMetrics]:
        """Return the loss, with gradients for ``states`` and the head's ``trained`` parameters, and the metrics.

        ``states`` (batch, length - 1, hidden) of each step are the input of the draft's head. ``hidden`` (batch,
        length, target hidden) are the target's last hidden states. ``weights`` (steps, batch, length - 1) are those
        of the positions. ``input_ids`` (batch, length) are needed for ``"nll"``.
        """
        of_selector = of_confidence = weights
        if self.smoothing is not None:
            with torch.no_grad():
                _, found = replace(self, smoothing=None).compute(states, hidden, weights, (), input_ids)
            counted = weights > 0
            of_selector = weights * chain_weights(found.selected, counted, self.smoothing)
            weights = weights * chain_weights(found.confidence, counted, self.smoothing)
        by_column = _shift(weights, 1)  # (steps, batch, columns)
        text, column = (by_column > 0).any(0).nonzero(as_tuple=True)
        if not len(text):  # the loss is zero, but every process of a distributed run needs a gradient
            text = column = text.new_zeros(1)
        tokens = torch.full_like(text, -1)
        if input_ids is not None:
            tokens = input_ids[text, (column + 2).clamp(max=input_ids.shape[1] - 1)]
        used = [_shift(one, 1)[:, text, column] for one in (weights, of_selector, of_confidence)]
        columns = _Columns(text, column, hidden[text, column + 1], tokens, *used)
        chunks: list[StepMetrics] = []
        trained = [parameter for parameter in trained if parameter.requires_grad]
        apply = cast(Any, _InChunks.apply)
        loss: Tensor = apply(self, columns, chunks, torch.is_grad_enabled(), *states, *trained)

        def by_position(name: str) -> Tensor:
            found = torch.cat([getattr(chunk, name) for chunk in chunks], dim=1)  # (steps, n)
            placed = found.new_zeros(weights.shape)
            placed[:, text, column] = found
            return _shift(placed, -1)

        losses = torch.stack([chunk.losses for chunk in chunks]).sum(0)
        metrics = (by_position(name) for name in ("correct", "overlap", "confidence", "selected", "inside"))
        return loss, StepMetrics(losses, *metrics)

    @torch.no_grad()
    def distribution(self, hidden: Tensor, tokens: Tensor | None = None) -> TargetDistribution:
        """Return the target's distributions at n positions from its last hidden states (n, target hidden).

        ``tokens`` (n,) are the text's own.
        """
        logits = self.target_head(hidden).float()  # (n, vocabulary)
        best, mass = logits.argmax(-1), logits.logsumexp(-1)
        if self.target_ids is not None:
            logits = logits[:, self.target_ids]
        inside = torch.ones_like(best, dtype=torch.bool)
        if self.target_ids is not None and self.outside == "drop":
            inside = torch.isin(best, self.target_ids)
        elif self.target_ids is not None:
            best, mass = self.target_ids[logits.argmax(-1)], logits.logsumexp(-1)
        log_p = logits.log_softmax(-1)  # (n, draft vocabulary)
        p = log_p.exp()
        p_of_all = p if self.target_ids is None else (logits - mass[:, None]).exp()
        token = torch.full_like(best, -1) if tokens is None else tokens
        if self.target_ids is not None:
            place = torch.searchsorted(self.target_ids, token).clamp(max=len(self.target_ids) - 1)
            token = torch.where(self.target_ids[place] == token, place, -1)
        return TargetDistribution(log_p, p, p_of_all, best, inside, log_p.argmax(-1), token)

    def compare(
        self,
        target: TargetDistribution,
        step: int,
        states: Tensor,
        weights: Tensor,
        selector_weights: Tensor | None = None,
        confidence_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the loss of n predictions of a step, with gradients by autograd, and their metrics (n,).

        The metrics are ``correct``, ``overlap``, ``confidence`` and ``selected`` of ``StepMetrics``.
        ``states`` (n, hidden) are the input of the draft's head, ``weights`` (n,) those of the predictions. The
        selector's and the confidence's are the same unless theirs (n,) are given.
        """
        logits = self.draft_head(step, states).float()  # (n, draft vocabulary)
        log_q = logits.log_softmax(-1)
        terms = objective_terms(self.objective)
        divergence = sum(weight * self._divergence(name, logits, log_q, target) for name, weight in terms.items())
        loss = (divergence * weights * target.inside).sum()
        with torch.no_grad():
            token = log_q.max(-1).indices
            correct = (token if self.target_ids is None else self.target_ids[token]) == target.best
            overlap = torch.minimum(target.p_of_all, log_q.exp()).sum(-1)
            wanted = target.token.clamp(min=0) if "nll" in terms else target.best_draft_id
            confidence = log_q.gather(-1, wanted[:, None])[:, 0].exp()
        if self.confidence is not None:
            said = self.confidence(states).float()
            wrong = functional.binary_cross_entropy_with_logits(said, overlap.clamp(0, 1), reduction="none")
            used = weights if confidence_weights is None else confidence_weights
            loss = loss + self.confidence_weight * (wrong * used).sum()
        if self.selector is None:
            return loss, correct, overlap, confidence, confidence
        scores, place = self.selector(states, logits, wanted)
        missed = functional.cross_entropy(scores.float(), place, reduction="none")
        used = weights if selector_weights is None else selector_weights
        loss = loss + self.selector_weight * (missed * used * target.inside).sum()
        return loss, correct, overlap, confidence, (-missed.detach()).exp()

    def _divergence(self, objective: str, logits: Tensor, log_q: Tensor, target: TargetDistribution) -> Tensor:
        """Return the divergence between the target's distributions and the draft's, (n,).

        The draft's are given as ``logits`` and as log-probabilities ``log_q``, (n, draft vocabulary) both. No product
        of matrices sums anything here: autocast would compute it in half precision.
        """
        if objective == "nll":
            own = -log_q.gather(-1, target.token.clamp(min=0)[:, None])[:, 0]
            return torch.where(target.token >= 0, own, 0)
        if objective == "ce":
            return -log_q.gather(-1, target.best_draft_id[:, None])[:, 0]
        if objective == "reverse_kl":
            return (log_q.exp() * (log_q - target.log_p)).sum(-1)
        if objective == "tv":
            return 1 - torch.minimum(target.p, log_q.exp()).sum(-1)
        if objective == "kl" and (heat := self.temperature) != 1:
            log_p, hot = (target.log_p / heat).log_softmax(-1), logits / heat
            return heat**2 * _kl(hot, hot.detach().log_softmax(-1), log_p.exp(), log_p)
        kl = _kl(logits, log_q.detach(), target.p, target.log_p)
        if objective == "kl":
            return kl
        tv = 1 - torch.minimum(target.p, log_q.exp()).sum(-1)
        share = (-LK_DECAY * (1 - tv.detach())).exp()
        return share * kl + (1 - share) * tv


def _kl(logits: Tensor, log_q: Tensor, p: Tensor, log_p: Tensor) -> Tensor:
    """Return KL from the target's distributions to those of ``logits``, (n, vocabulary) -> (n,)."""
    return cast(Tensor, cast(Any, _Kl.apply)(logits, log_q, p, log_p))


class _Kl(torch.autograd.Function):
    """KL with its own gradient, q - p, which reads the vocabulary less often than that of each operation."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_q: Tensor, p: Tensor, log_p: Tensor) -> Tensor:
        ctx.save_for_backward(log_q, p)
        return (log_p - log_q).mul_(p).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        log_q, p = ctx.saved_tensors
        return log_q.exp().sub_(p).mul_(gradient[:, None]), None, None, None


def of_chains(metrics: StepMetrics, counted: Tensor) -> StepMetrics:
    """Return the metrics of chains at the ``counted`` positions (steps, batch, length - 1), for a draft of one step.

    A language model's k-th draft token after a position is its first one k - 1 positions later. That holds as long as
    the draft tokens before it are those of the text. So the metrics of step 0 are shifted.
    """
    steps = range(len(counted))
    later = {name: getattr(metrics, name)[0] for name in ("correct", "overlap", "confidence", "selected", "inside")}
    moved = {name: torch.stack([one.roll(-step, -1) for step in steps]) for name, one in later.items()}
    return StepMetrics(functional.pad(metrics.losses, (0, len(counted) - 1)), **moved)


def _shift(by_step: Tensor, direction: int) -> Tensor:
    """Shift the values of step k by k places, (steps, batch, length - 1): from positions to columns, or back by -1.

    Values that wrap around have weight 0: no prediction of step k is in a column before the k-th.
    """
    return torch.stack([one.roll(direction * step, -1) for step, one in enumerate(by_step)])


def _placed(metric: Tensor, picked: Any, weights: Tensor) -> Tensor:
    """Scatter the ``metric`` of ``picked`` predictions to their places among all ``weights`` (n,); elsewhere 0."""
    placed = metric.new_zeros(len(weights))
    placed[picked] = metric
    return placed


class _InChunks(torch.autograd.Function):
    """The loss as an autograd function whose forward computes the gradients too: no logits outlive their chunk."""

    @staticmethod
    def forward(
        ctx: Any, loss: ChunkedLoss, columns: _Columns, chunks: list[StepMetrics], learns: bool, *given: Tensor
    ) -> Tensor:
        """Return the sum of all losses; ``given`` are the states of each step, then the trained parameters."""
        # Weights are far below 1. Scaling them up keeps gradients from underflowing in half precision.
        scale = float(columns.weights.max().clamp(min=torch.finfo(torch.float32).tiny))
        total = given[0].new_zeros((), dtype=torch.float32)
        steps, few = len(columns.weights), bool((columns.weights > 0).float().mean() < SPARSE)
        gradients, trained = [torch.zeros_like(tensor) for tensor in given], given[steps:]
        for start in range(0, len(columns.hidden), loss.chunk):
            chunk = slice(start, start + loss.chunk)
            target, compared = loss.distribution(columns.hidden[chunk], columns.tokens[chunk]), []
            for step in range(steps):  # one by one, so that only one step's logits are in memory
                weights = columns.weights[step, chunk] / scale
                picked = weights.nonzero()[:, 0] if few else slice(None)
                places = columns.text[chunk][picked], columns.positions(step, given[step].shape[1])[chunk][picked]
                with torch.set_grad_enabled(learns):
                    states = given[step][places].detach().requires_grad_(learns)
                    used = (columns.selector_weights, columns.confidence_weights)
                    others = [one[step, chunk][picked] / scale for one in used]
                    one, *metrics = loss.compare(target.at(picked), step, states, weights[picked], *others)
                compared.append((one.detach() * scale, *(_placed(metric, picked, weights) for metric in metrics)))
                if learns:
                    gradients[step][places], *found = torch.autograd.grad(one, [states, *trained], allow_unused=True)
                    for gradient, more in zip(gradients[steps:], found, strict=True):
                        if more is not None:  # None for the parameters of another step's head
                            gradient += more
            stacked = [torch.stack(metric) for metric in zip(*compared, strict=True)]
            stacked.append(target.inside.expand(steps, -1))
            chunks.append(StepMetrics(*stacked))
            total += chunks[-1].losses.sum()
        ctx.scale = scale
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = gradient * ctx.scale
        return None, None, None, None, *(found.mul_(factor) for found in ctx.saved_tensors)


def feature_loss(predicted: Sequence[Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
    """Compare each step's ``predicted`` last hidden states of the target with the true ``hidden``: (steps,) sums.

    All are (batch, length, hidden); ``weights`` (steps, batch, length - 1) are those of positions.
    """
    if not predicted or predicted[0].shape[-1] != hidden.shape[-1]:
        raise ValueError(
            "feature_loss_weight needs a draft that predicts the target's last hidden state, as EAGLE-1 does; "
            "set it to 0"
        )
    found = []
    for step, (state, weight) in enumerate(zip(predicted, weights, strict=True)):
        true = hidden[:, 1:].roll(-step, dims=1)
        distance = functional.smooth_l1_loss(state.float(), true.float(), reduction="none").mean(-1)
        found.append((distance * weight).sum())
    return torch.stack(found)
