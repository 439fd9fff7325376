"""Reading of a draft's files, config and tensors, from a local directory or Hub id, without executing any code."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from ..drafts.files import Checkpoint, check_held, check_pickled
from ..untrusted import check_ends, check_sound, printable
from .kinds import formats
from .neighbours import refuse_uno

HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "use_safetensors",
    "variant",
)
CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MASK_EMBEDDING = "mask_embedding.pt"
# Why no model of a name was found, by the cause of transformers' error.
NOWHERE: dict[type, str] = {
    HFValidationError: "it cannot be a name on the Hub",
    LocalEntryNotFoundError: "it was not downloaded before, nor can the Hub be reached (no connection, or "
    "HF_HUB_OFFLINE is set)",
    RepositoryNotFoundError: "the Hub has none of this name that you may read (`hf auth login`)",
}


def weight_files(variant: str | None = None, use_safetensors: bool | None = None) -> tuple[str, ...]:
    """List the files that may hold a draft's weights; those of a particular format come first."""
    names = (*(name for one in formats() for name in one.weight_files), *WEIGHT_FILES)
    if use_safetensors:
        names = tuple(name for name in names if ".safetensors" in name)
    if variant is None:
        return names
    parts = (name.rpartition(".") for name in names)
    return tuple(f"{before}.{variant}.{end}" for before, _, end in parts)


def read_checkpoint(
    path: str | os.PathLike[str],
    inside_target: bool = False,
    only_names: bool = False,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    **hub: Any,
) -> Checkpoint:
    """Read config and tensors of a local directory or Hub id. Errors: an OSError that names the file and a remedy.

    If the checkpoint is a target's and contains a draft, only the draft is read. With ``inside_target``, nothing is
    read if it contains none. ``variant`` is part of the files' names, as in ``save_pretrained``. With
    ``use_safetensors``, no pickled file is opened. ``only_names`` reads empty tensors, whose names are enough to
    detect the format.
    """
    config = _json(_find_config(path, hub))
    is_dflash = isinstance(config.get("dflash_config"), dict) or "DFlash" in str(config.get("architectures"))
    if is_dflash and _find(path, MASK_EMBEDDING, hub) is not None:
        raise OSError(
            f"{path} has {MASK_EMBEDDING}, an embedding for mask tokens that is not the target's, and hf_spec does "
            "not read it: serve the draft in vLLM, or take another one"
        )
    names = weight_files(variant, use_safetensors)
    for name in names:
        if (file := _find(path, name, hub)) is None:
            continue
        if not name.endswith(".json"):
            return Checkpoint(str(path), config, _tensors(file, inside_target, only_names))
        tensors: dict[str, Tensor] = {}
        places = _shards(file)
        for shard in sorted({places[key] for key in _of_the_draft(places, inside_target)}):
            if use_safetensors and not shard.endswith(".safetensors"):
                raise OSError(f"{path}: {name} names {shard}, which is no safetensors file: use_safetensors is set")
            if (part := _find(path, shard, hub)) is None:
                raise OSError(f"{path}: {name} names {shard}, which is missing; copy or download the checkpoint again")
            tensors |= _tensors(part, inside_target, only_names)
        return Checkpoint(str(path), config, tensors)
    raise OSError(f"{path} has a config.json but no weights; it should hold one of {names}")


def is_cached(name: str) -> bool:
    """Tell whether config and all weights of a model of the Hub are in its local cache, as of its main revision."""
    hub = {"local_files_only": True}
    with contextlib.suppress(OSError):
        index = _find(name, "model.safetensors.index.json", hub)
        weights = {"model.safetensors"} if index is None else {*_shards(index).values()}
        return all(_find(name, file, hub) is not None for file in (CONFIG, *weights))
    return False


def _shards(file: str) -> dict[str, str]:
    """Read the map of tensors to files from an index. Errors: an OSError for files outside the index's directory."""
    places = _json(file).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise OSError(f"{file} should map names of tensors to files under weight_map; copy or download it again")
    if away := [shard for shard in places.values() if Path(shard).name != shard or shard in ("", ".", "..")]:
        raise OSError(
            f"{file} names {away[0]!r}, but shards are in the directory of their index; copy or download it again"
        )
    return places


def _find(path: str | os.PathLike[str], name: str, hub: dict[str, Any]) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)


