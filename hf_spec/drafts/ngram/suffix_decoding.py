"""What may follow a text: what followed its end where it was written before, and how likely that is to come again."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...policy.acceptance import Calibration, num_accepted
from .suffix_index import BREAK, LOOK_BACK, SIZES, Place, SuffixIndex, match_length

Path = tuple[int, ...]
Continuations = dict[Path, float]  # paths, each after its beginnings, and their probabilities

# What speaks against every continuation, in places that agree with the text in one token: measured, docs/history.md.
DOUBT_VOTES = 2.0


class Texts:
    """The growing texts of a call, and where their ends were written before.

    Each looks in itself, in the others, and in the ``histories``. Texts keep their numbers, also when their rows
    leave.
    """

    def __init__(self, count: int, histories: Sequence[SuffixIndex], least_match: int = 1) -> None:
        self.texts: list[list[int]] = [[] for _ in range(count)]
        self._histories, self._least_match = histories, least_match
        shortest = max(size for size in SIZES if size <= least_match)
        self._sizes = [size for size in SIZES if size >= shortest]
        # For each size of n-gram: where it stands, as number of the text and position after it.
        self._places: dict[int, dict[Path, list[tuple[int, int]]]] = {size: {} for size in self._sizes}

    def rows(self) -> list[tuple[Texts, int]]:
        """Name each text by this object and its number, so that texts of several calls can stand side by side."""
        return [(self, number) for number in range(len(self.texts))]

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to a text, each in constant time."""
        text = self.texts[number]
        for token in tokens:
            end = len(text)
            for size, places in self._places.items():
                if size <= end:
                    places.setdefault(tuple(text[end - size :]), []).append((number, end))
            text.append(token)

    def continuations(
        self, number: int, depth: int, width: int, nodes: int | None, min_token_prob: float
    ) -> Continuations:
        """Return what may follow a text, and the probability of each: see ``best_continuations``."""
        text = self.texts[number]
        return best_continuations(text, self._find(text, depth), depth, width, nodes, min_token_prob)

    def _find(self, text: list[int], depth: int) -> list[Place]:
        """List the places that agree with the end of ``text`` in most tokens, as far as their number is bounded."""
        for size in self._sizes:
            if size <= len(text):
                places = self._places[size].get(tuple(text[-size:]), [])[-LOOK_BACK:]
                own = ((self.texts[other], position) for other, position in reversed(places))
                found: list[Place] = [
                    (tokens, position, match_length(tokens, position, text)) for tokens, position in own
                ]
                for history in self._histories:
                    found += history.find(text, size, depth)
                if found := [place for place in found if place[2] >= self._least_match]:
                    return found
        return []


def record_outcome(calibration: Calibration, continuations: Continuations, new: Sequence[int], scored: bool) -> None:
    """Compare a chain with the ``new`` tokens: all of it if it was ``scored``, else as far as the text goes.

    A chain that was not scored is judged, too: a history that was wrong once would never be believed again. In
    lockstep a scored chain may be cut off by another row, so that the text says nothing of its end.
    """
    chain, probabilities = max(continuations, key=len, default=()), list(continuations.values())
    right = num_accepted(chain, new)
    is_refuted = scored and right < len(new)
    for place, probability in enumerate(probabilities if is_refuted else probabilities[: len(new)]):
        calibration.record(probability, place < right)


def calibrated(continuations: Continuations, calibration: Calibration) -> list[float]:
    """Return the calibrated probabilities of a chain; they never rise."""
    return [*itertools.accumulate(map(calibration, continuations.values()), min)]


def truncated(continuations: Continuations, depth: int) -> Continuations:
    """Leave out what is more than ``depth`` deep."""
    return {path: probability for path, probability in continuations.items() if len(path) <= depth}


def best_continuations(
    text: list[int], places: Sequence[Place], depth: int, width: int, nodes: int | None, min_token_prob: float
) -> Continuations:
    """Return the likeliest continuations of ``text`` as a tree, the best first, every one after its beginnings.

    A place that agrees over m tokens has m votes for the token after it, and one more for each that it was right
    about. A token's share of all votes, DOUBT_VOTES more included, is its probability after the one before. Along a
    path they are multiplied. What is less likely than ``min_token_prob`` is left out, and all that is more than
    ``depth`` tokens long, that is not among the best ``width`` of its siblings, or among the best ``nodes`` of all.
    """
    tie = itertools.count()
    waiting: list[tuple[float, int, Path, Sequence[Place]]] = [(-1.0, next(tie), (), places)]
    found: Continuations = {}
    while waiting and (nodes is None or len(found) <= nodes):
        probability, _, path, after = heapq.heappop(waiting)
        found[path] = -probability
        voters: defaultdict[int, list[Place]] = defaultdict(list)
        for tokens, position, votes in after if len(path) < depth else ():
            if position < len(tokens):
                voters[tokens[position]].append((tokens, position + 1, votes + 1))
            elif tokens is text:  # a copy that reaches the end of the text goes on with itself: a period
                voters[path[position - len(tokens)]].append((tokens, position + 1, votes + 1))
        votes_of = {token: sum(votes for _, _, votes in group) - len(group) for token, group in voters.items()}
        total = DOUBT_VOTES + sum(votes_of.values())
        next_tokens = sorted((token for token in votes_of if token != BREAK), key=votes_of.__getitem__, reverse=True)
        for token in next_tokens[:width]:  # of equally many votes, the one of the latest place
            if (likely := -probability * votes_of[token] / total) >= min_token_prob:
                heapq.heappush(waiting, (-likely, next(tie), (*path, token), voters[token]))
    del found[()]
    return found
