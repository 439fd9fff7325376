"""Data for drafts: which tokens are answers, what is left out, packs, draft vocabularies."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import os
import shutil
import signal
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from golden import tiny_target
from groups import in_another_process
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from hf_spec.training import (
    DraftCollator,
    DraftTrainer,
    DraftTrainingArguments,
    cache_features,
    count_tokens,
    most_frequent,
    prepare_dataset,
    regenerate,
)
from hf_spec.training.chat import messages_of
from hf_spec.training.data_files import read_file
from hf_spec.training.evaluation import prompts_of
from hf_spec.training.regenerate import _generate_together
from hf_spec.training.sources import load_raw

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
    "{% endgeneration %}{% else %}{{ m.content }} <end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Like templates of reasoning models: what was thought is shown in the last answer only.
THINKING = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Like templates that begin an answer otherwise than they show it later.
UNLIKE = PLAIN.replace("%}<assistant> {%", "%}<assistant> think {%")
CHAT = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three four"},
    {"role": "user", "content": "five"},
    {"role": "assistant", "content": "six seven eight"},
]
WORDS = "one two three four five six seven eight nine <user> <assistant> <system> <end> think </think>".split()


def tokenizer(template: str | None = PLAIN) -> Any:
    vocabulary = {word: i for i, word in enumerate(["?", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    fast.chat_template = template
    return fast


def chats(*conversations: list[dict[str, str]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"messages": list(conversations)})


def answers(row: dict[str, Any]) -> str:
    ids = [token for token, answer in zip(row["input_ids"], row["loss_mask"], strict=True) if answer]
    return str(tokenizer().decode(ids))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_and_their_ends_are_marked(template: str) -> None:
    (row,) = prepare_dataset(chats(CHAT), tokenizer(template))
    assert answers(row) == "three four <end> six seven eight <end>"
    assert tokenizer().decode(row["input_ids"]).startswith("<user> one two <end> <assistant> three")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_no_token_of_the_prompt_is_an_answer_where_one_ends_as_the_answer_begins() -> None:
    """With ChatML and a token per character, the prompt's last token ends exactly where the answer's first begins."""
    characters = sorted({*"<|im_start|>assistant\nuser<|im_end|>system", *"".join(one["content"] for one in CHAT)})
    made = Tokenizer(models.WordLevel({one: i for i, one in enumerate(["?", *characters])}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    fast.chat_template = CHATML
    assert fast("a\n", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (1, 2)]
    (row,) = prepare_dataset(chats(CHAT), fast)
    shown = fast.convert_ids_to_tokens(row["input_ids"])
    marked = "".join(one if answer else "·" for one, answer in zip(shown, row["loss_mask"], strict=True))
    assert [run for run in marked.split("·") if run] == ["three four<|im_end|>", "six seven eight<|im_end|>"]
    assert "".join(shown)[: marked.index("three")].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_last_answer_only(template: str) -> None:
    (row,) = prepare_dataset(chats(CHAT), tokenizer(template), last_turn_only=True)
    assert answers(row) == "six seven eight <end>"


def test_answers_that_the_template_changes_later_do_not_count() -> None:
    thought = [dict(message) for message in CHAT]
    thought[1]["content"] = "think </think> three four"
    thought[3]["content"] = "think </think> six"
    (row,) = prepare_dataset(chats(thought), tokenizer(THINKING))
    assert answers(row) == "think </think> six <end>"


@pytest.mark.parametrize("said", ["think one </think> six\nseven", "one </think> six\nseven"])
def test_reasoning_that_the_template_never_shows_is_trained_on_as_it_was_said(said: str) -> None:
    """DeepSeek-R1's template begins the reasoning in the prompt and shows what follows it only."""
    template = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    made = tokenizer(template.replace("%}<assistant> {%", "%}<assistant> think {%"))
    said_before = [CHAT[0], {"role": "assistant", "content": "two </think> three four"}, CHAT[2]]
    (row,) = prepare_dataset(chats([*said_before, {"role": "assistant", "content": said}]), made)
    assert answers(row) == "one </think> six seven <end>"
    assert made.decode(row["input_ids"]).startswith(
        "<user> one two <end> <assistant> three four <end> <user> five <end>"
    )
    with pytest.raises(ValueError, match="renders differently than for generation"):
        prepare_dataset(chats(CHAT), made)  # without reasoning it would stand where the target reasons


