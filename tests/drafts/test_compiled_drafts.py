"""Drafting over fixed slots, compiled or not, guesses what drafting over slots that grow does.

Most tests run the function that is to be compiled as it is: what a graph may not do is refused where one is made.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_block_exactness as block_drafts
import torch
from architectures import build, prompts
from lengths import force_lengths
from pairs import each_value
from test_block_exactness import LAYERS, MARKOV, WINDOW
from test_static import Forwards, generate, on_any_device, warnings_of
from torch import Tensor, fx, nn
from transformers import DynamicCache
from twins import fitted, noisy, target

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, as_speculator
from hf_spec.drafts import static as static_drafts
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dflash2.configuration import DFlash2SpeculatorConfig
from hf_spec.drafts.dflash2.modeling import DFlash2DraftModel
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.dspark.modeling import DSparkDraftModel
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MedusaDraftModel
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel
from hf_spec.drafts.static import CompiledDrafter, OpenKeys
from hf_spec.scoring import compiled, graphs, rings
from hf_spec.scoring.graphs import Compiler
from hf_spec.scoring.names import CACHE

DEPTH = 3
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
DEEP = [(1,), *((0,) * depth for depth in range(1, 7))]
SHAPES = {
    "chain": SpeculationConfig(num_speculative_tokens=DEPTH),
    "confident": SpeculationConfig(num_speculative_tokens=DEPTH, confidence_threshold=0.02),
    "static": SpeculationConfig(num_speculative_tokens=DEPTH, tree=PATHS),
    "dynamic": SpeculationConfig(num_speculative_tokens=DEPTH, tree="dynamic", tree_topk=3, num_tree_tokens=7),
    "sampled": SpeculationConfig(num_speculative_tokens=DEPTH, tree="sampled", tree_topk=3, num_tree_tokens=7),
}
WINDOWS = block_drafts.WINDOW | {"num_hidden_layers": 2, "model_type": "qwen3"}
MASKED = {"mask_token_id": 0, "eagle_aux_hidden_state_layer_ids": [1, 2]}
SELECTOR = {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
BLOCK = {"mask_token_id": 0, "aux_hidden_state_layer_ids": [1, 2], "block_size": 5}


def new_draft(kind: str) -> Any:
    config = target("llama").config
    torch.manual_seed(1)
    made: dict[str, Callable[[], Any]] = {
        "eagle": lambda: EagleDraftModel(EagleSpeculatorConfig.for_target(config)),
        "eagle3": lambda: Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(config, draft_vocab_size=60)),
        "eagle3-window": lambda: Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(config, WINDOWS)),
        "mtp": lambda: MTPDraftModel(MTPSpeculatorConfig.for_target(config, {"num_hidden_layers": 1})),
        "medusa": lambda: MedusaDraftModel(MedusaSpeculatorConfig.for_target(config, num_heads=DEPTH)),
        "peagle": lambda: PEagleDraftModel(PEagleSpeculatorConfig.for_target(config, block_drafts.PLAIN, **MASKED)),
        "dflash": lambda: DFlashDraftModel(DFlashSpeculatorConfig.for_target(config, LAYERS | WINDOW, **BLOCK)),
        "jetspec": lambda: DFlashDraftModel(
            DFlashSpeculatorConfig.for_target(config, LAYERS | WINDOW, **BLOCK, block_causal=True)
        ),
        "dflash2": lambda: DFlash2DraftModel(DFlash2SpeculatorConfig.for_target(config, LAYERS, **BLOCK, **SELECTOR)),
        "dspark": lambda: DSparkDraftModel(
            DSparkSpeculatorConfig.for_target(config, LAYERS, **BLOCK | MARKOV | {"block_size": 4})
        ),
        "dspark-plain": lambda: DSparkDraftModel(
            DSparkSpeculatorConfig.for_target(config, LAYERS, **BLOCK | {"block_size": 4})
        ),
    }
    return made[kind]().eval()


BLOCKS = ("dflash", "jetspec", "dflash2", "dspark", "dspark-plain")
MODELS = ("llama", "gemma3_text", "mistral", "cohere2")  # as drafts: full attention, windows, and both
KINDS = ("eagle", "eagle3", "eagle3-window", "mtp", "medusa", "peagle", *BLOCKS, *MODELS)


@functools.cache
def draft_of(kind: str) -> Any:
    """Return a draft of that kind which is right now and then about what the target writes; but a model guesses."""
    if kind in MODELS:
        return noisy(target("llama")) if kind == "llama" else build(kind)
    model, given = target("llama"), prompts(8, (13, 9, 5, 1))
    text = model.generate(**given, max_new_tokens=24, do_sample=False)
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 24), value=1)
    learn = block_drafts.fitted if kind in (*BLOCKS, "peagle") else fitted
    return learn(new_draft(kind), model, text, mask, steps=60 if kind in BLOCKS else 25)


class Everything:
    """Contain whatever is asked for."""

    def __contains__(self, one: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 16)


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing, but run what would be."""
    monkeypatch.setattr(Compiler, "__call__", lambda compiler, function, name, *args, **_: function(*args))
    monkeypatch.setattr(compiled, "_not_compiled", {target("llama"): Everything()})


