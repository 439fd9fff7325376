"""The server, asked by OpenAI's own client over the loopback address: its texts are those of plain ``generate``."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from architectures import build
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, BadRequestError, OpenAI
from pairs import each_value
from servers import BATCHES, DRAFT, PROMPTS, TARGET, Client, crowd, plain, serving, target, until
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import _StreamError
from transformers.utils.chat_parsing import ResponseParser
from twins import by_code

from hf_spec import NgramSpeculator, SpeculationConfig, demo, pack
from hf_spec.batching.sizes import longest_text
from hf_spec.cli import main
from hf_spec.serving.batched import Batched
from hf_spec.serving.endpoints import TolerantParser, keep_unreadable_calls
from hf_spec.serving.meter import Meter
from hf_spec.serving.policy import Policy

DAY = "day"  # a word of the answers


@pytest.fixture(scope="module")
def one_by_one() -> Iterator[Client]:
    with serving(admin=True) as client:
        yield client


@pytest.fixture(scope="module")
def batched() -> Iterator[Client]:
    with serving(**BATCHES) as client:
        yield client


@pytest.fixture(scope="module", params=["one_by_one", "batched"])
def client(request) -> Client:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_completions_are_those_of_plain_generate(client, prompt, stream):
    assert client.complete(prompt, 40, stream) == plain(prompt, 40)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_those_of_plain_generate(client, stream):
    messages = [{"role": "user", "content": "Tell me a story."}]
    _, tokenizer = target()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = client.openai.chat.completions.create(
        model=TARGET, messages=messages, max_tokens=40, temperature=0, stream=stream
    )
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert text == plain(prompt, 40)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_cannot_be_read_is_text(client, stream, monkeypatch):
    """It is no JSON, or has no name, or has no end; another one is a call."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    prompt = target()[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = plain(prompt, 12)
    opens, called, closes = re.fullmatch(r"\w+( \w+)(.*)( \w+) \w+\W*", text).groups()
    named = {"name": "{content}", "arguments": "{content}"}
    cases = [("json", "{content}", closes), ("kv-lines", "{content}", closes), ("json", "{content}", "no end")]
    for content, function, close in [*cases, ("text", named, closes)]:
        calls = {
            "open": opens,
            "close": close,
            "content": content,
            "repeats": True,
            "transform": {"function": function},
        }
        fields = {"tool_calls": calls, "content": {"content": "text"}}
        template = {"start_anchor": prompt[-5:], "fields": fields}
        monkeypatch.setattr(client.server._processor(), "response_template", template, raising=False)
        answer = client.openai.chat.completions.create(
            model=TARGET, messages=messages, max_tokens=12, temperature=0, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        parts = [choice.delta if stream else choice.message for choice in choices]
        said = "".join(part.content or "" for part in parts)
        names = [call.function.name for part in parts for call in part.tool_calls or ()]
        if function is named:
            assert (names, choices[-1].finish_reason) == ([called.strip()], "tool_calls") and opens not in said
        else:
            assert (said, names, choices[-1].finish_reason) == (text, [], "length")
            body = {"input": messages, "max_output_tokens": 12, "temperature": 0, "stream": False}
            status, found = client.post("v1/responses", body)
            assert status == 200 and found["output"][0]["content"][0]["text"] == text


def test_a_tokenizer_with_an_attribute_of_that_name_is_no_processor():
    keep_unreadable_calls(words := by_code())
    assert "parse_response" in vars(words)


def test_a_stream_passes_on_the_whole_of_a_call_that_cannot_be_read():
    call = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    template = {"start_anchor": "A", "fields": {"tool_calls": call, "content": {"content": "text"}}}
    tokenizer = target()[1]
    end = tokenizer.eos_token
    for body, rest in (("{]</tool_call>", " Well."), ("{]", "")):
        parser = TolerantParser(ResponseParser(template, prefix="A"), tokenizer)
        pieces = ["Hi", " there", "\n<tool", "_call>", *body[:2], body[2:], rest, end]
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finalize()[1]
        said = [event["text"] for event in events if event["type"] == "region_chunk" and event["field"] == "content"]
        assert "".join(said) == f"Hi there\n<tool_call>{body}{rest}"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_no_statistics_unless_the_server_was_asked_for_them(client, stream):
    options = {"model": TARGET, "prompt": PROMPTS[0], "max_tokens": 9, "temperature": 0}
    found = client.openai.completions.create(**options, stream=stream)
    *_, last = found if stream else [found]
    assert last.usage.completion_tokens == 9 and "metrics" not in last.to_dict()


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_text_where_plain_generate_does(client, stream):
    expected = plain(PROMPTS[0], 80, DAY)
    assert expected.endswith(DAY)
    assert client.complete(PROMPTS[0], 80, stream, stop=[DAY]) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_a_stop_string_ends_is_learnt_once(stream):
    told = []

    class Learning(NgramSpeculator):
        def learn(self, texts):
            told.extend(map(list, texts))

    with serving(Learning(), **BATCHES) as client:
        client.complete(PROMPTS[0], 80, stream, stop=[DAY])
        until(lambda: told)
        client.complete(PROMPTS[1], 3)
        until(lambda: len(told) > 1)
    assert target()[1].decode(told[0], skip_special_tokens=True) == PROMPTS[0] + plain(PROMPTS[0], 80, DAY)
    assert len(told) == 2


def test_sampled_texts_are_those_of_the_seed(one_by_one):
    options = {"temperature": 0.8, "extra_body": {"generation_config": '{"do_sample": true, "max_new_tokens": 20}'}}
    one, same, other = (one_by_one.complete(PROMPTS[0], 20, seed=seed, **options) for seed in (1, 1, 2))
    assert one == same != other
    after, hot = [], options | {"temperature": 1.5}
    for _ in range(2):  # a text without a seed does not follow from the seed of an earlier request
        one_by_one.complete(PROMPTS[0], 1, seed=1, **options)
        after.append(one_by_one.complete(PROMPTS[0], 20, **hot))
    assert after[0] != after[1]


def test_texts_without_a_seed_are_those_of_the_default_seed():
    options = {"temperature": 1.5, "extra_body": {"generation_config": '{"do_sample": true, "max_new_tokens": 20}'}}
    found = []
    for seed, between in ((7, False), (7, True), (8, False)):
        with serving("ngram", default_seed=seed) as client:
            texts = [client.complete(PROMPTS[0], 20, **options)]
            if between:  # takes its random numbers from elsewhere
                client.complete(PROMPTS[0], 20, seed=1, **options)
            found.append([*texts, client.complete(PROMPTS[0], 20, **options)])
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]


