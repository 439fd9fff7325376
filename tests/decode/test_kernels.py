"""Layers that the package ``kernels`` replaced: speculation runs through them and writes plain ``generate``'s text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import hf_spec
from hf_spec import SpeculationConfig, demo

kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")
IDS = torch.tensor([[1, 581, 614, 263, 453, 16, 442, 297, 263, 493]])
CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


CALLS: list[int] = []  # the package allows a layer no attributes of its own


class CountedNorm(nn.Module):
    """An RMS norm that counts its calls. The package puts its forward into the model's own norms."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        CALLS.append(1)
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class Repository:
    """What the package asks for a layer."""

    layer_name = "CountedNorm"

    def load(self) -> type[nn.Module]:
        return CountedNorm


@pytest.fixture(scope="module")
def target() -> Any:
    found = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval()
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": Repository()}}, inherit_mapping=False):
        kernels.kernelize(found, mode=kernels.Mode.INFERENCE, device="cpu")
    return found


@pytest.mark.parametrize("tree", [None, "dynamic"])
@pytest.mark.parametrize("name", ["draft-eagle3", "draft-dspark", "ngram"])
def test_the_text_is_plain_generates(name: str, tree: str | None, target: Any) -> None:
    draft = name if name == "ngram" else AutoModel.from_pretrained(demo.path(name), dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval()
    CALLS.clear()
    out = target.generate(IDS, speculator=draft, speculation_config=SpeculationConfig(tree=tree), **CALL)
    assert CALLS  # the replaced layers ran
    assert torch.equal(out, target.generate(IDS, speculator=False, **CALL))
    assert torch.equal(out, own.generate(IDS, **CALL))


def test_batches_and_packed_weights_too(target: Any) -> None:
    rows = torch.cat([IDS, IDS.flip(1)])
    plain = target.generate(rows, speculator=False, **CALL)
    assert torch.equal(target.generate(rows, speculator="ngram", **CALL), plain)
    with hf_spec.packed(target, force=True):
        assert torch.equal(target.generate(rows, speculator="ngram", **CALL), plain)
