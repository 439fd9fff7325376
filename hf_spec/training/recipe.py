"""Training from a recipe, a YAML file; ``examples/train.yaml`` shows all of its keys."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]
from datasets import IterableDataset  # type: ignore[import-untyped]
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    set_seed,
)
from transformers.utils import logging

from ..checkpoints.files import looking_for
from ..checkpoints.fingerprint import differences
from ..checkpoints.kinds import config_classes
from ..checkpoints.language_models import load_decoder
from ..checkpoints.resolve import as_speculator, load_draft
from ..configuration import hub_name, max_positions
from ..drafts.modeling import DraftModel
from ..scoring.adapters import base_model
from ..untrusted import DEEPEST, check_ends, check_sound
from .arguments import DraftTrainingArguments
from .card import PLACE, adapter_origin
from .checks import check_devices
from .data import prepare_dataset
from .features import FeatureCache
from .origin import check_tokenizer
from .resuming import asks_to_resume, check_output_dir
from .sources import cache_splits, is_file, is_prepared, load_raw, prepared, saved, weights_of
from .trainer import DraftTrainer
from .vocabulary import count_tokens, new_draft

# The keys of each section, and the types of their values.
SECTIONS = {**dict.fromkeys(("data", "target", "draft", "prepare", "features", "trainer", "peft"), Any)}
TARGET = dict.fromkeys(("name", "adapter", "dtype", "attn_implementation", "revision"), str) | {"device_map": Any}
PREPARE = {"split": str, "config": str, "streaming": bool, "held_out": int | None, **get_type_hints(prepare_dataset)}
PREPARE = {name: hint for name, hint in PREPARE.items() if name not in ("dataset", "tokenizer", "return")}
FEATURES = {"directory": str, "without_target": bool, "dtype": str, "batch_size": int, "shard_size": int}
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
RESULTS = ("config.json", "adapter_config.json", "model.safetensors")
COUNTED = 10_000  # examples of a stream that are counted to choose the tokens of a smaller draft vocabulary
MOST_NODES, LONGEST_NUMBER = 100_000, 64  # limits: values in a recipe after aliases are expanded, digits of a number
NUMERIC = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
SET_BY_US = {"speculators_model_type", "transformer_layer_config", "speculators_config", "tie_word_embeddings"}

logger = logging.get_logger(__name__)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A safe YAML loader that reads 1e-4 as a number (text in YAML 1.1) and refuses what would fill the memory."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"lists and mappings stand within each other more than {DEEPEST} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _nodes(node, {}) > MOST_NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_NODES:,} values")
        return node

    def construct_scalar(self, node: Any) -> Any:
        found = super().construct_scalar(node)
        if node.tag in NUMERIC and len(found) > LONGEST_NUMBER:
            raise yaml.YAMLError(f"a number has {len(found):,} digits,{str(node.start_mark).replace(chr(10), ' ')}")
        return found


def _nodes(node: Any, known: dict[Any, int]) -> int:
    """Count the values of a YAML node after its aliases are expanded; ``known`` has the nodes counted before."""
    if node not in known:
        known[node] = MOST_NODES + 1  # a node that is met again before it is counted contains itself
        inside = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        children = inside if isinstance(node, yaml.CollectionNode) else ()
        known[node] = 1 + sum(_nodes(one, known) for one in children)
    return known[node]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_recipe(file: str | os.PathLike[str], **overrides: str | None) -> dict[str, Any]:
    """Read and check a recipe; ``overrides`` names a target, draft or data that replace the file's.

    If ``overrides`` names prepared data, the file's section prepare is ignored.
    Errors: a ValueError that names an unknown or missing key; an OSError for a file that cannot be read.
    """
    check_ends(file)
    try:
        recipe = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
        check_sound(recipe)
    except OSError as error:
        raise OSError(
            f"the recipe {str(file)!r} cannot be read ({error.strerror}); name a YAML file of target, draft and data"
        ) from error
    except Exception as error:  # errors of YAML, and whatever parsing its numbers, dates and tags raises
        raise ValueError(f"{file} is no YAML: {error}") from error
    recipe = _section(recipe, SECTIONS, "the recipe") | {name: one for name, one in overrides.items() if one}
    if overrides.get("data") and is_prepared(recipe["data"]):
        recipe.pop("prepare", None)
    if missing := [name for name in ("target", "draft", "data") if not recipe.get(name)]:
        raise ValueError(f"{file} does not say {', '.join(missing)}")
    if isinstance(recipe["target"], str):
        recipe["target"] = {"name": recipe["target"]}
    if "name" not in _section(recipe["target"], TARGET, "target"):
        raise ValueError("target needs a name, a directory or Hub id")
    if not isinstance(recipe["draft"], str):
        _check_draft(recipe["draft"])
        if recipe.get("peft"):
            raise ValueError(
                "peft trains an adapter of an existing draft, and saves only the adapter: let draft be its directory "
                "or Hub id, or leave out peft to train a new one"
            )
    recipe["prepare"] = _section(recipe.get("prepare"), PREPARE, "prepare")
    if isinstance(recipe.get("features"), str):
        recipe["features"] = {"directory": recipe["features"]}
    recipe["features"] = _section(recipe.get("features"), FEATURES, "features")
    if recipe["features"] and "directory" not in recipe["features"]:
        raise ValueError("features needs a directory")
    for section in ("target", "features"):
        _check_dtype(recipe[section].get("dtype"), section)
    if recipe["features"] and recipe["prepare"].get("streaming"):
        raise ValueError("features need numbered examples, and a stream has none: leave out one of the two")
    recipe["trainer"] = _section(recipe.get("trainer"), _fields(DraftTrainingArguments), "trainer")
    for name in weights_of(recipe["data"]):
        if not isinstance(recipe["data"], str) and is_prepared(name):
            raise ValueError(f"{name} is prepared already, and has no weight: name it alone, or what it was made of")
    if recipe["prepare"] and isinstance(recipe["data"], str) and is_prepared(recipe["data"]):
        raise ValueError(f"{recipe['data']} is prepared already: leave out the section prepare")
    return recipe


def _check_dtype(given: str | None, section: str) -> None:
    known = getattr(torch, given or "float32", None)
    if not (isinstance(known, torch.dtype) and known.is_floating_point) and (section, given) != ("target", "auto"):
        raise ValueError(f"{section}.dtype is {given!r}; name one of torch, such as bfloat16")


def _check_draft(given: Any) -> None:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    configs = config_classes()
    if kind not in configs:
        raise ValueError(
            f"draft.kind is {kind!r}; name one of {sorted(configs)}, or let draft be a path to start from"
        )
    own = {field.name for field in dataclasses.fields(configs[kind])} - _fields(PreTrainedConfig) - SET_BY_US
    layers = _section(given, {"kind", "layers", *own}, "draft").get("layers")
    model_type = layers.get("model_type", "llama") if isinstance(layers, Mapping) else "llama"
    _section(layers, _fields(type(AutoConfig.for_model(model_type))) | {"model_type"}, "draft.layers")


def _fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _section(given: Any, known: Collection[str], name: str) -> dict[str, Any]:
    """Return a section as a dict, empty if nothing is given; ``known`` may map its keys to types of values."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {given!r}; write keys and values")
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ValueError(f"{name} has no {key!r}; {hint}")
        if isinstance(known, Mapping) and not _fits(given[key], known[key]):
            takes = known[key].__name__ if isinstance(known[key], type) else str(known[key]).removeprefix("typing.")
            raise ValueError(f"{name}: {key} is {given[key]!r}; it takes {takes}")
    return dict(given)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is Any:
        return True
    return type(value) in [get_origin(one) or one for one in get_args(hint) or (hint,)]  # True is no int


