"""The hidden states that are caught for drafts are those that transformers gives."""

from __future__ import annotations

import pytest
import torch
from architectures import CORE, LAYERS, build, names, prompts
from pairs import usual

from hf_spec.scoring.features import Features

OF_IMAGES_ALONE = ("vl:llama4",)  # hidden states that it gives
COLLECT_THEMSELVES = ("bloom", "falcon:alibi", "mpt")  # without hooks


@pytest.mark.parametrize("name", [name for name in names("all") if name not in OF_IMAGES_ALONE])
def test_states_are_those_of_transformers(name: str) -> None:
    model = build(name)
    features = Features(model, range(LAYERS))
    with torch.no_grad(), features.watching() as caught:
        outputs = model(**prompts(3), output_hidden_states=True, use_cache=False)
    states = features.states(outputs, caught)
    assert all(torch.equal(state, theirs) for state, theirs in zip(states, outputs.hidden_states, strict=False))


@pytest.mark.parametrize("name", CORE)
def test_no_hook_stays(name: str) -> None:
    """Those of transformers would stay, at every layer, and cost all later forwards."""
    model = build(name, seed=1)  # which no other test asks for states
    features = Features(model, (1, LAYERS - 1))
    with torch.no_grad(), features.watching() as caught:
        outputs = model(**prompts(1), **features.asked)
    assert bool(features.asked) == (name in COLLECT_THEMSELVES)
    assert len(features.states(outputs, caught)) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("part", usual(["", "model", "model.layers.1"], ["", "model.layers.1"]))
def test_a_target_that_is_compiled_already(part: str) -> None:
    """A graph that was made without hooks does not see those that come later."""
    model, inputs = build("llama", seed=2), prompts(3)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
        model.get_submodule(part).compile(backend="eager")
        model(**inputs)
        features = Features(model, (1, LAYERS - 1))
        with features.watching() as caught:
            outputs = model(**inputs, **features.asked)
    for layer, states in zip(features.layers, features.states(outputs, caught), strict=True):
        torch.testing.assert_close(states, expected[layer])
