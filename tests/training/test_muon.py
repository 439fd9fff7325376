"""Muon for the matrices inside a draft, AdamW for the rest: as each alone steps, over checkpoints and schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import tiny_target
from test_trainer import arguments, eagle3, losses, medusa, mtp, sharp_target, text
from test_training_commands import recipe, stories

from hf_spec.cli import main
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft
from hf_spec.training.muon import Muon, MuonAndAdamW, inner_matrices

__all__ = ["stories"]  # a fixture
RATES: dict[str, Any] = {"muon_learning_rate": 0.02, "learning_rate": 3e-3, "weight_decay": 0.05}


def dspark(target: Any) -> Any:
    shape = {"block_size": 4, "mask_token_id": 5, "draft_vocab_size": 40, "markov_rank": 8, "shared_with_target": []}
    config = DSparkSpeculatorConfig.for_target(target.config, layers={"num_hidden_layers": 1}, **shape)
    return new_draft(config, target, torch.arange(96))


@pytest.mark.parametrize("make", [eagle3, medusa, mtp, dspark, lambda target: build("llama")])
def test_what_ends_in_a_vocabulary_is_not_muons(make: Any) -> None:
    draft = make(tiny_target())
    learning = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
    chosen = {id(weight) for weight in inner_matrices(draft)}
    ends = ("embed_tokens", "lm_head", "markov_w", "norm", "bias", "confidence", ".1.weight")  # the last of Medusa
    matrices = {name for name, weight in learning.items() if id(weight) in chosen}
    assert matrices == {name for name in learning if not any(end in name for end in ends)}
    assert any("proj" in name or "fc" in name for name in matrices) or make is medusa


def test_each_part_steps_as_torchs_own_optimizer_does() -> None:
    """The slow twin: both optimizers apart, over copies of the weights, with the same gradients and schedule."""
    args = DraftTrainingArguments(output_dir="unused", **RATES)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in ((6, 4), (4, 8), (5,), (40, 4))]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in given] for _ in range(2))
    both = MuonAndAdamW(ours[:2], ours[2:], args)
    apart: list[torch.optim.Optimizer] = [
        torch.optim.Muon(theirs[:2], lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(theirs[2:], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, 4) for one in (both, *apart)]
    for step in range(4):
        if step == 2:  # go on from a checkpoint
            saved = both.state_dict()
            both = MuonAndAdamW(ours[:2], ours[2:], args)
            both.load_state_dict(saved)
            schedules[0].optimizer = both
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            two.grad = one.grad.clone()
        for optimizer in (both, *apart):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    for one, two in zip(ours[:2], theirs[:2], strict=True):  # torch's products are in bfloat16
        torch.testing.assert_close(one, two, atol=2e-3, rtol=0)
    for one, two in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (16, 16)])
def test_muons_step_is_torchs_in_float32(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin: torch's own step, whose conversion to bfloat16 is left out."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizers = [kind([one], lr=0.02, weight_decay=0.05) for kind, one in ((Muon, ours), (torch.optim.Muon, theirs))]
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def trainer(folder: Path, **changes: Any) -> DraftTrainer:
    target = sharp_target()
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "data_seed": 0}
    return DraftTrainer(eagle3(target), target, arguments(folder, **saved | RATES | changes), train_dataset=text())


def test_training_that_was_interrupted_ends_in_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0]
    again = trainer(tmp_path / "whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again) == losses(whole)
    for one, two in zip(whole.draft.parameters(), again.draft.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("layers", ["all-linear", ["embed_tokens"]])
def test_one_of_the_two_may_have_nothing_to_do(layers: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    target = build("llama")
    adapter = peft.LoraConfig(r=2, target_modules=layers)
    args = arguments(tmp_path, max_steps=2, **RATES)
    whole = DraftTrainer(build("llama", seed=1), target, args, train_dataset=text(), peft_config=adapter)
    before = {name: weight.detach().clone() for name, weight in whole.model.named_parameters()}
    whole.train()
    changed = {name for name, weight in whole.model.named_parameters() if not torch.equal(weight.cpu(), before[name])}
    assert changed and all("lora" in name for name in changed)


def test_a_recipe_may_name_it(stories: Path, tmp_path: Path) -> None:
    kept = {"max_steps": 1, "eval_prompts": 0, "save_strategy": "no", "muon_learning_rate": 0.01}
    assert main(["train", recipe(tmp_path, stories, {"kind": "medusa", "num_heads": 1}, trainer=kept)]) == 0


@pytest.mark.parametrize("plugin", ["FSDP", "DEEPSPEED"])
def test_parts_of_matrices_are_refused_where_the_launcher_asks_for_them(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin}", "true")
    with pytest.raises(ValueError, match="leave muon_learning_rate out, or train without sharding"):
        DraftTrainingArguments(output_dir="unused", **RATES)


def test_parts_of_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="leave muon_learning_rate out, or train without sharding"):
        DraftTrainingArguments(output_dir="unused", fsdp="full_shard", **RATES)
    with pytest.raises(TypeError, match="muon_learning_rate is 'fast'; set a number"):
        DraftTrainingArguments(output_dir="unused", muon_learning_rate="fast")  # type: ignore[arg-type]
