"""What can be known of accelerators without one, in a process that has a simulated one: see ``simulated_device``."""

from __future__ import annotations

from pathlib import Path

import pytest
from groups import start
from simulated_device import APPLE, WANTED

HERE = Path(__file__).parent
TESTS = """
import os, sys, pytest
for name in [name for name in os.environ if name.startswith("PYTEST")]:
    del os.environ[name]
os.chdir(sys.argv[1])
raise SystemExit(pytest.main(sys.argv[2:]))
"""
# What asks for the most precise numbers there are, and training, which is the same on both devices.
PRECISE = "training or drawn or exact or processors or bits_of_a_row"
# What takes no device, and graphs that draw: the other device, with less precise numbers, has them.
OTHERS = "not defaults and not training and not (drawn and graphs)"


@pytest.mark.parametrize(("kind", "only"), [("1", OTHERS), (APPLE, PRECISE)])
def test_on_a_simulated_device(kind: str, only: str, tmp_path: Path) -> None:
    files = [str(HERE / name) for name in ("test_devices.py", "on_simulated_device.py")]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-k", only]
    process = start(tmp_path, TESTS, str(HERE.parent), *options, *files, **{WANTED: kind})
    process.join(1500)
    if process.is_alive():  # torch waits forever for the lock of a build that was killed
        process.kill()
        process.join()
    found = [(tmp_path / f"{stream}.0").read_text(encoding="utf-8") for stream in ("out", "err")]
    assert process.exitcode == 0, found[0][-8000:] + found[1][-2000:]
    summary = next(line for line in reversed(found[0].splitlines()) if " passed" in line)
    assert "skipped" not in summary, found[0][-2000:]
