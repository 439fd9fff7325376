"""Benchmark results in the model card of the draft."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from yaml import YAMLError  # type: ignore[import-untyped]

from ..whole_files import write_files
from .report import COLUMNS, BenchReport

PROMPTS, METRIC = "prompts", "mean_accepted_length"  # kinds of data and of figures, by which ours are known
SHOWN = ("τ", "accepted", "by position", "x plain")
SECTION = re.compile(r"\n*^## Benchmarks\n.*?(?=\n^## |\Z)", re.MULTILINE | re.DOTALL)


def add_to_card(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Add the figures of the contenders of ``report`` to the model card at ``path``, in place of earlier ones.

    They go into a table, by category of prompts, and into the metadata that the Hub reads (``model-index``).
    """
    card = read_card(path)
    methods = list(report.settings["contenders"])
    card.text = f"{SECTION.sub('', card.text).rstrip()}\n\n{_section(report, methods)}"
    data: Any = card.data
    data.model_name = data.model_name or Path(path).absolute().parent.name
    others = [one for one in data.eval_results or () if (one.dataset_type, one.metric_type) != (PROMPTS, METRIC)]
    data.eval_results = others + [
        EvalResult(
            task_type="text-generation",
            dataset_type=PROMPTS,
            dataset_name=category,
            dataset_config=category,  # identifies a result; the name does not
            metric_type=METRIC,
            metric_name=f"mean accepted length, {method}",
            metric_value=round(length, 3),
        )
        for category, figures in report.figures.items()
        for method in methods
        if (length := figures[method].mean_accepted_length) is not None
    ]
    write_files({Path(path).name: str(card)}, Path(path).parent)


def read_card(path: str | os.PathLike[str]) -> ModelCard:
    """Read the model card at ``path``. Errors: a ValueError for metadata that cannot be read, those of reading it."""
    try:
        return ModelCard(Path(path).read_text(encoding="utf-8"), ignore_metadata_errors=False)
    except (ValueError, TypeError, YAMLError) as error:
        raise ValueError(
            f"the model card {path} cannot be read, so figures cannot be added to it ({error}): mend what stands "
            "between its lines ---"
        ) from error


def _section(report: BenchReport, methods: list[str]) -> str:
    settings, made = report.settings, report.environment
    sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedily"
    lines = [
        "## Benchmarks",
        "",
        f"By `hf-spec bench` of hf_spec {made['hf_spec']} ({made['dtype']}, {made['device']}), {sampling}, up to "
        f"{settings['max_new_tokens']} new tokens, batches of {settings['batch_size']}. τ: tokens per forward of the "
        "target. Accepted: per cent of the draft tokens, overall and by position. x plain: tokens per second, plain "
        "`generate` in the same run being 1.",
        "",
        f"| prompts | rows | draft | {' | '.join(SHOWN)} |",
        f"|{'---|' * (3 + len(SHOWN))}",
    ]
    for category, figures in report.figures.items():
        for method in methods:
            cells = [COLUMNS[column](figures[method]) for column in SHOWN]
            lines.append(f"| {category} | {figures[method].rows} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
