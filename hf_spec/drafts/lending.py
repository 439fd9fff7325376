"""Weights that a target lends its draft: embeddings or an output layer, for a draft without its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..configuration import SpeculatorConfig


class Lent(dict[str, Tensor | None]):
    """The lent weights. They are not registered as the draft's own; a deep copy shares them, a pickle holds none.

    The methods for this are here and not on the draft. A wrapper of a draft, such as a PEFT adapter, forwards methods
    like ``__deepcopy__``, and the copy would lack the wrapper.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Lent:
        return self

    def __reduce__(self) -> tuple[type[Lent], tuple[()]]:
        return Lent, ()


def lendable(module: nn.Module | None, name: str, config: SpeculatorConfig) -> Tensor:
    """Return the weight of a target's ``module``. Errors: a ValueError that says why a draft cannot borrow it."""
    weight = getattr(module, "weight", None)
    # In quantized modules ``weight`` is integers, or a method (torch.ao) instead of a tensor.
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
        raise ValueError(f"the target's {name} is absent, offloaded or quantized: load it in memory and unquantized")
    if hasattr(weight, "full_tensor"):  # a DTensor
        raise ValueError(
            f"the target's {name} is split over processes: give the draft its own (hf-spec convert --self-contained)"
        )
    if weight.shape[1] != config.layers.hidden_size:
        raise ValueError(
            f"the draft has no {name} and hidden_size {config.layers.hidden_size}, but the target's {name} has width "
            f"{weight.shape[1]}: a draft of another width needs its own"
        )
    return weight
