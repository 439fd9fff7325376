"""Measurement of a draft by speculative generation from held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints.resolve import as_speculator
from ..integration import SpeculativeDecoding
from ..metrics import Counts, SpeculationStats
from ..sampling import other_random_numbers
from ..scoring.plain import input_device, padded, position_limit
from ..settings import SpeculationConfig
from .data import check_ids, numbers

DEPTH = 32  # draft tokens per step that are counted; a fixed size, because processes may draft to different depths


@torch.no_grad()
def measure(
    draft: Any,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_speculative_tokens: int | None = None,
    temperature: float | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Counts:
    """Generate from ``prompts`` (token ids) with ``draft`` and count what was accepted.

    Prompts that leave no position for so many new tokens are cut at their beginning. ``temperature`` ``None`` is
    greedy. The state of the random generators is restored afterwards.
    """
    prompts, max_new_tokens = within_positions(prompts, max_new_tokens, position_limit(target))
    speculator = as_speculator(draft, target)
    config = speculator.settings(self_check=False)
    if num_speculative_tokens is not None:
        config = config.merge(num_speculative_tokens=num_speculative_tokens)
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    counts = Counts()
    with other_random_numbers(input_device(target)):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            stats = _generate(
                target, speculator, config, prompts[start : start + batch_size], max_new_tokens, sampling
            )
            for row in stats.per_row:
                counts.add(row)
    return counts


def within_positions(
    prompts: Sequence[Sequence[int]], new: int, positions: int | None
) -> tuple[list[Sequence[int]], int]:
    """Return the ends of ``prompts`` after which ``new`` tokens have a position, and how many tokens that may be."""
    if positions is None:
        return [*prompts], new
    new = min(new, positions - 1)
    return [prompt[new - positions :] for prompt in prompts], new


def _generate(
    target: Any,
    speculator: Any,
    config: SpeculationConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> SpeculationStats:
    out = target.generate(
        **padded(prompts, 0, input_device(target)),
        custom_generate=SpeculativeDecoding(speculator, config),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **sampling,
    )
    stats: SpeculationStats = out.speculation
    return stats


def sums_of(counts: Counts, prompts: int) -> Tensor:
    """Return a vector to sum over processes: the ``counts`` of this process and the number of its ``prompts``."""
    flat = [prompts, counts.steps, counts.emitted]
    for by_depth in (counts.proposed_at, counts.accepted_at):
        flat += [*by_depth[:DEPTH], *[0] * (DEPTH - len(by_depth))]
    return torch.tensor(flat, dtype=torch.float64)


def acceptance(sums: Tensor) -> dict[str, float]:
    """Return acceptance rates from the ``sums`` of all processes: cumulative and conditional, by position."""
    prompts, steps, emitted, *found = sums.tolist()
    metrics = {
        "acceptance_length": emitted / max(1, steps),
        "measured_prompts": prompts,
        "measured_tokens": emitted,
    }
    proposed, accepted = found[:DEPTH], found[DEPTH:]
    for k in range(DEPTH):
        if proposed[k]:
            share = metrics[f"acceptance_{k + 1}"] = accepted[k] / proposed[k]
            # Earlier positions are averaged over more steps, because the last steps of a text are short. The ratio
            # may therefore exceed 1.
            before = metrics[f"acceptance_{k}"] if k else 1.0
            metrics[f"conditional_acceptance_{k + 1}"] = min(1.0, share / before) if before else 0.0
    return metrics


def token_ids(prompts: Iterable[Any], vocabulary: int) -> list[list[int]]:
    """Return prompts as lists of ids. Errors: a TypeError for text; a ValueError for ids outside the vocabulary."""
    prompts = list(prompts)
    if any(isinstance(prompt, str) for prompt in prompts):
        raise TypeError('eval_prompts are texts: pass token ids, such as tokenizer(prompts)["input_ids"]')
    found = [[int(token) for token in prompt] for prompt in prompts]
    if not all(found):
        raise ValueError("a prompt of eval_prompts is empty: give each one token at least")
    for prompt in found:
        check_ids(min(prompt), max(prompt), vocabulary)
    return found


def prompts_of(examples: Sequence[dict[str, Any]], count: int, plain_length: int) -> list[list[int]]:
    """Take up to ``count`` prompts from prepared ``examples``: the tokens before a document's first answer.

    A document that is an answer from its start, such as plain text, gives its first ``plain_length`` tokens.
    """
    prompts = []
    for example in examples:
        ids, answers = numbers(example["input_ids"]), numbers(example["loss_mask"])
        documents = numbers(example["document_ids"]) if "document_ids" in example else [0] * len(ids)
        end = documents.count(documents[0]) if documents else 0  # only the first document of a packed example is used
        if 1 not in answers[:end]:
            continue
        first = answers.index(1) or min(plain_length, end)
        prompts.append(ids[:first])
        if len(prompts) == count:
            break
    return prompts
