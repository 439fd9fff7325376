"""A device without hardware: the CPU's memory and kernels, but another device to torch, as strict as an accelerator.

Without a GPU it shows what a GPU would refuse, tensors of two devices in one operator, and what the host waits for.
Once there is one, torch takes it for the accelerator of the machine, in the whole process. So tests that need it have
a process of their own, which ``test_simulated_device.py`` starts. By hand: ``HF_SPEC_SIMULATED_DEVICE=1 pytest FILE``,
or ``=apple`` for one that has no float64, as Apple's have none.
"""

from __future__ import annotations

import os
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root, load

from hf_spec import sampling

NAME = "simulated"
WANTED = "HF_SPEC_SIMULATED_DEVICE"
APPLE = "apple"
LONGEST_BUILD = 600  # seconds

_kernels: Any = None


def is_wanted() -> bool:
    """Tell whether this process was started to run tests on the device."""
    return WANTED in os.environ


def make() -> None:
    """Let ``torch.device("simulated")`` be a device. The first process compiles it, which takes half a minute."""
    global _kernels
    sources = [str(Path(__file__).with_suffix(".cpp"))]
    _kernels = load("simulated_device", sources, extra_cflags=["-O0", "-w"], build_directory=str(_build_directory()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    if os.environ[WANTED] == APPLE:
        _kernels.refuse_float64()
        sampling.WITHOUT_FLOAT64 += (NAME,)


def _build_directory() -> Path:
    """Return where the device is compiled, without the lock of a killed process: torch waits for it forever."""
    directory = Path(get_default_build_root()) / f"simulated_device-{torch.__version__}"
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > LONGEST_BUILD:
        lock.unlink(missing_ok=True)
    return directory


def take_waits() -> list[str]:
    """Say what the host has waited for since the last call: names of operators, "upload" and "to the CPU"."""
    return list(_kernels.take_waits())


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    for name in ("is_available", "is_initialized"):
        setattr(module, name, lambda: True)
    for name in ("synchronize", "empty_cache", "manual_seed_all", "manual_seed"):
        setattr(module, name, lambda *_: None)
    vars(module).update(
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        initial_seed=torch.initial_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module
