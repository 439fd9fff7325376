"""Draft checkpoints of every project: find out whose format a directory has, and load it as one of our models.

=================  =============================================  =============================================
format             how it is recognised                           what its files leave unsaid
=================  =============================================  =============================================
``speculators``    ``speculators_model_type`` in the config       nothing; ``peagle`` holds an EAGLE-3 draft
``specforge``      ``LlamaForCausalLMEagle3`` and ``midlayer.*``  ``norm_output`` is the norm before the head
``modelopt``       ``layers.0.hidden_norm`` in a flat config      no ``t2d``
``eagle3``         other ``midlayer.*`` (SafeAILab's own)         the layers read, rope base 10000, layer count
``eagle``          ``fc.*`` but no ``hidden_norm`` (EAGLE-1/2)    feature after the final norm, target's head
``medusa``         ``0.0.linear.*``, also within a target         number of heads; whose output layers they end in
``medusa-vllm``    ``blocks.0.layers.0.*`` (vLLM before 0.33)     biases are zero; the same
``mtp``            ``mtp.*`` or ``model.mtp_layers.*`` in a target  the norms that Qwen and MiMo expect
=================  =============================================  =============================================

Numbers of layers, biases, norms and vocabularies are taken from the tensors, since configs in circulation are wrong.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils.hub import cached_file

from ..configuration import SpeculatorConfig, default_speculators_config, is_int, max_positions
from ..drafts.eagle.configuration import EagleSpeculatorConfig
from ..drafts.eagle.modeling import EagleDraftModel
from ..drafts.eagle3.configuration import Eagle3SpeculatorConfig
from ..drafts.eagle3.modeling import Eagle3DraftModel
from ..drafts.medusa.configuration import MedusaSpeculatorConfig
from ..drafts.medusa.modeling import MedusaDraftModel
from ..drafts.modeling import DraftModel
from ..drafts.mtp.formats import native_mtp, speculators_mtp
from ..drafts.mtp.modeling import MTPDraftModel

MODELS: tuple[type[DraftModel], ...] = (Eagle3DraftModel, EagleDraftModel, MedusaDraftModel, MTPDraftModel)
WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# A key that only hf_spec writes into a flat config: there norm_output has the meaning of the serving engines.
SERVED_FLAGS = "served_flags"
# How tensors of a draft begin where it is kept in its target's checkpoint: Medusa-2, Qwen3-Next and Qwen3.5, MiMo.
INSIDE_TARGET = ("medusa_head.", "mtp.", "model.mtp_layers.")
# What files hold that no draft needs: tables computed anew, and the target's ends, which speculators trains against.
LEFT_OVER = re.compile(r".*\binv_freq$|verifier_(lm_head|norm)\.weight$")
# Head, layer and tensor.
MEDUSA_NAME = re.compile(r"(?:medusa_heads?\.)?((\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight))")
MEDUSA_VLLM_NAME = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class Checkpoint:
    """Hold a draft as its files say it: the config's JSON and the tensors under their names in the file."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def layout(self) -> str:
        """Name the format: a row of the table above. Errors: ValueError if it is none of them."""
        config, names = self.config, self.tensors
        if "speculators_model_type" in config or "speculators_config" in config:
            return "speculators"
        if "midlayer.hidden_norm.weight" in names:
            return "specforge" if "LlamaForCausalLMEagle3" in (config.get("architectures") or ()) else "eagle3"
        if "layers.0.hidden_norm.weight" in names:
            return "modelopt"
        if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
            return "eagle"
        if "mtp.fc.weight" in names or "model.mtp_layers.0.input_proj.weight" in names:
            return "mtp"
        if any(MEDUSA_NAME.fullmatch(name) for name in names):
            return "medusa"
        if any(MEDUSA_VLLM_NAME.fullmatch(name) for name in names):
            return "medusa-vllm"
        raise ValueError(
            f"{self.path} is no draft that hf_spec knows (speculators, EAGLE-1/2/3, SpecForge, ModelOpt, Medusa, "
            f"MTP layers of Qwen and MiMo): its tensors are {sorted(names)[:4]}..."
        )


def register_auto_classes() -> None:
    """Teach AutoConfig and AutoModel what ``save_pretrained`` writes; harmless when repeated."""
    AutoConfig.register(SpeculatorConfig.model_type, SpeculatorConfig, exist_ok=True)
    for model in MODELS:
        AutoModel.register(model.config_class, model, exist_ok=True)


