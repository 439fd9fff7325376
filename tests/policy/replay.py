"""Replay recorded answers of a real model through the draft-length policy, with step times as they were measured.

    python tests/policy/replay.py            the table of docs/performance.md: each rule left out in turn
    python tests/policy/replay.py --passes 8

No model runs, and no clock is read. ``smollm2_answers.json`` holds greedy answers of SmolLM2-135M-Instruct, and how
many of five draft tokens of an EAGLE-3 draft were accepted after each token. N-grams are looked up in the answers.
Step times: a forward of so many tokens as in docs/performance.md, plus the draft's, with 6 % noise.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hf_spec.drafts.ngram.lookups import Lookups
from hf_spec.drafts.ngram.speculator import TextIndex
from hf_spec.drafts.ngram.suffix_index import match_length
from hf_spec.policy import acceptance, adaptive, cost
from hf_spec.policy.base import MAX_LENGTH, DraftSource, Estimate, StepObservation
from hf_spec.policy.store import Profile
from hf_spec.whole_files import write_files

ANSWERS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "smollm2_answers.json").read_text(encoding="utf-8")
)["answers"]
CALLS = 4  # of batches, in a pass
FIRST = 5  # draft tokens of the first step, and most of the EAGLE-3 draft
# Milliseconds of a forward by tokens, of asking the draft, and of each draft token.
MACHINES: dict[str, tuple[dict[int, float], float, float]] = {
    "AMD, float32": ({1: 40.8, 2: 63.7, 3: 77.5, 4: 61.0, 6: 57.8, 8: 59.6, 16: 73.7, 32: 97}, 3, 2.5),
    "Intel, float32": ({1: 48, 2: 57, 3: 62, 4: 75, 6: 82, 8: 91, 16: 86, 32: 104}, 3, 2.5),
    "bfloat16": ({1: 24, 2: 24.55}, 2.3, 1.3),
    "bfloat16, slow draft": ({1: 24, 2: 24.55}, 8, 6),
}


def forward(points: dict[int, float], tokens: int) -> float:
    """Return the milliseconds of a forward, on the line between its measured neighbours."""
    known = sorted(points)
    right = min(max(1, sum(one < tokens for one in known)), len(known) - 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (tokens - low) / (high - low)


@cache
def looked_up(number: int) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return for each length of an answer what n-grams find there, and how many tokens the match agrees over."""
    ids, prompt = ANSWERS[number]["ids"], ANSWERS[number]["prompt"]
    text, found = TextIndex(range(4, 0, -1)), {}
    text.extend(ids[:prompt])
    for done in range(prompt + 1, len(ids)):
        text.extend(ids[done - 1 : done])
        ngrams = (tuple(text.tokens[-size:]) for size in range(4, 0, -1))
        ngram = next((one for one in ngrams if text.places(one)), ())
        chain = next(text.continuations(ngram, 16), ())
        found[done] = chain, match_length(text.tokens, text.places(ngram)[-1], text.tokens) if chain else 0
    return found


class Row:
    """An answer while it is decoded: ``done`` of its tokens are there, and it gets as many as ``end``."""

    def __init__(self, number: int, new: int) -> None:
        self.number, self.ids = number, ANSWERS[number]["ids"]
        self.prompt: int = ANSWERS[number]["prompt"]
        self.done, self.end = self.prompt + 1, self.prompt + 1 + new

    def chain(self) -> tuple[tuple[int, ...], int]:
        """Return what n-grams find, and the length of their match."""
        found, agreed = looked_up(self.number)[self.done]
        return found[: self.end - self.done], agreed

    def accepted(self, length: int) -> int:
        """Return how many of ``length`` tokens of the draft model are accepted."""
        place = self.done - self.prompt - 1
        return min(int(ANSWERS[self.number]["drafted"][place : place + 1] or 0), length)


def decode(kind: str, numbers: Sequence[int], profile: Profile, machine: str, seed: int) -> tuple[float, float]:
    """Decode answers in one batch as the loop does; return the milliseconds, and those of plain steps.

    All rows of a batch get as many tokens as the shortest answer has.
    """
    points, asking, drafting = MACHINES[machine]
    new = min(len(ANSWERS[number]["ids"]) - ANSWERS[number]["prompt"] - 1 for number in numbers)
    rows = [Row(number, new) for number in numbers]
    clock, chance, had_backlog, in_plain = 0.0, random.Random(seed), True, new * forward(points, len(rows))
    profile.acceptance.begin_call(len(rows))
    lag = profile.acceptance.lag_of_call(len(rows)) if len(rows) > 1 else None
    policy = adaptive.AdaptiveLength(profile.cost, profile.acceptance, profile.idle, FIRST, lag=lag)
    lookups, by_match = Lookups(profile.acceptance, 1), len(rows) == 1
    while rows:
        if kind == "n-grams":
            chains = [row.chain() for row in rows]
            estimate = profile.acceptance.estimate(DraftSource.NGRAM, len(rows), MAX_LENGTH)
            if by_match:
                survival = lookups.survival(0, rows[0].ids[: rows[0].done], *chains[0])
                estimate = Estimate(DraftSource.NGRAM, [survival])
            planned = policy.plan(len(rows), [estimate]).length
            drafts = [chain[:planned] for chain, _ in chains]
            right = [
                acceptance.num_accepted(draft, row.ids[row.done :]) for draft, row in zip(drafts, rows, strict=True)
            ]
            lengths = [*map(len, drafts)]
        else:
            room = max(row.end - row.done for row in rows)
            estimate = profile.acceptance.estimate(DraftSource.MODEL, len(rows), min(FIRST, room))
            planned = policy.plan(len(rows), [estimate]).length
            lengths = [min(planned, row.end - row.done) for row in rows]
            right = [row.accepted(length) for row, length in zip(rows, lengths, strict=True)]
        length = max(lengths)
        asked = length and kind != "n-grams"
        taken = forward(points, len(rows) * (1 + length)) + (asking + drafting * length if asked else 0)
        taken *= chance.uniform(0.94, 1.06)
        is_usual = clock > 0 and not (had_backlog and asked)
        policy.observe(StepObservation(length, taken if is_usual else None, lengths, right))
        had_backlog = not length
        for row, accepted in zip(rows, right, strict=True):
            row.done = min(row.done + 1 + accepted, row.end)
        rows, clock = [row for row in rows if row.done < row.end], clock + taken
    return clock, in_plain


