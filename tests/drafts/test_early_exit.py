"""Early exit: the target's first layers draft over its own cache, against plain ``generate`` and a slow twin."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build, prompts
from batches import batching, prompts_of
from pairs import each_value
from test_distribution_end_to_end import VANILLA, Lying, distribution, sample
from test_static import warnings_of
from test_verification import TOO_FAR, deviation
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from twins import CHAIN, SHAPES, TREE, Heard, noisy, tokenizer

import hf_spec
from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    EarlyExitSpeculator,
    HybridSpeculator,
    Proposal,
    SpeculationConfig,
    Speculator,
)
from hf_spec.drafts.trees import grow
from hf_spec.scoring.early_exit import OtherLayers, can_reuse, first_layers, passing_on, why_no_early_exit
from hf_spec.scoring.hooks import hooked

NEW = 20
STATIC_TREE = SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
EXITS = EarlyExitSpeculator(2)


@functools.cache
def model(name: str = "llama") -> PreTrainedModel:
    return build(name)


def plain(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=NEW, **options)


def exits(model: PreTrainedModel, inputs: dict[str, Tensor], config: Any = CHAIN, **options: Any) -> Any:
    given = {"speculator": EXITS, "speculation_config": config} | options
    return model.generate(**inputs, max_new_tokens=NEW, **given)


# --- The text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batch"),
    each_value(["llama", "gpt2", "gemma3_text", "gemma4_text", "mixtral", "bart", "vl:qwen2_vl"], [1, 3]),
)
def test_greedy_text_and_cache_are_those_of_plain_generate(name: str, batch: int) -> None:
    inputs, target = prompts(batch), model(name)
    text = plain(target, inputs)
    # Some row ends in the middle: its last token is read, for the returned cache, while the others are drafted for.
    options = {"eos_token_id": [int(text[0, -12]), int(text[-1, -5])], "return_dict_in_generate": True}
    expected = plain(target, inputs, **options)
    for config in (CHAIN, TREE, STATIC_TREE):
        found = exits(target, inputs, config, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.speculation.proposed
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            if batch == 1 and getattr(theirs, "keys", None) is not None:  # padding of shorter rows differs
                assert torch.allclose(ours.keys, theirs.keys, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "shape"),
    each_value(
        [
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"min_new_tokens": 4, "eos_token_id": [5, 40, 41, 42]},
            {"logits_processor": [lambda ids, scores: scores - scores.roll(1, -1)]},  # lockstep
            {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        ],
        SHAPES,
    ),
)
def test_processors_and_ends(options: dict[str, Any], shape: str) -> None:
    inputs = prompts(3)
    assert torch.equal(exits(model(), inputs, SHAPES[shape], **options), plain(model(), inputs, **options))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_gives_the_text_of_plain_sampling(shape: str) -> None:
    inputs, texts = prompts(3), []
    exact = dataclasses.replace(SHAPES[shape], verification="exact")
    for ours in ({}, {"speculator": EXITS, "speculation_config": exact}):
        torch.manual_seed(3)
        texts.append(plain(model(), inputs, do_sample=True, **ours))
    assert torch.equal(*texts)


def test_stop_strings_and_a_streamer() -> None:
    inputs, words = prompts(1), tokenizer()
    stop = words.decode(plain(model(), inputs)[0, 20:22])
    heard, options = Heard(), {"stop_strings": [stop], "tokenizer": words}
    text = exits(model(), inputs, streamer=heard, **options)
    assert torch.equal(text, plain(model(), inputs, **options)) and text.shape[1] < 13 + NEW
    assert heard.tokens == [*text[0].tolist(), -1]


# --- The draft tokens ------------------------------------------------------------------------------------------------


class Twin:
    """Drafts after one text without a cache, by the whole model whose later layers pass on what they are given."""

    def __init__(self, target: PreTrainedModel, layers: int, text: list[int]) -> None:
        self._target, self._layers = target, layers
        self._level = [text]  # the texts up to the last nodes

    @torch.no_grad()
    def after(self, texts: list[list[int]]) -> Tensor:
        """Return the log-probabilities of the next token, (1, texts, vocabulary)."""
        ids = torch.tensor(texts)
        with passing_on(self._target, self._layers):
            return self._target(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)[None]

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        above = [0] * tokens.shape[1] if parents is None else parents[0].tolist()
        pairs = zip(above, tokens[0].tolist(), strict=True)
        self._level = [[*self._level[parent], token] for parent, token in pairs]
        return self.after(self._level)


class Watched(Speculator):
    """Drafts by early exit, and compares each proposal with that of the twin."""

    def __init__(self, layers: int, twins: int | None = None) -> None:
        self.inner, self.twins, self.compared = EarlyExitSpeculator(layers), twins or layers, 0

    shares_target_cache = True

    def drafter(self, request: DraftContext) -> Drafter:
        drafter, texts = self.inner.drafter(request), request.prompts()
        ends = [len(text) + NEW for text in texts]
        propose, keep_rows = drafter.propose, drafter.keep_rows

        def watch(accepted: AcceptedTokens, limit: int) -> Proposal:
            for text, new in zip(texts, accepted.emitted, strict=True):
                text += new
            proposal = propose(accepted, limit)
            for row, text in enumerate(texts):
                if limit == 0 or len(text) + limit > ends[row]:  # beyond the end, where rows share a position
                    continue
                twin = Twin(request.target, self.twins, text)
                expected = grow(
                    accepted.root[row : row + 1], twin.after([text])[0], twin.step, request.config, limit, False
                )
                assert torch.equal(proposal.tokens[row], expected.tokens[0])
                assert torch.equal(proposal.parents[row], expected.parents[0])
                self.compared += 1
            return proposal

        def keep(rows: Tensor) -> None:
            texts[:], ends[:] = ([one[row] for row in rows.tolist()] for one in (texts, ends))
            keep_rows(rows)

        drafter.propose, drafter.keep_rows = watch, keep  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize(
    ("name", "shape"), each_value(["llama", "gpt2", "gemma3_text", "gemma4_text", "olmoe"], SHAPES)
)
def test_draft_tokens_are_those_of_the_first_layers_without_a_cache(name: str, shape: str) -> None:
    watched = Watched(2)
    options = {"speculator": watched, "speculation_config": SHAPES[shape], "eos_token_id": [7, 19, 33, 61]}
    model(name).generate(**prompts(3), max_new_tokens=NEW, **options)
    assert watched.compared > 9


def test_the_twin_finds_another_layer() -> None:
    with pytest.raises(AssertionError):
        exits(model(), prompts(1), speculator=Watched(2, twins=3))


def test_training_steps_change_what_is_drafted() -> None:
    target = build("llama")
    for _ in range(2):
        exits(target, prompts(2), speculator=Watched(2))
        target.train()
        optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
        ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
        target(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        target.eval()
    layers = target.model.layers
    layers[0], layers[1].mlp = noisy(layers[0]), layers[3].mlp  # modules may be exchanged between calls, too
    exits(target, prompts(2), speculator=Watched(2))


def test_a_replaced_forward_of_the_whole_model_is_not_that_of_its_first_layers() -> None:
    target = build("llama")
    for module in (target, target.model):  # as accelerate and torch.compile do
        module.forward = functools.partial(type(module).forward, module)  # type: ignore[method-assign]
    exits(target, prompts(2), speculator=Watched(2))


# --- What the first layers have computed -----------------------------------------------------------------------------


def read_by(target: Any, modules: dict[str, nn.Module], batch: int = 1, **options: Any) -> tuple[Any, dict[str, int]]:
    """Generate, and count the tokens that each of ``modules`` reads."""
    read, names = dict.fromkeys(modules, 0), {module: name for name, module in modules.items()}

    def count(module: nn.Module, args: Any, output: Any) -> None:
        read[names[module]] += args[0].shape[0] * args[0].shape[1]

    with hooked(names, after=count):  # of this package, so that it asks for nothing
        return exits(target, prompts(batch), return_dict_in_generate=True, **options), read


UNTRIED = dataclasses.replace(CHAIN, self_check=False)


@pytest.mark.parametrize("config", [CHAIN, UNTRIED, TREE], ids=["reused", "untried", "tree"])
def test_the_prompt_is_read_once_and_so_are_draft_tokens_by_the_first_layers(config: SpeculationConfig) -> None:
    target = build("llama")
    exits(target, prompts(1), config)  # tries what has to be tried
    layers = target.model.layers
    parts = {"first": layers[0].mlp, "last": layers[3].mlp, "head": target.lm_head}
    out, read = read_by(target, parts, speculation_config=config)
    proposed, steps = out.speculation.proposed, out.speculation.steps
    assert proposed and read["last"] == 13 + steps + proposed
    if config is CHAIN:
        assert read["first"] == read["last"]  # each token once
    else:
        assert read["first"] > read["last"]
    if config.tree is None:  # the root and all draft tokens but the last one are drafted after
        assert read["head"] == 1 + steps + proposed + proposed
        assert config is CHAIN or read["first"] == read["last"] + proposed


def test_another_hook_sees_every_layer_run() -> None:
    target, read = build("llama"), {0: 0, 3: 0}
    for number in read:
        target.model.layers[number].register_forward_hook(functools.partial(_count, read, number))
    out = exits(target, prompts(1), return_dict_in_generate=True)
    read.update(dict.fromkeys(read, 0))
    out = exits(target, prompts(1), return_dict_in_generate=True)
    assert read[0] == read[3] + out.speculation.proposed


def _count(read: dict[int, int], number: int, module: nn.Module, args: Any, output: Any) -> None:
    read[number] += args[0].shape[1]


REUSING = ("llama", "gpt2", "gemma3_text", "qwen2:swa", "vl:qwen2_vl")


@pytest.mark.parametrize(("name", "layer", "batch"), each_value(REUSING, [1, 3], [1, 3]))
def test_reused_states_give_the_same_text(name: str, layer: int, batch: int) -> None:
    """The twin runs all layers over all draft tokens. Rows end at different times, so some are read once more."""
    target, speculator = model(name), EarlyExitSpeculator(layer)
    assert can_reuse(target, layer)
    text = plain(target, prompts(batch))
    options = {"eos_token_id": [int(text[0, -12]), int(text[-1, -5])], "return_dict_in_generate": True}
    expected = plain(target, prompts(batch), **options)
    for config, one in ((CHAIN, speculator), (UNTRIED, speculator), (CHAIN, HybridSpeculator(speculator))):
        found = exits(target, prompts(batch), config, speculator=one, **options)
        assert torch.equal(found.sequences, expected.sequences)
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert batch > 1 or torch.allclose(ours.keys, theirs.keys, atol=1e-4)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_reused_states_give_the_same_bits(batch: int) -> None:
    """In the mode in which a row has the bits that it has alone."""
    target, found = build("llama"), []
    with hf_spec.invariant(target):
        for config in (CHAIN, UNTRIED):
            out = exits(target, prompts(batch), config, return_dict_in_generate=True, output_logits=True)
            found.append(torch.stack(out.logits))
        wanted = plain(target, prompts(batch), return_dict_in_generate=True, output_logits=True)
    assert torch.equal(*found) and torch.equal(found[0], torch.stack(wanted.logits))


def test_states_of_another_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target, after = build("llama"), OtherLayers.after
    expected = plain(target, prompts(3))
    assert torch.equal(exits(target, prompts(3)), expected)  # and what has to be tried is tried
    monkeypatch.setattr(OtherLayers, "after", lambda self, outputs: after(self, [*outputs[1:], outputs[0]]))
    assert not torch.equal(exits(target, prompts(3)), expected)
    assert torch.equal(exits(target, prompts(3), UNTRIED), expected)
    assert not can_reuse(build("llama"), 2)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_keys_of_earlier_ones_run_after_these(name: str) -> None:
    """Their keys are passed on within a forward, and not in the cache."""
    assert not can_reuse(model(name), 2) and why_no_early_exit(model(name), 2) is None


def test_hidden_states_of_all_layers_are_returned() -> None:
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected, found = plain(model(), prompts(1), **options), exits(model(), prompts(1), **options)
    for theirs, ours in zip(expected.hidden_states, found.hidden_states, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


# --- Distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block"])
def test_sampled_text_has_the_distribution_of_the_target(case: str) -> None:
    assert deviation(sample(EarlyExitSpeculator(1), VANILLA[case], layers=2), distribution(2)) < TOO_FAR


class LyingExit(Lying):
    """Draft the best token and claim to have sampled it."""

    shares_target_cache = True

    def inner(self, request: DraftContext) -> Drafter:
        return EarlyExitSpeculator(1).drafter(request)


def test_a_lie_is_found_out() -> None:
    config = SpeculationConfig(num_speculative_tokens=1, verification="token")
    assert deviation(sample(LyingExit(), config, layers=2), distribution(2)) > 3 * TOO_FAR


# --- Calls -----------------------------------------------------------------------------------------------------------


def test_calls_do_not_disturb_each_other() -> None:
    target, inputs = build("llama"), prompts(3)
    expected = plain(target, inputs)
    speculators: list[Any] = [EXITS, EarlyExitSpeculator(3), "ngram", EXITS, HybridSpeculator(EXITS), EXITS]
    for speculator in speculators:
        assert torch.equal(exits(target, inputs, speculator=speculator), expected)
        assert torch.equal(plain(target, inputs), expected)


def test_the_adaptive_length_with_a_seed_and_without() -> None:
    target, inputs = model(), prompts(2)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=40, speculator=EXITS), target.generate(**inputs, max_new_tokens=40)
    )
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(target.generate(**inputs, max_new_tokens=40, do_sample=True, speculator=EXITS))
    assert torch.equal(*texts)
    whole, shallow = (one.draft_work(target)(2)[1] for one in (EarlyExitSpeculator(3), EXITS))
    assert shallow.layers == 3 and shallow.parameters < whole.parameters


def test_many_prompts_and_a_history_with_it() -> None:
    given = prompts_of(5, 99)
    options = {"max_new_tokens": 8, "progress": False, "ordered": True, "batch_size": 2}
    expected = [one.tokens for one in hf_spec.generate_many(model(), given, **options)]
    for speculator in (EXITS, HybridSpeculator(EXITS)):
        found = hf_spec.generate_many(model(), given, speculator=speculator, **options)
        assert [one.tokens for one in found] == expected


# --- The layer -------------------------------------------------------------------------------------------------------


def test_the_layer_is_named_by_the_call_or_the_checkpoint() -> None:
    target, inputs = build("llama"), prompts(1)
    expected = plain(target, inputs)
    with pytest.raises(ValueError, match=r"names no layer to exit after.*EarlyExitSpeculator\(layer\), from 1 to 3"):
        exits(target, inputs, speculator="early-exit")
    assert torch.equal(exits(target, inputs, speculator="early-exit", assistant_early_exit=1), expected)
    asked = GenerationConfig(max_new_tokens=NEW, assistant_early_exit=1, pad_token_id=0)
    with warnings_of(target) as told:
        assert torch.equal(target.generate(**inputs, generation_config=asked, speculator="early-exit"), expected)
    assert not any("deprecated" in message for message in told) and asked.assistant_early_exit == 1
    target.config.early_exit_layer = 3
    assert EarlyExitSpeculator().layer_of(target) == 3
    target.generation_config.assistant_early_exit = 2  # it comes first, and plain generate would decode with it
    assert EarlyExitSpeculator().layer_of(target) == 2 and EarlyExitSpeculator(1).layer_of(target) == 1
    for speculator in ("early-exit", EarlyExitSpeculator(3), HybridSpeculator("early-exit")):
        assert torch.equal(exits(target, inputs, speculator=speculator), expected)
    target.generation_config.speculator = "early-exit"
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW, speculation_config=CHAIN), expected)
    assert hf_spec.last_speculation(target) is not None


def test_a_class_of_the_users_own_drafts_itself() -> None:
    class Longer(EarlyExitSpeculator):
        def defaults(self) -> SpeculationConfig:
            return SpeculationConfig(num_speculative_tokens=7)

        def drafter(self, request: DraftContext) -> Drafter:
            asked.append(request.config.num_speculative_tokens)
            return super().drafter(request)

    asked: list[Any] = []
    assert torch.equal(exits(model(), prompts(1), None, speculator=Longer(2)), plain(model(), prompts(1)))
    assert asked == [7]


def test_a_bad_layer_is_refused() -> None:
    for layer in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            EarlyExitSpeculator(layer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LlamaForCausalLM has 4 layers, so it cannot exit after 4; choose 1 to 3"):
        exits(model(), prompts(1), speculator=EarlyExitSpeculator(4))
    with pytest.raises(ValueError, match=r"assistant_early_exit=1 and EarlyExitSpeculator\(layer=2\) name two layers"):
        exits(model(), prompts(1), assistant_early_exit=1)
    with pytest.raises(ValueError, match=r"assistant_early_exit is another way.*or pass speculator='early-exit'"):
        exits(model(), prompts(1), speculator="ngram", assistant_early_exit=1)
    with pytest.raises(ValueError, match=r"assistant_early_exit is another way"):
        exits(model(), prompts(1), speculator=HybridSpeculator(EarlyExitSpeculator(2)), assistant_early_exit=1)


def test_transformers_own_early_exit_is_passed_on() -> None:
    target, inputs = build("llama"), prompts(1)
    assert torch.equal(plain(target, inputs, assistant_early_exit=2), plain(target, inputs))
    assert hf_spec.last_speculation(target) is None


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "minimax"])
def test_recurrent_states_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="keeps recurrent states, which early exit would overwrite"):
        exits(model(name), prompts(1))


def test_other_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="not over a static one"):
        exits(model(), prompts(1), cache_implementation="static")
    with pytest.raises(ValueError, match="the engine's is paged"):
        model().generate_batch(
            prompts_of(2, 99),
            GenerationConfig(max_new_tokens=4),
            speculator=EXITS,
            continuous_batching_config=batching(2),
        )


def _asks_for_each_layer(decoder: Any, forward: Callable[..., Any]) -> Any:
    """Look up as many layers as the config counts."""
    for number in range(decoder.config.num_hidden_layers):
        decoder.layers[number]
    return forward()


def _scales_by_its_layers(decoder: Any, forward: Callable[..., Any]) -> Any:
    output = forward()
    output.last_hidden_state = output.last_hidden_state * len(decoder.layers)
    return output


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (_asks_for_each_layer, "cannot run its first 2 layers alone"),
        (_scales_by_its_layers, "alone compute something else"),
    ],
)
def test_a_model_that_needs_all_its_layers_is_refused(odd: Callable[..., Any], reason: str) -> None:
    target: Any = build("llama")
    usual = type(target.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return odd(self, functools.partial(usual.forward, self, *args, **kwargs))

    target.model.__class__ = type("Odd", (usual,), {"forward": forward})
    assert reason in (why_no_early_exit(target, 2) or "")
    with pytest.raises(ValueError, match=reason):
        exits(target, prompts(1))


def test_a_target_is_freed_at_once() -> None:
    """Nothing that early exit has made of it holds its weights until the garbage collector runs."""
    own = build("llama")
    exits(own, prompts(1))
    weight = weakref.ref(own.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        exits(own, prompts(1))
        del own
        assert weight() is None
    finally:
        gc.enable()


def test_the_whole_model_keeps_its_layers() -> None:
    target = build("gpt2")
    shallow = first_layers(target, 1)
    assert len(shallow.transformer.h) == 1 and len(target.transformer.h) == 4
    assert shallow.lm_head is target.lm_head and shallow.transformer.h[0] is target.transformer.h[0]
