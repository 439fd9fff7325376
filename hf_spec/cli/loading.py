"""Loading of the target, its tokenizer, and its drafts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from ..checkpoints.files import looking_for
from ..checkpoints.language_models import load_decoder, loader_of
from ..checkpoints.resolve import as_speculator, load_draft, with_tokenizers
from ..checkpoints.same_tokens import needs_translation
from ..configuration import SpeculatorConfig
from ..drafts.base import Speculator, network_of
from ..drafts.modeling import DraftModel
from ..drafts.ngram.hybrid import HybridSpeculator
from ..drafts.ngram.speculator import DEFAULT_HISTORY_SIZE, NgramSpeculator
from ..invariance.mode import invariant
from ..packing.packing import pack
from ..scoring.plain import input_device, position_limit, renders_by_code, space_after
from ..settings import SpeculationConfig

WITH_HISTORY = "history+"  # before the name of a draft
OF_TARGET = ("mtp", "early-exit", "auto")  # drafts that are found in the target's own files
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # over all devices, as accelerate does

Configured = Callable[[Speculator], Iterable[SpeculationConfig]]


def load_models(
    target: str, drafts: Iterable[str], dtype: str, device: str | None, configs: Configured
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Speculator]]:
    """Load a target, its tokenizer, and ``drafts`` by their names on the command line: rules, directories or Hub ids.

    Drafts are loaded first and checked against the target's config, with the settings that will be used (``configs``).
    So a wrong one is reported before the target's weights are read. Errors: a ValueError or an OSError.
    """
    check_device(device)
    speculators = load_drafts(outline_of(target), drafts, dtype, configs)
    model, tokenizer = load_target(target, dtype, device)
    for speculator in speculators.values():
        if (weights := network_of(speculator)) is not None:
            weights.to(input_device(model))
    return model, tokenizer, {name: speculators.get(name) or as_speculator(unloaded(name), model) for name in drafts}


def pack_models(args: argparse.Namespace, target: PreTrainedModel, *speculators: Speculator) -> None:
    """Pack the weights of a target on a CPU, and those of its drafts, unless --no-pack is given; say what was packed.

    With bench --compiled they stay plain: transformers' own compiled ``generate`` reads no packed weights. With
    --invariant the target is then made invariant.
    """
    if not (args.no_pack or getattr(args, "compiled", False) or input_device(target).type != "cpu"):
        packing = pack(target, *speculators)
        if packing.packed:  # a processor that gains nothing is no news
            print(f"hf-spec: {packing} (--no-pack: leave all plain)", file=sys.stderr)
    if getattr(args, "invariant", False):
        print(f"hf-spec: {invariant(target)}", file=sys.stderr)


def outline_of(target: str) -> PreTrainedModel:
    """Return a target without weights, which is enough to check a draft; errors: those of ``config_of``."""
    config = config_of(target)
    with torch.device("meta"):
        model: PreTrainedModel = loader_of(config).from_config(config)
    return model


def config_of(target: str) -> Any:
    """Return the config of a target.

    Errors: a FileNotFoundError if there is nothing at ``target``, or if it is a draft or an adapter.
    """
    with looking_for(target, "the target"):
        try:
            config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError) as error:
            if _is_adapter(target):
                raise FileNotFoundError(
                    f"the target {target!r} holds an adapter of PEFT and no model: merge it into its model, and pass "
                    f"what is written: PeftModel.from_pretrained(model, {target!r}).merge_and_unload()"
                    ".save_pretrained(DIRECTORY)"
                ) from error
            raise
    if isinstance(config, SpeculatorConfig):
        raise FileNotFoundError(
            f"the target {target!r} is a draft, which drafts for a language model: pass it as --speculator, and that "
            "model as the target"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"the target {target!r} is an encoder-decoder model, and the commands serve decoder-only ones: call its "
            "generate(..., speculator=...) in Python"
        )
    return config


def _is_adapter(target: str) -> bool:
    """Tell whether there is an adapter of PEFT at ``target``."""
    with contextlib.suppress(OSError, ValueError):  # nothing is there, or the Hub cannot be reached
        return find_adapter_config_file(target) is not None
    return False


def load_drafts(
    outline: PreTrainedModel, drafts: Iterable[str], dtype: str, configs: Configured
) -> dict[str, Speculator]:
    """Load ``drafts`` and check that they can serve ``outline``; those ``OF_TARGET`` are left to the target."""
    speculators = {}
    for name in drafts:
        if name.removeprefix(WITH_HISTORY) not in OF_TARGET:  # their weights are in the target's files
            speculators[name] = load_speculator(name, outline, dtype)
            for config in configs(speculators[name]):
                speculators[name].check(outline, config)
    return speculators


def load_target(name: str, dtype: str, device: str | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; ``device``: any ``device_map``, ``None`` for an accelerator or else CPU."""
    check_device(device)
    device = device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    tokenizer = tokenizer_of(name)  # first, because loading weights takes long
    with looking_for(name, "the target"):
        return load_decoder(name, dtype=dtype, device_map=device), tokenizer


