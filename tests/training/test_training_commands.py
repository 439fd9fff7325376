"""``hf-spec prepare`` and ``hf-spec train``, called in process on the demo target."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from groups import in_another_process
from pairs import each_value
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo
from hf_spec.checkpoints.kinds import config_classes
from hf_spec.cli import main

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
from hf_spec.progress import Progress  # noqa: E402
from hf_spec.training import DraftTrainer, DraftTrainingArguments  # noqa: E402
from hf_spec.training.card import adapter_of  # noqa: E402
from hf_spec.training.recipe import (  # noqa: E402
    FEATURES,
    PREPARE,
    _splits,
    _target_of_caches,
    read_recipe,
    train,
    training_arguments,
)
from hf_spec.training.sources import coverage, is_prepared, prepared  # noqa: E402

ROOT = Path(__file__).parents[2]
TARGET = str(demo.path())
TRAINER = {"max_steps": 1, "unroll_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
TRAINER |= {"eval_max_new_tokens": 8, "eval_prompts": 2, "per_device_train_batch_size": 2}


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    _, *found = (ROOT / "tests/fixtures/stories_excerpt.txt").read_text(encoding="utf-8").split("\n----\n")
    path = tmp_path / "stories.jsonl"
    path.write_text("\n".join(json.dumps({"text": story.strip()[:200]}) for story in found), encoding="utf-8")
    return path


def recipe(folder: Path, data: Path, draft: Any, /, **sections: Any) -> str:
    """Write a recipe and return its path."""
    trainer = TRAINER | {"output_dir": str(folder / "draft")} | sections.pop("trainer", {})
    content = {"target": TARGET, "draft": draft, "data": str(data), **sections, "trainer": trainer}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


# -- prepare ----------------------------------------------------------------------------------------------------------


def test_prepared_text_is_what_a_draft_is_trained_on(stories: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows"
    options = ["--target", TARGET, "--max-length", "64", "--packing", "--held-out", "2"]
    assert main(["prepare", str(stories), str(out), *options]) == 0
    rows = datasets.load_from_disk(str(out))
    assert len(rows["test"]) == 2 and set(rows["train"].column_names) == {"input_ids", "loss_mask", "document_ids"}
    assert max(map(len, rows["train"]["input_ids"])) <= 64
    said = capsys.readouterr().out
    tokens = sum(map(len, rows["train"]["input_ids"]))
    assert f"train: {len(rows['train'])} examples, {tokens:,} tokens, {tokens:,} of them answers" in said
    shares = [float(share) for share in re.findall(r"([\d.]+)%", said)]
    assert len(shares) == 4 and shares == sorted(shares) and shares[-1] > 90
    assert main(["train", recipe(tmp_path, out, {"kind": "medusa", "num_heads": 2})]) == 0
    assert "eval_acceptance_length" in capsys.readouterr().out
    assert AutoModel.from_pretrained(tmp_path / "draft").config.num_heads == 2
    assert main(["prepare", str(stories), str(out), *options]) == 1
    assert "exists; choose another directory" in capsys.readouterr().err


def test_a_part_of_one_of_several_configurations_is_prepared(tmp_path: Path, capsys: Any) -> None:
    """A directory may have several, as datasets of the Hub do."""
    source = tmp_path / "source"
    source.mkdir()
    named = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in ("main", "other"))
    (source / "README.md").write_text(f"---\nconfigs:\n{named}---\n", encoding="utf-8")
    for name in ("main", "other"):
        lines = [json.dumps({"text": f"The {name} story of a dog, {i}"}) for i in range(9)]
        (source / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    call = ["prepare", str(source), str(tmp_path / "rows"), "--target", TARGET, "--held-out", "0"]
    assert main(call) == 1
    assert "among the available configs: ['main', 'other']" in capsys.readouterr().err
    assert main([*call, "--config", "other", "--split", "train[:3]"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = datasets.load_from_disk(str(tmp_path / "rows"))["train"]
    assert made["input_ids"] == [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines[:3]]
    options = {"held_out": 0, "config": "other", "split": "train[:3]"}
    assert list(_splits({"data": str(source), "prepare": options}, tokenizer, 0)["train"]) == list(made)
    file = str(source / "main.jsonl")  # beside it: no configuration, and no split of another name
    assert len(_splits({"data": [file, str(source)], "prepare": options}, tokenizer, 0)["train"]) == 3 + 3
    assert len(_splits({"data": file, "prepare": options | {"split": "train_sft"}}, tokenizer, 0)["train"]) == 9
    call[1:3] = str(source / "main.jsonl"), str(tmp_path / "none")
    assert main([*call, "--config", "other"]) == 1
    assert "has no configurations, as datasets of the Hub may: leave out config 'other'" in capsys.readouterr().err


def prepare_on_a_full_disk(*argv: str) -> None:
    import resource

    sys.stderr = io.StringIO()  # pytest's file may be longer already
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
    assert main(["prepare", *argv]) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_preparing_is_repeated_after_a_full_disk(stories: Path, tmp_path: Path) -> None:
    argv = [str(stories), str(tmp_path / "rows"), "--target", TARGET]
    assert in_another_process(prepare_on_a_full_disk, *argv) == 0
    assert [path.name for path in tmp_path.iterdir()] == [stories.name]
    assert main(["prepare", *argv]) == 0


def test_the_target_answers_anew_and_goes_on_where_the_file_ends(tmp_path: Path, capsys: Any) -> None:
    asked = [[{"role": "user", "content": f"Tell me a story about {what}."}, {"role": "assistant", "content": "No."}]
             for what in ("a dog", "a cat", "the sea")]  # fmt: skip
    data, answers = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in asked), encoding="utf-8")
    options = ["--target", TARGET, "--regenerate", str(answers), "--max-new-tokens", "12", "--temperature", "0"]
    call = ["prepare", str(data), str(tmp_path / "rows"), *options, "--held-out", "0"]
    assert main([*call, "--speculator", "ngram", "--batch-size", "1"]) == 0
    whole = answers.read_text(encoding="utf-8")
    answered = [json.loads(line)["messages"] for line in whole.splitlines()]
    assert [one[0] for one in answered] == [one[0] for one in asked]
    assert all(one[1]["role"] == "assistant" and one[1]["content"] != "No." for one in answered)
    rows = datasets.load_from_disk(str(tmp_path / "rows"))
    assert list(rows) == ["train"] and all(0 < sum(row["loss_mask"]) < len(row["loss_mask"]) for row in rows["train"])
    answers.write_text(whole[: whole.index("\n") + 20], encoding="utf-8")
    call[2] = str(tmp_path / "again")
    assert main(call) == 0
    assert answers.read_text(encoding="utf-8") == whole
    capsys.readouterr()
    call[2] = str(tmp_path / "mixed")
    assert main([*call, "--max-new-tokens", "13"]) == 1
    assert "--max-new-tokens was 12, not 13" in capsys.readouterr().err and not (tmp_path / "mixed").exists()
    assert main([*call, "--cut-answers", "drop"]) == 1  # all of them
    assert "no example is left to train on: 3 examples have an answer that was cut off" in capsys.readouterr().err


def test_an_interrupted_regeneration_says_that_it_goes_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, answers = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"Tell me of {what}."}]} for what in ("a dog", "the sea")]
    data.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    told: list[str] = []

    def interrupt(bar: Progress, count: int = 1) -> None:
        bar.done += count
        told.append(str(bar))
        raise KeyboardInterrupt

    call = ["prepare", str(data), str(tmp_path / "rows"), "--target", TARGET, "--max-new-tokens", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", interrupt)
        assert main([*call, "--regenerate", str(answers), "--batch-size", "1"]) == 130
    assert told[0].startswith("Regenerating, 1 of 2 conversations, about ")
    assert f"hf-spec: stopped. The same command resumes after what {answers} holds\n" in capsys.readouterr().err
    assert main([*call, "--regenerate", str(answers), "--batch-size", "1"]) == 0
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 2


def test_the_share_of_a_draft_vocabulary_is_that_of_examples_held_out() -> None:
    seen, new = ([{"input_ids": ids, "loss_mask": [1] * len(ids)}] for ids in ([1, 1, 2, 2, 3], [1, 3, 3, 4]))
    assert coverage(seen, 16) == pytest.approx({1: 0.4, 2: 0.8, 4: 1.0, 8: 1.0})
    assert coverage(seen, 16, new) == pytest.approx(
        {1: 0.25, 2: 0.25, 4: 0.75, 8: 1.0}
    )  # ties go to the lower ids: 0 is the fourth


@pytest.mark.parametrize("held_out", ["2", "0"])
def test_prepare_says_which_answers_the_share_is_of(held_out: str, stories: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows"
    assert main(["prepare", str(stories), str(out), "--target", TARGET, "--held-out", held_out]) == 0
    splits = datasets.load_from_disk(str(out))
    shares = coverage(splits["train"], 2048, splits.get("test"))
    which = "the held-out answers" if int(held_out) else "the answers that it is counted on (fewer of others)"
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"Share of {which} that"))
    assert line.endswith(": " + ", ".join(f"{size:,} {share:.1%}" for size, share in shares.items()))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--regenerate", "{}/answers.txt"], "let {}/answers.txt end in .jsonl"),
        (["--regenerate", "{}/chats.jsonl"], "holds the data"),
    ],
)
def test_answers_go_to_a_file_that_is_read_again(
    options: list[str], problem: str, tmp_path: Path, capsys: Any
) -> None:
    asked = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "No."}]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": asked}), encoding="utf-8")
    call = ["prepare", str(data), str(tmp_path / "rows"), "--target", TARGET, "--max-new-tokens", "4"]
    assert main([*call, *(option.format(tmp_path) for option in options)]) == 1
    assert problem.format(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "rows").exists() and len(data.read_text(encoding="utf-8").splitlines()) == 1


def test_the_page_names_all_options_of_prepare(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    options = {*re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)}
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("training.md", "first-draft.md"))
    missing = {option for option in options if not re.search(rf"{option}\b(?!-)", pages)}
    assert missing == {"--device", "--threads"}  # of all commands


# -- train ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optional", [False, True])
def test_the_example_is_a_recipe(optional: bool, stories: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "train.yaml").read_text(encoding="utf-8")
    if optional:  # take out the comments from what is optional, but for another way to name the target
        text = re.sub(r"^# (target|  name|  adapter|  dtype).*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^# ( *\w+:( |$).*)$", r"  \1", text, flags=re.MULTILINE)
        text = re.sub(r"^  (?=(features|peft|    ))", "", text, flags=re.MULTILINE)
    given = yaml.safe_load(text)
    assert bool(given.get("peft")) == bool(given.get("features")) == optional
    assert all(re.search(rf"\b{kind}\b", text) for kind in config_classes())
    if optional:  # the dtype is taken out with the target's
        assert ({*given["features"], "dtype"}, {*given["prepare"]}) == ({*FEATURES}, {*PREPARE})
    given |= {"target": TARGET, "data": str(stories)}
    given["draft"]["draft_vocab_size"] = 512
    if optional:  # an adapter on a draft that exists
        given["draft"] = str(demo.path("draft-eagle3"))
    given["prepare"] |= {"max_length": 64, "num_proc": None, "held_out": 4, "streaming": False}
    given["prepare"].pop("config", None)  # the data are a file
    given["trainer"] |= TRAINER | {"output_dir": str(tmp_path / "draft"), "save_strategy": "steps"}
    given["trainer"] |= {"bf16": False, "push_to_hub": False, "resume_from_checkpoint": None}
    if optional:
        given["features"]["directory"] = str(tmp_path / "features")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    directory, metrics = train(read_recipe(tmp_path / "recipe.yaml"), ["--seed", "3"])
    assert metrics["eval_acceptance_length"] >= 1
    saved = {path.name for path in Path(directory).iterdir()}
    assert {"adapter_config.json" if optional else "config.json", "README.md"} <= saved
    assert (tmp_path / "features").exists() == optional


def test_what_no_training_could_do_is_refused_before_features_are_made(
    stories: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"features": str(tmp_path / "features"), "prepare": {"held_out": 0}}
    path = recipe(tmp_path, stories, {"kind": "medusa"}, trainer={"eval_strategy": "epoch"}, **sections)
    assert main(["train", path]) == 1
    assert "no example is held out: prepare more than one example with" in capsys.readouterr().err
    monkeypatch.setattr(DraftTrainingArguments, "n_gpu", 2)
    assert main(["train", path, "--target", "none/such"]) == 1
    assert "2 devices but one process" in capsys.readouterr().err
    assert not (tmp_path / "features").exists()


def test_a_trained_adapter_is_told_from_a_draft(stories: Path, tmp_path: Path, capsys: Any) -> None:
    base, adapter = str(demo.path("draft-eagle3")), str(tmp_path / "draft")
    assert main(["train", recipe(tmp_path, stories, base, peft={"r": 2, "target_modules": ["q_proj"]})]) == 0
    assert f"The adapter is in {adapter}: merge it into its draft {base}" in capsys.readouterr().out
    uses = [["generate", TARGET, "--prompt", "Once", "--max-new-tokens", "4", "--speculator"], ["inspect"]]
    for use in uses:
        assert main([*use, adapter]) == 1
        told = capsys.readouterr().err
        assert "holds an adapter of PEFT" in told and base in told
        assert f"PeftModel.from_pretrained(draft, '{adapter}').merge_and_unload().save_pretrained(DIRECTORY)" in told
    draft, merged = AutoModel.from_pretrained(base), str(tmp_path / "merged")
    peft.PeftModel.from_pretrained(draft, adapter).merge_and_unload().save_pretrained(merged)
    assert [main([*use, merged]) for use in uses] == [0, 0]


def test_the_recipe_of_a_block_draft_is_one(stories: Path, tmp_path: Path) -> None:
    given = yaml.safe_load((ROOT / "examples" / "train_dspark.yaml").read_text(encoding="utf-8"))
    given |= {"target": TARGET, "data": str(stories), "features": {"directory": str(tmp_path / "features")}}
    given["draft"] |= {"block_size": 3, "markov_rank": 8, "layers": {"num_hidden_layers": 1}}
    given["prepare"] |= {"max_length": 64, "held_out": 4}
    given["trainer"] |= TRAINER | {"output_dir": str(tmp_path / "draft"), "save_strategy": "steps", "num_anchors": 4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    directory, metrics = train(read_recipe(tmp_path / "recipe.yaml"))
    assert metrics["eval_acceptance_length"] >= 1 and {"eval_acceptance_3", "eval_accuracy_3"} <= metrics.keys()
    card = (Path(directory) / "README.md").read_text(encoding="utf-8")
    assert '"method": "dspark"' in card and "0.1 nll + 1.8 tv" in card
    draft = AutoModel.from_pretrained(directory)
    assert (draft.config.speculators_model_type, draft.config.num_draft_tokens) == ("dspark", 3)


def test_a_draft_is_trained_from_features_without_the_targets_weights(
    stories: Path, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    target, rows, features = (tmp_path / name for name in ("target", "rows", "features"))
    shutil.copytree(TARGET, target)
    options = ["--target", str(target), "--max-length", "64", "--held-out", "2", "--features", str(features)]
    assert main(["prepare", str(stories), str(rows), *options]) == 0
    weights = (target / "model.safetensors").rename(target / "elsewhere")
    for without, code in ((False, 1), (True, 0)):
        sections = {"target": str(target), "features": {"directory": str(features), "without_target": without}}
        assert main(["train", recipe(tmp_path, rows, {"kind": "eagle3"}, **sections)]) == code
    said = capsys.readouterr().out
    assert "eval_expected_length" in said and "acceptance" not in said
    assert AutoModel.from_pretrained(tmp_path / "draft").config.speculators_model_type == "eagle3"
    shard = features / "train" / "features-00000.safetensors"
    shard.unlink()
    again = recipe(tmp_path, rows, {"kind": "eagle3"}, **sections, trainer={"output_dir": str(tmp_path / "again")})
    assert main(["train", again]) == 1 and "features-00000.safetensors" in caplog.text
    weights.rename(target / "model.safetensors")
    assert main(["train", again]) == 0 and shard.exists()
    # Another target is noticed by its config, or by the name that the cache has recorded.
    elsewhere = recipe(tmp_path, rows, {"kind": "eagle3"}, **sections, trainer={"output_dir": str(tmp_path / "third")})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    assert main(["train", elsewhere]) == 1
    assert "is of another target: num_hidden_layers was" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_features_are_made_where_there_are_none(stories: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prepare": {"max_length": 64, "held_out": 2}, "trainer": {"seed": 5}}
    features = {"directory": str(tmp_path / "features"), "without_target": True}
    found = []
    for sections in ({}, {"features": features}, {"features": features["directory"]}):
        draft = {"kind": "medusa", "num_heads": 2}
        options["trainer"]["output_dir"] = str(tmp_path / f"draft {len(found)}")
        _, metrics = train(read_recipe(recipe(tmp_path, stories, draft, **options, **sections)))
        found.append(metrics)
    assert len({round(metrics["eval_loss"], 4) for metrics in found}) == 1
    assert ["eval_acceptance_length" in metrics for metrics in found] == [True, False, True]


def test_features_are_those_of_the_targets_adapter(stories: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TARGET), lora).save_pretrained(tmp_path / name)
    features = str(tmp_path / "features")

    def trained(adapter: str) -> str:
        options: dict[str, Any] = {"target": {"name": TARGET, "adapter": str(tmp_path / adapter)}}
        options |= {
            "prepare": {"max_length": 64, "held_out": 2},
            "trainer": {"output_dir": str(tmp_path / "of" / adapter)},
        }
        options["features"] = {"directory": features, "without_target": True}
        directory, _ = train(read_recipe(recipe(tmp_path, stories, {"kind": "medusa", "num_heads": 2}, **options)))
        return (Path(directory) / "README.md").read_text(encoding="utf-8")

    def opened(**adapter: str) -> Any:
        return _target_of_caches(features, ["train"], {"name": TARGET, **adapter}, AutoConfig.from_pretrained(TARGET))

    assert "with the adapter LORA 'default'" in trained("a")
    for other in (lambda: trained("b"), opened):
        with pytest.raises(ValueError, match="of another target: the adapter was LORA 'default', not "):
            other()
    index = Path(features, "train", "index.json")
    content = json.loads(index.read_text(encoding="utf-8"))
    (tmp_path / "a").rename(tmp_path / "moved")
    assert adapter_of(opened(adapter=str(tmp_path / "moved"))) == "LORA 'default'"
    del content["made_from"]["adapter_origin"]  # as of a model that was adapted in Python
    index.write_text(json.dumps(content), encoding="utf-8")
    assert adapter_of(opened(adapter=str(tmp_path / "b"))) == "LORA 'default'"
    with pytest.raises(ValueError, match="of another target: the adapter was LORA 'default', not "):
        opened()


def test_training_goes_on_from_a_draft(stories: Path, tmp_path: Path) -> None:
    start = recipe(tmp_path, stories, {"kind": "mtp", "shared_with_target": ["embed_tokens", "lm_head"]})
    first, _ = train(read_recipe(start))
    again = recipe(tmp_path, stories, first, trainer={"output_dir": str(tmp_path / "again"), "learning_rate": 1e-9})
    second, _ = train(read_recipe(again))
    one, other = (AutoModel.from_pretrained(path).state_dict() for path in (first, second))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_a_recipe_may_read_its_data_as_streams(stories: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(stories.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "both").mkdir()
    prepare = {"streaming": True, "held_out": 2, "max_length": 64, "packing": True}
    draft = {"kind": "eagle3", "draft_vocab_size": 512}
    for folder, data in ((tmp_path, str(stories)), (tmp_path / "both", {str(stories): 1, str(more): 2.5})):
        found = read_recipe(recipe(folder, stories, draft, prepare=prepare))
        directory, metrics = train(found | {"data": data})
        assert metrics["eval_acceptance_length"] >= 1
        assert AutoModel.from_pretrained(directory).config.draft_vocab_size == 512


@pytest.mark.parametrize(
    ("trainer", "times"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1}, 2),
        ({"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}, 2),
        ({"eval_strategy": "no"}, 1),
    ],
)
def test_the_last_step_is_measured_once(
    trainer: dict[str, Any], times: int, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    evaluate = DraftTrainer.evaluate

    def counting(self: Any, *args: Any, **options: Any) -> dict[str, float]:
        seen.append(evaluate(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(DraftTrainer, "evaluate", counting)
    given = recipe(tmp_path, stories, {"kind": "medusa", "num_heads": 2}, trainer={"max_steps": 2} | trainer)
    _, metrics = train(read_recipe(given))
    assert len(seen) == times
    assert {name: metrics[name] for name in seen[-1] if name != "epoch"}.items() <= seen[-1].items()


def test_an_interrupted_training_says_how_it_goes_on(
    stories: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last checkpoint if there is one, by a command that runs; it may be interrupted again."""
    file = recipe(tmp_path, stories, {"kind": "medusa", "num_heads": 2}, trainer={"max_steps": 4, "save_steps": 1})
    call = ["train", file, "--save_strategy", "steps", "--target", TARGET]
    directory = tmp_path / "draft"
    step = DraftTrainer.training_step

    def interrupted(at: int) -> None:
        def training_step(self: Any, *args: Any, **options: Any) -> Any:
            if self.state.global_step == at:
                raise KeyboardInterrupt
            return step(self, *args, **options)

        monkeypatch.setattr(DraftTrainer, "training_step", training_step)

    interrupted(0)
    assert main(call) == 130
    assert (
        f"No checkpoint is in {directory} yet: the same command starts from the beginning" in capsys.readouterr().err
    )
    for at in (2, 3):
        interrupted(at)
        assert main(call) == 130
        err = capsys.readouterr().err
        assert f"To resume from {directory}/checkpoint-{at}:" in err
        resume = shlex.split(err.splitlines()[-1])
        assert resume == ["hf-spec", *call[:2], *call[2:], "--resume_from_checkpoint", "true"][: len(resume)]
        call = resume[1:]
    monkeypatch.setattr(DraftTrainer, "training_step", step)
    assert main(call) == 0
    assert (directory / "checkpoint-4").is_dir()


