"""What ``return_dict_in_generate`` returns: plain ``generate``'s tensors, and statistics that add up."""

from __future__ import annotations

import gc
import json
import logging
from typing import Any

import pytest
import torch
from architectures import build, prompts
from pairs import pairwise, usual
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from twins import BATCHES, SHAPES, Oracle, draft, target, tokenizer

import hf_spec
from hf_spec import (
    AcceptedTokens,
    DraftContext,
    Drafter,
    Proposal,
    SpeculationConfig,
    SpeculationStats,
    Speculator,
    VanillaSpeculator,
    demo,
)
from hf_spec.proposal import NO_PARENT, PAD_NODE
from hf_spec.scoring import buffers
from hf_spec.scoring.buffers import SlotBuffer
from hf_spec.scoring.hooks import mark_as_ours

NEW = 18
EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
ENDS = {"eos_token_id": [30, 57, 72, 97], "pad_token_id": 0}


def generate(inputs: dict[str, Tensor], name: str = "llama", **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True} | options
    return target(name).generate(**inputs, **options)


def lengths(sequences: Tensor, options: dict[str, Any]) -> list[int]:
    """Count the tokens that each row emitted after a prompt of 13, up to an end token."""
    ends = torch.tensor(options.get("eos_token_id", []))
    return [next((i + 1 for i, token in enumerate(row[13:]) if token in ends), len(row) - 13) for row in sequences]


# --- Tensors ---------------------------------------------------------------------------------------------------------


