"""The memory of n-gram guesses against naive ones that keep every text and scan all of it anew."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from safetensors import safe_open
from safetensors.torch import save_file
from test_ngram import news, random_text, start
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from twins import BATCHES, TREE, by_code, draft, paths_of, target, tokenizer

import hf_spec.drafts.ngram.suffix_decoding
import hf_spec.drafts.ngram.suffix_index
from hf_spec import HybridSpeculator, NgramSpeculator, SpeculationConfig
from hf_spec.drafts.ngram.history_file import SavedHistory, read_history
from hf_spec.drafts.ngram.suffix_decoding import DOUBT_VOTES, best_continuations, record_outcome
from hf_spec.drafts.ngram.suffix_index import BLOCK, BREAK, LONGEST_MATCH, SIZES, Place, SuffixIndex
from hf_spec.policy.acceptance import Calibration

Guess = tuple[int, ...]


@pytest.fixture
def look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every place: in a tiny memory, others share the hash of an n-gram and count among those looked at."""
    monkeypatch.setattr(hf_spec.drafts.ngram.suffix_index, "LOOK_BACK", 10_000)
    monkeypatch.setattr(hf_spec.drafts.ngram.suffix_decoding, "LOOK_BACK", 10_000)


def naive_places(tokens: list[int], context: list[int], size: int) -> list[tuple[list[int], int, int]]:
    """List where the last ``size`` tokens of ``context`` stand in ``tokens``, the latest place first."""
    found = []
    for position in range(len(tokens) - 1, size - 1, -1):
        if tokens[position - size : position] == context[-size:]:
            length = size
            while (
                length < min(position, len(context), LONGEST_MATCH)
                and tokens[position - length - 1] == context[-length - 1]
            ):
                length += 1
            found.append((tokens, position, length))
    return found


def told(places: Any, depth: int) -> list[tuple[list[int], int]]:
    """What a place says: the tokens behind it, and how many in front agree."""
    return [(list(tokens[position : position + depth]), length) for tokens, position, length in places]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("look_at_all")
def test_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5, 40, 100, 300])
    memory, everything = SuffixIndex(size), [0] * 0
    for _ in range(30):
        text = random_text(rng, rng.randint(0, min(BLOCK - 1, size)))
        memory.add(text)
        everything = [*everything, *text[-max(1, size - 1) :], BREAK][-size:]
        assert memory.tokens() == everything
        assert len(memory) == len(everything) <= size
        for n in SIZES:
            context = random_text(rng, rng.randint(n, 80))
            start_at = rng.randrange(len(everything))
            if BREAK not in (piece := everything[start_at : start_at + n]):
                context += piece
            assert told(memory.find(context, n, 9), 9) == told(naive_places(everything, context, n), 9)


def naive_guesses(places: list[Place], text: list[int], depth: int, least: float) -> dict[Guess, float]:
    """Walk every path: a place votes with its match and what it was right about since."""
    found: dict[Guess, float] = {}

    def walk(path: Guess, chance: float) -> None:
        if len(path) == depth:
            return
        votes: dict[int, float] = defaultdict(float)
        for tokens, position, length in places:
            whole = [*tokens, *path] if tokens is text else [*tokens]
            right = whole[position : position + len(path)] == [*path]
            if right and position + len(path) < len(whole):
                votes[whole[position + len(path)]] += length + len(path)
        for token, number in votes.items():
            likely = chance * number / (DOUBT_VOTES + sum(votes.values()))
            if token != BREAK and likely >= least:
                found[*path, token] = likely
                walk((*path, token), likely)

    walk((), 1.0)
    return found


def check_guesses(guesses: dict[Guess, float], every: dict[Guess, float], nodes: int | None = None) -> None:
    """``continuations`` are all of ``every``, or its best ``nodes``, likeliest first and behind their beginnings."""
    assert len(guesses) == (len(every) if nodes is None else min(nodes, len(every)))
    assert guesses == {path: pytest.approx(every[path]) for path in guesses}
    assert sorted(guesses.values(), reverse=True) == list(guesses.values())
    assert list(guesses.values()) == pytest.approx(sorted(every.values(), reverse=True)[: len(guesses)])
    order = list(guesses)
    assert all(len(path) == 1 or order.index(path[:-1]) < number for number, path in enumerate(order))


