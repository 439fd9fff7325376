"""Large float32 products on a CPU, by whichever of torch's two libraries is faster on this processor.

For float32 torch asks MKL, for half precision oneDNN. On AMD's processors oneDNN takes half the time for float32, too,
and less for the few tokens of a block, for which MKL copies all the weights. So while a call guesses, the two take
turns in the large linear layers of target and draft until it is known which is faster for so many tokens. Both round
differently, by as much as MKL does itself from one number of tokens to another.

The layers are lent another ``forward`` for the time of a call. It changes nothing in other threads. Where torch is to
be deterministic, nothing is raced, because a clock decides.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGE = 1 << 17  # weights of a layer from which on the product takes longer than to ask for it
TURNS = 4  # of each library, of which the fastest counts
CLEAR = 0.9  # of MKL's time is what oneDNN has to need at most

_is_open: ContextVar[bool] = ContextVar("hf_spec_products", default=False)
_lock = threading.Lock()
_borrowers: Counter[nn.Linear] = Counter()  # calls that use a layer


class _Race:
    """Let both libraries take turns for products of one size, until it is known which one is faster."""

    def __init__(self) -> None:
        self.winner: bool | None = None  # whether that is oneDNN
        self._seconds: tuple[list[float], list[float]] = [], []

    def run(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the library whose turn it is."""
        turn = len(self._seconds[0]) > len(self._seconds[1])
        start = time.perf_counter()
        product = _multiply(turn, states, weight, bias)
        self._seconds[turn].append(time.perf_counter() - start)
        if len(self._seconds[1]) >= TURNS:
            mkl, onednn = map(min, self._seconds)
            self.winner = onednn <= CLEAR * mkl
        return product


# By the shape of the weights, the size of the number of tokens, and the number of threads.
_races: defaultdict[tuple[torch.Size, int, int], _Race] = defaultdict(_Race)


@contextlib.contextmanager
def quick_products(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Use the faster library in the large linear layers of ``networks``, in this context and thread."""
    if not _may_race():
        yield
        return
    layers = {layer for network in networks for layer in _large_layers(network)}
    with _lock:
        for layer in layers:
            _borrowers[layer] += 1
            layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    token = _is_open.set(True)
    try:
        yield
    finally:
        _is_open.reset(token)
        with _lock:
            _borrowers.subtract(layers)
            for layer in [one for one in layers if not _borrowers[one]]:
                del _borrowers[layer], layer.forward


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``states`` (..., inputs) times ``weight`` (outputs, inputs), plus ``bias``: (..., outputs)."""
    if torch.compiler.is_compiling() or not (_is_open.get() and _is_simple(states, weight)):
        return functional.linear(states, weight, bias)
    tokens = states.numel() // weight.shape[1]
    race = _races[weight.shape, tokens.bit_length(), torch.get_num_threads()]
    return race.run(states, weight, bias) if race.winner is None else _multiply(race.winner, states, weight, bias)


def _forward(layer: nn.Linear, states: Tensor) -> Tensor:
    return product(states, layer.weight, layer.bias)


def _multiply(by_onednn: bool, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if by_onednn:  # torch's compiler asks for it by this name
        result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
        return result
    return functional.linear(states, weight, bias)


def _may_race() -> bool:
    onednn = torch.backends.mkldnn
    is_there = onednn.is_available() and onednn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(is_there) and not torch.are_deterministic_algorithms_enabled()


def _is_simple(states: Tensor, weight: Tensor) -> bool:
    """Tell whether this is an ordinary product that is worth a look."""
    is_recorded = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return _is_large(weight) and states.dtype == torch.float32 and states.numel() > 0 and not is_recorded


def _is_large(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() >= LARGE and weight.device.type == "cpu"


def _large_layers(network: nn.Module) -> Iterator[nn.Linear]:
    """Find layers that are nothing but linear; none where somebody else has changed or compiled the forward."""
    modules = list(network.modules())
    if any(one._compiled_call_impl is not None for one in modules) or "forward" in vars(network):
        return
    for layer in (one for one in modules if isinstance(one, nn.Linear) and type(one) is nn.Linear):
        weight = layer.weight
        is_plain = type(weight) is nn.Parameter and weight.is_contiguous() and _is_large(weight)
        if is_plain and (layer in _borrowers or "forward" not in vars(layer)):
            yield layer
