"""Data that are read as a stream: the same examples, and the same draft is trained on them."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import leave, run_two
from test_trainer import arguments, eagle3, losses, sharp_target
from transformers import AutoTokenizer

from hf_spec import demo
from hf_spec.processes import Processes
from hf_spec.training import DraftTrainer, cache_features, prepare_dataset
from hf_spec.training.resuming import check_same_everywhere
from hf_spec.training.sources import prepared
from hf_spec.training.vocabulary import count_tokens

datasets = pytest.importorskip("datasets")
TOKENIZER = AutoTokenizer.from_pretrained(demo.path())
ROOT = Path(__file__).parents[1]
_, *STORIES = (ROOT / "fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
TEXTS = [{"text": story.strip()[: 60 + 40 * (i % 3)]} for i, story in enumerate(STORIES)]
CHATS = [{"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": one["text"]}]}
         for one in TEXTS]  # fmt: skip


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("rows", [TEXTS, CHATS, [{"prompt": "Go on", **one} for one in TEXTS]], ids=len)
def test_a_stream_gives_the_examples_of_the_dataset(rows: list[dict[str, Any]], packing: bool, tmp_path: Path) -> None:
    broken = [*rows[:3], dict.fromkeys(rows[0]), *rows[3:]]
    whole = prepare_dataset(datasets.Dataset.from_list(broken), TOKENIZER, max_length=48, packing=packing)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, broken)), encoding="utf-8")
    for stream in (
        datasets.Dataset.from_list(broken).to_iterable_dataset(),
        datasets.load_dataset("json", data_files=str(file), split="train", streaming=True),  # knows no columns
        datasets.IterableDataset.from_generator(lambda: iter(broken)),
    ):
        found = prepare_dataset(stream, TOKENIZER, max_length=48, packing=packing)
        assert isinstance(found, datasets.IterableDataset)
        assert list(found) == list(found) == list(whole)
    counts = [count_tokens(some, len(TOKENIZER)) for some in (found.take(3), whole.select(range(3)))]
    assert torch.equal(*counts)


def test_what_a_stream_leaves_out_is_told_by_its_first_examples(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_list([*TEXTS[:4], {"text": None}]).to_iterable_dataset()
    monkeypatch.setattr(logging.getLogger("hf_spec"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        prepare_dataset(rows, TOKENIZER)
    assert "4 of 5 examples are kept: 1 examples are no text" in caplog.text
    nothing = datasets.Dataset.from_list([{"text": "a"}] * 3).to_iterable_dataset()
    with pytest.raises(
        ValueError, match="no example is left to train on: 3 examples have no two adjacent answer tokens"
    ):
        prepare_dataset(nothing, TOKENIZER)
    with pytest.raises(ValueError, match="the dataset is empty"):
        prepare_dataset(datasets.IterableDataset.from_generator(lambda: iter(())), TOKENIZER)
    with pytest.raises(ValueError, match="leave out num_proc"):
        prepare_dataset(rows, TOKENIZER, num_proc=2)


def documents(rows: Any) -> list[str]:
    """Return the documents of examples, packed or not."""
    found = []
    for row in rows:
        numbers = row.get("document_ids") or [0] * len(row["input_ids"])
        parts = itertools.groupby(zip(numbers, row["input_ids"], strict=True), key=lambda one: one[0])
        found += ["".join(str(token) for _, token in part) for _, part in parts]
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_what_is_held_out_of_streams_is_not_trained_on(packing: bool, workers: int) -> None:
    short, long = (
        [{"text": f"{number} {one['text']}{mark}"} for number in range(6) for one in TEXTS] for mark in ("", "!" * 9)
    )
    parts = [
        (datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2), weight)
        for rows, weight in ((short, 1), (long, 4))
    ]
    splits = prepared(parts, TOKENIZER, held_out=5, packing=packing)
    known = documents(prepare_dataset(datasets.Dataset.from_list(short + long), TOKENIZER))
    held_out, rest = documents(splits["test"]), documents(splits["train"])
    assert len(held_out) == 5 and {*held_out, *rest} < {*known}
    if not packing:  # four times as often, but for chance
        often = sum(one in known[len(short) :] for one in held_out + rest)
        assert often > 2 * (len(held_out) + len(rest) - often) > 0
    orders = []
    for epoch in (0, 1, 0):
        splits["train"].set_epoch(epoch)
        read = documents(torch.utils.data.DataLoader(splits["train"], batch_size=None, num_workers=workers))
        assert len({*read}) == len(read) and not {*held_out} & {*read}
        orders.append(read)
    assert orders[0] == orders[2] != orders[1]


def examples(number: int = 12) -> list[dict[str, Any]]:
    """Return examples of the tiny target's tokens, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [10 + 3 * (i % 4) for i in range(number)]
    rows = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "loss_mask": [0] * 3 + [1] * (len(row) - 3)} for row in rows]


def test_a_draft_is_trained_on_a_stream_as_on_the_dataset(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(examples())
    trained = []
    for name, rows in (("whole", whole), ("stream", whole.to_iterable_dataset())):
        target = sharp_target()
        given = arguments(tmp_path / name, max_steps=6, train_sampling_strategy="sequential")
        trainer = DraftTrainer(eagle3(target), target, given, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trained.append((losses(trainer), trainer.evaluate()["eval_acceptance_length"]))
    assert trained[0] == trained[1]


def test_features_of_a_stream_are_not_kept(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(examples()).to_iterable_dataset()
    with pytest.raises(TypeError, match="take a part of it"):
        cache_features(rows, sharp_target(), (), tmp_path)
    part = datasets.Dataset.from_list(list(rows.take(4)))
    assert len(cache_features(part, sharp_target(), (), tmp_path, progress=False)) == 4


def work(folder: str) -> None:
    """Be one of two processes, which read batches of different widths from one stream."""
    torch.set_num_threads(1)
    target = sharp_target()
    for files in (1, 3):  # of three, one process would be given two
        rows = datasets.Dataset.from_list(examples()).to_iterable_dataset(num_shards=files)
        given = arguments(Path(folder), per_device_train_batch_size=1, max_steps=3)
        trainer = DraftTrainer(eagle3(target), target, given, train_dataset=rows)
        read = []
        collate = trainer.data_collator
        trainer.data_collator = lambda batch, read=read, collate=collate: read.extend(batch) or collate(batch)
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        mine = [row["input_ids"] for row in examples()][trainer.accelerator.process_index :: 2]
        assert [row["input_ids"] for row in read][:3] == mine[:3]
    here = f"checkpoint-{trainer.accelerator.process_index}"
    both = Processes(trainer.accelerator)
    check_same_everywhere("a/checkpoint-1", both)
    with pytest.raises(ValueError, match="different checkpoints"):
        check_same_everywhere(here, both)
    leave()


def test_processes_share_a_stream(tmp_path: Path) -> None:
    run_two(tmp_path, f"import test_streams_of_examples as test\ntest.work({str(tmp_path)!r})")
