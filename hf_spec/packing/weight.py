"""A parameter whose values are oneDNN's to read, and which turns into a plain one for all but two operations."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils import _pytree
from transformers.utils import logging

from .float16 import HALF, Float16Weight, product_in_graphs
from .graphs import compiling, packed_product, product
from .kept import half_product, half_product_in_graphs, kept_product, number_of_parts
from .layout import RowReader

logger = logging.get_logger(__name__)

lock = threading.RLock()  # of all changes between the two layouts; forwards take none
NOT_COMPILED = (
    "torch.compile reads no packed weights: call hf_spec.unpack(model) before, or let hf_spec compile in "
    "generate(..., speculator=..., cache_implementation='static', compile_config=...)"
)
NOT_TRACED = "packed weights are compiled in linear layers and embeddings alone, in their own dtype, without gradients"
# With weights of so many bytes, oneDNN took up to a quarter less time for four rows than for one or two. That was so
# on an AMD EPYC with AVX-512, and not with AVX2.
BIG, FEWEST = 3 << 20, 4 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 1
Owners = list[tuple[Any, str]]  # modules, each with the name of its parameter
Rows = Callable[[Tensor], Tensor]  # returns the rows of some ids, as an embedding does
Made = TypeVar("Made")
_PLAIN_TYPES = (Tensor, nn.Parameter)
_OWN_ATTRIBUTES = ("_storage", "_is_detached", "_is_param")

# Operations that ask what a tensor is like, and not for its values.
_ASKED = ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "is_meta",
          "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes")  # fmt: skip
_REQUIRES: Any = cast(Any, Tensor.requires_grad).__get__
_REQUIRING = (Tensor.requires_grad_, cast(Any, Tensor.requires_grad).__set__)
_ASKING = frozenset(
    [getattr(Tensor, name).__get__ for name in _ASKED]
    + [
        *_REQUIRING,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
    ]
    + [Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.stride]
    + [Tensor.__len__, Tensor.__hash__, Tensor.is_inference, torch.is_floating_point, torch.is_complex, torch.numel]
)
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}


class Storage:
    """The values of a weight: ``packed`` in oneDNN's or FBGEMM's layout, or else ``plain``.

    ``kept_for`` is 0, or the number of threads for which packed values have torch's layout, and ``parts`` are those
    of its products, see kept.py.
    ``rows`` reads rows of packed values.
    ``weight`` is the parameter that stands for them, and ``owners`` are those that hold it, each with its name there.
    ``attributes`` are those that the plain parameter had. ``contexts`` counts the contexts that need them packed,
    and what was packed without one is ``lasting``.
    """

    def __init__(self, plain: nn.Parameter | None = None) -> None:
        self.packed: Tensor | Float16Weight | None = None
        self.kept_for = self.parts = 0
        self.plain = plain
        self.rows: Rows | None = None
        self.weight: weakref.ref[PackedWeight] | None = None
        self.owners: list[tuple[weakref.ref[Any], str]] = []
        self.attributes: dict[str, Any] = {}
        self.contexts, self.lasting = 0, False

    def pack(
        self,
        packed: Tensor | Float16Weight,
        rows: Rows | None,
        weight: PackedWeight,
        owners: Owners,
        plain: nn.Parameter,
    ) -> None:
        """Take the values from ``packed`` from now on; ``plain`` is let go, and ``weight`` gets its attributes."""
        self.attributes = dict(vars(plain))
        vars(weight).update(self.attributes)
        # asked here and not in each product: torch.compile cannot trace the question
        is_kept = isinstance(packed, Tensor) and packed.layout is torch.strided
        self.kept_for = torch.get_num_threads() if is_kept else 0
        self.parts = number_of_parts(packed.shape[0], self.kept_for) if is_kept else 0
        self.rows, self.packed, self.plain = rows, packed, None
        self.weight, self.owners = weakref.ref(weight), [(weakref.ref(owner), name) for owner, name in owners]

    @property
    def nbytes(self) -> int:
        """Return the size of packed values in bytes, with padding and what reads rows of them."""
        packed, rows = self.packed, self.rows
        if packed is None:  # another thread has unpacked it
            return 0
        is_in_blocks = isinstance(packed, Tensor) and packed.is_mkldnn
        size = int(torch.ops.mkldnn._nbytes(packed)) if is_in_blocks else packed.nbytes
        return size + (rows.nbytes if isinstance(rows, RowReader) else 0)

    def take_back(self, plain: nn.Parameter) -> None:
        """Take the values from ``plain`` from now on."""
        self.plain = plain
        self.packed = self.rows = None
        self.lasting = False
        _unpacked[id(plain)] = self

    def unpack(self, reason: str | None = None) -> nn.Parameter:
        """Return the plain parameter, with the bits it had, and put it where the packed one was."""
        with lock:
            if (plain := self.plain) is None:
                own, plain = None if self.weight is None else self.weight(), self._new_plain()
                self.take_back(plain)
                for owner, name in self.owners:
                    held = parameters_of(owner())
                    if own is not None and held.get(name) is own:
                        held[name] = plain
                if reason is not None:
                    logger.warning_once(f"packed weights are made plain again, because {reason}")
            return plain

    def dense(self) -> Tensor:
        """Return a copy of the values in torch's own layout; the weight stays as it is."""
        packed, plain = self.packed, self.plain  # in this order: another thread may be unpacking
        if isinstance(packed, Float16Weight):
            return _without_modes(packed.dense)
        if packed is not None:
            return _without_modes(packed.clone if self.kept_for else packed.to_dense)
        kept = (self.unpack() if plain is None else plain).detach()
        return _without_modes(kept.clone)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``, of any shape, as torch's embedding does."""
        rows = self.rows
        return functional.embedding(ids, self.dense()) if rows is None else rows(ids)

    def _new_plain(self) -> nn.Parameter:
        own = None if self.weight is None else self.weight()
        is_trained = own is not None and own.requires_grad
        values = self.dense()
        plain = _without_modes(lambda: nn.Parameter(values, requires_grad=is_trained))
        vars(plain).update(self.attributes if own is None else own._attributes())
        return plain