def test_a_seed_in_a_batch_is_nobody_elses(batched):
    """All requests of a batch draw from one generator."""
    torch.seed()
    before = torch.initial_seed()
    batched.complete(PROMPTS[0], 5, seed=12345)
    assert torch.initial_seed() == before


def test_beams_end_when_nobody_waits_for_them(one_by_one):
    """One that runs, and one behind it, which does not begin."""
    before = one_by_one.metrics()
    config = '{"num_beams": 2, "max_new_tokens": 900, "eos_token_id": 2047}'
    with ThreadPoolExecutor(2) as pool:

        def leave(_):
            with pytest.raises(APITimeoutError):
                one_by_one.openai.with_options(timeout=1).completions.create(
                    model=TARGET, prompt=PROMPTS[0], extra_body={"generation_config": config}
                )

        list(pool.map(leave, range(2)))
    until(one_by_one.is_idle)
    found = one_by_one.metrics()
    assert found["texts_total.cancelled"] == before.get("texts_total.cancelled", 0) + 2
    assert found["texts_total.finished"] == before.get("texts_total.finished", 0)


@pytest.mark.parametrize(("name", "new"), [("gemma3_text", 2000), ("mistral", 450), ("llama", 450)])
def test_a_text_fits_beside_the_windows_of_other_layers(name, new, tmp_path):
    """Layers with windows take memory that full attention then does not have."""
    tokenizer = target()[1]
    model = build(name, vocab_size=len(tokenizer), max_position_embeddings=4096, sliding_window=64)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving("ngram", target=str(tmp_path), **BATCHES) as client:
        cache = client.server._generation_state._cb_manager._scheduler.cache
        for prompt in (PROMPTS[0], " a" * 200):
            answer = client.openai.completions.create(model=str(tmp_path), prompt=prompt, max_tokens=new)
            assert answer.choices[0].finish_reason == "length"
        if name != "gemma3_text":  # without full attention a text needs no more than its windows
            assert answer.usage.total_tokens == 201 + new > cache.max_tokens_read
            return
        room = longest_text(cache)
        assert answer.usage.total_tokens == room > 400
        with pytest.raises(BadRequestError, match=f"room for {room}"):
            client.openai.completions.create(model=str(tmp_path), prompt=" a" * room, max_tokens=5)


