"""The command ``hf-spec``, called in process on small models."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from architectures import build
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_spec
from hf_spec import HybridSpeculator, SpeculationConfig, cli, demo
from hf_spec.cli import main
from hf_spec.cli.bench import _names
from hf_spec.cli.common import length_of, resume_hint, tree_of
from hf_spec.cli.demo import highlighted
from hf_spec.cli.loading import load_models, load_speculator, unloaded
from hf_spec.cli.messages import as_typed, showing_messages
from hf_spec.cli.training import RECIPE_HELP
from hf_spec.drafts.base import network_of
from hf_spec.metrics import RowStats
from hf_spec.progress import Progress, duration, working

COMMANDS = [add.__name__.removeprefix("add_") for add in cli.COMMANDS]
EAGLE = Path(__file__).parents[1] / "fixtures" / "goldens" / "eagle3_orig_a" / "checkpoint"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Save a random target, a draft that is its twin, and another draft, all with the demo family's tokenizer."""
    paths = {}
    for name, seed in {"target": 0, "twin": 0, "other": 1}.items():
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=2048,
            initializer_range=0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        paths[name] = str(tmp_path_factory.mktemp(name) / name)
        LlamaForCausalLM(config).save_pretrained(paths[name])
        AutoTokenizer.from_pretrained(demo.path()).save_pretrained(paths[name])
    return paths


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPT}, {"turns": ["Tell me a story."], "category": "chat"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


# -- demo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--small"], []])
def test_demo_compares_the_shipped_models(capsys, monkeypatch, options):
    sizes = {"hidden_size": 288, "intermediate_size": 512, "num_hidden_layers": 12}
    monkeypatch.setattr("hf_spec.cli.demo.SIZES", sizes)  # the real one takes most of a minute
    assert main(["demo", "--max-new-tokens", "8", *options]) == 0
    out = capsys.readouterr().out
    assert ("inflated in memory from 2.5 to " in out) is (not options)
    told, table = re.search(
        r"(.*) of up to 8 tokens, plain and with draft tokens:\n\n(.*?)\n\n", out, re.DOTALL
    ).groups()
    assert told.endswith("3 stories" if options else "A story")
    header, *lines = table.splitlines()
    assert header.split() == ["method", "τ", "x", "plain", "accepted", "same", "text"]
    drafts = [name.removeprefix("draft-") for name in demo.MODELS[1:]]
    methods = [f"{name} {shape}" for name in drafts for shape in ("chain", "dynamic tree")]
    assert [re.split("  +", line)[0] for line in lines] == ["plain", "ngram chain", *methods]
    assert all(line.endswith(" yes") for line in lines)
    assert "\nOnce upon a time, there was a little dog named Max." in out
    assert "Greedy text is the same as that of plain generate." in out


def test_demo_draws_a_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "MODELS", demo.MODELS[:2])
    assert main(["demo", "--small", "--max-new-tokens", "4", "--png", str(tmp_path / "demo.png")]) == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"The picture is in {tmp_path / 'demo.png'}." in capsys.readouterr().out


@pytest.mark.parametrize(("colour", "text"), [(False, "one[ two] three"), (True, "one\x1b[30;42m two\x1b[0m three")])
def test_accepted_guesses_stand_out(colour, text):
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    parts = [tokenizer(part, add_special_tokens=False).input_ids for part in ("one", " two", " three")]
    row = RowStats(
        tokens=[token for part in parts for token in part],
        drafted=[i == 1 for i, part in enumerate(parts) for _ in part],
    )
    assert highlighted(row, tokenizer, colour) == text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("he said, â€œLook!â€\x9d It", "he said, \u201cLook!\u201d It"),
        ("â€œLookâ€. It", '\u201cLook". It'),
        ("donâ€™t", "don\u2019t"),
        ("a naïve café, \u201cyes\u201d, 日本", "a naïve café, \u201cyes\u201d, 日本"),
    ],
)
def test_text_that_was_decoded_wrongly_is_mended(text, meant):
    assert demo.mended(text) == meant
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert highlighted(RowStats(tokens=ids, drafted=[False] * len(ids)), tokenizer, False) == demo.mended(
        tokenizer.decode(ids)
    )


# -- generate ---------------------------------------------------------------------------------------------------------


