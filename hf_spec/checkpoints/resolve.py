"""Resolution of what a user passes as ``speculator=`` into a ``Speculator``."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from torch import OutOfMemoryError
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration import sizes_of
from ..drafts.base import Speculator, network_of
from ..drafts.early_exit.speculator import EarlyExitSpeculator
from ..drafts.files import Checkpoint
from ..drafts.gemma4_assistant.speculator import MODEL_TYPES as GEMMA_ASSISTANTS
from ..drafts.mtp.modeling import MTPDraftModel
from ..drafts.mtp.target import TargetMtp
from ..drafts.ngram.hybrid import HybridSpeculator
from ..drafts.ngram.speculator import DEFAULT_HISTORY_SIZE, NgramSpeculator
from ..drafts.plain.speculator import PlainSpeculator
from ..drafts.translated.speculator import TranslatedSpeculator
from ..drafts.vanilla.speculator import OTHER_TOKENIZERS, VanillaSpeculator
from ..scoring.adapters import base_model, why_in_generate
from ..scoring.architectures import cross_attends
from ..scoring.plain import input_device, tokenizer_in
from ..untrusted import printable
from .assistants import assistant_speculator, load_gemma_assistant
from .auto import AutoDraftModel, load
from .files import HUB_OPTIONS, gguf, is_cached, read_checkpoint
from .kinds import config_classes, find_format
from .known import cached, known_drafts
from .language_models import load_language_model
from .neighbours import ForeignDraftError

EARLY_EXIT = "early-exit"
KEYWORDS = ("ngram", "mtp", EARLY_EXIT, "plain", "auto")
# The least share of equal tokens without a warning: tokenizers of one family differ in a few added tokens.
MOST_IN_COMMON = 0.9

logger = logging.get_logger(__name__)

# What "auto" found for a target, and where that was then. It is searched once, so that n-grams keep their history of
# earlier calls, and again once a target that has a draft was moved.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Speculator, dict[str, Any]]] = WeakKeyDictionary()
# Names that were read from files for a target, to warn users who do so in a loop.
_read: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def as_speculator(speculator: Any, target: PreTrainedModel) -> Speculator:
    """Turn a draft model, a language model, an assistant, a keyword, or a path or Hub id into a ``Speculator``.

    The keywords are ``"ngram"``, ``"mtp"`` (the target's own MTP layers), ``"early-exit"`` (its own first layers),
    ``"plain"`` (no draft tokens) and ``"auto"``. ``"auto"`` takes the first that exists: MTP layers, a draft of
    ``known_drafts(target)`` in the Hub's local cache, or n-grams with a history. It is decided once for a target.
    ``"mtp"`` and paths are read again each time, so keep ``as_speculator("mtp", target)`` for many calls. An assistant
    is one of transformers' own (``Gemma4AssistantForCausalLM``, ``Gemma4UnifiedAssistantForCausalLM``,
    ``MuseGlimmerAssistantModel``).

    Errors: a TypeError for anything else; for a path what ``load_draft`` raises. A ValueError for a draft with an
    adapter of PEFT that works through PEFT's ``generate`` alone.
    """
    target = base_model(target)
    if isinstance(speculator, HybridSpeculator):
        return speculator.with_draft(as_speculator(speculator.draft, target))
    if isinstance(base := _unwrapped(speculator), Speculator):
        warn_of_tokenizers(base, target)
        _warn_of_device(base, target)
        return base
    if speculator == "ngram":
        return _ngrams()
    if speculator == "plain":
        return PlainSpeculator()
    if speculator == EARLY_EXIT:
        return EarlyExitSpeculator()
    if speculator == "auto":
        best, place = _found.get(target, (None, None))
        if best is None or (network_of(best) is not None and place != placement(target)):
            best = _best_at_hand(target)
            _found[target] = best, placement(target)
        return best
    if isinstance(speculator, str | os.PathLike):  # "mtp", too
        found = _from_files(speculator, target)
        _warn_of_reading(os.fspath(speculator), target)
        return found
    if isinstance(base, PreTrainedModel) and (assistant := assistant_speculator(base)) is not None:
        return as_speculator(assistant, target)
    is_pair = bool(getattr(target.config, "is_encoder_decoder", False))
    if isinstance(base, PreTrainedModel) and base.can_generate() and (is_pair or not base.config.is_encoder_decoder):
        return as_speculator(VanillaSpeculator(base), target)
    if hasattr(sys.modules.get(type(base).__module__), "SOURCES"):  # a file that ``bundling`` has written
        raise TypeError(
            f"this {type(base).__name__} was loaded with code of its own, before hf_spec was imported. Load it again, "
            "or decode with its code: generate(..., custom_generate=REPOSITORY, trust_remote_code=True)."
        )
    raise TypeError(
        "speculator must be a draft model, a language model, an assistant of transformers, 'ngram', 'mtp', "
        "'early-exit', 'plain', 'auto', a path or Hub id of one, or a hf_spec.Speculator, got "
        f"{type(speculator).__name__}. Load a draft with AutoModel.from_pretrained, or a language model with "
        "AutoModelForCausalLM.from_pretrained or AutoModelForSeq2SeqLM.from_pretrained."
        + (" An encoder-decoder model can draft for another of its kind alone." if _encodes(base) else "")
    )


def _unwrapped(draft: Any) -> Any:
    """Return the model inside of wrappers; a ValueError if the adapter of a draft would be passed by."""
    adapter = why_in_generate(draft) or why_in_generate(getattr(draft, "model", None))  # of a VanillaSpeculator
    if adapter is not None:
        raise ValueError(
            f"the draft's adapter ({adapter}) works through PEFT's generate alone, which drafting does not call: "
            "draft with its get_base_model(), or with an adapter of weights, such as LoRA"
        )
    return base_model(draft)


def _from_files(place: str | os.PathLike[str], target: PreTrainedModel) -> Speculator:
    if place == "mtp":
        return _own_layers(target)
    return as_speculator(load_draft(place, target, **placement(target)), target)


@functools.cache
def _ngrams() -> NgramSpeculator:
    """Return the same object each time: it keeps no state between calls."""
    return NgramSpeculator()


def _encodes(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and bool(model.config.is_encoder_decoder)


def load_draft(path: str | os.PathLike[str], target: PreTrainedModel, **kwargs: Any) -> Any:
    """Load a draft of any format for ``target``, or a language model if ``path`` is no draft.

    ``kwargs`` are those of ``from_pretrained``. Errors: a ValueError if there is neither at ``path``, or if an
    encoder-decoder model is there and the target is none.
    """
    try:
        hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        checkpoint = read_checkpoint(path, only_names=True, **hub)
    except (OSError, ValueError) as error:
        why = f"{_suggestion(os.fspath(path))}: {gguf(path) or error}"
        raise ValueError(f"no draft can be read at {os.fspath(path)!r}{why}") from error
    if _is_draft(checkpoint, target):
        return AutoDraftModel.from_pretrained(path, target=target, **kwargs)
    if checkpoint.config.get("model_type") in GEMMA_ASSISTANTS:
        return load_gemma_assistant(path, **kwargs)
    return load_language_model(path, target, **kwargs)


def with_tokenizers(speculator: Any, target: PreTrainedModel, tokenizer: Any, target_tokenizer: Any) -> Speculator:
    """Turn a language model with another ``tokenizer``, or the path or Hub id of one, into a ``Speculator``.

    If the tokenizers have the same tokens, nothing is translated. Errors: a ValueError for another kind of draft, or
    without a ``target_tokenizer``.
    """
    tokenizer, target_tokenizer = tokenizer_in(tokenizer), tokenizer_in(target_tokenizer)
    if isinstance(speculator, str | os.PathLike) and speculator not in KEYWORDS:
        place, speculator = speculator, load_draft(speculator, target, **placement(target))
        _warn_of_reading(os.fspath(place), target)
    draft = _unwrapped(speculator.model if isinstance(speculator, VanillaSpeculator) else speculator)
    if not (isinstance(draft, PreTrainedModel) and draft.can_generate()):
        raise ValueError(
            f"assistant_tokenizer is for a draft that is a language model, and {type(draft).__name__} is none; drop "
            "assistant_tokenizer"
        )
    if target_tokenizer is None:
        raise ValueError(
            "assistant_tokenizer needs the target's tokenizer, too: generate(..., tokenizer=tokenizer, "
            "assistant_tokenizer=the draft's tokenizer)"
        )
    if tokenizer.get_vocab() == target_tokenizer.get_vocab():
        return as_speculator(draft, target)
    if cross_attends(draft):
        raise ValueError(
            f"the draft {type(draft).__name__} reads a source and has another tokenizer than the target; drafts of "
            "its kind need the target's tokenizer: use one, or a decoder-only draft, or 'ngram'"
        )
    return as_speculator(TranslatedSpeculator(draft, tokenizer, target_tokenizer), target)


def _suggestion(name: str) -> str:
    """Suggest what the user meant by a ``name`` that does not exist; "" without an idea."""
    if name == "history" or name.startswith("history+"):
        own = "NgramSpeculator(history_size=100_000)" if name == "history" else "HybridSpeculator(draft)"
        return f" (a word of the commands; in Python, pass hf_spec.{own})"
    if near := difflib.get_close_matches(name.lower(), KEYWORDS, 1):
        return f" (did you mean {near[0]!r}?)"
    is_kind = name.lower() in config_classes()
    return f" ({name!r} is a kind of draft with weights; pass the directory or Hub id of one)" if is_kind else ""


def _is_draft(checkpoint: Checkpoint, target: PreTrainedModel) -> bool:
    try:
        found = find_format(checkpoint)
    except ForeignDraftError:
        raise
    except ValueError:  # none of the formats of drafts
        return False
    if found.name != "mtp":
        return True
    # An MTP layer is in the checkpoint of a complete model, which is the draft if its sizes are not this target's.
    config = checkpoint.config.get("text_config") or checkpoint.config
    return all(config.get(name) == size for name, size in sizes_of(target.config).items())


def _best_at_hand(target: PreTrainedModel) -> Speculator:
    """Find a speculator for ``target`` without a download, and log which it is."""
    at_hand = (cached(known.draft) for known in known_drafts(target) if known.is_read)
    places: Iterable[str | Path] = itertools.chain(("mtp",), filter(None, at_hand))
    for place in places:
        # The cache may have only some of its files, or the draft may not fit the target or the memory.
        with contextlib.suppress(OSError, ValueError, OutOfMemoryError):
            found = _own_layers_at_hand(target) if place == "mtp" else _from_files(place, target)
            found.check(target, found.settings(None))
            logger.info(f"speculator='auto' is {place} for {target.config.name_or_path or type(target).__name__}")
            return found
    return NgramSpeculator(history_size=DEFAULT_HISTORY_SIZE)


def _own_layers_at_hand(target: PreTrainedModel) -> Speculator:
    """Read the MTP layers of ``target`` without a download. Errors: an OSError if its files are not here."""
    path = target.config.name_or_path
    if path and not os.path.isdir(path) and not is_cached(path):  # loaded from another cache, or of another revision
        raise FileNotFoundError(f"{path} is not in the Hub's local cache")
    return _own_layers(target, local_files_only=True)


def _own_layers(target: PreTrainedModel, **hub: Any) -> Speculator:
    """Read the MTP layers of ``target`` from its checkpoint; through transformers if its config has them."""
    if getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return TargetMtp.of(target)
    path, found = target.config.name_or_path, None
    if path:
        with contextlib.suppress(OSError):  # the name may not be a path or Hub id
            found = read_checkpoint(path, inside_target=True, **hub)
    if found is None or not found.tensors or find_format(found).name != "mtp":
        here = " For the directory 'mtp' here, write './mtp'." if Path("mtp").is_dir() else ""
        raise ValueError(
            f"{type(target).__name__} has no multi-token-prediction layers: its config sets no num_mtp_layers, and "
            f"{path or 'a model made in memory'!r} holds no mtp.* tensors. Use another speculator, for example "
            f"'ngram'.{here}"
        )
    draft: MTPDraftModel = load(found, **placement(target))
    draft.bind(target)
    return draft


def warn_of_tokenizers(speculator: Speculator, target: PreTrainedModel) -> None:
    """Warn once if the tokenizers saved with draft and target give different meanings to the same ids.

    Vocabularies of the same size may have different tokens. Only local directories are compared.
    """
    draft = network_of(speculator)
    if isinstance(draft, PreTrainedModel) and not isinstance(speculator, TranslatedSpeculator):
        own, wanted = draft.name_or_path, target.name_or_path
        _warn_of_versions(draft, target)
        if (share := common_tokens(own, wanted)) < MOST_IN_COMMON and _serves(speculator, target):
            logger.warning_once(
                f"only {share:.0%} of the tokens of the draft {own} and the target {wanted} are the same: their "
                "tokenizers differ, so hardly a draft token will be accepted. The text is still the target's. "
                f"If the draft is a language model, pass both tokenizers: {OTHER_TOKENIZERS}"
            )
        elif share < 1 and (moved := moved_tokens(own, wanted)) and _serves(speculator, target):
            token, (id, other) = next(iter(moved.items()))
            logger.warning_once(
                f"the tokenizers of the draft {own} and the target {wanted} look alike, but {len(moved)} tokens have "
                f"other ids, such as {printable(token)!r}: {id} in the draft and {other} in the target. Draft tokens "
                f"around these will be rejected. The text is still the target's. "
                + (
                    "Use a draft with the target's tokenizer"
                    if cross_attends(draft)
                    else f"To translate them: {OTHER_TOKENIZERS}"
                )
            )


def _warn_of_versions(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Warn once if draft and target are Whispers of versions that number their special tokens in other ways."""
    name = "no_timestamps_token_id"
    own, wanted = (getattr(getattr(one, "generation_config", None), name, None) for one in (draft, target))
    if None not in (own, wanted) and own != wanted:
        logger.warning_once(
            f"the draft {type(draft).__name__} and the target are of two versions, whose special tokens have other "
            f"ids: <|notimestamps|> is {own} in the draft and {wanted} in the target. So the draft reads another "
            "language, task and time than the target, and few draft tokens may be accepted. The text is still the "
            "target's. Use a draft of the target's version: large-v3's has one language more than earlier ones"
        )


