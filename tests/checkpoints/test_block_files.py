"""Block drafts in files: every layout in circulation read and written, and what is wrong with a file said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import CLOSE, DFLASH, DSPARK, GOLDENS, PEAGLE, load_draft, load_target, outputs, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.kinds import find_format
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.dspark.modeling import DSparkDraftModel
from hf_spec.drafts.files import Checkpoint
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel
from hf_spec.settings import DEFAULT_NUM_SPECULATIVE_TOKENS
from hf_spec.unroll.feedback import UnrollInput

CASES = (*DFLASH, *DSPARK)
FORMATS = {"ds": "deepspec (DeepSpec)", "zl": "dflash (z-lab)"}
WEIGHTS = {"markov_rank": 4, "mask_token_id": 3}


def block_of(draft: Any, case: str) -> torch.Tensor:
    torch.manual_seed(0)
    features = torch.randn(2, 6, draft.fc.in_features)
    if draft.config.shared_with_target:
        draft.bind(load_target(case))
    with torch.no_grad():
        return draft(torch.tensor([[5], [6]]), features=features).logits


def copy_of(case: str, path: Path, **changes: Any) -> Path:
    """Copy a checkpoint with some keys of its config changed, or dropped where they are None."""
    shutil.copytree(GOLDENS / case / "checkpoint", path)
    config = json.loads((path / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if name not in changes or value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize("case", CASES)
def test_formats_are_recognised(case: str) -> None:
    report = inspect(GOLDENS / case / "checkpoint")
    kind = "dflash" if case.startswith(("sp_dflash", "zl_")) else "dspark"
    assert report.layout == FORMATS.get(case[:2], f"speculators ({kind})")
    assert report.problem is None
    assert report.config.speculators_model_type == kind
    shared = {"ds": [], "zl": ["embed_tokens", "lm_head"]}.get(case[:2], ["embed_tokens"])
    assert report.config.shared_with_target == (shared if "gated" not in case else ["embed_tokens", "lm_head"])
    assert "mask" in str(report) and "draft tokens per block" in str(report)


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_loaded_by_the_auto_classes(case: str, tmp_path: Path) -> None:
    draft = load_draft(case)
    expected = block_of(draft, case)
    draft.save_pretrained(tmp_path)
    for loader in (AutoModel, AutoDraftModel):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is type(draft)
        assert torch.equal(block_of(again, case), expected)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("speculators", [type(draft).__name__])
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == draft.config.num_draft_tokens == draft.defaults().num_speculative_tokens
    source = json.loads((GOLDENS / case / "checkpoint" / "config.json").read_text())
    if case.startswith("sp_"):  # every key of the library is there, and says the same
        ours = {"model_type", "speculators_version", "transformers_version", "auto_map", "dtype"}
        assert {name: config.get(name) for name in source.keys() - ours - {"transformer_layer_config"}} == {
            name: value for name, value in source.items() if name not in ours and name != "transformer_layer_config"
        }
        names = load_file(tmp_path / "model.safetensors").keys()
        assert names == load_file(GOLDENS / case / "checkpoint" / "model.safetensors").keys()


@pytest.mark.parametrize(("case", "to"), [("zl_dflash_qwen3", "dflash"), ("ds_dspark_qwen3", "deepspec")])
def test_flat_layouts_are_written(case: str, to: str, tmp_path: Path) -> None:
    convert(GOLDENS / case / "checkpoint", tmp_path / "nested", "speculators")
    convert(tmp_path / "nested", tmp_path / "flat", to, dtype=torch.float32)
    again = AutoDraftModel.from_pretrained(tmp_path / "flat", dtype=torch.float32)
    torch.testing.assert_close(block_of(again, case), block_of(load_draft(case), case), **CLOSE)
    raw, source = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "flat", GOLDENS / case / "checkpoint")
    )
    for name in ("architectures", "model_type", "block_size", "dflash_config", "target_layer_ids", "mask_token_id"):
        assert raw.get(name) == source.get(name)
    assert inspect(tmp_path / "flat").engines == {"vLLM": [], "SGLang": [], "llama.cpp": []}


@pytest.mark.parametrize(
    ("case", "to", "reason"),
    [
        ("sp_dflash_draft_qwen3", "dflash", "a vocabulary of its own, and ends its windows at the root"),
        ("sp_dspark_qwen3_gated_sliding", "deepspec", "sliding layers, and has no embeddings"),
        (
            "sp_dspark_qwen3_gated_sliding",
            "deepspec",
            r"no head of its own \(--self-contained TARGET writes them in\)",
        ),
        ("zl_dflash_qwen3", "deepspec", "has no deepspec layout"),
    ],
)
def test_what_a_flat_layout_cannot_say_is_refused(case: str, to: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        convert(GOLDENS / case / "checkpoint", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_engines_say_what_is_in_the_way() -> None:
    gated = inspect(GOLDENS / "sp_dspark_qwen3_gated_sliding" / "checkpoint").engines
    assert any("vanilla" in one for one in gated["vLLM"]) and any("windows" in one for one in gated["vLLM"])
    assert any("convert to deepspec" in one for one in gated["llama.cpp"])
    assert inspect(GOLDENS / "zl_dflash_qwen3" / "checkpoint").engines["vLLM"] == []
    config = DFlashSpeculatorConfig.for_target(tiny_target().config, mask_token_id=3, sample_from_anchor=True)
    assert any("root's slot" in one for one in DFlashDraftModel.engines(config)["vLLM"])
    assert '"method": "dspark"' in DSparkDraftModel.use_in_vllm(config, "some/target", "some/draft")
    cut = {"draft_vocab_size": 40, "shared_with_target": ["embed_tokens", "lm_head"]}
    for kind in (DFlashDraftModel, DSparkDraftModel, PEagleDraftModel):
        found = kind.engines(config_for(kind.config_class, **cut))["vLLM"]
        assert any("down to the draft's vocabulary; convert with --self-contained TARGET" in one for one in found)
        assert not kind.engines(config_for(kind.config_class))["vLLM"]
    peagle = config_for(PEagleSpeculatorConfig, fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 2])
    found = PEagleDraftModel.engines(peagle, Checkpoint("", peagle.to_dict(), {}))["vLLM"]
    assert "does not apply fc_norm to P-EAGLE" in found
    assert "expects 3 features, not 2; convert to speculators" in found


IDS = {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]}
HEADS = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
DSPARK_INSIDE = {"architectures": ["DSparkDraftModel"], "dflash_config": IDS, **dict.fromkeys(IDS)}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("ds_dspark_qwen3", DSPARK_INSIDE),
        ("ds_dspark_qwen3", DSPARK_INSIDE | {"dspark_config": HEADS, **dict.fromkeys(HEADS)}),  # SpecForge's
        ("ds_dflash_qwen3", {"dflash_config": IDS | {"target_layer_ids": [0, 2, 4]}, **dict.fromkeys(IDS)}),
        ("zl_dflash_qwen3", {"dflash_config": None, **IDS, "target_layer_ids": [1, 2, 4]}),
    ],
)
def test_repackaged_drafts_are_read(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Who trained a draft decides what its slots predict: the architecture's name says it, not the place of keys."""
    path = copy_of(case, tmp_path / "draft", **changes)
    draft, known = AutoDraftModel.from_pretrained(path, dtype=torch.float32), load_draft(case)
    assert (type(draft), draft.config.sample_from_anchor) == (type(known), known.config.sample_from_anchor)
    assert torch.equal(block_of(draft, case), block_of(known, case))