def test_an_answer_before_the_first_question_is_none_of_the_targets(tmp_path: Path) -> None:
    """ShareGPT has many. Without a prompt, a default system prompt and the header would count as the answer, too."""
    greeting, system = {"role": "assistant", "content": "nine"}, {"role": "system", "content": "nine"}
    words = tokenizer("<system> " + PLAIN)
    (row,) = prepare_dataset(chats([greeting, *CHAT]), words)
    assert answers(row) == "three four <end> six seven eight <end>"
    assert words.decode(row["input_ids"]).startswith("<system> <assistant> nine <end> <user> one")
    with pytest.raises(ValueError, match="none but before the first question"):
        prepare_dataset(chats([greeting]), words)
    target, options = tiny_target(vocab_size=len(words)), {"max_new_tokens": 4, "do_sample": False, "progress": False}
    silent = [greeting], [system, greeting]
    asked = [*silent, [greeting, *CHAT], [system, greeting, *CHAT[:2]], CHAT, [system, *CHAT[:2]]]
    for _ in range(2):  # the second call finds all answers there
        path = regenerate(asked, target, words, tmp_path / "new.jsonl", batch_size=2, **options)
        found = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        assert found[:2] == [[], []] and found[2:4] == found[4:]
    bare = tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}")
    path = regenerate([[CHAT[0] | {"content": " "}], CHAT[:1]], target, bare, tmp_path / "bare.jsonl", **options)
    assert [len(json.loads(line)["messages"]) for line in path.read_text().splitlines()] == [0, 2]


def test_what_follows_the_last_answer_is_cut_off() -> None:
    (row,) = prepare_dataset(chats([*CHAT, {"role": "user", "content": "nine"}]), tokenizer())
    assert tokenizer().decode(row["input_ids"]).endswith("eight <end>")


def test_conversations_of_the_other_kind_and_jsonl(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two three"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"conversations": turns}) + "\n", encoding="utf-8")
    (row,) = prepare_dataset(path, tokenizer())
    assert answers(row) == "two three <end>"


CALLS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "two"}]}]


def test_keys_that_only_other_rows_have_are_not_shown_to_the_template() -> None:
    """Arrow gives all dicts of a column the same keys."""
    template = PLAIN.replace("{{ m.content }}", "{{ m.content or m.tool_calls | tojson }}")
    rows = [
        [CALLS[0], CALLS[1] | {"tool_calls": [{"name": "two", "arguments": {"n": n}}]}] for n in ({"x": 1}, {"y": 2})
    ]
    both = chats(*rows)
    assert "y" in both[0]["messages"][1]["tool_calls"][0]["arguments"]["n"]
    for row, alone in zip(prepare_dataset(both, tokenizer(template)), rows, strict=True):
        assert row["input_ids"] == prepare_dataset(chats(alone), tokenizer(template))[0]["input_ids"]
    seen = [messages_of(row["messages"])[1]["tool_calls"] for row in both]
    assert seen == [row[1]["tool_calls"] for row in rows]


def test_files_of_several_kinds_are_read(tmp_path: Path) -> None:
    rows = chats(CHAT, CHAT)
    rows.to_parquet(tmp_path / "a.parquet")
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(f"{lines}\n\n", encoding="utf-8-sig")
    for suffix, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(compress(lines.encode()))
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", lines)
    (tmp_path / "a.json").write_text(json.dumps(list(rows)), encoding="utf-8")
    for file in sorted(tmp_path.iterdir()):
        assert prepare_dataset(file, tokenizer())["input_ids"] == prepare_dataset(rows, tokenizer())["input_ids"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl is empty"),
        ("a.jsonl", "\n \n", r"a\.jsonl is empty"),
        (
            "a.jsonl",
            '{"text": "one"}\n{"text": "tw',
            r"a\.jsonl is broken: line 2: Unterminated string starting at, character 10\. Repair it",
        ),
        ("a.json", '[{"text": "one"},\n {"text": two}]', r"a\.json is broken: line 2: Expecting value, character 11"),
        ("a.jsonl", '{"text": "one"}\n\n{"text": {"a": 1}}', r"a\.jsonl is broken: .*"),
        (
            "a.jsonl",
            '{"text": "one"}\n{"text": "café"}',
            r"a\.jsonl is broken: line 2: 'utf-8' codec.* Write it as UTF",
        ),
        ("a.txt", "one\ncafé\n", r"a\.txt is broken: line 2: 'utf-8' codec"),
        ("a.txt.gz", "one", r"a\.txt\.gz is broken: Not a gzipped file"),
        ("a.jsonl.gz", "one", r"a\.jsonl\.gz is broken: Not a gzipped file"),
        ("a.doc", "one", r"a\.doc is none of \['\.csv'"),
        ("a.jsonl", None, r"there is no file .*a\.jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError if content is not None else FileNotFoundError, match=message):
        prepare_dataset(tmp_path / name, tokenizer())


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_file_that_is_damaged_within_is_named(suffix: str, compress: Any, tmp_path: Path) -> None:
    content = bytearray(compress("\n".join(json.dumps({"text": f"{i} one"}) for i in range(99)).encode()))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{suffix} is broken: "):
        read_file(tmp_path / f"a.jsonl.{suffix}")


def test_keys_may_come_after_the_first_10_mb(tmp_path: Path) -> None:
    """The types of a file's columns are those of its first 10 MB."""
    long = {"messages": [CHAT[0] | {"content": "one " * 75_000}, CHAT[1]]}
    last = {"messages": [CHAT[0], CHAT[1] | {"cut": True}], "tools": [{"name": "one"}]}
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, [*[long] * 36, last])).encode(), 1))
    assert list(read_file(path))[35:] == [long | {"tools": None}, last]


