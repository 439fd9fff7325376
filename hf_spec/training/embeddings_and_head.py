"""The target's embeddings and output layer without its body: all that training needs if its states are cached."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ..checkpoints.fingerprint import embeddings_and_head
from ..scoring.features import decoder_of
from ..untrusted import check_ends
from .teacher import Reader

# Names on disk are as they were first written: "ends" means embeddings and output layer.
WEIGHTS = "ends.safetensors"


def save_embeddings_and_head(model: PreTrainedModel, directory: Path) -> None:
    """Write the config, the embeddings and everything after the body of ``model``.

    Errors: a ValueError if that is not enough to compute logits from a last hidden state.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
        raise ValueError(f"the output layer of {type(model).__name__} is absent, offloaded or quantized")
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in embeddings_and_head(model).items()}
    content = save(tensors, {"name_or_path": config.name_or_path or ""})
    (directory / WEIGHTS).write_bytes(content)  # unlike save_file, raises an OSError if the disk is full
    hidden = torch.randn(4, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(0))
    try:
        found, expected = (_logits(one, hidden) for one in (load_embeddings_and_head(directory), model))
    except Exception as error:  # an unforeseen architecture may need more and fail in any way
        raise ValueError(f"the logits of {type(model).__name__} take more than its output layer ({error})") from error
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(f"the logits of {type(model).__name__} take more than its output layer")


@torch.no_grad()
def _logits(model: Any, hidden: Tensor) -> Tensor:
    return Reader(model).logits(hidden.to(model.get_output_embeddings().weight)).float().cpu()


def load_embeddings_and_head(directory: Path) -> Any:
    """Load what ``save_embeddings_and_head`` wrote: a model that embeds and computes logits but runs no layers."""
    check_ends(directory / WEIGHTS)
    config = AutoConfig.from_pretrained(directory)
    kind: Any = getattr(transformers, config.architectures[0], None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(f"{config.architectures[0]} is no model of transformers")
    with torch.device("meta"):
        model = kind._from_config(config)
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config.name_or_path = file.metadata()["name_or_path"]  # where the target was loaded from, for draft and card
    wanted = embeddings_and_head(model)
    if {name: one.shape for name, one in found.items()} != {name: one.shape for name, one in wanted.items()}:
        raise ValueError(f"the embeddings and the output layer are other modules than {kind.__name__} has")
    real = {
        id(tensor): nn.Parameter(found[name], requires_grad=False) if isinstance(tensor, nn.Parameter) else found[name]
        for name, tensor in wanted.items()
    }
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: real.get(id(tensor)) for name, tensor in tensors.items()})
    decoder_of(model).forward = _refuse
    return model.eval()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "this target has no layers, only the embeddings and the output layer that a feature cache keeps: load the "
        "complete one to read or generate text"
    )
