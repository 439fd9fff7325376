"""A demo in the browser: plain and speculative text side by side while they stream, accepted draft tokens coloured.

    pip install "hf-spec[space] @ git+https://github.com/hf-spec/hf_spec" && python examples/space/app.py
    HF_SPEC_TARGET=ORG/MODEL HF_SPEC_DRAFTS="EAGLE-3=ORG/DRAFT,n-grams=ngram" python examples/space/app.py

Without variables it shows the demo family. HF_SPEC_TARGET=small takes its target as it is shipped, HF_SPEC_MAX_TOKENS
is the longest text, 128 by default. The folder is a Space as it is.

Both calls run alone, so that neither slows the other down. The speculative one comes first. It is shown again at its
own pace, from the recorded times, while plain ``generate`` runs.
"""

from __future__ import annotations

import html
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_spec import demo
from hf_spec.cli.demo import SIZES, STORIES
from hf_spec.cli.loading import load_speculator
from hf_spec.demo.inflation import Narrowed, inflate
from hf_spec.display import ACCEPTED_STYLE, text_pieces
from hf_spec.metrics import RowStats

FRAME = 0.05  # seconds between two pictures
WARM = 8  # tokens of the calls that nobody sees
BOX = "white-space: pre-wrap; min-height: 12em; padding: 0.8em; border: 1px solid #8884; border-radius: 6px"
EXPLANATION = f"""Each step, the draft proposes tokens, and the target checks all of them in one forward. Tokens
<span style="{ACCEPTED_STYLE}">like these</span> were proposed by the draft and accepted by the target. Greedy text is
that of plain generate. The speculative call ran first and alone; it is shown at its own pace."""


@dataclass
class Models:
    """The target, its tokenizer, and the drafts by their names in the menu."""

    target: Any
    tokenizer: Any
    drafts: dict[str, Any]
    is_demo: bool
    warm: set[str] = field(default_factory=set)  # drafts that have run, whose first call is slower


def load(variables: Mapping[str, str]) -> Models:
    """Load what the environment's ``variables`` name. Errors: a ValueError for a draft without a name."""
    name = variables.get("HF_SPEC_TARGET", "demo")
    if name not in ("demo", "small"):
        return load_own(name, variables.get("HF_SPEC_DRAFTS", "n-grams=ngram"))
    small = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval()
    target = small if name == "small" else inflate(small, **SIZES)
    drafts: dict[str, Any] = {}
    for one in demo.MODELS[1:]:
        draft = load_speculator(str(demo.path(one)), small, "float32")
        drafts[one.removeprefix("draft-")] = draft if target is small else Narrowed(draft, small)
    return Models(target, AutoTokenizer.from_pretrained(demo.path()), drafts | {"n-grams": "ngram"}, is_demo=True)


def load_own(name: str, drafts: str) -> Models:
    """Load a target and the ``drafts`` in ``NAME=PLACE,NAME=PLACE``."""
    pairs = [one.partition("=") for one in drafts.split(",")]
    if wrong := [before for before, _, place in pairs if not before.strip() or not place.strip()]:
        raise ValueError(f"HF_SPEC_DRAFTS: {wrong[0]!r} is not NAME=PLACE; write EAGLE-3=ORG/DRAFT,n-grams=ngram")
    device = "auto" if torch.cuda.is_available() else None
    target = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device).eval()
    loaded = {before.strip(): load_speculator(place.strip(), target, "auto") for before, _, place in pairs}
    return Models(target, AutoTokenizer.from_pretrained(name), loaded, is_demo=False)


@dataclass
class Run:
    """What a call has written so far, and when. ``drafted`` tells which tokens were draft tokens, if it is known."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafted: list[bool] | None = None
    accepted_length: float | None = None

    def until(self, elapsed: float) -> Run:
        """Return what was there after ``elapsed`` seconds."""
        count = sum(one <= elapsed for one in self.seconds)
        drafted = None if self.drafted is None else self.drafted[:count]
        return Run(self.tokens[:count], self.seconds[:count], drafted, self.accepted_length)


class Clock(BaseStreamer):
    """Keeps the tokens of a call with their times, and gives a sign for each."""

    def __init__(self, run: Run, signs: queue.Queue[Any]) -> None:
        self.run, self.signs, self.start, self.has_prompt = run, signs, time.perf_counter(), False

    def put(self, value: torch.Tensor) -> None:
        """Keep the next token; the first value is the prompt."""
        if self.has_prompt:
            self.run.tokens.append(int(value.flatten()[0]))
            self.run.seconds.append(time.perf_counter() - self.start)
            self.signs.put(None)
        self.has_prompt = True

    def end(self) -> None:
        """Do nothing: the thread says when the call has ended."""


class Stopped(StoppingCriteria):
    """Ends a text that nobody waits for any more."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), dtype=torch.bool, device=input_ids.device)


