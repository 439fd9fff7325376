"""``hf_spec.invariant``: the mode in which a row's bits do not depend on what else is computed with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from ..packing.weight import PackedWeight, layout_of
from ..scoring.adapters import active_adapters, base_model
from ..scoring.features import decoder_of
from ..scoring.graphs import is_compiled
from ..scoring.hooks import hooked, mark_as_ours
from ..scoring.plain import input_device, precision, prompt_kwargs
from ..scoring.prompts import tokens_for
from ..scoring.trials import ExplainedError, in_a_trial, in_short
from .attention import KERNELS, Shape, attention, register_attention, tiling_of
from .check import check_bits, check_close, logits_at_once
from .columns import NAME, PLACES, SHORT
from .known import State, address, settings_of_torch, settings_without_errors
from .mixtures import is_mixture, mixture_in_sizes, one_way_of_experts, way_of_experts
from .own_attention import attend_by_ours, multiplies_rows, without_bias
from .rows import ALIGNMENT, SIZES, agreeing_sizes, cancelling, in_sizes, one_by_one, sizes_on, with_float32
from .shared_configs import Undo, change
from .sources import CONVOLUTIONS, convolutions_of_source, encoded, read_text, why_no_source

AUTOCAST = "torch.autocast chooses dtypes by operation; leave it, and load the model in the dtype that you want"
PROBE = 2  # tokens of the forward that finds out what a model computes
ACTIVATIONS = tuple({kind for kind in ACT2CLS.values() if isinstance(kind, type)})

_modes: WeakKeyDictionary[nn.Module, Invariance] = WeakKeyDictionary()
_lock = threading.RLock()


@dataclass(frozen=True)
class _Kind:
    """What decides by which kernel a module computes rows: modules of one kind are tried once."""

    module: type[nn.Module]
    forward: Any
    inputs: int
    outputs: int
    dtype: torch.dtype
    weights: tuple[tuple[Hashable, Hashable, int], ...]  # the layout of each, its strides, and how it is aligned
    device: torch.device
    settings: Hashable  # of torch


@dataclass(eq=False)
class Invariance(contextlib.AbstractContextManager["Invariance"]):
    """The mode of a model, on until ``close`` or the end of a ``with``; ``str()`` is one line for people.

    Where several have opened it for one model, such as two threads, it is on until the last one closes it.
    ``products`` counts the linear layers by the numbers of rows that they compute at a time, and ``mixtures`` those of
    experts. ``threads`` are those of torch for which all was tried.
    """

    model: weakref.ref[Any]
    threads: int
    products: Counter[tuple[int, ...]] = field(default_factory=Counter)
    mixtures: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _undo: list[Undo] = field(default_factory=list, repr=False)
    _conditions: Hashable = ()
    # All that have opened the mode and not closed it. One that was dropped without closing holds up nobody.
    _open: WeakSet[Invariance] = field(default_factory=WeakSet, repr=False)

    def close(self) -> None:
        """End the mode, unless others have it open: forwards are as they were before."""
        with _lock:
            if self in self._open:
                self._open.remove(self)
                if not self._open:
                    self._end()

    def _end(self) -> None:
        self._open.clear()
        model = self.model()
        mode = None if model is None else _modes.pop(model, None)
        (mode or self)._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()(_itself)

    def __enter__(self) -> Self:
        if self not in self._open:
            raise ValueError("this mode was closed; call hf_spec.invariant(model) again")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        parts = [
            f"{sum(count.values())} {name}, {_in_words(count)}"
            for name, count in (("linear layers", self.products), ("mixtures of experts", self.mixtures))
            if count
        ]
        return f"invariant: {'; '.join(parts)}; bits compared"


_tried: dict[_Kind, tuple[int, ...]] = {}  # in this process
# What models were like when they were compared, and the numbers of rows that their modules compute.
_found: WeakKeyDictionary[nn.Module, tuple[State, Mapping[nn.Module, tuple[int, ...]]]] = WeakKeyDictionary()


def invariant(model: PreTrainedModel) -> Invariance:
    """Give each row of ``model`` the same bits whatever is computed with it, until the result is closed.

    Text, scores, hidden states and caches of a row are then those of plain ``generate`` in the same mode, to the bit:

    - alone or in a batch, padded or not,
    - with any speculator, chain or tree,
    - whether its prompt is read at once or in pieces,
    - with the source of an encoder-decoder model alone or in a padded batch.

    The model is on one device, a CPU or an accelerator. Beams, training and compiled forwards are not covered. Another
    processor, another number of threads, another version of torch and packed weights may give other bits.

    The products of the model are tried, and its forwards compared bit by bit, before anything else runs. That takes
    some forwards, and none for a model that has not changed since it was compared. A copy of the model, by
    ``copy.deepcopy``, is outside of the mode.

    Errors: a ValueError if the model computes anything that depends on the other rows; it names the module. A
    TypeError for what is no model of transformers.
    """
    network = base_model(model)
    if not isinstance(network, PreTrainedModel):
        raise TypeError(f"invariant takes a model of transformers, the target, and this is a {type(model).__name__}")
    with _lock:
        if (known := _modes.get(network)) is None:
            known = Invariance(weakref.ref(network), torch.get_num_threads())
            _begin(known, network)
            _modes[network] = known
        # Another object, which nothing here keeps alive.
        mode = Invariance(known.model, known.threads, known.products, known.mixtures, _open=known._open)
        mode._open.add(mode)
        return mode


def _itself(changed: Any) -> Any:
    return changed


def _begin(mode: Invariance, model: Any) -> None:
    try:  # also around the refusals: a mode that is renewed is on
        _refuse(model)
        register_attention()
        state, mode._conditions = State(model), _conditions(model)
        known, sizes = _found.get(model, (None, {}))
        if state == known:
            _change(mode, model)
            _compute_rows(mode, model, sizes)
            return
        with in_a_trial(model):
            # Half precision rounds so much that the logits of some models say nothing.
            outside = _logits_outside(model) if precision(model) == torch.float32 else None
            _change(mode, model)
            sizes = _tried_sizes(model, *_probe(model))
            _compute_rows(mode, model, sizes)
            logits = check_bits(model)
            if outside is not None:
                check_close(model, logits, outside)
        _found[model] = state, WeakKeyDictionary(sizes)
    except BaseException:
        mode._end()
        raise


def _change(mode: Invariance, model: Any) -> None:
    """Let ``model`` attend by our function, compile nothing, and make copies that are outside of the mode."""
    mode._undo += [_attend(model), attend_by_ours(model), _stay_eager(model), one_way_of_experts(model)]
    mode._undo.append(_copy_outside(mode, model))


def _logits_outside(model: Any) -> Tensor:
    try:
        return logits_at_once(model)
    except Exception as error:  # whatever an unforeseen architecture makes of made tokens
        name = type(model).__name__
        raise ValueError(f"{name} cannot be made invariant: a forward of it fails ({in_short(error)}).") from error


def _conditions(model: Any) -> Hashable:
    """Return what calls of a model in the mode may meet changed, and each of its forwards would be slow to look at."""
    return active_adapters(model), input_device(model), is_compiled(model), settings_without_errors()


def renew_invariance(model: Any) -> None:
    """Try and compare anew what ``model`` computes if it is in the mode and its ``_conditions`` have changed since.

    Errors: those of ``invariant``; the mode has then ended.
    """
    if (mode := invariance_of(model)) is None:
        return
    network = base_model(model)
    with _lock:
        if mode._conditions != _conditions(network):
            mode._restore()
            mode.products.clear()
            mode.mixtures.clear()
            _begin(mode, network)


def is_invariant(model: Any) -> bool:
    """Tell whether ``model`` is in the mode."""
    return invariance_of(model) is not None


def invariance_of(model: Any) -> Invariance | None:
    """Return the mode that ``model`` is in."""
    return _modes.get(base_model(model))


@contextlib.contextmanager
def with_other_attention(model: Any, name: str) -> Iterator[None]:
    """Let ``model`` name another attention for a while in which it computes nothing.

    A forward of another thread raises a ValueError meanwhile.
    """
    config = model.config.get_text_config(decoder=True)
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = NAME


def _refuse(model: Any) -> None:
    name, reason = type(model).__name__, None
    devices = {str(one.device) for one in model.parameters()}
    if (no_source := why_no_source(model)) is not None:
        reason = no_source
    elif is_compiled(model):
        reason = "it is compiled; load it anew and leave it eager"
    elif len(devices) > 1 or "meta" in devices:  # offloaded weights are on "meta"
        reason = f"it is on several devices, or offloaded: {', '.join(sorted(devices))}"
    elif (linear := _quantised_linear(model)) is not None:
        reason = f"{linear} is quantised and multiplies by code of its own, which may look at all rows at once"
    elif model.training:
        reason = "it is in train mode; call model.eval() first"
    elif any(torch.is_autocast_enabled(one.split(":")[0]) for one in devices):
        reason = AUTOCAST
    elif (other := _sharing(model)) is not None:
        reason = f"it shares modules with a {type(other).__name__} that is in the mode; end that mode first"
    elif not all(hasattr(torch.ops.aten, kernel) for kernel in KERNELS.values()):
        reason = f"torch {torch.__version__} lacks the kernel of attention that it needs"
    if reason is not None:
        raise ValueError(f"{name} cannot be made invariant: {reason}.")


def _sharing(model: Any) -> Any:
    """Return another model that is in the mode and has modules of ``model``."""
    own = set(model.modules())
    return next((one for one in list(_modes) if one is not model and not own.isdisjoint(one.modules())), None)


def _quantised_linear(model: Any) -> str | None:
    """Name a linear layer of integers that torch's own code does not compute, such as those of bitsandbytes."""
    for place, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is not None and not weight.is_floating_point() and not _computes_rows(module):
            return f"{place} ({type(module).__name__})"
    return None