def test_modelopt_names_the_heads_of_dspark_in_another_way(tmp_path: Path) -> None:
    case = "ds_dspark_qwen3"
    heads = {"markov_rank": 8, "markov_head_type": "vanilla", "use_confidence_head": True}
    inside = IDS | heads | {"causal": False, "projector_type": "dspark", "shift_label": True}
    moved = dict.fromkeys((*IDS, *HEADS, "confidence_head_with_markov"))
    changes = {"architectures": ["DFlashDraftModel"], "dflash_config": inside, **moved}
    path = copy_of(case, tmp_path / "draft", **changes)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if "_head." in name and not name.startswith("lm_head")]:
        named = name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")
        weights[named] = weights.pop(name)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    draft, known = AutoDraftModel.from_pretrained(path, dtype=torch.float32), load_draft(case)
    assert draft.config.markov_rank == 8
    assert draft.config.enable_confidence_head and draft.config.confidence_head_with_markov
    assert draft.state_dict().keys() == known.state_dict().keys()
    assert all(torch.equal(draft.state_dict()[name], one) for name, one in known.state_dict().items())
    checkpoint = read_checkpoint(path)
    assert find_format(checkpoint).unknown(checkpoint.config, checkpoint.tensors) == []
    assert "takes it for DFlash; convert to speculators" in inspect(path).engines["vLLM"]
    changes["dflash_config"] = inside | {"shift_label": False}
    with pytest.raises(ValueError, match="shift_label is False"):
        AutoDraftModel.from_pretrained(copy_of(case, tmp_path / "unshifted", **changes))


