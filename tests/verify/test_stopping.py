"""Stopping criteria inside a block, against asking plain criteria token by token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria, EosTokenCriteria

from hf_spec.verify.stopping import StopChecker

WORDS = ["a", "b", "c", "d", "e", "f", "s", "t", "o", "p", " ", "st", "op", "stop", "opera", "las", "topper", "to"]
ID = {word: i for i, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(ID, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def ids(*words: str) -> list[int]:
    return [ID[word] for word in words]


def one_by_one(criteria: StoppingCriteriaList, text: Tensor, before: list[int], after: list[int]) -> list[int | None]:
    """Ask after every token, as plain ``generate`` does."""
    stops: list[int | None] = []
    for b, (old, new) in enumerate(zip(before, after, strict=True)):
        finished = (length for length in range(old + 1, new + 1) if criteria(text[b : b + 1, :length], None).item())
        stops.append(next(finished, None))
    return stops


CRITERIA: dict[str, Callable[[PreTrainedTokenizerFast], list[StoppingCriteria]]] = {
    "eos": lambda _: [EosTokenCriteria(ID["a"])],
    "eos_ids": lambda _: [EosTokenCriteria([ID["a"], ID["st"], ID["p"]])],
    "two_eos": lambda _: [EosTokenCriteria(ID["a"]), EosTokenCriteria(torch.tensor([ID["b"]]))],
    "max_length": lambda _: [MaxLengthCriteria(9)],
    "two_max_lengths": lambda _: [MaxLengthCriteria(12), MaxLengthCriteria(7)],
    "string": lambda tokenizer: [StopStringCriteria(tokenizer, "stop")],
    "strings": lambda tokenizer: [StopStringCriteria(tokenizer, ["top", "sa", " b"])],
    "time_over": lambda _: [MaxTimeCriteria(1.0, initial_timestamp=0.0)],
    "time_left": lambda _: [MaxTimeCriteria(1e9)],
    "nothing": lambda _: [],
    "all": lambda tokenizer: [
        MaxLengthCriteria(11),
        MaxTimeCriteria(1e9),
        StopStringCriteria(tokenizer, ["sto", "ba"]),
        EosTokenCriteria([ID["c"], ID["d"]]),
    ],
}


def emitted(text: Tensor, before: list[int], after: list[int]) -> list[list[int]]:
    return [row[old:new].tolist() for row, old, new in zip(text, before, after, strict=True)]


@pytest.mark.parametrize("case", CRITERIA)
def test_first_stop_is_that_of_plain_calls(case: str, tokenizer: PreTrainedTokenizerFast) -> None:
    criteria = StoppingCriteriaList(CRITERIA[case](tokenizer))
    stops = StopChecker(criteria)
    chance = random.Random(0)
    found: list[int | None] = []
    for _ in range(40):
        before = [chance.randint(0, 8) for _ in range(3)]
        after = [old + chance.randint(0, 5) for old in before]
        # The text is no longer than its longest row; behind the others stands rubbish.
        text = torch.tensor([[chance.randrange(len(WORDS)) for _ in range(max(*after, 1))] for _ in range(3)])
        first = stops.first_stop(text, before, emitted(text, before, after))
        assert first == one_by_one(criteria, text, before, after)
        found += [None if length is None else length - old for length, old in zip(first, before, strict=True)]
    if case not in ("time_left", "nothing"):
        assert None in found and 1 in found, "no row went on, or none stopped"
    if "time" not in case and case != "nothing":
        assert {2, 3} <= set(found), "no row stopped inside a block"


@pytest.mark.parametrize("offset", range(5))
def test_every_offset_inside_a_block(offset: int, tokenizer: PreTrainedTokenizerFast) -> None:
    before, after = [4, 6], [9, 11]
    for criterion, mark in [
        (EosTokenCriteria([ID["b"], ID["c"]]), ids("c")),
        (StopStringCriteria(tokenizer, "stop"), ids("las", "topper")),
        (StopStringCriteria(tokenizer, "stop"), ids("st", "opera")),
        (StopStringCriteria(tokenizer, "stop"), ids("s", "to", "p")),
        (StopStringCriteria(tokenizer, "stop"), ids("s", "t", "o", "p")),
    ]:
        text = torch.full((2, 11), ID["a"])
        end = before[0] + offset + 1
        text[0, end - len(mark) : end] = torch.tensor(mark)
        stops = StopChecker(StoppingCriteriaList([criterion]))
        assert stops.first_stop(text, before, emitted(text, before, after)) == [end, None]
    limit = StopChecker(StoppingCriteriaList([MaxLengthCriteria(5 + offset)]))
    assert limit.first_stop(text, before, emitted(text, before, after)) == [5 + offset, max(7, 5 + offset)]


def test_the_first_of_several_stop_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    """In rows of any length, of which some are longer than any stop string and others become so within the block."""
    criterion = StopStringCriteria(tokenizer, ["stop", "top"])
    stops, chance, several = StopChecker(StoppingCriteriaList([criterion])), random.Random(0), 0
    for _ in range(60):
        before = [chance.choice([1, 2, 3, 12]) for _ in range(3)]
        after = [old + chance.randint(1, 6) for old in before]
        words = ids("st", "op", "stop", "t", "a")
        text = torch.tensor([[chance.choice(words) for _ in range(max(after))] for _ in range(3)])
        first = stops.first_stop(text, before, emitted(text, before, after))
        assert first == one_by_one(StoppingCriteriaList([criterion]), text, before, after)
        complete = stops.completes_string(text, after)
        assert complete == [bool(criterion(text[row : row + 1, :end], None)) for row, end in enumerate(after)]
        again = zip(first, complete, after, strict=True)  # another one, at the end of the block
        several += sum(end is not None and done and end < last for end, done, last in again)
    assert several > 10


def test_what_was_there_before_stops_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    text = torch.tensor([ids("stop", "a", "b", "b", "e")])
    for criterion in (EosTokenCriteria([ID["a"]]), StopStringCriteria(tokenizer, ["stop"])):
        assert StopChecker(StoppingCriteriaList([criterion])).first_stop(text, [2], emitted(text, [2], [5])) == [None]


def test_rubbish_behind_the_text_stops_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    text = torch.tensor([ids("b", "b", "a", "stop", "a"), ids("b", "b", "b", "b", "b")])
    for criterion in (EosTokenCriteria([ID["a"]]), StopStringCriteria(tokenizer, ["stop"])):
        stops = StopChecker(StoppingCriteriaList([criterion]))
        assert stops.first_stop(text, [1, 1], emitted(text, [1, 1], [2, 5])) == [None, None]


def test_who_is_asked_how() -> None:
    class Custom(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: object) -> Tensor:
            return input_ids[:, -1] == 5

    class LaterEos(EosTokenCriteria):
        pass

    def stops(*criteria: StoppingCriteria) -> StopChecker:
        return StopChecker(StoppingCriteriaList(criteria))

    assert not stops().lockstep and not stops().pads and stops().max_length is None
    known = stops(MaxLengthCriteria(9), MaxTimeCriteria(1.0), EosTokenCriteria(3), MaxLengthCriteria(7))
    assert not known.lockstep and known.pads and known.max_length == 7
    assert stops(MaxLengthCriteria(9), Custom()).lockstep and not stops(MaxLengthCriteria(9), Custom()).pads
    assert stops(LaterEos(3)).lockstep and stops(LaterEos(3)).pads
    assert stops(ConfidenceCriteria(0.4)).lockstep

    text = torch.tensor([[1, 2, 5], [1, 5, 2], [1, 2, 3]])
    assert stops(Custom(), EosTokenCriteria(3))(text, None) == [True, False, True]
