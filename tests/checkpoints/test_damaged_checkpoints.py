"""Files that are damaged, nonsense or meant to harm: refused by name before anything large is made or run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GOLDENS, load_draft
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel

from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect


def write_draft(path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """Write the golden EAGLE-3 draft of SafeAILab with parts of its files replaced."""
    source = GOLDENS / "eagle3_orig_a" / "checkpoint"
    known = read_checkpoint(source)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(known.config | config))
    save_file(known.tensors | (tensors or {}), path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dtype": 5}, "dtype is 5"),
        ({"torch_dtype": "float31"}, "dtype is 'float31'"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"intermediate_size": 10**8}, "describes a draft of .* values, and the weights hold at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"max_position_embeddings": -3}, "max_position_embeddings is -3"),
        (
            {"sliding_window": -2, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
            "sliding_window is -2",
        ),
    ],
)
def test_numbers_of_nonsense_are_named_with_the_file(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", config, qwen3_like() if "sliding_window" in config else None)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(path))}.*{message}"):
        AutoDraftModel.from_pretrained(path)


def qwen3_like() -> dict[str, Tensor]:
    """Return what makes the layer one of qwen3, which may have a window."""
    return {f"midlayer.self_attn.{name}_norm.weight": torch.ones(8) for name in "qk"}


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "norm.weight"])
def test_values_of_the_wrong_type_are_named(name: str, tmp_path: Path) -> None:
    known = read_checkpoint(GOLDENS / "eagle3_orig_a" / "checkpoint").tensors[name]
    for dtype in [torch.float32] if name == "d2t" else [torch.complex64, torch.int64]:
        path = write_draft(tmp_path / str(dtype), {}, {name: known.to(dtype)})
        with pytest.raises(ValueError, match=f"(?s){re.escape(str(path))}.*{name} holds values of type {dtype}"):
            AutoDraftModel.from_pretrained(path)


@pytest.mark.parametrize(("name", "value"), [("architectures", 1), ("dflash_config", [None])])
def test_keys_that_tell_the_format_may_be_of_the_wrong_type(name: str, value: Any, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", {name: value})
    for read in (AutoDraftModel.from_pretrained, inspect):
        with pytest.raises(ValueError, match=f"config.json of {re.escape(str(path))} has a value of the wrong type"):
            read(path)


@pytest.mark.parametrize(
    "places",
    [["a"], 3, {"fc.weight": 5}, {"fc.weight": ["model.safetensors"]}, {"fc.weight": "../secret.safetensors"},
     {"fc.weight": "/etc/passwd"}, {"fc.weight": ".."}],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused(places: Any, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", {})
    (path / "model.safetensors").rename(path / "secret.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(OSError, match=r"model\.safetensors\.index\.json.* copy or download it again"):
        AutoDraftModel.from_pretrained(path)


def test_weights_that_may_not_be_read_are_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_draft(tmp_path / "draft", {})
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file).name != "model.safetensors")  # root may read all
    with pytest.raises(PermissionError, match=r"you may not read .*model\.safetensors; change its permissions"):
        read_checkpoint(path)


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(OSError, match=r"config\.json is not valid JSON"):
        AutoDraftModel.from_pretrained(tmp_path)


def test_a_wrong_config_of_ours_is_named_by_its_file(tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_output": "yes"}))
    with pytest.raises(ValueError, match=f"config.json of {re.escape(str(tmp_path))}.*norm_output"):
        AutoModel.from_pretrained(tmp_path)


def test_a_config_that_describes_far_more_than_the_file_is_refused_before_room_is_made(tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["intermediate_size"] = 10**8  # 13 GB
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (AutoModel.from_pretrained, AutoDraftModel.from_pretrained):
        with pytest.raises(ValueError, match=r"describes a draft of .* values"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_file_does_not_choose_kernels(name: str, tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: "somebody/kernels"}))
    for load in (AutoModel.from_pretrained, AutoDraftModel.from_pretrained):
        assert load(tmp_path).config._attn_implementation in ("sdpa", "eager")
    assert AutoModel.from_pretrained(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"


def test_a_target_with_mtp_layers_of_its_own_is_no_draft_but_has_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass speculator='mtp'"):
        inspect(GOLDENS / "mtp_glm4_moe_small" / "checkpoint")
