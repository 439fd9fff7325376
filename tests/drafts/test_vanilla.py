"""The vanilla drafter with its cache, against the same draft asked anew for every guess."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import each_value
from torch import Tensor
from transformers import PreTrainedModel
from twins import SHAPES, draft, target

from hf_spec import AcceptedTokens, DraftContext, Proposal, SpeculationConfig, VanillaSpeculator
from hf_spec.drafts.vanilla import speculator
from hf_spec.drafts.vanilla.speculator import VanillaDrafter
from hf_spec.scoring.plain import position_limit

LENGTHS = (13, 9, 5)


def distribution_behind(draft: PreTrainedModel, text: Tensor, mask: Tensor) -> Tensor:
    """The draft's log-probabilities behind a row of text (length,), without any cache."""
    padded = torch.nn.functional.pad(mask, (0, len(text) - len(mask)), value=1)[None]
    positions = (padded.cumsum(1) - 1).clamp(min=0)
    logits = draft(input_ids=text[None], attention_mask=padded, position_ids=positions, use_cache=False).logits
    return logits[0, -1].float().log_softmax(-1)


def start(
    draft: PreTrainedModel, config: SpeculationConfig, sample: bool = False
) -> tuple[VanillaDrafter, dict[str, Tensor]]:
    prompt = prompts(3, lengths=LENGTHS)
    request = DraftContext(
        target=draft,
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        features=None,
        config=config,
        log_probs=lambda logits: logits.float().log_softmax(-1),
        sample=sample,
    )
    return VanillaSpeculator(draft).drafter(request), prompt


def some_news(proposal: Proposal | None, generator: torch.Generator) -> AcceptedTokens:
    """What a target might make of a proposal: a random number of its guesses, then a random token."""
    tokens, counts = torch.randint(3, 99, (3, 7), generator=generator), torch.ones(3, dtype=torch.long)
    for row in range(3):
        node, length = 0, 0
        while proposal is not None and torch.rand((), generator=generator) < 0.8:
            children = (proposal.parents[row] == node).nonzero()[:, 0].tolist()
            if not children:
                break
            node = children[int(torch.randint(len(children), (), generator=generator))]
            tokens[row, length] = proposal.tokens[row, node]
            length += 1
        # The text may also end with a guess: what follows it was left out, such as what stands after an end.
        counts[row] = length + int(length == 0 or torch.rand((), generator=generator) < 0.7)
    return AcceptedTokens(tokens[:, : int(counts.max())], counts)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "bloom", "mamba", "qwen3_next"])
@pytest.mark.parametrize("amounts", [[40, 23, 31], [40, 40, 40]])
def test_what_many_ordinary_steps_wrote_is_read_without_logits_of_all(
    name: str, amounts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = build(name)
    words, found = [], []
    head = draft.get_output_embeddings().register_forward_hook(lambda module, args, out: words.append(out.shape[1]))
    tokens = torch.randint(3, 99, (3, 40), generator=torch.Generator().manual_seed(0))
    for many in (speculator.LAST_LOGITS_FROM, 99):
        monkeypatch.setattr(speculator, "LAST_LOGITS_FROM", many)
        drafter, _ = start(draft, SpeculationConfig(num_speculative_tokens=4))
        words.clear()
        news = AcceptedTokens(tokens, torch.tensor(amounts), None, amounts)
        found.append(drafter.propose(news, 4).tokens)
        assert max(words) == (len({*amounts}) if many < 40 else 40)
        one_more = AcceptedTokens(tokens[:, :1], torch.ones(3, dtype=torch.long), None, [1] * 3)
        found.append(drafter.propose(one_more, 4).tokens)
    head.remove()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize(("length", "tree"), each_value([2, 5], [[(0,), (0, 0)], "dynamic"]))
def test_slots_end_where_the_text_does(length: int, tree: Any) -> None:
    """What became text is longer than the small forests here, in front of the end of a buffer of 256 slots."""
    model = build("llama", max_position_embeddings=1024)
    ids = torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(length))
    options = {"max_new_tokens": 270, "do_sample": False, "eos_token_id": None}
    config = SpeculationConfig(tree=tree, num_speculative_tokens=2, tree_topk=1, num_tree_tokens=2)
    out = model.generate(ids, speculator=copy.deepcopy(model), speculation_config=config, **options)
    assert torch.equal(out, model.generate(ids, **options))


