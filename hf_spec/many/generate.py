"""``generate_many``: an iterator over a model's answers to any number of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from transformers import PreTrainedModel
from transformers.utils import logging

from ..batching.hooks import KEYWORDS
from ..checkpoints.resolve import as_speculator, with_tokenizers
from ..decode.options import option
from ..metrics import Counts
from ..processes import Processes
from ..progress import Progress
from ..scoring.adapters import NAMES, OFFSETS, TASKS, base_model
from ..scoring.plain import input_device, tokenizer_in
from ..settings import SpeculationConfig, check_settings, is_int
from .batches import Batches
from .engine import Engine, why_not_engine
from .prompts import Completion, Pending, pending

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]

EngineChoice = Literal["auto", "generate", "generate_batch"]

BATCHES_PER_WINDOW = 16  # batches of prompts that are read at a time, to be sorted by length
logger = logging.get_logger(__name__)
# What generate_many sets or returns itself, and what to do instead.
NOT_FOR_MANY = {
    "inputs": "pass prompts",
    "input_ids": "pass prompts",
    "inputs_embeds": "pass prompts as token ids",
    "attention_mask": "pass prompts, which are padded here",
    "negative_prompt_ids": "batches have other prompts; call generate",
    "negative_prompt_attention_mask": "batches have other prompts; call generate",
    OFFSETS: "batches have other prompts; call generate",
    TASKS: "batches have other prompts; call generate",
    "past_key_values": "every prompt is read from its beginning",
    "cache": "every prompt is read from its beginning",
    "streamer": "completions come one by one; stream one prompt with generate",
    "return_dict_in_generate": "completions have their tokens and statistics",
    "output_scores": "call generate for scores",
    "output_logits": "call generate for logits",
    "output_hidden_states": "call generate for hidden states",
    "output_attentions": "call generate for attentions",
    "max_length": "it would count padding; use max_new_tokens",
    "min_length": "it would count padding; use min_new_tokens",
    "pad_token_id": "rows are padded here, and completions are not",
    "num_return_sequences": "pass each prompt as often as you want an answer to it",
}


def generate_many(
    model: PreTrainedModel,
    prompts: Iterable[Any],
    *,
    speculator: Any = None,
    speculation_config: SpeculationConfig | None = None,
    num_speculative_tokens: int | str | None = None,
    tokenizer: Any = None,
    batch_size: int = 8,
    look_ahead: int | None = None,
    ordered: bool = False,
    engine: EngineChoice = "auto",
    accelerator: Accelerator | PartialState | None = None,
    progress: bool = True,
    **generate_kwargs: Any,
) -> Iterator[Completion]:
    """Yield a ``Completion`` for each prompt as soon as it is finished; its text depends on no other prompt.

    A prompt is a text or a list of messages (with ``tokenizer``), or a list or tensor of token ids. For multimodal
    models it may be what their processor returns. ``prompts`` need not fit into memory: ``look_ahead`` of them are
    read at a time, 16 batches by default. Those of similar lengths are decoded together.

    Args:
        speculator, speculation_config, num_speculative_tokens: as in ``generate``.
        tokenizer: the model's, or its processor, which also opens the pictures and sounds of messages.
        ordered: yield in the order of the prompts; else as they finish, where ``index`` says whose they are.
        engine: what decodes them: ``"generate"``, in batches, or ``"generate_batch"``, transformers' continuous
            batching. There the next prompt takes the place of a finished one; ``continuous_batching_config`` sets it
            up. ``"auto"``: continuous batching on an accelerator, if it supports the model and all options, else
            batches. The text is the same. Between answers of continuous batching, other forwards of the model are
            wrong: choose ``"generate"`` if you need some.
        accelerator: distribute the prompts over its processes. All of them call this with the same prompts and read
            all completions. Each has a copy of the model.
        progress: draw a bar, with the tokens that a verification step emits (τ).
        **generate_kwargs: go to ``generate``; ``max_new_tokens`` must be among them or in a generation config.
            ``logits_processor`` and ``stopping_criteria`` may be functions, for those that keep a state. Such a
            function gets the indices of a batch's prompts and returns a list. A ``prefix_allowed_tokens_fn`` gets the
            index of the prompt.

    Errors: a ValueError for options that make no sense for many prompts, before anything runs. A TypeError or
    ValueError for a bad prompt once it is read. Those of ``generate``.
    """
    window_size = BATCHES_PER_WINDOW * batch_size if look_ahead is None else look_ahead
    _check(model, prompts, batch_size, window_size, generate_kwargs)
    check_settings(speculation_config)
    if speculation_config is not None and speculation_config.row_seeds is not None:
        raise ValueError("row_seeds is not for generate_many, which batches prompts by length; call generate")
    own = tokenizer_in(tokenizer)
    speculator = _resolved(speculator, base_model(model), own, generate_kwargs)
    given = (speculator, speculation_config, num_speculative_tokens)
    options = generate_kwargs | {name: value for name, value in zip(KEYWORDS, given, strict=True) if value is not None}
    if tokenizer is not None and option(model, options, "stop_strings"):
        options["tokenizer"] = own
    processes = Processes(accelerator)
    decoder = _decoder(model, batch_size, options, engine)
    words = tokenizer, base_model(model).config.get_text_config(decoder=True).vocab_size
    completions = _completions(prompts, words, window_size * processes.count, decoder, processes)
    if ordered:
        completions = _in_order(completions)
    return _finished(completions, own, prompts, progress and processes.is_first)


def _check(model: Any, prompts: Any, batch_size: int, look_ahead: int, options: dict[str, Any]) -> None:
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: pass a list of texts")
    if isinstance(prompts, Mapping):  # iterating would yield its keys, as texts
        raise TypeError(f"prompts is one {type(prompts).__name__}: pass a list with one for each prompt, or texts")
    if not (hasattr(prompts, "__iter__") or hasattr(prompts, "__getitem__")):
        raise TypeError(f"prompts is {prompts!r:.80}: pass a list, or another iterable, with one for each prompt")
    if base_model(model).config.is_encoder_decoder:
        raise ValueError(
            f"{type(base_model(model)).__name__} is an encoder-decoder model, and generate_many pads prompts for "
            "decoder-only ones; call model.generate(..., speculator=...) for each batch of sources"
        )
    for name, number in (("batch_size", batch_size), ("look_ahead", look_ahead)):
        if not is_int(number) or number < 1:
            raise ValueError(f"{name} is {number!r}; set a whole number of at least 1")
    for name, instead in NOT_FOR_MANY.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} is not for generate_many: {instead}")
    count = len(prompts) if isinstance(prompts, Sized) else None
    if (names := options.get(NAMES)) is not None and len(names) != count:
        raise ValueError(
            f"adapter_names has the length {len(names)}, and prompts {'has none' if count is None else count}: pass a "
            "list of prompts, and a list with one name for each"
        )
    for name in ("num_return_sequences", "min_length"):  # a generation config may set them, too
        if (option(model, options, name) or 0) > 1:
            raise ValueError(f"{name} of the generation config is not for generate_many: {NOT_FOR_MANY[name]}")
    if option(model, options, "max_new_tokens") is None:
        raise ValueError("generate_many needs max_new_tokens, the length of the longest answer: pass it")


def _resolved(speculator: Any, target: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> Any:
    """Return the draft, once for all batches; ``assistant_tokenizer`` is taken out of the ``options``."""
    if speculator is None or speculator is False:
        return speculator
    if (other := options.pop("assistant_tokenizer", None)) is not None:
        return with_tokenizers(speculator, target, other, tokenizer)
    return as_speculator(speculator, target)


def _decoder(model: Any, size: int, options: dict[str, Any], engine: EngineChoice) -> Batches | Engine:
    """Choose what decodes. Errors: a ValueError if the engine is requested but does not support the call."""
    if engine not in get_args(EngineChoice):
        raise ValueError(f"engine is {engine!r}; choose one of {get_args(EngineChoice)}")
    reason = None if engine == "generate" else why_not_engine(model, options)
    if engine == "auto" and reason is None and input_device(model).type == "cpu":
        reason = "on a CPU they take less time"
    if engine == "generate" or (engine == "auto" and reason is not None):
        logger.info(f"generate_many decodes in batches of generate{f': {reason}' if reason else ''}")
        options.pop("continuous_batching_config", None)
        return Batches(model, size, options)
    if reason is not None:
        raise ValueError(
            f"generate_batch cannot answer these prompts: {reason}. Leave engine at 'auto', which decodes them in "
            "batches"
        )
    return Engine(model, size, options)


def _completions(
    prompts: Iterable[Any],
    words: tuple[Any, int],
    window_size: int,
    decoder: Batches | Engine,
    processes: Processes,
) -> Iterator[Completion]:
    """Read ``window_size`` prompts at a time and answer them. Each process answers a part, and yields all completions.

    ``words`` are the tokenizer, if there is one, and the size of the model's vocabulary.
    """
    numbered = zip(count(), prompts, strict=False)

    def read() -> list[Pending]:
        return [pending(index, prompt, *words) for index, prompt in islice(numbered, window_size)]

    while window := processes.same(read, lambda one: one.ids):
        if processes.count == 1:
            yield from decoder.answer(window)
            continue
        for part in processes.together(lambda: list(decoder.answer(_mine(window, processes)))):
            yield from part


def _mine(window: list[Pending], processes: Processes) -> list[Pending]:
    """Choose this process's part of the prompts of a ``window``: as many as the others' and of similar lengths."""
    return sorted(window, key=lambda one: (len(one.ids), one.index))[processes.number :: processes.count]


def _in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Hold back completions until their turn; at most as many are held as prompts are read at a time."""
    waiting: dict[int, Completion] = {}
    due = 0
    for one in completions:
        waiting[one.index] = one
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def _finished(
    completions: Iterator[Completion], tokenizer: Any, prompts: Iterable[Any], progress: bool
) -> Iterator[Completion]:
    """Add the text to each completion, and advance the progress bar."""
    counts, total = Counts(), len(prompts) if isinstance(prompts, Sized) else None
    with Progress("Generating", total, "prompts", shown=progress) as bar:
        for one in completions:
            if tokenizer is not None:
                one.text = tokenizer.decode(one.tokens, skip_special_tokens=True)
            if one.speculation is not None:
                one.speculation.tokenizer = tokenizer
                counts.add(one.speculation.counts)
                bar.note(f"τ {counts.mean_accepted_length:.2f}")
            if isinstance(prompts, Sized):
                bar.expect(len(prompts))  # some may have been left out
            bar.update()
            yield one
