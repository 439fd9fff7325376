"""Every kind of draft in continuous batching: drafters of requests that come and go are asked together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import build
from batches import flawed, greedy, plain_texts, prompts_of, serve
from lengths import force_lengths
from test_block_exactness import drafts_for
from test_block_exactness import fitted as block_fitted
from test_mtp import GLM, golden
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from twins import fitted, noisy

from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    HybridSpeculator,
    NgramSpeculator,
    SpeculationConfig,
    SpeculationStats,
    Speculator,
)
from hf_spec.batching.drafting import Drafters
from hf_spec.batching.engine import _Processor, _Ring
from hf_spec.checkpoints.resolve import as_speculator
from hf_spec.drafts import draft_kv
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MedusaDraftModel
from hf_spec.drafts.peagle import modeling as peagle
from hf_spec.policy.adaptive import AdaptiveLength
from hf_spec.policy.base import DraftSource

MODELS = {
    "full": "llama",
    "sliding": "mistral",
    "mixed": "gemma3_text",
    "experts": "qwen3_moe",
    "sinks": "gpt_oss",
}
KINDS = ("n-gram", "vanilla", "eagle3", "eagle", "medusa", "dflash", "dspark", "peagle")
CHAIN = SpeculationConfig(num_speculative_tokens=4)
PROMPTS = prompts_of(9, 99)


@functools.cache
def model(name: str) -> PreTrainedModel:
    return build(name, num_hidden_layers=4 if name in ("gemma3_text", "gpt_oss") else 3)


@functools.cache
def texts(name: str) -> list[list[int]]:
    return plain_texts(model(name), PROMPTS, greedy())


@functools.cache
@torch.enable_grad()
def draft(kind: str, name: str) -> Any:
    """Make a draft that is right now and then about the target of this ``name``."""
    target = model(name)
    if kind == "n-gram":
        return flawed(texts(name), 99)
    if kind == "vanilla":
        return noisy(target)
    torch.manual_seed(0)
    flags = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    rows = [prompt + text for prompt, text in zip(PROMPTS, texts(name), strict=True)]
    width = min(40, max(map(len, rows)))
    text = torch.tensor([[0] * (width - len(row)) + row[-width:] for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * min(width, len(row)) for row in rows])
    if kind in ("dflash", "dspark", "peagle"):
        return block_fitted(drafts_for(target)[kind], target, text, mask, steps=24)
    made = {
        "eagle3": lambda: Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(target.config, **flags)),
        "eagle": lambda: EagleDraftModel(EagleSpeculatorConfig.for_target(target.config)),
        "medusa": lambda: MedusaDraftModel(MedusaSpeculatorConfig.for_target(target.config, num_heads=3)),
    }
    return fitted(made[kind](), target, text, mask, steps=16)


SLOW = [(layers, kind) for layers in ("mixed", "sliding", "experts", "sinks") for kind in KINDS]
CASES = [("full", kind) for kind in KINDS] + [("mixed", kind) for kind in KINDS[:3]] + [("sliding", "n-gram")]


@pytest.mark.parametrize(
    ("layers", "kind"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES]
)
def test_greedy_text_is_plain_generates(layers: str, kind: str) -> None:
    name = MODELS[layers]
    at_most = (1, 4, 16)[(list(MODELS).index(layers) + KINDS.index(kind)) % 3]
    found, manager = serve(
        model(name), PROMPTS, at_most, seed=KINDS.index(kind), speculator=draft(kind, name), speculation_config=CHAIN
    )
    assert [output.generated_tokens for output in found] == texts(name)
    stats = SpeculationStats.merge([output.speculation for output in found])
    assert 0 < stats.accepted < stats.proposed
    assert manager.speculation.draft_slots == 0


TREES = {
    "dynamic": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8),
    "static": SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(("layers", "kind"), [("full", "n-gram"), ("mixed", "vanilla"), ("sinks", "n-gram")])
def test_trees(layers: str, kind: str, shape: str) -> None:
    name = MODELS[layers]
    found, manager = serve(model(name), PROMPTS, 4, speculator=draft(kind, name), speculation_config=TREES[shape])
    assert [output.generated_tokens for output in found] == texts(name)
    counts = manager.speculation.counts
    assert 0 < counts.accepted < counts.proposed
    assert manager.speculation.draft_slots == 0


@pytest.mark.parametrize("method", ["_mask_trees", "_move_accepted_keys"])
def test_trees_need_their_own_places(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks and positions, or without moving what was accepted, the text is another."""
    monkeypatch.setattr(_Processor, method, lambda *args: None)
    found, _ = serve(
        model("gemma3_text"),
        PROMPTS,
        4,
        speculator=draft("vanilla", "gemma3_text"),
        speculation_config=TREES["static"],
    )
    assert [output.generated_tokens for output in found] != texts("gemma3_text")


def test_mtp_layers_of_the_target() -> None:
    """Two readers stand behind one another; both have slots for each request."""
    target, own, _ = golden(GLM)
    vocabulary = target.config.vocab_size
    prompts = prompts_of(7, vocabulary)
    expected = plain_texts(target, prompts, greedy())
    found, manager = serve(target, prompts, 4, speculator=own, speculation_config=CHAIN)
    assert [output.generated_tokens for output in found] == expected
    assert manager.speculation.counts.accepted