@pytest.mark.parametrize("seed", range(10))
def test_continuations_are_the_likeliest(seed: int) -> None:
    rng = random.Random(seed)
    text = random_text(rng, rng.randint(2, 120))
    other = [*random_text(rng, 60), BREAK, *random_text(rng, 60)]
    places = [place for tokens in (text, other) for place in naive_places(tokens, text, 1)]
    depth, least, nodes = rng.randint(1, 6), rng.choice([0.01, 0.1, 0.3]), rng.randint(1, 8)
    every = naive_guesses(places, text, depth, least)
    check_guesses(best_continuations(text, places, depth, 99, None, least), every)
    check_guesses(best_continuations(text, places, depth, 99, nodes, least), every, nodes)
    chain = list(best_continuations(text, places, depth, 1, None, least))
    for length, path in enumerate(chain, start=1):  # the likeliest child of the one before
        siblings = {other: chance for other, chance in every.items() if other[:-1] == path[:-1]}
        assert len(path) == length and every[path] == max(siblings.values())


def naive_drafter(
    texts: list[list[int]], row: int, books: list[list[int]], depth: int, least: float
) -> dict[Guess, float]:
    for size in SIZES:
        places = [place for tokens in (*texts, *books) for place in naive_places(tokens, texts[row], size)]
        places = [
            (tokens, at, length) for tokens, at, length in places if tokens is not texts[row] or at < len(tokens)
        ]
        if size <= len(texts[row]) and places:
            return naive_guesses(places, texts[row], depth, least)
    return {}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("look_at_all")
def test_drafter_equals_a_scan_of_all_texts(seed: int) -> None:
    """Rows look in their own text, in each other's, also in those that left, in the corpus, and in the memory."""
    rng = random.Random(seed)
    books = [random_text(rng, 50) for _ in range(rng.choice([0, 2]))]
    speculator = NgramSpeculator(corpus=books, history_size=1_000, min_token_prob=0.05)
    earlier = [random_text(rng, BLOCK - 1) for _ in range(2)]
    speculator.learn(earlier)
    saved = [[*text, BREAK] for text in (*books, *earlier)]
    texts = [random_text(rng, rng.randint(1, 60)) for _ in range(4)]
    drafters = {
        "chain": start(texts, speculator, num_speculative_tokens=5),
        "dynamic": start(texts, speculator, num_speculative_tokens=5, tree="dynamic", tree_topk=99, num_tree_tokens=7),
    }
    rows = [0, 1, 2, 3]
    for step in range(5):
        more = [random_text(rng, rng.randint(1, 5)) for _ in rows]
        for row, new in zip(rows, more, strict=True):
            texts[row] = texts[row] + new
        for kind, drafter in drafters.items():
            proposal = drafter.propose(news(more), 5)
            assert proposal.q is None and proposal.deterministic is None
            assert proposal.root.tolist() == [texts[row][-1] for row in rows]
            for number, row in enumerate(rows):
                every = naive_drafter(texts, row, saved, 5, 0.05)
                found = {path: every[path] for path in paths_of(proposal, number)}
                if kind == "dynamic":
                    check_guesses(found, every, 7)
                else:
                    assert [len(path) for path in found] == list(range(1, len(found) + 1))
                    assert bool(found) == bool(every)
        if step == 1:
            rows = [3, 1]
            for drafter in drafters.values():
                drafter.keep_rows(torch.tensor(rows))


def test_static_trees_rank_by_chance() -> None:
    speculator = NgramSpeculator(history_size=100, min_token_prob=0.05)
    speculator.learn([[1, 7, 5], [1, 7, 6], [1, 8, 9]])

    def found(paths: list[tuple[int, ...]]) -> list[Guess]:
        tree = sorted({path[:end] for path in paths for end in range(1, 1 + len(path))})
        return paths_of(start([[4]], speculator, tree=tree).propose(news([[1]]), 4), 0)

    assert found([(0, 0), (1, 0)]) == [(7,), (8,), (7, 6), (8, 9)]
    assert found([(1, 0), (2, 0)]) == [(8,), (8, 9)]
    assert found([(0, 1)]) == [(7,), (7, 5)]


