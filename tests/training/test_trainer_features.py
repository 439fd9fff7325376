"""Features of transformers' Trainer that DraftTrainer has to leave working."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import datasets
import optuna
import pytest
import torch
from architectures import build
from golden import tiny_target
from groups import run_two
from pairs import each_value, usual
from test_muon import dspark
from test_trainer import arguments, eagle3, losses, medusa, medusa_sharing, mtp, sharp_target, text, vanilla
from torch.utils.data import Dataset
from transformers import AutoModel, AutoModelForCausalLM, TrainingArguments

from hf_spec import demo
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.training import DraftTrainer, cache_features
from hf_spec.training.evaluation import measure, within_positions
from hf_spec.training.muon import MuonAndAdamW
from hf_spec.training.recipe import read_recipe, train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("make", usual([eagle3, mtp, medusa, vanilla], [eagle3, vanilla]))
def test_a_draft_that_is_made_when_training_begins(make: Any, tmp_path: Path) -> None:
    target, args, data = sharp_target(), arguments(tmp_path, data_seed=0), text()
    given = DraftTrainer(make(target), target, args, train_dataset=data)
    given.train()
    made = DraftTrainer(target=target, model_init=lambda: make(target), args=args, train_dataset=data)
    for _ in range(2):  # each call begins anew
        made.train()
        assert losses(made)[-4:] == losses(given)


def test_hyperparameters_are_searched_for(tmp_path: Path) -> None:
    target, rates = sharp_target(), [1e-2, 1e-9]
    args = arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, data_seed=0)
    data = {"train_dataset": text(), "eval_dataset": text(seed=9)}
    trainer = DraftTrainer(target=target, model_init=lambda: eagle3(target), args=args, **data)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=len(rates),
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}),
    )
    found = {}
    for rate in rates:
        one = DraftTrainer(
            eagle3(target), target, arguments(tmp_path, max_steps=2, learning_rate=rate, data_seed=0), **data
        )
        one.train()
        found[rate] = one.evaluate()["eval_loss"]
    assert best.hyperparameters["learning_rate"] == min(found, key=lambda rate: found[rate])
    assert best.objective == pytest.approx(min(found.values()))


def test_a_search_counts_the_steps_of_its_trial(tmp_path: Path) -> None:
    """Trainer makes the draft of a trial before it sets the trial's arguments."""
    target, found = sharp_target(), []
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, data_seed=0, logging_steps=500)
    data = {"train_dataset": text(), "eval_dataset": text(seed=9)}
    trainer = DraftTrainer(target=target, model_init=lambda: eagle3(target), args=args, **data)

    def objective(metrics: dict[str, float]) -> float:
        found.append((trainer.settings.unroll_steps, trainer._steps, sum("_loss_" in name for name in metrics)))
        return metrics["eval_loss"]

    def search(name: str, values: list[Any]) -> None:
        trainer.hyperparameter_search(
            hp_space=lambda trial: {name: trial.suggest_categorical(name, values)},
            compute_objective=objective,
            n_trials=2,
            sampler=optuna.samplers.GridSampler({name: values}),
        )

    search("unroll_steps", [2, 3])  # after which nothing was logged
    assert sorted(asked for asked, *_ in found) == [2, 3]
    assert all(asked == steps for asked, steps, _ in found), found
    search("muon_learning_rate", [0.01, 0.02])
    assert isinstance(trainer.optimizer.optimizer, MuonAndAdamW)
    with pytest.raises(ValueError, match="freeze_lm_head cannot be searched over"):
        search("freeze_lm_head", [True, False])


def test_dropout_that_steps_would_not_have_is_refused(tmp_path: Path) -> None:
    target = sharp_target()
    draft = eagle3(target, layers={"attention_dropout": 0.1})
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        DraftTrainer(draft, target, arguments(tmp_path))


def test_prompts_of_an_evaluation_end_where_positions_do() -> None:
    model = build("gpt2", num_hidden_layers=2, n_positions=32)
    counts = measure("ngram", model, [[*range(5, 36)], [7, 8, 9], [*range(40)]], 12)
    assert counts.emitted > 12
    assert within_positions([[1, 2, 3]], 12, None) == ([[1, 2, 3]], 12)
    assert within_positions([[*range(40)], [1]], 12, 32) == ([[*range(20, 40)], [1]], 12)
    assert within_positions([[*range(40)]], 50, 32) == ([[39]], 31)