def test_a_language_model_is_distilled(stories: Path, tmp_path: Path) -> None:
    directory, metrics = train(read_recipe(recipe(tmp_path, stories, str(demo.path("draft-vanilla")))))
    assert metrics["eval_acceptance_length"] > 1.5
    assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "llama"


def test_arguments_may_be_changed_on_the_command_line() -> None:
    given = {"learning_rate": "1e-3", "bf16": False, "output_dir": "a", "lr_scheduler_type": "linear"}
    args = training_arguments(given | {"use_cpu": True}, ["--output_dir", "b", "--step-decay", "0.5"])
    assert isinstance(args, DraftTrainingArguments)
    assert (args.learning_rate, args.output_dir, args.step_decay, args.unroll_steps) == (1e-3, "b", 0.5, 7)
    assert args.lr_scheduler_type == "linear" and args.remove_unused_columns is False


RECIPE = {"target": "t", "draft": {"kind": "eagle3"}, "data": "d"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trainr": {}}, "the recipe has no 'trainr'; did you mean 'trainer'"),
        ({"draft": None}, "does not say draft"),
        (
            {"draft": {"kind": "eagle4"}},
            "draft.kind is 'eagle4'; name one of ['dflash', 'dflash2', 'dspark', 'eagle', 'eagle3', 'medusa', ",
        ),
        ({"draft": {"kind": "eagle3", "draft_vocabsize": 8}}, "draft has no 'draft_vocabsize'; did you mean 'draft"),
        (
            {"draft": {"kind": "mtp", "layers": {"hiden_size": 8}}},
            "draft.layers has no 'hiden_size'; did you mean",
        ),
        ({"target": {"adapter": "a"}}, "target needs a name"),
        ({"target": {"name": "t", "quantise": True}}, "target has no 'quantise'; known are adapter, "),
        ({"prepare": {"packed": True}}, "prepare has no 'packed'; did you mean 'packing'?"),
        ({"prepare": ["packing"]}, "prepare is ['packing']; write keys and values"),
        ({"features": {"dtype": "bfloat16"}}, "features needs a directory"),
        ({"draft": {"kind": "eagle3", "layers": [1]}}, "draft.layers is [1]; write keys and values"),
        ({"data": 5}, "data is 5; write a name, a list of names"),
        ({"target": {"name": "t", "dtype": "flaot32"}}, "target.dtype is 'flaot32'; name one of torch"),
        ({"prepare": {"max_length": "long"}}, "prepare: max_length is 'long'; it takes int"),
        ({"prepare": {"held_out": True}}, "prepare: held_out is True; it takes int | None"),
        ({"prepare": {"too_long": "cut"}}, "prepare: too_long is 'cut'; it takes Literal['truncate', 'drop']"),
        (
            {"features": {"directory": "f", "without_target": "maybe"}},
            "features: without_target is 'maybe'; it takes bool",
        ),
        ({"features": {"directory": "f", "dtype": "int8"}}, "features.dtype is 'int8'; name one of torch"),
        ({"features": {"directory": "f", "dtype": "bf16"}}, "features.dtype is 'bf16'; name one of torch"),
        (
            {"prepare": {"streaming": True}, "features": {"directory": "f"}},
            "a stream has none: leave out one of the two",
        ),
        ({"peft": {"r": 4}}, "let draft be its directory or Hub id, or leave out peft"),
        ({"trainer": {"learning_rat": 1}}, "trainer has no 'learning_rat'; did you mean 'learning_rate'?"),
    ],
)
def test_mistakes_in_a_recipe_are_named(change: dict[str, Any], problem: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | change), encoding="utf-8")
    assert main(["train", str(path)]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        ({"draft": str(demo.path("draft-eagle3")), "peft": {"rank": 8}}, [], "peft has no 'rank'"),
        ({"trainer": {"learning_rate": "fast"}}, [], "invalid float value: 'fast'"),
        ({"trainer": {"objective": "mse"}}, [], "objective is 'mse'"),
        ({"trainer": {"unroll_steps": 2.5}}, [], "invalid int value: '2.5'"),
        ({"trainer": {"eval_prompts": -1}}, [], "eval_prompts is -1; set at least 0"),
        ({"draft": {"kind": "eagle3", "norm_output": "yes"}}, [], "draft: norm_output is 'yes'; set True or False"),
        (
            {"draft": {"kind": "eagle3", "layers": {"num_hidden_layers": "two"}}},
            [],
            "draft: Validation error for field",
        ),
        (
            {"draft": {"kind": "eagle3", "layers": {"num_hidden_layers": 0}}},
            [],
            "num_hidden_layers is 0; set",
        ),
        ({"data": "stories.jsonl"}, [], "there is no file stories.jsonl"),
        ({"target": "nowhere/model"}, [], "the target 'nowhere/model' is not found: there is no such directory"),
        ({"draft": "nowhere/draft"}, [], "'nowhere/draft' is not found: there is no such directory"),
        (
            {"features": {"directory": "f", "without_target": True}},
            ["--metric_for_best_model", "eval_acceptance_length"],
            "measured by generation",
        ),
        ({}, ["--learning_rat", "1"], "--learning_rat"),
        ({"trainer": {"learning_rate": [0.1]}}, [], "trainer: learning_rate is [0.1]; it takes float"),
        ({"trainer": {"max_steps": True}}, [], "trainer: max_steps is True; it takes int"),
        ({"trainer": {"report_to": "comet_ml"}}, [], "report_to names 'comet_ml', which is not installed"),
        ({"trainer": {"report_to": ["none", "paper"]}}, [], "report_to names"),
        ({"prepare": {"held_out": 500}}, [], "held_out is 500"),
        ({"prepare": {"held_out": 500, "streaming": True}}, [], "held_out is 500"),
        ({"prepare": {"num_proc": 2, "streaming": True}}, [], "leave out num_proc"),
        ({"prepare": {"streaming": True}, "trainer": {"max_steps": -1}}, [], "set max_steps"),
        ({"prepare": {"max_length": 64, "held_out": 0}, "trainer": {"eval_strategy": "epoch"}}, [], "is held out"),
    ],
)
def test_nothing_is_trained_by_a_wrong_recipe(
    section: dict[str, Any], changes: list[str], problem: str, stories: Path, tmp_path: Path, capsys: Any
) -> None:
    path = recipe(tmp_path, stories, {"kind": "eagle3"}, **section)
    assert main(["train", path, *changes]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(("packing", "count"), each_value([True, False], [1, 2, 3]))
def test_a_few_examples_are_enough(count: int, packing: bool, stories: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(stories.read_text(encoding="utf-8").splitlines()[:count]), encoding="utf-8")
    options = {"prepare": {"max_length": 600, "packing": packing}}  # the target has 512 positions
    directory, metrics = train(read_recipe(recipe(tmp_path, few, {"kind": "medusa", "num_heads": 2}, **options)))
    assert ("eval_acceptance_length" in metrics) == (count > 1 and not packing)
    assert (Path(directory) / "config.json").exists()


def test_examples_are_no_longer_than_the_target_has_positions(stories: Path, tmp_path: Path, caplog: Any) -> None:
    target, out = tmp_path / "target", tmp_path / "rows"
    shutil.copytree(TARGET, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    logging.getLogger("transformers").propagate = True
    assert main(["prepare", str(stories), str(out), "--target", str(target)]) == 0
    rows = datasets.load_from_disk(str(out))["train"]
    assert max(map(len, rows["input_ids"])) == 40
    assert "examples may have 2048 tokens, but the target has 40 positions" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--max-length 2", "--max-length is 2, but"),
        ("--held-out 500", "--held-out is 500, but"),
        ("--text-column story", "or name the text with --text-column\n"),
        ("--max-length 16 --too-long drop", "examples are longer than --max-length"),
    ],
)
def test_prepare_names_options_as_they_are_typed(
    options: str, problem: str, stories: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["prepare", str(stories), str(tmp_path / "rows"), "--target", TARGET, *options.split()]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--features rows/features", "--features rows/features lies in rows, which is written last"),
        ("--features rows", "--features rows lies in rows, which is written last"),
        ("--regenerate rows/new.jsonl", "--regenerate rows/new.jsonl lies in rows, which is written last"),
        ("--speculator ngram", "--speculator has no effect without --regenerate FILE.jsonl: add it"),
        ("--temperature 0", "--temperature has no effect without --regenerate FILE.jsonl: add it"),
        ("--endpoint-model m", "--endpoint-model has no effect without --endpoint URL: add it"),
        ("--layers", "--layers has no effect without --features DIR: add it"),
    ],
)
def test_prepare_says_at_once_what_cannot_come_out(
    options: str, problem: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    assert main(["prepare", "no-data", "rows", "--target", "no-target", *options.split()]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("place", ["no-such/new.jsonl", os.devnull])
def test_a_file_of_answers_that_cannot_be_continued_is_told_at_once(place: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "no-data", "rows", "--target", "no-target", "--regenerate", place])
    assert "argument --regenerate: " in capsys.readouterr().err


def test_prepared_data_are_not_prepared_again(stories: Path, tmp_path: Path, capsys: Any) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"input_ids": [[1]]})).save_to_disk(str(tmp_path / "rows"))
    assert main(["train", recipe(tmp_path, tmp_path / "rows", {"kind": "eagle3"}, prepare={"packing": True})]) == 1
    assert "prepared already" in capsys.readouterr().err


