"""What training logs has the names that docs/logging.md explains, as TensorBoard shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from golden import tiny_target

from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft
from hf_spec.training.recipe import training_arguments

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
OF_TRAINER = re.compile(r"(train_|eval/)?(runtime|(samples|steps|tokens)_per_second)|train_loss|total_flos")


def explained() -> set[str]:
    """Return the names in the first column of the page's tables."""
    rows = re.findall(r"^\| (`(?:train|eval)/.+?`)[,. ]* \|", PAGE.read_text(encoding="utf-8"), re.M)
    return {name for row in rows for name in re.findall(r"`(.+?)`", row)}


def test_the_page_explains_what_is_logged(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    target = tiny_target(num_hidden_layers=2)
    torch.manual_seed(1)
    draft = new_draft(MedusaSpeculatorConfig.for_target(target.config, num_heads=2, shared_with_target=[]), target)
    examples = [{"input_ids": list(range(12)), "loss_mask": [0] * 3 + [1] * 9}]
    args = DraftTrainingArguments(
        str(tmp_path),
        max_steps=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_max_new_tokens=6,
        eval_temperature=1.0,
        include_num_input_tokens_seen="all",
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    DraftTrainer(draft, target, args, train_dataset=examples, eval_dataset=examples).train()
    (run,) = (tmp_path / "runs").iterdir()
    events = accumulator.EventAccumulator(str(run))
    events.Reload()
    logged = {re.sub(r"_[12]$", "_k", name) for name in events.Tags()["scalars"]}
    logged = {name for name in logged if not OF_TRAINER.fullmatch(name.removeprefix("train/"))}
    sampled = {name for name in logged if name.startswith("eval/sampled_")}
    assert {name.replace("sampled_", "") for name in sampled} == {
        name for name in logged - sampled if "acceptance" in name or "measured" in name
    }
    assert explained() - sampled == logged - sampled
    assert explained() & sampled == {"eval/sampled_acceptance_length", "eval/sampled_acceptance_k"}


def test_a_recipe_may_have_the_page_s_lines() -> None:
    block = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert block
    trainer = yaml.safe_load(block[1])["trainer"] | {"report_to": [], "use_cpu": True, "output_dir": "draft"}
    args = training_arguments(trainer)  # services are refused where they are not installed
    assert (args.include_num_input_tokens_seen, args.eval_temperature) == ("all", 1.0)
