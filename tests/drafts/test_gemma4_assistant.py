"""Gemma 4's assistants: numbers of transformers' code, a slow twin that reads all anew, and text and distributions."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import CLOSE, GOLDENS, load_target, outputs
from packaging.version import Version
from pairs import each_value, usual
from test_block_drafts import Logits
from test_block_exactness import SHAPES
from test_distribution_end_to_end import VANILLA, distribution, sample, small_buffers  # noqa: F401
from test_distribution_end_to_end import model as tiny_model
from test_exactness import BATCHES, Way, plain, prompts, speculative
from test_static import on_any_device, short_rings, warnings_of  # noqa: F401
from test_verification import TOO_FAR, deviation
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, Gemma4TextConfig, PreTrainedModel

import hf_spec
from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    Proposal,
    SpeculationConfig,
    as_speculator,
    parallel,
    versions,
)
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.drafts.gemma4_assistant.speculator import (
    Gemma4AssistantDrafter,
    Gemma4AssistantSpeculator,
    keys_of_kind,
)
from hf_spec.scoring.factory import runner_for
from hf_spec.scoring.features import decoder_of
from hf_spec.scoring.names import CACHE
from hf_spec.scoring.plain import new_cache
from hf_spec.scoring.target_keys import LayerKeys, TargetKeys

CASES = ("hf_gemma4_assistant", "hf_gemma4_assistant_ordered")
WINDOW = 6  # of assistants made here: shorter than the targets', which is 8
GUESSES = 4


# -- the slow twin ----------------------------------------------------------------------------------------------------


def embedded(target: Any, ids: Tensor) -> Tensor:
    return target.get_input_embeddings()(ids)


def slow_logits(assistant: Any, target: Any, text: Tensor, path: Tensor, fresh: bool = False) -> Tensor:
    """Work out the logits (1 + path, vocabulary) after the end of ``text``, and after each token of ``path``.

    The target reads all anew, without a cache of ours. ``fresh``: the prompt was read last, so that transformers'
    cache holds one key less than a window.
    """
    before, position = text[None, :-1], len(text) - 1
    has_states = any(kind == "linear_attention" for kind in getattr(target.config, "layer_types", None) or ())
    cache = new_cache(target) if has_states else DynamicCache()  # which keeps all keys of sliding layers too
    with torch.no_grad():
        state = decoder_of(target)(before, use_cache=True, **{CACHE: cache}).last_hidden_state[:, -1:]
    own, keys = assistant.model.config, {}
    for kind, layer in keys_of_kind(target.config.get_text_config()).items():
        window = min(WINDOW if own.sliding_window is None else own.sliding_window, target_window(target))
        first = max(0, position - (window - fresh if window == target_window(target) else window))
        if kind == "full_attention":
            first = 0
        if kind in own.layer_types:
            held = cache.layers[layer]
            keys[kind] = held.keys[:, :, first:], held.values[:, :, first:]
    logits = []
    for token in torch.cat([text[-1:], path]):
        inputs = torch.cat([embedded(target, token[None, None]), state], dim=-1)
        out = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs),
            position_ids=torch.tensor([[position]]),
            attention_mask=dict.fromkeys(keys),
            shared_kv_states=dict(keys),
            use_cache=False,
        ).last_hidden_state
        state = assistant.post_projection(out)
        logits.append(assistant.lm_head(out)[0, 0])
    return torch.stack(logits)


def target_window(target: PreTrainedModel) -> int:
    return getattr(target.config.get_text_config(), "sliding_window", None) or 10**9


@torch.no_grad()
def slow_chain(assistant: Any, target: Any, text: list[int], count: int, fresh: bool = False) -> list[int]:
    path: list[int] = []
    for _ in range(count):
        logits = slow_logits(assistant, target, torch.tensor(text), torch.tensor(path, dtype=torch.long), fresh)
        path.append(int(logits[-1].argmax()))
    return path


# -- assistants for any target ----------------------------------------------------------------------------------------


def assistant_for(target: Any, seed: int = 0, **changes: Any) -> Any:
    """Make a random assistant that can read the keys of ``target``."""
    text, layers = target.config.get_text_config(), {}
    for kind, number in keys_of_kind(text).items():
        layer = text.per_layer_config[number] if text.is_heterogeneous else text
        layers[kind] = layer.head_dim, layer.num_key_value_heads
    kinds = [kind for kind in ("sliding_attention", "full_attention") if kind in layers]
    size, heads = layers[kinds[0]]
    config = Gemma4TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=4,
        num_key_value_heads=heads,
        head_dim=size,
        global_head_dim=layers["full_attention"][0],
        num_global_key_value_heads=layers["full_attention"][1],
        sliding_window=WINDOW,
        num_kv_shared_layers=len(kinds),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        **changes,
    )
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Gemma4AssistantForCausalLM(
            Gemma4AssistantConfig(text_config=config, backbone_hidden_size=text.hidden_size)
        )
        for weight in made.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return made.eval()


def fitted(target: Any, texts: Tensor, mask: Tensor, steps: int = 30) -> Any:
    """Teach an assistant by heart some of ``texts`` (batch, length): it will be right now and then."""
    assistant = assistant_for(target)
    rows = [row[seen > 0] for row, seen in zip(texts, mask, strict=True)]
    optimizer = torch.optim.Adam(assistant.parameters(), lr=0.02)
    for step in range(steps):
        row = rows[step % len(rows)]
        root = len(row) - 2 - GUESSES - 5 * (step // len(rows)) % 12
        logits = slow_logits(assistant, target, row[: root + 1], row[root + 1 : root + GUESSES])
        loss = functional.cross_entropy(logits, row[root + 1 : root + 1 + GUESSES])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return assistant


class Noting(Gemma4AssistantDrafter):
    """A drafter that notes the texts which it drafted after, and what it proposed."""

    def __init__(self, speculator: Noter, request: DraftContext) -> None:
        super().__init__(speculator, request)
        self.noted, self.texts, self.calls = speculator.noted, request.prompts(), 0

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        self.texts = [text + new for text, new in zip(self.texts, accepted.emitted, strict=True)]
        proposal = super().propose(accepted, limit)
        fresh = self.calls == 0 and max(accepted.amounts) == 1
        self.noted += [(text, row, fresh) for text, row in zip(self.texts, rows_of(proposal), strict=True)]
        self.calls += 1
        return proposal

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.texts = [self.texts[row] for row in rows.tolist()]


def rows_of(proposal: Proposal) -> list[Proposal]:
    q = proposal.q
    return [
        replace(proposal, tokens=proposal.tokens[i : i + 1], parents=proposal.parents[i : i + 1], q=None)
        if q is None
        else replace(proposal, tokens=proposal.tokens[i : i + 1], parents=proposal.parents[i : i + 1], q=q[i : i + 1])
        for i in range(len(proposal.tokens))
    ]


class Noter(Gemma4AssistantSpeculator):
    """An assistant whose drafters note what they do."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.noted: list[tuple[list[int], Proposal, bool]] = []

    def drafter(self, request: DraftContext) -> Drafter:
        super().drafter(request)
        return Noting(self, request)


