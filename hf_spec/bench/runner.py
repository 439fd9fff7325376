"""The benchmark: every method runs on every prompt, in turns, and is timed.

Seconds differ between machines and from minute to minute; ratios taken prompt by prompt in one run hardly do. So every
prompt goes through all methods before the next prompt, and each time another method is first.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from ..checkpoints.fingerprint import digest_of
from ..checkpoints.resolve import as_speculator
from ..drafts.base import network_of
from ..drafts.vanilla.speculator import VanillaSpeculator
from ..metrics import Counts
from ..packing.packing import is_packed
from ..progress import Progress
from ..sampling import other_random_numbers, set_seed
from ..scoring.hooks import mark_as_ours
from ..scoring.names import CACHE
from ..scoring.plain import input_device, padded
from ..scoring.rings import power_of_two
from ..scoring.widths import now
from ..settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .prompts import Prompt, check_positions
from .report import OVERALL, BenchReport
from .rounds import PLAIN, Method, Round, RoundLog, Run, figures_of

COMPILED, ASSISTED, LOOKUP = "plain, compiled", "assisted", "prompt lookup"
COMPILING = 2  # runs for compilation: in the second one torch recompiles with dynamic shapes
WARM = 8  # tokens of a prompt in warmup runs
EVERYWHERE: Any = CompileConfig(mode="default")
EVERYWHERE._compile_all_devices = True  # transformers' own switch: on a CPU, too
OFF = {"speculator": False}  # turns off a default that set_speculator has set


@dataclass(frozen=True)
class Contender:
    """A speculator to measure, and its ``speculation_config``, under a name."""

    name: str
    speculator: Any
    config: SpeculationConfig | None = None


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark; all others are those of the models' ``generation_config``.

    Args:
        max_new_tokens: per turn. batch_size: prompts decoded together, of one category.
        temperature: 0 decodes greedily.
        repeats: timed runs per prompt and method, of which the median counts. warmup: runs before the first of them.
        baselines: measure transformers' assisted generation with every draft model, and its prompt lookup, too. Both
            support batches of one prompt only.
        compiled: measure plain ``generate`` over a static cache with the model compiled, too, on a CPU as well.
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
    compiled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"max_new_tokens": 2, "batch_size": 1, "repeats": 1, "warmup": 0, "temperature": 0}.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)!r}")


def run_bench(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    settings: BenchSettings | None = None,
    *,
    progress: bool = False,
    rounds_file: str | os.PathLike[str] | None = None,
) -> BenchReport:
    """Decode ``prompts`` plainly and with every other method, and report the gain of each.

    The answers to earlier turns of a conversation are those of plain ``generate``, for all methods. Every batch of
    prompts is kept in ``rounds_file``, and a call that was stopped resumes after the last one in it.

    Errors: a ValueError for two contenders of one name or with one history, for a category called "overall", for a
    prompt that leaves no positions for an answer, and for a ``rounds_file`` of other settings or weights. Also
    whatever ``generate`` raises for an unfit speculator.
    """
    settings = settings or BenchSettings()
    if any(prompt.category == OVERALL for prompt in prompts):
        raise ValueError(
            f"a category is called {OVERALL!r}, which names the results over all of them: give it another name"
        )
    methods = _methods(target, contenders, settings)
    _check_lengths(target, methods, [prompt.render([], tokenizer) for prompt in prompts], settings.max_new_tokens)
    said = asdict(settings) | {"contenders": {one.name: one.config and asdict(one.config) for one in contenders}}
    environment = _environment(target)
    weights = {"target": digest_of(target)}
    names = {one.name for one in contenders}  # of drafts that are read by now, if they were given by a path
    weights |= {one.name: digest_of(one.options["speculator"]) for one in methods if one.name in names}
    made_from = {"settings": said, "environment": environment, "prompts": _digest(prompts), "weights": weights}
    log = RoundLog(rounds_file, made_from)
    by_category: dict[str, list[Round]] = {}
    batches = _batches(prompts, settings.batch_size)
    total = sum(max(len(prompt.turns) for prompt in batch) for batch in batches) * len(methods) * settings.repeats
    # Each run has its seed. Left behind, one would take measured times from later calls that sample.
    with Progress("Measuring", total, "runs", progress) as bar, other_random_numbers(input_device(target)):
        bench = _Bench(target, tokenizer, methods, settings, bar.update, log)
        for batch in batches:
            by_category.setdefault(batch[0].category, []).extend(bench.converse(batch))
    everything = [one for rounds in by_category.values() for one in rounds]
    grouped = {OVERALL: everything} | (by_category if len(by_category) > 1 else {})
    return BenchReport(
        settings=said,
        environment=environment,
        figures={
            name: {method.name: figures_of(method, rounds, settings.temperature == 0) for method in methods}
            for name, rounds in grouped.items()
        },
    )


def _check_lengths(
    target: PreTrainedModel, methods: Sequence[Method], rows: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise a ValueError if texts after ``rows`` may be longer than the target, or an assistant, has positions."""
    check_positions(target, rows, max_new_tokens)
    for method in methods:
        if method.chain_length is not None and isinstance(method.draft, PreTrainedModel):
            # Ours decode plainly beyond the positions of a draft. transformers' own fail there.
            name = f"the draft of {method.name!r}, by which transformers cannot go on after them,"
            check_positions(method.draft, rows, max_new_tokens, name, "measure no baselines")


