"""What the guesses of a draft cost and how good they are: objectives, the positions that count, and both in chunks.

Of a text of n tokens a draft has n - 1 *positions*, one beside each token but the first. Position i of step k has read
token i+1+k last and guesses token i+2+k, where the target's distribution is that of its own position i+1+k::

    token that is guessed    x2   x3   x4   x5
    step 0, position          0    1    2    3
    step 1, position          ·    0    1    2         a column: one distribution of the target,
    step 2, position          ·    ·    0    1         and the guesses of all steps that are compared with it

``answers`` marks the tokens that a draft will have to guess.
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
Normalizer = Literal["token", "sequence", "guess"]
Outside = Literal["drop", "keep"]

LK_DECAY = 3.0  # how fast the hybrid goes over from KL to total variation
FEW = 0.5  # if a smaller share of the guesses counts, as of blocks behind some positions, the others cost no logits


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

    A position counts if a drafter could stand there: all tokens from the one that it starts behind to the one that it
    guesses are answers of one document. A draft never guesses the first token of an answer, because prefill gives it.
    """
    answers = answers.bool()
    length = answers.shape[1]
    documents = torch.zeros_like(answers, dtype=torch.long) if document_ids is None else document_ids
    counted = answers[:, 1:] & (documents[:, 1:] == documents[:, :-1])  # the token that a position starts behind
    by_step = []
    for step in range(steps):
        guessed = torch.zeros_like(counted)
        if step + 2 < length:
            same = documents[:, step + 2 :] == documents[:, : -step - 2]
            guessed[:, : length - step - 2] = answers[:, step + 2 :] & same
        counted = counted & guessed
        by_step.append(counted)
    return torch.stack(by_step)


