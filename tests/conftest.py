"""Settings of the whole test run: one thread per worker, no network, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Read by huggingface_hub when it is imported, so it must be set first.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import simulated_device
import torch

import hf_spec.decoding.pace
from hf_spec.decoding.pace import Pace

torch.set_num_threads(1)
if simulated_device.is_wanted():
    simulated_device.make()


@pytest.fixture(autouse=True)
def depths_without_a_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step guess as deep as the first one, so that no test depends on how busy the machine is."""
    if request.node.get_closest_marker("clock") is None:
        monkeypatch.setattr(Pace, "_choose", lambda pace, rows: min(pace.first, pace.deepest))
        monkeypatch.setattr(hf_spec.decoding.pace, "Worth", lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
