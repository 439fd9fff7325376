"""Whether the token ids of a draft mean what those of the target do, or have to be translated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..drafts.vanilla.speculator import MOST_PADDING


def needs_translation(own: Any, wanted: Any) -> bool:
    """Tell whether a draft with the tokenizer ``own`` has to be translated for a target with ``wanted``.

    It has to if a token that texts use has another id, or none:

    - a token that was trained with the vocabulary, and not added later;
    - an added one that begins or ends texts, or that a chat template names.

    Other added tokens, such as reserved ones, do not count. Neither do tokens that only the larger tokenizer has, if
    they are so few that they may be padding.
    """
    ids, others = own.get_vocab(), wanted.get_vocab()
    if abs(len(ids) - len(others)) >= MOST_PADDING:
        return True
    used = {*_used(own), *_used(wanted)}
    if any(token in ids and token in others and ids[token] != others[token] for token in used):
        return True
    names, added = {id: token for token, id in others.items()}, {*_added(own), *_added(wanted)}
    for token, id in ids.items():
        other = names.get(id, token)
        if token != other and (token in used or other in used or not {token, other} <= added):
            return True
    return False


def _added(tokenizer: Any) -> Iterable[str]:
    added = tokenizer.added_tokens_decoder
    if callable(added):  # mistral-common knows special tokens alone
        return list(tokenizer.all_special_tokens)
    return (token.content for token in added.values())


def _used(tokenizer: Any) -> Iterable[str]:
    """Yield the added tokens of ``tokenizer`` that every text has, or that its chat template writes."""
    template = str(tokenizer.chat_template or "")
    for token in _added(tokenizer):
        if token in (tokenizer.bos_token, tokenizer.eos_token) or token in template:
            yield token
