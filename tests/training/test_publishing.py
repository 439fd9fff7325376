"""What a trained draft is published as: adapters, model cards, warnings, and a repository of a Hub."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from groups import environment
from hub import running
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from pairs import usual
from test_trainer import arguments, eagle1, eagle3, losses, medusa, medusa_sharing, mtp, sharp_target, text, vanilla
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import demo
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.modeling import DraftModel
from hf_spec.drafts.peagle.modeling import PEagleDraftModel
from hf_spec.scoring.adapters import base_model
from hf_spec.training import DraftTrainer, new_draft, recipe
from hf_spec.training.card import adapter_of, is_chat, model_card
from hf_spec.training.checks import name_target, serving_warnings

peft = pytest.importorskip("peft")
IDS = torch.arange(6)[None]
CALL: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


def trained(draft: Any, target: Any, folder: Path, **options: Any) -> DraftTrainer:
    """Train a little, evaluate and save."""
    others = {name: options.pop(name) for name in ("peft_config", "processing_class") if name in options}
    args = arguments(folder, max_steps=2, **options)
    trainer = DraftTrainer(draft, target, args, train_dataset=text(), eval_dataset=text(seed=4), **others)
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    return trainer


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", usual([eagle3, mtp, medusa, vanilla], [eagle3, vanilla]))
def test_a_saved_adapter_guesses_as_the_trained_one_and_as_the_merged_draft(make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    make(target).save_pretrained(tmp_path / "base")
    load = AutoModelForCausalLM if make is vanilla else AutoModel
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    trainer = trained(load.from_pretrained(tmp_path / "base"), target, tmp_path / "adapter", peft_config=lora)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    card = (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^draft = (.*)$", card, re.MULTILINE)
    assert ("hf_spec.AutoDraftModel.from_pretrained" in line) == (make is not vanilla)  # which is a language model
    loaded = eval(
        line.replace("the-draft", str(tmp_path / "base")).replace("this-draft", str(tmp_path / "adapter")),
        {"hf_spec": hf_spec, "PeftModel": peft.PeftModel, "AutoModelForCausalLM": load, "target": target},
    )
    outputs = []
    for draft in (trainer.model, loaded, loaded.merge_and_unload(), load.from_pretrained(tmp_path / "base")):
        out = target.generate(IDS, speculator=draft, return_dict_in_generate=True, max_new_tokens=40, do_sample=False)
        assert torch.equal(out.sequences, target.generate(IDS, max_new_tokens=40, do_sample=False))
        outputs.append([row.drafted for row in out.speculation.per_row])
    assert outputs[0] == outputs[1] == outputs[2]
    assert "draft = PeftModel.from_pretrained(" in card and "# adapter on a draft" in card
    assert "library_name: peft" in card and str(tmp_path) not in card
    assert "`draft.merge_and_unload()` first" in card


def test_a_draft_for_a_target_with_an_adapter_learns_what_that_says(tmp_path: Path) -> None:
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(sharp_target(), lora)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    found = {}
    for name, target in {"adapted": adapted, "bare": sharp_target()}.items():
        found[name] = losses(trained(eagle3(sharp_target()), target, tmp_path / name))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapted.state_dict().items())
    draft = AutoModel.from_pretrained(tmp_path / "adapted")
    assert torch.equal(adapted.generate(IDS, speculator=draft, **CALL), adapted.generate(IDS, **CALL))
    merged = adapted.merge_and_unload()
    found["merged"] = losses(trained(eagle3(sharp_target()), merged, tmp_path / "merged"))
    assert found["adapted"] == pytest.approx(found["merged"], rel=1e-4)
    assert found["adapted"] != pytest.approx(found["bare"], rel=1e-2)


# -- cards ------------------------------------------------------------------------------------------------------------

EXPECTED = {
    eagle3: '"method": "eagle3", "model": "me/draft", "num_speculative_tokens": 5',
    vanilla: '"method": "draft_model", "model": "me/draft", "num_speculative_tokens": 5',
    mtp: "vLLM serves MTP layers only within the checkpoints of targets that have some.",
    medusa: "vLLM does not serve drafts of this kind (medusa)",
    eagle1: "vLLM does not serve drafts of this kind (eagle)",
}


OWN = {eagle3: "embeddings and output layer", mtp: "output layer", medusa: "output layer", eagle1: "embeddings"}


@pytest.mark.parametrize("make", EXPECTED)
def test_a_card_says_how_to_use_the_draft(make: Any, tmp_path: Path) -> None:
    target = sharp_target()
    target.config.name_or_path = "org/target"
    trained(make(target), target, tmp_path, hub_model_id="me/draft", data_name="org/chats")
    card = ModelCard.load(tmp_path / "README.md")
    assert EXPECTED[make] in card.text
    assert card.data.base_model == "org/target" and card.data.datasets == ["org/chats"]
    assert "| data | org/chats, 4 examples |" in card.text
    assert re.findall(r"Its (.*) began as the target's", card.text) == ([OWN[make]] if make in OWN else [])
    loader = "AutoModelForCausalLM" if make is vanilla else "AutoModel"
    assert f'draft = {loader}.from_pretrained("me/draft")' in card.text
    assert 'target = AutoModelForCausalLM.from_pretrained("org/target")' in card.text


@pytest.mark.parametrize(
    ("name", "datasets"),
    [
        ("org/chats, dolly", ["org/chats", "dolly"]),
        ("answers of the target to prompts of Dolly, GSM8K", None),  # which the Hub would refuse
        ("./chats.jsonl", None),
    ],
)
def test_a_card_names_only_what_may_be_a_dataset(name: str, datasets: Any, tmp_path: Path) -> None:
    target = sharp_target()
    trained(medusa(target), target, tmp_path, data_name=name)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == datasets
    assert (name in card.text) == (name[0] != ".")


def test_a_card_tells_what_muon_did(tmp_path: Path) -> None:
    target = sharp_target()
    trained(medusa(target), target, tmp_path, muon_learning_rate=0.014, weight_decay=0.1)
    card = ModelCard.load(tmp_path / "README.md").text
    assert "| of matrices, by Muon | 0.014 |" in card and "| weight decay | 0.1 |" in card


def test_a_card_tells_the_figures_of_the_weights_beside_it(tmp_path: Path) -> None:
    target = sharp_target()
    steps = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "eval_strategy": "steps", "save_strategy": "steps"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    args = arguments(tmp_path, **steps, **best, learning_rate=1e-2)
    trainer = DraftTrainer(eagle3(target), target, args, train_dataset=text(), eval_dataset=text(seed=4))
    trainer.train()
    first, second = (logs for logs in trainer.state.log_history if "eval_loss" in logs)
    assert trainer.state.best_global_step == 2 and first["eval_loss"] > second["eval_loss"]
    for logs, length in ((first, 1.25), (second, 1.75)):  # so that they can be told apart
        logs["eval_acceptance_length"] = length
    trainer.save_model()
    assert "1.250" in (tmp_path / "README.md").read_text() and "1.750" not in (tmp_path / "README.md").read_text()
    measured = trainer.evaluate()["eval_acceptance_length"]
    trainer.save_model()
    assert f"{measured:.3f}" in (tmp_path / "README.md").read_text()


def test_a_card_tells_the_figures_of_every_benchmark(tmp_path: Path) -> None:
    target = sharp_target()
    args = arguments(tmp_path, max_steps=1, eval_temperature=1.0)
    benchmarks = {"stories": text(seed=4), "chat": text(seed=5)}
    trainer = DraftTrainer(eagle3(target), target, args, train_dataset=text(), eval_dataset=benchmarks)
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "|  | stories | chat |" in card
    for label, name in {
        "tokens per verification": "acceptance_length",
        "the same, sampled": "sampled_acceptance_length",
    }.items():
        line = next(line for line in card.splitlines() if label in line)
        assert line.endswith(f"| {found[f'eval_stories_{name}']:.3f} | {found[f'eval_chat_{name}']:.3f} |")
    assert found["eval_stories_acceptance_1"] != found["eval_chat_acceptance_1"]  # so they could have been mixed up


def test_the_snippet_of_a_card_runs(tmp_path: Path, capsys: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    options = {"eval_prompts": 3, "eval_temperature": None, "unroll_steps": 2, "license": "apache-2.0"}
    args = arguments(tmp_path, max_steps=1, target_name="org/target", hub_model_id="me/draft", **options)
    trainer = DraftTrainer(eagle3_of(target), target, args, train_dataset=text(), eval_dataset=text(seed=4))
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "org/target" and card.data.license == "apache-2.0"
    assert "The draft's own: apache-2.0. Its embeddings" in card.text
    assert "[org/target](https://huggingface.co/org/target)" in card.text
    assert "```sh\npip install git+https://github.com/hf-spec/hf_spec\n```" in card.text
    for line in (
        "| prompts | 3 |",
        f"| tokens that verifications emitted, greedy | {found['eval_measured_tokens']:,.0f} |",
        f"| first 1 draft tokens accepted (cumulative) | {found['eval_acceptance_1']:.3f} |",
        "| draft token 2 accepted if those before were (conditional) | "
        f"{found['eval_conditional_acceptance_2']:.3f} |",
    ):
        assert line in card.text
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    snippet = snippet.replace("org/target", str(demo.path())).replace("me/draft", str(tmp_path))
    capsys.readouterr()
    exec(snippet, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_the_snippet_of_a_draft_for_chats_and_an_adapter_runs(tmp_path: Path, capsys: Any) -> None:
    """By the recipe, which knows the adapter's name; without one on the Hub it is called by its kind."""
    plain = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(plain, lora).save_pretrained(str(tmp_path / "lora"))
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    masks = [{"input_ids": [1, 5, 6, 7, 8], "loss_mask": [0, 0, 1, 1, 1]}] * 4
    target = recipe._target(str(demo.path()), str(tmp_path / "lora"), dtype="float32")
    args = arguments(tmp_path, max_steps=1, target_name="org/target", hub_model_id="me/draft")
    for place, named in (("org/lora", "org/lora"), (str(tmp_path / "lora"), "LORA 'default'")):
        target.peft_config["default"].loaded_from = place
        trainer = DraftTrainer(
            eagle3_of(base_model(target)), target, args, train_dataset=masks, processing_class=tokenizer
        )
        trainer.save_model()
        card = ModelCard.load(tmp_path / "README.md")
        assert f"# eagle3 draft for org/target with {named}" in card.text
        assert f"with the adapter {named}. It has" in card.text and str(tmp_path) not in str(card)
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    places = {"org/target": demo.path(), "me/draft": tmp_path, "the-adapter": tmp_path / "lora"}
    for name, place in places.items():
        snippet = snippet.replace(name, str(place))
    capsys.readouterr()
    exec(snippet, {})
    assert "Tell me a short story." in capsys.readouterr().out
    with target.disable_adapter():
        assert adapter_of(base_model(target)) == ""


