"""Teach ``generate`` the keyword ``speculator``."""

from __future__ import annotations

import functools
import inspect
import os
import re
from typing import Any, Literal, Protocol, overload
from weakref import WeakKeyDictionary

from torch import LongTensor, Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.utils import logging

from .batching.hooks import HOOKS as BATCHING
from .batching.hooks import KEYWORDS, documented
from .batching.start import refuse_while_engine_decodes
from .checkpoints.kinds import register_auto_classes
from .checkpoints.resolve import EARLY_EXIT, as_speculator, with_tokenizers
from .decode.entry import Decoding, decode_with, refuse_other_ways, streaming
from .decode.options import configured, option
from .decode.outputs import (
    SpeculativeOutput,
    forget_speculation,
    with_speculation,
)
from .decode.parts import asked_of_all, collecting, noting_fallbacks, noting_rows
from .decode.refusals import Refusal, refuse_streams
from .defaults import default_speculator
from .drafts.base import Speculator
from .drafts.early_exit.speculator import EarlyExitSpeculator
from .invariance.mode import renew_invariance
from .scoring.adapters import base_model
from .scoring.architectures import MAKES_SOUND
from .scoring.attention import unhook_attention
from .scoring.masks import unhook_masks
from .scoring.relative_bias import unhook_biases
from .settings import SpeculationConfig, check_settings

DOCUMENTATION = """

        With hf_spec, `generate` knows three more keywords. The text has the same distribution with them as without.

        speculator (`hf_spec.DraftModel`, a causal language model, `hf_spec.Speculator`, `str` or `False`, *optional*):
            The source of draft tokens: a draft, `"ngram"`, `"mtp"`, `"early-exit"`, `"auto"`, or a directory or Hub id
            of a draft. `"plain"` proposes nothing. `False` turns off what `hf_spec.set_speculator` or a generation
            config asks for.
        speculation_config (`hf_spec.SpeculationConfig`, *optional*):
            How to draft and verify. By default as the draft says, with an adaptive draft length.
        num_speculative_tokens (`int` or `"auto"`, *optional*):
            Length of a chain, or depth of a tree, in every step. Left out, it is chosen from step to step by
            what pays, and may be 0; when sampling after a seed was set, no clock is read for it. `"auto"`: it is
            read then, too.

        A draft with another tokenizer is passed as in assisted generation: with `tokenizer` and
        `assistant_tokenizer`.

        With `return_dict_in_generate=True` the output has `speculation`, a `hf_spec.SpeculationStats`.
"""

logger = logging.get_logger(__name__)

_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # reasons for which a default was left, by model