def test_deepspec_eagle3_reads_outputs_of_layers() -> None:
    case = "ds_eagle3_qwen3"
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    assert draft.config.eagle_aux_hidden_state_layer_ids == [1, 2, 4, 6, 7]
    ids = io["draft/ids"][None]
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in draft.feature_layers(target)], dim=-1)
        torch.testing.assert_close(features[0], io["draft/features"], **CLOSE)
        out = draft(io["input_ids"][None, 1:], features=io["target_hidden_states"][None, :-1])
    torch.testing.assert_close(out.logits[0], io["row_logits"], **CLOSE)
    prompt, expected = io["e2e/prompt"][None], io["e2e/greedy_ids"].tolist()
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(
        prompt, **given, max_new_tokens=len(expected) - prompt.shape[1], speculator=draft, return_dict_in_generate=True
    )
    assert text.sequences[0].tolist() == expected
    assert draft.config.num_speculative_tokens == 4
    assert inspect(GOLDENS / case / "checkpoint").layout == "deepspec (DeepSpec)"


def test_the_chain_length_of_deepspec_eagle3_is_checked(tmp_path: Path) -> None:
    unsaid = copy_of("ds_eagle3_qwen3", tmp_path / "unsaid")
    (unsaid / "config.json").write_text(
        json.dumps(json.loads((unsaid / "config.json").read_text()) | {"ttt_length": None})
    )
    assert AutoDraftModel.from_pretrained(unsaid).config.num_speculative_tokens == DEFAULT_NUM_SPECULATIVE_TOKENS
    for number, given in enumerate((0, [4])):
        path = copy_of("ds_eagle3_qwen3", tmp_path / str(number), ttt_length=given)
        with pytest.raises(ValueError, match=rf"speculative_tokens in .* is {re.escape(str(given))}; give a whole"):
            AutoDraftModel.from_pretrained(path)


@pytest.mark.parametrize("case", PEAGLE)
def test_peagle_is_a_kind_of_its_own(case: str, tmp_path: Path) -> None:
    source = GOLDENS / case / "checkpoint"
    report = inspect(source)
    assert (report.layout, report.problem) == ("speculators (peagle)", None)
    draft = load_draft(case)
    assert type(draft) is PEagleDraftModel
    draft.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again.mask_hidden, draft.mask_hidden)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    config, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, source))
    assert config["mask_token_id"] == theirs["mask_token_id"]
    assert config["speculators_config"]["algorithm"] == "peagle"
    with pytest.raises(ValueError, match="has no sglang layout"):
        convert(source, tmp_path / "out", "sglang")


# -- what is wrong is said before anything runs -----------------------------------------------------------------------