@pytest.mark.parametrize("make", [eagle3, pytest.param(mtp, marks=pytest.mark.slow)])
def test_compiled_layers_learn_the_same(make: Any, tmp_path: Path) -> None:
    target, found = sharp_target(), []
    for compiled in (False, True):
        torch.compiler.reset()
        draft = make(target)
        for layer in draft.layers if compiled else ():
            layer.compile(backend="eager")
        data = {"train_dataset": text(), "eval_dataset": text(2, seed=5)}
        trainer = DraftTrainer(draft, target, arguments(tmp_path, max_steps=2), **data)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_acceptance_length"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(("make", "bf16"), each_value([eagle3, mtp, medusa, dspark, vanilla], [True, False]))
def test_a_trained_draft_is_that_of_its_file(make: Any, bf16: bool, tmp_path: Path) -> None:
    """What autocast put around its forward is taken off, also when it trains, or is evaluated, once more."""
    target, data = sharp_target(), {"train_dataset": text(), "eval_dataset": text(2, seed=5)}
    trainer = DraftTrainer(make(target), target, arguments(tmp_path, max_steps=1, bf16=bf16), **data)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
        assert "forward" not in vars(trainer.draft)
    trainer.save_model()
    loaded = (AutoModelForCausalLM if make is vanilla else AutoModel).from_pretrained(tmp_path)
    cast, inputs = copy.deepcopy(target).bfloat16(), {"input_ids": torch.tensor([[5, 8, 13, 21]])}
    for verifier, dtype in ((target, torch.float32), (cast, torch.bfloat16)):
        found = []
        for draft in (trainer.draft, loaded):
            out = verifier.generate(
                **inputs,
                speculator=draft.to(dtype),
                max_new_tokens=12,
                num_speculative_tokens=3,
                return_dict_in_generate=True,
            )
            found.append((out.sequences.tolist(), out.speculation.steps, out.speculation.acceptance_by_position))
        assert found[0] == found[1]


def test_a_trained_draft_can_be_pickled(tmp_path: Path) -> None:
    target = sharp_target()
    trainer = DraftTrainer(eagle3(target), target, arguments(tmp_path, max_steps=1), train_dataset=text())
    trainer.train()
    again = pickle.loads(pickle.dumps(trainer.draft))
    for one, other in zip(again.parameters(), trainer.draft.parameters(), strict=True):
        assert torch.equal(one, other)


def test_evaluation_in_half_precision_rounds_no_weights(tmp_path: Path) -> None:
    target, data = sharp_target(), {"train_dataset": text(), "eval_dataset": text(2, seed=5)}
    trainer = DraftTrainer(eagle3(target), target, arguments(tmp_path, max_steps=1, bf16_full_eval=True), **data)
    trainer.train()
    before = {
        name: tensor.clone() for name, tensor in [*trainer.draft.named_parameters(), *trainer.draft.named_buffers()]
    }
    seen = []
    trainer.draft.fc.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.evaluate()
    assert torch.bfloat16 in seen
    after = dict([*trainer.draft.named_parameters(), *trainer.draft.named_buffers()])
    assert all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]) for name, tensor in before.items()
    )


def test_a_resumed_block_draft_guesses_at_the_same_places(tmp_path: Path) -> None:
    target, kwargs = sharp_target(), {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_anchors": 2}
    whole, resumed = (
        DraftTrainer(dspark(target), target, arguments(tmp_path / name, **kwargs), train_dataset=text(9))
        for name in ("whole", "resumed")
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    for one, other in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True):
        assert torch.equal(one, other)


def test_compiled_layers_are_not_recomputed(tmp_path: Path) -> None:
    target, args = sharp_target(), arguments(tmp_path, activation_checkpointing=True)
    draft = eagle3(target)
    draft.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match="leave it out, or compile no layer"):
        DraftTrainer(draft, target, args, train_dataset=text())


def test_noise_needs_embeddings_of_ones_own(tmp_path: Path) -> None:
    target = sharp_target()
    args = arguments(tmp_path, neftune_noise_alpha=5.0, max_steps=1)
    with pytest.raises(ValueError, match="this one borrows the target's: leave it out"):
        DraftTrainer(medusa_sharing(target), target, args, train_dataset=text())


