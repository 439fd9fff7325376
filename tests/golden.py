"""Read the golden drafts of tests/fixtures/goldens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.kinds import register_auto_classes
from hf_spec.drafts.files import Checkpoint

register_auto_classes()
GOLDENS = Path(__file__).parent / "fixtures" / "goldens"
SPECULATORS = sorted(path.name for path in GOLDENS.glob("sp_eagle3_[lq]*"))
END_TO_END = sorted(path.name for path in GOLDENS.glob("sp_eagle3_e2e_*"))
SPECFORGE = sorted(path.name for path in GOLDENS.glob("specforge_*"))
SAFEAILAB = sorted(path.name for path in GOLDENS.glob("eagle?_orig_*"))
MEDUSA = sorted(path.name for path in GOLDENS.glob("medusa*"))
DFLASH = ("ds_dflash_qwen3", "sp_dflash_draft_qwen3", "sp_dflash_qwen3", "zl_dflash_qwen3")
DSPARK = ("ds_dspark_qwen3", "sp_dspark_qwen3", "sp_dspark_qwen3_gated_sliding")
DFLASH2 = ("sp_dflash2_qwen3", "zl_dflash2_muse", "zl_dflash2_qwen3")
JETSPEC = ("jet_nemo_qwen3", "jet_qwen3")  # DFlash with causal blocks
PEAGLE = ("sp_peagle_draft_llama", "sp_peagle_llama")
OTHERS = ("medusa", "mtp", "sp_mtp", "ds_", "sp_d", "sp_p", "zl_", "jet_", "hf_")  # with tests of their own
ALL = sorted(path.parent.name for path in GOLDENS.glob("*/checkpoint") if not path.parent.name.startswith(OTHERS))
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def outputs(case: str) -> dict[str, Tensor]:
    """Return the inputs and expected outputs of a case."""
    return load_file(GOLDENS / case / "io.safetensors")


def load_draft(case: str, **kwargs: Any) -> Any:
    """Load a case's draft in float32, bound to its target where it borrows from it."""
    draft = AutoDraftModel.from_pretrained(GOLDENS / case / "checkpoint", dtype=torch.float32, **kwargs)
    if case == "specforge_eagle3_31":  # of a time when SpecForge's norm_output: true was plain EAGLE-3
        draft.config.norm_output = False
    if draft.config.shared_with_target:
        draft.bind(load_target(case))
    return draft


def first_speculators(case: str) -> Checkpoint:
    """Return an EAGLE-1 draft as versions 0.1 and 0.2 of the speculators library wrote it."""
    found = read_checkpoint(GOLDENS / case / "checkpoint")
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {re.sub("^(fc|layers.0).", lambda one: names[one[0]], name): t for name, t in found.tensors.items()}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": found.config}
    config |= {"transformer_layer_architecture": "LlamaDecoderLayer", "fusion_bias": True, "layernorms": False}
    return Checkpoint("first/checkpoint", config, tensors)


def load_target(case: str) -> PreTrainedModel:
    """Load a case's target, or one around the embeddings that are all the case has of it."""
    if case == "medusa2_combined":  # the heads are in the target's own checkpoint
        return AutoModelForCausalLM.from_pretrained(GOLDENS / case / "checkpoint", dtype=torch.float32)
    if (GOLDENS / case / "target").exists():
        return AutoModelForCausalLM.from_pretrained(GOLDENS / case / "target", dtype=torch.float32)
    weights = load_file(GOLDENS / case / "target.safetensors")["model.embed_tokens.weight"]
    target = tiny_target(*weights.shape)
    target.get_input_embeddings().weight.data.copy_(weights)
    return target


def tiny_target(vocab_size: int = 96, hidden_size: int = 32, num_hidden_layers: int = 8, **kwargs: Any) -> Any:
    """Build a random llama target."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **kwargs,
    )
    return LlamaForCausalLM(config).eval()
