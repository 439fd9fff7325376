"""Mixtures of experts, whose experts each compute those rows of a forward that are routed to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .rows import all_in_sizes
from .shared_configs import Undo, change, is_changed

WAY, GROUPED, BATCHED = "_experts_implementation", "grouped_mm", "batched_mm"  # of transformers to compute experts


def is_mixture(module: nn.Module) -> bool:
    """Tell whether ``module`` routes rows to experts."""
    return isinstance(getattr(module, "experts", None), nn.Module)


def way_of_experts(config: Any) -> str | None:
    """Return the name of transformers' way of computing experts."""
    name: str | None = getattr(config, WAY, None)
    return name


def one_way_of_experts(model: Any) -> Undo:
    """Let experts compute prompts in the way of all later steps; return what undoes that.

    On an accelerator, transformers' ``generate`` changes grouped products to batched ones after the prompt.
    """
    configs = (model.config, model.config.get_text_config(decoder=True)) if model.device.type != "cpu" else ()
    concerned = [one for one in configs if way_of_experts(one) == GROUPED or is_changed(one, WAY)]
    return change(concerned, WAY, BATCHED)


def of_rows(compute: Callable[[Tensor], Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Turn a mixture of (1, rows, width) into a function of (rows, width).

    The routers' results, of which some mixtures return more, are (rows, experts) already.
    """

    def results(rows: Tensor) -> tuple[Tensor, ...]:
        found = compute(rows[None])
        states, others = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        return states.view(len(rows), -1), *others

    return results


def mixture_in_sizes(compute: Callable[[Tensor], Any], states: Tensor, sizes: tuple[int, ...]) -> Any:
    """Return what ``compute`` returns for ``states`` (batch, tokens, width), called with ``sizes`` of rows only."""
    found, *others = all_in_sizes(of_rows(compute), states, sizes)
    return (found.view_as(states), *others) if others else found.view_as(states)
