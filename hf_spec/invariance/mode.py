"""``hf_spec.invariant``: the mode in which a row's bits do not depend on what else is computed with it."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from ..scoring.adapters import base_model
from ..scoring.hooks import hooked, mark_as_ours
from ..scoring.plain import prompt_kwargs
from ..scoring.prompts import tokens_for
from .attention import agrees, attention, register_attention
from .check import check_bits
from .columns import NAME
from .rows import MOST, SIZES, agreeing_sizes, in_sizes

PROBE = 2  # tokens of the forward that finds out what a model computes
ACTIVATIONS = tuple({kind for kind in ACT2CLS.values() if isinstance(kind, type)})

_modes: WeakKeyDictionary[nn.Module, Invariance] = WeakKeyDictionary()
_lock = threading.RLock()


@dataclass(frozen=True)
class _Kind:
    """What decides by which kernel a module computes rows: modules of one kind are tried once."""

    module: type[nn.Module]
    inputs: int
    outputs: int
    dtype: torch.dtype
    weights: tuple[type, ...]


@dataclass(eq=False)
class Invariance(contextlib.AbstractContextManager["Invariance"]):
    """The mode of a model, on until ``close`` or the end of a ``with``; ``str()`` is one line for people.

    ``products`` counts the linear layers by the numbers of rows that they compute at a time. ``threads`` are those of
    torch for which all was tried.
    """

    model: weakref.ref[Any]
    threads: int
    products: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """End the mode: forwards are as they were before."""
        with _lock:
            if (model := self.model()) is not None and _modes.get(model) is self:
                del _modes[model]
            while self._undo:
                self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        ways = [f"{count} with {_in_words(sizes)}" for sizes, count in self.products.most_common()]
        return f"invariant: {sum(self.products.values())} linear layers, {', '.join(ways)}; bits compared"


def invariant(model: PreTrainedModel) -> Invariance:
    """Give each row of ``model`` the same bits whatever is computed with it, until the result is closed.

    Text, scores, hidden states and caches of a row are then those of plain ``generate`` in the same mode, to the bit:

    - alone or in a batch, padded or not,
    - with any speculator, chain or tree,
    - whether its prompt is read at once or in pieces.

    Beams, training and compiled forwards are not covered. Another processor, another number of threads, another
    version of torch and packed weights may give other bits.

    The products of the model are tried, and its forwards compared bit by bit, before anything else runs. That takes
    some forwards.

    Errors: a ValueError if the model computes anything that depends on the other rows; it names the module.
    """
    network = base_model(model)
    with _lock:
        if (known := _modes.get(network)) is not None:
            return Invariance(known.model, known.threads, known.products)
        _refuse(network)
        register_attention()
        mode = Invariance(weakref.ref(network), torch.get_num_threads())
        try:
            with torch.no_grad():
                mode._undo.append(_attend(network))
                _prepare(mode, network, *_probe(network))
                check_bits(network)
        except BaseException:
            mode.close()
            raise
        _modes[network] = mode
        return mode


def is_invariant(model: Any) -> bool:
    """Tell whether ``model`` is in the mode."""
    return base_model(model) in _modes


def _refuse(model: Any) -> None:
    name, reason = type(model).__name__, None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder model, whose attention to a source is not computed in blocks"
    elif isinstance(model, OptimizedModule) or any(one._compiled_call_impl is not None for one in model.modules()):
        reason = "it is compiled; load it anew and leave it eager"
    elif (devices := {str(one.device) for one in model.parameters()}) != {"cpu"}:
        reason = f"it is on {', '.join(sorted(devices))}, and bits were compared on CPUs alone"
    elif model.training:
        reason = "it is in train mode; call model.eval() first"
    elif not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        reason = f"torch {torch.__version__} lacks the kernel of attention that it needs"
    if reason is not None:
        raise ValueError(f"{name} cannot be made invariant: {reason}.")


def _attend(model: Any) -> Callable[[], None]:
    """Let ``model`` attend by our function; return what undoes that."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME

    def undo() -> None:
        config._attn_implementation = before

    return undo


