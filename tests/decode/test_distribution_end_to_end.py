"""Sampled text follows the target's distribution: whole calls of ``generate`` against an exact enumeration."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import pairwise, usual
from test_verification import TOO_FAR, deviation
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from twins import SHAPES, Oracle, draft, noisy, target

import hf_spec.decode.sequences
import hf_spec.sampling
import hf_spec.scoring.buffers
import hf_spec.verify.warpers
from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    NgramSpeculator,
    Proposal,
    SpeculationConfig,
    Speculator,
    VanillaSpeculator,
)
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel

VOCAB = 5
DEPTH = 4  # tokens whose joint distribution is checked
TEXTS = 4_000  # drawn in one call after each of two prompts: a lie about q is then 88 standard deviations off
PROMPTS = torch.tensor([[3, 1, 4, 1, 4], [0, 0, 2, 4, 2]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
WARPERS = {"temperature": 1.5, "top_k": 4, "top_p": 0.95}


@functools.cache
def model(layers: int = 1) -> PreTrainedModel:
    sizes = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return build("llama", vocab_size=VOCAB, num_key_value_heads=1, seed=4, **sizes)


@functools.cache
def guesser() -> PreTrainedModel:
    return noisy(model(), noise=0.2)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_spec.scoring.buffers, "SLOTS_ADDED", 8)
    monkeypatch.setattr(hf_spec.decode.sequences, "COLUMNS_ADDED", 8)


@functools.cache
def distribution(layers: int = 1) -> Tensor:
    """Enumerate the distribution of the first tokens after both prompts: (prompts, token, ..., token)."""
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(WARPERS["temperature"]),
            TopKLogitsWarper(int(WARPERS["top_k"])),
            TopPLogitsWarper(WARPERS["top_p"]),
        ]
    )
    joint = torch.ones(2, 1, dtype=torch.double)
    for depth in range(DEPTH):
        texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=depth)), dtype=torch.long)
        ids = torch.cat([PROMPTS.repeat_interleave(len(texts), 0), texts.repeat(2, 1)], dim=1)
        mask = torch.cat([MASK.repeat_interleave(len(texts), 0), torch.ones_like(texts).repeat(2, 1)], dim=1)
        with torch.no_grad():
            position = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(layers)(input_ids=ids, attention_mask=mask, position_ids=position).logits[:, -1]
        p = warpers(ids, logits).double().softmax(-1).view(2, -1, VOCAB)
        joint = (joint[:, :, None] * p).flatten(1)
    return joint / 2


def sample(
    speculator: Any, config: SpeculationConfig, seed: int = 0, layers: int = 1, count: int = TEXTS, **options: Any
) -> Tensor:
    """Draw texts after both prompts and number them: (texts,)."""
    torch.manual_seed(seed)
    inputs = {"input_ids": PROMPTS, "attention_mask": MASK, "speculator": speculator, "speculation_config": config}
    options |= {"do_sample": True, "max_new_tokens": DEPTH + 1, **WARPERS}
    few = model(layers).generate(**inputs, **options, num_return_sequences=9, return_dict_in_generate=True)
    assert few.speculation.accepted, "nothing to verify"
    texts = model(layers).generate(**inputs, **options, num_return_sequences=count)
    number = torch.arange(2).repeat_interleave(count)
    for token in texts[:, 5 : 5 + DEPTH].unbind(1):
        number = VOCAB * number + token
    return number


PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
VANILLA = {
    "chain, block": SpeculationConfig(num_speculative_tokens=3, verification="block"),
    "chain, token": SpeculationConfig(num_speculative_tokens=3, verification="token"),
    "chain that stops when in doubt": SpeculationConfig(num_speculative_tokens=3, confidence_threshold=0.4),
    "chain of best guesses": SpeculationConfig(num_speculative_tokens=3, sample_draft=False),
    "drawn tree, block": SpeculationConfig(num_speculative_tokens=3, tree="sampled", tree_topk=2, num_tree_tokens=6),
    "drawn tree, token": SpeculationConfig(
        num_speculative_tokens=3, tree="sampled", tree_topk=3, num_tree_tokens=7, verification="token"
    ),
    "drawn static tree": SpeculationConfig(tree=PATHS),
    "static tree of best guesses": SpeculationConfig(tree=PATHS, sample_draft=False),
    "dynamic tree": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=5),
}
NGRAM = {
    "chain": SpeculationConfig(num_speculative_tokens=3),
    "tree": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=3, num_tree_tokens=6),
}


@pytest.mark.parametrize("case", VANILLA)
def test_vanilla(case: str) -> None:
    assert deviation(sample(guesser(), VANILLA[case]), distribution()) < TOO_FAR


@pytest.mark.parametrize(
    "case",
    usual(
        ["chain, block", *(case for case in VANILLA if "tree" in case and "best" not in case)],
        ["chain, block", "drawn tree, token", "drawn static tree"],
    ),
)
def test_guesses_drawn_as_from_a_large_vocabulary(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_spec.sampling, "BY_COIN_FROM", 1)  # by coins
    monkeypatch.setattr(hf_spec.sampling, "IN_PARTS_FROM", 1)  # in parts
    monkeypatch.setattr(hf_spec.verify.warpers, "LARGE", 1)
    assert deviation(sample(guesser(), VANILLA[case]), distribution()) < TOO_FAR


@pytest.mark.parametrize(
    "case", usual(VANILLA, ["chain, block", "chain of best guesses", "drawn tree, token", "dynamic tree"])
)
def test_everything_is_banned_behind_an_end(case: str) -> None:
    """What could follow an end is never drawn, but a guess is weighed by what could follow it."""
    end, texts = 1, torch.tensor(list(itertools.product(range(VOCAB), repeat=DEPTH)))
    ends = (texts == end).long()
    texts = texts.masked_fill(ends.cumsum(1) > ends, 0)
    places = (texts * VOCAB ** torch.arange(DEPTH).flip(0)).sum(1)
    ended = torch.zeros(2, VOCAB**DEPTH, dtype=torch.double).index_add(1, places, distribution().view(2, -1))
    options = {"eos_token_id": end, "pad_token_id": 0, "bad_words_ids": [[end, token] for token in range(VOCAB)]}
    assert deviation(sample(guesser(), VANILLA[case], **options), ended) < TOO_FAR


@pytest.mark.slow
def test_many_rounds() -> None:
    found = [sample(guesser(), VANILLA["chain, block"], seed) for seed in range(6)]
    assert deviation(torch.cat(found), distribution()) < TOO_FAR


@pytest.mark.slow
@pytest.mark.parametrize("case", VANILLA)
def test_very_many_rounds(case: str) -> None:
    found = [sample(guesser(), VANILLA[case], seed, count=10_000) for seed in range(6)]
    assert deviation(torch.cat(found), distribution()) < TOO_FAR


@pytest.mark.parametrize("case", NGRAM)
def test_ngram(case: str) -> None:
    speculator = NgramSpeculator(max_ngram=2, corpus=[[4, 2, 4, 1, 3, 4, 2, 2, 0, 1, 1, 3]])
    assert deviation(sample(speculator, NGRAM[case]), distribution()) < TOO_FAR


@pytest.mark.parametrize(
    "case",
    usual(
        ["chain, block", "drawn tree, block", "drawn tree, token", "drawn static tree"],
        ["chain, block", "drawn tree, token"],
    ),
)
def test_eagle3_that_knows_fewer_tokens(case: str) -> None:
    torch.manual_seed(0)
    flags = {"draft_vocab_size": 3, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    eagle = Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(model().config, **flags)).eval()
    eagle.set_vocabulary(torch.tensor([1, 2, 4]))
    assert deviation(sample(eagle, VANILLA[case]), distribution()) < TOO_FAR


class Lying(Speculator):
    """Guess the best token and claim to have drawn it."""

    def inner(self, request: DraftContext) -> Drafter:
        return VanillaSpeculator(guesser()).drafter(request)

    def drafter(self, request: DraftContext) -> Drafter:
        drafter = self.inner(request)
        propose = drafter.propose

        def lie(news: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(news, limit)
            if proposal.q is None:
                return proposal
            tokens = proposal.tokens.clone()
            tokens[:, 1:] = proposal.q.argmax(-1)
            return replace(proposal, tokens=tokens)

        drafter.propose = lie  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_lie_is_found_out(rule: Any) -> None:
    config = SpeculationConfig(num_speculative_tokens=1, verification=rule)
    assert deviation(sample(Lying(), config), distribution()) > 3 * TOO_FAR


def test_another_distribution_is_found_out() -> None:
    """A slightly different distribution: the test is sharp enough to tell."""
    assert deviation(sample(guesser(), VANILLA["chain, block"], repetition_penalty=1.15), distribution()) > TOO_FAR


# --- The same text from the same seed --------------------------------------------------------------------------------


class Watched(Speculator):
    """Note whether guesses were to be drawn, and whether they were."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.drawn: list[bool] = []

    def drafter(self, request: DraftContext) -> Drafter:
        self.asked.append(request.sample)
        drafter = VanillaSpeculator(draft()).drafter(request)
        propose = drafter.propose

        def watch(news: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(news, limit)
            self.drawn += [proposal.q is not None] * (proposal.max_depth > 0)
            return proposal

        drafter.propose = watch  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize("shape", [*SHAPES, "drawn tree"])
def test_exact_verification_draws_no_guesses(shape: str) -> None:
    """The target's own draws decide: of guesses to compare them with, the best ones are right most often."""
    config = SHAPES.get(shape) or SpeculationConfig(tree="sampled", tree_topk=2, num_tree_tokens=6)
    for verification, drawn in {"exact": False, "block": True}.items():
        watched = Watched()
        target().generate(
            **prompts(2),
            do_sample=True,
            max_new_tokens=8,
            speculator=watched,
            speculation_config=replace(config, verification=verification),
        )
        assert watched.asked == [verification == "block"]
        assert watched.drawn and set(watched.drawn) == {drawn}


@pytest.mark.parametrize(
    ("options", "batch", "shape"),
    pairwise([{}, {"temperature": 0.7, "top_k": 9}, {"repetition_penalty": 1.3, "top_p": 0.9}], [1, 3], SHAPES),
)
def test_exact_verification_repeats_plain_sampling(options: dict[str, Any], batch: int, shape: str) -> None:
    inputs, config = prompts(batch), replace(SHAPES[shape], verification="exact")

    def generate(seed: int, **ours: Any) -> Tensor:
        torch.manual_seed(seed)
        ends = {"eos_token_id": [40, 41, 42, 43], "pad_token_id": 0}
        return target().generate(**inputs, **ends, do_sample=True, max_new_tokens=20, **options, **ours)

    plain = generate(7)
    assert not torch.equal(generate(8), plain)
    for speculator in (draft(), Oracle(plain, wrong=5)):
        assert torch.equal(generate(7, speculator=speculator, speculation_config=config), plain)
        custom = {"logits_processor": [lambda ids, scores: scores], "speculation_config": SHAPES[shape]}
        assert torch.equal(generate(7, speculator=speculator, **custom), plain), "lockstep draws as plain generate"
