"""Say what a draft checkpoint is and which engine reads it, and write drafts in the layouts of other projects."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..configuration import SpeculatorConfig
from ..drafts.eagle3.configuration import EAGLE3_FLAGS, Eagle3SpeculatorConfig
from ..drafts.eagle3.modeling import Eagle3DraftModel
from ..drafts.medusa.configuration import MedusaSpeculatorConfig
from ..drafts.modeling import DraftModel
from ..drafts.mtp.configuration import MTP_FLAGS, MTPSpeculatorConfig
from ..drafts.mtp.formats import to_native
from ..drafts.mtp.modeling import MTPDraftModel
from .auto import SERVED_FLAGS, AutoDraftModel, Checkpoint, load, read_checkpoint, translate

Layout = Literal["speculators", "eagle3", "sglang", "native"]


@dataclass(frozen=True)
class Report:
    """Hold what ``inspect`` found; ``str()`` is for people.

    ``engines`` maps an engine to what is in its way, nothing if it reads the files as they were meant. ``problem`` is
    why hf_spec itself refuses them, None if it does not.
    """

    path: str
    layout: str
    config: SpeculatorConfig
    parameters: int
    dtypes: tuple[str, ...]
    engines: dict[str, list[str]]
    problem: str | None

    def __str__(self) -> str:
        config, layers = self.config, self.config.layers
        verifier = (config.speculators_config or {})["verifier"]
        lines = {
            "format": self.layout,
            "draft": f"{config.speculators_model_type}, {_shape(config)} of width {layers.hidden_size}, "
            f"{self.parameters / 1e6:.1f} M values ({', '.join(self.dtypes)})",
            "target": f"{verifier.get('name_or_path') or 'not named'}, vocabulary {layers.vocab_size or 'not named'}",
            "from target": ", ".join(config.shared_with_target or ()) or "nothing: what it needs is in the file",
        }
        if config.transformer_layer_config is not None:
            lines["positions"] = f"{layers.max_position_embeddings}, rope {layers.rope_parameters}"
        if isinstance(config, Eagle3SpeculatorConfig):
            ids = config.eagle_aux_hidden_state_layer_ids
            lines["reads"] = f"hidden_states{ids}" if ids else "hidden_states[2, n // 2, n - 3] of n layers"
            lines["reads"] += f" of width {config.feature_size}"
            lines["guesses"] = f"{config.draft_vocab_size} of {layers.vocab_size} tokens"
            lines["flags"] = ", ".join(f"{name}={getattr(config, name)}" for name in EAGLE3_FLAGS)
        if isinstance(config, MTPSpeculatorConfig):
            lines["flags"] = ", ".join(f"{name}={getattr(config, name)}" for name in MTP_FLAGS)
        lines |= {name: "; ".join(found) or "reads it" for name, found in self.engines.items()}
        lines["hf_spec"] = self.problem or "reads it"
        return "\n".join([self.path, *(f"  {name:12} {text}" for name, text in lines.items())])


def inspect(path: str | os.PathLike[str], **hub: Any) -> Report:
    """Say what the draft at ``path`` (directory or Hub id) is. Errors: those of reading it, or an unknown format."""
    checkpoint = read_checkpoint(path, **hub)
    config, tensors = translate(checkpoint)
    problem = None
    try:
        load(checkpoint)
    except ValueError as error:
        problem = str(error)
    return Report(
        path=str(path),
        layout=_name(checkpoint),
        config=config,
        parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})),
        engines=_engines(checkpoint, config),
        problem=problem,
    )


def _shape(config: SpeculatorConfig) -> str:
    if isinstance(config, MedusaSpeculatorConfig):
        return f"{config.num_heads} heads of {config.num_hidden_layers} residual block(s)"
    return f"{config.layers.num_hidden_layers} {config.layers.model_type} layer(s)"


def _name(checkpoint: Checkpoint) -> str:
    owner = {"eagle3": "SafeAILab", "eagle": "SafeAILab", "medusa": "FasterDecoding"}.get(checkpoint.layout)
    kind = checkpoint.config.get("speculators_model_type", owner)
    return f"{checkpoint.layout} ({kind})" if kind else checkpoint.layout


# --- engines ---------------------------------------------------------------------------------------------------------


def _engines(checkpoint: Checkpoint, config: SpeculatorConfig) -> dict[str, list[str]]:
    """List what is in each engine's way, for the versions vLLM 0.33, SGLang 0.5.23 and llama.cpp's 2026 converter."""
    if isinstance(config, MTPSpeculatorConfig) and checkpoint.layout == "mtp":
        return {"vLLM": []}
    if isinstance(config, MedusaSpeculatorConfig | MTPSpeculatorConfig):
        return unserved(config)
    if not isinstance(config, Eagle3SpeculatorConfig):
        bias = "fc.bias" in checkpoint.tensors and not checkpoint.config.get("eagle_fc_bias")
        vllm = ["drops the bias of fc; set eagle_fc_bias: true in config.json"] if bias else []
        if checkpoint.layout == "speculators":
            vllm = ["does not know speculators_model_type 'eagle'"]
        return {"vLLM": vllm, "SGLang": [], "llama.cpp": ["reads EAGLE-3 only"]}
    return {
        "vLLM": _chosen(_vllm(checkpoint, config)),
        "SGLang": _chosen(_sglang(checkpoint, config)),
        "llama.cpp": _chosen(_llama_cpp(checkpoint, config)),
    }


def unserved(config: SpeculatorConfig) -> dict[str, list[str]]:
    """List what each engine cannot serve of a draft of ours, whatever layout it is converted to."""
    if isinstance(config, MedusaSpeculatorConfig):
        return {
            "vLLM": ["serves no Medusa heads since 0.33"],
            "SGLang": ["has no Medusa"],
            "llama.cpp": ["has no Medusa"],
        }
    if isinstance(config, MTPSpeculatorConfig):
        return {"vLLM": ["reads such a layer only as a part of its target; convert to native"]}
    if not isinstance(config, Eagle3SpeculatorConfig):
        return {engine: ["reads EAGLE-1 drafts in the layout of SafeAILab only"] for engine in ("vLLM", "SGLang")}
    return {
        "vLLM": _chosen(_beyond_vllm(config)),
        "SGLang": _chosen(_beyond_sglang(config)),
        "llama.cpp": _chosen(_beyond_llama_cpp(config)),
    }


def _chosen(obstacles: list[tuple[bool, str]]) -> list[str]:
    return [sentence for applies, sentence in obstacles if applies]


def _vllm(checkpoint: Checkpoint, config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    raw, ids, nested = (
        checkpoint.config,
        config.eagle_aux_hidden_state_layer_ids or [],
        checkpoint.layout == "speculators",
    )
    name = (config.speculators_config or {})["verifier"].get("name_or_path")
    kind, expected = config.layers.model_type, config.layers.to_dict().get("num_aux_hidden_states", 3)
    only_outputs = "eagle_config" in raw and "eagle_aux_hidden_state_layer_ids" not in raw
    return [
        (ids != sorted(ids), f"sorts the layer ids {ids} and so permutes the features; convert to speculators"),
        (
            nested and (not name or os.path.exists(name)),
            "needs --speculative-config: verifier.name_or_path is no Hub id",
        ),
        (nested and "norm_before_residual" not in raw, "takes the missing norm_before_residual for True"),
        (nested and raw.get("speculators_model_type") == "peagle", "drafts in parallel, unlike hf_spec"),
        (bool(ids) and only_outputs, "reads the layer ids of eagle_config one too low; convert to sglang names both"),
        (_misread_norm_output(checkpoint), "feeds back the normed output, unlike SpecForge in training; convert it"),
        (
            nested and kind == "llama" and config.num_features != expected,
            f"expects {expected} features, not {config.num_features}; convert to speculators",
        ),
        *_beyond_vllm(config),
    ]


def _beyond_vllm(config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    biased = config.layers.model_type == "qwen3" and config.layers.attention_bias
    return [
        (not config.norm_before_lm_head, "always norms before the head"),
        (biased, "has no bias in the output of qwen3's attention"),
        (_lends_part_of_head(config), "does not cut the target's output layer down to the draft's vocabulary"),
    ]


def _lends_part_of_head(config: Eagle3SpeculatorConfig) -> bool:
    return "lm_head" in (config.shared_with_target or ()) and config.draft_vocab_size != config.layers.vocab_size


def _sglang(checkpoint: Checkpoint, config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    raw, ids, nested = checkpoint.config, config.eagle_aux_hidden_state_layer_ids, checkpoint.layout == "speculators"
    outputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return [
        (nested, "does not read this config; convert to sglang"),
        (
            not nested and not outputs and not _default_ids(ids),
            "reads layer ids from eagle_config only; convert to sglang",
        ),
        (_misread_norm_output(checkpoint), "feeds back the normed output, unlike SpecForge in training; convert it"),
        *_beyond_sglang(config),
    ]


def _llama_cpp(checkpoint: Checkpoint, config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    missing = "draft_vocab_size" not in checkpoint.config
    return [
        (missing, "recognises EAGLE-3 by draft_vocab_size, which is missing"),
        *_beyond_llama_cpp(config),
    ]


def _beyond_llama_cpp(config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    ids, count = config.eagle_aux_hidden_state_layer_ids, config.layers.num_hidden_layers
    changed = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    return [
        (count != 1, f"reads drafts with num_hidden_layers 1, not {count}"),
        (bool(changed), f"does not know {', '.join(changed)}"),
        (not _default_ids(ids), f"always reads hidden_states[2, n // 2, n - 3], not {ids}"),
        (not config.norm_before_lm_head, "always norms before the head"),
    ]


def _misread_norm_output(checkpoint: Checkpoint) -> bool:
    raw = checkpoint.config
    return checkpoint.layout == "specforge" and bool(raw.get("norm_output")) and SERVED_FLAGS not in raw


def _default_ids(ids: list[int] | None) -> bool:
    """Tell whether ``ids`` are what readers assume for some number of layers of the target."""
    return ids is None or (len(ids) == 3 and ids == [2, (ids[2] + 3) // 2, ids[2]])


def _beyond_sglang(config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    trained = config.embed_requires_grad and config.feature_size == config.layers.hidden_size
    return [*_beyond_flat(config), (trained, "replaces trained embeddings by the target's")]


def _beyond_flat(config: Eagle3SpeculatorConfig) -> list[tuple[bool, str]]:
    layers, ids = config.layers, config.eagle_aux_hidden_state_layer_ids or [1]
    return [
        (layers.model_type != "llama", f"has llama layers only, not {layers.model_type}"),
        (layers.num_hidden_layers > 1, "norms the later layers of a draft differently"),
        (layers.attention_bias, "has no bias in the attention"),
        (getattr(layers, "mlp_bias", False), "has no bias in the MLP"),
        (
            config.num_features * config.feature_size == layers.hidden_size,
            "takes a single feature for a state fed back",
        ),
        (_lends_part_of_head(config), "does not cut the target's output layer down to the draft's vocabulary"),
        ("sliding_attention" in (getattr(layers, "layer_types", None) or ()), "has no sliding window"),
        (config.norm_before_residual, "does not know norm_before_residual"),
        (not config.norm_before_lm_head, "always norms before the head"),
        (min(ids) < 1, "reads outputs of layers, so not the embeddings (layer id 0)"),
    ]


# --- writing ---------------------------------------------------------------------------------------------------------


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Layout = "speculators",
    verifier: str | None = None,
    **kwargs: Any,
) -> None:
    """Write the draft at ``src``, of any known format, to the directory ``dst`` in another layout.

    ``"speculators"``: what ``save_pretrained`` writes. ``"eagle3"``: the layout of SafeAILab, for llama.cpp and
    TensorRT-LLM. ``"sglang"``: the same with ``eagle_config``, for SGLang and vLLM. ``"native"``: an MTP layer under
    the names of its target, as ``mtp.safetensors`` to be put beside the target's own files and named in their index.
    ``verifier`` names the target in speculators files, where vLLM wants a Hub id. ``kwargs`` are those of
    ``AutoDraftModel.from_pretrained``.

    Errors: what loading raises; a ValueError if the layout cannot express the draft; a FileExistsError if ``dst``
    holds files. ``dst`` appears complete or not at all.
    """
    draft = AutoDraftModel.from_pretrained(src, **kwargs)
    if verifier is not None:
        draft.config.speculators_config["verifier"]["name_or_path"] = verifier
    export(draft, dst, to)


def export(draft: DraftModel, dst: str | os.PathLike[str], to: Layout = "speculators") -> None:
    """Write a draft that is in memory, as ``convert`` does."""
    if to not in get_args(Layout):
        raise ValueError(f"to is {to!r}; it must be one of {get_args(Layout)}")
    path = Path(dst)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists; choose another directory or remove it")
    if isinstance(draft, Eagle3DraftModel):
        sort_features(draft)
    native = None
    if to == "native" and isinstance(draft, MTPDraftModel):
        native = to_native(draft.config, draft.state_dict())
    elif to != "speculators":
        _refuse(draft, to)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        if to == "speculators":
            draft.save_pretrained(partial)
        elif native is not None:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in native.items()}, partial / "mtp.safetensors"
            )
        else:
            _write_flat(draft, partial, to)
        partial.chmod(0o755)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sort_features(draft: Eagle3DraftModel) -> None:
    """Let the draft read the same hidden states in ascending order, in place; features are then concatenated so."""
    ids, width = draft.config.eagle_aux_hidden_state_layer_ids, draft.config.feature_size
    if ids is None or ids == sorted(ids):
        return
    order = sorted(range(len(ids)), key=ids.__getitem__)
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order]).to(draft.fc.weight.device)
    with torch.no_grad():
        draft.fc.weight.copy_(draft.fc.weight[:, columns])
        if draft.input_norm is not None:
            draft.input_norm.weight.copy_(draft.input_norm.weight[columns])
    if draft.fc_norm is not None:
        draft.fc_norm = nn.ModuleList(draft.fc_norm[i] for i in order)
    draft.config.eagle_aux_hidden_state_layer_ids = sorted(ids)


def _refuse(draft: DraftModel, to: Layout) -> None:
    config = draft.config
    if not isinstance(config, Eagle3SpeculatorConfig) or to == "native":
        raise ValueError(f"a draft of kind {config.speculators_model_type!r} has no {to} layout; use to='speculators'")
    found = _chosen(_beyond_flat(config))
    if to == "eagle3":
        ids = config.eagle_aux_hidden_state_layer_ids
        flags = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
        found += [f"does not know {name}" for name in flags]
        found += [] if _default_ids(ids) else [f"always reads hidden_states[2, n // 2, n - 3], not {ids}"]
    if found:
        raise ValueError(f"the {to} layout cannot express this draft, because its readers: it {'; it '.join(found)}")


def _write_flat(draft: DraftModel, path: Path, to: Layout) -> None:
    config: Eagle3SpeculatorConfig = draft.config
    tensors: dict[str, Tensor] = {
        name.replace("layers.0.", "midlayer."): tensor.detach().cpu().contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    ids, layers = config.eagle_aux_hidden_state_layer_ids, config.layers
    rope = layers.rope_parameters
    raw = layers.to_diff_dict() | {
        "architectures": ["LlamaForCausalLMEagle3" if to == "sglang" else "LlamaForCausalLM"],
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "bias": False,
        "rope_theta": rope["rope_theta"],  # readers older than rope_parameters
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    if config.target_hidden_size is not None:
        raw["target_hidden_size"] = config.target_hidden_size
    if ids is not None:
        raw["eagle_aux_hidden_state_layer_ids"] = ids  # vLLM
    if to == "sglang":
        raw |= {name: getattr(config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        raw[SERVED_FLAGS] = True
        if "lm_head" in (config.shared_with_target or ()):
            raw["draft_vocab_size"] = None  # SGLang lends the target's output layer only then
        raw["eagle_config"] = {"use_aux_hidden_state": True}
        if ids is not None:
            raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]
    (path / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
