"""``hf-spec demo``: compare plain and speculative decoding on the shipped models, offline."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .bench import contender
from .common import at_least, command, picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench import BenchReport, Contender
    from ..metrics import RowStats

HIGHLIGHT, NORMAL = "\x1b[30;42m", "\x1b[0m"
COLUMNS = ("τ", "x plain", "accepted", "same text")
LEGEND = "τ: tokens per forward of the target.  x plain: tokens per second, plain generate in the same run being 1."
# The decoder layers of SmolLM2-135M.
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
INFLATED = """\
The target is the demo family's, inflated in memory from {small:.1f} to {large:.0f} million parameters: as costly as
the layers of SmolLM2-135M. The added weights change no word: text and draft tokens are those of the small model.
"""
SMALL_LEGEND = """
τ is what a larger target would gain from: the forwards of this one, {small:.1f} million parameters, cost little more
than drafting."""
WARM = 8  # new tokens of the warmup run
SHAPES = ({"tree": None}, {"tree": "dynamic", "tree_topk": 4, "num_tree_tokens": 12})
STORIES = (
    "Once upon a time, there was a little dog named Max.",
    "One day, Lily and her mom went to the park.",
    "Tom had a big red ball. He liked to play with it.",
)


def add_demo(commands: Any) -> None:
    """Declare ``hf-spec demo``."""
    add = command(commands, _demo, "demo", "compare plain and speculative decoding on the shipped models, offline")
    add("--small", action="store_true", help="take the target as it is shipped, whose forwards cost hardly more than "
        "drafting, and more stories")  # fmt: skip
    add("--max-new-tokens", type=at_least(2), default=96, metavar="N", help="length of each story (%(default)s)")
    add("--threads", type=at_least(1), default=1, metavar="N",
        help="small models gain nothing from more (%(default)s)")  # fmt: skip
    add("--png", type=picture, metavar="FILE", help="write a picture of the table")


def _demo(args: argparse.Namespace) -> int:
    from ..bench import import_pyplot
    from ..demo import path
    from ..demo.inflation import inflate
    from .loading import load_target

    if args.png:
        import_pyplot()
    small, tokenizer = load_target(str(path()), "float32", "cpu")
    target = small if args.small else inflate(small, **SIZES)
    sizes = {name: model.num_parameters() / 1e6 for name, model in (("small", small), ("large", target))}
    if not args.small:
        print(INFLATED.format(**sizes), flush=True)
    contenders, stories = _contenders(small, target), STORIES if args.small else STORIES[:1]
    report = _compared(target, tokenizer, contenders, stories, args.max_new_tokens)
    print(f"\n{LEGEND}{SMALL_LEGEND.format(**sizes) if args.small else ''}")
    if args.png:
        report.plot(args.png)
        print(f"The picture is in {args.png}.")
    best = max(contenders, key=lambda one: report.overall[one.name].mean_accepted_length or 0)
    _show_accepted(target, tokenizer, best, args.max_new_tokens)
    different = sum(report.overall[one.name].differing_rows or 0 for one in contenders)
    print(f"\nGreedy text {'is the same as' if not different else 'DIFFERS from'} that of plain generate.")
    return 1 if different else 0


def _contenders(small: PreTrainedModel, target: PreTrainedModel) -> list[Contender]:
    """List the family's drafts, which are made for ``small``, as contenders for ``target``."""
    from ..bench import Contender
    from ..demo import MODELS, path
    from ..demo.inflation import Narrowed
    from .loading import load_speculator

    contenders = [Contender("ngram chain", "ngram")]
    for name in MODELS[1:]:
        speculator = load_speculator(str(path(name)), small, "float32")
        if target is not small:
            speculator = Narrowed(speculator, small)
        for shape in SHAPES:
            config = speculator.settings(**shape)
            contenders.append(contender(name.removeprefix("draft-"), speculator, config))
    return contenders


def _compared(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contenders: list[Contender],
    stories: Sequence[str],
    max_new_tokens: int,
) -> BenchReport:
    """Run every method on ``stories``, print the table and return the report."""
    from ..bench import BenchSettings, Prompt, run_bench

    prompts = [Prompt((story,), chat=False) for story in stories]
    what = "A story" if len(stories) == 1 else f"{len(stories)} stories"
    print(f"{what} of up to {max_new_tokens} tokens, plain and with draft tokens:\n", flush=True)
    warm = BenchSettings(max_new_tokens=min(WARM, max_new_tokens), baselines=False, warmup=0)
    run_bench(target, tokenizer, prompts[:1], contenders, warm)
    settings = BenchSettings(max_new_tokens=max_new_tokens, baselines=False, warmup=0)
    report = run_bench(target, tokenizer, prompts, contenders, settings, progress=sys.stderr.isatty())
    print(report.table(columns=COLUMNS))
    return report


def _show_accepted(target: Any, tokenizer: PreTrainedTokenizerBase, best: Contender, max_new_tokens: int) -> None:
    out = target.generate(
        **tokenizer(STORIES[0], return_tensors="pt"),
        speculator=best.speculator,
        speculation_config=best.config,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"\nDraft tokens of {best.name} that were accepted are {_mark('marked like this', colour)}:\n")
    print(STORIES[0] + highlighted(out.speculation.per_row[0], tokenizer, colour))


def highlighted(row: RowStats, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """Return the text of ``row`` with accepted draft tokens in green, or in brackets where there is no colour."""
    from ..demo import mended
    from ..display import text_pieces

    parts = ((is_draft, mended(text)) for is_draft, text in text_pieces(row, tokenizer) if text)
    return "".join(_mark(text, colour) if is_draft else text for is_draft, text in parts)


def _mark(text: str, colour: bool) -> str:
    return f"{HIGHLIGHT}{text}{NORMAL}" if colour else f"[{text}]"
