"""Pack the large linear layers of models on a CPU, and undo it."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.functional import embedding

from .attention import attend_together
from .float16 import HALF, MOST_MEMORY, Float16Weight, float16_weight, is_better_in_float16
from .kept import is_better_kept
from .layout import row_reader
from .weight import NOT_COMPILED, Owners, PackedWeight, Rows, Storage, lock, parameters_of, storage_of

LARGE = 1 << 16  # values of a weight from which on packing is worth the while
ROWS_AT_A_TIME = 16  # the rows that oneDNN chooses the layout for; its layouts for 2 to 1,024 rows were the same

HELD = "something else holds its weight, such as an optimizer, a list of parameters or a draft that borrows it"
SUPPORTED = (torch.float32, *HALF)
ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@dataclass(frozen=True)
class Packing:
    """What ``pack`` did: the weights ``packed`` by name, and those ``left`` plain, each with the reason.

    ``bytes`` is the size of packed weights as they are stored. ``str()`` is one line for people.
    """

    packed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    bytes: int = 0

    def __str__(self) -> str:
        total = len(self.packed) + len(self.left)
        reasons = dict.fromkeys(self.left.values())
        why = "; ".join(f"{list(self.left.values()).count(one)} left plain: {one}" for one in reasons)
        if not total:
            return "nothing is packed: there is no large linear layer"
        if not self.packed:
            return f"nothing is packed: {'; '.join(reasons)}"
        return f"{len(self.packed)} of {total} large weights are packed ({self.bytes / 2**20:.0f} MiB)" + (
            f"; {why}" if why else ""
        )


@dataclass
class _Found:
    """A weight by its ``owners``, each with the name of the parameter. It does not hold the weight itself."""

    name: str
    owners: Owners = field(default_factory=list)

    @property
    def weight(self) -> Any:
        owner, name = self.owners[0]
        return parameters_of(owner)[name]

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        for owner, name in self.owners:
            parameters_of(owner)[name] = weight

    @property
    def is_looked_up(self) -> bool:
        return any(isinstance(owner, nn.Embedding) for owner, _ in self.owners)


def pack(*models: Any, force: bool = False) -> Packing:
    """Reorder the large linear layers of ``models`` once, so that their forwards on a CPU are faster.

    ``models`` are a target and its drafts: modules, or speculators with or without weights. The plain weights are let
    go; ``unpack`` brings back the same bits. A weight is left plain, and named in the result, where packing cannot
    help or would be unsafe. ``force``: pack also on processors where packing was not measured.

    Errors: a ValueError for a compiled model, and a TypeError for what is no model.
    """
    storages: list[Storage] = []
    with lock:
        report = _pack(models, force, storages)
        for storage in storages:
            storage.lasting = True
    return report


def unpack(*models: Any) -> None:
    """Undo ``pack``: the weights of ``models`` are plain again, with the bits they had."""
    for found in _weights(_networks(models)):
        weight, is_own = found.weight, any(isinstance(owner, nn.Module) for owner, _ in found.owners)
        if is_own and isinstance(weight, PackedWeight):  # what a draft only borrows is its target's to undo
            found.weight = weight.made_plain()


@contextlib.contextmanager
def packed(*models: Any, force: bool = False) -> Iterator[Packing]:
    """Pack ``models`` while the context is open, see ``pack``; what was packed before stays so.

    Where several have opened a context for one model, such as two threads, it is packed until the last one ends.
    """
    storages: list[Storage] = []
    try:
        with lock:
            try:
                report = _pack(models, force, storages)
            finally:  # also after an interruption: what is packed by then is undone below
                for storage in storages:
                    storage.contexts += 1
        yield report
    finally:
        with lock:
            for storage in storages:
                storage.contexts -= 1
                if storage.contexts <= 0 and not storage.lasting:
                    storage.unpack()


def is_packed(model: nn.Module) -> bool:
    """Tell whether any weight of ``model`` is packed."""
    return any(_is_packed(weight) for module in model.modules() for weight in module._parameters.values())


def _pack(models: tuple[Any, ...], force: bool, of_contexts: list[Storage]) -> Packing:
    """Pack, and note in ``of_contexts`` what is packed for contexts: by this call, or by ones that are still open."""
    networks = _networks(models)
    for network in networks:
        _refuse_compiled(network)
    gc.collect()  # garbage may hold weights
    report, size, spare = Packing(), 0, 0
    # What is looked up in comes last: it may take the memory that others save.
    for found in sorted(_weights(networks), key=lambda one: one.is_looked_up):
        if isinstance(found.weight, PackedWeight) and not _is_packed(found.weight):  # a reference that was put back
            found.weight = found.weight.made_plain()
        if not _is_large(found):
            continue
        is_new = not _is_packed(found.weight)
        if is_new and (reason := _why_not(found, force) or _pack_weight(found, spare)):
            report.left[found.name] = reason
            continue
        storage, plain = found.weight._storage, found.weight.nbytes
        if is_new or storage.contexts:
            of_contexts.append(storage)
        report.packed.append(found.name)
        size, spare = size + storage.nbytes, spare + plain - storage.nbytes
    if report.packed:
        attend_together()
    return replace(report, bytes=size)


def _pack_weight(found: _Found, spare: int) -> str | None:
    """Pack one weight, which may take ``spare`` bytes more than before; return why it is left plain."""
    with lock, torch.inference_mode(False), torch.no_grad():
        weight = found.weight
        values = _values(weight, found.is_looked_up, spare)
        if isinstance(values, str):
            return values
        storage = storage_of(weight) or Storage()
        own = storage.weight() if storage.weight is not None else None
        if own is None or not own.is_like(weight):
            own = PackedWeight(storage, weight, weight.requires_grad)
        storage.pack(*values, own, found.owners, weight)
        found.weight = own.requires_grad_(weight.requires_grad)
        is_held = weakref.ref(weight)
        del weight
        if (held := is_held()) is not None:
            found.weight = held
            storage.take_back(held)
            return HELD
    return None


def _values(weight: Tensor, is_looked_up: bool, spare: int) -> tuple[Tensor | Float16Weight, Rows | None] | str:
    """Return the values that are multiplied, and what reads rows of them; or else why ``weight`` is left plain."""
    if is_better_in_float16(weight, is_looked_up, spare):
        stored = float16_weight(weight.detach(), is_looked_up)
        if stored is not None:
            return stored, stored.rows if is_looked_up else None
    if is_better_kept(weight):
        kept = weight.data
        return kept, functools.partial(embedding, weight=kept)
    if not multiplies(weight.dtype):
        return _no_product(weight.dtype)
    packed = _reordered(weight.detach())
    if torch.ops.mkldnn._nbytes(packed) > MOST_MEMORY * weight.nbytes:
        return "oneDNN would pad it to more than 1.05 of its memory"
    rows = row_reader(weight.detach(), packed, _reordered) if is_looked_up else None
    if is_looked_up and rows is None:
        return "it is an embedding too, and oneDNN's layout of it is not understood"
    return packed, rows


def _reordered(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_AT_A_TIME)
    return packed


# -- which weights, and why not ---------------------------------------------------------------------------------------


def _networks(models: tuple[Any, ...]) -> list[nn.Module]:
    """Return the modules of ``models``, some of which may be speculators; n-grams have none."""
    found = []
    for model in models:
        inside = model
        while inside is not None and not isinstance(inside, nn.Module):
            inside = getattr(inside, "model", getattr(inside, "draft", None))
            if inside is None and not hasattr(model, "drafter"):
                raise TypeError(f"{type(model).__name__} is no model and no speculator: pass loaded models and drafts")
        found += [] if inside is None else [inside]
    return found


def _refuse_compiled(network: nn.Module) -> None:
    if isinstance(network, OptimizedModule) or any(
        one._compiled_call_impl is not None or hasattr(one.forward, "_torchdynamo_orig_callable")
        for one in network.modules()
    ):
        raise ValueError(f"{type(network).__name__} is compiled, and {NOT_COMPILED}")


def _weights(networks: list[nn.Module]) -> list[_Found]:
    """Find all parameters, each once, with all modules that hold them and the drafts that borrow them."""
    found: dict[int, _Found] = {}
    kinds: Counter[str] = Counter()
    for network in dict.fromkeys(networks):
        kind = type(network).__name__
        kinds[kind] += 1
        title_of_all = kind if kinds[kind] == 1 else f"{kind} {kinds[kind]}"
        for place, module in network.named_modules():
            lent = vars(module).get("_lent")  # what a draft borrows of its target, see drafts/lending.py
            for owner in (module, lent) if isinstance(lent, dict) else (module,):
                for name, weight in parameters_of(owner).items():
                    if isinstance(weight, nn.Parameter):
                        title = ".".join(filter(None, (title_of_all, place, name)))
                        found.setdefault(id(weight), _Found(title)).owners.append((owner, name))
    return list(found.values())


def _is_large(found: _Found) -> bool:
    return any(_is_linear(owner) for owner, name in found.owners) and found.weight.numel() >= LARGE


def _is_linear(owner: Any) -> bool:
    return isinstance(owner, nn.Linear) and type(owner).forward is nn.Linear.forward


def _is_packed(weight: Any) -> bool:
    return isinstance(weight, PackedWeight) and weight._storage.packed is not None


def _why_not(found: _Found, force: bool) -> str | None:
    """Say why a weight is left plain, or return ``None``."""
    weight = found.weight
    others = [owner for owner, name in found.owners if not _is_known(owner, name)]
    if type(weight) is not nn.Parameter or weight.dtype not in SUPPORTED:
        return f"it is a {type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}"
    if weight.is_meta:
        return "it is offloaded or not loaded yet (device meta)"
    if weight.device.type != "cpu":
        return f"it is on {weight.device}, and packing is for CPUs"
    if weight.layout is not torch.strided or weight.ndim != 2:
        return "it is no plain matrix"
    if weight.grad is not None:
        return "it is being trained: it has a gradient"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "it has hooks on its gradient"
    if others:
        return f"{type(others[0]).__name__} uses it otherwise than as a linear layer or an embedding"
    return why_not_here(weight.dtype, force)


def _is_known(owner: Any, name: str) -> bool:
    """Tell whether ``owner`` only multiplies by its weight ``name``, or looks rows up; a dict lends it to a draft."""
    if isinstance(owner, nn.Embedding):
        return owner.max_norm is None and not owner.sparse
    return isinstance(owner, dict) or (isinstance(owner, nn.Linear) and name == "weight")


def why_not_here(dtype: torch.dtype, force: bool = False) -> str | None:
    """Say why this processor gains nothing from packed weights of ``dtype``, or return ``None`` if it gains.

    That is decided by what the processor can do. Nothing is measured, so that every run decides alike.
    """
    onednn, ops = torch.backends.mkldnn, torch.ops.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return "oneDNN (torch.backends.mkldnn) is not built in, or switched off"
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_nbytes", "data_ptr")):
        return f"torch {torch.__version__} has no packed linear products"
    capability = torch.backends.cpu.get_cpu_capability()
    if not multiplies(dtype) and capability != "AVX2":
        return _no_product(dtype)
    if force or capability == "AVX2" or "AVX512" in capability:
        return None
    return "packed weights were not measured on this kind of processor (force=True packs)"


def multiplies(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN multiplies weights of ``dtype`` on this processor."""
    return dtype not in ONEDNN or bool(getattr(torch.ops.mkldnn, ONEDNN[dtype])())


def _no_product(dtype: torch.dtype) -> str:
    return f"oneDNN multiplies no {str(dtype).removeprefix('torch.')} on this processor"