@pytest.fixture
def draft_graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile drafts, but no target."""
    torch._dynamo.reset()
    graphs._compiled.clear()
    graphs._failed.clear()
    monkeypatch.setattr(compiled, "_not_compiled", {target("llama"): Everything()})
    yield
    torch._dynamo.reset()


# -- the same guesses -------------------------------------------------------------------------------------------------


class Call:
    """Start the same call with two drafters, over slots that grow and over fixed ones, and tell both the same."""

    def __init__(
        self, kind: str, config: SpeculationConfig, batch: int, sample: bool, lengths: tuple[int, ...] = (9, 6, 1, 4)
    ) -> None:
        model, draft, given = target("llama"), draft_of(kind), prompts(batch, lengths)
        self.vocabulary = int(model.config.vocab_size)
        self.generator = torch.Generator().manual_seed(batch)
        draft = as_speculator(draft, model)
        self.layers = draft.feature_layers(model) or (1,)
        with torch.no_grad():
            states = model(**given, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in self.layers], dim=-1)
        self.width, self.rows = features.shape[2], batch
        distribution = functools.partial(torch.log_softmax, dim=-1)
        common = (model, given["input_ids"], given["attention_mask"], features, config, distribution, sample)
        compiler = Compiler(on_any_device(), DEPTH)
        self.compiler = compiler
        self.drafters: list[Drafter] = [
            draft.drafter(DraftContext(*common)),
            draft.drafter(DraftContext(*common, compiler=compiler)),
        ]
        assert isinstance(self.drafters[1], CompiledDrafter)

    def tell(self, counts: list[int], limit: int = DEPTH) -> list[Proposal]:
        counts = counts[: self.rows]
        shape = len(counts), max(counts)
        tokens = torch.randint(self.vocabulary, shape, generator=self.generator)
        features = torch.randn((*shape, self.width), generator=self.generator)
        found = []
        for drafter in self.drafters:
            torch.manual_seed(3)
            with torch.no_grad():
                found.append(drafter.propose(AcceptedTokens(tokens, torch.tensor(counts), features), limit))
        return found

    def keep(self, rows: list[int]) -> None:
        self.rows = len(rows)
        for drafter in self.drafters:
            drafter.keep_rows(torch.tensor(rows))


def assert_same(eager: Proposal, static: Proposal) -> None:
    """The trees of both, whose nodes may be padded, and what they were drawn from."""
    nodes = eager.tokens.shape[1]
    assert not static.present[:, nodes:].any()
    assert torch.equal(eager.present, static.present[:, :nodes])
    there = eager.present
    assert torch.equal(eager.tokens[there], static.tokens[:, :nodes][there])
    assert torch.equal(eager.parents[there], static.parents[:, :nodes][there])
    assert (eager.q is None) == (static.q is None)
    if eager.q is not None and static.q is not None:
        asked = there[:, : eager.q.shape[1]]
        torch.testing.assert_close(eager.q[asked], static.q[:, : eager.q.shape[1]][asked], atol=1e-5, rtol=1e-4)


def same_guesses(call: Call) -> None:
    """Several steps: rows that advance by different amounts, texts that outgrow the slots, and news after a pause."""
    for counts in ([1] * 8, [1, 3, 2, 4, 1, 2, 4, 3], [4, 1, 2, 1, 3, 1, 1, 2], [2, 1, 1, 3, 1, 4, 2, 2]):
        assert_same(*call.tell(counts))
    if call.rows > 2:
        call.keep([2, 0])
        assert_same(*call.tell([2, 4]))
        call.keep([1])
    assert_same(*call.tell([11, 7, 9][: call.rows]))
    assert_same(*call.tell([3, 1, 2][: call.rows]))


def test_the_draft_of_a_hybrid_drafts_no_further_than_its_own_number() -> None:
    """The graphs of a call are made for the history's longer chains."""
    call = Call("eagle3", SpeculationConfig(num_speculative_tokens=2), 1, False)
    first, second = call.tell([3], limit=2)
    assert first.max_depth == second.max_depth == 2 and torch.equal(first.tokens, second.tokens)
    assert isinstance(compiled := call.drafters[1], CompiledDrafter) and compiled._depth == 2 < DEPTH


