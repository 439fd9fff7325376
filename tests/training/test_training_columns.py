"""The shapes in which data come: questions and answers, tools, arguments of the template, plain documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from golden import tiny_target
from test_training_data import CHAT, MARKED, PLAIN, answers, tokenizer
from transformers import AutoTokenizer

from hf_spec import demo
from hf_spec.cli import main
from hf_spec.training import prepare_dataset, regenerate
from hf_spec.training.origin import check_tokenizer
from hf_spec.training.recipe import read_recipe
from hf_spec.training.sources import conversations, load_raw
from hf_spec.training.sources import prepared as prepared_splits

TOOLS = "{% for tool in tools or [] %}<system> {{ tool.name }} {{ tool.says }} <end>\n{% endfor %}"
DRY = "{% if thinking is defined and not thinking %}think {% endif %}"
SAID = [{"name": "seven", "says": "eight"}]


def with_tools(template: str) -> str:
    """Show tools first, and thinking that is switched off where an answer begins, as Qwen3's template does."""
    begun = template.replace("%}<assistant> {%", "%}<assistant> " + DRY + "{%")
    shown = "<{{ m.role }}> {% if m.role == 'assistant' %}" + DRY + "{% endif %}"
    return TOOLS + begun.replace("<{{ m.role }}> ", shown)


def text(row: dict[str, Any]) -> str:
    return str(tokenizer().decode(row["input_ids"]))


def prepared(columns: dict[str, list[Any]], template: str | None = PLAIN, **options: Any) -> list[dict[str, Any]]:
    return list(prepare_dataset(datasets.Dataset.from_dict(columns), tokenizer(template), **options))


QUESTION = [{"role": "user", "content": "one two"}]
ANSWER = [{"role": "assistant", "content": "three four"}]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ["one two"], "completion": ["three four"]},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"instruction": ["one two"], "output": ["three four"]},
        {"instruction": ["one"], "input": ["two"], "output": ["three four"]},
        {"instruction": ["one two"], "input": [""], "output": ["three four"]},
    ],
)
def test_questions_and_answers_are_conversations(columns: dict[str, list[Any]], template: str) -> None:
    (row,) = prepared(columns, template)
    (same,) = prepared({"messages": [QUESTION + ANSWER]}, template)
    assert row == same
    assert answers(row) == "three four <end>"


def test_without_a_template_an_answer_follows_its_question() -> None:
    (row,) = prepared({"prompt": ["one two"], "completion": ["three four five"]}, None)
    assert (text(row), answers(row)) == ("one two three four five", "three four five")
    with pytest.raises(ValueError, match="no chat template"):
        prepared({"messages": [CHAT]}, None)
    with pytest.raises(ValueError, match="prompt and completion hold messages"):
        prepared({"prompt": [QUESTION], "completion": [ANSWER]}, None)


def test_pairs_that_are_none_are_left_out_and_text_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"prompt": ["one two", None, "one"], "completion": ["three four", "five six", ""]}
    (row,) = prepared(columns)
    assert answers(row) == "three four <end>"
    (row,) = prepared({"text": ["one two three"], "prompt": ["one"], "completion": ["two three"]})
    assert answers(row) == "one two three"  # as it was before pairs were known


def test_a_column_of_text_that_is_named_goes_before_conversations() -> None:
    columns = {"text": ["one two three"], "body": ["five six seven"], "messages": [CHAT]}
    (row,) = prepared(columns, text_column="body")
    assert answers(row) == "five six seven"
    assert prepared(columns, text_column="missing") == prepared(columns) == prepared({"messages": [CHAT]})


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_template_is_told_of_tools_and_arguments(template: str, as_json: bool) -> None:
    tools = [json.dumps(SAID) if as_json else SAID, "" if as_json else None]
    columns = {"messages": [CHAT, CHAT], "tools": tools}
    told, untold = prepared(columns, with_tools(template))
    assert text(told) == "<system> seven eight <end> " + text(untold)
    assert answers(told) == answers(untold) == "three four <end> six seven eight <end>"
    (dry,) = prepared({"messages": [CHAT]}, with_tools(template), template_arguments={"thinking": False})
    assert "<assistant> think six" in text(dry)
    assert template != PLAIN or answers(dry) == answers(untold)  # what the prompt begins is no answer
    arguments = [{"thinking": True}, None]
    wet, dry_too = prepared(
        {"messages": [CHAT, CHAT], "chat_template_kwargs": arguments}, with_tools(template),
        template_arguments={"thinking": False},
    )  # fmt: skip
    assert (text(wet), text(dry_too)) == (text(untold), text(dry))  # an example's own go first