def gguf(path: str | os.PathLike[str]) -> str:
    """Say how to load a language model in GGUF, if one is at ``path`` or its name says so; else ""."""
    place = Path(path)
    files = sorted(file.name for file in place.glob("*.gguf")) if place.is_dir() else []
    if not files and "gguf" not in place.name.lower():
        return ""
    is_file = place.suffix.lower() == ".gguf"
    name, folder = (place.name, os.fspath(place.parent)) if is_file else ((files or ["FILE.gguf"])[0], os.fspath(path))
    return (
        "GGUF is read by transformers itself, if the package gguf is there: "
        f"model = AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}). Pass that model, or the "
        "directory that its save_pretrained writes together with the tokenizer's"
    )


@contextlib.contextmanager
def looking_for(path: str | os.PathLike[str], role: str = "") -> Iterator[None]:
    """Let errors name the model at ``path``: a FileNotFoundError if there is none, an OSError for damaged weights."""
    what = f"{role} {os.fspath(path)!r}".lstrip()
    if os.path.isfile(path):
        if hint := gguf(path):
            raise FileNotFoundError(f"{what}: {hint}")
        raise FileNotFoundError(f"{what} is a file; pass the directory of a model, or its name on the Hub, ORG/MODEL")
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"a weight file of {what} is cut off or damaged ({error}); copy or download it again") from error
    except OSError as error:
        if (why := NOWHERE.get(type(error.__cause__))) is None:
            raise
        raise FileNotFoundError(
            f"{what} is not found: there is no such directory, and {why}; pass the directory of a model, or its name "
            "on the Hub, ORG/MODEL"
        ) from error


def _find_config(path: str | os.PathLike[str], hub: dict[str, Any]) -> str:
    with looking_for(path):
        if (found := _find(path, CONFIG, hub)) is not None:
            return found
        if (adapter := _find(path, ADAPTER, hub)) is not None:
            given = _json(adapter)
            refuse_uno(os.fspath(path), given)
            base = given.get("base_model_name_or_path")
            raise OSError(f"{path} holds an adapter of PEFT and no draft: {merging(os.fspath(path), base)}")
        if not os.path.isdir(path):
            cached_file(path, CONFIG, **hub)  # raises an error that tells a missing model from a missing connection
    raise OSError(f"{path} has no config.json, so it is not a draft; pass the directory that holds config.json")


def merging(adapter: str, base: str | None) -> str:
    """Say how to merge ``adapter`` into its draft ``base`` (``None`` if unknown)."""
    return (
        f"merge it into its draft{f' {printable(base)}' if base else ''} and pass what is written: "
        f"PeftModel.from_pretrained(draft, {adapter!r}).merge_and_unload().save_pretrained(DIRECTORY)"
    )


def _json(file: str) -> dict[str, Any]:
    check_ends(file)
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        check_sound(content)
    except (ValueError, RecursionError) as error:
        raise OSError(f"{file} is not valid JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise OSError(f"{file} should hold a JSON object, not a {type(content).__name__}")
    return content


def _of_the_draft(names: Iterable[str], inside_target: bool) -> list[str]:
    """Drop the target's tensors, which may be large, if its checkpoint contains a draft."""
    prefixes = tuple(prefix for one in formats() for prefix in one.inside_target)
    found = [name for name in names if name.startswith(prefixes)]
    return found if found or inside_target else list(names)


def _tensors(file: str, inside_target: bool, only_names: bool) -> dict[str, Tensor]:
    if not os.access(file, os.R_OK):  # safetensors would report it as missing
        raise PermissionError(f"you may not read {file}; change its permissions")
    check_ends(file)
    try:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                names = _of_the_draft(opened.keys(), inside_target)
                return {name: torch.empty(0) if only_names else opened.get_tensor(name) for name in names}
        check_pickled(file)
        content = torch.load(file, map_location="meta" if only_names else "cpu", weights_only=True)
    except Exception as error:  # damaged pickles may raise anything
        raise OSError(
            f"{file} is cut off, damaged or holds more than tensors ({printable(error)}); copy or download it again, "
            "or convert it to safetensors where you trust it"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise OSError(f"{file} should hold a dict of tensors; save model.state_dict() as safetensors")
    found = {name: content[name] for name in _of_the_draft(content, inside_target)}
    if not only_names:
        check_held(file, found)
    return found
