"""Features of the host's Trainer that DraftTrainer has to leave working."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from test_trainer import arguments, eagle3, losses, medusa, mtp, sharp_target, text, vanilla

import hf_spec
from hf_spec import demo
from hf_spec.training import DraftTrainer
from hf_spec.training.recipe import read_recipe, train

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("make", [eagle3, mtp, medusa, vanilla])
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


@pytest.mark.parametrize("make", [eagle3, mtp])
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


def test_several_processes_train_as_a_recipe_says(tmp_path: Path) -> None:
    _, *stories = (ROOT / "tests/fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
    data = tmp_path / "stories.jsonl"
    data.write_text("\n".join(json.dumps({"text": story.strip()[:200]}) for story in stories), encoding="utf-8")
    trainer = {"max_steps": 2, "unroll_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    trainer |= {"per_device_train_batch_size": 1, "data_seed": 0, "eval_prompts": 0, "learning_rate": 1e-2}
    recipe = {"target": str(demo.path()), "draft": {"kind": "eagle3", "draft_vocab_size": 256}, "data": str(data)}
    recipe |= {"prepare": {"held_out": 2}, "trainer": trainer | {"output_dir": str(tmp_path / "two")}}
    path = tmp_path / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    place = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_spec.__file__).parents[1])}
    done = subprocess.run(
        [*command, "-m", "hf_spec", "train", str(path)],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
        env={**os.environ, **place},
    )
    changes = ["--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "one")]
    _, metrics = train(read_recipe(path), changes)
    (loss,) = set(re.findall(r"'eval_loss': '([0-9.]+)'", done.stdout))
    assert float(loss) == pytest.approx(metrics["eval_loss"], rel=1e-3)
    assert (tmp_path / "two" / "model.safetensors").exists()