@torch.no_grad()
def test_more_may_have_become_text_than_was_guessed() -> None:
    draft, tokens = build("llama"), torch.arange(20, 60)[None]
    config = SpeculationConfig(tree=[(0,), (1,)])
    found = []
    for guesses in (True, False):
        drafter, _ = start(draft, config)
        if guesses:  # a forest of two nodes, of which the news know nothing
            drafter.propose(
                AcceptedTokens(tokens[:, :1].expand(3, 1), torch.ones(3, dtype=torch.long), None, [1] * 3), 1
            )
        else:
            drafter.propose(
                AcceptedTokens(tokens[:, :1].expand(3, 1), torch.ones(3, dtype=torch.long), None, [1] * 3), 0
            )
        amounts = [30, 9, 2]
        found.append(
            drafter.propose(
                AcceptedTokens(tokens[:, 1:].expand(3, -1), torch.tensor(amounts), None, amounts), 1
            ).tokens
        )
    assert torch.equal(*found)


@torch.no_grad()
@pytest.mark.parametrize(
    ("tree", "name"),
    each_value([None, "dynamic", [(0,), (1,), (0, 0), (1, 0), (0, 0, 1)]], ["llama", "gpt2", "gemma3_text"]),
)
def test_a_cached_drafter_guesses_like_an_uncached_one(name: str, tree: Any) -> None:
    draft = build(name)
    config = SpeculationConfig(tree=tree, tree_topk=3, num_tree_tokens=9)
    drafter, prompt = start(draft, config)
    texts = list(prompt["input_ids"])
    generator = torch.Generator().manual_seed(1)
    proposal, accepted = None, 0
    for _ in range(4):
        news = some_news(proposal, generator)
        accepted += int(news.counts.sum()) - 3
        texts = [torch.cat([text, news.tokens[row, : news.counts[row]]]) for row, text in enumerate(texts)]
        proposal = drafter.propose(news, limit=4)
        for row, text in enumerate(texts):
            for node in range(1, proposal.tokens.shape[1]):
                path = proposal.ancestors[row, node].nonzero()[:-1, 0]
                before = torch.cat([text, proposal.tokens[row, path][1:]])
                distribution = distribution_behind(draft, before, prompt["attention_mask"][row])
                best = distribution.topk(3).indices.tolist()
                siblings = (proposal.parents[row, :node] == proposal.parents[row, node]).sum()
                if tree is None or tree == "dynamic":  # siblings stand in the order of their probability
                    assert int(proposal.tokens[row, node]) == best[int(siblings)]
                else:
                    assert int(proposal.tokens[row, node]) in best
    assert accepted > 5  # otherwise nothing came true and nothing was kept


