"""A target is compared with its own plain steps before it is trusted, and again when its forward may have changed."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build, prompts
from peft import LoraConfig, PeftModel, PolyConfig, get_peft_model
from test_multimodal import llava
from torch import Tensor, nn
from transformers import (
    BltForCausalLM,
    CsmForConditionalGeneration,
    DynamicCache,
    KyutaiSpeechToTextForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MoshiForConditionalGeneration,
    PreTrainedModel,
    VoxtralRealtimeForConditionalGeneration,
    XLMWithLMHeadModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from twins import SHAPES, Oracle

from hf_spec.integration import install, uninstall
from hf_spec.scoring import selfcheck
from hf_spec.scoring.architectures import why_unsupported
from hf_spec.scoring.changes import foreign_hooks, way_of_forward
from hf_spec.scoring.hooks import hooked
from hf_spec.scoring.kv_view import KVView
from hf_spec.scoring.prompts import Prompt
from hf_spec.scoring.selfcheck import check_target, difference_from_plain
from hf_spec.scoring.trials import MOST_WAYS, tried_once

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_one_wrong_row_is_enough_in_half_precision(
    dtype: torch.dtype, row: int, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, positions = build("llama", dtype=dtype, num_hidden_layers=2), KVView.positions

    def wrong(self: KVView, *args: Any) -> Tensor:
        found = positions(self, *args).clone()
        found[..., row, :] += 2
        return found

    monkeypatch.setattr(KVView, "positions", wrong)
    with pytest.raises(ValueError, match="differently from single steps"):
        check_target(model, trees)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_one_wrong_path_is_enough_in_half_precision(dtype: torch.dtype) -> None:
    """Of the six paths of the two rows of a tree only one ends in node 5 of row 1. What is found is remembered."""
    model, forwards = build("llama", dtype=dtype, num_hidden_layers=2), list[Any]()

    def wrong(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        forwards.append(logits.shape)
        if logits.shape[1] == len(selfcheck.TREE.parents):
            logits[1, 5] = logits[1, 5].roll(1)
        return logits

    model.get_output_embeddings().register_forward_hook(wrong)
    counts = []
    for _ in range(2):  # a default speculator is asked for in every call
        with pytest.raises(ValueError, match="scores a tree"):
            check_target(model, trees=True)
        counts.append(len(forwards))
    assert 0 < counts[0] == counts[1]


def test_a_lack_of_memory_tells_nothing_of_a_model() -> None:
    model, is_full = build("llama", num_hidden_layers=2), [True, False]

    def read(module: nn.Module, args: Any, logits: Tensor) -> None:
        if is_full[0]:
            raise torch.OutOfMemoryError

    model.get_output_embeddings().register_forward_hook(read)
    with pytest.raises(ValueError, match="too little memory"):
        check_target(model, trees=False)
    is_full.pop(0)
    check_target(model, trees=False)


def test_what_may_be_put_down_to_rounding_is_measured() -> None:
    """A quarter of the spread is far more than bfloat16 makes of two layers."""
    model = build("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    apart, most = difference_from_plain(model, selfcheck.TREE)
    assert apart <= most <= 0.5 * selfcheck.CHECK_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_tokens_that_rounding_routes_otherwise_are_tried_again_in_half_precision(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype, num_hidden_layers=2)
    blocks = [
        selfcheck.tokens_for(model, 2, len(selfcheck.CHAIN.parents), 1 + draw) for draw in range(selfcheck.TRIES)
    ]

    def flips(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        for draw, tokens in enumerate(blocks):  # once in each draw, in this row or that
            if torch.equal(kwargs["input_ids"], tokens.flip(0, 1)):
                output.logits[draw % 2] = output.logits[draw % 2].roll(1, -1)
        return output

    model.register_forward_hook(flips, with_kwargs=True)
    if dtype == torch.float32:
        with pytest.raises(ValueError, match="differently from single steps"):
            check_target(model, trees=False)
    else:
        check_target(model, trees=False)


# --- What the call passes --------------------------------------------------------------------------------------------


def given(model: PreTrainedModel, **inputs: Tensor) -> Prompt:
    """Take what ``generate`` would hand to the first forward."""
    caught: list[Prompt | None] = []

    def decode(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ("logits_processor", "stopping_criteria", "generation_config")
        caught.append(Prompt.of_call(input_ids, {k: v for k, v in kwargs.items() if k not in names}))
        return input_ids

    model.generate(**inputs, **OPTIONS, custom_generate=decode)  # type: ignore[operator]
    assert caught[0] is not None
    return caught[0]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_target_is_checked_with_the_images_of_the_call(static: bool) -> None:
    model, inputs = llava()
    prompt = given(model, **inputs)
    assert prompt.extra == ("mm_encoder_outputs",)
    check_target(model, trees=not static, static=static, prompt=prompt)

    def wrong(module: nn.Module, args: Any, kwargs: Any) -> Any:  # only behind an image
        if kwargs.get("mm_encoder_outputs") is not None:
            model.after_image = True
        if getattr(model, "after_image", False) and kwargs["input_ids"].shape[1] == 4:
            return args, kwargs | {"input_ids": kwargs["input_ids"] + 1}
        return None

    model.register_forward_pre_hook(wrong, with_kwargs=True)
    check_target(model, trees=False, static=static)
    with pytest.raises(ValueError, match=r"scores a chain .*hooks of others.*wrong"):
        check_target(model, trees=False, static=static, prompt=prompt)


def test_a_row_that_plain_generate_misreads_by_its_padding_counts_alone_also_with_images() -> None:
    model, inputs = build("git"), prompts(2)
    size = model.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    check_target(model, trees=True, prompt=given(model, **inputs, pixel_values=images))


def test_text_alone_needs_no_prompt_of_the_call_and_no_tensor_is_kept() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    assert Prompt.of_call(ids, {"attention_mask": ids, "use_cache": True, "logits_to_keep": 1}) is None
    model, inputs = llava()
    prompt = given(model, **inputs)
    one = Prompt.of_call(prompt.ids[:1], dict(prompt.kwargs))
    assert one is not None and one.kind != prompt.kind
    check_target(model, trees=False, prompt=prompt)
    given_mask = weakref.ref(prompt.kwargs["attention_mask"])
    del prompt, one, inputs
    gc.collect()
    assert given_mask() is None


# --- What may have changed since -------------------------------------------------------------------------------------


def hook_on_the_model(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: None)


def hook_on_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda module, args: None)


def forward_replaced(model: Any) -> None:
    layer = model.model.layers[1].mlp
    layer.forward = lambda states, forward=layer.forward: forward(states)


def module_swapped(model: Any) -> None:
    class Other(nn.Linear):
        pass

    model.model.layers[1].self_attn.q_proj.__class__ = Other


def weights_of_another_type(model: Any) -> None:
    class Quantised(Tensor):
        pass

    weight = model.lm_head.weight.data.as_subclass(Quantised)
    model.lm_head._parameters["weight"] = nn.Parameter(weight)


def weights_of_another_precision(model: Any) -> None:
    model.model.layers[1].mlp.bfloat16()


def config_edited(model: Any) -> None:
    model.config.sliding_window = 4


def nested_config_edited(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 7.0


def dropout_somewhere(model: Any) -> None:
    model.model.layers[0].train()


def another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


CHANGES = [
    hook_on_the_model,
    hook_on_a_layer,
    forward_replaced,
    module_swapped,
    weights_of_another_type,
    weights_of_another_precision,
    config_edited,
    nested_config_edited,
    dropout_somewhere,
    another_attention,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_target_is_tried_again_when_its_forward_may_have_changed(change: Callable[[Any], None]) -> None:
    tries = []

    @tried_once
    def trial(model: PreTrainedModel) -> None:
        tries.append(model)

    model = build("llama", num_hidden_layers=2)
    for _ in range(2):
        trial(model)
    assert len(tries) == 1
    change(model)
    for _ in range(2):
        trial(model)
    assert len(tries) == 2


def test_hooks_that_this_package_places_for_a_while_are_no_change() -> None:
    model = build("llama", num_hidden_layers=1)
    way = way_of_forward(model)
    with hooked([model.model], before=lambda *_: None, after=lambda *_: None):
        assert way_of_forward(model) == way
        assert foreign_hooks(model) == []


def test_only_the_last_ways_are_remembered_and_none_keeps_a_hook_alive() -> None:
    tries = []

    @tried_once
    def trial(model: PreTrainedModel) -> None:
        tries.append(model)

    model = build("llama", num_hidden_layers=1)
    trial(model)
    for _ in range(MOST_WAYS):
        hook = functools_hook()
        handle = model.register_forward_hook(hook)
        trial(model)
        handle.remove()
        gone = weakref.ref(hook)
        del hook, handle
        assert gone() is None
    assert len(tries) == MOST_WAYS + 1
    trial(model)
    assert len(tries) == MOST_WAYS + 2  # the first one was dropped


def functools_hook() -> Any:
    return lambda module, args, output: None


def test_what_changes_a_forward_is_asked_with_few_operations() -> None:
    """No look at numbers, and hardly a call for each module: the key is made in every call of generate."""
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=24, num_attention_heads=2, vocab_size=32
    )
    model = LlamaForCausalLM(config).eval()
    count = sum(1 for _ in model.modules())
    assert count > 300
    calls = [0]

    def watch(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        way_of_forward(model)
    finally:
        sys.setprofile(None)
    assert calls[0] < 1.5 * count


def test_checkpointing_that_goes_on_and_off_between_calls_is_no_change() -> None:
    """As around each rollout of TRL: transformers leaves a hook each time, which lets gradients pass."""
    model = build("llama", num_hidden_layers=2)
    before = way_of_forward(model)
    for _ in range(2):
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
    model.enable_input_require_grads()
    assert foreign_hooks(model) == [] and way_of_forward(model) == before


def test_a_hook_on_the_last_position_that_came_after_a_first_call_is_noticed() -> None:
    model, inputs = build("llama", num_hidden_layers=2), prompts(2)
    model.generate(**inputs, **OPTIONS, speculator="ngram")
    direction = 3 * torch.randn(32, generator=torch.Generator().manual_seed(0))

    def steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output[:, -1] += direction
        return output

    assert foreign_hooks(model) == []
    handle = model.model.layers[0].register_forward_hook(steer)
    assert len(foreign_hooks(model)) == 1
    model.model.layers[1].mlp.eval()
    for is_trained in (False, True):  # a policy generates while it is trained
        model.train(is_trained)
        with pytest.raises(ValueError, match=r"model\.layers\.0: .*steer"):
            model.generate(**inputs, **OPTIONS, speculator="ngram")
        assert all(module.training == is_trained for module in model.modules())
    handle.remove()
    model.generate(**inputs, **OPTIONS, speculator="ngram")
    assert model.training


# --- Adapters --------------------------------------------------------------------------------------------------------

INVOCATION = [71, 72]


def activated(name: str = "llama", seed: int = 0) -> PeftModel:
    """Put an activated LoRA on a model, which changes what it writes from its invocation tokens on."""
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
        alora_invocation_tokens=INVOCATION,
    )
    return get_peft_model(copy.deepcopy(build(name)), config).eval()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_activated_lora_takes_its_turn_after_the_base_model(cache: str, shape: str) -> None:
    """In a batch only the rows that hold the invocation tokens are adapted, and those from there on."""
    model, inputs = activated(), prompts(3)
    options = OPTIONS | {"cache_implementation": cache, "speculation_config": SHAPES[shape]}
    with model.disable_adapter():
        base = model.generate(**inputs, **OPTIONS)
        assert torch.equal(model.generate(**inputs, **options, speculator=Oracle(base)), base)
    inputs["input_ids"][:2, -2:] = torch.tensor(INVOCATION)
    with model.disable_adapter():
        base = model.generate(**inputs, **OPTIONS)
    for rows in (slice(0, 1), slice(0, 3)):
        given = {name: value[rows] for name, value in inputs.items()}
        plain = model.generate(**given, **OPTIONS)
        assert (plain != base[rows]).any(1).tolist() == [True, True, False][rows]
        for end in (None, int(plain[0, -6])):  # rows that end early leave the others their adapters
            plain = model.generate(**given, **OPTIONS, eos_token_id=end, pad_token_id=0)
            text = model.generate(**given, **options, eos_token_id=end, pad_token_id=0, speculator=Oracle(plain))
            assert torch.equal(text, plain)


def test_draft_tokens_are_not_read_with_a_prompt_that_an_activated_lora_reads() -> None:
    """PEFT counts the adapted tokens from the end of what is read. A call without the invocation hides nothing."""
    model, end = activated(), [40, 41, 42, 43, 44, 45]
    ids = torch.tensor([[*end, 50, 51, *INVOCATION, *end]])
    for given in (prompts(1)["input_ids"], ids):
        plain = model.generate(input_ids=given, **OPTIONS, return_dict_in_generate=True, output_logits=True)
        found = model.generate(
            input_ids=given, **OPTIONS, return_dict_in_generate=True, output_logits=True, speculator="ngram"
        )
        torch.testing.assert_close(found.logits[0], plain.logits[0])
        assert torch.equal(found.sequences, plain.sequences)


def test_the_active_adapter_is_part_of_what_was_found() -> None:
    model = activated()
    model.add_adapter("two", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    ways = {way_of_forward(model.base_model.model)}
    model.set_adapter("two")
    ways.add(way_of_forward(model.base_model.model))
    with model.disable_adapter():
        ways.add(way_of_forward(model.base_model.model))
    assert len(ways) == 3
    ways.add(way_of_forward(model.base_model.model))
    assert len(ways) == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_poly_mixes_for_each_row_what_its_task_needs(shape: str) -> None:
    torch.manual_seed(0)
    config = PolyConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2, n_tasks=3, n_skills=2, init_weights=False
    )
    model: Any = get_peft_model(copy.deepcopy(build("llama")), config).eval()
    for name, weight in model.named_parameters():
        if "module_logits" in name:
            nn.init.normal_(weight, std=3)
    inputs, tasks = prompts(3), torch.tensor([0, 2, 1])
    plain = model.generate(**inputs, **OPTIONS, task_ids=tasks)
    assert not torch.equal(plain, model.generate(**inputs, **OPTIONS, task_ids=tasks.flip(0)))
    for end in (None, int(plain[0, -6])):
        options = OPTIONS | {"task_ids": tasks, "eos_token_id": end, "pad_token_id": 0}
        plain = model.generate(**inputs, **options)
        text = model.generate(**inputs, **options, speculator=Oracle(plain), speculation_config=SHAPES[shape])
        assert torch.equal(text, plain)


# --- What is refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (BltForCausalLM, "patches"),
        (CsmForConditionalGeneration, "several codebooks"),
        (KyutaiSpeechToTextForConditionalGeneration, "sound of that moment"),
        (MoshiForConditionalGeneration, "a second model"),
        (VoxtralRealtimeForConditionalGeneration, "sound of that moment"),
        (XLMWithLMHeadModel, "no key-value cache"),
    ],
    ids=lambda kind: getattr(kind, "__name__", None),
)
def test_what_about_a_model_is_in_the_way_is_said(kind: type[Any], reason: str) -> None:
    own = type("Own", (kind,), {})  # somebody's subclass
    model = own.__new__(own)  # without its modules: some hold a whole codec
    nn.Module.__init__(model)
    model.config = kind.config_class()
    why = why_unsupported(model, DynamicCache())
    assert why is not None and why.startswith("Own is not supported: ") and reason in why


def test_a_model_that_reads_no_text_alone_is_told_from_one_that_reads_no_blocks() -> None:
    def needs_more(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise ValueError("pixel_values has to be not-None")

    def needs_one(module: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == 4:
            raise RuntimeError("no view")

    model = build("llama", num_hidden_layers=1)
    handle = model.register_forward_pre_hook(needs_more, with_kwargs=True)
    with pytest.raises(ValueError, match=r"its own plain steps, which fail with text alone .*pixel_values"):
        check_target(model, trees=False)
    handle.remove()
    model.register_forward_pre_hook(needs_one, with_kwargs=True)
    with pytest.raises(ValueError, match=r"cannot score a chain of draft tokens \(RuntimeError: no view\)"):
        check_target(model, trees=False)
    ids = torch.ones(2, 7, dtype=torch.long)
    prompt = Prompt(ids, ids, {"attention_mask": ids}, extra=("image_grids",))
    with pytest.raises(ValueError, match="a chain of draft tokens with the image_grids of this call"):
        check_target(model, trees=False, prompt=prompt)


def test_hooks_that_collect_the_outputs_of_a_model_change_no_forward() -> None:
    """transformers leaves them at all layers after the first call that asks for hidden states."""
    model = build("llama")
    before = way_of_forward(model)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_hidden_states": True}
    model.generate(torch.tensor([[5, 6, 7]]), **options)
    assert any(layer._forward_hooks for layer in model.modules())
    assert foreign_hooks(model) == [] and way_of_forward(model) == before


def test_the_first_call_of_a_process_changes_no_forward() -> None:
    """It puts functions of ours around those of transformers, for good."""
    model = build("llama")
    uninstall()
    install()
    before = way_of_forward(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, speculator="ngram")
    assert hasattr(ALL_MASK_ATTENTION_FUNCTIONS[model.config._attn_implementation], "_hf_spec_original")
    assert way_of_forward(model) == before
