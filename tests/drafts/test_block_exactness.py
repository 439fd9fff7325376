"""Greedy text with a block draft equals plain `generate`: every shape of proposal, ragged batches, architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from pairs import usual
from test_exactness import BATCHES, Way, plain, prompts, speculative
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_spec import SpeculationConfig
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.dspark.modeling import DSparkDraftModel
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel

NAMES = """llama qwen3 qwen2:swa gemma2 gemma3_text gpt2 phi3 qwen3_moe cohere2 falcon starcoder2
    qwen3_next mamba""".split()
USUAL = ("llama", "gemma3_text", "gpt2", "qwen3_next", "mamba")
FEW = ("llama", "gemma3_text", "qwen3_next", "mamba")
SHAPES = {
    "chain": SpeculationConfig(num_speculative_tokens=4),
    "static": SpeculationConfig(tree=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=8),
    "sampled": SpeculationConfig(num_speculative_tokens=3, tree="sampled", tree_topk=2, num_tree_tokens=7),
}
LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
FLAGS = {"mask_token_id": 0, "aux_hidden_state_layer_ids": [3, 1]}
PLAIN = LAYERS | {"model_type": "qwen3", "num_hidden_layers": 1}
FLAGS_OF_PEAGLE = {"mask_token_id": 0, "eagle_aux_hidden_state_layer_ids": [1, 3]}
GUESSES = 4
MARKOV = {"markov_rank": 8, "markov_head_type": "rnn", "sample_from_anchor": True}


def drafts_for(model: PreTrainedModel) -> dict[str, Any]:
    torch.manual_seed(0)
    config = model.config
    return {
        "dflash": DFlashDraftModel(DFlashSpeculatorConfig.for_target(config, LAYERS | WINDOW, block_size=5, **FLAGS)),
        "dspark": DSparkDraftModel(DSparkSpeculatorConfig.for_target(config, LAYERS, block_size=4, **FLAGS | MARKOV)),
        "peagle": PEagleDraftModel(PEagleSpeculatorConfig.for_target(config, PLAIN, **FLAGS_OF_PEAGLE)),
    }


def teacher_forced(draft: Any, text: Tensor, place: int, features: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of one block per row, (batch, guesses, draft vocabulary), whose root stands at ``place``."""
    root, following, features = text[:, place : place + 1], text[:, place + 1 :], features[:, :place]
    if isinstance(draft, PEagleDraftModel):
        tokens, features = draft.with_masks(text[:, 1 : place + 1], features, GUESSES - 1)
        mask = functional.pad(mask[:, 1 : place + 1], (0, GUESSES - 1), value=1)
        return draft(tokens, features=features, attention_mask=mask).logits[:, place - 1 :]
    mask = mask[:, :place]
    out = draft(root, features=features, attention_mask=mask)
    if not isinstance(draft, DSparkDraftModel):
        return out.logits
    hidden = out.hidden_states[:, -out.logits.shape[1] :]
    state, logits = None, []
    for slot, before in enumerate(torch.cat([root, following], dim=1)[:, : hidden.shape[1]].unbind(1)):
        reading, _ = draft.read(before, hidden[:, slot], state)
        state = None if reading is None else reading.state
        logits.append(draft.correct(out.logits[:, slot], reading))
    return torch.stack(logits, dim=1)


def fitted(draft: Any, model: PreTrainedModel, text: Tensor, mask: Tensor, steps: int = 30) -> Any:
    """Teach ``draft`` by heart some of the ``text`` of ``model``, (batch, length): it will be right now and then."""
    draft.bind(model)
    with torch.no_grad():
        states = model(text, attention_mask=mask, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in draft.feature_layers(model)], dim=-1)
    optimizer = torch.optim.Adam(draft.parameters(), lr=0.01)
    for step in range(steps):
        place = text.shape[1] - 2 - GUESSES - 5 * step % 16
        following = text[:, place + 1 : place + 1 + GUESSES]
        logits = teacher_forced(draft, text, place, features, mask)
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


@pytest.mark.parametrize("name", usual(NAMES, USUAL))
def test_same_text_as_plain_generate(name: str) -> None:
    """Each shape in one of the batches, the next shape in the next one."""
    check_text(name, turn=NAMES.index(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_text_in_every_shape_and_batch(name: str) -> None:
    check_text(name)


def check_text(name: str, turn: int | None = None) -> None:
    model = build(name)
    texts = {batch: plain(model, batch) for batch in BATCHES}
    mask = functional.pad(prompts(8, BATCHES[8])["attention_mask"], (0, texts[8].shape[1] - 13), value=1)
    for number, (kind, draft) in enumerate(drafts_for(model).items()):
        if kind == "peagle" and name not in FEW:  # which reads its text as EAGLE-3 does
            continue
        fitted(draft, model, texts[8], mask)
        for place, (shape, config) in enumerate(SHAPES.items()):
            accepted = proposed = 0
            batches, first = list(BATCHES), 0 if turn is None else (turn + number + place) % len(BATCHES)
            for batch in batches[first:] + batches[:first]:
                text = texts[batch]
                out = speculative(model, batch, Way(shape, draft, config))
                assert torch.equal(out.sequences, text), f"{kind}, {shape}, batch {batch}"
                accepted += out.speculation.counts.accepted
                proposed += out.speculation.counts.proposed
                if turn is not None and 0 < accepted < proposed:
                    break
            assert 0 < accepted < proposed, f"{kind}, {shape}: {accepted} of {proposed} guesses accepted"


@pytest.mark.parametrize("sees_ahead", [False, True])
def test_sliding_layers_without_a_window_read_padded_prompts(sees_ahead: bool) -> None:
    """As of z-lab's files, which name layers sliding and set no window that is used."""
    model = build("llama")
    flags = FLAGS | {"sliding_window_non_causal": sees_ahead, "sliding_window_per_slot": not sees_ahead}
    layers = LAYERS | WINDOW | {"use_sliding_window": False}
    draft = DFlashDraftModel(DFlashSpeculatorConfig.for_target(model.config, layers, block_size=5, **flags)).eval()
    assert draft.layer_config.sliding_window is None
    for shape, config in SHAPES.items():
        out = speculative(model, 8, Way(shape, draft, config))
        assert torch.equal(out.sequences, plain(model, 8)), shape