def draw_anchors(
    answers: Tensor, document_ids: Tensor | None, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw at most ``count`` roots of blocks among the ``answers`` (batch, length): (batch, length) bool.

    Behind each of them an answer token is left to guess.
    """
    possible = counted_positions(answers, 1, document_ids)[0]  # (batch, length - 1), a position is before its root
    order = torch.rand(possible.shape, generator=generator).to(possible.device).masked_fill(~possible, -1.0)
    first = order.topk(min(count, possible.shape[1]), dim=1).indices
    drawn = torch.zeros_like(possible).scatter(1, first, True) & possible
    return functional.pad(drawn, (1, 0))


def position_weights(
    counted: Tensor, normalizer: Normalizer, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weight of each position (steps, batch, length - 1) and the divisor of each step's weights (steps,).

    ``"token"``, ``"guess"``: every position weighs the same. ``"sequence"``: every document does, however long it is.
    Divisors of several batches add up, so that accumulated and distributed batches weigh as one.
    """
    if normalizer != "sequence":
        return counted.float(), counted.sum((1, 2)).float()
    if document_ids is None:
        document = torch.zeros(counted.shape[1:], dtype=torch.long, device=counted.device)
    else:
        change = functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
        document = change.long().cumsum(1)[:, :-1]  # (batch, length - 1), numbered from 0
    document = document.expand_as(counted)
    sizes = torch.zeros(*counted.shape[:2], counted.shape[2] + 1, device=counted.device)
    sizes = sizes.scatter_add(2, document, counted.float())  # (steps, batch, documents)
    weights = counted / sizes.gather(2, document).clamp(min=1)
    return weights, (sizes > 0).sum((1, 2)).float()


def chain_weights(sure: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """Weigh every guess by how far chains get that reach it (D-PACE): (steps, batch, length - 1).

    A chain reaches guess k with the product of how ``sure`` the draft is of the guesses up to it, each moved towards 1
    by ``smoothing``; a guess weighs the sum of these products from its own on. Only ``counted`` guesses take part.
    """
    moved = torch.where(counted, smoothing + (1 - smoothing) * sure, 1)
    reached = moved.cumprod(0) * counted
    return reached.flip(0).cumsum(0).flip(0) * counted


# -- the loss, in chunks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMetrics:
    """Say how good the guesses of a batch are; all but ``losses`` are (steps, batch, length - 1).

    ``losses`` (steps,) are weighted sums. ``correct`` tells whether the draft's best token is the target's,
    ``overlap`` how often a sampled guess would be accepted, and ``inside`` whether the draft can guess the target's
    best token at all. ``sure`` is the draft's probability of the token that the objective wants. What they say of
    guesses that do not count means nothing.
    """

    losses: Tensor
    correct: Tensor
    overlap: Tensor
    sure: Tensor
    inside: Tensor

    def plus(self, losses: Tensor) -> StepMetrics:
        """Return these metrics with further ``losses`` (steps,)."""
        return replace(self, losses=self.losses + losses)


@dataclass(frozen=True)
class TargetDistribution:
    """Hold what is known of n positions; the first three are (n, draft vocabulary), the others (n,).

    ``log_p`` and ``p`` are normalised within the draft vocabulary, which the losses compare. ``p_of_all`` are the same
    tokens' probabilities among all tokens. ``best`` is the target's best token, and ``inside`` tells whether the
    position counts in the loss. ``token`` is the text's own, as the draft numbers it; -1 if it has none such.
    """

    log_p: Tensor
    p: Tensor
    p_of_all: Tensor
    best: Tensor
    inside: Tensor
    token: Tensor

    def at(self, picked: Any) -> TargetDistribution:
        """Return what is known of some positions, by an index of them."""
        return TargetDistribution(*(getattr(self, field.name)[picked] for field in fields(self)))


@dataclass(frozen=True)
class _Columns:
    """Hold the n columns of the picture above in which some guess counts.

    ``text`` and ``column`` (n,) say where each one is in the batch, ``hidden`` (n, target hidden) are the target's
    last hidden states there, ``tokens`` (n,) what the text has there, and ``weights`` (steps, n) those of the guesses,
    0 where a step has none.
    """

    text: Tensor
    column: Tensor
    hidden: Tensor
    tokens: Tensor
    weights: Tensor

    def positions(self, step: int, length: int) -> Tensor:
        """Return the position (n,) of ``step`` in each column; where there is none, some other of the same text."""
        return (self.column - step) % length


@dataclass(frozen=True)
class ChunkedLoss:
    """Compare a draft's distributions with the target's, ``chunk`` positions of a step at a time.

    ``draft_head(step, states)`` gives logits over the draft vocabulary and ``target_head(hidden)`` over the target's;
    ``target_ids`` (draft vocabulary,) maps one to the other, ``None`` if they are the same. ``outside`` says what
    becomes of positions whose best target token the draft cannot guess: ``"drop"`` leaves them out of the loss and
    counts them wrong; ``"keep"`` looks at the draft vocabulary alone, as the speculators library does.

    ``objective`` is ``"kl"``, from the target's distribution to the draft's (EAGLE-3's soft cross-entropy, less a
    constant); ``"ce"``, cross-entropy with the target's best token; ``"tv"``, total variation, which is one minus the
    acceptance rate of a sampled guess; ``"lk"``, KL while acceptance is low and total variation when it is high, mixed
    by exp(-3 acceptance); ``"reverse_kl"``, from the draft's distribution to the target's; ``"nll"``, cross-entropy
    with the text's own token; or a sum of some with weights (see ``objective_terms``). ``confidence(states)`` is
    trained by binary cross-entropy, weighing ``confidence_weight``, to say how often a sampled guess is accepted.
    ``smoothing``: see ``chain_weights``.
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

    def compute(
        self,
        states: Sequence[Tensor],
        hidden: Tensor,
        weights: Tensor,
        trained: Sequence[Tensor] = (),
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, StepMetrics]:
        """Return the loss, with gradients for ``states`` and the head's ``trained`` parameters, and the metrics.

        ``states`` (batch, length - 1, hidden) of each step are what the draft's head reads, ``hidden`` (batch, length,
        target hidden) the target's last hidden states, ``weights`` (steps, batch, length - 1) those of the positions.
        ``input_ids`` (batch, length) are needed for ``"nll"``.
        """
        if self.smoothing is not None:
            with torch.no_grad():
                _, found = replace(self, smoothing=None).compute(states, hidden, weights, (), input_ids)
            weights = weights * chain_weights(found.sure, weights > 0, self.smoothing)
        by_column = _shift(weights, 1)  # (steps, batch, columns)
        text, column = (by_column > 0).any(0).nonzero(as_tuple=True)
        if not len(text):  # the loss is zero, but every process of a distributed run needs a gradient
            text = column = text.new_zeros(1)
        tokens = torch.full_like(text, -1)
        if input_ids is not None:
            tokens = input_ids[text, (column + 2).clamp(max=input_ids.shape[1] - 1)]
        columns = _Columns(text, column, hidden[text, column + 1], tokens, by_column[:, text, column])
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
        metrics = (by_position(name) for name in ("correct", "overlap", "sure", "inside"))
        return loss, StepMetrics(losses, *metrics)

    @torch.no_grad()
    def distribution(self, hidden: Tensor, tokens: Tensor | None = None) -> TargetDistribution:
        """Return what the target says at n positions, of its last hidden states (n, target hidden).

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
        return TargetDistribution(log_p, p, p_of_all, best, inside, token)

    def compare(
        self, target: TargetDistribution, step: int, states: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the loss of n guesses of a step, with gradients by autograd, and what ``StepMetrics`` says of them.

        ``states`` (n, hidden) are what the draft's head reads, ``weights`` (n,) those of the guesses.
        """
        log_q = self.draft_head(step, states).float().log_softmax(-1)  # (n, draft vocabulary)
        terms = objective_terms(self.objective)
        divergence = sum(weight * self._divergence(name, log_q, target) for name, weight in terms.items())
        loss = (divergence * weights * target.inside).sum()
        with torch.no_grad():
            guess = log_q.max(-1).indices
            correct = (guess if self.target_ids is None else self.target_ids[guess]) == target.best
            overlap = torch.minimum(target.p_of_all, log_q.exp()).sum(-1)
            wanted = target.token.clamp(min=0) if "nll" in terms else target.log_p.argmax(-1)
            sure = log_q.gather(-1, wanted[:, None])[:, 0].exp()
        if self.confidence is not None:
            said = self.confidence(states).float()
            wrong = functional.binary_cross_entropy_with_logits(said, overlap.clamp(0, 1), reduction="none")
            loss = loss + self.confidence_weight * (wrong * weights).sum()
        return loss, correct, overlap, sure

    def _divergence(self, objective: str, log_q: Tensor, target: TargetDistribution) -> Tensor:
        """Return how far the draft's log-probabilities (n, draft vocabulary) are from the target's, (n,)."""
        if objective == "nll":
            own = -log_q.gather(-1, target.token.clamp(min=0)[:, None])[:, 0]
            return torch.where(target.token >= 0, own, 0)
        if objective == "ce":
            return -log_q.gather(-1, target.log_p.argmax(-1, keepdim=True))[..., 0]
        if objective == "reverse_kl":
            return cast(Tensor, torch.linalg.vecdot(log_q.exp(), log_q - target.log_p))
        if objective == "tv":
            return 1 - torch.minimum(target.p, log_q.exp()).sum(-1)
        kl: Tensor = torch.linalg.vecdot(target.p, target.log_p - log_q)
        if objective == "kl":
            return kl
        tv = 1 - torch.minimum(target.p, log_q.exp()).sum(-1)
        share = (-LK_DECAY * (1 - tv.detach())).exp()
        return share * kl + (1 - share) * tv


def of_chains(metrics: StepMetrics, counted: Tensor) -> StepMetrics:
    """Return for a draft of one step what its chains do at the ``counted`` positions (steps, batch, length - 1).

    The k-th guess of a language model behind a position is its first one behind the k-th position further on, if the
    guesses before were those of the text.
    """
    steps = range(len(counted))
    later = {name: getattr(metrics, name)[0] for name in ("correct", "overlap", "sure", "inside")}
    moved = {name: torch.stack([one.roll(-step, -1) for step in steps]) for name, one in later.items()}
    return StepMetrics(functional.pad(metrics.losses, (0, len(counted) - 1)), **moved)


def _shift(by_step: Tensor, direction: int) -> Tensor:
    """Move what belongs to step k by k places, (steps, batch, length - 1): from positions to columns, or back by -1.

    What falls off one side comes in at the other, where it weighs 0: no guess of step k has a column before the k-th.
    """
    return torch.stack([one.roll(direction * step, -1) for step, one in enumerate(by_step)])


def _placed(metric: Tensor, picked: Any, weights: Tensor) -> Tensor:
    """Put the ``metric`` of ``picked`` guesses where they stand among all of ``weights`` (n,); elsewhere it is 0."""
    placed = metric.new_zeros(len(weights))
    placed[picked] = metric
    return placed


class _InChunks(torch.autograd.Function):
    """Work out loss and gradient chunk by chunk in one go, so that no logits outlive their chunk."""

    @staticmethod
    def forward(
        ctx: Any, loss: ChunkedLoss, columns: _Columns, chunks: list[StepMetrics], learns: bool, *given: Tensor
    ) -> Tensor:
        """Return the sum of all losses; ``given`` are the states of each step, then the trained parameters."""
        # Weights are far below 1; scaled up, what flows back does not vanish in half precision.
        scale = float(columns.weights.max().clamp(min=torch.finfo(torch.float32).tiny))
        total = given[0].new_zeros((), dtype=torch.float32)
        steps, few = len(columns.weights), bool((columns.weights > 0).float().mean() < FEW)
        gradients, trained = [torch.zeros_like(tensor) for tensor in given], given[steps:]
        for start in range(0, len(columns.hidden), loss.chunk):
            chunk = slice(start, start + loss.chunk)
            target, compared = loss.distribution(columns.hidden[chunk], columns.tokens[chunk]), []
            for step in range(steps):  # one by one: logits of other steps are gone, or not there yet
                weights = columns.weights[step, chunk] / scale
                picked = weights.nonzero()[:, 0] if few else slice(None)
                places = columns.text[chunk][picked], columns.positions(step, given[step].shape[1])[chunk][picked]
                with torch.set_grad_enabled(learns):
                    states = given[step][places].detach().requires_grad_(learns)
                    one, *metrics = loss.compare(target.at(picked), step, states, weights[picked])
                compared.append((one.detach() * scale, *(_placed(metric, picked, weights) for metric in metrics)))
                if learns:
                    gradients[step][places], *found = torch.autograd.grad(one, [states, *trained], allow_unused=True)
                    for gradient, more in zip(gradients[steps:], found, strict=True):
                        if more is not None:  # a head of another step
                            gradient += more
            losses, correct, overlap, sure = (torch.stack(metric) for metric in zip(*compared, strict=True))
            chunks.append(StepMetrics(losses, correct, overlap, sure, target.inside.expand(steps, -1)))
            total += losses.sum()
        ctx.scale = scale
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = gradient * ctx.scale
        return None, None, None, None, *(found.mul_(factor) for found in ctx.saved_tensors)


def feature_loss(guesses: Sequence[Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
    """Compare each step's ``guesses`` at the target's last hidden states with those, ``hidden``: (steps,) sums.

    All are (batch, length, hidden); ``weights`` (steps, batch, length - 1) are those of positions.
    """
    if not guesses or guesses[0].shape[-1] != hidden.shape[-1]:
        raise ValueError(
            "feature_loss_weight needs a draft that is fed guesses of the target's last hidden state, as EAGLE-1 is; "
            "set it to 0"
        )
    found = []
    for step, (guess, weight) in enumerate(zip(guesses, weights, strict=True)):
        true = hidden[:, 1:].roll(-step, dims=1)
        distance = functional.smooth_l1_loss(guess.float(), true.float(), reduction="none").mean(-1)
        found.append((distance * weight).sum())
    return torch.stack(found)