@pytest.mark.parametrize("given", ["{bad", "[1]", '"thinking"'])
def test_arguments_of_the_template_that_are_none_break_their_example_only(given: str, tmp_path: Path) -> None:
    columns = {"messages": [CHAT, CHAT], "chat_template_kwargs": [given, "{}"]}
    assert len(prepared(columns)) == 1
    rows = conversations(datasets.Dataset.from_dict(columns))
    target, path = tiny_target(vocab_size=len(tokenizer())), tmp_path / "new.jsonl"
    regenerate(rows, target, tokenizer(), path, max_new_tokens=4, do_sample=False, progress=False)
    assert [bool(line["messages"]) for line in read(path)] == [False, True]


@pytest.mark.parametrize("packing", [False, True])
def test_documents_of_plain_text_are_ended(packing: bool) -> None:
    ending = tokenizer(None)
    ending.eos_token = "<end>"
    data = datasets.Dataset.from_dict({"text": ["one two three", "four five <end>"]})
    rows = prepare_dataset(data, ending, end_of_text=True, packing=packing, max_length=16)
    shown = " ".join(answers(row) for row in rows)
    assert sorted(one.strip() for one in shown.split("<end>")) == ["", "four five", "one two three"]
    pair = datasets.Dataset.from_dict({"prompt": ["one"], "completion": ["two three"]})
    (row,) = prepare_dataset(pair, ending, end_of_text=True)
    assert answers(row) == "two three <end>"
    (row,) = prepare_dataset(pair, ending)
    assert answers(row) == "two three"
    with pytest.raises(ValueError, match="set eos_token"):
        prepare_dataset(data, tokenizer(None), end_of_text=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_given_with_tools_and_written_beside_them(tmp_path: Path) -> None:
    target, ask = tiny_target(), tokenizer(with_tools(PLAIN))
    data = datasets.Dataset.from_dict(
        {"prompt": ["one two", "one two"], "completion": ["three", "four"], "tools": [None, json.dumps(SAID)]}
    )
    options = {"max_new_tokens": 4, "do_sample": False, "progress": False}
    path = regenerate(conversations(data), target, ask, tmp_path / "new.jsonl", **options)
    without, told = read(path)
    assert json.loads(told["tools"]) == SAID and "tools" not in without
    assert [line["messages"][0] for line in (without, told)] == QUESTION * 2
    shown = ask(
        ask.apply_chat_template(QUESTION, tools=SAID, tokenize=False, add_generation_prompt=True), return_tensors="pt"
    )
    expected = target.generate(shown.input_ids, max_new_tokens=4, do_sample=False)[0, shown.input_ids.shape[1] :]
    assert told["messages"][1]["content"] == ask.decode(expected, skip_special_tokens=True).strip()
    written = path.read_bytes()
    regenerate(conversations(data), target, ask, path, **options)  # goes on behind the last one: nothing is left
    assert path.read_bytes() == written
    with pytest.raises(ValueError, match="template_arguments was left out"):
        regenerate(conversations(data), target, ask, path, template_arguments={"thinking": False}, **options)
    rows = prepare_dataset(path, ask)
    assert len({text(row).split(" <user>")[0] for row in rows}) == len(rows)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": ["one two"]}, "none of .'prompt'. is 'completion'"),
        ({"prompt": [QUESTION]}, "none of .'prompt'. is 'completion'"),
        ({"instruction": ["one"], "input": ["two"]}, "none of .'instruction', 'input'. is 'output'"),
        ({"messages": [QUESTION]}, "1 examples have no answer of the assistant"),
    ],
)
def test_questions_alone_are_answered_first(
    columns: dict[str, list[Any]], said: str, template: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{said}.*let the target answer first, by regenerate"):
        prepared(columns, template)
    target, ask = tiny_target(vocab_size=len(tokenizer())), tokenizer(template)
    options = {"max_new_tokens": 4, "do_sample": False, "progress": False}
    path = regenerate(conversations(datasets.Dataset.from_dict(columns)), target, ask, tmp_path / "1.jsonl", **options)
    same = regenerate([QUESTION + ANSWER], target, ask, tmp_path / "2.jsonl", **options)
    (found,), (expected,) = read(path), read(same)
    answer = [message.pop("content") for message in (found["messages"][1], expected["messages"][1])]
    assert answer[0] == answer[1] and found["messages"][0]["content"].split() == ["one", "two"]


def test_the_command_and_recipes_take_arguments_of_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    lines = "target: a/b\ndraft: {kind: eagle3}\ndata: x.jsonl\nprepare:\n  end_of_text: true\n  template_arguments: "
    recipe.write_text(lines + "{enable_thinking: false}\n")
    assert read_recipe(recipe)["prepare"] == {"end_of_text": True, "template_arguments": {"enable_thinking": False}}
    recipe.write_text(lines + "thinking\n")
    with pytest.raises(ValueError, match="template_arguments is 'thinking'; it takes dict"):
        read_recipe(recipe)
    with pytest.raises(SystemExit):
        main(["prepare", "x.jsonl", "out", "--target", "a/b", "--template-arguments", "thinking"])
    assert "is no JSON object" in capsys.readouterr().err


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


NUMBERS = "one two three four five six seven eight".split()


def test_several_files_are_mixed_by_weight_and_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    pairs = [{"prompt": "one two", "completion": f"{one} nine"} for one in NUMBERS]
    chats = [{"messages": [*QUESTION, {"role": "assistant", "content": f"{one} think"}]} for one in NUMBERS]
    names = write(tmp_path / "a.jsonl", *pairs), write(tmp_path / "b.jsonl", *chats)
    for weights in ((2, 1), (1.5, 0.5)):
        data = [(load_raw(name), weight) for name, weight in zip(names, weights, strict=True)]
        splits = prepared_splits(data, tokenizer(), held_out=4)
        rows = {name: [answers(row) for row in split] for name, split in splits.items()}
        assert len(set(rows["test"])) == len(rows["test"]) == 4
        assert not {*rows["train"]} & {*rows["test"]}
        for ending, weight in zip(("nine", "think"), weights, strict=True):
            counts = [rows["train"].count(one) for one in {*rows["train"]} if one.split()[1] == ending]
            assert {*counts} <= {int(weight), int(weight + 0.5)}
            assert weight % 1 == 0 or weight < 1 or len({*counts}) == 2  # some once, some twice
        check_tokenizer(splits["train"], tokenizer())
        with pytest.raises(ValueError, match="another tokenizer"):
            check_tokenizer(splits["train"], AutoTokenizer.from_pretrained(demo.path()))


def test_slices_of_files_and_of_saved_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": NUMBERS})
    rows.save_to_disk(str(tmp_path / "alone"))
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "both"))
    rows.to_json(tmp_path / "a.jsonl")
    problem = r"has no split 'dev': name one of \['train'.*slice such as train\["
    for name in ("a.jsonl", "alone", "both"):
        assert list(load_raw(str(tmp_path / name), "train[:25%]+train[-1:]")["text"]) == ["one", "two", "eight"]
        with pytest.raises(ValueError, match=problem):
            load_raw(str(tmp_path / name), "dev")
    assert load_raw(str(tmp_path / "both"), "test[:1]")["text"] == ["two"]
    with pytest.raises(ValueError, match=r"no split 'train\[:2\]': .* which a stream does not have"):
        load_raw(str(tmp_path / "a.jsonl"), "train[:2]", streaming=True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{a.jsonl: 0}", "a.jsonl has the weight 0; set a number above 0"),
        ("{a.jsonl: true}", "the weight True"),
        ("[[a.jsonl]]", "a list of names, or names with weights"),
        ("3", "data is 3"),
    ],
)
def test_senseless_weights_are_refused(tmp_path: Path, data: str, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: a/b\ndraft: {{kind: eagle3}}\ndata: {data}\n")
    with pytest.raises(ValueError, match=said):
        read_recipe(recipe)
