"""DSpark drafts (arXiv 2607.05147): a block draft, a Markov head over its slots, and a confidence head.

The slots of a block run in one forward, so none knows the draft tokens of the others. The Markov head compensates: the
embedding of each draft token corrects the logits of the next slot::

    slots   h0            h1             h2
             │             │              │
    root ─ correct ─ a ─ correct ─ b ── correct ─ c        after another token a', slot 1 predicts something else
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ...policy.cost import ModelShape
from ..base import DraftContext, DraftOutput, draft_log_probs
from ..block_drafting import BlockGrowth
from ..block_files import engines
from ..blocks import BlockDraftModel
from ..files import Checkpoint
from ..trees import at_depth
from .configuration import DSparkSpeculatorConfig
from .formats import FORMATS, is_modelopt, write_deepspec


class Reading(NamedTuple):
    """The output of the Markov head for a token and the slot after it, each (..., rank).

    ``token`` is the token's embedding. ``markov_w2`` projects ``bias`` to the draft vocabulary. ``state`` is passed to
    the next slot.
    """

    token: Tensor
    bias: Tensor
    state: Tensor


class MarkovHead(nn.Module):
    """A correction by the previous token: an embedding of the target's vocabulary, and a bias over the draft's."""

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
    """A predictor of acceptance: the logit of the probability that a draft token will be accepted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.proj(states)[..., 0])


