"""Targets and drafts with a recurrent state, from which rejected draft tokens cannot be removed.

``SnapshotRunner`` (*lazy commit*) is for chains. The state is saved where everything read so far was accepted.
When a block holds a rejected token, the state is rolled back to that point. The accepted tokens of the block are
*carried*: they become the head of the next block, so that no extra forward is needed. ::

    saved state ┐
    block 1     [ x5 | a  b  c ]        root x5; a is accepted, b is rejected: the sequence is x5 a x7
    block 2     [ x5 a | x7 | d  e ]    state rolled back; x5 and a are carried, x7 is the root
    block 3     [ x9 | ...              all of block 2 was accepted: its state is saved, nothing is carried

``PerTokenRunner`` is for trees, for drafts, and for models that read a block unlike single tokens. Inside one
forward every recurrent layer reads token by token, each from the state after its parent. It keeps a state per open
node; nothing is carried.
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

from ..device_tensors import to_device, to_list
from ..proposal import NO_PARENT, Proposal
from .cache import TreeKVCache
from .hooks import hooked
from .layers import keeps_state
from .masks import TreeMask
from .names import CACHE
from .runner import ModelRunner, Scores

logger = logging.get_logger(__name__)


class RecurrentRunner(ModelRunner):
    """What both runners share: transformers' cache can be returned if all rows end at the same length."""

    def _start(self, cache: DynamicCache, batch: int, *args: Any) -> None:
        super()._start(cache, batch, *args)
        self._batch = batch
        self._live = Live(self.slots.cache.layers_with_states)
        self._states = self._new_states()
        self._set_aside: dict[int, tuple[int, list[Tensor]]] = {}  # by batch index: length and states of finished rows

    def _new_states(self) -> States | NodeStates:
        """Return the object that rolls states back after rejections."""
        raise NotImplementedError

    def verifies_with_prompt(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        """Return False: the state after the prompt is needed, and not the one after draft tokens."""
        return False

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for the returned cache."""
        if keep_finished:
            self._set_rows_aside(set(range(len(self.slots.cache.batch))) - set(to_list(rows)))
        super().keep_rows(rows, keep_finished)
        self._states.keep_rows(rows)

    def _set_rows_aside(self, rows: Collection[int]) -> None:
        """Copy the states of ``rows`` after all of their tokens but the last emitted one."""
        cache = self.slots.cache
        self._read_carried(rows)
        for row in rows:
            states = [state[row].clone() for state in self._live]
            self._set_aside[cache.batch[row]] = cache.rows.cpu_lengths[row], states

    def _read_carried(self, rows: Collection[int]) -> None:
        """Bring the states of ``rows`` up to all accepted tokens that the target has scored."""

    def finish_rows(self, going_on: list[int], last_tokens: Tensor) -> None:
        """Keep the rows ``going_on``. The others end early, and no cache is returned: a state cannot be padded."""
        self.keep_rows(to_device(going_on, last_tokens.device))

    def read_last_tokens(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Do nothing: rows of different lengths get no cache back."""

    def release(self, committed: int) -> Cache | None:
        """Return transformers' cache with all tokens, if the rows are equally long.

        Otherwise return ``None``, and warn once: a state cannot be padded. States that are in no cache of transformers
        give ``None`` too, as in plain ``generate``.
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
        """Tell whether no row is missing, and the rows set aside and the ``rest`` are equally long."""
        lengths = [length for length, _ in self._set_aside.values()] + [self._length(row) for row in rest]
        return len(lengths) == self._batch and len(set(lengths)) <= 1

    def _length(self, row: int) -> int:
        """Count the columns of a row that are accepted and that the target has scored."""
        length: int = self.slots.cache.rows.cpu_lengths[row]
        return length

    def abandon(self, committed: int) -> None:
        """Write back to transformers' cache in the middle of a call, at batch size 1 only, as ``release`` does."""
        self.rollback()
        if self._batch == 1:
            self.release(committed)


class SnapshotRunner(RecurrentRunner):
    """A runner for chains with lazy commit: the saved state may lag behind the accepted tokens."""

    _states: States
    _carried: list[list[int]]
    _block: list[list[int]]  # per row: carried tokens, root and draft tokens of the last forward

    def _new_states(self) -> States:
        self._carried = [[] for _ in range(self._batch)]
        return States(self.slots.cache.layers_with_states)

    def clip(self, proposal: Proposal, limit: int) -> Proposal:
        """Drop draft tokens until each row's carried tokens, root and draft tokens fit into a block.

        The block has ``2 * limit + 1`` columns. So a row that carries many tokens gets fewer draft tokens, until a
        complete block is accepted and its state saved. How many fit is known before drafting, so that dropping some
        does not bias the output.
        """
        width = max(2 * limit + 1, 1 + max(map(len, self._carried)))
        room = [width - 1 - len(carried) for carried in self._carried]
        return proposal.truncate(max(room)).truncate_rows(room)

    def score(self, proposal: Proposal) -> Scores:
        """Read carried tokens, root and draft tokens of all rows in one forward; score the root and draft tokens."""
        rows = torch.cat([proposal.present.sum(1, keepdim=True), proposal.tokens], dim=1).tolist()  # in one transfer
        self._block = [
            carried + tokens[:length] for carried, (length, *tokens) in zip(self._carried, rows, strict=True)
        ]
        scores = self._read(self._block)
        skip = to_device([len(carried) for carried in self._carried], self.slots.device)[:, None]
        columns = skip + torch.arange(proposal.tokens.shape[1], device=self.slots.device)
        return scores.at(columns.clamp(max=max(map(len, self._block)) - 1))

    def _inputs(self, tokens: Tensor, block: TreeMask) -> dict[str, Any]:
        """Build the arguments of a forward; padding gets the position of its row's last token.

        Positions beyond that might exceed the maximum length.
        """
        inputs = super()._inputs(tokens, block)
        if (positions := inputs.get("position_ids")) is not None:  # (..., batch, nodes)
            last = to_device([len(row) - 1 for row in self._block], positions.device)
            column = torch.arange(tokens.shape[1], device=positions.device).minimum(last[:, None])
            inputs["position_ids"] = positions.gather(-1, column.expand_as(positions))
        return inputs

    def _read(self, rows: list[list[int]]) -> Scores:
        width = max(map(len, rows))
        tokens = to_device([row + row[-1:] * (width - len(row)) for row in rows], self.slots.device)
        return self.extend(tokens)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit ``counts[b]`` tokens after the carried ones; save the states of rows with a fully accepted block."""
        width = max(map(len, self._block))
        ends = [len(carried) + count for carried, count in zip(self._carried, counts, strict=True)]
        settled = [end == width for end in ends]
        self._carried = [row[:end] if end < width else [] for row, end in zip(self._block, ends, strict=True)]
        self._states.settle(settled)
        self.slots.commit(path[:, :0], [width if all_text else 0 for all_text in settled], in_place=True)

    def rollback(self) -> None:
        """Drop the last block, and roll the states back to the saved ones; carried tokens stay carried."""
        super().rollback()
        self._states.settle([False] * len(self._carried))

    def abandon(self, committed: int) -> None:
        """Write to transformers' cache in the middle of a call, carried tokens too if the model can read them."""
        try:
            super().abandon(committed)
        except Exception:  # the model itself may be what failed: then without the carried tokens
            super().abandon(committed)

    def keep_rows(self, rows: Tensor, keep_finished: bool = False) -> None:
        """Keep ``rows`` only; ``keep_finished`` saves the others for the returned cache."""
        super().keep_rows(rows, keep_finished)
        self._carried = [self._carried[row] for row in to_list(rows)]

    def _read_carried(self, rows: Collection[int]) -> None:
        """Read the carried tokens of ``rows``: one forward per different length, which keeps other rows' states."""
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

    @property
    def read_lengths(self) -> tuple[Tensor, list[int]]:
        """Count carried tokens too: their keys stay in the slots where the last block has written them."""
        lengths = self.slots.cache.rows.cpu_lengths
        held = [length + len(carried) for length, carried in zip(lengths, self._carried, strict=True)]
        return to_device(held, self.slots.device), held

    def _length(self, row: int) -> int:
        return super()._length(row) + len(self._carried[row])


class PerTokenRunner(RecurrentRunner):
    """A runner for trees: every recurrent layer reads token by token and keeps a state for each open node."""

    _states: NodeStates

    def _new_states(self) -> NodeStates:
        self._mixers = _mixers(self.model)
        return NodeStates(self.slots.cache, self._batch)

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None, depth: int | None = None) -> Scores:
        """Add ``tokens`` (batch, nodes) to the draft region and score them, as ``ModelRunner.extend`` does."""
        if ancestors is None:
            first = self.slots.cache.rows.draft_nodes - 1
            parents = [[parent] * len(tokens) for parent in range(first, first + tokens.shape[1])]
        else:
            parents = _parents(ancestors)
        with contextlib.ExitStack() as stack:
            for mixer in self._mixers:
                stack.enter_context(_reading_by_token(mixer, self._states, parents))
            return super().extend(tokens, ancestors, depth)

    def commit(
        self, path: Tensor, counts: Sequence[int], in_place: bool = False, on_device: Tensor | None = None
    ) -> None:
        """Commit the first ``counts[b]`` nodes of ``path[b]`` (batch, m)."""
        paths = [range(count) for count in counts] if in_place else path.tolist()
        last = [nodes[count - 1] if count else NO_PARENT for nodes, count in zip(paths, counts, strict=True)]
        self._states.commit(last)
        super().commit(path, counts, in_place, on_device)

    def rollback(self) -> None:
        """Drop the draft region, and roll the states back to the last committed token."""
        super().rollback()
        self._states.rollback()