def test_a_crowd_is_answered_and_nothing_stays(client):
    before = client.metrics()
    assert crowd(client, 16) >= 8
    until(client.is_idle)
    found = client.metrics()
    assert found["texts_total.cancelled"] > before.get("texts_total.cancelled", 0)
    assert client.complete(PROMPTS[0], 5) == plain(PROMPTS[0], 5)


@pytest.mark.slow
def test_two_hundred_at_a_time(client):
    assert crowd(client, 200, seed=1, lengths=(1, 2, 5, 12, 20)) >= 120
    until(client.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_when_its_client_has_gone(client, stream):
    before = client.metrics()
    client.leave(PROMPTS[0], pieces=3, stream=stream)
    until(client.is_idle)
    found = client.metrics()
    assert found["texts_total.cancelled"] == before.get("texts_total.cancelled", 0) + 1
    generated = found["generated_tokens_total"] - before["generated_tokens_total"]
    assert (2 if stream else -1) < generated < 900  # pieces that were told before the client left count
    assert found["requests_total.499"] == before.get("requests_total.499", 0) + 1


BAD: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": ""},
    "max_tokens": {"max_tokens": 0},
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 1.5},
    "stop": {"stop": [""]},
    "generation_config": {"extra_body": {"generation_config": "greedy"}},
    "max_new_tokens: 'x'": {"extra_body": {"generation_config": '{"max_new_tokens": "x"}'}},
    "output_scores: 'True' is not false": {"extra_body": {"generation_config": '{"output_scores": true}'}},
    "seed": {"seed": 1 << 64},
    "response_format": {"extra_body": {"response_format": {"type": "json_object"}}},
    "n": {"n": 2},
    "logprobs": {"logprobs": 3},
    "presence_penalty": {"presence_penalty": 0.5},
    "echo": {"echo": True},
    "logit_bias": {"extra_body": {"logit_bias": {"abc": 100}}},
    "GenerationConfig": {"extra_body": {"generation_config": '{"max_new_token": 3}'}},
    "pinned": {"model": "another"},
    "nonsense": {"extra_body": {"nonsense": 1}},
    "top_k": {"temperature": 1, "extra_body": {"generation_config": '{"do_sample": true, "top_k": -1}'}},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_requests_are_refused_by_name(client, named):
    with pytest.raises(APIError, match=named) as caught:
        client.complete(**{"prompt": PROMPTS[0], "new": 5} | BAD[named])
    assert caught.value.status_code in (400, 422)
    assert client.complete(PROMPTS[0], 5) == plain(PROMPTS[0], 5)


def test_the_model_is_listed_by_the_name_that_requests_give(client):
    assert [model.id for model in client.openai.models.list()] == [TARGET]


