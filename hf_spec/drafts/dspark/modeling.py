"""DSpark drafts (arXiv 2607.05147): a block draft, a Markov head over its slots, and one that says when to stop.

The slots of a block speak at once, so that none knows what the others guess. The Markov head makes up for that: when a
guess is in, its embedding corrects what the next slot says::

    slots   h0            h1             h2
             │             │              │
    root ─ correct ─ a ─ correct ─ b ── correct ─ c        behind another first guess a', slot 1 says something else
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..base import DraftContext, Drafter, DraftOutput, guess_log_probs
from ..block_drafting import BlockDrafter, BlockGrowth
from ..block_files import engines
from ..blocks import BlockDraftModel
from ..files import Checkpoint
from ..static import drafter_for
from ..trees import at_depth
from .configuration import DSparkSpeculatorConfig
from .formats import FORMATS, write_deepspec


class Reading(NamedTuple):
    """What the Markov head makes of a token and the slot behind it, each (..., rank).

    ``token`` is the token's embedding, ``bias`` what ``markov_w2`` spreads over the draft vocabulary, ``state`` what
    the next slot is given.
    """

    token: Tensor
    bias: Tensor
    state: Tensor


class MarkovHead(nn.Module):
    """Read the token before a guess: an embedding of the target's vocabulary, and a bias over the draft's."""

    def __init__(self, config: DSparkSpeculatorConfig, draft_vocab_size: int) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.layers.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.layers.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None = None) -> Reading:
        """Read ``tokens`` (...) before slots of ``hidden`` (..., hidden); ``state`` (..., rank) is zero at first."""
        token: Tensor = self.markov_w1(tokens)
        state = torch.zeros_like(token) if state is None else state
        if self.kind == "gated":
            return Reading(token, self.gate_proj(torch.cat([hidden, token], dim=-1)).sigmoid() * token, state)
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, token, hidden], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            return Reading(token, output.tanh(), gate * state + (1 - gate) * candidate.tanh())
        return Reading(token, token, state)


class ConfidenceHead(nn.Module):
    """Say how probable it is that a guess will be accepted, as a logit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.proj(states)[..., 0])