def train(recipe: dict[str, Any], changes: Sequence[str] = ()) -> tuple[str, dict[str, float]]:
    """Train by a ``recipe`` from ``read_recipe`` and save the draft; return its directory and the last metrics.

    ``changes`` are trainer arguments as on a command line. Errors: a ValueError for unknown ones or values of the
    wrong type; whatever preparing, loading and training raise.
    """
    args, adapter = training_arguments(recipe["trainer"], changes), _adapter(recipe.get("peft"))
    check_devices(args)
    names = [hub_name(name) for name in weights_of(recipe["data"])]
    args.data_name = args.data_name or ", ".join(name for name in names if name) or None
    if recipe["prepare"].get("streaming") and args.max_steps <= 0:
        raise ValueError("the length of a stream is unknown: set max_steps of the trainer")
    if not asks_to_resume(args.resume_from_checkpoint):
        check_output_dir(str(args.output_dir), RESULTS)
    features = dict(recipe["features"])
    if alone := features.pop("without_target", False):
        args.check_without_target()
    set_seed(args.seed)
    name, revision = recipe["target"]["name"], recipe["target"].get("revision", "main")
    with looking_for(name, "the target"):
        target_config = AutoConfig.from_pretrained(name, revision=revision)
    if not isinstance(recipe["draft"], str):
        _config(recipe["draft"], target_config)  # raises for wrong values before anything large is loaded
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    with args.main_process_first(desc="preparing data"):
        splits = _splits(recipe, tokenizer, max_positions(target_config))
        check_tokenizer(splits["train"], tokenizer)
    if args.eval_strategy != "no" and "test" not in splits:
        raise ValueError(
            "eval_strategy asks for evaluations, and no example is held out: prepare more than one example with "
            "held_out above 0 (hf-spec prepare --held-out), or set eval_strategy to 'no'"
        )
    if features and args.world_size > 1:
        _check_finished(features["directory"], splits, name)
    target = None
    if alone:
        target = _target_of_caches(features["directory"], splits, recipe["target"], target_config)
    target = target or _target(**recipe["target"])
    draft = _draft(recipe["draft"], base_model(target), splits["train"])
    if features:
        layers = draft.feature_layers(base_model(target)) if isinstance(draft, DraftModel) else ()
        with args.main_process_first(desc="caching features"):
            splits = cache_splits(splits, _on(args.device, target), layers, tokenizer=tokenizer, **features)
        target = splits["train"].load_target() if alone else target
    trainer = DraftTrainer(
        draft,
        target,
        args,
        train_dataset=splits["train"],
        eval_dataset=splits.get("test"),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = _last_metrics(trainer) if "test" in splits else {}
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub()
    return str(args.output_dir), metrics


def _last_metrics(trainer: DraftTrainer) -> dict[str, float]:
    """Return the metrics of the saved weights from the log, or measure them if they were not evaluated."""
    state, args = trainer.state, trainer.args
    best = state.best_global_step if args.load_best_model_at_end else None
    if best in (None, state.global_step):
        for logs in state.log_history:
            if logs["step"] == state.global_step and any(name.startswith("eval_") for name in logs):
                return {name: value for name, value in logs.items() if name != "step"}
    return trainer.evaluate()


def training_arguments(given: dict[str, Any], changes: Sequence[str] = ()) -> DraftTrainingArguments:
    """Parse trainer arguments with transformers' parser; the ``given`` ones replace its defaults."""
    kind: Any = DraftTrainingArguments
    parser: Any = HfArgumentParser(kind, prog="hf-spec train RECIPE.yaml", exit_on_error=False, allow_abbrev=False)
    numbers = {action.dest: action.type.__name__ for action in parser._actions if action.type in (int, float)}
    for name, one in given.items():
        if name in numbers and type(one) not in (int, float, str, type(None)):
            raise ValueError(f"trainer: {name} is {one!r}; it takes {numbers[name]}")
    # Numbers become text, so that the parser checks and converts them as on a command line.
    parser.set_defaults(**{name: repr(one) if type(one) in (int, float) else one for name, one in given.items()})
    try:
        (args,) = parser.parse_args_into_dataclasses(list(changes), look_for_args_file=False)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    return args  # type: ignore[no-any-return]


def _splits(recipe: dict[str, Any], tokenizer: Any, positions: int) -> Any:
    if isinstance(recipe["data"], str) and is_prepared(recipe["data"]):
        return saved(recipe["data"])
    options = dict(recipe["prepare"])
    how = {name: options.pop(name) for name in ("split", "streaming", "config") if name in options}
    data = [(load_raw(name, **_applicable(how, name)), weight) for name, weight in weights_of(recipe["data"]).items()]
    return prepared(data, tokenizer, positions=positions, **options)


def _applicable(how: dict[str, Any], name: str) -> dict[str, Any]:
    """Leave out, with a warning, what a file does not have: a recipe may name datasets of the Hub beside it."""
    left = [key for key in ("config", "split") if is_file(name) and how.get(key) is not None]
    left = [key for key in left if key == "config" or how[key].partition("[")[0] != "train"]
    for key in left:
        logger.warning(f"{name} is a file, which has no {key} {how[key]!r}: all of it is read")
    return {key: value for key, value in how.items() if key not in left}


def _check_finished(directory: str, parts: Iterable[str], name: str) -> None:
    """Raise a ValueError unless all caches are finished: other processes wait half an hour for the first, no more."""
    try:
        for part in parts:
            FeatureCache(Path(directory, part))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"several processes read finished features, and those in {directory} are not: make them first, by hf-spec "
            f"prepare DATA OUT --target {name} --features {directory}, with OUT as the recipe's data. Or begin this "
            "recipe in one process, and stop it once they are made"
        ) from error