def test_a_ring_needs_room_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, rejected guesses push keys out of the window, and the text is another."""
    take_over = _Ring.take_over
    monkeypatch.setattr(_Ring, "take_over", lambda allocator, spare: take_over(allocator, 0))
    found, _ = serve(model("mistral"), PROMPTS, 4, speculator=draft("vanilla", "mistral"), speculation_config=CHAIN)
    assert [output.generated_tokens for output in found] != texts("mistral")


# --- Asked together --------------------------------------------------------------------------------------------------


def request_of(target: PreTrainedModel, speculator: Speculator, prompt: Tensor, sample: bool) -> DraftContext:
    layers = speculator.feature_layers(target)
    with torch.no_grad():
        states = target(prompt[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in layers], dim=-1) if layers else None
    mask = torch.ones_like(prompt[None])
    return DraftContext(target, prompt[None], mask, features, CHAIN, lambda logits: logits.log_softmax(-1), sample)


def accepted_of(counts: list[int], widths: int | None, seed: int) -> list[AcceptedTokens]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AcceptedTokens(
            torch.randint(8, 99, (1, count), generator=generator),
            torch.tensor([count]),
            None if widths is None else torch.randn(1, count, widths, generator=generator),
        )
        for count in counts
    ]


def stacked(news: list[AcceptedTokens]) -> AcceptedTokens:
    """Put news side by side, the shorter ones padded on the right."""

    def padded(parts: list[Tensor]) -> Tensor:
        return pad_sequence([part[0] for part in parts], batch_first=True)

    features = None if news[0].features is None else padded([one.features for one in news])
    return AcceptedTokens(padded([one.tokens for one in news]), torch.cat([one.counts for one in news]), features)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_joined_drafters_guess_as_each_alone(kind: str) -> None:
    """Rows come and go between proposals; the twin asks each drafter by itself."""
    target = model("gemma3_text")
    speculator = as_speculator(draft(kind, "gemma3_text"), target)
    prompts = [torch.tensor(prompt) for prompt in ([9], [*range(10, 31)], [50, 51, 52], [60] * 12)]

    def start(i: int) -> tuple[Drafter, DraftContext]:
        request = request_of(target, speculator, prompts[i], sample=False)
        return speculator.drafter(request), request

    alone = {i: start(i)[0] for i in range(4)}
    joined, request = start(0)
    widths = None if request.features is None else request.features.shape[-1]
    rows, seed = [0], itertools.count()
    steps = [([1], None), ([], None), ([2, 3], None), ([], [0, 2, 3]), ([], None), ([], [2, 1]), ([], None)]
    for coming, staying in steps:
        for i in coming:
            assert joined.join(start(i)[0])
            rows.append(i)
        if staying is not None:
            joined.keep_rows(torch.tensor(staying))
            rows = [rows[i] for i in staying]
        news = accepted_of([1 + (i + len(rows)) % 3 for i in rows], widths, next(seed))
        proposal = joined.propose(stacked(news), 4)
        for place, (i, own) in enumerate(zip(rows, news, strict=True)):
            expected = alone[i].propose(own, 4)
            nodes = expected.tokens.shape[1]
            assert proposal.tokens[place, :nodes].tolist() == expected.tokens[0].tolist()
            assert not proposal.present[place, nodes:].any()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_padded_row_joins_as_what_it_is_or_not_at_all(kind: str) -> None:
    target = model("gemma3_text")
    speculator = as_speculator(draft(kind, "gemma3_text"), target)
    prompts = [torch.tensor(prompt) for prompt in ([*range(10, 24)], [50, 51, 52, 53, 54])]

    def start(i: int, padding: int) -> Drafter:
        whole = request_of(target, speculator, prompts[i], sample=False)
        features = None if whole.features is None else torch.nn.functional.pad(whole.features, (0, 0, padding, 0))
        ids, mask = (torch.nn.functional.pad(one, (padding, 0)) for one in (whole.input_ids, whole.attention_mask))
        return speculator.drafter(replace(whole, input_ids=ids, attention_mask=mask, features=features))

    widths = len(speculator.feature_layers(target)) * target.config.hidden_size or None
    for paddings in ((0, 3), (3, 0), (2, 3)):
        (mine, theirs), alone = ([start(i, padding) for i, padding in enumerate(paddings)] for _ in range(2))
        accepted = accepted_of([1, 2], widths, 0)
        expected = [drafter.propose(own, 4) for drafter, own in zip(alone, accepted, strict=True)]
        if mine.join(theirs):
            found = list(mine.propose(stacked(accepted), 4).tokens)
        else:
            found = [drafter.propose(own, 4).tokens[0] for drafter, own in zip((mine, theirs), accepted, strict=True)]
        for row, one in zip(found, expected, strict=True):
            assert row[: one.tokens.shape[1]].tolist() == one.tokens[0].tolist()


@pytest.mark.parametrize("counts", [[40, 40, 40], [40, 17, 23]], ids=["equal", "ragged"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "peagle"])
@torch.no_grad()
def test_what_many_plain_steps_wrote_is_read_without_logits_of_all(
    kind: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model("gemma3_text")
    speculator = as_speculator(draft(kind, "gemma3_text"), target)
    widths = len(speculator.feature_layers(target)) * target.config.hidden_size
    plain, found = type(speculator).logits, []
    scored: list[int] = []

    def counting(self: Any, states: Tensor, *args: Any) -> Tensor:
        scored.append(states.shape[1])
        return plain(self, states, *args)

    monkeypatch.setattr(type(speculator), "logits", counting)
    for many in (16, 99):
        for module in (draft_kv, peagle):
            monkeypatch.setattr(module, "LAST_LOGITS_FROM", many)
        requests = [request_of(target, speculator, torch.tensor([9, 8, n]), sample=False) for n in (10, 11, 12)]
        first, *others = map(speculator.drafter, requests)
        assert all(first.join(other) for other in others)
        scored.clear()
        for step, news in enumerate((counts, [1, 2, 3], [20, 1, 1])):
            found.append(first.propose(stacked(accepted_of(news, widths, step)), 4).tokens)
        assert (max(scored) < 17) == (many == 16)
    for one, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one, other)


def hybrid() -> HybridSpeculator:
    memory = NgramSpeculator(history_size=500)
    memory.learn([[*range(10, 40)], [60] * 9 + [61, 62]])
    return HybridSpeculator(as_speculator(draft("eagle3", "gemma3_text"), model("gemma3_text")), memory)


def kept_history() -> NgramSpeculator:
    speculator = NgramSpeculator(history_size=500)
    speculator.learn([[*range(10, 40)], [60] * 9 + [61, 62]])
    return speculator


@pytest.mark.parametrize("make", [hybrid, kept_history])
@torch.no_grad()
def test_joined_memories_guess_as_each_alone(make: Callable[[], Speculator]) -> None:
    """What became text follows what is remembered in one row, so that its chain is taken and the draft's put off."""
    target, ways = model("gemma3_text"), (make(), make())
    prompts = [torch.tensor(prompt) for prompt in ([9, 8], [10, 11, 12], [60] * 4)]

    def start(speculator: Speculator, i: int) -> Drafter:
        return speculator.drafter(request_of(target, speculator, prompts[i], sample=False))

    alone = [start(ways[1], i) for i in range(3)]
    joined, widths = start(ways[0], 0), None
    if layers := ways[0].feature_layers(target):
        widths = len(layers) * target.config.hidden_size
    rows, recalled = [0], 0
    for step, coming in enumerate(([1], [], [2], [], [])):
        for i in coming:
            assert joined.join(start(ways[0], i))
            rows.append(i)
        news = accepted_of([1] * len(rows), widths, step)
        for i, one in zip(rows, news, strict=True):
            if i == 1:
                one.tokens.fill_(13 + step)
        proposal = joined.propose(stacked(news), 6)
        for place, (i, own) in enumerate(zip(rows, news, strict=True)):
            expected = alone[i].propose(own, 6)
            recalled += expected.tokens[0, 1:4].tolist() == [14 + step, 15 + step, 16 + step]
            nodes = int(expected.present[0].sum())
            assert proposal.tokens[place, :nodes].tolist() == expected.tokens[0, :nodes].tolist()
            assert not proposal.present[place, nodes:].any()
    assert recalled >= 2  # in other steps the draft promises more