def test_the_lines_of_the_readme_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `prepare` writes is what `train` reads, and another target and data than the recipe's may be named."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {
        line.split()[1]: shlex.split(line, comments=True) for line in re.findall(r"^hf-spec \w+ .*$", readme, re.M)
    }
    chats = [[{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "No."}]] * 4
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in chats), encoding="utf-8")
    Path("examples").symlink_to(ROOT / "examples")
    prepare, train = ([word.replace("ORG/MODEL", TARGET) for word in lines[name]] for name in ("prepare", "train"))
    assert main([*prepare[1:], "--max-new-tokens", "16", "--held-out", "1"]) == 0
    few = {"max_steps": 1, "unroll_steps": 2, "use_cpu": True, "eval_max_new_tokens": 4, "eval_strategy": "no"}
    few |= {"save_strategy": "no", "load_best_model_at_end": False, "disable_tqdm": True, "logging_steps": 1}
    given = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    assert main([*train[1:], *given]) == 0
    output = Path(train[train.index("--output_dir") + 1])
    assert AutoModel.from_pretrained(output).config.speculators_model_type == "eagle3"


def test_the_recipe_for_a_laptop_is_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first-draft.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^hf-spec train (examples/laptop.yaml) --target \$TARGET$", page, re.M)
    recipe = read_recipe(ROOT / line, target=TARGET)
    assert (recipe["target"]["name"], recipe["data"]) == (TARGET, "prepared")
    arguments = training_arguments(recipe["trainer"], ["--output_dir", str(tmp_path)])
    assert arguments.num_train_epochs == 4 and "makes four passes" in page
    assert f"--draft {recipe['trainer']['output_dir']} " in page


