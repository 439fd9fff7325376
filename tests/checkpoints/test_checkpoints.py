"""Checkpoints of every project: what they are taken for, what is refused, and what is written."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ALL, CLOSE, GOLDENS, first_speculators, load_draft, load_target, outputs, tiny_target
from groups import in_another_process
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig, TorchAoConfig

from hf_spec import config_keys, demo
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert, export
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.kinds import find_format
from hf_spec.checkpoints.resolve import load_draft as load
from hf_spec.checkpoints.resolve import placement
from hf_spec.config_keys import unknown_keys
from hf_spec.drafts.eagle3 import formats
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.formats import aux_layer_ids
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.files import Checkpoint

PLAIN = "sp_eagle3_llama_ff"
IDS, GPT_OSS = "eagle_aux_hidden_state_layer_ids", {"vocab_size": 201088}


@torch.no_grad()
def logits(draft: Any, case: str) -> Tensor:
    """Run a golden case's prompt through a draft, one step."""
    if draft.config.shared_with_target:
        draft.bind(load_target(case))
    io = outputs(case)
    if "prompt_aux" in io:
        ids, features = io["prompt"], io["prompt_aux"]
    else:
        ids, features = io["input_ids"], io.get("features", io.get("aux_hidden_states"))
    rows = len(ids) - 1
    return draft(ids[None, 1:], features=features[None, :rows].to(draft.dtype)).logits


def copy_of(case: str, path: Path) -> Path:
    return Path(shutil.copytree(GOLDENS / case / "checkpoint", path))


def settings(draft: Any) -> dict[str, Any]:
    return {name: value for name, value in draft.config.to_diff_dict().items() if name != "architectures"}


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(path: Path, change: Any) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


# --- our own format --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_what_is_saved_is_loaded_by_the_auto_classes(case: str, tmp_path: Path) -> None:
    draft = load_draft(case)
    expected = logits(draft, case)
    draft.save_pretrained(tmp_path)
    for loader in (AutoModel, AutoDraftModel):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is type(draft)
        assert torch.equal(logits(again, case), expected)
        assert settings(again) == settings(draft)


@pytest.mark.parametrize("loader", [AutoModel, AutoDraftModel])
def test_dtype_and_device_map_are_honoured(loader: Any, tmp_path: Path) -> None:
    load_draft(PLAIN).save_pretrained(tmp_path)
    draft = loader.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert {weight.dtype for weight in draft.parameters()} == {torch.bfloat16}
    assert (draft.d2t.dtype, draft.t2d.dtype) == (torch.int64, torch.bool)
    assert draft.config.layers._attn_implementation == "eager"
    assert loader.from_pretrained(tmp_path).dtype == torch.float32
    draft = loader.from_pretrained(tmp_path, device_map="meta")
    assert {tensor.device.type for tensor in draft.state_dict().values()} == {"meta"}


def vllm_objections(config: dict[str, Any], names: set[str]) -> list[str]:
    """Apply the rules by which vLLM 0.33 reads a speculators config and its weights."""
    found = []
    if config.get("model_type") not in (None, "speculators"):
        found.append("model_type")
    if config.get("speculators_model_type") not in ("eagle3", "peagle", "dflash", "dflash2", "dspark"):
        found.append("speculators_model_type")
    speculators = config["speculators_config"]
    if not isinstance(speculators["proposal_methods"][0]["speculative_tokens"], int):
        found.append("speculative_tokens")
    verifier = speculators["verifier"]["name_or_path"]
    try:
        validate_repo_id(verifier or "")
    except ValueError:
        found.append("name_or_path")
    layers = config["transformer_layer_config"]
    if layers["model_type"] not in ("llama", "qwen3"):
        found.append("transformer_layer_config")
    flags = (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "draft_vocab_size",
        "target_hidden_size",
    )
    found += [name for name in flags if name not in config]
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and ids != sorted(set(ids)):
        found.append("eagle_aux_hidden_state_layer_ids")
    count = 3 if ids is None else len(ids)
    if layers["model_type"] == "llama" and layers.get("num_aux_hidden_states", 3) != count:
        found.append("num_aux_hidden_states")
    if ("layers.0.self_attn.q_proj.bias" in names) != layers["attention_bias"] or "fc.bias" in names:
        found.append("bias")
    if ("d2t" in names) != (config.get("draft_vocab_size") != layers["vocab_size"]):
        found.append("d2t")
    return found


@pytest.mark.parametrize("case", [case for case in ALL if not case.startswith("eagle1")])
def test_a_converted_draft_follows_the_rules_of_vllm(case: str, tmp_path: Path) -> None:
    convert(GOLDENS / case / "checkpoint", tmp_path / "out", verifier="some-org/some-target")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert vllm_objections(config, names) == []
    assert "verifier.name_or_path is no Hub id" not in str(inspect(tmp_path / "out"))