# -- numbers of transformers' code ------------------------------------------------------------------------------------


@functools.cache
def golden(case: str) -> tuple[Any, Any]:
    assistant = AutoModelForCausalLM.from_pretrained(GOLDENS / case / "checkpoint", dtype=torch.float32).eval()
    return load_target(case).eval(), assistant


def drafted(target: Any, assistant: Any, ids: Tensor, n: int, **settings: Any) -> tuple[Proposal, list[Tensor]]:
    """Draft after a prompt of ``n`` tokens and the root after it; return the proposal and the logits of each step."""
    speculator, said = Gemma4AssistantSpeculator(assistant), Logits()
    runner = runner_for(target, new_cache(target), speculator.feature_layers(target), one_chain=False)
    prompt, mask = ids[None, :n], torch.ones(1, n, dtype=torch.long)
    features = runner.prefill_tokens(prompt, mask).features
    config = SpeculationConfig(**settings)
    keys = TargetKeys(runner)
    request = DraftContext(target, prompt, mask, features, config, said, False, target_keys=keys)
    drafter = speculator.drafter(request)
    news = AcceptedTokens(ids[None, n : n + 1], torch.tensor([1]), features[:, -1:])
    return drafter.propose(news, config.num_speculative_tokens or 4), said.seen


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_steps_say_what_they_say_in_transformers(case: str) -> None:
    io, (target, assistant) = outputs(case), golden(case)
    guesses = Gemma4AssistantSpeculator(assistant).defaults().num_speculative_tokens
    assert guesses == io["draft/tokens"].shape[1]
    for n, logits, tokens in zip(
        io["draft/context_len"].tolist(), io["draft/logits"], io["draft/tokens"], strict=True
    ):
        proposal, seen = drafted(target, assistant, io["draft/ids"], n, num_speculative_tokens=guesses)
        found = torch.cat([one[0] for one in seen])
        active = torch.isfinite(found)
        torch.testing.assert_close(found[active], logits[active], **CLOSE)
        assert bool(active.all()) is ("ordered" not in case)
        least = found.masked_fill(~active, torch.inf).amin(1)  # of each step; the other tokens are below it there
        assert torch.equal(
            logits.masked_fill(active, -torch.inf).amax(1) < least, torch.ones(guesses, dtype=torch.bool)
        )
        assert proposal.tokens[0, 1:].tolist() == tokens.tolist()


