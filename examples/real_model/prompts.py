"""Choose prompts for training data from freely licensed corpora, none of them near the benchmark's.

    python examples/real_model/prompts.py --corpus DIR --benchmark spec_bench.jsonl --output work/prompts.jsonl

DIR holds ``*.jsonl.gz`` files; a line has a "source" and "messages" of {"role", "content"}. The output is
conversations in a random order that is always the same. Every 512 have all sources in their shares, so that a draft
may be trained on the part that is already answered. Within these they are sorted by length, because batches of similar
lengths need little padding. Their answers are those of the corpus. The target replaces them by its own (``hf-spec
prepare --regenerate``).
"""

import argparse
import collections
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The share of each source, and its licence. All others are left out.
SOURCES = {
    "dolly": (0.40, "CC-BY-SA-3.0"),
    "gpteacher_codegen": (0.20, "MIT"),
    "gpteacher_roleplay": (0.14, "MIT"),
    "gsm8k_train": (0.12, "MIT"),
    "math": (0.08, "MIT"),
    "rasbt": (0.06, "Apache-2.0"),
}
LONGEST = 600  # characters of a prompt
GROUP = 512  # prompts that are ordered by length
RUN = 8  # consecutive words; a prompt that shares as many with the benchmark is near it


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """Return every ``RUN`` consecutive words; of a shorter text, all of it."""
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(max(1, len(found) - RUN + 1))}


def candidates(corpus: Path, benchmark: set[tuple[str, ...]]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield source and messages of prompts that are short, not repeated, and not near the benchmark."""
    seen = set()
    for file in sorted(corpus.glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for example in map(json.loads, lines):
                if example["source"] not in SOURCES:
                    continue
                question, answer = example["messages"][:2]  # one turn
                prompt = question["content"]
                if question["role"] != "user" or len(prompt) > LONGEST or prompt in seen:
                    continue
                seen.add(prompt)
                if not runs(prompt) & benchmark:
                    yield example["source"], [question, answer]


def mixed(pools: dict[str, list[Any]], number: int, rng: random.Random) -> Iterator[Any]:
    """Sample from the pools by their shares, until ``number`` are taken or all pools are empty."""
    for pool in pools.values():
        rng.shuffle(pool)
    for _ in range(number):
        left = [source for source, pool in pools.items() if pool]
        if not left:
            return
        (source,) = rng.choices(left, [SOURCES[source][0] for source in left])
        yield {"source": source, "messages": pools[source].pop()}


def by_length(chosen: list[Any]) -> list[Any]:
    """Order every ``GROUP`` by the length of their prompts."""
    groups = [chosen[start : start + GROUP] for start in range(0, len(chosen), GROUP)]
    return [one for group in groups for one in sorted(group, key=lambda one: len(one["messages"][0]["content"]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory of *.jsonl.gz")
    parser.add_argument("--benchmark", type=Path, required=True, nargs="+", help="prompts that stay unseen")
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--number", type=int, default=12_288)
    parser.add_argument("--skip", type=int, default=0, help="leave out this many, which are already answered")
    args = parser.parse_args()
    turns = [turn for file in args.benchmark for line in file.open() for turn in json.loads(line)["turns"]]
    benchmark = set().union(*(runs(turn) for turn in turns))
    pools = collections.defaultdict(list)
    for source, messages in candidates(args.corpus, benchmark):
        pools[source].append(messages)
    if not pools:
        raise SystemExit(f"{args.corpus} has no *.jsonl.gz with one of the sources {list(SOURCES)}")
    chosen = list(mixed({source: pools[source] for source in SOURCES}, args.number, random.Random(0)))[args.skip :]
    whole = args.output.with_suffix(".part")
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in by_length(chosen)]
    whole.write_text("".join(lines), encoding="utf-8")
    whole.replace(args.output)
    for source, count in collections.Counter(one["source"] for one in chosen).most_common():
        print(f"{count:6,}  {source}  ({SOURCES[source][1]})")


if __name__ == "__main__":
    main()