def test_what_changes_nothing_is_taken(client):
    neutral = {"n": 1, "presence_penalty": 0, "echo": False, "stream_options": {"include_usage": True}}
    assert client.complete(PROMPTS[0], 5, **neutral, stream=True) == plain(PROMPTS[0], 5)


def test_biases_may_be_whole_numbers(one_by_one):
    [token] = set(target()[1].encode(f" {DAY}", add_special_tokens=False))
    ask = functools.partial(one_by_one.openai.chat.completions.create, model=TARGET, max_tokens=3, temperature=0)
    answer = ask(messages=[{"role": "user", "content": PROMPTS[0]}], logit_bias={str(token): 100})
    assert answer.choices[0].message.content.split() == [DAY] * 3


@pytest.mark.parametrize(
    ("path", "given", "status"), [("nowhere", {}, 404), ("v1/models", {}, 405), ("v1/completions", [1], 400)]
)
def test_every_error_stands_where_clients_look(client, path, given, status):
    with pytest.raises(APIStatusError) as caught:
        client.openai.post(f"{client.url}/{path}", body=given, cast_to=object)
    assert caught.value.status_code == int(caught.value.code) == status
    assert caught.value.type == "invalid_request_error" and caught.value.body["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "told"),
    [
        ("POST", "v1/completions", b"{", {}, "the body is not JSON: Expecting property name"),
        ("POST", "v1/completions", b"", {}, "the body is empty; send a JSON object"),
        ("POST", "v1/completions", b"[1]", {}, "the body is JSON of another kind (list); send a JSON object"),
        ("POST", "v1/completions", b"{}", {"Content-Type": "text/plain"}, "send the header Content-Type"),
        ("POST", "v1/completions", b"[" * 10**5, {}, "the body cannot be read"),
        ("POST", "v1/completions", b'{"prompt": "\xff"}', {}, "the body cannot be read"),
        ("GET", "v1/completions", None, {}, "there is no GET /v1/completions; it takes POST."),
        ("GET", "v2/completions", None, {}, "there is no GET /v2/completions; docs/serving.md"),
    ],
)
def test_what_is_no_request_is_told_what_to_send(client, method, path, body, headers, told):
    asked = Request(f"{client.url}/{path}", body, {"Content-Type": "application/json"} | headers, method=method)
    with pytest.raises(HTTPError) as caught:
        urlopen(asked)
    assert told in json.load(caught.value)["error"]["message"]
    assert caught.value.headers.get("Allow") == ("POST" if caught.value.code == 405 else None)


def test_a_bias_of_tokens_in_a_completion_is_not_dropped(client):
    status, answer = client.post("v1/completions", {"prompt": PROMPTS[0], "logit_bias": {"5": 100}})
    assert status == 400 and answer["error"]["message"].startswith("logit_bias: it is for chats"), answer


def test_a_chat_without_messages_is_refused(client):
    with pytest.raises(BadRequestError, match="messages"):
        client.openai.chat.completions.create(model=TARGET, messages=[])


def test_a_chat_that_the_template_does_not_take_is_refused(client):
    with pytest.raises(BadRequestError, match="not system"):
        client.openai.chat.completions.create(model=TARGET, messages=[{"role": "system", "content": "Be brief."}])


def test_a_stream_that_fails_says_why(one_by_one):
    with pytest.raises(APIError) as caught:
        one_by_one.complete(PROMPTS[0], 5, stream=True, extra_body={"generation_config": '{"num_beams": 2}'})
    assert "beam" in str(caught.value.body)