@pytest.mark.parametrize("make", usual([eagle3, mtp, medusa, vanilla], [eagle3, vanilla]))
def test_training_in_bfloat16_measures_what_the_saved_draft_does(make: Any, tmp_path: Path) -> None:
    """Autocast is around the forward of training only; in batches it made keys of another dtype than the cache's."""
    target, data = sharp_target(), {"train_dataset": text(), "eval_dataset": text(seed=4)}
    steps = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2}
    args = arguments(tmp_path, bf16=True, eval_prompts=4, per_device_eval_batch_size=4, eval_temperature=1.0, **steps)
    trainer = DraftTrainer(make(target), target, args, **data)
    dtypes = []
    layer = next(module for module in trainer.draft.modules() if isinstance(module, torch.nn.Linear))
    hook = layer.register_forward_hook(lambda module, inputs, output: dtypes.append((module.training, output.dtype)))
    trainer.train()
    hook.remove()
    assert {dtype for training, dtype in dtypes if not training} == {torch.bfloat16, torch.float32}  # loss, measured
    assert {dtype for training, dtype in dtypes if training} == {torch.bfloat16}  # after an evaluation too
    measured = trainer.evaluate()
    trainer.save_model()
    loaded = (AutoModelForCausalLM if make is vanilla else AutoModel).from_pretrained(tmp_path)
    alone = DraftTrainer(loaded, target, arguments(tmp_path, eval_prompts=4, eval_temperature=1.0), **data).evaluate()
    names = [name for name in alone if "acceptance" in name]
    assert len(names) > 2 and [measured[name] for name in names] == [alone[name] for name in names]


@pytest.mark.parametrize("depth", usual([1, 2, 3, 4, 6, 7], [1, 2, 4, 7]))
def test_drafts_of_targets_of_any_depth_are_trained_and_guess(depth: int, tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=depth)
    draft = eagle3(target)
    layers = draft.feature_layers(target)
    assert len(layers) == len({*layers}) == min(3, depth + 1) and max(layers) <= depth
    assert draft.config.layer_ids == [*layers]
    DraftTrainer(draft, target, arguments(tmp_path, max_steps=1), train_dataset=text()).train()
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    ids = torch.arange(6)[None]
    assert torch.equal(target.generate(ids, speculator=draft, **call), target.generate(ids, **call))


@pytest.mark.parametrize("kind", [Eagle3SpeculatorConfig, MedusaSpeculatorConfig])
def test_a_draft_vocabulary_beyond_the_targets_is_cut_with_a_warning(kind: Any, caplog: Any) -> None:
    logging.getLogger("transformers").propagate = True
    config = kind.for_target(sharp_target().config, draft_vocab_size=32000)
    assert config.draft_vocab_size == 96
    assert "draft_vocab_size is 32000, but the target has 96 tokens" in caplog.text


def test_norms_of_a_draft_divide_as_the_targets_do() -> None:
    target = tiny_target(rms_norm_eps=3e-4)
    assert eagle3(target).norm.eps == mtp(target).layers[0].input_layernorm.eps == 3e-4
    other = Eagle3SpeculatorConfig.for_target(target.config, {"rms_norm_eps": 1e-6})
    assert other.layers.rms_norm_eps == 1e-6


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"])
def test_what_would_never_be_called_is_refused(name: str, tmp_path: Path) -> None:
    target = sharp_target()
    with pytest.raises(ValueError, match=f"{name} would not be called"):
        DraftTrainer(eagle3(target), target, arguments(tmp_path), train_dataset=text(), **{name: print})
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(TypeError, match="pass DraftTrainingArguments"):
        DraftTrainer(eagle3(target), target, TrainingArguments(str(tmp_path)), train_dataset=text())  # type: ignore[arg-type]