def _probe(model: Any) -> tuple[dict[nn.Module, Tensor], set[tuple[int, int, int, torch.dtype]]]:
    """Read a few tokens; return the inputs of modules that compute rows, and the shapes of attention.

    The latter are key heads, queries of each, width and dtype.
    """
    inputs: dict[nn.Module, Tensor] = {}
    shapes: set[tuple[int, int, int, torch.dtype]] = set()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            inputs.setdefault(module, args[0])

    def noting(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        widest = max(query.shape[-1], value.shape[-1])
        shapes.add((key.shape[1], query.shape[1] // key.shape[1], widest, query.dtype))
        return attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(NAME, noting)
    try:
        with hooked([one for one in model.modules() if _computes_rows(one)], note):
            ids = tokens_for(model, 1, PROBE)
            model(ids, **prompt_kwargs(model, ids, torch.ones_like(ids)))
    finally:
        AttentionInterface.register(NAME, attention)
    if not shapes:
        raise ValueError(
            f"{type(model).__name__} cannot be made invariant: it does not look its attention up among transformers' "
            "attention functions."
        )
    return inputs, shapes


def _computes_rows(module: nn.Module) -> bool:
    """Tell whether ``module`` maps (..., inputs) to (..., outputs), each row by itself."""
    kind: Any = type(module)
    if isinstance(module, nn.Linear | Conv1D):
        return kind.forward in (nn.Linear.forward, Conv1D.forward)
    return kind.__name__.endswith("Norm") or isinstance(module, ACTIVATIONS)


def _prepare(
    mode: Invariance,
    model: Any,
    inputs: dict[nn.Module, Tensor],
    shapes: set[tuple[int, int, int, torch.dtype]],
) -> None:
    """Try what the model computes, and let its modules compute rows in numbers that agree."""
    name = type(model).__name__
    for key_heads, group, width, dtype in shapes:
        if not agrees(key_heads, group, width, dtype):
            raise ValueError(
                f"{name} cannot be made invariant: attention of {key_heads} heads of {group} queries, {width} wide in "
                f"{dtype}, depends on the other nodes on this processor with {mode.threads} threads; try "
                "torch.set_num_threads(1)."
            )
    tried: dict[_Kind, tuple[int, ...]] = {}
    for place, module in model.named_modules():
        if not _computes_rows(module) or (module not in inputs and not isinstance(module, nn.Linear | Conv1D)):
            continue
        kind = _kind(module, inputs.get(module))
        if kind not in tried:
            sample = torch.randn(MOST, kind.inputs, generator=torch.Generator().manual_seed(0)).to(kind.dtype)
            tried[kind] = agreeing_sizes(module, sample)
        if not (sizes := tried[kind]):
            raise ValueError(
                f"{name} cannot be made invariant: {place} ({kind.module.__name__}) gives a row other bits at another "
                f"place with {mode.threads} threads; try torch.set_num_threads(1)."
            )
        if isinstance(module, nn.Linear | Conv1D):
            mode.products[sizes] += 1
        elif sizes == SIZES:
            continue  # each row by itself already
        mode._undo.append(_compute_in(module, sizes, mode.threads))


def _kind(module: nn.Module, states: Tensor | None) -> _Kind:
    weights = [one for one in module._parameters.values() if one is not None]
    if isinstance(module, nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        inputs, outputs = module.nx, module.nf
    else:
        assert states is not None
        inputs = outputs = states.shape[-1]
    dtype = weights[0].dtype if states is None else states.dtype
    return _Kind(type(module), inputs, outputs, dtype, tuple(map(type, weights)))


def _compute_in(module: nn.Module, sizes: tuple[int, ...], threads: int) -> Callable[[], None]:
    """Let ``module`` compute ``sizes`` of rows at a time; return what undoes that."""
    own, kind = module.__dict__.get("forward"), type(module)
    weight = type(module._parameters.get("weight"))

    def forward(self: nn.Module, states: Tensor) -> Tensor:
        if type(self._parameters.get("weight")) is not weight:
            raise ValueError("a weight was packed or unpacked while the model is invariant; do that before")
        if torch.get_num_threads() != threads:
            raise ValueError(
                f"torch has {torch.get_num_threads()} threads, and the model was made invariant with {threads}; set "
                "them before"
            )
        compute: Any = functools.partial(kind.forward, self) if own is None else own
        return in_sizes(compute, states, sizes)

    module.forward = types.MethodType(mark_as_ours(forward), module)
    known = weakref.ref(module)  # a mode that nobody ends must not keep the model

    def undo() -> None:
        there: Any = known()
        if there is not None and own is None:
            del there.forward
        elif there is not None:
            there.forward = own

    return undo


def _in_words(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} to {sizes[-1]} rows" if len(sizes) > 1 else f"{sizes[0]} rows"
