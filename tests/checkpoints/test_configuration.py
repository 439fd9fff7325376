"""Configs: what they refuse, what they write, and what they read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, prompts
from golden import tiny_target
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, DynamicCache, LlamaConfig, Qwen3Config

from hf_spec import configuration
from hf_spec.configuration import SpeculatorConfig, default_speculators_config
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle3.configuration import EAGLE3_FLAGS, Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.settings import SpeculationConfig
from hf_spec.training import new_draft
from hf_spec.training.checks import name_target

ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
NESTED = {"full_attention": ROPE, "sliding_attention": ROPE}


def tiny(**changes: Any) -> Eagle3SpeculatorConfig:
    layers = LlamaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    return Eagle3SpeculatorConfig(**{"transformer_layer_config": layers} | changes)


def methods(**changes: Any) -> dict[str, Any]:
    config = default_speculators_config("eagle3")
    config["proposal_methods"][0] |= changes
    return config


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"draft_vocab_size": "40"}, TypeError, r"draft_vocab_size is '40'; set a whole number"),
        ({"draft_vocab_size": True}, TypeError, r"draft_vocab_size is True"),
        ({"draft_vocab_size": 97}, ValueError, r"draft_vocab_size is 97, larger than .* 96 .*; set at most that"),
        ({"target_hidden_size": 0}, TypeError, r"target_hidden_size is 0"),
        ({"norm_output": 1}, TypeError, r"norm_output is 1; set True or False"),
        ({"norm_before_residual": None}, TypeError, r"norm_before_residual is None"),
        ({"fc_norm": True, "norm_before_fc": True}, ValueError, r"fc_norm and norm_before_fc .* not both"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}, ValueError, r"layer_ids \[2, 5, 4\] .* set \[2, 4, 5\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, ValueError, r"\[2, 2, 4\] .* set \[2, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2]}, ValueError, r"\[-1, 2\]; list whole numbers"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, ValueError, r"\['2'\]; list whole numbers"),
        ({"eagle_aux_hidden_state_layer_ids": []}, ValueError, r"\[\]; list whole numbers"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, ValueError, r"is 2; list whole numbers"),
        ({"tie_word_embeddings": True}, ValueError, r"tie_word_embeddings is True.*set False"),
        ({"speculators_model_type": "eagle"}, ValueError, r"speculators_model_type is 'eagle'.*AutoConfig"),
        ({"shared_with_target": ["fc"]}, ValueError, r"shared_with_target is \['fc'\]"),
        ({"transformer_layer_config": 3}, TypeError, r"transformer_layer_config is a int"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, ValueError, r"is 'gpt2'; build .*llama"),
        (
            {"transformer_layer_config": {"layer_types": ["chunked_attention"], "num_hidden_layers": 1}},
            ValueError,
            r"layer_types is \['chunked_attention'\]",
        ),
        (
            {"transformer_layer_config": {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}},
            ValueError,
            r"sliding_window is not set",
        ),
        ({"transformer_layer_config": {"head_dim": 0}}, ValueError, r"head_dim is 0; set a whole number"),
        ({"transformer_layer_config": {"num_key_value_heads": 3}}, ValueError, r"heads is 32; set a multiple .* 3"),
        ({"transformer_layer_config": {"hidden_act": "x"}}, ValueError, r"hidden_act is 'x'; transformers knows"),
        ({"transformer_layer_config": {"rope_parameters": NESTED}}, ValueError, r"describe one rope for all"),
        (
            {"transformer_layer_config": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}},
            ValueError,
            r"llama layers rotate all of a head: drop partial_rotary_factor",
        ),
        ({"speculators_config": []}, TypeError, r"speculators_config is a list"),
        ({"speculators_config": default_speculators_config("mtp")}, ValueError, r"algorithm is 'mtp'.*'eagle3'"),
        ({"speculators_config": methods() | {"proposal_methods": []}}, ValueError, r"proposal_methods is \[\]"),
        ({"speculators_config": methods(speculative_tokens=0)}, ValueError, r"is 0; give a whole number"),
        ({"speculators_config": methods() | {"verifier": None}}, TypeError, r"verifier is None; name the target"),
        (
            {"speculators_config": methods() | {"verifier": {"name_or_path": ["a"]}}},
            TypeError,
            r"verifier is \{'name_or_path': \['a'\]\}; name the target",
        ),
        ({"speculators_config": methods(proposal_type="x")}, ValueError, r"is 'greedy'; name one of \['x'\]"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    tiny()
    with pytest.raises(error, match=named):
        tiny(**changes)


def test_a_config_spoilt_later_is_not_saved(tmp_path: Path) -> None:
    config = tiny(eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    config.eagle_aux_hidden_state_layer_ids = [4, 1, 2]
    with pytest.raises(ValueError, match="ascending"):
        config.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        tiny(draft_vocab_size=40, norm_output=True, target_hidden_size=48),
        Eagle3SpeculatorConfig(
            transformer_layer_config=Qwen3Config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
        ),
        EagleSpeculatorConfig(fc_bias=False, shared_with_target=["lm_head"]),
    ],
)
def test_a_saved_config_is_read_back_by_the_auto_class(config: SpeculatorConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert type(again.layers) is type(config.layers)
    assert again.to_diff_dict() == config.to_diff_dict()


def test_every_flag_is_written(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {name: name == "norm_before_lm_head" for name in EAGLE3_FLAGS}
    assert {name: written[name] for name in EAGLE3_FLAGS} == expected
    assert written["model_type"] == "speculators"
    assert written["speculators_model_type"] == written["speculators_config"]["algorithm"] == "eagle3"
    assert written["draft_vocab_size"] == 96
    # A value that is transformers' default must be there too: other readers do not know it.
    default = LlamaConfig(num_hidden_layers=1)
    Eagle3SpeculatorConfig(transformer_layer_config=default).save_pretrained(tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert layers["hidden_size"] == default.hidden_size
    assert layers["model_type"] == "llama"


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'dflash9'.*'eagle', 'eagle3'"):
        SpeculatorConfig.from_dict({"speculators_model_type": "dflash9"})


def test_caches_and_masks_find_the_decoder_layers() -> None:
    layers = {"model_type": "qwen3", "num_hidden_layers": 2, "sliding_window": 4, "use_sliding_window": True}
    config = tiny(transformer_layer_config=layers | {"layer_types": ["full_attention", "sliding_attention"]})
    assert [layer.is_sliding for layer in DynamicCache(config=config).layers] == [False, True]


def test_a_new_draft_takes_its_shape_from_the_target() -> None:
    target = tiny_target(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}).config
    config = Eagle3SpeculatorConfig.for_target(target, draft_vocab_size=40)
    layers = config.layers
    assert (layers.model_type, layers.num_hidden_layers, layers.vocab_size) == ("llama", 1, 96)
    assert (layers.hidden_size, layers.max_position_embeddings) == (32, 512)
    assert layers.rope_parameters == target.rope_parameters
    assert layers.rope_parameters is not target.rope_parameters
    assert config.feature_layers(8) == (2, 4, 5)
    assert Eagle3SpeculatorConfig.for_target(Qwen3Config()).layers.model_type == "qwen3"


def test_a_new_draft_rotates_all_of_a_head_where_the_target_rotates_a_part() -> None:
    rope = ROPE | {"partial_rotary_factor": 0.5}
    target = CONFIG_MAPPING["glm4_moe"](hidden_size=32, num_attention_heads=8, head_dim=8, rope_parameters=rope)
    assert Eagle3SpeculatorConfig.for_target(target).layers.rope_parameters == ROPE


def test_a_new_draft_has_as_many_heads_as_its_width_holds() -> None:
    """GLM-4.5 has 96 heads of 128 in a width of 5120; transformers refuses such layers of llama."""
    sizes = {"hidden_size": 40, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 4}
    layers = Eagle3SpeculatorConfig.for_target(CONFIG_MAPPING["glm4_moe"](**sizes)).layers
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (10, 2, 4)


def test_a_new_draft_of_what_has_no_attention_keeps_common_proportions() -> None:
    layers = MTPSpeculatorConfig.for_target(build("mamba", hidden_size=128, intermediate_size=256).config).layers
    assert (layers.hidden_size, layers.num_attention_heads, layers.intermediate_size) == (128, 2, 256)
    layers = MTPSpeculatorConfig.for_target(build("mpt").config).layers
    assert (layers.hidden_size, layers.num_attention_heads, layers.intermediate_size) == (32, 4, 128)


def test_a_new_draft_has_as_many_key_heads_as_heads_unless_the_target_has_fewer() -> None:
    for name, wanted in (("gpt2", 4), ("llama", 2)):
        config = EagleSpeculatorConfig.for_target(build(name).config, {"model_type": "qwen3"})
        assert (config.layers.num_attention_heads, config.layers.num_key_value_heads) == (4, wanted)
    with pytest.raises(ValueError, match="num_hidden_layers is 0"):
        EagleSpeculatorConfig.for_target(build("llama").config, {"num_hidden_layers": 0})


@pytest.mark.parametrize("name", ["gemma4_text", "dots3_note_text", "beam"])  # heads or ropes of several kinds
def test_a_new_draft_for_layers_of_several_kinds_is_shaped_as_the_first(name: str) -> None:
    target = build(name).config
    layers = Eagle3SpeculatorConfig.for_target(target, eagle_aux_hidden_state_layer_ids=[1, 2, 3]).layers
    assert (layers.hidden_size, layers.head_dim, layers.num_attention_heads) == (32, 8, 4)
    assert layers.rope_parameters["rope_theta"] == (1e6 if name == "gemma4_text" else 1e4)


def test_a_new_draft_needs_no_embeddings_of_what_is_no_text() -> None:
    target = build("mllama")
    rows = target.get_input_embeddings().weight
    assert len(rows) > target.config.vocab_size == 99
    draft = new_draft(EagleSpeculatorConfig.for_target(target.config), target)
    assert torch.equal(draft.embed_tokens.weight, rows[:99])


@pytest.mark.parametrize("name", ["gemma3n_text", "hy_v4", "qwen4_exp_text"])
def test_targets_with_several_residual_streams_are_for_drafts_that_read_none(name: str) -> None:
    target = build(name)
    with pytest.raises(ValueError, match=f"{target.config.model_type} target has several residual streams"):
        Eagle3SpeculatorConfig.for_target(target.config, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    prompt = prompts(2)
    plain = target.generate(**prompt, max_new_tokens=12)
    for kind in (EagleSpeculatorConfig, MedusaSpeculatorConfig, MTPSpeculatorConfig):
        draft = new_draft(kind.for_target(target.config), target).eval()
        assert torch.equal(target.generate(**prompt, max_new_tokens=12, speculator=draft), plain)


def test_fewer_positions_than_the_target_has_are_refused() -> None:
    target = tiny_target().config
    with pytest.raises(ValueError, match=r"max_position_embeddings is 64, below the target's 512: .* set 512"):
        Eagle3SpeculatorConfig.for_target(target, {"max_position_embeddings": 64})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": "many"},
        {"tree": "static"},
        {"tree": []},
        {"tree": [(0,), ()]},
        {"tree": [(0, 0)]},
        {"tree": [[1], [0], [1, 0, 0]]},
        {"tree_topk": 0},
        {"tree": 5},
        {"tree": [5]},
        {"tree": [(0,), "10"]},
        {"tree": True},
        {"tree": [(0.0,)]},
        {"num_tree_tokens": "12"},
        {"confidence_threshold": 1.0},
        {"confidence_threshold": "0.3"},
        {"confidence_threshold": None},
        {"confidence_threshold": float("nan")},
        {"posterior_alpha": "0.3"},
        {"posterior_threshold": True},
        {"verification": None},
        {"verification": ["block"]},
        {"acceptance": 1},
        {"sample_draft": "yes"},
        {"self_check": 1},
        {"verification": "lossy"},
    ],
)
def test_wrong_settings_of_a_call_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SpeculationConfig(**changes)


def test_settings_are_merged_by_name() -> None:
    assert SpeculationConfig(tree_topk=3).merge(tree="dynamic") == SpeculationConfig(tree_topk=3, tree="dynamic")
    with pytest.raises(TypeError, match="has no \\['speculative_tokens'\\]"):
        SpeculationConfig().merge(speculative_tokens=3)


# --- The target that a draft was made for ----------------------------------------------------------------------------


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(configuration.logger, "warning_once", told.append)
    return told


@pytest.mark.parametrize("kind", [Eagle3SpeculatorConfig, MedusaSpeculatorConfig, MTPSpeculatorConfig])
def test_a_draft_on_a_target_of_other_layers_is_told_with_both(kind: Any, tmp_path: Path, warnings: list[str]) -> None:
    """What the file keeps of the target is looked at after it was saved and read, each time, and first of all fits."""
    target, other = tiny_target(num_hidden_layers=8), tiny_target(num_hidden_layers=12)
    target.config.name_or_path, other.config.name_or_path = "org/eight", "org/twelve"
    new_draft(kind.for_target(target.config), target).save_pretrained(tmp_path)
    draft = AutoModel.from_pretrained(tmp_path)
    draft.check(target)
    assert warnings == []
    draft.check(other)
    (told,) = warnings
    assert "made for org/eight with num_hidden_layers 8, and this is org/twelve with num_hidden_layers 12" in told


def test_a_draft_keeps_which_layers_it_reads(tmp_path: Path, warnings: list[str]) -> None:
    """By the rule [2, n // 2, n - 3] it would read other ones of a target with other layers."""
    config = Eagle3SpeculatorConfig.for_target(tiny_target(num_hidden_layers=12).config)
    assert config.eagle_aux_hidden_state_layer_ids == [2, 6, 9]
    draft = new_draft(config, tiny_target(num_hidden_layers=12))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\[2, 6, 9\] do not fit .* made for .* 12, and this is .* 8; use"):
            draft.check(tiny_target(num_hidden_layers=8))
    assert warnings == []  # what is refused is not warned of, too


def test_a_draft_that_says_nothing_of_its_target_is_for_all(warnings: list[str]) -> None:
    config = Eagle3SpeculatorConfig.for_target(tiny_target(num_hidden_layers=8).config)
    draft = new_draft(config, tiny_target(num_hidden_layers=8))
    for unknown in ({}, {"num_hidden_layers": None}, {"num_hidden_layers": "8"}, {"hidden_size": True}):
        config.speculators_config["verifier"] = {"name_or_path": "org/model", **unknown}
        draft.check(tiny_target(num_hidden_layers=12))
    assert warnings == []


def test_a_draft_that_is_trained_on_for_another_target_becomes_that_one_s() -> None:
    target = tiny_target(num_hidden_layers=8)
    draft = new_draft(Eagle3SpeculatorConfig.for_target(target.config), target)
    name_target(draft, tiny_target(num_hidden_layers=12), "org/twelve")
    assert draft.config.made_for["num_hidden_layers"] == 12 and draft.config.made_for["name_or_path"] == "org/twelve"


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_whether_to_sample_the_draft_is_true_or_false(value: Any) -> None:
    assert SpeculationConfig().sample_draft is True
    with pytest.raises(ValueError, match="sample_draft must be True or False"):
        SpeculationConfig(sample_draft=value)
