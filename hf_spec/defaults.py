"""What guesses where a call does not say: stored beside the model, or named in a generation config."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PreTrainedModel

from .checkpoints.resolve import as_speculator, base_model
from .drafts.base import Speculator
from .settings import SpeculationConfig, check_settings

_stored: WeakKeyDictionary[PreTrainedModel, tuple[Speculator, SpeculationConfig | None]] = WeakKeyDictionary()
# What a generation config names is read once per model.
_named: WeakKeyDictionary[PreTrainedModel, tuple[str, Speculator]] = WeakKeyDictionary()


def set_speculator(model: PreTrainedModel, speculator: Any, config: SpeculationConfig | None = None) -> None:
    """Let every ``generate`` call of ``model`` use ``speculator``; ``None`` goes back to plain generation.

    Nothing is stored on the model, so that copies of it have none. A call's own ``speculator=``, ``assistant_model=``
    or ``custom_generate=`` comes first; ``speculator=False`` turns it off once. A call that cannot be decoded
    speculatively, such as one with beams, is decoded plainly, with one warning.
    """
    check_settings(config, "config")
    model = base_model(model)
    if speculator is None:
        _stored.pop(model, None)
    else:
        found = as_speculator(speculator, model)
        found.check(model, found.settings(config))
        _stored[model] = (found, config)


def get_speculator(model: PreTrainedModel) -> Speculator | None:
    """Return what ``set_speculator`` stored for ``model``; None where nothing is."""
    return stored_for(model)[0]


def stored_for(model: PreTrainedModel) -> tuple[Speculator | None, SpeculationConfig | None]:
    """Return what ``set_speculator`` was given for ``model``."""
    return _stored.get(base_model(model), (None, None))


def default_speculator(
    model: Any, generation_config: GenerationConfig | None
) -> tuple[Speculator | None, SpeculationConfig | None]:
    """Return what guesses in a call of ``model`` that does not say, and the settings stored with it.

    The call's own ``generation_config`` comes first, then what ``set_speculator`` stored, then the model's
    ``generation_config``. Errors: those of reading the draft that a config names; TypeError for what none can name.
    """
    own, models = (_named_in(config) for config in (generation_config, getattr(model, "generation_config", None)))
    if own is None and (stored := _stored.get(model)) is not None:
        return stored
    name = models if own is None else own
    if not name:  # False turns off what the other ones say
        return None, None
    if _named.get(model, ("",))[0] != name:
        _named[model] = (name, as_speculator(name, model))
    return _named[model][1], None


def _named_in(config: GenerationConfig | None) -> Any:
    name = getattr(config, "speculator", None)
    if name is None or name is False or isinstance(name, str):
        return name
    raise TypeError(
        f"generation_config.speculator is a {type(name).__name__}, but a generation config holds what can be saved as "
        "JSON, a str: 'ngram', 'mtp', 'auto', a path or a Hub id. Pass a draft as generate(..., speculator=draft), or "
        "store it with hf_spec.set_speculator(model, draft)"
    )


def configured(model: Any, kwargs: dict[str, Any]) -> SpeculationConfig | None:
    """Return the settings in the generation config of a call or of ``model``; None if neither has any."""
    given = option(model, kwargs, "speculation_config")
    if given is None or isinstance(given, SpeculationConfig):
        return given
    if isinstance(given, dict):  # as it was saved
        return SpeculationConfig().merge(**given)
    raise TypeError(
        f"generation_config.speculation_config is {given!r:.80}; write a hf_spec.SpeculationConfig or a dict of its "
        "fields"
    )


def option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Look an option up where transformers does: in the call, in its configuration, in the model's."""
    if name in kwargs:  # None turns off what the configurations ask for
        return kwargs[name]
    found = (getattr(config, name, None) for config in (kwargs.get("generation_config"), model.generation_config))
    return next((value for value in found if value is not None), None)


def fill_in(model: Any, config: GenerationConfig) -> None:
    """Let ``config`` say what ``generate`` would find: what it leaves open is the model's, or transformers' default.

    The engine of continuous batching knows none of these defaults, of which ``top_k=50`` is one.
    """
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**config._get_default_generation_params(), defaults_only=True)