def _attend(model: Any) -> Undo:
    """Let ``model`` attend by our function; return what undoes that.

    A config that several models share names our function until the last of their modes ends.
    """
    return change(_configs_of(model), "_attn_implementation", NAME)


def _configs_of(model: Any) -> list[Any]:
    """List the configs that say how ``model`` attends: its text's, and each of an encoder-decoder model's."""
    if not model.config.is_encoder_decoder:
        return [model.config.get_text_config(decoder=True)]
    return [model.config, *(one.config for one in model.modules() if isinstance(one, PreTrainedModel))]


def _text_config(model: Any) -> Any:
    """Return the config that the text's layers look at; an encoder-decoder model may return a copy of it."""
    if model.config.is_encoder_decoder:
        return decoder_of(model).config
    return model.config.get_text_config(decoder=True)


def _stay_eager(model: Any) -> Undo:
    """Let ``generate`` compile no forward of ``model``; return what undoes that."""
    known = weakref.ref(model)
    model._valid_auto_compile_criteria = lambda *args, **kwargs: False

    def undo(of: Callable[[Any], Any]) -> None:
        if (there := known()) is not None:
            del of(there)._valid_auto_compile_criteria

    return undo


def _copy_outside(mode: Invariance, model: Any) -> Undo:
    """Let ``copy.deepcopy`` make copies of ``model`` that are outside of the mode; return what undoes that."""
    known = weakref.ref(model)

    def deepcopy(memo: dict[int, Any]) -> Any:
        parts: Any = known().__reduce_ex__(4)
        rebuild, given, state, *_ = parts
        memo[id(known())] = duplicate = rebuild(*given)
        duplicate.__setstate__(copy.deepcopy(state, memo))
        for undo in reversed(mode._undo):
            undo(lambda changed: copy.deepcopy(changed, memo))  # what it was copied to
        return duplicate

    def undo(of: Callable[[Any], Any]) -> None:
        if (there := known()) is not None:
            vars(of(there)).pop("__deepcopy__", None)

    if not hasattr(model, "__deepcopy__"):  # else a way of its own
        model.__deepcopy__ = deepcopy
    return undo