# By the ids of parameters that are plain again. A storage holds its parameter, so that no other one gets the id. An
# attribute would be saved with the parameter, and a weak reference to it would keep torch from swapping it.
_unpacked: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()


def storage_of(plain: Tensor) -> Storage | None:
    """Return the storage of a weight that is plain again, if references to the packed one are still around."""
    storage = _unpacked.get(id(plain))
    return storage if storage is not None and storage.plain is plain else None


class PackedWeight(Tensor):
    """A parameter (outputs, inputs) that oneDNN or FBGEMM multiplies by, and that is looked up in, as it is.

    Anything else that is done with it, such as a view, a change, a gradient or a move, makes its module's parameter
    plain first. References to this object then act on the plain one, and those to a detached one on its values.
    """

    _is_param = True  # for isinstance(..., nn.Parameter)
    _is_detached = False
    _storage: Storage

    @staticmethod
    def __new__(cls, storage: Storage, like: Tensor, requires_grad: bool) -> PackedWeight:
        """Make a tensor of the size and dtype of ``like`` without values of its own."""
        made: PackedWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("cpu"), requires_grad=requires_grad
        )
        made._storage = storage
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _traced(func, args, kwargs or {})
        if func is functional.linear and len(args) > 1 and not kwargs and type(weight := args[1]) is cls:
            storage, bias = weight._storage, args[2] if len(args) > 2 else None
            packed, kept = storage.packed, (storage.kept_for, storage.parts)
            if packed is not None and _multiplies(args[0], packed.dtype, bias, weight):
                return _product(args[0], packed, bias, product, *kept)
        elif func is functional.embedding and len(args) > 1 and type(weight := args[1]) is cls:
            if _looks_up(args[0], args[2:], kwargs or {}) and not _is_recorded(weight):
                return weight._storage.rows_of(args[0])
        elif (answer := _answer(cls, func, args, kwargs or {})) is not NotImplemented:
            return answer
        return _on_plain(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch disables it there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _on_plain(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain copy."""
        return self._copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain copy."""
        return self._copy().__reduce_ex__(protocol)

    @property
    def __tensor_flatten__(self) -> Any:
        """Refuse graphs that hf_spec does not make: torch.compile asks for this before it traces, and nobody else."""
        if TracingContext.try_get() is None or compiling.get():
            raise AttributeError("__tensor_flatten__")
        raise RuntimeError(NOT_COMPILED)

    def is_floating_point(self) -> bool:
        """Return True, as for every packed weight: a method of C++ does not stand in graphs, and this one is asked."""
        return True

    def detach(self) -> Any:
        """Return the values without gradients; in graphs, which record none, this object."""
        return self if torch.compiler.is_dynamo_compiling() else super().detach()

    def is_like(self, weight: Tensor) -> bool:
        """Tell whether ``weight`` has the same shape and dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.shape == weight.shape and self.dtype == weight.dtype

    def made_plain(self, reason: str | None = None) -> nn.Parameter:
        """Return the plain parameter that this one stands for from now on."""
        plain = self._storage.unpack(reason)
        if self._is_detached and _untouched(_REQUIRES, self):  # by nn.Parameter(weight)
            plain = nn.Parameter(plain.detach())  # gets gradients of its own
            self._storage, self._is_detached = Storage(plain), False
            self._storage.weight = weakref.ref(self)
        return nn.Parameter(plain.detach(), requires_grad=False) if self._is_detached else plain

    def _copy(self) -> nn.Parameter:
        copy = nn.Parameter(self._storage.dense(), requires_grad=self.requires_grad)
        vars(copy).update(self._attributes())
        return copy

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OWN_ATTRIBUTES}

    def _detached(self) -> PackedWeight:
        """Return the same values as a tensor that is no one's parameter."""
        plain = self._storage.plain
        made = PackedWeight(self._storage, self if plain is None else plain, False)
        made._is_detached = True
        return made


def _traced(func: Any, args: Any, kwargs: Any) -> Any:
    """Say what a graph does for ``func``: torch.compile runs this function symbolically."""
    if func is functional.linear and len(args) > 1 and not kwargs and isinstance(args[1], PackedWeight):
        storage, bias = args[1]._storage, args[2] if len(args) > 2 else None
        packed = storage.packed
        is_plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if is_plain and packed is not None and packed.dtype == args[0].dtype:
            return _product(args[0], packed, bias, packed_product, storage.kept_for, storage.parts)
    elif func is functional.embedding and len(args) > 1 and isinstance(args[1], PackedWeight):
        rows = args[1]._storage.rows
        if rows is not None and not torch.is_grad_enabled() and _looks_up(args[0], args[2:], kwargs):
            return rows(args[0])
    raise RuntimeError(NOT_TRACED)


def _product(
    states: Tensor,
    packed: Tensor | Float16Weight,
    bias: Tensor | None,
    multiply: Callable[..., Tensor],
    kept_for: int,
    parts: int,
) -> Tensor:
    """Multiply ``states``, (..., inputs), by the transpose of ``packed``, (outputs, inputs), and add ``bias``."""
    outputs, inputs = packed.shape
    if states.shape[-1:] != (inputs,):  # oneDNN's error says nothing
        raise RuntimeError(f"a weight of shape {(outputs, inputs)} cannot multiply states of {tuple(states.shape)}")
    if (rows := states.numel() // inputs) == 0:
        return states.new_empty(*states.shape[:-1], outputs)
    is_traced = multiply is packed_product
    if isinstance(packed, Float16Weight):
        return product_in_graphs(states, packed, bias) if is_traced else packed.product(states, bias)
    if kept_for and packed.dtype in HALF:
        return (half_product_in_graphs if is_traced else half_product)(states, packed, bias)
    if kept_for:
        return kept_product(states, packed, bias, multiply, kept_for, parts)
    if rows < FEWEST and outputs * inputs * packed.itemsize >= BIG:
        several = states.expand(-(-FEWEST // rows), *states.shape)
        return multiply(several, packed, bias)[0]
    return multiply(states, packed, bias)


def values_of(weight: Tensor) -> Tensor:
    """Return ``weight`` to be read only: a plain copy if it is packed, which it stays."""
    return weight._storage.dense() if isinstance(weight, PackedWeight) else weight.detach()


def layout_of(weight: Tensor | None) -> Hashable:
    """Return what decides how products with ``weight`` are computed, apart from its shape and dtype."""
    if not isinstance(weight, PackedWeight):
        return cast(Hashable, type(weight))
    return type(weight), type(weight._storage.packed), weight._storage.kept_for


def parameters_of(owner: Any) -> dict[str, Any]:
    """Return the dict in which ``owner`` keeps weights: a module's, or ``owner`` itself; empty for ``None``."""
    if owner is None:
        return {}
    return owner._parameters if isinstance(owner, nn.Module) else owner


def _multiplies(states: Any, dtype: torch.dtype, bias: Any, weight: PackedWeight) -> bool:
    """Tell whether oneDNN's product is what torch would compute: no gradient, no other dtype, nothing traced."""
    return (
        type(states) in _PLAIN_TYPES
        and states.dtype is dtype
        and states.device.type == "cpu"
        and (bias is None or (type(bias) in _PLAIN_TYPES and bias.dtype is dtype))
        and not _is_recorded(weight, states, bias)
        and not torch.is_autocast_enabled("cpu")
    )


def _is_recorded(weight: PackedWeight, *others: Tensor | None) -> bool:
    """Tell whether an operation is differentiated, traced or watched, so that it has to be torch's own."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (weight, *others)):
        return True
    return bool(
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _looks_up(ids: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a look-up only reads: with max_norm it changes the weight. Padding matters to gradients only."""
    if type(ids) is not Tensor or ids.device.type != "cpu" or ids.dtype not in (torch.int64, torch.int32):
        return False
    given = dict(zip(("padding_idx", "max_norm"), args, strict=False)) | kwargs
    return given.get("max_norm") is None


def _answer(cls: type[PackedWeight], func: Any, args: Any, kwargs: Any) -> Any:
    """Return what can be said of a packed weight without its values, or NotImplemented."""
    own = args[0] if args else None
    if type(own) is not cls:
        return NotImplemented
    if func is Tensor.detach:
        return own._detached()
    if own._is_detached and func in _REQUIRING:
        return _untouched(func, *args, **kwargs)
    # After a change of shape or dtype in between, another one stands for the weight.
    is_stale = not own._is_detached and own._storage.weight is not None and own._storage.weight() is not own
    if own._storage.packed is None or is_stale:
        return NotImplemented
    if func in _ASKING:
        return _untouched(func, *args, **kwargs)
    if func is Tensor.__getitem__ and (row := _row(own, args[1])) is not None:
        return row
    if func is Tensor.__repr__:  # a look at a model must not slow it down
        return repr(own._copy())
    if func is Tensor.to and not kwargs and all(_changes_nothing(one, own) for one in args[1:]):
        return own
    if len(args) == 1 and not kwargs and (func is Tensor.cpu or _CASTS.get(func) is own.dtype):
        return own
    if len(args) == 2 and args[1] is own:  # after such a move, Module.to writes back what it got
        if func is torch._has_compatible_shallow_copy_type:
            return True
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return None
    return NotImplemented


def _row(own: PackedWeight, index: Any) -> Tensor | None:
    """Copy the row ``own[index]``, for which Gemma 4 asks in every forward; ``None`` for any other index.

    Torch lets nobody change an inference tensor: a change of the copy would be lost.
    """
    is_whole = type(index) is tuple and len(index) == 2 and type(index[1]) is slice and index[1] == slice(None)
    number = index[0] if is_whole else index
    is_row = type(number) is int and -len(own) <= number < len(own)
    if not is_row or own._storage.rows is None or torch.is_grad_enabled() or _is_recorded(own):
        return None
    with torch.inference_mode():
        return own._storage.rows_of(torch.tensor(number % len(own), device="cpu"))


def _untouched(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``func`` on packed weights as they are."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _changes_nothing(argument: Any, own: PackedWeight) -> bool:
    is_same_place = isinstance(argument, (str, torch.device)) and torch.device(argument).type == "cpu"
    return argument is None or argument is False or argument is own.dtype or is_same_place


def _on_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on plain parameters, which from now on are those of their modules."""
    if func in (functional.linear, functional.embedding):
        reason = "a forward records gradients, or runs in another dtype or in a mode of torch"
    else:
        reason = f"{_name_of(func)} needs the plain ones"

    def plain(weight: PackedWeight) -> Tensor:
        return _plain(weight, reason)

    args, kwargs = _pytree.tree_map_only(PackedWeight, plain, (args, kwargs))
    return func(*args, **kwargs)


def _name_of(func: Any) -> str:
    """Name an operation; that of a property of tensors is its method ``__get__`` or ``__set__``."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def _plain(weight: PackedWeight, reason: str) -> Tensor:
    plain = weight.made_plain(reason)
    return plain.detach() if weight._is_detached else plain


def _without_modes(make: Callable[[], Made]) -> Made:
    """Return ``make()`` as it is outside of inference mode, fake tensors, traces and transforms.

    Torch keeps all of these per thread, so another thread has none.
    """
    found: Future[Made] = Future()

    def run() -> None:
        try:
            found.set_result(make())
        except BaseException as error:
            found.set_exception(error)

    other = threading.Thread(target=run)  # an executor takes no work any more once the main thread has ended
    other.start()
    return found.result()
