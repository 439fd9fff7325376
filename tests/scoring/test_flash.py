"""Attention that takes no mask, as that of flash attention, of the target and of the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import prompts
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from twins import CHAIN, TREE, noisy, target

import hf_spec
from hf_spec import demo
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel
from hf_spec.scoring.runner import ModelRunner


@pytest.fixture
def like_flash() -> str:
    """Attend as flash attention does: without masks, and to all earlier columns of a row."""

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        nodes, columns = query.shape[2], key.shape[2]
        seen = torch.ones(nodes, columns, dtype=torch.bool).tril(columns - nodes)[None, None]
        if attention_mask is not None:  # 2D, of a prompt with padding
            seen = seen & attention_mask[:, None, None].bool()
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    def mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return attention_mask if attention_mask is not None and not attention_mask.all() else None

    name = "kernels-test/flash-like"  # as transformers names kernels of the Hub
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    return name


def test_chains_of_one_sequence_need_no_mask(like_flash: str) -> None:
    """Neither of the target, which is checked with one row, nor of the draft; all else is refused."""
    model, small, one = noisy(target(), 0.0), noisy(target()), prompts(1)
    plain = model.generate(**one, max_new_tokens=16, do_sample=False)
    small.config._attn_implementation_internal = like_flash
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "speculation_config": CHAIN}
    assert torch.equal(model.generate(**one, **options, speculator=small), plain)
    for given, config, what in ((prompts(2), CHAIN, "2 rows would need one"), (one, TREE, "a tree would need one")):
        with pytest.raises(ValueError, match=f"the draft attends by {like_flash}.*{what}"):
            model.generate(**given, **options | {"speculation_config": config}, speculator=small)
    model.config._attn_implementation_internal = like_flash
    for speculator in ("ngram", small):
        assert torch.equal(model.generate(**one, **options, speculator=speculator), plain)
    with pytest.raises(ValueError, match=f"{like_flash} takes no custom mask, which rows that advance by"):
        model.generate(**prompts(2, (9,)), **options, speculator="ngram")
    padded = {name: torch.nn.functional.pad(given, (3, 0)) for name, given in one.items()}
    with pytest.raises(ValueError, match="takes no custom mask, which padding needs"):
        model.generate(**padded, **options, speculator="ngram")
    with pytest.raises(ValueError, match="and a padded prompt would need one"):
        target().generate(**padded, **options, speculator=small)


def test_a_mask_of_ones_is_no_padding(like_flash: str) -> None:
    """Older versions of transformers hand it on."""
    model, one = noisy(target(), 0.0), prompts(1)
    model.config._attn_implementation_internal = like_flash
    runner = ModelRunner(model)
    with torch.no_grad():
        runner.prefill_tokens(one["input_ids"], torch.ones_like(one["input_ids"]))
        found = runner.extend(prompts(1, (4,), seed=2)["input_ids"]).logits
        twin = ModelRunner(noisy(target(), 0.0))
        twin.prefill_tokens(one["input_ids"], torch.ones_like(one["input_ids"]))
        torch.testing.assert_close(found, twin.extend(prompts(1, (4,), seed=2)["input_ids"]).logits)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_drafts_with_such_attention(kind: str, like_flash: str) -> None:
    """A draft that attends to nothing takes anything; a default draft is passed over where it cannot be used."""
    model = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    ids = torch.tensor([[5, 66, 77, 8]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    draft = AutoModel.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32)
    accepted = []
    for implementation in ("sdpa", like_flash):
        for config in (draft.config, draft.config.layers):
            config._attn_implementation_internal = implementation
        out = model.generate(ids, **options, speculator=draft, speculation_config=CHAIN, return_dict_in_generate=True)
        accepted.append(out.speculation.accepted)
        assert torch.equal(out.sequences, model.generate(ids, **options))
    assert accepted[0] == accepted[1] > 0
    plain = model.generate(ids.repeat(2, 1), **options)
    hf_spec.set_speculator(model, draft)
    assert torch.equal(model.generate(ids.repeat(2, 1), **options), plain)
    assert (hf_spec.last_speculation(model) is None) == (kind != "medusa")
    batch: dict[str, Any] = {"generation_config": GenerationConfig(**options), "speculator": draft}
    if kind != "medusa":
        with pytest.raises(ValueError, match="and 2 rows would need one"):
            model.generate_batch(ids.tolist(), **batch)


@torch.no_grad()
def test_depths_of_a_parallel_draft_are_a_chain(like_flash: str) -> None:
    model, one = target(), prompts(1)
    config = PEagleSpeculatorConfig.for_target(model.config, mask_token_id=3)
    found = []
    for implementation in ("sdpa", like_flash):
        torch.manual_seed(0)
        draft = PEagleDraftModel(config)
        for part in (draft.config, draft.config.layers):
            part._attn_implementation_internal = implementation
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        out = model.generate(**one, **options, speculator=draft, speculation_config=CHAIN)
        found.append((out.sequences.tolist(), out.speculation.accepted))
    assert found[0] == found[1]
