"""Greedy text with a speculator equals plain `generate`, token for token in float32, on every architecture.

{n-gram, vanilla} x {chain, tree} x {one row, three left-padded rows, eight ragged rows}: every pair of these on the
architectures that stand for others, and the whole product on all with ``-m slow``. (``test_alignment.py`` has all of
them each time, in one batch.) The vanilla draft is a noisy copy of the target, the n-gram draft looks into flawed
copies of the target's text: guesses are right for a while, and every row goes its own way.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from architectures import CORE, USUAL, build, names, prompts
from pairs import usual
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec import NgramSpeculator, SpeculationConfig, demo
from hf_spec.scoring import buffers
from hf_spec.scoring.architectures import keeps_own_states, why_unsupported
from hf_spec.scoring.cache import TreeKVCache
from hf_spec.scoring.kv_view import KVView
from hf_spec.scoring.layers import SlotLayer
from hf_spec.scoring.masks import TreeMask
from hf_spec.scoring.names import CACHE
from hf_spec.scoring.plain import new_cache, precision
from hf_spec.scoring.selfcheck import check_target

NEW_TOKENS = 24
# Prompts of 12 and 13 tokens are longer than the windows and chunks of 8; all are left-padded to the longest.
BATCHES = {1: (13,), 3: (13, 9, 5), 8: (13, 9, 5, 12, 3, 7, 13, 2)}
CHAIN = SpeculationConfig(num_speculative_tokens=4)
TREE = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8)
# ALiBi that counts slots cannot put two guesses at one distance.
NO_TREES = ("bloom", "falcon:alibi", "mpt")

# Plain `generate` itself writes other text for a padded row than for the row alone, which is what counts then.
MISREADS_PADDING = ("git",)


class Way(NamedTuple):
    name: str
    speculator: Any
    config: SpeculationConfig


def ways(model: PreTrainedModel, text: Tensor, seeds: Sequence[int]) -> Iterator[Way]:
    ngram = NgramSpeculator(corpus=flawed(text))
    yield Way("n-gram chain", ngram, CHAIN)
    yield Way("n-gram tree", ngram, TREE)
    if keeps_own_states(model) or why_unsupported(model, new_cache(model)):
        return  # no draft itself
    for seed in seeds:
        vanilla = noisy_copy(model, seed)
        yield Way("vanilla chain", vanilla, CHAIN)
        yield Way("vanilla tree", vanilla, TREE)


@torch.no_grad()
def noisy_copy(model: PreTrainedModel, seed: int, noise: float = 0.1) -> PreTrainedModel:
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
    inputs = prompts(batch, BATCHES[batch])
    if model.config.model_type in MISREADS_PADDING:
        rows = [ids[seen > 0][None] for ids, seen in zip(*inputs.values(), strict=True)]
        texts = [model.generate(row, max_new_tokens=NEW_TOKENS, do_sample=False)[0] for row in rows]
        return pad_sequence(texts, batch_first=True, padding_side="left")
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)


def speculative(model: PreTrainedModel, batch: int, way: Way, **changes: Any) -> Any:
    return model.generate(
        **prompts(batch, BATCHES[batch]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        speculator=way.speculator,
        speculation_config=way.config.merge(**changes),
        return_dict_in_generate=True,
    )


def mistakes(
    model: PreTrainedModel,
    batches: Sequence[int],
    kinds: str = "chain tree",
    seeds: Sequence[int] = (0,),
    turn: int | None = None,
    **changes: Any,
) -> list[str]:
    """Name the ways and batches whose text is not plain `generate`'s, and the ways whose guesses were no test.

    With a ``turn`` each way is tried in one of the batches, the next way in the next one, and in further batches until
    guesses were accepted and rejected.
    """
    texts = {batch: plain(model, batch) for batch in batches}
    found = []
    for place, way in enumerate(ways(model, texts[batches[-1]], seeds)):
        if way.name.split()[-1] not in kinds:
            continue
        accepted = proposed = 0
        first = 0 if turn is None else (turn + place) % len(batches)
        for batch in (*batches[first:], *batches[:first]):
            text = texts[batch]
            out = speculative(model, batch, way, **changes)
            accepted += out.speculation.counts.accepted
            proposed += out.speculation.counts.proposed
            if not torch.equal(out.sequences, text):
                found.append(f"{way.name}, batch {batch}")
            if turn is not None and 0 < accepted < proposed:
                break
        if not 0 < accepted < proposed:
            found.append(f"{way.name}: {accepted} of {proposed} guesses accepted")
    return found


@pytest.mark.parametrize("name", usual(CORE, USUAL))
def test_same_text_as_plain_generate(name: str) -> None:
    model, turn = build(name), CORE.index(name)
    kinds = "chain" if name in NO_TREES else "chain tree"
    assert mistakes(model, list(BATCHES), kinds, turn=turn) == []
    if model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        assert mistakes(model, [3], kinds if name in NO_TREES else kinds.split()[turn % 2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_same_text_in_every_way_and_batch(name: str) -> None:
    model = build(name)
    kinds = "chain" if name in NO_TREES else "chain tree"
    assert mistakes(model, list(BATCHES), kinds) == []
    if model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        assert mistakes(model, [3], kinds) == []


@pytest.mark.parametrize("name", NO_TREES)
def test_trees_are_refused_where_distance_is_counted_in_slots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    tree = Way("tree", NgramSpeculator(), TREE)
    with pytest.raises(ValueError, match=r"in slots, .*; use a chain \(tree=None\)"):
        speculative(model, 1, tree)
    monkeypatch.setattr("hf_spec.decode.refusals.why_no_trees", lambda model: None)
    with pytest.raises(ValueError, match=r"scores a tree .*; use a chain \(tree=None\)"):
        speculative(model, 1, tree)
    assert "vanilla tree, batch 8" in mistakes(model, [8], "tree", self_check=False)


TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"


def documented() -> dict[str, tuple[str, str]]:
    """Read what the documentation says of chains and trees on each decoder-only architecture."""
    text = TABLE.read_text().partition("## Encoder-decoders")[0]
    rows = re.findall(r"^\| `(.+?)` \| ([\w ]+) \| ([\w ]+) \|$", text, re.MULTILINE)
    return {name: (chain, tree) for name, chain, tree in rows}


def verdict(name: str, kind: str, batches: Sequence[int] = (3,), seeds: Sequence[int] = (0,)) -> str:
    """Say whether "chain" or "tree" is "exact", "refused", or exact for "one row"; never anything else."""
    model = build(name)
    try:
        wrong = mistakes(model, batches, kind, seeds)
    except ValueError as refusal:
        if "one row at a time" in str(refusal):
            return "one row" if verdict(name, kind, (1,), seeds) == "exact" else "refused"
        if not re.search(r"[Gg]enerate without `speculator`|use a chain", str(refusal)):
            raise
        return "refused"
    assert wrong == []
    return "exact"


def test_documentation_knows_every_architecture() -> None:
    """The table is of the newest version of transformers: an older one lacks some."""
    assert not set(names("all")) - set(documented())
    assert set(documented()) == set(names("all")) or CACHE == "past_key_values"


@pytest.mark.slow
@pytest.mark.parametrize("name", names("all"))
def test_documentation_is_right(name: str) -> None:
    assert (verdict(name, "chain"), verdict(name, "tree")) == documented()[name]


# Each of these must show in the text, and in the logits that the self-check compares.


def positions_shifted(patch: pytest.MonkeyPatch) -> None:
    positions = KVView.positions
    patch.setattr(KVView, "positions", lambda self, first, block: positions(self, first, block) + 1)


def siblings_visible(patch: pytest.MonkeyPatch) -> None:
    def visible(block: TreeMask) -> Tensor:
        used = torch.arange(block.width) < block.lengths[:, None] + block.draft_nodes + block.count
        seen = used[:, None].repeat(1, block.count, 1)
        if block.padding is not None:
            seen[:, :, : block.padding.shape[1]] &= block.padding[:, None]
        return seen

    patch.setattr(TreeMask, "visible", property(visible))


def path_not_moved(patch: pytest.MonkeyPatch) -> None:
    commit = TreeKVCache.commit
    patch.setattr(
        TreeKVCache, "commit", lambda self, path, counts, in_place, device: commit(self, path, counts, True, device)
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("mistake", [positions_shifted, siblings_visible, path_not_moved])
def test_planted_mistakes_are_caught(name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    mistake(monkeypatch)
    with pytest.raises(ValueError, match="differently from single steps"):
        check_target(model, trees=True)
    assert "vanilla tree, batch 8" in mistakes(model, [8], "tree", self_check=False)


@pytest.mark.parametrize("alike", ["one word", "no spread"])
def test_a_target_whose_words_are_all_alike_is_trusted(alike: str) -> None:
    model = build("llama", vocab_size=1) if alike == "one word" else build("llama")
    model.get_output_embeddings().weight.data.zero_()
    check_target(model, trees=True)


def test_an_error_of_a_compiler_is_told_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("g++ failed\n" + "int x;\n" * 100)

    model = build("llama")
    model.config._attn_implementation = "flex_attention"
    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(ValueError, match=r"\(RuntimeError: g\+\+ failed\); .* attn_implementation='sdpa'") as caught:
        check_target(model, trees=False)
    assert len(str(caught.value)) < 300


def test_a_target_is_measured_by_what_autocast_lets_it_compute_in() -> None:
    """And once more by its own precision."""
    model = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    mistaken = model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: logits * (1.02 if logits.shape[1] > 1 else 1)
    )
    with torch.autocast("cpu", torch.bfloat16):
        check_target(model, trees=True)
    with pytest.raises(ValueError, match="differently from single steps"):
        check_target(model, trees=True)
    mistaken.remove()
    check_target(model, trees=True)


def test_autocast_inside_of_a_forward_counts_as_one_around_it() -> None:
    """As accelerate puts it there, and so every Trainer with ``bf16=True``."""
    model = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    assert precision(model) == torch.float32
    forward = torch.autocast("cpu", torch.bfloat16)(type(model).forward)
    model.forward = MethodType(convert_outputs_to_fp32(forward), model)
    assert precision(model) == torch.bfloat16
    mistaken = model.get_output_embeddings().register_forward_hook(
        lambda module, args, logits: logits * (1.02 if logits.shape[1] > 1 else 1)
    )
    check_target(model, trees=True)
    mistaken.remove()
    for other in (torch.autocast("cuda", torch.float16), torch.autocast("cpu", torch.bfloat16, enabled=False)):
        model.forward = MethodType(other(type(model).forward), model)
        assert precision(model) == torch.float32
    assert precision(model.to(torch.bfloat16)) == torch.bfloat16


@pytest.mark.parametrize("way", ["compile", "forward"])
def test_a_model_that_was_compiled_as_one_graph_is_told_of(way: str) -> None:
    model = build("llama")
    if way == "compile":
        model.compile(backend="eager", fullgraph=True)
    else:
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"cannot score a chain .*, or without torch\.compile as one graph"):
        check_target(model, trees=False)


@pytest.mark.parametrize("small", [0, 1600, 1 << 30], ids=["never", "for a while", "always"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v2"])
def test_small_buffers_are_copied_and_large_ones_written_in_place(
    name: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one length see the same columns either way, and where the one follows the other."""
    copied: list[int] = []  # bytes
    update = SlotLayer.update

    def watch(layer: SlotLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before, end = layer.buffers["keys"].data, layer.rows.longest + layer.rows.draft_nodes - layer.first
        keys, values = update(layer, *args, **kwargs)
        if keys is layer.buffers["keys"].data and before is not None:
            copied.append(before.nbytes * end // before.shape[2])
        return keys, values

    monkeypatch.setattr(SlotLayer, "update", watch)
    monkeypatch.setattr(buffers, "SMALL_BUFFER", small)
    assert mistakes(build(name), (1, 3), turn=small % 3) == []
    assert bool(copied) == bool(small)
    assert max(copied, default=0) <= small
    assert small != 1600 or max(copied) > 1000  # a whole text takes more than 2,400


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_columns_beyond_a_window_are_hidden_where_the_models_own_mask_shows_them(config: SpeculationConfig) -> None:
    """Moshi's layers keep a window, but its mask is a causal one: columns kept for other rows must not be seen."""
    model = build("moshi")
    text = plain(model, 3)
    out = speculative(model, 3, Way("n-gram", NgramSpeculator(corpus=flawed(text)), config))
    assert torch.equal(getattr(out, "sequences", out), text)


if __name__ == "__main__":  # python tests/decode/test_exactness.py [names]: print the table of docs/architectures.md
    torch.set_num_threads(1)
    print("| architecture | chain | tree |\n| --- | --- | --- |")
    for name in sys.argv[1:] or names("all"):
        both = [verdict(name, kind, batches=(3, 8), seeds=(0, 1, 2)) for kind in ("chain", "tree")]
        print(f"| `{name}` | {' | '.join(both)} |", flush=True)