def tokenizer_of(target: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target; errors: a ValueError that names the target."""
    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be read at the target {target!r}; copy tokenizer.json and tokenizer_config.json of the "
            f"model that it was made from into it. {error}"
        ) from error


def limited_length(answer: int, prompt: int, target: PreTrainedModel) -> int:
    """Limit the length of an ``answer`` to the positions that the target has left after the ``prompt``.

    Errors: a ValueError if the prompt is too long for the target's positions.
    """
    size = position_limit(target)
    return answer if size is None else min(answer, space_after(prompt, size, "the target has positions"))


def refuse_without_template(tokenizer: PreTrainedTokenizerBase, target: str, instead: str) -> None:
    """Raise a ValueError if the tokenizer of a target has no chat template; ``instead`` says what else to do."""
    if not (tokenizer.chat_template or renders_by_code(tokenizer)):
        raise ValueError(f"{target} has no chat template; {instead}, or take an instruction-tuned model")


def load_speculator(name: str, target: PreTrainedModel, dtype: str) -> Speculator:
    """Load a draft by its name: a rule, a draft of any format, or else a causal language model.

    With the ``dtype`` "auto" it gets the target's, as in ``generate``: training may have stored it in float32.
    """
    if name.startswith(WITH_HISTORY):
        return with_history(load_speculator(name.removeprefix(WITH_HISTORY), target, dtype))
    if name in ("ngram", "history", "plain", *OF_TARGET):
        return as_speculator(unloaded(name), target)
    stored = getattr(target.config, "dtype", None)  # of an outline: what its weights will be
    draft = load_draft(name, target, dtype=stored or dtype if dtype == "auto" else dtype)
    draft = draft if target.device.type == "meta" else draft.to(input_device(target))
    both = None if isinstance(draft, DraftModel) else _other_tokenizers(name, target.name_or_path or "")
    return as_speculator(draft, target) if both is None else with_tokenizers(draft, target, *both)


def _other_tokenizers(draft: str, target: str) -> tuple[Any, Any] | None:
    """Return the tokenizers of a draft and a target if tokens have to be translated, and both can be read."""
    try:
        own, wanted = (AutoTokenizer.from_pretrained(place) for place in (draft, target))
    except (OSError, ValueError):
        return None
    return (own, wanted) if needs_translation(own, wanted) else None


def unloaded(name: str) -> str | Speculator:
    """Return what ``as_speculator`` takes for the name of a draft, which is not loaded yet."""
    if name == "history":
        return NgramSpeculator(history_size=DEFAULT_HISTORY_SIZE)
    return with_history(name.removeprefix(WITH_HISTORY)) if name.startswith(WITH_HISTORY) else name


def with_own_history(speculator: Speculator) -> Speculator:
    """Return ``speculator`` with a history that no other has, if it has one."""
    if isinstance(speculator, HybridSpeculator):
        return HybridSpeculator(speculator.draft, draft_tokens=speculator.draft_tokens)
    if isinstance(speculator, NgramSpeculator) and speculator.learns:
        return NgramSpeculator(history_size=DEFAULT_HISTORY_SIZE)
    return speculator


def with_history(draft: str | Speculator) -> HybridSpeculator:
    """Combine a draft with n-grams over earlier texts."""
    return HybridSpeculator(draft)


def check_device(name: str | None) -> None:
    """Raise a ValueError unless this machine has the device ``name``; ``None`` is always fine."""
    if name is None or name in SPREAD:
        return
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: write cpu, cuda, cuda:1, ..., or auto for all") from error
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found else 0
    if device.type != "cpu" and (found is None or device.type != found.type or (device.index or 0) >= count):
        has = f"{count} of type {found.type}" if found else "no accelerator, or torch was built without it"
        raise ValueError(f"--device {name}: this machine has {has}; use another one, or leave --device out")
