"""Prompts of unequal length, read in groups: the same text, scores and cache as when all are padded."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import CORE, build, prompts
from torch import Tensor, nn
from transformers import DynamicCache
from twins import CHAIN, TREE, Oracle, draft, target

from hf_spec.scoring import groups, runner
from hf_spec.scoring.parts import Extent, cheapest_parts

LENGTHS = (40, 9, 5, 12, 3, 7, 31, 1)
AS_EVER = ("bart", "deepseek_v32")  # an encoder's states, and an indexer's keys, are not put together from groups
CHAINS_ONLY = ("bloom", "falcon:alibi", "mpt")
USUAL = """llama gpt2 opt mistral gemma2 gpt_oss llama4_text deepseek_v3 bloom mpt xglm gemma4_text bart
    vl:qwen2_vl""".split()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let further forwards cost nothing, and list the groups of each prompt: how many rows each has."""
    seen: list[list[int]] = []
    divide = runner.groups_of

    def noted(*args: Any) -> list[groups.Group]:
        found = divide(*args)
        if len(args[1]) > 2:  # not the self-check's
            seen.append([len(group.rows) for group in found])
        return found

    monkeypatch.setattr(groups, "FORWARD_PLACES", 1)
    monkeypatch.setattr(runner, "groups_of", noted)
    return seen


