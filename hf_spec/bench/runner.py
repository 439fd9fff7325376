"""Run every method on every prompt, in turns, and take the time.

Seconds differ between machines and from minute to minute; ratios taken prompt by prompt in one run hardly do. So every
prompt goes through all methods before the next one comes, and another method begins each time.
"""

from __future__ import annotations

import contextlib
import copy
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.resolve import as_speculator
from ..drafts.vanilla.speculator import VanillaSpeculator
from ..metrics import SpeculationStats
from ..scoring.plain import input_device
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .prompts import Prompt
from .report import OVERALL, BenchReport, Figures

PLAIN, ASSISTED, LOOKUP = "plain", "assisted", "prompt lookup"
OFF = {"speculator": False}  # also where set_speculator has given the target a default


@dataclass(frozen=True)
class Contender:
    """Name a way of speculating: what ``generate`` is given as ``speculator`` and ``speculation_config``."""

    name: str
    speculator: Any
    config: SpeculationConfig | None = None


@dataclass(frozen=True)
class BenchSettings:
    """Say how to run: the rest is the models' own ``generation_config``.

    Args:
        max_new_tokens: per turn. batch_size: prompts decoded together, of one category.
        temperature: 0 decodes greedily.
        repeats: timed runs per prompt and method, of which the middle one counts; ``warmup`` are run before the first.
        baselines: measure transformers' assisted generation with every vanilla draft and its prompt lookup too, which
            know batches of one prompt only.
        seed: set before each run.

    Raises:
        ValueError: for values outside these.
    """

    max_new_tokens: int = 128
    batch_size: int = 1
    temperature: float = 0.0
    repeats: int = 1
    warmup: int = 1
    baselines: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"max_new_tokens": 2, "batch_size": 1, "repeats": 1, "warmup": 0, "temperature": 0}.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class _Method:
    """A way of decoding, ours or transformers' own."""

    name: str
    options: dict[str, Any]  # of generate
    draft: nn.Module | None = None  # whose forwards count beside the target's
    theirs: int | None = None  # length of a chain of transformers' own methods, None for ours
    rival: str | None = None  # name of assisted generation with the same draft, for ours


@dataclass(frozen=True)
class _Run:
    """One ``generate`` call: the emitted tokens of every row, and what they cost."""

    rows: list[list[int]]
    seconds: float
    forward_seconds: float
    target_forwards: int
    stats: SpeculationStats | None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


_Round = dict[str, _Run]  # one batch of prompts, by method


def run_bench(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    settings: BenchSettings | None = None,
    *,
    progress: bool = False,
) -> BenchReport:
    """Decode ``prompts`` plainly and in every other way, and report what each way gains.

    The answers to earlier turns of a conversation are those of plain ``generate``, for all methods.

    Errors: ValueError for two contenders of one name, and whatever ``generate`` raises for an unfit speculator.
    """
    settings = settings or BenchSettings()
    methods = _methods(target, contenders, settings)
    by_category: dict[str, list[_Round]] = {}
    batches = _batches(prompts, settings.batch_size)
    total = sum(max(len(prompt.turns) for prompt in batch) for batch in batches) * len(methods) * settings.repeats
    with tqdm(total=total, disable=not progress, unit="run") as bar:
        bench = _Bench(target, tokenizer, methods, settings, bar.update)
        for batch in batches:
            by_category.setdefault(batch[0].category, []).extend(bench.converse(batch))
    everything = [one for rounds in by_category.values() for one in rounds]
    grouped = {OVERALL: everything} | (by_category if len(by_category) > 1 else {})
    return BenchReport(
        settings=asdict(settings)
        | {"contenders": {one.name: one.config and asdict(one.config) for one in contenders}},
        environment=_environment(target),
        figures={
            name: {method.name: _figures(method, rounds, settings.temperature == 0) for method in methods}
            for name, rounds in grouped.items()
        },
    )