def streamed(models: Models, inputs: BatchEncoding, options: dict[str, Any]) -> Iterator[Run]:
    """Generate in a thread and yield what is there, each ``FRAME`` seconds and at the end."""
    run, signs, event = Run(), queue.Queue[Any](), threading.Event()

    def call() -> None:
        try:
            torch.manual_seed(0)
            criteria = StoppingCriteriaList([Stopped(event)])
            more = {"streamer": Clock(run, signs), "stopping_criteria": criteria, "return_dict_in_generate": True}
            out = models.target.generate(**inputs, **options, **more)
            if (stats := getattr(out, "speculation", None)) is not None:
                run.drafted, run.accepted_length = stats.per_row[0].drafted, stats.mean_accepted_length
            signs.put(StopIteration)
        except Exception as error:  # shown where somebody waits
            signs.put(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        shown, sign = 0.0, None
        while sign is None:
            sign = signs.get()
            if sign is None and time.perf_counter() - shown >= FRAME:
                shown = time.perf_counter()
                yield run
        if sign is not StopIteration:
            raise sign
        yield run
    finally:
        event.set()
        thread.join()


def compare(models: Models, prompt: str, draft: str, new_tokens: int, temperature: float) -> Iterator[tuple[str, ...]]:
    """Yield the text and the figures of plain and of speculative decoding, again and again while they grow."""
    inputs = encoded(models, prompt).to(models.target.device)
    options: dict[str, Any] = {"max_new_tokens": int(new_tokens), "do_sample": temperature > 0}
    options |= {"temperature": float(temperature)} if temperature > 0 else {}
    if models.target.generation_config.pad_token_id is None:
        options["pad_token_id"] = models.tokenizer.eos_token_id
    if draft not in models.warm:
        yield "", "waits for its turn", "", "gets warm"
        for speculator in (False, models.drafts[draft]):
            models.target.generate(**inputs, **options | {"max_new_tokens": WARM, "speculator": speculator})
        models.warm.add(draft)
    recorded = Run()
    for recorded in streamed(models, inputs, options | {"speculator": models.drafts[draft]}):
        yield "", "waits for its turn", "", f"{len(recorded.tokens)} tokens are recorded"
    start = time.perf_counter()
    for plain in streamed(models, inputs, options | {"speculator": False}):
        past = recorded.until(time.perf_counter() - start)
        yield text_of(models, plain), figures(plain), text_of(models, past), figures(past)
    while (past := recorded.until(time.perf_counter() - start)).tokens != recorded.tokens:  # plain was faster
        yield text_of(models, plain), figures(plain), text_of(models, past), figures(past)
        time.sleep(FRAME)
    last = figures(recorded) + (f" · {ratio(recorded, plain):.2f} x plain" if recorded.tokens and plain.tokens else "")
    yield text_of(models, plain), figures(plain), text_of(models, recorded), last


def encoded(models: Models, prompt: str) -> BatchEncoding:
    """Return the prompt's tokens: the beginning of a story for the demo family, else in the chat template, if any."""
    tokenizer = models.tokenizer
    if models.is_demo or tokenizer.chat_template is None:
        return BatchEncoding(tokenizer(prompt, return_tensors="pt"))
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def text_of(models: Models, run: Run) -> str:
    """Return the text as HTML, accepted draft tokens coloured."""
    special = set(models.tokenizer.all_special_ids)
    pairs = zip(run.tokens, run.drafted or [False] * len(run.tokens), strict=True)
    kept = [(token, is_draft) for token, is_draft in pairs if token not in special]
    row = RowStats(tokens=[token for token, _ in kept], drafted=[is_draft for _, is_draft in kept])
    parts = []
    for accepted, text in text_pieces(row, models.tokenizer):
        shown = html.escape(demo.mended(text) if models.is_demo else text)
        parts.append(f'<span style="{ACCEPTED_STYLE}">{shown}</span>' if accepted else shown)
    return f'<div style="{BOX}">{"".join(parts)}</div>'


def figures(run: Run) -> str:
    """Return tokens, tokens per second since the call began, and the accepted length."""
    count = len(run.tokens)
    span = run.seconds[-1] if run.seconds else 0.0
    found = [f"{count} tokens"] + ([f"{count / span:.1f} tokens/s"] if span else [])
    if run.drafted:
        found.append(f"{sum(run.drafted)} accepted draft tokens")
    if run.accepted_length is not None:
        found.append(f"{run.accepted_length:.2f} tokens a step in the whole text")
    return " · ".join(found)


def ratio(one: Run, plain: Run) -> float:
    """Return how many times as many tokens a second ``one`` had."""
    return (len(one.tokens) / one.seconds[-1]) / (len(plain.tokens) / plain.seconds[-1])


def build(models: Models, most: int = 128) -> Any:
    """Build the page. Errors: an ImportError without gradio."""
    import gradio

    def run(prompt: str, draft: str, new_tokens: int, temperature: float) -> Iterator[tuple[str, ...]]:
        try:
            yield from compare(models, prompt, draft, new_tokens, temperature)
        except Exception as error:
            raise gradio.Error(str(error)) from error

    with gradio.Blocks(title="hf_spec") as page:
        gradio.Markdown("# Speculative decoding with hf_spec\n\n`model.generate(..., speculator=draft)`")
        prompt = gradio.Textbox(STORIES[0], label="Prompt", lines=2)
        with gradio.Row():
            draft = gradio.Dropdown([*models.drafts], value=next(iter(models.drafts)), label="Draft")
            length = gradio.Slider(8, most, value=min(64, most), step=1, label="New tokens")
            temperature = gradio.Slider(0, 1.5, value=0, step=0.1, label="Temperature (0: greedy)")
        button = gradio.Button("Generate", variant="primary")
        with gradio.Row():
            columns = []
            for title in ("Plain", "Speculative"):
                with gradio.Column():
                    gradio.Markdown(f"### {title}")
                    columns += [gradio.HTML(), gradio.Markdown()]
        gradio.HTML(EXPLANATION)
        given = [prompt, draft, length, temperature]
        gradio.on([button.click, prompt.submit], run, given, columns, api_name="compare", concurrency_limit=1)
        if models.is_demo:
            gradio.Examples([[story] for story in STORIES], [prompt])
    return page


if __name__ == "__main__":
    if "SPACE_ID" not in os.environ:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # small models gain nothing from more
    build(load(os.environ), int(os.environ.get("HF_SPEC_MAX_TOKENS", "128"))).launch()
