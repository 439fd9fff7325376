"""Greedy text with a speculator equals plain `generate`, token for token in float32, on every architecture.

{n-gram, vanilla} x {chain, tree} x {one row, three left-padded rows, eight ragged rows}. The vanilla draft is a noisy
copy of the target, the n-gram draft looks into flawed copies of the target's text: guesses are right for a while, and
every row goes its own way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from architectures import CORE, build, prompts
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import NgramSpeculator, SpeculationConfig
from hf_spec.cache import SlotCache
from hf_spec.selfcheck import check_target
from hf_spec.slots import Block, Slots

NEW_TOKENS = 24
# Prompts of 12 and 13 tokens are longer than the windows and chunks of 8; all are left-padded to the longest.
BATCHES = {1: (13,), 3: (13, 9, 5), 8: (13, 9, 5, 12, 3, 7, 13, 2)}
CHAIN = SpeculationConfig(num_speculative_tokens=4)
TREE = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_top_k=2, tree_nodes=8)
# ALiBi that counts slots cannot put two guesses at one distance.
NO_TREES = ("bloom", "falcon:alibi", "mpt")


class Way(NamedTuple):
    name: str
    speculator: Any
    config: SpeculationConfig


def ways(model: PreTrainedModel, text: Tensor, seed: int = 0) -> Iterator[Way]:
    ngram, vanilla = NgramSpeculator(corpus=flawed(text)), noisy_copy(model, seed)
    yield Way("n-gram chain", ngram, CHAIN)
    yield Way("vanilla chain", vanilla, CHAIN)
    yield Way("n-gram tree", ngram, TREE)
    yield Way("vanilla tree", vanilla, TREE)


@torch.no_grad()
def noisy_copy(model: PreTrainedModel, seed: int = 0, noise: float = 0.1) -> PreTrainedModel:
    """Copy a model and shake its weights a little."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        if weight.is_floating_point() and weight.numel() > 1:
            weight += torch.randn(weight.shape, generator=generator) * weight.std() * noise
    return draft


def flawed(text: Tensor) -> list[list[int]]:
    """Give every row of `text` (batch, length) twice, with a wrong token at every fifth place."""
    copies = []
    for first in (1, 3):
        one = text.clone()
        one[:, first::5] = (one[:, first::5] + 1) % text.max()
        copies += one.tolist()
    return copies


def plain(model: PreTrainedModel, batch: int) -> Tensor:
    return model.generate(**prompts(batch, BATCHES[batch]), max_new_tokens=NEW_TOKENS, do_sample=False)


def speculative(model: PreTrainedModel, batch: int, way: Way, **changes: Any) -> Any:
    return model.generate(
        **prompts(batch, BATCHES[batch]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        speculator=way.speculator,
        speculation_config=way.config.merge(**changes),
        return_dict_in_generate=True,
    )


def mistakes(model: PreTrainedModel, batches: list[int], kinds: str = "chain tree", **changes: Any) -> list[str]:
    """Name the ways and batches whose text is not plain `generate`'s, and the ways whose guesses were no test."""
    texts = {batch: plain(model, batch) for batch in batches}
    found = []
    for way in ways(model, texts[batches[-1]]):
        if way.name.split()[-1] not in kinds:
            continue
        accepted = proposed = 0
        for batch, text in texts.items():
            out = speculative(model, batch, way, **changes)
            accepted += out.speculation.counts.accepted
            proposed += out.speculation.counts.proposed
            if not torch.equal(out.sequences, text):
                found.append(f"{way.name}, batch {batch}")
        if not 0 < accepted < proposed:
            found.append(f"{way.name}: {accepted} of {proposed} guesses accepted")
    return found


@pytest.mark.parametrize("name", CORE)
def test_same_text_as_plain_generate(name: str) -> None:
    model = build(name)
    kinds = "chain" if name in NO_TREES else "chain tree"
    assert mistakes(model, list(BATCHES), kinds) == []
    if model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        assert mistakes(model, [3], kinds) == []


@pytest.mark.parametrize("name", NO_TREES)
def test_trees_are_refused_where_positions_are_slots(name: str) -> None:
    model = build(name)
    tree = Way("tree", NgramSpeculator(), TREE)
    with pytest.raises(ValueError, match=r"scores a tree .* use a chain \(tree=None\)"):
        speculative(model, 1, tree)
    assert "vanilla tree, batch 8" in mistakes(model, [8], "tree", self_check=False)


# Each of these must show in the text, and in the logits that the self-check compares.


def positions_shifted(patch: pytest.MonkeyPatch) -> None:
    advance = Slots.advance
    patch.setattr(Slots, "advance", lambda self, block: advance(self, block) + 1)


def siblings_visible(patch: pytest.MonkeyPatch) -> None:
    def visible(block: Block) -> Tensor:
        used = torch.arange(block.width) < block.lengths[:, None] + block.open + block.count
        seen = used[:, None].repeat(1, block.count, 1)
        if block.padding is not None:
            seen[:, :, : block.padding.shape[1]] &= block.padding[:, None]
        return seen

    patch.setattr(Block, "visible", property(visible))


def path_not_moved(patch: pytest.MonkeyPatch) -> None:
    commit = SlotCache.commit
    patch.setattr(SlotCache, "commit", lambda self, path, counts, in_place=False: commit(self, path, counts, True))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("mistake", [positions_shifted, siblings_visible, path_not_moved])
def test_planted_mistakes_are_caught(name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    mistake(monkeypatch)
    with pytest.raises(ValueError, match="differently from single steps"):
        check_target(model, trees=True)
    assert "vanilla tree, batch 8" in mistakes(model, [8], "tree", self_check=False)
