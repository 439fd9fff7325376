"""The default speculator of a model: set with ``set_speculator``, or named in a generation config."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PreTrainedModel

from .checkpoints.resolve import as_speculator, placement
from .drafts.base import Speculator
from .scoring.adapters import base_model
from .settings import SpeculationConfig, check_settings

_stored: WeakKeyDictionary[PreTrainedModel, tuple[Speculator, SpeculationConfig | None]] = WeakKeyDictionary()
# Drafts that a generation config names, loaded once per model and place of it.
_named: WeakKeyDictionary[PreTrainedModel, tuple[Speculator, str, dict[str, Any]]] = WeakKeyDictionary()


def set_speculator(model: PreTrainedModel, speculator: Any, config: SpeculationConfig | None = None) -> None:
    """Let every ``generate`` call of ``model`` use ``speculator``; ``None`` forgets it.

    After that, calls are plain, unless the model's generation config names a speculator.
    So do the calls of a language model inside ``model``, which BLIP-2 lets generate.
    Nothing is stored on the model, so copies of it have no default speculator. A speculator of your own that refers to
    the model keeps it in memory until this is called with ``None``. A call's own ``speculator=``,
    ``assistant_model=`` or ``custom_generate=`` comes first. ``speculator=False`` turns the default off for one call.
    A call that cannot be decoded speculatively, such as one with beams, is decoded plainly, with one warning.
    """
    check_settings(config, "config")
    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}, no model of transformers: pass the loaded target, "
            "set_speculator(target, draft)"
        )
    if speculator is None:
        _stored.pop(model, None)
    else:
        found = as_speculator(speculator, model)
        found.check(model, found.settings(config))
        _stored[model] = (found, config)


def get_speculator(model: PreTrainedModel) -> Speculator | None:
    """Return the speculator that ``set_speculator`` stored for ``model``; None if there is none."""
    return stored_for(model)[0]


def stored_for(model: PreTrainedModel) -> tuple[Speculator | None, SpeculationConfig | None]:
    """Return the speculator and the settings that ``set_speculator`` stored for ``model``."""
    return _stored.get(base_model(model), (None, None))


def default_speculator(
    model: Any, generation_config: GenerationConfig | None
) -> tuple[Speculator | None, SpeculationConfig | None]:
    """Return the speculator for a call of ``model`` that passes none, and the settings stored with it.

    The call's own ``generation_config`` comes first, then what ``set_speculator`` stored, then the model's
    ``generation_config``. What is stored for a model holds for the language model inside that generates for it.

    Errors: those of loading the named draft; TypeError for a value that a config cannot hold.
    """
    if getattr(generation_config, "is_assistant", False):  # transformers' assisted generation asks it for draft tokens
        return None, None
    own, models = (_named_in(config) for config in (generation_config, getattr(model, "generation_config", None)))
    if own is None and (stored := _stored_for_call(model)) is not None:
        return stored
    name = models if own is None else own
    if not name:  # False turns off the defaults of lower priority
        _named.pop(model, None)  # so that a draft that was trained further can be named again
        return None, None
    speculator, *known = _named.get(model, (None,))
    if speculator is None or known != [name, placement(model)]:
        speculator = as_speculator(name, model)
        _named[model] = speculator, name, placement(model)
    return speculator, None


def _stored_for_call(model: Any) -> tuple[Speculator, SpeculationConfig | None] | None:
    if model in _stored:
        return _stored[model]
    # BLIP-2 and a few others call ``generate`` of their language model. Talkers and depth decoders write no text.
    outer = (
        known
        for one, known in list(_stored.items())
        if any(inner is model for inner in one.modules()) and _kind_of_text(one) == _kind_of_text(model)
    )
    return next(outer, None)


def _kind_of_text(model: Any) -> tuple[Any, Any]:
    config = model.config.get_text_config(decoder=True)
    return config.model_type, getattr(config, "vocab_size", None)


def _named_in(config: GenerationConfig | None) -> Any:
    name = getattr(config, "speculator", None)
    if name is None or name is False or isinstance(name, str):
        return name
    raise TypeError(
        f"generation_config.speculator is a {type(name).__name__}, but a generation config holds what can be saved as "
        "JSON, a str: 'ngram', 'mtp', 'early-exit', 'plain', 'auto', a path or a Hub id. Pass a draft as "
        "generate(..., speculator=draft), or store it with hf_spec.set_speculator(model, draft)"
    )


def fill_in(model: Any, config: GenerationConfig) -> None:
    """Fill the open fields of ``config`` as ``generate`` does, from the model's config or transformers' defaults.

    The engine of continuous batching does not apply these defaults, of which ``top_k=50`` is one.
    """
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**config._get_default_generation_params(), defaults_only=True)
