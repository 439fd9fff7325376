"""How processes of a group begin and end in the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

import hf_spec


def environment() -> dict[str, str]:
    """Return the environment of a process that is to find this package, and has one core to itself."""
    return {**os.environ, "PYTHONPATH": str(Path(hf_spec.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def leave() -> None:
    """End this process once the others of its group are as far, without taking anything down.

    Threads of gloo race with the end of the interpreter: now and then a process that has done all its work aborts.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
