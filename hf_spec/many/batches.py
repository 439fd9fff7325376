"""Batches for ``generate``, in which no answer depends on the other prompts of its batch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import StopStringCriteria

from ..decode.options import option
from ..decode.refusals import Refusal, refuse_growing_rope
from ..metrics import SpeculationStats
from ..scoring.adapters import NAMES, base_model
from ..scoring.plain import input_device, placeholders
from ..verify.processors import is_declared_pure, pure
from .prompts import Completion, Pending

# Options that read all tokens of a row, so that padding counts as text, and their values that do nothing. Not
# repetition_penalty, for which transformers ignores padding.
READS_PADDING: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}),
    "forced_bos_token_id": (None,),
    "watermarking_config": (None,),
    "guidance_scale": (None, 1),
    "logits_processor": (None, []),
    "stopping_criteria": (None, []),
    "prefix_allowed_tokens_fn": (None,),
}
PER_BATCH = ("logits_processor", "stopping_criteria")


class Batches:
    """Generation for a few prompts at a time, of similar lengths.

    Left-padded rows do not affect each other, except through options that read all tokens of a row, padding included.
    With these, only prompts of the same length are batched. Rotary frequencies may change at a length, for all rows at
    once: no batch has texts on both sides of it. Rows that only a stop string or a criterion can end would be
    generated until all are done. So without an end-of-sequence token they are decoded one by one.
    """

    def __init__(self, model: Any, size: int, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.pads = all(option(model, options, name) in nothing for name, nothing in READS_PADDING.items())
        self.ends = _as_list(option(model, options, "eos_token_id"))
        strings, *stops = (option(model, options, name) for name in ("stop_strings", "stopping_criteria", "max_time"))
        self.stops, tokenizer = bool(strings) or any(stops), options.get("tokenizer")
        self.strings = StopStringCriteria(tokenizer, strings) if strings and tokenizer and not any(stops) else None
        self.new = option(model, options, "max_new_tokens") or 0
        self.size = 1 if self.stops and not self.ends else size
        # Finished rows are padded with a token that is hardly ever emitted: the last one of the vocabulary. Models
        # count the placeholders for parts of an image, padding included.
        words = model.config.get_text_config(decoder=True).vocab_size
        taken = placeholders(base_model(model).config).union(self.ends)
        self.filler = next(token for token in range(words - 1, -1, -1) if token not in taken)

    def answer(self, prompts: Sequence[Pending]) -> Iterator[Completion]:
        """Generate for ``prompts``, the longest first."""
        for batch in self.of(prompts):
            try:
                yield from self._answer(batch)
            except Exception as error:
                error.add_note(f"while generating for the prompts {[one.index for one in batch]}")
                raise

    def of(self, prompts: Iterable[Pending]) -> Iterator[list[Pending]]:
        """Batch prompts of similar lengths."""

        keyed = [((str(one.kind), self._part(one), 0 if self.pads else -len(one.ids)), one) for one in prompts]
        keyed.sort(key=lambda both: (*both[0], -len(both[1].ids), both[1].index))
        for _, group in groupby(keyed, itemgetter(0)):
            alike = [one for _, one in group]
            yield from (alike[start : start + self.size] for start in range(0, len(alike), self.size))

    def _part(self, prompt: Pending) -> int:
        """Number what is batched together: texts that pass the length at which rotary frequencies change are alone."""
        length = len(prompt.ids)
        if self._changes(length, length + self.new):
            return prompt.index
        return -1 if self._changes(length, sys.maxsize) else -2

    def _changes(self, first: int, last: int) -> bool:
        try:
            refuse_growing_rope(base_model(self.model), {}, first, last)
        except Refusal:
            return True
        return False

    def _answer(self, batch: list[Pending]) -> Iterator[Completion]:
        inputs = _inputs(batch, self.filler, input_device(self.model))
        indices = [one.index for one in batch]
        options = self.options | {name: _made(name, self.options.get(name), indices) for name in PER_BATCH}
        if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
            options["prefix_allowed_tokens_fn"] = _by_index(allowed, indices)
        if (names := options.get(NAMES)) is not None:
            options[NAMES] = [names[index] for index in indices]
        out = self.model.generate(**inputs, **options, pad_token_id=self.filler, return_dict_in_generate=True)
        stats: SpeculationStats | None = getattr(out, "speculation", None)
        rows = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for number, (one, row) in enumerate(zip(batch, rows, strict=True)):
            own = None if stats is None else stats.of_row(number)
            tokens = own.per_row[0].tokens if own else self._until_end(one.ids, row) if len(batch) > 1 else row
            yield Completion(one.index, one.ids, tokens, speculation=own)

    def _until_end(self, prompt: list[int], row: list[int]) -> list[int]:
        end = next((place + 1 for place, token in enumerate(row) if token in self.ends), None)
        if end is None and self.stops:  # a stop string or a criterion: padding follows
            end = len(row) - next((place for place, token in enumerate(reversed(row)) if token != self.filler), 0)
            if self.strings is not None:
                strings = cast(Any, self.strings)
                ends = (n for n in range(end, len(row)) if strings(torch.tensor([prompt + row[:n]]), None))
                end = next(ends, len(row))
        return row[:end]


def _inputs(batch: list[Pending], filler: int, device: torch.device) -> dict[str, Tensor]:
    """Pad on the left, (batch, longest) each; images and the like are concatenated."""
    widest = max(len(one.ids) for one in batch)

    def left(rows: Iterable[Tensor], value: int) -> Tensor:
        return torch.cat([pad(row, (widest - row.shape[-1], 0), value=value) for row in rows])

    ids = [torch.tensor([one.ids]) for one in batch]
    inputs = {"input_ids": left(ids, filler), "attention_mask": left(map(torch.ones_like, ids), 0)}
    inputs |= {name: left((one.per_token[name] for one in batch), 0) for name in batch[0].per_token}
    inputs |= {name: torch.cat([one.others[name] for one in batch]) for name in batch[0].others}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _made(name: str, given: Any, indices: list[int]) -> Any:
    """Return a list of processors or criteria: the given one, or a new one for the prompts of a batch."""
    if not callable(given) or isinstance(given, list):
        return given
    made = given(indices)
    if not isinstance(made, list | None):
        raise TypeError(f"the function {name} returned {made!r:.80}: it must return a list, or None for nothing")
    return made


def _by_index(allowed: Callable[[int, Tensor], Any], indices: list[int]) -> Callable[[int, Tensor], Any]:
    """Call ``allowed`` with the prompt's index among all prompts, in place of its batch row."""

    @functools.wraps(allowed, updated=())
    def of_row(row: int, ids: Tensor) -> Any:
        return allowed(indices[row], ids)

    return pure(of_row) if is_declared_pure(allowed) else of_row


def _as_list(ends: Any) -> list[int]:
    return [] if ends is None else ends if isinstance(ends, list) else [ends]
