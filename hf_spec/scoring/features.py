"""The hidden states of a target that a draft reads: some are captured by hooks, others asked of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .graphs import is_compiled
from .hooks import hooked
from .modules import modules_of


class Features:
    """The hidden states of ``model`` at ``layers``, numbered as transformers' ``hidden_states``.

    ``hidden_states[i]`` is the input of layer i. The number of layers itself means the last layer's output before the
    final norm, and -1 that after it. Transformers has at most one of these two.

    States are captured by hooks at these layers only. Transformers' own hooks stay at all layers permanently, and took
    a tenth of a small target's forward. Transformers is asked where its modules are not known, or where ``every``
    state is wanted: ``asked`` are the arguments of a forward for that.

    Errors: a ValueError for layers that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = (), every: bool = False) -> None:
        self.layers = tuple(layers)
        self._count: int = model.config.get_text_config(decoder=True).num_hidden_layers
        if unknown := [layer for layer in self.layers if not -1 <= layer <= self._count]:
            raise ValueError(
                f"feature layer {unknown[0]} was asked for, but {type(model).__name__} has {self._count} layers: name "
                f"hidden states from 0 to {self._count}, or -1 for those after the last norm"
            )
        self.every = every
        catches = bool(self.layers) and not every and not is_compiled(model)  # a user's graphs may lack our hooks
        stack = _stack(model, self._count) if catches else []
        self._read: dict[nn.Module, int] = {stack[i]: i for i in self.layers if 0 <= i < len(stack)}  # by their inputs
        others = every or [i for i in self.layers if 0 <= i < self._count and i not in self._read.values()]
        self.asked: dict[str, Any] = {"output_hidden_states": others} if others else {}
        self._watched: dict[nn.Module, int] = {}  # modules whose output is captured, and that output's number
        if self._count in self.layers:
            self._watched[_last_layer(model, self._count)] = self._count
        if -1 in self.layers:
            self._watched[decoder_of(model)] = -1

    @property
    def watched(self) -> list[int]:
        """List the layers whose states are captured by hooks."""
        return [*self._read.values(), *self._watched.values()]

    def watching(self) -> contextlib.AbstractContextManager[dict[int, Tensor]]:
        """Capture states in the forwards of this context, by layer number."""
        return self._watching() if self._read or self._watched else contextlib.nullcontext({})

    @contextlib.contextmanager
    def _watching(self) -> Iterator[dict[int, Tensor]]:
        caught: dict[int, Tensor] = {}

        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[self._read[module]] = args[0] if args else kwargs["hidden_states"]

        def catch(module: nn.Module, args: Any, output: Any) -> None:
            caught[self._watched[module]] = output if isinstance(output, Tensor) else output[0]

        with hooked(self._read, before=read), hooked(self._watched, after=catch):
            yield caught

    def states(self, outputs: Any, caught: dict[int, Tensor]) -> list[Tensor]:
        """Return the hidden states of each of ``layers``, (batch, length, width), from a forward in ``watching``."""
        return [caught[layer] if layer in caught else outputs.hidden_states[layer] for layer in self.layers]

    def joined(self, outputs: Any, caught: dict[int, Tensor]) -> Tensor | None:
        """Concatenate the same, (batch, length, sum of widths), on one device; ``None`` without layers."""
        states = self.states(outputs, caught)
        return torch.cat([state.to(states[0].device) for state in states], dim=-1) if states else None

    def all_hidden(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return every hidden state, (batch, length, ...), if they were asked for; see ``in_own_layout``."""
        if not self.every:
            return ()
        states = getattr(outputs, "decoder_hidden_states", None)  # of an encoder-decoder model
        states = outputs.hidden_states if states is None else states
        return tuple(state.movedim(0, 2) for state in states) if streams_lead(states) else tuple(states)


def streams_lead(states: Sequence[Tensor]) -> bool:
    """Tell whether dimension 0 of hidden ``states`` are several residual streams, of the last one as well (Gemma 3n).

    Elsewhere streams follow the tokens, and the last state is their sum (HY 4).
    """
    return bool(states) and states[-1].ndim == 4


def in_own_layout(states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return hidden ``states``, as ``all_hidden`` returned them, in the layout of transformers."""
    return tuple(state.movedim(2, 0) for state in states) if streams_lead(states) else tuple(states)


def decoder_of(model: Any) -> Any:
    """Return the module whose output is the last hidden state; transformers' ``get_decoder`` may return another."""
    found = model.get_decoder()
    if found is model.get_output_embeddings():  # ModernBERT calls it its decoder
        return model.base_model
    if isinstance(found, PreTrainedModel) and found.get_output_embeddings() is not None:
        # Llama 4 and Mllama return the complete model, with its head; so does a pair of an encoder and any decoder.
        return found.base_model if model.config.is_encoder_decoder else found.model
    return found


def _stack(model: PreTrainedModel, count: int) -> list[nn.Module]:
    """List the layers whose inputs are transformers' hidden states; none where that is not known.

    It is known where transformers itself hooks the modules of one class, and there are ``count`` of them.
    """
    decoder = decoder_of(model)
    kind = (getattr(decoder, "_can_record_outputs", None) or {}).get("hidden_states")
    if not isinstance(kind, type):
        return []
    layers = list(filter(kind.__instancecheck__, modules_of(decoder)))
    if layers != list(getattr(decoder, "layers", ())):  # they may be at several levels (Zamba): in torch's order
        layers = list(filter(kind.__instancecheck__, decoder.modules()))
    return layers if len(layers) == count else []


def _last_layer(model: PreTrainedModel, count: int) -> nn.Module:
    stacks = [module for module in modules_of(decoder_of(model)) if isinstance(module, nn.ModuleList)]
    return next(stack[-1] for stack in stacks if len(stack) == count)