@pytest.mark.parametrize("ids", [[1], [1, 2], [1, 2, 3, 4], None])
def test_vllm_is_told_how_many_features_there_are(ids: list[int] | None, tmp_path: Path) -> None:
    config = Eagle3SpeculatorConfig.for_target(tiny_target().config, eagle_aux_hidden_state_layer_ids=ids)
    draft = Eagle3DraftModel(config)
    draft.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.config.num_features == (3 if ids is None else len(ids))
    loaded.config.speculators_config["verifier"]["name_or_path"] = "some-org/some-target"
    loaded.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert unknown_keys(config, Eagle3SpeculatorConfig.known_keys(config)) == []
    assert (
        vllm_objections(config, set(load_file(tmp_path / "model.safetensors")))
        == inspect(tmp_path).engines["vLLM"]
        == []
    )
    if ids is not None and len(ids) != 3:
        del config["transformer_layer_config"]["num_aux_hidden_states"]
        path.write_text(json.dumps(config))
        assert vllm_objections(config, set()) == ["num_aux_hidden_states"]
        assert inspect(tmp_path).engines["vLLM"] == [f"expects 3 features, not {len(ids)}; convert to speculators"]


def test_sglang_is_asked_to_lend_the_output_layer(tmp_path: Path) -> None:
    config = Eagle3SpeculatorConfig.for_target(tiny_target().config, shared_with_target=["lm_head"])
    draft = Eagle3DraftModel(config)
    export(draft, tmp_path / "out", "sglang")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] is None
    assert settings(AutoDraftModel.from_pretrained(tmp_path / "out"))["draft_vocab_size"] == 96


def test_the_rules_of_vllm_can_be_broken(tmp_path: Path) -> None:
    load_draft("eagle1_orig_a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = vllm_objections(config, set(load_file(tmp_path / "model.safetensors")))
    assert {"speculators_model_type", "name_or_path", "norm_before_residual", "bias"} <= set(found)


# --- formats of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "layout", "feature_layers"),
    [
        ("sp_eagle3_qwen3_tf_aux4", "speculators", (1, 3, 5, 6)),
        ("sp_peagle_llama", "speculators", (2, 4, 5)),
        ("eagle3_orig_a", "eagle3", (2, 4, 5)),
        ("specforge_eagle3_31", "specforge", (2, 4, 5)),
        ("eagle1_orig_a", "eagle", (-1,)),
        ("ds_dspark_qwen3", "deepspec", (2, 4, 5)),
    ],
)
def test_every_format_is_recognised(case: str, layout: str, feature_layers: tuple[int, ...]) -> None:
    assert find_format(read_checkpoint(GOLDENS / case / "checkpoint")).name == layout
    names = read_checkpoint(GOLDENS / case / "checkpoint", only_names=True)
    assert find_format(names).name == layout
    assert not any(tensor.device.type == "cpu" and tensor.numel() for tensor in names.tensors.values())
    assert load_draft(case).feature_layers(tiny_target(num_hidden_layers=8)) == feature_layers
    under_model = {f"model.{name}": one for name, one in names.tensors.items()}
    assert find_format(Checkpoint("here", names.config, under_model)).name == layout


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, [2, 4, 5], id="speculators"),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, [2, 4, 5], id="modelopt"),
        pytest.param(
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
            [2, 4, 5],
            id="specforge",
        ),
        pytest.param(
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            },
            [2, 4, 5],
            id="both",
        ),
        pytest.param({}, None, id="eagle"),
        pytest.param({"eagle_config": {}}, None, id="modelopt-silent"),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None, id="modelopt-default"),
        pytest.param(
            {"eagle_aux_hidden_state_layer_ids": [], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
            [2, 4],
            id="empty",
        ),
        pytest.param({"aux_hidden_states_layer_ids": [0, 3, 7]}, [1, 4, 8], id="angelslim"),
        pytest.param(GPT_OSS | {"eagle_config": {IDS: [24, 30, 36]}}, [24, 30, 36], id="gpt-oss-v3"),
        pytest.param(GPT_OSS | {"eagle_config": {IDS: [1, 17, 32]}}, [2, 18, 33], id="gpt-oss"),
    ],
)
def test_layer_ids_of_every_convention(config: dict[str, Any], expected: list[int] | None) -> None:
    assert aux_layer_ids(config) == expected