@torch.no_grad()
def test_a_window_shows_as_many_keys_as_it_says() -> None:
    """As vLLM reads it; transformers shows one more."""
    io, (target, assistant) = outputs(CASES[0]), golden(CASES[0])
    assistant = copy.deepcopy(assistant)
    assistant.model.config.sliding_window = 5
    differ = []
    for n, ours, theirs in zip(
        io["draft/context_len"].tolist(), io["window_vllm/logits"], io["window/logits"], strict=True
    ):
        found = torch.cat([one[0] for one in drafted(target, assistant, io["draft/ids"], n)[1]])
        torch.testing.assert_close(found, ours, **CLOSE)
        differ.append(not torch.allclose(found, theirs, atol=0.1))
    assert differ == [False, True, True]  # the first context is shorter than the window


@pytest.mark.parametrize("case", CASES)
def test_the_keys_are_those_of_the_last_layers_that_compute_some(case: str) -> None:
    io, (target, _) = outputs(case), golden(case)
    ids = io["draft/ids"][None]
    runner = runner_for(target, new_cache(target), one_chain=False)
    runner.prefill_tokens(ids, torch.ones_like(ids))
    view = TargetKeys(runner)
    assert view.position.tolist() == [[ids.shape[1]]]
    for kind, number in keys_of_kind(target.config).items():
        layer = view.of_layer(number)
        assert layer.distance[0].tolist() == list(range(ids.shape[1], 0, -1))
        torch.testing.assert_close(layer.keys[0], io[f"kv/{kind}/keys"], **CLOSE)
        torch.testing.assert_close(layer.values[0], io[f"kv/{kind}/values"], **CLOSE)
    with pytest.raises(ValueError, match="layer 99 of Gemma4ForCausalLM caches no keys and values"):
        view.of_layer(99)


def end_to_end(case: str, speculator: Any, **options: Any) -> Any:
    io, (target, _) = outputs(case), golden(case)
    prompt, expected = io["e2e/prompt"][None], io["e2e/greedy_ids"]
    return target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(expected) - prompt.shape[1],
        do_sample=False,
        eos_token_id=None,
        speculator=speculator,
        num_speculative_tokens=io["draft/tokens"].shape[1],
        return_dict_in_generate=True,
        **options,
    )


def follow(noted: list[Any]) -> list[tuple[list[int], int]]:
    """Return the draft tokens of each step, and how many of them became text."""
    found = []
    for (text, proposal, _), (after, _, _) in itertools.pairwise(noted):
        found.append((proposal.tokens[0, 1:].tolist(), len(after) - len(text) - 1))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_end_to_end(case: str, cache: str | None) -> None:
    io, noter = outputs(case), Noter(golden(case)[1])
    out = end_to_end(case, noter, cache_implementation=cache)
    assert out.sequences[0].tolist() == io["e2e/spec_ids"].tolist() == io["e2e/greedy_ids"].tolist()
    steps = follow(noter.noted)
    assert [count for _, count in steps] == io["e2e/accept_len"].tolist()[: len(steps)]
    for (tokens, _), expected in zip(steps, io["e2e/drafts"].tolist(), strict=False):
        assert tokens == expected[: len(tokens)] and tokens