class MarkovGrowth(BlockGrowth):
    """The distributions of one block, corrected by the draft tokens on the path to each node."""

    def __init__(self, draft: DSparkDraftModel, request: DraftContext, root: Tensor, output: DraftOutput) -> None:
        assert output.logits is not None
        assert output.hidden_states is not None
        self._draft, self._request = draft, request
        unused = output.hidden_states.shape[1] - output.logits.shape[1]
        self._logits = output.logits  # (batch, depths, draft vocabulary)
        self._hidden = output.hidden_states[:, unused:]  # (batch, depths, hidden)
        self._state: Tensor | None = None  # (batch, new, rank) of the Markov head after the root, or the last nodes
        state: Tensor | None = None
        if unused:  # training steps through the slot that predicts nothing, too
            reading, _ = draft.read(root[:, None], output.hidden_states[:, :1])
            state = None if reading is None else reading.state
        self.first = self._log_probs_after(root[:, None], self._logits[:, :1], self._hidden[:, :1], state)[:, 0]

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Return the corrected log-probabilities after new nodes."""
        logits, hidden = (at_depth(one, tokens, depth) for one in (self._logits, self._hidden))
        state = self._state
        if state is not None and parents is None:
            state = state.expand(-1, tokens.shape[1], -1)
        elif state is not None and parents is not None:
            state = state.gather(1, parents[:, :, None].expand(-1, -1, state.shape[-1]))
        return self._log_probs_after(tokens, logits, hidden, state)

    def _log_probs_after(self, tokens: Tensor, logits: Tensor, hidden: Tensor, state: Tensor | None) -> Tensor:
        """Return the log-probabilities (batch, new, vocabulary) after ``tokens`` (batch, new)."""
        reading, confidence = self._draft.read(tokens, hidden, state)
        if reading is not None:
            self._state = reading.state
        if confidence is not None:
            self._confidence = confidence[:, 0].float().sigmoid()  # (batch,), read for chains only
        return draft_log_probs(self._draft, self._request, self._draft.correct(logits, reading))

    @property
    def confidence(self) -> Callable[[], Tensor] | None:
        return None if self._draft.confidence_head is None else lambda: self._confidence


class DSparkDraftModel(BlockDraftModel):
    """A DSpark draft with any flags (see ``DSparkSpeculatorConfig``).

    ``forward`` returns the logits before any correction; ``correct`` adds what ``read`` returns.
    """

    config_class = DSparkSpeculatorConfig
    config: DSparkSpeculatorConfig
    formats = FORMATS
    layouts = {"deepspec": write_deepspec}  # noqa: RUF012
    vllm_method = "dspark"
    growth = MarkovGrowth

    def __init__(self, config: DSparkSpeculatorConfig) -> None:
        super().__init__(config)
        size = config.layers.hidden_size
        vocabulary = config.draft_vocab_size or config.layers.vocab_size
        self.markov_head = MarkovHead(config, vocabulary) if config.markov_rank else None
        width = size + config.markov_rank * config.confidence_head_with_markov
        self.confidence_head = ConfidenceHead(width) if config.enable_confidence_head else None
        self.post_init()

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List the forward of the block, and the Markov head's for each draft token."""
        head = [] if self.markov_head is None else [ModelShape(1, self.markov_head.markov_w2.weight.numel())]
        block = super().draft_work(target)
        return lambda length: [*block(length), *head * length]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MarkovHead):
            init.normal_(module.markov_w1.weight, std=0.01)  # a small correction at first

    def read(
        self, tokens: Tensor, hidden: Tensor, state: Tensor | None = None
    ) -> tuple[Reading | None, Tensor | None]:
        """Run the heads on ``tokens`` (...) and the slots after them, ``hidden`` (..., hidden).

        Returns the output of the Markov head and the logit of the confidence (...); ``None`` for a missing head.
        """
        reading = None if self.markov_head is None else self.markov_head(tokens, hidden, state)
        if self.confidence_head is None:
            return reading, None
        if not self.config.confidence_head_with_markov:
            return reading, self.confidence_head(hidden)
        assert reading is not None
        return reading, self.confidence_head(torch.cat([hidden, reading.token], dim=-1))

    def correct(self, logits: Tensor, reading: Reading | None) -> Tensor:
        """Add the bias of the Markov head to ``logits`` (..., draft vocabulary)."""
        if self.markov_head is None or reading is None:
            return logits
        return logits + cast(Tensor, self.markov_head.markov_w2(reading.bias)).to(logits)

    @property
    def trained_heads(self) -> list[nn.Module]:
        return super().trained_heads + ([] if self.markov_head is None else [self.markov_head.markov_w2])

    def trained_states(self, hidden: Tensor, input_ids: Tensor, roots: Tensor) -> Tensor:
        """Return hidden state, Markov bias after the true token, and confidence, concatenated for each draft token."""
        count, states, state = self.config.num_draft_tokens, [], None
        unused = hidden.shape[2] - count
        for slot in range(hidden.shape[2]):
            place = (roots + max(0, slot - unused)).clamp(max=input_ids.shape[1] - 1)
            reading, confidence = self.read(input_ids.gather(1, place), hidden[:, :, slot], state)
            state = None if reading is None else reading.state
            parts = [hidden[:, :, slot]] + ([] if reading is None else [reading.bias])
            parts += [] if confidence is None else [confidence[..., None]]
            states.append(torch.cat(parts, dim=-1))
        return torch.stack(states[unused:], dim=2)

    def trained_logits(self, states: Tensor) -> Tensor:
        """Compute logits from the hidden states in ``states``, and add the Markov bias stored next to them."""
        size, rank = self.layer_config.hidden_size, self.config.markov_rank
        logits = self.logits(states[..., :size])
        if self.markov_head is None:
            return logits
        return logits + cast(Tensor, self.markov_head.markov_w2(states[..., size : size + rank])).to(logits)

    @property
    def trained_confidence(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.confidence_head is None else lambda states: states[..., -1]

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        simple = config.markov_head_type == "vanilla" or not config.markov_rank
        unserved = ["knows the vanilla Markov head only"] * (not simple)
        found = engines(config, checkpoint, unserved, "deepspec")
        if checkpoint is not None and is_modelopt(checkpoint.tensors):
            found["vLLM"].append("takes it for DFlash; convert to speculators")
            for engine in ("SGLang", "llama.cpp"):
                cure = "convert to deepspec with --self-contained TARGET"
                found[engine].append(f"is not known to read ModelOpt's files of DSpark; {cure}")
        return found
