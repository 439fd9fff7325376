"""Rows of unequal length attend to their own columns, and see the same as when all attend to the longest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build, prompts
from lengths import force_lengths
from torch import Tensor
from twins import CHAIN, TREE, Oracle, draft, target

from hf_spec import SpeculationConfig
from hf_spec.scoring import attention, row_spans
from hf_spec.scoring.attention import Span
from hf_spec.scoring.cache import TreeKVCache
from hf_spec.scoring.row_spans import RowSpans
from hf_spec.scoring.runner import ModelRunner

LENGTHS = (40, 9, 5, 12, 3, 7, 31, 1)
MODELS = ["llama", "gpt2", "gemma3_text", "gpt_oss", "deepseek_v2", "bloom", "opt", "llama4_text", "gemma4_text"]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Span]]]:
    """Let a further call of attention cost nothing, and list the nodes and spans of each layer."""
    seen: list[tuple[int, list[Span]]] = []
    usual = attention._in_spans

    def noted(query: Tensor, *args: Any) -> Tensor:
        seen.append((query.shape[2], list(args[4])))
        return usual(query, *args)

    monkeypatch.setattr(row_spans, "CALL_NUMBERS", 1)
    monkeypatch.setattr(attention, "_in_spans", noted)
    return seen


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all rows attend at once: the slow twin."""
    monkeypatch.setattr(row_spans, "CALL_NUMBERS", 1 << 40)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, marks=() if name == "llama" or i % 2 == number else pytest.mark.slow)
        for i, name in enumerate(MODELS)
        for number, config in enumerate([CHAIN, TREE])
    ],
)
def test_text_is_the_same(name: str, config: Any, attended: list[Any]) -> None:
    if name == "bloom" and config is TREE:
        config = CHAIN  # it takes no trees
    model, given = build(name), prompts(8, LENGTHS)
    options = {"max_new_tokens": 14, "do_sample": False}
    plain = model.generate(**given, **options)
    for _ in range(2):
        text = model.generate(**given, **options, speculator=Oracle(plain), speculation_config=config)
        assert torch.equal(text, plain)
    assert bool(attended) == (name not in ("gpt_oss", "bloom"))  # eager attention, and a bias for each head


def test_rows_are_divided_once_for_each_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model reads one, two, three ... tokens in turns."""
    divided, usual = [], RowSpans._divided

    def noted(self: RowSpans, extents: Any, count: int) -> Any:
        divided.append((id(self), count))
        return usual(self, extents, count)

    monkeypatch.setattr(RowSpans, "_divided", noted)
    options: Any = {"max_new_tokens": 16, "do_sample": False, "speculator": draft(), "speculation_config": CHAIN}
    output = target().generate(**prompts(2, (9, 5)), **options, return_dict_in_generate=True)
    assert output.speculation.steps > 4 and 1 < len(divided) == len(set(divided))


@pytest.mark.parametrize("rows", [3, 8])
def test_plain_steps_in_spans(rows: int, attended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After draft tokens rows are of unequal length; then plain steps follow, and rows are aligned."""
    model, given = target(), prompts(rows, LENGTHS)
    plain = model.generate(**given, max_new_tokens=24, do_sample=False)
    depths = iter([0, 3, 0, 0, 0, 2, 0, 0, 0, 0] * 9)
    force_lengths(monkeypatch, lambda rows: next(depths))
    text = model.generate(**given, max_new_tokens=24, do_sample=False, speculator=draft())
    assert torch.equal(text, plain)
    assert {nodes for nodes, _ in attended} >= {1, 3, 4}
    assert all(end - row == 1 for nodes, spans in attended[:1] for row, end, *_ in spans)


