"""Targets and drafts with recurrent states: lazy commit and stepping say what plain `generate` says."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import each_value, usual
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.utils import logging
from twins import Oracle, fitted, noisy

from hf_spec import AcceptedTokens, DraftContext, Drafter, NgramSpeculator, Proposal, SpeculationConfig, Speculator
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MedusaDraftModel
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.scoring.architectures import cache_name
from hf_spec.scoring.cache import TreeKVCache
from hf_spec.scoring.factory import reads_blocks, runner_for
from hf_spec.scoring.hooks import mark_as_ours
from hf_spec.scoring.plain import new_cache, plain_logits
from hf_spec.scoring.recurrent import Branches, Live, PerTokenRunner, SnapshotRunner, States
from hf_spec.scoring.runner import ModelRunner
from hf_spec.scoring.selfcheck import check_target

# Blocks go on from the state as single tokens do: lazy commit.
LAZY = """bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 mamba2
    olmo_hybrid qwen3_5_text qwen3_next qwen4_exp_text vl:lfm2_vl zaya""".split()
# Blocks forget the state (Mamba 1), or bound the time step as single tokens do not: stepping.
STEPPED = "falcon_mamba jamba mamba nemotron_h zamba zamba2".split()
# Their caches are of a kind of their own: lazy commit, and no draft but for other targets.
OWN = "minimax rwkv xlstm".split()
# Exact for one row: in batches they count positions in columns, or mix rows up.
ONE_ROW = {"inkling2_text": "relative position bias", "inkling_text": "relative position bias", "rwkv": "mix the rows"}
WIDER = ("qwen4_exp_text",)  # several residual streams side by side, which no EAGLE-3 draft was made for
CHAIN = SpeculationConfig(num_speculative_tokens=4)
TREE = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8)
BATCHES = {1: (13,), 3: (13, 9, 5), 8: (13, 9, 5, 12, 3, 7, 13, 2)}


@functools.cache
def target(name: str) -> PreTrainedModel:
    return build(name)


def plain(model: PreTrainedModel, batch: int = 1, **options: Any) -> Any:
    options = {"max_new_tokens": 16, "do_sample": False} | options
    return model.generate(**prompts(batch, BATCHES[batch]), **options)


def speculative(model: PreTrainedModel, batch: int, speculator: Any, config: SpeculationConfig, **options: Any) -> Any:
    options = {"speculation_config": config, "return_dict_in_generate": True} | options
    return plain(model, batch, speculator=speculator, **options)


def ngram(text: Tensor) -> NgramSpeculator:
    """Look into the text itself, with a wrong token at every fifth place."""
    flawed = text.clone()
    flawed[:, ::5] = (flawed[:, ::5] + 1) % 99
    return NgramSpeculator(corpus=flawed.tolist())


def feature_drafts(model: PreTrainedModel, text: Tensor) -> Iterator[Any]:
    """Teach drafts that read the target's hidden states a text (batch, length) by heart."""
    batch = len(text)
    mask = torch.nn.functional.pad(prompts(batch, BATCHES[batch])["attention_mask"], (0, 16), value=1)
    config, size = model.config.get_text_config(), {"intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    yield fitted(MedusaDraftModel(MedusaSpeculatorConfig.for_target(config, num_heads=3)), model, text, mask, steps=18)
    yield fitted(MTPDraftModel(MTPSpeculatorConfig.for_target(config, size)), model, text, mask)
    if config.model_type not in WIDER:
        eagle3 = Eagle3SpeculatorConfig.for_target(config, size, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        yield fitted(Eagle3DraftModel(eagle3), model, text, mask)


# --- The same text ---------------------------------------------------------------------------------------------------


def mistakes(name: str, config: SpeculationConfig, turn: int | None = None) -> Iterator[str]:
    """Name drafts and batches whose text is not plain `generate`'s, and drafts that were always right or wrong.

    With a ``turn`` each draft is tried in one of the batches, the next draft in the next one, and in further batches
    until it was right and wrong.
    """
    model = target(name)
    texts = {batch: plain(model, batch) for batch in ([1] if name in ONE_ROW else BATCHES)}
    text = texts[max(texts)]
    copies = () if name in (*OWN, *ONE_ROW) else (noisy(model),)
    for place, speculator in enumerate((ngram(text), *copies, *feature_drafts(model, text))):
        counts = Counter[str]()
        batches, first = list(texts), 0 if turn is None else (turn + place) % len(texts)
        for batch in batches[first:] + batches[:first]:
            text = texts[batch]
            out = speculative(model, batch, speculator, config)
            counts += Counter(right=out.speculation.accepted, all=out.speculation.proposed)
            if not torch.equal(out.sequences, text):
                yield f"{type(speculator).__name__}, batch {batch}"
            if turn is not None and 0 < counts["right"] < counts["all"]:
                break
        if not 0 < counts["right"] < counts["all"]:
            yield f"{type(speculator).__name__}: {counts}"


NAMES = (*LAZY, *STEPPED, *OWN, *sorted(ONE_ROW.keys() - OWN))
# The others have layers of the same kinds.
USUAL = """falcon_h1 kimi_linear lfm2 mamba2 qwen3_next qwen4_exp_text zaya jamba mamba zamba2 minimax rwkv xlstm
    inkling_text""".split()


@pytest.mark.parametrize("name", usual(NAMES, USUAL))
def test_same_text_as_plain_generate(name: str) -> None:
    """With n-grams, with a draft that is recurrent too, and with Medusa, MTP and EAGLE-3 drafts."""
    kind = PerTokenRunner if name in STEPPED else SnapshotRunner
    assert type(runner_for(target(name), new_cache(target(name)), one_chain=True)) is kind
    assert list(mistakes(name, CHAIN, turn=NAMES.index(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_text_in_every_batch(name: str) -> None:
    assert list(mistakes(name, CHAIN)) == []


@pytest.mark.parametrize("name", usual(["jamba", "lfm2", "zaya"], ["jamba", "lfm2"]))
def test_same_text_with_trees(name: str) -> None:
    assert list(mistakes(name, TREE, turn=NAMES.index(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jamba", "lfm2", "zaya"])
def test_same_text_with_trees_in_every_batch(name: str) -> None:
    assert list(mistakes(name, TREE)) == []


@pytest.mark.parametrize("name", ["falcon_h1", "mamba", "minimax", "xlstm"])
def test_rows_that_end_early_and_lengths_that_adapt(name: str) -> None:
    model = target(name)
    text = plain(model, 8)
    ends = {"eos_token_id": [int(text[1, -6]), int(text[4, -12])]}
    expected = plain(model, 8, **ends)
    assert (expected == 0).any()
    config = CHAIN.merge(num_speculative_tokens="auto")
    assert torch.equal(speculative(model, 8, ngram(text), config, **ends).sequences, expected)


@pytest.mark.parametrize("wrong", [2, 3, 4])
def test_no_position_lies_beyond_the_longest_text(wrong: int) -> None:
    """Where rotary frequencies change for all rows, though short rows' blocks are padded to the width of others."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 13 + 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0], "partial_rotary_factor": 1.0}
    model = build("qwen3_next", rope_parameters=rope | factors)
    text = plain(model, 3)
    assert torch.equal(speculative(model, 3, Oracle(text, wrong), CHAIN).sequences, text)


class Custom(LogitsProcessor):
    """A processor that the loop knows nothing about: rows advance in lockstep."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - (torch.arange(scores.shape[-1]) == input_ids[:, -3, None]) * 5.0


@pytest.mark.parametrize("name", ["lfm2", "mamba", "minimax", "xlstm"])
def test_lockstep(name: str) -> None:
    model = target(name)
    options = {"logits_processor": LogitsProcessorList([Custom()])}
    text = plain(model, 3, **options)
    assert torch.equal(speculative(model, 3, Oracle(text), CHAIN, **options).sequences, text)


@pytest.mark.parametrize(
    "name",
    usual(
        ["falcon_h1", "qwen3_next", "jamba", "qwen4_exp_text", "inkling_text", "minimax"],
        ["qwen3_next", "jamba", "inkling_text", "minimax"],
    ),
)
def test_turns(name: str) -> None:
    """One row's cache is handed back with all the text, and may go on plain or with guesses."""
    model = target(name)
    text, inputs = plain(model), prompts(1)["input_ids"][:, :13]
    for first in (Oracle(text), Oracle(text, wrong=3)):
        out = speculative(model, 1, first, CHAIN)
        ids = torch.cat([out.sequences, inputs[:, :3]], dim=1)
        cache = plain(model, return_dict_in_generate=True).past_key_values
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
        guessing = {"speculator": ngram(text), "speculation_config": CHAIN}
        for options in ({}, guessing) if name not in OWN else ({},):
            cache = copy.deepcopy(out.past_key_values)
            again = model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache, **options)
            assert torch.equal(again, expected)


def test_a_turn_after_assisted_decoding() -> None:
    """That of transformers leaves the cache recording, so that convolution states grow."""
    model, inputs = target("lfm2"), prompts(1)
    first = model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    found = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, prompt_lookup_num_tokens=3
    )
    ids = torch.cat([first.sequences, inputs["input_ids"][:, :3]], dim=1)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, past_key_values=first.past_key_values)
    cache = found.past_key_values
    assert any(getattr(layer, "record_past", False) for layer in cache.layers)
    text = model.generate(
        ids, max_new_tokens=12, do_sample=False, past_key_values=cache, speculator=Oracle(expected, wrong=3)
    )
    assert torch.equal(text, expected)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gemma4_text"])
def test_embeddings_in_the_place_of_tokens(name: str) -> None:
    model = target(name)
    embeds = model.get_input_embeddings()(prompts(1)["input_ids"]).detach()
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False)
    for _ in range(2):
        found = model.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False, speculator=ngram(expected))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_the_state_handed_back_has_read_all_that_was_carried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens the last block left: none, exactly one, several."""
    model, counts, release = target(name), set[int](), SnapshotRunner.release

    def counted(runner: SnapshotRunner, committed: int) -> Any:
        counts.add(len(runner._carried[0]))
        return release(runner, committed)

    monkeypatch.setattr(SnapshotRunner, "release", counted)
    text = plain(model)
    for end in range(13 + 1, 13 + 9):
        options = {"eos_token_id": int(text[0, end]), "pad_token_id": 0, "return_dict_in_generate": True}
        expected = plain(model, **options)
        cache = expected.get(cache_name(model), expected.past_key_values)
        for wrong in (1, 3, 1000):
            out = speculative(model, 1, Oracle(text, wrong), CHAIN, **options)
            assert torch.equal(out.sequences, expected.sequences)
            for mine, theirs in zip(out.past_key_values.layers, cache.layers, strict=True):
                for kept in ("conv_states", "recurrent_states"):
                    for number, state in getattr(theirs, kept, {}).items():
                        torch.testing.assert_close(getattr(mine, kept)[number], state, atol=1e-4, rtol=1e-4)
                if isinstance(getattr(theirs, "keys", None), Tensor):
                    torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
    assert {0, 1} < counts


# --- The same distribution
# ----------------------------------------------------------------------------------------------------

VOCABULARY, NEW, ROWS, ROUNDS = 4, 4, 1500, 3
TEMPERATURE = 1.5


def distribution_of_texts(model: PreTrainedModel, prompt: Tensor, temperature: float) -> Tensor:
    """Enumerate the distribution of all texts of NEW tokens behind a prompt (1, n), one token at a time."""
    texts = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * NEW)  # (texts, NEW)
    read = torch.cat([prompt[:, -1:].expand(len(texts), 1), texts[:, :-1]], dim=1)
    head = prompt[:, :-1].expand(len(texts), -1)
    logits = plain_logits(model, head, torch.ones_like(head), read.split(1, dim=1))
    logs = (logits.double() / temperature).log_softmax(-1).gather(2, texts[:, :, None])
    return logs.sum((1, 2)).exp()


def deviations(counts: Tensor, distribution: Tensor) -> float:
    """Return how far ``counts`` are from ``distribution``, in standard deviations of a chi-square test."""
    expected = distribution * counts.sum()
    rare = expected < 5
    pairs = torch.stack([counts.double(), expected])
    pairs = torch.cat([pairs[:, ~rare], pairs[:, rare].sum(1, keepdim=True)], dim=1)
    freedom = pairs.shape[1] - 1
    return float((((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
@torch.no_grad()
def test_sampled_texts_have_the_targets_distribution(name: str) -> None:
    model = build(name, vocab_size=VOCABULARY)
    prompt = prompts(1, (5,), VOCABULARY)["input_ids"]
    options = {"speculator": noisy(model, 0.3), "num_speculative_tokens": 3, "max_new_tokens": NEW}
    torch.manual_seed(0)
    counts = torch.zeros(VOCABULARY**NEW)
    for _ in range(ROUNDS):
        ids = model.generate(prompt.expand(ROWS, -1), do_sample=True, top_k=0, temperature=TEMPERATURE, **options)
        place = ids[:, 5:] @ VOCABULARY ** torch.arange(NEW - 1, -1, -1)
        counts += place.bincount(minlength=len(counts))
    assert abs(deviations(counts, distribution_of_texts(model, prompt, TEMPERATURE))) < 4
    assert deviations(counts, distribution_of_texts(model, prompt, TEMPERATURE * 0.75)) > 10


# --- What a drafter sees ---------------------------------------------------------------------------------------------


class Spy(Speculator):
    """Guess like an oracle and write down the features of every text position."""

    def __init__(self, text: Tensor) -> None:
        self.oracle = Oracle(text)
        self.features: list[list[Tensor]] = [[] for _ in text]

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return (1, 3)

    def drafter(self, request: DraftContext) -> Drafter:
        return _SpyDrafter(self, request)


class _SpyDrafter(Drafter):
    def __init__(self, spy: Spy, request: DraftContext) -> None:
        self._drafter = spy.oracle.drafter(request)
        self._features = spy.features

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        assert news.features is not None
        for written, row, count in zip(self._features, news.features, news.counts.tolist(), strict=True):
            written.extend(row[:count])
        return self._drafter.propose(news, limit)

    def keep_rows(self, rows: Tensor) -> None:
        self._features = [self._features[row] for row in rows.tolist()]
        self._drafter.keep_rows(rows)


@pytest.mark.parametrize("name", ["kimi_linear", "mamba2"])
@torch.no_grad()
def test_features_are_those_of_their_positions(name: str) -> None:
    """Carried tokens are read again; their features are not shown again."""
    model, inputs = target(name), prompts(3, BATCHES[3])
    text = plain(model, 3)
    spy = Spy(text)
    assert torch.equal(speculative(model, 3, spy, CHAIN).sequences, text)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 16, dtype=torch.long)], dim=1)
    states = model(text, attention_mask=mask, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[3]], dim=-1)[:, 12:]  # from the prompt's last token on
    for row, written in enumerate(spy.features):
        assert len(written) > 10
        torch.testing.assert_close(torch.stack(written), expected[row, : len(written)], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "config"),
    [("falcon_h1", TREE), ("mamba", CHAIN), ("mamba2", CHAIN), ("mamba2", TREE), ("qwen4_exp_text", CHAIN)],
)
def test_a_draft_equal_to_its_target_is_always_right(name: str, config: SpeculationConfig) -> None:
    """Its states must be those behind the text, whichever guesses it has read in between."""
    model = target(name)
    out = speculative(model, 3, copy.deepcopy(model), config, max_new_tokens=17)
    depth = config.num_speculative_tokens
    assert out.speculation.counts.accepted_at[:1] == out.speculation.counts.proposed_at[:1]
    assert out.speculation.steps == -(-16 // (1 + depth)), out.speculation


# --- Costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next"])
def test_no_step_runs_an_extra_forward(name: str) -> None:
    model = target(name)
    text = plain(model, 3)
    for wrong in (2, 3, 7):
        speculator = Oracle(text, wrong)
        steps = speculative(model, 3, speculator, CHAIN).speculation.steps
        forwards: list[Any] = []
        hook = model.register_forward_hook(mark_as_ours(lambda *_, seen=forwards: seen.append(None)))
        speculative(model, 3, speculator, CHAIN, return_dict_in_generate=False)
        hook.remove()
        assert len(forwards) == 1 + steps < 16


class Weigher(Oracle):
    """Count the tensors of given shapes that are alive when guesses are asked for."""

    def __init__(self, text: Tensor, shapes: set[torch.Size]) -> None:
        super().__init__(text)
        self.shapes = shapes
        self.found: list[int] = []

    def drafter(self, request: DraftContext) -> Drafter:
        drafter, steps = super().drafter(request), iter(range(1000))
        propose = drafter.propose

        def weighing(news: AcceptedTokens, limit: int) -> Proposal:
            if next(steps) % 12 == 1 and len(news.tokens) == len(self.text):
                alive = (thing for thing in gc.get_objects() if type(thing) is Tensor)
                self.found.append(sum(tensor.shape in self.shapes for tensor in alive))
            return propose(news, limit)

        drafter.propose = weighing  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize("tree", [None, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,)]], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_draft_goes_on_from_its_own_states_when_rows_have_ended(name: str, tree: Any) -> None:
    """Of the target's own weights every guess is right: each step emits five tokens until its row's end."""
    model = target(name)
    new = plain(model, 3)[:, BATCHES[3][0] :].tolist()
    end = new[0][5]  # for the first row, after six tokens or fewer
    config = SpeculationConfig(num_speculative_tokens=4 if tree is None else None, tree=tree)
    options = {"eos_token_id": end, "pad_token_id": 0, "return_dict_in_generate": True}
    out = plain(model, 3, speculator=copy.deepcopy(model), speculation_config=config, **options)
    rows = out.speculation.per_row
    assert min(row.emitted for row in rows) < 7 and max(row.emitted for row in rows) >= 10
    assert [row.steps for row in rows] == [-(-row.emitted // 5) for row in rows]


@pytest.mark.parametrize(("name", "copies"), [("mamba2", 2), ("mamba", 1)])
def test_states_are_saved_once(name: str, copies: int) -> None:
    """Lazy commit holds one copy; stepping holds none between two steps; neither gathers any over a long text."""
    gc.collect()  # of earlier tests
    model = target(name)
    text = plain(model, 3, max_new_tokens=200)
    cache = new_cache(model)
    model(torch.ones(3, 5, dtype=torch.long), cache_params=cache)
    states = list(Live(cache.layers))
    weigher = Weigher(text, {state.shape for state in states})
    count = len(states)
    del cache, states
    assert torch.equal(speculative(model, 3, weigher, CHAIN, max_new_tokens=200).sequences, text)
    assert weigher.found == [copies * count] * len(weigher.found)
    assert len(weigher.found) > 2


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2", "minimax"])
def test_no_cache_waits_for_the_garbage_collector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of references would keep the memory of a call during the next ones."""
    model = target(name)
    text = plain(model, 3)
    alive = weakref.WeakSet[TreeKVCache]()
    made = TreeKVCache.__init__
    monkeypatch.setattr(TreeKVCache, "__init__", lambda self, *args: (made(self, *args), alive.add(self))[0])
    gc.collect()
    gc.disable()
    try:
        speculative(model, 3, Oracle(text), CHAIN)
        assert not alive
    finally:
        gc.enable()


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    modules = [(sorted(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]
    return modules, model.config.to_dict(), model.generation_config.to_dict()


@pytest.mark.parametrize(("name", "config"), each_value(["mamba", "qwen3_next"], [CHAIN, TREE]))
def test_nothing_is_left_on_the_model(name: str, config: SpeculationConfig) -> None:
    model = build(name)
    before, state = plain(model, 3), state_of(model)
    speculative(model, 3, Oracle(before), config)
    assert torch.equal(plain(model, 3), before)
    assert state_of(model) == state
    drafts = list(feature_drafts(model, plain(model, 8)))
    state = state_of(model)  # transformers leaves hooks of its own once it was asked for hidden states
    for draft in drafts:
        speculative(model, 3, draft, config)
        assert torch.equal(plain(model, 3), before)
        assert state_of(model) == state


# --- What is refused, and what the self-check catches ----------------------------------------------------------------


def test_refusals_name_the_reason() -> None:
    model = target("recurrent_gemma")
    with pytest.raises(ValueError, match="in its modules"):
        plain(model, speculator="ngram")
    with pytest.raises(ValueError, match=r"cannot be a draft.*in its modules"):
        plain(target("llama"), speculator=model)


@pytest.mark.parametrize("name", ONE_ROW)
def test_what_takes_one_row_refuses_batches_and_trees(name: str) -> None:
    model = target(name)
    with pytest.raises(ValueError, match=rf"one row at a time only.*{ONE_ROW[name]}"):
        plain(model, 3, speculator="ngram")
    with pytest.raises(ValueError, match=r"use a chain \(tree=None\)"):
        speculative(model, 1, "ngram", TREE)


@pytest.mark.parametrize("name", ["minimax", "xlstm"])
def test_states_of_an_own_kind_take_back_one_chain(name: str) -> None:
    model = target(name)
    with pytest.raises(ValueError, match=r"a cache of its own kind.*use a chain \(tree=None\)"):
        speculative(model, 1, "ngram", TREE)
    with pytest.raises(ValueError, match=r"cannot be a draft.*a cache of its own kind"):
        plain(target("llama"), speculator=model)
    argument = cache_name(model)
    state = model(prompts(1)["input_ids"], use_cache=True)[argument]
    with pytest.raises(ValueError, match="a state handed to"):
        plain(model, speculator="ngram", **{argument: state})


def test_trees_are_refused_where_neighbouring_slots_are_pooled() -> None:
    with pytest.raises(ValueError, match=r"neighbouring slots.*; use a chain \(tree=None\)"):
        speculative(target("qwen4_exp_text"), 1, "ngram", TREE)


class Liar(Oracle):
    """Guess trees whatever the configuration says."""

    def drafter(self, request: DraftContext) -> Drafter:
        return super().drafter(dataclasses.replace(request, config=TREE))


@pytest.mark.parametrize(
    ("name", "options"), [("mamba2", {}), ("llama", {}), ("llama", {"prefill_chunk_size": 2})], ids=str
)
def test_trees_of_a_drafter_that_was_asked_for_chains(name: str, options: dict[str, Any]) -> None:
    """Also where the prompt is read first."""
    model = target(name)
    with pytest.raises(ValueError, match="a tree where the configuration promised chains"):
        speculative(model, 3, Liar(plain(model, 3)), CHAIN, **options)


def states_in(cache: Any) -> list[Tensor]:
    """List what the layers of a cache hold, layer by layer."""
    held = [getattr(layer, name, {}) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    keys = [layer.keys for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    return [state for states in held for state in states.values() if state is not None] + keys


@pytest.mark.parametrize(("name", "shape"), each_value(["mamba2", "mamba", "qwen3_next"], ["chain", "tree"]))
def test_the_cache_of_rows_that_are_equally_long_is_handed_back(name: str, shape: str) -> None:
    """The rows reach the limit in different steps, with different numbers of tokens that are still to be read."""
    model = target(name)
    expected, text = plain(model, 3, return_dict_in_generate=True), plain(model, 3)
    wanted = states_in(expected.get(cache_name(model), expected.past_key_values))
    ragged = 0
    for wrong in (2, 3, 5, 7):
        out = speculative(model, 3, Oracle(text, wrong), CHAIN if shape == "chain" else TREE)
        assert torch.equal(out.sequences, text)
        ragged += len({row.steps for row in out.speculation.per_row}) > 1
        found = states_in(out.past_key_values)
        assert len(found) == len(wanted) > 0
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert ragged, "the rows ended in the same step"


def test_no_cache_of_rows_of_different_lengths_is_handed_back(caplog: pytest.LogCaptureFixture) -> None:
    model = target("mamba2")
    text = plain(model, 3)
    logging.warning_once.cache_clear()
    logging.enable_propagation()
    try:
        options = {"eos_token_id": int(text[0, 18]), "pad_token_id": 0}
        for _ in range(2):
            assert speculative(model, 3, Oracle(text), CHAIN, **options).past_key_values is None
    finally:
        logging.disable_propagation()
    assert [record.message for record in caplog.records if "one row at a time" in record.message][1:] == []
    assert "different lengths" in caplog.text
    with pytest.raises(ValueError, match="several rows"):
        plain(model, 3, speculator="ngram", cache_params=new_cache(model))


def states_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(States, "settle", lambda self, right: None)


def states_saved_too_early(patch: pytest.MonkeyPatch) -> None:
    settle = States.settle
    patch.setattr(States, "settle", lambda self, right: settle(self, [True] * len(right)))


def nodes_read_behind_one_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branches, "read_after", lambda self, parents: None)


def carried_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    commit = SnapshotRunner.commit

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, *args, **kwargs)
        self._carried = [[] for _ in self._carried]

    patch.setattr(SnapshotRunner, "commit", forgetful)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mamba2", states_not_restored),
        ("mamba2", states_saved_too_early),
        ("mamba2", carried_tokens_forgotten),
        ("lfm2", states_not_restored),
        ("jamba", nodes_read_behind_one_another),
    ],
)
def test_planted_mistakes_are_caught(name: str, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    mistake(monkeypatch)
    with pytest.raises(ValueError, match="of draft tokens differently from single steps"):
        check_target(model, trees=name in STEPPED)


@pytest.mark.parametrize("name", ["jamba", "mamba", "zamba2"])
def test_a_model_that_misreads_blocks_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reads_blocks(target(name))
    monkeypatch.setattr("hf_spec.scoring.factory.reads_blocks", lambda model: True)
    with pytest.raises(ValueError, match="a chain of draft tokens differently from single steps"):
        check_target(build(name), trees=False)


def test_attention_alone_needs_neither() -> None:
    model = target("llama")
    assert type(runner_for(model, new_cache(model), one_chain=True)) is ModelRunner


@pytest.mark.parametrize(
    ("name", "layers"),
    [("granitemoehybrid", {"layer_types": ["attention"] * 4}), ("bamba", {"attn_layer_indices": [0, 1, 2, 3]})],
)
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_hybrid_of_attention_layers_alone(name: str, layers: dict[str, Any], config: SpeculationConfig) -> None:
    """As the small models of Granite 4.0 are; Bamba scores one token of a prompt, however many it is asked for."""
    model = build(name, **layers)
    text = plain(model, 3)
    assert torch.equal(speculative(model, 3, ngram(text), config).sequences, text)


def test_rows_with_tokens_to_read_again_keep_the_draft_tokens_that_two_proposals_have_room_for() -> None:
    """A block has nine columns for chains of four: none, four and seven carried tokens leave room for 8, 4 and 1."""
    runner = SnapshotRunner(target("qwen3_next"))
    runner._carried = [[], [5] * 4, [5] * 7]
    proposal = Proposal.chain(torch.tensor([5, 6, 7]), torch.arange(12).view(3, 4))
    assert runner.clip(proposal, 4).present.sum(1).tolist() == [5, 5, 2]