def _target_of_caches(directory: str, parts: Iterable[str], asked: dict[str, Any], config: PreTrainedConfig) -> Any:
    """Load the target's embeddings and output layer from finished caches; ``None`` if a cache must still be made.

    Errors: a ValueError if they are of another target than the one ``asked`` for, which has this ``config``.
    """
    try:
        caches = [FeatureCache(Path(directory, part)) for part in parts]
    except OSError as error:  # a damaged file was removed
        logger.warning(f"{error}. The complete target is loaded to repair it")
        return None
    except ValueError:  # not started, or not finished
        return None
    target, made_from = caches[0].load_target(), caches[0].made_from
    name, recorded = asked["name"], made_from.get("name")
    texts = (one.get_text_config(decoder=True) for one in (target.config, config))
    own, wanted = ({key: getattr(text, key, None) for key in SIZES} for text in texts)
    if None not in (recorded, hub_name(name)):
        own["the target"], wanted["the target"] = recorded, name
    adapter, had = asked.get("adapter"), made_from.get("adapter")
    origin = None if adapter is None else adapter_origin(adapter)
    if made_from.get("adapter_origin", had and (origin or "")) != origin:  # of a model that was given, it is unknown
        own["the adapter"], wanted["the adapter"] = had, adapter
    if found := differences(own, wanted):
        raise ValueError(
            f"the feature cache in {directory} is of another target: {'; '.join(found)}. Name the target it was made "
            "from, or make another cache in another directory"
        )
    return target