def plain_text(model: str, prompt: str, new: int, chat: bool = False) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat:
        prompt = f"<|user|>{prompt}<|end|><|assistant|>"
    inputs = tokenizer(prompt, return_tensors="pt")
    out = AutoModelForCausalLM.from_pretrained(model).generate(**inputs, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("speculator", ["ngram", "twin", "other"])
@pytest.mark.parametrize("chat", [False, True])
def test_generate_writes_the_text_and_then_the_figures(models, capsys, speculator, chat):
    options = ["--prompt", PROMPT, "--max-new-tokens", "9", "--tree", "dynamic", "--num-tree-tokens", "6"]
    draft = models.get(speculator, speculator)
    assert main(["generate", models["target"], "--speculator", draft, *options, *(["--chat"] if chat else [])]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == plain_text(models["target"], PROMPT, 9, chat).rstrip("\n")
    assert "gave 8 tokens, batch" in err


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_generate_reads_standard_input_up_to_its_last_newline(models, capsys, monkeypatch, end):
    """As UTF-8, with or without its mark at the beginning, whatever the code page of the machine is."""
    mark, prompt = "\ufeff" if end else "", f"{PROMPT}, Zo\xeb"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{mark}{prompt}{end}".encode()), "cp1252"))
    assert main(["generate", models["target"], "--speculator", "ngram", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(models["target"], prompt, 5).rstrip("\n")


def test_generate_ends_where_the_positions_of_the_target_do(tmp_path, capsys):
    sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 1, "bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(GPT2Config(vocab_size=2048, **sizes)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    tokenizer.save_pretrained(tmp_path)
    command = ["generate", str(tmp_path), "--speculator", "ngram", "--max-new-tokens", "99", "--prompt"]
    assert main([*command, PROMPT]) == 0
    assert f"gave {24 - len(tokenizer(PROMPT).input_ids)} tokens, batch" in capsys.readouterr().err
    assert main([*command, "a " * 40]) == 1
    assert re.search(r"the prompt has \d+ tokens, and the target has positions for 24; ", capsys.readouterr().err)


def test_what_is_no_utf_8_is_told_before_anything_is_loaded(capsys, monkeypatch):
    half = b"caf\xe9".decode(errors="surrogateescape")  # as Python takes it from a shell
    for options in (["generate", "--prompt", half], ["chat", "--system", half]):
        with pytest.raises(SystemExit, match="2"):
            main([options[0], "no-model", "--speculator", "ngram", *options[1:]])
        assert "'caf\\udce9' is not UTF-8; write it, or set your terminal, so" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(half))
    assert main(["generate", "no-model", "--speculator", "ngram"]) == 1
    assert "hf-spec: 'caf\\udce9' is not UTF-8" in capsys.readouterr().err


def test_left_out_the_best_at_hand_guesses(models, capsys, monkeypatch):
    """Twice: what the first call found for its target says nothing about another one."""
    for _ in range(2):
        assert main(["generate", models["target"], "--prompt", PROMPT, "--max-new-tokens", "9"]) == 0
        out, err = capsys.readouterr()
        assert out.rstrip("\n") == plain_text(models["target"], PROMPT, 9).rstrip("\n")
        assert "gave 9 tokens, batch" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n"))
    assert main(["chat", str(demo.path()), "--max-new-tokens", "4"]) == 0
    assert "SpeculationStats: " in capsys.readouterr().out


def test_a_seed_repeats_a_sampled_text(models, capsys):
    texts = []
    for seed in "112":
        options = ["--prompt", PROMPT, "--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12"]
        assert main(["generate", models["target"], "--speculator", models["other"], *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench_prints_tables_and_writes_both_files(models, prompts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "bench.json"), "--png", str(tmp_path / "bench.png")]
    options = ["--max-new-tokens", "8", "--num-speculative-tokens", "3", "--tree", "chain", "[[0],[1],[0,0]]"]
    drafts = ["--draft", models["twin"], models["other"]]
    assert main(["bench", models["target"], *drafts, "--prompts", prompts, *options, *files]) == 0
    names = ["twin chain", "twin static tree", "other chain", "other static tree"]
    methods = ["plain", "prompt lookup", "assisted: twin chain", "assisted: other chain", *names]
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert list(report["figures"]) == ["overall", "prompts", "chat"]
    assert all(list(figures) == methods for figures in report["figures"].values())
    assert all(one["differing_rows"] == 0 for one in report["figures"]["overall"].values())
    assert report["figures"]["overall"]["twin static tree"]["ratio_to_assisted"] > 0
    assert report["settings"]["contenders"]["other static tree"]["tree"] == [[0], [1], [0, 0]]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(out.count(f"\n{method}  ") == 3 for method in methods)


def test_bench_limits_prompts_and_leaves_baselines_out(models, prompts, capsys):
    options = ["--limit", "1", "--batch-size", "2", "--max-new-tokens", "4", "--warmup", "0", "--no-baselines"]
    assert main(["bench", models["target"], "--prompts", prompts, *options]) == 0
    assert "prompt lookup" not in capsys.readouterr().out


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space is left")


def test_bench_measures_a_memory_and_goes_on_where_a_file_of_rounds_ends(
    models, prompts, tmp_path, capsys, monkeypatch
):
    rounds = tmp_path / "rounds.jsonl"
    options = ["--prompts-per-category", "1", "--max-new-tokens", "4", "--warmup", "0", "--no-baselines"]
    call = ["bench", models["target"], "--prompts", prompts, *options, "--draft", "history", "--rounds", str(rounds)]
    assert main(call) == 0
    first, kept = capsys.readouterr().out, rounds.read_bytes()
    assert "history chain" in first
    assert main(call) == 0
    assert (capsys.readouterr().out, rounds.read_bytes()) == (first, kept)  # the same seconds: nothing was run
    with monkeypatch.context() as patch:  # pipes of Windows have no Greek letters
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
        assert main(call) == 0
        assert sys.stdout.buffer.getvalue().decode("cp1252") == first.replace("τ", r"\u03c4") != first
        patch.setattr(sys, "stdout", Full())
        assert main([*call, "--json", str(tmp_path / "bench.json")]) == 1
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["figures"]
    capsys.readouterr()
    assert main([*call, "--temperature", "1"]) == 1
    assert "measured with other settings (temperature was 0.0, not 1.0)" in capsys.readouterr().err


def test_a_draft_and_a_memory_are_measured_beside_each_alone(models, prompts, capsys):
    options = ["--prompts-per-category", "1", "--max-new-tokens", "4", "--warmup", "0", "--no-baselines"]
    drafts = [models["twin"], "history", f"history+{models['twin']}"]
    assert main(["bench", models["target"], "--prompts", prompts, *options, "--draft", *drafts]) == 0
    out = capsys.readouterr().out
    assert {"twin", "history", "history+twin"} <= set(re.findall(r"^\s*(\S+) chain\s", out, re.MULTILINE))
    assert main(["bench", models["target"], "--prompts", prompts, *options, "--draft", "history+ngram"]) == 1
    assert "needs a draft with weights" in capsys.readouterr().err


def test_plain_steps_have_a_name(models, capsys):
    options = ["--speculator", "plain", "--prompt", PROMPT, "--max-new-tokens", "9"]
    assert main(["generate", models["target"], *options]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(models["target"], PROMPT, 9, False).rstrip("\n")


@pytest.mark.parametrize("name", ["history", "history+mtp", "history+DRAFT"])
def test_what_a_name_stands_for(name, models):
    target = AutoModelForCausalLM.from_pretrained(models["target"])
    if name == "history+mtp":
        found = unloaded(name)
        assert isinstance(found, HybridSpeculator) and found.draft == "mtp"
        with pytest.raises(ValueError, match="mtp"):
            load_models(models["target"], [name], "float32", "cpu", lambda draft: [])
        return
    found = load_speculator(name.replace("DRAFT", models["twin"]), target, "float32")
    memory = found.history if isinstance(found, HybridSpeculator) else found
    assert isinstance(found, HybridSpeculator) is (name != "history") and memory is not None
    assert unloaded("ngram") == "ngram"


def test_a_draft_has_the_dtype_of_its_target(models, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(models["target"], dtype=torch.bfloat16)
    target.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(models["target"]).save_pretrained(tmp_path)
    for given, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        _, _, found = load_models(str(tmp_path), [models["other"]], given, "cpu", lambda draft: [])
        assert network_of(found[models["other"]]).dtype == dtype  # which is stored in float32


def test_bench_searches_trees_and_writes_the_fastest(models, prompts, tmp_path, capsys):
    path = tmp_path / "tree.json"
    options = ["--prompts", prompts, "--max-new-tokens", "8", "--no-baselines", "--warmup", "0"]
    search = ["--search-tree", "2", "5", "--num-speculative-tokens", "3", "--save-tree", str(path)]
    assert main(["bench", models["target"], "--draft", models["twin"], *options, *search]) == 0
    out = capsys.readouterr().out
    assert "twin tree of 2: expected τ 3.00, measured " in out  # a draft that is always right
    assert "twin tree of 3: expected τ 4.00, measured " in out
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert tree in ([[0], [0, 0]], [[0], [0, 0], [0, 0, 0]])
    assert tree_of(str(path)) == tree
    assert main(["bench", models["target"], "--draft", models["twin"], *options, "--tree", str(path)]) == 0
    assert "twin static tree" in capsys.readouterr().out


def test_bench_adds_its_figures_to_a_model_card(models, prompts, tmp_path, capsys):
    draft = shutil.copytree(models["twin"], tmp_path / "twin")
    card = draft / "README.md"
    other = "{task: {type: a}, dataset: {type: gsm8k, name: GSM8K}, metrics: [{type: accuracy, value: 0.5}]}"
    head = f"base_model: org/target\nmodel-index:\n- name: twin\n  results:\n  - {other}\n"
    card.write_text(f"---\n{head}---\n\n# A draft\n\n## Training\n\nLong.\n", encoding="utf-8")
    options = ["--prompts", prompts, "--max-new-tokens", "8", "--no-baselines", "--warmup", "0", "--card", str(card)]
    call = ["bench", models["target"], "--draft", str(draft), "--num-speculative-tokens", "3", *options]
    assert main(call) == main([*call, "--tree", "[[0],[0,0],[0,0,0]]"]) == 0
    content = card.read_text(encoding="utf-8")
    assert content.count("## Benchmarks") == 1 and "## Training\n\nLong." in content
    for category in ("overall", "prompts", "chat"):
        assert re.search(rf"^\| {category} \| [12] \| twin static tree \| 3.50 \| 100% \|", content, re.MULTILINE)
    data = ModelCard.load(card).data
    assert data.base_model == "org/target" and data.model_name == "twin"
    assert [(one.dataset_name, one.metric_type) for one in data.eval_results] == [
        ("GSM8K", "accuracy"),
        *((category, "mean_accepted_length") for category in ("overall", "prompts", "chat")),
    ]
    assert all(one.metric_value == pytest.approx(3.5) for one in data.eval_results[1:])
    assert main([*call, "--draft", "ngram", models["twin"]]) == 1
    assert main([*call, "--draft", models["twin"]]) == 1  # which is not the draft beside this card
    assert card.read_text(encoding="utf-8") == content
    assert f"is not the card of {models['twin']}, which is measured" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*call, "--card", str(tmp_path / "nothing")])


# -- inspect and convert ----------------------------------------------------------------------------------------------


def test_convert_writes_what_inspect_describes(tmp_path, capsys):
    out = str(tmp_path / "converted")
    assert main(["convert", str(EAGLE), out, "--verifier", "org/target"]) == 0
    assert "org/target" in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert "eagle3" in capsys.readouterr().out
    assert main(["convert", str(EAGLE), out]) == 1
    assert "exists; choose another directory" in capsys.readouterr().err


def test_convert_says_what_becomes_of_a_native_layer(tmp_path, capsys):
    layer = EAGLE.parents[1] / "mtp_qwen3_next_native" / "checkpoint"
    assert main(["convert", str(layer), str(tmp_path / "native"), "--to", "native"]) == 0
    assert "put it next to the target's files" in capsys.readouterr().out
    assert (tmp_path / "native" / "mtp.safetensors").exists()


# -- errors -----------------------------------------------------------------------------------------------------------


def test_tree_and_length_are_read():
    assert [tree_of(text) for text in ("chain", "sampled", "[[0],[0,0]]")] == ["chain", "sampled", [[0], [0, 0]]]
    assert [length_of(text) for text in ("7", "auto")] == [7, "auto"]
    assert SpeculationConfig(tree=tree_of("[[0],[0,0]]")).tree == [[0], [0, 0]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tree", "bush"], "'bush' is not chain, dynamic, sampled, a list"),
        (["--tree", "[0]"], "is not chain"),
        (["--tree", "[[0]"], "is not chain"),
        (["--tree", "[[0,0]]"], "the tree has the path (0, 0) without (0,), which leads to it: add (0,), for each"),
        (
            ["--tree", "nowhere.json"],
            "the tree 'nowhere.json' cannot be read (No such file or directory); name",
        ),
        (["--num-speculative-tokens", "0"], "neither a whole number of at least 1 nor auto"),
        (["--limit", "0"], "--limit/--prompts-per-category: '0' is not a whole number of at least 1"),
        (["--threads", "0"], "--threads: '0' is not a whole number of at least 1"),
        (["--repeats", "0"], "--repeats: '0' is not a whole number of at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens: '1' is not a whole number of at least 2"),
        (["--search-tree", "4", "0"], "--search-tree: '0' is not a whole number of at least 1"),
        (["--temperature", "-1"], "--temperature: '-1' is not a temperature"),
        (["--temperature", "nan"], "--temperature: 'nan' is not a temperature"),
        (["--temperature", "1e-40"], "--temperature: '1e-40' is not a temperature: 0, or a number from 1e-30 on"),
        (["--seed", "1.5"], "--seed: '1.5' is not a seed"),
        (["--seed", str(1 << 63)], f"--seed: '{1 << 63}' is not a seed: a whole number of at most 63 bits"),
        (["--json", "/no/such/directory/bench.json"], "/no/such/directory is not a directory"),
        (["--json", "."], "'.' is a directory; name a file in it"),
        (["--rounds", os.devnull], f"'{os.devnull}' is a pipe or a device, which keeps nothing; name a file"),
        (["--png", "picture.foo"], "'picture.foo' has to end with .png, .pdf or .svg"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(options, problem, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "no-model", "--prompts", "no-file", *options])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("mistake", ["--no-such", "--max-tokens 3", "extra"])
def test_an_option_that_is_unknown_is_told_with_those_of_its_command(mistake, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "no-model", "--speculator", "ngram", *mistake.split()])
    err = capsys.readouterr().err
    assert err.startswith("usage: hf-spec generate [-h] [--speculator X]")
    assert err.endswith(f"hf-spec generate: error: unrecognized arguments: {mistake}\n")


def test_files_that_may_not_be_written_are_told_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "old.json").touch()
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # root may write anywhere
    for name, place in {"new.json": tmp_path, "old.json": tmp_path / "old.json"}.items():
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "no-model", "--prompts", "no-file", "--json", str(tmp_path / name)])
        assert f"you may not write to {place}; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("bench no-model --prompts {file} --json {file}", "--json {file} would write over the file that --prompts re"),
        ("bench no-model --prompts {file} --json {link}", "--json {link} would write over the file that --prompts re"),
        (
            "bench no-model --prompts {file} --rounds {file}",
            "--rounds {file} would write over the file that --prompts",
        ),
        ("bench no-model --prompts {file} --save-tree {file}", "--save-tree {file} would write over"),
        ("bench no-model --prompts x --draft y --card {file} --json {file}", "over the file that --card reads: name"),
        ("bench no-model --prompts x --rounds {file} --json {file}", "over the file that --rounds writes: name"),
        (
            "generate no-model --prompts {file} --out {file}",
            "--out {file} would write over the file that --prompts re",
        ),
        (
            "generate no-model --speculator history --prompts {file} --out x --history-file {file}",
            "--history-file {file} would write over the file that --prompts reads",
        ),
    ],
)
def test_no_output_is_written_over_an_input(tmp_path, capsys, command, problem):
    places = {"file": tmp_path / "file.jsonl", "link": tmp_path / "link.jsonl"}
    places["file"].write_text('{"prompt": "a"}\n', encoding="utf-8")
    places["link"].symlink_to(places["file"])
    assert main(command.format(**places).split()) == 1
    assert problem.format(**places) in capsys.readouterr().err
    assert places["file"].read_text(encoding="utf-8") == '{"prompt": "a"}\n'


