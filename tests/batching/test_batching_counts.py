"""What continuous batching counts, remembers and shares: right for every request, however its steps fell out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from batches import batching, flawed, greedy, plain_texts, prompts_of, serve
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from twins import CHAIN, target

from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    NgramSpeculator,
    Proposal,
    SpeculationConfig,
    SpeculationStats,
    Speculator,
    generate_many,
)
from hf_spec.batching.drafting import Drafters, Row
from hf_spec.batching.engine import _Processor
from hf_spec.batching.speculation import Speculation
from hf_spec.drafts.base import ask

PROMPTS = prompts_of(9, 99)


class Learning(NgramSpeculator):
    """N-grams that note what they are told."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[list[int]] = []

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        self.told += map(list, texts)


def test_a_stream_is_learnt_once_and_whole() -> None:
    """What a client cancels is not learnt."""
    (text,) = plain_texts(target(), PROMPTS[:1], greedy(eos_token_id=None))
    speculator = Learning()
    with target().continuous_batching_context_manager(
        greedy(eos_token_id=-1), continuous_batching_config=batching(4), warmup=False, speculator=speculator
    ) as manager:
        manager.add_request(PROMPTS[1], "left", streaming=True, max_new_tokens=900)
        assert manager.get_result(timeout=60).request_id == "left"
        manager.cancel_request("left")
        manager.add_request(PROMPTS[0], "one", streaming=True)
        pieces = 0
        while (output := manager.get_result(timeout=60)).request_id != "one" or not output.is_finished():
            pieces += output.request_id == "one"
    assert pieces > 2 and speculator.told == [PROMPTS[0] + text]