def test_a_row_that_stays_is_judged_by_its_own_chain() -> None:
    def trusted(prompts: list[list[int]], first: list[list[int]], staying: list[int]) -> list[float]:
        speculator = NgramSpeculator(history_size=100)
        speculator.learn([[1, 7, 8, 9], [2, 3, 4, 5]])
        drafter = start(prompts, speculator)
        drafter.propose(news(first), 3)
        drafter.keep_rows(torch.tensor(staying))
        drafter.propose(news([[3, 4, 5]]), 3)
        return [drafter._calibration(chance / 10) for chance in range(1, 10)]

    alone = trusted([[8]], [[2]], [0])
    assert trusted([[9], [8]], [[1], [2]], [1]) == alone
    assert alone != [pytest.approx(chance / 10) for chance in range(1, 10)], "it was judged"


def test_the_end_of_a_chain_that_another_row_cut_off_is_not_judged() -> None:
    def trusted(new: list[int]) -> list[float]:
        calibration = Calibration()
        record_outcome(calibration, {(1,): 0.9, (1, 2): 0.6, (1, 2, 3): 0.4}, new, scored=True)
        return [calibration(probability) > probability for probability in (0.9, 0.6, 0.4)]

    assert trusted([1]) == [True, False, False]
    assert trusted([1, 2]) == [True, True, False]
    calibration, untouched = Calibration(), Calibration()
    record_outcome(calibration, {(1,): 0.9, (1, 2): 0.6}, [1], scored=True)
    assert calibration(0.6) == untouched(0.6)
    record_outcome(calibration, {(1,): 0.9, (1, 2): 0.6}, [1, 7], scored=True)
    assert calibration(0.6) < untouched(0.6), "the text goes on otherwise"


def test_longer_matches_and_common_ones_are_followed_deeper() -> None:
    memory = SuffixIndex(1_000)
    memory.add([*range(20), 50, *range(20, 60)])

    def depth(context: list[int]) -> int:
        places = memory.find(context, 1, 16)
        return len(best_continuations(context, places, 16, 1, None, 0.3))

    assert depth([19]) < depth([17, 18, 19]) < depth([*range(20)])
    once = depth([19])
    memory.add([70, 19, 50, *range(20, 60)])
    assert depth([19]) > once


def test_memory_stays_bounded() -> None:
    rng = random.Random(0)
    memory = SuffixIndex(3_000)
    most = 0
    for length in [10, 5_000, *[400] * 60]:
        memory.add([rng.randrange(50_000) for _ in range(length)])
        most = max(most, memory.nbytes)
        assert len(memory) <= 3_000
        assert len(memory._beginnings) <= 1.25 * 3_000 / BLOCK + 1
    assert most / 3_000 < 120


def test_next_turn_adds_only_what_is_new() -> None:
    rng = random.Random(0)
    memory, talk = SuffixIndex(100_000), [rng.randrange(1_000) for _ in range(500)]
    memory.add(talk)
    for _ in range(20):
        talk = talk + [rng.randrange(1_000) for _ in range(30)]
        before = len(memory)
        memory.add(talk)
        assert len(memory) - before < 30 + LONGEST_MATCH + BLOCK + 1
    assert told(memory.find(talk[:-10], 8, 10), 10) == [(talk[-10:], LONGEST_MATCH)]


@pytest.mark.usefixtures("look_at_all")
def test_known_beginnings_are_forgotten_with_the_text() -> None:
    rng = random.Random(0)
    memory, talk = SuffixIndex(1_000), [rng.randrange(1_000) for _ in range(300)]
    memory.add(talk)
    memory.add([rng.randrange(1_000) for _ in range(999)])
    assert memory.find(talk, 8, 5) == []
    memory.add(talk)
    assert memory.tokens()[-301:] == [*talk, BREAK]


# --- In generate -----------------------------------------------------------------------------------------------------


