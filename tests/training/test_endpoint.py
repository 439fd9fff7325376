"""A server answers the conversations of a dataset: as the target would here, over interruptions and refusals."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import TARGET, Client, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.cli import main
from hf_spec.training import Endpoint, regenerate
from hf_spec.training.endpoint import Refused, map_in_threads, request_of

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "progress": False}


def chat(question: str, *more: str) -> list[dict[str, str]]:
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": "No."}] for one in (question, *more)]
    return [message for turn in turns for message in turn]


CHATS = [chat(f"Tell me a story about {what}.", *more) for what, more in (
    ("a dog", ()), ("a cat", ("And then?", "Why?")), ("the sea", ()), ("Tom", ("Who is he?",)), ("a bird", ()),
)]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(speculator="ngram") as client:
        yield client


def rows(path: Path) -> list[Any]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_server_gives_the_targets_own_answers(client: Client, tmp_path: Path) -> None:
    """The slow twin: the target, loaded here, answers one conversation after the other."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    here = regenerate(CHATS, model.float(), tokenizer, tmp_path / "here.jsonl", batch_size=1, **GREEDY)
    server = Endpoint(f"{client.url}/v1", TARGET)
    there = regenerate(CHATS, server, None, tmp_path / "there.jsonl", batch_size=4, **GREEDY)
    assert rows(there) == rows(here)
    with pytest.raises(ValueError, match="are those of the target here, and a server would go on: repeat the call"):
        regenerate(CHATS, server, None, here, **GREEDY)
    assert any(message.get("cut") for row in rows(there) for message in row)


def test_an_interrupted_call_goes_on_and_other_answers_are_not_mixed_in(client: Client, tmp_path: Path) -> None:
    server = Endpoint(f"{client.url}/v1", TARGET)
    path = regenerate(CHATS, server, None, tmp_path / "answers.jsonl", **GREEDY)
    whole = path.read_text(encoding="utf-8")
    path.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"messages": [{"ro', encoding="utf-8")
    asked: list[Any] = []
    answer = server.answer
    server.answer = lambda *given: asked.append(given) or answer(*given)  # type: ignore[method-assign]
    regenerate(CHATS, server, None, path, **GREEDY)
    assert path.read_text(encoding="utf-8") == whole
    assert len(asked) == 4  # the turns of the last three
    with pytest.raises(ValueError, match="max_tokens was 12, not 13"):
        regenerate(CHATS, server, None, path, **GREEDY | {"max_new_tokens": 13})
    with pytest.raises(ValueError, match="model was"):
        regenerate(CHATS, Endpoint(f"{client.url}/v1", "another"), None, path, **GREEDY)


def test_the_command_asks_a_server(client: Client, tmp_path: Path, capsys: Any) -> None:
    data, answers = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in CHATS), encoding="utf-8")
    call = ["prepare", str(data), str(tmp_path / "rows"), "--target", TARGET, "--held-out", "0", "--temperature", "0"]
    call += ["--endpoint", f"{client.url}/v1", "--max-new-tokens", "12"]
    assert main(call) == 1
    assert "--endpoint needs --regenerate FILE" in capsys.readouterr().err
    assert main([*call, "--regenerate", str(answers)]) == 0
    assert "train: 5 examples" in capsys.readouterr().out
    assert len(rows(answers)) == 5 and (tmp_path / "rows").is_dir()


class Stubborn(Endpoint):
    """Refuse what has a certain word in it: no server of ours refuses one conversation and takes the next."""

    def __init__(self, refused: str) -> None:
        super().__init__("http://localhost:1/v1", "m", retries=0)
        self.refused = refused

    def answer(self, messages: Any, arguments: Any, options: Any) -> tuple[str, bool]:
        if re.search(self.refused, messages[0]["content"]):
            raise Refused("too long")
        return "Yes.", False


def test_conversations_that_are_refused_are_skipped(tmp_path: Path) -> None:
    path = regenerate(CHATS, Stubborn("dog|sea"), None, tmp_path / "some.jsonl", **GREEDY)
    assert [bool(row) for row in rows(path)] == [False, True, False, True, True]
    few = regenerate(CHATS, Stubborn(""), None, tmp_path / "few.jsonl", **GREEDY)
    assert rows(few) == [[]] * 5
    with pytest.raises(ValueError, match="refused the first 16 conversations: too long"):
        regenerate(CHATS * 4, Stubborn(""), None, tmp_path / "all.jsonl", **GREEDY)
    assert rows(tmp_path / "all.jsonl") == []


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"http://localhost:1/v1 cannot be reached .* answers are kept"):
        regenerate(CHATS, Endpoint("http://localhost:1/v1", "m", retries=0), None, tmp_path / "x.jsonl", **GREEDY)


def test_options_of_generate_are_sent_under_their_names_there() -> None:
    arguments = {"tools": [{"type": "function"}], "enable_thinking": False}
    options = {"max_new_tokens": 7, "do_sample": True, "temperature": 0.6, "top_k": 20}
    assert request_of(arguments, options) == {
        "max_tokens": 7,
        "temperature": 0.6,
        "tools": [{"type": "function"}],
        "extra_body": {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}},
    }
    assert request_of({}, {"max_new_tokens": 7, "do_sample": False}) == {"max_tokens": 7, "temperature": 0.0}
    with pytest.raises(ValueError, match="a speculator of its own"):
        request_of({}, {"speculator": "ngram"})


def test_several_are_asked_at_once_and_answered_in_order() -> None:
    together = threading.Barrier(4, timeout=30)

    def wait(number: int) -> int:
        together.wait()  # until four are at work
        return number

    taken: list[int] = []
    found = map_in_threads(wait, (taken.append(number) or number for number in range(40)), 4)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    assert len(taken) < 16
    assert list(found) == list(range(4, 40))


def test_an_error_ends_what_waits() -> None:
    begun: list[int] = []

    def fail(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise ConnectionError
        return number

    with pytest.raises(ConnectionError):
        list(map_in_threads(fail, range(100), 2))
    assert len(begun) < 20


def test_nothing_waits_for_running_requests_after_an_error() -> None:
    """Nor when Python ends, which joins all threads but daemons."""
    runs, goes_on, before = threading.Event(), threading.Event(), {*threading.enumerate()}

    def fail(number: int) -> None:
        if number == 0:
            assert runs.wait(timeout=5)
            raise ConnectionError
        runs.set()
        goes_on.wait(timeout=5)

    begun = time.monotonic()
    with pytest.raises(ConnectionError):
        list(map_in_threads(fail, range(2), 2))
    assert time.monotonic() - begun < 4
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)
    goes_on.set()


@pytest.mark.parametrize("lost", ["tool_calls", "reasoning_content", "reasoning"])
def test_answers_without_what_a_parser_took_out_are_refused(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft would learn an answer that the target never gives."""
    message = SimpleNamespace(content="It is four.", **{lost: "two and two"})
    said = SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])
    server = Endpoint("http://localhost:1/v1", "m")
    monkeypatch.setattr(server._client.chat.completions, "create", lambda **options: said)
    with pytest.raises(Refused, match=f"taken {lost} out of the answer"):
        server.answer(chat("2+2?")[:1], {}, {})
    setattr(message, lost, None)
    assert server.answer(chat("2+2?")[:1], {}, {}) == ("It is four.", False)
