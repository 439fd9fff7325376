"""What a step takes by shapes, beside operators and instructions of Python that are counted in such steps.

The demo family serves. Weights are left out of both sides: a count does not know how long reading them takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_spec import SpeculationConfig, as_speculator, demo
from hf_spec.decode import draft_length
from hf_spec.decode.draft_length import Situation
from hf_spec.policy import cost
from hf_spec.policy.base import DraftSource
from hf_spec.policy.cost import ModelShape, ShapeCost
from hf_spec.scoring.plain import padded

APART = 0.3  # in plain steps: the estimate is wrong by less
# A block draft's wide products take longer than their operators say: one row took 2.1 plain steps in operators, and
# 2.5 in time. So its estimate may be higher.
HIGHER = {"dspark": 0.6}
VIEWS = frozenset(
    "view _unsafe_view reshape expand unsqueeze squeeze transpose t slice select split as_strided".split()
)
BEGINNINGS = (
    "Once upon a time, there was a little dog", "Tom and Lily went to", "The sun was shining and",
    "One day a girl named", "Ben had a big", "In the forest there", "Mom said that", "A small bird sat",
)  # fmt: skip
KINDS = ["ngram", "vanilla", "eagle3", "medusa", "mtp", "dspark"]


class Operators(TorchDispatchMode):
    """The number of operators that are carried out while the context is open, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


class Instructions:
    """The number of Python's instructions that are carried out in this thread while the context is open."""

    count = 0

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self.trace

    def __enter__(self) -> Instructions:
        gc.disable()  # it would run code for what earlier tests have left
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()


@functools.cache
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.path("target"), dtype=torch.float32)


@functools.cache
def draft(kind: str) -> Any:
    if kind in ("plain", "ngram"):
        return kind
    loader = AutoModelForCausalLM if kind == "vanilla" else AutoModel
    return loader.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32)


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Return the beginnings of stories, which the drafts go on with: their rows advance by different amounts."""
    tokenizer = AutoTokenizer.from_pretrained(demo.path("target"))
    texts = [tokenizer(text).input_ids for text in BEGINNINGS[:rows]]
    return padded(texts, 0, torch.device("cpu"))


@contextlib.contextmanager
def counting_forwards() -> Iterator[list[int]]:
    calls = [0]
    handle = target().register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    yield calls
    handle.remove()


@functools.cache
def counted(kind: str, rows: int, sample: bool, **options: Any) -> tuple[float, float]:
    """Return operators and instructions of a step, without what the call and its prompt take."""
    inputs = prompts(rows)
    found = []
    for counter in (Operators, Instructions):
        counts = []
        for new_tokens in (6, 6, 20):  # what is made once is made by the first call
            torch.manual_seed(1)
            with counter() as count, counting_forwards() as calls:
                target().generate(
                    **inputs, speculator=draft(kind), do_sample=sample, max_new_tokens=new_tokens, eos_token_id=None,
                    pad_token_id=0, **options,
                )  # fmt: skip
            counts.append((count.count, calls[0]))
        (_, (few, some), (many, more)) = counts
        found.append((many - few) / (more - some))
    return found[0], found[1]


def share_counted(kind: str, rows: int, sample: bool, length: int) -> float:
    """Return what is counted of a step with ``length`` draft tokens, in plain steps."""
    step, plain = counted(kind, rows, sample, num_speculative_tokens=length), counted("plain", rows, sample)
    return sum(one / usual for one, usual in zip(step, plain, strict=True)) / 2


def share_estimated(kind: str, rows: int, sample: bool, length: int) -> float:
    """Return what such a step takes by the shapes of target and draft, in plain steps, without their weights."""
    speculator = as_speculator(draft(kind), target())
    config = speculator.settings(SpeculationConfig(num_speculative_tokens=length))
    shapes = draft_length._shape_cost(config, Situation(target(), speculator, sample, rows, 8))

    def weightless(shape: ModelShape) -> ModelShape:
        return dataclasses.replace(shape, parameters=0)

    def drafting(length: int) -> list[ModelShape]:
        return [weightless(one) for one in shapes._draft(length)]

    bare = ShapeCost(weightless(shapes._target), drafting, shapes._nodes, *shapes._machine)
    source = DraftSource.NGRAM if kind == "ngram" else DraftSource.MODEL
    return bare.curve(rows, source)[length] / bare.plain(rows)


def is_near(kind: str, rows: int, sample: bool, length: int) -> bool:
    estimated, found = (share(kind, rows, sample, length) for share in (share_estimated, share_counted))
    return -APART < estimated - found < HIGHER.get(kind, APART)


CASES = [
    (kind, rows, sample, length) for kind in KINDS for rows in (1, 8) for sample in (False, True) for length in (2, 5)
]
USUAL = [("mtp", 8, True, 5), ("vanilla", 1, False, 5)]  # the rest repeats them: tracing each instruction is slow


@pytest.mark.parametrize(
    ("kind", "rows", "sample", "length"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one not in USUAL)) for one in CASES],
)
def test_shapes_say_what_is_counted(kind: str, rows: int, sample: bool, length: int) -> None:
    assert is_near(kind, rows, sample, length)


def test_an_estimate_of_forwards_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERIFYING", "DRAFTING", "UNEQUAL"):
        monkeypatch.setattr(cost, name, 0.0)
    assert not is_near("mtp", 8, True, 5)


if __name__ == "__main__":  # python tests/policy/test_counted_cost.py: print both for all kinds
    torch.set_num_threads(1)
    for case in CASES:
        print(*case, f"estimated {share_estimated(*case):.2f} counted {share_counted(*case):.2f}", flush=True)
