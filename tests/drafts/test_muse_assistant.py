"""Muse Glimmer's assistant, a DFlash draft of transformers: numbers, text, and the scales of the target in ``q``."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import CLOSE, GOLDENS, outputs, tiny_target
from test_block_distribution import FLAGS, LAYERS
from test_block_exactness import SHAPES
from test_distribution_end_to_end import VANILLA, distribution, model, sample, small_buffers  # noqa: F401
from test_verification import TOO_FAR, deviation
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForImageTextToText

import hf_spec
from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, Speculator, as_speculator
from hf_spec.checkpoints import resolve
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.known import KnownDraft
from hf_spec.checkpoints.trimming import trimmed
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.unroll.feedback import UnrollInput

CASE = "hf_muse_glimmer"
CHECKPOINT = GOLDENS / CASE / "checkpoint"


@functools.cache
def target() -> Any:
    return AutoModelForImageTextToText.from_pretrained(GOLDENS / CASE / "target", dtype=torch.float32).eval()


def draft(**changes: Any) -> Any:
    loaded = AutoDraftModel.from_pretrained(CHECKPOINT, target=target(), dtype=torch.float32)
    for name, value in changes.items():
        setattr(loaded.config.layers if name == "sliding_window" else loaded.config, name, value)
    return loaded


def blocks(draft: Any, io: dict[str, Tensor]) -> list[Any]:
    ids, features = io["draft/ids"][None], io["draft/features"][None]
    return [draft(ids[:, n : n + 1], features=features[:, :n]) for n in io["draft/context_len"].tolist()]


@torch.no_grad()
def test_slots_say_what_they_say_in_transformers() -> None:
    io, found = outputs(CASE), blocks(draft(), outputs(CASE))
    for out, hidden, logits in zip(found, io["draft/hidden"], io["draft/logits"], strict=True):
        torch.testing.assert_close(out.hidden_states[0], hidden, **CLOSE)
        torch.testing.assert_close(out.logits[0], logits, **CLOSE)
    mistakes: list[dict[str, Any]] = [
        {"sliding_window": 6},  # as z-lab reads it: one key less
        {"sliding_window": None},
        {"block_causal": True, "sliding_window_non_causal": False},
        {"sliding_window_per_slot": False},
    ]
    for mistake in mistakes:
        wrong = torch.stack([out.logits[0] for out in blocks(draft(**mistake), io)])
        assert (wrong - io["draft/logits"]).abs().max() > 0.1, mistake


@torch.no_grad()
def test_root_and_masks_are_embedded_by_the_raw_table() -> None:
    io, embeddings = outputs(CASE), target().get_input_embeddings()
    n = int(io["draft/context_len"][0])
    ids = torch.tensor([[int(io["draft/ids"][n]), 3, 3, 3, 3]])
    torch.testing.assert_close(draft().embed(ids)[0], io["draft/noise_embeds"][0], **CLOSE)
    assert (embeddings(ids)[0] - io["draft/noise_embeds"][0]).abs().max() > 0.1  # the target norms them


@torch.no_grad()
def test_training_sees_what_drafting_sees_and_scales_it_as_the_target() -> None:
    io, one = outputs(CASE), draft()
    anchors = io["block_anchors"]
    marked = torch.zeros_like(io["block_ids"], dtype=torch.bool).index_fill(0, anchors, True)
    made = one.unroll(UnrollInput(io["block_ids"][None], None, io["block_features"][None], marked[None]), 4)
    logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)])
    expected = 9 * (io["block_logits"][:, 1:] * 0.7 / 9).tanh()
    kept = anchors > 0  # training has no block before any context
    torch.testing.assert_close(logits[:, anchors[kept] - 1].transpose(0, 1), expected[kept], **CLOSE)


def generate(prompt: Tensor, mask: Tensor, new: int, **options: Any) -> Any:
    given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return target().generate(prompt, attention_mask=mask, **given | options, return_dict_in_generate=True)


@pytest.mark.parametrize("given", ["draft", "model", "path"])
def test_end_to_end(given: str) -> None:
    io = outputs(CASE)
    loaded = {"draft": draft, "path": lambda: CHECKPOINT}
    loaded["model"] = lambda: AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32)
    prompt, expected = io["e2e/prompt"][None], io["e2e/spec_ids"]
    options = {"speculator": loaded[given](), "num_speculative_tokens": 4}
    out = generate(prompt, torch.ones_like(prompt), len(expected) - prompt.shape[1], **options)
    assert out.sequences[0].tolist() == expected.tolist() == io["e2e/greedy_ids"].tolist()
    assert out.speculation.counts.steps == len(io["e2e/accept_len"])
    assert out.speculation.counts.accepted == int(io["e2e/accept_len"].sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_same_text_as_plain_generate(shape: str) -> None:
    io, accepted = outputs(CASE), 0
    rows = [io["e2e/prompt"], io["draft/ids"][:3], io["draft/ids"][4:13]]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    for batch in (1, 3):
        given = ids[3 - batch :], mask[3 - batch :]
        for cache in (None, "static"):
            text = generate(*given, 24, cache_implementation=cache).sequences
            options = {"speculator": draft(), "speculation_config": SHAPES[shape], "cache_implementation": cache}
            out = generate(*given, 24, **options)
            assert torch.equal(out.sequences, text), (batch, cache)
            accepted += out.speculation.counts.accepted
    assert accepted > 0


def test_a_loaded_model_lends_its_weights_and_is_made_into_a_draft_once() -> None:
    assistant = AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32)
    found = as_speculator(assistant, target())
    assert as_speculator(assistant, target()) is found
    assert found.fc.weight.data_ptr() == assistant.encoder.fc.weight.data_ptr()
    assistant.to(torch.float64)
    again = as_speculator(assistant, target())
    assert again is not found and again.dtype == torch.float64


# -- the target's scales ----------------------------------------------------------------------------------------------


class Noting(Speculator):
    """Draft with ``draft``, and note what it proposes; ``lie`` takes the scales out of ``q``."""

    def __init__(self, draft: Any, lie: bool = False) -> None:
        self.model, self.lie, self.noted = draft, lie, list[Proposal]()

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return self.model.feature_layers(target)

    def drafter(self, request: DraftContext) -> Drafter:
        drafter = self.model.drafter(request)
        propose, said = drafter.propose, self.model.over_target

        def noting(accepted: AcceptedTokens, limit: int) -> Proposal:
            blocks: list[Tensor] = []
            self.model.over_target = lambda logits: (blocks.append(logits), said(logits))[1]
            proposal = propose(accepted, limit)
            if self.lie and proposal.q is not None:
                unscaled = request.log_probs(blocks[-1].float())[:, : proposal.q.shape[1]].exp()
                proposal = replace(proposal, q=unscaled)
            self.noted.append(proposal)
            return proposal

        drafter.propose = noting
        return drafter


def test_q_is_scaled_and_capped_as_the_targets_distribution() -> None:
    io, noting = outputs(CASE), Noting(draft())
    prompt = io["e2e/prompt"][None]
    raw: list[Tensor] = []
    logits = noting.model.logits
    noting.model.logits = lambda hidden: raw.append(logits(hidden)) or raw[-1]
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.8, "num_speculative_tokens": 4, "speculator": noting}
    generate(prompt, torch.ones_like(prompt), 12, **options)
    drawn = [(one, said) for one, said in zip(noting.noted, raw, strict=True) if one.q is not None]
    assert len(drawn) > 2
    for proposal, said in drawn:
        depth = proposal.max_depth
        expected = ((9 * (said[:, :depth] * 0.7 / 9).tanh()) / 0.8).softmax(-1)
        torch.testing.assert_close(proposal.q, expected, atol=1e-5, rtol=1e-4)
        assert (proposal.q - (said[:, :depth] / 0.8).softmax(-1)).abs().max() > 0.05


@functools.cache
def scaled() -> Any:
    torch.manual_seed(0)
    flags = FLAGS | {"scored_as_target": True}
    small = DFlashDraftModel(DFlashSpeculatorConfig.for_target(model().config, LAYERS, **flags)).eval()
    small.bind(model())
    small._scales_of_target = {"output_multiplier": 0.3, "final_logit_softcapping": 2.0}
    small.bind = lambda target: None  # a tiny llama has no scales
    return small


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block"])
def test_sampled_text_follows_the_targets_distribution(case: str) -> None:
    assert deviation(sample(scaled(), VANILLA[case]), distribution()) < TOO_FAR


def test_q_without_the_scales_is_found_out() -> None:
    config = SpeculationConfig(num_speculative_tokens=3, verification="token")
    assert deviation(sample(Noting(scaled(), lie=True), config), distribution()) > 3 * TOO_FAR


# -- files ------------------------------------------------------------------------------------------------------------


def rewritten(tmp_path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    shutil.copytree(CHECKPOINT, tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    raw = {name: one for name, one in json.loads(file.read_text()).items() if name not in drop} | changes
    file.write_text(json.dumps(raw))
    return tmp_path / "draft"


def test_keys_that_are_not_in_the_file_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import MuseGlimmerAssistantConfig

    path = rewritten(tmp_path, ("layer_types", "rope_parameters", "sliding_window", "rms_norm_eps", "block_size"))
    config, theirs = AutoDraftModel.from_pretrained(path).config, MuseGlimmerAssistantConfig()
    assert config.layers.layer_types == ["sliding_attention"] * 2
    assert config.layers.sliding_window == theirs.sliding_window + 1  # theirs includes the token at that distance
    assert config.layers.rope_parameters["rope_theta"] == theirs.default_theta
    assert config.layers.rms_norm_eps == theirs.rms_norm_eps and config.block_size == theirs.block_size


@torch.no_grad()
def test_what_is_saved_says_the_same(tmp_path: Path) -> None:
    io = outputs(CASE)
    expected = blocks(draft(), io)[1].logits
    draft().save_pretrained(tmp_path / "saved")
    convert(CHECKPOINT, tmp_path / "converted", dtype=torch.float32)
    for place in ("saved", "converted"):
        again = AutoDraftModel.from_pretrained(tmp_path / place, target=target(), dtype=torch.float32)
        assert again.config.scored_as_target and again._scales_of_target == draft()._scales_of_target
        assert torch.equal(blocks(again, io)[1].logits, expected)
    with pytest.raises(ValueError, match="cannot express scored_as_target: set output_multiplier"):
        convert(CHECKPOINT, tmp_path / "flat", "dflash")
    report = hf_spec.inspect(CHECKPOINT)
    assert (report.layout, report.problem, report.engines["vLLM"]) == ("muse (transformers)", None, [])
    assert "all tokens of the target" in str(report)


def test_the_vocabulary_is_the_targets() -> None:
    one = AutoDraftModel.from_pretrained(CHECKPOINT, dtype=torch.float32)
    assert one.config.layers.vocab_size == 4  # the mask token is 3
    other = build("llama", vocab_size=50, num_hidden_layers=6)
    other.generate(torch.tensor([[5, 6, 7]]), speculator=one, max_new_tokens=4)
    assert (one.config.layers.vocab_size, one._scales_of_target) == (50, {})
    one.bind(target())
    assert (one.config.layers.vocab_size, len(one._scales_of_target)) == (80, 2)
    with pytest.raises(ValueError, match="mask_token_id is 3, but the target has 2 tokens"):
        AutoDraftModel.from_pretrained(CHECKPOINT, target=tiny_target(vocab_size=2))


def test_a_trimmed_one_stays_so_when_it_is_bound_and_saved(tmp_path: Path) -> None:
    kept = [3, 7, 20, 41, 79]
    with pytest.raises(ValueError, match=r"call draft\.bind\(target\) first"):
        trimmed(AutoDraftModel.from_pretrained(CHECKPOINT, dtype=torch.float32), kept)
    small = trimmed(draft(), kept)
    text = target().generate(torch.tensor([[5, 6, 7]]), speculator=small, max_new_tokens=6, do_sample=False)
    assert torch.equal(text, target().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False))
    small.save_pretrained(tmp_path)
    again = AutoDraftModel.from_pretrained(tmp_path, target=target(), dtype=torch.float32)
    assert again.config.draft_vocab_size == 5 and again.target_ids.tolist() == kept


def test_auto_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = KnownDraft("some/target", "some/assistant", "dflash", "transformers", None)
    monkeypatch.setattr(resolve, "known_drafts", lambda target: [entry])
    monkeypatch.setattr(resolve, "cached", lambda draft: CHECKPOINT)
    assert type(as_speculator("auto", copy.deepcopy(target()))) is DFlashDraftModel