def _learns_into(speculator: Any) -> Any:
    """Return the object that what ``speculator`` learns is kept in."""
    while (history := getattr(speculator, "history", None)) is not None:
        speculator = history
    return speculator


def _methods(target: PreTrainedModel, contenders: Sequence[Contender], settings: BenchSettings) -> list[Method]:
    """List plain decoding, transformers' own speculative methods if they are wanted, and the contenders."""
    ours: list[Method] = []
    assisted: dict[tuple[int, int], Method] = {}  # by draft and length: contenders may share one
    lengths: list[int] = []
    learning: dict[int, str] = {}  # the name of the contender, by what it learns into
    for one in contenders:
        speculator = as_speculator(one.speculator, target)
        speculator.check(target)
        if speculator.learns:
            other = learning.setdefault(id(_learns_into(speculator)), one.name)
            if other != one.name:
                raise ValueError(
                    f"{other!r} and {one.name!r} have one history, in which each would find the other's texts: "
                    "measure one of them, or give each a history of its own"
                )
        config, assisted_name = speculator.settings(one.config), None
        length = config.num_speculative_tokens
        lengths.append(length := length if isinstance(length, int) else DEFAULT_NUM_SPECULATIVE_TOKENS)
        weights = network_of(speculator)
        if isinstance(speculator, VanillaSpeculator):  # the only kind that transformers supports, too
            baseline = Method(f"{ASSISTED}: {one.name}", {**OFF, "assistant_model": weights}, weights, length)
            assisted_name = assisted.setdefault((id(weights), length), baseline).name
        options = {"speculator": speculator, "speculation_config": config}
        ours.append(Method(one.name, options, weights, assisted_name=assisted_name))
    plain = [Method(PLAIN, OFF), *([Method(COMPILED, OFF, compiled=True)] if settings.compiled else ())]
    methods = [*plain, *_baselines(assisted.values(), lengths), *ours]
    if not settings.baselines or settings.batch_size > 1:
        methods = [*plain, *(replace(method, assisted_name=None) for method in ours)]
    if len({method.name for method in methods}) < len(methods):
        raise ValueError(f"methods need different names, got {[method.name for method in methods]}")
    return methods


def _baselines(assisted: Iterable[Method], lengths: list[int]) -> list[Method]:
    """List transformers' own methods: prompt lookup as long as the longest chain, and assisted generation."""
    longest = max(lengths, default=DEFAULT_NUM_SPECULATIVE_TOKENS)
    return [Method(LOOKUP, {**OFF, "prompt_lookup_num_tokens": longest}, chain_length=longest), *assisted]


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Split each category, in the order of its first prompt, into batches."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