def test_a_rejected_key_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: transformers' reading, which shows the key of the draft token rejected at the root."""
    case, before = CASES[0], TargetKeys.of_layer
    io, noter = outputs(case), Noter(golden(case)[1])
    rejected = [False]

    def with_the_rejected(view: TargetKeys, number: int) -> Any:
        buffers = view._runner.slots.cache.layers[number].buffers
        length = view._runner.read_lengths[1][0]
        if len(noter.noted) == 0 or noter.noted[-1][1].max_depth == 0:
            return before(view, number)
        (text, proposal, _), now = noter.noted[-1], length + 1
        if now - len(text) == 1 + proposal.max_depth:  # all were accepted
            return before(view, number)
        rejected[0] = True
        keys, values = (buffers[name].data[:, :, : length + 1] for name in ("keys", "values"))
        return LayerKeys(keys, values, torch.arange(length + 1, 0, -1)[None])

    monkeypatch.setattr(TargetKeys, "of_layer", with_the_rejected)
    out = end_to_end(case, noter)
    assert out.sequences[0].tolist() == io["e2e/greedy_ids"].tolist()  # the text is the target's all the same
    steps = follow(noter.noted)
    assert rejected[0]
    for (tokens, count), theirs, accepted in zip(
        steps, io["e2e_hf/drafts"].tolist(), io["e2e_hf/accept_len"], strict=False
    ):
        assert tokens == theirs[: len(tokens)] and count == int(accepted)
    assert [tokens for tokens, _ in steps][1:] != io["e2e/drafts"].tolist()[1 : len(steps)]


# -- the same text, and drafts of the slow twin -----------------------------------------------------------------------

NAMES = ("gemma4_text", "gemma4_text:moe", "gemma4", "gemma3_text", "llama", "qwen3_next")


@functools.cache
def taught(name: str) -> tuple[Any, Any]:
    """Return a target and an assistant that has learnt some of its texts."""
    model = build(name)
    text = plain(model, 8)
    mask = functional.pad(prompts(8, BATCHES[8])["attention_mask"], (0, text.shape[1] - 13), value=1)
    return model, fitted(model, text, mask)


@pytest.mark.parametrize("name", usual(NAMES, ["gemma4_text", "gemma3_text", "qwen3_next"]))
def test_same_text_as_plain_generate(name: str) -> None:
    model, assistant = taught(name)
    texts = {batch: plain(model, batch) for batch in BATCHES}
    for shape, config in SHAPES.items():
        accepted = proposed = 0
        for batch, text in texts.items():
            out = speculative(model, batch, Way(shape, assistant, config))
            assert torch.equal(out.sequences, text), f"{shape}, batch {batch}"
            accepted += out.speculation.counts.accepted
            proposed += out.speculation.counts.proposed
        assert 0 < accepted < proposed, f"{shape}: {accepted} of {proposed} draft tokens accepted"


def check_with_the_twin(noter: Noter, model: Any, held_before: bool = False) -> None:
    """Compare every proposal with the chain that the slow twin drafts; ``held_before``: a static cache's prompt."""
    assert len(noter.noted) > 3
    for text, proposal, fresh in noter.noted[::2]:
        tokens = proposal.tokens[0, 1:].tolist()
        fresh = fresh and not held_before
        assert tokens == slow_chain(noter.model, model, text, len(tokens), fresh), text


