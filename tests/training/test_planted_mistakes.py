"""Mistakes that were planted by hand in training and in files, and that no other test had noticed."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from golden import tiny_target
from test_block_training import new_draft as block_draft
from test_trainer import arguments, eagle3, medusa, sharp_target, text
from test_training_data import tokenizer
from torch.nn import functional

from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import export
from hf_spec.drafts.ngram.history_file import SavedHistory, read_history, write_history
from hf_spec.metrics import Counts
from hf_spec.training import DraftTrainer, measure
from hf_spec.training.evaluation import acceptance, prompts_of, sums_of
from hf_spec.training.losses import ChunkedLoss
from hf_spec.training.resuming import checkpoint_to_resume


def test_sglang_is_told_the_layers_whose_output_is_read(tmp_path: Path) -> None:
    """vLLM reads ``hidden_states[i]`` under one name, SGLang the output of layer i under another."""
    draft = eagle3(tiny_target(), eagle_aux_hidden_state_layer_ids=[1, 2])
    export(draft, tmp_path / "draft", to="sglang")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config.pop("eagle_aux_hidden_state_layer_ids") == [1, 2]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))  # as SpecForge writes it
    assert AutoDraftModel.from_pretrained(tmp_path / "draft").config.eagle_aux_hidden_state_layer_ids == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="files have no such modes there")
@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
def test_others_may_read_what_is_written(layout: str, tmp_path: Path) -> None:
    export(eagle3(tiny_target()), tmp_path / "draft", to=layout)
    assert stat.S_IMODE((tmp_path / "draft").stat().st_mode) == 0o755


def test_confidence_is_learnt_where_the_draft_cannot_guess_the_best_token_too() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(30, 12, generator=generator)
    states = torch.randn(30, 6, generator=generator)
    weights = torch.rand(30, generator=generator)
    ids = torch.tensor([0, 2, 3, 7, 9])
    loss = ChunkedLoss(
        lambda step, given: given[:, :5],
        lambda given: given,
        ids,
        confidence=lambda given: given[:, 5],
        confidence_weight=0.7,
    )
    total, _, overlap, *_ = loss.compare(loss.distribution(hidden), 0, states, weights)
    inside = torch.isin(hidden.argmax(-1), ids)
    assert 0 < inside.sum() < 30
    log_q, p = states[:, :5].log_softmax(-1), hidden.softmax(-1)
    kl = functional.kl_div(log_q, hidden[:, ids].softmax(-1), reduction="none").sum(-1)
    known = torch.minimum(p[:, ids], log_q.exp()).sum(-1)
    unsure = functional.binary_cross_entropy_with_logits(states[:, 5], known, reduction="none")
    torch.testing.assert_close(overlap, known)
    torch.testing.assert_close(total, (kl * weights * inside).sum() + 0.7 * (unsure * weights).sum())


def test_accumulated_batches_draw_anchors_of_their_own(tmp_path: Path) -> None:
    target = tiny_target()
    args = arguments(tmp_path, num_anchors=3, gradient_accumulation_steps=2)
    trainer = DraftTrainer(block_draft("dflash", target), target, args, train_dataset=text())

    def drawn() -> list[torch.Tensor]:
        rows = {name: torch.tensor([text(rows=1, length=40)[0][name]]) for name in ("input_ids", "loss_mask")}
        batches = [dict(rows), dict(rows)]
        trainer._get_num_items_in_batch(batches, torch.device("cpu"))
        return [batch["anchors"] for batch in batches]

    first, again = drawn(), drawn()
    assert not torch.equal(*first) and all(map(torch.equal, first, again))
    trainer.state.global_step = 1
    assert not any(map(torch.equal, first, drawn()))
    assert all(int(one.sum()) == 3 for one in first)


def test_examples_grouped_by_length_come_in_another_order_in_every_epoch(tmp_path: Path) -> None:
    rows = [row for length in (9, 12, 16) for row in text(rows=4, length=length, seed=length)]
    args = arguments(tmp_path, max_steps=18, train_sampling_strategy="group_by_length", learning_rate=1e-5)
    target = sharp_target()
    trainer = DraftTrainer(medusa(target), target, args, train_dataset=rows)
    read, collate = [], trainer.data_collator
    trainer.data_collator = lambda batch: read.extend(tuple(row["input_ids"]) for row in batch) or collate(batch)
    trainer.train()
    epochs = [read[start : start + 12] for start in (0, 12, 24)]
    assert len({*map(tuple, epochs)}) == 3 and all({*epoch} == {*epochs[0]} for epoch in epochs)


def test_every_log_is_of_its_own_steps(tmp_path: Path) -> None:
    rows = [*text(rows=2, seed=1), *text(rows=2, seed=2)]
    args = arguments(tmp_path, learning_rate=0.0, max_steps=4, train_sampling_strategy="sequential")
    target = sharp_target()
    trainer = DraftTrainer(eagle3(target), target, args, train_dataset=rows)
    trainer.train()
    found = [logs["overlap_1"] for logs in trainer.state.log_history if "overlap_1" in logs]
    assert found[:2] == pytest.approx(found[2:], rel=1e-5) and found[0] != pytest.approx(found[1], rel=1e-3)


def test_no_share_is_above_one() -> None:
    """The last steps of texts are short: the second guess may be right more often than the first is."""
    sums = sums_of(Counts(steps=10, emitted=17, proposed_at=[10, 2], accepted_at=[5, 2]), 3)
    assert acceptance(sums) == {
        "acceptance_length": 1.7,
        "measured_prompts": 3,
        "measured_tokens": 17,
        "acceptance_1": 0.5,
        "conditional_acceptance_1": 0.5,
        "acceptance_2": 1.0,
        "conditional_acceptance_2": 1.0,
    }


def test_measuring_draws_from_numbers_of_its_own() -> None:
    target = sharp_target()
    draft = eagle3(target)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = measure(draft, target, [[5, 6, 7]], 8, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    second = measure(draft, target, [[5, 6, 7]], 8, temperature=1.0)
    assert (first.proposed_at, first.accepted_at) == (second.proposed_at, second.accepted_at)


def test_the_last_checkpoint_is_that_of_the_most_steps(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        eagle3(tiny_target()).save_pretrained(folder)
        (folder / "trainer_state.json").write_text("{}")
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.save({}, folder / name)
    for step in (100, 11, 10, 9):
        assert checkpoint_to_resume(True, tmp_path) == str(tmp_path / f"checkpoint-{step}")
        shutil.rmtree(tmp_path / f"checkpoint-{step}")


def test_a_memory_file_keeps_the_largest_token_and_cuts_texts_at_those_beyond(tmp_path: Path) -> None:
    largest = max(tokenizer().get_vocab().values())
    write_history(tmp_path / "memory", SavedHistory(100, [1, largest, 2, largest + 1, 3, -1]), tokenizer())
    assert [*read_history(tmp_path / "memory", tokenizer()).texts()] == [[1, largest, 2], [3]]


def test_a_prompt_is_of_the_first_document_of_a_pack() -> None:
    documents = [0, 0, 1, 1, 1, 1]
    pack = {"input_ids": [1, 2, 3, 4, 5, 6], "document_ids": documents}
    assert prompts_of([pack | {"loss_mask": [0, 0, 0, 1, 1, 1]}], 2, 4) == []  # an answer of another document
    assert prompts_of([pack | {"loss_mask": [1] * 6}], 2, 4) == [[1, 2]]
