"""The unrolled draft against the draft that drafts from one position at a time, and against other projects."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from golden import CLOSE, SPECFORGE, SPECULATORS, load_draft, outputs, tiny_target
from pairs import usual
from torch import Tensor
from transformers import DynamicCache

from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MedusaDraftModel
from hf_spec.drafts.mtp.configuration import MTP_FLAGS, MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.training import unroll
from hf_spec.training.unrolling import unrolled
from hf_spec.unroll.feedback import UnrollInput
from hf_spec.unroll.feedback import outputs as outputs_of_steps
from hf_spec.unroll.key_ranges import KeyRange, attend

FLAGS = ("norm_before_residual", "norm_output", "norm_before_lm_head", "norm_before_fc")
STEPS = 4
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention"], "use_sliding_window": True}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 4,
}
SLIDING = "sp_eagle3_qwen3_sliding_bf16"


def eagle3(layers: dict[str, Any] | None = None, **flags: Any) -> Any:
    torch.manual_seed(1)
    draft = Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(tiny_target().config, layers, **flags)).eval()
    return rougher(draft)


def rougher(draft: Any) -> Any:
    """Make a random draft's outputs depend visibly on all that it reads."""
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return draft


def batch(draft: Any, rows: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (rows, length), generator=generator)
    width = draft.fc.in_features if isinstance(draft, Eagle3DraftModel) else 32
    return ids, torch.randn(rows, length, width, generator=generator)


@torch.no_grad()
def drafted(draft: Any, ids: Tensor, features: Tensor, start: int, steps: int) -> list[Tensor]:
    """Draft from position ``start`` of a text (length,) as a drafter does, but let it guess the text's own tokens."""
    cache = DynamicCache()
    out = draft(ids[None, : start + 1], features=features[None, : start + 1], past_key_values=cache)
    logits = [out.logits[0, -1]]
    for token in ids[start + 1 : start + steps]:
        out = draft(token.view(1, 1), hidden_states=out.hidden_states[:, -1:], past_key_values=cache)
        logits.append(out.logits[0, -1])
    return logits


@torch.no_grad()
def assert_unrolls_like_the_drafter(
    draft: Any, steps: int = STEPS, documents: tuple[int, ...] = (9,), attention: str = "sdpa"
) -> None:
    ids, features = batch(draft, length=sum(documents))
    numbers = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)).expand_as(ids)
    draft.config.layers._attn_implementation = attention
    logits = unroll(draft, ids, features, steps, numbers if len(documents) > 1 else None)
    draft.config.layers._attn_implementation = "sdpa"
    ends = itertools.accumulate(documents)
    for row, (end, length) in itertools.product((0, 1), zip(ends, documents, strict=True)):
        first = end - length
        one_ids, one_features = ids[row, first : first + length], features[row, first : first + length]
        for start in range(length):
            for step, expected in enumerate(drafted(draft, one_ids, one_features, start, steps)):
                torch.testing.assert_close(logits[step][row, first + start], expected, **CLOSE)


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=len(FLAGS))))
def test_every_row_of_every_step_is_what_the_drafter_computes(values: tuple[bool, ...]) -> None:
    assert_unrolls_like_the_drafter(eagle3(draft_vocab_size=40, **dict(zip(FLAGS, values, strict=True))))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("documents", usual([(9,), (4, 1, 6, 2)], [(4, 1, 6, 2)]))
@pytest.mark.parametrize(
    "layers",
    [
        {"num_hidden_layers": 3},
        {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16},
        {"model_type": "qwen3", **WINDOW},
        {"model_type": "qwen3", **WINDOW, "sliding_window": 2},  # shorter than the unroll: it leaves own steps behind
        {"num_key_value_heads": 4},
    ],
)
def test_several_layers_windows_and_packed_documents(
    layers: dict[str, Any], documents: tuple[int, ...], attention: str
) -> None:
    draft = eagle3(layers, fc_norm=True, norm_output=True)
    assert_unrolls_like_the_drafter(draft, documents=documents, attention=attention)


def test_eagle_1_unrolls_the_same_way() -> None:
    torch.manual_seed(1)
    target = tiny_target()
    config = EagleSpeculatorConfig.for_target(target.config, {"num_hidden_layers": 2}, shared_with_target=["lm_head"])
    draft = rougher(EagleDraftModel(config).eval())
    draft.bind(target)
    assert_unrolls_like_the_drafter(draft, documents=(4, 5))


