"""A graph finds its buffers where the call before had them; the text stays plain `generate`'s."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import build, prompts
from test_compiled_drafts import draft_of
from test_static import generate, on_any_device
from torch import Tensor, fx
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList
from twins import SHAPES, noisy, target

from hf_spec import SpeculationConfig
from hf_spec.scoring import kept, rings
from hf_spec.scoring.kept import NEW_MEMORY, KeptBuffers, records_graphs

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep buffers here, too, as if graphs were recorded."""
    monkeypatch.setattr(kept, "records_graphs", lambda config, device: True)
    monkeypatch.setattr(rings, "SHORTEST", 16)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    kept._memory_of.clear()


class Recorder:
    """A backend that notes for each graph at which addresses its fixed inputs were in each call."""

    def __init__(self) -> None:
        self.addresses: list[dict[int, set[tuple[int, ...]]]] = []  # by call: by graph
        self._graphs = 0
        self._alive: list[Tensor] = []  # so that no memory is given out twice by chance

    def begin_call(self) -> None:
        self.addresses.append(collections.defaultdict(set))

    def backend(self) -> Any:
        """Return it as a function, which nobody makes a copy of."""
        return lambda graph, inputs: self._compiled(graph)

    def _compiled(self, graph: fx.GraphModule) -> Any:
        number, self._graphs = self._graphs, self._graphs + 1

        def run(*args: Any) -> Any:
            fixed = [one for one in args if hasattr(one, "_dynamo_static_input_type")]
            fixed = [one for one in fixed if not isinstance(one, torch.nn.Parameter)]
            self._alive += fixed
            self.addresses[-1][number].add(tuple(one.data_ptr() for one in fixed))
            return graph(*args)

        return run

    def moved(self) -> list[int]:
        """List the graphs that were run with buffers at several addresses."""
        found = collections.defaultdict(set)
        for call in self.addresses:
            for graph, addresses in call.items():
                found[graph] |= addresses
        return [graph for graph, addresses in found.items() if len(addresses) > 1]


def calls(kind: str, shape: str, batches: list[int], recorder: Recorder) -> None:
    """Generate for several batches, whose rows end apart, and compare the texts with plain `generate`'s."""
    model = target("llama")
    ends = {"eos_token_id": int(generate(model, 3)[0, 20]), "pad_token_id": 0}
    own = {"speculator": draft_of(kind), "speculation_config": SHAPES[shape], "cache_implementation": "static"}
    own |= {"compile_config": on_any_device(backend=recorder.backend())}
    for batch in batches:
        recorder.begin_call()
        assert torch.equal(generate(model, batch, **own, **ends), generate(model, batch, **ends))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", "chain"),
        ("mtp", "chain"),
        ("llama", "chain"),
        ("dflash", "chain"),
        pytest.param("eagle3", "dynamic", marks=pytest.mark.slow),
        pytest.param("peagle", "chain", marks=pytest.mark.slow),
        pytest.param("medusa", "chain", marks=pytest.mark.slow),
    ],
)
def test_buffers_are_where_they_were(kind: str, shape: str) -> None:
    recorder = Recorder()
    calls(kind, shape, [3, 3, 1, 3], recorder)
    assert not recorder.moved()
    assert sum(map(len, recorder.addresses)) > 2 * len(recorder.addresses[0])