def test_a_result_that_cannot_be_written_loses_no_other_one(models, prompts, tmp_path, capsys):
    """No half of it is left either."""
    resource = pytest.importorskip("resource")
    files = {name: tmp_path / f"{name}.json" for name in ("json", "save-tree")}
    options = ["--max-new-tokens", "4", "--no-baselines", "--warmup", "0", "--search-tree", "2", "--prompts", prompts]
    options += [word for name, path in files.items() for word in (f"--{name}", str(path))]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert main(["bench", models["target"], "--draft", models["twin"], *options]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr()
    assert f"hf-spec: {files['json']} could not be written (File too large), and is lost" in said.err
    assert not files["json"].exists()
    assert "twin tree of 2" in said.out and tree_of(str(files["save-tree"])) == [[0], [0, 0]]


@pytest.mark.parametrize(
    ("drafts", "names"),
    [
        (["."], ["here"]),
        (["history+."], ["history+here"]),
        ([".."], ["above"]),
        (["ngram", "org/draft", "history+org/draft"], ["ngram", "draft", "history+draft"]),
        (["a/draft", "b/draft"], ["a/draft", "b/draft"]),
    ],
)
def test_drafts_are_named_by_their_directories(drafts, names, tmp_path, monkeypatch):
    place = tmp_path / "above" / "here"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    assert _names(drafts) == names


@pytest.mark.parametrize("name", ["", " ", "history+"])
@pytest.mark.parametrize(
    "command",
    [
        "generate no-model --speculator",
        "chat no-model --speculator",
        "serve no-model --speculator",
        "bench no-model --prompts no-file --draft",
        "doctor no-model --prompts no-file --speculator",
        "prepare no-data out --target no-model --speculator",
    ],
)
def test_a_draft_has_a_name(command, name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), name])
    assert f"{name!r} names no draft: write ngram, history, " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch-size", "--max-length", "--max-new-tokens", "--num-proc", "--threads"])
