"""``generate(..., speculator=...)`` called in every way that plain ``generate``, the slow twin, may be called."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from architectures import build, prompts
from pairs import pairwise
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    modeling_layers,
    pipeline,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from twins import BATCHES, CHAIN, SHAPES, TREE, Oracle, draft, noisy, target, tokenizer

import hf_spec
from hf_spec import DraftContext, Drafter, NgramSpeculator, SpeculationConfig, SpeculativeDecoding, pure
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.many.engine import why_not_engine
from hf_spec.scoring.adapters import base_model
from hf_spec.scoring.architectures import arguments_of
from hf_spec.scoring.hooks import mark_as_ours
from hf_spec.scoring.names import CACHE
from hf_spec.training import DraftTrainingArguments, evaluation, new_draft
from hf_spec.training.checks import check_call
from hf_spec.training.evaluation import measure
from hf_spec.versions import CHECKPOINTING_ARGUMENT

NEW = 20


def greedy(model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Lend the target and see that nothing is left on it."""
    model = target()
    before = state_of(model)
    yield model
    assert state_of(model) == before


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    modules = [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return set(vars(model)), model.config.to_dict(), model.generation_config.to_dict(), modules


# --- The keyword and the hook ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "ngram"])
def test_what_transformers_gives_no_forward(model: PreTrainedModel, kind: str) -> None:
    """A ``Seq2SeqTrainer`` that predicts with ``generate`` hands the labels in."""
    inputs = prompts(3)
    options = {"labels": inputs["input_ids"], "speculator": draft() if kind == "vanilla" else "ngram"}
    assert torch.equal(greedy(model, inputs, **options), greedy(model, inputs))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["vanilla", "ngram"])
def test_keyword(model: PreTrainedModel, kind: str, shape: str, batch: str) -> None:
    inputs = prompts(*BATCHES[batch])
    speculator = draft() if kind == "vanilla" else NgramSpeculator(corpus=greedy(model, inputs).tolist()[:1])
    out = greedy(model, inputs, speculator=speculator, speculation_config=SHAPES[shape], return_dict_in_generate=True)
    assert torch.equal(out.sequences, greedy(model, inputs))
    assert out.speculation.accepted


