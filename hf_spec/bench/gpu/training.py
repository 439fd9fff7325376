"""Seconds and memory of a training step of an EAGLE-3 draft, on an accelerator with FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

from ...drafts.eagle3.configuration import Eagle3SpeculatorConfig
from ...drafts.eagle3.modeling import Eagle3DraftModel
from ...scoring.widths import now
from ...unroll.feedback import UnrollInput

STEPS, DECAY, VOCABULARY, HEAD = 7, 0.8, 32000, 64
WHOLE = 4 * HEAD  # four query heads share a key head
ATTENTION = {"cuda": "FlexAttention"}


def training_step(
    sizes: tuple[int, int, int] | None, tokens: int, device: str
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """List the cells: one step, forward and backward of seven unrolled steps over given features, one sequence."""
    width, vocabulary = (64, 256) if sizes is None else (-(-sizes[0] // WHOLE) * WHOLE, VOCABULARY)
    name = f"seven unrolled steps, {ATTENTION.get(torch.device(device).type, 'no FlexAttention')}"
    return [(name, lambda: _measure(width, vocabulary, tokens, torch.device(device)))]


def _measure(width: int, vocabulary: int, tokens: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    step = _step(width, vocabulary, tokens, device, dtype)
    step()  # compiles
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(5):
        begin = now(device)
        step()
        seconds.append(now(device) - begin)
    taken = min(seconds)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "seconds": taken,
        "tokens": tokens,
        "tokens_per_second": tokens / taken,
        "peak_bytes": peak,
        "width": width,
    }


def _step(
    width: int, vocabulary: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Return a function that runs one step; its loss is the trainer's own."""
    # Training needs more packages than decoding does; without them, this cell alone fails.
    from ...training.losses import ChunkedLoss, counted_positions, position_weights
    from ...training.unrolling import unrolled

    torch.manual_seed(0)
    layers = LlamaConfig(
        hidden_size=width,
        intermediate_size=(width * 8 // 3 + 63) // 64 * 64,
        num_attention_heads=width // HEAD,
        num_key_value_heads=max(1, width // HEAD // 4),
        head_dim=HEAD,
        num_hidden_layers=1,
        vocab_size=vocabulary,
        max_position_embeddings=tokens + 1,
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=vocabulary, eagle_aux_hidden_state_layer_ids=[1, 2, 3]
    )
    draft: Any = Eagle3DraftModel(config)
    draft.to(device, dtype)
    draft.lm_head.requires_grad_(False)
    ids = torch.randint(0, vocabulary, (1, tokens + 1), device=device)
    features = torch.randn(1, tokens + 1, 3 * width, device=device, dtype=dtype)
    hidden = 0.5 * torch.randn(1, tokens + 1, width, device=device, dtype=dtype)
    head = 0.08 * torch.randn(vocabulary, width, device=device, dtype=dtype)
    weights, divisor = position_weights(counted_positions(torch.ones_like(ids), STEPS), "token")
    decay = DECAY ** torch.arange(STEPS, device=weights.device)
    weights = weights * (decay / divisor)[:, None, None]

    def target_head(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, (width,)) @ head.T

    def run() -> torch.Tensor:
        draft.zero_grad()
        made = unrolled(draft, UnrollInput(ids, None, features), STEPS)
        loss = ChunkedLoss(made.head, target_head).compute(made.states, hidden, weights, made.trained)[0]
        loss.backward()
        return loss

    return run
