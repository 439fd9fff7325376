"""Settings that may be wrong in a draft's config: the same weights with each of them changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration import GEMMA
from ..drafts.features import FeatureSpeculatorConfig
from ..drafts.layers import CLASSES, classes_of
from ..drafts.modeling import DraftModel
from ..drafts.mtp.configuration import MTP_FLAGS, MTPSpeculatorConfig

TRAINING_ONLY = "embed_requires_grad"  # has no effect on inference
USUAL_THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # Llama 2, Llama 3, Qwen3


@dataclass(frozen=True)
class Change:
    """A change of a draft's config: ``name`` of the cause, values ``was`` and ``now``, and the changed ``fields``."""

    name: str
    was: str
    now: str
    fields: dict[str, Any]

    def apply(self, draft: DraftModel, target: PreTrainedModel) -> DraftModel | None:
        """Return ``draft`` with this change, sharing its weights; None if it would need other weights."""
        if self.name == "dtype":
            exact: Any = copy.deepcopy(draft)
            return _bound(exact.to(torch.float32), target)
        config = copy.deepcopy(draft.config)
        for field, value in self.fields.items():
            setattr(config.layers if field == "rope_parameters" else config, field, value)
        try:
            config.validate()
            with torch.device("meta"):
                changed: DraftModel = type(draft)(config)  # type: ignore[call-arg]  # kinds count their vocabulary
            missing, left = changed.load_state_dict(draft.state_dict(), strict=False, assign=True)
        except (ValueError, TypeError, RuntimeError):  # such a draft has other weights, or is impossible
            return None
        if missing or left:
            return None
        _make_rotary(changed, draft)
        return None if any(one.is_meta for one in changed.buffers()) else _bound(changed.train(False), target)


def _bound(draft: DraftModel, target: PreTrainedModel) -> DraftModel:
    draft.bind(target)
    return draft


def _make_rotary(changed: DraftModel, draft: DraftModel) -> None:
    """Compute the RoPE frequencies, which no file holds, on the device of ``draft``."""
    layers = changed.config.layers
    if isinstance(getattr(changed, "rotary_emb", None), nn.Module) and layers.model_type in (*CLASSES, GEMMA):
        changed.rotary_emb = classes_of(layers.model_type).rotary(layers).to(draft.device)


def changes(draft: DraftModel, target: PreTrainedModel) -> Iterator[Change]:
    """List changes of settings that may be wrong in ``draft``, one at a time."""
    config = draft.config
    if draft.dtype in (torch.bfloat16, torch.float16):
        yield Change("dtype", str(draft.dtype).removeprefix("torch."), "float32", {})
    if isinstance(config, FeatureSpeculatorConfig):
        yield from _other_layers(config, target.config.get_text_config().num_hidden_layers)
    flags = config.flags if isinstance(config, FeatureSpeculatorConfig) else ()
    flags = MTP_FLAGS if isinstance(config, MTPSpeculatorConfig) else flags
    for name in flags:
        if name == TRAINING_ONLY:
            continue
        value = getattr(config, name)
        yield Change(name, f"{name}={value}", f"{name}={not value}", {name: not value})
    yield from _other_ropes(draft, target)


def _other_layers(config: FeatureSpeculatorConfig, count: int) -> Iterator[Change]:
    """List other target layers: shifted by one, as if outputs were counted and not inputs, reversed, and the usual."""
    field, ids = config.layer_ids_field, list(config.feature_layers(count))
    usual = [[2, count // 2, count - 3]] if len(ids) == 3 and count >= 7 else []
    for other in ([i + 1 for i in ids], [i - 1 for i in ids], ids[::-1], *usual):
        if other != ids and all(0 <= i <= count for i in other):
            yield Change("layer ids", f"{field}={ids}", f"{field}={other}", {field: other})


def _other_ropes(draft: DraftModel, target: PreTrainedModel) -> Iterator[Change]:
    layers = draft.config.layers
    if getattr(layers, "model_type", None) not in CLASSES or not isinstance(rope := layers.rope_parameters, dict):
        return
    of_target = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    thetas = dict.fromkeys(theta for theta in (of_target.get("rope_theta"), *USUAL_THETAS) if theta)
    others = [{"rope_type": "default", "rope_theta": theta} for theta in thetas]
    if of_target.get("rope_type") in ("linear", "llama3", "yarn"):
        others.insert(0, dict(of_target))
    for other in others:
        if other != {name: rope.get(name) for name in other}:
            yield Change("rope", f"rope {rope}", f"rope {other}", {"rope_parameters": other})
