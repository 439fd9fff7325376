"""Every logits processor of transformers, and custom ones, give the text of plain ``generate``."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import prompts
from pairs import each_value
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from twins import SHAPES, Oracle, draft, target, tokenizer

from hf_spec import NgramSpeculator, SpeculationConfig, pure

NEW = 16
BATCHES = {"one": (1, (13,)), "ragged": (3, (13, 9, 5))}


def generate(inputs: dict[str, Tensor], options: dict[str, Any], **ours: Any) -> Any:
    return target().generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | options, **ours)


@functools.cache
def text(batch: str) -> Tensor:
    """What is said without processors: what they forbid or favour is taken from it."""
    return generate(prompts(*BATCHES[batch]), {})[:, -NEW:]


def allowed(batch: int, prefix: Tensor) -> list[int]:
    """Allow other tokens in every row and after every prefix."""
    return [token for token in range(99) if (token + batch + int(prefix.sum())) % 3]


ASKED: dict[str, dict[str, Any]] = {
    "at all nodes": {},
    "node by node": {"logits_processor": LogitsProcessorList([pure(lambda ids, scores: scores)])},
    "in lockstep": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("sample", [False, True])
def test_a_prompt_that_ends_in_an_end_of_sequence_token(sample: bool, asked: str, shape: str) -> None:
    """It is text that goes on: processors are asked after it as after any other token."""
    inputs, options = prompts(3), {"repetition_penalty": 1.8, "pad_token_id": 0} | ASKED[asked]
    inputs["input_ids"][:, -1] = options["eos_token_id"] = 7
    plain = generate(inputs, options)
    assert not torch.equal(plain, generate(inputs, options | {"repetition_penalty": 1.0}))
    if sample:
        options |= {"do_sample": True, "top_k": 1}
    for speculator in (Oracle(plain, wrong=5), draft()):
        out = generate(inputs, options, speculator=speculator, speculation_config=SHAPES[shape])
        assert torch.equal(out, plain)


class Remembering:
    """Allow tokens by how often each row was asked: a state per row, as a grammar has."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    def __call__(self, batch: int, prefix: Tensor) -> list[int]:
        self.asked[batch] += 1
        return [token for token in range(99) if (token + batch + self.asked[batch]) % 3]


# What plain `generate` is asked for, given what it would say otherwise.
OPTIONS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "repetition penalty": lambda said: {"repetition_penalty": 1.8},
    "no repeated n-gram": lambda said: {"no_repeat_ngram_size": 1},
    "bad words": lambda said: {"bad_words_ids": [said[0, 3:4].tolist(), said[-1, 5:7].tolist()]},
    "sequence bias": lambda said: {"sequence_bias": [[said[0, :2].tolist(), -9.0], [[40], 2.0], [[40, 41], 5.0]]},
    "min length": lambda said: {"min_length": 13 + 9, "eos_token_id": said[:, 4].tolist(), "pad_token_id": 0},
    "min new tokens": lambda said: {"min_new_tokens": 9, "eos_token_id": said[:, 4].tolist(), "pad_token_id": 0},
    "forced end": lambda said: {"forced_eos_token_id": [7]},
    "forced start": lambda said: {"forced_bos_token_id": 7, "max_new_tokens": 3},
    "exponential decay": lambda said: {
        "exponential_decay_length_penalty": (4, 1.2),
        "eos_token_id": 7,
        "pad_token_id": 0,
    },
    "exponential decay, an end listed twice": lambda said: {
        "exponential_decay_length_penalty": (2, 1.2),
        "eos_token_id": [7, 9, 7],
        "pad_token_id": 0,
    },
    "allowed tokens": lambda said: {"prefix_allowed_tokens_fn": pure(allowed)},
    "allowed tokens, undeclared": lambda said: {"prefix_allowed_tokens_fn": Remembering()},
    "suppressed tokens": lambda said: {"suppress_tokens": said[:, 6].tolist()},
    "suppressed at the start": lambda said: {"begin_suppress_tokens": said[:, 0].tolist()},
    "repaired values": lambda said: {"remove_invalid_values": True, "renormalize_logits": True},
    "guidance": lambda said: {"guidance_scale": 1.6},
    "negative prompt": lambda said: {
        "guidance_scale": 1.6,
        "negative_prompt_ids": 3 + said[:, :6] % 50,
        "negative_prompt_attention_mask": (torch.arange(6) >= torch.arange(len(said))[:, None]).long(),
    },
    "watermark": lambda said: {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark that hashes itself": lambda said: {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)
    },
    "many": lambda said: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [said[0, 2:4].tolist()],
        "min_new_tokens": 6,
        "eos_token_id": [7, *said[:, 5].tolist()],
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize(("case", "batch", "shape"), each_value(OPTIONS, BATCHES, SHAPES))
def test_processor(case: str, batch: str, shape: str) -> None:
    inputs, make_options = prompts(*BATCHES[batch]), functools.partial(OPTIONS[case], text(batch))
    if case == "forced start":  # acts on a prompt of one token
        inputs = {name: value[:, -1:] for name, value in inputs.items()}
    plain = generate(inputs, make_options())
    if case != "repaired values":
        assert not torch.equal(plain[:, inputs["input_ids"].shape[1] :], text(batch)), "the processor does nothing"
    given = {"speculation_config": SHAPES[shape], "return_dict_in_generate": True}
    for speculator in (Oracle(plain, wrong=5), draft()):
        out = generate(inputs, make_options(), speculator=speculator, **given)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.accepted or case == "forced start"


