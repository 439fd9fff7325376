"""What attacks on training found: bad conversations, numbers that are none, data in other formats, copies."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from architectures import build
from golden import tiny_target
from groups import leave, run_two
from test_streams_of_examples import examples as stream_rows
from test_trainer import arguments, eagle3, sharp_target
from test_training_data import CHAT, THINKING, answers, chats, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.training import (
    DraftTrainer,
    DraftTrainingArguments,
    cache_features,
    count_tokens,
    new_draft,
    prepare_dataset,
    regenerate,
)
from hf_spec.training.evaluation import prompts_of
from hf_spec.training.losses import objective_terms
from hf_spec.training.muon import inner_matrices

# -- Muon -------------------------------------------------------------------------------------------------------------


def matrices(draft: Any) -> set[str]:
    chosen = {id(weight) for weight in inner_matrices(draft)}
    return {name for name, weight in draft.named_parameters() if id(weight) in chosen}


def test_muon_trains_layers_that_happen_to_be_as_wide_as_a_vocabulary() -> None:
    target = tiny_target()
    for size in (40, 96):  # the draft's vocabulary, the target's
        shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": size // 4}
        draft = eagle3(target, 40, layers={"intermediate_size": size, **shape})
        found = matrices(draft)
        assert {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")} <= found
        assert {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"} <= found and "fc.weight" in found
        assert not any("lm_head" in name for name in found)
    shape = {"block_size": 4, "mask_token_id": 5, "draft_vocab_size": 40, "markov_rank": 40, "shared_with_target": []}
    config = DSparkSpeculatorConfig.for_target(target.config, **shape, markov_head_type="gated")
    found = matrices(new_draft(config, target, torch.arange(96)))
    assert "markov_head.gate_proj.weight" in found and "markov_head.markov_w2.weight" not in found
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 96}
    found = matrices(LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)))
    assert "model.layers.0.mlp.gate_proj.weight" in found and "lm_head.weight" not in found


def test_muon_trains_no_adapter_that_ends_in_a_vocabulary() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["lm_head", "gate_proj"])
    found = matrices(peft.get_peft_model(eagle3(tiny_target(), 40), adapter))
    assert any("lm_head.lora_A" in name for name in found) and any("gate_proj.lora_B" in name for name in found)
    assert not any("lm_head.lora_B" in name for name in found)


# -- conversations ----------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def said(question: Any = "one", role: Any = "user", **more: Any) -> dict[str, Any]:
    asked = {"role": role, "content": question, **more}
    return {"messages": [asked, {"role": "assistant", "content": "two three"}]}


BAD: dict[str, Any] = {
    "half a surrogate": said("one \ud800"),
    "half a surrogate in a name": said(**{"x\udfff": 1}),
    "a role that is a list": said(role=["user"]),
    "a role that is a number": said(role=5),
    "deep": said(more=nested(200)),
    "deep tools": {**said(), "tools": nested(200)},
    "deep tools as text": {**said(), "tools": "[" * 5000 + "]" * 5000},
    "half a surrogate in tools": {**said(), "tools": json.dumps([{"name": "\ud800"}])},
    "a number": {"messages": 5},
    "no conversation": {"unknown": 5},
    "half a surrogate in a question": {"prompt": "\ud800", "completion": "two"},
}


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_conversation_is_skipped_by_regenerate(bad: str, tmp_path: Path) -> None:
    target, given = build("llama"), [said(), BAD[bad], said("four")]
    file = tmp_path / "answers.jsonl"
    for _ in range(2):  # a call that is repeated reads what it wrote
        regenerate(given, target, tokenizer(), file, max_new_tokens=2, progress=False, do_sample=False)
        lines = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
        assert [len(line) for line in lines] == [2, 0, 2]


@pytest.mark.parametrize("bad", [name for name in BAD if name not in ("a number", "half a surrogate in a question")])
def test_one_bad_line_is_skipped_by_prepare(bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (said(), BAD[bad], said("four"))), encoding="utf-8")
    rows = prepare_dataset(file, tokenizer())
    assert [answers(row) for row in rows] == ["two three <end>"] * 2
    assert "2 of 3 examples are kept: 1 examples are no text, or no conversation" in caplog.text


def test_half_a_surrogate_in_plain_text_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one two three"}\n{"text": "one \\ud800 two"}\n', encoding="utf-8")
    assert len(prepare_dataset(file, tokenizer(None))) == 1


def test_a_template_that_writes_half_a_surrogate_is_skipped() -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if messages | length > 2 %}\ud800{% endif %}"
    rows = prepare_dataset(chats(CHAT, CHAT[:2]), tokenizer(template))
    assert len(rows) == 1


# -- numbers ----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step_decay", (NAN, INF, 0, -1.0)),
        ("confidence_weight", (NAN, INF, -0.1)),
        ("feature_loss_weight", (NAN, -1)),
        ("chain_smoothing", (NAN, -0.1, 1.5)),
        ("eval_temperature", (-1, 0, NAN, INF, 1e-300)),
        ("eval_speculative_tokens", (0, -3)),
        ("muon_learning_rate", (0, -1.0, NAN)),
        ("learning_rate", (NAN, INF, -1.0)),
        ("weight_decay", (NAN, -0.1)),
        ("max_grad_norm", (NAN, -1.0)),
        ("adam_beta2", (NAN, 1.0, -0.1)),
        ("adam_epsilon", (NAN, -1.0)),
        ("warmup_steps", (NAN,)),
        ("num_train_epochs", (NAN,)),
    ],
)
def test_numbers_that_are_none_or_out_of_range_are_refused(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name} is {value}.*set "):
            DraftTrainingArguments(output_dir="unused", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["nan kl", "inf kl", "-1 kl", "0 kl", "0.1 ce + -0.9 tv", "kl + nan ce"])
def test_weights_of_an_objective_are_numbers_above_0(objective: str) -> None:
    with pytest.raises(ValueError, match="set a number above 0"):
        DraftTrainingArguments(output_dir="unused", objective=objective)


def test_terms_of_an_objective_add_up() -> None:
    assert objective_terms("0.5 kl + 0.25 kl + tv") == {"kl": 0.75, "tv": 1.0}


def broken_target(weight: str) -> Any:
    target = sharp_target()
    with torch.no_grad():
        target.get_parameter(weight)[7] = NAN
    return target


@pytest.mark.parametrize("weight", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_states_and_losses_that_are_no_numbers_end_training_at_once(weight: str, tmp_path: Path) -> None:
    """The token stands in a prompt, where no loss is: its gradient of zero times NaN would be NaN."""
    target = broken_target(weight)
    rows = [{"input_ids": [7, *range(20, 30)], "loss_mask": [0] * 3 + [1] * 8}]
    draft = eagle3(sharp_target())
    before = copy.deepcopy(draft.state_dict())
    with pytest.raises(ValueError, match="not finite"):
        DraftTrainer(draft, target, arguments(tmp_path), train_dataset=rows).train()
    assert all(torch.equal(before[name], tensor.cpu()) for name, tensor in draft.state_dict().items())


def test_cached_states_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    rows = [{"input_ids": [7, *range(20, 30)], "loss_mask": [0] * 3 + [1] * 8}]
    with pytest.raises(ValueError, match=r"are not finite in torch\.float32"):
        cache_features(rows, broken_target("model.embed_tokens.weight"), [1], tmp_path / "nan", progress=False)
    target = sharp_target()
    with torch.no_grad():
        target.model.norm.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"layer -1 are not finite in torch\.float16"):
        cache_features(rows, target, [1], tmp_path / "half", dtype=torch.float16, progress=False)
    cache_features(rows, target, [1], tmp_path / "half", dtype=torch.bfloat16, progress=False)


# -- data in other formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_packed_data_in_the_format_of_a_library_train_and_measure_the_same(kind: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one two three four five", "six seven eight nine", "one two six"]})
    packed = prepare_dataset(rows, tokenizer(None), packing=True, max_length=10)
    assert prepare_dataset(rows.with_format(kind), tokenizer(None), packing=True, max_length=10)[:] == packed[:]
    found = []
    for data in (packed, packed.with_format(kind)):
        target = sharp_target()
        trainer = DraftTrainer(
            eagle3(target), target, arguments(tmp_path / str(len(found))), train_dataset=data, eval_dataset=data
        )
        trainer.train()
        found.append({name: value for name, value in trainer.evaluate().items() if "per_second" not in name})
        found[-1].pop("eval_runtime")
    assert found[0] == found[1]
    assert prompts_of(packed.with_format(kind), 2, 3) == prompts_of(packed, 2, 3)


def test_an_example_without_a_token_is_passed_over() -> None:
    rows = [{"input_ids": [], "loss_mask": []}, {"input_ids": [3, 1, 1], "loss_mask": [0, 1, 1]}]
    assert count_tokens(rows, 4).tolist() == [0, 2, 0, 0]
    assert prompts_of(rows, 2, 3) == [[3]]


def evaluate_stream(folder: str, count: int) -> dict[str, float]:
    torch.set_num_threads(1)
    rows = datasets.Dataset.from_list(stream_rows(count)).to_iterable_dataset()
    given = arguments(Path(folder), per_device_eval_batch_size=2, eval_prompts=3, normalizer="sequence")
    target = sharp_target()
    return DraftTrainer(eagle3(target), target, given, eval_dataset=rows).evaluate()


def evaluate_two(folder: str) -> None:
    found = {count: evaluate_stream(folder, count) for count in (1, 3, 5, 8)}
    if torch.distributed.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    leave()


def test_two_processes_count_no_example_of_a_stream_twice(tmp_path: Path) -> None:
    run_two(tmp_path, f"import test_training_attacks as test\ntest.evaluate_two({str(tmp_path)!r})", timeout=240)
    for count, figures in json.loads((tmp_path / "found.json").read_text()).items():
        alone = evaluate_stream(str(tmp_path), int(count))
        names = {name for name in alone if "time" not in name and "per_second" not in name}
        for name in names:
            assert figures[name] == pytest.approx(alone[name], rel=1e-4), (count, name)


# -- copies -----------------------------------------------------------------------------------------------------------


def lending() -> tuple[Any, Any]:
    target = sharp_target()
    draft = eagle3(target, shared_with_target=["lm_head"])
    draft.bind(target)
    return draft, target


def test_a_copy_of_an_adapter_keeps_it() -> None:
    peft = pytest.importorskip("peft")
    draft, target = lending()
    model = peft.get_peft_model(draft, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made = copy.deepcopy(model)
    assert isinstance(made, peft.PeftModel) and made.get_base_model() is not draft
    assert {*made.state_dict()} == {*model.state_dict()} and any("lora_A" in name for name in made.state_dict())
    ids = torch.tensor([[3, 4, 5, 6]])
    inside = made.get_base_model()
    features = torch.randn(1, 4, inside.fc.in_features)
    assert torch.equal(inside(ids, features=features).logits, draft(ids, features=features).logits)
    assert inside._borrowed("lm_head").data_ptr() == target.lm_head.weight.data_ptr()
    again = pickle.loads(pickle.dumps(draft))
    with pytest.raises(ValueError, match=r"call draft\.bind\(target\) first"):
        again(ids, features=features)


def test_a_copy_of_a_compiled_draft_is_compiled() -> None:
    draft, _ = lending()
    compiled = torch.compile(draft, backend="eager")
    assert type(copy.deepcopy(compiled)) is type(compiled)


# -- answers that a template shows otherwise later --------------------------------------------------------------------


def thoughts() -> list[dict[str, str]]:
    return [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "think </think> two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four five"},  # without a thought: as it was said
        {"role": "user", "content": "six"},
        {"role": "assistant", "content": "think </think> seven eight"},
        {"role": "user", "content": "nine"},
        {"role": "assistant", "content": "think </think> nine"},
    ]


LEFT_OUT = "2 earlier answers of 1 conversations are not trained on"


@pytest.mark.parametrize("streaming", [False, True])
def test_earlier_answers_that_are_left_out_are_counted(streaming: bool, caplog: Any) -> None:
    rows = chats(thoughts(), CHAT)
    found = list(prepare_dataset(rows.to_iterable_dataset() if streaming else rows, tokenizer(THINKING)))
    assert [answers(row) for row in found] == [
        "four five <end> think </think> nine <end>",
        "three four <end> six seven eight <end>",
    ]
    assert LEFT_OUT in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_earlier_answers_are_kept_as_they_were_said(streaming: bool, caplog: Any) -> None:
    rows = chats(thoughts(), CHAT)
    given = rows.to_iterable_dataset() if streaming else rows
    found = list(prepare_dataset(given, tokenizer(THINKING), earlier_answers="keep"))
    assert [answers(row) for row in found] == [
        "think </think> two <end>",
        "think </think> seven eight <end>",
        "four five <end> think </think> nine <end>",
        "three four <end> six seven eight <end>",
    ]
    shown = [tokenizer().decode(row["input_ids"]) for row in found]
    assert shown[0] == "<user> one <end> <assistant> think </think> two <end>"
    assert shown[1].startswith("<user> one <end> <assistant> two <end> <user> three")  # as the target read it then
    assert "left out" not in caplog.text and LEFT_OUT not in caplog.text


def test_keeping_earlier_answers_takes_more_than_the_last_turn() -> None:
    with pytest.raises(ValueError, match="leave out last_turn_only"):
        prepare_dataset(chats(CHAT), tokenizer(), earlier_answers="keep", last_turn_only=True)
    with pytest.raises(ValueError, match="earlier_answers is 'all'"):
        prepare_dataset(chats(CHAT), tokenizer(), earlier_answers="all")  # type: ignore[arg-type]
