"""Tiny random models of every encoder-decoder architecture that transformers can build, and sources for them.

`build("t5")` shrinks a default configuration as `architectures.py` does. Names after a `+` are pairs of an encoder and
a decoder: `vit+gpt2`. `sources(model, 3)` draws what the encoder reads. Rows but the first are padded, where there is
a mask to say so.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from architectures import redraw, shrink
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

VOCABULARY, START = 99, 1
LENGTHS = (9, 6, 4)  # of the rows of a source of text; the shorter ones are padded
# Classes that no mapping for generation names.
CLASSES = {
    "dia": "DiaForConditionalGeneration",
    "pix2struct": "Pix2StructForConditionalGeneration",
    "udop": "UdopForConditionalGeneration",
}
PAIR_CONFIGS = (
    transformers.EncoderDecoderConfig,
    transformers.SpeechEncoderDecoderConfig,
    transformers.VisionEncoderDecoderConfig,
)
PAIRS = ("bert+bert", "bert+gpt2", "vit+trocr", "vit+gpt2", "wav2vec2+bart")
OVERRIDES: dict[str, dict[str, Any]] = {
    "moonshine_streaming": {"num_key_value_heads": 4, "num_attention_heads": 4},
    "speech_to_text": {"input_feat_per_channel": 8, "max_source_positions": 60, "conv_channels": 16},
    "udop": {"image_size": 16, "patch_size": 8},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 30},
}
# Those that most tests take are half as deep as the others: each call of theirs takes half the time.
OVERRIDES |= {name: {"encoder_layers": 2, "decoder_layers": 2} for name in ("bart", "mbart")}
OVERRIDES["t5"] = {"num_layers": 2, "num_decoder_layers": 2}
# Added to the seed: with seed 0 these repeat themselves.
SEEDS = {
    "bigbird_pegasus": 6,
    "canary": 23,
    "longt5": 4,
    "m2m_100": 31,
    "mbart": 8,
    "pop2piano": 6,
    "seamless_m4t": 31,
    "seamless_m4t_v2": 31,
    "speech_to_text": 4,
    "t5": 4,
}
# These go from one token to another and back with any seed, unless no pair of tokens may come twice.
REPEATING = """bart blenderbot-small fsmt led marian mvp pegasus plbart prophetnet speecht5 switch_transformers umt5
    t5gemma2 nllb-moe bert+bert bert+gpt2 vit+trocr vit+gpt2 wav2vec2+bart""".split()
_KNOWN = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | CLASSES


def _is_one(name: str) -> bool:
    """Tell whether `name` is one encoder-decoder model: no pair, and no decoder that reads sound within its text."""
    config_class = CONFIG_MAPPING[name]
    return not issubclass(config_class, PAIR_CONFIGS) and bool(config_class().is_encoder_decoder)


NAMES = (*filter(_is_one, dict.fromkeys(_KNOWN)), *PAIRS)


def build(
    name: str,
    *,
    seed: int = 0,
    vocab_size: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    **overrides: Any,
) -> PreTrainedModel:
    """Build a tiny random model in eval mode that never ends a sequence."""
    seed += SEEDS.get(name, 0)
    if "+" in name:
        config, kind = _pair(name, vocab_size)
    else:
        kind = getattr(transformers, _KNOWN[name])
        config = shrink(CONFIG_MAPPING[name], vocab_size, **copy.deepcopy(OVERRIDES.get(name, {})) | overrides)
        for part in ("text_config", "vision_config") if name == "pix2struct" else ():
            getattr(config, part).d_kv = 8
    if not kind._supports_sdpa or name == "vit+trocr":
        attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    redraw(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, decoder_start_token_id=START)
    if name in REPEATING:
        model.generation_config.no_repeat_ngram_size = 2
    return model.eval()


def _pair(name: str, vocab_size: int) -> tuple[PreTrainedConfig, Any]:
    encoder, decoder = (shrink(CONFIG_MAPPING[kind], vocab_size) for kind in name.split("+"))
    if hasattr(encoder, "image_size"):
        encoder.image_size, encoder.patch_size = 16, 4
    group, kind = {
        "bert": (PAIR_CONFIGS[0], transformers.EncoderDecoderModel),
        "wav2vec2": (PAIR_CONFIGS[1], transformers.SpeechEncoderDecoderModel),
        "vit": (PAIR_CONFIGS[2], transformers.VisionEncoderDecoderModel),
    }[name.partition("+")[0]]
    config = group.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = START, 0
    return config, kind


def sources(
    model: PreTrainedModel, batch: int, seed: int = 0, vocab_size: int = VOCABULARY, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, Tensor]:
    """Draw a source for each of ``batch`` rows, by the arguments of ``generate``."""
    generator = torch.Generator().manual_seed(seed)
    name = getattr(getattr(model, "encoder", None), "main_input_name", model.main_input_name)
    config = getattr(model.config, "encoder", model.config)
    if name == "input_ids":
        rows = torch.tensor([lengths[row % len(lengths)] for row in range(batch)])
        mask = (torch.arange(int(rows.max())) < rows[:, None]).long()
        ids = torch.randint(3, vocab_size, mask.shape, generator=generator)
        given = {"input_ids": ids * mask, "attention_mask": mask}
        if model.config.model_type == "udop":  # reads where each token stands on its page
            given["bbox"] = torch.rand(*ids.shape, 4, generator=generator)
        return given
    if name == "pixel_values":
        return {name: torch.randn(batch, 3, 16, 16, generator=generator)}
    if name == "flattened_patches":
        patches = torch.randn(batch, 6, 768, generator=generator)
        return {name: torch.cat([torch.ones(batch, 6, 2), patches], dim=-1), "attention_mask": torch.ones(batch, 6)}
    if model.config.model_type == "whisper":
        return {name: torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)}
    if name == "input_features":
        width = getattr(config, "input_feat_per_channel", None) or getattr(config, "num_mel_bins", 80)
        sound = torch.randn(batch, 40, width, generator=generator)
    else:
        sound = torch.randn(batch, 4000, generator=generator)
    mask = torch.ones(sound.shape[:2], dtype=torch.long)
    mask[1:, 3 * sound.shape[1] // 4 :] = 0
    return {name: sound, "attention_mask": mask}


def generate(model: PreTrainedModel, **kwargs: Any) -> Any:
    """Generate by transformers' own loop, also where a model (Whisper) cuts sound into parts first."""
    return GenerationMixin.generate(model, **kwargs)  # type: ignore[arg-type]