@pytest.mark.parametrize(("kind", "shape", "sample", "batch"), each_value(KINDS, SHAPES, [False, True], [1, 8]))
def test_fixed_slots_change_no_guess(kind: str, shape: str, sample: bool, batch: int, as_it_is: None) -> None:
    same_guesses(Call(kind, SHAPES[shape], batch, sample))


@pytest.mark.parametrize("kind", ["eagle3-window", "mtp", "peagle", "dflash", "llama"])
def test_a_prompt_of_one_token_leaves_nothing_to_read_before_it(kind: str, as_it_is: None) -> None:
    call = Call(kind, SHAPES["chain"], 2, sample=False, lengths=(1,))
    for counts in ([1, 1], [2, 1], [1, 4], [3, 2]):
        assert_same(*call.tell(counts))


WIDE = SHAPES["dynamic"].merge(tree_topk=6, num_tree_tokens=12)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("eagle3", SHAPES["chain"]), ("peagle", SHAPES["chain"]), ("dflash", SHAPES["chain"]), ("llama", WIDE)],
    ids=["eagle3", "peagle", "dflash", "llama-wide"],
)
def test_slots_end_where_all_that_is_read_does(kind: str, config: SpeculationConfig, as_it_is: None) -> None:
    """At every length: a row that is ahead is padded like one that gets many tokens, and either may stay alone."""
    for ahead in range(1, 9):
        call = Call(kind, config, 2, sample=False, lengths=(9, 8))
        for counts in ([ahead, 1], [1, 9], [1, 1]):
            assert_same(*call.tell(counts))
        call.keep([ahead % 2])
        for _ in range(4):
            assert_same(*call.tell([3]))


@pytest.mark.parametrize("shape", ["chain", "static"])
def test_a_shallower_limit_leaves_out_the_deepest_guesses(shape: str, as_it_is: None) -> None:
    for sample in (False, True):
        call = Call("eagle3", SHAPES[shape], 3, sample)
        call.tell([1, 1, 1])
        for limit in (1, 2):
            assert_same(*call.tell([1, 2, 3], limit))


