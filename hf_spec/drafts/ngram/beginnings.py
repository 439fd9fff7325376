"""What n-grams are looked up in from the start of a call: the prompts, and the sources of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...scoring.plain import placeholders, scored_vocabulary
from ..base import DraftContext
from .suffix_index import BREAK


def beginnings(request: DraftContext) -> list[Sequence[int]]:
    """Return the text of each row so far. An encoder-decoder's follows its source, if both have the same tokens.

    BREAK stands between them, and in place of tokens that no text has, such as those of images.
    """
    texts = without_placeholders(request.prompts(), request.target)
    sources = None if request.source is None else request.source.tokens(request.target)
    if sources is None:
        return texts
    known = without_placeholders(sources, request.target)
    return [[*source, BREAK, *text] for source, text in zip(known, texts, strict=True)]


def without_placeholders(texts: Sequence[Sequence[int]], target: Any) -> list[Sequence[int]]:
    """Put BREAK in place of the tokens of ``texts`` that ``target`` never writes, such as those of images.

    Some lie outside its vocabulary: a history would take them for tokens of another tokenizer. A few models fail
    where they read others as text.
    """
    known, absent = range(scored_vocabulary(target)), placeholders(target.config)
    return [_with_breaks(text, known, absent) for text in texts]


def _with_breaks(text: Sequence[int], known: range, absent: set[int]) -> Sequence[int]:
    if not text or (max(text) < known.stop and absent.isdisjoint(text)):
        return text
    return [token if token in known and token not in absent else BREAK for token in text]