@pytest.mark.parametrize(
    ("cache", "name"), each_value(["slots", "rings"], ["gemma4_text", "gemma3_text", "qwen3_next"])
)
def test_drafts_of_ragged_rows_are_those_of_the_slow_twin(name: str, cache: str) -> None:
    """Rows are padded, of different lengths, end at different steps, and outgrow the windows."""
    if cache == "rings" and name == "qwen3_next":
        pytest.skip("transformers has no static cache of recurrent states")
    model, assistant = taught(name)
    for batch in (1, 3):
        noter, inputs = Noter(assistant), prompts(batch, BATCHES[batch])
        end = plain(model, batch)[:, 20:].flatten().mode().values.item()  # some rows end early
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": end, "return_dict_in_generate": True}
        options |= {"cache_implementation": "static"} if cache == "rings" else {}
        text = model.generate(**inputs, **options).sequences
        out = model.generate(**inputs, **options, speculator=noter, num_speculative_tokens=3)
        assert torch.equal(out.sequences, text)
        check_with_the_twin(noter, model, cache == "rings")


@pytest.mark.parametrize("mistake", ["padding is seen", "position of the last token"])
def test_the_slow_twin_finds(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = taught("gemma4_text")
    noter = Noter(assistant)
    if mistake == "padding is seen":
        distance = TargetKeys._distance

        def seeing(view: TargetKeys, columns: Tensor, window: int | None) -> Tensor:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(view._runner.slots, "padding", None)
                return distance(view, columns, window)

        monkeypatch.setattr(TargetKeys, "_distance", seeing)
    else:
        right = TargetKeys.position.fget  # type: ignore[attr-defined]
        monkeypatch.setattr(TargetKeys, "position", property(lambda view: right(view) - 1))
    out = speculative(model, 3, Way("chain", noter, SpeculationConfig(num_speculative_tokens=3)))
    assert torch.equal(out.sequences, plain(model, 3))
    with pytest.raises(AssertionError):
        check_with_the_twin(noter, model)


def test_the_window_of_the_target_limits_that_of_the_assistant() -> None:
    model, assistant = taught("gemma4_text")
    wide = copy.deepcopy(assistant)
    wide.model.config.sliding_window = 100
    noter = Noter(wide)
    text = plain(model, 3)
    out = speculative(model, 3, Way("chain", noter, SpeculationConfig(num_speculative_tokens=3)))
    assert torch.equal(out.sequences, text)
    check_with_the_twin(noter, model)


@pytest.mark.parametrize("name", ["gemma4_text", "qwen3_next"])
@torch.no_grad()
def test_nodes_of_trees_read_their_parents(name: str) -> None:
    """The distribution behind each node of a sampled tree is what the slow twin says after its path."""
    model, assistant = taught(name)
    noter, inputs = Noter(assistant), prompts(3, BATCHES[3])
    torch.manual_seed(0)
    tree = SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=0, speculator=noter, speculation_config=tree)
    compared = 0
    for text, proposal, fresh in noter.noted[:12]:
        q, parents = proposal.q, proposal.parents[0].tolist()
        assert q is not None
        for node in (0, 1, 2, 3):
            path, place = [], node
            while place > 0:
                path.insert(0, int(proposal.tokens[0, place]))
                place = parents[place]
            if place < 0 or node >= q.shape[1]:
                continue
            expected = slow_logits(assistant, model, torch.tensor(text), torch.tensor(path, dtype=torch.long), fresh)
            torch.testing.assert_close(q[0, node], expected[-1].softmax(-1), atol=2e-5, rtol=1e-3)
            compared += 1
    assert compared > 20


def test_the_view_is_only_read() -> None:
    """Drafting leaves every bit of the target's cache as it was."""
    io, (target, assistant) = outputs(CASES[0]), golden(CASES[0])
    ids = io["draft/ids"][None]
    runner = runner_for(target, new_cache(target), (-1,), one_chain=True)
    features = runner.prefill_tokens(ids[:, :9], torch.ones(1, 9, dtype=torch.long)).features
    layers = [layer for layer in runner.slots.cache.layers if layer.is_initialized]
    before = [buffer.data.clone() for layer in layers for buffer in layer.buffers.values()]
    config = SpeculationConfig(num_speculative_tokens=4)
    asked = (target, ids[:, :9], torch.ones(1, 9, dtype=torch.long), features, config, Logits(), False)
    drafter = as_speculator(assistant, target).drafter(DraftContext(*asked, target_keys=TargetKeys(runner)))
    drafter.propose(AcceptedTokens(ids[:, 9:10], torch.tensor([1]), features[:, -1:]), 4)
    after = [buffer.data for layer in layers for buffer in layer.buffers.values()]
    assert before and all(map(torch.equal, before, after))


