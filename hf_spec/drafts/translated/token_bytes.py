"""What the tokens of a tokenizer write, in bytes: two tokenizers share a token if it writes the same in both."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ...scoring.plain import tokenizer_in

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_TOKEN = 6  # characters of <0xNN>, SentencePiece's token for one byte
LONGEST_CHARACTER = 4  # bytes in UTF-8

_made: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


class TokenBytes:
    """The bytes that each token of ``tokenizer`` writes in the middle of a text.

    ``of[id]`` is ``None`` for special tokens, which write nothing. ``ids`` maps bytes to the token that writes them:
    the first one, and a token of the vocabulary rather than one for a single byte. ``specials`` maps the names of
    special tokens to their ids. ``adds_space``: the tokenizer writes a space before every text, which is none of it.

    Byte-level, SentencePiece and WordPiece tokenizers are known by their decoders. Others write their tokens.

    Errors: a ValueError for a tokenizer without a backend of the tokenizers library.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library, so it is not known what its "
                "tokens write; load it with AutoTokenizer.from_pretrained, which converts most of them (one of "
                "mistral-common with mistral_format=False)"
            )
        self._tokenizer = weakref.ref(tokenizer)  # which is the key of what is kept here
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.specials = {token: id for token, id in vocabulary.items() if id in special}
        self.of: list[bytes | None] = [None] * (1 + max(vocabulary.values(), default=-1))
        writes = _writer(backend)
        for token, id in vocabulary.items():
            if id not in special:
                self.of[id] = token.encode() if id in added else writes(token)
        single = {id for token, id in vocabulary.items() if _is_byte(token)}
        self.ids: dict[bytes, int] = {}
        for id, data in sorted(enumerate(self.of), key=lambda pair: (pair[0] in single, pair[0])):
            if data:
                self.ids.setdefault(data, id)
        self.adds_space = self._encoded("a")[:1] != self._encoded("\na")[-1:]
        self._anchor = self._encoded("\n")

    def __reduce__(self) -> tuple[type[TokenBytes], tuple[Any]]:
        return TokenBytes, (self.tokenizer,)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer, which the user of this object keeps."""
        found = self._tokenizer()
        assert found is not None
        return found

    @classmethod
    def known(cls, tokenizer: Any) -> TokenBytes:
        """Return those of ``tokenizer``, made once: a large vocabulary takes about a second."""
        tokenizer = tokenizer_in(tokenizer)
        if tokenizer not in _made:
            _made[tokenizer] = cls(tokenizer)
        return _made[tokenizer]

    def written(self, tokens: Iterable[int]) -> bytes:
        """Return what ``tokens`` write."""
        return b"".join(self.of[token] or b"" for token in tokens if token < len(self.of))

    def is_special(self, token: int) -> bool:
        """Tell whether ``token`` writes nothing, or is not known to the tokenizer."""
        return token >= len(self.of) or self.of[token] is None

    def encode(self, data: bytes, starts: bool) -> list[int]:
        """Return the tokenizer's own tokens for ``data``, which is the beginning of a text or goes on in one.

        SentencePiece and others write a space before every text; going on, that is left out.
        """
        text = data.decode(errors="ignore")
        if not text:
            return []
        if not starts and self.adds_space:
            both = self._encoded(f"\n{text}")
            if both[: len(self._anchor)] == self._anchor:
                return both[len(self._anchor) :]
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return found


def whole_characters(data: bytes | bytearray) -> bytes:
    """Leave out a character at the end whose last bytes are not there yet."""
    for back in range(1, min(LONGEST_CHARACTER, 1 + len(data))):
        byte = data[-back]
        if byte >> 6 != 0b10:  # the first byte of a character says how many it has
            count = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return bytes(data[:-back] if count > back else data)
    return bytes(data)


def _writer(backend: Any) -> Any:
    """Return the function from a token to the bytes that it writes, by the decoder of ``backend``."""
    parts = [*_parts(backend.decoder), *_parts(backend.pre_tokenizer)]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        table = _byte_of_character()
        return lambda token: bytes(table[one] for one in token) if table.keys() >= {*token} else token.encode()
    if "WordPiece" in kinds or type(backend.model).__name__ == "WordPiece":
        mark = backend.model.continuing_subword_prefix
        return lambda token: token.removeprefix(mark).encode() if token.startswith(mark) else f" {token}".encode()
    if "BPEDecoder" in kinds:
        end = next(part["suffix"] for part in parts if part["type"] == "BPEDecoder")
        return lambda token: (f"{token.removesuffix(end)} " if token.endswith(end) else token).encode()
    spaced = "Metaspace" in kinds or any(part["type"] == "Replace" and SPACE in str(part) for part in parts)
    has_bytes = "ByteFallback" in kinds

    def written(token: str) -> bytes:
        if has_bytes and _is_byte(token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE, " ") if spaced else token).encode()

    return written


def _parts(one: Any) -> Iterator[dict[str, Any]]:
    """List a decoder or pre-tokenizer and its parts, as they are saved."""
    left: list[Any] = [] if one is None else [json.loads(one.__getstate__())]
    while left:
        part = left.pop()
        if isinstance(part, dict) and "type" in part:
            yield part
            left += [*part.get("decoders", ()), *part.get("pretokenizers", ())]


def _is_byte(token: str) -> bool:
    return len(token) == BYTE_TOKEN and token.startswith("<0x") and token.endswith(">")


def _byte_of_character() -> dict[str, int]:
    """Return the bytes that the characters of byte-level tokens stand for.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on (GPT-2).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in {*printable}]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def shared_tokens(target: TokenBytes, draft: TokenBytes) -> dict[int, int]:
    """Map the tokens of ``target`` to those of ``draft`` that write the same, or that have the same special name."""
    found = {id: draft.ids[data] for data, id in target.ids.items() if data in draft.ids}
    return found | {id: draft.specials[name] for name, id in target.specials.items() if name in draft.specials}