class AutoDraftModel:
    """Load a draft of any known format; see ``from_pretrained``."""

    def __init__(self) -> None:
        raise TypeError("use AutoDraftModel.from_pretrained(path_or_id)")

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
        """Load the draft at ``path``, a directory or Hub id, in our format or anyone's.

        ``target`` is checked against the draft and lends what the file leaves out. ``kwargs`` are those of any
        ``from_pretrained`` of transformers (dtype, device_map, revision, ...). Nothing of the checkpoint is executed.

        Errors: OSError for missing, damaged or half-written files; ValueError for a format that is not known, weights
        that do not fit, or a target that does not.
        """
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        loaded = load(read_checkpoint(path, **hub), **kwargs)
        if target is not None:
            draft = loaded[0] if kwargs.get("output_loading_info") else loaded
            raise_positions(draft.config, target)
            draft.bind(target)
        return loaded


def load(checkpoint: Checkpoint, **kwargs: Any) -> Any:
    """Build our model from a checkpoint of any format; ``kwargs`` and errors are those of ``AutoDraftModel``."""
    config, tensors = translate(checkpoint)
    model = next(model for model in MODELS if model.config_class is type(config))
    try:
        loaded = model.from_pretrained(None, config=config, state_dict=tensors, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.path}, read as {checkpoint.layout}: {error}") from error
    draft = loaded[0] if kwargs.get("output_loading_info") else loaded
    draft.config.name_or_path = draft.name_or_path = checkpoint.path
    return loaded


def raise_positions(config: SpeculatorConfig, target: PreTrainedModel) -> None:
    """Give the draft the target's ``max_position_embeddings`` where only a number stands in the way.

    Drafts in circulation say 2048, at which other engines stop or fail. Most ropes do not depend on the number.
    """
    if config.transformer_layer_config is None:
        return
    layers, rope = config.layers, config.layers.rope_parameters["rope_type"]
    if rope in ("default", "linear", "llama3"):
        layers.max_position_embeddings = max(layers.max_position_embeddings, max_positions(target.config))


# --- files -----------------------------------------------------------------------------------------------------------


def read_checkpoint(
    path: str | os.PathLike[str], inside_target: bool = False, only_names: bool = False, **hub: Any
) -> Checkpoint:
    """Read config and tensors of a local directory or Hub id. Errors: OSError that names the file and the cure.

    Of a target that has a draft in its checkpoint only the draft is read; ``inside_target`` reads nothing of others.
    ``only_names`` leaves the tensors empty, which tells the format of a large model as well.
    """
    config = _json(_find_config(path, hub))
    for name in WEIGHT_FILES:
        if (file := _find(path, name, hub)) is None:
            continue
        if not name.endswith(".json"):
            return Checkpoint(str(path), config, _tensors(file, inside_target, only_names))
        tensors: dict[str, Tensor] = {}
        places = _json(file).get("weight_map", {})
        for shard in sorted({places[key] for key in _of_the_draft(places, inside_target)}):
            if (part := _find(path, shard, hub)) is None:
                raise OSError(f"{path}: {name} names {shard}, which is missing; copy or download the checkpoint again")
            tensors |= _tensors(part, inside_target, only_names)
        return Checkpoint(str(path), config, tensors)
    raise OSError(f"{path} has a config.json but no weights; it should hold one of {WEIGHT_FILES}")


def _find(path: str | os.PathLike[str], name: str, hub: dict[str, Any]) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)


def _find_config(path: str | os.PathLike[str], hub: dict[str, Any]) -> str:
    if not os.path.isdir(path):
        try:
            validate_repo_id(os.fspath(path))
        except HFValidationError as error:
            raise OSError(f"{path} is neither a directory nor a Hub id; pass the directory of config.json") from error
    # Of a Hub id this says whether it does not exist or is only out of reach.
    found = _find(path, "config.json", hub) if os.path.isdir(path) else cached_file(path, "config.json", **hub)
    if found is None:
        raise OSError(f"{path} has no config.json, so it is not a draft; pass the directory that holds config.json")
    return found


