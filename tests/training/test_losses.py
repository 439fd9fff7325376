"""Losses, the positions that count, and metrics: against numbers of other projects, slow twins, lists made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden import GOLDENS, SPECULATORS, load_draft, outputs
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_spec.training.losses import ChunkedLoss, counted_positions, position_weights
from hf_spec.unroll.feedback import outputs as unroll_outputs

SLIDING = "sp_eagle3_qwen3_sliding_bf16"  # its window stays where training began, ours moves as in serving
CASES = [case for case in SPECULATORS if case != SLIDING and "e2e" not in case]
PEERS_NAMES = {"ce": "ce", "tv": "tv", "lk": "lk_hybrid", "reverse_kl": "rkl"}


def peers_target(case: str, draft: Any) -> Any:
    """Return the head that speculators takes its targets from: final norm, then the rows of the draft vocabulary."""
    tensors = load_file(GOLDENS / case / "target.safetensors")
    head = next(value for name, value in tensors.items() if "lm_head" in name or "embed" in name)
    head = tensors.get("lm_head.weight", head).float()
    norm = next(value for name, value in tensors.items() if name.endswith("norm.weight")).float()
    eps = draft.config.layers.rms_norm_eps

    def logits(hidden: Tensor) -> Tensor:
        return hidden * (hidden.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * norm @ head.T

    return logits


def by_speculators(case: str, objective: Any, decay: float, fed: str | None = None, kept: Tensor | None = None) -> Any:
    """Return the draft with gradients, the weighted loss of each step and the metrics, all by speculators' rules."""
    io, draft = outputs(case), load_draft(case)
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(False)
    if fed is None:  # positions as they stand in a text
        ids, features = io["input_ids"][None, 1:], io["aux_hidden_states"][None, :-1]
        hidden, mask = io["last_hidden_states"][None], io["loss_mask"][None, 1:]
        documents = torch.zeros_like(ids)
    else:  # positions of several texts, each shifted before packing
        ids, features, documents = (
            io[f"packed/fed/{x}"][None] for x in ("input_ids", "hidden_states", "document_ids")
        )
        mask = io[f"{fed}/fed/loss_mask"][None]
        hidden = io["packed/fed/verifier_last_hidden_states"][None]
        hidden = torch.cat([hidden[:, :1], hidden], dim=1)  # nothing is guessed there
    counted = torch.stack([torch.zeros_like(mask)] * 3)
    for step in range(3):
        counted[step, :, : mask.shape[1] - step] = mask[:, step:]
        if kept is not None:
            counted[step] &= kept[step]
    unrolled = unroll_outputs(draft, ids, features, 3, documents, head=False)
    weights = counted / (counted.sum((1, 2), keepdim=True) + 1e-5)
    weights = weights * torch.tensor([decay**k for k in range(3)])[:, None, None]
    chunked_loss = ChunkedLoss(
        lambda step, states: draft.logits(states), peers_target(case, draft), draft.target_ids, objective, "keep", 5
    )
    loss, metrics = chunked_loss.compute([out.logits for out in unrolled], hidden, weights)
    loss.backward()
    return draft, io, loss, metrics, counted


def assert_gradients(draft: Any, io: dict[str, Tensor], prefix: str, decay: float) -> None:
    total = 0.0
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            continue
        total += parameter.grad.pow(2).sum().item()
        if (norm := io.get(f"{prefix}gradnorm/decay{decay}/{name}")) is not None:
            torch.testing.assert_close(parameter.grad.norm(), norm, rtol=1e-3, atol=1e-5)
        if not prefix and (gradient := io.get(f"grad/decay{decay}/{name}")) is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=3e-4 * float(gradient.abs().max()))
    assert math.sqrt(total) == pytest.approx(io[f"{prefix}gradnorm/decay{decay}/__all__"].item(), rel=1e-3)