@pytest.mark.parametrize(
    ("template", "mask", "chat"), [(True, [0, 1], True), (True, [1, 1], False), (False, [0, 1], False)]
)
def test_what_was_trained_on_chats_is_asked_in_the_template(template: bool, mask: list[int], chat: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    tokenizer.chat_template = tokenizer.chat_template if template else None
    assert is_chat(tokenizer, [{"input_ids": [3, 4], "loss_mask": mask}]) == chat
    assert is_chat(tokenizer, iter(())) == template


def eagle3_of(target: Any) -> Any:
    return new_draft(Eagle3SpeculatorConfig.for_target(target.config), target)


@pytest.mark.parametrize("named", [None, "org/target"])
def test_no_directory_of_this_machine_is_published(named: str | None, tmp_path: Path, caplog: Any) -> None:
    logging.getLogger("transformers").propagate = True
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    sharp_target().save_pretrained(tmp_path / "place" / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "place" / "target")
    draft = eagle3(target)
    assert draft.config.speculators_config["verifier"]["name_or_path"] is None
    draft.config.speculators_config["verifier"]["name_or_path"] = str(tmp_path / "place")  # as was written before
    saved = {"target_name": named, "save_strategy": "steps", "save_steps": 1, "data_name": str(tmp_path / "place")}
    trained(draft, target, tmp_path / "draft", **saved)
    files = [path for path in (tmp_path / "draft").rglob("*") if path.is_file()]
    sent = filter_repo_objects(
        [str(path.relative_to(tmp_path / "draft")) for path in files], ignore_patterns=excluded()
    )
    assert {*sent} == {"README.md", "config.json", "model.safetensors"}
    for name in ("README.md", "config.json", "model.safetensors"):
        assert str(tmp_path).encode() not in (tmp_path / "draft" / name).read_bytes()
    verifier = AutoModel.from_pretrained(tmp_path / "draft").config.speculators_config["verifier"]
    assert verifier["name_or_path"] == named and ("set target_name" in caplog.text) == (named is None)


def test_a_draft_that_is_trained_further_forgets_the_name_of_another_target() -> None:
    target = sharp_target()
    draft = eagle3(target)
    verifier = draft.config.speculators_config["verifier"]
    verifier["name_or_path"] = "org/base"
    name_target(draft, target, None)  # it was loaded from nowhere
    assert verifier["name_or_path"] == "org/base"
    target.config.name_or_path = "/models/fine-tuned"
    name_target(draft, target, None)
    assert verifier["name_or_path"] is None


def test_a_card_names_the_repository_that_was_made(tmp_path: Path) -> None:
    target = sharp_target()
    trainer = trained(eagle3(target), target, tmp_path)
    trainer.hub_model_id = "me/made"  # as Trainer does
    trainer.create_model_card()
    assert 'from_pretrained("me/made")' in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_card_says_whose_weights_a_draft_began_with(tmp_path: Path) -> None:
    target, args = sharp_target(), arguments(tmp_path)
    assert "None is named for the draft.\n\n## Limits" in model_card(medusa_sharing(target), target, args, 0, [])
    draft = eagle3(target)
    for place, said in (("org/first", "from org/first, whose"), (str(tmp_path), "from another draft, whose")):
        draft.config.name_or_path = place
        card = model_card(draft, target, args, 0, [])
        assert f"Training went on {said} licence applies, too." in card and "began as" not in card


def test_a_card_takes_the_options_of_an_upload(tmp_path: Path) -> None:
    target = sharp_target()
    trainer = DraftTrainer(eagle3(target), target, arguments(tmp_path), train_dataset=text())
    trainer.create_model_card(license="mit", tags="tiny", dataset=["org/chats", "org/code"], model_name="draft")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "mit" and "The draft's own: mit." in card.text
    assert card.data.tags == ["speculative-decoding", "hf_spec", "eagle3", "tiny"]
    assert card.data.datasets == ["org/chats", "org/code"]
    assert "| data | org/chats, org/code, 4 examples |" in card.text
    with pytest.raises(TypeError, match=r"no place for language: it takes license, tags, dataset and model_name$"):
        trainer.create_model_card(language="en")
    with pytest.raises(TypeError, match=r"no place for with_code: .*; draft\.push_to_hub\(\.\.\., with_code=True\)"):
        trainer.push_to_hub("a message", with_code=True)  # before a Hub is asked


def test_a_card_loads_a_target_that_reads_images(tmp_path: Path) -> None:
    target = build("vl:llava")
    card = model_card(medusa(target), target, arguments(tmp_path), 0, [])
    assert 'target = AutoModelForImageTextToText.from_pretrained("the-target")' in card


def test_vllm_is_told_that_peagle_drafts_in_parallel() -> None:
    config = SimpleNamespace(num_speculative_tokens=5)
    command = PEagleDraftModel.use_in_vllm(config, "org/target", "me/draft")
    assert '"method": "eagle3", "model": "me/draft", "num_speculative_tokens": 5, "parallel_drafting": true' in command


def excluded() -> list[str]:
    """Return what the line in README leaves out of an upload."""
    root = Path(hf_spec.__file__).parents[1]
    found = [
        re.findall(r'--exclude "?([^" ]+)"?', line)
        for file in ("README.md", "docs/training.md")
        for line in (root / file).read_text(encoding="utf-8").splitlines()
        if line.startswith("hf upload")
    ]
    assert len(found) == 2 and found[0] == found[1]
    return found[0]


# -- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        ({}, []),
        ({"norm_before_residual": True}, ["SGLang does not know norm_before_residual"]),
        ({"norm_before_lm_head": False}, ["vLLM always norms", "SGLang always norms", "llama.cpp always norms"]),
        ({"norm_output": True}, ["llama.cpp does not know norm_output"]),
        ({"layers": {"model_type": "qwen3", "attention_bias": True}}, ["vLLM has no bias", "SGLang has llama layers"]),
        ({"layers": {"num_hidden_layers": 2}}, ["SGLang norms the later", "llama.cpp reads drafts with num_hidden"]),
        ({"layers": {"mlp_bias": True}}, ["SGLang has no bias in the MLP"]),
        ({"embed_requires_grad": True}, ["SGLang replaces trained embeddings"]),
        (
            {"eagle_aux_hidden_state_layer_ids": [8]},
            ["SGLang takes a single feature", "llama.cpp always reads", "SGLang does not capture"],
        ),
        ({"shared_with_target": ["embed_tokens"]}, ["no embed_tokens in the file"]),
        (
            {"shared_with_target": ["lm_head"], "vocabulary": 40},
            ["vLLM does not cut", "SGLang does not cut", "no lm_head in the file"],
        ),
    ],
)
def test_options_that_an_engine_cannot_serve_are_named(flags: dict[str, Any], engines: list[str]) -> None:
    target = sharp_target()
    draft = eagle3(target, **flags)
    found = serving_warnings(draft, target)
    assert len(found) == len(engines) and all(one.startswith(start) for one, start in zip(found, engines, strict=True))
    draft.config.layers.max_position_embeddings = 8
    assert "max_position_embeddings is 8, the target's 512" in " ".join(serving_warnings(draft, target))


