"""What clients may send: values of every kind, as they stand in the body of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import BATCHES, PROMPTS, TARGET, Client, plain, serving


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


@pytest.mark.parametrize("path", ASKED)
def test_null_is_as_if_left_out(client, path):
    names = ["stream", "temperature", "top_p", "tools", "generation_config"]
    nulls = dict.fromkeys([*names, "chat_template_kwargs"] if path.startswith("chat") else names[:3])
    if path == "responses":
        nulls["stream"] = False  # left out, this endpoint streams
    assert client.post(f"v1/{path}", {"model": TARGET} | ASKED[path] | nulls)[0] == 200


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
