"""Compare the bits of a row, read in different ways, before a model is said to be invariant."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..proposal import Proposal
from ..scoring.architectures import cache_name
from ..scoring.factory import runner_for
from ..scoring.hooks import hooked
from ..scoring.plain import difference, new_cache, position_limit, prompt_kwargs
from ..scoring.prompts import tokens_for
from .columns import places_of_parts, short_parts
from .sources import encoded, read_text

APART = 0.3  # of the spread of logits, what rounding cannot do to half of the tokens
LAST = 6  # tokens of a text that are compared
PADDED = (0, 3, 7)  # tokens of left padding of the rows of a batch
PARENTS = (-1, 0, 0, 1, 2, 3, 4)  # of a tree; the text is the path to its last node
PATH = (0, 2, 4, 6)

States = list[Tensor]  # of the last tokens: logits and each hidden state, (tokens, width)
Begun = dict[tuple[int, ...], tuple[Any, States]]  # caches and states after first tokens, which several ways share
Way = Callable[[Begun], States]


def check_bits(model: Any) -> Tensor:
    """Raise a ValueError unless a row's logits and hidden states have the same bits in each way of reading it.

    The ways are: token by token, in blocks, at once, in a batch with padding, and as a path of a tree. A source of an
    encoder-decoder model is read alone, and in a batch with padding. The error names the first module that computes
    other bits. For that a short text with few late keys does as well as a long one. A text with as many late keys as
    usual is read token by token, and in one block.

    The result are the logits of the long text's last tokens, (tokens, vocabulary).
    """
    with short_parts():
        ids = _text_for(model)
        _compare(model, ids, _ways(model, ids))
    ids = _text_for(model)
    return _compare(model, ids, [("in blocks", lambda begun: _alone(model, ids, [LAST], begun))])[-1]


def logits_at_once(model: Any) -> Tensor:
    """Return the logits of the last tokens of a text that is read at once, (tokens, vocabulary)."""
    return _alone(model, _text_for(model), [], {})[-1]


def check_close(model: Any, found: Tensor, outside: Tensor) -> None:
    """Raise a ValueError if the logits ``found`` are others than those ``outside`` of the mode, by more than rounding.

    Attention may get an argument that the mode does not know. Few tokens may differ: rounding sends some to other
    experts.
    """
    apart = float(difference(found, outside).median())
    if not apart <= APART:
        raise ValueError(
            f"{type(model).__name__} cannot be made invariant: its logits would differ from transformers' by "
            f"{apart:.2g} of their spread, so something in its attention is not known."
        )


def _length() -> int:
    """Return the length of a text of whose last tokens some have early keys and some have none."""
    return places_of_parts() * 3 // 2 + LAST // 2 + 1


def _text_for(model: Any) -> Tensor:
    limit = position_limit(model)
    return tokens_for(model, 1, _length() if limit is None else min(_length(), limit - max(PADDED) - 1))


def _ways(model: Any, ids: Tensor) -> Iterator[tuple[str, Way]]:
    yield "at once", lambda begun: _alone(model, ids, [], begun)
    yield "in blocks", lambda begun: _alone(model, ids, [2, LAST - 2], begun)
    yield "in pieces", lambda begun: _alone(model, ids, [ids.shape[1] // 4, 5, LAST], begun)
    yield "in a batch, with padding", lambda begun: _in_batch(model, ids, [1] * LAST, begun)
    yield "in a batch, in blocks", lambda begun: _in_batch(model, ids, [LAST], begun)
    yield "as a chain of draft tokens", lambda _: _scored(model, ids, tuple(range(-1, LAST - 1)), tuple(range(LAST)))
    yield "as a path of a tree", lambda _: _scored(model, ids, PARENTS, PATH)


def _compare(model: Any, ids: Tensor, ways: Iterable[tuple[str, Way]]) -> States:
    """Read the text ``ids`` token by token and in each of the ``ways``; return its states."""
    begun: Begun = {}

    def one_by_one(begun: Begun) -> States:
        return _alone(model, ids, [1] * LAST, begun)

    wanted = one_by_one(begun)
    for name, read in ways:
        if not _equal(read(begun), wanted):
            where = _first_difference(model, one_by_one, read)
            raise ValueError(f"{type(model).__name__} cannot be made invariant: {where} when its row is read {name}.")
    return wanted


def _equal(found: States, wanted: States) -> bool:
    """Compare the last tokens: as many as both have."""
    return all(
        torch.equal(one[-count:], other[-count:])
        for one, other in zip(found, wanted, strict=True)
        for count in [min(len(one), len(other))]
    )


def _alone(model: Any, ids: Tensor, pieces: Sequence[int], begun: Begun) -> States:
    return _read(model, ids, torch.ones_like(ids), pieces, begun)


def _in_batch(model: Any, ids: Tensor, pieces: Sequence[int], begun: Begun) -> States:
    """Read rows of which the last is ``ids``, padded on the left; the others are shorter and longer.

    Texts after sources are equally long: few decoders take the padding of others.
    """
    padding = PADDED if not model.config.is_encoder_decoder else [0] * len(PADDED)
    width = ids.shape[1] + padding[1]
    rows = tokens_for(model, len(padding), width, 1).to(ids.device)
    mask = torch.ones_like(rows)
    rows[-1, padding[1] :] = ids[0]
    mask[1, : padding[2]], mask[-1, : padding[1]] = 0, 0
    return _read(model, rows, mask, pieces, begun)


def _read(model: Any, ids: Tensor, mask: Tensor, pieces: Sequence[int], begun: Begun) -> States:
    """Read a beginning and then ``pieces`` of so many tokens; return the states of the last row's last tokens.

    A beginning that is in ``begun`` is not read again.
    """
    source, states = encoded(model, len(ids), _length())
    kwargs = prompt_kwargs(model, ids, mask, source=source or None)
    name, found, begin = cache_name(model), [], 0
    cache, counts = kwargs[name], (ids.shape[1] - sum(pieces), *pieces)
    for count in counts:
        end, key = begin + count, (len(ids), count)
        if begin == 0 and key in begun:
            cache, read = _copied(begun[key][0]), begun[key][1]
        else:
            asked = {name: cache, "use_cache": True, "output_hidden_states": True, **source}
            if (positions := kwargs.get("position_ids")) is not None:
                asked["position_ids"] = positions[..., begin:end]
            if not bool(mask.all()):
                asked["attention_mask"] = mask[:, :end]
            if begin == 0 and model._supports_logits_to_keep():
                asked["logits_to_keep"] = LAST
            outputs = read_text(model, ids[:, begin:end], **asked)
            hidden = outputs.decoder_hidden_states if source else outputs.hidden_states
            read = _of_tokens(hidden, outputs.logits)
            if begin == 0 and len(counts) > 1:
                begun[key] = _copied(cache), read
        found.append(read)
        begin = end
    return states + [torch.cat(parts)[-LAST:] for parts in zip(*found, strict=True)]


def _copied(cache: Any) -> Any:
    """Return a copy of ``cache``. Its tensors are copied as such: not all devices copy the memory below them."""
    return copy.deepcopy(cache, {id(tensor): tensor.clone() for tensor in _tensors_in(cache)})


def _tensors_in(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
        return
    inner: Iterable[Any] = thing if isinstance(thing, list | tuple) else ()
    if isinstance(thing, dict | Cache | CacheLayerMixin):
        inner = (thing if isinstance(thing, dict) else vars(thing)).values()
    for one in inner:
        yield from _tensors_in(one)


def _scored(model: Any, ids: Tensor, parents: tuple[int, ...], path: tuple[int, ...]) -> States:
    """Score the last tokens as the ``path`` of a tree, in the second of two rows of unequal lengths."""
    start, padding = ids.shape[1] - len(path), 0 if model.config.is_encoder_decoder else PADDED[1]
    rows = tokens_for(model, 2, start + padding, 2).to(ids.device)
    mask = torch.ones_like(rows)
    rows[-1, padding:] = ids[0, :start]
    mask[-1, :padding] = 0
    source, states = encoded(model, len(rows), _length())
    is_chain = path == tuple(range(len(parents)))
    runner = runner_for(model, new_cache(model), hidden_states=True, one_chain=is_chain)
    runner.prefill_tokens(rows, mask, source=source or None)
    tokens = tokens_for(model, 2, len(parents), 3).to(ids.device)
    tokens[-1, list(path)] = ids[0, start:]
    wide = torch.tensor([parents] * 2, device=ids.device)
    scores = runner.score(Proposal(tokens, wide, len(parents), is_chain=is_chain))
    runner.rollback()
    return states + [one[list(path)] for one in _of_tokens(scores.hidden_states, scores.logits)]


def _of_tokens(hidden_states: Sequence[Tensor], logits: Tensor) -> States:
    """Return the states of the last row, (tokens, width) each; several streams of hidden states are left out."""
    return [states[-1] for states in (*hidden_states, logits) if states.ndim == logits.ndim]


def _first_difference(model: Any, *ways: Way) -> str:
    """Name the first module whose output for one token differs between two ways of reading it.

    It is the last token of the text, and the first one of a source: sources are padded on the right.
    """
    of_source = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    outputs = []
    for read in ways:
        found: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, args: Any, output: Any, found: dict[nn.Module, Tensor] = found) -> None:
            states = output[0] if isinstance(output, tuple) and output else output
            if isinstance(states, Tensor) and states.ndim == 3 and len(states) <= len(PADDED):  # else biases of places
                found.pop(module, None)  # the order is that of the last forward
                found[module] = states[-1, 0 if module in of_source else -1]

        with hooked(list(model.modules()), after=note):
            read({})
        outputs.append(found)
    names = {module: place for place, module in model.named_modules()}
    for module, states in outputs[0].items():
        other = outputs[1].get(module)
        if other is not None and other.shape == states.shape and not torch.equal(other, states):
            return f"{names[module]} ({type(module).__name__}) computes other bits"
    return "something outside of its modules computes other bits"
