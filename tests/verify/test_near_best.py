"""``acceptance="near_best"``: the lossy rule that ``verifier_accept_k`` and ``accept_tolerance`` describe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import prompts
from torch import Tensor
from transformers import LogitsProcessorList
from twins import draft, path_to, target

from hf_spec import DraftContext, Drafter, EagleSpeculatorConfig, SpeculationConfig, Speculator, VanillaSpeculator
from hf_spec.proposal import NO_PARENT, PAD_NODE, Proposal
from hf_spec.training import new_draft
from hf_spec.verify.rules import accept_near_best

NEW = 24


def near(p: Tensor, guess: int, k: int, tolerance: float) -> bool:
    """Sort the vocabulary and look: the slow twin for one guess."""
    best_first = sorted(range(len(p)), key=lambda token: (-float(p[token]), token))
    within = bool(tolerance) and float(p[best_first[0]] - p[guess]) <= tolerance
    return float(p[guess]) > 0 and (guess in best_first[:k] or within)


def slow_end(proposal: Proposal, p: Tensor, row: int, k: int, tolerance: float) -> int:
    """Walk down every path by hand; the node where the longest, and of those the most probable one, ends."""
    ends = []
    for node in range(proposal.tokens.shape[1]):
        likelihood, here = 1.0, node
        while here > 0:
            parent, guess = int(proposal.parents[row, here]), int(proposal.tokens[row, here])
            if parent < 0 or not near(p[row, parent], guess, k, tolerance):
                break
            likelihood *= float(p[row, parent, guess])
            here = parent
        if here == 0:
            ends.append((len(path_to(proposal, row, node)), likelihood, -node))
    return -max(ends)[2]


@pytest.mark.parametrize(("k", "tolerance"), [(1, 0.0), (2, 0.0), (3, 0.0), (1, 0.05), (2, 0.3), (1, 1.0), (9, 0.0)])
def test_it_decides_as_the_slow_twin(k: int, tolerance: float) -> None:
    random = torch.Generator().manual_seed(7)
    parents = torch.tensor([[NO_PARENT, 0, 0, 1, 1, 2, 3, 6], [NO_PARENT, 0, 1, 2, 2, PAD_NODE, 3, PAD_NODE]])
    config = SpeculationConfig(acceptance="near_best", accept_k=k, accept_tolerance=tolerance)
    lengths = set()
    for _ in range(60):
        p = (2 * torch.randn(2, 8, 6, generator=random)).round()  # ties
        p = p.masked_fill(torch.rand(p.shape, generator=random) < 0.1, -torch.inf).softmax(-1)
        proposal = Proposal(torch.randint(0, 6, (2, 8), generator=random), parents, 5)
        verdict = accept_near_best(proposal, p, config, sample=False)
        for row in range(2):
            end = slow_end(proposal, p, row, k, tolerance)
            guesses = path_to(proposal, row, end)
            emitted = verdict.tokens[row, : int(verdict.counts[row])].tolist()
            assert emitted == [*guesses, int(p[row, end].argmax())]
            lengths.add(len(guesses))
    assert len(lengths) > 2


def test_the_next_token_is_the_targets_own() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    proposal = Proposal.chain(torch.zeros(40_000, dtype=torch.long), torch.ones(40_000, 1, dtype=torch.long))
    config = SpeculationConfig(acceptance="near_best", accept_k=2)
    verdict = accept_near_best(proposal, p.expand(40_000, 2, -1), config, sample=True)
    assert (verdict.counts == 2).all() and (verdict.tokens[:, 0] == 1).all()
    shares = torch.bincount(verdict.tokens[:, 1], minlength=4) / 40_000
    assert (shares - p).abs().max() < 0.01 and shares[3] == 0


def run(**options: Any) -> Any:
    given = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "speculator": draft(),
        "return_dict_in_generate": True,
    } | options
    return target().generate(**prompts(3), **given)


@pytest.mark.parametrize("tree", [None, "dynamic"])
def test_greedy_text(tree: Any) -> None:
    """One best token and no tolerance is plain greedy text; more accept longer paths of another text."""
    plain = target().generate(**prompts(3), max_new_tokens=NEW, do_sample=False)
    config = SpeculationConfig(tree=tree, acceptance="near_best", num_tree_tokens=12, tree_topk=3)
    strict, lossless = run(speculation_config=config), run(speculation_config=config.merge(acceptance="lossless"))
    assert torch.equal(strict.sequences, plain)
    assert strict.speculation.steps == lossless.speculation.steps
    for loose in (config.merge(accept_k=4), config.merge(accept_tolerance=0.5)):
        out = run(speculation_config=loose)
        assert not torch.equal(out.sequences, plain)
        assert out.speculation.mean_accepted_length > strict.speculation.mean_accepted_length
        torch.manual_seed(0)
        sampled = run(speculation_config=loose, do_sample=True)
        assert sampled.speculation.mean_accepted_length > strict.speculation.mean_accepted_length


class Undeclared(Speculator):
    """A draft whose file declares nothing."""

    def drafter(self, request: DraftContext) -> Drafter:
        return VanillaSpeculator(draft()).drafter(request)


class Declared(Undeclared):
    """A draft whose file declares a loose acceptance."""

    def defaults(self) -> SpeculationConfig:
        return SpeculationConfig(accept_k=4, accept_tolerance=0.25)


def test_values_of_the_draft_are_used_only_when_asked_for() -> None:
    plain = target().generate(**prompts(3), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(run(speculator=Declared()).sequences, plain)
    assert torch.equal(run(speculator=Declared(), speculation_config=SpeculationConfig()).sequences, plain)
    asked = run(speculator=Declared(), speculation_config=SpeculationConfig(acceptance="near_best")).sequences
    by_hand = SpeculationConfig(acceptance="near_best", accept_k=4, accept_tolerance=0.25)
    assert not torch.equal(asked, plain)
    assert torch.equal(asked, run(speculator=Undeclared(), speculation_config=by_hand).sequences)
    stricter = Declared().settings(SpeculationConfig(acceptance="near_best", accept_k=1))
    assert (stricter.accept_k, stricter.accept_tolerance) == (1, 0.25)


def test_values_in_a_file() -> None:
    config = EagleSpeculatorConfig.for_target(target().config)
    method = config.speculators_config["proposal_methods"][0]
    method |= {"verifier_accept_k": 3, "accept_tolerance": 7.5}  # of a probability: any guess
    defaults = new_draft(config, target()).defaults()
    assert (defaults.accept_k, defaults.accept_tolerance, defaults.acceptance) == (3, 1.0, "lossless")
    for name, value in {"verifier_accept_k": 0, "accept_tolerance": -0.1}.items():
        with pytest.raises(ValueError, match=f"{name} in .* is {value}"):
            EagleSpeculatorConfig.from_dict(
                {
                    **config.to_dict(),
                    "speculators_config": {**config.speculators_config, "proposal_methods": [method | {name: value}]},
                }
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification": "token"}, "verification of its own"),
        ({"accept_k": 0}, "accept_k must be a whole number"),
        ({"accept_k": 1.0}, "accept_k must be a whole number"),
        ({"accept_tolerance": -0.1}, "accept_tolerance must be a number between 0 and 1"),
        ({"accept_tolerance": float("nan")}, "accept_tolerance must be a number between 0 and 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(acceptance="near_best", **settings)


@pytest.mark.parametrize("sample", [False, True])
def test_it_refuses_what_needs_the_text_token_by_token(sample: bool) -> None:
    def custom(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    config = SpeculationConfig(acceptance="near_best")
    with pytest.raises(ValueError, match="acceptance='near_best' weighs whole paths"):
        run(speculation_config=config, do_sample=sample, logits_processor=LogitsProcessorList([custom]))