def test_metrics_agree_with_the_answers(client):
    until(client.is_idle)
    before = client.metrics()
    usages = [
        client.openai.completions.create(model=TARGET, prompt=prompt, max_tokens=30, temperature=0).usage
        for prompt in PROMPTS
    ]
    until(client.is_idle)
    grown = {name: value - before.get(name, 0) for name, value in client.metrics().items()}
    assert grown["prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert grown["generated_tokens_total"] == sum(usage.completion_tokens for usage in usages)
    assert grown["texts_total.finished"] == len(PROMPTS)
    assert grown["plain_texts_total"] == 0
    # The token that prefill gives belongs to no step.
    assert grown["emitted_tokens_total"] == grown["generated_tokens_total"] - len(PROMPTS)
    assert grown["emitted_tokens_total"] == grown["accepted_tokens_total"] + grown["steps_total"]
    found = client.metrics()
    assert found["acceptance_rate"] == found["accepted_tokens_total"] / found["proposed_tokens_total"] > 0.2
    assert found["mean_accepted_length"] == found["emitted_tokens_total"] / found["steps_total"] > 1.5


def test_what_no_draft_can_serve_is_generated_plainly(one_by_one):
    before = one_by_one.metrics()["plain_texts_total"]
    text = one_by_one.complete(PROMPTS[0], 12, extra_body={"generation_config": '{"num_beams": 2}'})
    model, tokenizer = target()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    out = model.generate(**inputs, num_beams=2, max_new_tokens=12, do_sample=False)
    assert text == tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert one_by_one.metrics()["plain_texts_total"] == before + 1


def test_a_model_that_is_loaded_anew_guesses_too(one_by_one):
    one_by_one.openai.post(f"{one_by_one.url}/reset", cast_to=object)
    before = one_by_one.metrics()["steps_total"]
    assert one_by_one.complete(PROMPTS[0], 20) == plain(PROMPTS[0], 20)
    assert one_by_one.metrics()["steps_total"] > before


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_takes_no_other_along(stream):
    """The engine hands out the results of all requests in one call of the server's loop."""
    asyncio.run(_two_at_once(stream))


async def _two_at_once(stream):
    model, tokenizer = target()
    small = ContinuousBatchingConfig(page_size=16, num_blocks=40, max_batch_tokens=128)  # not all free memory
    manager = Batched(Meter(), small, Policy())
    manager.init_cb(model, GenerationConfig(max_new_tokens=6, do_sample=False))
    prompt = tokenizer(PROMPTS[0])
    settings = [GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None) for _ in range(2)]
    try:
        if stream:
            queue, streamer = manager.generate_streaming(model, tokenizer, prompt, settings[0], "first")
            streamer._decode_stream = None  # which fails at the first token
        else:
            first = asyncio.ensure_future(
                manager.generate_non_streaming(model, tokenizer, prompt, settings[0], "first")
            )
        second = asyncio.ensure_future(manager.generate_non_streaming(model, tokenizer, prompt, settings[1], "second"))
        await asyncio.sleep(0)
        if stream:
            assert isinstance(await asyncio.wait_for(queue.get(), 60), _StreamError)
        else:  # its client goes in the very turn in which both end
            handlers = manager._cb.output_router.result_handlers
            [name] = [name for name in handlers if name.startswith("first ")]
            deliver, loop = handlers[name]

            def leave_and_deliver(output):
                if output.is_finished():
                    first.cancel()
                deliver(output)

            handlers[name] = leave_and_deliver, loop
        text, _, tokens = await asyncio.wait_for(second, 60)
        assert len(tokens) == 6 and text
    finally:
        manager.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_left_of_a_prompt_that_the_engine_refuses(batched, stream, monkeypatch):
    """The tokenizer has a token that the model does not know."""
    [loaded] = batched.server._model_manager.loaded_models.values()
    monkeypatch.setattr(loaded, "processor", copy.deepcopy(loaded.processor))
    loaded.processor.add_tokens(["<other>"])
    before = batched.metrics()["prompt_tokens_total"]
    with pytest.raises(APIError, match="the prompt has token 2048, but the model knows 2048"):
        batched.complete("<other>", 5, stream)
    assert batched.metrics()["prompt_tokens_total"] == before
    until(batched.is_idle, 9)