def test_prepare_counts_from_one(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "no-data", "out", "--target", "no-model", option, "0"])
    assert f"{option}: '0' is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("bench {target} --prompts missing.jsonl", "missing.jsonl"),
        ("bench {target} --prompts {bad}", "line 2: a prompt is"),
        ("bench {target} --prompts {latin}", "latin, line 2: 'utf-8' codec can't decode"),
        ("bench {target} --prompts {prompts} --device cuda:7", "--device cuda:7: this machine has"),
        ("generate {target} --speculator ngram --prompt x --device gpu", "write cpu, cuda, cuda:1, ..., or auto"),
        ("bench {target} --prompts {prompts} --save-tree {empty}/tree", "what --search-tree finds; add it"),
        (
            "generate {target} --speculator ngram --prompt x --num-tree-tokens 5",
            "--num-tree-tokens is for a tree that grows with each text, and this is a chain: add --tree dynamic, or",
        ),
        ("generate {target} --speculator ngram --prompt x --tree [[0]] --tree-topk 5", "and this is a static tree: a"),
        ("bench {target} --prompts {prompts} --num-tree-tokens 5", "--num-tree-tokens is for a tree that grows with"),
        ("bench {target} --prompts {prompts} --search-tree 4", "does not rank draft tokens"),
        ("bench {target} --prompts {prompts} --search-tree 4 --tree dynamic", "--tree names them: pass one of them"),
        ("bench {target} --prompts {prompts} --card {card}", "the model card {card} cannot be read"),
        ("generate {adapter} --prompt x", "'{adapter}' holds an adapter of PEFT and no model: merge it"),
        ("bench {adapter} --prompts {prompts}", "'{adapter}' holds an adapter of PEFT and no model: merge it"),
        ("bench {target} --prompts {prompts} --draft nowhere/draft", "no draft can be read at 'nowhere/draft'"),
        ("generate {target} --speculator /nowhere --prompt x", "no draft can be read at '/nowhere'"),
        ("generate {target} --speculator {empty} --prompt x", "no draft can be read at"),
        ("generate {target} --speculator {eagle} --prompt x", "made for another target"),
        ("generate {empty} --speculator ngram --prompt x", "empty"),
        ("generate {target} --speculator ngram --prompt=", "the prompt is empty"),
        ("inspect {target}", "is a language model by its config (LlamaForCausalLM), and none of the drafts"),
        ("convert {target} {empty}", "A language model drafts as it is for larger ones of its tokenizer: pass it"),
        ("generate nowhere/model --speculator ngram --prompt x", "the target 'nowhere/model' is not found: there is"),
        ("generate nowhere/at/all --speculator ngram --prompt x", "the target 'nowhere/at/all' is not found: there"),
        ("bench nowhere/model --prompts {prompts}", "the target 'nowhere/model' is not found: there is no such"),
        ("prepare {prompts} {empty} --target nowhere/model", "the target 'nowhere/model' is not found: there is"),
        (
            "convert {eagle} {empty} --self-contained nowhere/model",
            "the target 'nowhere/model' is not found: there is",
        ),
        ("generate {target} --speculator nowhere/draft --prompt x", "'nowhere/draft' is not found: there is no such"),
        ("inspect nowhere/draft", "'nowhere/draft' is not found: there is no such directory, and it was not downl"),
        ("convert {eagle} {empty} --verifier org/not!", "verifier is 'org/not!', which is neither a name on the Hub"),
        ("generate {demo} --speculator ngram --prompt x", "is a draft, which drafts for a language model: pass it"),
        ("prepare {prompts} {empty} --target {demo}", "is a draft, which drafts for a language model: pass it"),
        ("generate {bad} --speculator ngram --prompt x", "bad' is a file; pass the directory of a model"),
        ("generate {target} --speculator {bad} --prompt x", "bad' is a file; pass the directory of a model"),
        ("inspect {bad}", "bad' is a file; pass the directory of a model"),
        ("generate {cut} --speculator ngram --prompt x", "a weight file of the target '{cut}' is cut off or damaged"),
        (
            "convert {eagle} {empty} --self-contained {cut}",
            "a weight file of the target '{cut}' is cut off or damaged",
        ),
        ("generate {mute} --speculator ngram --prompt x", "no tokenizer can be read at the target '{mute}'; copy "),
        ("prepare {empty} out --target {target}", "no data can be read at '{empty}': "),
        ("prepare {target} out --target {target}", "no data can be read at '{target}': "),
        ("train {empty}", "the recipe '{empty}' cannot be read (Is a directory); name"),
        ("train nowhere.yaml", "the recipe 'nowhere.yaml' cannot be read (No such file"),
        ("train {latin}", "latin is no YAML: 'utf-8' codec can't decode"),
        ("prepare {prompts} {empty} --target {mute}", "no tokenizer can be read at the target '{mute}'; copy "),
    ],
)
def test_errors_are_one_message_and_no_traceback(models, prompts, tmp_path, capsys, command, problem):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").write_text('{"prompt": "a"}\n{"prompt": 1}', encoding="utf-8")
    (tmp_path / "card").write_text("---\nlicense: [a\n---\n", encoding="utf-8")
    (tmp_path / "latin").write_bytes('{"prompt": "a"}\n{"prompt": "é"}'.encode("latin-1"))
    places = {"target": models["target"], "prompts": prompts, "eagle": EAGLE, "demo": demo.path("draft-eagle3")}
    places |= {name: tmp_path / name for name in ("empty", "bad", "card", "latin", "cut", "mute", "adapter")}
    places["adapter"].mkdir()
    (places["adapter"] / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    for name in ("cut", "mute"):
        shutil.copytree(models["target"], places[name])
    os.truncate(places["cut"] / "model.safetensors", 1000)
    (places["mute"] / "tokenizer.json").unlink()
    (places["mute"] / "model.safetensors").unlink()  # the tokenizer is looked at before
    argv = [part.format(**places) for part in command.split()]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "hf-spec: " in err
    assert problem.format(**places) in err
    with pytest.raises((ValueError, OSError)):
        main(["--traceback", *argv])


@pytest.mark.parametrize(
    "command", ["generate {target} --prompt x --speculator", "bench {target} --prompts {prompts} --draft"]
)
@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("/nowhere", "no draft can be read at '/nowhere'"),
        (str(EAGLE), "made for another target"),
        (str(demo.path("draft-eagle3")), "made for another target"),
        ("ngram --tree sampled", "use --tree dynamic"),
    ],
)
def test_a_wrong_draft_is_told_before_the_target_is_read(models, prompts, tmp_path, capsys, command, draft, problem):
    """The target has no weights at all here."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((Path(models["target"]) / file).read_bytes())
    assert main([*command.format(target=tmp_path, prompts=prompts).split(), *draft.split()]) == 1
    assert problem in capsys.readouterr().err
    assert main([*command.format(target=tmp_path, prompts=prompts).split(), models["twin"]]) == 1
    assert "model.safetensors" in capsys.readouterr().err


def test_what_ranks_no_tokens_is_told_before_the_target_is_read(models, prompts, tmp_path, capsys):
    """The target has no weights at all here."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((Path(models["target"]) / file).read_bytes())
    for draft in ("ngram", "history", "plain"):
        assert main(["bench", str(tmp_path), "--prompts", prompts, "--draft", draft, "--search-tree"]) == 1
        assert "does not rank draft tokens" in capsys.readouterr().err


