"""Processors at the nodes of a proposal, against plain calls node by node."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import usual
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from hf_spec import SpeculationConfig
from hf_spec.proposal import NO_PARENT, PAD_NODE, Proposal
from hf_spec.sampling import draw
from hf_spec.verify import prefixes, warpers
from hf_spec.verify.prefixes import Prefixes
from hf_spec.verify.processors import Processors, pure
from hf_spec.verify.scores import NodeScores
from hf_spec.verify.verifier import Verifier

BATCH = 5  # rows of the generate call, of which ROWS are still going on
ROWS = [3, 0, 2, 4]
LENGTHS = [7, 1, 5, 3]
VOCAB = 48
WORDS = 6  # text and guesses use so few tokens that n-grams repeat and bans meet guesses
EOS = 2


def is_even(row: int, prefix: Tensor) -> list[int]:
    """Allow other tokens in every row and after every prefix."""
    return [token for token in range(VOCAB) if (token + row + int(prefix.sum())) % 3]


def timestamps(begin: int, **options: Any) -> LogitsProcessor:
    """Make Whisper's processor: 0 and 1 are text, 2 ends, 3 is not to come, and timestamps begin at 4."""
    known = {"max_initial_timestamp_index": 2, "no_timestamps_token_id": 3} | options
    config = GenerationConfig(eos_token_id=EOS, bos_token_id=EOS)
    for name, value in known.items():
        setattr(config, name, value)
    return logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=begin)


STATELESS: dict[str, Callable[[], LogitsProcessor]] = {
    "temperature": lambda: logits_process.TemperatureLogitsWarper(0.6),
    "top_k": lambda: logits_process.TopKLogitsWarper(7),
    "top_k_keep": lambda: logits_process.TopKLogitsWarper(1, min_tokens_to_keep=3),
    "top_p": lambda: logits_process.TopPLogitsWarper(0.7),
    "top_p_small": lambda: logits_process.TopPLogitsWarper(0.01, min_tokens_to_keep=2),
    "top_h": lambda: logits_process.TopHLogitsWarper(0.5),
    "min_p": lambda: logits_process.MinPLogitsWarper(0.2),
    "typical": lambda: logits_process.TypicalLogitsWarper(0.5),
    "typical_small": lambda: logits_process.TypicalLogitsWarper(0.05, min_tokens_to_keep=2),
    "epsilon": lambda: logits_process.EpsilonLogitsWarper(0.02),
    "eta": lambda: logits_process.EtaLogitsWarper(0.05),
    "normalise": lambda: logits_process.LogitNormalization(),
    "suppress": lambda: logits_process.SuppressTokensLogitsProcessor([1, 4, 40]),
    "bark": lambda: logits_process.BarkEosPrioritizerLogitsProcessor(EOS, 0.02),
}

PER_SEQUENCE: dict[str, Callable[[], LogitsProcessor]] = {
    "min_length": lambda: logits_process.MinLengthLogitsProcessor(7, EOS),
    "min_new_tokens": lambda: logits_process.MinNewTokensLengthLogitsProcessor(4, 3, [EOS, 5]),
    "repetition": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition_prompt": lambda: logits_process.RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=4),
    "repetition_padding": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([0, 2, 4, 5, 1])),
    "ngram_1": lambda: logits_process.NoRepeatNGramLogitsProcessor(1),
    "ngram_2": lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    "ngram_3": lambda: logits_process.NoRepeatNGramLogitsProcessor(3),
    "bias": lambda: logits_process.SequenceBiasLogitsProcessor({(3,): -2.0, (0, 1): 3.0, (2, 1): 2.5, (1, 2, 3): 4.0}),
    "bad_words": lambda: logits_process.NoBadWordsLogitsProcessor([[4], [1, 2], [3, 3], [0, 5, 1]], EOS),
    "allowed": lambda: logits_process.PrefixConstrainedLogitsProcessor(pure(is_even), 1),
    "forced_bos": lambda: logits_process.ForcedBOSTokenLogitsProcessor(3),
    "forced_eos": lambda: logits_process.ForcedEOSTokenLogitsProcessor(9, [EOS, 4]),
    "decay": lambda: logits_process.ExponentialDecayLengthPenalty((2, 1.4), EOS, 4),
    "suppress_begin": lambda: logits_process.SuppressTokensAtBeginLogitsProcessor([1, 2, 3], 6),
    "codebooks": lambda: logits_process.AlternatingCodebooksLogitsProcessor(2, 0, 4),
    "timestamps": lambda: timestamps(1),
    "timestamps_anywhere": lambda: timestamps(1, max_initial_timestamp_index=None),
    "timestamps_not_preferred": lambda: timestamps(1, _detect_timestamp_from_logprob=False),
    "watermark": lambda: logits_process.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "watermark_self": lambda: logits_process.WatermarkLogitsProcessor(
        VOCAB, "cpu", seeding_scheme="selfhash", context_width=2, bias=1.0
    ),
}