class Reading(Speculator):
    """A draft that reads hidden states, guesses nothing, and notes how many states of a prompt it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return (1,)

    def drafter(self, request: DraftContext) -> Drafter:
        assert request.features is not None
        self.given.append((request.input_ids.shape[1], request.features.shape[1]))
        return Silent()


class Silent(Drafter):
    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        return Proposal.nothing(accepted.root)

    def keep_rows(self, rows: Tensor) -> None:
        pass


@pytest.mark.parametrize("size", [24, 512])
def test_a_draft_that_reads_hidden_states_gets_those_of_the_whole_prompt(size: int) -> None:
    """Also where another prompt began with the same tokens, and where a prompt is read in parts."""
    speculator, prompts = Reading(), [[*range(10, 42), end] for end in (50, 51, 52)]
    given = batching(1, page_size=4, max_batch_tokens=size)
    options: Any = {"warmup": False, "speculator": speculator, "speculation_config": CHAIN}
    target().generate_batch(prompts * 2, greedy(eos_token_id=-1), given, **options)
    assert speculator.given == [(33, 33)] * 6


def test_draft_tokens_after_the_end_are_not_accepted() -> None:
    """Nor are those of the depths that no text reached."""
    prompt = PROMPTS[0]
    (text,) = plain_texts(target(), [prompt], greedy(eos_token_id=None))
    end = next(i for i in range(2, 5) if text[i] not in text[:i])
    outputs = target().generate_batch(
        [prompt],
        greedy(eos_token_id=text[end]),
        batching(1),
        warmup=False,
        speculator=NgramSpeculator(corpus=[prompt + text]),
        speculation_config=SpeculationConfig(num_speculative_tokens=8),
    )
    (output,) = outputs.values()
    assert output.generated_tokens == text[: end + 1]
    stats = output.speculation
    assert (stats.steps, stats.proposed, stats.accepted, stats.emitted) == (1, 8, end, end)
    assert stats.counts.accepted_at == [1] * end + [0] * (8 - end)


@pytest.mark.parametrize("tree", [None, [(0,), (1,), (0, 0), (0, 0, 0)]])
def test_no_more_is_drafted_than_can_become_text(tree: Any) -> None:
    """Each request has its own limit; one token always follows those that are accepted."""
    texts = plain_texts(target(), PROMPTS[:3], greedy(eos_token_id=None))
    speculator = NgramSpeculator(corpus=[prompt + text for prompt, text in zip(PROMPTS, texts, strict=False)])
    config = SpeculationConfig(tree=tree) if tree else SpeculationConfig(num_speculative_tokens=8)
    with target().continuous_batching_context_manager(
        greedy(eos_token_id=-1),
        continuous_batching_config=batching(4, max_batch_tokens=128),
        warmup=False,
        speculator=speculator,
        speculation_config=config,
    ) as manager:
        for length in (1, 2, 4):
            manager.add_request(PROMPTS[0], str(length), max_new_tokens=length)
        found = {(output := manager.get_result(timeout=60)).request_id: output for _ in range(3)}
    for length in (1, 2, 4):
        output = found[str(length)]
        assert output.generated_tokens == texts[0][:length]
        assert len(output.speculation.counts.proposed_at) <= max(0, length - 2)


def test_no_draft_token_lies_outside_the_positions_of_the_target() -> None:
    """A text may end before them, however many tokens it may have."""
    model = build("gpt2", n_positions=40)
    prompt = [*range(10, 44)]
    (text,) = plain_texts(model, [prompt], greedy(eos_token_id=None, max_new_tokens=6))
    end = max(text.index(token) for token in text)
    speculator = NgramSpeculator(corpus=[[*prompt, *text, *range(50, 70)]])
    (output,) = model.generate_batch(
        [prompt],
        greedy(eos_token_id=text[end], max_new_tokens=60),
        batching(1, max_batch_tokens=128),
        warmup=False,
        speculator=speculator,
        speculation_config=SpeculationConfig(num_speculative_tokens=16),
    ).values()
    assert output.error is None and output.generated_tokens == text[: end + 1]
    assert output.speculation.proposed


def test_a_request_that_restarts_keeps_its_statistics() -> None:
    prompts = [[*range(10, 10 + length)] for length in (9, 13, 11, 7)]
    texts = plain_texts(target(), prompts, greedy(eos_token_id=None))
    outputs = target().generate_batch(
        prompts,
        greedy(eos_token_id=-1),
        batching(4, page_size=4, num_blocks=16, max_batch_tokens=64),
        warmup=False,
        speculator=flawed(texts, 99),
        speculation_config=CHAIN,
    )
    assert [output.generated_tokens for output in outputs.values()] == texts
    stats = SpeculationStats.merge([output.speculation for output in outputs.values()])
    assert [row.tokens for row in stats.per_row] == texts


def test_features_of_a_prompt_keep_no_others_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    store = _Processor._store_prompt_features

    def stored(self: _Processor, features: Tensor | None) -> None:
        store(self, features)
        rows = self.speculation._rows.values()
        sizes.extend((part.untyped_storage().nbytes(), part.nbytes) for row in rows for part in row.features)

    monkeypatch.setattr(_Processor, "_store_prompt_features", stored)
    given = batching(2, page_size=4, max_batch_tokens=128)
    options: Any = {"warmup": False, "speculator": Reading(), "speculation_config": CHAIN}
    target().generate_batch([[*range(10, 42)], [*range(10, 20)]], greedy(), given, **options)
    assert sizes and all(kept == own for kept, own in sizes)


def test_steps_that_read_prompts_do_not_say_how_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int, bool]] = []  # reads part of a prompt, rows that go on, is taken for a usual step
    step, timed = _Processor._generation_step, Speculation._observe
    reads: list[bool] = []

    def stepped(self: _Processor, model: Any) -> None:
        futures = self._io.requests_in_batch
        reads.append(any(not future.has_new_token or not future.state.generated_len() for future in futures))
        step(self, model)

    def noted(self: Speculation, usual: bool, offered: list[int], *args: Any) -> None:
        seen.append((reads[-1], len(offered), usual))
        timed(self, usual, offered, *args)

    monkeypatch.setattr(_Processor, "_generation_step", stepped)
    monkeypatch.setattr(Speculation, "_observe", noted)
    prompts = [*PROMPTS[:3], *([[*range(10, 90)]] * 2)]  # the long ones are read in several parts, beside others
    serve(target(), prompts, 4, speculator="ngram", speculation_config=CHAIN)
    assert any(reading and continuing for reading, continuing, _ in seen)
    assert all(usual != reading for reading, continuing, usual in seen if continuing)


def row_of(prompt: list[int], *told: list[int]) -> Row:
    row = Row(str(prompt), SimpleNamespace(initial_tokens=prompt, generated_tokens=[]), SpeculationStats(1))
    for tokens in told:
        emit(row, tokens)
    return row


def emit(row: Row, tokens: list[int]) -> None:
    row.request.generated_tokens += tokens
    row.steps += 1


def test_drafters_that_catch_up_are_late() -> None:
    """One that is new, and one that reads what became text in several steps; what they take is not usual."""
    speculator, drafters, limits = NgramSpeculator(), Drafters(torch.device("cpu")), []

    def start(row: Row) -> Drafter:
        prompt = torch.tensor([row.request.initial_tokens])
        mask = torch.ones_like(prompt)
        return speculator.drafter(DraftContext(target(), prompt, mask, None, CHAIN, lambda logits: logits, False))

    def asked(drafter: Drafter, rows: list[Row], accepted: AcceptedTokens, limit: int) -> Proposal:
        limits.append((limit, len(rows)))
        return ask(drafter, accepted, limit)

    one, other = row_of([10, 11, 12, 10], [11]), row_of([20, 21, 20], [21])
    assert drafters.propose([one], 3, start, asked), "it is new"
    assert one.proposal is not None and one.proposal.tokens == [11, 12, 10, 11]
    emit(one, [12])
    assert not drafters.propose([one], 3, start, asked)
    emit(one, [10])
    assert drafters.propose([one, other], 2, start, asked), "the other is new"
    assert other.proposal is not None and other.proposal.tokens[:2] == [21, 20]
    for row, steps in ((one, ([11], [12])), (other, ([20],))):
        for tokens in steps:
            emit(row, tokens)
    assert drafters.propose([one, other], 3, start, asked), "one has two steps to read"
    assert limits == [(3, 1), (3, 1), (2, 2), (3, 2)] and (one.steps, one.unread) == (0, [])
    emit(one, [10])
    assert not drafters.propose([one], 3, start, asked) and len(limits) == 4, "the other one was not in the batch"


def test_blocks_are_shared_when_they_are_full_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected draft tokens fill no block."""
    marked: Counter[str] = Counter()
    found: list[bool] = []
    mark = PagedAttentionCache.mark_complete_blocks

    def noted(self: Any, state: Any, blocks: dict[str, int]) -> None:
        marked[state.request_id] += sum(blocks.values())
        found.append(marked[state.request_id] == state.position_offset // 4)
        mark(self, state, blocks)

    monkeypatch.setattr(PagedAttentionCache, "mark_complete_blocks", noted)
    prompts = [[*range(10 + i, 20 + 2 * i)] for i in range(4)]  # that share nothing
    texts = plain_texts(target(), prompts, greedy(eos_token_id=None))
    outputs = target().generate_batch(
        prompts,
        greedy(eos_token_id=-1),
        batching(4, page_size=4),
        warmup=False,
        speculator=flawed(texts, 99),
        speculation_config=CHAIN,
    )
    assert [output.generated_tokens for output in outputs.values()] == texts
    assert all(found) and len(found) > 20 and sum(marked.values()) > 20


def test_whoever_stops_reading_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = _Processor._generation_step
    monkeypatch.setattr(_Processor, "_generation_step", lambda self, model: (steps.append(1), step(self, model)))
    answers = generate_many(
        target(),
        PROMPTS,
        engine="generate_batch",
        batch_size=1,
        speculator="ngram",
        num_speculative_tokens=1,
        generation_config=greedy(eos_token_id=-1, max_new_tokens=60),
        progress=False,
    )
    next(answers)
    answers.close()
    assert len(steps) < 3 * 60, "all were answered"
