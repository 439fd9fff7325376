"""What an engine of continuous batching keeps in memory: nothing after its end, and no more than requests need."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from architectures import build
from batches import batching, greedy, plain_texts, prompts_of
from servers import BATCHES, serving
from servers import PROMPTS as SERVED
from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.utils import WorkloadHints
from twins import CHAIN, draft, target

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, Speculator, generate_many
from hf_spec.batching import sizes
from hf_spec.batching.engine import SpeculativeManager, _Processor
from hf_spec.batching.speculation import Speculation
from hf_spec.cli import main
from hf_spec.drafts.vanilla.speculator import VanillaDrafter

PROMPTS = prompts_of(4, 99)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """List what engines are made of, while nobody looks for cycles: transformers' engine would at its end."""
    found: list[weakref.ref[Any]] = []
    for kind in (PagedAttentionCache, Speculation, VanillaDrafter, continuous_api.ContinuousBatchingManager):

        def noting(self: Any, *args: Any, plain: Callable[..., None] = kind.__init__, **kwargs: Any) -> None:
            found.append(weakref.ref(self))
            plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", noting)
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    yield found
    gc.enable()


def left(made: list[weakref.ref[Any]]) -> list[str]:
    """Name what is still there."""
    return [type(one).__name__ for ref in made if (one := ref()) is not None]


def lists_of_prompts() -> None:
    target().generate_batch(PROMPTS, greedy(), batching(4), speculator=draft(), speculation_config=CHAIN)


def a_manager() -> None:
    with target().continuous_batching_context_manager(
        greedy(), continuous_batching_config=batching(4), speculator=draft(), speculation_config=CHAIN
    ) as manager:
        manager.add_request(PROMPTS[0], "one")
        assert manager.get_result(timeout=60).generated_tokens


def a_manager_that_is_stopped_at_once() -> None:
    manager = target().init_continuous_batching(
        greedy(eos_token_id=-1), batching(4), speculator=draft(), speculation_config=CHAIN
    )
    manager.start()
    manager.add_request(PROMPTS[0], "one", max_new_tokens=900, streaming=True)
    assert manager.get_result(timeout=60).generated_tokens
    manager.stop(hard_stop=True)


def many_prompts() -> None:
    answers = generate_many(
        target(),
        PROMPTS,
        engine="generate_batch",
        speculator=draft(),
        speculation_config=CHAIN,
        generation_config=greedy(),
        progress=False,
    )
    assert len(list(answers)) == len(PROMPTS)


def an_engine_that_is_kept() -> None:
    model = copy.copy(target())  # on which it is kept
    for _ in range(2):
        model.generate_batch(PROMPTS, greedy(), batching(4), persistent_manager=True, speculator=draft())
    model.destroy_cached_continuous_batching_manager()


class Failing(Drafter):
    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        raise RuntimeError("this draft fails")

    def keep_rows(self, rows: Tensor) -> None:
        raise NotImplementedError


class FailingSpeculator(Speculator):
    def drafter(self, request: DraftContext) -> Drafter:
        return Failing()


def an_engine_that_fails() -> None:
    failed = target().generate_batch(PROMPTS, greedy(), batching(4), speculator=FailingSpeculator())
    assert {output.error for output in failed.values()} == {"this draft fails"}


def answers_that_nobody_waits_for() -> None:
    answers = generate_many(
        target(), PROMPTS, engine="generate_batch", speculator=draft(), generation_config=greedy(), progress=False
    )
    next(answers)
    answers.close()


CALLS = [
    lists_of_prompts,
    a_manager,
    a_manager_that_is_stopped_at_once,
    many_prompts,
    an_engine_that_is_kept,
    an_engine_that_fails,
    answers_that_nobody_waits_for,
]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_of_an_engine(call: Callable[[], None], made: list[weakref.ref[Any]]) -> None:
    for _ in range(2):
        call()
        assert len(made) >= 3, "no engine was made"
        assert left(made) == []
        made.clear()


def test_no_cache_is_left_of_a_server(made: list[weakref.ref[Any]]) -> None:
    with serving(**BATCHES) as client:
        assert client.complete(SERVED[0], 8)
        assert "PagedAttentionCache" in left(made)
    assert "PagedAttentionCache" not in left(made)


# --- How large the cache is ------------------------------------------------------------------------------------------