@pytest.mark.parametrize("documents", [(9,), (4, 5)])
@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        *(({}, dict(zip(MTP_FLAGS, values, strict=True))) for values in itertools.product([False, True], repeat=3)),
        ({"model_type": "qwen3", **WINDOW}, {}),
        ({"model_type": "mixtral", "num_local_experts": 4}, {}),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, **LATENT}, {}),
    ],
)
def test_an_mtp_layer_unrolls_the_same_way(
    layers: dict[str, Any], flags: dict[str, bool], documents: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    target = tiny_target()
    config = MTPSpeculatorConfig.for_target(
        target.config, layers, shared_with_target=["embed_tokens", "lm_head"], **flags
    )
    draft = rougher(MTPDraftModel(config).eval())
    draft.bind(target)
    assert_unrolls_like_the_drafter(draft, documents=documents)


def test_scores_that_are_capped_are_refused() -> None:
    target = tiny_target()
    draft = MTPDraftModel(MTPSpeculatorConfig.for_target(target.config, {"model_type": "gemma2", "head_dim": 8}))
    with pytest.raises(ValueError, match="cap their scores"):
        unroll(draft, *batch(draft), STEPS)


@pytest.mark.parametrize("flags", [{}, {"shared_with_target": [], "draft_vocab_size": 40}])
@torch.no_grad()
def test_medusa_heads_are_the_steps(flags: dict[str, Any]) -> None:
    torch.manual_seed(1)
    target = tiny_target()
    draft = rougher(MedusaDraftModel(MedusaSpeculatorConfig.for_target(target.config, num_heads=3, **flags)).eval())
    draft.bind(target)
    ids, features = batch(draft)
    made = unrolled(draft, UnrollInput(ids, torch.tensor([[0] * 4 + [1] * 5]).expand_as(ids), features), 3)
    assert len(made.states) == 3
    for start, step in itertools.product(range(8), range(3)):
        expected = draft(features=features[:, start : start + 1]).logits[:, 0, step]
        torch.testing.assert_close(made.head(step, made.states[step])[:, start], expected, **CLOSE)


@pytest.mark.parametrize("case", [case for case in SPECULATORS + SPECFORGE if case != SLIDING])
@torch.no_grad()
def test_other_projects_unroll_to_the_same_logits(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    ids, features = io["input_ids"][None, 1:], io["aux_hidden_states"][None, :-1]
    for step, logits in enumerate(unroll(draft, ids, features, len(io["ttt_logits"]))):
        rows = io["ttt_valid"][step]
        torch.testing.assert_close(logits[0, rows], io["ttt_logits"][step, rows], **CLOSE)
    if "packed/fed/input_ids" in io:
        fed = {name: io[f"packed/fed/{name}"][None] for name in ("input_ids", "hidden_states", "document_ids")}
        packed = unroll(draft, fed["input_ids"], fed["hidden_states"], 3, fed["document_ids"])
        for step, logits in enumerate(packed):
            rows = torch.zeros(len(logits[0]), dtype=torch.bool)
            rows[: len(rows) - step] = fed["document_ids"][0, : len(rows) - step] == fed["document_ids"][0, step:]
            rows &= fed["document_ids"][0] >= 0
            torch.testing.assert_close(logits[0, rows], io["packed/ttt_logits"][step, rows], **CLOSE)


@pytest.mark.parametrize("size", [3, 256])
def test_blocks_attend_as_one_dense_softmax_does(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_spec.unroll.key_ranges.BLOCK", size)
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 2, 3, 7, 4), "key": (2, 2, 7, 4), "value": (2, 2, 7, 4)}
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes.values()]
    first = torch.tensor([[0, 0, 0, 3, 3, 5, 5], [0, 0, 0, 0, 0, 1, 2]])
    end = torch.arange(1, 8).expand(2, -1)
    torch.set_default_dtype(torch.bfloat16)  # of a training script, and nothing to these
    try:
        attended, logsumexp = attend(*given, KeyRange(first, end), flex=False)
    finally:
        torch.set_default_dtype(torch.float32)

    query, key, value = given
    scores = query @ key.mT[:, :, None]  # (batch, heads, group, rows, rows)
    rows = torch.arange(7)
    hidden = (rows > rows[:, None]) | (rows < first[:, :, None])
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    expected = scores.softmax(-1) @ value[:, :, None], scores.logsumexp(-1)
    pull = [torch.randn(out.shape, generator=generator) for out in expected]
    found = torch.autograd.grad((attended, logsumexp), given, pull)
    for one, two in zip(
        (attended, logsumexp, *found), (*expected, *torch.autograd.grad(expected, given, pull)), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("flex", [False, True])
@torch.no_grad()
def test_any_number_of_queries_attends_to_any_stretch_of_keys(flex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_spec.unroll.key_ranges.BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 3, 10, 16, generator=generator)
    key, value = (torch.randn(2, 2, 6, 16, generator=generator) for _ in range(2))
    first = torch.tensor([[0, 0, 1, 1, 2, 2, 0, 0, 4, 4], [0] * 10])
    end = torch.tensor([[1, 1, 3, 3, 2, 2, 6, 6, 6, 6], [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]])  # two queries see nothing
    attended, logsumexp = attend(query, key, value, KeyRange(first, end), flex)
    place = torch.arange(6)
    hidden = (place >= end[:, :, None]) | (place < first[:, :, None])
    scores = (query @ key.mT[:, :, None]).masked_fill(hidden[:, None, None], -torch.inf)
    seen = (first < end)[:, None, None].expand(logsumexp.shape)
    torch.testing.assert_close(attended[seen], (scores.softmax(-1) @ value[:, :, None])[seen], atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(logsumexp[seen], scores.logsumexp(-1)[seen], atol=2e-6, rtol=1e-4)
    assert (logsumexp[~seen] < -1e9).all() and attended[~seen].isfinite().all()


@pytest.mark.parametrize("layers", [None, {"num_hidden_layers": 2}])
def test_blocks_and_recomputing_change_neither_logits_nor_gradients(
    layers: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = eagle3(layers)
    ids, features = batch(draft, length=11)
    numbers = torch.tensor([[0] * 5 + [1] * 6, [3] * 11])
    found = []
    for size, recompute in [(256, False), (3, False), (256, True), (3, True)]:
        monkeypatch.setattr("hf_spec.unroll.key_ranges.BLOCK", size)
        draft.zero_grad()
        logits = [out.logits for out in outputs_of_steps(draft, ids, features, STEPS, numbers, recompute=recompute)]
        sum(step.logsumexp(-1).sum() for step in logits).backward()
        gradients = [parameter.grad.clone() for parameter in draft.parameters() if parameter.requires_grad]
        found.append([*(step.detach() for step in logits), *gradients])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=len(FLAGS))))