@pytest.mark.parametrize("streaming", [False, True])
def test_answers_that_are_json_stay_text_beside_a_list_of_parts(streaming: bool, tmp_path: Path) -> None:
    said = ["42", "true", '{"a":   1.50}', '"one"', "null", "", [{"type": "text", "text": "7"}]]
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": one}], "id": 3} for one in said]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert list(read_file(tmp_path / "a.jsonl", streaming)) == rows
    assert list(load_raw(str(tmp_path), streaming=streaming)) == rows


def reads_on_a_full_disk(path: Path) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
    for name in (path, path.parent):
        with pytest.raises(OSError, match=r"No space left on device: datasets keeps what it reads in .*HF_DATASETS_"):
            load_raw(str(name))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_full_disk_is_not_taken_for_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"text": "one " * 500})] * 20))
    assert in_another_process(reads_on_a_full_disk, tmp_path / "a.jsonl") == 0


@pytest.mark.parametrize(
    ("options", "message"), [({"max_length": -5}, "max_length is -5"), ({"too_long": "cut"}, "too_long is 'cut'")]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_dataset(chats(CHAT), tokenizer(), **options)


def test_plain_text_is_an_answer_throughout() -> None:
    (row,) = prepare_dataset(datasets.Dataset.from_dict({"text": ["one two three"]}), tokenizer(None))
    assert row["loss_mask"] == [1, 1, 1]


def test_a_plain_text_of_two_tokens_has_nothing_to_guess(caplog: pytest.LogCaptureFixture) -> None:
    """Prefill gives the second token, or it is the prompt's: the first guess is the third."""
    logging.getLogger("transformers").propagate = True
    texts = datasets.Dataset.from_dict({"text": ["one two three", "one two", "one"]})
    assert [len(ids) for ids in prepare_dataset(texts, tokenizer(None))["input_ids"]] == [3]
    assert "1 of 3 examples are kept: 2 examples have no two adjacent answer tokens" in caplog.text
    with pytest.raises(
        ValueError, match="no example is left to train on: 2 examples have no two adjacent answer tokens"
    ):
        prepare_dataset(texts.select([1, 2]), tokenizer(None))


def test_a_thousand_examples_that_are_left_out_may_come_first() -> None:
    """Their batch has no token, and does not tell the types of the others."""
    asked = [{"role": "user", "content": "one"}]
    (row,) = prepare_dataset(chats(*[asked] * 1000, CHAT), tokenizer())
    assert row["input_ids"] and row["loss_mask"]


def test_examples_without_a_guess_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    bad = [[{"role": "user", "content": "one"}], [{"role": "assistant", "content": "two"}][:0]]
    long = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two " * 30}]
    with caplog.at_level(logging.WARNING):
        rows = prepare_dataset(chats(CHAT, *bad, long), tokenizer(), max_length=20, too_long="drop")
    assert len(rows) == 1
    assert "1 of 4 examples are kept: 1 examples have no answer" in caplog.text
    assert "1 examples are no text, or no conversation" in caplog.text
    assert "1 examples are longer" in caplog.text
    assert [len(row["input_ids"]) for row in prepare_dataset(chats(CHAT, long), tokenizer(), max_length=20)] == [
        16,
        20,
    ]


def test_packs_hold_whole_documents() -> None:
    texts = [" ".join(["one"] * length) for length in (5, 9, 4, 3, 8)]
    rows = prepare_dataset(datasets.Dataset.from_dict({"text": texts}), tokenizer(None), max_length=12, packing=True)
    sizes = [[row["document_ids"].count(i) for i in range(max(row["document_ids"]) + 1)] for row in rows]
    assert sizes == [[9, 3], [8, 4], [5]]
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) == len(row["document_ids"]) for row in rows)


