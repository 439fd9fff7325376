"""``hf-spec chat``: what is said, what is remembered, and what an interrupted answer leaves."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from architectures import LONG_ROPE, build
from servers import DRAFT, TARGET, plain, target
from transformers import TextStreamer

from hf_spec.cli import main

ASKED, AGAIN = "Tell me a story, Zo\xeb.", "Tell me another one."
BEGIN = "{{ bos_token }}"  # of the model's chat template
COMMAND = ["chat", TARGET, "--speculator", str(DRAFT), "--max-new-tokens", "24", "--temperature", "0"]


@pytest.fixture
def talk(monkeypatch, capsys) -> Callable[..., list[str]]:
    """Say lines to the command and return what it writes."""

    def say(*lines: str, options: tuple[str, ...] = (), model: str = TARGET) -> list[str]:
        said = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said), "cp1252"))
        assert main(["chat", model, *COMMAND[2:], "--dtype", "float32", *options]) == 0
        return capsys.readouterr().out.splitlines()

    return say


def answer(*said: str, before: str = "") -> str:
    """Return what plain ``generate`` answers, where user and assistant have ``said`` something by turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    prompt = target()[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return plain(prompt.replace("<|begin|>", f"<|begin|>{before}", 1), 24)


def with_template(folder: Path, template: str | None) -> str:
    """Return the target with another chat template, or none."""
    for file in Path(TARGET).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(folder)


def test_answers_follow_what_was_said(talk):
    first = answer(ASKED)
    second = answer(ASKED, first, AGAIN)
    assert talk(ASKED, "", AGAIN) == [first, second]
    assert answer(AGAIN) != second


def test_reset_forgets_what_was_said(talk):
    first = answer(ASKED)
    assert talk(ASKED, "/reset", ASKED, "/exit", ASKED) == [first, first]


def test_the_system_message_stays(talk, tmp_path):
    system = "Ben and Ben and Ben and Ben and"
    own = Path(TARGET, "chat_template.jinja").read_text(encoding="utf-8")
    system_first = "{{ messages[0].content }}{% set messages = messages[1:] %}"
    model = with_template(tmp_path, own.replace(BEGIN, BEGIN + system_first, 1))
    first = answer(ASKED, before=system)
    assert first != answer(ASKED)
    assert talk(ASKED, "/reset", ASKED, options=("--system", system), model=model) == [first, first]


def test_a_template_that_knows_no_system_message_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(ASKED))
    assert main([*COMMAND, "--system", "Be brief."]) == 1
    assert "does not take this chat: This template knows the roles user" in capsys.readouterr().err


def test_stats(talk):
    lines = talk("/stats", ASKED, "/stats", ASKED, "/stats")
    assert lines[0] == "no answer was generated yet"
    assert lines[1:3] == [answer(ASKED), "the last answer:"]
    assert lines.count("all 2 answers:") == 1
    assert sum("accept" in line for line in lines) >= 3


def test_commands_are_told(talk):
    lines = talk("/help", "/rest")
    assert "/reset" in lines[0] and lines[2] == "/rest is not a command"


@pytest.mark.parametrize(
    ("model", "new", "told"),
    [
        ("gpt2", 500, "the target has positions for 48; shorten it"),
        ("llama", 20, "may reach 70; generate without `speculator`"),
    ],
)
def test_a_chat_goes_on_where_the_positions_of_the_model_end(talk, tmp_path, model, new, told):
    """Or where its rotary frequencies would change."""
    rope = LONG_ROPE | {"rope_type": "dynamic"}
    ends = {"gpt2": {"n_positions": 48}, "llama": {"max_position_embeddings": 48, "rope_parameters": rope}}
    build(model, vocab_size=2048, **ends[model]).save_pretrained(tmp_path)
    target()[1].save_pretrained(tmp_path)
    options = ("--speculator", "ngram", "--max-new-tokens", str(new))
    said = talk(ASKED, AGAIN, "/reset", ASKED, model=str(tmp_path), options=options)
    refused = next(i for i, line in enumerate(said) if line.endswith(", or /reset starts a new chat)"))
    assert re.search(f"{told}, or", said[refused])
    assert said[:refused] == said[refused + 1 :] != []


def test_an_interrupted_answer_is_kept_as_far_as_it_was_said(talk, monkeypatch):
    puts = []
    put = TextStreamer.put

    def interrupted(self, value):
        puts.append(value)
        if len(puts) == 9:
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    began, stopped, second = talk(ASKED, AGAIN)
    assert stopped == "(stopped)"
    assert began and answer(ASKED).startswith(began) and began != answer(ASKED)
    assert second == answer(ASKED, began, AGAIN)


def test_ctrl_c_between_answers_ends_nothing(talk, monkeypatch):
    lines = iter([KeyboardInterrupt, ASKED])

    def read(_prompt: str = "") -> str:
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert talk()[1:] == ["(Ctrl-D or /exit ends the chat)", answer(ASKED)]


def test_a_model_without_a_chat_template_is_refused(capsys, tmp_path):
    model, prompts = with_template(tmp_path, None), tmp_path / "prompts"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    many = ["--chat", "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    for command, *more in (["chat"], ["generate", "--chat", "--prompt", "a"], ["generate", *many]):
        assert main([command, model, *COMMAND[2:], *more]) == 1
        assert "has no chat template; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_signal_stops_an_answer_and_not_the_program():
    command = [sys.executable, "-u", "-m", "hf_spec", *COMMAND[:4], "--max-new-tokens", "900", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdin.write(f"{ASKED}\n")
        process.stdin.flush()
        process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate("/stats\n", timeout=120)
        assert out.endswith("(stopped)\nno answer was generated yet\n")
        assert process.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
