"""Relative position biases of the T5 family for draft nodes: by the distance of logical columns.

These decoders count a query's position from the length of the cache. In a ragged batch, or a tree, that is not the
node's own column.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .features import decoder_of
from .masks import open_block

_lock = threading.Lock()
_hooked: dict[Any, Any] = {}  # attention classes, and their own ``compute_bias``


def hook_biases(model: PreTrainedModel) -> None:
    """Wrap ``compute_bias`` of the decoder's attention classes once; without an open block calls pass through."""
    for module in decoder_of(model).modules():
        kind: Any = type(module)
        if getattr(module, "has_relative_attention_bias", False):
            with _lock:
                if kind not in _hooked:
                    _hooked[kind] = kind.compute_bias
                    kind.compute_bias = _of_nodes(kind.compute_bias)


def unhook_biases() -> None:
    """Restore transformers' own biases."""
    while _hooked:
        kind, original = _hooked.popitem()
        kind.compute_bias = original


def _of_nodes(original: Any) -> Any:
    def compute_bias(
        self: Any, query_length: int, key_length: int, device: torch.device | None = None, past_seen_tokens: int = 0
    ) -> Tensor:
        block = open_block()
        if block is None or block.hides_nothing:
            plain: Tensor = original(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
            return plain
        # A query in the last column sees every distance; each node picks its own ones.
        last = key_length - 1
        bias = original(self, 1, key_length, device=device, past_seen_tokens=last)[0, :, 0]  # (heads, columns)
        distance = (block.query[:, :, None] - block.column[:, None]).clamp(0, last)  # (batch, nodes, columns)
        found: Tensor = bias[:, last - distance.to(bias.device)]  # (heads, batch, nodes, columns)
        return found.transpose(0, 1)

    return compute_bias
