"""Default size of an engine's paged cache: what the requests need, and no more.

transformers' own default allocates most of the machine's memory, whatever other programs use.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import math
import sys
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_psutil_available

from ..parallel import ModelParallelGroup
from ..scoring.plain import input_device
from ..versions import find_head_dim, find_num_key_value_heads, get_device_and_memory_breakdown

MOST_ON_CPU = 2 * 2**30  # bytes
SHARE_ON_CPU, SHARE = 0.25, 0.5  # share of the free memory
PAGE, TOKENS_PER_FORWARD, MOST_TOKENS_PER_FORWARD = 32, 512, 2048  # tokens, on a CPU
TOKENS_PER_FORWARD_ELSEWHERE = 8192
AT_ONCE = 1024  # requests, transformers' own limit
DRAFT_TOKENS = 16  # draft tokens per request that need space in addition to its text
MARGIN = 0.15  # share of the blocks that must be free, or transformers starts no request

logger = logging.get_logger(__name__)


def sized(
    model: Any,
    given: ContinuousBatchingConfig | None,
    hints: WorkloadHints | None,
    at_once: int | None = None,
) -> ContinuousBatchingConfig:
    """Return a copy of ``given`` that sets the tokens of its cache and of a forward.

    Fields that ``given`` sets are kept. ``hints`` hold the length and number of the requests; without them the cache
    gets the largest size allowed. ``at_once`` is the largest number of requests in a batch, if ``given`` sets none.
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
        _choose_blocks(model, config, longest, rows or AT_ONCE, longest_of(hints) is not None)
    return config


def longest_of(hints: WorkloadHints | None) -> int | None:
    """Return the tokens of the longest request, with its text, if ``hints`` hold them."""
    if hints is None or hints.max_prompt_length <= 0 or hints.max_generated_length <= 0:
        return None
    return int(hints.max_prompt_length + hints.max_generated_length)


def holds_longest(kept: ContinuousBatchingConfig, hints: WorkloadHints | None) -> bool:
    """Tell whether an engine of size ``kept`` has space for the longest request, as far as ``hints`` say."""
    return _tokens(kept) >= (longest_of(hints) or 0)


def holds_half(kept: ContinuousBatchingConfig, wanted: ContinuousBatchingConfig) -> bool:
    """Tell whether an engine of size ``kept`` has space for half of the ``wanted`` tokens at once."""
    return 2 * _tokens(kept) >= _tokens(wanted)


def _tokens(config: ContinuousBatchingConfig) -> int:
    return (config.num_blocks or 0) * config.page_size


def longest_text(cache: Any) -> int:
    """Return how many tokens of one text the paged ``cache`` of an engine has room for.

    All kinds of layers take memory from the same sectors, so full attention cannot have every one of them. Without
    full attention, a text may be of any length once its windows have room.
    """

    def is_too_long(tokens: int) -> bool:
        kinds = cache.cache_allocators.values()
        sectors = (math.ceil(one.needs_new_blocks("", 0, tokens) / one.blocks_per_sector) for one in kinds)
        return bool(sum(sectors) > cache.num_sectors)

    most = sys.maxsize if cache.read_cache_limit is not None else cache.max_tokens_read + 1
    return bisect.bisect_left(range(1, most), True, key=is_too_long)


def _longest(model: Any, hints: WorkloadHints | None) -> float:
    """Return the tokens of the longest request, from ``hints`` or else the model's positions."""
    if (known := longest_of(hints)) is not None:
        return known
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf


def _tokens_per_forward(on_cpu: bool, rows: int | None, longest: float) -> int:
    """Choose the tokens of a forward; masks grow with them, and are filled before every forward."""
    if on_cpu:
        return min(MOST_TOKENS_PER_FORWARD, max(TOKENS_PER_FORWARD, 8 * (rows or 0)))
    return int(min(TOKENS_PER_FORWARD_ELSEWHERE, max(TOKENS_PER_FORWARD, (rows or AT_ONCE) * longest)))


def _choose_blocks(model: Any, config: ContinuousBatchingConfig, longest: float, rows: int, known: bool) -> None:
    """Set the number of blocks of ``config`` and, if memory is short, the number of requests at once; log both."""
    margin = min(0.5, MARGIN if config.safety_margin is None else config.safety_margin)
    spare = _blocks_of_sectors(model)
    each = math.inf if math.isinf(longest) else math.ceil((longest + DRAFT_TOKENS) / config.page_size)
    needed = rows * each / (1 - margin) + spare
    bytes_per_block = config.page_size * _bytes_per_token(model, config.max_batch_tokens or 0)
    # Processes that share a model have different free memory, and must schedule the same requests.
    bound = ModelParallelGroup(model).broadcast(_most_bytes(model))
    most: float = max(1, bound // bytes_per_block)
    if known:  # one request has to fit
        most = max(most, each + spare)
    config.num_blocks = math.ceil(min(needed, most))
    is_bounded = known and needed > most
    if is_bounded:  # with more requests at once, the engine would have to evict some that have begun
        rows = max(1, min(rows, int((config.num_blocks - spare) * (1 - margin) / each)))
        config.max_requests_per_batch = config.max_requests_per_batch or rows
    tokens = config.num_blocks * config.page_size
    text = (
        f"The paged cache holds {tokens} tokens ({config.num_blocks * bytes_per_block / 1e9:.2f} GB with its masks)"
        f"{f', {rows} requests of up to {longest} tokens at once' if known else ''}. Set num_blocks or "
        "max_memory_percent of a ContinuousBatchingConfig for another size."
    )
    (logger.warning if is_bounded else logger.info)(text)


def _blocks_of_sectors(model: Any) -> int:
    """Count the blocks that may stay empty: each kind of layer gets memory in sectors, whose size fits all kinds."""
    counts = [len(layers) for layers in group_layers_by_attn_type(model.config.get_text_config(decoder=True)).values()]
    return math.ceil(len(counts) * math.lcm(*counts) / sum(counts))


def _bytes_per_token(model: Any, tokens_per_forward: int) -> int:
    """Return the bytes of one token: its keys and values, and its column of the masks."""
    text = model.config.get_text_config(decoder=True)
    states = 2 * text.num_hidden_layers * find_num_key_value_heads(text) * find_head_dim(text)
    kinds = 0 if is_flash_attention_requested(text) else len(group_layers_by_attn_type(text))  # one mask for each kind
    return int(model.dtype.itemsize * (states + kinds * tokens_per_forward))


def _most_bytes(model: Any) -> int:
    """Return the largest default size of a cache, in bytes."""
    device = input_device(model)
    if device.type != "cpu":
        with _current(device):
            _, total, reserved, allocated = get_device_and_memory_breakdown()
        return int(SHARE * (total - max(reserved, allocated)))
    if not is_psutil_available():
        return MOST_ON_CPU
    import psutil  # type: ignore[import-untyped]

    return min(MOST_ON_CPU, int(SHARE_ON_CPU * psutil.virtual_memory().available))


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the current one, whose memory transformers asks for."""
    if device.type not in ("cuda", "xpu"):  # there is one device of the other kinds
        return contextlib.nullcontext()
    current: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return current