def test_inspect_counts_small_drafts_too(capsys):
    assert main(["inspect", str(EAGLE)]) == 0
    assert re.search(r" [1-9]\d*\.\d k values ", capsys.readouterr().out)
    assert main(["inspect", str(demo.path("draft-eagle3"))]) == 0
    assert re.search(r" [1-9]\d*\.\d [kM] values ", capsys.readouterr().out)


def test_convert_writes_in_what_a_draft_borrows(tmp_path, capsys):
    assert (
        main(["convert", str(demo.path("draft-mtp")), str(tmp_path / "whole"), "--self-contained", str(demo.path())])
        == 0
    )
    assert re.search("from target +nothing", capsys.readouterr().out)
    assert main(["convert", str(demo.path("draft-mtp")), str(tmp_path / "borrowing")]) == 0
    assert re.search("from target +.*lm_head", capsys.readouterr().out)


def test_layouts_are_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(EAGLE), "out", "--to", "ggml"])
    assert "'ggml' is not a layout; choose from speculators, " in capsys.readouterr().err


def test_the_recipe_in_the_help_is_one(tmp_path):
    from hf_spec.training.recipe import read_recipe

    lines = [line for line in RECIPE_HELP.splitlines() if line.startswith("  ")]
    (tmp_path / "recipe.yaml").write_text("\n".join(line[2:] for line in lines), encoding="utf-8")
    assert set(yaml.safe_load("\n".join(line[2:] for line in lines))) == {"target", "draft", "data", "trainer"}
    assert read_recipe(tmp_path / "recipe.yaml")["draft"] == {"kind": "eagle3"}