def test_requests_with_draft_and_memory_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as the draft alone, whose rows stand side by side."""
    groups = []
    propose = Drafters.propose

    def counted(self: Drafters, *args: Any) -> bool:
        late = propose(self, *args)
        groups.append(len(self._groups))
        return late

    monkeypatch.setattr(Drafters, "propose", counted)
    speculator = HybridSpeculator(draft("eagle3", "gemma3_text"), NgramSpeculator(history_size=300))
    found, _ = serve(model("gemma3_text"), PROMPTS, 4, speculator=speculator, speculation_config=CHAIN)
    assert [output.generated_tokens for output in found] == texts("gemma3_text")
    assert set(groups) == {1}


# --- Depth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["n-gram", "vanilla", "eagle3", "dflash"])
def test_drafts_catch_up_after_ordinary_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps guess nothing no draft is asked; the next one is told all that became text since."""
    depths = itertools.cycle([0, 0, 3, 0, 2, 4])
    force_lengths(monkeypatch, lambda rows: next(depths))
    found, manager = serve(model("llama"), PROMPTS, 4, speculator=draft(kind, "llama"))
    assert [output.generated_tokens for output in found] == texts("llama")
    assert manager.speculation.counts.accepted


@pytest.mark.clock
def test_depth_adapts_by_the_clock() -> None:
    found, manager = serve(model("llama"), PROMPTS, 4, speculator=draft("vanilla", "llama"))
    assert [output.generated_tokens for output in found] == texts("llama")
    policy = manager.speculation.policy
    assert isinstance(policy, AdaptiveLength) and "by measured time" in found[-1].speculation.draft_lengths
    assert policy.cost.plain(4) and policy.cost.curve(4, DraftSource.MODEL)
