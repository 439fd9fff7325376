"""Run a model as plain ``generate`` does: with its caches, its arguments, and one token per step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from .architectures import arguments_of, cache_name, cross_attends, keeps_own_states
from .names import text_arguments

MASKED = -1e4  # logits as low as this are a mask: no head computes them
# Largest difference between two readings of one text that may be due to rounding, as a share of the logits' spread.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.25}
# The same of two forwards over the same tokens and slots.
ROUNDING_OF_A_FORWARD = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
# Settings that name tokens in whose places parts of an image, a video or a sound are read.
_KINDS = ("image", "video", "audio", "vision")
PLACEHOLDERS = {f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index")} | {"image_patch_id"}  # of Molmo 2


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of the first computation of ``model``; offloaded weights move there when they are used."""
    device = model.device
    if device.type == "meta":
        for module in model.modules():  # with accelerate's hooks
            if (place := getattr(getattr(module, "_hf_hook", None), "execution_device", None)) is not None:
                return torch.device(place)
    return device


def precision(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the matrix products of ``model``, which torch.autocast may have changed.

    accelerate's autocast is inside of the forward that it puts in the place of the model's own.
    """
    kind = input_device(model).type
    around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    if "forward" not in vars(model):
        return around
    return _autocast_inside(model.forward, kind, model.dtype) or around


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of matrix products that modules with packed weights name."""
    found = (getattr(module, "compute_dtype", None) for module in model.modules())
    return {dtype for dtype in found if isinstance(dtype, torch.dtype) and dtype.is_floating_point}


def coarsest_precision(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the coarsest matrix products: beside quantised weights, the others may be of float32."""
    return max((precision(model), *compute_dtypes(model)), key=lambda dtype: torch.finfo(dtype).eps)


def _autocast_inside(function: Any, kind: str, own: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the innermost torch.autocast for a device of ``kind`` that decorates ``function``.

    It is the ``own`` dtype of the weights where that autocast is disabled.
    """
    found = None
    while function is not None:
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        for context in (one for one in cells if isinstance(one, torch.autocast) and one.device == kind):
            found = context.fast_dtype if context._enabled else own
        function = getattr(function, "__wrapped__", None)
    return found


def rounding_of(model: PreTrainedModel) -> float:
    """Return the largest difference of two readings of one text that may be due to rounding; see ``difference``."""
    return ROUNDING.get(coarsest_precision(model), 1e-3)


def rounding_of_a_forward(dtype: torch.dtype) -> float:
    """Return the largest difference of two forwards over the same tokens and slots that may be due to rounding."""
    return ROUNDING_OF_A_FORWARD.get(dtype, 1e-3)


def scored_vocabulary(model: Any) -> int:
    """Return the width of the logits of ``model``; its config may count more tokens (ImageGPT, Inkling)."""
    config = model.config.get_text_config(decoder=True)
    width = getattr(model.get_output_embeddings(), "out_features", None)
    counts = (width or config.vocab_size, getattr(config, "unpadded_vocab_size", None))
    return min(int(count) for count in counts if count)


def placeholders(config: PreTrainedConfig) -> set[int]:
    """Return the tokens in whose places parts of an image, a video or a sound are read: no text has them."""
    settings = vars(config)
    own = {token for name in settings.keys() & PLACEHOLDERS if type(token := settings[name]) is int}
    parts = (settings.get(name) for name in config.sub_configs)
    return own.union(*(placeholders(part) for part in parts if isinstance(part, PreTrainedConfig)))


def tokenizer_in(reader: Any) -> Any:
    """Return the tokenizer inside a processor, or ``reader`` itself if it is a tokenizer."""
    # Mistral's tokenizer has one of another library in its attribute `tokenizer`.
    return reader if isinstance(reader, PreTrainedTokenizerBase) else getattr(reader, "tokenizer", reader)


def renders_by_code(reader: Any) -> bool:
    """Tell whether a tokenizer or processor makes tokens of chats by code, as Mistral's do, and has no template."""
    own = getattr(type(reader), "apply_chat_template", None)
    usual = (None, PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    return not reader.chat_template and own not in usual


def readable(tokens: Tensor, count: int) -> Tensor:
    """Replace tokens outside an embedding table of ``count`` by 0: some are placeholders for parts of an image."""
    return tokens.masked_fill((tokens < 0) | (tokens >= count), 0)


def new_cache(model: PreTrainedModel) -> DynamicCache | EncoderDecoderCache | None:
    """Make the empty cache that transformers would make for ``model``; ``None`` if the model makes its own kind."""
    if keeps_own_states(model):
        return None
    config = model.config.get_text_config(decoder=True)
    if cross_attends(model):
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache())  # sources fit into no window
    return DynamicCache(config=config)


def new_static_cache(model: PreTrainedModel, length: int) -> StaticCache:
    """Make an empty cache of fixed ``length`` for ``model``."""
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the size of the position table of ``model``, or ``None`` if it has no table."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None):
        return None
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    size = next((size for name in names if (size := getattr(config, name, None))), None)
    return size if size and size > 0 else None


def space_after(prompt: int, size: int, where: str, instead: str = "") -> int:
    """Return how many tokens fit after a prompt into ``size``; a ValueError if none does.

    ``where`` names, for the message, what is ``size`` long.
    """
    if size <= prompt:
        raise ValueError(f"the prompt has {prompt} tokens, and {where} for {size}; shorten it{instead}")
    return size - prompt


def padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> dict[str, Tensor]:
    """Pad token ids on the left by ``filler``: ``input_ids`` and ``attention_mask``, (batch, longest row) each."""
    width = max(map(len, rows))
    ids = [[filler] * (width - len(row)) + [*row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def prompt_kwargs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    cache: Cache | None = None,
    source: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the arguments of ``generate``'s prefill, with an empty ``cache``, by default the model's usual one.

    ``source`` are those of the encoder's states, where the model attends to some.
    """
    cache = new_cache(model) if cache is None else cache
    mask = None if bool(attention_mask.all()) else attention_mask
    kwargs: dict[str, Any] = {cache_name(model): cache, text_arguments(model).mask: mask, "use_cache": True}
    if source is not None:
        return kwargs | source
    if "position_ids" in arguments_of(model):
        known = {"attention_mask": attention_mask}
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(input_ids, known)
    return kwargs


def plain_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Read a prompt and then ``pieces`` (batch, n) as plain ``generate`` would; return the logits of the pieces."""
    return logits_of_ways(model, input_ids, prompt_kwargs(model, input_ids, attention_mask), [pieces])[0]


def logits_of_ways(
    model: Any, input_ids: Tensor, kwargs: dict[str, Any], ways: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Read a prompt with the prefill arguments ``kwargs``, and continue it in several ``ways``.

    Each way is a list of pieces (batch, n), one per forward. Returns the logits (batch, tokens, vocabulary) of each.
    """
    outputs, name = model._prefill(input_ids, GenerationConfig(), kwargs), cache_name(model)
    found = []
    for number, pieces in enumerate(ways):
        last = number + 1 == len(ways)
        read, cache = (outputs, kwargs.get(name)) if last else copy.deepcopy((outputs, kwargs.get(name)))
        found.append(_logits_after(model, input_ids, read, {**kwargs, name: cache}, pieces))
    return found


def _logits_after(
    model: Any, input_ids: Tensor, outputs: Any, kwargs: dict[str, Any], pieces: Sequence[Tensor]
) -> Tensor:
    logits = []
    for piece in pieces:
        new = piece.shape[1]
        kwargs = model._update_model_kwargs_for_generation(
            outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder, num_new_tokens=new
        )
        input_ids = torch.cat([input_ids, piece.to(input_ids.device)], dim=1)
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **kwargs)
        inputs.pop("logits_to_keep", None)  # some models set it to 1
        outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)  # (batch, tokens of the pieces, vocabulary)


def continued(model_kwargs: dict[str, Any], count: int) -> dict[str, Tensor]:
    """Extend the mask and the positions of a prompt by ``count`` tokens."""
    longer: dict[str, Tensor] = {}
    if (mask := model_kwargs.get("attention_mask")) is not None:
        longer["attention_mask"] = torch.nn.functional.pad(mask, (0, count), value=1)
    if (positions := model_kwargs.get("position_ids")) is not None:
        more = torch.arange(1, 1 + count, device=positions.device)
        longer["position_ids"] = torch.cat([positions, positions[..., -1:] + more], dim=-1)
    return longer


def step_inputs(model: Any, input_ids: Tensor, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Let the model prepare the arguments of the first one-token forward after a prompt.

    ``outputs`` are those of the prompt's last forward, and ``kwargs`` the arguments of its first one.
    """
    longer = torch.nn.functional.pad(input_ids, (0, 1))  # the value of the new token does not matter
    has_encoder = model.config.is_encoder_decoder
    kwargs = model._update_model_kwargs_for_generation(outputs, dict(kwargs), is_encoder_decoder=has_encoder)
    prepared: dict[str, Any] = model.prepare_inputs_for_generation(longer, next_sequence_length=1, **kwargs)
    return prepared


def difference(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference (...) of ``logits`` from ``expected``, both (..., vocabulary).

    It is a share of the spread (standard deviation) of the tokens that the model's head does not mask. Masked are
    -inf and huge negative numbers, which must be in both, and a lowest value that several tokens share. Equal logits
    differ by 0, whatever the spread.
    """
    logits, expected = logits.float(), expected.float()
    huge = expected <= MASKED
    lowest = expected == expected.amin(-1, keepdim=True)
    free = ~(huge | (lowest & (lowest.sum(-1, keepdim=True) > 1)))
    count = free.sum(-1, keepdim=True)
    mean = expected.where(free, 0).sum(-1, keepdim=True) / count
    spread = ((expected - mean).where(free, 0).square().sum(-1) / (count[..., 0] - 1)).sqrt()
    most = (logits - expected).abs().masked_fill(huge & (logits <= MASKED), 0).amax(-1)
    return torch.where(most == 0, most, most / spread)