def test_buffers_move_where_none_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must be able to fail."""
    monkeypatch.setattr(kept, "records_graphs", lambda config, device: False)
    recorder = Recorder()
    calls("eagle3", "chain", [3, 3], recorder)
    assert recorder.moved()


class Generating(StoppingCriteria):
    """A criterion that generates another text with the same model and draft in every step, and stops nothing."""

    def __init__(self, **options: Any) -> None:
        self._options, self.texts = options, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if len(self.texts) < 3:
            self.texts.append(target("llama").generate(**prompts(1), max_new_tokens=9, **self._options))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_in_the_middle_of_another_has_memory_of_its_own() -> None:
    model = target("llama")
    own = {"speculator": draft_of("eagle3"), "speculation_config": SHAPES["chain"], "cache_implementation": "static"}
    own |= {"compile_config": on_any_device()}
    plain, short = generate(model, 3), model.generate(**prompts(1), max_new_tokens=9)
    for _ in range(2):
        inner = Generating(**own)
        assert torch.equal(generate(model, 3, **own, stopping_criteria=StoppingCriteriaList([inner])), plain)
        assert len(inner.texts) == 3 and all(torch.equal(text, short) for text in inner.texts)


def test_a_call_after_one_that_failed() -> None:
    model = target("llama")
    own = {"speculator": draft_of("eagle3"), "cache_implementation": "static", "compile_config": on_any_device()}

    def fail(batch: int, ids: Tensor) -> list[int]:
        if ids.shape[0] > 20:
            raise KeyboardInterrupt
        return list(range(int(model.config.vocab_size)))

    with pytest.raises(KeyboardInterrupt):
        generate(model, 3, **own, prefix_allowed_tokens_fn=fail)
    assert torch.equal(generate(model, 3, **own), generate(model, 3))


def test_memory_of_inference_mode_serves_outside_of_it() -> None:
    model = target("llama")
    own = {"speculator": draft_of("eagle3"), "cache_implementation": "static", "compile_config": on_any_device()}
    with torch.inference_mode():
        first = generate(model, 3, **own)
    assert torch.equal(first, generate(model, 3, **own))


def test_memory_goes_with_its_model() -> None:
    model = build("llama")
    own = {"speculator": noisy(model), "cache_implementation": "static", "compile_config": on_any_device()}
    model.generate(**prompts(1), max_new_tokens=9, **own)
    buffers = [weakref.ref(one) for memory in kept._memory_of.values() for one in memory.values()]
    assert len(buffers) > 8
    torch._dynamo.reset()
    del model, own
    gc.collect()
    assert not any(one() is not None for one in buffers)


def test_fewer_rows_have_the_first_part_of_the_memory() -> None:
    owner, states = torch.nn.Linear(1, 1), torch.arange(24.0).view(4, 2, 3)
    first = KeptBuffers(owner)
    whole = first.put("keys", states)
    fewer = first.put("keys", states[1:3].clone())
    assert fewer.data_ptr() == whole.data_ptr() and torch.equal(fewer, states[1:3])
    assert first.put("keys", fewer) is fewer
    longer, more = first.put("keys", states[:, :, :2]), first.put("keys", states.repeat(2, 1, 1))
    assert len({one.data_ptr() for one in (whole, longer, more)}) == 3
    assert KeptBuffers(owner).put("keys", states).data_ptr() != more.data_ptr()
    first.free()
    assert KeptBuffers(owner).put("keys", states).data_ptr() == more.data_ptr()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CompileConfig(), True),
        (CompileConfig(mode="max-autotune"), True),
        (CompileConfig(mode="default"), False),
        (CompileConfig(mode=None, options={"triton.cudagraphs": True}), True),
        (CompileConfig(mode="max-autotune-no-cudagraphs"), False),
    ],
)
def test_where_torch_records_graphs(config: CompileConfig, expected: bool) -> None:
    assert records_graphs(config, torch.device("cuda")) is expected
    assert not records_graphs(config, HERE) and NEW_MEMORY == ("cpu",)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [None, "dynamic"])
def test_no_graph_is_recorded_twice(shape: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    recorded: list[int] = []
    record = CUDAGraphTreeManager.record_function

    def noted(manager: Any, inputs: Any, function: Any) -> Any:
        recorded.append(1)
        return record(manager, inputs, function)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", noted)
    model = build("llama").to(torch.bfloat16)
    draft, model = noisy(model).to("cuda"), model.to("cuda")
    given = {name: one.to("cuda") for name, one in prompts(3).items()}
    own: dict[str, Any] = {"speculator": draft, "cache_implementation": "static"}
    own |= {"speculation_config": SpeculationConfig(tree=shape, num_speculative_tokens=3)}
    found, junk = [], []
    for call in range(6):
        recorded.clear()
        model.generate(**given, max_new_tokens=24, **own)
        junk.append(torch.ones(1 << (12 + call), device="cuda"))  # the allocator's state changes
        found.append(len(recorded))
    assert found[0] + found[1] > 0 and sum(found[3:]) == 0, found
