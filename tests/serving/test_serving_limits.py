"""One client cannot stop a server: what it may ask for is limited, and is prepared outside the event loop."""

from __future__ import annotations

import base64
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import encoder_decoders
import pytest
import speech
from fastapi import HTTPException
from servers import BATCHES, PROMPTS, TARGET, Client, plain, serving, until
from transformers import AutoTokenizer, GenerationConfig
from twins import target

from hf_spec.serving import batched as batched_module
from hf_spec.serving.fields import is_number
from hf_spec.serving.limits import limit_length
from hf_spec.serving.policy import Policy
from hf_spec.serving.requests import refuse_request, refuse_template_arguments

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
LIMITS = {"max_prompt_tokens": 40, "max_new_tokens": 12, "max_beams": 2}


@pytest.fixture(scope="module", params=["one_by_one", "batched"])
def client(request) -> Iterator[Client]:
    options = BATCHES if request.param == "batched" else {}
    with serving("ngram", admin=True, **LIMITS, **options) as client:
        yield client


def refused(client: Client, path: str, body: dict, told: str) -> None:
    status, answer = client.post(path, body)
    assert status == 400 and told in answer["error"]["message"], (status, answer)


# -- chat templates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
        {"chat_template": None},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tokenize": False},
        {"tokenizer_kwargs": {}},
        {"return_tensors": "np"},
        {"max_length": 1},
        {"messages": []},
        {"tools": []},
        {"conversation": []},
        {"bos_token": "x"},
        {"num_frames": 9},
        {"no_such_variable": 1},
    ],
)
def test_clients_set_nothing_but_what_the_template_reads(client, given):
    [name] = given
    refused(client, "v1/chat/completions", {**CHAT, "chat_template_kwargs": given}, f"does not read {name!r}")


@pytest.mark.parametrize("value", [True, "yes", 3])
def test_thinking_may_be_switched_for_every_model(client, value):
    assert client.post("v1/chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": value}})[0] == 200


def test_what_a_template_reads_may_be_set():
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ style }}{% endfor %}{{ documents }}{{ tools }}"
    refuse_template_arguments({"chat_template_kwargs": {"style": "short", "documents": [{"title": "a"}]}}, template)
    for name, value in {"tools": [], "documents": 3, "bos_token": "", "chat_template": "x"}.items():
        with pytest.raises(Exception, match="chat_template_kwargs"):
            refuse_template_arguments({"chat_template_kwargs": {name: value}}, template)
    refuse_template_arguments({"chat_template_kwargs": {"style": "short"}}, {"default": "{{ other }}", "b": template})
    with pytest.raises(Exception, match="style"):
        refuse_template_arguments({"chat_template_kwargs": {"style": "short"}}, None)


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses"])
def test_what_a_template_raises_is_the_mistake_of_the_client(client, monkeypatch, path):
    """Templates are code of others: what types they fail at cannot be known."""
    [loaded] = client.server._model_manager.loaded_models.values()
    monkeypatch.setattr(loaded.processor, "chat_template", "{{ messages[0].content + 1 }}")
    body = CHAT if "chat" in path else {"input": "Hi", "max_output_tokens": 3}
    for stream in (False, True):
        refused(client, path, {**body, "stream": stream}, "chat template does not take")


# -- outside the event loop -------------------------------------------------------------------------------------------