def test_the_collator_pads_on_the_right() -> None:
    rows = [
        {"input_ids": [5, 6], "loss_mask": [0, 1], "document_ids": [0, 1]},
        {"input_ids": [7, 8, 9], "loss_mask": [1, 1, 1], "document_ids": [0, 0, 0]},
    ]
    batch = DraftCollator(pad_token_id=3)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 3], [7, 8, 9]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert batch["document_ids"].tolist() == [[0, 1, -1], [0, 0, 0]]
    alone = DraftCollator()([{"input_ids": [1], "loss_mask": [1], "states": {-1: torch.ones(1, 4)}}])
    assert "document_ids" not in alone
    assert alone["loss_mask"].tolist() == [[1, 0]] and alone["states"][-1].sum(-1).tolist() == [[4, 0]]


@pytest.mark.parametrize("name", ["loss_mask", "document_ids"])
def test_columns_of_different_lengths_are_refused(name: str) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "document_ids": [0, 0, 0]}
    with pytest.raises(ValueError, match=f"{name} is not as long as input_ids"):
        DraftCollator()([row, row | {name: [0, 0]}])


def test_examples_that_are_packed_stand_beside_those_that_are_not() -> None:
    rows = [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": [1], "loss_mask": [1], "document_ids": [4]}]
    for order in (rows, rows[::-1]):
        assert sorted(DraftCollator()(order)["document_ids"].tolist()) == [[0, 0], [4, -1]]


def test_the_draft_vocabulary_is_what_answers_use_most() -> None:
    rows = [{"input_ids": [5, 5, 7, 7, 2, 9], "loss_mask": [0, 0, 1, 1, 1, 1]}]
    counts = count_tokens(rows, 10)
    assert counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 1]
    assert most_frequent(counts, 2).tolist() == [2, 7]  # 2 and 9 are as frequent
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 7, 9]
    with pytest.raises(ValueError, match="cannot be chosen"):
        most_frequent(counts, 11)


def test_prompts_end_where_answers_begin() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 1, 1]},
        {"input_ids": [9, 9, 9, 1, 1], "loss_mask": [0, 1, 1, 0, 1], "document_ids": [0, 0, 0, 1, 1]},
        {"input_ids": [9, 9], "loss_mask": [0, 0]},
    ]
    assert prompts_of(rows, 5, 3) == [[1, 2], [5, 6, 7], [9]]
    assert prompts_of(rows, 1, 3) == [[1, 2]]


@pytest.mark.parametrize(
    ("dataset", "template", "message"),
    [
        (datasets.Dataset.from_dict({"text": []}), None, "is empty"),
        (datasets.Dataset.from_dict({"prose": ["one"]}), None, "text_column="),
        (datasets.Dataset.from_dict({"text": [None]}), None, "no example is left to train on: 1 examples are no text"),
        (datasets.Dataset.from_dict({"conversation": ["one"]}), PLAIN, "1 examples are no text, or no conversation"),
        (chats(CHAT), None, "no chat template"),
        (
            chats([{"role": "user", "content": "one"}]),
            PLAIN,
            "no example is left to train on: 1 examples have no answer",
        ),
        (
            chats(CHAT, CHAT),
            UNLIKE,
            "2 examples have answers whose beginning the chat template .* generation %}",
        ),
    ],
)
def test_unusable_data_is_refused(dataset: datasets.Dataset, template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_dataset(dataset, tokenizer(template))


@pytest.mark.parametrize("other", [[{"text": "one"}], datasets.DatasetDict({"train": chats(CHAT)}), None])
def test_other_kinds_of_datasets_are_refused(other: Any) -> None:
    with pytest.raises(TypeError, match="pass the path of a jsonl file"):
        prepare_dataset(other, tokenizer())


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        ([{"input_ids": [1, 2, 3]}], r"has no \['loss_mask'\].*prepare_dataset"),
        ([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}], "no token of the dataset is marked"),
        ([{"input_ids": [1, 2, 3], "loss_mask": [-100, 2, 3]}], "loss_mask has values from -100 to 3, as labels have"),
        ([{"input_ids": [1], "loss_mask": [1]}, {"input_ids": [2, 96], "loss_mask": [1, 1]}], "from 1 to 96, but the"),
        ([{"input_ids": [-100, 3], "loss_mask": [1, 1]}], "from -100 to 3, but the target has 96 tokens"),
    ],
)
def test_examples_that_the_target_cannot_read_are_refused_before_anything_runs(
    rows: list[dict[str, Any]], message: str, as_dataset: bool, tmp_path: Path
) -> None:
    target = tiny_target()
    target.forward = lambda *args, **kwargs: pytest.fail("something is run")
    given = datasets.Dataset.from_list(rows) if as_dataset else rows
    held_out = [{"input_ids": [5, 95], "loss_mask": [1, 1]}]
    arguments = DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for data in ({"train_dataset": given}, {"train_dataset": held_out, "eval_dataset": given}):
        with pytest.raises(ValueError, match=message):
            DraftTrainer(tiny_target(), target, arguments, **data)
    DraftTrainer(tiny_target(), tiny_target(), arguments, train_dataset=held_out)