def _methods(target: PreTrainedModel, contenders: Sequence[Contender], settings: BenchSettings) -> list[_Method]:
    """List plain decoding, transformers' own ways of guessing if they are wanted, and the contenders."""
    ours: list[_Method] = []
    assisted: dict[tuple[int, int], _Method] = {}  # by draft and length: contenders may share one
    lengths: list[int] = []
    for one in contenders:
        speculator = as_speculator(one.speculator, target)
        speculator.check(target)
        config, rival = speculator.settings(one.config), None
        length = config.num_speculative_tokens
        lengths.append(length := length if isinstance(length, int) else DEFAULT_NUM_SPECULATIVE_TOKENS)
        weights: nn.Module | None = speculator if isinstance(speculator, nn.Module) else None
        if isinstance(speculator, VanillaSpeculator):  # the only kind that transformers can use, too
            weights = speculator.model
            theirs = _Method(f"{ASSISTED}: {one.name}", {**OFF, "assistant_model": weights}, weights, length)
            rival = assisted.setdefault((id(weights), length), theirs).name
        options = {"speculator": speculator, "speculation_config": config}
        ours.append(_Method(one.name, options, weights, rival=rival))
    methods = [_Method(PLAIN, OFF), *_baselines(assisted.values(), lengths), *ours]
    if not settings.baselines or settings.batch_size > 1:
        methods = [methods[0], *(replace(method, rival=None) for method in ours)]
    if len({method.name for method in methods}) < len(methods):
        raise ValueError(f"methods need different names, got {[method.name for method in methods]}")
    return methods


def _baselines(assisted: Iterable[_Method], lengths: list[int]) -> list[_Method]:
    """List what transformers can do itself: prompt lookup as long as the longest chain, and assisted generation."""
    longest = max(lengths, default=DEFAULT_NUM_SPECULATIVE_TOKENS)
    return [_Method(LOOKUP, {**OFF, "prompt_lookup_num_tokens": longest}, theirs=longest), *assisted]


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Cut each category, in the order of its first prompt, into batches."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


