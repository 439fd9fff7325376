"""Wherever plain ``generate`` stops, and whatever it streams: the same, token for token and call for call."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from typing import Any

import pytest
import torch
from architectures import prompts
from pairs import pairwise, usual
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer
from twins import BATCHES, CHAIN, SHAPES, TREE, Oracle, draft, target, tokenizer

import hf_spec

NEW = 14
BLOCK = 5  # tokens that a step of `OFFSETS` emits
OFFSETS = range(1, 2 * BLOCK + 1)  # of a stop: the token of the prefill, then every place in the first two blocks


def generate(inputs: dict[str, Tensor], options: dict[str, Any], **ours: Any) -> Any:
    return target().generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | options, **ours)


@functools.cache
def text(batch: str) -> Tensor:
    return generate(prompts(*BATCHES[batch]), {})


def said(batch: str) -> Tensor:
    return text(batch)[:, 13:]


def check(batch: str, options: dict[str, Any], wrong: int = 1000) -> Tensor:
    """Compare all shapes with plain ``generate`` under ``options``, guessing its text but every ``wrong``-th token."""
    inputs = prompts(*BATCHES[batch])
    plain = generate(inputs, options)
    for config in (CHAIN, TREE):
        out = generate(inputs, options, speculator=Oracle(text(batch), wrong), speculation_config=config)
        assert torch.equal(out, plain)
    return plain[:, 13:]


# --- Stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", OFFSETS[1:])
def test_a_stop_counts_the_guesses_up_to_it(offset: int, shape: str, lockstep: bool) -> None:
    """All guesses are right, so that a block which is cut behind a guess has accepted each of its tokens."""
    words = said("one")[0].tolist()
    stop = words[offset - 1]
    offset = words.index(stop) + 1
    options = {"eos_token_id": stop, "pad_token_id": 0, "return_dict_in_generate": True}
    if lockstep:
        options["logits_processor"] = [lambda ids, scores: scores]
    config = SHAPES[shape]
    row = generate(
        prompts(1), options, speculator=Oracle(text("one"), wrong=1000), speculation_config=config
    ).speculation.per_row[0]
    with_prompt = row.emitted == offset  # guesses were read with the prompt, so that its first token is a guess too
    block = config.num_speculative_tokens + 1
    own = [(place + 1) % block == 0 for place in range(row.emitted)]  # the target's own token behind each whole block
    assert row.tokens == words[:offset] and with_prompt == (shape == "chain")
    assert row.drafted == [False] * (offset - row.emitted) + [not mine for mine in own]
    assert (row.accepted, row.emitted) == (sum(row.drafted), offset - (not with_prompt))


@pytest.mark.parametrize("offset", OFFSETS)
def test_end_token_at_every_offset(offset: int) -> None:
    stop = said("one")[0, offset - 1].item()
    first = said("one")[0].tolist().index(stop) + 1
    found = check("one", {"eos_token_id": [stop, 98], "pad_token_id": 0})
    assert found.shape[1] == first
    check("one", {"eos_token_id": stop, "pad_token_id": 0}, wrong=3)


@pytest.mark.parametrize("wrong", [3, 1000])
def test_rows_finish_at_different_times(wrong: int) -> None:
    stops = [said("eight")[row, 2 + row].item() for row in range(8)]
    found = check("eight", {"eos_token_id": stops, "pad_token_id": 0}, wrong)
    assert len({int((row != 0).sum()) for row in found}) > 3


@pytest.mark.parametrize("offset", OFFSETS)
def test_max_new_tokens_at_every_offset(offset: int) -> None:
    for batch in ("one", "ragged"):
        assert check(batch, {"max_new_tokens": offset}).shape[1] == offset
    check("ragged", {"max_new_tokens": offset}, wrong=3)
    assert check("one", {"max_length": 13 + offset, "max_new_tokens": None}).shape[1] == offset


@pytest.mark.parametrize("more", [1, 2])
def test_transformers_reminds_of_the_length_that_a_model_is_made_for(
    more: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in plain ``generate``: not of the last token, after which nothing is read."""
    inputs, reminders = prompts(1), []
    monkeypatch.setattr(target().config, "max_position_embeddings", inputs["input_ids"].shape[1] + 4)
    for speculator in ({}, {"speculator": "ngram"}):
        logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # another test may have been warned
        logging.getLogger("transformers").propagate = True
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            target().generate(**inputs, max_new_tokens=4 + more, do_sample=False, **speculator)
        reminders.append(caplog.text.count("friendly reminder"))
    assert reminders == [more - 1, more - 1]


@pytest.mark.parametrize("offset", OFFSETS)
def test_stop_string_at_every_offset(offset: int) -> None:
    ids = said("one")[0].tolist()
    string = tokenizer().decode(ids[max(0, offset - 2) : offset])
    found = check("one", {"stop_strings": [string, "never"], "tokenizer": tokenizer()})
    assert found.shape[1] == min(offset, tokenizer().decode(ids).index(string) + len(string))
    check("ragged", {"stop_strings": string, "tokenizer": tokenizer(), "eos_token_id": 98, "pad_token_id": 0}, 3)