def test_static_tree_and_automatic_length(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    paths = SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert torch.equal(greedy(model, inputs, speculator=draft(), speculation_config=paths), plain)
    assert torch.equal(greedy(model, inputs, speculator=draft(), num_speculative_tokens="auto"), plain)
    confident = SpeculationConfig(confidence_threshold=0.5)
    assert torch.equal(greedy(model, inputs, speculator=draft(), speculation_config=confident), plain)


class Shallow(Oracle):
    """Be always right, two tokens deep unless asked for more."""

    def defaults(self) -> SpeculationConfig:
        return SpeculationConfig(num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("config", "changes", "depth"),
    [
        (None, {}, 2),
        (SpeculationConfig(), {}, 2),
        (SpeculationConfig(tree="dynamic"), {}, 2),
        (SpeculationConfig(num_speculative_tokens=4), {}, 4),
        (SpeculationConfig(num_speculative_tokens=4), {"num_speculative_tokens": 1}, 1),
        (SpeculationConfig(tree=[(0,), (0, 0), (0, 0, 0)]), {}, 3),
    ],
)
def test_what_a_config_leaves_open_is_the_drafts_to_say(
    model: PreTrainedModel, config: SpeculationConfig | None, changes: dict[str, Any], depth: int
) -> None:
    inputs = prompts(1)
    oracle = Shallow(greedy(model, inputs), wrong=1000)
    given = {"speculator": oracle, "speculation_config": config, **changes}
    out = greedy(model, inputs, **given, return_dict_in_generate=True)
    assert len(out.speculation.acceptance_by_position) == depth
    static = config is not None and isinstance(config.tree, list)
    assert oracle.settings(config, **changes).num_speculative_tokens == (None if static else depth)


def test_num_speculative_tokens_is_a_shorthand(model: PreTrainedModel) -> None:
    inputs = prompts(1)
    oracle = Oracle(greedy(model, inputs), wrong=1000)
    for count in (1, 3):
        out = greedy(model, inputs, speculator=oracle, num_speculative_tokens=count, return_dict_in_generate=True)
        assert len(out.speculation.acceptance_by_position) == count
    out = greedy(
        model,
        inputs,
        speculator=oracle,
        speculation_config=TREE,
        num_speculative_tokens=2,
        return_dict_in_generate=True,
    )
    assert len(out.speculation.acceptance_by_position) == 2
    assert out.speculation.proposed > out.speculation.accepted, "the tree was forgotten"


def test_official_hook(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    hook = SpeculativeDecoding(draft(), CHAIN)
    assert torch.equal(greedy(model, inputs, custom_generate=hook), plain)
    assert torch.equal(greedy(model, inputs, custom_generate=hook), plain), "the second time"
    hf_spec.uninstall()
    try:
        out = greedy(model, inputs, custom_generate=hook, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.accepted
        with pytest.raises(ValueError, match="speculator"):
            greedy(model, inputs, speculator=draft())
    finally:
        hf_spec.install()


def test_install_and_uninstall_may_be_repeated() -> None:
    installed = GenerationMixin.generate
    greedy(target(), prompts(1), speculator="ngram")
    hf_spec.install()
    assert GenerationMixin.generate is installed
    try:
        hf_spec.uninstall()
        plain = GenerationMixin.generate
        assert plain.__module__ == "transformers.generation.utils"
        assert "speculator" not in inspect.getsource(plain)
        for name, mask in ALL_MASK_ATTENTION_FUNCTIONS.items():  # that of the exact mode is no wrapped one
            assert mask.__module__.startswith("transformers.") or name == "hf_spec_invariant"
        hf_spec.uninstall()
        assert GenerationMixin.generate is plain
    finally:
        hf_spec.install()
    assert GenerationMixin.generate.__wrapped__ is plain


def test_calls_without_a_speculator_are_passed_on(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    result = object()
    hf_spec.uninstall()
    try:
        monkeypatch.setattr(GenerationMixin, "generate", lambda *args, **kwargs: seen.append((args, kwargs)) or result)
        hf_spec.install()
        ids = torch.ones(1, 1)
        assert model.generate(ids, None, max_new_tokens=3, custom_generate=None) is result
        assert seen == [((model, ids, None), {"max_new_tokens": 3, "custom_generate": None})]
    finally:
        hf_spec.uninstall()
        monkeypatch.undo()
        hf_spec.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(model, prompts(3))
        greedy(model, prompts(3), speculator="ngram")


def test_default_speculator(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    try:
        hf_spec.set_speculator(model, draft(), TREE)
        out = greedy(model, inputs, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.proposed > 3 * out.speculation.row_steps, "not the default's tree"
        out = greedy(model, inputs, return_dict_in_generate=True, num_speculative_tokens=1)
        assert len(out.speculation.acceptance_by_position) == 1
        out = greedy(model, inputs, return_dict_in_generate=True, speculator="ngram")
        assert out.speculation.proposed < 3 * out.speculation.row_steps
        assert not hasattr(greedy(model, inputs, return_dict_in_generate=True, speculator=False), "speculation")
        out = greedy(model, prompts(1), return_dict_in_generate=True, assistant_model=draft())
        assert not hasattr(out, "speculation")
        hf_spec.set_speculator(model, None)
        assert not hasattr(greedy(model, inputs, return_dict_in_generate=True), "speculation")
        with pytest.raises(ValueError, match="draft is the target itself"):
            hf_spec.set_speculator(model, model)
    finally:
        hf_spec.set_speculator(model, None)


# --- Wrappers --------------------------------------------------------------------------------------------------------


def adapted(model: PreTrainedModel, seed: int, size: float) -> Any:
    """Wrap a copy of ``model`` in a LoRA adapter that changes what it says."""
    wrapped = get_peft_model(noisy(model, 0.0), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
    return wrapped.eval()


def test_peft_target_and_draft(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    wrapped = adapted(model, seed=3, size=0.2)
    plain = greedy(wrapped, inputs)
    assert not torch.equal(plain, greedy(model, inputs)), "the adapter does nothing"
    assert torch.equal(greedy(wrapped, inputs, speculator=draft()), plain)
    with wrapped.disable_adapter():
        assert torch.equal(greedy(wrapped, inputs, speculator=draft()), greedy(model, inputs))
    out = greedy(wrapped, inputs, speculator=adapted(model, seed=3, size=0.2), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.acceptance_by_position[0] == 1.0, "the draft's adapter is not active"
    try:
        hf_spec.set_speculator(wrapped, "ngram")
        out = greedy(wrapped, inputs, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.steps
    finally:
        hf_spec.set_speculator(wrapped, None)


def test_what_torch_compile_returns_is_the_model_inside(model: PreTrainedModel) -> None:
    inputs, other = prompts(3), adapted(model, seed=3, size=0.2)
    for wrapped in (torch.compile(noisy(model, 0.0), backend="eager"), torch.compile(other, backend="eager")):
        plain = greedy(wrapped, inputs)
        try:
            hf_spec.set_speculator(wrapped, torch.compile(draft(), backend="eager"))
            out = greedy(wrapped, inputs, return_dict_in_generate=True)
            assert torch.equal(out.sequences, plain)
            assert hf_spec.last_speculation(wrapped) is out.speculation and out.speculation.steps
        finally:
            hf_spec.set_speculator(wrapped, None)
        assert hf_spec.as_speculator("auto", wrapped) is hf_spec.as_speculator("auto", base_model(wrapped))
        assert hf_spec.known_drafts(wrapped) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_peft_virtual_tokens(kind: type[PeftConfig], name: str) -> None:
    """They stand in the cache, in front of the padding, and in no mask of the caller."""
    plain = greedy(target(name), prompts(3))
    base = noisy(target(name), 0.0)
    assert torch.equal(greedy(base, prompts(3), speculator=draft(name)), plain)  # what this found is not for adapters
    wrapped = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with torch.no_grad():
        weight = next(weight for key, weight in wrapped.named_parameters() if "prompt_encoder" in key)
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(greedy(wrapped, prompts(3)), plain), "the adapter does nothing"
    assert "goes past PEFT's generate" in str(why_not_engine(wrapped, {"max_new_tokens": 2}))
    with pytest.raises(ValueError, match="works through PEFT's generate alone"):
        check_call(wrapped, DraftTrainingArguments(report_to="none"), {})
    with pytest.raises(ValueError, match=r"the draft's adapter \(P.*_TUNING\) works through PEFT's generate alone"):
        greedy(target(name), prompts(3), speculator=wrapped)
    if f'"{CACHE}"' not in inspect.getsource(type(wrapped).prepare_inputs_for_generation):
        # PEFT before it knows the new name: it puts its tokens into every forward, and plain generate is wrong, too.
        with pytest.raises(ValueError, match=r"single steps.* prepared by PeftModelForCausalLM P.*_TUNING, which may"):
            greedy(wrapped, prompts(3), speculator=draft(name))
        assert torch.equal(greedy(base, prompts(3), speculator=draft(name)), plain)
        return
    for batch in BATCHES.values():
        inputs = prompts(*batch)
        expected = greedy(wrapped, inputs)
        for shape in SHAPES.values():
            for speculator in (Oracle(expected), draft(name)):
                out = greedy(wrapped, inputs, speculator=speculator, speculation_config=shape)
                assert torch.equal(out, expected)


def test_pipeline() -> None:
    generator = pipeline("text-generation", model=target(), tokenizer=tokenizer())
    options = {"max_new_tokens": NEW, "do_sample": False}
    texts = ["Once upon a time", "{}"]
    for batch_size in (1, 2):
        plain = generator(texts, batch_size=batch_size, **options)
        assert generator(texts, batch_size=batch_size, speculator=draft(), **options) == plain
    stopping = {"stop_strings": [plain[0][0]["generated_text"][-12:-8]], "tokenizer": tokenizer(), **options}
    plain = generator(texts[0], **stopping)
    assert generator(texts[0], speculator="ngram", **stopping) == plain


# --- Options of the call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_num_return_sequences(model: PreTrainedModel, shape: str) -> None:
    inputs, options = prompts(2), {"do_sample": True, "num_return_sequences": 3, "top_k": 1}
    out = greedy(model, inputs, speculator=draft(), speculation_config=SHAPES[shape], **options)
    assert torch.equal(out, greedy(model, inputs, **options))


def test_generation_config(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    stop = int(plain[1, -6])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=stop, pad_token_id=0)
    expected = model.generate(**inputs, generation_config=config)
    assert expected[1, -1] == 0, "the row did not stop"
    assert torch.equal(model.generate(**inputs, generation_config=config, speculator=draft()), expected)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert torch.equal(model.generate(ids, config, attention_mask=mask, speculator=draft()), expected)
    assert config.eos_token_id == stop

    other = noisy(model, 0.0)
    other.generation_config = config
    assert torch.equal(other.generate(**inputs, speculator=draft()), expected)
    assert torch.equal(other.generate(**inputs, generation_config=GenerationConfig(), speculator=draft()), expected)
    override = {"eos_token_id": [stop, int(plain[0, -9])], "max_new_tokens": NEW - 2}
    assert torch.equal(other.generate(**inputs, speculator=draft(), **override), other.generate(**inputs, **override))


def test_none_turns_off_what_the_model_asks_for(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    other = noisy(model, 0.0)
    other.generation_config.cache_implementation = "static"
    other.generation_config.stop_strings = [tokenizer().decode(plain[0, -8:-6])]
    off = {"cache_implementation": None, "stop_strings": None}
    assert torch.equal(greedy(other, inputs, **off), plain)
    assert torch.equal(greedy(other, inputs, speculator=draft(), **off), plain)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activation_checkpointing_while_a_target_is_trained(name: str) -> None:
    """Layers of newer versions drop the cache only where gradients are recorded; some models always do."""
    model, inputs = build(name), prompts(2)
    expected = greedy(model.eval(), inputs)
    getattr(model, f"{CHECKPOINTING_ARGUMENT}_enable")()
    assert torch.equal(greedy(model, inputs, speculator="ngram"), expected), "nothing is dropped after training"
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name == "llama" and "is_grad_enabled" in inspect.getsource(modeling_layers):
        state = torch.get_rng_state()
        assert torch.equal(greedy(model, inputs, speculator="ngram"), expected)
        assert torch.equal(greedy(model, inputs, speculator=noisy(model, 0.3).train()), expected)
        assert torch.equal(torch.get_rng_state(), state)
    else:
        for one, speculator in ((model, "ngram"), (build(name), model)):
            with pytest.raises(ValueError, match=r"training mode with activation checkpointing.* call .*\.eval\(\)"):
                greedy(one, inputs, speculator=speculator)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_prefill_chunk_size(name: str, chunk: int) -> None:
    model, inputs = target(name), prompts(3, (21, 12, 5))
    plain = greedy(model, inputs, prefill_chunk_size=chunk)
    assert torch.equal(greedy(model, inputs, prefill_chunk_size=chunk, speculator=draft(name)), plain)
    assert torch.equal(plain, greedy(model, inputs))


@pytest.mark.parametrize("ids", ["without ids", "with ids", "with longer ids"])
@pytest.mark.parametrize("kind", ["vanilla", "ngram"])
def test_inputs_embeds(model: PreTrainedModel, kind: str, ids: str) -> None:
    inputs = prompts(3)
    embeds = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }
    if ids != "without ids":
        embeds["input_ids"] = inputs["input_ids"]
    if ids == "with longer ids":
        embeds["input_ids"] = torch.cat([inputs["input_ids"]] * 2, dim=1)
    plain = greedy(model, embeds)
    speculator = draft() if kind == "vanilla" else NgramSpeculator(corpus=plain.tolist())
    assert torch.equal(greedy(model, embeds, speculator=speculator), plain)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
@pytest.mark.parametrize("acceptance", ["lossless", "near_best"])
def test_a_processor_and_a_prompt_without_ids(model: PreTrainedModel, acceptance: Any) -> None:
    """The first token has no text before it, and so the processors see none."""
    embeds = {"inputs_embeds": model.get_input_embeddings()(prompts(2, (13,))["input_ids"]).detach()}
    no_doubles = LogitsProcessorList([pure(lambda ids, scores: scores.scatter(1, ids[:, -1:], -torch.inf))])
    for options in ({"repetition_penalty": 1.3}, {"logits_processor": no_doubles}):
        plain = greedy(model, embeds, **options)
        for shape in SHAPES.values():
            config = shape.merge(acceptance=acceptance)  # its own best token is near enough
            assert torch.equal(greedy(model, embeds, **options, speculator=draft(), speculation_config=config), plain)


def test_positions_of_the_caller(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    moved = inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) * 2}
    plain = greedy(model, moved)
    assert not torch.equal(plain, greedy(model, inputs))
    for shape in SHAPES.values():
        assert torch.equal(greedy(model, moved, speculator=draft(), speculation_config=shape), plain)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_forward_that_names_no_arguments(name: str) -> None:
    """Someone's wrapper: transformers gives it no positions, and neither must we."""
    model = noisy(target(name), 0.0)
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    for batch in BATCHES.values():
        plain = greedy(model, prompts(*batch))
        for shape in SHAPES.values():
            for speculator in (Oracle(plain), draft(name)):
                out = greedy(model, prompts(*batch), speculator=speculator, speculation_config=shape)
                assert torch.equal(out, plain)


def test_a_forward_that_is_replaced_on_its_class_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *args, **kwargs: None)
        assert "position_ids" not in arguments_of(model)
    assert "position_ids" in arguments_of(model)


def test_inference_mode(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    plain = greedy(model, inputs)
    with torch.inference_mode():
        out = greedy(model, inputs, speculator=draft(), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    more = next_turn(out, inputs, [33] * 3)
    out = greedy(model, more, speculator=draft(), past_key_values=out.past_key_values)
    assert torch.equal(out, greedy(model, more)), "its cache is of no use outside"


def test_cache_implementation_of_old_files() -> None:
    model = noisy(target("gemma2"), 0.0)
    model.generation_config.cache_implementation = "hybrid"
    assert torch.equal(greedy(model, prompts(3), speculator="ngram"), greedy(target("gemma2"), prompts(3)))


def test_inputs_without_a_mask_or_at_all(model: PreTrainedModel) -> None:
    ids = prompts(3, (7,))["input_ids"]
    assert torch.equal(greedy(model, {"inputs": ids}, speculator=draft()), greedy(model, {"inputs": ids}))
    start = {"bos_token_id": 5}
    assert torch.equal(greedy(model, {}, speculator=draft(), **start), greedy(model, {}, **start))


def test_short_integers(model: PreTrainedModel) -> None:
    inputs = {name: value.int() for name, value in prompts(3).items()}
    plain = greedy(model, inputs)
    for shape in SHAPES.values():
        for speculator in (draft(), "ngram"):
            out = greedy(model, inputs, speculator=speculator, speculation_config=shape)
            assert out.dtype == plain.dtype
            assert torch.equal(out, plain)


def test_a_mask_with_holes(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    inputs["attention_mask"][:, -4:-2] = 0
    for shape in SHAPES.values():
        out = greedy(model, inputs, speculator=draft(), speculation_config=shape)
        assert torch.equal(out, greedy(model, inputs))


@pytest.mark.parametrize("ends", [False, True], ids=["all to the end", "one ends early"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_end_of_a_position_table(name: str, shape: str, ends: bool) -> None:
    """Rows that are ahead have no positions for as many guesses as those behind; the tables are exactly full."""
    model = target(name, max_position_embeddings=48)
    inputs, options = prompts(3, (13, 12, 11)), {"max_new_tokens": 48 - 13, "return_dict_in_generate": True}
    if ends:  # its last token is read beside the others' guesses
        options |= {"eos_token_id": int(greedy(model, inputs, **options).sequences[0, -3]), "pad_token_id": 0}
    plain = greedy(model, inputs, **options)
    for depth in (3, 4, 6, 7):
        ahead, config = Halting(plain.sequences), SHAPES[shape].merge(num_speculative_tokens=depth)
        out = greedy(model, inputs, speculator=ahead, speculation_config=config, **options)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


class Halting(Oracle):
    """Be right in row 0 and wrong in all others, so that it is far ahead of them."""

    def __init__(self, text: Tensor) -> None:
        super().__init__(torch.cat([text[:1], (text[1:] + 1) % 99]), wrong=1000)


@pytest.mark.parametrize("tree", [None, [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["vanilla", "ngram", "oracle"])
def test_a_row_guesses_as_deep_in_a_batch_as_alone(model: PreTrainedModel, kind: str, tree: Any) -> None:
    """The limit of the longest row is not that of the others."""
    inputs = prompts(8)
    plain = greedy(model, inputs)
    config = SpeculationConfig(num_speculative_tokens=4, tree=tree)

    def counts(rows: slice) -> list[dict[str, Any]]:
        speculator = {"vanilla": draft(), "ngram": "ngram", "oracle": Oracle(plain[rows], wrong=1000)}[kind]
        given = {name: value[rows] for name, value in inputs.items()}
        out = greedy(model, given, speculator=speculator, speculation_config=config, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain[rows])
        return [{**row.to_dict(), "seconds": 0} for row in out.speculation.per_row]

    together, alone = counts(slice(0, 8)), [counts(slice(row, row + 1))[0] for row in range(8)]
    assert together == alone


def test_measured_acceptance_does_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    inputs = prompts(8)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    by_batch = [measure(draft(), model, texts, max_new_tokens=NEW, batch_size=size) for size in (1, 3, 8)]
    assert by_batch[0] == by_batch[1] == by_batch[2] and by_batch[0].accepted


@pytest.mark.parametrize(("place", "forked"), [("cpu", ([], "cuda")), ("xpu:1", ([torch.device("xpu:1")], "xpu"))])
def test_measuring_leaves_the_random_numbers_of_any_device(
    place: str, forked: tuple[Any, Any], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(evaluation, "input_device", lambda target: torch.device(place))
    monkeypatch.setattr(
        torch.random,
        "fork_rng",
        lambda devices, device_type=None: found.append((devices, device_type)) or nullcontext(),
    )
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    measure("ngram", model, [], max_new_tokens=1)
    assert found == [forked]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draft_in_another_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    inputs = prompts(3)
    other = noisy(model).to(dtype)
    out = greedy(model, inputs, speculator=other, return_dict_in_generate=True)
    assert torch.equal(out.sequences, greedy(model, inputs))
    assert out.speculation.accepted


def test_the_path_of_a_language_model(model: PreTrainedModel, tmp_path: Path) -> None:
    noisy(model).save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        out = greedy(model, prompts(3), speculator=path, return_dict_in_generate=True)
        assert torch.equal(out.sequences, greedy(model, prompts(3)))
        assert out.speculation.accepted


@pytest.mark.parametrize("kind", ["vanilla", "eagle3", "a path", "n-gram"])
def test_an_offloaded_target(model: PreTrainedModel, kind: str, tmp_path: Path) -> None:
    """What speculation saves most: each forward fetches all the weights."""
    config = Eagle3SpeculatorConfig.for_target(model.config, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    eagle3 = new_draft(config, model).eval()
    eagle3.save_pretrained(tmp_path)
    speculators: dict[str, Any] = {"vanilla": noisy(model), "eagle3": eagle3, "n-gram": "ngram"}
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert offloaded.device.type == "meta"
    for shape in SHAPES.values():
        speculator = speculators.get(kind, str(tmp_path))
        for sampling in ({}, {"do_sample": True, "temperature": 1e-4}):  # which samples the likeliest token
            out = greedy(offloaded, prompts(3), speculator=speculator, speculation_config=shape, **sampling)
            assert torch.equal(out, greedy(model, prompts(3)))


def test_train_mode(model: PreTrainedModel) -> None:
    """Without dropout train mode changes nothing; the mode stays as it was."""
    other, guesser = noisy(model, 0.0).train(), noisy(model).train()
    inputs = prompts(3)
    assert torch.equal(greedy(other, inputs, speculator=guesser), greedy(model, inputs))
    assert other.training
    assert guesser.training


# --- Several turns ---------------------------------------------------------------------------------------------------


def cached(model: PreTrainedModel, inputs: dict[str, Tensor], speculator: Any, shape: str, **kwargs: Any) -> Any:
    options = {} if speculator is None else {"speculator": speculator, "speculation_config": SHAPES[shape]}
    return greedy(model, inputs, return_dict_in_generate=True, **options, **kwargs)


def next_turn(out: Any, inputs: dict[str, Tensor], ends: list[int]) -> dict[str, Tensor]:
    """Let every row go on with three new tokens after what it said; ``ends`` are the lengths of the texts."""
    batch, length = out.sequences.shape
    said = torch.cat([inputs["attention_mask"], torch.ones(batch, length - inputs["attention_mask"].shape[1])], 1)
    said = said * (torch.arange(length) < torch.tensor(ends)[:, None])
    news = torch.arange(3 * batch).view(batch, 3) + 20
    return {
        "input_ids": torch.cat([out.sequences, news], dim=1),
        "attention_mask": torch.cat([said, torch.ones(batch, 3)], dim=1).long(),
    }


@pytest.mark.parametrize(
    ("name", "batch", "shape", "who"),
    pairwise(["llama", "mistral", "gemma2"], ["one", "ragged"], SHAPES, ["ours, plain", "plain, ours", "ours, ours"]),
)
def test_turns(name: str, batch: str, shape: str, who: str) -> None:
    model, inputs = target(name), prompts(*BATCHES[batch])
    first, second = ({"ours": draft(name), "plain": None}[one] for one in who.split(", "))
    plain = cached(model, inputs, None, shape)
    out = cached(model, inputs, first, shape)
    ends = [plain.sequences.shape[1]] * len(plain.sequences)
    more = next_turn(plain, inputs, ends)
    expected = cached(model, more, None, shape, past_key_values=plain.past_key_values)
    again = cached(model, more, second, shape, past_key_values=out.past_key_values)
    assert torch.equal(again.sequences, expected.sequences)
    assert again.past_key_values is out.past_key_values
    assert torch.equal(greedy(model, more), expected.sequences), "plain's own cache is not usable"


@pytest.mark.parametrize("wrong", [1, 4, 1000])
def test_turns_with_rows_that_ended_early(model: PreTrainedModel, wrong: int) -> None:
    inputs = prompts(3)
    text = greedy(model, inputs)
    eos = {"eos_token_id": [int(text[1, -12]), int(text[2, -5]), int(text[0, -3])]}
    plain = cached(model, inputs, None, "chain", **eos)
    ends = [int((row != 0).nonzero().max()) + 1 for row in plain.sequences]
    assert len(set(ends)) == 3
    more = next_turn(plain, inputs, ends)
    expected = greedy(model, more)
    for shape in SHAPES:
        cached(model, inputs, draft(), shape)  # with the self-check
        for speculator in (draft(), Oracle(text, wrong)):
            forwards: list[object] = []
            hook = model.register_forward_hook(mark_as_ours(lambda *_: forwards.append(1)))  # noqa: B023
            out = cached(model, inputs, speculator, shape, **eos)
            hook.remove()
            assert len(forwards) <= 1 + out.speculation.steps + 1  # the prompt, and rows that ended in the last step
            cache = out.past_key_values
            assert cache.get_seq_length() == plain.past_key_values.get_seq_length()
            for mine, theirs in zip(cache.layers, plain.past_key_values.layers, strict=True):
                for row, end in enumerate(ends):  # the row's last token is read too, as others went on
                    padding = 13 - int(inputs["attention_mask"][row].sum())
                    torch.testing.assert_close(
                        mine.keys[row, :, padding:end], theirs.keys[row, :, padding:end], atol=1e-4, rtol=1e-4
                    )
            assert torch.equal(cached(model, more, draft(), shape, past_key_values=cache).sequences, expected)


def test_only_the_new_tokens_of_a_turn(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    out = cached(model, inputs, draft(), "chain")
    more = next_turn(out, inputs, [out.sequences.shape[1]] * 3)
    expected = greedy(model, more)
    seen = out.past_key_values.get_seq_length()
    news = {"input_ids": more["input_ids"][:, seen:], "attention_mask": more["attention_mask"]}
    out = cached(model, news, draft(), "tree", past_key_values=out.past_key_values)
    assert torch.equal(out.sequences, expected[:, seen:])


class Listener(Oracle):
    """Keep what a call tells of its prompt, and its text."""

    def drafter(self, request: DraftContext) -> Drafter:
        self.mask = request.attention_mask
        return super().drafter(request)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]


def test_new_tokens_of_a_turn_are_no_padding(model: PreTrainedModel) -> None:
    """The mask begins with what the cache holds, padding included; all new tokens count for drafter and memory."""
    inputs = prompts(3)
    out = cached(model, inputs, None, "chain")
    more = next_turn(out, inputs, [out.sequences.shape[1]] * 3)
    seen = out.past_key_values.get_seq_length()
    assert not bool(more["attention_mask"][:, : more["input_ids"].shape[1] - seen].all())
    news = {"input_ids": more["input_ids"][:, seen:], "attention_mask": more["attention_mask"]}
    listener = Listener(news["input_ids"])
    text = greedy(model, news, speculator=listener, past_key_values=out.past_key_values)
    assert bool(listener.mask.all())
    assert listener.texts == text.tolist()


def test_a_cache_that_was_handed_in_holds_the_text(model: PreTrainedModel) -> None:
    """As with plain ``generate``, also where the result is tokens only."""
    inputs = prompts(1)
    before = cached(model, inputs, None, "chain", max_new_tokens=3)
    cache = before.past_key_values
    inputs = {"input_ids": before.sequences, "attention_mask": torch.ones_like(before.sequences)}
    more = greedy(model, inputs, speculator=draft(), past_key_values=cache)
    assert cache.get_seq_length() == more.shape[1] - 1
    longer = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    assert torch.equal(greedy(model, longer, past_key_values=cache), greedy(model, longer))


@pytest.mark.parametrize("name", [CACHE, "past_key_values"])
def test_a_cache_goes_by_the_name_of_transformers_and_by_its_old_one(name: str) -> None:
    model, inputs = target(), prompts(1)
    before = greedy(model, inputs, speculator=draft(), return_dict_in_generate=True)
    longer = {"input_ids": torch.cat([before.sequences, before.sequences[:, :3]], dim=1)}
    expected = greedy(model, longer)
    out = greedy(model, longer, speculator=draft(), return_dict_in_generate=True, **{name: before[name]})
    assert torch.equal(out.sequences, expected)
    assert out[name] is getattr(out, name) is before[name]
    assert before[name].get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_empty_cache_is_filled(name: str) -> None:
    """One that was made without a configuration has no windowed layers."""
    model, inputs, ours, plain = target(name), prompts(3), DynamicCache(), DynamicCache()
    expected = greedy(model, inputs, past_key_values=plain)
    assert torch.equal(greedy(model, inputs, past_key_values=ours, speculator=draft(name)), expected)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.keys.shape == theirs.keys.shape
        assert torch.allclose(mine.keys[0], theirs.keys[0], atol=1e-4)


# --- Two calls at a time ---------------------------------------------------------------------------------------------


def test_threads_share_a_model(model: PreTrainedModel) -> None:
    calls = [prompts(3, seed=1), prompts(1, (6,), seed=2), prompts(2, (17, 3), seed=3)]
    plain = [greedy(model, inputs) for inputs in calls]
    found: list[Tensor | None] = [None] * len(calls)

    def run(index: int) -> None:
        for _ in range(3):
            found[index] = greedy(model, calls[index], speculator=draft(), speculation_config=TREE)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
