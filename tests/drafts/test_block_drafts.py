"""DFlash, DSpark and P-EAGLE: logits, guesses and accepted lengths of the other projects' own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import CLOSE, DFLASH, DFLASH2, DSPARK, GOLDENS, JETSPEC, PEAGLE, load_draft, load_target, outputs
from torch import Tensor

from hf_spec import AcceptedTokens, DraftContext, Proposal, SpeculationConfig
from hf_spec.checkpoints.auto import AutoDraftModel

CASES = tuple(case for case in (*DFLASH, *DSPARK) if (GOLDENS / case / "target").exists())
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
READS_WINDOWS = {"sliding": {}, "sliding_causal": {"sliding_window_non_causal": False}}
READS_WINDOWS["sliding_anchor"] = {"sliding_window_per_slot": False}


class Logits:
    """Stand for the processors of a call: keep the logits of every guess."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        self.seen.append(logits)
        return logits.float().log_softmax(-1)


def drafter_of(
    draft: Any, target: Any, ids: Tensor, features: Tensor, mask: Tensor | None = None, **settings: Any
) -> tuple[Any, Logits]:
    """Start a drafter behind a prompt ``ids`` (batch, n) that the target has read with ``features``."""
    logits = Logits()
    sample = settings.pop("sample", False)
    config = SpeculationConfig(**settings)
    mask = torch.ones_like(ids) if mask is None else mask
    return draft.drafter(DraftContext(target, ids, mask, features, config, logits, sample)), logits


def news(tokens: Tensor, features: Tensor, counts: Tensor | None = None) -> AcceptedTokens:
    return AcceptedTokens(tokens, torch.full((len(tokens),), tokens.shape[1]) if counts is None else counts, features)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- one block --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_slots_say_what_they_say_in_the_peers_code(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    ids, features, guesses = io["draft/ids"], io["draft/features"], draft.config.num_draft_tokens
    for length, expected in zip(io["draft/context_len"].tolist(), io["draft/base_logits"], strict=True):
        out = draft(ids[None, length : length + 1], features=features[None, :length])
        torch.testing.assert_close(out.logits[0], expected[-guesses:], **CLOSE)
        if "draft/hidden" in io:
            states = io["draft/hidden"][io["draft/context_len"].tolist().index(length)]
            torch.testing.assert_close(out.hidden_states[0], states, **CLOSE)


@torch.no_grad()
def test_eager_attention_sees_the_same() -> None:
    case = "sp_dflash_draft_qwen3"
    io, draft = outputs(case), load_draft(case, attn_implementation="eager")
    out = draft(io["draft/ids"][None, 14:15], features=io["draft/features"][None, :14])
    torch.testing.assert_close(out.logits[0], io["draft/base_logits"][2, 1:], **CLOSE)


@torch.no_grad()
def test_context_grows_and_blocks_leave_nothing_behind(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    ids, features, length = io["draft/ids"][None], io["draft/features"][None], int(io["draft/context_len"][-1])
    expected = draft(ids[:, length : length + 1], features=features[:, :length]).logits
    cache, start = None, 0
    for end in (length - 5, length - 4, length - 3, length):  # a block in between, whose guesses are all rejected
        out = draft(ids[:, end : end + 1], features=features[:, start:end], past_key_values=cache)
        cache, start = out.past_key_values, end
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [*CASES, PEAGLE[0]])
@torch.no_grad()
def test_rows_of_a_ragged_batch_are_what_they_are_alone(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    lengths = io["draft/context_len"].tolist()
    ids, features = (torch.cat([one, one[:4]]) for one in (io["draft/ids"], io["draft/features"]))  # to go on with
    first = [length - more for length, more in zip(lengths, (2, 0, 4), strict=True)]  # read as the prompt
    longest = max(first) + 1
    prompt, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    states = torch.full((3, longest, features.shape[1]), 7.0)
    for row, end in enumerate(first):
        prompt[row, longest - end - 1 :], mask[row, longest - end - 1 :] = ids[: end + 1], 1
        states[row, longest - end - 1 :] = features[: end + 1]
    drafter, _ = drafter_of(draft, target, prompt, states, mask)
    # The first guesses are thrown away but for the root's; then the rows advance by 2, 1 and 4 tokens more.
    root = torch.stack([ids[end + 1] for end in first])[:, None]
    drafter.propose(news(root, torch.stack([features[end] for end in first])[:, None]), 3)
    counts = torch.tensor([2, 1, 4])
    tokens, beside = torch.zeros(3, 4, dtype=torch.long), torch.full((3, 4, features.shape[1]), 7.0)
    last = [end + 1 + count for end, count in zip(first, counts.tolist(), strict=True)]  # the roots
    for row, (end, count) in enumerate(zip(last, counts.tolist(), strict=True)):
        tokens[row, :count], beside[row, :count] = ids[end - count + 1 : end + 1], features[end - count : end]
    guesses = draft.config.num_speculative_tokens
    proposal = drafter.propose(news(tokens, beside, counts), guesses)

    def check(found: Proposal, rows: list[int]) -> None:
        for place, end in enumerate(last[row] for row in rows):
            alone, _ = drafter_of(draft, target, ids[None, :end], features[None, :end])
            expected = alone.propose(news(ids[None, end : end + 1], features[None, end - 1 : end]), guesses)
            assert found.tokens[place].tolist() == expected.tokens[0].tolist()

    check(proposal, [0, 1, 2])
    for rows, kept in (([0, 2], [0, 2]), ([2], [1])):  # by the numbers that they have among those that are left
        drafter.keep_rows(torch.tensor(kept))
        last = [end + 1 for end in last]
        root = torch.stack([ids[last[row]] for row in rows])[:, None]
        before = torch.stack([features[last[row] - 1] for row in rows])[:, None]
        check(drafter.propose(news(root, before), guesses), rows)


@pytest.mark.parametrize("reading", READS_WINDOWS)
@torch.no_grad()
def test_windows_are_read_in_all_three_ways(reading: str, tmp_path: Path) -> None:
    case = "zl_dflash_qwen3"
    shutil.copytree(GOLDENS / case / "checkpoint", tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | WINDOW | {"is_causal": False}))
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32, target=load_target(case))
    assert draft.config.sliding_window_per_slot and draft.config.sliding_window_non_causal
    for name, value in READS_WINDOWS[reading].items():
        setattr(draft.config, name, value)
    io = outputs(case)
    for length, expected in zip(io["draft/context_len"].tolist(), io[f"{reading}/logits"], strict=True):
        out = draft(io["draft/ids"][None, length : length + 1], features=io["draft/features"][None, :length])
        torch.testing.assert_close(out.logits[0], expected, **CLOSE)