def test_stop_strings_of_the_caller_come_first() -> None:
    first, later = (tokenizer().decode(said("one")[0, at : at + 2].tolist()) for at in (2, 7))
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer(), [later])])
    found = check("one", {"stop_strings": first, "tokenizer": tokenizer(), "stopping_criteria": criteria})
    assert found.shape[1] == 9


@pytest.mark.parametrize("wrong", [2, 3, 1000])
def test_without_an_end_token_rows_wait_for_each_other(wrong: int) -> None:
    """Plain ``generate`` goes on with rows that are done, and shows them in its output."""
    strings = [tokenizer().decode(row[3 + at : 5 + at]) for at, row in zip((2, 5, 0), said("ragged"), strict=True)]
    found = check("ragged", {"stop_strings": strings, "tokenizer": tokenizer()}, wrong)
    assert found.shape[1] == 10
    assert torch.equal(found, said("ragged")[:, :10])


@pytest.mark.parametrize("batch", ["one", "ragged"])
def test_max_time(batch: str) -> None:
    assert check(batch, {"max_time": 0.0}).shape[1] == 1
    assert check(batch, {"max_time": 1e9}).shape[1] == NEW
    assert check(batch, {"max_time": 1e9, "eos_token_id": 98, "pad_token_id": 0}).shape[1] == NEW


class Custom(StoppingCriteria):
    """Stop each row at the call with its number; keep a log of what was shown."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = torch.tensor(calls)
        self.log: list[tuple[Tensor, int]] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: Any) -> Tensor:
        input_ids.view(-1)  # as plain generate allows
        self.log.append((input_ids, -1 if scores is None else len(scores)))
        return self.calls == len(self.log)


def logs_agree(log: list[tuple[Tensor, int]], other: list[tuple[Tensor, int]]) -> bool:
    return len(log) == len(other) and all(
        torch.equal(a, b) and m == n for (a, m), (b, n) in zip(log, other, strict=True)
    )


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 98, "pad_token_id": 0}], ids=["no end", "end"])
def test_custom_criterion_at_every_offset(ends: dict[str, Any], offset: int) -> None:
    for batch, calls in (("one", [offset]), ("ragged", [offset, offset + 2, max(1, offset - 1)])):
        inputs, plain = prompts(*BATCHES[batch]), Custom(calls)
        options = {**ends, "return_dict_in_generate": True, "output_scores": offset % 2 == 0}
        expected = generate(inputs, options, stopping_criteria=StoppingCriteriaList([plain]))
        for wrong, config in ((1000, CHAIN), (3, CHAIN), (1000, TREE)):
            ours = Custom(calls)
            out = generate(
                inputs,
                options,
                stopping_criteria=StoppingCriteriaList([ours]),
                speculator=Oracle(text(batch), wrong),
                speculation_config=config,
            )
            assert torch.equal(out.sequences, expected.sequences)
            assert logs_agree(ours.log, plain.log)


# --- Streams ---------------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    """Streams of transformers take one row; any other streamer may take a batch."""

    def __init__(self) -> None:
        self.said: list[list[Any]] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.said.append(value.tolist())

    def end(self) -> None:
        self.said.append([])


@pytest.mark.parametrize("batch", usual(BATCHES, ["ragged"]))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": [30, 57, 72], "pad_token_id": 0},
        {"repetition_penalty": 1.3},
        {"stop_strings": "?", "tokenizer": tokenizer()},
    ],
    ids=["length", "end", "prefix", "string"],
)
def test_streamer_of_a_batch(options: dict[str, Any], batch: str) -> None:
    inputs, plain = prompts(*BATCHES[batch]), Recorder()
    expected = generate(inputs, options, streamer=plain)
    assert plain.said[-1] == []
    for config in SHAPES.values():
        for speculator in (Oracle(expected, wrong=3), draft()):
            ours = Recorder()
            generate(inputs, options, streamer=ours, speculator=speculator, speculation_config=config)
            assert ours.said == plain.said


def test_streamer_of_the_hook() -> None:
    inputs, plain, ours, more = prompts(1), Recorder(), Recorder(), Recorder()
    generate(inputs, {}, streamer=plain)
    hook = hf_spec.SpeculativeDecoding(draft(), CHAIN, streamer=ours)
    generate(inputs, {}, custom_generate=hook)
    assert ours.said == plain.said
    generate(inputs, {}, custom_generate=hook, streamer=more)
    assert more.said == plain.said, "the streamer of the call comes first"
    assert ours.said == plain.said
    hf_spec.uninstall()
    try:
        generate(inputs, {}, custom_generate=hook)
    finally:
        hf_spec.install()
    assert ours.said == 2 * plain.said


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(skip_prompt: bool, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = prompts(1)
    generate(inputs, {}, streamer=TextStreamer(tokenizer(), skip_prompt=skip_prompt))
    plain = capsys.readouterr().out
    generate(inputs, {}, streamer=TextStreamer(tokenizer(), skip_prompt=skip_prompt), speculator=draft())
    assert capsys.readouterr().out == plain
    assert len(plain) > NEW


def test_text_iterator_streamer() -> None:
    inputs = prompts(1)
    pieces = {}
    for name, ours in {"plain": {}, "ours": {"speculator": draft()}}.items():
        streamer = TextIteratorStreamer(tokenizer(), timeout=60)
        thread = threading.Thread(target=generate, args=(inputs, {}), kwargs={"streamer": streamer, **ours})
        thread.start()
        pieces[name] = list(streamer)
        thread.join()
    assert pieces["ours"] == pieces["plain"]
    assert "".join(pieces["ours"]) == tokenizer().decode(text("one")[0])


def test_async_streamer() -> None:
    async def pieces(**ours: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer(), timeout=60)
        thread = threading.Thread(target=generate, args=(prompts(1), {}), kwargs={"streamer": streamer, **ours})
        thread.start()
        found = [piece async for piece in streamer]
        thread.join()
        return found

    assert asyncio.run(pieces(speculator=draft())) == asyncio.run(pieces())


REFUSED: dict[str, dict[str, Any]] = {
    "by the keyword": {"cache_implementation": "quantized"},
    "by the loop": {"num_beams": 2},
    "by the draft": {"speculator": hf_spec.NgramSpeculator(corpus=[[5, 10**6]])},
    "by what reads drafts": {"speculator": "/nowhere"},
    "by transformers": {"no_such_option": 3},
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_stream_of_a_refused_call_ends(case: str) -> None:
    """Whoever reads it in another thread would wait for ever."""
    streamer, errors = TextIteratorStreamer(tokenizer(), timeout=60), []

    def call() -> None:
        try:
            generate(prompts(1), {}, **{"streamer": streamer, "speculator": "ngram"} | REFUSED[case])
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert "".join(streamer) == ""
    thread.join()
    assert len(errors) == 1
    assert streamer.text_queue.empty(), "the stream was ended twice"


# --- After a failure -------------------------------------------------------------------------------------------------


class Failing:
    """Raise ``error`` at the ``at``-th call, whatever it is called as."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error("in the middle")
        return args[1] if len(args) == 2 and isinstance(args[1], Tensor) else None

    put = __call__

    def end(self) -> None:
        raise AssertionError("the stream of a failed call was closed")


