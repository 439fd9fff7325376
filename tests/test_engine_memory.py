"""What an engine of continuous batching keeps in memory: nothing after its end, and no more than requests need."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batches import batching, greedy, prompts_of
from servers import BATCHES, serving
from servers import PROMPTS as SERVED
from torch import Tensor
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from twins import CHAIN, draft, target

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, Speculator, generate_many
from hf_spec.batching.speculation import Speculation
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
