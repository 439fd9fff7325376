"""What clients may send: values of every kind, as they stand in the body of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import BATCHES, PROMPTS, TARGET, Client, plain, serving, target
from transformers import GPT2Config, GPT2LMHeadModel


@pytest.fixture(scope="module", params=["one_by_one", "batched"])
def client(request) -> Iterator[Client]:
    with serving("ngram", **(BATCHES if request.param == "batched" else {})) as client:
        yield client


ASKED = {
    "completions": {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "responses": {"input": "Hi", "max_output_tokens": 5},
}


@pytest.mark.parametrize(
    ("path", "given", "named"),
    [
        ("completions", {"stream": "false"}, "stream: 'false' is not true or false"),
        ("completions", {"suffix": 3}, "suffix"),
        ("completions", {"prompt": "\ud83d"}, "prompt"),
        ("completions", {"model": "\ud83d"}, "Server is pinned"),
        ("chat/completions", {"messages": [{"role": "user", "content": ["Hi"]}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ("chat/completions", {"tools": 3}, "tools"),
        ("chat/completions", {"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ("responses", {"input": [{"content": "Hi"}]}, "input"),
        ("responses", {"input": ["Hi"]}, "input"),
        ("responses", {"input": [{"type": "reasoning", "content": []}, {"role": "user", "content": "Hi"}]}, "input"),
        ("responses", {"background": True}, "background"),
    ],
)
def test_bad_values_are_refused_by_name(client, path, given, named):
    status, answer = client.post(f"v1/{path}", {"model": TARGET} | ASKED[path] | given)
    assert status == 400 and answer["error"]["message"].startswith(named), answer


@pytest.mark.parametrize(
    "setting",
    [
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": "no"},
        {"eos_token_id": []},
        {"stop_strings": 3},
        {"max_new_tokens": 2.5},
        {"num_beams": "a"},
    ],
)
def test_bad_settings_are_refused_by_name(client, setting):
    [*_, name] = setting
    given = {"model": TARGET, "prompt": PROMPTS[0], "generation_config": json.dumps(setting)}
    status, answer = client.post("v1/completions", given)
    assert status == 400 and answer["error"]["message"].startswith(f"generation_config: {name}: "), answer


def test_whole_numbers_are_numbers(client, request):
    """JavaScript writes 2 for 2.0, and transformers takes no integers there."""
    token = target()[1].encode("dog")[0]
    config = {"temperature": 0, "do_sample": True, "repetition_penalty": 1}
    if "one_by_one" in request.node.name:  # batches take no biases
        config["sequence_bias"] = [[[token], 0]]
    answers = []
    for setting in (config, config | {"temperature": 2}):
        given = {"prompt": PROMPTS[0], "max_tokens": 5, "generation_config": json.dumps(setting)}
        status, answer = client.post("v1/completions", given)
        assert status == 200, answer
        answers.append(answer["choices"][0]["text"])
    assert answers[0] == plain(PROMPTS[0], 5), "a temperature of 0 is greedy"


@pytest.mark.parametrize("path", ASKED)
def test_null_is_as_if_left_out(client, path):
    names = ["stream", "temperature", "top_p", "tools", "generation_config"]
    nulls = dict.fromkeys([*names, "chat_template_kwargs"] if path.startswith("chat") else names[:3])
    assert client.post(f"v1/{path}", {"model": TARGET} | ASKED[path] | nulls)[0] == 200


def test_fields_are_read_as_clients_of_openai_mean_them(client):
    """A list of one prompt is a prompt, an empty list of stop strings stops nowhere, and a stream is asked for."""
    status, answer = client.post(
        "v1/completions", {"prompt": [PROMPTS[0]], "max_tokens": 5, "temperature": 0, "stop": []}
    )
    assert status == 200 and answer["choices"][0]["text"] == plain(PROMPTS[0], 5)
    for prompts in (PROMPTS[:2], [""], [[5, 6]]):
        status, answer = client.post("v1/completions", {"prompt": prompts})
        assert status == 400 and "send a request for each prompt" in answer["error"]["message"]
    assert client.post("v1/chat/completions", {**ASKED["chat/completions"], "logit_bias": {}})[0] == 200
    response = client.openai.responses.create(model=TARGET, input="Hi", max_output_tokens=5)
    assert response.object == "response" and response.output_text
    status, answer = client.post("v1/completions", {"prompt": PROMPTS[0], "frequency_penalty": -2})
    assert status == 400 and "from -0.99 to 99, for it is repetition_penalty - 1 here" in answer["error"]["message"]


@pytest.mark.parametrize("setting", [{"temperature": 1e-38}, {"temperature": 1e-320}, {"top_k": 10**12}])
def test_no_setting_ends_the_engine(client, setting):
    """An error in a step of the engine would be one of all requests, and of those to come."""
    config = json.dumps({"do_sample": True, "max_new_tokens": 5} | setting)
    status, _ = client.post("v1/completions", {"model": TARGET, "prompt": PROMPTS[0], "generation_config": config})
    assert status == (200 if "top_k" in setting else 400)
    assert client.complete(PROMPTS[0], 5) == plain(PROMPTS[0], 5)


def test_requests_may_have_one_id(client):
    """Proxies and clients that try again send ``X-Request-Id``."""
    asked = [{"model": TARGET, "prompt": prompt, "max_tokens": 20, "temperature": 0} for prompt in PROMPTS[:3]]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: client.post("v1/completions", body, **{"X-Request-Id": "one"}), asked))
    for (status, answer), body in zip(answers, asked, strict=True):
        assert (status, answer["id"]) == (200, "one")
        assert answer["choices"][0]["text"] == plain(body["prompt"], 20)


def test_requests_that_wait_keep_their_seeds():
    def ask(seed: int) -> str:
        config = '{"do_sample": true, "max_new_tokens": 20}'
        answer = client.post("v1/completions", {"prompt": PROMPTS[0], "seed": seed, "generation_config": config})[1]
        return answer["choices"][0]["text"]

    with serving("ngram") as client, ThreadPoolExecutor(5) as pool:
        alone = [ask(seed) for seed in range(5)]
        assert list(pool.map(ask, range(5))) == alone
        assert len(set(alone)) > 1


def test_settings_that_are_left_out_are_those_of_generate(client, monkeypatch):
    """Of the model, and of transformers, where ``top_k`` is 50."""
    [loaded] = client.server._model_manager.loaded_models.values()
    given = {"prompt": PROMPTS[0], "generation_config": '{"do_sample": true, "max_new_tokens": 1}'}
    monkeypatch.setattr(loaded.model.generation_config, "temperature", 9.0)
    answers = [client.post("v1/completions", given)[1]["choices"][0]["text"] for _ in range(100)]
    assert 20 < len(set(answers)) <= 50
    monkeypatch.setattr(loaded.model.generation_config, "temperature", 0.001)
    assert client.post("v1/completions", given)[1]["choices"][0]["text"] == plain(PROMPTS[0], 1)


def test_a_length_may_count_the_prompt(client):
    given = {"prompt": PROMPTS[0], "generation_config": '{"max_length": 14}'}
    assert client.post("v1/completions", given)[1]["usage"]["total_tokens"] == 14
    status, answer = client.post("v1/completions", given | {"generation_config": '{"max_length": 3}'})
    assert status == 400 and "max_length" in answer["error"]["message"]


@pytest.mark.parametrize("options", [{}, BATCHES])
def test_a_text_ends_where_the_positions_of_the_model_do(options, tmp_path):
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 1, "bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(GPT2Config(vocab_size=2048, **sizes)).save_pretrained(tmp_path)
    target()[1].save_pretrained(tmp_path)
    with serving("ngram", target=str(tmp_path), **options) as client:
        for given in ({}, {"max_tokens": 500}, {"max_tokens": 9}):
            _, answer = client.post("v1/completions", {"prompt": PROMPTS[0], "temperature": 0} | given)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == (20 if given == {"max_tokens": 9} else 64)
        status, answer = client.post("v1/completions", {"prompt": " a" * 80})
        assert status == 400 and "the prompt has 81 tokens, and the model has room for 64" in answer["detail"]