def count_hooks(model: Any) -> int:
    """transformers leaves hooks of its own behind when hidden states are asked for."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("where", "at", "shape"), pairwise(["processor", "streamer", "criterion", "target", "draft"], [1, 2, 5], SHAPES)
)
def test_the_call_after_a_failure(where: str, at: int, shape: str) -> None:
    inputs, failing = prompts(3), Failing(KeyboardInterrupt if where in ("target", "draft") else ValueError, at)
    options: dict[str, Any] = {"speculator": draft(), "speculation_config": SHAPES[shape]}
    assert torch.equal(generate(inputs, options), text("ragged"))
    before = {name: set(vars(model)) for name, model in (("target", target()), ("draft", draft()))}
    hooks = {name: count_hooks(model) for name, model in (("target", target()), ("draft", draft()))}
    extra: dict[str, Any] = {
        "processor": {"logits_processor": [failing]},
        "streamer": {"streamer": failing},
        "criterion": {"stopping_criteria": [lambda ids, scores: failing() or torch.zeros(3, dtype=torch.bool)]},
    }.get(where, {})
    hooked = {"target": target(), "draft": draft()}.get(where)
    # Inside the forward: below the model there are wrappers of ours to be unwound.
    hook = hooked and hooked.model.layers[1].register_forward_hook(lambda *args: failing())
    with pytest.raises(failing.error, match="in the middle"):
        generate(inputs, options, **extra)
    if hook:
        hook.remove()
    assert torch.equal(generate(inputs, options), text("ragged"))
    assert torch.equal(generate(inputs, {}), text("ragged"))
    for name, model in (("target", target()), ("draft", draft())):
        assert set(vars(model)) == before[name]
        assert hooks[name] == count_hooks(model)


def test_an_abandoned_streamer() -> None:
    """Nobody reads it any more and its thread still generates while the next call begins."""
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    longer = {"max_new_tokens": 60, "speculator": draft()}
    thread = threading.Thread(target=generate, args=(prompts(1), longer), kwargs={"streamer": streamer})
    thread.start()
    next(streamer)
    for _ in range(3):
        assert torch.equal(generate(prompts(3), {"speculator": draft()}), text("ragged"))
    thread.join()
    rest = "".join(iter(functools.partial(streamer.text_queue.get, timeout=1), streamer.stop_signal))
    with pytest.raises(queue.Empty):
        streamer.text_queue.get_nowait()
    plain = generate(prompts(1), {"max_new_tokens": 60})[0]
    assert tokenizer().decode(plain).endswith(rest)