def test_what_no_engine_serves_is_said_before_training(tmp_path: Path, caplog: Any) -> None:
    """And not again when it is saved."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    target = sharp_target()
    draft = eagle3(target, norm_before_residual=True)
    trainer = DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text())
    assert caplog.text.count("SGLang does not know norm_before_residual") == 1
    trainer.save_model(str(tmp_path / "saved"))
    assert caplog.text.count("SGLang does not know norm_before_residual") == 1


def test_layers_in_another_order_are_sorted_for_training(tmp_path: Path) -> None:
    """But not for an adapter, which belongs to the draft as its files have it."""
    target, given, lora = sharp_target(), [5, 2, 4], peft.LoraConfig(r=2, target_modules=["fc"])
    for options, expected in (({}, (2, 4, 5)), ({"peft_config": lora}, (5, 2, 4))):
        draft = eagle3(target)
        draft.config.eagle_aux_hidden_state_layer_ids = list(given)
        trainer = trained(draft, target, tmp_path / str(len(options)), **options)
        assert trainer._reader.feature_layers == draft.feature_layers(target) == expected
    assert AutoModel.from_pretrained(tmp_path / "0").config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]


def test_a_vocabulary_that_does_not_ascend_is_not_saved(tmp_path: Path) -> None:
    target = sharp_target()
    draft = eagle3(target, 40)
    trainer = DraftTrainer(draft, target, arguments(tmp_path), train_dataset=text())
    draft.d2t[0] += 5
    with pytest.raises(ValueError, match="must ascend"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists() and isinstance(draft, DraftModel)


# -- a Hub ------------------------------------------------------------------------------------------------------------

PUBLISH = """
from pathlib import Path
import pytest
from test_publishing import CALL, IDS, trained
from test_trainer import eagle3, sharp_target
from transformers import AutoModel, AutoTokenizer
from hf_spec import demo
target = sharp_target()
tokenizer = AutoTokenizer.from_pretrained(demo.path())
trainer = trained(eagle3(target, 40), target, Path({folder!r}), processing_class=tokenizer, hub_model_id="me/draft")
trainer.push_to_hub(license="mit")
loaded = AutoModel.from_pretrained("me/draft")
for name, tensor in trainer.draft.state_dict().items():
    assert tensor.equal(loaded.state_dict()[name]), name
assert target.generate(IDS, speculator="me/draft", **CALL).equal(target.generate(IDS, **CALL))
assert AutoTokenizer.from_pretrained("me/draft").vocab_size == tokenizer.vocab_size
with pytest.raises(ValueError, match="'me/other' is not found: .* the Hub has none of this name"):
    target.generate(IDS, speculator="me/other", **CALL)
"""


def test_a_draft_is_pushed_to_a_hub_and_loaded_from_there(tmp_path: Path) -> None:
    script = PUBLISH.format(folder=str(tmp_path / "draft"))
    with running("me/draft") as hub:
        given = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_none",
            "HF_HUB_OFFLINE": "0",
        }
        given |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=environment() | given)
    assert hub.commits == ["End of training"]
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= hub.files.keys()
    assert not [name for name in hub.files if name.startswith("checkpoint-")]
    assert hub.objects  # the weights were uploaded as a large file
    assert b'draft = AutoModel.from_pretrained("me/draft")' in hub.files["README.md"]
    assert b"license: mit" in hub.files["README.md"]