@pytest.mark.parametrize("batch", BATCHES)
def test_synthid(batch: str) -> None:
    """It draws from its own state, so plain sampling from the same seed is the twin."""
    mark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3, context_history_size=8)
    inputs, options = prompts(*BATCHES[batch]), {"do_sample": True, "top_k": 1, "watermarking_config": mark}
    plain = generate(inputs, options)
    for config in SHAPES.values():
        assert torch.equal(generate(inputs, options, speculator=Oracle(plain), speculation_config=config), plain)
    options = {"do_sample": True, "watermarking_config": mark}
    torch.manual_seed(5)
    plain = generate(inputs, options)
    for config in SHAPES.values():
        torch.manual_seed(5)
        assert torch.equal(generate(inputs, options, speculator=Oracle(plain), speculation_config=config), plain)


class Counting(LogitsProcessor):
    """Forbid at every call another token, and keep a log."""

    def __init__(self, banned: Tensor) -> None:
        self.banned = banned
        self.log: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(input_ids)
        scores[:, self.banned[:, len(self.log) % self.banned.shape[1]]] = -torch.inf
        return scores


class Floor(LogitsProcessor):
    """Forbid all tokens that are a little less likely than the mean: where all are equally likely, all."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(scores.log_softmax(-1) < -math.log(0.9 * scores.shape[-1]), -torch.inf)


def test_a_floor_of_probabilities_samples_beside_a_text_that_has_ended() -> None:
    inputs, processors = prompts(2, (4, 4)), LogitsProcessorList([Floor()])
    ends: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    for _ in range(2):  # the second time a token ends the first text
        torch.manual_seed(3)
        plain = generate(inputs, ends, logits_processor=processors)
        ends = {"eos_token_id": plain[0, 7].item(), **ends}
    assert plain[0, -1] == 0 != plain[1, -1]
    torch.manual_seed(3)
    options = {"speculator": Oracle(plain, wrong=5), "speculation_config": SpeculationConfig(verification="exact")}
    assert torch.equal(generate(inputs, ends, logits_processor=processors, **options), plain)


def same(logs: list[Tensor], others: list[Tensor]) -> bool:
    return len(logs) == len(others) and all(torch.equal(log, other) for log, other in zip(logs, others, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_custom_processor_sees_what_plain_generate_shows(batch: str, shape: str) -> None:
    inputs = prompts(*BATCHES[batch])
    plain_processor = Counting(text(batch))
    ends = {"eos_token_id": text(batch)[-1:, 3].tolist(), "pad_token_id": 0}
    plain = generate(inputs, ends, logits_processor=LogitsProcessorList([plain_processor]))
    for speculator in (Oracle(plain, wrong=5), draft(), "ngram"):
        processor = Counting(text(batch))
        out = generate(
            inputs,
            ends,
            logits_processor=LogitsProcessorList([processor]),
            speculator=speculator,
            speculation_config=SHAPES[shape],
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, plain)
        assert same(processor.log, plain_processor.log)
    assert len(plain_processor.log) > 3


class Parity(LogitsProcessor):
    """Let even and odd tokens take turns: a pure function of the prefix."""

    def __init__(self) -> None:
        self.batches: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.batches.add(len(input_ids))
        last = input_ids[:, -1:] + torch.arange(scores.shape[1])
        return scores.masked_fill(last % 2 == 0, -torch.inf)


@pytest.mark.parametrize("shape", SHAPES)
def test_pure_function_that_allows_tokens(shape: str) -> None:
    """Undeclared it may remember, so that rows wait for each other; declared, they need not."""

    def undeclared(batch: int, prefix: Tensor) -> list[int]:
        return allowed(batch, prefix)

    inputs = prompts(3)
    plain = generate(inputs, {"prefix_allowed_tokens_fn": undeclared})
    ours = {"speculator": Oracle(plain, wrong=3), "speculation_config": SHAPES[shape], "return_dict_in_generate": True}
    waiting = generate(inputs, {"prefix_allowed_tokens_fn": undeclared}, **ours)
    free = generate(inputs, {"prefix_allowed_tokens_fn": pure(undeclared)}, **ours)
    assert torch.equal(waiting.sequences, plain) and torch.equal(free.sequences, plain)
    assert free.speculation.steps < waiting.speculation.steps


def test_several_texts_of_a_prompt_that_allows_tokens() -> None:
    """transformers calls the function with the prompt's number for each of them."""
    one = {"num_return_sequences": 2, "do_sample": True, "top_k": 1, "prefix_allowed_tokens_fn": allowed}
    plain = generate(prompts(2), one)
    ours: dict[str, Any] = {"speculator": Oracle(plain, wrong=3), "return_dict_in_generate": True}
    waiting, free = (
        generate(prompts(2), one | {"prefix_allowed_tokens_fn": ask}, **ours)
        for ask in (lambda batch, prefix: allowed(batch, prefix), pure(lambda batch, prefix: allowed(batch, prefix)))
    )
    assert torch.equal(waiting.sequences, plain) and torch.equal(free.sequences, plain)
    assert free.speculation.steps < waiting.speculation.steps


