"""Mixtures of experts, whose experts each compute those rows of a forward that are routed to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .rows import all_in_sizes

GROUPED, BATCHED = "grouped_mm", "batched_mm"  # ways of transformers to compute experts


def is_mixture(module: nn.Module) -> bool:
    """Tell whether ``module`` routes rows to experts."""
    return isinstance(getattr(module, "experts", None), nn.Module)


def way_of_experts(config: Any) -> str | None:
    """Return the name of transformers' way of computing experts."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


def one_way_of_experts(model: Any) -> Callable[[Callable[[Any], Any]], None]:
    """Let experts compute prompts in the way of all later steps; return what undoes that.

    On an accelerator, transformers' ``generate`` changes grouped products to batched ones after the prompt.
    """
    known: list[tuple[Any, str]] = []
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if way_of_experts(config) == GROUPED and model.device.type != "cpu":
            known.append((config, GROUPED))
            config._experts_implementation = BATCHED

    def undo(of: Callable[[Any], Any]) -> None:
        for config, before in known:
            of(config)._experts_implementation = before

    return undo


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
