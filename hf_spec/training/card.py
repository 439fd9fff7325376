"""The model card of a trained draft."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # which its list of names lacks
from transformers import PreTrainedModel

from ..checkpoints.language_models import loader_of
from ..configuration import hub_name, is_local
from ..drafts.modeling import DraftModel, vllm_command
from .arguments import DraftTrainingArguments
from .checks import serving_warnings

PLACE = "loaded_from"  # attribute of an adapter's config: the path or id it was loaded from
ADAPTER = "adapter_of_states"  # attribute of a target without layers: the adapter that its cached states are of
PLAIN_PROMPT = ('inputs = tokenizer("Once upon a time", return_tensors="pt")',)
CHAT_PROMPT = (
    'messages = [{"role": "user", "content": "Tell me a short story."}]',
    "inputs = tokenizer.apply_chat_template(",
    '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
    ")",
)


def check_card_options(names: Collection[str]) -> None:
    """Raise a TypeError unless ``names`` are options that ``create_model_card`` takes."""
    if not (others := sorted(set(names) - {"license", "tags", "dataset", "model_name"})):
        return
    cure = "; draft.push_to_hub(..., with_code=True) uploads the code" if "with_code" in others else ""
    raise TypeError(
        f"the model card has no place for {', '.join(others)}: it takes license, tags, dataset and model_name{cure}"
    )


def _names(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def is_chat(tokenizer: Any, examples: Any) -> bool:
    """Tell whether ``examples`` were made from conversations. In plain text every token is an answer token."""
    if getattr(tokenizer, "chat_template", None) is None:
        return False
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):  # a stream
        return True
    some = (examples[i] for i in range(min(len(examples), 8)))
    return any(not torch.as_tensor(one["loss_mask"]).bool().all() for one in some if "loss_mask" in one)


def model_card(
    draft: Any,
    target: PreTrainedModel,
    args: DraftTrainingArguments,
    steps: int,
    history: list[dict[str, float]],
    *,
    base: str | None = None,
    examples: int | None = None,
    target_name: str | None = None,
    best_step: int | None = None,
    chat: bool = False,
    draft_name: str | None = None,
    license: str | None = None,
    tags: str | Sequence[str] = (),
    dataset: str | Sequence[str] = (),
    model_name: str | None = None,
) -> str:
    """Return a README for the Hub: target, recipe, measurements, and how to load the draft.

    ``base`` is the draft's name if an adapter on it is saved. ``examples`` counts the training examples.
    ``best_step`` is the step whose weights were loaded when training ended. ``chat``: trained on conversations.
    ``draft_name`` is that of the repository, where it differs from ``hub_model_id``. ``license``,
    ``tags``, ``dataset`` and ``model_name``: see ``DraftTrainer.create_model_card``.
    """
    args = copy.copy(args)
    args.license = license or args.license
    args.data_name = ", ".join(_names(dataset)) or args.data_name
    draft_name = draft_name or args.hub_model_id or "this-draft"
    name = target_name or hub_name(target.config.name_or_path)
    kind = draft.config.speculators_model_type if isinstance(draft, DraftModel) else "independent"
    what = f"{kind} draft" if base is None else f"adapter on a draft ({kind})"
    adapter = adapter_of(target)
    parts = [
        _front_matter(name, kind, args, base, _names(tags)),
        f"# {what} for {name or type(target).__name__}{f' with {adapter}' if adapter else ''}",
        f"Drafts tokens for speculative decoding of {_link(name, type(target).__name__)}"
        f"{f' with the adapter {adapter}' if adapter else ''}. It has {_millions(draft)} parameters. The text stays "
        f"the target's. Trained by {_library()}.",
        "## How to use it\n\n"
        + _install(peft=base is not None or bool(adapter))
        + _snippet(draft, target, (name or "the-target", adapter), draft_name, base, chat)
        + _usage_in_vllm(draft, name or "the-target", draft_name, base),
        "## Measured\n\n" + _measured(args, history, best_step),
        "## Training\n\n" + _recipe(args, steps, history, examples),
        "## Licence\n\n" + _licence(args.license, _origin(draft, target) if base is None else ""),
    ]
    if warnings := serving_warnings(draft, target):
        parts.append("## Limits\n\n" + "\n".join(f"- {warning}" for warning in warnings))
    return "\n\n".join(parts) + "\n"


def adapter_of(target: Any) -> str:
    """Name the PEFT adapters that are active in ``target``, by Hub id or type; "" if there are none."""
    if (recorded := getattr(target, ADAPTER, None)) is not None:
        return str(recorded)
    configs: dict[str, Any] = getattr(target, "peft_config", None) or {}
    active = [name for name in _active(target) if name in configs]
    names = [
        hub_name(getattr(configs[one], PLACE, None)) or f"{configs[one].peft_type.value} {one!r}" for one in active
    ]
    return ", ".join(names)


def recorded_adapter(target: Any) -> dict[str, str]:
    """Return what a cache of states records of the active adapters: their name, and the origin if it is known."""
    if not (name := adapter_of(target)):
        return {}
    configs = getattr(target, "peft_config", {})
    place = next(filter(None, (getattr(configs.get(one), PLACE, None) for one in _active(target))), None)
    return {"adapter": name} | ({} if place is None else {"adapter_origin": adapter_origin(place)})


def adapter_origin(place: str) -> str:
    """Return the Hub id of an adapter, or a digest of its files: paths are nobody else's business."""
    if (name := hub_name(place)) is not None:
        return name
    files = sorted(one for one in Path(place).glob("adapter_*") if one.is_file())
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()