def test_tokens_outside_the_vocabulary_are_not_counted() -> None:
    with pytest.raises(ValueError, match="from 2 to 10, but the target has 10 tokens"):
        count_tokens([{"input_ids": [2, 10], "loss_mask": [1, 1]}], 10)


def test_prepared_examples_know_their_tokenizer(tmp_path: Path) -> None:
    rows = prepare_dataset(chats(CHAT, CHAT), tokenizer(), packing=True, max_length=20)
    rows.train_test_split(test_size=1, seed=0).save_to_disk(str(tmp_path / "rows"))
    rows = datasets.load_from_disk(str(tmp_path / "rows"))["train"]
    arguments = DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    target, count = tiny_target(vocab_size=len(tokenizer())), len(tokenizer())
    other = tokenizer()
    other.add_tokens(["ten"])
    with pytest.raises(ValueError, match="prepared with another tokenizer: prepare the data again"):
        DraftTrainer(tiny_target(vocab_size=count), target, arguments, train_dataset=rows, processing_class=other)
    with pytest.raises(ValueError, match="prepared with another tokenizer"):
        cache_features(rows, target, (), tmp_path / "features", tokenizer=other, progress=False)
    smaller = tiny_target(vocab_size=count - 2)  # which has the ids of these examples, but they mean other tokens
    with pytest.raises(ValueError, match=f"a tokenizer of {count} tokens, of which the target has {count - 2}"):
        DraftTrainer(tiny_target(vocab_size=count - 2), smaller, arguments, train_dataset=rows)
    own = tokenizer(MARKED)
    own.tokenizer = object()  # as that of Mistral has
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(), tokenizer(MARKED))
    assert list(prepare_dataset(chats(CHAT), processor)) == list(prepare_dataset(chats(CHAT), tokenizer(MARKED)))
    for given in (None, own, processor):  # the same tokens
        DraftTrainer(tiny_target(vocab_size=count), target, arguments, train_dataset=rows, processing_class=given)
        cache_features(rows, target, (), tmp_path / "features", tokenizer=given, progress=False)


def test_counts_are_of_answers(tmp_path: Path) -> None:
    rows = prepare_dataset(chats(CHAT), tokenizer())
    counts = count_tokens(rows, len(tokenizer()))
    assert counts.sum() == sum(sum(row["loss_mask"]) for row in rows)
    assert counts[tokenizer().convert_tokens_to_ids("one")] == 0
    assert torch.equal(counts, count_tokens(list(rows), len(tokenizer())))


def test_special_tokens_inside_an_answer_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those around reasoning; the end of the text and what pads it are not."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ends = words.convert_tokens_to_ids(["three", "four"])
    target = tiny_target(vocab_size=len(words))
    monkeypatch.setattr(target.generation_config, "eos_token_id", ends)
    said = [
        "<think> one </think> two four one one",
        "<think> one </think> two one two one",
        "three one one one one two two",
    ]
    ids = torch.tensor([words.convert_tokens_to_ids(one.split()) for one in said])
    monkeypatch.setattr(target, "generate", lambda asked, **options: torch.cat([asked, ids], 1))
    found = _generate_together([[1], [1], [1]], target, words, {"max_new_tokens": 7})
    assert [cut for _, cut in found] == [False, True, False]
    assert [words(text)["input_ids"] for text, _ in found] == [ids[0, :4].tolist(), ids[1].tolist(), []]


