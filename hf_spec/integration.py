"""Teach ``generate`` the keyword ``speculator``."""

from __future__ import annotations

import functools
import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .checkpoints.kinds import register_auto_classes
from .checkpoints.resolve import as_speculator, base_model
from .configuration import SpeculationConfig
from .decoding.loop import SpeculativeDecoding
from .decoding.refusals import refuse_cache
from .scoring.masks import unhook_masks

_defaults: WeakKeyDictionary[PreTrainedModel, tuple[Any, SpeculationConfig | None]] = WeakKeyDictionary()


def set_speculator(model: PreTrainedModel, speculator: Any, config: SpeculationConfig | None = None) -> None:
    """Let every ``generate`` call of ``model`` use ``speculator``; ``None`` goes back to plain generation.

    Nothing is stored on the model. A call's own ``speculator=``, ``assistant_model=`` or ``custom_generate=`` comes
    first; ``speculator=False`` turns it off once.
    """
    model = base_model(model)
    if speculator is None:
        _defaults.pop(model, None)
    else:
        found = as_speculator(speculator, model)
        found.check(model, found.settings(config))
        _defaults[model] = (speculator, config)


def install() -> None:
    """Teach ``generate`` its new keywords, and AutoModel what drafts are.

    The keywords are ``speculator``, ``speculation_config`` and ``num_speculative_tokens``; calls without a speculator
    are passed on untouched. Runs on ``import hf_spec`` and may be called again.
    """
    if not hasattr(GenerationMixin.generate, "_hf_spec_original"):
        register_auto_classes()
        GenerationMixin.generate = _speculative(GenerationMixin.generate)  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo ``install``: ``generate`` and the mask functions of transformers are its own again."""
    GenerationMixin.generate = getattr(  # type: ignore[method-assign]
        GenerationMixin.generate, "_hf_spec_original", GenerationMixin.generate
    )
    unhook_masks()


def _speculative(plain: Any) -> Any:
    names = list(inspect.signature(plain).parameters)[1:]

    @functools.wraps(plain)
    def generate(
        self: Any,
        *args: Any,
        speculator: Any = None,
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | str | None = None,
        **kwargs: Any,
    ) -> Any:
        hook = kwargs.get("custom_generate")
        if speculator is None and hook is None and kwargs.get("assistant_model") is None:
            speculator, speculation_config = _default(self, speculation_config)
        elif speculator is None and isinstance(hook, SpeculativeDecoding):  # let it have what transformers drops
            del kwargs["custom_generate"]
            speculator, speculation_config = hook.speculator, speculation_config or hook.config
            kwargs = {"streamer": hook.streamer, "tokenizer": hook.tokenizer} | kwargs
        if speculator is None or speculator is False:
            if speculation_config is not None or num_speculative_tokens is not None:
                raise ValueError(
                    "speculation_config and num_speculative_tokens need a speculator; pass speculator=..."
                )
            return plain(self, *args, **kwargs)
        kwargs |= dict(zip(names, args, strict=False))
        _refuse_other_ways(self, kwargs)
        speculator, tokenizer = as_speculator(speculator, self), kwargs.pop("tokenizer", None)
        decoding = SpeculativeDecoding(
            speculator, speculation_config, streamer=kwargs.pop("streamer", None), tokenizer=tokenizer
        )
        if num_speculative_tokens is not None:
            decoding.config = speculator.settings(decoding.config, num_speculative_tokens=num_speculative_tokens)
        return plain(self, **_with_stop_strings(self, kwargs, tokenizer) | {"custom_generate": decoding})

    generate._hf_spec_original = plain  # type: ignore[attr-defined]
    return generate


def _default(model: Any, config: SpeculationConfig | None) -> tuple[Any, SpeculationConfig | None]:
    speculator, default_config = _defaults.get(model, (None, None))
    return speculator, config or default_config


def _refuse_other_ways(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError for what transformers would do, or drop, before the loop is asked."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; a speculator needs a decoder-only target. "
            "Drop `speculator`."
        )
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`speculator` and `{name}` are two ways of decoding; pass one of them.")
    if _synced(model, kwargs.get("synced_gpus")):
        raise ValueError(
            "synced_gpus (which FSDP and ZeRO-3 over several processes imply) needs the same number of forwards on "
            "every process, which speculation cannot promise. Generate without `speculator`, or gather the model."
        )
    refuse_cache(_option(model, kwargs, "cache_implementation"))  # before transformers makes it
    if _option(model, kwargs, "token_healing"):
        raise ValueError(
            "token_healing: transformers keeps the tokenizer from a `custom_generate` callable. Heal the prompt "
            "first: input_ids = model.heal_tokens(input_ids, tokenizer)."
        )


def _synced(model: PreTrainedModel, asked: bool | None) -> bool:
    """Tell whether transformers would keep processes in step: as asked, else where the model is spread over them."""
    if asked is not None:
        return asked
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    spread = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return several and torch.distributed.get_world_size() > 1 and bool(spread)


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Turn ``stop_strings`` into a criterion: transformers keeps the tokenizer from a ``custom_generate`` call."""
    strings = _option(model, kwargs, "stop_strings")
    if not strings:
        return kwargs
    if tokenizer is None:
        raise ValueError("stop_strings needs the model's tokenizer: generate(..., tokenizer=tokenizer).")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(one) is StopStringCriteria for one in criteria):  # the caller's own one takes precedence
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**kwargs, "stopping_criteria": criteria, "stop_strings": None}


def _option(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """Look an option up where transformers does: in the call, in its configuration, in the model's."""
    if name in kwargs:  # None turns off what the configurations ask for
        return kwargs[name]
    found = (getattr(config, name, None) for config in (kwargs.get("generation_config"), model.generation_config))
    return next((value for value in found if value is not None), None)
