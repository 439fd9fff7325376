"""Guesses whose forward overflows: attention gives them no weight, but 0 * nan is nan. They must not matter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build, prompts
from batches import greedy, plain_texts, prompts_of, serve
from torch import Tensor
from torch.distributions import Distribution
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process
from twins import CHAIN, TREE

from hf_spec import AcceptedTokens, DraftContext, Drafter, NgramSpeculator, Proposal, Speculator
from hf_spec.policy.base import DraftLengthPolicy, StepObservation
from hf_spec.policy.fixed import FixedLength
from hf_spec.verify.processors import Processors, pure
from hf_spec.verify.rules import block_verification, token_verification

NEW_TOKENS = 14
POISON = 90  # its embedding overflows, and no text has it
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "suppress_tokens": [POISON]}
SHAPES = {"chain": CHAIN, "tree": TREE}
RAISING: dict[str, dict[str, float]] = {"eta": {"eta_cutoff": 0.02}, "top_h": {"top_h": 0.6}}  # in plain generate, too


@pytest.fixture(autouse=True)
def arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let warpers raise for what they refuse: torch.compile of an earlier test turns that off."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


class Poisoner(Speculator):
    """Guess the ``text`` (batch, length) of a plain call, with a guess in it now and then that overflows."""

    def __init__(self, text: Tensor, every: int = 3) -> None:
        self.text, self.every = text, every

    def drafter(self, request: DraftContext) -> Drafter:
        return _PoisonDrafter(self, request)


class _PoisonDrafter(Drafter):
    def __init__(self, poisoner: Poisoner, request: DraftContext) -> None:
        self._text = torch.nn.functional.pad(poisoner.text, (0, 16))
        self._every, self._calls = poisoner.every, 0
        self._lengths = torch.full((len(self._text),), request.input_ids.shape[1])
        self._tree = request.config.tree is not None

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        self._lengths += news.counts
        depth = min(limit, 3)
        guesses = self._text.gather(1, self._lengths[:, None] + torch.arange(depth))
        if self._calls % self.every == 0 and depth:
            guesses[-1, -1] = POISON  # of the last row only: rows advance by different amounts
        self._calls += 1
        if not self._tree:
            return Proposal.chain(news.root, guesses)
        poison = torch.full_like(guesses, POISON if self._calls % 2 else 7)
        siblings = torch.stack([poison, guesses], dim=2).flatten(1)
        parents = torch.tensor([-1, *(2 * (node // 2) for node in range(2 * depth))])
        tokens = torch.cat([news.root[:, None], siblings], dim=1)
        return Proposal(tokens, parents.expand_as(tokens), depth)

    @property
    def every(self) -> int:
        return self._every

    def keep_rows(self, rows: Tensor) -> None:
        self._text, self._lengths = self._text[rows], self._lengths[rows]


def harmless(batch: int) -> dict[str, Tensor]:
    given = prompts(batch, (9, 6, 7)[:batch])
    given["input_ids"] = given["input_ids"].masked_fill(given["input_ids"] == POISON, 11)
    return given


def poisoned(name: str, value: float = torch.inf) -> PreTrainedModel:
    model = copy.deepcopy(build(name))
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone())  # not the embeddings' own
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = value
    return model


class Remembers(LogitsProcessor):
    """A processor that may count calls, so that rows advance in lockstep."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "jamba"])