def rendering_waits(client, monkeypatch):
    """Let chats be rendered no further until the second event is set; the first tells that one has begun."""
    [loaded] = client.server._model_manager.loaded_models.values()
    rendered, may_go_on, render = threading.Event(), threading.Event(), loaded.processor.apply_chat_template

    def slowly(*args, **kwargs):
        rendered.set()
        assert may_go_on.wait(60)
        return render(*args, **kwargs)

    monkeypatch.setattr(loaded.processor, "apply_chat_template", slowly)
    return rendered, may_go_on


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_answered_while_a_chat_is_rendered(client, monkeypatch, stream):
    rendered, may_go_on = rendering_waits(client, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        ask = client.openai.chat.completions.create
        asked = pool.submit(ask, model=TARGET, **CHAT, temperature=0, stream=stream)
        assert rendered.wait(60)
        try:
            assert client.metrics()["requests_running"] == 0  # it is answered
        finally:
            may_go_on.set()
        answer = asked.result()
    assert [*answer] if stream else answer.choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_its_text_begins_has_none(client, monkeypatch, stream):
    until(client.is_idle)
    before = client.metrics()
    rendered, may_go_on = rendering_waits(client, monkeypatch)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    try:
        with socket.create_connection(("localhost", int(client.url.rpartition(":")[2]))) as leaving:
            leaving.sendall(b"%s%d\r\n\r\n%s" % (head, len(body), body))
            assert rendered.wait(60)
        gone = before.get("requests_total.499", 0)
        until(lambda: client.metrics().get("requests_total.499", 0) > gone)
    finally:
        may_go_on.set()
    asked = {"model": TARGET, "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0}
    usage = client.openai.completions.create(**asked).usage
    until(client.is_idle)
    assert client.metrics()["prompt_tokens_total"] - before["prompt_tokens_total"] == usage.prompt_tokens


def test_stop_strings_are_compiled_outside_the_event_loop(monkeypatch):
    threads, criteria = [], batched_module.StopStringCriteria
    monkeypatch.setattr(
        batched_module,
        "StopStringCriteria",
        lambda *args: threads.append(threading.current_thread()) or criteria(*args),
    )
    with serving("ngram", **BATCHES) as client:
        for stream in (False, True):
            assert client.complete(PROMPTS[0], 9, stream, stop=["zzz"]) == plain(PROMPTS[0], 9)
        assert len(threads) == 2 and client.server._thread not in threads


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [["a"] * 17, "a" * 257, ["a", "b" * 200_000], [[]], ["a", 3], {"a": 1}, 3, [""]])
def test_stop_strings_are_few_and_short(client, stop):
    refused(client, "v1/completions", {"prompt": "Hi", "stop": stop}, "stop: ")
    refused(client, "v1/chat/completions", {**CHAT, "stop": stop}, "stop: ")
    config = json.dumps({"stop_strings": stop})
    refused(client, "v1/completions", {"prompt": "Hi", "generation_config": config}, "stop_strings: ")


def test_as_many_and_as_long_stop_strings_as_that_are_taken(client):
    stop = [f"{number:x}" * 256 for number in range(16)]
    assert client.post("v1/completions", {"prompt": "Hi", "max_tokens": 1, "stop": stop})[0] == 200


def test_beams_are_few(client):
    for beams in (3, 20_000):
        config = json.dumps({"num_beams": beams})
        refused(client, "v1/completions", {"prompt": "Hi", "generation_config": config}, "at most 2 (--max-beams)")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_short(client, stream):
    def asked(words: int) -> dict:
        return {"prompt": " a" * words, "max_tokens": 1, "stream": stream}

    refused(client, "v1/completions", asked(40), "the prompt has 41 tokens, and this server takes 40")
    client.openai.post("/completions", body=asked(39), cast_to=object)
    refused(client, "v1/completions", {**asked(1), "prompt": "a" * 641}, "more than 640 characters")
    refused(client, "v1/completions", {**asked(1), "prompt": "a" * 640}, "tokens, and this server takes 40")
    messages = [{"role": "user", "content": " a" * 40}]
    refused(client, "v1/chat/completions", {**CHAT, "messages": messages, "stream": stream}, "(--max-prompt-tokens)")
    refused(client, "v1/responses", {"input": " a" * 40, "stream": stream}, "(--max-prompt-tokens)")
    refused(client, "v1/responses", {"input": "a", "instructions": "a" * 641, "stream": stream}, "640 characters")
    tools = [{"type": "function", "function": {"name": "f", "description": "a" * 641}}]
    refused(client, "v1/chat/completions", {**CHAT, "tools": tools}, "640 characters")


LONG = "data:" + "a" * 700


def test_tools_that_may_not_be_called_are_left_out():
    for choice, is_there in (("auto", True), ("none", False)):
        body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": choice}
        refuse_request(body, Policy())
        assert ("tools" in body) == is_there


def with_tool(parameters: dict) -> dict:
    return {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        with_tool({"type": "image_url", "image_url": LONG}),
        with_tool({"enum": [1] * 700}),
        with_tool({"enum": [10**700]}),
        with_tool({"enum": [None, True, []] * 200}),
        {"messages": [], "chat_template_kwargs": {"documents": [{}] * 400}},
    ],
)
def test_whatever_a_template_may_write_out_counts(body):
    with pytest.raises(HTTPException, match="more than 640 characters"):
        refuse_request(body, Policy(max_prompt_tokens=40))


