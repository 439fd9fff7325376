"""Sharding of a draft by FSDP, as one unit: a training forward needs all weights, from the first layer to the loss.

FSDP gathers the weights of a wrapped module for that module's own forward only. Training reads the output layer's
weights outside of it, where it computes their gradient chunk by chunk.
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
    """Tell whether a process may hold only a part of a matrix: with FSDP or DeepSpeed."""
    return is_asked_for(args) or bool(args.deepspeed) or _launched_with("DEEPSPEED")


def check_complete_matrices(args: TrainingArguments) -> None:
    """Raise a ValueError if a process may hold only a part of a matrix, of which Muon could not take a step."""
    if splits_matrices(args):
        raise ValueError(
            "Muon needs complete matrices, and FSDP and DeepSpeed give each process a part of them: leave "
            "muon_learning_rate out, or train without sharding"
        )


def _launched_with(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() in ("true", "1")


def set_up(plugin: Any) -> None:
    """Let accelerate shard the model as one unit, not its submodules. Errors: a ValueError for FSDP 1."""
    if plugin.fsdp_version != 2:
        raise ValueError(f"drafts are sharded by FSDP 2, not by FSDP {plugin.fsdp_version}: set fsdp_version to 2")
    plugin.auto_wrap_policy = None
    # Of shards alone, Trainer would write no draft at the end. The settings of shards would not fit whole files.
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.cpu_ram_efficient_loading = False  # not needed, as each process has the draft; and it loses buffers (d2t)


def hide_embeddings_and_head(model: Any) -> None:
    """Keep accelerate from wrapping embeddings and output layer: it finds them by these methods of ``model``."""
    model.get_input_embeddings = model.get_output_embeddings = lambda: None


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights of ``model`` on every process, so that each may run it any number of times."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
