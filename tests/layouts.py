"""Which layout packed weights take in the tests, whatever this processor would take."""

import pytest
import torch
from torch import Tensor

from hf_spec.packing import packing


def take_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack float32 weights "in blocks" of oneDNN, "kept" as torch has them, or as FBGEMM's "float16"."""
    if name == "float16" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without FBGEMM")

    def is_taken(layout: str, weight: Tensor) -> bool:
        return name == layout and weight.dtype is torch.float32

    monkeypatch.setattr(packing, "is_better_kept", lambda weight: is_taken("kept", weight))
    monkeypatch.setattr(
        packing, "is_better_in_float16", lambda weight, is_looked_up, spare: is_taken("float16", weight)
    )