def _warn_of_device(speculator: Speculator, target: PreTrainedModel) -> None:
    """Warn once if the draft is on the CPU and the target is not: the draft would be the slower one."""
    draft, device = network_of(speculator), input_device(target)
    is_left = isinstance(draft, PreTrainedModel) and draft.device.type == "cpu" and device.type not in ("cpu", "meta")
    if is_left and _serves(speculator, target):
        logger.warning_once(
            f"the draft {type(draft).__name__} computes on the CPU and the target on {device}: drafting will be slow. "
            f'Move it, draft.to("{device}"), or load it with device_map={{"": target.device}} and dtype=target.dtype'
        )


def _serves(speculator: Speculator, target: PreTrainedModel) -> bool:
    """Tell whether ``speculator`` fits ``target``. If not, an error will follow, and a warning would be redundant."""
    try:
        speculator.check(target)
    except (TypeError, ValueError):
        return False
    return True


def _warn_of_reading(place: str, target: PreTrainedModel) -> None:
    """Warn once if a draft is read again for the same target: every call that gives a name reads the files."""
    read = _read.setdefault(target, set())
    if place in read:
        logger.warning_once(
            f"the draft {place!r} is read from its files again. For many calls read it once: "
            f"draft = hf_spec.as_speculator({place!r}, target)"
        )
    read.add(place)