def _target(name: str, adapter: str | None = None, **options: Any) -> Any:
    with looking_for(name, "the target"):
        target = load_decoder(name, **{"dtype": "auto"} | options)
    if adapter is None:
        return target
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(target, adapter)
    for config in adapted.peft_config.values():
        setattr(config, PLACE, adapter)  # for the draft's model card: PEFT does not keep the path
    return adapted


def _on(device: Any, target: Any) -> Any:
    return target if getattr(base_model(target), "hf_device_map", None) else target.to(device)


def _draft(given: Any, target: PreTrainedModel, examples: Any) -> Any:
    """Load the draft to start from, or make one; in float32, so that small updates of weights are not rounded away."""
    if given == "mtp":
        return cast(Any, as_speculator(given, target)).float()
    if isinstance(given, str):
        return load_draft(given, target, dtype="float32")
    config = _config(given, target.config)
    complete, size = config.layers.vocab_size, getattr(config, "draft_vocab_size", None)
    counted = examples.take(COUNTED) if isinstance(examples, IterableDataset) else examples
    return new_draft(config, target, count_tokens(counted, complete) if size and size < complete else None)


def _config(given: dict[str, Any], target: PreTrainedConfig) -> Any:
    flags = {name: value for name, value in given.items() if name not in ("kind", "layers")}
    try:
        return config_classes()[given["kind"]].for_target(target, given.get("layers"), **flags)
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"draft: {error}") from error


def _adapter(given: Any) -> Any:
    if given is None:
        return None
    from peft import LoraConfig

    return LoraConfig(**_section(given, _fields(LoraConfig), "peft"))