MIXED: dict[str, tuple[str, ...]] = {
    "sampling": ("temperature", "top_k", "top_p"),
    "penalty_sampling": ("bias", "repetition_padding", "ngram_2", "bad_words", "temperature", "top_k", "top_p"),
    "lengths": ("min_length", "min_new_tokens", "forced_eos", "decay", "suppress_begin"),
    "warper_before": ("top_k", "allowed", "temperature", "watermark"),
    "allowed_bans": ("ngram_1", "allowed"),
}

CASES = {name: (name,) for name in [*STATELESS, *PER_SEQUENCE]} | MIXED


@pytest.fixture(autouse=True, params=[1, warpers.LARGE], ids=["in less time", ""])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warpers, "LARGE", request.param)
    if request.param == 1:
        monkeypatch.setattr(warpers, "MANY_SCORES", 1)
        monkeypatch.setattr(warpers, "PART", 2)


def make(*names: str) -> LogitsProcessorList:
    return LogitsProcessorList([(STATELESS | PER_SEQUENCE)[name]() for name in names])


def chain(random: torch.Generator) -> Proposal:
    tokens = torch.randint(0, WORDS, (len(ROWS), 5), generator=random)
    return Proposal.chain(tokens[:, 0], tokens[:, 1:], torch.tensor([4, 2, 3, 0]))


def tree(random: torch.Generator) -> Proposal:
    tokens = torch.randint(0, WORDS, (len(ROWS), 9), generator=random)
    parents = torch.tensor(
        [
            [NO_PARENT, 0, 0, 0, 1, 1, 3, 4, 7],
            [NO_PARENT, 0, 1, 2, 3, 3, 2, PAD_NODE, PAD_NODE],
            [NO_PARENT, 0, 1, 1, 0, 4, 4, 6, 6],
            [NO_PARENT, 0, 0, PAD_NODE, PAD_NODE, PAD_NODE, PAD_NODE, PAD_NODE, PAD_NODE],
        ]
    )
    return Proposal(tokens, parents, max_depth=5)


def one_word(random: torch.Generator) -> Proposal:
    return Proposal.path(torch.zeros(len(ROWS), 4, dtype=torch.long))


class Block:
    """A scored proposal after a ragged text, behind which and at whose PAD_NODE nodes stands rubbish."""

    def __init__(self, shape: Callable[[torch.Generator], Proposal], seed: int, dtype: torch.dtype = torch.float32):
        random = torch.Generator().manual_seed(seed)
        self.proposal = shape(random)
        self.text = torch.randint(0, WORDS, (len(ROWS), 9), generator=random)
        self.text[torch.arange(len(ROWS)), torch.tensor(LENGTHS) - 1] = self.proposal.root
        logits = 2 * torch.randn(*self.proposal.tokens.shape, VOCAB, generator=random)
        logits[:, :, :WORDS] += 3  # so that warpers let some guesses live
        self.logits = logits.masked_fill(~self.proposal.present[:, :, None], float("nan")).to(dtype)

    def scores(self, processors: LogitsProcessorList) -> NodeScores:
        return NodeScores(Processors(processors), self.logits, self.proposal, self.text, LENGTHS, ROWS)

    def nodes(self) -> list[tuple[int, int]]:
        return [(b, i) for b, i in self.proposal.present.nonzero().tolist()]

    def prefix(self, b: int, node: int) -> list[int]:
        path = []
        while node:
            path.append(int(self.proposal.tokens[b, node]))
            node = int(self.proposal.parents[b, node])
        return self.text[b, : LENGTHS[b]].tolist() + path[::-1]

    def plain(self, processors: LogitsProcessorList, b: int, node: int) -> Tensor:
        """Do what plain ``generate`` does at a node: the whole batch at this length, of which one row matters."""
        prefix = self.prefix(b, node)
        input_ids = torch.ones(BATCH, len(prefix), dtype=torch.long)
        input_ids[ROWS[b]] = torch.tensor(prefix)
        scores = torch.randn(BATCH, VOCAB)
        scores[ROWS[b]] = self.logits[b, node].float()
        return processors(input_ids, scores)[ROWS[b]]


