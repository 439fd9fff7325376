"""What can be known of accelerators without one, in a process that has a simulated one: see ``simulated_device``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_device import APPLE, WANTED

HERE = Path(__file__).parent


DRAWING = "training or drawn or exact or processors"  # what asks for the most precise numbers there are


EVERYTHING = "not defaults"  # test_defaults_of_torch_change_nothing takes no device


@pytest.mark.parametrize(("kind", "only"), [("1", EVERYTHING), (APPLE, DRAWING)])
def test_on_a_simulated_device(kind: str, only: str) -> None:
    files = [str(HERE / name) for name in ("test_devices.py", "on_simulated_device.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {WANTED: kind}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-k", only, *files]
    found = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout.splitlines()[-1], found.stdout[-2000:]
