"""Training goes on from its last whole checkpoint, says when the disk is full, and keeps runs apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from groups import in_another_process
from pairs import usual
from peft import LoraConfig
from test_trainer import arguments, eagle3, losses, medusa, sharp_target, text, vanilla
from test_training_commands import recipe, stories

from hf_spec.cli import main
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.training import DraftTrainer, new_draft
from hf_spec.training.resuming import checkpoint_to_resume

__all__ = ["stories"]  # a fixture
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "data_seed": 0}


def trainer(folder: Path, train_dataset: Any = None, **changes: Any) -> DraftTrainer:
    target, data = sharp_target(), train_dataset or text()
    return DraftTrainer(eagle3(target), target, arguments(folder, **SAVED | changes), train_dataset=data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def break_checkpoint(file: str) -> Callable[[Path], None]:
    return lambda checkpoint: cut_off(checkpoint / file)


FILES = ("model.safetensors", "optimizer.pt", "trainer_state.json", "config.json")
DAMAGE = {name: break_checkpoint(name) for name in FILES}
DAMAGE["no trainer_state.json"] = lambda checkpoint: (checkpoint / "trainer_state.json").unlink()
DAMAGE["no weights"] = lambda checkpoint: (checkpoint / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage", [pytest.param(one, marks=pytest.mark.slow if one in FILES[2:] else ()) for one in DAMAGE]
)
def test_a_broken_checkpoint_is_passed_over(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    whole = trainer(tmp_path)
    whole.train()
    expected = {name: tensor.clone() for name, tensor in whole.draft.state_dict().items()}
    DAMAGE[damage](tmp_path / "checkpoint-6")
    with pytest.raises(ValueError, match=r"cannot resume from .*checkpoint-6, which has"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-6 has" in caplog.text and damage in caplog.text and "looking for an earlier" in caplog.text
    assert losses(again) == losses(whole)
    for name, tensor in again.draft.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_without_a_whole_checkpoint_training_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    first = trainer(tmp_path, max_steps=2)
    first.train(resume_from_checkpoint=True)
    assert "there is no complete checkpoint" in caplog.text
    cut_off(tmp_path / "checkpoint-2" / "trainer_state.json")
    again = trainer(tmp_path, max_steps=2)
    again.train(resume_from_checkpoint="True")
    assert losses(again) == losses(first)
    with pytest.raises(ValueError, match=r"cannot resume from .*nowhere, which does not exist"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_checkpoint_of_weights_alone_is_not_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_only_model=True).train()
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(
        ValueError, match="checkpoint-2, which has no optimizer and no learning rate schedule, because"
    ):
        trainer(tmp_path).train(resume_from_checkpoint=str(checkpoint))
    checkpoint.joinpath("optimizer_0").mkdir()  # of FSDP
    with pytest.raises(ValueError, match="which has no learning rate schedule, because of save_only_model"):
        checkpoint_to_resume(str(checkpoint), tmp_path)
    checkpoint.joinpath("global_step2").mkdir()  # of DeepSpeed
    assert checkpoint_to_resume("true", tmp_path) == str(checkpoint)


def test_a_second_run_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=2)
    first.train()
    with pytest.raises(ValueError, match="has the checkpoint-2 of another run: name another output_dir, or resume"):
        trainer(tmp_path, max_steps=4).train()
    again = trainer(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert losses(again)[:2] == losses(first) and len(losses(again)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_run_trains_no_more(stream: bool, tmp_path: Path) -> None:
    rows: Any = datasets.Dataset.from_list(text()).to_iterable_dataset() if stream else text()
    whole = trainer(tmp_path, max_steps=5, save_steps=1, train_dataset=rows)
    whole.train()
    again = trainer(tmp_path, max_steps=5, save_steps=1, train_dataset=rows)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5 and not (tmp_path / "checkpoint-6").exists()
    for name, tensor in again.draft.state_dict().items():
        assert torch.equal(tensor, whole.draft.state_dict()[name]), name


OTHER_DRAFTS = {
    "norm_output was False, not True": lambda target: eagle3(target, norm_output=True),
    "draft_vocab_size was 96, not 40": lambda target: eagle3(target, 40),
    "speculators_model_type was eagle3, not medusa": medusa,
    "model_type was speculators, not llama": vanilla,
}


@pytest.mark.parametrize("differs", OTHER_DRAFTS)
def test_another_draft_does_not_go_on_from_a_checkpoint(differs: str, tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    target = sharp_target()
    for options in ({}, {"peft_config": LoraConfig(r=2, target_modules="all-linear")}):
        other = DraftTrainer(
            OTHER_DRAFTS[differs](target), target, arguments(tmp_path, **SAVED), train_dataset=text(), **options
        )
        said = "has no adapter of PEFT" if options else differs
        with pytest.raises(ValueError, match=rf"checkpoint-2, which holds another draft: .*{said}"):
            other.train(resume_from_checkpoint=True)


def test_another_adapter_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def adapter(base: str = "org/draft", **changes: Any) -> DraftTrainer:
        given: dict[str, Any] = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        lora, target = LoraConfig(**given | changes), sharp_target()
        draft, args = eagle3(target), arguments(tmp_path, **SAVED | {"max_steps": 2})
        draft.name_or_path = base
        return DraftTrainer(draft, target, args, train_dataset=text(), peft_config=lora)

    adapter().train()
    adapter(target_modules=["v_proj", "q_proj"]).train(resume_from_checkpoint=True)
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lora_alpha": 64}, "lora_alpha was 8, not 64"),
        ({"use_rslora": True}, "use_rslora was left out, not True"),
        ({"target_modules": ["q_proj"]}, r"target_modules was \['q_proj', 'v_proj'\], not \['q_proj'\]"),
        ({"base": "org/other"}, "base_model_name_or_path was org/draft, not org/other"),
    )
    for changes, said in others:
        with pytest.raises(ValueError, match=f"checkpoint-2, which holds another draft: .*{said}"):
            adapter(**changes).train(resume_from_checkpoint=True)


def test_a_checkpoint_brings_the_draft_vocabulary_that_a_shared_output_layer_is_cut_to(tmp_path: Path) -> None:
    def made(folder: str, first: int, **changes: Any) -> DraftTrainer:
        torch.manual_seed(1)
        target = sharp_target()
        config = MedusaSpeculatorConfig.for_target(target.config, num_heads=2, draft_vocab_size=40)
        draft = new_draft(config, target, torch.arange(96).roll(first))  # other data may have other frequent tokens
        return DraftTrainer(draft, target, arguments(tmp_path / folder, **SAVED | changes), train_dataset=text())

    whole = made("whole", first=0)
    whole.train()
    again = made("again", first=48, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(again.draft.d2t, whole.draft.d2t) and losses(again) == losses(whole)


@pytest.mark.parametrize("change", [{"muon_learning_rate": 0.01}, {"freeze_lm_head": True}, {"optim": "sgd"}])
def test_another_optimizer_does_not_go_on_from_a_checkpoint(change: dict[str, Any], tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    with pytest.raises(ValueError, match=r"checkpoint-2, which was written with another optimizer, or trained other"):
        trainer(tmp_path, **change).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("muon", [None, 0.01])
def test_what_a_checkpoint_says_of_its_optimizer_is_told_where_arguments_differ(
    muon: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_spec"), "propagate", True)
    options: dict[str, Any] = {"lr_scheduler_type": "linear", "muon_learning_rate": muon}
    trainer(tmp_path, max_steps=2, **options).train()
    again = trainer(tmp_path, max_steps=3, **options)
    again.train(resume_from_checkpoint=True)
    assert "continues with the optimizer" not in caplog.text
    again = trainer(tmp_path, max_steps=4, learning_rate=5e-3, **options)
    again.train(resume_from_checkpoint=True)
    assert "not with these arguments: initial_lr was 0.001, not 0.005" in caplog.text
    assert max(logs.get("learning_rate", 0) for logs in again.state.log_history) <= (muon or 1e-3)


OTHER_ORDERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "group_by_length")]


@pytest.mark.parametrize("strategy", ["random", "batch_rebalance", *OTHER_ORDERS])
def test_examples_come_in_the_order_of_an_uninterrupted_run(strategy: str, tmp_path: Path) -> None:
    rows = [row for length in (9, 12, 16) for row in text(rows=4, length=length)]
    options = {"train_dataset": rows, "max_steps": 14, "train_sampling_strategy": strategy, "data_seed": None}
    whole = trainer(tmp_path / "whole", save_steps=5, **options)
    whole.train()
    for step in (5, 10):  # of six batches an epoch
        again = trainer(tmp_path / "again", save_strategy="no", **options)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert losses(again) == losses(whole)


@pytest.mark.parametrize("accumulated", usual([1, 2], [2]))
def test_a_stream_goes_on_in_the_pass_where_it_was_left(accumulated: int, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(text(rows=12)).to_iterable_dataset().shuffle(seed=0, buffer_size=4)
    options = {"train_dataset": rows, "max_steps": 14, "gradient_accumulation_steps": accumulated}
    whole = trainer(tmp_path / "whole", save_steps=5, **options)
    whole.train()
    for step in (5, 10):  # of six batches a pass
        again = trainer(tmp_path / "again", save_strategy="no", **options)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert again.state.epoch == whole.state.epoch and losses(again) == losses(whole)
        for name, tensor in again.draft.state_dict().items():
            assert torch.equal(tensor, whole.draft.state_dict()[name]), name
    longer = trainer(tmp_path / "whole", **options | {"max_steps": 16})
    longer.train(resume_from_checkpoint=True)
    assert len(losses(longer)) == 16


def test_the_command_line_resumes_and_keeps_runs_apart(stories: Path, tmp_path: Path, capsys: Any) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_prompts": 0, "logging_steps": 1}
    path = recipe(tmp_path, stories, {"kind": "medusa", "num_heads": 1}, trainer=saved)
    assert main(["train", path, "--resume_from_checkpoint", "true"]) == 0  # there is none yet
    capsys.readouterr()
    assert main(["train", path]) == 1
    assert "of another run: name another output_dir" in capsys.readouterr().err
    assert main(["train", path, "--resume_from_checkpoint", "false"]) == 1
    assert "of another run: name another output_dir" in capsys.readouterr().err
    cut_off(tmp_path / "draft" / "checkpoint-2" / "optimizer.pt")
    assert main(["train", path, "--resume_from_checkpoint", "true", "--max_steps", "3"]) == 0
    assert (tmp_path / "draft" / "checkpoint-3").exists()


def fill_the_disk(folder: Path, size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(OSError, match=r"No space left on device: the checkpoint of step 2 could not be written"):
        trainer(folder, max_steps=2).train()
    if size < 50_000:  # the weights alone do not fit either
        with pytest.raises(OSError, match=r"No space left on device: the draft in .* could not be written"):
            trainer(folder / "other").save_model(str(folder / "draft"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("size", [900, 20_000, 100_000])
def test_a_full_disk_is_a_message(size: int, tmp_path: Path) -> None:
    """Where config, weights and optimizer do not fit."""
    assert in_another_process(fill_the_disk, tmp_path, size) == 0
    again = trainer(tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert len(losses(again)) == 2