@functools.cache
def common_tokens(draft: str, target: str) -> float:
    """Return the share of ids of both tokenizers that have the same token; 1 if the tokenizers cannot be compared."""
    files = [Path(place, "tokenizer.json") for place in (draft, target)]
    if not (draft and target and all(file.is_file() for file in files)):
        return 1.0
    try:
        if files[0].read_bytes() == files[1].read_bytes():
            return 1.0
        own, wanted = ({id: token for token, id in _vocabulary(file).items()} for file in files)
    except Exception as error:  # tokenizers raises no more specific class
        logger.warning(
            f"a tokenizer.json of {draft} or {target} cannot be read ({printable(error)}), so the tokens of draft "
            "and target are not compared"
        )
        return 1.0
    both = own.keys() & wanted.keys()
    return sum(own[id] == wanted[id] for id in both) / max(1, len(both))


@functools.cache
def moved_tokens(draft: str, target: str) -> dict[str, tuple[int, int]]:
    """Return the tokens that have different ids in the tokenizers of ``draft`` and ``target``, with both ids."""
    own, wanted = (_vocabulary(Path(place, "tokenizer.json")) for place in (draft, target))
    return {token: (id, wanted[token]) for token, id in own.items() if wanted.get(token, id) != id}


def _vocabulary(file: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(file)).get_vocab()


def placement(target: PreTrainedModel) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` by which a draft stands where ``target`` does."""
    return {"dtype": target.dtype, "device_map": {"": input_device(target)}}
