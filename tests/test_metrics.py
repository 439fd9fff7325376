"""Figures of speculation counted by hand, and the text they belong to."""

from __future__ import annotations

import html
import json
import re
from dataclasses import fields

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_spec.metrics import Counts, SpeculationStats


def example() -> SpeculationStats:
    """Run two rows for three steps; row 1 proposes a tree first, then nothing, then is gone."""
    stats = SpeculationStats(batch_size=2)
    stats.prefilled([9, 8])
    stats.step([0, 1], [3, 5], [3, 1], [4, 2], [3, 2], tokens=[[1, 2, 3, 4], [5, 6]])
    stats.step([0, 1], [3, 0], [1, 0], [2, 1], [3, 0], tokens=[[5, 6], [7]])
    stats.step([0], [2], [2], [2], [2], tokens=[[7, 8]])
    stats.finish()
    return stats


def test_figures() -> None:
    stats = example()
    assert (stats.steps, stats.row_steps) == (3, 5)
    assert (stats.proposed, stats.accepted, stats.emitted) == (13, 7, 11)
    assert stats.acceptance_rate == 7 / 13
    assert stats.mean_accepted_length == 11 / 5
    assert stats.acceptance_by_position == [4 / 4, 2 / 4, 1 / 2]
    first, second = stats.per_row
    assert (first.steps, first.proposed, first.accepted, first.emitted) == (3, 8, 6, 8)
    assert first.acceptance_by_position == [1.0, 2 / 3, 1 / 2]
    assert (second.steps, second.mean_accepted_length) == (2, 1.5)
    assert second.acceptance_by_position == [1.0, 0.0]


def test_tokens_are_split_into_guesses_and_own() -> None:
    first, second = example().per_row
    assert first.tokens == [9, 1, 2, 3, 4, 5, 6, 7, 8]
    assert first.drafted == [False, True, True, True, False, True, False, True, True]
    assert second.tokens == [8, 5, 6, 7]
    assert second.drafted == [False, True, False, False]


def test_the_plot_shows_how_long_steps_were() -> None:
    """A step of a row may end with an accepted draft token, because that of another row was wrong."""
    pytest.importorskip("matplotlib")
    together, without = example(), SpeculationStats(1)
    together.step([0], [3], [3], [3], [3], tokens=[[9, 9, 9]])
    together.plain_steps([1], [[4, 4]])
    without.step([0], [0], [0], [1], [0], tokens=[[6]])  # its first token is one of a step
    without.step([0], [2], [1], [2], [2], tokens=[[7, 8]])
    merged = SpeculationStats.merge([together, without, SpeculationStats(1)], [[0, 1], [0], [0]])
    for stats, lengths in ((together, [3, 3, 1, 1]), (without, [1, 1]), (merged, [4, 4, 1, 1])):
        bars = stats.plot().axes[1].patches
        assert [(bar.get_center()[0], bar.get_height()) for bar in bars] == list(enumerate(lengths, 1))


def test_nothing_to_divide_by_is_zero() -> None:
    for stats in (SpeculationStats(2), SpeculationStats.merge([])):
        figures = stats.to_dict()
        names = ("acceptance_rate", "mean_accepted_length", "overhead", "time_per_output_token", "time_to_first_token")
        assert [figures[name] for name in names] == [0.0] * 5
        assert figures["acceptance_by_position"] == []
        assert "acceptance rate" in repr(stats)


def test_dict_survives_json() -> None:
    figures = example().to_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["steps"] == 3
    assert figures["row_steps"] == 5
    assert {one.name for one in fields(SpeculationStats)} - figures.keys() == {"synchronize", "tokenizer"}
    assert [(row["steps"], row["lengths"]) for row in figures["per_row"]] == [(3, [0, 0, 2, 0, 1]), (2, [0, 1, 1])]


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the clock is one second after the one before."""
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    stats = SpeculationStats(2)  # reads 0
    stats.prefilled()  # 1
    with stats.timed("propose"):  # 2, 3
        pass
    with pytest.raises(KeyError), stats.timed("target"), stats.timed("verify"):  # 4, (5, 6), 7
        raise KeyError
    stats.step([0, 1], [1, 1], [1, 0], [2, 1], [1, 1])  # 8
    stats.step([1], [1], [0], [1], [1])  # 9
    stats.finish()  # 10
    assert (stats.propose_seconds, stats.target_seconds, stats.verify_seconds) == (1.0, 3.0, 1.0)
    assert stats.overhead == 1 / 5
    assert stats.time_to_first_token == 1.0
    assert [row.seconds for row in stats.per_row] == [7.0, 8.0]
    assert stats.time_per_output_token == 15 / 4
    assert stats.total_seconds == 10.0


def test_clock_without_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step gave the first tokens, for which no row had waited yet."""
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    stats = SpeculationStats(2)  # reads 0
    stats.step([0, 1], [1, 1], [1, 0], [2, 1], [1, 1])  # 1 for the first tokens, 2
    stats.step([1], [1], [0], [1], [1])  # 3
    assert stats.time_to_first_token == 1.0
    assert [row.seconds for row in stats.per_row] == [1.0, 2.0]
    assert (stats.emitted, stats.first_tokens_in_steps) == (4, 2)
    assert stats.time_per_output_token == 3 / 2


