"""The model card of a trained draft."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedModel

from ..configuration import Eagle3SpeculatorConfig
from ..drafts.modeling import DraftModel
from .arguments import DraftTrainingArguments
from .checks import serving_warnings


def model_card(
    draft: Any, target: PreTrainedModel, args: DraftTrainingArguments, steps: int, history: list[dict[str, float]]
) -> str:
    """Return a README for the Hub: target, recipe, what was measured, and how to load the draft."""
    name = target.config.name_or_path or None
    kind = draft.config.speculators_model_type if isinstance(draft, DraftModel) else "independent"
    parts = [
        _front_matter(name, kind),
        f"# {kind} draft for {name or type(target).__name__}",
        f"Guesses tokens for speculative decoding with {_millions(draft)} parameters. The text stays the target's.",
        "## How to use it\n\n" + _usage(draft, name),
        "## Measured\n\n" + _measured(history),
        "## Training\n\n" + _recipe(args, steps, history),
    ]
    if warnings := serving_warnings(draft, target):
        parts.append("## Limits\n\n" + "\n".join(f"- {warning}" for warning in warnings))
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str | None, kind: str) -> str:
    lines = ["---", "library_name: transformers", "tags:", "- speculative-decoding", "- hf_spec", f"- {kind}"]
    # A path on somebody's disk is no name on the Hub.
    if target and target.count("/") <= 1 and not target.startswith((".", "/")):
        lines += [f"base_model: {target}"]
    return "\n".join([*lines, "---"])


def _millions(draft: Any) -> str:
    return f"{sum(parameter.numel() for parameter in draft.parameters()) / 1e6:.1f} million"


def _usage(draft: Any, target: str | None) -> str:
    loader = "AutoModel" if isinstance(draft, DraftModel) else "AutoModelForCausalLM"
    text = f"""```python
import hf_spec
from transformers import {"AutoModel, " if loader == "AutoModel" else ""}AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{target or "the target"}")
draft = {loader}.from_pretrained("this repository")
target.generate(**inputs, speculator=draft)
```"""
    if isinstance(draft, DraftModel) and isinstance(draft.config, Eagle3SpeculatorConfig):
        count = draft.config.num_speculative_tokens
        setting = json.dumps({"method": "eagle3", "model": "this repository", "num_speculative_tokens": count})
        text += f"\n\nIn vLLM:\n\n```sh\nvllm serve {target or 'the-target'} --speculative-config '{setting}'\n```"
    return text


def _measured(history: list[dict[str, float]]) -> str:
    found = next((logs for logs in reversed(history) if "eval_acceptance_length" in logs), None)
    if found is None:
        return "Nothing was measured in this training run."
    rows = [("mean accepted length (tokens per verification, greedy)", found["eval_acceptance_length"])]
    if "eval_sampled_acceptance_length" in found:
        rows.append(("the same, sampled", found["eval_sampled_acceptance_length"]))
    position = 1
    while (share := found.get(f"eval_acceptance_{position}")) is not None:
        rows.append((f"guess {position} accepted", share))
        position += 1
    table = "\n".join(f"| {name} | {value:.3f} |" for name, value in rows)
    return f"By generation from held-out prompts at step {found.get('step', 0):.0f}:\n\n| | |\n|---|---|\n{table}"


def _recipe(args: DraftTrainingArguments, steps: int, history: list[dict[str, float]]) -> str:
    done = max((int(logs.get("step", 0)) for logs in history), default=0)
    rows: list[tuple[str, Any]] = [
        ("steps of training", done),
        ("batch per device × accumulated", f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps}"),
        (
            "learning rate, schedule",
            f"{args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}",
        ),
        ("unrolled steps, decay", f"{steps}, {args.step_decay:g}"),
        ("objective, normalizer", f"{args.objective}, {args.normalizer}"),
        ("outside the draft vocabulary", args.outside_vocabulary),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)
