"""Keys of a draft's config that nobody knows are told, in every layout of every kind; neighbours are refused."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GOLDENS, first_speculators
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hf_spec import demo
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.kinds import DRAFT_MODELS, find_format, translate
from hf_spec.checkpoints.neighbours import ForeignDraftError
from hf_spec.checkpoints.resolve import load_draft
from hf_spec.config_keys import unknown_keys
from hf_spec.drafts.files import SPECULATORS, Checkpoint

# A file of every layout of every kind, by kind and layout.
FILES = {
    "eagle3 speculators": "sp_eagle3_e2e_llama",
    "eagle3 specforge": "specforge_eagle3_31",
    "eagle3 eagle3": "eagle3_orig_a",
    "eagle3 deepspec": "ds_eagle3_qwen3",
    "eagle3 modelopt": "ds_eagle3_qwen3",  # without the ids of layers
    "dflash speculators": "sp_dflash_qwen3",
    "dflash dflash": "zl_dflash_qwen3",
    "dflash muse": "hf_muse_glimmer",
    "dflash2 speculators": "sp_dflash2_qwen3",
    "dflash2 dflash": "zl_dflash2_qwen3",
    "dspark speculators": "sp_dspark_qwen3",
    "dspark deepspec": "ds_dspark_qwen3",
    "peagle speculators": "sp_peagle_llama",
    "eagle eagle": "eagle1_orig_a",
    "eagle speculators": "eagle1_orig_a",  # of its first versions
    "medusa medusa": "medusa_v1_pt",
    "medusa medusa-vllm": "medusa_v1_pt",  # by names of vLLM's
    "mtp speculators": "sp_mtp_qwen3",
    "mtp mtp": "mtp_qwen3_next_native",
}


def of_layout(layout: str) -> Checkpoint:
    found = read_checkpoint(GOLDENS / FILES[layout] / "checkpoint")
    if layout == "eagle speculators":
        found = first_speculators(FILES[layout])
    config, tensors = copy.deepcopy(found.config), dict(found.tensors)
    if layout == "eagle3 modelopt":
        del config["target_layer_ids"]
    if layout == "medusa medusa-vllm":
        tensors = {"blocks.0.layers.0.weight": torch.eye(4)}
        config = {"vocab_size": 8, "hidden_size": 4, "num_heads": 1, "truncated_vocab_size": 8}
    return Checkpoint(f"{layout}/checkpoint", config, tensors)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Show what transformers' loggers say."""
    logger = logging.getLogger("transformers")
    ours = logging.getLogger("hf_spec")
    before = logger.propagate, ours.propagate
    logger.propagate = ours.propagate = True
    with caplog.at_level(logging.WARNING):
        yield caplog
    logger.propagate, ours.propagate = before


def test_every_layout_has_a_file_here() -> None:
    known = {(kind.config_class.speculators_model_type, one.name) for kind in DRAFT_MODELS for one in kind.formats}
    assert known == {(layout.split()[0], layout.split()[1]) for layout in FILES}
    assert all(one.keys is not None for kind in DRAFT_MODELS for one in (*kind.formats, SPECULATORS))


@pytest.mark.parametrize("layout", FILES)
def test_an_unknown_key_is_told(layout: str, told: pytest.LogCaptureFixture) -> None:
    checkpoint = of_layout(layout)
    assert find_format(checkpoint).name == layout.split()[1]
    if "vllm" not in layout:  # whose file is only names
        translate(checkpoint)
    assert "does not know" not in told.text  # nor is a key told that everybody writes
    changed = checkpoint.config | {"frobnicate": 7, "says_nothing": None}
    inside = "transformer_layer_config" in changed
    if inside:
        changed["transformer_layer_config"] = changed["transformer_layer_config"] | {"residual_gate": True}
    other = Checkpoint(f"{layout}/changed", changed, checkpoint.tensors)
    wanted = ["frobnicate"] + ["transformer_layer_config.residual_gate"] * inside
    assert find_format(other).unknown(changed, other.tensors) == wanted or inside
    if "vllm" not in layout:
        translate(other)
        assert f"config.json of {layout}/changed has keys" in told.text
        assert ", ".join(sorted(wanted)) in told.text and "says_nothing" not in told.text