@pytest.mark.parametrize("shape", SHAPES)
def test_pure_processor(shape: str) -> None:
    inputs = prompts(3)
    plain = generate(inputs, {}, logits_processor=LogitsProcessorList([Parity()]))
    steps = {}
    for name, processor in {"pure": pure(Parity()), "lockstep": Parity()}.items():
        out = generate(
            inputs,
            {},
            logits_processor=LogitsProcessorList([processor]),
            speculator=Oracle(plain, wrong=3),
            speculation_config=SHAPES[shape],
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, plain)
        steps[name] = out.speculation.steps
    assert steps["pure"] < steps["lockstep"], "rows waited for each other"


DRAWN = SpeculationConfig(num_speculative_tokens=3, tree="sampled", tree_topk=2, num_tree_tokens=6)


@pytest.mark.parametrize("shape", [*SHAPES.values(), DRAWN], ids=[*SHAPES, "drawn"])
@pytest.mark.parametrize("sample", [False, True])
def test_nobody_is_asked_behind_the_end(sample: bool, shape: SpeculationConfig) -> None:
    """A guess may be an end of sequence, behind which a constraint has nothing to allow."""
    stop, start = int(text("one")[0, 5]), 13

    def constraint(batch: int, prefix: Tensor) -> list[int]:
        assert stop not in prefix[start:], "asked behind the end"
        return allowed(0, prefix[:start]) if len(prefix) < start + 3 else [stop, 40]

    options = {
        "prefix_allowed_tokens_fn": pure(constraint),
        "eos_token_id": stop,
        "pad_token_id": 0,
        "do_sample": sample,
    }
    plain = generate(prompts(1), options)
    oracle = Oracle(torch.nn.functional.pad(plain, (0, NEW), value=40), wrong=1000)
    for seed in range(10 if sample else 1):
        for speculator in (draft(), oracle) if shape is not DRAWN else (draft(),):
            torch.manual_seed(seed)
            out = generate(prompts(1), options, speculator=speculator, speculation_config=shape)
            assert stop in out[0, start:] or out.shape[1] == start + NEW
            assert sample or torch.equal(out, plain)