def same(left: Tensor, right: Tensor) -> bool:
    inf = float("inf")
    return torch.equal(left.nan_to_num(7.0, inf, -inf), right.nan_to_num(7.0, inf, -inf))


@pytest.mark.parametrize("shape", [chain, tree])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_plain_calls(case: str, shape: Callable[..., Proposal]) -> None:
    changed = reached = 0
    for seed, dtype in enumerate([torch.float32, torch.bfloat16]):
        block = Block(shape, seed, dtype)
        before = block.logits.clone(), block.text.clone()
        asked = block.scores(make(*CASES[case]))
        plain = make(*CASES[case])
        every = asked.at_all_nodes()
        assert every.dtype == torch.float32 and not every.isnan().any()
        expected: dict[tuple[int, int], Tensor] = {}
        for b, node in block.nodes():  # parents come first
            parent = int(block.proposal.parents[b, node])
            if node and not set(CASES[case]) <= set(STATELESS):
                token = block.proposal.tokens[b, node]
                possible = (b, parent) in expected and expected[b, parent].softmax(0)[token] > 0
                if not possible:
                    continue
            expected[b, node] = block.plain(plain, b, node)
            assert same(every[b, node], expected[b, node])
            changed += not same(expected[b, node], block.logits[b, node].float())
        for node in range(block.proposal.tokens.shape[1]):
            at = [node if (b, node) in expected else 0 for b in range(len(ROWS))]
            assert same(asked.at(torch.tensor(at)), torch.stack([expected[b, i] for b, i in enumerate(at)]))
        reached += len(expected)
        assert same(block.logits, before[0]) and torch.equal(block.text, before[1])
    assert changed, "this setting never does anything, so it tests nothing"
    assert reached > 2 * len(ROWS), "nothing but roots was compared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_without_guesses_draws_in_float32(dtype: torch.dtype) -> None:
    """As plain ``generate`` does; no processor makes float32 of half precision here."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(VOCAB)).to(dtype).expand(20_000, 1, VOCAB)
    rows = list(range(len(logits)))
    proposal = Proposal.nothing(torch.zeros(len(rows), dtype=torch.long))
    scores = NodeScores(Processors(LogitsProcessorList()), logits, proposal, None, [1] * len(rows), rows)
    torch.manual_seed(1)
    result = Verifier(SpeculationConfig(), sample=True)(proposal, scores, lambda emitted: [1] * len(emitted))
    assert result is not None
    torch.manual_seed(1)
    assert torch.equal(result.tokens[:, 0], draw(logits[:, 0].float().softmax(-1)))
    torch.manual_seed(1)
    assert not torch.equal(result.tokens[:, 0], draw(logits[:, 0].softmax(-1)))


EDGES: dict[str, Callable[[int], LogitsProcessor]] = {
    "min_length": lambda length: logits_process.MinLengthLogitsProcessor(length, EOS),
    "min_new_tokens": lambda length: logits_process.MinNewTokensLengthLogitsProcessor(3, length, [EOS, 5]),
    "forced_eos": lambda length: logits_process.ForcedEOSTokenLogitsProcessor(length + 1, [EOS, 4]),
    "suppress_begin": lambda length: logits_process.SuppressTokensAtBeginLogitsProcessor([1, 2, 3], length),
    "decay": lambda length: logits_process.ExponentialDecayLengthPenalty((length, 1.4), EOS, 0),
    "ngram": lambda length: logits_process.NoRepeatNGramLogitsProcessor(length),
    "ignored_prompt": lambda length: logits_process.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=length),
}


def same_as_plain(block: Block, make: Callable[[], LogitsProcessorList]) -> int:
    """Ask at all nodes, and at the roots alone; return at how many nodes the processors do something."""
    every, root = block.scores(make()).at_all_nodes(), block.scores(make()).at_root()
    changed = 0
    for b, node in block.nodes():
        expected = block.plain(make(), b, node)
        assert same(every[b, node], expected), (b, node)
        assert node or same(root[b], expected), b
        changed += not same(expected, block.logits[b, node].float())
    return changed


@pytest.mark.parametrize("case", EDGES)
def test_processors_begin_and_end_at_any_length(case: str) -> None:
    """At every length that a prefix has, or none: the shortest root's, the deepest guess's, and those around them."""
    block, same_word, changed = Block(chain, 3), Block(one_word, 3), []
    same_word.text.zero_()
    for length in range(1, 14):
        changed.append(same_as_plain(block, lambda length=length: LogitsProcessorList([EDGES[case](length)])))
        same_as_plain(same_word, lambda length=length: LogitsProcessorList([EDGES[case](length)]))
    assert len(set(changed)) > 2


@pytest.mark.parametrize("prefers", [True, False])
def test_rules_of_timestamps_after_every_short_text(prefers: bool) -> None:
    """After a prompt of two tokens, one of them a timestamp, come up to four of two words, the end and timestamps."""
    one = timestamps(2, _detect_timestamp_from_logprob=prefers, max_initial_timestamp_index=3)
    texts = [text for count in range(5) for text in itertools.product([0, 1, EOS, 4, 6, 9], repeat=count)]
    lengths = torch.tensor([2 + len(text) for text in texts])
    tokens = torch.tensor([[0, 5, *text, *[7] * (4 - len(text))] for text in texts])  # 7: what comes after a text
    scores = torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(0))
    scores[:, : EOS + 1] += 4  # so that timestamps are not always likelier
    got = Processors(LogitsProcessorList([one])).at_once(scores, Prefixes(tokens, lengths, lengths, 2, 6))
    for length in range(2, 7):
        rows = lengths == length
        assert same(got[rows], one(tokens[rows, :length], scores[rows])), length
    kinds = {tuple(row) for row in torch.stack([got[:, end].isinf() for end in (0, EOS, 4, 6, 9, 20)], 1).tolist()}
    assert len(kinds) > 8, "too few rules were met"


@pytest.mark.parametrize("others", [(), ("min_length",), ("timestamps", "suppress_begin"), ("watermark",)])
@pytest.mark.parametrize("shape", [chain, tree])
def test_silence_is_detected_once_in_all_rows(others: tuple[str, ...], shape: Callable[..., Proposal]) -> None:
    """From the scores of the first tokens, whichever way the nodes are asked and whatever the other processors are."""
    for ask in ("at_root", "at", "at_all_nodes", "best_tokens"):
        detection = logits_process.WhisperNoSpeechDetection(no_speech_token=7, begin_index=1)
        block = Block(shape, 5)
        processors = Processors(LogitsProcessorList([detection, *make(*others)]))
        assert not processors.lockstep
        rows, begun = list(range(len(ROWS))), [1] * len(ROWS)
        nodes = NodeScores(processors, block.logits, block.proposal, block.text, begun, rows)
        given = (torch.zeros(len(ROWS), dtype=torch.long),) if ask == "at" else ()
        getattr(nodes, ask)(*given)
        want = block.logits[:, 0].softmax(-1)[:, 7]
        assert same(detection.no_speech_prob, want), ask
        later = NodeScores(
            processors, block.logits + torch.randn_like(block.logits), block.proposal, block.text, begun, rows
        )
        getattr(later, ask)(*given)
        assert same(detection.no_speech_prob, want), "it was asked again"


def test_a_sequence_is_as_long_as_what_has_been_said() -> None:
    """It ends a prefix that is as long, and no shorter one that begins with it or consists of one token of it."""
    block = Block(chain, 4)
    for b, node in block.nodes():
        prefix = block.prefix(b, node)
        ends = [before for before in (prefix, prefix[1:]) if before]
        for before in (*ends, prefix[:1] + prefix, prefix[:1] * (len(prefix) + 1)):
            bans = functools.partial(logits_process.NoBadWordsLogitsProcessor, [[*before, 7], [*before, 9]], EOS)
            changed = same_as_plain(block, lambda bans=bans: LogitsProcessorList([bans()]))
            assert changed or before not in ends


def test_an_end_that_is_banned_is_not_made_likelier() -> None:
    def ends() -> LogitsProcessorList:
        return LogitsProcessorList([logits_process.SuppressTokensLogitsProcessor([EOS]), *make("decay")])

    block = Block(chain, 5)
    assert same_as_plain(block, ends)
    assert block.scores(ends()).at_all_nodes()[block.proposal.present][:, EOS].eq(-torch.inf).all()


def test_infinities_are_removed_node_by_node() -> None:
    block = Block(tree, 0)
    block.logits[0, 0, 3], block.logits[0, 1, 4], block.logits[1, 2, 5] = float("inf"), -float("inf"), float("nan")
    processors = LogitsProcessorList([logits_process.InfNanRemoveLogitsProcessor()])
    every = block.scores(processors).at_all_nodes()
    assert every.isfinite().all()
    for b, node in block.nodes():
        assert torch.equal(every[b, node], block.plain(processors, b, node))


def test_without_processors_scores_are_the_logits() -> None:
    block = Block(tree, 0, torch.bfloat16)
    asked = block.scores(LogitsProcessorList())
    node = torch.tensor([4, 3, 0, 1])
    assert torch.equal(asked.at(node), block.logits.float()[torch.arange(len(ROWS)), node])
    present = block.proposal.present
    assert torch.equal(asked.at_all_nodes()[present], block.logits.float()[present])


def test_order_of_the_list_is_kept() -> None:
    block = Block(chain, 0)
    one = block.scores(make("repetition", "top_k")).at_all_nodes()
    other = block.scores(make("top_k", "repetition")).at_all_nodes()
    assert not torch.equal(one, other)


def test_tied_logits_are_cut_as_for_a_row_alone() -> None:
    block = Block(tree, 0)
    block.logits = block.logits.round()
    for names in [("top_k",), ("top_p",), ("min_p",), ("typical",), ("top_h",), ("epsilon",), ("eta",)]:
        every = block.scores(make(*names)).at_all_nodes()
        for b, node in block.nodes():
            assert torch.equal(every[b, node], block.plain(make(*names), b, node)), names


BUILT_IN = (
    "bias",
    "repetition_padding",
    "ngram_2",
    "bad_words",
    "min_length",
    "forced_eos",
    "suppress_begin",
    "timestamps",
    "top_k",
)


@pytest.mark.parametrize("names", [(), ("temperature", "top_k", "top_p", "min_p"), BUILT_IN])
def test_scores_of_built_in_processors_never_wait_for_the_accelerator(names: tuple[str, ...]) -> None:
    def ask(processors: LogitsProcessorList) -> NodeScores:
        block = Block(tree, 0)
        proposal = Proposal(block.proposal.tokens.to("meta"), block.proposal.parents.to("meta"), 5)
        return NodeScores(
            Processors(processors), block.logits.to("meta"), proposal, block.text.to("meta"), LENGTHS, ROWS
        )

    node = torch.zeros(len(ROWS), dtype=torch.long, device="meta")
    asked = ask(make(*names))  # a meta tensor has no values, so reading one raises
    assert asked.at(node).shape == (len(ROWS), VOCAB)
    assert asked.at_all_nodes().shape == (len(ROWS), 9, VOCAB)
    with pytest.raises((NotImplementedError, RuntimeError)):
        ask(make("watermark")).at(node)


def test_allowed_tokens_function_gets_original_rows_and_prefixes_that_can_be() -> None:
    block = Block(tree, 1)
    seen: list[tuple[int, tuple[int, ...]]] = []

    def odd_only(row: int, prefix: Tensor) -> list[int]:
        guesses = prefix.tolist()[LENGTHS[ROWS.index(row)] :]
        assert all(token % 2 for token in guesses), "asked about a text it has forbidden"
        seen.append((row, tuple(prefix.tolist())))
        return list(range(1, VOCAB, 2))

    constrain = logits_process.PrefixConstrainedLogitsProcessor(odd_only, 1)
    block.scores(LogitsProcessorList([constrain, logits_process.InfNanRemoveLogitsProcessor()])).at_all_nodes()
    prefixes = [(ROWS[b], tuple(block.prefix(b, node)), LENGTHS[b]) for b, node in block.nodes()]
    odd = [(row, prefix) for row, prefix, length in prefixes if all(token % 2 for token in prefix[length:])]
    assert sorted(seen) == sorted(odd)
    assert len(ROWS) < len(odd) < len(prefixes)

    seen.clear()
    block.scores(LogitsProcessorList([constrain])).at(torch.zeros(len(ROWS), dtype=torch.long))
    assert sorted(seen) == sorted((ROWS[b], tuple(block.prefix(b, 0))) for b in range(len(ROWS)))


def test_an_allowed_tokens_function_that_allows_nothing_is_told_which_row() -> None:
    def nothing_in_row_2(row: int, prefix: Tensor) -> list[int]:
        return [] if row == 2 else [1]

    constrain = logits_process.PrefixConstrainedLogitsProcessor(pure(nothing_in_row_2), 1)
    with pytest.raises(ValueError, match=r"batch ID 2 behind 5 tokens: nothing could follow"):
        Block(chain, 0).scores(LogitsProcessorList([constrain])).at(torch.zeros(len(ROWS), dtype=torch.long))


def test_scores_at_serves_any_pairs() -> None:
    torch.manual_seed(0)
    lengths, rows = [3, 1, 3, 5, 2], [1, 3, 1, 0, 2]
    tokens = torch.randint(0, WORDS, (5, 6))
    logits = torch.randn(5, VOCAB)
    for case in CASES.values():
        plain = make(*case)
        scores = Processors(make(*case)).scores_at(logits, tokens, lengths, rows)
        for pair, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            batch = tokens[pair, :length].repeat(BATCH, 1)
            assert same(scores[pair], plain(batch, logits[pair].repeat(BATCH, 1))[row]), case


class Overwrite(LogitsProcessor):
    """Write into what it is given, as careless processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[:, -1]] = -float("inf")
        input_ids.fill_(0)
        return scores