def _json(file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{file} is not valid JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise OSError(f"{file} should hold a JSON object, not a {type(content).__name__}")
    return content


def _of_the_draft(names: Iterable[str], inside_target: bool) -> list[str]:
    """Leave out the target's tensors where a draft is kept in its checkpoint, which may be large."""
    found = [name for name in names if name.startswith(INSIDE_TARGET)]
    return found if found or inside_target else list(names)


def _tensors(file: str, inside_target: bool, only_names: bool) -> dict[str, Tensor]:
    try:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                names = _of_the_draft(opened.keys(), inside_target)
                return {name: torch.empty(0) if only_names else opened.get_tensor(name) for name in names}
        content = torch.load(file, map_location="meta" if only_names else "cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise OSError(
            f"{file} is cut off, damaged or holds more than tensors ({error}); copy or download it again, or convert "
            "it to safetensors where you trust it"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise OSError(f"{file} should hold a dict of tensors; save model.state_dict() as safetensors")
    return {name: content[name] for name in _of_the_draft(content, inside_target)}


# --- formats ---------------------------------------------------------------------------------------------------------


def aux_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Return which ``hidden_states[i]`` of the target a draft reads; None where its format leaves it to the reader.

    The only place where conventions meet. A top-level ``eagle_aux_hidden_state_layer_ids`` (speculators, vLLM) counts
    layers that have run, and so is ``hidden_states[i]`` already. One inside ``eagle_config`` (SpecForge, ModelOpt,
    SGLang) names the layer whose output is read, which is ``hidden_states[i + 1]``. EAGLE's own files name none.
    """
    name, behind = "eagle_aux_hidden_state_layer_ids", 0
    if (ids := config.get(name)) is None:
        ids, behind = (config.get("eagle_config") or {}).get(name), 1
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(map(is_int, ids)):
        raise ValueError(f"{name} is {ids!r}; list whole numbers, one per hidden state that the draft reads")
    return [i + behind for i in ids]


def translate(checkpoint: Checkpoint) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    """Return the config and the weights of our model for a checkpoint of any format.

    Errors: ValueError for a format that is not known, or for a config that says too little or nonsense.
    """
    layout = checkpoint.layout
    try:
        return _translated(checkpoint, layout)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint.path}, read as {layout}: there is no {error}; complete the config or copy the weights again"
        ) from error
    except (ArithmeticError, AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{checkpoint.path}, read as {layout}: {error}") from error


def _translated(checkpoint: Checkpoint, layout: str) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    raw = copy.deepcopy(checkpoint.config)
    if layout == "medusa":
        return _medusa(raw, checkpoint.tensors)
    if layout == "medusa-vllm":
        return _medusa(raw, _from_vllm(raw, checkpoint.tensors))
    if layout == "mtp":
        return native_mtp(raw, checkpoint.tensors)
    tensors = {_our_name(name): tensor for name, tensor in checkpoint.tensors.items() if not LEFT_OVER.match(name)}
    if layout == "eagle":
        return _eagle(raw, tensors)
    if layout == "speculators":
        kind = raw.get("speculators_model_type", "eagle3")
        if kind not in ("eagle3", "peagle", "mtp"):
            return SpeculatorConfig.from_dict(raw), tensors
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise ValueError("the config has no transformer_layer_config, which describes the layers; add it")
        if kind == "mtp":
            return speculators_mtp(raw, tensors)
        raw = _speculators(raw, tensors)
    else:
        raw = _flat(raw, tensors, norm_output_is_before_head=layout == "specforge" and SERVED_FLAGS not in raw)
    ids = aux_layer_ids(raw)
    raw["shared_with_target"] = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in tensors]
    raw["draft_vocab_size"] = _vocabulary(raw, tensors)
    raw["eagle_aux_hidden_state_layer_ids"] = ids and sorted(ids)
    known = {field.name for field in fields(Eagle3SpeculatorConfig)} - {"architectures", "transformers_version"}
    config = Eagle3SpeculatorConfig(**{name: value for name, value in raw.items() if name in known})
    # Foreign files may list ids in any order and mean it. Construction refuses that, since vLLM would sort them.
    config.eagle_aux_hidden_state_layer_ids = ids
    return config, tensors


def _our_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _speculators(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors.pop("mask_hidden", None)  # serves the parallel steps of peagle; one step of it is EAGLE-3
    raw["speculators_model_type"] = "eagle3"
    if isinstance(raw.get("speculators_config"), dict):
        raw["speculators_config"]["algorithm"] = "eagle3"
    rope = raw["transformer_layer_config"].get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:  # of two ropes the library takes this one for all
        raw["transformer_layer_config"]["rope_parameters"] = rope["sliding_attention"]
    return raw


def _flat(raw: dict[str, Any], tensors: dict[str, Tensor], norm_output_is_before_head: bool) -> dict[str, Any]:
    flags = raw | (raw.get("eagle_config") or {})
    ids = aux_layer_ids(raw)
    norms = sum(name.startswith("fc_norm.") for name in tensors)
    count = norms or (len(ids) if ids else 3)
    layers = _layers(raw, tensors)
    width = tensors["fc.weight"].shape[-1] // count if "fc.weight" in tensors else layers.hidden_size
    norm_output = bool(flags.get("norm_output", False))
    return {
        "transformer_layer_config": layers,
        "speculators_config": default_speculators_config("eagle3"),
        "eagle_aux_hidden_state_layer_ids": ids,
        "target_hidden_size": None if width == layers.hidden_size else width,
        "norm_before_residual": bool(flags.get("norm_before_residual", False)),
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": norms > 0,
        "norm_output": norm_output and not norm_output_is_before_head,
        "norm_before_lm_head": not norm_output_is_before_head or bool(flags.get("norm_output", True)),
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
    }


def _eagle(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    config = EagleSpeculatorConfig(
        transformer_layer_config=_layers(raw, tensors),
        shared_with_target=[name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in tensors],
        fc_bias="fc.bias" in tensors,
        dtype=raw.get("dtype", raw.get("torch_dtype")),
    )
    return config, tensors


def _medusa(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    """Read heads as they are published, counting heads and blocks from the names of the tensors."""
    found = {match[0]: match for name in tensors if (match := MEDUSA_NAME.fullmatch(name))}
    blocks = [match for match in found.values() if match[4].startswith("linear.")]
    ends = [tensor for name, tensor in tensors.items() if name in found and found[name][4] == "weight"]
    own_vocabulary = len(ends[0]) if ends else None
    speculators_config = default_speculators_config("medusa")
    speculators_config["verifier"]["name_or_path"] = raw.get("base_model_name_or_path")
    config = MedusaSpeculatorConfig(
        num_heads=1 + max(int(match[2]) for match in blocks),
        num_hidden_layers=1 + max(int(match[3]) for match in blocks),
        hidden_size=len(tensors[blocks[0][0]]),
        vocab_size=raw.get("vocab_size") or own_vocabulary,
        draft_vocab_size=own_vocabulary,
        shared_with_target=[] if ends else ["lm_head"],
        speculators_config=speculators_config,
        dtype=raw.get("dtype", raw.get("torch_dtype")),
    )
    # Blocks that were one module in training are one storage in a pickled file. Here they are not.
    renamed = {
        f"heads.{found[name][1]}" if name in found else name: tensor.clone() for name, tensor in tensors.items()
    }
    return config, renamed


def _from_vllm(raw: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of vLLM's own Medusa format, and sort the vocabulary that its ``token_map`` lists."""
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in given.items()}
    ids, lm_head = tensors.pop("token_map", None), tensors.pop("lm_head.weight", None)
    found = [match for name in tensors if (match := MEDUSA_VLLM_NAME.fullmatch(name))]
    end = 1 + max(int(match[2]) for match in found)
    for match in found:
        place = f"{match[1]}.{match[2]}.linear"
        tensors[f"{place}.{match[3]}"] = tensor = tensors.pop(match[0])
        tensors.setdefault(f"{place}.bias", tensor.new_zeros(len(tensor)))
    for head in {match[1] for match in found}:
        weight = tensors.pop(f"lm_heads.{head}.weight", lm_head)  # all heads may end in one
        if weight is not None:
            tensors[f"{head}.{end}.weight"] = weight if ids is None else weight[ids.argsort()]
    if ids is not None and len(ids) < raw["vocab_size"]:
        ids = ids.sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(raw["vocab_size"]), ids)
    return tensors