def took(kind: str, machine: str, passes: int, rows: int = 1) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of each category, or of all batches, and those of plain steps.

    Each of the ``passes`` begins without any knowledge, and takes the answers in another order.
    """
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for seed in range(passes):
        profile, order, chance = Profile(), list(range(len(ANSWERS))), random.Random(seed)
        chance.shuffle(order)
        calls = [[one] for one in order] if rows == 1 else [chance.sample(order, rows) for _ in range(CALLS)]
        for position, numbers in enumerate(calls):
            name = ANSWERS[numbers[0]]["category"] if rows == 1 else "all"
            both = zip(found[name], decode(kind, numbers, profile, machine, 1000 * seed + position), strict=True)
            taken, in_plain = map(sum, both)
            found[name] = taken, in_plain
    return found


def speed(found: dict[str, tuple[float, float]]) -> float:
    """Return how many times as fast as plain steps all of it was."""
    taken, in_plain = map(sum, zip(*found.values(), strict=True))
    return in_plain / taken


def by_position(known: acceptance.AcceptanceEstimator, length: int) -> list[float]:
    return known.survival(DraftSource.NGRAM, length)


@contextlib.contextmanager
def without(rule: str) -> Iterator[None]:
    """Leave out a rule of the policy inside."""
    saved: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, value: Any) -> None:
        saved.append((place, name, getattr(place, name)))
        setattr(place, name, value)

    if rule == "fresh start":
        put(acceptance.AcceptanceEstimator, "begin_call", lambda self, batch_size: None)
    elif rule == "decay":
        put(acceptance, "DECAY", 1.0)
        put(acceptance, "PLAIN_DECAY", 1.0)
    elif rule == "retries":
        put(adaptive, "TRIES", 1e-12)
    elif rule == "cost bound":
        line = cost._on_line
        put(cost, "_on_line", lambda times, weights, plain: line(times, weights, 0.0 if len(times) > 1 else plain))
    elif rule == "match length":
        put(Lookups, "survival", lambda self, _row, _text, chain, _: by_position(self._acceptance, len(chain)))
    elif rule == "slowest row":
        put(acceptance.Lag, "share", lambda self: 1.0)
    elif rule:
        raise ValueError(rule)
    try:
        yield
    finally:
        for place, name, value in reversed(saved):
            setattr(place, name, value)


RULES = (
    "fresh start",
    "decay",
    "retries",
    "cost bound",
    "match length",
    "slowest row",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument(
        "--json", type=Path, help="write commit, machine, versions and the figures; what it has is kept"
    )
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from engine_speed import earlier, machine  # the folder is no package

    made_from = machine() | {"argv": sys.argv[1:]}
    content: dict[str, Any] = {"made_from": made_from, "rows": {}} | earlier(args.json, made_from)
    for rows, kind, machine_name in itertools.product((1, 8), ("draft model", "n-grams"), MACHINES):
        name = f"{kind}, {machine_name}" + (f", {rows} sequences" if rows > 1 else "")
        if name not in content["rows"]:
            content["rows"][name] = figures(kind, machine_name, args.passes, rows)
            if args.json:
                write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)
    print(table(content))


def figures(kind: str, machine: str, passes: int, rows: int) -> dict[str, Any]:
    """Return times plain with all rules, and what is left of it without each one: mean, worst category."""
    base = took(kind, machine, passes, rows)
    found: dict[str, Any] = {"x plain": speed(base), "without": {}}
    for rule in RULES:
        with without(rule):
            other = took(kind, machine, passes, rows)
        worst = min(base[name][0] / other[name][0] for name in base)
        found["without"][rule] = [speed(other) / speed(base), worst]
    return found


def table(content: dict[str, Any]) -> str:
    """Write a raw file as Markdown."""
    rules = list(next(iter(content["rows"].values()))["without"])
    head = ["draft, step times of", "x plain", *(f"without: {rule}" for rule in rules)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, one in content["rows"].items():
        cells = [f"{mean:.2f} ({worst:.2f})" for mean, worst in one["without"].values()]
        lines.append(f"| {' | '.join([name, format(one['x plain'], '.2f'), *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
