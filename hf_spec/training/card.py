"""The model card of a trained draft."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from ..drafts.modeling import DraftModel, vllm_command
from .arguments import DraftTrainingArguments
from .checks import serving_warnings


def model_card(
    draft: Any,
    target: PreTrainedModel,
    args: DraftTrainingArguments,
    steps: int,
    history: list[dict[str, float]],
    *,
    base: str | None = None,
    examples: int | None = None,
    best_step: int | None = None,
) -> str:
    """Return a README for the Hub: target, recipe, what was measured, and how to load the draft.

    ``base`` is the name of the draft if what is saved is an adapter on it, ``examples`` how many it was
    trained on, ``best_step`` the step whose weights were loaded when training ended.
    """
    name = hub_name(target.config.name_or_path)
    kind = draft.config.speculators_model_type if isinstance(draft, DraftModel) else "independent"
    what = f"{kind} draft" if base is None else f"adapter on a draft ({kind})"
    parts = [
        _front_matter(name, kind, args.data_name, base),
        f"# {what} for {name or type(target).__name__}",
        f"Guesses tokens for speculative decoding with {_millions(draft)} parameters. The text stays the target's.",
        "## How to use it\n\n" + _usage(draft, kind, name or "the-target", args.hub_model_id or "this-draft", base),
        "## Measured\n\n" + _measured(history, best_step),
        "## Training\n\n" + _recipe(args, steps, history, examples),
    ]
    if warnings := serving_warnings(draft, target):
        parts.append("## Limits\n\n" + "\n".join(f"- {warning}" for warning in warnings))
    return "\n\n".join(parts) + "\n"


def hub_name(path: str | None) -> str | None:
    """Return ``path`` if it may be a name on the Hub: one on somebody's disk is none."""
    return path if path and path.count("/") <= 1 and path[0] not in "./~" and not os.path.exists(path) else None


def _front_matter(target: str | None, kind: str, data: str | None, base: str | None) -> str:
    card = ModelCardData(
        library_name="transformers" if base is None else "peft",
        tags=["speculative-decoding", "hf_spec", kind],
        base_model=target if base is None else hub_name(base),
        datasets=None if data is None or hub_name(data) is None else [data],
    )
    return f"---\n{card.to_yaml()}\n---"


def _millions(draft: Any) -> str:
    return f"{sum(parameter.numel() for parameter in draft.parameters()) / 1e6:.1f} million"


def _usage(draft: Any, kind: str, target: str, here: str, base: str | None) -> str:
    loader = "AutoModel" if isinstance(draft, DraftModel) else "AutoModelForCausalLM"
    imports = ["import hf_spec", *(["from peft import PeftModel"] if base is not None else [])]
    imports += [f"from transformers import {', '.join(dict.fromkeys((loader, 'AutoModelForCausalLM')))}"]
    loaded = f'{loader}.from_pretrained("{here if base is None else hub_name(base) or "the-draft"}")'
    if base is not None:
        loaded = f'PeftModel.from_pretrained({loaded}, "{here}")'
    lines = [
        *("```python", *imports, ""),
        f'target = AutoModelForCausalLM.from_pretrained("{target}")',
        f"draft = {loaded}",
        *("target.generate(**inputs, speculator=draft)", "```"),
    ]
    return "\n".join(lines) + "\n\n" + _usage_in_vllm(draft, target, here, base)


def _usage_in_vllm(draft: Any, target: str, here: str, base: str | None) -> str:
    if base is not None:
        return "vLLM reads no adapters of drafts: save `draft.merge_and_unload()` first."
    if isinstance(draft, DraftModel):
        return draft.use_in_vllm(draft.config, target, here)
    return vllm_command("draft_model", target, here, 5)


def _measured(history: list[dict[str, float]], best_step: int | None) -> str:
    ended = bool(history) and "train_runtime" in history[-1]  # not evaluated since the best weights were loaded
    found: dict[str, dict[str, float]] = {}  # by what the metrics of a dataset begin with
    for logs in history:
        if best_step is not None and ended and logs["step"] != best_step:
            continue
        # Figures of sampling have longer names.
        if name := min((name for name in logs if name.endswith("_acceptance_length")), key=len, default=""):
            found[name.removesuffix("acceptance_length")] = logs
    if not found:
        return "Nothing was measured in this training run."
    names = {
        "acceptance_length": "mean accepted length (tokens per verification, greedy)",
        "sampled_acceptance_length": "the same, sampled",
    }
    names |= {f"acceptance_{position}": f"guess {position} accepted" for position in range(1, 33)}
    lines = []
    for metric, label in names.items():
        cells = [logs.get(f"{prefix}{metric}") for prefix, logs in found.items()]
        if any(cell is not None for cell in cells):
            lines.append((label, *("" if cell is None else f"{cell:.3f}" for cell in cells)))
    table = _table(lines, [prefix.removeprefix("eval_").rstrip("_") for prefix in found])
    return f"By generation from held-out prompts:\n\n{table}"


def _recipe(args: DraftTrainingArguments, steps: int, history: list[dict[str, float]], examples: int | None) -> str:
    done = max((int(logs.get("step", 0)) for logs in history), default=0)
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    data = [args.data_name, None if examples is None else f"{examples:,} examples"]
    return _table(
        [
            ("data", ", ".join(one for one in data if one) or "not named"),
            ("steps of training", done),
            (
                "batch per device × accumulated × devices",
                f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps} × {args.world_size}",
            ),
            ("learning rate, schedule", f"{args.learning_rate:g}, {schedule}"),
            ("unrolled steps, decay", f"{steps}, {args.step_decay:g}"),
            ("objective, normalizer", f"{args.objective}, {args.normalizer}"),
            ("outside the draft vocabulary", args.outside_vocabulary),
        ]
    )


def _table(lines: Sequence[tuple[Any, ...]], columns: Sequence[str] = ("",)) -> str:
    lines = [("", *columns), ("---",) * (1 + len(columns)), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