@pytest.mark.parametrize("split", [True, False])
def test_a_dataset_that_was_saved_is_raw_until_it_is_prepared(split: bool, stories: Path, tmp_path: Path) -> None:
    raw = datasets.load_dataset("json", data_files=str(stories), split="train")
    (datasets.DatasetDict(train=raw) if split else raw).save_to_disk(str(tmp_path / "raw"))
    options = {"prepare": {"max_length": 64, "held_out": 2}}
    draft = {"kind": "medusa", "num_heads": 2}
    assert not is_prepared(str(tmp_path / "raw"))
    directory, metrics = train(read_recipe(recipe(tmp_path, tmp_path / "raw", draft, **options)))
    assert f"{len(raw) - 2} examples" in Path(directory, "README.md").read_text(encoding="utf-8")
    prepared(raw, AutoTokenizer.from_pretrained(TARGET), **options["prepare"]).save_to_disk(str(tmp_path / "rows"))
    assert is_prepared(str(tmp_path / "rows"))
    second = recipe(tmp_path, tmp_path / "rows", draft, trainer={"output_dir": str(tmp_path / "second")})
    assert train(read_recipe(second))[1]["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)


def test_prepared_data_of_another_tokenizer_are_refused(stories: Path, tmp_path: Path, capsys: Any) -> None:
    other = AutoTokenizer.from_pretrained(TARGET)
    other.add_tokens(["<extra>"])
    raw = datasets.load_dataset("json", data_files=str(stories), split="train")
    prepared(raw, other, max_length=64, held_out=2).save_to_disk(str(tmp_path / "rows"))
    assert main(["train", recipe(tmp_path, tmp_path / "rows", {"kind": "eagle3"})]) == 1
    assert "were prepared with another tokenizer" in capsys.readouterr().err and not (tmp_path / "draft").exists()


WITHOUT_EXTRA = """
import sys
sys.modules["datasets"] = sys.modules["peft"] = None
from hf_spec.cli import main
assert main(["prepare", "a", "b", "--target", "c"]) == main(["train", "recipe.yaml"]) == 1
main(["--help"])
"""


def test_only_these_commands_need_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, check=True)
    assert done.stderr.count('pip install "hf-spec[train]"') == 2
    assert "turn conversations or plain text" in done.stdout