def test_a_processor_that_writes_in_place_does_no_harm() -> None:
    block = Block(tree, 0)
    logits, text, tokens = block.logits.clone(), block.text.clone(), block.proposal.tokens.clone()
    asked = block.scores(LogitsProcessorList([pure(Overwrite())]))
    node = torch.tensor([2, 1, 1, 0])
    assert torch.equal(asked.at(node), asked.at(node))
    asked.at_all_nodes()
    assert same(block.logits, logits) and torch.equal(block.text, text) and torch.equal(block.proposal.tokens, tokens)

    scores = torch.zeros(2, VOCAB)
    Processors(LogitsProcessorList([Overwrite()]))(torch.ones(2, 3, dtype=torch.long), scores)
    assert not scores.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_pure_processor_may_return_another_type(dtype: torch.dtype) -> None:
    block = Block(tree, 0)
    every = block.scores(LogitsProcessorList([pure(lambda ids, scores: scores.to(dtype))])).at_all_nodes()
    for b, node in block.nodes():
        if every[b, node].any():  # others are behind a guess without a chance
            assert torch.equal(every[b, node], block.logits[b, node].to(dtype).float())


def test_plain_call_is_in_float32() -> None:
    scores = torch.randn(2, VOCAB, dtype=torch.bfloat16)
    input_ids = torch.randint(0, WORDS, (2, 5))
    processors = make("repetition", "temperature")
    got = Processors(processors)(input_ids, scores)
    assert got.dtype == torch.float32 and torch.equal(got, processors(input_ids, scores.float()))