@torch.no_grad()
def test_a_window_as_servers_read_it() -> None:
    case = "sp_dflash_draft_qwen3"
    io, draft = outputs(case), load_draft(case)
    draft.config.sliding_window_per_slot = True
    for length, expected in zip(io["draft/context_len"].tolist(), io["draft/serving_window_base_logits"], strict=True):
        out = draft(io["draft/ids"][None, length : length + 1], features=io["draft/features"][None, :length])
        torch.testing.assert_close(out.logits[0], expected[1:], **CLOSE)


# -- guesses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, PEAGLE[0]])
@torch.no_grad()
def test_chains_are_those_of_the_peers_code(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    ids, features = io["draft/ids"][None], io["draft/features"][None]
    for i, length in enumerate(io["draft/context_len"].tolist()):
        drafter, logits = drafter_of(draft, target, ids[:, :length], features[:, :length])
        given = news(ids[:, length : length + 1], features[:, length - 1 : length])
        proposal = drafter.propose(given, len(io["draft/tokens"][i]))
        assert proposal.tokens[0, 1:].tolist() == io["draft/tokens"][i].tolist()
        found = torch.cat([step.flatten(0, 1) for step in logits.seen])
        known = slice(None) if draft.target_ids is None else draft.target_ids
        torch.testing.assert_close(found[:, known], io["draft/logits"][i], **CLOSE)


@pytest.mark.parametrize("case", DSPARK)
@torch.no_grad()
def test_confidence_is_that_of_the_peers_code(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    for i, length in enumerate(io["draft/context_len"].tolist()):
        root, features = io["draft/ids"][None, length : length + 1], io["draft/features"][None, :length]
        hidden = draft(root, features=features).hidden_states
        before = torch.cat([root[0], io["draft/tokens"][i, :-1]])
        _, confidence = draft.read(before[None], hidden)
        torch.testing.assert_close(confidence[0], io["draft/confidence"][i], **CLOSE)


def accepted_lengths(case: str, **settings: Any) -> tuple[list[int], list[list[int]], list[int]]:
    """Generate as the peer did: the text, the guesses of every step and how many of them were accepted."""
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    prompt, made = io["e2e/prompt"][None], []
    drafter_for = draft.drafter

    def watched(request: DraftContext) -> Any:
        drafter = drafter_for(request)
        propose = drafter.propose

        def keep(given: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(given, limit)
            made.append(proposal.tokens[0, 1:][proposal.present[0, 1:]].tolist())
            return proposal

        drafter.propose = keep
        return drafter

    draft.drafter = watched
    expected = io["e2e/greedy_ids"]
    out = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(expected) + 16 - prompt.shape[1],  # the end of the text shortens no block of the peer's
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        speculator=draft,
        speculation_config=draft.defaults().merge(**settings),
        return_dict_in_generate=True,
    )
    text = out.sequences[0].tolist()
    lengths, place = [], prompt.shape[1] + 1
    for guesses in made:
        right = 0
        while right < len(guesses) and place + right < len(text) and guesses[right] == text[place + right]:
            right += 1
        lengths.append(right)
        place += right + 1
    return text[: len(expected)], made, lengths


@pytest.mark.parametrize("case", [*CASES, PEAGLE[0], *JETSPEC, *DFLASH2])
def test_generation_accepts_what_the_peer_accepted(case: str) -> None:
    io = outputs(case)
    text, guesses, lengths = accepted_lengths(case)
    steps = len(io["e2e/drafts"])
    assert text == io["e2e/greedy_ids"].tolist()
    assert guesses[:steps] == io["e2e/drafts"].tolist()
    assert lengths[:steps] == io["e2e/accept_len"].tolist()


def test_confidence_cuts_chains_where_the_peer_cuts_them() -> None:
    io = outputs("ds_dspark_qwen3")
    text, guesses, lengths = accepted_lengths("ds_dspark_qwen3", confidence_threshold=float(io["e2e_cut/threshold"]))
    steps = len(io["e2e_cut/proposal_len"])
    assert text == io["e2e_cut/spec_ids"].tolist()
    assert [len(chain) for chain in guesses[:steps]] == io["e2e_cut/proposal_len"].tolist()
    assert lengths[:steps] == io["e2e_cut/accept_len"].tolist()


# -- P-EAGLE ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_peagle_reads_text_as_the_peer_does() -> None:
    case = PEAGLE[0]
    io, draft = outputs(case), load_draft(case)
    length = int(io["draft/context_len"][-1])
    out = draft(io["draft/ids"][None, 1 : length + 1], features=io["draft/features"][None, :length])
    torch.testing.assert_close(out.logits[0], io["draft/row_logits"], **CLOSE)


@torch.no_grad()
def test_a_window_hides_old_text_from_every_depth() -> None:
    """Rows of a sliding layer see so many positions, wherever their chunk ends: one token at a time says the same."""
    case = PEAGLE[0]
    draft, target, io = load_draft(case), load_target(case), outputs(case)
    draft.layer_config.layer_types, draft.layer_config.sliding_window = ["sliding_attention"], 5
    ids, features = io["draft/ids"][None], io["draft/features"][None]
    at_once, said_at_once = drafter_of(draft, target, ids[:, :12], features[:, :12])
    whole = at_once.propose(news(ids[:, 12:13], features[:, 11:12]), 3)
    slowly, said_slowly = drafter_of(draft, target, ids[:, :4], features[:, :4])
    for end in range(4, 13):
        proposal = slowly.propose(news(ids[:, end : end + 1], features[:, end - 1 : end]), 3)
    assert proposal.tokens.tolist() == whole.tokens.tolist()
    torch.testing.assert_close(said_slowly.seen[-1], said_at_once.seen[-1], **CLOSE)
    unwindowed = load_draft(case)
    other, said = drafter_of(unwindowed, target, ids[:, :12], features[:, :12])
    other.propose(news(ids[:, 12:13], features[:, 11:12]), 3)
    assert not torch.allclose(said.seen[-1], said_at_once.seen[-1], atol=0.1)