@torch.no_grad()
def test_q_is_the_distribution_of_the_cached_draft() -> None:
    draft = build("llama")
    drafter, prompt = start(draft, SpeculationConfig(), sample=True)
    generator = torch.Generator().manual_seed(2)
    texts, proposal = list(prompt["input_ids"]), None
    for _ in range(4):
        news = some_news(proposal, generator)
        texts = [torch.cat([text, news.tokens[row, : news.counts[row]]]) for row, text in enumerate(texts)]
        proposal = drafter.propose(news, limit=3)
        assert proposal.q is not None
        for row, text in enumerate(texts):
            for depth in range(3):
                before = torch.cat([text, proposal.tokens[row, 1 : 1 + depth]])
                distribution = distribution_behind(draft, before, prompt["attention_mask"][row])
                torch.testing.assert_close(proposal.q[row, depth], distribution.exp(), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_news_without_room_for_guesses_are_read_all_the_same() -> None:
    draft = build("llama")
    drafter, _ = start(draft, SpeculationConfig())
    told, _ = start(draft, SpeculationConfig())
    first = AcceptedTokens(torch.tensor([[5], [6], [7]]), torch.ones(3, dtype=torch.long))
    assert drafter.propose(first, limit=0).max_depth == 0
    second = AcceptedTokens(torch.tensor([[8], [9], [10]]), torch.ones(3, dtype=torch.long))
    both = AcceptedTokens(torch.cat([first.tokens, second.tokens], dim=1), torch.full((3,), 2))
    assert torch.equal(drafter.propose(second, limit=3).tokens, told.propose(both, limit=3).tokens)


@torch.no_grad()
def test_rows_that_go_on_guess_as_before() -> None:
    draft = build("llama")
    news = AcceptedTokens(torch.tensor([[5], [6], [7]]), torch.ones(3, dtype=torch.long))
    more = AcceptedTokens(torch.tensor([[8], [9], [10]]), torch.ones(3, dtype=torch.long))
    whole, _ = start(draft, SpeculationConfig())
    part, _ = start(draft, SpeculationConfig())
    whole.propose(news, limit=3)
    part.propose(news, limit=3)
    rows = torch.tensor([0, 2])
    part.keep_rows(rows)
    fewer = AcceptedTokens(more.tokens[rows], more.counts[rows])
    assert torch.equal(part.propose(fewer, limit=3).tokens, whole.propose(more, limit=3).tokens[rows])


TABLES = {
    "gpt2": "n_positions",
    "opt": "max_position_embeddings",
    "gptj": "n_positions",
    "mpt": "max_seq_len",
    "roberta": "max_position_embeddings",
}


@torch.no_grad()
@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_positions_is_used_up(name: str) -> None:
    """That of RoBERTa, too, which counts from behind its padding only if it is told no positions."""
    model = build(name, **{TABLES[name]: 24})
    assert position_limit(model) == 24
    model.generate(**prompts(1, lengths=(24,)), max_new_tokens=1)
    with pytest.raises((IndexError, RuntimeError)):
        model.generate(**prompts(1, lengths=(25,)), max_new_tokens=1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        pytest.param(name, tree, marks=pytest.mark.slow if (tree is None) == (name in ("opt", "roberta")) else ())
        for name in TABLES
        for tree in (None, "dynamic")
        if (name, tree) != ("mpt", "dynamic")
    ],
)
def test_a_draft_stops_guessing_where_its_table_of_positions_ends(name: str, tree: str | None) -> None:
    target, draft = build("llama"), build(name, **{TABLES[name]: 24})
    with pytest.raises((IndexError, RuntimeError)):
        draft(input_ids=torch.full((1, 30), 5))
    options = {"num_speculative_tokens": 4, "return_dict_in_generate": True}
    config = SpeculationConfig(tree=tree, tree_topk=2, num_tree_tokens=6)
    for lengths, guesses in {(5, 3): True, (13, 5): True, (40, 3): False}.items():
        prompt = prompts(2, lengths=lengths)
        plain = target.generate(**prompt, max_new_tokens=30)
        out = target.generate(**prompt, max_new_tokens=30, speculator=draft, speculation_config=config, **options)
        assert torch.equal(out.sequences, plain)
        assert (out.speculation.proposed > 0) == guesses
        assert out.speculation.steps > 20  # random guesses seldom come true: the text went past the table


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "guesses"),
    [("gpt2", [4, 4, 4, 4, 4, 1]), ("bart", [4, 4, 2, 0, 0, 0]), ("mpt", [4, 4, 2, 0, 0, 0])],
)
def test_a_row_that_is_ahead_of_longer_ones_may_reach_the_end_first(name: str, guesses: list[int]) -> None:
    """Its padding takes positions, too, where a model is told none."""
    draft = build(name, **{TABLES.get(name, "max_position_embeddings"): 24})
    drafter, _ = start(draft, SpeculationConfig(num_speculative_tokens=4))
    tokens = torch.randint(3, 99, (3, 3), generator=torch.Generator().manual_seed(0))
    news = AcceptedTokens(tokens, torch.tensor([1, 1, 3]))
    assert [drafter.propose(news, limit=4).tokens.shape[1] - 1 for _ in guesses] == guesses
    drafter, _ = start(draft, SpeculationConfig(num_speculative_tokens=4))
    drafter.propose(news, limit=4)
    drafter.keep_rows(torch.tensor([2]))  # the shortest one, by which the others' lengths are forgotten
    alone = AcceptedTokens(tokens[2:], torch.tensor([3]))
    left = [24 - (5 if name == "gpt2" else 13) - 3 * read for read in range(2, 2 + len(guesses))]
    found = [drafter.propose(alone, limit=4).tokens.shape[1] - 1 for _ in guesses]
    assert found == [min(4, max(0, room)) for room in left]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("counts", [[1, 1, 12], [2, 3, 17]])
def test_padding_of_a_long_row_stays_within_the_table_of_positions(name: str, counts: list[int]) -> None:
    """What many plain steps wrote is read in one block, as wide as the row has it that went on the fastest."""
    draft = build(name, **{TABLES[name]: 24})
    drafter, _ = start(draft, SpeculationConfig(num_speculative_tokens=4))
    tokens = torch.randint(3, 99, (3, max(counts)), generator=torch.Generator().manual_seed(0))
    one = AcceptedTokens(tokens[:, :1], torch.ones(3, dtype=torch.long))
    assert drafter.propose(one, limit=4).max_depth > 0
    for _ in range(2):  # it does not come back: it has missed tokens
        found = drafter.propose(AcceptedTokens(tokens, torch.tensor(counts)), limit=4)
        assert (found.max_depth, found.tokens.tolist()) == (0, [[int(tokens[i, n - 1])] for i, n in enumerate(counts)])
        counts = [1, 1, 1]