def test_draft_distribution_applies_the_warpers_once_and_nothing_else() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 3, VOCAB)
    before = logits.clone()
    distribution = Processors(
        LogitsProcessorList([*make("temperature", "ngram_2", "min_p"), Overwrite()])
    ).draft_distribution()
    once = logits / 0.6
    once = once.masked_fill(once < once.amax(-1, keepdim=True) + math.log(0.2), -float("inf")).log_softmax(-1)
    assert torch.allclose(distribution(logits), once) and torch.equal(logits, before)
    assert not torch.allclose(distribution(once), once), "the temperature was lost"
    assert distribution(logits[0, 0].to(torch.bfloat16)).dtype == torch.float32
    assert torch.allclose(
        Processors(LogitsProcessorList()).draft_distribution()(logits).exp().sum(-1), torch.ones(2, 3)
    )


def test_warpers_for_graphs_are_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, nothing = 3 * torch.randn(5, VOCAB), torch.empty(5, 0, dtype=torch.long)
    known: list[LogitsProcessor] = [
        logits_process.EpsilonLogitsWarper(0.02),
        logits_process.MinPLogitsWarper(0.1),
        logits_process.TemperatureLogitsWarper(0.7),
        logits_process.TopHLogitsWarper(0.4),
        logits_process.TopPLogitsWarper(0.8),
        logits_process.TypicalLogitsWarper(0.7),
        *(logits_process.TopKLogitsWarper(kept) for kept in (1, 2, 3, VOCAB - 1, VOCAB, VOCAB + 1)),
    ]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # else top-k is the usual one
    for one in known:
        expected = one(nothing, logits)
        found = warpers.for_graphs(one, logits.device)
        assert found is not one and torch.equal(found(nothing, logits), expected)
        assert [value for value in vars(found).values() if isinstance(value, Tensor)], "its number is a tensor"
        assert torch.equal(one(nothing, logits), expected), "the user's own is as it was"


