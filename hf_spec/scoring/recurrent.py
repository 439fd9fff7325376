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
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging

from ..counting import numbers_of, uploaded
from ..proposal import ABSENT, NO_PARENT, Proposal
from .cache import SlotCache
from .hooks import hooked
from .layers import keeps_state
from .masks import Block
from .names import CACHE
from .runner import ModelRunner, Scores, refuse_trees

logger = logging.get_logger(__name__)


class RecurrentRunner(ModelRunner):
    """What both ways share: transformers' cache can be given back where all rows end at the same length."""

    def _start(self, cache: DynamicCache, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._batch = batch
        self._live = Live(self.slots.cache.layers_with_states)
        self._states = self._new_states()
        self._set_aside: dict[int, tuple[int, list[Tensor]]] = {}  # length and states of rows that are done

    def _new_states(self) -> States | NodeStates:
        """Return what takes the states back where guesses were wrong."""
        raise NotImplementedError

    def reads_guesses_with_prompt(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        """Return False: the state behind the prompt is wanted, not the one behind guesses."""
        return False

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Go on with ``rows`` only; ``keep_finished`` saves the others for the cache that is handed back."""
        if keep_finished:
            self._set_rows_aside(set(range(len(self.slots.cache.batch))) - set(numbers_of(rows)))
        super().keep_rows(rows, keep_finished)
        self._states.keep_rows(rows)

    def _set_rows_aside(self, rows: Collection[int]) -> None:
        """Copy the states of ``rows``, which are those after all of their text but its last token."""
        cache = self.slots.cache
        self._read_carried(rows)
        for row in rows:
            states = [state[row].clone() for state in self._live]
            self._set_aside[cache.batch[row]] = cache.rows.cpu_lengths[row], states

    def _read_carried(self, rows: Collection[int]) -> None:
        """Let the states of ``rows`` take in all of their text that the target has scored."""

    def close_rows(self, going_on: list[int], last_tokens: Tensor) -> None:
        """Go on with some rows. The others end early, and no cache is given back: a state cannot be padded."""
        self.keep_rows(uploaded(going_on, last_tokens.device))

    def read_ends(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Do nothing: rows of different lengths get no cache back."""

    def release(self, committed: int) -> Cache | None:
        """Give transformers' cache back with all the text of rows that are equally long.

        ``None``, and one warning, where they are not: a state cannot be padded. ``None`` too for states that are in no
        cache of transformers, as ``generate`` itself does.
        """
        cache = self.slots.cache
        if not isinstance(cache.shown, Cache):
            return None
        alone, rest = self._batch == 1, range(len(cache.batch))
        if not self._ends_together(rest):
            logger.warning_once(
                f"{type(self.model).__name__}: {CACHE} is None in what is returned. The rows ended at different "
                "lengths, and a recurrent state cannot be padded. To go on from a cache, generate for one row at a "
                "time, or let all rows get equally many tokens."
            )
            return None
        if alone:
            self._read_carried(rest)
        else:
            self._set_rows_aside(rest)
        released = self.slots.release(committed)
        if not alone:
            rows = [states for _, (_, states) in sorted(self._set_aside.items())]
            self._live.replace([torch.stack(list(parts)) for parts in zip(*rows, strict=True)])
        return released

    def _ends_together(self, rest: Iterable[int]) -> bool:
        """Tell whether no row is lost, and those set aside and the ``rest`` have equally much text."""
        lengths = [length for length, _ in self._set_aside.values()] + [self._length(row) for row in rest]
        return len(lengths) == self._batch and len(set(lengths)) <= 1

    def _length(self, row: int) -> int:
        """Count the columns of a row whose tokens are text and scored."""
        length: int = self.slots.cache.rows.cpu_lengths[row]
        return length

    def abandon(self, committed: int) -> None:
        """Give transformers' cache back in the middle of a call: a single row's, as ``release`` does."""
        self.drop()
        if self._batch == 1:
            self.release(committed)


class LazyRunner(RecurrentRunner):
    """Score chains behind a text whose recurrent state is committed late."""

    _states: States
    _carried: list[list[int]]
    _block: list[list[int]]  # per row: carried tokens, root and guesses of the last forward

    def _new_states(self) -> States:
        self._carried = [[] for _ in range(self._batch)]
        return States(self.slots.cache.layers_with_states)

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
        """Go on with ``rows`` only; ``keep_finished`` saves the others for the cache that is handed back."""
        super().keep_rows(rows, keep_finished)
        self._carried = [self._carried[row] for row in numbers_of(rows)]

    def _read_carried(self, rows: Collection[int]) -> None:
        """Read what ``rows`` carry: a forward for each length of it, in which the states of other rows stay."""
        while pending := [row for row in rows if self._carried[row]]:
            width = min(len(self._carried[row]) for row in pending)
            self._block = [carried[:width] or [0] for carried in self._carried]
            self._read(self._block)
            settled = [row in pending for row in range(len(self._carried))]
            self._states.settle(settled)
            nowhere = torch.zeros(len(settled), 0, dtype=torch.long, device=self.slots.device)
            self.slots.commit(nowhere, [width if is_read else 0 for is_read in settled], in_place=True)
            self._carried = [
                carried[width:] if is_read else carried
                for carried, is_read in zip(self._carried, settled, strict=True)
            ]

    def _length(self, row: int) -> int:
        return super()._length(row) + len(self._carried[row])


class StepRunner(RecurrentRunner):
    """Score trees by letting every recurrent layer read token by token, with a state for each open node."""

    _states: NodeStates

    def _new_states(self) -> NodeStates:
        self._mixers = _mixers(self.model)
        return NodeStates(self.slots.cache, self._batch)

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

    def replace(self, states: Sequence[Tensor]) -> None:
        """Put ``states`` in place of those that are there, in the order in which they are listed."""
        there = [(holder, key) for holder, key in self._places if holder[key] is not None]
        for (holder, key), state in zip(there, states, strict=True):
            holder[key] = state


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
