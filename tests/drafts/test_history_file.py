"""``--history-file``: what one run of a command wrote, the next one remembers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from groups import COMMAND, start
from transformers import AutoTokenizer

from hf_spec import NgramSpeculator, demo
from hf_spec.cli import main
from hf_spec.drafts.ngram.history_file import read_history

TARGET = str(demo.path())
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
PROMPT = "Once upon a time, there was a little dog"
OPTIONS = ["--max-new-tokens", "24", "--temperature", "0", "--dtype", "float32", "--device", "cpu"]
OPTIONS += ["--num-speculative-tokens", "8"]


def texts(file: Path) -> list[str]:
    return [TOKENIZER.decode(one, skip_special_tokens=True) for one in read_history(file, TOKENIZER).texts()]


@pytest.mark.parametrize("speculator", ["history", f"history+{demo.path('draft-medusa')}"], ids=["alone", "draft"])
def test_the_second_run_copies_the_first(speculator: str, tmp_path: Path, capsys: Any) -> None:
    file, said = tmp_path / "memory.safetensors", []
    call = ["generate", TARGET, "--speculator", speculator, "--prompt", PROMPT, *OPTIONS]
    for more in ([], ["--history-file", str(file)], ["--history-file", str(file)]):
        assert main([*call, *more]) == 0
        out, err = capsys.readouterr()
        said.append((out, int(err.split("SpeculationStats: ")[1].split(" steps gave ")[0])))
    assert said[0] == said[1]  # a file that is not there yet changes nothing
    assert said[2][0] == said[0][0] and said[2][1] < said[0][1]
    assert len({*texts(file)}) == 1 and texts(file)[0].startswith(PROMPT)


def test_answers_of_a_file_of_prompts_are_remembered(tmp_path: Path) -> None:
    file, prompts = tmp_path / "memory.safetensors", tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": one}) for one in (PROMPT, "Tom and Lily")), encoding="utf-8")
    call = ["generate", TARGET, "--speculator", "history", "--prompts", str(prompts), "--history-file", str(file)]
    assert main([*call, "--out", str(tmp_path / "out.jsonl"), *OPTIONS]) == 0
    assert len(texts(file)) == 2


def test_a_larger_memory_loses_nothing(tmp_path: Path) -> None:
    file, larger = tmp_path / "memory.safetensors", NgramSpeculator(history_size=150_000)
    generator = random.Random(0)
    larger.learn([[generator.randrange(1, 2000) for _ in range(1000)] for _ in range(120)])
    larger.save(file, TOKENIZER)
    before = read_history(file, TOKENIZER)
    assert len(before.tokens) > 100_000  # what the command would remember by itself
    call = ["generate", TARGET, "--speculator", "history", "--prompt", PROMPT, "--history-file", str(file)]
    assert main([*call, *OPTIONS]) == 0
    after = read_history(file, TOKENIZER)
    assert after.size == 150_000 and after.tokens[: len(before.tokens)] == before.tokens


def test_a_chat_is_remembered_that_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.safetensors"
    lines = iter(["Tell me a story."])

    def read(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise RuntimeError("the terminal is gone")
        return line

    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        main(["chat", TARGET, "--speculator", "history", "--history-file", str(file), *OPTIONS])
    assert "Tell me a story." in texts(file)[0]


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize(
    ("speculator", "cure"),
    [
        ("ngram", "--speculator ngram uses none: take --speculator history\n"),
        (
            "auto",
            "--speculator auto, which stands where none is given, may take a draft that uses none: take --speculator "
            "history, or history+auto\n",
        ),
        ("mtp", "--speculator mtp uses none: take --speculator history, or history+mtp\n"),
    ],
)
def test_a_file_without_a_history_is_refused(
    command: str, speculator: str, cure: str, tmp_path: Path, capsys: Any
) -> None:
    call = [command, TARGET, "--speculator", speculator, "--history-file", str(tmp_path / "memory")]
    assert main([*call, *(["--prompt", PROMPT] if command == "generate" else [])]) == 1
    assert f"--history-file keeps earlier texts, and {cure}" in capsys.readouterr().err


def test_a_memory_of_another_tokenizer_is_refused_and_stays(tmp_path: Path, capsys: Any) -> None:
    file, other = tmp_path / "memory.safetensors", AutoTokenizer.from_pretrained(TARGET)
    other.add_tokens(["<another>"])
    memory = NgramSpeculator(history_size=100)
    memory.learn([[1, 2, 3]])
    memory.save(file, other)
    before = file.read_bytes()
    call = ["generate", TARGET, "--speculator", "history", "--prompt", PROMPT, "--history-file", str(file), *OPTIONS]
    assert main(call) == 1
    assert "tokenizer" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="processes there are not asked to end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_keeps_its_memory(number: int, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    file = tmp_path / "memory.safetensors"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = ["serve", TARGET, "--speculator", "history", "--history-file", str(file)]
    server = start(tmp_path, COMMAND, *call, "--port", str(port), "--host", "127.0.0.1", "--device", "cpu")
    try:
        answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", server)
        os.kill(server.pid or 0, number)
        server.join(60)
    finally:
        server.kill()
    assert answer in texts(file)[0]


def ask(url: str, server: BaseProcess) -> str:
    """Return a server's answer, once it is up."""
    question = {"model": TARGET, "messages": [{"role": "user", "content": "A dog"}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(question).encode(), {"Content-Type": "application/json"})
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                found: str = json.load(response)["choices"][0]["message"]["content"]
                return found
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        assert server.is_alive() and time.monotonic() < end, "the server never came"
        time.sleep(0.2)


def test_threads_count_no_signals() -> None:
    """The option works where commands are called outside of the main thread, too."""
    from concurrent.futures import ThreadPoolExecutor

    from hf_spec.cli.history_file import _exit_on_sigterm

    def inside() -> bool:
        with _exit_on_sigterm():
            return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result()


def test_a_history_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no history .*absent; pass a file that"):
        NgramSpeculator.load(tmp_path / "absent", None)