@pytest.mark.parametrize("change", [lambda scores: scores[:, :20], lambda scores: scores[:1].repeat(7, 1)])
def test_a_pure_processor_that_gives_other_scores_than_asked(change: Callable[[Tensor], Tensor]) -> None:
    class Other(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return change(scores)

    with pytest.raises(ValueError, match=r"Other: scores of shape \(1, 48\) became .*a score for every token"):
        Block(chain, 0).scores(LogitsProcessorList([pure(Other())])).at_all_nodes()


def test_a_penalty_for_another_number_of_rows() -> None:
    penalty = LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([0, 2, 4]))])
    Processors(penalty, 3)
    for rows in (2, 4):
        with pytest.raises(ValueError, match=f"is for 3 rows, but {rows} are generated"):
            Processors(penalty, rows)


def lockstep(processor: object) -> bool:
    return Processors(LogitsProcessorList([processor])).lockstep


def test_every_processor_of_transformers_has_its_tier() -> None:
    known = {type(one()) for one in (STATELESS | PER_SEQUENCE).values()}
    known |= {logits_process.InfNanRemoveLogitsProcessor, logits_process.WhisperNoSpeechDetection}
    for name, kind in inspect.getmembers(logits_process, inspect.isclass):
        if issubclass(kind, LogitsProcessor) and kind is not logits_process.PrefixConstrainedLogitsProcessor:
            assert lockstep(kind.__new__(kind)) == (kind not in known), name
    for one in STATELESS.values():
        assert Processors(LogitsProcessorList([one()])).stateless
    for one in PER_SEQUENCE.values():
        processors = Processors(LogitsProcessorList([one()]))
        assert not processors.stateless and not processors.lockstep
    for texts in (1, 2):  # of a prompt
        assert not lockstep(logits_process.PrefixConstrainedLogitsProcessor(pure(is_even), texts))
        assert lockstep(logits_process.PrefixConstrainedLogitsProcessor(lambda row, prefix: [5], texts))