def test_sampled_text_and_scores(attended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = target(), []
    for _ in range(2):
        torch.manual_seed(3)
        options = {"speculation_config": CHAIN, "max_new_tokens": 16, "do_sample": True, "output_scores": True}
        options |= {"return_dict_in_generate": True, "speculator": draft()}
        found.append(model.generate(**prompts(8, LENGTHS), **options))
        calls = len(attended)
        at_once(monkeypatch)
    assert calls == len(attended) > 0
    assert torch.equal(found[0].sequences, found[1].sequences)
    for ours, twin in zip(found[0].scores, found[1].scores, strict=True):
        torch.testing.assert_close(ours, twin, atol=1e-4, rtol=1e-4)
    for ours, twin in zip(found[0].past_key_values.layers, found[1].past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, twin.keys, atol=1e-4, rtol=1e-4)


def test_a_node_that_is_read_alone_sees_no_sibling(attended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second level one node alone has a child."""
    config = SpeculationConfig(tree=[(0,), (1,), (0, 0), (1, 0), (1, 0, 0), (1, 0, 0, 0)])
    model, small = target(), draft()
    logits: list[list[Tensor]] = [[], []]
    options = {"max_new_tokens": 12, "do_sample": False, "speculator": small, "speculation_config": config}
    for seen in logits:
        hook = small.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.logits.clone()))
        model.generate(**prompts(3, (40, 9, 5)), **options)
        hook.remove()
        at_once(monkeypatch)
    assert attended and any(one.shape[1] == 1 for one in logits[0])
    for ours, twin in zip(*logits, strict=True):
        torch.testing.assert_close(ours, twin, atol=1e-4, rtol=1e-4)


def test_columns_of_other_rows_are_missed(attended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a span that is too short changes the scores."""
    spans, given = RowSpans.of, prompts(3, LENGTHS)
    monkeypatch.setattr(RowSpans, "of", lambda *args: [one._replace(first=one.first + 1) for one in spans(*args)])
    logits = []
    for _ in range(2):
        runner = ModelRunner(target())
        with torch.no_grad():
            runner.prefill_tokens(given["input_ids"], given["attention_mask"])
            logits.append(runner.extend(prompts(3, (4,), seed=2)["input_ids"]).logits)
        at_once(monkeypatch)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def cache_of(lengths: list[int], heads: int = 4, width: int = 64) -> TreeKVCache:
    runner = ModelRunner(target())
    given = prompts(len(lengths), (max(lengths),))
    with torch.no_grad():
        runner.prefill_tokens(given["input_ids"], given["attention_mask"])
    cache: TreeKVCache = runner.slots.cache
    cache.layers[0].buffers["keys"].data = torch.empty(len(lengths), heads, max(lengths), width)
    cache.rows.set(torch.tensor(lengths), lengths)
    return cache


def test_rows_attend_alone_where_that_costs_less() -> None:
    assert not RowSpans(cache_of([50]), None).of(1)
    assert not RowSpans(cache_of([50, 50]), None).of(1)
    assert not RowSpans(cache_of([50, 40, 45]), None).of(1)  # a call costs more
    spans = RowSpans(cache_of([50, 40, 900, 880]), None).of(5)
    assert spans == [Span(0, 2, 0, 55), Span(2, 4, 0, 905)]
    assert len(RowSpans(cache_of([900, 200]), None).of(1)) == 2
    assert not RowSpans(cache_of([900, 700]), None).of(1)
    assert len(RowSpans(cache_of([900, 700]), None).of(24)) == 2  # of more nodes there is more to save


def test_padding_in_the_middle_is_left_to_masks(attended: list[Any]) -> None:
    model, given = target(), prompts(3, LENGTHS)
    given["attention_mask"][0, 20:22] = 0
    plain = model.generate(**given, max_new_tokens=10, do_sample=False)
    text = model.generate(**given, max_new_tokens=10, do_sample=False, speculator=Oracle(plain))
    assert torch.equal(text, plain)
    assert not attended


def test_lengths_decide_again_when_rows_leave_or_are_aligned() -> None:
    cache, padding = cache_of([50, 40, 900, 880]), torch.ones(4, 30, dtype=torch.bool)
    padding[1, :10] = False
    spans = RowSpans(cache, padding)
    assert spans.of(1)[0] == Span(0, 2, 0, 51)
    cache.keep_rows(torch.tensor([1, 2]))
    assert spans.of(1) == [Span(0, 1, 10, 41), Span(1, 2, 0, 901)]
    spans.align()
    cache.rows.set(None, [900, 900])
    assert spans.of(1) == [Span(0, 1, 870, 901), Span(1, 2, 0, 901)]