class States:
    """The recurrent states of a cache, and a saved copy of each row's from when all it had read was accepted."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._live = Live(layers)
        self._saved = self._live.copy()

    def settle(self, right: Sequence[bool]) -> None:
        """Save the states of rows that are ``right`` (their block was fully accepted); roll the others back."""
        keep = {device: to_device(right, device) for device in {saved.device for saved in self._saved}}
        for saved, live in zip(self._saved, self._live, strict=True):
            saved.copy_(torch.where(keep[live.device].view(-1, *[1] * (live.ndim - 1)), live, saved))
            live.copy_(saved)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        self._live.keep_rows(rows)
        self._saved = [saved.index_select(0, rows.to(saved.device)) for saved in self._saved]


class NodeStates:
    """The recurrent states of a cache after every open node, stored as modules read and write them node by node."""

    def __init__(self, cache: TreeKVCache, batch: int) -> None:
        self._cache = cache
        layers: list[Any] = cache.layers
        self._branches = {
            (index, number): Branches(layer, number, batch)
            for index, layer in enumerate(layers)
            if keeps_state(layer)
            for number in layer.conv_states
        }

    @contextlib.contextmanager
    def after_parents(self, parents: list[int]) -> Iterator[None]:
        """Give modules in this context the states after node ``parents[b]`` of row b; store those that they write."""
        touched: dict[tuple[int, int], Branches] = {}

        def on_access(layer: int, number: int) -> None:
            if (place := (layer, number)) not in touched:
                touched[place] = self._branches[place]
                touched[place].read_after(parents)

        self._cache.on_access = on_access
        try:
            yield
        finally:
            self._cache.on_access = None
        for branches in touched.values():
            branches.add_node()

    def commit(self, last: list[int]) -> None:
        """Commit the states after node ``last[b]`` of row b, and drop the others."""
        for branches in self._branches.values():
            branches.commit(last)

    def rollback(self) -> None:
        """Roll back to the committed states, also after a forward that failed half-way."""
        for branches in self._branches.values():
            branches.rollback()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only."""
        for branches in self._branches.values():
            branches.keep_rows(rows)


