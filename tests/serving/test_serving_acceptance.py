"""The acceptance of a request in its answer: figures by hand, and a server's answers, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.responses import JSONResponse, StreamingResponse
from servers import BATCHES, DRAFT, PROMPTS, TARGET, Client, serving, target

from hf_spec import SpeculationConfig
from hf_spec.cli import main
from hf_spec.metrics import Counts, SpeculationStats
from hf_spec.serving.acceptance import acceptance_of, acceptance_of_request, with_acceptance
from hf_spec.serving.preparing import Preparer

FIXED = SpeculationConfig(num_speculative_tokens=3)
SUMMARY = {"per_request_spec_decode_metrics": "summary"}
PATHS = ("v1/completions", "v1/chat/completions", "v1/responses")
LONG = "Tell me a story."  # the text that follows is longer than any here, also in a chat
PLAIN = {"generation_config": '{"num_beams": 2}'}

# -- figures ----------------------------------------------------------------------------------------------------------


def test_figures_by_hand():
    counts = Counts()
    for proposed, accepted in ((3, 3), (3, 1), (3, 0), (2, 1), (0, 0)):
        counts.add_step(proposed, accepted, accepted + 1, proposed)
    assert acceptance_of(counts) == {
        "mean_acceptance_length": 1 + 5 / 4,  # the step without draft tokens does not count
        "draft_acceptance_rate": 5 / 11,
        "acceptance_histogram": [1, 2, 0, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 11,
        "num_spec_tokens": 3,
    }


def test_without_a_draft_token_there_are_no_figures():
    counts = Counts()
    assert acceptance_of(counts) == {}
    counts.add_step(0, 0, 1, 0)
    assert acceptance_of(counts) == {}


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_the_list_of_steps(seed):
    rng = random.Random(seed)
    counts, steps = Counts(), []
    for _ in range(rng.randrange(1, 30)):
        depth = rng.randrange(5)
        proposed, accepted = depth * rng.randrange(1, 4), rng.randint(0, depth)  # several times its depth: a tree
        counts.add_step(proposed, accepted, accepted + 1, depth)
        steps += [(proposed, accepted, depth)] * (depth > 0)
    found = acceptance_of(counts)
    if not steps:
        assert found == {}
        return
    longest = max(depth for _, _, depth in steps)
    assert found["num_spec_tokens"] == longest
    assert found["acceptance_histogram"] == [sum(held == j for _, held, _ in steps) for j in range(longest + 1)]
    assert found["num_draft_tokens"] == sum(proposed for proposed, _, _ in steps)
    assert found["mean_acceptance_length"] == pytest.approx(sum(held + 1 for _, held, _ in steps) / len(steps))


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_end_in_the_same_moment_get_their_own(stream):
    """All figures are recorded before the first answer is built."""
    lengths = [1, 2, 3, 4]
    assert asyncio.run(recorded_together(lengths, stream)) == lengths


async def recorded_together(lengths: list[int], stream: bool) -> list[int]:
    recorded, everyone = [], asyncio.Event()

    async def handle(length: int) -> Any:
        own = acceptance_of_request()  # in the thread that prepares requests
        await asyncio.sleep(0)
        stats = SpeculationStats(1)
        stats.step([0], [length], [length], [length + 1], [length])
        own.record(stats)
        recorded.append(length)
        if len(recorded) == len(lengths):
            everyone.set()
        await everyone.wait()
        text = json.dumps({"usage": {"completion_tokens": length}}, separators=(",", ":"))
        return StreamingResponse(pieces(f"data: {text}\n\n")) if stream else JSONResponse(json.loads(text))

    async def pieces(event: str) -> Any:
        yield event

    async def ask(length: int) -> int:
        answer = await handled(length)
        found = [piece async for piece in answer.body_iterator] if stream else [answer.body.decode()]
        return json.loads(found[0].removeprefix("data: "))["metrics"]["speculative_decoding"]["num_spec_tokens"]

    handled = with_acceptance(Preparer().around(handle))
    return list(await asyncio.gather(*map(ask, lengths)))


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_by_one() -> Iterator[Client]:
    with serving(config=FIXED, **SUMMARY) as client:
        yield client


@pytest.fixture(scope="module")
def batched() -> Iterator[Client]:
    with serving(config=FIXED, **SUMMARY, **BATCHES) as client:
        yield client


@pytest.fixture(params=["one_by_one", "batched"])
def client(request) -> Client:
    return request.getfixturevalue(request.param)


def request_to(path: str, prompt: str, new: int, **more: Any) -> dict[str, Any]:
    field, length = {"v1/completions": ("prompt", "max_tokens"), "v1/responses": ("input", "max_output_tokens")}.get(
        path, ("messages", "max_tokens")
    )
    given = [{"role": "user", "content": prompt}] if field == "messages" else prompt
    return {"model": TARGET, field: given, length: new, "temperature": 0, "stream": False} | more


def events_of(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer, or the events of its stream."""
    request = urllib.request.Request(
        f"{client.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    if not body["stream"]:
        return [json.loads(text)]
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


def figures_of(events: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Return the figures of an answer, which only its last event has, and the tokens of its text."""
    *others, last = (event.get("response", event) for event in events)
    assert not any("metrics" in event for event in others)
    usage = last["usage"]
    assert set(last["metrics"]) == {"speculative_decoding"}
    return last["metrics"]["speculative_decoding"], usage.get("completion_tokens", usage.get("output_tokens"))


def check(figures: dict[str, Any], tokens: int) -> None:
    """Check that figures belong to a text of so many tokens."""
    assert figures["num_spec_tokens"] <= 3
    # One token comes from the prompt. A step that has one token left does not draft.
    own = figures["num_spec_steps"] + figures["num_accepted_draft_tokens"]
    assert own in (tokens - 1, tokens - 2), (figures, tokens)
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_has_figures(client, path, stream):
    for new in (40, 12):
        events = events_of(client, path, request_to(path, LONG, new, stream=stream))
        figures, tokens = figures_of(events)
        assert tokens == new
        check(figures, tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_figures_are_those_of_generate(one_by_one, stream):
    model, tokenizer = target()
    for prompt in PROMPTS[:2]:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **inputs,
            speculator=str(DRAFT),
            speculation_config=FIXED,
            max_new_tokens=40,
            do_sample=False,
            return_dict_in_generate=True,
        )
        body = request_to(PATHS[0], prompt, 40, stream=stream)
        assert figures_of(events_of(one_by_one, PATHS[0], body))[0] == acceptance_of(out.speculation.counts)


def test_openai_clients_read_them(client):
    options = {"model": TARGET, "prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0}
    answer = client.openai.completions.create(**options)
    *_, last = client.openai.completions.create(**options, stream=True)
    for found in (answer, last):
        assert found.metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_clients_at_the_same_time_get_their_own(client):
    asked = [(path, stream, new) for new in (5, 60) for path in PATHS[:2] for stream in (False, True)]

    def ask(one: tuple[str, bool, int]) -> None:
        path, stream, new = one
        figures, tokens = figures_of(events_of(client, path, request_to(path, LONG, new, stream=stream)))
        assert tokens == new
        check(figures, tokens)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, asked))


@pytest.mark.parametrize("new", [1, 12])
def test_a_plain_text_has_none(one_by_one, new):
    """Neither one with beams, nor one whose only token comes from the prompt; the text before it had figures."""
    events_of(one_by_one, PATHS[0], request_to(PATHS[0], PROMPTS[0], 12))
    more = PLAIN if new > 1 else {}
    [answer] = events_of(one_by_one, PATHS[0], request_to(PATHS[0], PROMPTS[0], new, **more))
    assert "metrics" not in answer and answer["usage"]["completion_tokens"] == new


def test_a_text_may_quote_usage(one_by_one):
    body = request_to(PATHS[0], PROMPTS[0], 12, stream=True, suffix=' "usage":{"x": "é"}')
    events = events_of(one_by_one, PATHS[0], body)
    figures_of(events)
    assert "".join(event["choices"][0]["text"] for event in events).endswith(body["suffix"])


@pytest.mark.parametrize("level", ["detailed", "yes"])
def test_the_command_refuses_other_levels(level, capsys):
    with pytest.raises(SystemExit):
        main(["serve", TARGET, "--per-request-spec-decode-metrics", level])
    assert f"invalid choice: '{level}'" in capsys.readouterr().err