def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read prompts as ever: the slow twin."""
    monkeypatch.setattr(groups, "FORWARD_PLACES", 1 << 20)


def compositions(count: int) -> Iterator[list[range]]:
    for cuts in itertools.product([False, True], repeat=count - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield [range(*pair) for pair in itertools.pairwise(at)]


def test_the_cheapest_parts_are_those_of_all_that_there_are() -> None:
    random.seed(0)
    for count, fixed in itertools.product(range(1, 8), (0, 3, 20, 1000)):
        firsts = [random.randrange(30) for _ in range(count)]
        rows = [Extent(first, first + random.randrange(1, 30)) for first in firsts]

        def cost(parts: list[range], rows: list[Extent] = rows, fixed: int = fixed) -> int:
            widths = [max(rows[i].end for i in part) - min(rows[i].first for i in part) for part in parts]
            return sum(len(part) * width + fixed for part, width in zip(parts, widths, strict=True))

        assert cost(cheapest_parts(rows, fixed)) == min(map(cost, compositions(count)))
    assert cheapest_parts([Extent(0, 9)] * 20_000, 0) == [range(20_000)]  # at once, though divisions are many
    assert cheapest_parts([], 3) == []


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(name, batch, marks=() if name in USUAL and batch == 3 + 5 * (i % 2) else pytest.mark.slow)
        for i, name in enumerate(CORE)
        for batch in (3, 8)
    ],
)
def test_text_is_the_same(name: str, batch: int, read: list[list[int]]) -> None:
    model, given = build(name), prompts(batch, LENGTHS)
    options = {"max_new_tokens": 10, "do_sample": False}
    plain = model.generate(**given, **options)
    config = TREE if batch == 3 and name not in CHAINS_ONLY else CHAIN  # a chain is read together with the prompt
    for _ in range(2):
        text = model.generate(**given, **options, speculator=Oracle(plain), speculation_config=config)
        assert torch.equal(text, plain)
    assert any(len(sizes) > 1 for sizes in read) == (name not in AS_EVER)


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_what_is_returned_is_the_same(config: Any, read: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = target("gemma2"), prompts(8, LENGTHS)
    options = {"max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    plain = model.generate(**given, **options)
    ours = [model.generate(**given, **options, speculator=draft("gemma2"), speculation_config=config)]
    assert max(map(len, read)) > 1
    padded(monkeypatch)
    ours.append(model.generate(**given, **options, speculator=draft("gemma2"), speculation_config=config))
    assert read[-1] == []
    for out in ours:
        assert torch.equal(out.sequences, plain.sequences)
        for found, wanted in zip(out.scores, plain.scores, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        for found, wanted in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
            assert found.keys.shape == wanted.keys.shape and found.get_seq_length() == wanted.get_seq_length()
            seen = torch.nn.functional.pad(given["attention_mask"], (0, 9), value=1)[:, -wanted.keys.shape[2] :].bool()
            for one, other in ((found.keys, wanted.keys), (found.values, wanted.values)):
                torch.testing.assert_close(
                    one.transpose(1, 2)[seen], other.transpose(1, 2)[seen], atol=1e-4, rtol=1e-4
                )


def test_sampled_text_is_that_of_the_padded_prompts(read: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = target(), []
    for _ in range(2):
        torch.manual_seed(5)
        options = {"speculator": draft(), "speculation_config": CHAIN, "max_new_tokens": 16, "do_sample": True}
        texts.append(model.generate(**prompts(8, LENGTHS), **options))
        padded(monkeypatch)
    assert torch.equal(*texts)
    assert max(map(len, read)) > 1 and read[-1] == []


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bloom"])
def test_features_and_caches_are_put_together(
    name: str, read: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build(name), prompts(8, LENGTHS)
    results = []
    for _ in range(2):
        one = runner.ModelRunner(model, feature_layers=(0, 1))
        with torch.no_grad():
            scores = one.prefill_tokens(given["input_ids"], given["attention_mask"])
            after = one.extend(prompts(8, (4,), seed=2)["input_ids"])
        assert scores is not None and scores.features is not None and after.features is not None
        mask = given["attention_mask"].bool()
        results.append([scores.logits, scores.features[mask], after.logits, after.features])
        padded(monkeypatch)
    assert len(read[0]) > 1 and read[1] == []
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [3, 16])
def test_prompts_in_groups_and_chunks(size: int, read: list[list[int]]) -> None:
    model, given = target(), prompts(8, LENGTHS)
    plain = model.generate(**given, max_new_tokens=8, do_sample=False)
    options = {"max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": size}
    for speculator in ("ngram", draft()):
        assert torch.equal(model.generate(**given, **options, speculator=speculator, speculation_config=CHAIN), plain)
    assert max(map(len, read)) > 1


def refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    given = prompts(3, LENGTHS)
    held = DynamicCache(config=model.config)
    before = {name: value[:, :1] for name, value in given.items()}
    model(**before, past_key_values=held)
    return {
        "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
        "a static cache": {"cache_implementation": "static"},
        "a cache with text": {"past_key_values": held},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(given["input_ids"])},
    }


@pytest.mark.parametrize("case", ["hidden states", "a static cache", "a cache with text", "embeddings"])
def test_what_is_read_as_ever(case: str, read: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    with torch.no_grad():
        options = refused(model, monkeypatch)[case] | {"max_new_tokens": 6, "do_sample": False}
    if "past_key_values" in options:
        twin = refused(model, monkeypatch)[case]["past_key_values"]
        plain = model.generate(**prompts(3, LENGTHS), **options | {"past_key_values": twin})
    else:
        plain = model.generate(**prompts(3, LENGTHS), **options)
    found = model.generate(**prompts(3, LENGTHS), **options, speculator="ngram", num_speculative_tokens=3)
    assert torch.equal(getattr(found, "sequences", found), getattr(plain, "sequences", plain))
    assert not any(read)
    if case == "hidden states":  # those of the padding, too
        for ours, theirs in zip(found.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-4, rtol=1e-4)


def test_hooks_of_others_see_the_padded_prompt(read: list[list[int]]) -> None:
    model, shapes = build("llama"), []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: shapes.append(args[0].shape[:2]))
    model.generate(**prompts(3, LENGTHS), speculator="ngram", max_new_tokens=4)
    handle.remove()
    assert (3, 40) in shapes and not any(read)


def test_a_model_that_reads_padding_is_read_padded(read: list[list[int]]) -> None:
    assert not groups.reads_rows_alone(build("git"))  # the negative control
    assert groups.reads_rows_alone(build("llama"))
    model, given = build("git"), prompts(8, LENGTHS)
    model.generate(**given, speculator="ngram", num_speculative_tokens=3, max_new_tokens=4)
    assert read and not any(read)


def test_places_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a forward costs: one group for prompts of similar length, and several for others."""
    model, read = target(), []
    plain = type(model).forward

    @functools.wraps(plain)
    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(tuple(input_ids.shape))
        return plain(self, input_ids, *args, **kwargs)

    def shapes(*lengths: int) -> list[tuple[int, ...]]:
        model.generate(
            **prompts(len(lengths), lengths), max_new_tokens=1, speculator=Oracle(torch.zeros(9, 300).long())
        )
        return read

    monkeypatch.setattr(type(model), "forward", noted)
    shapes(100, 40, 1)  # checks itself
    read.clear()
    assert shapes(13, 9, 5, 1) == [(4, 13)]
    read.clear()
    assert shapes(120, 9, 5, 12, 100) == [(2, 120), (3, 12)]
    read.clear()
    assert shapes(64, 64, 64) == [(3, 64)]