def inputs(batch: str = "ragged") -> dict[str, Tensor]:
    rows, lengths = BATCHES[batch]
    ids = torch.randint(3, 99, (rows, max(lengths)), generator=torch.Generator().manual_seed(3))
    counts = torch.tensor([lengths[row % len(lengths)] for row in range(rows)])
    mask = (torch.arange(max(lengths)) >= max(lengths) - counts[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def plain(given: dict[str, Tensor], **options: Any) -> Tensor:
    return target().generate(**given, max_new_tokens=24, do_sample=False, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "config", [None, SpeculationConfig(num_speculative_tokens=9), TREE], ids=["own", "chain", "tree"]
)
def test_text_is_that_of_plain_generate(batch: str, config: SpeculationConfig | None) -> None:
    given, speculator = inputs(batch), NgramSpeculator(history_size=500)
    expected, lengths = plain(given), []
    for _ in range(2):
        out = target().generate(
            **given,
            max_new_tokens=24,
            do_sample=False,
            speculator=speculator,
            speculation_config=config,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected)
        lengths.append(out.speculation.mean_accepted_length)
    if config is not None:  # by the clock, it may not guess at all
        assert lengths[1] > 2
        assert lengths[1] >= lengths[0]


def whole_texts(given: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    width = given["input_ids"].shape[1]
    rows = zip(given["input_ids"], given["attention_mask"].bool(), sequences[:, width:], strict=True)
    return [ids[mask].tolist() + new.tolist() for ids, mask, new in rows]


def test_finished_calls_are_remembered_without_padding() -> None:
    given, speculator = inputs(), NgramSpeculator(history_size=500)
    end = int(plain(given)[0, 13 + 5])  # a token of row 0
    sequences = plain(given, eos_token_id=end, pad_token_id=0, speculator=speculator)
    expected = []
    for text in whole_texts(given, sequences):
        prompt = len(text) - (sequences.shape[1] - 13)
        stop = text.index(end, prompt) + 1 if end in text[prompt:] else len(text)
        expected += [*text[:stop], BREAK]
    assert speculator.history is not None
    assert speculator.history.tokens() == expected
    assert len(expected) < 13 + 9 + 5 + 3 * (24 + 1), "row 0 ends early"


@pytest.mark.parametrize("kind", ["alone", "hybrid"])
def test_placeholders_of_a_prompt_do_not_stand_for_another_tokenizer(kind: str) -> None:
    """PaliGemma's token for a part of an image stands after all those that it has embeddings for."""
    model, history = target(), NgramSpeculator(history_size=500)
    speculator = history if kind == "alone" else HybridSpeculator(draft(), history)
    vocabulary = model.get_input_embeddings().num_embeddings

    def hide(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].clamp(max=vocabulary - 1),)

    ids = torch.tensor([[150] * 4 + [1, 5, 6, 7]])
    seen = model.get_input_embeddings().register_forward_pre_hook(hide)
    try:
        texts = [model.generate(ids, max_new_tokens=9, do_sample=False, speculator=speculator) for _ in range(2)]
    finally:
        seen.remove()
    assert torch.equal(*texts)
    assert history.history is not None
    assert history.history.tokens()[:9] == [*[BREAK] * 4, *ids[0, 4:].tolist(), int(texts[0][0, 8])]
    with pytest.raises(ValueError, match="texts of another tokenizer"):
        history.check(target(vocab_size=6))


def test_tokens_that_a_target_has_no_logits_of_are_not_looked_up() -> None:
    """The config of Inkling counts the padding of its vocabulary, too."""
    speculator = NgramSpeculator(history_size=500)
    speculator.learn([[5, 6, 95, 5, 6, 95]])
    with pytest.raises(ValueError, match="token 95 and the target knows 90 tokens"):
        speculator.check(build("inkling_text", unpadded_vocab_size=90))
    with pytest.raises(ValueError, match="corpus holds token 95 and the target knows 90 tokens"):
        NgramSpeculator(corpus=[[5, 95]]).check(build("inkling_text", unpadded_vocab_size=90))


class Breaks(StoppingCriteria):
    """Raise after some steps, as a stop button does."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 8:
            raise self.kind("enough")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_nothing_of_an_abandoned_call_is_remembered(kind: type[BaseException]) -> None:
    given, speculator = inputs(), NgramSpeculator(history_size=500)
    plain(given, speculator=speculator)
    assert speculator.history is not None
    before = speculator.history.tokens()
    with pytest.raises(kind, match="enough"):
        plain(inputs("eight"), speculator=speculator, stopping_criteria=StoppingCriteriaList([Breaks(kind)]))
    assert speculator.history.tokens() == before


def test_threads_share_a_memory() -> None:
    speculator = NgramSpeculator(history_size=5_000)
    prompts = [torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [plain({"input_ids": ids}) for ids in prompts]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(3):
            found = plain({"input_ids": prompts[number]}, speculator=speculator, num_speculative_tokens=6)
            if not torch.equal(found, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert speculator.history is not None
    texts = list(SavedHistory(5_000, speculator.history.tokens()).texts())
    assert sorted(texts) == sorted(text[0].tolist() for text in expected for _ in range(3))


def test_a_text_may_be_added_by_another_thread_while_one_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before the lock is taken, so that the index is larger than it was."""
    index = SuffixIndex(100_000)
    index.add(range(1, 4_000))
    lock: Any = index._lock

    class Late(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            index._lock = lock
            index.add(range(5_000, 9_000))
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(index, "_lock", Late())
    ((copied, start, _),) = index.find([5_003, 5_004], 2, 4)
    assert copied[start:].tolist() == [5_005, 5_006, 5_007, 5_008]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_remembers_the_same_and_goes_on_by_itself(copied: Any) -> None:
    speculator = NgramSpeculator(history_size=100)
    assert speculator.history is not None
    speculator.history.add([3, 4, 5, 6])
    other = copied(speculator)
    assert other.history.tokens() == [3, 4, 5, 6, BREAK] and other.history.find([3, 4], 2, 2)
    other.history.add([7, 8])
    assert len(speculator.history) == 5 and len(other.history) == 8
    assert torch.equal(plain(inputs(), speculator=other), plain(inputs()))


def test_rows_without_guesses_take_an_ordinary_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to the device, and nothing but the root is scored, of a chain or of a tree."""
    for config in ({}, {"tree": "dynamic"}):
        for speculator in (NgramSpeculator(), NgramSpeculator(history_size=9)):
            drafter, new = start([[1, 2, 3]], speculator, **config), news([[4]])
            with monkeypatch.context() as patched:
                patched.setattr(torch, "tensor", None)
                proposal = drafter.propose(new, 4)
            assert (proposal.is_chain, proposal.max_depth, proposal.tokens.tolist()) == (True, 0, [[4]])


# --- The file --------------------------------------------------------------------------------------------------------


def filled() -> NgramSpeculator:
    speculator = NgramSpeculator(history_size=40)
    speculator.learn([[3, 4, 5, 6], list(range(10, 30))])
    return speculator


def test_saved_and_loaded(tmp_path: Path) -> None:
    speculator, file = filled(), tmp_path / "new" / "memory.safetensors"
    speculator.save(file, by_code())  # Mistral's tokenizers have an attribute `tokenizer`, as processors do
    again = NgramSpeculator.load(file, tokenizer(), min_token_prob=0.3)
    assert again.history is not None and speculator.history is not None
    assert (again.history.tokens(), again.history.size, again.min_token_prob) == (speculator.history.tokens(), 40, 0.3)
    assert paths_of(start([[1]], again).propose(news([[12]]), 2), 0) == [(13,)]
    smaller = NgramSpeculator.load(file, tokenizer(), history_size=10).history
    assert smaller is not None and smaller.tokens() == [*range(21, 30), BREAK]
    assert file.stat().st_mode & 0o77 == 0, "texts of users, for nobody else to read"
    assert [one.name for one in file.parent.iterdir()] == ["memory.safetensors"]


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Swap two words."""
    backend = tokenizer().backend_tokenizer
    words = backend.get_vocab()
    (a, first), (b, second) = sorted(words.items())[10:12]
    swapped = Tokenizer(models.BPE(words | {a: second, b: first}, []))
    return PreTrainedTokenizerFast(tokenizer_object=swapped)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    filled().save(file, tokenizer())
    with pytest.raises(ValueError, match=r"another tokenizer.*begin a new history"):
        NgramSpeculator.load(file, other_tokenizer())
    with pytest.raises(TypeError, match="must be a tokenizer"):
        NgramSpeculator.load(file, "gpt2")
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(OSError, match="begin a new one"):
            NgramSpeculator.load(file, tokenizer())
    marks = {"format": "hf_spec memory", "version": "2", "size": "9", "tokenizer": "?"}
    save_file({"tokens": torch.zeros(3, dtype=torch.int32)}, file, metadata=marks)
    with pytest.raises(ValueError, match=r"version 2.*update"):
        NgramSpeculator.load(file, tokenizer())
    save_file({"weight": torch.zeros(3)}, file)
    with pytest.raises(OSError, match="is no history"):
        NgramSpeculator.load(file, tokenizer())
    file.write_bytes(pickle.dumps({"tokens": [1, 2]}))
    with pytest.raises(OSError, match="no history"):
        NgramSpeculator.load(file, tokenizer())
    with pytest.raises(IsADirectoryError, match="is a directory; pass a file that"):
        NgramSpeculator.load(tmp_path, tokenizer())
    with pytest.raises(OSError, match=r"there is no history .*pass a file that NgramSpeculator\.save wrote"):
        NgramSpeculator.load(tmp_path / "none", tokenizer())


def marked(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    speculator, file = NgramSpeculator(history_size=9), tmp_path / "memory"
    speculator.learn([[3, 98]])
    speculator.check(target())
    speculator.learn([[3, 99]])
    with pytest.raises(ValueError, match=r"token 99.*knows 99.*per tokenizer"):
        speculator.check(target())
    speculator.save(file, tokenizer())
    marks = marked(file)
    for tokens, size in (([3, 500], "9"), ([3, 4], "0"), ([3, 4], "nine")):
        save_file({"tokens": torch.tensor(tokens, dtype=torch.int32)}, file, metadata=marks | {"size": size})
        with pytest.raises(OSError, match="no token ids of this tokenizer"):
            NgramSpeculator.load(file, tokenizer())


def test_a_token_that_the_tokenizer_has_not_makes_no_file_unreadable(tmp_path: Path) -> None:
    """Targets have more tokens than their tokenizers, as padding, and may draw one."""
    speculator, file = NgramSpeculator(history_size=40), tmp_path / "memory"
    speculator.learn([[3, 4, 500, 5, 6], [7, 8]])
    speculator.save(file, tokenizer())
    assert [*read_history(file, tokenizer()).texts()] == [[3, 4], [5, 6], [7, 8]]
    again = NgramSpeculator.load(file, tokenizer()).history
    assert again is not None and again.tokens() == [3, 4, BREAK, 5, 6, BREAK, 7, 8, BREAK]


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, speculator = tmp_path / "memory", filled()
    speculator.save(file, tokenizer())
    before = file.read_bytes()
    speculator.learn([[7, 8, 9]])

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        speculator.save(file, tokenizer())
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["memory"]


def test_bad_values_are_refused() -> None:
    for history_size in (0, -5, 2.5, True, "all"):
        with pytest.raises(ValueError, match="history_size must be a whole number"):
            NgramSpeculator(history_size=history_size)  # type: ignore[arg-type]
    for chance in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match="min_token_prob"):
            NgramSpeculator(history_size=9, min_token_prob=chance)
    with pytest.raises(ValueError, match="no history to save"):
        NgramSpeculator().save("nowhere", tokenizer())


def test_a_text_whose_addition_was_interrupted_spoils_nothing() -> None:
    """By the stop button of a notebook."""
    texts = [[(7 * number + place * place) % 50 for place in range(40)] for number in range(3)]
    index, whole, link = SuffixIndex(500), SuffixIndex(500), SuffixIndex._link

    def stopped(self: SuffixIndex, start: int, stop: int) -> None:
        link(self, start, start + 9)
        raise KeyboardInterrupt

    for text in texts:
        whole.add(text)
    index.add(texts[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SuffixIndex, "_link", stopped)
        with pytest.raises(KeyboardInterrupt):
            index.add(texts[1])
    again = pickle.loads(pickle.dumps(index))
    for one in (index, again):
        one.add(texts[2])
        assert one.tokens() == whole.tokens()
        for size in SIZES:
            for text in texts:
                found = whole.find(text[:30], size, 5)
                assert found and one.find(text[:30], size, 5) == found
