"""The simulated device is as strict as an accelerator, and steps make the host wait for it as seldom as plain ones do.

Run by ``test_simulated_device.py``.
"""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import prompts
from lengths import force_lengths
from pairs import each_value
from simulated_device import NAME, take_waits
from test_operators import NEW_TOKENS, models
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer
from twins import Oracle, target

from hf_spec import AcceptedTokens, Proposal, SpeculationConfig, SpeculationStats
from hf_spec.batching.drafting import Row, accepted_of
from hf_spec.decode.sequences import Sequences
from hf_spec.device_tensors import to_device, to_list
from hf_spec.scoring.recurrent import Branches, States
from hf_spec.verify.stopping import StopChecker

THERE = torch.device(NAME)


# -- the device itself ------------------------------------------------------------------------------------------------


def refused() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    return {
        "add": lambda there, here: there + here,
        "cat": lambda there, here: torch.cat([there, here]),
        "where": lambda there, here: torch.where(there > 0, there, here),
        "gather": lambda there, here: there.gather(0, here.long()),
        "in place": lambda there, here: here.mul_(there),
    }


@pytest.mark.parametrize("name", refused())
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    here = torch.ones(3)
    with pytest.raises(RuntimeError, match="device"):
        refused()[name](here.to(THERE), here)


WAITING: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "an operator": (lambda there: (there * 2 + 1).softmax(0).sum(), []),
    "a number": (lambda there: there.sum().item(), ["aten::_local_scalar_dense"]),
    "a decision": (lambda there: bool((there > 0).all()), ["aten::_local_scalar_dense"]),
    "a list": (lambda there: there.tolist(), ["to the CPU"]),
    "a mask": (lambda there: there[there > 1], ["aten::nonzero"]),
    "an upload": (lambda there: torch.tensor([1, 2]).to(there.device), ["upload"]),
    "a tensor made there": (lambda there: torch.tensor([1, 2], device=there.device), ["upload"]),
    "an upload from pinned memory": (lambda there: to_device([1, 2], there.device), []),
    "what was uploaded": (lambda there: to_list(to_device([1, 2], there.device)), []),
    "what was not": (lambda there: to_list(there), ["to the CPU"]),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_are_counted(name: str) -> None:
    act, expected = WAITING[name]
    there = torch.arange(3.0).to(THERE)
    take_waits()
    act(there)
    assert take_waits() == expected


def test_guesses_on_another_device_are_found() -> None:
    class Elsewhere(Oracle):
        def drafter(self, request: Any) -> Any:
            drafter = super().drafter(request)
            propose = drafter.propose

            def on_the_cpu(news: AcceptedTokens, limit: int) -> Proposal:
                return propose(news, limit).to(torch.device("cpu"))

            drafter.propose = on_the_cpu  # type: ignore[method-assign]
            return drafter

    model, inputs = there(target()), {name: tensor.to(THERE) for name, tensor in prompts(3).items()}
    text = model.generate(**inputs, max_new_tokens=8)
    with pytest.raises(RuntimeError, match="device"):
        model.generate(**inputs, max_new_tokens=8, speculator=Elsewhere(text))


@pytest.mark.parametrize("sample", [False, True])
def test_prompts_may_lie_on_the_cpu(sample: bool) -> None:
    """transformers moves them; texts come back where prompts are."""
    model, inputs = there(target()), prompts(2)
    texts = []
    for given in ({}, {"speculator": "plain"}, {"speculator": "ngram"}):
        torch.manual_seed(0)
        exact = {"speculation_config": SpeculationConfig(verification="exact")} if given else {}
        texts.append(model.generate(**inputs, max_new_tokens=8, do_sample=sample, **given, **exact))
    assert texts[0].device.type == "cpu"
    assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])


def test_plain_steps_compute_experts_as_plain_generate_does() -> None:
    model, inputs = there(target("qwen2_moe")), {name: tensor.to(THERE) for name, tensor in prompts(1).items()}
    ways: list[str] = []
    model.register_forward_hook(lambda *_: ways.append(model.config._experts_implementation))
    plain = ["grouped_mm"] + ["batched_mm"] * 3
    for options, wanted in (({}, plain), ({"speculator": "plain"}, plain), ({"speculator": "ngram"}, ["grouped_mm"])):
        fixed = {"num_speculative_tokens": 3} if wanted != plain else {}
        for _ in range(2):  # a first call checks the target
            ways.clear()
            model.generate(**inputs, do_sample=False, max_new_tokens=4, **options, **fixed)
        assert ways[: len(wanted)] == wanted
    assert model.config._experts_implementation == "grouped_mm"


# -- waits of a step --------------------------------------------------------------------------------------------------


