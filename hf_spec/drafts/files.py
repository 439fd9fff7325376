"""Formats of draft files: how kinds of drafts declare them, and what flat configs and their tensors share."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig

from ..config_keys import Known, flat_keys, unknown_keys
from ..configuration import GEMMA, SpeculatorConfig
from ..settings import is_int

Config = TypeVar("Config", bound=SpeculatorConfig)

# The tensors from which the shape of Gemma 4's layers is read.
GEMMA_TENSORS = (
    *("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"),
    "layers.0.mlp.gate_proj.weight",
)
ZIP = b"PK\x03\x04"
MOST_NAMES, SPARE_BYTES = 8, 1 << 26  # a tensor may have so many names, and small files more
# Tensors whose rows are the tokens of the draft's vocabulary.
OF_DRAFT_TOKENS = ("lm_head.weight", "markov_head.markov_w2.weight")
# Tensors that no draft needs: recomputed tables, and the target's norm and head, which speculators trains against.
LEFT_OVER = re.compile(r".*\binv_freq$|verifier_(lm_head|norm)\.weight$")


@dataclass(frozen=True)
class Checkpoint:
    """A draft as in its files: the config's JSON, and the tensors under their names in the file."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """The way files of some project are recognised and read.

    ``recognises(config, names)`` is given the config's JSON and the names of the tensors. ``read(config, tensors)``
    may change both; it returns the config and the weights of our model. ``owner`` is the project that made the format.
    ``weight_files`` are file names used for weights in this format only. ``inside_target`` are the prefixes of the
    draft's tensors where it is stored in its target's checkpoint. ``keys(config, names)`` are the keys of the config
    that its reader knows; by default those of a flat config's decoder layers.
    """

    name: str
    recognises: Callable[[dict[str, Any], Collection[str]], bool]
    read: Callable[[dict[str, Any], dict[str, Tensor]], tuple[SpeculatorConfig, dict[str, Tensor]]]
    owner: str | None = None
    weight_files: tuple[str, ...] = ()
    inside_target: tuple[str, ...] = ()
    keys: Callable[[dict[str, Any], Collection[str]], Known] | None = None

    def unknown(self, config: dict[str, Any], names: Collection[str]) -> list[str]:
        """List the keys of a config that nobody knows who reads this format, see ``unknown_keys``."""
        return unknown_keys(config, flat_keys(config, names, {}) if self.keys is None else self.keys(config, names))


@dataclass(frozen=True)
class Files:
    """What a layout writes: ``tensors`` into the file ``weights``, and ``config``, if any, into config.json."""

    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    config: dict[str, Any] | None = None


def check_pickled(file: str | os.PathLike[str]) -> None:
    """Raise an OSError if a file of ``torch.save`` has compressed or overlapping parts, which would grow when read."""
    with open(file, "rb") as opened:
        if opened.read(4) != ZIP:  # as torch tells the formats apart; older files are not zip archives and cannot grow
            return
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise OSError(f"{file} is cut off or damaged ({error}); copy or download it again") from error
    is_compressed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    if is_compressed or sum(part.file_size for part in parts) > os.path.getsize(file):
        raise OSError(
            f"{file} would take more memory than it is large: its parts are compressed or lie over each other, which "
            "torch.save never writes; get it from another place, or as safetensors"
        )


def check_held(file: str | os.PathLike[str], tensors: dict[str, Tensor]) -> None:
    """Raise an OSError for ``tensors`` without values of their own, or whose shapes are far larger than their storage.

    Several names may share one tensor, as tied weights do. A tensor that repeats one value is no weight.
    """
    if odd := [name for name, one in tensors.items() if one.layout != torch.strided or one.is_meta]:
        raise OSError(f"{file}: {odd[0]!r} is a sparse tensor or has no values; save plain tensors, as safetensors")
    storages = [one.untyped_storage() for one in tensors.values()]
    held = sum({one._cdata: one.nbytes() for one in storages}.values())
    described = sum(one.numel() * one.element_size() for one in tensors.values())
    if described > MOST_NAMES * held + SPARE_BYTES:
        raise OSError(
            f"{file} describes tensors of {described:,} bytes and holds {held:,}: they repeat the same values; get it "
            "from another place, or as safetensors"
        )


def is_speculators(config: dict[str, Any]) -> bool:
    """Tell whether a config is one of the speculators library, whose layout is also ours."""
    return "speculators_model_type" in config or "speculators_config" in config


def read_speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[SpeculatorConfig, dict[str, Tensor]]:
    """Read what ``save_pretrained`` writes; a ValueError for a ``speculators_model_type`` that is not known."""
    return SpeculatorConfig.from_dict(config), needed(tensors)


def speculators_keys(config: dict[str, Any], names: Collection[str]) -> Known:
    """Return the known keys of a config of the speculators library, by its kind."""
    return SpeculatorConfig.kinds().get(_named_kind(config), SpeculatorConfig).known_keys(config)


def _named_kind(config: dict[str, Any]) -> str:
    """Return the kind of draft that a config of the speculators library names; its first files name none."""
    return str(config.get("speculators_model_type", "eagle3"))


SPECULATORS = Format(
    "speculators", lambda config, names: is_speculators(config), read_speculators, keys=speculators_keys
)


def speculators_format(kind: str, read: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Format:
    """Return the format of the speculators library for drafts of one ``kind``.

    ``read`` is given the config's JSON, which describes the layers, and the tensors under our names.
    """

    def recognises(config: dict[str, Any], names: Collection[str]) -> bool:
        return is_speculators(config) and _named_kind(config) == kind

    def read_checked(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise ValueError("the config has no transformer_layer_config, which describes the layers; add it")
        _take_rope_of_text(raw["transformer_layer_config"])
        return read(raw, needed(tensors))

    return Format("speculators", recognises, read_checked, keys=speculators_keys)


def needed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a draft needs, its layers under our name ``layers.*``."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if not LEFT_OVER.match(name)
    }


def short_names(names: Collection[str]) -> set[str]:
    """Return the names of tensors without the ``model.`` that some files put before them, as ``needed`` does."""
    return {name.removeprefix("model.") for name in names}


def renamed(tensors: dict[str, Tensor], beginnings: dict[str, str]) -> dict[str, Tensor]:
    """Replace in the name of each tensor the first of ``beginnings`` that it has by what the table says."""
    found = {name: next((one for one in beginnings if name.startswith(one)), "") for name in tensors}
    return {beginnings.get(found[name], "") + name.removeprefix(found[name]): one for name, one in tensors.items()}


def doubled_prefix(tensors: Collection[str]) -> str | None:
    """Say what vLLM makes of names that begin with ``model.``, which it puts before all names itself."""
    has_prefix = any(name.startswith("model.") for name in tensors)
    return "doubles the prefix model. of its tensors" if has_prefix else None


def shared_with_target(tensors: Collection[str]) -> list[str]:
    """List which of embeddings and head the files lack, and the target provides."""
    return [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in tensors]


def flat_layers(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Build the config of the decoder layers. Tensors win over the flat config ``raw``, which is often wrong."""
    if str(raw.get("model_type")).startswith("gemma4"):
        return _flat_gemma_layers(raw, tensors)
    kind = "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    known = set(AutoConfig.for_model(kind).to_dict()) | {"rope_theta", "rope_scaling", "layer_types"}
    unwanted = {"architectures", "dtype", "model_type", "transformers_version", "tie_word_embeddings"}
    given = {name: value for name, value in raw.items() if name in known - unwanted and value is not None}
    _take_rope_of_text(given)
    if "rope_parameters" not in given:
        given.setdefault("rope_theta", 10000.0)
    indices = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
    given["num_hidden_layers"] = len(indices)
    if "layer_types" in given:
        given["layer_types"] = given["layer_types"][: len(indices)]  # may be copied from the target
    given["attention_bias"] = any(name.endswith("q_proj.bias") for name in tensors)
    if kind == "llama":
        given["mlp_bias"] = any(name.endswith("gate_proj.bias") for name in tensors)
        if "sliding_attention" in given.get("layer_types", ()):
            given["sliding_window"] = raw.get("sliding_window")  # which transformers does not know of llama
    width, heads = given.get("hidden_size"), given.get("num_attention_heads")
    if kind == "llama" and is_int(width) and is_int(heads) and heads and width % heads:
        raise ValueError(
            f"num_attention_heads is {heads} and hidden_size {width}: transformers refuses llama layers whose heads "
            "do not divide their width, whatever head_dim says; serve the draft with the project that made it, or "
            "use another one"
        )
    if given["attention_bias"]:  # transformers also gives o_proj one; EAGLE for Qwen2 does not
        for place in (f"layers.{i}.self_attn.o_proj" for i in indices):
            if (weight := tensors.get(f"{place}.weight")) is not None:
                tensors.setdefault(f"{place}.bias", weight.new_zeros(weight.shape[0]))
    return AutoConfig.for_model(kind, **given)