def test_each_request_of_a_batch_has_its_own_settings(batched):
    def sampled(temperature: float) -> str:
        config = '{"do_sample": true, "max_new_tokens": 20}'
        options = {"temperature": temperature, "extra_body": {"generation_config": config}}
        return batched.complete(PROMPTS[0], 20, **options)

    with ThreadPoolExecutor(12) as pool:
        cold = [pool.submit(sampled, 0.001) for _ in range(4)]
        hot = [pool.submit(sampled, 1.5) for _ in range(4)]
        greedy = [pool.submit(batched.complete, PROMPTS[0], 20, stop=[DAY]) for _ in range(4)]
    assert {one.result() for one in cold} == {plain(PROMPTS[0], 20)}
    assert {one.result() for one in greedy} == {plain(PROMPTS[0], 20, DAY)}
    assert len({one.result() for one in hot}) > 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"frequency_penalty": 0.5}, "RepetitionPenaltyLogitsProcessor .* continuous batching"),
        ({"extra_body": {"generation_config": '{"num_beams": 2}'}}, "num_beams"),
        ({"extra_body": {"generation_config": '{"max_time": 0.1}'}}, "max_time"),
        ({"temperature": 1, "extra_body": {"generation_config": '{"do_sample": true, "min_p": 0.1}'}}, "MinPLogits"),
    ],
)
def test_what_a_batch_would_drop_is_refused(batched, options, named):
    with pytest.raises(BadRequestError, match=named):
        batched.complete(PROMPTS[0], 5, **options)


def test_a_text_ends_where_the_paged_cache_does(batched):
    cache = batched.server._generation_state._cb_manager._scheduler.cache
    room = longest_text(cache)
    assert room == cache.max_tokens_read  # all layers have full attention
    with pytest.raises(BadRequestError, match=f"the prompt has {room + 1} tokens.* room for {room}"):
        batched.complete(" a" * room, 5)  # and one that the tokenizer adds
    small = {"continuous_batching": True, "cb_num_blocks": 1, "cb_max_batch_tokens": 64}
    with serving(**small) as client:
        prompt = " a" * 240
        answer = client.openai.completions.create(model=TARGET, prompt=prompt, max_tokens=60, temperature=0)
        assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
        assert answer.choices[0].text == plain(prompt, 60 - 45)
        assert client.complete(PROMPTS[0], 5) == plain(PROMPTS[0], 5)


DRAFTS = {
    "ngram": ("ngram", None),
    "medusa": (demo.path("draft-medusa"), None),
    "tree": (demo.path("draft-eagle3"), SpeculationConfig(tree="dynamic", num_tree_tokens=8)),
    "mtp": (demo.path("draft-mtp"), None),
    "vanilla": (demo.path("draft-vanilla"), lambda speculator: speculator.settings(num_speculative_tokens=3)),
}


@pytest.mark.parametrize(("draft", "options"), each_value(DRAFTS, ({}, BATCHES)))
def test_every_kind_of_draft(draft, options):
    with serving(*DRAFTS[draft], **options) as client:
        assert client.complete(PROMPTS[2], 40, stream=True) == plain(PROMPTS[2], 40)
        until(client.is_idle)
        assert client.metrics()["accepted_tokens_total"] > 0


def packed(model, _speculator):
    assert pack(model, force=True).packed


