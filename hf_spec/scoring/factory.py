"""Choose the runner that scores draft tokens, by the model's cache and by how it reads several tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from .architectures import keeps_own_states
from .cache import has_states
from .compiled import StaticCacheRunner
from .plain import difference, plain_logits, rounding_of
from .prompts import tokens_for
from .recurrent import PerTokenRunner, SnapshotRunner
from .runner import ModelRunner
from .trials import tried_once

PROBE_TOKENS = 8  # tokens that tell whether a model reads blocks as it reads single tokens


def runner_for(
    model: PreTrainedModel,
    cache: object,
    feature_layers: Sequence[int] = (),
    hidden_states: bool = False,
    *,
    one_chain: bool,
    widest: int | None = None,
) -> ModelRunner:
    """Choose the runner that scores draft tokens after a sequence in ``cache``.

    ``one_chain`` promises that each row gets one chain, in one forward, between two commits. ``widest`` is the number
    of nodes of a complete proposal, if that is always the same.
    """
    if keeps_own_states(model):
        if not one_chain:
            raise ValueError(
                f"{type(model).__name__} cannot be a draft: it keeps recurrent states in a cache of its own kind, "
                "which rolls back one chain of draft tokens at a time. Use another draft, or 'ngram'."
            )
        return SnapshotRunner(model, feature_layers, hidden_states)
    if isinstance(cache, StaticCache):
        return StaticCacheRunner(model, feature_layers, hidden_states, widest)
    if not has_states(cache):
        return ModelRunner(model, feature_layers, hidden_states)
    kind = SnapshotRunner if one_chain and reads_blocks(model) else PerTokenRunner
    return kind(model, feature_layers, hidden_states)


@tried_once
def reads_blocks(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` continues from its state with several tokens as with one at a time; measured once.

    Mamba, FalconMamba, Jamba and Zamba drop the state then; Zamba2 and Nemotron-H clamp the time step in blocks only.
    """
    prompt, rest = tokens_for(model, 1, 2 * PROBE_TOKENS).split(PROBE_TOKENS, dim=1)
    block = plain_logits(model, prompt, torch.ones_like(prompt), [rest])
    steps = plain_logits(model, prompt, torch.ones_like(prompt), rest.split(1, dim=1))
    return bool(difference(block, steps).max() <= rounding_of(model))
