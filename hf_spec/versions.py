"""What older versions of transformers lack or name otherwise, and what takes its place.

No other module asks for a version. A feature that needs a newer one says so (``older_than``) when it is used.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PreTrainedConfig, cache_utils, configuration_utils
from transformers.masking_utils import create_causal_mask

INSTALLED = Version(transformers.__version__)
CONTINUOUS_BATCHING = Version("5.23")  # the oldest whose engine was run with what batching/ overrides

# The name of the cache among the arguments of forwards: "cache" since 5.24.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

# The name of the property that tells whether a model runs its layers again in the backward pass: changed in 5.23.
CHECKPOINTING = next(
    name
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing")
    if hasattr(transformers.PreTrainedModel, name)
)
CHECKPOINTING_ARGUMENT = CHECKPOINTING.removeprefix("is_")  # of training, for the same


def older_than(needed: Version) -> str | None:
    """Say which version of transformers is needed if the installed one is older; ``None`` if it is not."""
    if Version(INSTALLED.base_version) >= needed:
        return None
    return f"it needs transformers {needed} or newer, and {INSTALLED} is installed; upgrade transformers"


def assistants_error() -> str:
    """Say where to look if the assistants of Gemma 4 cannot be built: 5.23 looks for layers that share no keys."""
    if INSTALLED.release[:2] == (5, 23):
        return "5.23 builds none of these assistants: install an older or a newer version"
    return "its config may be damaged, or made for a newer version"


def indexer_positions(layer: Any) -> Any:
    """Return the positions that a ``DynamicIndexedLayer`` keeps since 5.21, or ``None`` if it keeps none."""
    return getattr(layer, "indexer_position_ids", None)


class _NoCache:
    """A stand-in for ``DummyLayer`` (5.23), which is no layer of any cache of an older version."""

    is_compileable = is_croppable = True
    keys = values = None


class _SubConfigSpec:
    """A stand-in for ``SubConfigSpec`` (5.20): the class of a part of a config, and how to make one without fields."""

    def __init__(self, config_class: Any, model_type: str, init_kwargs: dict[str, Any]) -> None:
        self.config_class = config_class
        self.model_type = model_type
        self.init_kwargs = init_kwargs

    def make(self, given: Any) -> Any:
        """Return ``given`` as a config: one already, a dict of fields, or ``None`` for the default."""
        if isinstance(given, PreTrainedConfig):
            return given
        fields = self.init_kwargs if given is None else given
        name = fields.get("model_type", self.model_type)
        if name not in CONFIG_MAPPING:
            raise ValueError(f"Unrecognized model type for subconfig: {name}")
        return CONFIG_MAPPING[name](**fields)


class _CompositeConfig(PreTrainedConfig):
    """A stand-in for ``PreTrainedConfig`` (5.20), which makes the parts in ``sub_configs_defaults``."""

    sub_configs_defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        made: Any = cls
        made.sub_configs = {name: spec.config_class for name, spec in cls.sub_configs_defaults.items()}
        made.has_no_defaults_at_init = True  # a kind of draft need not have a valid default
        super().__init_subclass__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __post_init__(self, **kwargs: Any) -> None:
        for name, spec in self.sub_configs_defaults.items():
            setattr(self, name, spec.make(getattr(self, name)))
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


def _engine_part(name: str) -> Any:
    """Return ``name`` of transformers' continuous batching, or a class without use, which ``older_than`` guards.

    Parts moved between its modules.
    """
    for module in ("utils", "requests", "cache", "cache_allocators"):
        try:
            found = importlib.import_module(f"transformers.generation.continuous_batching.{module}")
        except ImportError:  # cache_allocators is new in 5.18
            continue
        if hasattr(found, name):
            return getattr(found, name)
    return type(name, (), {})


if TYPE_CHECKING:  # the newest version is what types are checked with
    from transformers.cache_utils import DummyLayer as DummyLayer
    from transformers.configuration_utils import SubConfigSpec as SubConfigSpec
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator as FullAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.cache_allocators import (
        SlidingAttentionCacheAllocator as SlidingAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.utils import find_head_dim as find_head_dim
    from transformers.generation.continuous_batching.utils import find_num_key_value_heads as find_num_key_value_heads
    from transformers.generation.continuous_batching.utils import (
        get_device_and_memory_breakdown as get_device_and_memory_breakdown,
    )
    from transformers.generation.continuous_batching.utils import stream_context as stream_context

    CompositeConfig = PreTrainedConfig
else:
    DummyLayer = getattr(cache_utils, "DummyLayer", _NoCache)
    SubConfigSpec = getattr(configuration_utils, "SubConfigSpec", _SubConfigSpec)
    CompositeConfig = _CompositeConfig if SubConfigSpec is _SubConfigSpec else PreTrainedConfig
    FullAttentionCacheAllocator = _engine_part("FullAttentionCacheAllocator")
    SlidingAttentionCacheAllocator = _engine_part("SlidingAttentionCacheAllocator")
    find_head_dim = _engine_part("find_head_dim")
    find_num_key_value_heads = _engine_part("find_num_key_value_heads")
    get_device_and_memory_breakdown = _engine_part("get_device_and_memory_breakdown")
    stream_context = _engine_part("stream_context")
