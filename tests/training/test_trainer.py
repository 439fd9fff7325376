"""DraftTrainer on tiny models: it learns all that it should and nothing else, resumes, measures and saves."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from architectures import LLAMA4, build
from golden import tiny_target
from groups import run_two
from pairs import each_value, usual
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import hf_spec
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.modeling import DraftModel
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.scoring.names import CACHE
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft
from hf_spec.training.teacher import Reader, separates_documents

STEPS = 3


def text(rows: int = 4, length: int = 16, seed: int = 0, prompt: int = 3) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "loss_mask": [0] * prompt + [1] * (length - prompt)} for row in ids]


def sharp_target() -> Any:
    """Return a target whose best tokens differ by far."""
    target = tiny_target()
    with torch.no_grad():
        target.lm_head.weight.mul_(20)
    return target


def eagle3(target: Any, vocabulary: int | None = None, **flags: Any) -> Any:
    torch.manual_seed(1)
    config = Eagle3SpeculatorConfig.for_target(target.config, draft_vocab_size=vocabulary, **flags)
    return new_draft(config, target, torch.arange(96) if vocabulary else None)


def wide_eagle3(target: Any) -> Any:
    return eagle3(target, 40, norm_before_fc=True, norm_output=True)


def eagle1(target: Any) -> Any:
    torch.manual_seed(1)
    return new_draft(EagleSpeculatorConfig.for_target(target.config, shared_with_target=["lm_head"]), target)


def mtp(target: Any, vocabulary: int | None = None) -> Any:
    torch.manual_seed(1)
    assert vocabulary is None  # an MTP layer guesses the whole vocabulary
    return new_draft(MTPSpeculatorConfig.for_target(target.config, shared_with_target=["embed_tokens"]), target)


def medusa(target: Any, vocabulary: int | None = None) -> Any:
    torch.manual_seed(1)
    shape = {"num_heads": STEPS, "draft_vocab_size": vocabulary, "shared_with_target": []}
    return new_draft(
        MedusaSpeculatorConfig.for_target(target.config, **shape), target, torch.arange(96) if vocabulary else None
    )


def medusa_sharing(target: Any) -> Any:
    torch.manual_seed(1)
    return new_draft(MedusaSpeculatorConfig.for_target(target.config, num_heads=STEPS, num_hidden_layers=2), target)


def dflash(target: Any) -> Any:
    torch.manual_seed(1)
    return new_draft(DFlashSpeculatorConfig.for_target(target.config, mask_token_id=95, block_size=4), target)


def vanilla(target: Any, vocabulary: int = 96) -> Any:
    torch.manual_seed(1)
    shape = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))


def arguments(folder: Path, **changes: Any) -> DraftTrainingArguments:
    given = {
        "output_dir": str(folder),
        "unroll_steps": STEPS,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "eval_max_new_tokens": 12,
        "eval_prompts": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
    }
    return DraftTrainingArguments(**(given | changes))


def losses(trainer: DraftTrainer) -> list[float]:
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def test_examples_of_several_lengths_are_padded_where_no_collator_is_named(tmp_path: Path) -> None:
    target, rows = sharp_target(), [*text(2), *text(2, length=9, seed=1)]
    given = {"args": arguments(tmp_path, max_steps=2, per_device_train_batch_size=4), "train_dataset": rows}
    plain, named = (DraftTrainer(eagle3(target), target, **given, **more) for more in ({}, {"data_collator": None}))
    plain.train()
    named.train()
    assert losses(named) == losses(plain)


@pytest.mark.parametrize("make", [eagle3, dflash])
def test_batches_and_streams_without_answers_are_refused_by_name(make: Any, tmp_path: Path) -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    target, args = sharp_target(), arguments(tmp_path, max_steps=2)
    trainer = DraftTrainer(make(target), target, args, train_dataset=text(), data_collator=collate)
    with pytest.raises(ValueError, match=r"a batch has no \['loss_mask'\], but \['input_ids', 'labels'\]: leave out"):
        trainer.train()
    rows = datasets.Dataset.from_list([{"text": "once"}] * 4).to_iterable_dataset()
    trainer = DraftTrainer(make(target), target, args, train_dataset=rows)
    with pytest.raises(ValueError, match=r"has no \['input_ids', 'loss_mask'\], but \['text'\]: make it with prepare"):
        trainer.train()


@pytest.mark.parametrize("make", usual([eagle3, eagle1, mtp, medusa, vanilla], [eagle3, mtp, medusa, vanilla]))
def test_overfitting_makes_every_step_right(make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    args = arguments(
        tmp_path,
        max_steps=120,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        step_decay=1.0,
        max_grad_norm=1.0,
        eval_prompts=0,
    )
    trainer = DraftTrainer(make(target), target, args, train_dataset=text(2), eval_dataset=text(2))
    trainer.train()
    found = trainer.evaluate()
    assert [found[f"eval_accuracy_{k}"] for k in range(1, STEPS + 1)] == [1.0] * STEPS
    assert found["eval_expected_length"] == 1 + STEPS


@pytest.mark.parametrize(("freeze", "make"), each_value([False, True], [wide_eagle3, mtp, medusa, medusa_sharing]))
def test_all_that_is_trained_changes_and_nothing_else(freeze: bool, make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    draft = make(target)
    fixed = {"d2t", "t2d", *(["embed_tokens.weight"] if make is wide_eagle3 else [])}
    if freeze:
        heads = [layer.weight for layer in draft.output_layers]
        fixed |= {name for name, weight in draft.named_parameters() if any(weight is head for head in heads)}
        assert bool(heads) != (make is medusa_sharing)
    before = {name: tensor.clone() for name, tensor in [*draft.state_dict().items(), *_named(target)]}
    args = arguments(tmp_path, freeze_lm_head=freeze)
    DraftTrainer(draft, target, args, train_dataset=text()).train()
    assert all(parameter.grad is None for parameter in target.parameters())
    for name, tensor in [*draft.state_dict().items(), *_named(target)]:
        assert torch.equal(tensor, before[name]) == (name in fixed or name.startswith("target.")), name


UNREAD = {"norm_before_lm_head": False}


@pytest.mark.parametrize(
    ("kind", "flags", "steps"),
    [
        (Eagle3SpeculatorConfig, UNREAD, 2),
        (Eagle3SpeculatorConfig, UNREAD | {"norm_output": True}, 2),
        (Eagle3SpeculatorConfig, UNREAD | {"norm_output": True}, 1),
        (PEagleSpeculatorConfig, UNREAD | {"norm_output": True, "mask_token_id": 0}, 2),
        (PEagleSpeculatorConfig, {"mask_token_id": 0}, 1),
    ],
)
def test_all_that_is_trained_gets_a_gradient(kind: Any, flags: dict[str, Any], steps: int, tmp_path: Path) -> None:
    """Or distributed training is told: it would else end with an error in its second step."""
    target = sharp_target()
    draft = new_draft(kind.for_target(target.config, **flags), target)
    args = arguments(tmp_path, unroll_steps=steps)
    trainer = DraftTrainer(draft, target, args, train_dataset=text())
    trainer.compute_loss(draft.train(), trainer.data_collator([*text()][:2])).backward()
    missing = [name for name, weight in draft.named_parameters() if weight.requires_grad and weight.grad is None]
    assert bool(missing) <= bool(args.ddp_find_unused_parameters)
    assert args.ddp_find_unused_parameters == (steps == 1)


def _named(target: Any) -> list[tuple[str, torch.Tensor]]:
    return [(f"target.{name}", tensor) for name, tensor in target.state_dict().items()]


@pytest.mark.parametrize("make", [eagle3, medusa, mtp])
def test_resumed_training_is_uninterrupted_training(make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    kwargs: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
    data = {"train_dataset": text(8), "eval_dataset": text(2, seed=5)}
    whole = DraftTrainer(make(target), target, arguments(tmp_path / "a", **kwargs), **data)
    whole.train()
    resumed = DraftTrainer(make(target), target, arguments(tmp_path / "b", **kwargs), **data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("normalizer", ["token", "sequence"])
def test_accumulated_batches_are_one_batch(normalizer: str, tmp_path: Path) -> None:
    target = sharp_target()
    rows = text(2) + text(2, 10, seed=3)  # batches of different lengths
    found = []
    for size, accumulated in ((4, 1), (1, 4), (2, 2)):
        args = arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            normalizer=normalizer,
            max_steps=2,
        )
        trainer = DraftTrainer(eagle3(target, 40), target, args, train_dataset=rows)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[2] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("make", [eagle3, medusa, mtp])
def test_packed_documents_weigh_as_single_ones(make: Any, tmp_path: Path) -> None:
    target, single = sharp_target(), text(3, 8)
    packed = {
        "input_ids": [token for row in single for token in row["input_ids"]],
        "loss_mask": [token for row in single for token in row["loss_mask"]],
        "document_ids": [number for number in range(3) for _ in range(8)],
    }
    found = []
    for rows in (single, [packed]):
        args = arguments(tmp_path, per_device_train_batch_size=len(rows), max_steps=2)
        trainer = DraftTrainer(make(target, None if make is mtp else 40), target, args, train_dataset=rows)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize(
    ("option", "make"),
    each_value([{"activation_checkpointing": True}, {"logit_rows": 3}, {"bf16": True}], [eagle3, medusa, mtp]),
)
def test_saving_memory_keeps_the_loss(make: Any, option: dict[str, Any], tmp_path: Path) -> None:
    target, found = sharp_target(), []
    for changes in ({}, option):
        trainer = DraftTrainer(make(target), target, arguments(tmp_path, **changes), train_dataset=text())
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=3e-2 if "bf16" in option else 1e-4)


@pytest.mark.parametrize(("objective", "make"), each_value(["ce", "tv", "lk", "reverse_kl"], [eagle3, medusa, mtp]))
def test_every_objective_trains_every_kind(make: Any, objective: str, tmp_path: Path) -> None:
    target = sharp_target()
    args = arguments(tmp_path, objective=objective, normalizer="sequence", max_steps=12, learning_rate=3e-3)
    trainer = DraftTrainer(make(target), target, args, train_dataset=text(2))
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0]


@pytest.mark.parametrize("make", [eagle3, mtp])
def test_the_first_step_weighs_one_and_each_later_one_less(make: Any, tmp_path: Path) -> None:
    """The loss is l0 + d * l1 + d² * l2, where d is the decay; unrolling fewer steps gives its first summands."""
    target = sharp_target()

    def loss(decay: float, steps: int, training: bool) -> float:
        args = arguments(tmp_path, step_decay=decay, unroll_steps=steps, eval_prompts=0, normalizer="sequence")
        trainer = DraftTrainer(make(target), target, args, eval_dataset=text())
        if not training:
            return float(trainer.evaluate()["eval_loss"])
        return float(trainer.compute_loss(trainer.model, trainer.data_collator(text())))

    for training in (True, False):
        sums = [loss(1.0, steps, training) for steps in (1, 2, 3)]
        by_step = [sums[0], sums[1] - sums[0], sums[2] - sums[1]]
        assert min(by_step) > 0.1
        expected = by_step[0] + 0.8 * by_step[1] + 0.64 * by_step[2]
        assert loss(0.8, 3, training) == pytest.approx(expected, rel=1e-4)


def test_evaluation_measures_by_generation_and_picks_the_best(tmp_path: Path) -> None:
    target = sharp_target()
    args = arguments(
        tmp_path,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_acceptance_length",
        eval_temperature=1.0,
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    draft = eagle3(target, 40)
    trainer = DraftTrainer(draft, target, args, train_dataset=text(), eval_dataset=text(seed=9), eval_prompts=prompts)
    trainer.train()
    logged = [logs for logs in trainer.state.log_history if "eval_acceptance_length" in logs]
    assert len(logged) == 2
    assert trainer.state.best_metric == max(logs["eval_acceptance_length"] for logs in logged)
    assert {"eval_loss", "eval_accuracy_3", "eval_overlap_1", "eval_sampled_acceptance_length"} <= logged[0].keys()
    metrics = trainer.evaluate()
    emitted = steps = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = target.generate(
            ids, speculator=draft, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        ).speculation
        emitted, steps = emitted + out.per_row[0].emitted, steps + out.per_row[0].steps
    assert metrics["eval_acceptance_length"] == pytest.approx(emitted / steps)


@pytest.mark.parametrize("make", [eagle3, medusa, mtp, vanilla])
def test_what_a_text_shows_is_what_generation_measures(make: Any, tmp_path: Path) -> None:
    """On a text that the target wrote itself, the chain's accuracy is how often a drafter's guesses are accepted."""
    target = sharp_target()
    draft = make(target) if make in (mtp, vanilla) else make(target, 60)
    prompts = torch.randint(0, 96, (2, 4), generator=torch.Generator().manual_seed(7))
    written = target.generate(prompts, max_new_tokens=12, do_sample=False)  # (2, 16)
    rows = [{"input_ids": row, "loss_mask": [0] * 4 + [1] * 12} for row in written.tolist()]
    args = arguments(tmp_path, max_steps=3 if make is mtp else 12, learning_rate=3e-3)
    trainer = DraftTrainer(draft, target, args, train_dataset=rows, eval_dataset=rows, eval_prompts=[])
    trainer.train()
    shown = trainer.evaluate()
    accepted = {step: [0, 0] for step in range(1, STEPS + 1)}  # guesses right and made, by depth
    for length in range(4, 15):
        out = target.generate(
            written[:, :length],
            speculator=draft,
            num_speculative_tokens=STEPS,
            max_new_tokens=STEPS + 2,
            do_sample=False,
            return_dict_in_generate=True,
        )
        for row in out.speculation.per_row:
            run = next((i for i, guessed in enumerate(row.drafted[1:]) if not guessed), STEPS)
            for step in range(1, STEPS + 1):
                if length + step < 16:  # the text shows the token that is guessed
                    accepted[step][0] += run >= step
                    accepted[step][1] += 1
    for step, (right, made) in accepted.items():
        assert shown[f"eval_accuracy_{step}"] == pytest.approx(right / made)
    chains = 1 + sum(right / made for right, made in accepted.values())
    assert shown["eval_expected_length"] == pytest.approx(chains)
    assert 0 < accepted[1][0] < accepted[1][1]


@pytest.mark.parametrize("make", [eagle3, eagle1, mtp, medusa, medusa_sharing])
def test_what_is_saved_loads_and_drafts_the_same(make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    draft = make(target)
    trainer = DraftTrainer(
        draft, target, arguments(tmp_path, max_steps=2), train_dataset=text(), eval_dataset=text(seed=4)
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "speculators" and "use_cache" not in config
    assert config["architectures"] == [type(draft).__name__]
    loaded = AutoModel.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, DraftModel)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    ids = torch.arange(6)[None]
    expected = target.generate(ids, max_new_tokens=10, do_sample=False)
    assert target.generate(ids, speculator=loaded, max_new_tokens=10, do_sample=False).equal(expected)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"{metrics['eval_acceptance_length']:.3f}" in card and str(tmp_path) not in card
    assert f"# {draft.config.speculators_model_type} draft for LlamaForCausalLM" in card
    assert ("In vLLM:" in card) == (make is eagle3) != ("## Limits" in card and make is not eagle3)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    target = sharp_target()
    draft = eagle3(target)
    trainer = DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text())
    draft.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_an_adapter_is_trained_saved_and_drafts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    target = sharp_target()
    draft = eagle3(target)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    for passed_by in (peft.PrefixTuningConfig(num_virtual_tokens=2), peft.LoraConfig(alora_invocation_tokens=[3])):
        with pytest.raises(ValueError, match="such as LoRA without alora_invocation_tokens"):
            DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text(), peft_config=passed_by)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    trainer = DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text(), peft_config=lora)
    trainer.train()
    changed = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert changed and all("lora_" in name for name in changed)
    assert all(tensor.abs().sum() > 0 for name, tensor in trainer.model.named_parameters() if "lora_B" in name)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    merged = trainer.model.merge_and_unload()
    assert not torch.equal(merged.lm_head.weight, before["lm_head.weight"])
    ids = torch.arange(6)[None]
    expected = target.generate(ids, max_new_tokens=10, do_sample=False)
    assert target.generate(ids, speculator=merged, max_new_tokens=10, do_sample=False).equal(expected)


def test_short_texts_make_no_guess_worse(tmp_path: Path) -> None:
    """The last steps of a text guess less deep, which is no refusal."""
    target = sharp_target()
    args = arguments(tmp_path, eval_max_new_tokens=10, eval_speculative_tokens=5)
    figures = DraftTrainer(copy.deepcopy(target), target, args, train_dataset=text(), eval_dataset=text()).evaluate()
    assert [figures[f"eval_conditional_acceptance_{k}"] for k in range(1, 6)] == [1.0] * 5


def test_the_feature_loss_of_eagle_1(tmp_path: Path) -> None:
    target = sharp_target()
    found = {}
    for weight in (0.0, 1.0):
        args = arguments(tmp_path, feature_loss_weight=weight, max_steps=1, per_device_train_batch_size=4)
        trainer = DraftTrainer(eagle1(target), target, args, train_dataset=text(), eval_dataset=text())
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        found[weight] = losses(trainer)[0]
        assert found[weight] == pytest.approx(before, rel=1e-3)  # what is evaluated is what is trained
    assert found[1.0] > 1.01 * found[0.0]


def test_the_drafts_state_of_its_own_is_left_alone(tmp_path: Path) -> None:
    target = sharp_target()
    draft = eagle3(target)
    ids, features = torch.arange(5)[None], torch.randn(1, 5, 96)
    before = draft(ids, features=features).logits
    DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text())
    assert torch.equal(draft(ids, features=features).logits, before)
    assert isinstance(hf_spec.as_speculator(draft, target), DraftModel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "mse"}, "objective is 'mse'"),
        ({"normalizer": "batch"}, "normalizer"),
        ({"unroll_steps": 0}, "unroll_steps is 0"),
        ({"num_train_epochs": 0, "max_steps": -1}, "num_train_epochs is 0, so that nothing would be trained: set"),
        ({"num_train_epochs": -1.5, "max_steps": 0}, "num_train_epochs is -1.5, so that nothing would be trained"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; set at least 1"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size is 0; set at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; set at least 1"),
        ({"step_decay": 0.0}, "step_decay"),
        ({"metric_for_best_model": "eval_acceptance_length", "eval_prompts": 0}, "set eval_prompts"),
        ({"metric_for_best_model": "eval_sampled_acceptance_length"}, "set eval_temperature"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
        ({"torch_compile": True}, r"layer\.compile\(\)"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    for changes in ({"unroll_steps": "7"}, {"eval_prompts": 2.5}, {"step_decay": "0.8"}, {"logit_rows": True}):
        with pytest.raises(TypeError, match=rf"{next(iter(changes))} is .*; set (an integer|a number)"):
            arguments(tmp_path, **changes)


def test_a_draft_needs_its_target(tmp_path: Path) -> None:
    target = sharp_target()
    with pytest.raises(TypeError, match="needs the target"):
        DraftTrainer(eagle3(target), args=arguments(tmp_path))
    with pytest.raises(ValueError, match="vocab_size"):
        DraftTrainer(eagle3(target), tiny_target(vocab_size=100), arguments(tmp_path))
    given: dict[str, Any] = {"args": arguments(tmp_path), "train_dataset": text()}
    for draft, other in ((target, eagle3(target)), (eagle3(target), "demo")):
        with pytest.raises(TypeError, match="the target is a"):
            DraftTrainer(draft, other, **given)
    for draft in (target, "draft", hf_spec.NgramSpeculator()):
        with pytest.raises(TypeError, match=r"the draft is (the target|a str|a NgramSpeculator): pass a DraftModel"):
            DraftTrainer(draft, target, **given)
    for prompts, error, problem in (
        (["once"], TypeError, "are texts"),
        ([[]], ValueError, "is empty"),
        ([[1, 500]], ValueError, "to 500, but the"),
    ):
        with pytest.raises(error, match=problem):
            DraftTrainer(eagle3(target), target, eval_prompts=prompts, **given)
    smaller = vanilla(target, 90)
    with pytest.raises(ValueError, match=r"90 tokens and not 96, .*call draft\.resize_token_embeddings\(96\) first"):
        DraftTrainer(smaller, target, **given)
    smaller.resize_token_embeddings(96)
    DraftTrainer(smaller, target, **given)
    trainer = DraftTrainer(eagle3(target), target, eval_prompts=torch.tensor([[1, 2], [3, 4]]), **given)
    assert trainer.eval_prompts == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="pass token_counts"):
        new_draft(Eagle3SpeculatorConfig.for_target(target.config, draft_vocab_size=40), target)


# -- the target -------------------------------------------------------------------------------------------------------


WRAPPED = ["llama4_text", "modernbert-decoder"]  # where transformers' get_decoder names something else


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gemma4_text", "cohere", "granite", "gpt2", "mixtral", "opt", LLAMA4, *WRAPPED]
)
@torch.no_grad()
def test_a_reader_gives_features_and_distributions_of_the_model(kind: str) -> None:
    model = build(kind, seed=0)
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    layers = model.config.get_text_config().num_hidden_layers
    torch.testing.assert_close(Reader(model).read(ids)[1], Reader(model, (-1,)).read(ids)[0][0])
    reader = Reader(model, (1, layers, -1))
    (first, _, last), hidden = reader.read(ids)
    expected = model(ids, output_hidden_states=True)
    torch.testing.assert_close(first, expected.hidden_states[1])
    torch.testing.assert_close(last, expected.hidden_states[-1])
    for rows in (hidden[0], hidden[1, 4:6]):
        want = expected.logits[0] if len(rows) == 9 else expected.logits[1, 4:6]
        torch.testing.assert_close(reader.logits(rows), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(ids).logits, expected.logits)


APART = ["llama", "gemma2", "gemma4_text", "qwen3", "mixtral"]  # that see it in the positions
IN_ROWS = ["gpt_oss", "falcon:alibi", "opt", "bloom", "lfm2", "mamba", "qwen3_next", "vl:qwen2_vl"]


@pytest.mark.parametrize("kind", [*APART, *IN_ROWS])
@torch.no_grad()
def test_packed_documents_are_read_apart(kind: str) -> None:
    model = build(kind, seed=0)
    reader = Reader(model, (2, -1))
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    ends = [(0, 5, 9), (0, 2, 3, 4, 12)]
    documents = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 2 + [1] + [0] + [1] * 8])
    layers, packed = reader.read(ids, documents)
    for row, places in enumerate(ends):
        for start, end in itertools.pairwise(places):
            alone, last = reader.read(ids[row : row + 1, start:end])
            for found, expected in zip((*layers, packed), (*alone, last), strict=True):
                torch.testing.assert_close(found[row : row + 1, start:end], expected, atol=1e-2, rtol=1e-2)
    since_5_24 = kind == "falcon:alibi" and CACHE == "cache"
    assert separates_documents(model) == (kind in APART or since_5_24)


def test_a_language_model_learns_from_packed_documents_as_from_single_ones(tmp_path: Path) -> None:
    target, single, found = build("gpt2", seed=0), text(2, 8), []
    both = {name: single[0][name] + single[1][name] for name in single[0]}
    for rows in (single, [both | {"document_ids": [0] * 8 + [1] * 8}]):
        draft = build("opt", seed=1, dropout=0.0)  # which reads them in rows
        args = arguments(tmp_path, per_device_train_batch_size=len(rows))
        trainer = DraftTrainer(draft, target, args, train_dataset=rows)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[0][-1] < found[0][0]


# -- several processes ------------------------------------------------------------------------------------------------

WORKER = """
import json
import torch
torch.set_num_threads(1)
from groups import leave
from test_trainer import arguments, eagle3, losses, sharp_target, text
from hf_spec.training import DraftTrainer
target = sharp_target()
args = arguments({folder!r}, per_device_train_batch_size=1, max_steps=3)
rows = text(2) + text(2, 10, seed=3)
trainer = DraftTrainer(eagle3(target, 40), target, args, train_dataset=rows, eval_dataset=text(3, seed=8))
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    with open({output!r}, "w") as file:
        json.dump([losses(trainer), metrics], file)
leave()
"""


def test_two_processes_train_as_one_that_accumulates(tmp_path: Path) -> None:
    target, output = sharp_target(), tmp_path / "found.json"
    run_two(tmp_path, WORKER.format(folder=str(tmp_path), output=str(output)))
    found, metrics = json.loads(output.read_text())
    args = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=3)
    rows = text(2) + text(2, 10, seed=3)
    one = DraftTrainer(eagle3(target, 40), target, args, train_dataset=rows, eval_dataset=text(3, seed=8))
    one.train()
    assert found == pytest.approx(losses(one), rel=1e-4)
    alone = one.evaluate()
    for name in ("eval_acceptance_length", "eval_loss", "eval_accuracy_1", "eval_overlap_2"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-3), name