@pytest.mark.parametrize(
    ("changes", "ids", "told"),
    [
        ({"eagle_config": {IDS: [0, 3, 7]}}, [1, 4, 8], "one too low"),
        ({"aux_hidden_states_layer_ids": [0, 3, 7]}, [1, 4, 8], "does not know aux_hidden_states_layer_ids"),
        ({"aux_hidden_states_layer_ids": [1, 3, 4]}, [2, 4, 5], None),  # which it reads unasked
    ],
)
def test_vllm_reads_layer_ids_in_its_own_way(
    changes: dict[str, Any], ids: list[int], told: str | None, tmp_path: Path
) -> None:
    path = copy_of("specforge_eagle3_plain", tmp_path / "draft")
    edit_config(path, **changes)
    report = inspect(path)
    assert report.config.eagle_aux_hidden_state_layer_ids == ids
    assert find_format(read_checkpoint(path)).unknown(changes, {}) == []
    assert report.engines["vLLM"] == [] if told is None else told in report.engines["vLLM"][0]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_modelopt_export(prefix: str, tmp_path: Path) -> None:
    """NeMo's drafts have the prefix."""
    path = copy_of("specforge_eagle3_plain", tmp_path / "draft")

    def rename(weights: dict[str, Tensor]) -> None:
        for name in weights.keys() - {"lm_head.weight", "d2t", "t2d"}:
            weights[prefix + name.replace("midlayer.", "layers.0.")] = weights.pop(name)
        del weights["t2d"]

    edit_weights(path, rename)
    edit_config(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True})
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32)
    assert find_format(read_checkpoint(path)).name == "modelopt"
    assert draft.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    twin = load_draft("specforge_eagle3_plain")
    assert torch.equal(logits(draft, "specforge_eagle3_plain"), logits(twin, "specforge_eagle3_plain"))
    assert torch.equal(draft.t2d, twin.t2d)
    assert type(load(path, load_target("specforge_eagle3_plain"))) is Eagle3DraftModel
    assert any("doubles the prefix" in one for one in inspect(path).engines["vLLM"]) is bool(prefix)