def test_gradients_under_autocast_are_those_of_float32(values: tuple[bool, ...]) -> None:
    """Norms give float32 there, projections bfloat16, so that a step may meet keys of another dtype."""
    draft = eagle3(**dict(zip(FLAGS, values, strict=True)))
    ids, features = batch(draft)
    found = []
    for enabled in (False, True):
        draft.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = unroll(draft, ids, features, STEPS)
        sum(step.float().log_softmax(-1)[..., 3].sum() for step in logits).backward()
        gradients = [weight.grad for weight in draft.parameters() if weight.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.cosine_similarity(*found, dim=0) > 0.98


def test_the_last_step_teaches_what_the_first_one_reads() -> None:
    draft = eagle3()
    ids, features = batch(draft)
    unroll(draft, ids, features, STEPS)[-1][:, 0].logsumexp(-1).sum().backward()
    assert draft.fc.weight.grad.abs().max() > 0
    assert draft.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


def test_the_draft_is_as_before_afterwards() -> None:
    draft = eagle3()
    ids, features = batch(draft)
    before = draft(ids, features=features).logits
    (logits,) = unroll(draft, ids, features, 1)
    torch.testing.assert_close(logits, before, **CLOSE)
    assert draft.config.layers._attn_implementation == "sdpa"
    torch.testing.assert_close(draft(ids, features=features).logits, before, atol=0, rtol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    draft = eagle3()
    ids, features = batch(draft)
    with pytest.raises(ValueError, match="one feature per token"):
        unroll(draft, ids[:, 1:], features, 2)
    with pytest.raises(ValueError, match="at least one"):
        unroll(draft, ids, features, 0)
