"""DFlash2 drafts (z-lab and Inco AI, August 2026): DFlash with convolutions over its slots and a selector of pairs.

Before and after each sublayer, a convolution mixes a slot with the slots before it in its block. After the layers, a
selector scores pairs of neighbouring tokens among the best candidates of their slots::

    slots        h0           h1              h2
                  │            │               │
    candidates    ·         a a' a''        b b' b''
    root ───────────── pair ──── a ─── pair ──── b          score of b after a: its logit, and A[a] * (W h2) · B[b]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ...policy.cost import ModelShape
from ..base import DraftContext, DraftOutput, draft_log_probs
from ..block_drafting import BlockGrowth
from ..block_files import engines
from ..blocks import BlockDraftModel
from ..files import Checkpoint
from .configuration import DFlash2SpeculatorConfig
from .formats import FORMATS, write_flat_dflash2


class BlockConvolution(nn.Module):
    """The convolutions before and after a sublayer: fixed kernels, and a part of them that depends on the slot.

    ``base_kernel`` is (2, taps, hidden). ``kernel_projection`` gives the other part for each group of channels.
    """

    def __init__(self, config: DFlash2SpeculatorConfig) -> None:
        super().__init__()
        size, self.taps, self.group = config.layers.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.slots = config.block_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * self.taps * (size // self.group), bias=False)

    def kernels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels of both sides, (batch, length, taps, hidden), by the sublayer's input ``states``."""
        own = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (self.base_kernel + own).unbind(-3)
        return before, after

    def forward(self, states: Tensor, kernel: Tensor) -> Tensor:
        """Convolve ``states`` (batch, blocks x slots, hidden); nothing is before the first slot of a block."""
        slots = min(self.slots, states.shape[1])  # several blocks are whole ones
        blocks = states.unflatten(1, (-1, slots))
        mixed = torch.zeros_like(blocks)
        for tap, weights in enumerate(kernel.unflatten(1, (-1, slots)).unbind(-2)):
            mixed = mixed + weights * functional.pad(blocks, (0, 0, tap, 0))[:, :, :slots]
        return mixed.flatten(1, 2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """A decoder layer of Qwen3 with convolutions around attention and MLP; its context passes none."""

    def __init__(self, config: DFlash2SpeculatorConfig, layer: int) -> None:
        super().__init__(cast(Any, config.layers), layer)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Run the layer on ``hidden_states`` (batch, blocks x slots, hidden)."""
        normed = self.input_layernorm(hidden_states)
        before, after = self.attention_conv.kernels(normed)
        attended, _ = self.self_attn(hidden_states=self.attention_conv(normed, before), **given)
        hidden_states = hidden_states + self.attention_conv(attended, after)
        normed = self.post_attention_layernorm(hidden_states)
        before, after = self.mlp_conv.kernels(normed)
        return cast(Tensor, hidden_states + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after))


class CandidateSelector(nn.Module):
    """Scores of pairs of neighbouring tokens: an embedding of each, weighted by the second one's slot."""

    def __init__(self, config: DFlash2SpeculatorConfig) -> None:
        super().__init__()
        shape = config.layers.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(config.layers.hidden_size, config.selector_rank, bias=False)


class SelectorGrowth(BlockGrowth):
    """The distributions of one block: over the candidates of each slot, given the token before."""

    def __init__(self, draft: DFlash2DraftModel, request: DraftContext, root: Tensor, output: DraftOutput) -> None:
        assert output.logits is not None
        assert output.hidden_states is not None
        self._draft, self._request = draft, request
        hidden = output.hidden_states[:, output.hidden_states.shape[1] - output.logits.shape[1] :]
        selector = draft.candidate_selector
        self._values, self._candidates = output.logits.topk(draft.config.selector_top_k)  # (batch, depths, k)
        self._weights = selector.hidden_projection(hidden)  # (batch, depths, rank)
        self._successors = selector.successor_codebook[self._candidates]  # (batch, depths, k, rank)
        self.first = self.step(root[:, None], 0, None, None)[:, 0]

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Return the log-probabilities after new nodes ``tokens`` (batch, new); -inf for what is no candidate."""
        before = self._draft.candidate_selector.predecessor_codebook[tokens] * self._weights[:, depth, None]
        pairs = before @ self._successors[:, depth].mT  # (batch, new, k)
        scores = self._values[:, depth, None] + pairs.to(self._values)
        size = self._draft.config.layers.vocab_size
        whole = scores.new_full((*scores.shape[:2], size), -torch.inf)
        candidates = self._candidates[:, depth, None].expand_as(scores)
        return draft_log_probs(self._draft, self._request, whole.scatter(2, candidates, scores))


class DFlash2DraftModel(BlockDraftModel):
    """A DFlash2 draft with any flags (see ``DFlash2SpeculatorConfig``); ``forward`` returns logits without pairs."""

    config_class = DFlash2SpeculatorConfig
    config: DFlash2SpeculatorConfig
    formats = FORMATS
    layouts = {"dflash": write_flat_dflash2}  # noqa: RUF012
    vllm_method = "dflash"
    growth = SelectorGrowth
    _no_split_modules = [*BlockDraftModel._no_split_modules, "ConvolvedLayer"]  # noqa: RUF012

    def __init__(self, config: DFlash2SpeculatorConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(ConvolvedLayer(config, i) for i in range(config.layers.num_hidden_layers))
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List the forward of the block, and a choice among the candidates for each draft token."""
        block = super().draft_work(target)
        return lambda length: [*block(length), *[ModelShape(1, 0)] * length]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):  # which change nothing at first
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=0.02)
            init.zeros_(module.successor_codebook)

    def trained_states(self, hidden: Tensor, input_ids: Tensor, roots: Tensor) -> Tensor:
        """Return each slot's hidden state, and after it what the selector makes of that and the true token before."""
        drafting = super().trained_states(hidden, input_ids, roots)  # (batch, blocks, draft tokens, hidden)
        place = roots[..., None] + torch.arange(drafting.shape[2], device=roots.device)
        before = input_ids.gather(1, place.flatten(1).clamp(max=input_ids.shape[1] - 1)).view_as(place)
        selector = self.candidate_selector
        pairs = selector.predecessor_codebook[before] * selector.hidden_projection(drafting)
        return torch.cat([drafting, pairs], dim=-1)

    def trained_logits(self, states: Tensor) -> Tensor:
        return self.logits(states[..., : self.layer_config.hidden_size])

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        return [*super().trained_parameters, self.candidate_selector.successor_codebook]

    @property
    def trained_selector(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        return self._select

    def _select(self, states: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Score the candidates of n slots, (n, k), and find the ``labels`` (n,) among them.

        A label that is missing replaces the last candidate, as in the speculators library.
        """
        candidates = logits.detach().topk(self.config.selector_top_k).indices
        missing = (candidates != labels[:, None]).all(-1)
        candidates[:, -1] = torch.where(missing, labels, candidates[:, -1])
        pairs = states[:, None, self.layer_config.hidden_size :]  # (n, 1, rank)
        found = (pairs * self.candidate_selector.successor_codebook[candidates]).sum(-1)
        return logits.gather(1, candidates) + found, (candidates == labels[:, None]).long().argmax(-1)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return engines(config, checkpoint, [], "dflash")
