"""The keywords of ``generate`` for transformers' ways into continuous batching: lists of prompts, and a manager."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from ..checkpoints.resolve import as_speculator
from ..decode.options import configured, option
from ..decode.refusals import Refusal
from ..defaults import default_speculator
from ..drafts.base import Speculator
from ..settings import SpeculationConfig, check_settings
from .engine import PlainManager, SpeculativeManager
from .prompts import check_prompts
from .refusals import GENERATE, refuse_dropped, refuse_plain
from .start import forget_manager, kept_manager, make_manager, note_engine

KEYWORDS = ("speculator", "speculation_config", "num_speculative_tokens")
DOCUMENTATION = """

        With hf_spec, continuous batching takes three more keywords. They do not change the distribution of any text,
        whatever the other requests are.

        speculator (`hf_spec.DraftModel`, a causal language model, `hf_spec.Speculator`, `str` or `False`, *optional*):
            What drafts: a draft, `"ngram"`, `"mtp"`, `"auto"`, or a directory or Hub id of a draft. `False` turns off
            what `hf_spec.set_speculator` or a generation config sets.
        speculation_config (`hf_spec.SpeculationConfig`, *optional*):
            How to draft and how to verify. By default the draft decides, and the draft length adapts.
        num_speculative_tokens (`int` or `"auto"`, *optional*):
            Draft length of every step. Left out, it adapts to acceptance and step times, and may be 0. When sampling
            after a seed was set, it depends on no times. `"auto"`: it depends on them then, too.

        Each result is then a `hf_spec.RequestOutput`, whose `speculation` is a `hf_spec.SpeculationStats`.
"""

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SpeculationKeywords:
    """The keywords of a call that concern speculation."""

    speculator: Any = None
    config: SpeculationConfig | None = None
    num_speculative_tokens: int | str | None = None

    @property
    def has_settings(self) -> bool:
        """Tell whether the call sets how to draft or verify."""
        return self.config is not None or self.num_speculative_tokens is not None


# The keywords of the call in which a manager is made: transformers does not pass unknown keywords on.
_asked: ContextVar[SpeculationKeywords | None] = ContextVar("hf_spec_asked", default=None)


def with_keywords(plain: Any) -> Any:
    """Let ``generate_batch`` take a speculator."""
    parameters = list(inspect.signature(plain).parameters.values())[1:]
    names = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(plain)
    def generate_batch(
        self: Any,
        *args: Any,
        speculator: Any = None,
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | str | None = None,
        **kwargs: Any,
    ) -> Any:
        # transformers' own drops whatever it does not know. Calls that ask for no speculator are left to it.
        unknown = [name for name in kwargs if name not in (*names, "max_new_tokens")]
        if unknown and speculator is not None and speculator is not False:
            raise TypeError(
                f"generate_batch does not know {', '.join(unknown)}, and transformers would ignore it: set options of "
                f"texts in generation_config, or use {GENERATE}"
            )
        with _asking(speculator, speculation_config, num_speculative_tokens):
            given = kwargs | dict(zip(names, args, strict=False))
            if _speculates(self, speculator, given.get("generation_config")) and "inputs" in given:
                check_prompts(self, given["inputs"])
            return plain(self, *args, **kwargs)

    return documented(generate_batch, plain, DOCUMENTATION)


def with_keywords_when_entered(plain: Any) -> Any:
    """Let ``continuous_batching_context_manager`` take a speculator. It makes its manager when it is entered."""

    @functools.wraps(plain)
    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self: Any,
        *args: Any,
        speculator: Any = None,
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | str | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            with _asking(speculator, speculation_config, num_speculative_tokens):
                manager = stack.enter_context(plain(self, *args, **kwargs))
            yield manager

    return documented(continuous_batching_context_manager, plain, DOCUMENTATION)


def with_speculator(plain: Any) -> Any:
    """Let ``init_continuous_batching``, which makes every manager, make a speculative one."""

    @functools.wraps(plain)
    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        *,
        speculator: Any = None,
        speculation_config: SpeculationConfig | None = None,
        num_speculative_tokens: int | str | None = None,
    ) -> Any:
        with _asking(speculator, speculation_config, num_speculative_tokens):
            asked = _asked.get() or SpeculationKeywords()
        given = (generation_config, continuous_batching_config, workload_hints)
        found, config = _resolve(self, asked, generation_config)
        manager = None
        if found is not None:
            falls_back = asked.speculator is None and not asked.has_settings
            try:
                if not falls_back:
                    refuse_dropped(generation_config or self.generation_config, workload_hints)
                manager = make_manager(plain, self, found, config, *given)
            except Refusal as refusal:
                if not falls_back:
                    raise
                logger.warning_once(f"The model's default speculator is not used: {refusal} Requests are plain.")
        if manager is None:
            if isinstance(kept_manager(self), SpeculativeManager):
                forget_manager(self)
            refuse_plain(self)
            manager = PlainManager.of(plain(self, *given))
        note_engine(self, manager)
        return manager

    return documented(init_continuous_batching, plain, DOCUMENTATION)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "generate_batch": with_keywords,
    "continuous_batching_context_manager": with_keywords_when_entered,
    "init_continuous_batching": with_speculator,
}


def _speculates(model: Any, speculator: Any, generation_config: Any) -> bool:
    """Tell whether a call uses the ``speculator`` that it passes, or a default one."""
    return speculator is not False and (speculator or default_speculator(model, generation_config)[0]) is not None


@contextlib.contextmanager
def _asking(speculator: Any, config: SpeculationConfig | None, num_speculative_tokens: Any) -> Iterator[None]:
    """Keep the keywords of a call until its manager is made; without any, those of the outer call stay."""
    check_settings(config)
    asked = SpeculationKeywords(speculator, config, num_speculative_tokens)
    token = _asked.set(_asked.get() if asked == SpeculationKeywords() else asked)
    try:
        yield
    finally:
        _asked.reset(token)


def _resolve(
    model: Any, asked: SpeculationKeywords, generation_config: Any
) -> tuple[Speculator | None, SpeculationConfig | None]:
    """Return the speculator and the settings of a call; a ValueError for settings without a speculator."""
    config, number, found = asked.config, asked.num_speculative_tokens, None
    if asked.speculator is None:
        found, stored = default_speculator(model, generation_config)
        config = config or stored
    elif asked.speculator is not False:
        found = as_speculator(asked.speculator, model)
    if found is None:
        if asked.has_settings:
            raise ValueError("speculation_config and num_speculative_tokens need a speculator; pass speculator=...")
        return None, None
    if config is None:
        given = {} if generation_config is None else {"generation_config": generation_config}
        config = configured(model, given)
        if number is None:
            number = option(model, given, "num_speculative_tokens")
    return found, config if number is None else found.settings(config, num_speculative_tokens=number)


def documented(ours: Any, plain: Any, text: str) -> Any:
    """Let ``inspect`` and ``help`` show ``ours``, which wraps ``plain``, with our keywords and ``text`` about them."""
    ours._hf_spec_original = plain
    ours.__signature__ = _signature_with_keywords(plain)
    ours.__doc__ = (plain.__doc__ or "").rstrip() + text
    return ours


def _signature_with_keywords(plain: Any) -> inspect.Signature:
    signature = inspect.signature(plain)
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in KEYWORDS]
    first = list(signature.parameters.values())
    rest = [first.pop()] if first[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    return signature.replace(parameters=[*first, *keywords, *rest])