def config_for(kind: Any = DFlashSpeculatorConfig, **flags: Any) -> Any:
    return kind.for_target(tiny_target().config, **{"mask_token_id": 3} | flags)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (DFlashSpeculatorConfig, {"block_size": 0}, "block_size is 0; set a whole number"),
        (DFlashSpeculatorConfig, {"block_size": 1}, "at least 2, or sample_from_anchor=True"),
        (DFlashSpeculatorConfig, {"block_size": 2.5}, "block_size is 2.5"),
        (DFlashSpeculatorConfig, {"mask_token_id": None}, "mask_token_id is None; name a token of the target, 0..95"),
        (DFlashSpeculatorConfig, {"mask_token_id": 96}, "mask_token_id is 96"),
        (DFlashSpeculatorConfig, {"sample_from_anchor": 1}, "sample_from_anchor is 1; set True or False"),
        (DFlashSpeculatorConfig, {"draft_vocab_size": 0}, "draft_vocab_size is 0; set a whole number"),
        (DFlashSpeculatorConfig, {"aux_hidden_state_layer_ids": [0, 9]}, "do not fit a target of 8 layers"),
        (DFlashSpeculatorConfig, {"aux_hidden_state_layer_ids": []}, "list whole numbers"),
        (PEagleSpeculatorConfig, {"mask_token_id": None}, "mask_token_id is None; name a token"),
        (DSparkSpeculatorConfig, {"markov_rank": -1}, "markov_rank is -1"),
        (DSparkSpeculatorConfig, {"markov_head_type": "lstm"}, "'lstm'; name one of"),
        (DSparkSpeculatorConfig, {"markov_rank": 0}, "set confidence_head_with_markov=False"),
    ],
)
def test_bad_settings_are_refused(kind: Any, flags: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        config_for(kind, **flags)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"vocab_size": 95}, "vocab_size is 96, but the target has 95"),
        ({"hidden_size": 64}, "target_hidden_size is None"),
        ({"num_hidden_layers": 4}, r"\[2, 4, 5\] do not fit a target of 4 layers"),
    ],
)
@pytest.mark.parametrize("kind", [DFlashDraftModel, DSparkDraftModel, PEagleDraftModel])
def test_other_targets_are_refused(kind: Any, target: dict[str, Any], message: str) -> None:
    config = kind.config_class
    draft = kind(config_for(config, **{config.layer_ids_field: [2, 4, 5]}))
    with pytest.raises(ValueError, match=message):
        tiny_target(**target).generate(torch.arange(4)[None], speculator=draft, max_new_tokens=4)


@pytest.mark.parametrize(("kind", "to"), [(DFlashDraftModel, "dflash"), (DSparkDraftModel, "deepspec")])
def test_drafts_for_a_target_name_their_layers(kind: Any, to: str, tmp_path: Path) -> None:
    """Which flat files and servers need; a file that names none means the same ones."""
    target = tiny_target(num_hidden_layers=8).config
    shared = ["embed_tokens", "lm_head"] if to == "dflash" else []
    flags = {"mask_token_id": 0, "shared_with_target": shared}
    config = kind.config_class.for_target(target, {"num_hidden_layers": 1}, **flags)
    assert config.aux_hidden_state_layer_ids == [2, 4, 5]
    kind(config).save_pretrained(tmp_path / "draft")
    convert(tmp_path / "draft", tmp_path / "flat", to)
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"aux_hidden_state_layer_ids": None}))
    assert kind.from_pretrained(tmp_path / "draft").config.feature_layers(8) == (2, 4, 5)
    with pytest.raises(ValueError, match=r"write aux_hidden_state_layer_ids into config.json: \[2, n // 2, n - 3\]"):
        convert(tmp_path / "draft", tmp_path / "again", to)


def test_files_that_say_too_little_are_refused(tmp_path: Path) -> None:
    path = copy_of("zl_dflash_qwen3", tmp_path / "ids", dflash_config={"mask_token_id": 3})
    with pytest.raises(ValueError, match=r"target_layer_ids is None; list the layers"):
        AutoDraftModel.from_pretrained(path)
    path = copy_of("zl_dflash_qwen3", tmp_path / "mask", dflash_config={"target_layer_ids": [1, 2, 4]})
    with pytest.raises(ValueError, match="mask_token_id is None; name a token"):
        AutoDraftModel.from_pretrained(path)
    path = copy_of("zl_dflash_qwen3", tmp_path / "count", dflash_config={"mask_token_id": 3, "target_layer_ids": [1]})
    with pytest.raises(ValueError, match="target_hidden_size is 96"):
        AutoDraftModel.from_pretrained(path, target=load_target("zl_dflash_qwen3"))
    path = copy_of("sp_dspark_qwen3", tmp_path / "head")
    weights = load_file(path / "model.safetensors")
    del weights["markov_head.markov_w2.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"markov_head.markov_w2.weight is missing"):
        AutoDraftModel.from_pretrained(path)


def test_a_new_draft_stands_between_the_targets_own_ends() -> None:
    assert config_for().shared_with_target == ["embed_tokens", "lm_head"]
    assert config_for(draft_vocab_size=97).shared_with_target == ["embed_tokens", "lm_head"]  # which is cut to 96
    assert config_for(draft_vocab_size=40).shared_with_target == ["embed_tokens"]
    assert config_for(layers={"hidden_size": 48}, target_hidden_size=32).shared_with_target == []
    config = config_for(DSparkSpeculatorConfig, block_size=6)
    assert config.num_draft_tokens == config.num_speculative_tokens == 6
    assert config_for(block_size=6).num_draft_tokens == 5
    assert config.layers.model_type == "qwen3"
    assert config.layers.num_hidden_layers == 5


def test_sliding_layers_without_a_window_are_causal_in_the_block() -> None:
    layers = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "sliding_window": None}
    draft = DFlashDraftModel(config_for(layers=layers, block_size=3, sliding_window_per_slot=True)).eval()
    draft.bind(tiny_target())
    seen = draft.seen(torch.tensor([4]), 3, torch.arange(7), "sliding_attention")[0]
    assert seen.long().tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]


