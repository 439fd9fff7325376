"""The command: check, test, measure part by part, write after every cell, go on where it was stopped."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ...progress import counted
from ...whole_files import write_files
from ..runner import installed_version
from .page import page
from .plan import PART_SECONDS, Part, parts

ROOT = Path(__file__).parents[3]  # the clone, if this is one
RESULTS, PAGE, TESTS = "results.json", "page.md", "tests.txt"
SAME = ("commit", "device", "torch", "transformers", "tiny")  # without which figures stand in no table together
Results = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m hf_spec.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of results.json, page.md and tests.txt")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a trial on a CPU")
    parser.add_argument("--device", help="by default the accelerator; with --tiny the CPU if there is none")
    parser.add_argument("--minutes", type=float, help="begin no further cell after so many minutes; repeat to go on")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these, such as decoding-1b-1")
    parser.add_argument("--cells", nargs="+", metavar="WORDS", help="only cells that name one of these, such as eager")
    parser.add_argument("--again", action="store_true", help="measure finished cells again, and keep the faster call")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    listed = parts(options.tiny, device)
    names = ["tests", *(part.name for part in listed)]
    if options.list:
        print("\n".join(names))
        return
    if unknown := sorted({*(options.parts or ())} - {*names}):
        parser.error(f"--parts {unknown[0]}: choose from {', '.join(names)}")
    if device == "cpu" and not options.tiny:
        parser.error("there is no accelerator, and on a CPU 1 B and 8 B would take days; add --tiny for a trial")
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    results = opened(options.out, environment(device, options.tiny))
    wanted = options.parts or names
    if "tests" in wanted:
        run_tests(options.out, results, device, deadline)
    for part in listed:
        if part.name in wanted:
            run_part(options.out, results, part, deadline, options.cells, options.again)
    print(page(results))
    rest = [] if is_complete(results, names) else ["some is missing"]
    if failed := sum(_has_failed(cell) for part in results["parts"].values() for cell in part["cells"].values()):
        rest.append(f"{counted(failed, 'cell')} failed")
    print(f"{options.out / PAGE}" + (f": {', '.join(rest)}; repeat the command" if rest else ""))


def environment(device: str, tiny: bool) -> Results:
    """Describe machine and versions. Errors: a SystemExit for a device that cannot add two numbers."""
    try:
        assert int((torch.ones(2, device=device) + 1).sum()) == 4
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"{device} does not compute ({error}); what does nvidia-smi say?") from error
    found = {
        "commit": _of_clone("rev-parse", "HEAD") or installed_version("hf-spec"),
        "changed": bool(_of_clone("status", "--porcelain", "--untracked-files=no")),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "triton": installed_version("triton"),  # without it, cells that compile say so
        "tiny": tiny,
    }
    return found


def _of_clone(*command: str) -> str:
    """Return what git says about the clone; "" if this is none: an environment may lie in another repository."""
    return _said("git", "-C", str(ROOT), *command) if (ROOT / ".git").exists() else ""


def _said(*command: str) -> str:
    """Return what a command prints; "" if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def opened(out: Path, here: Results) -> Results:
    """Return the results in ``out`` so far. Errors: a SystemExit if they are of another machine or version."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / RESULTS
    if not file.exists():
        return {"environment": here, "parts": {}}
    results: Results = json.loads(file.read_text(encoding="utf-8"))
    for name in SAME:
        if (before := results["environment"].get(name)) != here[name]:
            raise SystemExit(f"{file} is of {name} {before}, and here it is {here[name]}; choose another --out")
    return results


def save(out: Path, results: Results) -> None:
    """Write raw results and the page, each completely or not at all."""
    write_files({RESULTS: json.dumps(results, indent=1) + "\n", PAGE: page(results)}, out)


def run_part(
    out: Path,
    results: Results,
    part: Part,
    deadline: float,
    words: Sequence[str] | None = None,
    again: bool = False,
) -> None:
    """Measure the cells of ``part`` that are missing, then those that failed, or all ``again``, and save after each.

    With ``words``, only cells that name one of them. Of two measurements of a cell the faster one is kept.
    """
    deadline = min(deadline, time.monotonic() + PART_SECONDS)
    held = results["parts"].setdefault(part.name, {"title": part.title, "cells": {}})
    cells = part.cells()
    for name, measure in sorted(cells, key=lambda cell: _has_failed(held["cells"].get(cell[0]))):
        before = held["cells"].get(name)
        if (before and not again and not _has_failed(before)) or (words and not any(one in name for one in words)):
            continue
        if time.monotonic() > deadline:
            return
        print(f"{part.name}: {name}", file=sys.stderr, flush=True)
        found = _measured(measure) | {"commit": results["environment"].get("commit")}
        held["cells"][name] = min(filter(None, (found, before)), key=_seconds)
        save(out, results)
    held["complete"] = len(held["cells"]) == len(cells)
    save(out, results)


def _measured(measure: Callable[[], Results]) -> Results:
    """Return the figures of one cell; what fails is a result, too, and the other cells go on."""
    begin = time.monotonic()
    try:
        found = measure()
    except Exception as error:  # out of memory, no compiler, a way that this version of transformers lacks
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found | {"wall_seconds": time.monotonic() - begin, "at": time.strftime("%Y-%m-%d %H:%M:%S")}


def _has_failed(cell: Results | None) -> bool:
    """Tell whether a cell was measured in vain, perhaps for want of memory that another process held."""
    return "error" in (cell or {})


def _seconds(cell: Results) -> float:
    return float(cell.get("seconds", "inf"))


def run_tests(out: Path, results: Results, device: str, deadline: float) -> None:
    """Run the tests that are marked ``gpu``, if they and an accelerator are at hand, and keep what pytest says."""
    held = results["parts"].setdefault("tests", {"title": "pytest -m gpu", "cells": {}})
    is_stopped = False
    if held.get("complete") or time.monotonic() > deadline:
        return
    if torch.device(device).type == "cpu":
        held["said"] = "not run: there is no accelerator"
    elif not (ROOT / "tests" / "conftest.py").exists():
        held["said"] = "not run: the tests are in a clone of the repository, and this is an installed package"
    else:
        seconds = min(PART_SECONDS, deadline - time.monotonic())
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
        with open(out / TESTS, "w", encoding="utf-8") as file:
            both: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
            try:
                subprocess.run(command, cwd=ROOT, **both, timeout=seconds, check=False)
                held["said"] = (out / TESTS).read_text(encoding="utf-8").strip().rpartition("\n")[2]
            except subprocess.TimeoutExpired:
                held["said"] = f"stopped after {seconds:.0f} seconds; {TESTS} has what was said until then"
                is_stopped = seconds < PART_SECONDS  # there may be more time in the next run
    held["complete"] = not is_stopped
    save(out, results)


def is_complete(results: Results, names: list[str]) -> bool:
    """Tell whether all parts were measured to their end."""
    return all(results["parts"].get(name, {}).get("complete") for name in names)