def close(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.allclose(mine, theirs, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [{}, ENDS, {"repetition_penalty": 1.4}, ENDS | {"logits_processor": [lambda ids, scores: scores / 2]}],
    ids=["length", "end", "prefix", "lockstep"],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_scores_logits_and_hidden_states(batch: str, shape: str, options: dict[str, Any]) -> None:
    inputs = prompts(*BATCHES[batch])
    plain = generate(inputs, **EVERYTHING, **options)
    oracle = Oracle(plain.sequences, wrong=3)
    out = generate(inputs, speculator=oracle, speculation_config=SHAPES[shape], **EVERYTHING, **options)
    assert torch.equal(out.sequences, plain.sequences)
    emitted = lengths(plain.sequences, options)
    steps = max(emitted)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == steps
    for step in range(steps):
        rows = [row for row, count in enumerate(emitted) if step < count]  # the others are padding
        assert close(out.scores[step][rows], plain.scores[step][rows])
        assert close(out.logits[step][rows], plain.logits[step][rows])
        assert len(out.hidden_states[step]) == len(plain.hidden_states[step])
        for mine, theirs in zip(out.hidden_states[step], plain.hidden_states[step], strict=True):
            assert close(mine[rows], theirs[rows])


@pytest.mark.parametrize("static", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("batch", [1, 3])
def test_several_residual_streams_stand_in_front(batch: int, static: dict[str, Any]) -> None:
    inputs = prompts(batch)
    plain = generate(inputs, "gemma3n_text", **EVERYTHING)
    assert plain.hidden_states[1][0].shape[1] == batch and plain.hidden_states[1][0].ndim == 4
    oracle = Oracle(plain.sequences, wrong=3)
    out = generate(inputs, "gemma3n_text", speculator=oracle, **EVERYTHING, **static)
    assert out.speculation.accepted > 0 and len(out.hidden_states) == len(plain.hidden_states)
    for mine, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert all(close(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["hy_v4", "qwen4_exp_text", "opt"])
@pytest.mark.parametrize("batch", [1, 4])
def test_hidden_states_have_the_shapes_of_their_layers(batch: int, name: str) -> None:
    """The last one is narrower than the others, or they are several streams."""
    model = build(name, **({"word_embed_proj_dim": 16} if name == "opt" else {}))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = model.generate(**prompts(batch), **options)
    assert len({one.shape for one in plain.hidden_states[0]}) > 1
    out = model.generate(**prompts(batch), speculator=Oracle(plain.sequences, wrong=3), **options)
    assert torch.equal(out.sequences, plain.sequences)
    for mine, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert all(close(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "together"),
    [
        ("llama", {}, True),
        ("llama", {"logits_processor": [lambda ids, scores: scores / 2]}, True),
        ("gpt2", {}, True),
        ("llama", {"prefill_chunk_size": 6}, False),
        ("llama", {"output_hidden_states": True}, False),
        ("llama", {"speculation_config": SHAPES["tree"]}, False),
        ("mistral", {}, False),  # a layer with a window forgets what rejected guesses pushed out
    ],
    ids=["plain", "lockstep", "learned", "chunks", "states", "tree", "window"],
)
@pytest.mark.parametrize("batch", usual(BATCHES, ["one", "ragged"]))
def test_first_guesses_are_read_with_the_prompt(
    name: str, batch: str, options: dict[str, Any], together: bool
) -> None:
    """One forward less, and nothing else differs: guesses that are all right, and guesses that are all wrong."""
    inputs, wanted = prompts(*BATCHES[batch]), {"output_scores": True, "output_logits": True}
    config = {"speculation_config": SHAPES["chain"]} | options
    ours = {key: value for key, value in options.items() if key != "speculation_config"}
    plain = generate(inputs, name, **wanted, **ours)
    model = target(name)
    generate(inputs, name, speculator="ngram", **config)  # the self-check has forwards of its own
    for wrong in (1000, 1):
        forwards: list[Any] = []
        hook = model.register_forward_hook(mark_as_ours(lambda *_, seen=forwards: seen.append(None)))
        out = generate(inputs, name, speculator=Oracle(plain.sequences, wrong), **wanted, **config)
        hook.remove()
        assert torch.equal(out.sequences, plain.sequences)
        assert out.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
        assert all(map(close, out.logits[:3], plain.logits[:3]))
        chunks = 3 if "prefill_chunk_size" in options else 1
        assert len(forwards) == chunks + out.speculation.steps - together
        assert out.speculation.first_tokens_in_steps == (len(plain.sequences) if together else 0)


def test_only_what_was_asked_for() -> None:
    out = generate(prompts(1), speculator=draft())
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.scores is out.logits is out.hidden_states is out.attentions is None
    assert isinstance(generate(prompts(1), speculator=draft(), return_dict_in_generate=False), Tensor)
    assert generate(prompts(1), speculator=draft(), output_scores=True).logits is None


def test_transition_scores() -> None:
    """A method of the model that reads the output."""
    inputs = prompts(3)
    plain, out = generate(inputs, output_scores=True), generate(inputs, output_scores=True, speculator=draft())
    mine, theirs = (target().compute_transition_scores(one.sequences, one.scores) for one in (out, plain))
    assert close(mine, theirs)


@pytest.mark.parametrize(
    ("name", "batch", "shape", "options"), pairwise(["llama", "mistral", "gemma2"], BATCHES, SHAPES, [{}, ENDS])
)
def test_cache(name: str, batch: str, shape: str, options: dict[str, Any]) -> None:
    """It holds exactly the emitted text but the last token; the windowed layers hold their window."""
    inputs = prompts(*BATCHES[batch])
    plain = generate(inputs, name, **options)
    out = generate(inputs, name, speculator=Oracle(plain.sequences, 3), speculation_config=SHAPES[shape], **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert type(out.past_key_values) is type(plain.past_key_values)
    ends = [13 + count - 1 for count in lengths(plain.sequences, options)]  # columns
    last = max(ends)
    for mine, theirs in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.get_seq_length() == theirs.get_seq_length() == last
        assert mine.keys.shape == theirs.keys.shape
        for row, end in enumerate(ends):
            held = max(0, mine.keys.shape[2] - (last - end))  # the rest is padding, and masked
            padding = int((inputs["attention_mask"][row] == 0).sum()) - (last - mine.keys.shape[2])
            for name_ in ("keys", "values"):
                ours, others = (getattr(layer, name_)[row, :, max(0, padding) : held] for layer in (mine, theirs))
                assert close(ours, others)
    if name != "llama":
        assert any(isinstance(layer, DynamicSlidingWindowLayer) for layer in out.past_key_values.layers)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_last_column_of_a_row_that_ends_one_token_before_the_limit(name: str, shape: str) -> None:
    """Plain generate pads that row once, and so reads its last token: it is in the last column."""
    inputs = prompts(2, (13, 9))
    text = generate(inputs, name).sequences
    token = text[0, -2]
    inputs = inputs if (text[1, 13:-1] != token).all() else prompts(2, (13, 5))
    options = {"eos_token_id": int(token), "pad_token_id": 0}
    plain = generate(inputs, name, **options)
    assert lengths(plain.sequences, options) == [NEW - 1, NEW]
    for wrong in (1, 3, 1000):
        guesser = Oracle(plain.sequences, wrong)
        out = generate(inputs, name, speculator=guesser, speculation_config=SHAPES[shape], **options)
        assert torch.equal(out.sequences, plain.sequences)
        for mine, theirs in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
            assert mine.get_seq_length() == theirs.get_seq_length() == 13 + NEW - 1
            assert close(mine.keys[:, :, -1], theirs.keys[:, :, -1])
            assert close(mine.values[:, :, -1], theirs.values[:, :, -1])


# --- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        ENDS,
        {"stop_strings": ["Z", "k", "'"], "tokenizer": tokenizer()},
        ENDS | {"logits_processor": [lambda ids, scores: scores]},
    ],
    ids=["length", "end", "strings", "lockstep"],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", usual(BATCHES, ["one", "ragged"]))
def test_speculation_adds_up(batch: str, shape: str, options: dict[str, Any]) -> None:
    inputs = prompts(*BATCHES[batch])
    plain = generate(inputs, return_dict_in_generate=False, **options)
    config = SHAPES[shape]
    for speculator in (Oracle(plain, wrong=3), draft(), "ngram"):
        out = generate(inputs, speculator=speculator, speculation_config=config, **options)
        assert torch.equal(out.sequences, plain)
        stats: SpeculationStats = out.speculation
        emitted = lengths(plain, options)
        # Guesses of the first step were read with the prompt, unless a model has to draft them.
        with_prompt = config.tree is None and not isinstance(speculator, PreTrainedModel)
        assert [(not with_prompt) + row.emitted for row in stats.per_row] == emitted
        assert [row.tokens for row in stats.per_row] == [
            row[13 : 13 + count].tolist() for row, count in zip(plain, emitted, strict=True)
        ]
        for row in stats.per_row:
            assert row.accepted == sum(row.drafted) == sum(row.accepted_at)
            assert row.accepted <= row.proposed
            assert row.steps >= row.emitted - row.accepted, "a step emits at most one token of its own"
            assert row.steps <= row.emitted
            assert row.seconds <= stats.total_seconds
        assert stats.steps >= max(row.steps for row in stats.per_row)
        assert stats.emitted == sum(emitted) - (0 if with_prompt else len(emitted))
        assert stats.first_tokens_in_steps == (len(emitted) if with_prompt else 0)
        parts = stats.propose_seconds + stats.target_seconds + stats.verify_seconds
        assert 0 < max(stats.time_to_first_token, parts) <= stats.total_seconds
        assert json.loads(json.dumps(stats.to_dict()))["accepted"] == stats.accepted


class Uneven(Speculator):
    """Guess the ``text`` in as many places as the row's number says, and note the guesses and their depth, by row."""

    def __init__(self, text: Tensor, tree: bool) -> None:
        self.text, self.tree = text, tree
        self.noted: list[list[tuple[int, int]]] = [[] for _ in text]

    def drafter(self, request: Any) -> Drafter:
        return _UnevenDrafter(self, request.input_ids.shape[1])


class _UnevenDrafter(Drafter):
    def __init__(self, uneven: Uneven, length: int) -> None:
        self._uneven = uneven
        self._rows = list(range(len(uneven.text)))
        self._lengths = [length] * len(self._rows)

    def propose(self, news: Any, limit: int) -> Proposal:
        self._lengths = [length + count for length, count in zip(self._lengths, news.counts.tolist(), strict=True)]
        text, whole = self._uneven.text, self._uneven.text.shape[1]
        depths = [min(row, limit, whole - 1 - end) for row, end in zip(self._rows, self._lengths, strict=True)]
        guesses = torch.zeros(len(depths), max(depths), dtype=torch.long)
        for place, (row, end, depth) in enumerate(zip(self._rows, self._lengths, depths, strict=True)):
            guesses[place, :depth] = text[row, end : end + depth]
            self._uneven.noted[row].append((2 * depth if self._uneven.tree else depth, depth))
        if not self._uneven.tree:
            return Proposal.chain(news.root, guesses, torch.tensor(depths))
        siblings = torch.stack([(guesses + 7) % 99, guesses], dim=2).flatten(1)  # of which the right one goes on
        node = torch.arange(siblings.shape[1])
        parents = (2 * (node // 2)).masked_fill(node >= 2 * torch.tensor(depths)[:, None], PAD_NODE)
        parents = torch.nn.functional.pad(parents, (1, 0), value=NO_PARENT)
        return Proposal(torch.cat([news.root[:, None], siblings], dim=1), parents, max(depths))

    def keep_rows(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
        self._lengths = [self._lengths[row] for row in rows.tolist()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lockstep", [False, True])
def test_rows_that_guess_less_are_counted_by_themselves(lockstep: bool, shape: str) -> None:
    """Row 0 guesses nothing, row 1 one token, row 2 two: what the widest row has says nothing of the others."""
    options: dict[str, Any] = {"logits_processor": [lambda ids, scores: scores]} if lockstep else {}
    inputs = prompts(4)
    plain = generate(inputs, return_dict_in_generate=False, **options)
    uneven = Uneven(plain, shape == "tree")
    out = generate(inputs, speculator=uneven, speculation_config=SHAPES[shape], **options)
    assert torch.equal(out.sequences, plain)
    for row, noted in zip(out.speculation.per_row, uneven.noted, strict=True):
        assert row.proposed == sum(guesses for guesses, _ in noted)
        deepest = [depth for _, depth in noted]
        assert row.proposed_at == [sum(depth > place for depth in deepest) for place in range(max(deepest))]
    assert [len(row.proposed_at) for row in out.speculation.per_row] == [0, 1, 2, 3]


def test_a_row_whose_end_was_not_foreseen_holds_no_other_up() -> None:
    """In lockstep, where a token that was not guessed ends the step of all rows, unless it ended its own."""
    options: dict[str, Any] = {"logits_processor": [lambda ids, scores: scores], "max_new_tokens": 20}
    inputs = prompts(2)
    said = generate(inputs, **options).sequences
    end = next(token for token in said[0, 13 + 6 :].tolist() if token not in said[1, 13:])
    options |= {"eos_token_id": end, "pad_token_id": 0}
    plain = generate(inputs, **options).sequences
    place = plain[0].tolist().index(end) - 13
    assert place % 5 in (1, 2, 3), "inside a block of four guesses and one more token"
    foreseen, otherwise = plain, plain.masked_fill(plain == end, (end + 1) % 99)
    steps = []
    for guesses in (foreseen, otherwise):
        out = generate(inputs, speculator=Oracle(guesses, wrong=1000), num_speculative_tokens=4, **options)
        assert torch.equal(out.sequences, plain)
        steps.append(out.speculation.steps)
    assert steps == [4, 4]


def test_known_acceptance() -> None:
    """Of a chain of four whose third guess is wrong two are accepted, and a third token is the target's own."""
    plain = generate(prompts(1)).sequences

    class ThirdIsWrong(Speculator):
        def drafter(self, request: DraftContext) -> Drafter:
            return self.Drafter()

        class Drafter(Drafter):
            length = 12

            def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
                self.length += int(news.counts)
                guesses = plain[:, self.length : self.length + min(4, limit)].clone()
                if guesses.shape[1] > 2:
                    guesses[0, 2] += 1
                return Proposal.chain(news.root, guesses)

            def keep_rows(self, rows: Tensor) -> None:
                raise AssertionError("the only row is never left alone")

    stats = generate(prompts(1), speculator=ThirdIsWrong(), max_new_tokens=5 * 3).speculation
    assert torch.equal(plain[0, 13 : 13 + 15], torch.tensor(stats.per_row[0].tokens))
    assert (stats.steps, stats.emitted, stats.accepted) == (5, 15, 10)
    assert stats.proposed == 4 + 4 + 4 + 4 + 2
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert stats.mean_accepted_length == 3.0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_never_right_is_warned_of_once(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(wrong: int, **options: Any) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            given = {"speculator": Oracle(plain, wrong), "speculation_config": SHAPES[shape], **options}
            generate(prompts(3), **given)
        return caplog.text.count("Oracle: no draft token was accepted in 20 steps or more")

    plain = generate(prompts(3)).sequences
    logging.getLogger("transformers").propagate = True
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # another test may have been warned before
    assert warnings(wrong=5) == 0
    assert warnings(wrong=1, max_new_tokens=4) == 0, "too few to tell"
    assert warnings(wrong=1, max_new_tokens=16) == 1
    assert warnings(wrong=1, max_new_tokens=16) == 0


def test_the_text_is_shown_with_the_tokenizer_of_the_call() -> None:
    out = generate(prompts(1), speculator=draft(), tokenizer=tokenizer())
    html = out.speculation._repr_html_()
    assert "accepted draft tokens" in html
    assert "accepted draft tokens" not in generate(prompts(1), speculator=draft()).speculation._repr_html_()


# --- Memory ----------------------------------------------------------------------------------------------------------


class Watched(Speculator):
    """Guess as ``draft`` does, and note the tensors over the vocabulary that are there before each proposal."""

    def __init__(self) -> None:
        self.draft = VanillaSpeculator(draft())
        self.found: list[list[torch.Size]] = []

    def drafter(self, request: DraftContext) -> Drafter:
        drafter = self.draft.drafter(request)
        propose = drafter.propose

        def watch(news: AcceptedTokens, limit: int) -> Proposal:
            tensors = [one for one in gc.get_objects() if type(one) is Tensor]
            self.found.append([one.shape for one in tensors if one.shape[-1:] == (99,) and one.numel() > 99])
            return propose(news, limit)

        drafter.propose = watch  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [None, "dynamic", "sampled"])
def test_nothing_as_large_as_nodes_times_vocabulary_outlives_a_step(tree: Any, sample: bool) -> None:
    """Neither the target's logits nor the draft's distribution; 99 is the size of the vocabulary."""
    config = SpeculationConfig(num_speculative_tokens=3, tree=tree, tree_topk=2, num_tree_tokens=6)
    watched = Watched()
    gc.collect()
    gc.freeze()  # what other tests left is not looked through
    generate(prompts(1), speculator=watched, speculation_config=config, do_sample=sample)
    assert len(watched.found) > 3
    assert not any(watched.found)


class Looking(BaseStreamer):
    """Notes at each token which tensors as long as the prompt are in memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.found: list[list[torch.Size]] = []

    def put(self, value: Tensor) -> None:
        tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
        self.found.append([one.shape for one in tensors if one.ndim > 2 and self.length in one.shape])

    def end(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa", "dspark", "vanilla"])
def test_nothing_of_the_prompt_outlives_its_reading(kind: str) -> None:
    """Neither the first keys and values, which buffers replace, nor the features that the draft has read."""
    model = AutoModelForCausalLM.from_pretrained(demo.path())
    inputs = {"input_ids": torch.randint(10, 2000, (1, 137)), "attention_mask": torch.ones(1, 137, dtype=torch.long)}
    looking, config = Looking(137), SpeculationConfig(num_speculative_tokens=3, self_check=False)
    gc.collect()
    gc.freeze()
    options = {"speculator": demo.path(f"draft-{kind}"), "speculation_config": config, "streamer": looking}
    model.generate(**inputs, **options, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert any(looking.found[:3]) and not looking.found[-1], looking.found


def test_cache_grows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A huge limit reserves nothing, and buffers are copied seldom, but for small ones."""
    monkeypatch.setattr(buffers, "SMALL_BUFFER", 0)
    sizes: list[int] = []
    make_room = SlotBuffer._grow

    def long_enough(ids: Tensor, scores: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] > 60)

    def watch(buffer: SlotBuffer, *args: Any) -> Tensor:
        data = make_room(buffer, *args)
        sizes.append(data.shape[buffer.dim])
        return data

    monkeypatch.setattr(SlotBuffer, "_grow", watch)
    generate(prompts(2), speculator="ngram", max_new_tokens=10**6, stopping_criteria=[long_enough])
    assert sizes
    assert max(sizes) < 4 * buffers.SLOTS_ADDED
    sizes.clear()
    monkeypatch.setattr(buffers, "SLOTS_ADDED", 16)
    plain = generate(prompts(2), max_new_tokens=160).sequences
    out = generate(prompts(2), speculator=Oracle(plain, wrong=10), max_new_tokens=160)
    assert torch.equal(out.sequences, plain)
    assert max(sizes) < 2 * 173
    assert 2 < len(set(sizes)) < 8


def test_public_names() -> None:
    assert isinstance(generate(prompts(1), speculator="ngram"), hf_spec.SpeculativeOutput)