def _probe(model: Any) -> tuple[dict[nn.Module, Tensor], set[Shape]]:
    """Read a few tokens; return the inputs of modules that compute rows, and the shapes of attention.

    Errors: a ValueError if a part of the model attends, or routes to experts, in a way that is not known here.
    """
    inputs: dict[nn.Module, Tensor] = {}
    shapes: set[Shape] = set()
    others: set[nn.Module] = set()  # attend by code of their own, or route by more than rows, as far as is known

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            inputs.setdefault(module, args[0])
        elif is_mixture(module):
            others.add(module)

    def note_attention(module: nn.Module, *_: Any) -> None:
        others.add(module)

    def noting(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        widest = max(query.shape[-1], value.shape[-1])
        shapes.add((key.shape[1], query.shape[1] // key.shape[1], widest, query.dtype, kwargs.get("softcap")))
        others.discard(module)
        return attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(NAME, noting)
    modules = list(model.modules())
    try:
        with hooked([*filter(_computes_rows, modules)], note), hooked([*filter(_attends, modules)], note_attention):
            ids, (source, _) = tokens_for(model, 1, PROBE), encoded(model, 1, PROBE)
            read_text(model, ids, **prompt_kwargs(model, ids, torch.ones_like(ids), source=source or None))
    except Exception as error:  # whatever an unforeseen architecture makes of made tokens
        reason = str(error) if isinstance(error, ExplainedError) else f"a forward of it fails ({in_short(error)})"
        raise ValueError(f"{type(model).__name__} cannot be made invariant: {reason}.") from error
    finally:
        AttentionInterface.register(NAME, attention)
    if (unknown := _why_unknown(model, others)) is not None:
        raise ValueError(f"{type(model).__name__} cannot be made invariant: {unknown}.")
    return inputs, shapes


def _attends(module: nn.Module) -> bool:
    """Tell whether ``module`` seems to attend itself, and not by one that it has."""
    return "Attention" in type(module).__name__ and sum(isinstance(one, nn.Linear) for one in module.children()) > 1


def _why_unknown(model: Any, others: set[nn.Module]) -> str | None:
    """Say what one of the modules ``others`` does, or return ``None`` if there are none."""
    place, module = next(((place, one) for place, one in model.named_modules() if one in others), ("", None))
    if module is None:
        return None
    name = f"{place} ({type(module).__name__})"
    if is_mixture(module):
        return f"{name} is given more than rows, by which it may route them to experts"
    return f"{name} does not look its attention up among transformers' attention functions"


def _computes_rows(module: nn.Module) -> bool:
    """Tell whether ``module`` maps (..., inputs) to (..., outputs), each row by itself."""
    kind: Any = type(module)
    if isinstance(module, nn.Linear | Conv1D):
        return kind.forward in (nn.Linear.forward, Conv1D.forward) or multiplies_rows(module)
    return kind.__name__.endswith("Norm") or isinstance(module, ACTIVATIONS) or is_mixture(module)


def _tried_sizes(model: Any, inputs: dict[nn.Module, Tensor], shapes: set[Shape]) -> dict[nn.Module, tuple[int, ...]]:
    """Try what the model computes; return in which numbers of rows its modules give a row the same bits.

    Errors: a ValueError if a module gives them in none.
    """
    name, threads = type(model).__name__, torch.get_num_threads()
    device, found = input_device(model), dict[nn.Module, tuple[int, ...]]()
    found |= dict.fromkeys(convolutions_of_source(model), SIZES[:1])
    on_cpu = f"on this processor with {threads} threads; try torch.set_num_threads(1)"
    where = on_cpu if device.type == "cpu" else f"on {device.type} with torch {torch.__version__}"
    for shape in shapes:
        for places in (PLACES, SHORT):
            try:
                tiling_of(shape, device, places)
            except ExplainedError as error:
                raise ValueError(f"{name} cannot be made invariant: {error} {where}.") from error
    own: dict[_Kind, tuple[int, ...]] = {}  # of modules that other models need not have alike
    for place, module in model.named_modules():
        if not _computes_rows(module) or (module not in inputs and not isinstance(module, nn.Linear | Conv1D)):
            continue
        kind = _kind(module, inputs.get(module), device)
        tried = _tried if _is_known(module) else own
        if kind not in tried:
            generator = torch.Generator().manual_seed(0)
            sample = torch.randn(sizes_on(device)[-1], kind.inputs, generator=generator, device="cpu")
            tried[kind] = _sizes_of(module, sample.to(device, kind.dtype))
        if not tried[kind]:
            raise ValueError(
                f"{name} cannot be made invariant: {place} ({kind.module.__name__}) gives a row other bits at another "
                f"place {where}."
            )
        found[module] = tried[kind]
    return found


def _is_known(module: nn.Module) -> bool:
    """Tell whether all of the ``module`` that chooses its kernels is its ``_Kind``."""
    kinds, plain = {type(one) for one in module._parameters.values()}, {nn.Parameter, type(None)}
    return kinds <= plain and not is_mixture(module) and "forward" not in vars(module)


def _compute_rows(mode: Invariance, model: Any, found: Mapping[nn.Module, tuple[int, ...]]) -> None:
    """Let modules of ``model`` compute rows in the numbers that were ``found``."""
    device = input_device(model)
    settings, every = _Settings(_text_config(model), device.type), sizes_on(device)
    # Configs are slow to read, so that one module of each attention looks at them.
    first = (
        next((one for one in module.modules() if one in found), None) for module in filter(_attends, model.modules())
    )
    watching = set(first) - {None} or set(found)
    for module in model.modules():
        if (sizes := found.get(module)) is None:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            mode.products[sizes] += 1
        elif is_mixture(module):
            mode.mixtures[sizes] += 1
        elif sizes == every and module not in watching:
            continue  # each row by itself already
        watched = settings if module in watching or is_mixture(module) else None
        mode._undo.append(_compute_in(module, sizes, mode.threads, watched))


class _Settings:
    """The ways of attention and of experts that a config names, which may not change in the mode."""

    def __init__(self, config: Any, place: str) -> None:
        self.config, self.way, self.place = config, way_of_experts(config), place

    def check(self) -> None:
        """Raise an ``ExplainedError`` if one of them was set, or if autocast is on."""
        if torch.is_autocast_enabled(self.place):
            raise ExplainedError(f"an invariant model cannot run in autocast: {AUTOCAST}")
        if self.config._attn_implementation != NAME:
            raise ExplainedError(
                f"attention was set to {self.config._attn_implementation!r} while the model is invariant; close the "
                "mode before that"
            )
        if way_of_experts(self.config) != self.way:
            raise ExplainedError(
                "the experts' implementation was set while the model is invariant; close the mode before"
            )


def _sizes_of(module: nn.Module, sample: Tensor) -> tuple[int, ...]:
    if isinstance(module, nn.Linear | Conv1D):
        module = without_bias(module) if multiplies_rows(module) else module
        return agreeing_sizes(module, cancelling(module, sample))
    if is_mixture(module):
        return SIZES[:1]  # how many rows an expert gets depends on the others; trials would not find each number
    return agreeing_sizes(with_float32(module), sample)


def _kind(module: nn.Module, states: Tensor | None, device: torch.device) -> _Kind:
    weights = [one for one in module._parameters.values() if one is not None]
    if isinstance(module, nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        inputs, outputs = module.nx, module.nf
    else:
        assert states is not None
        inputs = outputs = states.shape[-1]
    dtype = weights[0].dtype if states is None else states.dtype
    layouts = tuple((layout_of(one), one.stride(), address(one) % ALIGNMENT) for one in weights)
    forward, settings = type(module).forward, settings_of_torch()
    return _Kind(type(module), forward, inputs, outputs, dtype, layouts, device, settings)


def _compute_in(module: nn.Module, sizes: tuple[int, ...], threads: int, watched: _Settings | None) -> Undo:
    """Let ``module`` compute ``sizes`` of rows at a time; return what undoes that."""
    own, kind = module.__dict__.get("forward"), type(module)
    weight = module._parameters.get("weight")
    layout = layout_of(weight)
    # Packed weights, which are slow to ask, become plain before their dtype changes.
    dtype = None if isinstance(weight, PackedWeight) else getattr(weight, "dtype", None)
    del weight  # the forward holds none
    compute_rows: Any = mixture_in_sizes if is_mixture(module) else in_sizes
    if isinstance(module, CONVOLUTIONS):
        compute_rows = one_by_one

    def forward(self: nn.Module, states: Tensor) -> Any:
        held = self._parameters.get("weight")
        if layout_of(held) != layout:
            raise ExplainedError("a weight was packed or unpacked while the model is invariant; do that before")
        if dtype is not None and held is not None and held.dtype is not dtype:
            raise ExplainedError(
                f"weights of {dtype} became {held.dtype} while the model is invariant; close the mode before that"
            )
        if torch.get_num_threads() != threads:
            raise ExplainedError(
                f"torch has {torch.get_num_threads()} threads, and the model was made invariant with {threads}; set "
                "them before"
            )
        if watched is not None:
            watched.check()
        compute: Any = functools.partial(kind.forward, self) if own is None else own
        return compute_rows(compute, states, sizes)

    module.forward = types.MethodType(mark_as_ours(forward), module)
    known = weakref.ref(module)  # a mode that nobody ends must not keep the model

    def undo(of: Callable[[Any], Any]) -> None:
        there: Any = known()
        if there is not None and own is None:
            del of(there).forward
        elif there is not None:
            of(there).forward = of(own)

    return undo


def _in_words(count: Counter[tuple[int, ...]]) -> str:
    ranges = ((f"{sizes[0]} to {sizes[-1]} rows" if len(sizes) > 1 else f"{sizes[0]} row", sizes) for sizes in count)
    return ", ".join(f"{count[sizes]} with {rows}" for rows, sizes in ranges)
