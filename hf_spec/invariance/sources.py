"""Sources of encoder-decoder models, to compare what their encoders and decoders compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..scoring.names import text_arguments
from ..scoring.plain import input_device, position_limit
from ..scoring.prompts import tokens_for

SHORTER, LONGER = 7, 3  # tokens by which other sources of a batch differ from the last one
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def why_no_source(model: Any) -> str | None:
    """Say why no source can be made for ``model``, or return ``None`` if one can, or if it reads none."""
    if not model.config.is_encoder_decoder or model.config.model_type == "whisper":
        return None
    name = getattr(model.get_encoder(), "main_input_name", "input_ids")
    if name == "input_ids":
        return None
    return f"its encoder reads {name}, and bits were compared for tokens and for Whisper's sound"


def encoded(model: Any, rows: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Encode ``rows`` sources, of which the last is always the same one of ``length`` tokens.

    The first result are arguments of the decoder's forward, none for a decoder-only model. The second are the
    encoder's hidden states of the last source, (tokens, width) each.
    """
    if not model.config.is_encoder_decoder:
        return {}, []
    encoder = model.get_encoder()
    if model.config.model_type == "whisper":
        given = {encoder.main_input_name: _sounds(model, rows)}
        length = int(model.config.max_source_positions)
    else:
        limit = position_limit(encoder)
        length = length if limit is None else min(length, limit - LONGER)
        given = _texts(model, encoder, rows, length)
    outputs = encoder(**given, output_hidden_states=True, return_dict=True)
    kwargs = {"encoder_outputs": outputs} | {name: given[name] for name in ("attention_mask",) if name in given}
    states = (*outputs.hidden_states, outputs.last_hidden_state)
    return kwargs, [one[-1, :length] for one in states]


def read_text(model: Any, ids: Tensor, **kwargs: Any) -> Any:
    """Run a forward of ``model`` that continues its text by ``ids`` (rows, tokens)."""
    return model(**{text_arguments(model).ids: ids}, **kwargs)


def convolutions_of_source(model: Any) -> set[nn.Module]:
    """Return the convolutions of an encoder, which add up a row in an order that depends on how many there are."""
    if not model.config.is_encoder_decoder:
        return set()
    return {one for one in model.get_encoder().modules() if type(one) in CONVOLUTIONS}


def _texts(model: Any, encoder: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Make token ids and their mask, padded on the right: a longer source, shorter ones, and the last."""
    width = length if rows == 1 else length + LONGER
    last = tokens_for(model, 1, length, 4)
    ids = tokens_for(model, rows, width, 5)
    ids[-1, :length] = last[0]
    mask = torch.ones_like(ids)
    mask[1:, length - SHORTER :] = 0
    mask[-1, :length], mask[-1, length:] = 1, 0
    table = encoder.get_input_embeddings()
    return {"input_ids": ids % table.num_embeddings, "attention_mask": mask}


def _sounds(model: Any, rows: int) -> Tensor:
    config, generator = model.config, torch.Generator().manual_seed(0)
    last, *others = (
        torch.randn(config.num_mel_bins, 2 * config.max_source_positions, generator=generator, device="cpu")
        for _ in range(rows)
    )
    return torch.stack([*others, last]).to(input_device(model), model.dtype)