def _take_rope_of_text(layers: dict[str, Any]) -> None:
    """Replace a rope of Qwen2.5-VL ("mrope") in a config's JSON by the usual one: for text they are the same."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = layers.get(name)
        if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            layers[name] = {key: rope[key] for key in rope if key == "rope_theta"} | {"rope_type": "default"}


def _flat_gemma_layers(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Build the config of Gemma 4's layers in a DeepSpec draft; ``raw`` has the shapes of the target's two kinds."""
    if missing := [name for name in GEMMA_TENSORS if name not in tensors]:
        raise ValueError(f"it says {raw['model_type']!r} and has no {missing[0]}: it holds no layers of Gemma 4")
    head_norm, query, key, gate = (tensors[name] for name in GEMMA_TENSORS)
    size, count = len(head_norm), len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    shape: dict[str, Any] = {
        "num_hidden_layers": count,
        "layer_types": ["full_attention"] * count,
        "head_dim": size,
        "num_attention_heads": len(query) // size,
        "num_key_value_heads": len(key) // size,
        "intermediate_size": len(gate),
        "attention_k_eq_v": "layers.0.self_attn.v_proj.weight" not in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "per_layer_config": {},
    }
    rope = (raw.get("rope_parameters") or {}).get("full_attention")
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {raw.get('rope_parameters')!r}; give those of 'full_attention'")
    known = set(AutoConfig.for_model(GEMMA).to_dict()) - {"architectures", "dtype", "model_type", "sliding_window"}
    unwanted = {"transformers_version", "tie_word_embeddings", "use_double_wide_mlp", "num_kv_shared_layers"}
    given = {name: value for name, value in raw.items() if name in known - unwanted}
    given |= {"hidden_size_per_layer_input": raw.get("hidden_size_per_layer_input", 0)}
    return AutoConfig.for_model(GEMMA, **given | shape | {"rope_parameters": {"full_attention": rope}})


