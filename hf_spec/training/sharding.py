"""Shard a draft by FSDP: as a whole, for one forward of training needs all weights, from the first layer to the loss.

FSDP gathers the weights of a module that it wraps for that module's own forward only. Training reads the output
layer's weights outside of it, where it works out their gradient chunk by chunk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments


def is_asked_for(args: TrainingArguments) -> bool:
    """Tell whether ``args`` or ``accelerate launch`` ask for FSDP."""
    return bool(args.fsdp) or _launched_with("FSDP")


def splits_matrices(args: TrainingArguments) -> bool:
    """Tell whether a process may have a part of a matrix only: with FSDP, or with DeepSpeed."""
    return is_asked_for(args) or bool(args.deepspeed) or _launched_with("DEEPSPEED")


def _launched_with(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() in ("true", "1")


def set_up(plugin: Any) -> None:
    """Let accelerate shard the model and nothing in it. Errors: a ValueError for FSDP 1."""
    if plugin.fsdp_version != 2:
        raise ValueError(f"drafts are sharded by FSDP 2, not by FSDP {plugin.fsdp_version}: set fsdp_version to 2")
    plugin.auto_wrap_policy = None
    plugin.cpu_ram_efficient_loading = False  # each process has made the draft; that way knows no buffers like d2t


def hide_embeddings_and_head(model: Any) -> None:
    """Keep accelerate from wrapping embeddings and output layer, which it asks ``model`` for."""
    model.get_input_embeddings = model.get_output_embeddings = lambda: None


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have the whole of ``model`` on every process, so that each may run it as often as it likes."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