class DSparkDraftModel(BlockDraftModel):
    """Guess with a DSpark draft of any flags (see ``DSparkSpeculatorConfig``).

    ``forward`` gives the logits before any correction; what ``read`` says corrects them, see ``correct``.
    """

    config_class = DSparkSpeculatorConfig
    config: DSparkSpeculatorConfig
    formats = FORMATS
    layouts = {"deepspec": write_deepspec}  # noqa: RUF012
    vllm_method = "dspark"

    def __init__(self, config: DSparkSpeculatorConfig) -> None:
        super().__init__(config)
        size = config.layers.hidden_size
        vocabulary = config.draft_vocab_size or config.layers.vocab_size
        self.markov_head = MarkovHead(config, vocabulary) if config.markov_rank else None
        width = size + config.markov_rank * config.confidence_head_with_markov
        self.confidence_head = ConfidenceHead(width) if config.enable_confidence_head else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MarkovHead):
            init.normal_(module.markov_w1.weight, std=0.01)  # a small correction at first

    def read(
        self, tokens: Tensor, hidden: Tensor, state: Tensor | None = None
    ) -> tuple[Reading | None, Tensor | None]:
        """Read ``tokens`` (...) before guesses of ``hidden`` (..., hidden): what the heads make of them.

        Returns what the Markov head says and the logit of the confidence (...); ``None`` of heads that are not there.
        """
        reading = None if self.markov_head is None else self.markov_head(tokens, hidden, state)
        if self.confidence_head is None:
            return reading, None
        if not self.config.confidence_head_with_markov:
            return reading, self.confidence_head(hidden)
        assert reading is not None
        return reading, self.confidence_head(torch.cat([hidden, reading.token], dim=-1))

    def correct(self, logits: Tensor, reading: Reading | None) -> Tensor:
        """Correct ``logits`` (..., draft vocabulary) by what the Markov head read."""
        if self.markov_head is None or reading is None:
            return logits
        return logits + cast(Tensor, self.markov_head.markov_w2(reading.bias)).to(logits)

    @property
    def trained_heads(self) -> list[nn.Module]:
        return super().trained_heads + ([] if self.markov_head is None else [self.markov_head.markov_w2])

    def trained_states(self, hidden: Tensor, input_ids: Tensor, roots: Tensor) -> Tensor:
        """Return the states beside what the Markov head reads of the true tokens, and the confidence in each guess."""
        guesses, states, state = self.config.num_guesses, [], None
        unused = hidden.shape[2] - guesses
        for slot in range(hidden.shape[2]):
            place = (roots + max(0, slot - unused)).clamp(max=input_ids.shape[1] - 1)
            reading, confidence = self.read(input_ids.gather(1, place), hidden[:, :, slot], state)
            state = None if reading is None else reading.state
            parts = [hidden[:, :, slot]] + ([] if reading is None else [reading.bias])
            parts += [] if confidence is None else [confidence[..., None]]
            states.append(torch.cat(parts, dim=-1))
        return torch.stack(states[unused:], dim=2)

    def trained_logits(self, states: Tensor) -> Tensor:
        """Correct the logits of the first part of ``states`` by the second."""
        size, rank = self.layer_config.hidden_size, self.config.markov_rank
        logits = self.logits(states[..., :size])
        if self.markov_head is None:
            return logits
        return logits + cast(Tensor, self.markov_head.markov_w2(states[..., size : size + rank])).to(logits)

    @property
    def trained_confidence(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.confidence_head is None else lambda states: states[..., -1]

    def drafter(self, request: DraftContext) -> Drafter:
        self.bind(request.target)
        return drafter_for(DSparkDrafter, self, request)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        simple = config.markov_head_type == "vanilla" or not config.markov_rank
        unserved = ["knows the vanilla Markov head only"] * (not simple)
        return engines(config, checkpoint, unserved, "deepspec")


class MarkovGrowth(BlockGrowth):
    """Correct what the slots say by the guesses on the way to each node."""

    def __init__(self, draft: DSparkDraftModel, request: DraftContext, root: Tensor, output: DraftOutput) -> None:
        assert output.logits is not None
        assert output.hidden_states is not None
        self._draft, self._request = draft, request
        unused = output.hidden_states.shape[1] - output.logits.shape[1]
        self._logits = output.logits  # (batch, guesses, draft vocabulary)
        self._hidden = output.hidden_states[:, unused:]  # (batch, guesses, hidden)
        self._state: Tensor | None = None  # (batch, new, rank) of the Markov head behind the root, or the last nodes
        state: Tensor | None = None
        if unused:  # training steps through the slot that guesses nothing, too
            reading, _ = draft.read(root[:, None], output.hidden_states[:, :1])
            state = None if reading is None else reading.state
        self._first = self._behind(root[:, None], self._logits[:, :1], self._hidden[:, :1], state)[:, 0]

    @property
    def first(self) -> Tensor:
        return self._first

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Return the corrected log-probabilities behind new nodes."""
        logits, hidden = (at_depth(one, tokens, depth) for one in (self._logits, self._hidden))
        state = self._state
        if state is not None and parents is None:
            state = state.expand(-1, tokens.shape[1], -1)
        elif state is not None and parents is not None:
            state = state.gather(1, parents[:, :, None].expand(-1, -1, state.shape[-1]))
        return self._behind(tokens, logits, hidden, state)

    def _behind(self, tokens: Tensor, logits: Tensor, hidden: Tensor, state: Tensor | None) -> Tensor:
        """Return the log-probabilities (batch, new, vocabulary) behind ``tokens`` (batch, new)."""
        reading, confidence = self._draft.read(tokens, hidden, state)
        if reading is not None:
            self._state = reading.state
        if confidence is not None:
            self._trust = confidence[:, 0].float().sigmoid()  # (batch,), asked of chains only
        return guess_log_probs(self._draft, self._request, self._draft.correct(logits, reading))

    @property
    def confidence(self) -> Callable[[], Tensor] | None:
        return None if self._draft.confidence_head is None else lambda: self._trust


class DSparkDrafter(BlockDrafter):
    """Keep the context of one call, and let every block say what follows it, corrected guess by guess."""

    growth = MarkovGrowth