@pytest.mark.parametrize("case", ["specforge_eagle3_plain", "ds_dspark_qwen3"])
def test_tokens_listed_by_frequency_are_the_same_draft(case: str, tmp_path: Path) -> None:
    """ModelOpt and NeMo list them so; a row of every output layer belongs to each."""
    listed, found = torch.tensor([9, 2, 30, 5]), []
    for ids in (listed, listed.sort().values, torch.tensor([2, 5, 5, 30])):
        path = copy_of(case, tmp_path / str(len(found)))
        weights = load_file(path / "model.safetensors")
        weights.pop("t2d", None)
        ends = weights.keys() & {"lm_head.weight", "markov_head.markov_w2.weight"}
        rows = {name: weights[name][ids] for name in ends}
        weights |= rows | {"d2t": ids - torch.arange(4)}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        if len(found) == 2:
            with pytest.raises(ValueError, match="must ascend"):
                AutoDraftModel.from_pretrained(path)
        else:
            found.append(AutoDraftModel.from_pretrained(path).state_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


def test_eagle1_of_the_first_versions_of_speculators(tmp_path: Path) -> None:
    checkpoint = first_speculators("eagle1_orig_a")
    save_file(dict(checkpoint.tensors), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    draft, known = AutoDraftModel.from_pretrained(tmp_path, dtype=torch.float32), load_draft("eagle1_orig_a")
    assert draft.config.fc_bias is True
    assert all(inspect(tmp_path).engines.values())  # each is told why not
    assert torch.equal(logits(draft, "eagle1_orig_a"), logits(known, "eagle1_orig_a"))
    edit_config(tmp_path, layernorms=True)
    with pytest.raises(ValueError, match="layernorms is true: "):
        AutoDraftModel.from_pretrained(tmp_path)


def test_kinds_of_layers_may_be_copied_from_the_target(tmp_path: Path) -> None:
    path = copy_of("specforge_eagle3_plain", tmp_path / "draft")
    edit_config(path, layer_types=["full_attention"] * 6)
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32)
    assert draft.config.layers.layer_types in (None, ["full_attention"])
    twin = load_draft("specforge_eagle3_plain")
    assert torch.equal(logits(draft, "specforge_eagle3_plain"), logits(twin, "specforge_eagle3_plain"))


def test_a_variant_is_read_from_its_own_files(tmp_path: Path) -> None:
    draft, io = load_draft("specforge_eagle3_plain"), "specforge_eagle3_plain"
    draft.save_pretrained(tmp_path / "both", variant="fp16")
    shutil.copytree(tmp_path / "both", tmp_path / "alone")
    other = Eagle3DraftModel(draft.config)
    other.save_pretrained(tmp_path / "both")
    for place in ("alone", "both"):
        found = AutoDraftModel.from_pretrained(tmp_path / place, variant="fp16", dtype=torch.float32)
        assert torch.equal(logits(found, io), logits(draft, io))
    assert type(load(tmp_path / "alone", load_target(io), variant="fp16")) is Eagle3DraftModel
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoDraftModel.from_pretrained(tmp_path / "alone")
    with pytest.raises(OSError, match=r"model\.bf16\.safetensors"):
        AutoDraftModel.from_pretrained(tmp_path / "both", variant="bf16")


@pytest.mark.parametrize(("written", "meant"), [(True, "norm_output"), (False, "norm_before_lm_head"), (None, None)])
def test_norm_output_of_specforge_is_that_of_engines(
    written: bool | None, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until September 2026 SpecForge meant the norm before the head by it."""
    told: list[str] = []
    monkeypatch.setattr(formats.logger, "warning_once", told.append)
    path = copy_of("specforge_eagle3_31", tmp_path / "draft")
    edit_config(path, norm_output=written)
    config = AutoDraftModel.from_pretrained(path).config
    assert (config.norm_output, config.norm_before_lm_head) == (written is True, True)
    assert len(told) == (meant is not None)
    assert meant is None or f"set {meant} to false" in told[0]
    edit_config(path, served_flags=True)  # which says that the engines' meaning is meant
    AutoDraftModel.from_pretrained(path)
    assert len(told) == (meant is not None)


def test_a_silent_config_has_rope_base_10000_and_a_wrong_layer_count_does_not_matter(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_b_fullvocab", tmp_path / "draft")
    layers = AutoDraftModel.from_pretrained(path).config.layers
    assert layers.rope_parameters["rope_theta"] == 10000.0
    assert layers.num_hidden_layers == 1  # config.json says 40
    edit_config(path, rope_theta=77.0)
    assert AutoDraftModel.from_pretrained(path).config.layers.rope_parameters["rope_theta"] == 77.0


def test_of_two_ropes_speculators_takes_that_of_windows(tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    layers = json.loads((path / "config.json").read_text())["transformer_layer_config"]
    ropes = {"full_attention": 77.0, "sliding_attention": 10000.0}
    nested = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in ropes.items()}
    edit_config(path, transformer_layer_config=layers | {"rope_parameters": nested})
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32)
    assert draft.config.layers.rope_parameters == nested["sliding_attention"]


@pytest.mark.parametrize("case", [PLAIN, "eagle3_orig_b_fullvocab"])
def test_the_rope_of_texts_with_images_is_the_usual_one_for_text(case: str, tmp_path: Path) -> None:
    """SpecForge's drafts for Qwen2.5-VL have it."""
    path, more = copy_of(case, tmp_path / "draft"), {"mrope_section": [1, 1, 2]}
    if case == PLAIN:
        layers = json.loads((path / "config.json").read_text())["transformer_layer_config"]
        rope = layers["rope_parameters"] | {"rope_type": "mrope"}
        edit_config(path, transformer_layer_config=layers | {"rope_parameters": rope | more})
    else:
        edit_config(path, rope_scaling={"type": "mrope"} | more)
    draft, known = AutoDraftModel.from_pretrained(path, dtype=torch.float32), load_draft(case)
    assert draft.config.layers.rope_parameters == known.config.layers.rope_parameters
    assert torch.equal(logits(draft, case), logits(known, case))


def test_a_window_of_llama_layers_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' config of llama has none."""
    told: list[str] = []
    monkeypatch.setattr(config_keys.logger, "warning_once", told.append)
    path = copy_of("specforge_eagle3_plain", tmp_path / "draft")
    edit_config(path, layer_types=["sliding_attention"], sliding_window=3)
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32)
    draft.save_pretrained(tmp_path / "saved")
    for one in (draft, AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)):
        assert one.config.layers.sliding_window == 3
        windowed, known = (
            logits(any, "specforge_eagle3_plain") for any in (one, load_draft("specforge_eagle3_plain"))
        )
        torch.testing.assert_close(windowed[:, :3], known[:, :3])
        assert not torch.allclose(windowed[:, 3:], known[:, 3:], atol=1e-3)
    assert told == []