def test_the_target_answers_anew_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    target, words = tiny_target(vocab_size=len(tokenizer())), tokenizer()
    conversations = [CHAT, CHAT[:2], [{"role": "user", "content": "nine"}, *CHAT[1:]]]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "progress": False}
    whole = regenerate(conversations, target, words, tmp_path / "whole.jsonl", batch_size=3, **options)
    rows = [json.loads(line)["messages"] for line in whole.read_text().splitlines()]
    assert [len(row) for row in rows] == [4, 2, 4]
    assert rows[0][0] == CHAT[0] and rows[0][2] == CHAT[2]
    prompt = words(words.apply_chat_template(rows[0][:3], tokenize=False, add_generation_prompt=True))
    out = target.generate(torch.tensor([prompt["input_ids"]]), max_new_tokens=4, do_sample=False)
    said, end = out[0, len(prompt["input_ids"]) :].tolist(), target.generation_config.eos_token_id
    content = words.decode(said[: said.index(end)] if end in said else said).strip()
    assert rows[0][3] == {"role": "assistant", "content": content}
    broken = tmp_path / "broken.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    broken.write_text(lines[0] + lines[1][:9])
    shutil.copy(f"{whole}.made_from.json", f"{broken}.made_from.json")
    regenerate(conversations, target, words, broken, batch_size=1, **options)
    assert broken.read_text() == whole.read_text()
    with pytest.raises(ValueError, match="no chat template"):
        regenerate(conversations, target, tokenizer(None), tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="to 13, but the target has 5 tokens"):
        regenerate(conversations, tiny_target(vocab_size=5), words, tmp_path / "none.jsonl")


def trained_on(target: Any) -> Any:
    target.model.layers[0].mlp.up_proj.weight.data.mul_(1.1)
    return target


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": lambda: trained_on(tiny_target(vocab_size=len(tokenizer())))}, "the target's layers differ"),
        ({"tokenizer": lambda: tokenizer(MARKED)}, "the tokenizer differs"),
        ({"max_new_tokens": lambda: 5}, "max_new_tokens was 4, not 5"),
        ({"temperature": lambda: 0.3}, r"temperature was 0\.7, not 0\.3"),
        ({"do_sample": lambda: False}, "do_sample was True, not False"),
        ({"top_k": lambda: 3}, "top_k was left out, not 3"),
    ],
)
def test_answers_are_not_added_to_those_of_another_origin(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"target": tiny_target(vocab_size=len(tokenizer())), "tokenizer": tokenizer()}
    given |= {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7, "progress": False}
    path = regenerate([CHAT], output=tmp_path / "answers.jsonl", **given)
    first = path.read_text()
    with pytest.raises(ValueError, match=problem):
        regenerate([CHAT, CHAT], output=path, **given | {name: change() for name, change in changes.items()})
    assert path.read_text() == first
    regenerate([CHAT, CHAT], output=path, batch_size=1, speculator="ngram", **given)
    assert path.read_text().startswith(first) and len(path.read_text().splitlines()) == 2
    Path(f"{path}.made_from.json").unlink()
    with pytest.raises(ValueError, match="says how its answers were made: write to another file"):
        regenerate([CHAT] * 3, output=path, **given)


def test_a_kill_leaves_no_half_of_what_answers_were_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    given: dict[str, Any] = {"target": tiny_target(vocab_size=len(tokenizer())), "tokenizer": tokenizer()}
    given |= {"output": tmp_path / "answers.jsonl", "max_new_tokens": 4, "progress": False}
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            regenerate([CHAT], **given)
    assert not Path(f"{given['output']}.made_from.json").exists()
    regenerate([CHAT], **given)
    assert json.loads(Path(f"{given['output']}.made_from.json").read_text())


def test_an_answer_that_was_cut_off_is_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    target, words = tiny_target(vocab_size=len(tokenizer())), tokenizer()
    target.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "progress": False}
    cut = regenerate([CHAT[:2]] * 3, target, words, tmp_path / "cut.jsonl", max_new_tokens=6, **options)
    assert [json.loads(line)["messages"][1]["cut"] for line in cut.read_text().splitlines()] == [True] * 3
    assert "3 of 3 answers were cut off by max_new_tokens" in caplog.text
    prompt = words(words.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True))
    said = target.generate(torch.tensor([prompt["input_ids"]]), max_new_tokens=6, do_sample=False)[0].tolist()
    target.generation_config.eos_token_id = [said[-1], said[-2]]  # the one of them that comes first ends the answer
    target.generation_config.pad_token_id = 0
    caplog.clear()
    ended = regenerate([CHAT[:2]], target, words, tmp_path / "ended.jsonl", max_new_tokens=6, **options)
    assert "cut" not in json.loads(ended.read_text())["messages"][1] and "cut off" not in caplog.text
    with torch.no_grad():  # the end may be token 0
        for weight in target.parameters():
            weight.zero_()
    target.generation_config.eos_token_id = 0
    ended = regenerate([CHAT[:2]], target, words, tmp_path / "zero.jsonl", max_new_tokens=6, **options)
    assert "cut" not in json.loads(ended.read_text())["messages"][1]


