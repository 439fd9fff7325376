"""The command that measures with a GPU runs to its end on a CPU with tiny shapes, and goes on after a kill."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.bench.gpu import command, plan
from hf_spec.bench.gpu.command import RESULTS, main
from hf_spec.bench.gpu.page import made_from, page
from hf_spec.bench.runner import installed_version


def read(out: Path) -> Any:
    return json.loads((out / RESULTS).read_text(encoding="utf-8"))


def killed_after(out: Path, cells: int) -> None:
    """Run the command in a process that is killed once it has saved so many cells of its first part."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process may not use the threads that it had
    process = context.Process(target=main, args=(["--out", str(out), "--tiny"],))
    process.start()
    while process.is_alive():
        if (out / RESULTS).exists():
            parts = read(out)["parts"]
            if len(parts.get("decoding-tiny-1", {"cells": {}})["cells"]) >= cells:
                break
        time.sleep(0.02)
    process.kill()
    process.join()


def test_it_runs_to_its_end_and_goes_on_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    killed_after(tmp_path, 1)
    before = read(tmp_path)
    done = before["parts"]["decoding-tiny-1"]["cells"]
    assert done and "complete" not in before["parts"]["decoding-tiny-1"]
    assert "Not complete" in page(before)
    main(["--out", str(tmp_path), "--tiny"])
    after = read(tmp_path)
    names = ["tests", *(part.name for part in plan.parts(True, "cpu"))]
    assert list(after["parts"]) == names and all(part["complete"] for part in after["parts"].values())
    cells = after["parts"]["decoding-tiny-1"]["cells"]
    assert {name: cells[name] for name in done} == done, "finished cells are not measured again"
    for part in list(after["parts"].values())[1:]:
        assert not [cell["error"] for cell in part["cells"].values() if "error" in cell]
    for name in ("plain, eager", "EAGLE-3, eager", "transformers' assisted, eager"):
        cell = cells[name]
        parts = [cell[f"{what}_seconds"] for what in ("target", "draft", "rest")]
        assert sum(parts) == pytest.approx(cell["seconds"]) and cell["text"] == cells["plain, eager"]["text"]
        assert (parts[1] == 0) == name.startswith("plain")
    assert after["environment"]["commit"] and after["environment"]["torch"] == torch.__version__
    shown = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert shown in capsys.readouterr().out and "Not complete" not in shown
    assert not [*tmp_path.glob(".*")] and "\\*" not in shown
    after["parts"]["decoding-tiny-1"]["cells"]["EAGLE-3, eager"]["commit"] = "feed" * 10
    marked = page(after)
    assert "| EAGLE-3, eager \\* |" in marked and "s) \\* |" in marked and "(\\*: feedfeedfeed)" in made_from(after)
    after = read(tmp_path)
    for table in re.findall(r"(?:^\|.*\|\n)+", shown, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    main(["--out", str(tmp_path), "--tiny"])
    assert read(tmp_path) == after, "nothing is left to do"


def test_some_cells_are_measured_before_the_others(tmp_path: Path) -> None:
    calls: list[str] = []

    def cell(name: str) -> tuple[str, Any]:
        return name, lambda: calls.append(name) or {"error": "none"}

    part = plan.Part("training-x", "One", lambda: [cell("plain, eager"), cell("plain, CUDA graphs")])
    results = command.opened(tmp_path, {"device": "none"})
    for wanted, done in ((["compiled", "graphs"], False), (None, True)):
        command.run_part(tmp_path, results, part, float("inf"), wanted)
        assert results["parts"]["training-x"]["complete"] == done
    assert calls == ["plain, CUDA graphs", "plain, eager", "plain, CUDA graphs"], "what failed comes last"


def test_a_cell_that_is_measured_again_keeps_the_faster_call(tmp_path: Path) -> None:
    """One that failed is measured again by any call."""
    fails = {"error": "none"}
    rounds = iter((fails, fails, {"seconds": 2.0}, {"seconds": 3.0}, fails, {"seconds": 1.0}))
    rest = {"tokens": 1, "width": 1, "tokens_per_second": 1.0, "peak_bytes": None}
    part = plan.Part("training-x", "One", lambda: [("one", lambda: rest | next(rounds))])
    results, kept = command.opened(tmp_path, {"device": "none"}), []
    for again in (False, False, False, True, False, True, True):
        command.run_part(tmp_path, results, part, float("inf"), again=again)
        kept.append(read(tmp_path)["parts"]["training-x"]["cells"]["one"].get("seconds"))
    assert kept == [None, None, 2.0, 2.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("most", [0.5, 60])
def test_tests_that_were_stopped_for_want_of_time_run_again(
    most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that took longer than a part may are left so."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("")
    (tmp_path / "tests" / "test_slow.py").write_text(
        "import time, pytest\n@pytest.mark.gpu\ndef test_it(): time.sleep(60)\n"
    )
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "PART_SECONDS", most)
    monkeypatch.setattr(command, "page", lambda results: "")
    results: dict[str, Any] = {"parts": {}}
    command.run_tests(tmp_path, results, "cuda", time.monotonic() + 1)
    held = results["parts"]["tests"]
    assert "stopped after" in held["said"] and held["complete"] == (most < 1)


def test_a_failing_cell_is_a_result_and_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory | tried to allocate")

    listed = [plan.Part("decoding-x-1", "One", lambda: [("plain, eager", fails)])]
    monkeypatch.setattr(command, "parts", lambda tiny, device: listed)
    main(["--out", str(tmp_path / "early"), "--tiny", "--minutes", "0.0000001"])
    main(["--out", str(tmp_path / "none"), "--tiny", "--parts", "tests"])
    assert list(read(tmp_path / "none")["parts"]) == ["tests"]
    capsys.readouterr()
    main(["--out", str(tmp_path / "all"), "--tiny"])
    assert capsys.readouterr().out.endswith("page.md: 1 cell failed; repeat the command\n")
    cell = read(tmp_path / "all")["parts"]["decoding-x-1"]["cells"]["plain, eager"]
    assert cell["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "| plain, eager | OutOfMemoryError: CUDA out of memory / tried" in page(read(tmp_path / "all"))


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    here = command.environment("cpu", True)
    command.save(tmp_path, command.opened(tmp_path, here))
    assert command.opened(tmp_path, here)["environment"] == here
    command.save(tmp_path, {"environment": here | {"device": "another GPU"}, "parts": {}})
    with pytest.raises(SystemExit, match="is of device another GPU, and here it is cpu; choose another --out"):
        command.opened(tmp_path, here)


def test_a_package_in_the_repository_of_another_has_a_version_and_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", command.ROOT / "tests")  # in a clone, where git would answer
    here = command.environment("cpu", True)
    assert (here["commit"], here["changed"]) == (installed_version("hf-spec"), False)
    assert "Commit unknown, torch" in made_from({"environment": here | {"commit": None}, "parts": {}})


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--device", "cpu"], "add --tiny for a trial"),
        (["--tiny", "--device", "cpu", "--parts", "nonsense"], "--parts nonsense: choose from tests, decoding-tiny-1"),
    ):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), *options])
        assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("tiny", [True, False])
def test_the_plan_has_what_is_wanted(tiny: bool) -> None:
    """Nothing is loaded to list it, so that the list can be read anywhere."""
    listed = {part.name: [name for name, _ in part.cells()] for part in plan.parts(tiny, "cuda")}
    shapes = ["tiny"] if tiny else ["1b", "8b"]
    for shape in shapes:
        single = listed[f"decoding-{shape}-1"]
        assert {"plain, CUDA graphs", "EAGLE-3, compiled", "transformers' assisted, compiled"} <= {*single}
        assert single[0] == "plain, eager", "what the others are compared with comes first"
        assert listed[f"training-{shape}"] == ["seven unrolled steps, FlexAttention"]
        sizes = {int(found) for name in listed[f"trees-{shape}"] for found in re.findall(r"tree of (\d+)", name)}
        assert sizes == ({4, 8} if tiny else {16, 32, 64, 128})
    assert tiny or {f"decoding-{shape}-{batch}" for shape in shapes for batch in (1, 8, 32)} <= listed.keys()
