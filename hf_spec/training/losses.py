"""What a draft is taught, and how well it does: objectives, the positions that count, and both in chunks.

Everything is aligned to *rows*: row i of step k has read token i+1+k last and guesses token i+2+k, where the target's
distribution is that of its position i+1+k. ``answers`` marks the tokens that a draft will have to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

Objective = Literal["kl", "ce", "tv", "lk", "reverse_kl"]
Normalizer = Literal["token", "sequence"]
Outside = Literal["drop", "keep"]

LK_DECAY = 3.0  # how fast the hybrid goes over from KL to total variation


def objective_loss(objective: Objective, draft: Tensor, target: Tensor) -> Tensor:
    """Return the loss (...) of ``draft`` logits against ``target`` logits, both (..., draft vocabulary).

    ``"kl"``: from the target's distribution to the draft's (EAGLE-3's soft cross-entropy, less a constant). ``"ce"``:
    the target's best token. ``"tv"``: total variation, one minus the acceptance rate of a sampled guess. ``"lk"``: KL
    while acceptance is low, total variation when it is high, mixed by exp(-3 acceptance). ``"reverse_kl"``: from the
    draft's distribution to the target's.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective is {objective!r}; choose one of {get_args(Objective)}")
    p = target.float().log_softmax(-1)
    return _apart(objective, draft.float().log_softmax(-1), p, p.exp())


def _apart(objective: Objective, q: Tensor, p: Tensor, distribution: Tensor) -> Tensor:
    """Do the same for log-probabilities; ``distribution`` is ``p.exp()``, which all steps share."""
    if objective == "ce":
        return -q.gather(-1, p.argmax(-1, keepdim=True))[..., 0]
    if objective == "reverse_kl":
        return cast(Tensor, torch.linalg.vecdot(q.exp(), q - p))
    kl: Tensor = torch.linalg.vecdot(distribution, p - q)
    if objective == "kl":
        return kl
    tv = 1 - torch.minimum(distribution, q.exp()).sum(-1)
    if objective == "tv":
        return tv
    share = (-LK_DECAY * (1 - tv.detach())).exp()
    return share * kl + (1 - share) * tv


# -- which rows count -------------------------------------------------------------------------------------------------


def taught_rows(answers: Tensor, steps: int, document_ids: Tensor | None = None) -> Tensor:
    """Mark the rows that count at each step, (steps, batch, length - 1), for ``answers`` (batch, length).

    A row counts if a drafter could stand there: from the token it starts behind to the one it guesses, all are answers
    of one document. The first token of an answer is none of its guesses, because prefill gives that one.
    """
    answers = answers.bool()
    length = answers.shape[1]
    documents = torch.zeros_like(answers, dtype=torch.long) if document_ids is None else document_ids
    counted = answers[:, 1:] & (documents[:, 1:] == documents[:, :-1])  # the token the row starts behind
    marks = []
    for step in range(steps):
        guessed = torch.zeros_like(counted)
        if step + 2 < length:
            same = documents[:, step + 2 :] == documents[:, : -step - 2]
            guessed[:, : length - step - 2] = answers[:, step + 2 :] & same
        counted = counted & guessed
        marks.append(counted)
    return torch.stack(marks)


def row_shares(rows: Tensor, normalizer: Normalizer, document_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each row's share (steps, batch, length - 1) and what the shares of a step are to be divided by, (steps,).

    ``"token"``: every row the same. ``"sequence"``: every document the same, however long. Divisors of several batches
    add up, so that accumulated and distributed batches weigh as one.
    """
    if normalizer == "token":
        return rows.float(), rows.sum((1, 2)).float()
    if document_ids is None:
        document = torch.zeros(rows.shape[1:], dtype=torch.long, device=rows.device)
    else:
        change = functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
        document = change.long().cumsum(1)[:, :-1]  # (batch, length - 1), numbered from 0
    document = document.expand_as(rows)
    counts = torch.zeros(*rows.shape[:2], rows.shape[2] + 1, device=rows.device)
    counts = counts.scatter_add(2, document, rows.float())  # (steps, batch, documents)
    shares = rows / counts.gather(2, document).clamp(min=1)
    return shares, (counts > 0).sum((1, 2)).float()


# -- the loss, in chunks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exam:
    """Hold what the rows of a batch should know: the target's last ``hidden`` states (rows, target hidden).

    ``sources`` (rows,) of each step say where the draft's states about them are. ``shares`` (steps, rows) weigh them;
    0 leaves one out.
    """

    sources: list[Tensor]
    hidden: Tensor
    shares: Tensor


@dataclass(frozen=True)
class Marks:
    """Say how the rows did; all but ``losses`` are (steps, ...rows).

    ``losses`` (steps,) are weighted sums, ``right`` tells whether the draft's best token is the target's, ``overlap``
    how often a sampled guess would be accepted, ``inside`` whether the draft can guess the target's best token at all.
    """

    losses: Tensor
    right: Tensor
    overlap: Tensor
    inside: Tensor


@dataclass(frozen=True)
class Distribution:
    """Hold what the target says at some rows; all but the last two are (rows, draft vocabulary).

    ``p`` are log-probabilities within the draft vocabulary and ``within`` their exponentials, ``whole`` are the same
    tokens' probabilities within the target's vocabulary. ``best`` (rows,) is its best token, and ``inside`` tells
    whether the loss counts the row.
    """

    p: Tensor
    within: Tensor
    whole: Tensor
    best: Tensor
    inside: Tensor


@dataclass(frozen=True)
class Examiner:
    """Compare a draft's distributions with the target's, ``chunk`` rows of a step at a time.

    ``draft_head(step, states)`` gives logits over the draft vocabulary and ``target_head(hidden)`` over the target's;
    ``target_ids`` (draft vocabulary,) maps one to the other, ``None`` if they are the same. ``outside`` says what
    becomes of rows where the target's best token is none that the draft can guess: ``"drop"`` leaves them out of the
    loss and counts them wrong; ``"keep"`` looks at the draft vocabulary alone, as the speculators library does.
    """

    draft_head: Callable[[int, Tensor], Tensor]
    target_head: Callable[[Tensor], Tensor]
    target_ids: Tensor | None = None
    objective: Objective = "kl"
    outside: Outside = "drop"
    chunk: int = 256

    def mark(
        self, states: Sequence[Tensor], hidden: Tensor, shares: Tensor, trained: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Marks]:
        """Return the loss, with gradients for ``states`` and the head's ``trained`` parameters, and the marks by row.

        ``states`` (batch, length - 1, hidden) of each step are what the draft's head reads, ``hidden`` (batch, length,
        target hidden) the target's last hidden states, ``shares`` (steps, batch, length - 1) the weights of the rows.
        """
        # Shifted by its step, every row stands at the position of the target whose distribution it guesses.
        wanted = _shift(shares, 1).flatten(1)  # (steps, batch * rows)
        column = (wanted > 0).any(0).nonzero()[:, 0]
        if not len(column):  # the loss is zero, but every process of a distributed run needs a gradient
            column = column.new_zeros(1)
        length = hidden.shape[1] - 1
        sources = [column - column % length + (column % length - step) % length for step in range(len(states))]
        exam = Exam(sources, hidden[:, 1:].flatten(0, 1)[column], wanted[:, column])
        marks: list[Marks] = []
        learning = [parameter for parameter in trained if parameter.requires_grad]
        learns, apply = torch.is_grad_enabled(), cast(Any, _InChunks.apply)
        loss: Tensor = apply(self, exam, marks, learns, *(state.flatten(0, 1) for state in states), *learning)

        def by_row(name: str) -> Tensor:
            found = torch.cat([getattr(mark, name) for mark in marks], dim=1)
            placed = found.new_zeros(wanted.shape).index_copy(1, column, found)
            return _shift(placed.unflatten(1, shares.shape[1:]), -1)

        losses = torch.stack([mark.losses for mark in marks]).sum(0)
        return loss, Marks(losses, by_row("right"), by_row("overlap"), by_row("inside"))

    @torch.no_grad()
    def distribution(self, hidden: Tensor) -> Distribution:
        """Return what the target says at a few rows, of last hidden states (rows, target hidden)."""
        logits = self.target_head(hidden).float()  # (rows, vocabulary)
        best, mass = logits.argmax(-1), logits.logsumexp(-1)
        if self.target_ids is not None:
            logits = logits[:, self.target_ids]
        inside = torch.ones_like(best, dtype=torch.bool)
        if self.target_ids is not None and self.outside == "drop":
            inside = torch.isin(best, self.target_ids)
        elif self.target_ids is not None:
            best, mass = self.target_ids[logits.argmax(-1)], logits.logsumexp(-1)
        p = logits.log_softmax(-1)  # (rows, draft vocabulary)
        within = p.exp()
        return Distribution(
            p, within, within if self.target_ids is None else (logits - mass[:, None]).exp(), best, inside
        )

    def mark_step(
        self, distribution: Distribution, step: int, states: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of a few rows of a step, with gradients by autograd, and what is right and overlaps."""
        q = self.draft_head(step, states).float().log_softmax(-1)  # (rows, draft vocabulary)
        loss = (_apart(self.objective, q, distribution.p, distribution.within) * shares * distribution.inside).sum()
        with torch.no_grad():
            first = q.max(-1).indices
            right = (first if self.target_ids is None else self.target_ids[first]) == distribution.best
            return loss, right, torch.minimum(distribution.whole, q.exp()).sum(-1)


def _shift(by_step: Tensor, direction: int) -> Tensor:
    """Move the rows of step k by k, (steps, batch, rows)."""
    return torch.stack([rows.roll(direction * step, -1) for step, rows in enumerate(by_step)])


class _InChunks(torch.autograd.Function):
    """Work out loss and gradient chunk by chunk in one go, so that no logits outlive their chunk."""

    @staticmethod
    def forward(ctx: Any, examiner: Examiner, exam: Exam, marks: list[Marks], learns: bool, *given: Tensor) -> Tensor:
        # Shares are far below 1; scaled up, what flows back does not vanish in half precision.
        scale = float(exam.shares.max().clamp(min=torch.finfo(torch.float32).tiny))
        total = given[0].new_zeros((), dtype=torch.float32)
        steps = len(exam.sources)
        gradients, trained = [torch.zeros_like(tensor) for tensor in given], given[steps:]
        for start in range(0, len(exam.hidden), examiner.chunk):
            rows = slice(start, start + examiner.chunk)
            distribution, seen = examiner.distribution(exam.hidden[rows]), []
            for step in range(steps):  # one by one: logits of other steps are gone, or not there yet
                source = exam.sources[step][rows]
                with torch.set_grad_enabled(learns):
                    part = given[step][source].detach().requires_grad_(learns)
                    loss, *mark = examiner.mark_step(distribution, step, part, exam.shares[step, rows] / scale)
                seen.append((loss.detach() * scale, *mark))
                if learns:
                    gradients[step][source], *found = torch.autograd.grad(loss, [part, *trained], allow_unused=True)
                    for gradient, more in zip(gradients[steps:], found, strict=True):
                        if more is not None:  # a head of another step
                            gradient += more
            losses, right, overlap = (torch.stack(column) for column in zip(*seen, strict=True))
            marks.append(Marks(losses, right, overlap, distribution.inside.expand(steps, -1)))
            total += losses.sum()
        ctx.scale = scale
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = gradient * ctx.scale
        return None, None, None, None, *(found.mul_(factor) for found in ctx.saved_tensors)
