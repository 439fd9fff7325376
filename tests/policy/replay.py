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
from hf_spec.policy.base import DraftSource, Estimate, StepObservation
from hf_spec.policy.store import Profile
from hf_spec.whole_files import write_files

ANSWERS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "smollm2_answers.json").read_text(encoding="utf-8")
)["answers"]
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


def decode(kind: str, number: int, profile: Profile, machine: str, seed: int) -> float:
    """Decode an answer as the loop does; return the milliseconds."""
    answer, (points, asking, drafting) = ANSWERS[number], MACHINES[machine]
    ids, done, clock, chance, had_backlog = answer["ids"], answer["prompt"] + 1, 0.0, random.Random(seed), True
    profile.acceptance.begin_call(1)
    policy = adaptive.AdaptiveLength(profile.cost, profile.acceptance, profile.idle, FIRST)
    lookups = Lookups(profile.acceptance, 1)
    while done < len(ids):
        room = len(ids) - done
        chain: Sequence[int]
        if kind == "n-grams":
            found, agreed = looked_up(number)[done]
            chain = found[:room]
            survival = lookups.survival(0, ids[:done], tuple(chain), agreed)
            plan = policy.plan(1, [Estimate(DraftSource.NGRAM, [survival])])
            length = min(plan.length, len(chain))
            right = acceptance.num_accepted(chain[:length], ids[done:])
        else:
            plan = policy.plan(1, [profile.acceptance.estimate(DraftSource.MODEL, 1, min(FIRST, room))])
            place = done - answer["prompt"] - 1
            length = min(plan.length, FIRST, room)
            right = min(int(answer["drafted"][place : place + 1] or 0), length)
        taken = forward(points, 1 + length) + (asking + drafting * length if length and kind != "n-grams" else 0)
        taken *= chance.uniform(0.94, 1.06)
        is_usual = clock > 0 and not (had_backlog and length and kind != "n-grams")
        policy.observe(StepObservation(length, taken if is_usual else None, [length], [right]))
        had_backlog = not length
        done, clock = min(done + 1 + right, len(ids)), clock + taken
    return clock


def took(kind: str, machine: str, passes: int) -> dict[str, float]:
    """Return the milliseconds of each category, a mean over ``passes`` in different order."""
    times: dict[str, float] = defaultdict(float)
    for seed in range(passes):
        profile, order = Profile(), list(range(len(ANSWERS)))
        random.Random(seed).shuffle(order)
        for position, number in enumerate(order):
            times[ANSWERS[number]["category"]] += (
                decode(kind, number, profile, machine, 1000 * seed + position) / passes
            )
    return times


def plain(machine: str) -> dict[str, float]:
    """Return the milliseconds of each category in plain steps."""
    times: dict[str, float] = defaultdict(float)
    for answer in ANSWERS:
        times[answer["category"]] += MACHINES[machine][0][1] * (len(answer["ids"]) - answer["prompt"] - 1)
    return times


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
    for kind, machine_name in itertools.product(("draft model", "n-grams"), MACHINES):
        if f"{kind}, {machine_name}" not in content["rows"]:
            content["rows"][f"{kind}, {machine_name}"] = figures(kind, machine_name, args.passes)
            if args.json:
                write_files({args.json.name: json.dumps(content, indent=1) + "\n"}, args.json.absolute().parent)
    print(table(content))


def figures(kind: str, machine: str, passes: int) -> dict[str, Any]:
    """Return times plain with all rules, and what is left of it without each one: mean, worst category."""
    base = took(kind, machine, passes)
    found: dict[str, Any] = {"x plain": sum(plain(machine).values()) / sum(base.values()), "without": {}}
    for rule in RULES:
        with without(rule):
            other = took(kind, machine, passes)
        worst = min(base[name] / other[name] for name in base)
        found["without"][rule] = [sum(base.values()) / sum(other.values()), worst]
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
