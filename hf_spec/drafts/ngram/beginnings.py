"""What n-grams are looked up in from the start of a call: the prompts, and the sources of an encoder-decoder."""

from __future__ import annotations

from ..base import DraftContext
from .suffix_index import BREAK


def beginnings(request: DraftContext) -> list[list[int]]:
    """Return the text of each row so far. An encoder-decoder's follows its source, if both have the same tokens.

    BREAK stands between them, and in place of tokens of the source that the target cannot write.
    """
    prompts = request.prompts()
    sources = None if request.source is None else request.source.tokens(request.target)
    if sources is None:
        return prompts
    known = range(request.vocabulary)
    return [
        [*(token if token in known else BREAK for token in source), BREAK, *prompt]
        for source, prompt in zip(sources, prompts, strict=True)
    ]
