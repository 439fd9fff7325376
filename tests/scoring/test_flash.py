"""Attention that takes no mask, as that of flash attention, of the target and of the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import prompts
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from twins import CHAIN, TREE, noisy, target


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
    for given, config, what in ((prompts(2), CHAIN, "2 rows need one"), (one, TREE, "a tree needs one")):
        with pytest.raises(ValueError, match=f"the draft attends by {like_flash}.*{what}"):
            model.generate(**given, **options | {"speculation_config": config}, speculator=small)
    model.config._attn_implementation_internal = like_flash
    for speculator in ("ngram", small):
        assert torch.equal(model.generate(**one, **options, speculator=speculator), plain)
    with pytest.raises(ValueError, match=f"{like_flash} takes no custom mask, which rows that advance by"):
        model.generate(**prompts(2), **options, speculator="ngram")
    padded = {name: torch.nn.functional.pad(given, (3, 0)) for name, given in one.items()}
    with pytest.raises(ValueError, match="takes no custom mask, which trees, padding"):
        model.generate(**padded, **options, speculator="ngram")