def test_pictures_and_sounds_do_not_count():
    sound = base64.b64encode(bytes(900)).decode()
    part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]}
    refuse_request(body, Policy(max_prompt_tokens=40))


def test_nothing_is_nested_deep(client):
    def nested(depth: int) -> dict:
        value: dict = {}
        for _ in range(depth):
            value = {"a": value}
        return {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]}

    assert client.post("v1/chat/completions", nested(9))[0] == 200
    for depth in (70, 400):
        refused(client, "v1/chat/completions", nested(depth), "more than 64 deep")


@pytest.mark.parametrize("given", [{"max_tokens": 10**9}, {"generation_config": '{"max_length": 1000000000}'}, {}])
def test_texts_end_at_the_limit(client, given):
    _, answer = client.post("v1/completions", {"prompt": PROMPTS[0], "temperature": 0} | given)
    assert answer["usage"]["completion_tokens"] == 12 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("own", "given", "most", "length"),
    [
        ({}, {}, 12, 12),
        ({}, {}, 60, 20),  # as many as transformers writes by default
        ({"max_length": 400}, {}, 12, 12),
        ({"max_length": 30}, {}, 60, 25),
        ({"max_length": 30}, {"max_new_tokens": 50}, 60, 50),
        ({"max_new_tokens": 2048}, {}, 60, 60),
        ({"max_new_tokens": 7}, {}, 60, 7),
        ({"max_new_tokens": 7}, {"max_new_tokens": 9}, 60, 9),
        ({"max_new_tokens": 7}, {"max_length": 1000}, 60, 7),
    ],
)
def test_what_the_model_says_of_lengths_counts_and_is_limited(own, given, most, length):
    model, config = copy.copy(target()), GenerationConfig(**given)
    model.generation_config = GenerationConfig(**own)
    limit_length(model, 5, config, Policy(max_new_tokens=most))
    assert config.max_new_tokens == length


@pytest.mark.parametrize(
    "setting",
    [
        {"forced_eos_token_id": 2048},
        {"forced_bos_token_id": 2048},
        {"bad_words_ids": [[1, 2048]]},
        {"sequence_bias": [[[2048], 5000]]},
        {"suppress_tokens": [1, 2048]},
        {"begin_suppress_tokens": [2048]},
    ],
)
def test_tokens_that_there_are_not(client, setting):
    [name] = setting
    for stream in (False, True):
        config = json.dumps(setting | {"max_new_tokens": 2})
        body = {"prompt": "Hi", "stream": stream, "generation_config": config}
        status, answer = client.post("v1/completions", body)
        assert status == 400 and (name in answer["detail"] or "continuous batching" in answer["detail"]), answer


def test_a_bias_may_be_larger_than_the_vocabulary(client):
    config = json.dumps({"sequence_bias": [[[5], 5000.0]], "max_new_tokens": 2})
    status, answer = client.post("v1/completions", {"prompt": "Hi", "generation_config": config})
    assert status == 200 or "continuous batching" in answer["detail"]
    status, answer = client.post("v1/chat/completions", {**CHAT, "logit_bias": {"2048": 1}})
    assert status == 400 and ("no token 2048" in answer["detail"] or "continuous batching" in answer["detail"])


# -- what has no text -------------------------------------------------------------------------------------------------