class SpeculativeDecoding(Decoding):
    """Decode with a draft: ``model.generate(..., custom_generate=SpeculativeDecoding(draft))``.

    The same loop as ``generate(..., speculator=draft)``, without the keyword. transformers keeps streamer and
    tokenizer from a ``custom_generate`` callable, so they are given here: ``streamer`` gets prompt and text,
    ``tokenizer`` serves the statistics. The object keeps nothing of a call and may be used again.
    """

    def __init__(
        self,
        speculator: Any,
        config: SpeculationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_settings(config)
        super().__init__(speculator, config, streamer, tokenizer)

    def speculator_for(self, model: PreTrainedModel) -> Speculator:
        """Turn what was given into a speculator for ``model``."""
        return as_speculator(self.speculator, model)


class SpeculativeModel(Protocol):
    """Be, to type checkers, a model whose ``generate`` knows speculators: ``cast(SpeculativeModel, model).generate``.

    Any causal language model of transformers is one at run time. Its own class cannot be annotated from outside.
    """

    @overload
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        speculator: Speculator | PreTrainedModel | str | os.PathLike[str],
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        return_dict_in_generate: Literal[True],
        **kwargs: Any,
    ) -> SpeculativeOutput: ...

    @overload
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        speculator: Speculator | PreTrainedModel | str | os.PathLike[str] | Literal[False] | None = None,
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        return_dict_in_generate: Literal[False] | None = None,
        **kwargs: Any,
    ) -> LongTensor: ...

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as any model of transformers does, with three keywords more."""


def install() -> None:
    """Teach ``generate`` its new keywords, and AutoModel what drafts are.

    The keywords are ``speculator``, ``speculation_config`` and ``num_speculative_tokens``; calls without a speculator
    are passed on untouched. Runs on ``import hf_spec`` and may be called again.
    """
    if not hasattr(GenerationMixin.generate, "_hf_spec_original"):
        register_auto_classes()
        GenerationMixin.generate = _speculative(GenerationMixin.generate)  # type: ignore[method-assign]
        for name, wrap in BATCHING.items():
            setattr(_owner(name), name, wrap(getattr(_owner(name), name)))
        for name, wrap in WHISPER.items():
            setattr(WhisperGenerationMixin, name, wrap(getattr(WhisperGenerationMixin, name)))


def uninstall() -> None:
    """Undo ``install``: ``generate``, ``generate_batch`` and the mask functions of transformers are its own again."""
    of_whisper = ((WhisperGenerationMixin, name) for name in WHISPER)
    for owner, name in ((GenerationMixin, "generate"), *of_whisper, *((_owner(name), name) for name in BATCHING)):
        ours = getattr(owner, name)
        setattr(owner, name, getattr(ours, "_hf_spec_original", ours))
    unhook_masks()
    unhook_attention()
    unhook_biases()


def _owner(name: str) -> Any:
    return next(kind for kind in GenerationMixin.__mro__ if name in vars(kind))


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
        renew_invariance(self)
        if whole := asked_of_all(self):
            speculator, speculation_config, num_speculative_tokens = (whole.get(name) for name in KEYWORDS)
        given = kwargs | dict(zip(names, args, strict=False))
        hook, has_settings = given.get("custom_generate"), (speculation_config, num_speculative_tokens) != (None, None)
        if type(self).__name__ in MAKES_SOUND:  # given what was asked for the text, which is made by now
            if speculator not in (None, False):
                logger.warning_once(f"{type(self).__name__} makes sound, so it generates without the speculator.")
            return plain(self, *args, **kwargs)
        falls_back = False  # to plain generation, where a default cannot serve a call that asks for nothing of ours
        if isinstance(hook, str):  # a repository's way of decoding, which gets all arguments, even ours
            asked = speculator, speculation_config, num_speculative_tokens
            ours = {name: value for name, value in zip(KEYWORDS, asked, strict=True) if value is not None}
            return plain(self, *args, **kwargs, **ours)
        if speculator is None and isinstance(hook, SpeculativeDecoding):  # let it have what transformers drops
            speculator, speculation_config = hook.speculator, speculation_config or hook.config
            given = {"streamer": hook.streamer, "tokenizer": hook.tokenizer} | given | {"custom_generate": None}
        elif speculator is None and hook is None and given.get("assistant_model") is None:
            speculator, default_config = default_speculator(self, given.get("generation_config"))
            speculation_config, falls_back = speculation_config or default_config, not has_settings
        if speculator is None or speculator is False:
            _refuse_without_speculator(given, has_settings)
            return plain(self, *args, **kwargs)
        try:
            asked = speculator, speculation_config, num_speculative_tokens
            return _speculate(plain, self, *asked, given, ends_stream=not falls_back)
        except Refusal as refusal:
            if not falls_back:
                raise
            _leave_default(self, refusal)
        return plain(self, *args, **kwargs)

    return documented(generate, plain, DOCUMENTATION)


def _leave_default(model: Any, refusal: Refusal) -> None:
    """Say once why a call of ``model`` is plain, whatever its lengths are."""
    reason = re.sub(r"\d+", "N", str(refusal))
    if reason not in (said := _said.setdefault(model, set())):
        said.add(reason)
        logger.warning(f"The model's default speculator is not used: {refusal} The text is generated plainly.")
    forget_speculation(model)


def _speculative_whisper(plain: Any) -> Any:
    """Wrap Whisper's own ``generate``, which calls the usual one for each window: refuse early, and sum up."""
    names = list(inspect.signature(plain).parameters)[1:]

    @functools.wraps(plain)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs | dict(zip(names, args, strict=False))
        if given.get("speculator") not in (None, False):
            if given.get("return_token_timestamps"):
                raise Refusal(
                    "Cannot generate with a speculator: return_token_timestamps (return_timestamps='word' in a "
                    "pipeline) aligns words by the attention of single steps. Ask for timestamps of segments, "
                    "return_timestamps=True, or generate without `speculator`."
                )
            refuse_other_ways(self, given)
            _refuse_seeds_of_rows(self, given)
            kwargs |= _read_once(self, given)
        elif all(given.get(name) is None for name in ("speculator", "assistant_model", "custom_generate")):
            kwargs |= _by_default(self, given)
        asked = {name: kwargs.pop(name) for name in KEYWORDS if name in kwargs}
        with collecting(self, asked) as parts:
            output = plain(self, *args, **kwargs)
        return with_speculation(output, parts)

    return documented(generate, plain, DOCUMENTATION)