def test_a_draft_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="'ngram'"):
        VanillaSpeculator(build("llama", vocab_size=64)).check(build("llama"))


def test_the_target_is_no_draft_for_itself() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="smaller model"):
        VanillaSpeculator(model).check(model)


@pytest.mark.parametrize(("sample", "shape"), each_value([False, True], SHAPES))
def test_tokens_that_a_draft_of_a_smaller_vocabulary_does_not_know(shape: str, sample: bool) -> None:
    """They are in the prompt and in the text; the target's padding of its vocabulary is larger than the draft's."""
    known, vocabulary = 8192, 8192 + 300
    model = build("llama", vocab_size=vocabulary)
    draft = copy.deepcopy(model)
    draft.resize_token_embeddings(known)
    with torch.no_grad():
        model.lm_head.weight[:known] *= 0.9  # of many tokens, some that the draft does not know
    given = prompts(3, (9, 6, 7))
    given["input_ids"][:, -3:] = torch.tensor([known, 5, vocabulary - 1])
    options = {"max_new_tokens": 16, "do_sample": sample, "num_return_sequences": 8 if sample else 1}
    options |= {"speculator": draft, "speculation_config": SHAPES[shape], "return_dict_in_generate": True}
    out = model.generate(**given, **options)
    assert (out.sequences[:, 9:] >= known).any(), "the text has no such token"
    if not sample:
        assert torch.equal(out.sequences, model.generate(**given, max_new_tokens=16, do_sample=False))


@pytest.mark.parametrize(("own", "fits"), [(8192 - 1, False), (8192 + 511, True), (8192 + 512, False)])
def test_vocabularies_of_one_family_differ_by_their_padding_alone(own: int, fits: bool) -> None:
    target, speculator = build("llama", vocab_size=8192), VanillaSpeculator(build("llama", vocab_size=own))
    if fits:
        speculator.check(target)
        return
    with pytest.raises(ValueError, match=f"vocabulary of {own} tokens"):
        speculator.check(target)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_a_target_of_a_smaller_vocabulary_does_not_know_are_not_guessed(shape: str) -> None:
    model = build("llama", vocab_size=8192)
    draft = copy.deepcopy(model)
    draft.resize_token_embeddings(8192 + 300)
    with torch.no_grad():
        draft.lm_head.weight[8192:] = 2 * model.lm_head.weight[:300]  # which the draft would rather guess
    given = prompts(3, (9, 6, 7))
    for sample in (False, True):
        options = {"max_new_tokens": 12, "do_sample": sample, "speculation_config": SHAPES[shape]}
        out = model.generate(**given, **options, speculator=draft, return_dict_in_generate=True)
        assert int(out.sequences.max()) < 8192 and out.speculation.proposed
        if not sample:
            assert torch.equal(out.sequences, model.generate(**given, max_new_tokens=12, do_sample=False))
            assert out.speculation.accepted


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_whose_logits_overflow_guesses_badly_and_no_more(shape: str) -> None:
    model = build("llama")
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.get_output_embeddings().weight[7] = torch.nan
    for seed in range(3):
        torch.manual_seed(seed)
        out = model.generate(
            **prompts(2, (9, 6)), max_new_tokens=8, do_sample=True, speculator=draft, speculation_config=SHAPES[shape]
        )
        assert out.shape[1] == 9 + 8
    plain = model.generate(**prompts(2, (9, 6)), max_new_tokens=8, do_sample=False)
    options = {"max_new_tokens": 8, "do_sample": False, "speculation_config": SHAPES[shape]}
    assert torch.equal(model.generate(**prompts(2, (9, 6)), **options, speculator=draft), plain)


@pytest.mark.parametrize(("threshold", "longest"), [(0.0, 4), (0.99, 1)])
def test_a_confidence_threshold_ends_greedy_chains(threshold: float, longest: int) -> None:
    """Nobody needs probabilities in greedy chains, but for the threshold, which scores of another kind would pass."""
    config = SpeculationConfig(num_speculative_tokens=4, confidence_threshold=threshold)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    out = target().generate(**prompts(1), speculator=draft(), speculation_config=config, **options)
    assert len(out.speculation.counts.proposed_at) == longest
