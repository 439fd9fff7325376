"""How large the paged cache of an engine is where the user does not say it: what the requests need, and no more.

transformers would take most of the memory that the machine has, whatever other programs use, and fill it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.utils import (
    WorkloadHints,
    find_head_dim,
    find_num_key_value_heads,
    get_device_and_memory_breakdown,
)
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_psutil_available

from ..scoring.plain import input_device

MOST_ON_CPU = 2 * 2**30  # bytes
SHARE_ON_CPU, SHARE = 0.25, 0.5  # of the memory that is free
PAGE, TOKENS_PER_FORWARD, MOST_TOKENS_PER_FORWARD = 32, 512, 2048  # on a CPU
TOKENS_PER_FORWARD_ELSEWHERE = 8192
AT_ONCE = 1024  # requests, transformers' own limit
DRAFT_TOKENS = 16  # of a request that need room beside its text
MARGIN = 0.15  # of the blocks must be free, or transformers lets no request begin

logger = logging.get_logger(__name__)


def sized(
    model: Any,
    given: ContinuousBatchingConfig | None,
    hints: WorkloadHints | None,
    at_once: int | None = None,
) -> ContinuousBatchingConfig:
    """Return a copy of ``given`` that says how many tokens its cache holds and a forward reads.

    What ``given`` says is kept. ``hints`` tell how long and how many the requests are; without them the cache is as
    large as it may become. ``at_once`` is the largest number of requests in a batch, if ``given`` says none.
    """
    config = copy.copy(given) if given is not None else ContinuousBatchingConfig()
    on_cpu = input_device(model).type == "cpu"
    if given is None and on_cpu:
        config.page_size = PAGE
    config.max_requests_per_batch = config.max_requests_per_batch or at_once
    longest: float = _longest(model, hints)
    rows = config.max_requests_per_batch
    if hints is not None and hints.num_requests > 0:
        rows = min(hints.num_requests, rows or AT_ONCE)
    if config.max_batch_tokens is None:
        config.max_batch_tokens = _tokens_per_forward(on_cpu, rows, longest)
    if config.num_blocks is None and config.max_memory_percent is None:
        _choose_blocks(model, config, longest, rows or AT_ONCE, is_known(hints))
    return config


def is_known(hints: WorkloadHints | None) -> bool:
    """Tell whether ``hints`` say how long requests may become."""
    return hints is not None and hints.max_prompt_length > 0 and hints.max_generated_length > 0


def has_room(kept: ContinuousBatchingConfig, wanted: ContinuousBatchingConfig, hints: WorkloadHints | None) -> bool:
    """Tell whether an engine of the size ``kept`` holds every single request, and half of those ``wanted`` at once."""
    room = (kept.num_blocks or 0) * kept.page_size
    longest = hints.max_prompt_length + hints.max_generated_length if hints is not None and is_known(hints) else 0
    return room >= longest and 2 * room >= (wanted.num_blocks or 0) * wanted.page_size


def _longest(model: Any, hints: WorkloadHints | None) -> float:
    """Return the tokens of the longest request: what ``hints`` say, or what the model was made for."""
    if hints is not None and is_known(hints):
        return hints.max_prompt_length + hints.max_generated_length
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf


def _tokens_per_forward(on_cpu: bool, rows: int | None, longest: float) -> int:
    """Choose how many tokens a forward may read; masks grow with them, and are filled before every forward."""
    if on_cpu:
        return min(MOST_TOKENS_PER_FORWARD, max(TOKENS_PER_FORWARD, 8 * (rows or 0)))
    return int(min(TOKENS_PER_FORWARD_ELSEWHERE, max(TOKENS_PER_FORWARD, (rows or AT_ONCE) * longest)))


def _choose_blocks(model: Any, config: ContinuousBatchingConfig, longest: float, rows: int, known: bool) -> None:
    """Set the number of blocks of ``config``, and of requests at once if they are fewer; say so in the log."""
    margin = min(0.5, MARGIN if config.safety_margin is None else config.safety_margin)
    spare = _blocks_of_sectors(model)
    each = math.inf if math.isinf(longest) else math.ceil((longest + DRAFT_TOKENS) / config.page_size)
    needed = rows * each / (1 - margin) + spare
    bytes_per_block = config.page_size * _bytes_per_token(model, config.max_batch_tokens or 0)
    most: float = max(1, _most_bytes(model) // bytes_per_block)
    if known:  # one request has to fit
        most = max(most, each + spare)
    config.num_blocks = math.ceil(min(needed, most))
    is_bounded = known and needed > most
    if is_bounded:  # texts that were begun in too great a number would have to be put aside
        rows = max(1, min(rows, int((config.num_blocks - spare) * (1 - margin) / each)))
        config.max_requests_per_batch = config.max_requests_per_batch or rows
    room = config.num_blocks * config.page_size
    text = (
        f"The paged cache holds {room} tokens ({config.num_blocks * bytes_per_block / 1e9:.2f} GB with its masks)"
        f"{f', {rows} requests of up to {longest} tokens at once' if known else ''}. Set num_blocks or "
        "max_memory_percent of a ContinuousBatchingConfig for another size."
    )
    (logger.warning if is_bounded else logger.info)(text)


def _blocks_of_sectors(model: Any) -> int:
    """Count the blocks that may stay empty: memory is given to each kind of layer in sectors, which fit all kinds."""
    counts = [len(layers) for layers in group_layers_by_attn_type(model.config.get_text_config(decoder=True)).values()]
    return math.ceil(len(counts) * math.lcm(*counts) / sum(counts))


def _bytes_per_token(model: Any, tokens_per_forward: int) -> int:
    """Count the bytes of the keys and values of a token of text, and of its column of the masks."""
    text = model.config.get_text_config(decoder=True)
    states = 2 * text.num_hidden_layers * find_num_key_value_heads(text) * find_head_dim(text)
    kinds = 0 if is_flash_attention_requested(text) else len(group_layers_by_attn_type(text))  # each has a mask
    return int(model.dtype.itemsize * (states + kinds * tokens_per_forward))


def _most_bytes(model: Any) -> int:
    """Return how many bytes a cache may have that nobody asked for."""
    if input_device(model).type != "cpu":
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        return int(SHARE * (total - max(reserved, allocated)))
    if not is_psutil_available():
        return MOST_ON_CPU
    import psutil  # type: ignore[import-untyped]

    return min(MOST_ON_CPU, int(SHARE_ON_CPU * psutil.virtual_memory().available))