def test_a_bias_of_queries_keys_and_values_alone(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_b_fullvocab", tmp_path / "draft")

    def add_bias(weights: dict[str, Tensor]) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = weights[f"midlayer.self_attn.{name}.weight"]
            weights[f"midlayer.self_attn.{name}.bias"] = weight.new_ones(len(weight))

    edit_weights(path, add_bias)
    draft = AutoDraftModel.from_pretrained(path)
    assert draft.layers[0].self_attn.q_proj.bias.all()
    assert not draft.layers[0].self_attn.o_proj.bias.any()


def test_unsorted_layer_ids_of_others_keep_their_meaning(tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    order = [2, 0, 1]  # of the features that the draft was trained on as 2, 4, 5
    columns = torch.cat([torch.arange(i * 32, (i + 1) * 32) for i in order])
    edit_weights(path, lambda weights: weights.update({"fc.weight": weights["fc.weight"][:, columns].contiguous()}))
    edit_config(path, eagle_aux_hidden_state_layer_ids=[5, 2, 4])
    draft = AutoDraftModel.from_pretrained(path)
    assert draft.feature_layers(tiny_target()) == (5, 2, 4)
    io = outputs(PLAIN)
    given = {"input_ids": io["input_ids"][None, 1:], "features": io["aux_hidden_states"][None, :-1]}
    shuffled = given | {"features": given["features"][..., columns]}
    torch.testing.assert_close(draft(**shuffled).logits[0, :13], io["ttt_logits"][0], **CLOSE)
    expected = draft(**shuffled).logits
    with pytest.raises(ValueError, match="ascending"):  # because those weights stay as they are
        draft.save_pretrained(tmp_path / "given", state_dict=draft.state_dict())
    draft.save_pretrained(tmp_path / "saved")
    convert(path, tmp_path / "out")
    for place in ("saved", "out"):
        again = AutoModel.from_pretrained(tmp_path / place)
        assert again.feature_layers(tiny_target()) == (2, 4, 5)
        torch.testing.assert_close(again(**given).logits, expected)
    torch.testing.assert_close(draft(**given).logits, expected)


def test_heads_that_do_not_divide_the_width_are_named(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_a", tmp_path / "draft")
    edit_config(path, num_attention_heads=6, head_dim=8, num_key_value_heads=2)
    with pytest.raises(ValueError, match="num_attention_heads is 6 and hidden_size 32: transformers refuses"):
        AutoDraftModel.from_pretrained(path)


def test_positions_are_raised_to_those_of_the_target() -> None:
    target = load_target("eagle3_orig_a")
    target.config.max_position_embeddings = 4096
    path = GOLDENS / "eagle3_orig_a" / "checkpoint"
    assert AutoDraftModel.from_pretrained(path).config.layers.max_position_embeddings == 2048
    assert AutoDraftModel.from_pretrained(path, target=target).config.layers.max_position_embeddings == 4096


def test_a_target_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 128, but the target has 96"):
        AutoDraftModel.from_pretrained(GOLDENS / "eagle3_orig_a" / "checkpoint", target=tiny_target())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_draft_that_was_saved_quantised_is_read_by_its_path(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    whole, packed, target = tmp_path / "whole", tmp_path / "packed", tiny_target(hidden_size=64)
    config = Eagle3SpeculatorConfig.for_target(target.config)
    # bitsandbytes multiplies by no other widths than multiples of 64 where the processor has bfloat16.
    config.transformer_layer_config.intermediate_size = 64
    Eagle3DraftModel(config).save_pretrained(whole)
    given = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    known = AutoModel.from_pretrained(whole, quantization_config=given, **placement(target))
    known.save_pretrained(packed)
    draft = load(packed, target, **placement(target))
    assert draft.fc.weight.dtype is known.fc.weight.dtype in (torch.uint8, torch.int8)
    read = {"input_ids": torch.arange(9)[None], "features": torch.randn(1, 9, draft.fc.in_features)}
    assert torch.equal(draft(**read).logits, known(**read).logits)
    with pytest.raises(ValueError, match=r"was saved quantised.*inspect the unquantised draft"):
        inspect(packed)
    with pytest.raises(ValueError, match="are quantised, which no layout can express; convert the unquantised draft"):
        convert(packed, tmp_path / "out", "eagle3", **placement(target))


def test_a_draft_that_torchao_quantised_is_read_by_its_path(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    given = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    known = AutoModel.from_pretrained(demo.path("draft-eagle3"), quantization_config=given)
    known.save_pretrained(tmp_path)
    draft = AutoDraftModel.from_pretrained(tmp_path)
    assert type(draft.fc.weight) is type(known.fc.weight) is not torch.nn.Parameter
    assert torch.equal(draft.fc.weight.dequantize(), known.fc.weight.dequantize())


def test_quantised_drafts_of_others_are_refused_as_such(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_b_fullvocab", tmp_path / "draft")
    edit_config(path, quantization_config={"quant_method": "awq"})
    AutoDraftModel.from_pretrained(path)  # what it says may be of its target
    edit_weights(path, lambda weights: weights.update({"fc.qweight": torch.ones(4, dtype=torch.int32)}))
    with pytest.raises(ValueError, match=r"fc\.qweight is part of weights that are stored quantised"):
        AutoDraftModel.from_pretrained(path)


# --- damaged files ---------------------------------------------------------------------------------------------------


def set_d2t(*ids: int) -> Any:
    def change(weights: dict[str, Tensor]) -> None:
        weights["d2t"][: len(ids)] = torch.tensor(ids) - torch.arange(len(ids))

    return change


WRONG_WEIGHTS = {
    "fc.weight is missing": lambda weights: weights.pop("fc.weight"),
    "extra.weight is not part of this draft": lambda weights: weights.update({"extra.weight": torch.ones(2)}),
    r"norm.weight has shape \(31,\) instead of \(32,\)": lambda weights: weights.update(
        {"norm.weight": torch.ones(31)}
    ),
    "embed_tokens.weight holds values that are not finite": lambda weights: weights["embed_tokens.weight"].fill_(
        torch.nan
    ),
    "which must ascend within 0..127": set_d2t(9, 8),
    r"ids \[-1, 3": set_d2t(-1, 3),
    "t2d marks other tokens": lambda weights: weights.update({"t2d": ~weights["t2d"]}),
}


@pytest.mark.parametrize("message", WRONG_WEIGHTS)
@pytest.mark.parametrize("loader", [AutoModel, AutoDraftModel])
def test_wrong_weights_are_named(loader: Any, message: str, tmp_path: Path) -> None:
    load_draft(PLAIN).save_pretrained(tmp_path)
    edit_weights(tmp_path, WRONG_WEIGHTS[message])
    with pytest.raises(ValueError, match=message):
        loader.from_pretrained(tmp_path)
    assert inspect(tmp_path).problem is not None


def test_a_vocabulary_beyond_the_target_is_refused(tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    edit_weights(path, lambda weights: weights["d2t"].__setitem__(-1, 128))
    with pytest.raises(ValueError, match=r"must ascend within 0\.\.127"):
        AutoDraftModel.from_pretrained(path)


@pytest.mark.parametrize("loader", [AutoModel, AutoDraftModel])
def test_a_truncated_file_is_named(loader: Any, tmp_path: Path) -> None:
    load_draft(PLAIN).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="cut off"):
        loader.from_pretrained(tmp_path)


def test_a_truncated_pickle_is_named(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_a", tmp_path / "draft")
    file = path / "pytorch_model.bin"
    for size in (-3000, 100, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(OSError, match=r"pytorch_model\.bin is cut off"):
            AutoDraftModel.from_pretrained(path)


def test_biases_without_their_layer_are_named(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_b_fullvocab", tmp_path / "draft")
    bias = {"midlayer.self_attn.q_proj.bias": torch.ones(32)}
    edit_weights(path, lambda weights: weights.update(bias) or weights.pop("midlayer.self_attn.o_proj.weight"))
    with pytest.raises(ValueError, match=r"o_proj\.weight is missing"):
        AutoDraftModel.from_pretrained(path)


def test_the_loading_report_is_given_when_asked_for(tmp_path: Path) -> None:
    source = GOLDENS / "eagle3_orig_a" / "checkpoint"
    draft, info = AutoDraftModel.from_pretrained(source, target=load_target("eagle3_orig_a"), output_loading_info=True)
    assert isinstance(draft, Eagle3DraftModel)
    assert not info["missing_keys"]


def test_a_half_copied_directory_is_refused(tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", "d2t": "model-00002-of-00002.safetensors"}
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"model-00002-of-00002.safetensors, which is missing"):
        AutoDraftModel.from_pretrained(path)
    (path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(OSError, match="not valid JSON"):
        AutoDraftModel.from_pretrained(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match="no weights"):
        AutoDraftModel.from_pretrained(path)
    (path / "config.json").unlink()
    with pytest.raises(OSError, match=r"no config\.json"):
        AutoDraftModel.from_pretrained(path)
    with pytest.raises(OSError, match="no such directory, and it cannot be a name on the Hub"):
        AutoDraftModel.from_pretrained(path / "away")
    with pytest.raises(OSError, match="is a file; pass the directory of a model"):
        AutoDraftModel.from_pretrained(path / "model-00001-of-00002.safetensors")


def test_a_draft_that_is_out_of_reach_is_not_taken_for_none() -> None:
    with pytest.raises(OSError, match="connect"):
        AutoDraftModel.from_pretrained("some-org/some-draft", local_files_only=True)


def test_shards_are_read_together(tmp_path: Path) -> None:
    draft = load_draft(PLAIN)
    draft.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = AutoDraftModel.from_pretrained(tmp_path)
    assert torch.equal(logits(again, PLAIN), logits(draft, PLAIN))


def test_pickled_files_are_not_opened_for_whoever_wants_safetensors(tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    tensors = load_file(path / "model.safetensors")
    assert AutoDraftModel.from_pretrained(path, use_safetensors=True).dtype == load_draft(PLAIN).dtype
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    for given in ({}, {"use_safetensors": False}):
        AutoDraftModel.from_pretrained(path, **given)
    with pytest.raises(OSError, match=r"no weights; it should hold one of \('medusa_lm_head.safetensors', 'model.saf"):
        AutoDraftModel.from_pretrained(path, use_safetensors=True)
    with pytest.raises(ValueError, match=r"no draft can be read .*no weights; it should hold one of"):
        load(path, load_target(PLAIN), use_safetensors=True)
    places = dict.fromkeys(tensors, "pytorch_model.bin")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(OSError, match=r"names pytorch_model\.bin, which is no safetensors file"):
        AutoDraftModel.from_pretrained(path, use_safetensors=True)


@pytest.mark.parametrize("name", ["config", "state_dict"])
def test_what_the_files_say_is_no_option(name: str) -> None:
    given = {name: getattr(load_draft(PLAIN), name)}
    with pytest.raises(TypeError, match=f"^{name} is read from the files of .*: leave it out"):
        AutoDraftModel.from_pretrained(GOLDENS / PLAIN / "checkpoint", **given)


class Bomb:
    """Create a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    path = copy_of("eagle3_orig_a", tmp_path / "draft")
    torch.save({"fc.weight": Bomb(tmp_path / "exploded")}, path / "pytorch_model.bin")
    with pytest.raises(OSError, match="holds more than tensors"):
        AutoDraftModel.from_pretrained(path)
    assert not (tmp_path / "exploded").exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "exploded").exists()  # the bomb works


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": "yes"}, "norm_output is 'yes'; set True or False"),
        ({"speculators_config": "eagle3"}, "speculators_config is a str; pass a dict"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids is 3; list whole numbers"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "there is no 'vocab_size'; complete the config"),
        ({"transformer_layer_config": {"vocab_size": "96"}}, "Field 'vocab_size' expected int, got str"),
        ({"speculators_model_type": "mtp", "transformer_layer_config": "llama"}, "no transformer_layer_config"),
    ],
)
def test_a_config_of_nonsense_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = copy_of(PLAIN, tmp_path / "draft")
    edit_config(path, **changes)
    for read in (AutoDraftModel.from_pretrained, inspect):
        with pytest.raises(ValueError, match=f"(?s)draft, read as speculators: .*{message}") as error:
            read(path)
        assert str(error.value).count("read as") == 1


def test_other_models_are_refused(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="none of the drafts that hf_spec knows by its tensors"):
        AutoDraftModel.from_pretrained(tmp_path / "llama")
    path = copy_of(PLAIN, tmp_path / "draft")
    edit_config(path, speculators_model_type="dflash9")
    with pytest.raises(ValueError, match="'dflash9'"):
        AutoDraftModel.from_pretrained(path)
    edit_config(path, speculators_model_type="eagle3", transformer_layer_config=None)
    with pytest.raises(ValueError, match="no transformer_layer_config"):
        AutoDraftModel.from_pretrained(path)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoDraftModel()


# --- reports and conversion ------------------------------------------------------------------------------------------


def fill_the_disk(source: Path, out: Path, to: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))
    with pytest.raises(OSError, match=r"out could not be written, and nothing of it is kept .*File too large"):
        convert(source, out, to)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("to", ["speculators", "eagle3"])
def test_nothing_is_left_when_the_disk_is_full(to: str, tmp_path: Path) -> None:
    source = GOLDENS / "eagle3_orig_a" / "checkpoint"
    assert in_another_process(fill_the_disk, source, tmp_path / "out", to) == 0
    assert list(tmp_path.iterdir()) == []


EXPRESSIBLE = {
    "eagle3": {"eagle3_orig_a", "eagle3_orig_b_fullvocab", PLAIN, "sp_eagle3_e2e_llama"} | {"specforge_eagle3_plain"},
    "speculators": set(ALL),
}
EXPRESSIBLE["sglang"] = EXPRESSIBLE["eagle3"] | {"sp_eagle3_llama_ft_fullvocab", "specforge_eagle3_31"}


@pytest.mark.parametrize("to", ["speculators", "eagle3", "sglang"])
@pytest.mark.parametrize("case", ALL)
def test_conversion_keeps_the_draft_or_refuses(case: str, to: str, tmp_path: Path) -> None:
    source, out = GOLDENS / case / "checkpoint", tmp_path / "out"
    if case not in EXPRESSIBLE[to]:
        with pytest.raises(ValueError, match=r"cannot express|has no"):
            convert(source, out, to)
        assert list(tmp_path.iterdir()) == []
        return
    convert(source, out, to)
    draft, again = (AutoDraftModel.from_pretrained(path) for path in (source, out))
    assert torch.equal(logits(again, case), logits(draft, case))
    only_in_speculators = {"speculators_config": None, "embed_requires_grad": None}
    assert settings(again) | only_in_speculators == settings(draft) | only_in_speculators
    engine = {"speculators": "vLLM", "eagle3": "llama.cpp", "sglang": "SGLang"}[to]
    objections = [o for o in inspect(out).engines[engine] if "Hub id" not in o]
    assert objections == ([] if case != "eagle1_orig_a" else ["does not know speculators_model_type 'eagle'"])


def test_a_draft_of_another_width_is_exported(tmp_path: Path) -> None:
    target = tiny_target(hidden_size=48)
    layers = {"hidden_size": 32, "head_dim": 8}
    config = Eagle3SpeculatorConfig.for_target(target.config, layers, target_hidden_size=48)
    draft = Eagle3DraftModel(config).eval()
    export(draft, tmp_path / "out", "eagle3")
    again = AutoDraftModel.from_pretrained(tmp_path / "out")
    given = {"input_ids": torch.arange(5)[None], "features": torch.randn(1, 5, 144)}
    assert again.config.target_hidden_size == 48
    assert torch.equal(again(**given).logits, draft(**given).logits)


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GOLDENS / PLAIN / "checkpoint"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="exists"):
        convert(source, tmp_path / "full")
    with pytest.raises(ValueError, match="'gguf'"):
        convert(source, tmp_path / "out", "gguf")  # type: ignore[arg-type]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hf_spec.checkpoints.conversion.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(source, tmp_path / "out", "eagle3")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_report_says_what_a_checkpoint_is() -> None:
    report = inspect(GOLDENS / "sp_eagle3_qwen3_tt_2layers" / "checkpoint")
    assert report.problem is None
    text = str(report)
    for part in (
        "speculators (eagle3)",
        "2 qwen3 layer(s) of width 32",
        "tiny-random/qwen3-target, vocabulary 100",
        "hidden_states[2, 3, 4] of width 32",
        "32 of 100 tokens",
        "norm_before_residual=True",
        "llama.cpp    reads drafts with num_hidden_layers 1, not 2",
    ):
        assert part in text
    specforge = inspect(GOLDENS / "specforge_eagle3_31" / "checkpoint")
    assert specforge.engines["vLLM"] == specforge.engines["SGLang"] == []
    assert inspect(GOLDENS / "eagle3_orig_a" / "checkpoint").engines == {
        "vLLM": [],
        "SGLang": [],
        "llama.cpp": [],
        "speculators": ["does not read this layout; convert to speculators"],
    }


def test_the_config_alone_is_ours(tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, Eagle3SpeculatorConfig)
    assert config.architectures == ["Eagle3DraftModel"]
    assert config.shared_with_target == ["embed_tokens"]


@torch.no_grad()
def test_a_draft_that_borrows_is_written_whole_for_readers_that_lend_nothing(tmp_path: Path) -> None:
    case = "eagle3_orig_a"
    source, target = GOLDENS / case / "checkpoint", load_target(case)
    shared = AutoDraftModel.from_pretrained(source).config.shared_with_target
    assert shared == ["embed_tokens"]
    convert(source, tmp_path / "borrows")
    memory, name = inspect(tmp_path / "borrows").engines["speculators"]
    assert memory.startswith(
        "leaves the missing embed_tokens uninitialised, so they hold any numbers; name the target"
    )
    assert name == "reads only drafts that name their target; convert with --verifier"
    convert(tmp_path / "borrows", tmp_path / "whole", self_contained=True, target=target)
    assert inspect(tmp_path / "whole").engines["speculators"] == [name]
    convert(tmp_path / "borrows", tmp_path / "named", verifier="some-org/some-target")
    assert inspect(tmp_path / "named").engines["speculators"] == []
    whole = AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(whole.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(logits(whole, case), logits(AutoDraftModel.from_pretrained(source, target=target), case))
    with pytest.raises(ValueError, match="self_contained=True needs target="):
        convert(tmp_path / "borrows", tmp_path / "no", self_contained=True)


@pytest.mark.parametrize("case", ALL)
def test_no_conversion_is_advised_that_is_then_refused(case: str, tmp_path: Path) -> None:
    found = inspect(GOLDENS / case / "checkpoint").engines.values()
    advised = {match for lines in found for line in lines for match in re.findall(r"convert to (\w+)", line)}
    for layout in advised:
        convert(GOLDENS / case / "checkpoint", tmp_path / layout, to=layout)