def test_a_generation_config_of_the_call_leaves_the_end_of_the_text_to_the_target(tmp_path: Path) -> None:
    target, words = tiny_target(vocab_size=len(tokenizer())), tokenizer()
    prompt = words(words.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True))
    said = target.generate(torch.tensor([prompt["input_ids"]]), max_new_tokens=6, do_sample=False)[0].tolist()
    target.generation_config.eos_token_id = said[-1]
    options: dict[str, Any] = {"max_new_tokens": 8, "progress": False}
    plain = regenerate([CHAT[:2]], target, words, tmp_path / "plain.jsonl", do_sample=False, **options)
    given = GenerationConfig(do_sample=False)
    same = regenerate([CHAT[:2]], target, words, tmp_path / "same.jsonl", generation_config=given, **options)
    assert same.read_text() == plain.read_text() and '"cut"' not in same.read_text()
    target.generation_config.eos_token_id = said[-2]
    with pytest.raises(ValueError, match=f"eos_token_id was {said[-1]}, not {said[-2]}"):
        regenerate([CHAT[:2]] * 2, target, words, same, generation_config=given, **options)


@pytest.mark.parametrize("end", ["\u2028", "\x85", "\x0c", "\r\n"])
def test_a_line_of_the_file_is_not_a_line_of_the_text(end: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": f"one{end}two"}, CHAT[1]]
    options: dict[str, Any] = {"do_sample": False, "progress": False, "max_new_tokens": 2}
    target, words = tiny_target(vocab_size=len(tokenizer())), tokenizer()
    for count in (1, 2):  # the second time it goes on
        path = regenerate([said] * count, target, words, tmp_path / "answers.jsonl", batch_size=1, **options)
        found = [json.loads(line)["messages"] for line in path.read_bytes().split(b"\n") if line]
        assert [messages[0]["content"] for messages in found] == [f"one{end}two"] * count


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_end_that_was_not_said_is_not_trained_on(template: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    chat = [dict(message) for message in CHAT]
    whole, answered = prepare_dataset(chats(chat), tokenizer(template))[0]["input_ids"], []
    for places in ((1,), (3,), (1, 3)):
        cut = [message | ({"cut": True} if i in places else {}) for i, message in enumerate(chat)]
        (row,) = prepare_dataset(chats(cut), tokenizer(template))
        assert row["input_ids"] == whole
        answered.append(answers(row))
    assert answered == [
        "three four six seven eight <end>",
        "three four <end> six seven eight",
        "three four six seven eight",
    ]
    assert "1 examples have an answer that was cut off: its end" in caplog.text
    caplog.clear()
    (row,) = prepare_dataset(chats(cut, chat), tokenizer(template), cut_answers="drop")
    assert answers(row) == "three four <end> six seven eight <end>"
    assert "1 of 2 examples are kept: 1 examples have an answer that was cut off" in caplog.text


def test_reasoning_that_was_cut_off_is_trained_on_up_to_there() -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    made = tokenizer(template.replace("%}<assistant> {%", "%}<assistant> think {%"))
    cut = {"role": "assistant", "content": "think one </think> six\nseven", "cut": True}
    (row,) = prepare_dataset(chats([*CHAT[:1], cut]), made)
    assert answers(row) == "one </think> six seven"


def test_answers_to_other_questions_are_not_taken_for_these(tmp_path: Path) -> None:
    target, path = tiny_target(vocab_size=len(tokenizer())), tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "progress": False}
    regenerate([CHAT, CHAT[:2]], target, tokenizer(), path, **options)
    written = path.read_text()
    regenerate([CHAT, CHAT[:2]], target, tokenizer(), path, **options)
    for others, line in (([CHAT[:2], CHAT], 1), ([CHAT, [{"role": "user", "content": "nine"}]], 2), ([CHAT], 2)):
        with pytest.raises(ValueError, match=rf"line {line} of .* conversation {line}: repeat"):
            regenerate(others, target, tokenizer(), path, **options)
    assert path.read_text() == written
    for text in ("one two\n", '{"text": "one"}\n', "[]\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 of .* does not answer"):
            regenerate([CHAT], target, tokenizer(), path, **options)
        assert path.read_text() == text


def test_nothing_is_asked_where_answers_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        regenerate([CHAT], None, tokenizer(), tmp_path / "missing" / "answers.jsonl")  # type: ignore[arg-type]
    assert regenerate([], tiny_target(), tokenizer(), tmp_path / "none.jsonl").read_text() == ""


def test_rows_that_cannot_be_answered_are_left_empty(tmp_path: Path) -> None:
    target, path = tiny_target(vocab_size=len(tokenizer())), tmp_path / "answers.jsonl"
    picky = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content != 'five' else raise_exception('no') }}")
    conversations = [[{"content": "one"}], CHAT, CHAT[:2], None, []]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "progress": False, "batch_size": 2}
    for _ in range(2):
        regenerate(conversations, target, tokenizer(picky), path, **options)
        rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        assert [len(row) for row in rows] == [0, 0, 2, 0, 0]


