"""The first token is shown as early as in plain ``generate``: no draft model reads the prompt before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import prompts
from pairs import pairwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from twins import CHAIN, draft, target

from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.ngram.hybrid import HybridSpeculator

MOST = 1.05  # of the products of plain ``generate``


class Counter(TorchDispatchMode):
    """Counts the products of matrices: how many numbers are multiplied."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            first, second = (one for one in args if one.ndim > 1)
            self.count += first.numel() * second.shape[-1]
        return func(*args, **(kwargs or {}))


class Watch(BaseStreamer):
    """A streamer that notes the products that were computed until the first token was shown."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.products, self.puts = counter, 0, 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the first one is the prompt
            self.products = self.counter.count

    def end(self) -> None:
        """Do nothing."""


def products(model: PreTrainedModel, **options: Any) -> int:
    with Counter() as counter:
        watch = Watch(counter)
        model.generate(**options, streamer=watch, max_new_tokens=8, do_sample=False)
    return watch.products


def drafts(model: PreTrainedModel) -> dict[str, Any]:
    torch.manual_seed(0)
    config = Eagle3SpeculatorConfig.for_target(model.config, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    eagle = Eagle3DraftModel(config).eval()
    hybrid = HybridSpeculator(draft())
    return {"ngram": "ngram", "draft model": draft(), "eagle3": eagle, "hybrid": hybrid, "plain": "plain"}


@pytest.mark.parametrize(
    ("kind", "config"), pairwise(["ngram", "draft model", "eagle3", "hybrid", "plain"], [CHAIN, None])
)
def test_no_more_is_computed_before_the_first_token(kind: str, config: Any) -> None:
    model, speculator = target(), drafts(target())[kind]
    given = {name: value.repeat(1, 10) for name, value in prompts(1, (13,)).items()}  # n-grams find something
    plain = products(model, **given)
    for _ in range(2):  # the first call checks the target
        found = products(model, **given, speculator=speculator, speculation_config=config)
    assert plain <= found <= MOST * plain


def test_all_that_is_computed_before_is_seen() -> None:
    """The negative control: more is computed for one more token."""
    model, longer = target(), prompts(1, (150,))
    assert products(model, **longer) > MOST * products(model, **prompts(1, (130,)))