def completed(
    kind: type[Config], raw: dict[str, Any], vocabulary: int, tensors: dict[str, Tensor]
) -> tuple[Config, dict[str, Tensor]]:
    """Take what a config lacks from the ``tensors``, and build the config of ``kind``."""
    raw["shared_with_target"] = shared_with_target(tensors)
    raw["draft_vocab_size"] = complete_vocabulary(vocabulary, tensors)
    return config_of(kind, raw), tensors


def config_of(kind: type[Config], raw: dict[str, Any]) -> Config:
    """Build the config of ``kind`` from those keys of ``raw`` that are fields of it."""
    known = {field.name for field in fields(kind)} - {"architectures", "transformers_version"}
    return kind(**{name: value for name, value in raw.items() if name in known})


def sort_vocabulary(tensors: dict[str, Tensor]) -> None:
    """Sort the tokens that ``d2t`` lists, in place: ModelOpt and NeMo write them by frequency."""
    if "d2t" not in tensors:
        return
    places = torch.arange(len(tensors["d2t"]))
    ids = tensors["d2t"].long() + places
    order = ids.argsort()
    if torch.equal(order, places):
        return
    tensors["d2t"] = ids[order] - places
    for name in OF_DRAFT_TOKENS:
        if name in tensors and len(tensors[name]) == len(order):  # others are refused for their shape
            tensors[name] = tensors[name][order]


def complete_vocabulary(total: int, tensors: dict[str, Tensor]) -> int:
    """Complete ``d2t`` and ``t2d`` from each other, or drop them if all ``total`` tokens are kept; return the size."""
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


def in_speculators(config: SpeculatorConfig, layout: str, beyond: Iterable[str] = ()) -> list[str]:
    """List why the speculators library, version 0.9.0, cannot read a draft of a kind that it knows.

    ``beyond`` are the reasons of its kind.
    """
    if layout != SPECULATORS.name:
        return ["does not read this layout; convert to speculators"]
    missing = " and ".join(config.shared_with_target or ())
    if missing and not names_target(config):
        cure = "name the target with --verifier, or write them in with --self-contained"
        return [f"leaves the missing {missing} uninitialised, so they hold any numbers; {cure}", *beyond]
    return list(beyond)


def names_target(config: SpeculatorConfig) -> bool:
    """Tell whether the config names the target, from which speculators reads what a file lacks."""
    return bool((config.speculators_config or {})["verifier"].get("name_or_path"))


def as_wide(config: Any) -> list[tuple[bool, str]]:
    """Return whether the draft is not as wide as its target, and what speculators has to say about that."""
    return [(config.feature_size != config.layers.hidden_size, "reads only drafts that are as wide as their targets")]


def head_in_part(config: Any) -> list[tuple[bool, str]]:
    """Return whether the draft uses a part of the target's output layer, and what engines have to say about that."""
    whole = config.draft_vocab_size in (None, config.layers.vocab_size)
    cure = "convert with --self-contained TARGET"
    sentence = f"does not cut the target's output layer down to the draft's vocabulary; {cure}"
    return [("lm_head" in (config.shared_with_target or ()) and not whole, sentence)]


def applying(obstacles: list[tuple[bool, str]]) -> list[str]:
    """Return the sentences of those ``obstacles`` that apply."""
    return [sentence for applies, sentence in obstacles if applies]