@dataclass
class Looked:
    """What is seen of engines: the bytes of each one's cache and masks, and the most requests in one forward."""

    sizes: list[int] = field(default_factory=list)
    caches: list[PagedAttentionCache] = field(default_factory=list)
    at_once: int = 0
    aside: int = 0


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    found = Looked()
    step, made = _Processor._generation_step, SpeculativeManager._create_batch_processor
    again = continuous_api.RequestState.create_equivalent_initial_request

    def stepped(self: _Processor, model: Any) -> None:
        found.at_once = max(found.at_once, len(self._io.requests_in_batch))
        step(self, model)

    def create(self: SpeculativeManager) -> Any:
        processor = made(self)
        masks = processor.inputs_and_outputs.attention_mask.values()
        found.sizes.append(processor.cache.cache_tensor.nbytes + sum(mask.nbytes for mask in masks))
        found.caches.append(processor.cache)
        return processor

    def put_aside(state: Any) -> Any:
        found.aside += 1
        return again(state)

    monkeypatch.setattr(_Processor, "_generation_step", stepped)
    monkeypatch.setattr(SpeculativeManager, "_create_batch_processor", create)
    monkeypatch.setattr(continuous_api.RequestState, "create_equivalent_initial_request", put_aside)
    return found


def batch(model: PreTrainedModel, prompts: list[list[int]], config: Any = None, **options: Any) -> list[list[int]]:
    outputs = model.generate_batch(
        prompts, greedy(eos_token_id=-1), config, warmup=False, speculator="ngram", **options
    )
    return [output.generated_tokens for output in outputs.values()]


