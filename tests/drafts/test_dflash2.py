"""DFlash2: convolutions, selector, trees and files, by the numbers of z-lab's and speculators' own code."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import CLOSE, DFLASH2, GOLDENS, load_draft, load_target, outputs, tiny_target
from safetensors.torch import load_file, save_file
from test_block_drafts import Logits, drafter_of, news
from test_block_exactness import FLAGS, LAYERS, WINDOW
from test_block_training import examples, trainer
from test_distribution_end_to_end import VANILLA, distribution, model, sample, small_buffers  # noqa: F401
from test_exactness import CHAIN, TREE, Way, plain, speculative
from test_verification import TOO_FAR, deviation
from torch import Tensor
from transformers import AutoModel

from hf_spec import AcceptedTokens, Drafter, Proposal, SpeculationConfig, Speculator
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.inspection import inspect
from hf_spec.drafts.base import DraftContext, draft_log_probs
from hf_spec.drafts.dflash2.configuration import DFlash2SpeculatorConfig
from hf_spec.drafts.dflash2.modeling import DFlash2DraftModel, SelectorGrowth
from hf_spec.training.losses import ChunkedLoss
from hf_spec.unroll.feedback import UnrollInput

SMALL = {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}


def block(draft: Any, io: dict[str, Tensor], place: int, **given: Any) -> Any:
    n = int(io["draft/context_len"][place])
    return draft(io["draft/ids"][None, n : n + 1], features=io["draft/features"][None, :n], **given)


def growth_of(draft: Any, target: Any, io: dict[str, Tensor], place: int) -> tuple[SelectorGrowth, Logits]:
    """Start the selector after a golden context; it says log-probabilities and keeps scores."""
    n, said = int(io["draft/context_len"][place]), Logits()
    ids = io["draft/ids"][None]
    request = DraftContext(target, ids[:, :n], torch.ones_like(ids[:, :n]), None, SpeculationConfig(), said, False)
    draft.bind(target)
    return SelectorGrowth(draft, request, ids[:, n], block(draft, io, place)), said


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DFLASH2)
@torch.no_grad()
def test_slots_say_what_they_say_in_the_peers_code(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    for place in range(len(io["draft/context_len"])):
        out = block(draft, io, place)
        torch.testing.assert_close(out.hidden_states[0], io["draft/hidden"][place], **CLOSE)
        wanted = io["draft/base_logits"][place][-draft.config.num_draft_tokens :]
        torch.testing.assert_close(out.logits[0], wanted, **CLOSE)
    for layer in draft.layers:  # the negative control: without the neighbours
        layer.attention_conv.base_kernel[:, 1:] = 0
        layer.attention_conv.kernel_projection.weight.zero_()
    assert (block(draft, io, 0).hidden_states[0] - io["draft/hidden"][0]).abs().max() > 0.01


@pytest.mark.parametrize("case", DFLASH2)
@torch.no_grad()
def test_the_selector_scores_pairs(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    for place, tokens in enumerate(io["draft/tokens"]):
        growth, said = growth_of(draft, target, io, place)
        for depth, token in enumerate(tokens):
            scores = said.seen[-1][0, 0]
            candidates = io["draft/candidates"][place, depth]
            torch.testing.assert_close(scores[candidates], io["draft/scores"][place, depth], **CLOSE)
            assert scores.isfinite().sum() == len(candidates) and int(scores.argmax()) == int(token)
            if depth + 1 < len(tokens):
                growth.step(token[None, None], depth + 1, None, None)
        for depth in range(1, len(tokens) if "draft/edge_scores" in io else 0):  # a tree asks for all pairs
            before, here = io["draft/candidates"][place, depth - 1], io["draft/candidates"][place, depth]
            growth.step(before[None], depth, None, None)
            torch.testing.assert_close(said.seen[-1][0][:, here], io["draft/edge_scores"][place, depth - 1], **CLOSE)
    assert not torch.equal(io["draft/tokens"], io["draft/unary_tokens"])  # what is drafted without pairs


@pytest.mark.parametrize("case", DFLASH2)
@torch.no_grad()
def test_chains_are_those_of_the_peers_code(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    ids, features = io["draft/ids"][None], io["draft/features"][None]
    for place, n in enumerate(io["draft/context_len"].tolist()):
        drafter, _ = drafter_of(draft, target, ids[:, :n], features[:, :n])
        proposal = drafter.propose(news(ids[:, n : n + 1], features[:, n - 1 : n]), draft.config.num_draft_tokens)
        assert proposal.tokens[0, 1:].tolist() == io["draft/tokens"][place].tolist()
        drafter, _ = drafter_of(draft, target, ids[:, :n], features[:, :n], sample=True)
        q = drafter.propose(news(ids[:, n : n + 1], features[:, n - 1 : n]), draft.config.num_draft_tokens).q
        assert q is not None and ((q > 0).sum(-1) == draft.config.selector_top_k).all()
        torch.testing.assert_close(q.sum(-1), torch.ones_like(q[..., 0]))
        first = q[0, 0][io["draft/candidates"][place, 0]]
        torch.testing.assert_close(first, io["draft/scores"][place, 0].softmax(-1), **CLOSE)


@torch.no_grad()
def test_blocks_side_by_side_do_not_see_each_other() -> None:
    """Two blocks in one forward of a convolution are the blocks one after the other."""
    draft = load_draft(DFLASH2[0])
    conv, slots = draft.layers[0].attention_conv, draft.config.block_size
    torch.manual_seed(0)
    states = torch.randn(1, 2 * slots, draft.layer_config.hidden_size)
    both = conv(states, conv.kernels(states)[0])
    alone = [conv(one, conv.kernels(one)[0]) for one in states.split(slots, dim=1)]
    torch.testing.assert_close(both, torch.cat(alone, dim=1))
    conv.slots = 2 * slots  # as one block: a mistake
    assert not torch.allclose(conv(states, conv.kernels(states)[0]), both, atol=1e-3)


# -- text -------------------------------------------------------------------------------------------------------------


def draft_for(target: Any, **flags: Any) -> Any:
    torch.manual_seed(0)
    config = DFlash2SpeculatorConfig.for_target(target.config, LAYERS | WINDOW, block_size=4, **FLAGS | SMALL | flags)
    draft = DFlash2DraftModel(config).eval()
    with torch.no_grad():
        draft.candidate_selector.successor_codebook.normal_()
        draft.candidate_selector.predecessor_codebook.normal_()
        draft.candidate_selector.hidden_projection.weight.normal_()  # so that pairs decide much
    return draft


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_same_text_as_plain_generate(name: str) -> None:
    target = build(name)
    draft = draft_for(target)
    for batch in (1, 3):
        text = plain(target, batch)
        for shape, settings in {"chain": CHAIN, "dynamic": TREE}.items():
            out = speculative(target, batch, Way(shape, draft, settings))
            assert torch.equal(out.sequences, text), f"{shape}, batch {batch}"
            assert out.speculation.counts.proposed > 0


@functools.cache
def small() -> Any:
    layers, flags = {"num_hidden_layers": 1, "head_dim": 8}, {"aux_hidden_state_layer_ids": [0, 1]}
    torch.manual_seed(0)
    config = DFlash2SpeculatorConfig.for_target(
        model().config, layers, block_size=4, mask_token_id=0, **flags, **SMALL | {"selector_top_k": 3}
    )
    draft = DFlash2DraftModel(config).eval()
    with torch.no_grad():
        draft.candidate_selector.successor_codebook.normal_()
        draft.candidate_selector.predecessor_codebook.normal_()
        draft.candidate_selector.hidden_projection.weight.normal_()  # so that pairs decide much
    return draft


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block"])
def test_sampled_text_has_the_targets_distribution(case: str) -> None:
    assert deviation(sample(small(), VANILLA[case]), distribution()) < TOO_FAR


class Unselected(Speculator):
    """Sample with the selector, and say that there was none: ``q`` of the candidates' own logits."""

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return small().feature_layers(target)

    def drafter(self, request: DraftContext) -> Drafter:
        draft = copy.copy(small())
        drafter = draft.drafter(request)
        propose, blocks = drafter.propose, []

        class Noting(SelectorGrowth):
            def __init__(self, draft: Any, request: DraftContext, root: Tensor, output: Any) -> None:
                blocks.append(output.logits)
                super().__init__(draft, request, root, output)

        def lie(accepted: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(accepted, limit)
            if proposal.q is None:
                return proposal
            logits = blocks[-1][:, : proposal.q.shape[1]]
            values, candidates = logits.topk(small().config.selector_top_k)
            only = torch.full_like(logits, -torch.inf).scatter(2, candidates, values)
            return replace(proposal, q=draft_log_probs(small(), request, only).exp())

        draft.growth, drafter.propose = Noting, lie
        return drafter


@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_without_the_selector_is_found_out(rule: Any) -> None:
    config = SpeculationConfig(num_speculative_tokens=3, verification=rule)
    assert deviation(sample(Unselected(), config), distribution()) > 3 * TOO_FAR


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DFLASH2)
@torch.no_grad()
def test_files_are_read_and_written(case: str, tmp_path: Path) -> None:
    source, io = GOLDENS / case / "checkpoint", outputs(case)
    report = inspect(source)
    nested = case.startswith("sp_")
    assert report.layout == ("speculators (dflash2)" if nested else "dflash (z-lab)") and report.problem is None
    before = block(load_draft(case), io, 0)
    draft = load_draft(case)
    draft.save_pretrained(tmp_path / "saved")
    places = ["saved"]
    if not nested:
        convert(source, tmp_path / "flat", "dflash", dtype=torch.float32)
        places.append("flat")
        tensors = load_file(source / "model.safetensors")  # as save_pretrained of dflash 0.1.0 names them
        (tmp_path / "named").mkdir()
        (tmp_path / "named" / "config.json").write_text((source / "config.json").read_text())
        save_file(
            {name.replace("codebook", "codebook.weight"): one for name, one in tensors.items()},
            tmp_path / "named" / "model.safetensors",
        )
        places.append("named")
        flat, theirs = (
            json.loads((path / "config.json").read_text())["dflash_config"] for path in (tmp_path / "flat", source)
        )
        assert {name: flat.get(name) for name in theirs if name != "block_size"} == {
            name: value for name, value in theirs.items() if name != "block_size"
        }
    for place in places:
        again = AutoDraftModel.from_pretrained(tmp_path / place, dtype=torch.float32, target=load_target(case))
        after = block(again, io, 0)
        torch.testing.assert_close(after.logits, before.logits, **CLOSE)
        for name in ("block_causal", "sliding_window_non_causal", "sliding_window_per_slot"):
            assert getattr(again.config, name) == getattr(draft.config, name), (place, name)
    assert type(AutoModel.from_pretrained(tmp_path / "saved")) is DFlash2DraftModel
    if nested:
        config, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", source))
        passing = {"transformers_version", "auto_map", "dtype", "speculators_version", "transformer_layer_config"}
        assert {name: config.get(name) for name in theirs.keys() - passing} == {
            name: value for name, value in theirs.items() if name not in passing
        }
        names = load_file(tmp_path / "saved" / "model.safetensors").keys()
        assert names == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0; set a whole number"),
        ({"conv_group_size": 5}, "set a divisor of hidden_size, 32"),
        ({"selector_rank": 1.5}, "selector_rank is 1.5"),
        ({"selector_top_k": 97}, "selector_top_k is 97; set at most 96"),
        ({"draft_vocab_size": 40}, "selector scores all 96 tokens"),
    ],
)
def test_wrong_shapes_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlash2SpeculatorConfig.for_target(tiny_target().config, mask_token_id=3, **SMALL | flags)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["zl_dflash2_muse", "zl_dflash2_qwen3"])
@torch.no_grad()
def test_training_sees_what_drafting_sees(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    ids, anchors = io["block_ids"][None], io["block_anchors"]
    marked = torch.zeros_like(ids, dtype=torch.bool)
    marked[:, anchors[anchors > 0]] = True
    made = draft.unroll(UnrollInput(ids, None, io["block_features"][None], marked), draft.config.num_draft_tokens)
    assert made.selector is not None
    for place, anchor in enumerate(anchors.tolist()):
        for step, states in enumerate(made.states if anchor else ()):
            here = states[0, anchor - 1][None]
            logits = made.head(step, here)
            torch.testing.assert_close(logits[0], io["block_logits"][place, 1 + step], **CLOSE)
            candidates = io["block_candidates"][place, step]
            scores, which = made.selector(here, logits, candidates[2:3])
            torch.testing.assert_close(scores[0], io["block_teacher_scores"][place, step], **CLOSE)
            assert int(which) == 2


@pytest.mark.parametrize(("name", "objective", "smoothing"), [("kl", "kl", None), ("dpace", "ce", 0.5)])
def test_losses_and_gradients_are_those_of_speculators(name: str, objective: str, smoothing: float | None) -> None:
    case = "sp_dflash2_qwen3"
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    ids, anchors, guesses = io["input_ids"][None], io["anchors"], draft.config.num_draft_tokens
    marked = torch.zeros_like(ids, dtype=torch.bool).index_fill(1, anchors, True)
    documents = io["document_ids"][None] if "document_ids" in io else None
    made = draft.unroll(UnrollInput(ids, documents, io["aux_hidden_states"][None], marked), guesses)
    decay = torch.exp(-torch.arange(guesses) / 4.0) if smoothing is None else torch.ones(guesses)
    mask = io["block_loss_mask"][:, -guesses:]
    weights = torch.zeros(guesses, 1, ids.shape[1] - 1)
    weights[:, 0, anchors - 1] = (mask * decay / (mask.sum() + 1e-5)).T

    def head(hidden: Tensor) -> Tensor:
        return target.get_output_embeddings()(target.get_decoder().norm(hidden))

    def total(**more: Any) -> Tensor:
        loss = ChunkedLoss(made.head, head, objective=objective, chunk=5, smoothing=smoothing, **more)
        return loss.compute(made.states, io["last_hidden_states"][None], weights, made.trained, ids)[0]

    torch.testing.assert_close(total(), io[f"loss/{name}/unary"], atol=3e-5, rtol=1e-5)
    whole = total(selector=made.selector)
    torch.testing.assert_close(whole, io[f"loss/{name}/total"], atol=3e-5, rtol=1e-5)
    if f"gradnorm/{name}/fc.weight" in io:
        whole.backward()
        for one, weight in draft.named_parameters():
            if (norm := io.get(f"gradnorm/{name}/{one}")) is not None:
                torch.testing.assert_close(weight.grad.norm(), norm, atol=1e-5, rtol=2e-4, msg=one)


def test_overfitting_one_batch_drives_acceptance_to_one(tmp_path: Path) -> None:
    target = build("llama", vocab_size=96, tie_word_embeddings=False)
    torch.manual_seed(1)
    config = DFlash2SpeculatorConfig.for_target(
        target.config, {"num_hidden_layers": 1, "head_dim": 8}, block_size=4, **FLAGS | SMALL
    )
    draft, rows = DFlash2DraftModel(config), examples(target)
    one = trainer(draft, target, tmp_path, rows, objective="kl", max_steps=120)
    before = one.evaluate()
    one.train()
    after = one.evaluate()
    assert before["eval_expected_length"] < 2 and after["eval_loss"] < before["eval_loss"]
    assert min(after[f"eval_acceptance_{k}"] for k in (1, 2, 3)) > 0.95
    assert float(draft.candidate_selector.successor_codebook.abs().max()) > 0  # which was zero