@pytest.mark.parametrize(
    ("place", "layout"),
    [("dflash_config", "dflash dflash"), ("dflash_config", "dspark deepspec"), ("eagle_config", "eagle3 specforge")],
)
def test_keys_inside_are_told_too(place: str, layout: str) -> None:
    checkpoint = of_layout(layout)
    given = {place: (checkpoint.config.get(place) or {}) | {"frobnicate": 7}}
    changed = checkpoint.config | given
    assert find_format(checkpoint).unknown(changed, checkpoint.tensors) == [f"{place}.frobnicate"]


def test_a_value_that_means_another_layer_is_told() -> None:
    checkpoint = of_layout("eagle3 specforge")
    usual = {"use_aux_hidden_state": True, "use_mtp_layernorm": False, "parallel_draft_step": 1}
    other = {"use_aux_hidden_state": False, "use_mtp_layernorm": True, "parallel_draft_step": 4}
    found = find_format(checkpoint)
    assert found.unknown(checkpoint.config | {"eagle_config": usual}, checkpoint.tensors) == []
    told = found.unknown(checkpoint.config | {"eagle_config": other}, checkpoint.tensors)
    assert told == [f"eagle_config.{name}={value!r}" for name, value in other.items()]
    assert unknown_keys({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}) == ["a.c"]
    assert unknown_keys({"a": 1}, {"a": True}) == ["a=1"]


@pytest.mark.parametrize(
    ("layout", "place", "usual", "other"),
    [
        (
            "eagle3 specforge",
            None,
            {"target_model_type": "llama", "reuse_target_lm_head": True, "additional_fc": False},
            {"additional_fc": True},
        ),
        (
            "dspark deepspec",
            "dflash_config",
            {"projector_type": "dspark", "confidence_head_alpha": 1.0, "attention_mode": "gqa"},
            {"projector_type": "own", "attention_mode": "mla"},
        ),
        ("dspark deepspec", None, {"draft_vocab_size": 40}, {}),
        ("dflash2 dflash", "dflash_config", {"projector_type": "dflash2"}, {"projector_type": "own"}),  # ModelOpt's
    ],
)
def test_what_specforge_always_writes_is_known(
    layout: str, place: str | None, usual: dict[str, Any], other: dict[str, Any]
) -> None:
    checkpoint, found = of_layout(layout), find_format(of_layout(layout))
    for given, told in ((usual, {}), (other, other)):
        changed = checkpoint.config | ({place: (checkpoint.config.get(place) or {}) | given} if place else given)
        said = [f"{place}.{name}={value!r}" if place else f"{name}={value!r}" for name, value in told.items()]
        assert found.unknown(changed, checkpoint.tensors) == said


