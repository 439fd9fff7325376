"""Transcribe a recording with draft tokens, and compare with plain generation.

    python examples/transcribe.py recording.wav --model openai/whisper-medium --draft openai/whisper-tiny

``--model`` is the directory or Hub id of any Whisper, ``--draft`` that of a smaller one with the same tokens, or
``ngram`` or another word of ``speculator=``. WAV files are read by Python itself, other formats by soundfile if that
is installed. Recordings of any length are read; those longer than 30 seconds get timestamps.
"""

from __future__ import annotations

import argparse
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

import hf_spec


def read(path: str, rate: int) -> np.ndarray:
    """Return the samples of one channel at ``rate`` samples a second, between -1 and 1."""
    try:
        samples, own_rate = read_wave(path)
    except (wave.Error, EOFError):  # compressed, no WAV at all, or empty
        try:
            import soundfile
        except ImportError as error:
            raise SystemExit(f"{path} is no plain WAV file; pip install soundfile, or convert it first") from error
        samples, own_rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = samples.mean(1)
    if own_rate == rate:
        return mono
    if own_rate > rate:  # what the lower rate cannot hold would come back as noise
        spectrum, bound = np.fft.rfft(mono), len(mono) * rate // (2 * own_rate)
        spectrum[bound:] = 0
        mono = np.fft.irfft(spectrum, len(mono))
    times = np.arange(len(mono) * rate // own_rate) * own_rate / rate
    return np.interp(times, np.arange(len(mono)), mono).astype(np.float32)


def read_wave(path: str) -> tuple[np.ndarray, int]:
    """Return the samples of a WAV file, (time, channels), and how many a second has."""
    with wave.open(path) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = file.readframes(file.getnframes())
    if width == 1:  # the only unsigned kind
        samples = np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        padded = np.pad(np.frombuffer(data, np.uint8).reshape(-1, 3), ((0, 0), (1, 0)))
        samples = padded.reshape(-1).view("<i4").astype(np.float32) / 2**31
    else:
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return samples.reshape(-1, channels), rate


def features(extractor: Any, sound: list[np.ndarray], window: int) -> dict[str, Tensor]:
    """Return the arguments of ``generate``: a window for short recordings, everything for long ones."""
    rate = extractor.sampling_rate
    if max(map(len, sound)) <= window * rate:
        return {"input_features": extractor(sound, sampling_rate=rate, return_tensors="pt").input_features}
    options = {"truncation": False, "padding": "longest", "return_attention_mask": True, "return_tensors": "pt"}
    return dict(extractor(sound, sampling_rate=rate, **options))


def timed(model: Any, forwards: list[int], call: dict[str, Any]) -> tuple[Tensor, float, int]:
    """Generate; return tokens, seconds, and how often the decoder ran."""
    forwards.clear()
    start = time.perf_counter()
    tokens = model.generate(**call)
    return tokens, time.perf_counter() - start, len(forwards)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", help="files that are transcribed together, as one batch")
    parser.add_argument("--model", required=True, help="directory or Hub id of a Whisper")
    parser.add_argument("--draft", default="ngram", help="directory or Hub id of a draft, or 'ngram'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--language", help="of the recordings; detected if left out")
    parser.add_argument("--task", choices=["transcribe", "translate"])
    parser.add_argument("--num-speculative-tokens", type=int, help="chosen from step to step if left out")
    parser.add_argument("--max-new-tokens", type=int, help="of a window")
    parser.add_argument("--repeat", type=int, default=1, help="time each way so often, in turns, and take the best")
    given = parser.parse_args(arguments)
    if missing := [path for path in given.recordings if not Path(path).is_file()]:
        parser.error(f"no such file: {missing[0]}")

    dtype = torch.float32 if given.device == "cpu" else torch.float16
    model = AutoModelForSpeechSeq2Seq.from_pretrained(given.model, dtype=dtype).to(given.device).eval()
    extractor = AutoFeatureExtractor.from_pretrained(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    sound = [read(path, extractor.sampling_rate) for path in given.recordings]
    inputs = features(extractor, sound, extractor.chunk_length)
    inputs["input_features"] = inputs["input_features"].to(given.device, dtype)
    asked = {"language": given.language, "task": given.task, "max_new_tokens": given.max_new_tokens}
    call = inputs | {name: value for name, value in asked.items() if value is not None} | {"num_beams": 1}
    if max(map(len, sound)) > extractor.chunk_length * extractor.sampling_rate:
        call["return_timestamps"] = True  # by which windows are cut
    speculation: dict[str, Any] = {"speculator": hf_spec.as_speculator(given.draft, model)}
    if given.num_speculative_tokens is not None:
        speculation["num_speculative_tokens"] = given.num_speculative_tokens

    forwards: list[int] = []
    with model.get_decoder().register_forward_hook(lambda *_: forwards.append(1)):
        window = {name: value[:1, ..., : 2 * model.config.max_source_positions] for name, value in inputs.items()}
        model.generate(**call | window | {"max_new_tokens": 2}, **speculation)  # checks the target, once
        rounds = [
            (timed(model, forwards, call), timed(model, forwards, call | speculation)) for _ in range(given.repeat)
        ]
    (plain, slow, steps), (tokens, fast, fewer) = (
        min(way, key=lambda one: one[1]) for way in zip(*rounds, strict=True)
    )
    for path, text in zip(given.recordings, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True):
        print(f"{path}: {text.strip()}")
    print(hf_spec.last_speculation(model))
    print(f"\nsame text as plain      {'yes' if torch.equal(plain, tokens) else 'no'}")
    print(f"forwards of the decoder {steps} plain, {fewer} with {given.draft}")
    count = int((tokens != model.generation_config.pad_token_id).sum())
    print(f"tokens per forward      {count / steps:.2f} plain, {count / fewer:.2f} with {given.draft}")
    print(f"seconds                 {slow:.2f} plain, {fast:.2f} with {given.draft}")


if __name__ == "__main__":
    main()
