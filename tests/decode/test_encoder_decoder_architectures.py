"""Every encoder-decoder architecture of transformers: exact, or refused by name, as docs/architectures.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from encoder_decoders import NAMES, build, generate, sources
from test_encoder_decoders import SHAPES
from test_exactness import flawed, noisy_copy

import hf_spec
from hf_spec import NgramSpeculator
from hf_spec.decode.refusals import Refusal

QUICK = "umt5 t5gemma moonshine speech_to_text bert+gpt2 nllb-moe prophetnet".split()
# Its plain generation fails with what is made up here: codes of sound in several channels.
UNTRIED = ("dia",)
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def verdict(name: str, shape: str) -> str:
    """Say whether the text of three sources is plain `generate`'s: "exact", "refused" or "wrong"."""
    model = build(name)
    given = sources(model, 3) | {"max_new_tokens": 16, "do_sample": False}
    want = generate(model, **given)
    accepted = 0
    for speculator in (NgramSpeculator(corpus=flawed(want)), noisy_copy(model, seed=0, noise=0.05)):
        try:
            got = generate(model, **given, speculator=speculator, speculation_config=SHAPES[shape])
        except Refusal:
            return "refused"
        if not torch.equal(got, want):
            return "wrong"
        stats = hf_spec.last_speculation(model)
        assert stats is not None
        accepted += stats.counts.accepted
    assert accepted
    return "exact"


def documented() -> dict[str, tuple[str, str]]:
    """Read the table of encoder-decoders: chain and tree by name."""
    part = PAGE.read_text(encoding="utf-8").partition("## Encoder-decoders")[2].partition("\n## ")[0]
    return {name: (chain, tree) for name, chain, tree in re.findall(r"\| `(.*?)` \| (\w+) \| (\w+) \|", part)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES if name not in UNTRIED],
)
def test_as_documented(name: str) -> None:
    assert (verdict(name, "chain"), verdict(name, "dynamic tree")) == documented()[name]


def test_every_architecture_is_documented() -> None:
    assert set(documented()) == set(NAMES) - set(UNTRIED)
