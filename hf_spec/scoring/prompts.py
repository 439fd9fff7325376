"""The prompts that the self-check tries a target with: a few tokens of text, or the inputs of a call's prefill.

An encoder-decoder model is tried with a few tokens after the first source of the call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from .architectures import cache_name, why_one_row
from .cache import holds_tokens
from .masks import takes_no_mask
from .names import CACHES, OF_ENCODER_DECODER, cache_among, map_tensors
from .plain import input_device, new_cache, new_static_cache, prompt_kwargs

PROMPT_TOKENS = 7  # tokens of a prompt of text
SPARE_SLOTS = 64  # slots of a static cache after the prompt, more than the check ever reads
# Arguments of the prefill of a prompt of text alone.
OF_TEXT = ("attention_mask", "position_ids", "logits_to_keep", *CACHES)


@dataclass(frozen=True)
class Prompt:
    """A prompt and the arguments of its prefill.

    ``ids`` (rows, tokens); ``mask`` (rows, columns) is 0 at padding, ``None`` without any. ``kwargs`` are the
    arguments without the cache; ``extra`` names those that a prompt of text does not have. A static cache has
    ``slots``.
    """

    ids: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    extra: tuple[str, ...] = ()
    slots: int = PROMPT_TOKENS + SPARE_SLOTS

    @property
    def kind(self) -> Hashable:
        """Return the key by which findings about such prompts are remembered: everything but their values."""
        return self.extra, len(self.ids) > 1

    @classmethod
    def of_text(cls, model: PreTrainedModel, draw: int = 0) -> Prompt:
        """Make two rows, the second one padded on the left, or one row if ``model`` takes no more.

        Each ``draw`` has other tokens.
        """
        ids = tokens_for(model, 2, PROMPT_TOKENS, draw)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        count = _rows_for(model)
        return cls._text(model, ids[:count], mask[:count])

    @classmethod
    def _text(cls, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Prompt:
        return cls(ids, mask, _without_cache(prompt_kwargs(model, ids, mask)))

    @classmethod
    def of_call(cls, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Prompt | None:
        """Take over the prefill arguments of a ``generate`` call, with all of its rows.

        ``None`` if the prompt is text alone, or continues a cache that holds tokens already.
        """
        extra = [name for name, value in model_kwargs.items() if name not in OF_TEXT and _is_content(value)]
        cache = cache_among(model_kwargs)
        if not extra or (isinstance(cache, Cache) and holds_tokens(cache)):
            return None
        mask, slots = model_kwargs.get("attention_mask"), input_ids.shape[1] + SPARE_SLOTS
        if isinstance(cache, StaticCache):  # it has slots for whatever precedes the tokens, such as images
            slots = max(slots, int(cache.get_max_length()))
        return cls(input_ids, mask, _without_cache(model_kwargs), tuple(sorted(extra)), slots)

    @classmethod
    def of_source(cls, model: PreTrainedModel, model_kwargs: dict[str, Any], batch: int) -> Prompt:
        """Make two rows of text, or one if ``model`` takes no more, after the first source of a ``batch``.

        The end of the source is hidden from the second row, if there is a mask to do so. Text is padded on the left
        if the call has a mask for it.
        """
        names, rows = OF_ENCODER_DECODER, _rows_for(model)

        def first_row(value: Tensor) -> Tensor:
            has_rows = value.ndim > 0 and len(value) == batch
            return value[:1].repeat(rows, *[1] * (value.ndim - 1)) if has_rows else value

        kwargs = {
            name: map_tensors(value, first_row)
            for name, value in _without_cache(model_kwargs).items()
            if name not in names
        }
        ids, mask = tokens_for(model, rows, PROMPT_TOKENS), None
        if isinstance(seen := kwargs.get("attention_mask"), Tensor) and seen.ndim == 2:
            # A copy: of Whisper's windows it may still be the caller's own, with more rows than are decoded here.
            kwargs["attention_mask"] = seen = seen.clone()
            shown = seen[-1].nonzero()[:, 0]
            seen[-1, shown[-max(1, len(shown) // 3) :][: len(shown) - 1]] = 0
        if model_kwargs.get(names.mask) is not None:
            mask = torch.ones_like(ids)
            mask[1:, :2] = 0
            kwargs[names.mask] = mask
        extra = sorted(name for name, value in kwargs.items() if _is_content(value))
        return cls(ids, mask, kwargs, tuple(extra))

    def handed(self, model: PreTrainedModel, static: bool = False) -> dict[str, Any]:
        """Build the arguments of ``generate``'s prefill, with an empty cache."""
        cache = new_static_cache(model, self.slots) if static else new_cache(model)
        return {**self.kwargs, cache_name(model): cache}

    def repeated(self, model: PreTrainedModel, count: int) -> Prompt:
        """Repeat the rows of a prompt of text ``count`` times."""
        assert not self.extra and self.mask is not None
        return self._text(model, self.ids.repeat(count, 1), self.mask.repeat(count, 1))

    def alone(self, model: PreTrainedModel, row: int) -> Prompt | None:
        """Keep one row without its padding; ``None`` where an argument cannot be split by rows."""
        rows, columns = self.ids.shape
        seen = self.ids.new_ones(columns) if self.mask is None else self.mask[row]
        if len(seen) != columns:
            return None
        kept = seen.nonzero()[:, 0]
        if not self.extra:
            return self._text(model, self.ids[row : row + 1, kept], self.ids.new_ones(1, len(kept)))
        of_row: dict[str, Any] = {}
        for name, value in self.kwargs.items():
            if isinstance(value, Tensor):
                if value.ndim == 0 or len(value) != rows:
                    return None
                value = value[row : row + 1]
                value = value[:, kept] if value.shape[1:2] == (columns,) else value
            elif _is_content(value):
                return None
            of_row[name] = value
        return Prompt(self.ids[row : row + 1, kept], of_row.get("attention_mask"), of_row, self.extra, self.slots)


def tokens_for(model: PreTrainedModel, rows: int, count: int, draw: int = 0) -> Tensor:
    """Return low token ids (rows, count), which are rarely special tokens; each ``draw`` has other ones."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    numbers = torch.arange(rows * count, device=input_device(model)).view(rows, count)
    return ((numbers + 3 * draw) * 7 % 31 + 11) % vocabulary


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in CACHES}


def _is_content(value: object) -> bool:
    if isinstance(value, dict):  # of what encoders gave; empty for text
        return any(map(_is_content, value.values()))
    return value is not None and not isinstance(value, (bool, int, float, str))


def _rows_for(model: PreTrainedModel) -> int:
    """Return how many rows of different lengths ``model`` can score at once: two stand for any number."""
    takes_masks = not takes_no_mask(model.config.get_text_config(decoder=True)._attn_implementation)
    return 2 if takes_masks and why_one_row(model) is None else 1
