"""Targets and drafts that keep a recurrent state, which cannot take rejected guesses back.

``LazyRunner`` (*lazy commit*) is for chains. The state is saved at the last point where everything read was text.
When a block turns out wrong somewhere, the state goes back there, and the tokens that did become text are *carried*:
they are the head of the next block, so that no extra forward is needed. ::

    saved state ┐
    block 1     [ x5 | a  b  c ]        root x5; a was right, b was not: text is x5 a x7
    block 2     [ x5 a | x7 | d  e ]    state went back; x5 and a are carried, x7 is the root
    block 3     [ x9 | ...              all of block 2 was right: its state is saved, nothing is carried

``StepRunner`` is for trees, for drafts, and for models that read a block differently from single tokens. Inside one
forward every recurrent layer reads token by token, each from the state that its parent left, and keeps a state per
open node; nothing is carried.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..counting import numbers_of, uploaded
from ..proposal import ABSENT, NO_PARENT, Proposal
from .cache import SlotCache
from .hooks import hooked
from .layers import keeps_state
from .masks import Block
from .runner import ModelRunner, Scores, refuse_trees


class RecurrentRunner(ModelRunner):
    """What both ways share: transformers' cache can be given back for a single row only."""

    _batch_is_whole = True

    def reads_guesses_with_prompt(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        """Return False: the state behind the prompt is wanted, not the one behind guesses."""
        return False

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; finished ones cannot be handed back, see ``release``."""
        super().keep_rows(rows)
        self._batch_is_whole = False

    def close_rows(self, going_on: list[int], last_tokens: Tensor) -> None:
        """Go on with some rows: several get no cache back."""
        self.keep_rows(uploaded(going_on, last_tokens.device))

    def read_ends(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Do nothing: several rows get no cache back."""

    def release(self, committed: int) -> Cache | None:
        """Give transformers' cache back with all the text of a single row.

        ``None`` for a larger batch: its rows end at different lengths, and a state cannot be padded. ``None`` too for
        states that are in no cache of transformers, as ``generate`` itself does.
        """
        cache = self.slots.cache
        if len(cache.rows.cpu_lengths) != 1 or not self._batch_is_whole or not isinstance(cache.shown, Cache):
            return None
        return self.slots.release(committed)

    def abandon(self, committed: int) -> None:
        """Give transformers' cache back in the middle of a call: a single row's, as ``release`` does."""
        self.drop()
        self.release(committed)


class LazyRunner(RecurrentRunner):
    """Score chains behind a text whose recurrent state is committed late."""

    _carried: list[list[int]]
    _block: list[list[int]]  # per row: carried tokens, root and guesses of the last forward

    def _start(self, cache: DynamicCache, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._states = States(self.slots.cache.layers_with_states)
        self._carried = [[] for _ in range(batch)]

    def fit(self, proposal: Proposal, limit: int) -> Proposal:
        """Keep what a row's carried tokens and guesses have room for in a block of ``2 * limit + 1`` columns.

        A row with a long carry so guesses less, until a whole block is text and its state is saved. The room is known
        before the guesses are, so that leaving some out changes no distribution.

        Errors: a ValueError if the proposal is a tree.
        """
        refuse_trees(proposal)
        width = max(2 * limit + 1, 1 + max(map(len, self._carried)))
        room = [width - 1 - len(carried) for carried in self._carried]
        longest = min(max(room), proposal.max_depth)
        steps = torch.arange(1 + longest, device=proposal.tokens.device)
        beyond = steps > uploaded(room, steps.device)[:, None]
        parents = proposal.parents[:, : 1 + longest].masked_fill(beyond, ABSENT)
        q = None if proposal.q is None else proposal.q[:, :longest]
        chosen = None if proposal.chosen is None else proposal.chosen[:, : 1 + longest]
        return Proposal(proposal.tokens[:, : 1 + longest], parents, longest, q, is_chain=True, chosen=chosen)

    def score(self, proposal: Proposal) -> Scores:
        """Read every row's carried tokens, root and guesses in one forward, and score its root and guesses."""
        rows = torch.cat([proposal.present.sum(1, keepdim=True), proposal.tokens], dim=1).tolist()  # in one transfer
        self._block = [
            carried + tokens[:length] for carried, (length, *tokens) in zip(self._carried, rows, strict=True)
        ]
        scores = self._read(self._block)
        skip = uploaded([len(carried) for carried in self._carried], self.slots.device)[:, None]
        columns = skip + torch.arange(proposal.tokens.shape[1], device=self.slots.device)
        return scores.at(columns.clamp(max=max(map(len, self._block)) - 1))

    def _inputs(self, tokens: Tensor, block: Block) -> dict[str, Any]:
        """Build the arguments of a forward; padding stands where its row ends, not beyond what the text may reach."""
        inputs = super()._inputs(tokens, block)
        if (positions := inputs.get("position_ids")) is not None:  # (..., batch, nodes)
            last = uploaded([len(row) - 1 for row in self._block], positions.device)
            column = torch.arange(tokens.shape[1], device=positions.device).minimum(last[:, None])
            inputs["position_ids"] = positions.gather(-1, column.expand_as(positions))
        return inputs

    def _read(self, rows: list[list[int]]) -> Scores:
        width = max(map(len, rows))
        tokens = uploaded([row + row[-1:] * (width - len(row)) for row in rows], self.slots.device)
        return self.extend(tokens)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Make ``counts[b]`` tokens behind the carried ones text; save the state of rows whose whole block is text."""
        width = max(map(len, self._block))
        ends = [len(carried) + count for carried, count in zip(self._carried, counts, strict=True)]
        settled = [end == width for end in ends]
        self._carried = [row[:end] if end < width else [] for row, end in zip(self._block, ends, strict=True)]
        self._states.settle(settled)
        self.slots.commit(path[:, :0], [width if all_text else 0 for all_text in settled], in_place=True)

    def drop(self) -> None:
        """Forget the last block, and take the states back to where they were saved; what is carried stays so."""
        super().drop()
        self._states.settle([False] * len(self._carried))

    def abandon(self, committed: int) -> None:
        """Give transformers' cache back in the middle of a call, with what is carried if the model can read it."""
        try:
            super().abandon(committed)
        except Exception:  # it may be what failed before: then the text of the saved state
            super().abandon(committed)

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; finished ones cannot be handed back, see ``release``."""
        super().keep_rows(rows)
        self._carried = [self._carried[row] for row in numbers_of(rows)]
        self._states.keep_rows(rows)

    def release(self, committed: int) -> Cache | None:
        """Give transformers' cache back with all the text of a single row, reading what it carries; else ``None``."""
        if len(self._carried) == 1 and self._carried[0]:
            self._block, self._carried = self._carried, [[]]
            self._read(self._block)
            self.commit(torch.zeros(1, 0, dtype=torch.long, device=self.slots.device), [len(self._block[0])])
        return super().release(committed)


class StepRunner(RecurrentRunner):
    """Score trees by letting every recurrent layer read token by token, with a state for each open node."""

    def _start(self, cache: DynamicCache, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._mixers = _mixers(self.model)
        self._states = NodeStates(self.slots.cache, batch)

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None, level: int | None = None) -> Scores:
        """Add ``tokens`` (batch, nodes) to the open forest and score them, as ``ModelRunner.extend`` does."""
        if ancestors is None:
            first = self.slots.cache.rows.open - 1
            parents = [[parent] * len(tokens) for parent in range(first, first + tokens.shape[1])]
        else:
            parents = _parents(ancestors)
        with contextlib.ExitStack() as stack:
            for mixer in self._mixers:
                stack.enter_context(_reading_by_token(mixer, self._states, parents))
            return super().extend(tokens, ancestors, level)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Make the first ``counts[b]`` nodes of ``path[b]`` (batch, m) text."""
        paths = [range(count) for count in counts] if in_place else path.tolist()
        last = [nodes[count - 1] if count else NO_PARENT for nodes, count in zip(paths, counts, strict=True)]
        self._states.commit(last)
        super().commit(path, counts, in_place, on_device)

    def drop(self) -> None:
        """Forget the open forest, and take the states back to where the text ends."""
        super().drop()
        self._states.drop()

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; finished ones cannot be handed back, see ``release``."""
        super().keep_rows(rows)
        self._states.keep_rows(rows)


class States:
    """The recurrent states of a cache, and a copy of each row's from when all it had read was text."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._live = Live(layers)
        self._saved = self._live.copy()

    def settle(self, right: Sequence[bool]) -> None:
        """Save the states of the rows that are ``right`` and take the others back to what was saved."""
        keep = {device: uploaded(right, device) for device in {saved.device for saved in self._saved}}
        for saved, live in zip(self._saved, self._live, strict=True):
            saved.copy_(torch.where(keep[live.device].view(-1, *[1] * (live.ndim - 1)), live, saved))
            live.copy_(saved)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self._live.keep_rows(rows)
        self._saved = [saved.index_select(0, rows.to(saved.device)) for saved in self._saved]


class NodeStates:
    """The recurrent states of a cache behind every open node, kept as modules read and write them node by node."""

    def __init__(self, cache: SlotCache, batch: int) -> None:
        self._cache = cache
        layers: list[Any] = cache.layers
        self._branches = {
            (index, number): Branches(layer, number, batch)
            for index, layer in enumerate(layers)
            if keeps_state(layer)
            for number in layer.conv_states
        }

    @contextlib.contextmanager
    def behind(self, parents: list[int]) -> Iterator[None]:
        """Show what reads the cache in here the states behind node ``parents[b]`` of row b, and keep its own."""
        touched: dict[tuple[int, int], Branches] = {}

        def touch(layer: int, number: int) -> None:
            if (place := (layer, number)) not in touched:
                touched[place] = self._branches[place]
                touched[place].read_behind(parents)

        self._cache.touch = touch
        try:
            yield
        finally:
            self._cache.touch = None
        for branches in touched.values():
            branches.add_node()

    def commit(self, last: list[int]) -> None:
        """Make the states behind node ``last[b]`` of row b those behind the text, and forget the others."""
        for branches in self._branches.values():
            branches.commit(last)

    def drop(self) -> None:
        """Go back to the states behind the text, wherever a forward has stopped."""
        for branches in self._branches.values():
            branches.drop()

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        for branches in self._branches.values():
            branches.keep_rows(rows)


class Branches:
    """One state behind the text and behind every open node; its layer holds that of one of them per row."""

    def __init__(self, layer: Any, number: int, batch: int) -> None:
        self._live = Live([layer], number)
        self._saved: list[list[Tensor]] = []  # behind the text, then behind each open node
        self._at = [NO_PARENT] * batch  # the node whose state the layer holds, per row

    def read_behind(self, parents: list[int]) -> None:
        """Let row b go on behind node ``parents[b]``, -1 being the text."""
        if not self._saved:
            self._saved.append(self._live.copy())
        self._go_to(parents)

    def add_node(self) -> None:
        """Keep what the layer holds as the state behind a new node."""
        self._saved.append(self._live.copy())
        self._at = [len(self._saved) - 2] * len(self._at)

    def commit(self, last: list[int]) -> None:
        """Make the state behind node ``last[b]`` of row b the one behind the text, and forget the others."""
        if self._saved:  # some layers have room for states that nobody uses
            self._go_to(last)
        self._saved, self._at = [], [NO_PARENT] * len(last)

    def drop(self) -> None:
        """Go back to the state behind the text, whatever the layer holds now."""
        if self._saved:
            for saved, live in zip(self._saved[0], self._live, strict=True):
                live.copy_(saved)
        self._saved, self._at = [], [NO_PARENT] * len(self._at)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only; a draft's nodes may still be open."""
        self._live.keep_rows(rows)
        self._saved = [[state.index_select(0, rows.to(state.device)) for state in states] for states in self._saved]
        self._at = [self._at[row] for row in numbers_of(rows)]

    def _go_to(self, nodes: list[int]) -> None:
        for node in set(nodes):
            rows = [row for row, wanted in enumerate(nodes) if wanted == node != self._at[row]]
            for saved, live in zip(self._saved[1 + node], self._live, strict=True) if rows else ():
                if len(rows) == len(nodes):
                    live.copy_(saved)
                else:
                    index = _index(tuple(rows), live.device)
                    live[index] = saved[index]
        self._at = nodes


@functools.lru_cache(maxsize=256)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``rows`` (n,) as a tensor, once: every layer asks for them, at every node."""
    return uploaded(rows, device)


class Live:
    """States as transformers' layers hold them, in dicts: kernels write in place, some models put a new tensor there.

    ``number`` picks one where a layer has several.
    """

    def __init__(self, layers: Sequence[Any], number: int | None = None) -> None:
        holders = [holder for layer in layers for holder in (layer.conv_states, layer.recurrent_states)]
        self._places = [(holder, key) for holder in holders for key in holder if number in (None, key)]

    def __iter__(self) -> Iterator[Tensor]:
        return (holder[key] for holder, key in self._places if holder[key] is not None)

    def copy(self) -> list[Tensor]:
        """Return copies."""
        return [state.clone() for state in self]

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        for holder, key in self._places:
            if (state := holder[key]) is not None:
                holder[key] = state.index_select(0, rows.to(state.device))


def _parents(ancestors: Tensor) -> list[list[int]]:
    """Find the parent of every new node, nodes outside and rows inside, in ``ancestors`` (batch, nodes, forest)."""
    new, forest = ancestors.shape[1:]
    above = ancestors.clone()
    above[:, range(new), range(forest - new, forest)] = False  # a node is among its own ancestors
    numbers = torch.arange(forest, device=above.device)
    found: list[list[int]] = torch.where(above, numbers, NO_PARENT).amax(2).T.tolist()
    return found


def _mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the outermost modules that put a state into the cache, as their code says."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    for module in model.modules():  # from outside to inside
        if module not in seen and _writes_state(type(module)):
            found.append(module)
            seen.update(module.modules())
    return found


def _writes_state(kind: type[nn.Module]) -> bool:
    methods = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value))
    return any({"update_conv_state", "update_recurrent_state"} & {*method.__code__.co_names} for method in methods)


@contextlib.contextmanager
def _reading_by_token(mixer: nn.Module, states: NodeStates, parents: list[list[int]]) -> Iterator[None]:
    """Let ``mixer`` read node by node during a forward, each behind its parent; ``parents[node][row]`` is a node.

    The context in which the first node is read is opened in the hook before the call and closed in the hook after it,
    or here if the call raises. The hook after the call then reads the other nodes and joins the outputs.
    """
    given: tuple[Any, Any] = (), {}

    def arguments(node: int) -> Any:
        """Return the arguments of the call, with the column of one node where they have one per node."""

        def column(value: Any) -> Any:
            has_columns = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == len(parents)
            return value[:, node : node + 1] if has_columns else value

        args, kwargs = given
        return tuple(map(column, args)), {name: column(value) for name, value in kwargs.items()}

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal given
        given = args, kwargs
        reading_first.enter_context(states.behind(parents[0]))
        return arguments(0)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        reading_first.close()
        outputs = [output]
        for node, above in enumerate(parents[1:], start=1):
            args, kwargs = arguments(node)
            with states.behind(above):
                outputs.append(module.forward(*args, **kwargs))
        return _joined(outputs)

    with contextlib.ExitStack() as reading_first, hooked([mixer], before, after):
        yield


def _joined(outputs: Sequence[Any]) -> Any:
    """Put single tokens' outputs together: tensors (batch, 1, ...) or tuples of them."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