def test_processors_and_second_calls() -> None:
    model, assistant = taught("gemma4_text")
    speculator = as_speculator(assistant, model)
    inputs = prompts(3, BATCHES[3])
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[7]]}, {}):
        options |= {"max_new_tokens": 16, "do_sample": False}
        text = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, speculator=speculator), text), options
    first = model.generate(**inputs, **options, return_dict_in_generate=True, speculator=speculator)
    more = {"input_ids": first.sequences[:1], "attention_mask": torch.ones_like(first.sequences[:1])}
    one = model.generate(
        **{name: value[:1] for name, value in inputs.items()},
        **options,
        return_dict_in_generate=True,
        speculator=speculator,
    )
    going_on = {CACHE: copy.deepcopy(one[CACHE])}
    text = model.generate(**more, **options)
    assert torch.equal(model.generate(**more, **options, **going_on, speculator=speculator), text)
    hybrid = hf_spec.HybridSpeculator(assistant)
    assert torch.equal(model.generate(**inputs, **options, speculator=hybrid), first.sequences)


@pytest.mark.slow
def test_over_a_compiled_target_it_runs_eagerly_with_one_warning() -> None:
    model, assistant = taught("gemma4_text")
    inputs = prompts(2, (13, 9)) | {"max_new_tokens": 8, "do_sample": False}
    text = model.generate(**inputs)
    options = {"cache_implementation": "static", "compile_config": on_any_device(), "speculator": assistant}
    with warnings_of(model) as told:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **options, num_speculative_tokens=3), text)
    assert len([one for one in told if "Gemma4AssistantForCausalLM is not compiled for drafting" in one]) == 1


# -- sampled text -----------------------------------------------------------------------------------------------------


@functools.cache
def small() -> Any:
    """Return an assistant for the target whose distribution is enumerated, which knows a little of it."""
    return assistant_for(tiny_model(), seed=3)


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block", "drawn static tree"])
def test_sampled_text_follows_the_targets_distribution(case: str) -> None:
    assert deviation(sample(small(), VANILLA[case]), distribution()) < TOO_FAR


