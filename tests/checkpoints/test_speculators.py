"""What `inspect` says about the speculators library, against what that library computed with our files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden import tiny_target

from hf_spec.checkpoints.kinds import DRAFT_MODELS
from hf_spec.drafts.files import SPECULATORS, Checkpoint

ENGINES = Path(__file__).parents[2] / "examples" / "engines"
MEASURED: dict[str, Any] = json.loads((ENGINES / "results" / "speculators.json").read_text())["drafts"]
PYTHON = os.environ.get("HF_SPEC_SPECULATORS")


@pytest.mark.parametrize("case", MEASURED)
def test_inspect_objects_to_what_speculators_read_otherwise(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENGINES))
    monkeypatch.syspath_prepend(str(ENGINES.parent))
    from compare_speculators import CASES

    kind, given = CASES[case]
    made = next(one for one in DRAFT_MODELS if one.config_class.speculators_model_type == kind)
    config = made.config_class.for_target(tiny_target().config, **given)
    if "speculators_config" not in given:
        config.speculators_config["verifier"]["name_or_path"] = "some-org/some-target"
    objections = made.engines(config, Checkpoint("", config.to_dict(), {}), SPECULATORS.name)["speculators"]
    assert (objections == []) == MEASURED[case]["equal"]
    assert objections == MEASURED[case]["inspect"]


@pytest.mark.skipif(PYTHON is None, reason="set HF_SPEC_SPECULATORS to the Python of an environment with speculators")
def test_speculators_reads_what_we_write(tmp_path: Path) -> None:
    assert PYTHON is not None
    command = [sys.executable, str(ENGINES / "compare_speculators.py"), "--work", str(tmp_path)]
    subprocess.run([*command, "--speculators", PYTHON], check=True)
    found = json.loads((tmp_path / "speculators.json").read_text())["drafts"]
    assert {case: one["equal"] for case, one in found.items()} == {
        case: one["equal"] for case, one in MEASURED.items()
    }
    assert {case: one["inspect"] for case, one in found.items()} == {
        case: one["inspect"] for case, one in MEASURED.items()
    }
