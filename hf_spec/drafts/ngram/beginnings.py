"""What n-grams are looked up in from the start of a call: the prompts, and the sources of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...scoring.plain import scored_vocabulary
from ..base import DraftContext
from .suffix_index import BREAK


def beginnings(request: DraftContext) -> list[Sequence[int]]:
    """Return the text of each row so far. An encoder-decoder's follows its source, if both have the same tokens.

    BREAK stands between them, and in place of tokens that the target cannot write, such as those of images.
    """
    known = range(request.vocabulary)
    texts = [_with_breaks(prompt, known) for prompt in request.prompts()]
    sources = None if request.source is None else request.source.tokens(request.target)
    if sources is None:
        return texts
    return [[*_with_breaks(source, known), BREAK, *text] for source, text in zip(sources, texts, strict=True)]


def without_placeholders(texts: Sequence[Sequence[int]], target: Any) -> list[Sequence[int]]:
    """Put BREAK in place of the tokens of ``texts`` that ``target`` cannot write, such as those of images.

    A history would else take them for tokens of another tokenizer.
    """
    known = range(scored_vocabulary(target))
    return [_with_breaks(text, known) for text in texts]


def _with_breaks(text: Sequence[int], known: range) -> Sequence[int]:
    if not text or max(text) < known.stop:
        return text
    return [token if token in known else BREAK for token in text]