def test_the_auto_classes_tell_it_too(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    source = Path(demo.path("draft-dspark"))
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoConfig.from_pretrained(tmp_path)
    assert "does not know" not in told.text
    (tmp_path / "config.json").write_text(json.dumps(config | {"frobnicate": 7}))
    AutoConfig.from_pretrained(tmp_path)
    assert "does not know: frobnicate" in told.text


def test_windows_of_llama_layers_are_no_surprise_where_they_are_off() -> None:
    checkpoint = of_layout("eagle3 eagle3")
    found, off = find_format(checkpoint), {"sliding_window": 4096, "max_window_layers": 9, "use_sliding_window": False}
    assert found.unknown(checkpoint.config | off, checkpoint.tensors) == []
    on = off | {"use_sliding_window": True}
    assert set(found.unknown(checkpoint.config | on, checkpoint.tensors)) == off.keys()


# -- neighbours -------------------------------------------------------------------------------------------------------

DFLASH = "dflash dflash"
NEIGHBOURS: dict[str, tuple[dict[str, Any], str]] = {  # what the config says, or the name of a tensor
    "EAGLE-4": ({"architectures": ["LlamaForCausalLMEagle4"]}, "efficient_lm_head.down.weight"),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, "prefix_gru.weight_ih_l0"),
    "XPress": ({"speculators_model_type": "xpress"}, "refiner_head.in_proj.weight"),
    "LiLiCorr": ({"dflash_config": {"lilicorr_num_layers": 2}}, "lilicorr.layers.0.weight"),
    "FlashMap": ({"architectures": ["FlashMapDraftModel"]}, "flashmap.weight"),
    "Orthrus": ({"model_type": "orthrus"}, "model.layers.0.self_attn.q_proj_diff.weight"),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_refused_by_name(name: str, tmp_path: Path) -> None:
    said, tensor = NEIGHBOURS[name]
    checkpoint = of_layout(DFLASH)
    inside = {"dflash_config": checkpoint.config["dflash_config"] | said.get("dflash_config", {})}
    by_config = Checkpoint("here", checkpoint.config | said | inside, checkpoint.tensors)
    by_tensor = Checkpoint("here", checkpoint.config, checkpoint.tensors | {tensor: torch.zeros(1)})
    for one in (by_config, by_tensor):
        with pytest.raises(ForeignDraftError, match=f"here is a draft of the kind {name}, .*: .*another draft"):
            find_format(one)
    assert find_format(checkpoint).name == "dflash"
    # Whoever passes the path gets the same reason, and no language model is looked for there.
    (tmp_path / "config.json").write_text(json.dumps(by_config.config))
    save_file(dict(checkpoint.tensors), tmp_path / "model.safetensors")
    target: Any = None  # which is not reached
    with pytest.raises(ForeignDraftError, match=name):
        load_draft(tmp_path, target)


def test_a_flat_file_of_p_eagle_is_refused_by_name() -> None:
    checkpoint = of_layout("eagle3 modelopt")
    assert find_format(checkpoint).name == "modelopt"
    flat = Checkpoint("here", checkpoint.config, checkpoint.tensors | {"mask_hidden": torch.zeros(1)})
    with pytest.raises(ForeignDraftError, match=r"here is a P-EAGLE draft in a flat layout.*Serve it with"):
        find_format(flat)


def test_the_reason_for_eagle4_is_its_licence() -> None:
    checkpoint = of_layout("eagle3 eagle3")
    config = checkpoint.config | {"efficient_lm_head_config": {"rank": 8}, "layer_types": ["sliding_attention"]}
    with pytest.raises(ForeignDraftError, match=r"EAGLE-4.*licence.*forbids competing offerings"):
        find_format(Checkpoint("here", config, checkpoint.tensors))


@pytest.mark.parametrize(("name", "foreign"), [("Qwen3-8B-Uno", True), ("uno_lora", True), ("juno-eagle", False)])
def test_an_adapter_of_uno_is_no_draft_to_merge(name: str, foreign: bool, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model", "r": 8}))
    with pytest.raises(ForeignDraftError if foreign else OSError, match="kind Uno" if foreign else "adapter of PEFT"):
        AutoDraftModel.from_pretrained(folder)


# -- what engines read of DFlash files and hf_spec does not -----------------------------------------------------------


def changed(tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any]) -> Path:
    """Copy a draft of z-lab's layout with keys added at the top level and inside ``dflash_config``."""
    shutil.copytree(GOLDENS / "zl_dflash_qwen3" / "checkpoint", tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text()) | outer
    config["dflash_config"] |= inner
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in inner}))
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({}, {"use_swa": True, "swa_window_size": 128}),
        ({"attention_sink_bias": True}, {}),
        ({}, {"attention_sink_bias": True}),
        ({"attention_value_scale": 0.5}, {}),
        ({"is_neox_style": False}, {}),
        ({}, {"use_aux_hidden_state": False}),
        ({}, {"target_hidden_size": 64}),
    ],
)
def test_what_is_not_done_is_refused(outer: dict[str, Any], inner: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(outer | inner))} is .*(serve the draft|train a draft)"):
        AutoDraftModel.from_pretrained(changed(tmp_path, outer, inner))


def test_what_says_nothing_is_read(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    outer = {"attention_value_scale": 1.0, "is_neox_style": True, "attention_sink_bias": False}
    AutoDraftModel.from_pretrained(changed(tmp_path, outer, {"use_swa": False, "target_hidden_size": 32}))
    assert "does not know" not in told.text


def test_embeddings_of_their_own_for_masks_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, {}, {})
    torch.save(torch.zeros(32), path / "mask_embedding.pt")
    config = json.loads((path / "config.json").read_text())
    inside = config.pop("dflash_config")
    for written in (config | {"dflash_config": inside}, config | inside):  # whose keys may be at the top level
        (path / "config.json").write_text(json.dumps(written))
        with pytest.raises(OSError, match=r"mask_embedding\.pt, an embedding for mask tokens"):
            AutoDraftModel.from_pretrained(path)
    assert load_file(path / "model.safetensors")  # which stays as it is
