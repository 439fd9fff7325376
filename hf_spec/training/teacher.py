"""Read texts with a language model: its features, its last hidden state, and its laws a few rows at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..target import TargetRunner
from .unrolling import positions


def bare(model: Any) -> Any:
    """Look through a PEFT wrapper: its adapter layers sit inside the model and stay active."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Reader:
    """Run ``model`` over whole texts without working out their logits."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()) -> None:
        self.model: Any = model
        self.feature_layers = tuple(feature_layers)
        self._runner = TargetRunner(model, feature_layers)

    def read(self, input_ids: Tensor, document_ids: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the states of each feature layer (batch, length, width) and the last ones (batch, length, hidden).

        Packed documents (batch, length) do not see each other. Padding is on the right, where no text sees it.

        Errors: a ValueError for packed documents if the model cannot keep them apart.
        """
        kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if document_ids is not None and bool((document_ids != document_ids[:, :1]).any()):
            self._check_packing()
            kwargs["position_ids"] = positions(input_ids, document_ids)
        if asked := self._runner.asked_hidden_states:
            kwargs["output_hidden_states"] = asked
        if self.model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        caught: list[Any] = []
        hook = self.model.get_decoder().register_forward_hook(lambda module, args, output: caught.append(output))
        try:
            with self._runner._watching() as last:
                outputs = self.model(**kwargs, return_dict=True)
        finally:
            hook.remove()
        return self._runner._layers(outputs, last), caught[-1].last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocabulary) of some last hidden states (rows, hidden).

        The model's own ``forward`` works them out around a decoder that gives these states, so that they are capped
        and scaled where the model does that.
        """
        with _answering(self.model.get_decoder(), _Answer(last_hidden_state=hidden[None])):
            outputs = self.model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long), return_dict=True)
        return cast(Tensor, outputs.logits[0])

    def _check_packing(self) -> None:
        if getattr(self.model, "_is_stateful", False):
            raise ValueError(
                f"{type(self.model).__name__} keeps a recurrent state, which runs from one packed document into the "
                "next; prepare the data with packing=False"
            )
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"{type(self.model).__name__} takes no position_ids, so it cannot tell packed documents apart; "
                "prepare the data with packing=False"
            )


class _Answer(BaseModelOutputWithPast):
    """Hold last hidden states, and nothing of what else the decoders of some models give."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def _answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Let ``module`` give ``output`` whatever it is asked."""
    wrapped = module.__dict__.get("forward")  # by whoever spreads models over devices
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if wrapped is not None:
            module.forward = wrapped
