"""Sampled text with a block draft follows the target's distribution; with a q that is not corrected it does not."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import usual
from test_distribution_end_to_end import VANILLA, distribution, model, sample, small_buffers  # noqa: F401
from test_verification import TOO_FAR, deviation
from torch import Tensor

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, Speculator
from hf_spec.drafts.base import draft_log_probs
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.dspark.modeling import DSparkDraftModel, MarkovGrowth
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel

CASES = (
    "chain, block",
    "chain, token",
    "chain that stops when in doubt",
    "chain of best guesses",
    "drawn tree, block",
    "drawn tree, token",
    "drawn static tree",
    "dynamic tree",
)
LAYERS = {"num_hidden_layers": 1, "head_dim": 8}
FLAGS = {"block_size": 4, "mask_token_id": 0, "aux_hidden_state_layer_ids": [0, 1], "sample_from_anchor": True}


@functools.cache
def dspark(head: str) -> Any:
    torch.manual_seed(0)
    flags = FLAGS | {"markov_rank": 4, "markov_head_type": head, "draft_vocab_size": 4}
    draft = DSparkDraftModel(DSparkSpeculatorConfig.for_target(model().config, LAYERS, **flags)).eval()
    draft.set_vocabulary(torch.tensor([0, 1, 2, 4]))
    with torch.no_grad():  # a head that has been trained: guesses say much of the next one
        draft.markov_head.markov_w1.weight.normal_(std=1.5)
        draft.markov_head.markov_w2.weight.normal_()
        draft.confidence_head.proj.weight.normal_()
    return draft


@functools.cache
def dflash() -> Any:
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashSpeculatorConfig.for_target(model().config, LAYERS, **FLAGS)).eval()


@pytest.mark.parametrize(
    "case", usual(CASES, ["chain, block", "chain, token", "drawn tree, block", "drawn static tree"])
)
def test_dspark(case: str) -> None:
    head = "vanilla" if "token" in case else "rnn" if "tree" in case else "gated"
    assert deviation(sample(dspark(head), VANILLA[case]), distribution()) < TOO_FAR


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block"])
def test_dflash(case: str) -> None:
    assert deviation(sample(dflash(), VANILLA[case]), distribution()) < TOO_FAR


@pytest.mark.parametrize("case", ["chain, block", "drawn tree, block"])
def test_peagle(case: str) -> None:
    torch.manual_seed(0)
    flags = {"mask_token_id": 0, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    draft = PEagleDraftModel(PEagleSpeculatorConfig.for_target(model().config, **flags)).eval()
    assert deviation(sample(draft, VANILLA[case]), distribution()) < TOO_FAR


class Forgetful(Speculator):
    """Draw with the Markov correction, and say that there was none."""

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return dspark("vanilla").feature_layers(target)

    def drafter(self, request: DraftContext) -> Drafter:
        draft = copy.copy(dspark("vanilla"))
        drafter = draft.drafter(request)
        propose, blocks = drafter.propose, []

        class Noting(MarkovGrowth):
            def __init__(self, draft: Any, request: DraftContext, root: Tensor, output: Any) -> None:
                blocks.append(output)
                super().__init__(draft, request, root, output)

        def lie(news: AcceptedTokens, limit: int) -> Proposal:
            proposal = propose(news, limit)
            if proposal.q is None:
                return proposal
            uncorrected = draft_log_probs(dspark("vanilla"), request, blocks[-1].logits)
            return replace(proposal, q=uncorrected[:, : proposal.q.shape[1]].exp())

        draft.growth, drafter.propose = Noting, lie
        return drafter


@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_without_the_correction_is_found_out(rule: Any) -> None:
    config = SpeculationConfig(num_speculative_tokens=3, verification=rule)
    assert deviation(sample(Forgetful(), config), distribution()) > 3 * TOO_FAR
