"""The command ``hf-spec``, called in process on small models."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_spec import SpeculationConfig, demo
from hf_spec.cli import highlighted, length_of, main, tree_of
from hf_spec.metrics import RowStats

EAGLE = Path(__file__).parent / "fixtures" / "goldens" / "eagle3_orig_a" / "checkpoint"
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


def test_demo_compares_the_shipped_models(capsys):
    assert main(["demo", "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    header, *lines = out.split("\n\n")[1].splitlines()
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
    assert main(["demo", "--max-new-tokens", "4", "--png", str(tmp_path / "demo.png")]) == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"The picture is in {tmp_path / 'demo.png'}." in capsys.readouterr().out


@pytest.mark.parametrize(("colour", "text"), [(False, "one[ two] three"), (True, "one\x1b[30;42m two\x1b[0m three")])
def test_accepted_guesses_stand_out(colour, text):
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    parts = [tokenizer(part, add_special_tokens=False).input_ids for part in ("one", " two", " three")]
    row = RowStats(
        tokens=[token for part in parts for token in part],
        guessed=[i == 1 for i, part in enumerate(parts) for _ in part],
    )
    assert highlighted(row, tokenizer, colour) == text


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
    options = ["--prompt", PROMPT, "--max-new-tokens", "9", "--tree", "dynamic", "--tree-nodes", "6"]
    draft = models.get(speculator, speculator)
    assert main(["generate", models["target"], "--speculator", draft, *options, *(["--chat"] if chat else [])]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == plain_text(models["target"], PROMPT, 9, chat).rstrip("\n")
    assert "SpeculationStats: 8 tokens" in err


def test_generate_reads_standard_input(models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["generate", models["target"], "--speculator", "ngram", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(models["target"], PROMPT, 5).rstrip("\n")


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


def test_bench_adds_its_figures_to_a_model_card(models, prompts, tmp_path):
    card = tmp_path / "draft" / "README.md"
    card.parent.mkdir()
    card.write_text("---\nbase_model: org/target\n---\n\n# A draft\n\n## Training\n\nLong.\n", encoding="utf-8")
    options = ["--prompts", prompts, "--max-new-tokens", "8", "--no-baselines", "--warmup", "0", "--card", str(card)]
    call = ["bench", models["target"], "--draft", models["twin"], "--num-speculative-tokens", "3", *options]
    assert main(call) == main([*call, "--tree", "[[0],[0,0],[0,0,0]]"]) == 0
    content = card.read_text(encoding="utf-8")
    assert content.count("## Benchmarks") == 1 and "## Training\n\nLong." in content
    for category in ("overall", "prompts", "chat"):
        assert re.search(rf"^\| {category} \| [12] \| twin static tree \| 3.50 \| 100% \|", content, re.MULTILINE)
    data = ModelCard.load(card).data
    assert data.base_model == "org/target" and data.model_name == "draft"
    assert [(one.dataset_name, one.metric_type) for one in data.eval_results] == [
        (category, "mean_accepted_length") for category in ("overall", "prompts", "chat")
    ]
    assert all(one.metric_value == pytest.approx(3.5) for one in data.eval_results)
    assert main([*call, "--draft", "ngram", models["twin"]]) == 1
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
    assert "put it beside the target's files" in capsys.readouterr().out
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
        (["--tree", "nowhere.json"], "'nowhere.json' is not chain"),
        (["--num-speculative-tokens", "0"], "neither a whole number of at least 1 nor auto"),
        (["--json", "/no/such/directory/bench.json"], "/no/such/directory is not a directory"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(options, problem, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "no-model", "--prompts", "no-file", *options])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("bench {target} --prompts missing.jsonl", "missing.jsonl"),
        ("bench {target} --prompts {bad}", "line 2: a prompt is"),
        ("bench {target} --prompts {prompts} --repeats 0", "repeats must be at least 1"),
        ("bench {target} --prompts {prompts} --search-tree 4 0", "at least 1 guess, got --search-tree 0"),
        ("bench {target} --prompts {prompts} --save-tree {empty}/tree", "what --search-tree finds; add it"),
        ("bench {target} --prompts {prompts} --search-tree 4", "does not rank its guesses"),
        ("bench {target} --prompts {prompts} --draft nowhere/draft", "no draft can be read at 'nowhere/draft'"),
        ("generate {target} --speculator /nowhere --prompt x", "no draft can be read at '/nowhere'"),
        ("generate {target} --speculator {empty} --prompt x", "no draft can be read at"),
        ("generate {target} --speculator {eagle} --prompt x", "made for another target"),
        ("generate {empty} --speculator ngram --prompt x", "empty"),
        ("generate {target} --speculator ngram --prompt=", "the prompt is empty"),
        ("inspect {target}", "is no draft that hf_spec knows"),
    ],
)
def test_errors_are_one_message_and_no_traceback(models, prompts, tmp_path, capsys, command, problem):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").write_text('{"prompt": "a"}\n{"prompt": 1}', encoding="utf-8")
    places = {"target": models["target"], "prompts": prompts, "eagle": EAGLE}
    places |= {name: tmp_path / name for name in ("empty", "bad")}
    argv = [part.format(**places) for part in command.split()]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "hf-spec: " in err
    assert problem in err
    with pytest.raises((ValueError, OSError)):
        main(["--traceback", *argv])