def test_a_guess_that_overflows_changes_no_text(name: str, shape: str, batch: int) -> None:
    model, given = poisoned(name), harmless(batch)
    plain = model.generate(**given, **GREEDY)
    assert POISON not in plain
    out = model.generate(
        **given,
        **GREEDY,
        speculator=Poisoner(plain),
        speculation_config=SHAPES[shape].merge(self_check=False),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    if shape == "chain":
        assert out.speculation.accepted > 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nor_in_lockstep_nor_with_features_nor_in_what_is_returned(name: str, value: float) -> None:
    model, given = poisoned(name, value), harmless(3)
    options: dict[str, Any] = {
        **GREEDY,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_logits": True,
        "logits_processor": LogitsProcessorList([Remembers()]),
    }
    plain = model.generate(**given, **options)
    assert POISON not in plain.sequences
    out = model.generate(**given, **options, speculator=Poisoner(plain.sequences), speculation_config=CHAIN)
    assert torch.equal(out.sequences, plain.sequences)
    torch.testing.assert_close(out.logits, plain.logits, atol=1e-4, rtol=1e-4)
    for found, expected in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(found.keys, expected.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("other", ["", "penalty", "pure"])
@pytest.mark.parametrize("warper", [{}, *RAISING.values()], ids=["", *RAISING])
@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_goes_on_behind_such_a_guess(shape: str, warper: dict[str, float], other: str) -> None:
    """Processors see all nodes at once, with prefixes and without, or nodes of one length after another."""
    model, given = poisoned("llama"), harmless(2)
    own = LogitsProcessorList([pure(Remembers())] if other == "pure" else [])
    options = warper | ({"repetition_penalty": 1.2} if other == "penalty" else {})
    text = model.generate(**given, **GREEDY)
    for seed in range(5):
        torch.manual_seed(seed)
        out = model.generate(
            **given,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            suppress_tokens=[POISON],
            speculator=Poisoner(text, every=1),
            speculation_config=SHAPES[shape].merge(self_check=False),
            logits_processor=own,
            **options,
        )
        assert out.shape == text.shape


@pytest.mark.parametrize("warper", RAISING)
def test_warpers_that_refuse_rows_do_so_in_plain_steps_alone(warper: str) -> None:
    made = {"eta": logits_process.EtaLogitsWarper(0.02), "top_h": logits_process.TopHLogitsWarper(0.6)}[warper]
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    rows[0, 3], rows[1], rows[2, 5] = torch.nan, -torch.inf, torch.inf
    processors = Processors(LogitsProcessorList([made]))
    got = processors.warp(rows)
    torch.testing.assert_close(got[:3], rows[:3], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(got[3:], made(torch.ones(1, 0, dtype=torch.long), rows[3:])) and not got[3].isfinite().all()
    drafted = processors.draft_distribution()(rows)
    assert drafted[:3].isnan().all() and not drafted[3].isnan().any()
    with pytest.raises(ValueError, match="invalid values"):
        processors.warp(rows, is_plain=True)


@pytest.mark.parametrize("warper", RAISING)
def test_a_target_that_overflows_by_itself_raises_as_in_plain_generate(warper: str) -> None:
    model, given = poisoned("llama"), harmless(2)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": True, **RAISING[warper]}
    text = model.generate(**given, **GREEDY)
    given["input_ids"][1, -1] = POISON
    for more in ({}, {"speculator": Poisoner(text), "speculation_config": CHAIN.merge(self_check=False)}):
        with pytest.raises(ValueError, match="invalid values"):
            model.generate(**given, **options, **more)


def test_a_target_that_overflows_by_itself_writes_what_plain_generate_writes() -> None:
    model, given = poisoned("llama"), harmless(2)
    given["input_ids"][1, -1] = POISON
    plain = model.generate(**given, **GREEDY)
    out = model.generate(
        **given,
        **GREEDY,
        speculator=Poisoner(plain),
        speculation_config=CHAIN.merge(self_check=False),
    )
    assert torch.equal(out, plain)


@pytest.mark.parametrize("rule", [token_verification, block_verification])
def test_nan_is_accepted_by_no_rule(rule: Any) -> None:
    """Where the distribution of a node is nan, nothing of its children may be accepted."""
    guesses, vocabulary = torch.tensor([[1, 2]]), 4
    q = torch.full((1, 2, vocabulary), 0.25)
    p = torch.full((1, 3, vocabulary), 0.25)
    p[:, 0] = torch.nan
    for _ in range(20):
        verdict = rule(Proposal.chain(torch.tensor([3]), guesses, q=q), p)
        assert int(verdict.counts) == 1


def test_a_batch_of_requests_is_scored_again() -> None:
    """Packed tokens are spoilt for all requests at once; prompts are read in parts beside them."""
    model, options = poisoned("llama"), greedy(suppress_tokens=[POISON])
    asked = [[11 if token == POISON else token for token in prompt] for prompt in prompts_of(9, 99)]
    texts = plain_texts(model, asked, options)
    corpus = [[POISON if place % 4 == 3 else token for place, token in enumerate(text)] for text in texts]
    found, manager = serve(
        model, asked, 4, generation_config=options, speculator=NgramSpeculator(corpus=corpus), num_speculative_tokens=4
    )
    assert [output.generated_tokens for output in found] == texts
    assert manager.speculation.counts.accepted


def test_a_step_that_is_scored_twice_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time says nothing about others, and would make draft tokens look dear."""
    model, inputs = poisoned("llama"), harmless(2)
    text = model.generate(**inputs, **GREEDY)
    timed: list[bool] = []
    observe = DraftLengthPolicy.observe

    def noted(policy: DraftLengthPolicy, step: StepObservation) -> None:
        timed.append(step.seconds is not None)
        observe(policy, step)

    monkeypatch.setattr(FixedLength, "observe", noted)
    for every, untimed in ((1000, False), (3, True)):
        timed.clear()
        model.generate(**inputs, **GREEDY, speculator=Poisoner(text, every), speculation_config=CHAIN)
        assert (False in timed[2:]) == untimed
        assert True in timed