@pytest.mark.parametrize("decay", [0.8, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_gradients_are_those_of_speculators(case: str, decay: float) -> None:
    draft, io, loss, metrics, counted = by_speculators(case, "kl", decay)
    torch.testing.assert_close(loss, io[f"loss/decay{decay}/total"], atol=2e-5, rtol=1e-5)
    for step, found in enumerate(metrics.losses):
        torch.testing.assert_close(found, io[f"loss/decay{decay}/step{step}"], atol=2e-5, rtol=1e-5)
    assert_gradients(draft, io, "", decay)
    correct = torch.ones_like(counted[0])
    for step in range(3):
        correct = correct & metrics.correct[step] if step else metrics.correct[0]
        assert (correct & counted[step]).sum() == io[f"metric/full_acc_{step}_sum"]
        assert counted[step].sum() == io[f"metric/full_acc_{step}_total"]


@pytest.mark.parametrize("fed", ["packed", "packed_rawmask"])
@pytest.mark.parametrize("case", CASES)
def test_packed_losses_are_those_of_speculators(case: str, fed: str) -> None:
    draft, io, loss, _, _ = by_speculators(case, "kl", 0.8, fed)
    torch.testing.assert_close(loss, io[f"{fed}/loss/decay0.8/total"], atol=2e-5, rtol=1e-5)
    assert_gradients(draft, io, f"{fed}/", 0.8)


@pytest.mark.parametrize("case", CASES)
def test_no_step_crosses_a_document(case: str) -> None:
    io = outputs(case)
    documents = io["packed/fed/document_ids"][None]
    kept = torch.stack([torch.zeros_like(documents, dtype=torch.bool)] * 3)
    for step in range(3):
        kept[step, :, : documents.shape[1] - step] = documents[:, step:] == documents[:, : documents.shape[1] - step]
    _, io, loss, _, _ = by_speculators(case, "kl", 0.8, "packed_rawmask", kept)
    torch.testing.assert_close(loss, io["packed_rawmask/loss_no_leak/decay0.8/total"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", PEERS_NAMES)
def test_other_objectives_are_those_of_speculators(objective: str) -> None:
    _, io, loss, _, _ = by_speculators("sp_eagle3_llama_ff", objective, 0.8)
    torch.testing.assert_close(loss, io[f"loss_other/decay0.8/{PEERS_NAMES[objective]}"], atol=2e-5, rtol=1e-5)


# -- by hand ----------------------------------------------------------------------------------------------------------


def listed(answers: list[int], steps: int, documents: list[int] | None = None) -> list[tuple[int, int, int]]:
    """List (position, step, token guessed)."""
    numbers = None if documents is None else torch.tensor([documents])
    counted = counted_positions(torch.tensor([answers]), steps, numbers)
    return [(position, step, position + step + 2) for step, _, position in counted.nonzero().tolist()]


def test_the_positions_of_a_chat_of_eight_tokens() -> None:
    # token     0 1 2 | 3 4 5 | 6 | 7        prompt, answer, next turn's prompt, its answer
    answers = [0, 0, 0, 1, 1, 1, 0, 1]
    # Prefill gives token 3, the verification before token 6 ends the answer: tokens 4 and 5 are guessed.
    assert listed(answers, 3) == [(2, 0, 4), (3, 0, 5), (2, 1, 5)]


def test_the_positions_of_plain_text_and_of_packed_documents() -> None:
    assert listed([1] * 5, 2) == [(0, 0, 2), (1, 0, 3), (2, 0, 4), (0, 1, 3), (1, 1, 4)]
    assert listed([1] * 7, 2, [0, 0, 0, 1, 1, 1, 1]) == [(0, 0, 2), (3, 0, 5), (4, 0, 6), (3, 1, 6)]
    assert listed([1, 0, 1], 9) == []


def test_weights_of_tokens_and_of_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2]])
    counted = counted_positions(torch.ones(1, 10), 2, documents)
    weights, divisor = position_weights(counted, "token", documents)
    assert weights.equal(counted.float()) and divisor.tolist() == [4, 2]
    weights, divisor = position_weights(counted, "sequence", documents)
    assert divisor.tolist() == [2, 1]
    torch.testing.assert_close(weights[0, 0], torch.tensor([1, 1, 1, 0, 0, 3, 0, 0, 0.0]) / 3)
    for normalizer in ("token", "sequence"):  # batches add up to what they are together
        both = torch.cat([counted, counted], dim=1), documents.expand(2, -1)
        divisor = position_weights(counted, normalizer, documents)[1]
        assert position_weights(both[0], normalizer, both[1])[1].equal(2 * divisor)


# -- against a slow twin ----------------------------------------------------------------------------------------------


def random_batch(
    vocabulary: int = 11, steps: int = 3, batch: int = 2, length: int = 7, width: int = 5
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "states": [torch.randn(batch, length - 1, width, generator=generator).requires_grad_() for _ in range(steps)],
        "hidden": torch.randn(batch, length, width, generator=generator),
        "draft_head": torch.randn(6, width, generator=generator).requires_grad_(),
        "target_head": torch.randn(vocabulary, width, generator=generator) * 2,
        "ids": torch.tensor([1, 2, 5, 6, 8, 10]),
        "weights": counted_positions(torch.ones(batch, length), steps) * torch.rand(steps, 1, 1, generator=generator),
    }


def slow(given: dict[str, Any], objective: Any) -> tuple[Tensor, int]:
    """Go through positions one by one, with whole distributions; return the loss and how many guesses are correct."""
    loss, correct = torch.zeros(()), 0
    for step, row, position in (given["weights"] > 0).nonzero().tolist():
        target = given["target_head"] @ given["hidden"][row, position + 1 + step]
        guess = given["draft_head"] @ given["states"][step][row, position]
        if target.argmax() in given["ids"]:
            weight = given["weights"][step, row, position]
            loss = loss + weight * divergence(objective, guess.softmax(-1), target[given["ids"]].softmax(-1))
        correct += int(given["ids"][guess.argmax()] == target.argmax())
    return loss, correct


def divergence(objective: Any, q: Tensor, p: Tensor) -> Tensor:
    """Compare the draft's distribution q with the target's, p, as the formulas of the objectives are written."""
    kl, accepted = (p * (p / q).log()).sum(), torch.minimum(p, q).sum()
    if objective == "lk":
        share = (-3 * accepted.detach()).exp()
        return share * kl + (1 - share) * (1 - accepted)
    others = {"ce": -q[p.argmax()].log(), "tv": 1 - accepted, "reverse_kl": (q * (q / p).log()).sum()}
    return kl if objective == "kl" else others[objective]


@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("objective", ["kl", "ce", "tv", "lk", "reverse_kl"])
def test_chunks_give_the_loss_and_gradients_of_single_positions(objective: Any, chunk: int) -> None:
    given = random_batch()
    head, learned = given["draft_head"], [*given["states"], given["draft_head"]]
    chunked_loss = ChunkedLoss(
        lambda step, states: states @ head.T,
        lambda hidden: hidden @ given["target_head"].T,
        given["ids"],
        objective,
        chunk=chunk,
    )
    loss, metrics = chunked_loss.compute(given["states"], given["hidden"], given["weights"], [head])
    expected, correct = slow(given, objective)
    torch.testing.assert_close(loss, expected)
    counted = given["weights"] > 0
    assert (metrics.correct & counted).sum() == correct < (metrics.inside & counted).sum() < counted.sum()
    for one, other in zip(
        torch.autograd.grad(3 * loss, learned), torch.autograd.grad(3 * expected, learned), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("objective", "heat"), [("kl", 1), ("kl", 2), ("lk", 1), ("reverse_kl", 1)])
def test_autocast_rounds_no_divergence(objective: Any, heat: float) -> None:
    given, found = random_batch(), []
    chunked_loss = ChunkedLoss(lambda step, x: x, lambda x: x, objective=objective, temperature=heat)  # no head rounds
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = chunked_loss.compute(given["states"], given["hidden"], given["weights"])
        found.append([loss, *torch.autograd.grad(loss, given["states"])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_confidence_is_weighted_by_the_decay_alone(chunk: int) -> None:
    """As the speculators library does: D-PACE weights are for what a draft says, not for how sure it is."""
    given = random_batch()
    asked = torch.randn(given["states"][0].shape[-1], generator=torch.Generator().manual_seed(1))
    chunked_loss = ChunkedLoss(
        lambda step, states: states @ given["draft_head"].T,
        lambda hidden: hidden @ given["target_head"].T,
        given["ids"],
        chunk=chunk,
        smoothing=0.5,
    )
    batch = given["states"], given["hidden"], given["weights"]
    alone, metrics = chunked_loss.compute(*batch)
    both, _ = replace(chunked_loss, confidence=lambda states: states @ asked, confidence_weight=0.7).compute(*batch)
    said = torch.stack([states @ asked for states in given["states"]])
    wrong = binary_cross_entropy_with_logits(said, metrics.overlap, reduction="none")
    torch.testing.assert_close(both - alone, 0.7 * (wrong * given["weights"]).sum())


def test_overlap_is_how_often_a_drawn_guess_is_accepted() -> None:
    given = random_batch(steps=1)
    chunked_loss = ChunkedLoss(
        lambda step, states: states @ given["draft_head"].T,
        lambda hidden: hidden @ given["target_head"].T,
        given["ids"],
    )
    with torch.no_grad():
        loss, metrics = chunked_loss.compute(given["states"], given["hidden"], given["weights"])
    assert not loss.requires_grad
    p = (given["hidden"][1, 3] @ given["target_head"].T).softmax(-1)
    q = torch.zeros(11).index_copy(0, given["ids"], (given["draft_head"] @ given["states"][0][1, 2]).softmax(-1))
    torch.testing.assert_close(metrics.overlap[0, 1, 2], torch.minimum(p, q).sum())


def test_a_batch_without_answers_costs_nothing_and_keeps_its_gradients() -> None:
    given = random_batch()
    chunked_loss = ChunkedLoss(
        lambda step, states: states @ given["draft_head"].T,
        lambda hidden: hidden @ given["target_head"].T,
        given["ids"],
    )
    weights = torch.zeros_like(given["weights"])
    loss, _ = chunked_loss.compute(given["states"], given["hidden"], weights, [given["draft_head"]])
    loss.backward()
    assert loss == 0 and given["draft_head"].grad.abs().sum() == 0 == given["states"][0].grad.abs().sum()


def test_each_objective_vanishes_where_the_distributions_agree() -> None:
    given = random_batch(steps=1)
    head = given["target_head"]
    states = [given["hidden"][:, 1:].clone()]
    for objective in ("kl", "tv", "lk", "reverse_kl"):
        chunked_loss = ChunkedLoss(lambda step, x: x @ head.T + 3, lambda x: x @ head.T, objective=objective)  # type: ignore[arg-type]
        loss, metrics = chunked_loss.compute(states, given["hidden"], given["weights"])
        assert abs(loss) < 1e-6 and metrics.correct[given["weights"] > 0].all()
