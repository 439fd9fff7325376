"""Reading texts with a target, while another thread generates with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build, prompts
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_spec.scoring.hooks import hooked
from hf_spec.training.teacher import Reader, separates_documents

NUM_LAYERS = 2


def run_elsewhere(call: Callable[[], object]) -> None:
    other = threading.Thread(target=call)
    other.start()
    other.join()


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_states_of_another_threads_forward_never_come_back(when: str) -> None:
    model = build("llama", num_hidden_layers=NUM_LAYERS)
    reader, ids = Reader(model, (0, 1, NUM_LAYERS, -1)), prompts(2, (9,))["input_ids"]
    expected, others = reader.read(ids), reader.read(ids.flip(1))
    assert not torch.equal(expected[1], others[1])

    def disturb(module: nn.Module, args: Any, *rest: Any) -> Any:
        """Run the whole model elsewhere, in the middle of the forward that is read."""
        run_elsewhere(lambda: model(ids.flip(1), output_hidden_states=True))
        return (args, rest[0]) if when == "before" else None

    with hooked([model.lm_head], **{when: disturb}):
        layers, last = reader.read(ids)
    assert torch.equal(last, expected[1])
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(layers, expected[0], strict=True))


@torch.no_grad()
def test_another_thread_is_given_its_own_logits_while_some_are_worked_out() -> None:
    model = build("llama", num_hidden_layers=NUM_LAYERS)
    ids = prompts(2, (9,))["input_ids"]
    reader, expected = Reader(model), model(ids).logits
    found: list[Tensor] = []

    def disturb(module: nn.Module, args: Any, output: Any) -> None:
        run_elsewhere(lambda: found.append(model(ids).logits))

    with hooked([model.lm_head], after=disturb):
        reader.logits(reader.read(ids)[1][0])
    assert found
    assert all(torch.equal(logits, expected) for logits in found)


@torch.no_grad()
def test_a_kernel_that_finds_documents_in_one_row_alone_is_not_trusted() -> None:
    """As those of flash attention, which look for them in the positions of a batch of one."""

    def mask(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        own = kwargs["mask_function"] if batch_size == 1 else causal_mask_function
        return sdpa_mask(batch_size, *args, **kwargs | {"mask_function": own, "allow_is_causal_skip": False})

    AttentionInterface.register("one_row", sdpa_attention_forward)
    AttentionMaskInterface.register("one_row", mask)
    ids, documents = prompts(2, (9,))["input_ids"], torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])
    found = {}
    for implementation, separates in (("sdpa", True), ("one_row", False)):
        model = build("llama", num_hidden_layers=NUM_LAYERS)
        model.set_attn_implementation(implementation)
        assert separates_documents(model) == separates
        found[implementation] = Reader(model).read(ids, documents)[1]
    torch.testing.assert_close(found["one_row"], found["sdpa"], rtol=1e-4, atol=1e-4)
