"""What training needs of a target whose states are cached: its embeddings and its output layer, without its body."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .teacher import Reader

WEIGHTS = "ends.safetensors"
SAMPLE = 64  # values of each weight that a fingerprint looks at
PASSING = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")  # changes no forward


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Return digests of what ``model`` computes with: its config, its embeddings and output layer, and its body.

    Of each weight only some values are looked at. A model without a body has only the digest of its ``ends``.
    """
    found = {"ends": _digest(_tensors(model))}
    if has_body(model):
        config = json.dumps(_lasting(model.config.to_dict()), sort_keys=True, default=str)
        ends = _of_ends(model)
        body: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if id(tensor) not in ends}
        found |= {"config": hashlib.sha256(config.encode()).hexdigest(), "body": _digest(body)}
    return found


def has_body(model: Any) -> bool:
    """Tell whether ``model`` has more weights than embeddings and an output layer, so that it can read a text."""
    ends = _of_ends(model)
    return any(id(parameter) not in ends for parameter in model.get_decoder().parameters())


def save_ends(model: PreTrainedModel, directory: Path) -> None:
    """Write the config, the embeddings and the output layer of ``model``.

    Errors: a ValueError if that is not enough to work out the logits of a last hidden state.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
        raise ValueError(f"the output layer of {type(model).__name__} is absent, offloaded or quantized")
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    (directory / WEIGHTS).write_bytes(save(tensors))  # an OSError if the disk is full
    hidden = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = (
            Reader(one).logits(hidden.to(one.device, one.dtype)).float().cpu() for one in (load_ends(directory), model)
        )
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(f"the output layer of {type(model).__name__} alone does not give its logits")


def load_ends(directory: Path) -> Any:
    """Load what ``save_ends`` wrote as a model with nothing else: it embeds and gives logits, but reads no text."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = load_file(directory / WEIGHTS)
    if found.keys() != _tensors(model).keys():
        raise ValueError(f"the embeddings and the output layer are other modules than {type(model).__name__} has")
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            kind.update(dict.fromkeys(kind))
    for role, module in _ends(model).items():
        for name in [name for name in found if name.startswith(f"{role}.")]:
            _place(module, name.removeprefix(f"{role}."), found[name])
    if "head.weight" not in found:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.get_decoder().forward = _refuse
    return model.eval().requires_grad_(False)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "this target has no layers, only the embeddings and the output layer that a feature cache keeps: load the "
        "whole one to read or generate text"
    )


def _ends(model: Any) -> dict[str, nn.Module]:
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    return {role: module for role, module in ends.items() if module is not None}


def _of_ends(model: Any) -> set[int]:
    return {id(parameter) for module in _ends(model).values() for parameter in module.parameters()}


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and buffers of both ends; a tied one stands with the embeddings only."""
    tensors: dict[str, Tensor] = {}
    for role, module in _ends(model).items():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not any(tensor is other for other in tensors.values()):
                tensors[f"{role}.{name}"] = tensor
    return tensors


def _place(module: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, name = name.rpartition(".")
    module = module.get_submodule(parent)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


def _lasting(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _lasting(value) for name, value in config.items() if name not in PASSING}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta and tensor.numel():
            values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLE)]
            digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()