@pytest.mark.parametrize("prefilled", [True, False])
def test_the_speed_beside_plain_steps(prefilled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps go on until the longest row ends; tokens that come with the first ones are in nobody's time."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    stats = SpeculationStats(2)
    now[0] = 5.0
    if prefilled:
        stats.prefilled()
    else:
        stats.step([0, 1], [3, 3], [3, 0], [4, 1], [3, 3])
    now[0] = 7.0
    stats.step([0, 1], [3, 3], [3, 2], [4, 3], [3, 3])
    stats.step([1], [3], [2], [3], [3])
    stats.finish(plain_step=0.5)
    assert (stats.plain_seconds, stats.decode_seconds) == (0.5 * 6, 2.0)
    assert stats.speedup == 1.5 and "about 1.5 x plain steps" in repr(stats)
    assert SpeculationStats.merge([stats, stats]).speedup == 1.5
    stats.finish()
    assert stats.speedup == SpeculationStats.merge([stats, stats]).speedup == 0.0 and "plain steps" not in repr(stats)


def test_merge_equals_one_call_of_all_rows() -> None:
    whole, parts = example(), [SpeculationStats(1), SpeculationStats(1)]
    parts[0].step([0], [3], [3], [4], [3])
    parts[0].step([0], [3], [1], [2], [3])
    parts[0].step([0], [2], [2], [2], [2])
    parts[1].step([0], [5], [1], [2], [2])
    parts[1].step([0], [0], [0], [1], [0])
    for number, part in enumerate(parts):
        part.propose_seconds, part.target_seconds, part.verify_seconds = 0.25, 1.0 + number, 0.5
        part.time_to_first_token, part.total_seconds = 2.0 + number, 5.0
    merged = SpeculationStats.merge(parts)
    assert merged.counts == whole.counts
    assert (merged.batch_size, merged.steps) == (2, 5)
    assert (merged.propose_seconds, merged.target_seconds, merged.verify_seconds) == (0.5, 3.0, 1.0)
    assert (merged.time_to_first_token, merged.total_seconds) == (2.5, 10.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Make every byte a token, so that most characters below are torn apart."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def visible(page: str) -> list[str]:
    """Return the text of every row as a browser shows it."""
    return [html.unescape(re.sub("<[^>]+>", "", row)) for row in re.findall("<div style.*?</div>", page, re.DOTALL)]


@pytest.mark.parametrize("guessed", range(4))
def test_html_shows_the_whole_text(tokenizer: PreTrainedTokenizerFast, guessed: int) -> None:
    texts = ["a <b> & naïve  日本語 🙂🙂\n end", "x"]
    ids = [tokenizer(text).input_ids for text in texts]
    assert len(ids[0]) > len(texts[0])
    stats = SpeculationStats(2, tokenizer=tokenizer)
    stats.prefilled([row[0] for row in ids])
    for start in range(1, len(ids[0]), guessed + 1):
        block = ids[0][start : start + guessed + 1]
        held = min(guessed, len(block))
        stats.step([0], [guessed], [held], [len(block)], [guessed], tokens=[block])
    assert visible(stats._repr_html_()) == texts


def test_html_colours_accepted_guesses_only(tokenizer: PreTrainedTokenizerFast) -> None:
    stats = SpeculationStats(1)
    stats.prefilled(tokenizer("o").input_ids)
    stats.step([0], [3], [2], [3], [3], tokens=[tokenizer("<go").input_ids])
    assert "span" not in stats._repr_html_()
    assert stats.show(tokenizer) is stats
    assert re.findall("<div style[^>]*>(.*?)</div>", stats._repr_html_())[0].split("<span")[0] == "o"
    assert re.findall("<span[^>]*>(.*?)</span>", stats._repr_html_()) == ["accepted draft tokens", "&lt;g"]


def test_repr_names_the_figures() -> None:
    text = repr(example())
    assert text.startswith("SpeculationStats: 3 steps gave 11 tokens, batch of 2\n")
    for figure in ("2.20 tokens per step", "53.8% (7 of 13)", "1.00 0.50 0.50"):
        assert figure in text


def test_html_needs_no_font_of_equal_widths() -> None:
    """Names and figures are cells of a table; no column is made of spaces."""
    page = example()._repr_html_()
    cells = re.findall("<td[^>]*>(.*?)</td>", page)
    assert [html.unescape(cell) for cell in cells[:4]] == [
        "mean accepted length",
        "2.20 tokens per step and row",
        "acceptance rate",
        "53.8% (7 of 13)",
    ]
    assert "  " not in page
    assert "<pre" not in page


def test_a_step_is_counted_as_counts_of_one_step_are_added() -> None:
    one_by_one, added = Counts(), Counts()
    for proposed, accepted, depth in ((0, 0, 0), (3, 1, 3), (9, 2, 2), (1, 0, 1), (5, 5, 5)):
        one_by_one.add_step(proposed, accepted, accepted + 1, depth)
        accepted_at = [1] * accepted + [0] * (depth - accepted)
        lengths = [0] * (accepted + 1) + [1]
        added.add(Counts(1, proposed, accepted, accepted + 1, [1] * depth, accepted_at, lengths))
    one_by_one.add_plain_steps(2)
    added.add(Counts(2, emitted=2, lengths=[0, 2]))
    assert one_by_one == added and one_by_one.accepted_at == [3, 2, 1, 1, 1]
    assert one_by_one.lengths == [0, 4, 1, 1, 0, 0, 1]