def plain(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return plain_texts(model, prompts, greedy(eos_token_id=None))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_a_cache_is_as_large_as_the_requests_need(name: str, looked: Looked) -> None:
    model = build(name, num_hidden_layers=4)
    prompts = prompts_of(7, 99)
    assert batch(model, prompts) == plain(model, prompts)
    assert looked.at_once == len(prompts) and not looked.aside
    assert looked.sizes[0] < 10 * 2**20
    assert looked.caches[0].max_batch_tokens == 512


def test_eager_attention_has_masks_too(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    monkeypatch.setattr(sizes, "MOST_ON_CPU", 2**21)
    with model.continuous_batching_context_manager(greedy(), speculator="ngram", warmup=False) as manager:
        manager.add_request(PROMPTS[0], "one")
        assert manager.get_result(timeout=60).generated_tokens
    assert 2**20 < looked.sizes[0] < 2**22


def test_a_bounded_cache_answers_fewer_at_once(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is put aside; where not even one request fits, the bound gives way."""
    said: list[str] = []
    monkeypatch.setattr(sizes.logger, "warning", said.append)
    prompts = [[*range(10, 70)]] * 3 + prompts_of(7, 99)
    expected = plain(target(), prompts)
    monkeypatch.setattr(sizes, "MOST_ON_CPU", 2**20)
    assert batch(target(), prompts) == expected
    assert 1 < looked.at_once < len(prompts) and not looked.aside
    assert looked.sizes[0] < 3 * 2**20  # masks see the tokens of a forward, too
    assert f"{looked.at_once} requests of up to 80 tokens at once. Set num_blocks" in said[0]
    looked.at_once = 0
    monkeypatch.setattr(sizes, "MOST_ON_CPU", 1)
    assert batch(target(), prompts) == expected
    assert looked.at_once == 1 and not looked.aside


ASKED: dict[str, dict[str, Any]] = {
    "blocks": {"num_blocks": 77, "page_size": 8},
    "share": {"max_memory_percent": 1e-3, "max_batch_tokens": 64},
    "tokens": {"max_batch_tokens": 48},
    "requests": {"max_requests_per_batch": 2},
}


@pytest.mark.parametrize("case", ASKED)
def test_what_was_asked_for_is_kept(case: str, looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_ON_CPU", 1)
    given = ContinuousBatchingConfig(**ASKED[case])
    before = vars(given).copy()
    assert batch(target(), PROMPTS, given) == plain(target(), PROMPTS)
    assert vars(given) == before
    cache, asked = looked.caches[0], ASKED[case]
    assert cache.max_batch_tokens == asked.get("max_batch_tokens", 512)
    assert looked.at_once <= asked.get("max_requests_per_batch", 4)
    if "num_blocks" in asked:
        assert cache.num_blocks == 77
    if "max_memory_percent" in asked:
        assert cache.num_blocks > 20


@pytest.mark.parametrize("more", [{"prompts": 40}, {"length": 600}, {"new": 520}], ids=str)
def test_a_kept_engine_makes_way_for_one_with_more_room(more: dict[str, int], looked: Looked) -> None:
    model = copy.copy(target())
    expected = plain(model, PROMPTS)
    given: dict[str, Any] = {"persistent_manager": True}
    assert batch(model, PROMPTS, **given) == batch(model, PROMPTS, **given) == expected
    kept = model._cached_continuous_batching_manager
    assert batch(model, PROMPTS[:1], **given) == expected[:1]
    assert model._cached_continuous_batching_manager is kept, "there was room"
    prompts = [[*range(10, 20)] * (more.get("length", 10) // 10)] * more.get("prompts", 1)
    new = more.get("new", 20)
    (text,) = plain_texts(model, prompts[:1], greedy(eos_token_id=None, max_new_tokens=new))
    assert batch(model, prompts, **given, max_new_tokens=new) == [text] * len(prompts)
    assert model._cached_continuous_batching_manager is not kept
    assert not looked.aside
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_engine_of_a_chosen_size_is_kept(looked: Looked) -> None:
    """Whoever chose its size is not overruled, except by another size that is asked for."""
    model = copy.copy(target())
    given: dict[str, Any] = {"persistent_manager": True}
    batch(model, PROMPTS[:1], ContinuousBatchingConfig(num_blocks=12, page_size=16), **given)
    kept = model._cached_continuous_batching_manager
    assert batch(model, PROMPTS * 5, **given) == plain(model, PROMPTS) * 5
    assert model._cached_continuous_batching_manager is kept
    assert looked.at_once > 1, "the first call had one prompt"
    batch(model, PROMPTS[:1], ContinuousBatchingConfig(num_blocks=90, page_size=16), **given)
    assert model._cached_continuous_batching_manager is not kept
    assert looked.caches[-1].num_blocks == 90
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_engine_of_a_chosen_size_that_is_too_small_makes_way(looked: Looked) -> None:
    model = copy.copy(target())
    given: dict[str, Any] = {"persistent_manager": True}
    batch(model, PROMPTS[:1], ContinuousBatchingConfig(num_blocks=12, page_size=16), **given)
    (text,) = plain_texts(model, PROMPTS[:1], greedy(eos_token_id=None, max_new_tokens=250))
    assert batch(model, PROMPTS[:1], **given, max_new_tokens=250) == [text]
    assert len(looked.caches) > 1
    model.destroy_cached_continuous_batching_manager()


def test_the_memory_is_that_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the current device, which may be another one."""
    current = [torch.device("cuda:0")]

    @contextlib.contextmanager
    def inside(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def breakdown() -> tuple[torch.device, int, int, int]:
        return current[-1], 100 + 800 * (current[-1].index or 0), 0, 0

    monkeypatch.setattr(sizes, "input_device", lambda model: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device", inside)
    monkeypatch.setattr(sizes, "get_device_and_memory_breakdown", breakdown)
    assert sizes._most_bytes(target()) == sizes.SHARE * 900
    assert len(current) == 1


def test_processes_that_share_a_model_make_caches_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        is_alone = False

        def __init__(self, model: Any) -> None:
            pass

        def broadcast(self, value: int) -> int:
            return 2**20

    monkeypatch.setattr(sizes, "ModelParallelGroup", Group)
    found = []
    for own in (2**20, 2**23):
        monkeypatch.setattr(sizes, "MOST_ON_CPU", own)
        config = sizes.sized(target(), None, WorkloadHints(60, 20, 30))
        found.append((config.num_blocks, config.max_requests_per_batch))
    assert found[0] == found[1]


def test_a_server_says_how_large_its_cache_may_be(
    looked: Looked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"{sizes.MOST_ON_CPU / 2**30:.0f} GiB on a CPU" in told and "--cb-num-blocks" in told
    monkeypatch.setattr(sizes, "MOST_ON_CPU", 2**24)
    with serving(continuous_batching=True) as client:
        assert client.complete(SERVED[0], 8)
    assert 2**23 < looked.sizes[0] < 2**24 + 2**22


def test_many_prompts_have_a_bounded_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a speculator, too, where transformers' own engine answers."""
    made: list[int] = []
    init = PagedAttentionCache.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self.cache_tensor.nbytes)

    monkeypatch.setattr(PagedAttentionCache, "__init__", noting)
    for speculator in (None, "ngram"):
        found = generate_many(
            target(),
            PROMPTS,
            engine="generate_batch",
            ordered=True,
            speculator=speculator,
            continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True),
            generation_config=greedy(eos_token_id=-1),
            progress=False,
        )
        assert [one.tokens for one in found] == plain(target(), PROMPTS)
    assert max(made) < 2**20 and len(made) == 2