def test_custom_processors_are_lockstep_unless_declared_pure() -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    @pure
    class Declared(Nothing):
        pass

    class Derived(Declared):
        pass

    class Warmer(logits_process.TemperatureLogitsWarper):
        pass

    assert lockstep(Nothing()) and not lockstep(pure(Nothing())) and lockstep(Nothing())
    assert not lockstep(Declared())
    assert lockstep(Derived()), "a subclass may keep a state"
    assert lockstep(Warmer(0.5))
    assert lockstep(lambda input_ids, scores: scores)
    assert not lockstep(pure(lambda input_ids, scores: scores))
    assert not Processors(LogitsProcessorList()).lockstep
    assert Processors(LogitsProcessorList([*make("temperature"), Nothing()])).lockstep
    assert not Processors(LogitsProcessorList([*make("temperature"), Declared()])).stateless


class Fsm:
    """Look like a function of the prefix, and count."""

    calls = 0

    def allowed(self, row: int, prefix: Tensor) -> list[int]:
        self.calls += 1
        return [self.calls % VOCAB]

    __call__ = allowed


def test_functions_that_allow_tokens_are_lockstep_unless_declared_pure() -> None:
    def function(row: int, prefix: Tensor) -> list[int]:
        return [1]

    def waits(function: Any) -> bool:
        return lockstep(logits_process.PrefixConstrainedLogitsProcessor(function, 1))

    fsm, other = Fsm(), Fsm()
    for undeclared in (function, fsm, fsm.allowed, functools.partial(function)):
        assert waits(undeclared)
    for declared in (pure(function), pure(fsm), pure(other.allowed), pure(functools.partial(function))):
        assert not waits(declared)
    assert waits(other.allowed) and pure(other.allowed)(0, torch.zeros(1)) == [1], "the wrapper calls the method"
    assert waits(Fsm())


def test_watermarks_of_a_generation_config_are_sorted() -> None:
    green = GenerationConfig(watermarking_config={"bias": 2.0}).watermarking_config
    assert not lockstep(green.construct_processor(VOCAB, "cpu"))
    synth = logits_process.SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 2**8, 0, 16, torch.device("cpu"))
    assert lockstep(synth)