def _layers(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Describe the decoder layers of a flat config, trusting the tensors where both speak."""
    kind = "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    known = set(AutoConfig.for_model(kind).to_dict()) | {"rope_theta", "rope_scaling", "layer_types"}
    unwanted = {"architectures", "dtype", "model_type", "transformers_version", "tie_word_embeddings"}
    given = {name: value for name, value in raw.items() if name in known - unwanted and value is not None}
    if "rope_parameters" not in given:
        given.setdefault("rope_theta", 10000.0)
    indices = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
    given["num_hidden_layers"] = len(indices)
    given["attention_bias"] = any(name.endswith("q_proj.bias") for name in tensors)
    if kind == "llama":
        given["mlp_bias"] = any(name.endswith("gate_proj.bias") for name in tensors)
    if given["attention_bias"]:  # transformers also gives o_proj one; EAGLE for Qwen2 does not
        for place in (f"layers.{i}.self_attn.o_proj" for i in indices):
            if (weight := tensors.get(f"{place}.weight")) is not None:
                tensors.setdefault(f"{place}.bias", weight.new_zeros(weight.shape[0]))
    return AutoConfig.for_model(kind, **given)


def _vocabulary(raw: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Complete ``d2t`` and ``t2d`` from each other, drop them for a full vocabulary, and return the draft's size."""
    layers = raw["transformer_layer_config"]
    total: int = layers["vocab_size"] if isinstance(layers, dict) else layers.vocab_size
    if "d2t" not in tensors and "t2d" in tensors:
        ids = tensors["t2d"].nonzero()[:, 0]
        tensors["d2t"] = ids - torch.arange(len(ids))
    if "d2t" not in tensors:
        return len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else total
    tensors["d2t"] = offsets = tensors["d2t"].long()
    size, ids = len(offsets), torch.arange(len(offsets)) + offsets
    if "t2d" not in tensors:
        tensors["t2d"] = torch.isin(torch.arange(total), ids)
    tensors["t2d"] = tensors["t2d"].bool()
    if size == total:
        if offsets.any():
            raise ValueError(f"d2t has {size} entries, the whole vocabulary, and so must be all zero; drop it")
        del tensors["d2t"], tensors["t2d"]
    return size
