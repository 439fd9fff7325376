"""What holds on the CPU holds on a GPU, and where target and draft sit on different devices.

Every test runs on the CPU too, where it cannot rot; the GPU then has the CPU's results to meet.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import prompts
from test_trainer import STEPS, arguments, eagle3, losses, medusa, mtp, sharp_target, text
from transformers import PreTrainedModel
from twins import SHAPES, noisy, target

from hf_spec import SpeculationConfig
from hf_spec.counting import uploaded
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.training import DraftTrainer, new_draft, unroll

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = {"num_hidden_layers": 2, "head_dim": 8}
BLOCKS = {"aux_hidden_state_layer_ids": [0, 1, 2], "mask_token_id": 3, "block_size": 5}
HEADS = {"markov_rank": 8, "markov_head_type": "rnn"}
CONFIGS: dict[str, Any] = {
    "eagle3": lambda config: Eagle3SpeculatorConfig.for_target(config, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "dflash": lambda config: DFlashSpeculatorConfig.for_target(config, LAYERS, **BLOCKS),
    "dspark": lambda config: DSparkSpeculatorConfig.for_target(config, LAYERS, **BLOCKS, **HEADS),
    "peagle": lambda config: PEagleSpeculatorConfig.for_target(
        config, mask_token_id=3, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    ),
    "eagle": EagleSpeculatorConfig.for_target,
    "medusa": MedusaSpeculatorConfig.for_target,
    "mtp": MTPSpeculatorConfig.for_target,
}


def draft_of(kind: str, model: PreTrainedModel) -> Any:
    torch.manual_seed(1)
    return noisy(model) if kind == "vanilla" else new_draft(CONFIGS[kind](model.config), model).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", [[3, -1], [[1, 2], [3, 4]], [[True], [False]], [], [5_000_000_000]], ids=str)
def test_numbers_arrive_as_they_are(values: list[Any], device: str) -> None:
    for _ in range(20):  # the memory they are sent from is used again
        put = [uploaded(values, torch.device(device)) for _ in range(20)]
        assert all(one.device.type == device and torch.equal(one.cpu(), torch.tensor(values)) for one in put)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["vanilla", *CONFIGS])
def test_same_text_as_plain_generate(kind: str, shape: str, device: str) -> None:
    model, draft = target(), draft_of(kind, target())
    there, inputs = copy.deepcopy(model).to(device), prompts(3)
    given = {name: tensor.to(device) for name, tensor in inputs.items()}
    # The sibling on the CPU guesses for the target on the device; drafts over its states have to sit beside it.
    places = [device, "cpu"] if kind == "vanilla" else [device]
    for place in places:
        options = {"speculator": copy.deepcopy(draft).to(place), "speculation_config": SHAPES[shape]}
        out = there.generate(**given, max_new_tokens=20, **options)
        assert torch.equal(out.cpu(), model.generate(**inputs, max_new_tokens=20))
        sampled = there.generate(**given, max_new_tokens=20, do_sample=True, top_p=0.9, **options)
        assert sampled.device.type == device and sampled.shape[0] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_exact_verification_draws_what_plain_generate_draws(device: str) -> None:
    model = copy.deepcopy(target()).to(device)
    inputs = {name: tensor.to(device) for name, tensor in prompts(3).items()}
    texts = []
    for options in ({}, {"speculator": "ngram", "speculation_config": SpeculationConfig(verification="exact")}):
        torch.manual_seed(7)
        texts.append(model.generate(**inputs, max_new_tokens=20, do_sample=True, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", [{}, {"transformer_layer_config": {"num_hidden_layers": 2}}])
def test_gradients_of_the_unroll(flags: dict[str, Any], device: str) -> None:
    """On a GPU FlexAttention works them out, compiled; packed documents and a length that fills no block included."""
    model = sharp_target()
    config = Eagle3SpeculatorConfig.for_target(model.config, flags.get("transformer_layer_config"))
    torch.manual_seed(1)
    draft = new_draft(config, model)
    ids, features = torch.randint(3, 96, (2, 37)), torch.randn(2, 37, config.num_features * config.feature_size)
    documents = torch.tensor([[0] * 20 + [1] * 17, [2] * 37])
    found = []
    for place in ("cpu", device):
        one = copy.deepcopy(draft).to(place)
        logits = unroll(one, ids.to(place), features.to(place), STEPS, documents.to(place))
        sum(step.logsumexp(-1).sum() for step in logits).backward()
        gradients = [parameter.grad for parameter in one.parameters() if parameter.requires_grad]
        found.append([tensor.detach().cpu() for tensor in (*logits, *gradients)])
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)


def dspark(model: Any) -> Any:
    return draft_of("dspark", model)


def peagle(model: Any) -> Any:
    return draft_of("peagle", model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("make", [eagle3, mtp, medusa, dspark, peagle])
def test_training_loses_alike(make: Any, precision: str, device: str, tmp_path: Path) -> None:
    found = []
    for place, half in (("cpu", False), (device, precision == "bf16")):
        model = sharp_target()
        args = arguments(tmp_path, use_cpu=place == "cpu", bf16=half)
        trainer = DraftTrainer(make(model), model, args, train_dataset=text(), eval_dataset=text(2, seed=5))
        trainer.train()
        found.append(losses(trainer))
        assert trainer.evaluate()["eval_acceptance_length"] >= 1
    assert found[1] == pytest.approx(found[0], rel=2e-2 if precision == "bf16" else 1e-3)