class _Bench:
    """Run every method on conversations; another one begins each time."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        methods: list[_Method],
        settings: BenchSettings,
        advance: Callable[[], Any],
    ) -> None:
        # What to run, and what to call after each run.
        self.target: Any = target  # `generate` is of a mixin that the type does not know
        self.tokenizer, self.methods, self.settings = tokenizer, methods, settings
        self._advance = advance
        # Rounds so far: this method, modulo their number, begins the next one.
        self._turn = 0
        # Tokens that end a text, and one that fills up rows.
        ends = target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        pads = (tokenizer.pad_token_id, target.generation_config.pad_token_id, *self._ends, 0)
        self._pad = next(token for token in pads if token is not None)

    def converse(self, prompts: list[Prompt]) -> Iterator[_Round]:
        """Take the prompts through all their turns."""
        answers: dict[int, list[str]] = {number: [] for number in range(len(prompts))}
        while asking := [number for number, given in answers.items() if len(given) < len(prompts[number].turns)]:
            inputs = self._inputs([prompts[number].render(answers[number], self.tokenizer) for number in asking])
            found = self._round(inputs)
            for number, row in zip(asking, found[PLAIN].rows, strict=True):
                answers[number].append(str(self.tokenizer.decode(row, skip_special_tokens=True)))
            yield found

    def _inputs(self, rows: list[list[int]]) -> dict[str, Tensor]:
        """Pad ``rows`` on the left: (batch, longest) each."""
        width = max(map(len, rows))
        ids = [[self._pad] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        device = input_device(self.target)
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}

    def _round(self, inputs: dict[str, Tensor]) -> _Round:
        """Run every method ``repeats`` times, in an order that rotates, and keep the middle run of each."""
        if self._turn == 0:
            for method in self.methods * self.settings.warmup:
                self._run(method, inputs)
        runs: dict[str, list[_Run]] = {method.name: [] for method in self.methods}
        for _ in range(self.settings.repeats):
            first = self._turn % len(self.methods)
            for method in self.methods[first:] + self.methods[:first]:
                runs[method.name].append(self._run(method, inputs))
                self._advance()
            self._turn += 1
        return {name: sorted(tried, key=lambda run: run.speed)[len(tried) // 2] for name, tried in runs.items()}

    def _run(self, method: _Method, inputs: dict[str, Tensor]) -> _Run:
        torch.manual_seed(self.settings.seed + self._turn)
        options: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature:
            options = {"do_sample": True, "temperature": self.settings.temperature}
        models = [self.target] if method.draft is None else [self.target, method.draft]
        with _constant_length(method), ForwardClock(models) as clock:
            start = _now(input_device(self.target))
            out = self.target.generate(
                **inputs,
                **options,
                **method.options,
                max_new_tokens=self.settings.max_new_tokens,
                pad_token_id=self._pad,
                return_dict_in_generate=True,
            )
            seconds = _now(input_device(self.target)) - start
        rows = [self._until_end(row) for row in out.sequences[:, inputs["input_ids"].shape[1] :].tolist()]
        return _Run(rows, seconds, clock.seconds(), clock.calls[0], getattr(out, "speculation", None))

    def _until_end(self, row: list[int]) -> list[int]:
        return row[: next((i + 1 for i, token in enumerate(row) if token in self._ends), len(row))]


@contextlib.contextmanager
def _constant_length(method: _Method) -> Iterator[None]:
    """Let an assistant guess as long a chain as ours: always, however sure it is."""
    if method.theirs is None or not isinstance(method.draft, PreTrainedModel):
        yield
        return
    own = method.draft.generation_config
    config = method.draft.generation_config = copy.deepcopy(own)
    config.num_assistant_tokens = method.theirs
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        method.draft.generation_config = own


class ForwardClock:
    """Add up the time that ``models`` spend in ``forward`` inside a ``with`` block; ``calls`` counts them per model.

    On CUDA by events on the device's own clock, so that the CPU does not wait for each forward and what it does
    beside them counts as it would without a clock.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.calls = [0] * len(models)
        self._open: list[Any] = []
        self._spans: list[tuple[Any, Any]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ForwardClock:
        for number, model in enumerate(self.models):
            device = next(model.parameters()).device
            self._hooks.append(model.register_forward_pre_hook(partial(self._begin, device)))
            self._hooks.append(model.register_forward_hook(partial(self._end, device, number)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, device: torch.device, *_: Any) -> None:
        self._open.append(_mark(device))

    def _end(self, device: torch.device, number: int, *_: Any) -> None:
        self._spans.append((self._open.pop(), _mark(device)))
        self.calls[number] += 1

    def seconds(self) -> float:
        """Return the sum; the devices must have finished."""
        return sum(
            end - start if isinstance(end, float) else float(start.elapsed_time(end)) / 1e3
            for start, end in self._spans
        )


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return _now(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


# -- figures ----------------------------------------------------------------------------------------------------------


def _figures(method: _Method, rounds: Sequence[_Round], greedy: bool) -> Figures:
    runs = [found[method.name] for found in rounds]
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    stats = [run.stats for run in runs if run.stats is not None]
    counts = SpeculationStats.merge(stats).counts if stats else None
    tau = counts.mean_accepted_length if counts else None
    if method.theirs is not None:  # every target forward of theirs, the first included, is a step
        tau = tokens / sum(run.target_forwards for run in runs)
    texts = [(run.rows, found[PLAIN].rows) for run, found in zip(runs, rounds, strict=True)]
    differs = [one != plain for ours, plains in texts for one, plain in zip(ours, plains, strict=True)]
    to_plain, to_plain_median = _ratios(method.name, PLAIN, rounds)
    to_assisted, to_assisted_median = _ratios(method.name, method.rival, rounds) if method.rival else (None, None)
    return Figures(
        rows=len(differs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ratio_to_plain=to_plain,
        median_ratio_to_plain=to_plain_median,
        ratio_to_assisted=to_assisted,
        median_ratio_to_assisted=to_assisted_median,
        mean_accepted_length=tau,
        acceptance_rate=counts.acceptance_rate if counts else None,
        acceptance_by_position=counts.acceptance_by_position if counts else None,
        outside_forwards=1 - sum(run.forward_seconds for run in runs) / seconds,
        differing_rows=sum(differs) if greedy else None,
    )


def _ratios(name: str, other: str, rounds: Sequence[_Round]) -> tuple[float, float]:
    """Divide the tokens per second of two methods: over all rounds, and the median of each round's own."""
    own, others = ([found[method] for found in rounds] for method in (name, other))
    total = [sum(run.tokens for run in runs) / sum(run.seconds for run in runs) for runs in (own, others)]
    return total[0] / total[1], median(one.speed / two.speed for one, two in zip(own, others, strict=True))


def _environment(target: PreTrainedModel) -> dict[str, Any]:
    device = input_device(target)
    return {
        "hf_spec": metadata.version("hf-spec"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "target": target.config.name_or_path or type(target).__name__,
        "parameters": target.num_parameters(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config.get_text_config(decoder=True)._attn_implementation,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }
