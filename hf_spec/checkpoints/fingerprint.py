"""Digests of the models and tokenizers that data were made with, to refuse additions to data of another origin."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..invariance.mode import is_invariant
from ..packing.weight import values_of
from ..scoring.adapters import state_of_adapters
from ..scoring.features import decoder_of
from ..scoring.plain import input_device

SAMPLE = 64  # about how many values of each weight a digest includes
# Keys of a config that do not change the forward.
PASSING = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")
DIFFERENCES = {
    "config": "the target's config differs",
    "ends": "the target's embeddings or output layer differ",
    "body": "the target's layers differ",
    "adapters": "the target's active adapters or their scaling differ, or were not recorded",
    "tokenizer": "the tokenizer differs",
    "dataset": "the dataset differs",
}
SWITCHES = {  # settings that are recorded where they are on: what off and on mean
    "invariant": ("outside of the exact mode", "in the exact mode (--invariant, hf_spec.invariant)"),
    "no_pack": ("with packed weights", "without packed weights (--no-pack)"),
}


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return digests of the config of ``model``, its embeddings and output layer, and its body.

    Only some values of each weight are included. A model without a body has no digest of config and body. Only a
    model with adapters of PEFT has an entry for those that are active.
    """
    outside = embeddings_and_head(model)
    found: dict[str, Any] = {"ends": _digest(outside)}
    if has_body(model):
        config = json.dumps(lasting(model.config.to_dict()), sort_keys=True, default=str)
        body: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if name not in outside}
        found |= {"config": hashlib.sha256(config.encode()).hexdigest(), "body": _digest(body)}
        if adapters := _adapters(model):
            found["adapters"] = adapters[0] if all(one == adapters[0] for one in adapters) else adapters
    return found


def digest_of(model: Any) -> str | None:
    """Return the digest of ``model``, or of the model inside a speculator; ``None`` if it has no weights."""
    if isinstance(model, nn.Module):
        return _digest(dict(model.named_parameters()))
    inside = getattr(model, "model", getattr(model, "draft", None))
    return None if inside is None else digest_of(inside)


def has_body(model: Any) -> bool:
    """Tell whether ``model`` has layers, and not only embeddings and an output layer."""
    outside = {id(tensor) for tensor in embeddings_and_head(model).values()}
    return any(id(parameter) not in outside for parameter in decoder_of(model).parameters())


def embeddings_and_head(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers of the embeddings and of all modules outside the body; tied ones once."""
    body = decoder_of(model) if model.base_model is model else model.base_model
    inside = {*body.modules()} - {*model.get_input_embeddings().modules()}
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if module in inside:
            continue
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not any(tensor is other for other in found.values()):
                found[f"{prefix}.{name}"] = tensor
    return found


def generation_settings(target: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the generation options that are not defaults, as JSON values; a speculator does not change them."""
    given = options.get("generation_config")
    config = copy.deepcopy(target.generation_config if given is None else given)
    if given is not None:  # what it leaves open, such as the end of the text, is the model's
        config.update(**target.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**options)
    found = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    settings: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return settings


def differences(made_from: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """List the differences between ``made_from`` and ``wanted``; an unknown tokenizer is no difference."""
    found = []
    for name, value in wanted.items():
        have = made_from.get(name)
        if have == value or (name == "tokenizer" and None in (have, value)):
            continue
        if name in SWITCHES:
            before, now = (SWITCHES[name][bool(one)] for one in (have, value))
            found.append(f"it was {before}, not {now}")
        else:
            found.append(DIFFERENCES.get(name, f"{name} was {in_words(have)}, not {in_words(value)}"))
    return found


def computing(model: Any, no_pack: bool = False) -> dict[str, bool]:
    """Return what changes the bits of ``model``'s sums: its exact mode, and ``no_pack`` on a CPU; only what is on."""
    found = {"invariant": is_invariant(model), "no_pack": no_pack and input_device(model).type == "cpu"}
    return {name: True for name, on in found.items() if on}


def in_words(value: Any) -> str:
    """Write the value of a setting for people."""
    return "left out" if value is None else str(value)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of the vocabulary of ``tokenizer`` and its chat template."""
    return _json_digest([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of the vocabulary of ``tokenizer``: if it is equal, ids mean the same tokens."""
    return _json_digest(sorted(tokenizer.get_vocab().items()))


def lasting(config: Any) -> Any:
    """Drop the keys of a config (a dict) that do not change the forward."""
    if not isinstance(config, dict):
        return config
    return {name: lasting(value) for name, value in config.items() if name not in PASSING}


def _adapters(model: nn.Module) -> list[dict[str, float | None]]:
    """Return the scaling of the active adapters of PEFT, for each layer that has adapters."""
    found = []
    for own in map(vars, model.modules() if hasattr(model, "peft_config") else ()):
        if "_active_adapter" in own:
            names, is_disabled, _ = state_of_adapters(own)
            known = scaling if isinstance(scaling := own.get("scaling"), dict) else {}
            found.append({name: float(known[name]) if name in known else None for name in names if not is_disabled})
    return found


def _json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta and tensor.numel():
            values = values_of(tensor).flatten()[:: max(1, tensor.numel() // SAMPLE)]
            digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()