def _active(target: Any) -> list[str]:
    """Return the names of the active adapters, as the first adapted layer gives them."""
    layers = (one for one in target.modules() if hasattr(one, "active_adapters") and hasattr(one, "base_layer"))
    return [] if (layer := next(layers, None)) is None or layer.disable_adapters else list(layer.active_adapters)


def _link(name: str | None, fallback: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if name else f"a {fallback}"


def _library() -> str:
    """Return the library's name, as a link if its address is known."""
    return f"[hf_spec]({address})" if (address := _address()) else "hf_spec"


def _address() -> str:
    """Return the first Project-URL of the package; "" in a checkout that is not installed."""
    try:
        addresses = metadata("hf-spec").get_all("Project-URL") or [""]
    except PackageNotFoundError:
        return ""
    return str(addresses[0].partition(", ")[2])


def _install(peft: bool) -> str:
    """Return the install command: from the repository, because no package index has the library yet."""
    source = f"git+{address}" if (address := _address()) else "hf-spec"
    return f"```sh\npip install {f'{source} peft' if peft else source}\n```\n\n"


def _licence(name: str | None, origin: str) -> str:
    own = f"The draft's own: {name}." if name else "None is named for the draft."
    return f"{own} {origin}".rstrip()


def _origin(draft: Any, target: PreTrainedModel) -> str:
    """Say whose weights ``draft`` began with: another draft's, or some of the target's, see ``new_draft``."""
    if not isinstance(draft, DraftModel):
        return ""
    if place := draft.config.name_or_path:
        return f"Training went on from {hub_name(place) or 'another draft'}, whose licence applies, too."
    own = {"embeddings": draft.embed_tokens is not None, "output layer": bool(draft.output_layers)}
    parts = " and ".join(name for name, is_own in own.items() if is_own)
    width = target.config.get_text_config(decoder=True).hidden_size
    if not parts or draft.layer_config.hidden_size != width:
        return ""
    return f"Its {parts} began as the target's, whose licence applies to that."


def _front_matter(
    target: str | None, kind: str, args: DraftTrainingArguments, base: str | None, tags: Sequence[str]
) -> str:
    card = ModelCardData(
        license=args.license,
        library_name="transformers" if base is None else "peft",
        tags=list(dict.fromkeys(("speculative-decoding", "hf_spec", kind, *tags))),
        base_model=target if base is None else hub_name(base),
        datasets=_datasets(args.data_name or ""),
    )
    return f"---\n{card.to_yaml()}\n---"


def _datasets(names: str) -> list[str] | None:
    """Return the dataset ids in ``names``; ``None`` if one is invalid, because the Hub refuses such a card."""
    found = [hub_name(name.strip()) for name in names.split(",")]
    try:
        for name in found:
            validate_repo_id(name or "")
    except HFValidationError:  # a description, not an id
        return None
    return [name for name in found if name]


def _millions(draft: Any) -> str:
    return f"{sum(parameter.numel() for parameter in draft.parameters()) / 1e6:.1f} million"


def _snippet(draft: Any, target: Any, names: tuple[str, str], here: str, base: str | None, chat: bool) -> str:
    """Return Python code that uses the draft at ``here`` with ``target``; ``names``: its own, its adapter's or ""."""
    loader = "AutoModel" if isinstance(draft, DraftModel) else "AutoModelForCausalLM"
    place = here if base is None else hub_name(base) or "the-draft"
    loaded = f'{loader}.from_pretrained("{place}")'
    if base is not None and isinstance(draft, DraftModel):  # of any format, and AutoModel reads one of them
        loader, loaded = "", f'hf_spec.AutoDraftModel.from_pretrained("{place}", target=target)'
    of_target = loader_of(target.config).__name__
    name, adapter = names
    imports = ["import hf_spec", *(["from peft import PeftModel"] if base is not None or adapter else [])]
    loaders = dict.fromkeys(filter(None, (loader, of_target, "AutoTokenizer")))
    imports += [f"from transformers import {', '.join(loaders)}"]
    if base is not None:
        loaded = f'PeftModel.from_pretrained({loaded}, "{here}")'
    target_code = f'{of_target}.from_pretrained("{name}")'
    if adapter:
        target_code = f'PeftModel.from_pretrained({target_code}, "{adapter if "/" in adapter else "the-adapter"}")'
    lines = [
        *("```python", *imports, ""),
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f"target = {target_code}",
        f"draft = {loaded}",
        *(CHAT_PROMPT if chat else PLAIN_PROMPT),
        "out = target.generate(**inputs, speculator=draft, max_new_tokens=64)",
        *("print(tokenizer.decode(out[0], skip_special_tokens=True))", "```"),
    ]
    return "\n".join(lines) + "\n\n"


def _usage_in_vllm(draft: Any, target: str, here: str, base: str | None) -> str:
    if base is not None:
        return "vLLM reads no adapters of drafts: save `draft.merge_and_unload()` first."
    if isinstance(draft, DraftModel):
        return draft.use_in_vllm(draft.config, target, here)
    return vllm_command("draft_model", target, here, 5)


def _measured(args: DraftTrainingArguments, history: list[dict[str, float]], best_step: int | None) -> str:
    ended = bool(history) and "train_runtime" in history[-1]  # no evaluation since the best weights were loaded
    found: dict[str, dict[str, float]] = {}  # metric prefix of an evaluation dataset -> its last logs
    for logs in history:
        if best_step is not None and ended and logs["step"] != best_step:
            continue
        # The sampled metric has the longer name, so the shortest one is the greedy metric.
        if name := min((name for name in logs if name.endswith("_acceptance_length")), key=len, default=""):
            found[name.removesuffix("acceptance_length")] = logs
    if not found:
        return "Nothing was measured in this training run."
    names = {
        "measured_prompts": "prompts",
        "measured_tokens": "tokens that verifications emitted, greedy",
        "acceptance_length": "τ: mean accepted length (tokens per verification, greedy)",
        "sampled_acceptance_length": "the same, sampled",
    }
    names |= {f"acceptance_{k}": f"first {k} draft tokens accepted (cumulative)" for k in range(1, 33)}
    names |= {
        f"conditional_acceptance_{k}": f"draft token {k} accepted if those before were (conditional)"
        for k in range(1, 33)
    }
    lines = []
    for metric, label in names.items():
        cells = [logs.get(f"{prefix}{metric}") for prefix, logs in found.items()]
        if any(cell is not None for cell in cells):
            form = ",.0f" if metric.startswith("measured") else ".3f"
            lines.append((label, *("" if cell is None else f"{cell:{form}}" for cell in cells)))
    table = _table(lines, [prefix.removeprefix("eval_").rstrip("_") for prefix in found])
    return f"By `generate` from held-out prompts, up to {args.eval_max_new_tokens} new tokens each:\n\n{table}"


def _recipe(args: DraftTrainingArguments, steps: int, history: list[dict[str, float]], examples: int | None) -> str:
    done = max((int(logs.get("step", 0)) for logs in history), default=0)
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    named = None if is_local(args.data_name or "") else args.data_name
    data = [named, None if examples is None else f"{examples:,} examples"]
    return _table(
        [
            ("data", ", ".join(one for one in data if one) or "not named"),
            ("steps of training", done),
            (
                "batch per device × accumulated × devices",
                f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps} × {args.world_size}",
            ),
            ("learning rate, schedule", f"{args.learning_rate:g}, {schedule}"),
            *([("of matrices, by Muon", f"{args.muon_learning_rate:g}")] if args.muon_learning_rate else ()),
            *([("weight decay", f"{args.weight_decay:g}")] if args.weight_decay else ()),
            ("unrolled steps, decay", f"{steps}, {args.step_decay:g}"),
            ("objective, normalizer", f"{args.objective}, {args.normalizer}"),
            ("outside the draft vocabulary", args.outside_vocabulary),
        ]
    )


def _table(lines: Sequence[tuple[Any, ...]], columns: Sequence[str] = ("",)) -> str:
    lines = [("", *columns), ("---",) * (1 + len(columns)), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