class Branches:
    """The committed value of one state, and its value after every open node; the layer holds one of them per row."""

    def __init__(self, layer: Any, number: int, batch: int) -> None:
        self._live = Live([layer], number)
        self._saved: list[list[Tensor]] = []  # the committed value, then that after each open node
        self._at = [NO_PARENT] * batch  # the node whose state the layer holds, per row

    def read_after(self, parents: list[int]) -> None:
        """Let row b continue after node ``parents[b]``; -1 is the last committed token."""
        if not self._saved:
            self._saved.append(self._live.copy())
        self._go_to(parents)

    def add_node(self) -> None:
        """Store what the layer holds as the state after a new node."""
        self._saved.append(self._live.copy())
        self._at = [len(self._saved) - 2] * len(self._at)

    def commit(self, last: list[int]) -> None:
        """Commit the state after node ``last[b]`` of row b, and drop the others."""
        if self._saved:  # some layers declare states that no module uses
            self._go_to(last)
        self._saved, self._at = [], [NO_PARENT] * len(last)

    def rollback(self) -> None:
        """Roll back to the committed state, whatever the layer holds now."""
        if self._saved:
            for saved, live in zip(self._saved[0], self._live, strict=True):
                live.copy_(saved)
        self._saved, self._at = [], [NO_PARENT] * len(self._at)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only; a draft's nodes may still be open."""
        self._live.keep_rows(rows)
        self._saved = [[state.index_select(0, rows.to(state.device)) for state in states] for states in self._saved]
        self._at = [self._at[row] for row in to_list(rows)]

    def _go_to(self, nodes: list[int]) -> None:
        for node in set(nodes):
            rows = [row for row, wanted in enumerate(nodes) if wanted == node != self._at[row]]  # copy no others
            for saved, live in zip(self._saved[1 + node], self._live, strict=True) if rows else ():
                if len(rows) == len(nodes):
                    live.copy_(saved)
                else:
                    index = _index(tuple(rows), live.device)
                    live[index] = saved[index]
        self._at = nodes


