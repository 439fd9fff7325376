"""How processes of a group begin and end in the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def environment() -> dict[str, str]:
    """Return the environment of a process that is to find what this one finds, and has one core to itself."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def run_two(folder: Path, code: str, *arguments: str, timeout: int = 120) -> str:
    """Run ``code``, a script in ``folder``, as two processes of a group, and return what they print."""
    script = folder / "worker.py"
    script.write_text(code, encoding="utf-8")
    command = [*TWO_PROCESSES, str(script), *arguments]
    done = subprocess.run(command, check=True, timeout=timeout, env=environment(), stdout=subprocess.PIPE, text=True)
    return done.stdout


def leave() -> None:
    """End this process once the others of its group are as far, without taking anything down.

    Threads of gloo race with the end of the interpreter: now and then a process that has done all its work aborts.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