# -- the process ------------------------------------------------------------------------------------------------------

# transformers imports torchao wherever that is installed, and torchao logs to stderr while it is imported: hide it.
COMMAND = "import sys\nsys.modules['torchao'] = None\nsys.argv[0] = 'hf-spec'\nfrom hf_spec.cli import main\n"


def process(code: str, *argv: str, **options) -> subprocess.Popen:
    """Start ``hf-spec`` as its script does, with ``code`` around the call of ``main``."""
    where = {"PYTHONPATH": str(Path(hf_spec.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", COMMAND + code, *argv]
    return subprocess.Popen(call, text=True, stderr=subprocess.PIPE, env=os.environ | where, **options)


IMPORTED = """
try:
    main()
finally:
    print(*(name for name in ("torch", "transformers", "numpy") if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv", ["--help", "--version", *(f"{name} --help" for name in COMMANDS), "bench x --limit 0"]
)
def test_help_and_mistakes_import_nothing_that_takes_long(argv):
    running = process(IMPORTED, *argv.split(), stdout=subprocess.PIPE)
    out, err = running.communicate(timeout=60)
    assert err.splitlines()[-1] == "", err
    assert running.returncode == (2 if "--limit" in argv else 0)
    assert (f"hf-spec {hf_spec.__version__}\n" == out) is (argv == "--version")
    assert "docs/" not in out and "examples/" not in out  # which the wheel does not have


def test_submodules_are_there_after_an_import_of_the_package():
    names = "hf_spec.doctor.diagnose, hf_spec.training.DraftTrainer, hf_spec.bench.run_bench, hf_spec.demo.path"
    subprocess.run([sys.executable, "-c", f"import hf_spec; assert all(map(callable, ({names})))"], check=True)


def test_the_module_is_the_command():
    where = {"PYTHONPATH": str(Path(hf_spec.__file__).parents[1]), "PYTHONPROFILEIMPORTTIME": "1"}
    call = [sys.executable, "-m", "hf_spec", "--version"]
    done = subprocess.run(call, text=True, capture_output=True, env=os.environ | where, timeout=60)
    assert done.stdout == f"hf-spec {hf_spec.__version__}\n"
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "hf_spec.cli" in imported and not imported & {"torch", "transformers", "numpy"}


def test_public_names_are_there_in_the_process_of_the_command():
    code = "import hf_spec\nassert 'torch' not in sys.modules\nassert not hasattr(hf_spec, 'nothing')\n"
    code += "assert hf_spec.SpeculationConfig(tree='dynamic').tree in hf_spec.pure.__doc__ + 'dynamic'"
    running = process(code, stdout=subprocess.PIPE)
    assert running.communicate(timeout=60) == ("", "")
    assert running.returncode == 0


@pytest.mark.parametrize("argv", [["--help"], ["inspect", str(EAGLE)]])
def test_a_reader_that_goes_away_ends_the_command_without_a_traceback(argv):
    """What is left in the buffer is written when the process ends, too."""
    reading, writing = os.pipe()
    os.close(reading)
    running = process("sys.exit(main())", *argv, stdout=writing)
    os.close(writing)
    assert running.communicate(timeout=60)[1] == ""
    assert running.returncode in ((0, 141) if argv == ["--help"] else (141,))  # argparse may not mind


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["--help"], ["inspect", str(EAGLE)]])
def test_output_to_a_full_disk_is_told_without_a_traceback(argv, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # else argparse loses the help without a word
    with open("/dev/full", "w") as full:
        running = process("sys.exit(main())", *argv, stdout=full)
    expected = "hf-spec: the output could not be written, or not all of it: No space left on device\n"
    assert running.communicate(timeout=60)[1] == expected
    assert running.returncode == 1


@pytest.mark.parametrize("argv", [["inspect", str(EAGLE)], ["generate", "no-model"]])
def test_streams_that_are_closed_end_no_command(argv):
    """Python has None for streams that the shell closes, as by >&-."""
    code = "sys.stdin = sys.stdout = None; os.close(0); os.close(1); sys.exit(main())"
    running = process(f"import os; {code}", *argv, stdout=subprocess.PIPE)
    err = running.communicate(timeout=60)[1]
    assert (running.returncode, err) == (0, "") if argv[0] == "inspect" else "the prompt is empty" in err


def test_an_interrupt_while_importing_is_no_traceback():
    code = """
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.exit(main())
"""
    running = process(code, "inspect", str(EAGLE), stdout=subprocess.PIPE)
    assert running.communicate(timeout=60) == ("", "")
    assert running.returncode == 130


def test_progress_bars_are_for_terminals(models, prompts):
    argv = [
        "bench",
        models["target"],
        "--prompts",
        prompts,
        "--max-new-tokens",
        "2",
        "--no-baselines",
        "--warmup",
        "0",
        "--no-pack",
    ]
    running = process("sys.exit(main())", *argv, stdout=subprocess.PIPE)
    assert running.communicate(timeout=120)[1] == ""
    assert running.returncode == 0


# -- what is told while a command runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("leave them out with cut_answers='drop'", "leave them out with --cut-answers drop"),
        ("max_length is 2, but", "--max-length is 2, but"),
        ("or name the text with text_column=", "or name the text with --text-column"),
        ('set end_of_text=True, or tree="dynamic"', "set --end-of-text, or --tree dynamic"),
        ("use tree='dynamic'", "use --tree dynamic"),
        ("set batch_size=4.", "set --batch-size 4."),
        ("a tree of guesses", "a tree of guesses"),
        ("SpeculationConfig(tree='dynamic')", "SpeculationConfig(tree='dynamic')"),
        ("the field max_length_of and my_max_length", "the field max_length_of and my_max_length"),
        ("--max-length and 'max_length'", "--max-length and 'max_length'"),
        ("a tree==2", "a tree==2"),
    ],
)
def test_messages_are_written_as_options_are_typed(message, typed):
    names = ("cut_answers", "max_length", "text_column", "end_of_text", "tree", "batch_size", "length")
    assert as_typed(message, {name: f"--{name.replace('_', '-')}" for name in names}) == typed


def test_warnings_name_options_as_they_are_typed_and_stand_above_a_bar(tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    asked = [[{"role": "user", "content": f"Tell me of {what}."}] for what in ("a dog", "the sea")]
    data.write_text("\n".join(json.dumps({"messages": one}) for one in asked), encoding="utf-8")
    call = ["prepare", str(data), str(tmp_path / "rows"), "--target", str(demo.path()), "--max-new-tokens", "4"]
    assert main([*call, "--regenerate", str(tmp_path / "answers.jsonl"), "--temperature", "0"]) == 0
    err = capsys.readouterr().err
    assert err.count("were cut off by --max-new-tokens") == 1 and "leave them out with --cut-answers drop" in err
    assert logging.getLogger("hf_spec").handlers == []


def test_without_a_terminal_a_line_says_how_far_it_is(capsys):
    """Only while something goes on, and not for commands that wait for others."""
    for command, silence in (("doctor", 60.0), ("chat", 0.01), ("serve", 0.01)):
        with showing_messages(argparse.Namespace(command=command, options={}), silence):
            time.sleep(0.1)
        assert capsys.readouterr().err == ""
    with showing_messages(argparse.Namespace(command="doctor", options={}), 0.01):
        with Progress("Answering", 4, "prompts", shown=False, done=1) as bar:
            bar.update()
            time.sleep(0.2)
        time.sleep(0.1)
    *others, last = capsys.readouterr().err.splitlines()
    expected = r"hf-spec doctor is at work for \d s: Answering, 2 of 4 prompts, about \d s more"
    assert any(re.match(expected, line) for line in others)
    assert re.fullmatch(r"hf-spec doctor is at work for \d s", last)


def test_an_interrupted_command_says_where_it_goes_on(models, prompts, tmp_path, capsys, monkeypatch):
    """Only if there is something to go on with."""
    raw, out, rounds = tmp_path / "raw.jsonl", tmp_path / "answers.jsonl", tmp_path / "rounds.jsonl"
    raw.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    files = ["--prompts", str(raw), "--max-new-tokens", "3"]

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupt)
    commands = {out: ["generate", models["target"], "--out", str(out)]}
    commands |= {rounds: ["bench", models["target"], "--rounds", str(rounds)]}
    for place, command in commands.items():
        place.touch()
        assert main([*command, *files]) == 130
        assert f"hf-spec: stopped. The same command resumes after what {place} holds\n" in capsys.readouterr().err
    assert resume_hint("out")(argparse.Namespace(out=tmp_path / "no.jsonl")) == ""
    assert main(["generate", models["target"], "--prompt", PROMPT]) == 130
    assert "goes on" not in capsys.readouterr().err


def test_a_bar_without_an_end_counts():
    with Progress("Regenerating", None, "conversations", shown=False) as bar:
        bar.update(3)
        assert str(bar) == "Regenerating, 3 conversations" and working == [bar]
    assert working == []
    assert [duration(one) for one in (0.4, 89, 90, 3600, 7200)] == ["0 s", "89 s", "2 min", "60 min", "2.0 h"]


def test_prompts_that_are_no_json_are_told_with_their_place(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    for text, place in (('{"prompt": \n', "line 1, column 11"), ('{"prompt": "a"}\n\n[}\r\n', "line 3, column 2")):
        file.write_text(text, encoding="utf-8")
        assert main(["bench", "no-model", "--prompts", str(file)]) == 1
        err = capsys.readouterr().err
        assert f"{file}, {place} is no JSON (Expecting value); write one object per line" in err
    assert main(["bench", "no-model", "--prompts", str(tmp_path / "no.jsonl")]) == 1
    err = capsys.readouterr().err
    assert "no.jsonl' cannot be read (No such file or directory); name a file" in err and "Errno" not in err


def test_gguf_is_told_how_it_is_read(models, tmp_path, capsys):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model-Q8_0.gguf").write_bytes(b"GGUF")
    read = f"from_pretrained('{folder}', gguf_file='model-Q8_0.gguf')"
    for draft in (folder, folder / "model-Q8_0.gguf"):
        assert main(["generate", models["target"], "--speculator", str(draft), "--prompt", "x"]) == 1
        assert read in capsys.readouterr().err
    assert main(["generate", str(folder / "model-Q8_0.gguf"), "--prompt", "x"]) == 1
    assert read in capsys.readouterr().err


def test_a_draft_that_will_be_refused_is_not_called_harmless_before(tmp_path, caplog):
    """Another tokenizer and another vocabulary: what is wrong with it is one error."""
    draft = tmp_path / "draft"
    shutil.copytree(demo.path("draft-vanilla"), draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(tokens, reversed(tokens.values()), strict=True))
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    options = {"max_new_tokens": 2, "do_sample": False}
    resized = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    resized.resize_token_embeddings(4096)
    with pytest.raises(ValueError, match="vocab"):
        target.generate(torch.ones(1, 3, dtype=torch.long), speculator=resized, **options)
    assert "The text is still the target's" not in caplog.text
    fitting = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    target.generate(torch.ones(1, 3, dtype=torch.long), speculator=fitting, **options)
    assert "The text is still the target's" in caplog.text


def test_a_target_that_reads_images_takes_text_alone(tmp_path, capsys):
    model = build("vl:llava", vocab_size=2048)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo.path()).save_pretrained(tmp_path)
    options = ["--prompt", PROMPT, "--max-new-tokens", "4", "--dtype", "float32", "--no-pack"]
    assert main(["generate", str(tmp_path), *options]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert capsys.readouterr().out.strip() == tokenizer.decode(written).strip()