def there(model: Any) -> Any:
    return copy.deepcopy(model).to(THERE) if isinstance(model, PreTrainedModel) else model


def waits_per_step(draft: str, rows: int, tree: bool = False, sample: bool = False) -> float:
    """Return the waits for each forward of the target, without those for the prompt."""
    model, drafts = there(models()[0]), models()[1]
    shape = {"tree": "dynamic", "num_tree_tokens": 24, "tree_topk": 4} if tree else {}
    options: dict[str, Any] = {"do_sample": sample}
    if (speculator := there(drafts[draft])) is not None:
        config = SpeculationConfig(num_speculative_tokens=5, **shape)
        options |= {"speculator": speculator, "speculation_config": config}
    ids = torch.randint(5, 512, (rows, 24), generator=torch.Generator().manual_seed(1)).to(THERE)
    found, calls = collections.Counter[int](), collections.Counter[int]()
    model.register_forward_pre_hook(lambda *_: calls.update([length]))
    for length in (1, 1, NEW_TOKENS, NEW_TOKENS):  # what is made once is made by the first call
        torch.manual_seed(0)
        calls[length] = 0
        take_waits()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **options)
        found[length] = len(take_waits())
    steps = calls[NEW_TOKENS] - calls[1]
    assert steps > 3
    return (found[NEW_TOKENS] - found[1]) / steps


CEILINGS = {  # waits a step of 1 and of 8 rows
    ("plain", False, False): (1.0, 1.0),
    ("plain", False, True): (1.0, 1.0),
    ("n-gram", False, False): (1.3, 1.3),
    ("vanilla", False, False): (1.2, 1.2),
    ("eagle3", False, False): (1.2, 1.2),
    ("eagle3", False, True): (1.2, 1.2),
    ("eagle3", True, False): (1.2, 1.2),
    ("eagle3", True, True): (2.2, 2.2),
}


@pytest.mark.parametrize(("call", "rows"), each_value(CEILINGS, [1, 8]))
def test_a_step_waits_seldom(call: tuple[str, bool, bool], rows: int) -> None:
    draft, tree, sample = call
    assert waits_per_step(draft, rows, tree, sample) <= CEILINGS[call][rows > 1]


def test_states_are_moved_without_waiting() -> None:
    layer = types.SimpleNamespace(conv_states={0: torch.zeros(3, 2)}, recurrent_states={0: torch.zeros(3, 2)})
    for states in vars(layer).values():
        states[0] = states[0].to(THERE)
    take_waits()
    branches = Branches(layer, 0, 3)
    for parents in ([-1, -1, -1], [0, 0, 0], [0, 0, -1]):
        branches.read_after(parents)
        layer.conv_states[0] += 1
        branches.add_node()
    branches.commit([1, 2, -1])
    States([layer]).settle([True, False, True])
    assert take_waits() == []
    assert layer.conv_states[0][:, 0].tolist() == [2, 2, 0]


def test_an_engines_drafters_are_told_without_waiting() -> None:
    asked = [types.SimpleNamespace(generated_tokens=tokens) for tokens in ([5, 6], [7])]
    rows = [Row(str(one), one, SpeculationStats(1)) for one in asked]
    take_waits()
    told = accepted_of(rows, THERE)
    assert (told.amounts, told.emitted) == ([2, 1], [[5, 6], [7]])
    assert take_waits() == []
    assert told.tokens.tolist() == [[5, 6], [7, 0]]


def test_all_tokens_of_a_step_are_streamed_in_one_transfer() -> None:
    class Kept(BaseStreamer):
        def put(self, value: Tensor) -> None:
            kept.append(value.tolist())

        def end(self) -> None:
            pass

    kept: list[list[int]] = []
    text = Sequences(torch.ones(2, 4, dtype=torch.long).to(THERE), StopChecker(StoppingCriteriaList()), None, Kept())
    take_waits()
    text.extend([[5, 6, 7], [8, 9]])
    assert kept == [[5, 8], [6, 9]]
    assert take_waits() == ["to the CPU"]


def test_rows_that_go_on_are_read_without_waiting() -> None:
    ends = StoppingCriteriaList([EosTokenCriteria(9)])
    text = Sequences(torch.ones(3, 4, dtype=torch.long).to(THERE), StopChecker(ends), None, None)
    take_waits()
    text.extend([[5, 6], [9], [7]])
    ids = text.ids
    assert take_waits() == []
    assert ids[:, :6].tolist() == [[1, 1, 1, 1, 5, 6], [1, 1, 1, 1, 7, 0]]


def test_one_more_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = waits_per_step("eagle3", 1)
    force_lengths(monkeypatch, lambda rows: 5 + int(torch.zeros(1, device=THERE)))
    assert waits_per_step("eagle3", 1) > usual + 0.9
