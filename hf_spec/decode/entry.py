"""The way from ``generate`` into the loop, once the speculator is known: refusals, settings, policy, the call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from ..drafts.base import Speculator
from ..drafts.source import Source
from ..parallel import ModelParallelGroup
from ..scoring.names import cache_among
from ..scoring.prompts import Prompt
from ..scoring.selfcheck import check_target
from ..settings import SpeculationConfig, check_settings
from ..verify.stopping import StopChecker
from .draft_length import Situation, draft_length_policy
from .loop import Call, GenerateArguments
from .options import configured, option
from .outputs import SpeculativeEncoderDecoderOutput, SpeculativeOutput
from .refusals import (
    Refusal,
    refuse_before_encoding,
    refuse_cache,
    refuse_call,
    refuse_draft,
    refuse_sharing,
    refuse_source,
    refusing,
)
from .sequences import Sequences

logger = logging.get_logger(__name__)

ENCODED = ("encoder_outputs", "mm_encoder_outputs")  # what a caller's model has encoded before


class Decoding:
    """The loop as a ``custom_generate`` callable of transformers, for a speculator that is ready."""

    def __init__(
        self,
        speculator: Any,
        config: SpeculationConfig | None,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.speculator, self.config, self.streamer, self.tokenizer = speculator, config, streamer, tokenizer

    def speculator_for(self, model: PreTrainedModel) -> Speculator:
        """Return the speculator for ``model``."""
        return cast(Speculator, self.speculator)

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput | SpeculativeEncoderDecoderOutput:
        speculator, input_ids = self.speculator_for(model), input_ids.long()
        config = speculator.settings(self.config)
        ranks = ModelParallelGroup(model)
        stops, pad_token = StopChecker(stopping_criteria, ranks), generation_config._pad_token_tensor
        sequences = Sequences(input_ids, stops, pad_token, self.streamer)
        is_static = isinstance(cache_among(model_kwargs), StaticCache)
        samples, source = bool(generation_config.do_sample), None
        with refusing():
            refuse_call(model, generation_config, model_kwargs, config, sequences)
            refuse_sharing(speculator, model_kwargs)
            refuse_draft(speculator, model, model_kwargs, config, len(input_ids))
            prompt = Prompt.of_call(input_ids, model_kwargs)
            if model.config.is_encoder_decoder:
                prompt = Prompt.of_source(model, model_kwargs, len(input_ids))
                source = Source.of_call(inputs_tensor, model_kwargs, len(input_ids))
                refuse_source(speculator, model, source)
            speculator.check(model, config)
            if config.self_check:
                check_target(model, config.tree is not None, is_static, prompt)
        if generation_config.compile_config is not None:  # warns, as in plain generate, where it changes nothing
            cast(Any, model)._valid_auto_compile_criteria(model_kwargs, generation_config)

        if samples:
            ranks.share_random_numbers(input_ids.device)
        batch, length = input_ids.shape
        situation = Situation(
            model, speculator, samples, batch, length, is_static, ends_together=batch > 1 and not stops.pads
        )
        config, policy = draft_length_policy(config, self.config, situation, ranks)
        arguments = GenerateArguments(generation_config, model_kwargs, logits_processor, self.tokenizer, source)
        return Call(model, speculator, config, policy, sequences, ranks, arguments).run(input_ids)


class Stream(BaseStreamer):
    """Pass on to a user's streamer, and know whether anything was passed on."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.began = inner, False

    def put(self, value: Tensor) -> None:
        self.began = True
        self.inner.put(value)

    def end(self) -> None:
        self.inner.end()


@contextmanager
def streaming(kwargs: dict[str, Any], ends: bool = True) -> Iterator[Stream | None]:
    """Take the streamer out of ``kwargs``, and end it if the call fails before it has got anything, where it ``ends``.

    Who reads it, in another thread, would wait for ever.
    """
    given = kwargs.pop("streamer", None)
    stream = None if given is None else Stream(given)
    try:
        yield stream
    except BaseException:
        if stream is not None and ends and not stream.began:
            stream.end()
        raise


def decode_with(
    plain: Any,
    model: Any,
    speculator: Speculator,
    config: SpeculationConfig | None,
    num_speculative_tokens: int | str | None,
    kwargs: dict[str, Any],
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
) -> Any:
    """Call ``plain``, the ``generate`` of transformers, with our loop as its way of decoding."""
    if speculator.shares_target_cache and kwargs.get("assistant_early_exit") is None:  # else a config's layer decodes
        kwargs = _without(model, kwargs, "assistant_early_exit")
    if config is None:
        config = configured(model, kwargs)
        if num_speculative_tokens is None:
            num_speculative_tokens = option(model, kwargs, "num_speculative_tokens")
    check_settings(config)
    decoding = Decoding(speculator, config, streamer, tokenizer)
    if num_speculative_tokens is not None:
        decoding.config = speculator.settings(config, num_speculative_tokens=num_speculative_tokens)
    if model.config.is_encoder_decoder:  # whose encoder runs before the loop can refuse a draft
        with refusing():
            speculator.check(model, speculator.settings(decoding.config))
            if kwargs.get("inputs_embeds") is not None:
                refuse_source(speculator, model, Source(kwargs["inputs_embeds"], kwargs))
    # transformers expands them in place, and a call that is refused after that is made again.
    kwargs = kwargs | {name: _copied(kwargs[name]) for name in ENCODED if name in kwargs}
    return plain(model, **_with_stop_strings(model, kwargs, tokenizer) | {"custom_generate": decoding})


