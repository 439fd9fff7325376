"""How processes of a group begin and end in the tests."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

COMMAND = "from hf_spec.cli import main\nraise SystemExit(main())"  # ``hf-spec``, for ``run_two`` and ``start``
PRELOADED = ["hf_spec.training", "architectures", "datasets", "transformers.trainer"]

# A process that has imported all of it forks the others: importing it takes most of a short test's time.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


def environment() -> dict[str, str]:
    """Return the environment of a process that is to find what this one finds, and has one core to itself."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def run_two(folder: Path, code: str, *arguments: str, timeout: int = 120) -> str:
    """Run ``code`` as two processes of a group, and return what they print; ``folder`` keeps it."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    members = [start(folder, code, *arguments, **group, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    wait_for(members, time.monotonic() + timeout)
    told = [(folder / f"{stream}.{rank}").read_text(encoding="utf-8") for stream in ("out", "err") for rank in "01"]
    assert [one.exitcode for one in members] == [0, 0], "\n".join(told)[-8000:]
    return "".join(told[:2])


def start(folder: Path, code: str, *arguments: str, **given: str) -> BaseProcess:
    """Begin a process that runs ``code``, and prints into files of ``folder``; ``given`` joins its environment."""
    return forked(be_process, str(folder), code, arguments, environment() | given)


def in_another_process(work: Callable[..., None], *arguments: Any, **options: Any) -> int | None:
    """Run a function of a test module in a process of its own and return its exit code."""
    process = forked(functools.partial(work, **options), *arguments)
    process.join(120)
    return process.exitcode


def forked(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Begin a process, which has no thread of this one: a copy of this one would wait for threads that it has not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():  # the server takes over what is there when the first process begins
            patch.setenv(name, value)
        process = _server.Process(target=work, args=arguments)
        process.start()
    return process


def be_process(folder: str, code: str, arguments: tuple[str, ...], given: dict[str, str]) -> None:
    """Run ``code`` as a script would be run in the environment ``given``."""
    for stream, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{folder}/{stream}.{given.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(given)
    sys.argv = ["script", *arguments]
    exec(compile(code, "script", "exec"), {"__name__": "__main__"})


def wait_for(members: list[BaseProcess], end: float) -> None:
    """Wait until all have ended; one that fails ends the others, and so does the time."""
    while any(one.is_alive() for one in members) and time.monotonic() < end:
        if any(one.exitcode for one in members):
            break
        members[0].join(0.05)
        members[1].join(0.05)
    for one in members:
        one.kill()
        one.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def leave() -> None:
    """End this process once the others of its group are as far, without taking anything down.

    Threads of gloo race with the end of the interpreter: now and then a process that has done all its work aborts.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
