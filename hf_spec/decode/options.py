"""What a generation config says of speculation, and where ``generate`` looks an option up."""

from __future__ import annotations

from typing import Any

from ..settings import SpeculationConfig


def configured(model: Any, kwargs: dict[str, Any]) -> SpeculationConfig | None:
    """Return the settings in the generation config of a call or of ``model``; None if neither has any."""
    given = option(model, kwargs, "speculation_config")
    if given is None or isinstance(given, SpeculationConfig):
        return given
    if isinstance(given, dict):  # loaded from a JSON file
        return SpeculationConfig().merge(**given)
    raise TypeError(
        f"generation_config.speculation_config is {given!r:.80}; write a hf_spec.SpeculationConfig or a dict of its "
        "fields"
    )


def option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Look an option up as transformers does: in the call, in its generation config, in the model's."""
    if name in kwargs:  # None turns off the option of the configs
        return kwargs[name]
    found = (getattr(config, name, None) for config in (kwargs.get("generation_config"), model.generation_config))
    return next((value for value in found if value is not None), None)
