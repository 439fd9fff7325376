"""Train drafts: the training-time test, its losses, data, and a ``Trainer``. Needs ``pip install hf-spec[train]``."""

from __future__ import annotations

try:
    import datasets as _needed  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError('hf_spec.training needs the datasets library: pip install "hf-spec[train]"') from error

from ..unroll.feedback import unroll
from .arguments import DraftTrainingArguments
from .data import DraftCollator, prepare_dataset
from .endpoint import Endpoint
from .evaluation import measure
from .features import FeatureCache, cache_features
from .regenerate import regenerate
from .rollouts import RolloutCallback, train_on
from .trainer import DraftTrainer
from .vocabulary import count_tokens, most_frequent, new_draft

__all__ = [
    "DraftCollator",
    "DraftTrainer",
    "DraftTrainingArguments",
    "Endpoint",
    "FeatureCache",
    "RolloutCallback",
    "cache_features",
    "count_tokens",
    "measure",
    "most_frequent",
    "new_draft",
    "prepare_dataset",
    "regenerate",
    "train_on",
    "unroll",
]