@pytest.mark.parametrize("shape", [*SHAPES.values(), DRAWN], ids=[*SHAPES, "drawn"])
@pytest.mark.parametrize("sample", [False, True])
def test_nobody_is_asked_behind_a_stop_string(sample: bool, shape: SpeculationConfig) -> None:
    inputs, start = prompts(3), 13
    said = text("ragged")
    stop = tokenizer().convert_ids_to_tokens(said[:, 4].tolist())

    def constraint(batch: int, prefix: Tensor) -> list[int]:
        assert not set(said[:, 4].tolist()) & set(prefix[start:].tolist()), "asked behind the end"
        return list(range(99)) if len(prefix) < start + 7 else said[:, 4].tolist()

    options = {"stop_strings": stop, "tokenizer": tokenizer(), "do_sample": sample, "pad_token_id": 0}
    options |= {"prefix_allowed_tokens_fn": pure(constraint), "eos_token_id": 98}
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        plain = generate(alone, options)
        oracle = Oracle(torch.cat([plain, said[row : row + 1]], dim=1), wrong=1000)
        for seed in range(6 if sample else 1):
            for speculator in (draft(), oracle) if shape is not DRAWN else (draft(),):
                torch.manual_seed(seed)
                out = generate(alone, options, speculator=speculator, speculation_config=shape)
                assert sample or torch.equal(out, plain)


class DeadEnd(LogitsProcessor):
    """Leave no token behind the fourth."""

    def __init__(self, score: float) -> None:
        self.score = score

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 13 + 4 else torch.full_like(scores, self.score)


@pytest.mark.parametrize("shape", [*SHAPES.values(), DRAWN], ids=[*SHAPES, "drawn"])
@pytest.mark.parametrize("score", [-torch.inf, torch.nan])
def test_sampling_from_nothing(score: float, shape: SpeculationConfig) -> None:
    options = {"do_sample": True, "logits_processor": LogitsProcessorList([pure(DeadEnd(score))])}
    with pytest.raises(RuntimeError, match="probability tensor"):
        generate(prompts(3), options)
    with pytest.raises(RuntimeError, match="no token can be drawn"):
        generate(prompts(3), options, speculator=draft(), speculation_config=shape)


@pytest.mark.parametrize("shape", [*SHAPES.values(), DRAWN], ids=[*SHAPES, "drawn"])
@pytest.mark.parametrize("end", ["token", "string"])
def test_nothing_is_left_behind_an_end(end: str, shape: SpeculationConfig) -> None:
    """Processors of transformers that ban every token there say nothing about the text, which has ended."""
    stop = int(text("one")[0, 2])
    options = {
        "bad_words_ids": [[stop, token] for token in range(99)],
        "pad_token_id": 0,
        "do_sample": True,
        "top_k": 1,
    }
    if end == "token":
        options |= {"eos_token_id": stop}
    else:
        options |= {"stop_strings": tokenizer().convert_ids_to_tokens([stop]), "tokenizer": tokenizer()}
    plain = generate(prompts(1), options)
    assert plain[0, -1] == stop
    for speculator in (draft(), Oracle(plain, wrong=1000)) if shape is not DRAWN else (draft(),):
        out = generate(prompts(1), options, speculator=speculator, speculation_config=shape)
        assert torch.equal(out, plain)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer"}, "tags": {"enum": [[], ["x"]]}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_grammar(batch: str, shape: str) -> None:
    """A matcher of xgrammar keeps a state per row and may be told each token once."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=99, stop_token_ids=[2])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    inputs = prompts(*BATCHES[batch])

    def constrained(**ours: Any) -> Any:
        processors = LogitsProcessorList([xgrammar.contrib.hf.LogitsProcessor(grammar)])
        options = {"max_new_tokens": 60, "eos_token_id": 2, "pad_token_id": 0, "logits_processor": processors}
        return generate(inputs, options, **ours)

    plain = constrained()
    prompt = inputs["input_ids"].shape[1]
    for said in tokenizer().batch_decode(plain[:, prompt:], skip_special_tokens=True):
        assert set(json.loads(said)) == set(SCHEMA["required"])
    schema = json.dumps({"name": "Ann", "age": 1, "tags": []})
    corpus = NgramSpeculator(corpus=tokenizer()([schema])["input_ids"], min_ngram=1)
    for speculator in (Oracle(plain, wrong=6), corpus):
        out = constrained(speculator=speculator, speculation_config=SHAPES[shape], return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.accepted