def _copied(value: Any) -> Any:
    """Copy a dictionary (which a ``ModelOutput`` is) and those in it, but no tensors."""
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)
    for name, part in value.items():
        copied[name] = _copied(part)
    return copied


def generate(
    model: Any,
    speculator: Speculator,
    speculation_config: SpeculationConfig | None = None,
    num_speculative_tokens: int | str | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with a loaded draft where ``generate`` of transformers does not know the keyword ``speculator``.

    Files that a draft saves ``with_code`` decode by this. All else is as in ``generate(..., speculator=draft)``.
    """
    with streaming(kwargs) as stream:
        if not isinstance(speculator, Speculator):
            raise TypeError(
                f"speculator is a {type(speculator).__name__}; pass the draft itself, as "
                "AutoModel.from_pretrained(..., trust_remote_code=True) gives it"
            )
        refuse_other_ways(model, kwargs)
        settings = speculation_config, num_speculative_tokens
        return decode_with(type(model).generate, model, speculator, *settings, kwargs, stream, tokenizer)


def refuse_other_ways(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise a Refusal for what transformers would do, or drop, before the loop is asked.

    Errors: a TypeError for a field of SpeculationConfig as a keyword of its own.
    """
    _refuse_fields(kwargs)
    _refuse_options_of_assistants(kwargs)
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise Refusal(f"`speculator` and `{name}` are two ways of decoding; pass one of them.")
    if is_synced(model, kwargs.get("synced_gpus")):
        raise Refusal(
            "synced_gpus (which FSDP and ZeRO-3 over several processes imply) needs the same number of forwards on "
            "every process, which speculation cannot promise. Generate without `speculator`, or gather the model."
        )
    if model.config.is_encoder_decoder or model.input_modalities != "text":
        refuse_before_encoding(model, functools.partial(option, model, kwargs))
    refuse_cache(option(model, kwargs, "cache_implementation"))  # before transformers makes it
    if option(model, kwargs, "token_healing"):
        raise Refusal(
            "token_healing: transformers keeps the tokenizer from a `custom_generate` callable. Heal the prompt "
            "first: input_ids = model.heal_tokens(input_ids, tokenizer)."
        )


_ASSISTED = {  # options of transformers' assisted generation, and what asks for the same here
    "num_assistant_tokens": "pass num_speculative_tokens=N",
    "num_assistant_tokens_schedule": "the draft length is adaptive, or num_speculative_tokens=N is constant",
    "assistant_confidence_threshold": "pass speculation_config=hf_spec.SpeculationConfig(confidence_threshold=...)",
    "assistant_lookbehind": "tokens of another tokenizer are encoded anew without it",
    "target_lookbehind": "tokens of another tokenizer are encoded anew without it",
    "assistant_ensemble_weight": "rules that change the text are SpeculationConfig(acceptance=...)",
    "max_matching_ngram_size": "pass speculator=hf_spec.NgramSpeculator(max_ngram=...)",
    "speculation_type": "pass the draft itself as speculator=...",
}


def _refuse_options_of_assistants(kwargs: dict[str, Any]) -> None:
    for name in kwargs.keys() & _ASSISTED.keys():
        if kwargs[name] is not None:
            raise Refusal(
                f"Cannot generate with a speculator: {name} is an option of transformers' assisted generation. Drop "
                f"it; {_ASSISTED[name]}."
            )
    if (config := kwargs.get("generation_config")) is None:
        return
    usual = config._get_default_generation_params()  # as pipelines and Whisper fill them in
    for name in (name for name in _ASSISTED if getattr(config, name, None) not in (None, usual.get(name))):
        logger.warning_once(
            f"generation_config.{name} is for transformers' assisted generation, and does nothing with a speculator: "
            f"{_ASSISTED[name]}."
        )


# Whisper's own generate passes the number on.
_FIELDS = SpeculationConfig.__dataclass_fields__.keys() - {"num_speculative_tokens"}


def _refuse_fields(kwargs: dict[str, Any]) -> None:
    if found := [*filter(_FIELDS.__contains__, kwargs)]:
        given = ", ".join(f"{name}={kwargs[name]!r:.40}" for name in found)
        raise TypeError(
            f"generate has no keyword {found[0]!r}, which is a field of SpeculationConfig: pass "
            f"speculation_config=hf_spec.SpeculationConfig({given})"
        )


def is_synced(model: Any, asked: bool | None = None) -> bool:
    """Tell whether transformers would keep processes in step: as asked, else where the model is spread over them."""
    if asked is not None:
        return asked
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    spread = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return several and torch.distributed.get_world_size() > 1 and bool(spread)


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Turn ``stop_strings`` into a criterion: transformers keeps the tokenizer from a ``custom_generate`` call."""
    strings = option(model, kwargs, "stop_strings")
    if not strings:
        return kwargs
    if tokenizer is None:
        raise ValueError("stop_strings needs the model's tokenizer: generate(..., tokenizer=tokenizer).")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(one) is StopStringCriteria for one in criteria):  # the caller's own one takes precedence
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return _without(model, kwargs, "stop_strings") | {"stopping_criteria": criteria}


def _without(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Take the option ``name`` out of a call; transformers warns of keywords beside a generation config."""
    config = kwargs.get("generation_config")
    if config is None or getattr(model.generation_config, name, None) is not None:  # which would fill it in again
        return kwargs | {name: None}
    config = copy.copy(config)
    setattr(config, name, None)
    return {key: value for key, value in kwargs.items() if key != name} | {"generation_config": config}
