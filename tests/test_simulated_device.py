"""What can be known of accelerators without one, in a process that has a simulated one: see ``simulated_device``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from simulated_device import WANTED

HERE = Path(__file__).parent


def test_on_a_simulated_device() -> None:
    files = [HERE / "test_devices.py", HERE / "on_simulated_device.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {WANTED: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *map(str, files)]
    found = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout.splitlines()[-1], found.stdout[-2000:]