def test_a_speculators_file_without_its_window_is_refused_where_engines_differ(tmp_path: Path) -> None:
    """speculators lets slots of such layers see the whole block, vLLM earlier slots only."""
    layers = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "sliding_window": None}
    draft = DFlashDraftModel(config_for(layers=layers, sliding_window_non_causal=True))
    draft.save_pretrained(tmp_path)
    assert AutoDraftModel.from_pretrained(tmp_path).config.sliding_window_non_causal
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for said in ({"sliding_window_non_causal": False}, {}):
        unsaid = {name: value for name, value in config.items() if name != "sliding_window_non_causal"}
        file.write_text(json.dumps(unsaid | said), encoding="utf-8")
        with pytest.raises(ValueError, match=r"sliding_window is not set, .* set sliding_window_non_causal to true"):
            AutoDraftModel.from_pretrained(tmp_path)
    windowed = config["transformer_layer_config"] | {"sliding_window": 4, "use_sliding_window": True}
    file.write_text(json.dumps(unsaid | {"transformer_layer_config": windowed}), encoding="utf-8")
    assert AutoDraftModel.from_pretrained(tmp_path).config.layers.sliding_window == 4


def test_auto_config_knows_the_kinds(tmp_path: Path) -> None:
    config: PreTrainedConfig = config_for(DSparkSpeculatorConfig, **WEIGHTS)
    config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkSpeculatorConfig


# -- as speculators reads them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle"])
@torch.no_grad()
def test_what_we_write_is_what_speculators_reads(kind: str, tmp_path: Path) -> None:
    """The checkpoints were written by us, and the logits beside them are those of speculators 0.9.0 that read them."""
    case = f"sp_{kind}_from_us"
    io, source = outputs(case), GOLDENS / case / "checkpoint"
    target = tiny_target(*io["target/embed"].shape, num_hidden_layers=6)
    target.get_input_embeddings().weight.copy_(io["target/embed"])
    target.get_output_embeddings().weight.copy_(io["target/head"])
    draft = AutoDraftModel.from_pretrained(source, dtype=torch.float32, target=target)
    ids, marked = io["input_ids"][None], None
    if kind != "peagle":
        marked = torch.zeros_like(ids, dtype=torch.bool).index_fill(1, io["anchors"], True)
    made = draft.unroll(UnrollInput(ids, None, io["features"][None], marked), draft.unroll_steps(4))
    logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)])
    found = logits[io["depths"], io["rows"]] if kind == "peagle" else logits[:, io["anchors"] - 1].transpose(0, 1)
    torch.testing.assert_close(found, io["logits"], **CLOSE)
    draft.save_pretrained(tmp_path)  # today's files are those that it read
    written, read = (json.loads((path / "config.json").read_text()) for path in (tmp_path, source))
    written["transformer_layer_config"].pop("dtype")  # which loading notes
    assert written | {"transformers_version": read["transformers_version"]} == read
    tensors, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, source))
    assert tensors.keys() == theirs.keys() and all(torch.equal(tensors[name], theirs[name]) for name in theirs)