@functools.lru_cache(maxsize=256)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``rows`` (n,) as a cached tensor: every layer asks for it, at every node."""
    return to_device(rows, device)


class Live:
    """Views of the states in the dicts of transformers' layers, also after a model has replaced a tensor there.

    Kernels write in place; some models store a new tensor. ``number`` selects one state where a layer has several.
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
        """Keep ``rows`` only."""
        for holder, key in self._places:
            if (state := holder[key]) is not None:
                holder[key] = state.index_select(0, rows.to(state.device))

    def replace(self, states: Sequence[Tensor]) -> None:
        """Replace the states by ``states``, in the order of iteration."""
        there = [(holder, key) for holder, key in self._places if holder[key] is not None]
        for (holder, key), state in zip(there, states, strict=True):
            holder[key] = state


def _parents(ancestors: Tensor) -> list[list[int]]:
    """Return the parent of every new node, ``[node][row]``, from ``ancestors`` (batch, nodes, draft nodes).

    It is the other ancestor with the highest number, because parents come before their children.
    """
    new, forest = ancestors.shape[1:]
    above = ancestors.clone()
    above[:, range(new), range(forest - new, forest)] = False  # a node counts as its own ancestor
    numbers = torch.arange(forest, device=above.device)
    found: list[list[int]] = torch.where(above, numbers, NO_PARENT).amax(2).T.tolist()
    return found


def _mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the outermost modules whose code writes a state to the cache."""
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
    """Let ``mixer`` read node by node in a forward, each after its parent, which is node ``parents[node][row]``.

    The model's own call reads the first node, in a context that the pre-forward hook opens. The forward hook closes
    it, or this function if the call raises. The forward hook then reads the other nodes, and joins the outputs.
    """
    given: tuple[Any, Any] = (), {}

    def arguments(node: int) -> Any:
        """Return the arguments of the call for one node: its column of those that have a column per node."""

        def column(value: Any) -> Any:
            has_columns = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == len(parents)
            return value[:, node : node + 1] if has_columns else value

        args, kwargs = given
        return tuple(map(column, args)), {name: column(value) for name, value in kwargs.items()}

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal given
        given = args, kwargs
        reading_first.enter_context(states.after_parents(parents[0]))
        return arguments(0)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        reading_first.close()
        outputs = [output]
        for node, above in enumerate(parents[1:], start=1):
            args, kwargs = arguments(node)
            with states.after_parents(above):
                outputs.append(module.forward(*args, **kwargs))
        return _joined(outputs)

    with contextlib.ExitStack() as reading_first, hooked([mixer], before, after):
        yield


def _joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of single tokens: tensors (batch, 1, ...) or tuples of them."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