class Rows(Dataset[Any]):
    """Be a dataset as torch asks for: it has a length and takes numbers below it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = dict(enumerate(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[int(row)]


def test_datasets_of_other_kinds_train_the_same(tmp_path: Path) -> None:
    target, rows = sharp_target(), text()
    given = datasets.Dataset.from_list(rows)
    found = []
    for data in (rows, Rows(rows), given, given.with_format("torch"), given.to_iterable_dataset()):
        args = arguments(tmp_path, train_sampling_strategy="sequential")
        trainer = DraftTrainer(eagle3(target), target, args, train_dataset=data, eval_dataset=text(2, seed=5))
        trainer.train()
        found.append(losses(trainer))
    assert all(one == found[0] for one in found)


def test_datasets_of_a_later_evaluation_are_looked_at_too(tmp_path: Path) -> None:
    target = sharp_target()
    trainer = DraftTrainer(eagle3(target), target, arguments(tmp_path), eval_dataset={"near": text(2)})
    assert trainer.evaluate()["eval_near_acceptance_length"] >= 1
    foreign = [{"input_ids": [1, 2, 300], "loss_mask": [0, 1, 1]}]
    for data in (foreign, {"far": foreign}):
        with pytest.raises(ValueError, match="from 1 to 300, but the target has 96 tokens"):
            trainer.evaluate(data)
    with pytest.raises(ValueError, match="is empty"):
        trainer.predict([])


def test_a_target_that_was_trained_a_moment_ago_reads_without_dropout(tmp_path: Path) -> None:
    target = build("gpt2", seed=0)
    assert target.config.resid_pdrop > 0
    found = []
    for model in (target, target.train()):
        trainer = DraftTrainer(vanilla(target, 99), model, arguments(tmp_path), train_dataset=text())
        trainer.train()
        found.append(losses(trainer))
        layers = cache_features(text(), model.train(), [1], tmp_path / str(len(found)), progress=False)
        found[-1].append(float(layers[0]["states"][1].sum()))
    assert found[0] == found[1]


def test_several_processes_train_as_a_recipe_says(tmp_path: Path) -> None:
    _, *stories = (ROOT / "tests/fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
    data = tmp_path / "stories.jsonl"
    data.write_text("\n".join(json.dumps({"text": story.strip()[:200]}) for story in stories), encoding="utf-8")
    trainer = {"max_steps": 2, "unroll_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    trainer |= {"per_device_train_batch_size": 1, "data_seed": 0, "eval_prompts": 0, "learning_rate": 1e-2}
    recipe = {"target": str(demo.path()), "draft": {"kind": "eagle3", "draft_vocab_size": 256}, "data": str(data)}
    recipe |= {"prepare": {"held_out": 2}, "trainer": trainer | {"output_dir": str(tmp_path / "two")}}
    recipe["features"] = str(tmp_path / "features")
    path = tmp_path / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps(recipe), encoding="utf-8")
    changes = ["--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "one")]
    _, metrics = train(read_recipe(path), changes)
    code = (
        "import sys, pytest, torch; from hf_spec.cli import main\n"
        "from hf_spec.training.recipe import read_recipe, train\n"
        "with pytest.raises(ValueError, match='those in missing are not: make them first, by hf-spec prepare'):\n"
        "    train(read_recipe(sys.argv[2]) | {'features': {'directory': 'missing'}})\n"
        "status = main()\nassert status == 0\n"
        "assert not torch.distributed.is_initialized()  # else its threads race with the end of the interpreter"
    )
    printed = run_two(tmp_path, code, "train", str(path), timeout=300)
    (loss,) = set(re.findall(r"'eval_loss': '([0-9.]+)'", printed))
    assert float(loss) == pytest.approx(metrics["eval_loss"], rel=1e-3)
    assert (tmp_path / "two" / "model.safetensors").exists()


def test_targets_that_see_what_follows_are_refused(tmp_path: Path) -> None:
    target = build("vl:paligemma", attn_implementation="sdpa")
    rows = [{"input_ids": list(range(3, 30)), "loss_mask": [1] * 27}]
    with pytest.raises(ValueError, match="lets tokens attend to later ones"):
        DraftTrainer(medusa(target), target, arguments(tmp_path / "draft"), train_dataset=rows)
    with pytest.raises(ValueError, match="lets tokens attend to later ones"):
        cache_features(rows, target, (), tmp_path / "features")
    assert not (tmp_path / "features").exists()


def test_a_second_trainer_of_a_draft_computes_in_half_precision_too(tmp_path: Path) -> None:
    """accelerate leaves a model as it is that it has wrapped once."""
    target = sharp_target()
    draft = eagle3(target)
    layer = next(one for one in draft.layers.modules() if isinstance(one, torch.nn.Linear))
    for name in ("first", "second"):
        found: list[torch.dtype] = []
        seeing = layer.register_forward_hook(lambda module, args, output, found=found: found.append(output.dtype))
        args = arguments(tmp_path / name, max_steps=1, bf16=True)
        DraftTrainer(draft, target, args, train_dataset=text()).train()
        seeing.remove()
        assert set(found) == {torch.bfloat16} and not draft.training
