"""Tiny random models of Whisper with all special tokens, sound for them, and what processors for their pipelines need.

Text are the tokens below END. A window is 60 frames, and a timestamp is two of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoder_decoders import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor, WhisperTokenizerFast

END, START, LANGUAGES, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE, NO_TIMES = 40, 41, (42, 43, 44), 45, 46, 47, 48, 49
VOCABULARY = NO_TIMES + 1 + 31
FRAMES = 60  # of a window
NAMES = ("en", "de", "fr")
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in NAMES), "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)


def whisper(languages: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny Whisper, which knows three ``languages`` or English alone."""
    options = {"vocab_size": VOCABULARY, "max_target_positions": 64} | overrides
    model = build("whisper", seed=seed, **options)
    config: Any = model.generation_config
    config.eos_token_id = config.pad_token_id = config.bos_token_id = END
    config.decoder_start_token_id, config.prev_sot_token_id, config.no_timestamps_token_id = START, PREVIOUS, NO_TIMES
    config.max_initial_timestamp_index = 5
    config.is_multilingual, config.max_length = languages, 64
    config.suppress_tokens, config.begin_suppress_tokens = [1, START, PREVIOUS, SILENCE], [2, END]
    if languages:
        config.lang_to_id = {f"<|{name}|>": token for name, token in zip(NAMES, LANGUAGES, strict=True)}
        config.task_to_id = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
    return model


def sound(model: PreTrainedModel, rows: int, windows: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """Draw sound: the first row has as many ``windows``, each one after it less."""
    generator = torch.Generator().manual_seed(seed)
    frames = int(FRAMES * windows)
    features = torch.randn(rows, model.config.num_mel_bins, frames, generator=generator)
    if windows <= 1:
        return {"input_features": features}
    lengths = torch.tensor([frames - 37 * row for row in range(rows)])
    mask = (torch.arange(frames) < lengths[:, None]).long()
    return {"input_features": features * mask[:, None], "attention_mask": mask}


def save(model: PreTrainedModel, path: Path) -> None:
    """Save ``model`` with a tokenizer of one word a token, and a feature extractor that takes 0.6 seconds a window."""
    model.save_pretrained(path)
    WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=1, n_fft=400, hop_length=16000 // FRAMES
    ).save_pretrained(path)
    words = [chr(ord("a") + token % 26) + "xyz"[token // 26] for token in range(END)]
    times = [f"<|{index * 0.02:.2f}|>" for index in range(VOCABULARY - NO_TIMES - 1)]
    known = {word: token for token, word in enumerate([*words, *SPECIAL, *times])}
    plain = Tokenizer(models.WordLevel(known, unk_token=words[0]))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.decoder = decoders.Fuse()
    plain.add_special_tokens([*SPECIAL])
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), SPECIAL[0])
    WhisperTokenizerFast(tokenizer_object=plain, unk_token=words[0], **ends).save_pretrained(path)
    assert json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"] == known


def wave(seconds: float, seed: int = 0) -> np.ndarray:
    """Draw noise of 16,000 samples a second."""
    return np.random.default_rng(seed).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)