DECISION = {"state": "a", "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}


def test_decisions_do_not_stay_in_the_queue():
    with serving("ngram", max_prompt_tokens=300) as client:
        for _ in range(2):
            client.post("v1/systemone", DECISION)
        refused(client, "v1/systemone", {**DECISION, "state": " a" * 400}, "this server takes 300")
        refused(client, "v1/systemone", {**DECISION, "state": "a" * 4801}, "4800 characters")
        assert client.complete(PROMPTS[0], 3) == plain(PROMPTS[0], 3)
        until(client.is_idle)
        found = client.metrics()
        assert found["requests_waiting"] == found["requests_running"] == 0


def test_decisions_are_refused_where_requests_are_batched():
    with serving("ngram", **BATCHES) as client:
        refused(client, "v1/systemone", DECISION, "without --continuous-batching")
        assert client.complete(PROMPTS[0], 3) == plain(PROMPTS[0], 3)


def test_a_model_of_texts_transcribes_nothing(client):
    until(client.is_idle)
    refused(client, "v1/audio/transcriptions", {}, "no model of speech")
    client.post("reset", {})  # after which no model is loaded
    refused(client, "v1/audio/transcriptions", {}, "no model of speech")


def test_encoder_decoder_models_are_served_if_they_hear(tmp_path):
    encoder_decoders.build("t5", vocab_size=2048).save_pretrained(tmp_path / "t5")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "t5")
    told = "is an encoder-decoder model that hears nothing, .*in Python"
    with pytest.raises(ValueError, match=told), serving("ngram", target=str(tmp_path / "t5")):
        pass
    speech.save(speech.whisper(), tmp_path / "whisper")
    with serving("ngram", target=str(tmp_path / "whisper")):
        pass


# -- POST /reset ------------------------------------------------------------------------------------------------------


def test_a_reset_under_load_spoils_no_answer(client):
    """Each is right; where requests are batched, the model is not taken from those that are there."""

    def ask(number: int) -> None:
        if number % 4 == 3:
            assert client.post("reset", {})[0] in (200, 409)
        else:
            assert client.complete(PROMPTS[number % 2], 12, stream=number % 3 == 0) == plain(PROMPTS[number % 2], 12)

    for prompt in PROMPTS[:2]:
        plain(prompt, 12)
    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(ask, range(12))]) == 12
    until(client.is_idle)


def test_what_is_loaded_after_a_reset_guesses_and_there_is_one_of_it(client):
    until(client.is_idle)
    for _ in range(2):
        assert client.post("reset", {}) == (200, {"status": "ok"})
        assert not client.server._model_manager.loaded_models
        before = client.metrics()
        assert client.complete(PROMPTS[2], 12) == plain(PROMPTS[2], 12)
        until(client.is_idle)
        assert client.metrics()["steps_total"] > before["steps_total"]
        [loaded] = client.server._model_manager.loaded_models.values()
        manager = client.server._generation_state._cb_manager
        assert manager is None or manager._engine.model is loaded.model


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--continuous-batching", "--cb-num-blocks", "200", "--cb-block-size", "32"]])
def test_sigterm_ends_a_server_in_time_and_its_memory_is_kept(options, tmp_path):
    """With half a request, an endless stream and an answer that nobody reads."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "memory.safetensors"
    command = [
        sys.executable,
        "-m",
        "hf_spec",
        "serve",
        TARGET,
        "--speculator",
        "history",
        "--history-file",
        str(file),
    ]
    more = ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--shutdown-seconds", "1", *options]
    process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True, env=os.environ)

    def answers() -> bool:
        try:
            socket.create_connection(("localhost", port)).close()
        except OSError:
            return process.poll() is not None
        return True

    def send(body: dict, half: bool = False) -> socket.socket:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("localhost", port))
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + (data[:9] if half else data))
        return connection

    endless = {"prompt": "Hi", "max_tokens": 10**6, "stream": True, "logit_bias": None}
    try:
        until(answers, 300)
        assert process.poll() is None, process.stderr.read()
        first = send({"prompt": PROMPTS[2], "max_tokens": 20, "temperature": 0})
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connections = [send(endless, half=True), send(endless)]
        assert connections[1].recv(1 << 16).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, process.stderr.read()
        assert file.stat().st_size > 100
        for connection in (first, *connections):
            connection.close()
    finally:
        process.kill()


def test_numbers_are_finite():
    assert all(map(is_number, (0, -1, 2.5, 10**300)))
    assert not any(map(is_number, (True, None, "1", float("nan"), float("inf"), 10**400, [1])))
    assert Policy().max_prompt_tokens < 30_000
