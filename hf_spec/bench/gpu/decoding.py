"""Seconds of decoding: plain, assisted and ours, eager, compiled and as CUDA graphs, over an inflated target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaForCausalLM

from ...demo import path
from ...demo.inflation import Narrowed, inflate
from ...drafts.base import network_of
from ...scoring.widths import now
from ...settings import SpeculationConfig
from ..runner import parts_of

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a big red ball. One day,",
    "The sun was bright and the birds",
    "Sara and Ben went to the park with their mom.",
    "There was a small dog who liked to",
    "One day, a boy found a shiny key.",
    "The old cat sat by the window and",
    "Anna wanted to bake a cake for her friend.",
)
LENGTH = 5  # draft tokens of a chain, the same for all ways
EAGER, COMPILED, GRAPHS = "eager", "compiled", "CUDA graphs"
PLAIN, ASSISTED, MODEL, EAGLE = "plain", "transformers' assisted", "draft model", "EAGLE-3"
FORMS = (EAGER, COMPILED, GRAPHS)
BATCHED = tuple(f"{way}, {form}" for way in (PLAIN, EAGLE) for form in FORMS)
SINGLE = (*BATCHED, f"{ASSISTED}, {EAGER}", f"{MODEL}, {EAGER}", f"{ASSISTED}, {COMPILED}", f"{MODEL}, {COMPILED}")


Cells = list[tuple[str, Callable[[], dict[str, Any]]]]


def trees(sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Name the ways that draft trees of ``sizes`` tokens, after what they are compared with."""
    drafted = (f"{EAGLE}, tree of {size}" for size in sizes)
    return tuple(f"{what}, {form}" for what in (PLAIN, *drafted) for form in (EAGER, GRAPHS))


def ways_at(sizes: tuple[int, int, int] | None, batch: int, ways: tuple[str, ...], device: str) -> Cells:
    """List the cells of ``ways`` at one shape; ``sizes`` None is the demo target itself, for a trial on a CPU."""
    bench = _Decoding(sizes, batch, device)
    if sizes is None and device == "cpu":  # a trial: nothing is compiled but one of each
        ways = tuple(way for way in ways if way.endswith(EAGER) or (batch == 1 and way == f"{PLAIN}, {COMPILED}"))
    return [(way, lambda way=way: bench.cell(way)) for way in ways]  # type: ignore[misc]


class _Decoding:
    """The models of one part, loaded when the first cell is measured, and its inputs."""

    def __init__(self, sizes: tuple[int, int, int] | None, batch: int, device: str) -> None:
        self.sizes, self.batch, self.device = sizes, batch, device
        self.tokens, self.rounds = (12, 1) if sizes is None else (64, 5)
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._target: Any = None

    def cell(self, way: str) -> dict[str, Any]:
        """Measure one way: seconds of a call, and the parts of them."""
        self._load()
        options, network = self._options(way)
        torch._dynamo.reset()
        for _ in range(1 if way.endswith(EAGER) else 4):  # compiles, and records graphs
            out = self._run(options)
        seconds = []
        for _ in range(self.rounds):
            begin = now(self._target.device)
            out = self._run(options)
            seconds.append(now(self._target.device) - begin)
        return self._figures(options, network, min(seconds), out) | {"calls": seconds}

    def _figures(self, options: dict[str, Any], network: Any, seconds: float, out: Any) -> dict[str, Any]:
        stats = getattr(out, "speculation", None)
        parts = self._parts(options, network, seconds)
        if stats and "compile_config" in options:  # modules are called for the prompt only
            parts = dict.fromkeys(parts)
        text = hashlib.sha256(repr(out.sequences.tolist()).encode()).hexdigest()[:16]
        tokens = out.sequences.shape[0] * (out.sequences.shape[1] - self._inputs["input_ids"].shape[1])
        found = {"seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens, **parts}
        found |= {"tokens_per_step": stats.mean_accepted_length if stats else None, "text": text}
        if stats:
            found |= {"statistics": {name: value for name, value in stats.to_dict().items() if name != "per_row"}}
        return found

    def _parts(self, options: dict[str, Any], network: Any, seconds: float) -> dict[str, Any]:
        """Return what target, draft and the rest took of ``seconds``, by the shares in one more run with a clock.

        The clock counts forwards by the device's own events. A compiled forward that calls no module is not seen;
        then there are no parts.
        """
        found = parts_of(seconds, self._target, network, lambda: self._run(options))
        names = (f"{what}_seconds" for what in ("target", "draft", "rest"))
        return dict(zip(names, found or (None,) * 3, strict=True))

    def _run(self, options: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        return self._target.generate(**self._inputs, **self._call, **options)

    def _options(self, way: str) -> tuple[dict[str, Any], Any]:
        """Return the options of ``generate`` for a way, and the module of its draft."""
        what, *tree, form = way.split(", ")
        options: dict[str, Any] = {"speculator": False}
        network = None
        if what == ASSISTED:
            options["assistant_model"] = network = self._draft_model
        elif what != PLAIN:
            speculator = self._draft_model if what == MODEL else self._eagle
            shape: dict[str, Any] = {"num_speculative_tokens": LENGTH}
            if tree:
                shape |= {"tree": "dynamic", "tree_topk": 8, "num_tree_tokens": int(tree[0].rpartition(" ")[2])}
            options = {"speculator": speculator, "speculation_config": SpeculationConfig(**shape)}
            network = self._draft_model if what == MODEL else network_of(self._eagle)
        if form != EAGER:
            options |= {"cache_implementation": "static", "compile_config": self._compilation(form)}
        return options, network

    def _compilation(self, form: str) -> CompileConfig:
        config: Any = CompileConfig(mode="reduce-overhead" if form == GRAPHS else "default")
        if self.device == "cpu":  # a trial: traced, without a compiler of C++
            config.backend, config.mode = "eager", None
        config._compile_all_devices = True
        return cast(CompileConfig, config)

    def _load(self) -> None:
        if self._target is not None:
            return
        place: dict[str, Any] = {"dtype": self.dtype, "device_map": {"": self.device}}
        small: Any = LlamaForCausalLM.from_pretrained(path(), **place).eval()
        self._draft_model: Any = AutoModelForCausalLM.from_pretrained(path("draft-vanilla"), **place).eval()
        self._eagle: Any = AutoModel.from_pretrained(path("draft-eagle3"), **place).eval()
        settings = self._draft_model.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = LENGTH, "constant"
        settings.assistant_confidence_threshold = 0.0
        self._target = small
        if self.sizes is not None:
            self._target = inflate(small, *self.sizes)
            self._eagle = Narrowed(self._eagle, small)
        tokenizer = AutoTokenizer.from_pretrained(path(), padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        texts = [PROMPTS[row % len(PROMPTS)] for row in range(self.batch)]
        self._inputs = tokenizer(texts, return_tensors="pt", padding=True).to(self.device)
        self._call = {"max_new_tokens": self.tokens, "do_sample": False, "eos_token_id": None}
        self._call |= {"pad_token_id": tokenizer.pad_token_id, "return_dict_in_generate": True}