class Counted(logits_process.TopPLogitsWarper):
    """Count the rows that the vocabulary is sorted for."""

    rows = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        self.rows += len(scores)
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", usual([0.0, 0.3, 0.9, 0.99, 1.0], [0.0, 0.9, 1.0]))
@pytest.mark.parametrize(("spread", "sorted_at_most"), [(0.5, 60), (2.0, 60), (8.0, 3)])
def test_top_p_without_sorting_the_vocabulary(
    dtype: torch.dtype, top_p: float, spread: float, sorted_at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warpers, "LARGE", 1)
    monkeypatch.setattr(warpers, "FIRST_SORTED", 16)
    monkeypatch.setattr(warpers, "MOST_SORTED", 128)
    torch.manual_seed(0)
    scores, ids = (spread * torch.randn(60, 3000)).to(dtype).float(), torch.zeros(60, 0, dtype=torch.long)
    scores[1, 7:] = -torch.inf  # as top-k leaves it
    scores[2, 1:] = -torch.inf
    scores[3, 5] = torch.nan
    scores[4] = 1.0
    before = scores.clone()
    for least in (1, 3, 40, 200):
        warper = Counted(top_p, min_tokens_to_keep=least)
        plain = logits_process.TopPLogitsWarper(top_p, min_tokens_to_keep=least)(ids, scores)
        torch.testing.assert_close(warpers.TopP(warper)(ids, scores), plain, rtol=0, atol=0, equal_nan=True)
        if top_p in (0.3, 0.9) and dtype == torch.float32 and least == 1:
            assert warper.rows <= sorted_at_most
        nearly = warpers.TopP(Counted(top_p, min_tokens_to_keep=least), nearly=True)
        kept, wanted = nearly(ids, scores) > -torch.inf, plain > -torch.inf
        assert not nearly.warper.rows  # type: ignore[attr-defined]
        enough = kept.sum(-1) >= wanted.sum(-1).clamp(max=128)
        assert top_p == 1.0 or enough[~scores.isnan().any(-1)].all()
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3000, 3001])
def test_top_k_without_looking_at_all_parts(
    vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warpers, "PART", 8)
    torch.manual_seed(0)
    scores, ids = (2 * torch.randn(60, vocabulary)).to(dtype).float(), torch.zeros(60, 0, dtype=torch.long)
    scores[1, 7:] = -torch.inf
    scores[2, 5] = torch.nan
    scores[3] = 1.0  # all are equally good
    scores[4, ::375] = 20.0  # eight of the best in one part
    before, looked_at, topk = scores.clone(), [], Tensor.topk

    def noted(scores: Tensor, count: int) -> Any:
        looked_at.append(scores.numel())
        return topk(scores, count)

    monkeypatch.setattr(Tensor, "topk", noted)
    for count in (1, 7, 50, 187, 188, 4000):  # from 188 on the vocabulary is too small for parts
        warper = logits_process.TopKLogitsWarper(count)
        plain = warper(ids, scores)
        looked_at.clear()
        torch.testing.assert_close(warpers.TopK(warper)(ids, scores), plain, rtol=0, atol=0, equal_nan=True)
        assert count > 50 or sum(looked_at) < scores.numel() / 3
        nearly = warpers.TopK(warper, nearly=True)(ids, scores)
        kept, wanted = nearly > -torch.inf, plain > -torch.inf
        assert (kept | ~wanted).all() and torch.equal(nearly[kept], scores[kept])
        assert dtype == torch.bfloat16 or kept[5:].sum() <= 1.4 * wanted[5:].sum()
        assert not torch.equal(kept, wanted) or count not in (7, 50, 187)  # so a difference would be seen
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("nearly", [True, False])
def test_top_p_in_a_graph(nearly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warpers, "LARGE", 1)
    torch.manual_seed(0)
    scores, ids = 3 * torch.randn(9, 5000), torch.zeros(9, 0, dtype=torch.long)
    warper = warpers.TopP(logits_process.TopPLogitsWarper(0.8), nearly)
    compiled = torch.compile(lambda scores: warper(ids, scores), backend="eager", fullgraph=True)
    assert torch.equal(compiled(scores), warper(ids, scores))


def test_biases_of_sequences_are_those_of_older_versions_of_transformers() -> None:
    """Before 5.23, a sequence counted only after a text of as many tokens as it has itself."""
    biases = {(5,): 1.0, (3, 4): 2.0, (7, 4): 0.25, (1, 2, 3): -1.5, (6, 1, 2, 3): 4.0}
    one: Any = logits_process.SequenceBiasLogitsProcessor([[list(tokens), bias] for tokens, bias in biases.items()])
    tokens = torch.tensor([[3, 0, 0, 0], [7, 3, 0, 0], [1, 2, 0, 0], [6, 1, 2, 0], [0, 6, 1, 2], [1, 7, 0, 0]])
    lengths, scores = torch.tensor([1, 2, 2, 3, 4, 2]), torch.zeros(6, 8)
    one._prepare_bias_variables(scores)
    vars(one).pop("multi_token_biases", None)
    wanted = scores.clone()
    for row, length in enumerate(lengths.tolist()):
        text = tokens[row, :length].tolist()
        for (*before, last), bias in biases.items():
            agrees = not before or (len(before) < length and text[length - len(before) :] == before)
            wanted[row, last] += bias * agrees
    assert torch.equal(prefixes._sequence_bias(one, Prefixes(tokens, lengths, lengths, 1, 4), scores), wanted)
    assert wanted[1, 4] == 2.0 and wanted[0, 4] == 0  # the text before it is long enough, and is not
