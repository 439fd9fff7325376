"""What a target lends its draft: embeddings, or an output layer, that a draft without its own computes with."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..configuration import SpeculatorConfig


class Lent(dict[str, Tensor | None]):
    """What a target lends: no weights of a draft, so that none is registered; copied along, but never pickled.

    It says so itself. What wraps a draft, as an adapter of PEFT does, passes on methods such as ``__deepcopy__``, and
    the copy would lack the wrapper.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Lent:
        return self

    def __reduce__(self) -> tuple[type[Lent], tuple[()]]:
        return Lent, ()


def lendable(module: nn.Module | None, name: str, config: SpeculatorConfig) -> Tensor:
    """Return the weight of a target's ``module``. Errors: a ValueError that says why a draft cannot borrow it."""
    weight = getattr(module, "weight", None)
    # Quantized modules show integers, or a method (torch.ao) in the place of a tensor.
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
        raise ValueError(f"the target's {name} is absent, offloaded or quantized: load it in memory and unquantized")
    if weight.shape[1] != config.layers.hidden_size:
        raise ValueError(
            f"the draft has no {name} and hidden_size {config.layers.hidden_size}, but the target's {name} has width "
            f"{weight.shape[1]}: a draft of another width needs its own"
        )
    return weight