def fills_the_disk(limit: int, path: Path, conversations: Any, **options: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(OSError, match=rf"File too large: {path}\. The answers in it are kept.*repeat the call"):
        regenerate(conversations, tiny_target(vocab_size=len(tokenizer())), tokenizer(), path, **options)


def test_conversations_beyond_the_positions_of_the_target_are_cut_or_left_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_spec"), "propagate", True)
    ask = tokenizer(PLAIN)
    torch.manual_seed(0)
    shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    target = GPT2LMHeadModel(GPT2Config(vocab_size=len(ask), eos_token_id=None, **shape)).eval()
    conversations = [[{"role": "user", "content": "one " * count}, CHAT[1]] for count in (1, 40, 20)]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "progress": False}
    path = regenerate(conversations, target, ask, tmp_path / "new.jsonl", **options)
    short, none, long = (json.loads(line)["messages"] for line in path.read_text().splitlines())
    assert none == [] and "that leave no position for an answer in the target's 32" in caplog.text
    for asked, said in (short, long):
        prompt = ask.apply_chat_template([asked], add_generation_prompt=True)["input_ids"]
        length = min(16, 32 - len(prompt))
        assert (length < 16) == (asked == long[0])
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, pad_token_id=0)
        assert said["content"] == ask.decode(alone[0, len(prompt) :], skip_special_tokens=True).strip()
        assert said["cut"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_answers_are_kept_when_the_disk_is_full(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "one " * 300}, CHAT[1]]  # longer than what is noted beside the answers
    conversations, path = [first, CHAT[:2], CHAT], tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "progress": False, "batch_size": 1}
    target = tiny_target(vocab_size=len(tokenizer()))
    expected = regenerate(conversations, target, tokenizer(), tmp_path / "whole.jsonl", **options).read_text()
    limit = len(expected.splitlines()[0]) + 20
    assert in_another_process(fills_the_disk, limit, path, conversations, **options) == 0
    assert path.read_text() == expected[:limit]
    assert regenerate(conversations, target, tokenizer(), path, **options).read_text() == expected


def dies_at_line(call: int, path: Path, conversations: Any, **options: Any) -> None:
    """Answer, but be killed when a line has been written by half."""
    lines, dumps = iter(range(1, 100)), json.dumps

    def killed(written: Any, **kwargs: Any) -> str:
        line = dumps(written, **kwargs)
        if "messages" in written and next(lines) == call:
            with path.open("a", encoding="utf-8") as file:
                file.write(line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    json.dumps = killed  # type: ignore[assignment]
    regenerate(conversations, tiny_target(vocab_size=len(tokenizer())), tokenizer(), path, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_call_goes_on_behind_its_finished_batches(tmp_path: Path) -> None:
    conversations = [CHAT[:2], CHAT, [{"role": "user", "content": "nine"}, CHAT[1]]] * 2
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "progress": False, "batch_size": 2}
    target, path = tiny_target(vocab_size=len(tokenizer())), tmp_path / "answers.jsonl"
    expected = regenerate(conversations, target, tokenizer(), tmp_path / "whole.jsonl", **options).read_text()
    assert in_another_process(dies_at_line, 3, path, conversations, **options) == -signal.SIGKILL
    left = path.read_text()
    assert left.count("\n") == 2 and expected.startswith(left[: left.rfind("\n") + 1]) and left[-1] != "\n"
    asked = target.generate
    calls = []
    target.generate = lambda *args, **kwargs: calls.append(args) or asked(*args, **kwargs)
    assert regenerate(conversations, target, tokenizer(), path, **options).read_text() == expected
    assert sum(len(args[0]) for args in calls) == 5  # answers of four conversations