def test_other_random_numbers_give_other_guesses(as_it_is: None) -> None:
    """Not each time: the test above must be able to fail."""
    call = Call("eagle3", SHAPES["chain"], 8, sample=True)
    first = call.tell([1] * 8)[0]
    call.drafters[0], call.drafters[1] = call.drafters[1], call.drafters[0]
    torch.rand(1)
    seen = []
    for seed in range(3):
        torch.manual_seed(seed)
        news = AcceptedTokens(first.tokens[:, :1], torch.ones(8, dtype=torch.long), torch.zeros(8, 1, call.width))
        with torch.no_grad():
            seen.append(call.drafters[0].propose(news, DEPTH).tokens.tolist())
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [("eagle3", "chain"), ("mtp", "dynamic"), ("llama", "chain")])
@pytest.mark.parametrize("sample", [False, True], ids=["best", "drawn"])
def test_a_graph_makes_the_same_guesses(
    kind: str, shape: str, sample: bool, draft_graphs_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each batch size and number of slots, whatever the lengths of the texts."""
    monkeypatch.setattr(rings, "SHORTEST", 64)
    call = Call(kind, SHAPES[shape], 3, sample)
    same_guesses(call)
    assert call.compiler.graphs.made == 3  # batches of 4, 2 and 1
    assert call.compiler.graphs.seconds > 0
    same_guesses(again := Call(kind, SHAPES[shape], 3, sample))
    assert again.compiler.graphs.made == 0


# -- the same text ----------------------------------------------------------------------------------------------------


def text_and_out(kind: str, shape: str, batch: int, **options: Any) -> tuple[Tensor, Any]:
    model = target("llama")
    text = generate(model, batch)
    ways = {"speculator": draft_of(kind), "speculation_config": SHAPES[shape], "cache_implementation": "static"}
    ways |= {"compile_config": on_any_device(), "return_dict_in_generate": True}
    return text, generate(model, batch, **ways | options)


@pytest.mark.parametrize(("shape", "batch", "kind"), each_value(SHAPES, [1, 3, 8], KINDS))
def test_same_text_as_plain_generate(kind: str, shape: str, batch: int, as_it_is: None) -> None:
    text, out = text_and_out(kind, shape, batch)
    assert torch.equal(out.sequences, text)
    assert out.speculation.accepted > 0 or kind in MODELS[1:]  # which know nothing of this target


@pytest.mark.parametrize("deep", [{"num_speculative_tokens": 6}, {"tree": DEEP}], ids=["chain", "tree"])
@pytest.mark.parametrize(("kind", "deepest"), [("medusa", DEPTH), ("dflash", 4), ("dspark", 4), ("peagle", 6)])
def test_no_draft_guesses_deeper_than_it_can(kind: str, deepest: int, deep: dict[str, Any], as_it_is: None) -> None:
    ways: dict[str, Any] = {"speculation_config": SpeculationConfig(**deep), "max_new_tokens": 12}
    expected = generate(target("llama"), 1, max_new_tokens=12)
    for cache in ("static", None):
        _, out = text_and_out(kind, "chain", 1, **ways, cache_implementation=cache)
        assert torch.equal(out.sequences, expected)
        assert len(out.speculation.per_row[0].proposed_at) == deepest


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "peagle", "dflash"])
def test_a_target_that_has_read_more_or_less_than_the_tokens_of_the_call(kind: str) -> None:
    """A cache that holds the first half of the prompt, and a prompt without tokens."""
    model, given = target("llama"), prompts(1, (13,))
    text = generate(model, 1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(given["input_ids"][:, :7], **{CACHE: cache})
    embeds = {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(given["input_ids"]).detach()}
    for ways, expected in (({CACHE: cache}, text), (embeds, text[:, 13:])):
        out = generate(model, 1, **ways, speculator=draft_of(kind), return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        assert out.speculation.proposed


def test_rows_that_end_apart(as_it_is: None) -> None:
    model = target("llama")
    text = generate(model, 8)
    ends = {"eos_token_id": [int(text[row, 16 + 2 * row]) for row in range(8)], "pad_token_id": 0}
    expected = generate(model, 8, **ends)
    _, out = text_and_out("eagle3", "dynamic", 8, **ends)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_steps_in_between(kind: str, as_it_is: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that was not asked reads later what became text, of rows that have come further by one or by many."""
    chance = random.Random(3)
    force_lengths(monkeypatch, lambda rows: chance.choice([0, DEPTH]))
    model = target("llama")
    text = generate(model, 8)
    for last in range(14, 30, 8):
        ends = {"eos_token_id": [int(text[row, last + row]) for row in range(8)], "pad_token_id": 0}
        _, out = text_and_out(kind, "chain", 8, **ends)
        assert torch.equal(out.sequences, generate(model, 8, **ends))
        assert out.speculation.proposed


def test_drafting_is_compiled_with_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    forwards = Forwards(monkeypatch)
    for again in (False, True):
        text, out = text_and_out("eagle3", "chain", 1)
        assert torch.equal(out.sequences, text)
        assert bool(forwards.compiled) != again
        assert (out.speculation.graphs > len(forwards.compiled)) != again
        forwards.compiled.clear()
    assert out.speculation.compile_seconds == 0.0
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:])])
def test_what_a_graph_writes_to_stays_where_it_is(kind: str, draft_graphs_only: None) -> None:
    """Torch makes no CUDA graph of what writes to an input, unless the input is known to stay at its address."""
    written: list[bool] = []

    def watching(graph: fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            before = [one._version for one in args]
            found = graph(*args)
            changed = [one for one, version in zip(args, before, strict=True) if one._version != version]
            written.extend(hasattr(one, "_dynamo_static_input_type") for one in changed)
            return found

        return run

    text, out = text_and_out(kind, "chain", 1, compile_config=on_any_device(backend=watching))
    assert torch.equal(out.sequences, text)
    assert all(written) and (written or kind == "medusa")


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "dynamic"])
def test_draws_need_few_graphs(shape: str, draft_graphs_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal and a choice for each batch size, however many tokens a row gets, and may still get."""
    monkeypatch.setattr(rings, "SHORTEST", 64)
    graphs = []
    for seed in range(4):
        torch.manual_seed(seed)
        _, out = text_and_out("eagle3", shape, 8, do_sample=True, max_new_tokens=26)
        graphs.append(out.speculation.graphs)
    assert 0 < sum(graphs) <= 8


NUMBERS = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "epsilon_cutoff": 0.001}


@pytest.mark.slow
def test_requests_with_other_numbers_share_a_graph(draft_graphs_only: None) -> None:
    made = []
    for change in ({}, {"temperature": 1.3, "top_k": 15, "top_p": 0.8}, {"min_p": 0.1, "typical_p": 0.8}):
        _, out = text_and_out("eagle3", "chain", 1, do_sample=True, **NUMBERS | change)
        made.append(out.speculation.graphs)
    assert made[0] > 0 and made[1:] == [0, 0]


@pytest.mark.parametrize("numbers", [{}, NUMBERS], ids=["usual", "all"])
def test_the_same_seed_gives_the_same_text_compiled_or_not(numbers: dict[str, Any], as_it_is: None) -> None:
    model = target("llama")
    texts = []
    for ways in ({}, {"cache_implementation": "static", "compile_config": on_any_device()}):
        torch.manual_seed(7)
        options = {"speculator": draft_of("eagle3"), "speculation_config": SHAPES["chain"], "do_sample": True}
        texts.append(generate(model, 1, **options, **numbers, **ways))
    assert torch.equal(*texts)


def test_one_warning_where_a_draft_cannot_be_compiled(
    draft_graphs_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Eagle3DraftModel.logits

    def unforeseen(self: Any, hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return logits(self, hidden)

    monkeypatch.setattr(Eagle3DraftModel, "logits", unforeseen)
    with warnings_of(target("llama")) as told:
        for _ in range(2):
            text, out = text_and_out("eagle3", "chain", 3)
            assert torch.equal(out.sequences, text)
    assert out.speculation.graphs == 0
    assert ["Eagle3DraftModel is not compiled" in message for message in told if "not compiled" in message] == [True]


def test_other_attention(as_it_is: None) -> None:
    config = draft_of("eagle3-window").layer_config
    before = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        text, out = text_and_out("eagle3-window", "dynamic", 3)
    finally:
        config._attn_implementation = before
    assert torch.equal(out.sequences, text)
    assert out.speculation.accepted > 0


def test_where_no_masks_are_known_slots_grow(as_it_is: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_drafts, "MASKED_ATTENTION", ("eager",))
    monkeypatch.setattr(CompiledDrafter, "propose", None)  # not asked
    with warnings_of(target("llama")) as told:
        text, out = text_and_out("eagle3", "dynamic", 3)
    assert torch.equal(out.sequences, text)
    assert ["its attention is 'sdpa'" in message for message in told if "not compiled" in message] == [True]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("gpt2", "its positions come from a table"),
        ("bloom", "it takes no positions"),
        ("lfm2", "keep keys and values"),
    ],
)
def test_language_models_that_take_no_fixed_slots_are_run_as_they_are(draft: str, reason: str, as_it_is: None) -> None:
    model = target("llama")
    with warnings_of(model) as told:
        text, out = text_and_out("eagle3", "dynamic", 3, speculator=build(draft))
    assert torch.equal(out.sequences, text)
    assert [reason in message for message in told if "not compiled" in message] == [True]


def test_a_language_model_that_reads_fixed_slots_differently_is_run_as_it_is(
    as_it_is: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = OpenKeys.begin

    def shifted(self: OpenKeys, *args: Any) -> Any:
        position, masks = positions(self, *args)
        return position + 3, {kind: mask.roll(1, -1) for kind, mask in masks.items()}

    monkeypatch.setattr(OpenKeys, "begin", shifted)
    model, draft = target("llama"), noisy(target("llama"))
    with warnings_of(model) as told:
        text, out = text_and_out("eagle3", "chain", 3, speculator=draft)
    assert torch.equal(out.sequences, text)
    assert ["it reads fixed slots differently" in message for message in told if "not compiled" in message] == [True]


def test_a_draft_of_a_smaller_vocabulary(as_it_is: None) -> None:
    """Vocabularies of a family are padded to different sizes; the target's last tokens are no words."""
    model = target("llama", vocab_size=9000)
    draft = noisy(target("llama", vocab_size=8990))
    text = generate(model, 3)
    ways = {"cache_implementation": "static", "compile_config": on_any_device(), "speculation_config": SHAPES["chain"]}
    assert torch.equal(generate(model, 3, speculator=draft, **ways), text)


def read(module: nn.Module, states: Tensor) -> Any:
    return module(states)


def test_hooks_on_a_draft_that_come_later_are_in_its_graph() -> None:
    """Torch takes no notice of the first hook on a module."""
    draft, states = nn.Sequential(nn.Linear(3, 3)), torch.ones(1, 3)
    plain = Compiler(on_any_device(), DEPTH)(read, draft, draft, states)
    draft[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert torch.equal(Compiler(on_any_device(), DEPTH)(read, draft, draft, states), 2 * plain)
