"""The reference implementation is a slow twin of the loop: same text, same accepted tokens, right distribution."""

from __future__ import annotations

import re
import runpy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import draft, target

import hf_spec

ROOT = Path(__file__).parents[2]
CRITICAL = 54.1  # the 0.1 % point of chi-square with 26 degrees of freedom
REFERENCE = runpy.run_path(str(ROOT / "examples" / "reference.py"))
PROMPT = torch.tensor([5, 17, 3, 60, 22])


@pytest.mark.parametrize("draft_length", [1, 4, 7])
def test_the_loop_accepts_what_the_reference_accepts(draft_length: int) -> None:
    plain = target().generate(PROMPT[None], max_length=45, do_sample=False, eos_token_id=None)
    begun = plain[0, : len(PROMPT) + 1]  # the loop emits the first token before a draft model reads the prompt
    tokens, accepted = REFERENCE["speculative_decode"](target(), draft(), begun, 45, draft_length, temperature=0)
    assert torch.equal(tokens, plain[0])
    options: dict[str, Any] = {"max_length": 45, "do_sample": False, "eos_token_id": None}
    config = hf_spec.SpeculationConfig(num_speculative_tokens=draft_length)
    options |= {"speculation_config": config, "return_dict_in_generate": True}
    out = target().generate(PROMPT[None], speculator=draft(), **options)
    assert torch.equal(out.sequences[0], tokens)
    assert (out.speculation.steps, out.speculation.accepted) == (len(accepted), sum(accepted))
    assert 0 < sum(accepted) < draft_length * len(accepted)


class Table:
    """A model of three tokens whose logits after each token stand in a table."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) * 1.5

    def __call__(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[ids])


def chi_square(speculative_decode: Any, rounds: int = 4000) -> float:
    """Compare how often each text of three tokens comes with the target's probabilities; 26 degrees of freedom."""
    model, generator = Table(0), torch.Generator().manual_seed(0)
    p = model.logits.softmax(-1)
    counts = dict.fromkeys(product(range(3), repeat=3), 0)
    for _ in range(rounds):
        tokens, _ = speculative_decode(model, Table(1), torch.tensor([0]), 4, 2, generator=generator)
        counts[tuple(tokens[1:].tolist())] += 1
    expected = {text: float(p[0, text[0]] * p[text[0], text[1]] * p[text[1], text[2]]) * rounds for text in counts}
    return sum((counts[text] - expected[text]) ** 2 / expected[text] for text in counts)


def test_sampled_text_has_the_targets_distribution() -> None:
    assert chi_square(REFERENCE["speculative_decode"]) < CRITICAL


def test_a_residual_that_is_left_out_is_noticed() -> None:
    source = (ROOT / "examples" / "reference.py").read_text(encoding="utf-8")
    wrong: dict[str, Any] = {}
    exec(source.replace("(p[i] - q[i]).clamp(min=0)", "p[i]"), wrong)
    assert chi_square(wrong["speculative_decode"]) > CRITICAL


def test_the_documents_show_the_file_as_it_is() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    source = (ROOT / "examples" / "reference.py").read_text(encoding="utf-8")
    assert source in re.findall(r"```python\n(.*?)```", page, re.S)
    assert source.count("\n") <= 60
