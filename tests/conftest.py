"""Settings of the whole test run: one thread per worker, no network, GPU tests only where there is a GPU."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator

# Read by huggingface_hub when it is imported, so it must be set first.
os.environ["HF_HUB_OFFLINE"] = "1"

from typing import Any

import pytest
import simulated_device
import torch
from accelerate.utils import imports

from hf_spec.policy.adaptive import AdaptiveLength
from hf_spec.policy.base import DraftPlan, better_sources

torch.set_num_threads(1)
if simulated_device.is_wanted():
    simulated_device.make()
# Trainer asks in every step whether packages are there that are not, which takes as long as a small forward.
imports._is_package_available = functools.cache(imports._is_package_available)


def first_length(policy: AdaptiveLength, batch_size: int, estimates: Any) -> DraftPlan:
    """Draft in every step as much as in the first one."""
    return DraftPlan(policy.first, better_sources(estimates, batch_size), policy.first)


@pytest.fixture(autouse=True)
def lengths_without_a_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step draft as much as the first one, so that no test depends on how busy the machine is."""
    if request.node.get_closest_marker("clock") is None:
        monkeypatch.setattr(AdaptiveLength, "_choose", first_length)
        monkeypatch.setattr(AdaptiveLength, "keep_drafting", lambda policy, confidence: True)


@pytest.fixture
def seeded() -> Iterator[None]:
    """Draw the same numbers whatever tests came before, and leave no seed to those that follow."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection() -> None:
    gc.disable()  # what is imported stays


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that is imported: Trainer, ``pack`` and engines call it, a second each time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