class _Bench:
    """A run of every method on conversations; each round another method is first."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        methods: list[Method],
        settings: BenchSettings,
        advance: Callable[..., Any],
        log: RoundLog,
    ) -> None:
        # ``advance`` is called after each run; ``log`` keeps the rounds.
        self.target: Any = target  # `generate` is of a mixin that the type does not know
        self.tokenizer, self.methods, self.settings = tokenizer, methods, settings
        self._advance, self._log = advance, log
        # Rounds so far; modulo the number of methods, the index of the one that is first in the next round.
        self._turn = 0
        self._warm = False
        # Static caches that a graph was compiled for, by (rows, slots).
        self._caches: dict[tuple[int, int], StaticCache] = {}
        # Tokens that end a text, and the padding token.
        ends = target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        pads = (tokenizer.pad_token_id, target.generation_config.pad_token_id, *self._ends, 0)
        self._pad = next(token for token in pads if token is not None)

    def converse(self, prompts: list[Prompt]) -> Iterator[Round]:
        """Run the conversations of ``prompts`` turn by turn."""
        answers: dict[int, list[str]] = {number: [] for number in range(len(prompts))}
        while asking := [number for number, given in answers.items() if len(given) < len(prompts[number].turns)]:
            rows = [prompts[number].render(answers[number], self.tokenizer) for number in asking]
            _check_lengths(self.target, self.methods, rows, self.settings.max_new_tokens)
            inputs = padded(rows, self._pad, input_device(self.target))
            found = self._log.next()
            if found is None:
                found = self._round(inputs)
                self._log.add(found)
            else:
                self._turn += self.settings.repeats
                self._advance(len(self.methods) * self.settings.repeats)
            for number, row in zip(asking, found[PLAIN].rows, strict=True):
                answers[number].append(str(self.tokenizer.decode(row, skip_special_tokens=True)))
            yield found

    def _round(self, inputs: dict[str, Tensor]) -> Round:
        """Run every method ``repeats`` times, in a rotating order, and keep the median run of each."""
        if not self._warm:
            # The end of a prompt only, so that n-grams with a history do not learn the answer before they are
            # measured.
            few = {name: tensor[:, -WARM:] for name, tensor in inputs.items()}
            for method in [one for one in self.methods if not one.compiled] * self.settings.warmup:
                self._run(method, few)
            self._warm = True
        for method in self.methods:
            if method.compiled and (len(inputs["input_ids"]), self._slots(inputs)) not in self._caches:
                for _ in range(COMPILING):  # compile time is not measured
                    self._run(method, inputs)
        runs: dict[str, list[Run]] = {method.name: [] for method in self.methods}
        for _ in range(self.settings.repeats):
            first = self._turn % len(self.methods)
            for method in self.methods[first:] + self.methods[:first]:
                runs[method.name].append(self._run(method, inputs))
                self._advance()
            self._turn += 1
        return {name: sorted(tried, key=lambda run: run.speed)[(len(tried) - 1) // 2] for name, tried in runs.items()}

    def _run(self, method: Method, inputs: dict[str, Tensor]) -> Run:
        set_seed(self.settings.seed + self._turn)
        options: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature:
            options = {"do_sample": True, "temperature": self.settings.temperature}
        if method.compiled:
            options |= {CACHE: self._static_cache(inputs), "compile_config": EVERYWHERE}
        models = [self.target] if method.draft is None else [self.target, method.draft]
        with _constant_length(method), ForwardClock(models) as clock:
            start = now(input_device(self.target))
            out = self.target.generate(
                **inputs,
                **options,
                **method.options,
                max_new_tokens=self.settings.max_new_tokens,
                pad_token_id=self._pad,
                return_dict_in_generate=True,
            )
            seconds = now(input_device(self.target)) - start
        rows = [self._until_end(row) for row in out.sequences[:, inputs["input_ids"].shape[1] :].tolist()]
        counts = None
        for row in out.speculation.per_row if hasattr(out, "speculation") else ():
            counts = counts or Counts()
            counts.add(row)
        return Run(rows, seconds, clock.seconds(), clock.calls[0], counts, sum(clock.by_model()[1:]))

    def _slots(self, inputs: dict[str, Tensor]) -> int:
        """Return the length of a static cache: a power of two, so that few graphs serve all prompts."""
        return power_of_two(inputs["input_ids"].shape[1] + self.settings.max_new_tokens)

    def _static_cache(self, inputs: dict[str, Tensor]) -> StaticCache:
        size = len(inputs["input_ids"]), self._slots(inputs)
        if size not in self._caches:
            self._caches[size] = StaticCache(config=self.target.config, max_cache_len=size[1])
        self._caches[size].reset()
        return self._caches[size]

    def _until_end(self, row: list[int]) -> list[int]:
        return row[: next((i + 1 for i, token in enumerate(row) if token in self._ends), len(row))]


@contextlib.contextmanager
def _constant_length(method: Method) -> Iterator[None]:
    """Let an assistant draft chains of the same length as ours, whatever its confidence."""
    if method.chain_length is None or not isinstance(method.draft, PreTrainedModel):
        yield
        return
    own = method.draft.generation_config
    config = method.draft.generation_config = copy.deepcopy(own)
    config.num_assistant_tokens = method.chain_length
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        method.draft.generation_config = own


class ForwardClock:
    """The time that ``models`` spend in ``forward`` inside a ``with`` block; ``calls`` counts the forwards per model.

    On CUDA it is measured by events on the device's own clock. So the CPU does not wait for each forward, and its
    other work takes the same time as without a clock.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.calls = [0] * len(models)
        self._open: list[Any] = []
        self._spans: list[tuple[int, Any, Any]] = []  # number of the model, begin, end
        self._hooks: list[Any] = []

    def __enter__(self) -> ForwardClock:
        for number, model in enumerate(self.models):
            device = next(model.parameters()).device
            # Outside of a compiled model's graph, which would be recompiled for each clock and each number of calls.
            begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
            self._hooks.append(model.register_forward_pre_hook(mark_as_ours(partial(begin, device))))
            self._hooks.append(model.register_forward_hook(mark_as_ours(partial(end, device, number))))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, device: torch.device, *_: Any) -> None:
        self._open.append(_mark(device))

    def _end(self, device: torch.device, number: int, *_: Any) -> None:
        self._spans.append((number, self._open.pop(), _mark(device)))
        self.calls[number] += 1

    def seconds(self) -> float:
        """Return the sum of all forwards; the devices must have finished."""
        return sum(self.by_model())

    def by_model(self) -> list[float]:
        """Return the seconds of each model's forwards; the devices must have finished."""
        found = [0.0] * len(self.models)
        for number, start, end in self._spans:
            found[number] += end - start if isinstance(end, float) else float(start.elapsed_time(end)) / 1e3
        return found


def parts_of(
    seconds: float, target: nn.Module, network: nn.Module | None, run: Callable[[], Any]
) -> tuple[float, float, float] | None:
    """Return what target, draft and the rest took of ``seconds``, by the shares in one more ``run`` with a clock.

    A compiled forward that calls no module is not seen: None.
    """
    with ForwardClock([target] if network is None else [target, network]) as clock:
        device = next(target.parameters()).device
        begin = now(device)
        run()
        whole = now(device) - begin
    if not all(clock.calls):
        return None
    of_target, *of_draft = (seconds * one / whole for one in clock.by_model())
    return of_target, sum(of_draft), seconds - of_target - sum(of_draft)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return now(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]


def _environment(target: PreTrainedModel) -> dict[str, Any]:
    device = input_device(target)
    return {
        "hf_spec": installed_version("hf-spec"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "target": target.config.name_or_path or type(target).__name__,
        "parameters": target.num_parameters(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "packed": is_packed(target),
        "attention": target.config.get_text_config(decoder=True)._attn_implementation,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def installed_version(package: str) -> str | None:
    """Return the version of a package; ``None`` if it is not installed, such as this one in a clone."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name from the operating system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