@pytest.mark.parametrize("loaded", [None, packed])
def test_a_static_cache(loaded):
    with serving(compile=True, loaded=loaded) as client:
        assert client.complete(PROMPTS[1], 24) == plain(PROMPTS[1], 24)
        assert client.complete(PROMPTS[2], 24, stream=True) == plain(PROMPTS[2], 24)
        until(client.is_idle)
        found = client.metrics()
        assert found["accepted_tokens_total"] > 0 == found["plain_texts_total"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_reads_the_options_of_transformers(monkeypatch):
    made = {}
    monkeypatch.setattr("hf_spec.serving.server.Server", lambda *args, **options: made.update(options, args=args))
    ours = ["--speculator", str(DRAFT), "--tree", "dynamic", "--num-tree-tokens", "7"]
    theirs = ["--port", "8123", "--compile", "--dtype", "float32", "--cb-num-blocks", "9"]
    assert main(["serve", *theirs[:2], TARGET, *ours, *theirs[2:]]) == 0
    name, speculator, config = made["args"]
    assert name == TARGET and type(speculator).__name__ == "Eagle3DraftModel"
    assert (config(speculator).tree, config(speculator).num_tree_tokens) == ("dynamic", 7)
    assert made["port"] == 8123 and made["compile"] and made["cb_num_blocks"] == 9
    assert made["dtype"] == "float32" and made["host"] == "localhost"


@pytest.mark.parametrize("name", ["org/model@v1", "org/model:file.gguf"])
def test_a_revision_or_a_file_of_a_target_is_left_to_transformers(name, monkeypatch):
    made = []
    monkeypatch.setattr("hf_spec.serving.server.Server", lambda *args, **options: made.append(args[:2]))
    assert main(["serve", name, "--speculator", "ngram"]) == 0
    assert made == [(name, "ngram")]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--speculator", "ngram"], "serve needs a target"),
        ([TARGET, "--speculator", "ngram", "--prt", "80"], "No such option: --prt"),
        ([TARGET, "--speculator", "ngram", "--port", "many"], "Invalid value for '--port'"),
        ([TARGET, "--speculator", "nowhere/at/all"], "no draft can be read at 'nowhere/at/all'"),
        ([TARGET, "--speculator", "ngram", "--dtype", "float7"], "Unsupported dtype: 'float7'"),
        (["nowhere/model", "--speculator", "ngram"], "the target 'nowhere/model' is not found: there is no such"),
        ([str(DRAFT), "--speculator", "ngram"], "is a draft, which drafts for a language model: pass it as --spec"),
    ],
)
def test_the_command_tells_mistakes(options, told, capsys):
    assert main(["serve", *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hf_spec", "serve", TARGET, "--speculator", "ngram", "--port", str(port)]
    process = subprocess.Popen([*command, "--device", "cpu", "--dtype", "float32"], stderr=subprocess.PIPE, text=True)
    try:
        client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")

        def answers() -> bool:
            with contextlib.suppress(APIConnectionError):
                return bool(client.get(f"http://localhost:{port}/health", cast_to=object))
            return process.poll() is not None

        until(answers)
        found = client.completions.create(model=TARGET, prompt=PROMPTS[2], max_tokens=20, temperature=0)
        assert found.choices[0].text == plain(PROMPTS[2], 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), process.stderr.read()
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--one-by-one", "--speculator", "ngram"]])
def test_the_soak_finds_nothing(options, monkeypatch, capsys):
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "soak_server.py"))
    main = names["main"]
    # It is short, so that caches and pools are still getting warm, and texts are few.
    shorter = {"PROMPTS": names["PROMPTS"][:2], "LENGTHS": (1, 5, 20), "MOST_GROWTH": 2.0}
    monkeypatch.setattr("sys.argv", ["soak_server.py", "--minutes", "0.1", "--clients", "6", *options])
    for name, value in shorter.items():
        monkeypatch.setitem(main.__globals__, name, value)
    assert main() == 0, capsys.readouterr().out


def test_a_soak_of_a_server_that_does_not_start_says_why(monkeypatch, capfd):
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "soak_server.py"))
    main = names["main"]
    monkeypatch.setattr("sys.argv", ["soak_server.py", "--minutes", "0.1", "--speculator", "no-such-draft"])
    for name, value in {"PROMPTS": names["PROMPTS"][:1], "LENGTHS": (1,), "STOPS": ()}.items():
        monkeypatch.setitem(main.__globals__, name, value)
    with pytest.raises(SystemExit, match=r"the server ended with status [1-9], before it answered"):
        main()
    assert "no-such-draft" in capfd.readouterr().err
