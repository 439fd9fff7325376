"""How processes of a group begin and end in the tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PRELOADED = ["hf_spec.training", "architectures", "datasets", "transformers.trainer"]

# A process that has imported all of it forks those of every group: importing it takes most of a short test's time.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


def environment() -> dict[str, str]:
    """Return the environment of a process that is to find what this one finds, and has one core to itself."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def run_two(folder: Path, code: str, *arguments: str, timeout: int = 120) -> str:
    """Run ``code``, a script in ``folder``, as two processes of a group, and return what they print."""
    script = folder / "worker.py"
    script.write_text(code, encoding="utf-8")
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    members = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():  # the server takes over what is there when the first group begins
            patch.setenv(name, value)
        for rank in ("0", "1"):
            given = environment() | group | {"RANK": rank, "LOCAL_RANK": rank}
            members.append(_server.Process(target=be_member, args=(str(script), list(arguments), given)))
            members[-1].start()
    wait_for(members, time.monotonic() + timeout)
    told = [Path(f"{script}.{stream}.{rank}").read_text(encoding="utf-8") for stream in "oe" for rank in "01"]
    assert [one.exitcode for one in members] == [0, 0], "\n".join(told)[-8000:]
    return "".join(told[:2])


def be_member(script: str, arguments: list[str], given: dict[str, str]) -> None:
    """Run a script as the process of a group that ``given``, its environment, says."""
    for stream, descriptor in (("o", 1), ("e", 2)):
        file = os.open(f"{script}.{stream}.{given['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(given)
    sys.argv = [script, *arguments]
    exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), {"__name__": "__main__"})


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