# Methods of Whisper that its windows go through.
WHISPER = {
    "generate": _speculative_whisper,
    "generate_with_fallback": noting_rows,
    "_need_fallback": noting_fallbacks,
}


def _refuse_seeds_of_rows(model: Any, given: dict[str, Any], default: SpeculationConfig | None = None) -> None:
    """Raise a Refusal for ``row_seeds``: each part of a call has other rows, and would begin with the same seeds.

    ``default``: the settings of a default speculator.
    """
    config = given.get("speculation_config") or default
    if config is None:
        config = configured(model, {"generation_config": given.get("generation_config")})
    if getattr(config, "row_seeds", None) is not None:
        raise Refusal(
            f"Cannot generate with a speculator: row_seeds has a seed for each row, but {type(model).__name__} "
            "decodes in parts: windows of sound, and poor ones again. They have fewer rows, and each would begin with "
            "the same seeds. Pass one sound per call without row_seeds, after torch.manual_seed(seed)."
        )


def _by_default(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that turn off the default speculator of a call where its settings are refused.

    Errors: a Refusal if the call itself asks for such settings.
    """
    speculator, config = default_speculator(model, given.get("generation_config"))
    if not speculator:
        return {}
    try:
        _refuse_seeds_of_rows(model, given, config)
    except Refusal as refusal:
        if (given.get("speculation_config"), given.get("num_speculative_tokens")) != (None, None):
            raise
        _leave_default(model, refusal)
        return {"speculator": False}
    return {}


def _read_once(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call that takes a draft of a name, or with another tokenizer, with the draft itself."""
    speculator, tokenizer = given["speculator"], given.get("tokenizer")
    if given.get("assistant_tokenizer") is not None:
        found = _translated(speculator, model, given["assistant_tokenizer"], tokenizer)
    elif isinstance(speculator, str | os.PathLike) and speculator != EARLY_EXIT:  # whose layer the call may name
        found = as_speculator(speculator, model)
    else:
        return {}
    return {"speculator": found} | ({"assistant_tokenizer": None} if "assistant_tokenizer" in given else {})


def _translated(speculator: Any, model: Any, other: Any, tokenizer: Any) -> Speculator:
    return with_tokenizers(speculator, base_model(model), other, tokenizer)


def _speculate(
    plain: Any,
    model: Any,
    speculator: Any,
    config: SpeculationConfig | None,
    num_speculative_tokens: int | str | None,
    given: dict[str, Any],
    ends_stream: bool,
) -> Any:
    """Call ``plain`` with our loop as its way of decoding; ``ends_stream``: also where the call is refused."""
    kwargs = dict(given)
    with streaming(kwargs, ends_stream) as stream:
        refuse_other_ways(model, kwargs)
        refuse_streams(kwargs)
        refuse_while_engine_decodes(model)
        speculator = _with_exit_layer(model, speculator, kwargs)
        tokenizer, other = kwargs.pop("tokenizer", None), kwargs.pop("assistant_tokenizer", None)
        found = as_speculator(speculator, model) if other is None else _translated(speculator, model, other, tokenizer)
        return decode_with(plain, model, found, config, num_speculative_tokens, kwargs, stream, tokenizer)


def _with_exit_layer(model: Any, speculator: Any, kwargs: dict[str, Any]) -> Any:
    """Read ``assistant_early_exit``, transformers' own option, as the layer of early exit, and take it out.

    Errors: a Refusal if the speculator has another layer.
    """
    if not (speculator == EARLY_EXIT or isinstance(speculator, EarlyExitSpeculator)):
        return speculator
    asked = kwargs.get("assistant_early_exit")
    own = speculator.layer if isinstance(speculator, EarlyExitSpeculator) else None
    if None not in (asked, own) and asked != own:
        raise Refusal(
            f"assistant_early_exit={asked} and EarlyExitSpeculator(layer={own}) name two layers to exit after; pass "
            "one of them."
        )
    layer = option(model, kwargs, "assistant_early_exit")
    kwargs.pop("assistant_early_exit", None)
    return speculator if layer is None or own is not None else EarlyExitSpeculator(layer)


def _refuse_without_speculator(given: dict[str, Any], has_settings: bool) -> None:
    if has_settings:
        raise ValueError("speculation_config and num_speculative_tokens need a speculator; pass speculator=...")
    if isinstance(given.get("assistant_model"), Speculator):
        raise ValueError(
            f"assistant_model takes a language model, and {type(given['assistant_model']).__name__} only drafts for "
            "one; pass it as speculator=..."
        )