class AsTransformers(Gemma4AssistantSpeculator):
    """Draft the best tokens, and accept them as if they had been sampled, as transformers does: a mistake."""

    def drafter(self, request: DraftContext) -> Drafter:
        drafter = super().drafter(request)
        propose = drafter.propose

        def lie(accepted: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(accepted, min(limit, 1))
            if proposal.q is None or proposal.max_depth == 0:
                return proposal
            best = proposal.q.argmax(-1)
            return replace(proposal, tokens=torch.cat([proposal.tokens[:, :1], best], dim=1))

        drafter.propose = lie  # type: ignore[method-assign]
        return drafter


def test_the_best_token_is_no_sample() -> None:
    config = SpeculationConfig(num_speculative_tokens=1, verification="token")
    assert deviation(sample(AsTransformers(small()), config), distribution()) > 3 * TOO_FAR


def test_q_of_clusters_is_a_distribution_over_their_tokens() -> None:
    io, (target, assistant) = outputs(CASES[1]), golden(CASES[1])
    noter = Noter(assistant)
    torch.manual_seed(0)
    prompt = io["e2e/prompt"][None]
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": 20, "eos_token_id": None, "top_k": 0, "num_speculative_tokens": 3}
    target.generate(prompt, attention_mask=mask, do_sample=True, speculator=noter, **options)
    head, drawn = assistant.masked_embedding, [one[1].q[0] for one in noter.noted if one[1].q is not None]
    active = head.centroid_intermediate_top_k * head.vocab_size_per_centroid
    for q in torch.cat(drawn):
        assert int((q > 0).sum()) == active < len(q) and abs(float(q.sum()) - 1) < 1e-5


# -- what it is given as ----------------------------------------------------------------------------------------------


def test_paths_and_loaded_models_and_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_spec.checkpoints import resolve
    from hf_spec.checkpoints.known import KnownDraft

    case = CASES[0]
    path, (target, assistant) = GOLDENS / case / "checkpoint", golden(case)
    for given in (str(path), path, assistant):
        found = as_speculator(given, target)
        assert type(found) is Gemma4AssistantSpeculator and found.model.dtype == torch.float32
        assert end_to_end(case, given).speculation.counts.accepted > 0
    entry = KnownDraft("some/target", "some/assistant", "gemma4_assistant", "transformers", None)
    monkeypatch.setattr(resolve, "known_drafts", lambda target: [entry])
    monkeypatch.setattr(resolve, "cached", lambda draft: path)
    assert type(as_speculator("auto", load_target(case))) is Gemma4AssistantSpeculator
    for read in (AutoDraftModel.from_pretrained, hf_spec.inspect):
        with pytest.raises(ValueError, match="is an assistant of Gemma 4, which transformers itself loads: pass"):
            read(path)


def test_the_unified_class_is_the_same_under_another_name(tmp_path: Path) -> None:
    case = CASES[0]
    shutil.copytree(GOLDENS / case / "checkpoint", tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    raw = json.loads(config.read_text()) | {"model_type": "gemma4_unified_assistant"}
    raw |= {"architectures": ["Gemma4UnifiedAssistantForCausalLM"]}
    raw["text_config"]["model_type"] = "gemma4_unified_text"
    config.write_text(json.dumps(raw))
    found = as_speculator(tmp_path / "draft", golden(case)[0])
    assert type(found.model).__name__ == "Gemma4UnifiedAssistantForCausalLM"
    counts = [end_to_end(case, given).speculation.counts.accepted for given in (found, golden(case)[1])]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("gemma4_text:noshare", {"head_dim": 32}, "keys of size in sliding_attention layers"),
        ("gemma4_text:noshare", {"num_key_value_heads": 1}, "key heads in sliding_attention layers"),
        ("gemma4_text:noshare", {"vocab_size": 50}, "a vocabulary of"),
        ("gemma4_text:noshare", {"hidden_size": 64}, "hidden states of width"),
        ("llama", {}, "reads keys of layers of kind 'sliding_attention', and LlamaForCausalLM has none"),
    ],
)
def test_a_target_that_it_was_not_made_for_is_refused(target: str, changes: dict[str, Any], message: str) -> None:
    made_for = build("gemma4_text:noshare", **changes)
    with pytest.raises(ValueError, match=message):
        build(target).generate(torch.tensor([[5, 6]]), speculator=assistant_for(made_for), max_new_tokens=4)


def test_where_the_keys_cannot_be_read_it_is_refused() -> None:
    model, assistant = taught("llama")
    for draft in (assistant, hf_spec.HybridSpeculator(assistant)):
        with pytest.raises(
            ValueError, match="the draft reads the target's keys and values, which the engine keeps in"
        ):
            model.generate_batch([[5, 6, 7, 8]], speculator=draft, max_new_tokens=4)
    request = DraftContext(
        model, torch.ones(1, 3).long(), torch.ones(1, 3), None, SpeculationConfig(), Logits(), False
    )
    with pytest.raises(ValueError, match="reads the keys and values of the target, which are not at hand here"):
        as_speculator(assistant, model).drafter(request)


def test_an_assistant_that_transformers_cannot_build_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDENS / CASES[0] / "checkpoint", tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    raw = json.loads(config.read_text())
    raw["text_config"]["hidden_size_per_layer_input"] = 8
    config.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"(?s)cannot build the assistant of Gemma 4 at .*config may be damaged"):
        as_speculator(tmp_path / "draft", golden(CASES[0])[0])
    monkeypatch.setattr(versions, "INSTALLED", Version("5.23.0"))
    with pytest.raises(ValueError, match=r"5\.23 builds none of these assistants: install an older or a newer"):
        as_speculator(tmp_path / "draft", golden(CASES[0])[0])


def test_a_target_over_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = golden(CASES[0])
    monkeypatch.setattr(parallel, "_groups", lambda model: ["a group"])
    with pytest.raises(ValueError, match="the keys of Gemma4ForCausalLM are spread over several processes"):
        as_speculator(assistant, target).check(target)
