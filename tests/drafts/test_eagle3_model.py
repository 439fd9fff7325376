"""The EAGLE draft models against the outputs of the projects that invented them, and against slow twins."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from golden import CLOSE, END_TO_END, SAFEAILAB, SPECFORGE, SPECULATORS, load_draft, load_target, outputs, tiny_target
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.layers import RMSNorm, with_torch_norms

SLIDING = "sp_eagle3_qwen3_sliding_bf16"


def tiny_draft(layers: dict[str, Any] | None = None, **flags: Any) -> Any:
    torch.manual_seed(1)
    config = Eagle3SpeculatorConfig.for_target(tiny_target().config, layers, **flags)
    return Eagle3DraftModel(config).eval()


def tokens(*shape: int, high: int = 96, seed: int = 2) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def chain(draft: Any, ids: Tensor, features: Tensor, steps: int, cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Draft greedily: logits (steps, draft vocabulary) and target tokens (steps,)."""
    out = draft(ids[None], features=features[None], past_key_values=cache)
    logits, guesses = [], []
    for _ in range(steps):
        logits.append(out.logits[0, -1])
        guesses.append(draft.to_target_ids(logits[-1].argmax()))
        hidden = out.hidden_states[:, -1:]
        out = draft(guesses[-1].view(1, 1), hidden_states=hidden, past_key_values=cache)
    return torch.stack(logits), torch.stack(guesses)


def unroll(draft: Any, ids: Tensor, features: Tensor, steps: int, window: int | None = None) -> list[Any]:
    """Teach every row at once: row i sees the first step's rows up to i, and its own later steps."""
    rows = len(features) - 1
    here, there = torch.arange(rows)[:, None], torch.arange(rows)[None]
    seen = (there <= here) & (there > here - (window or rows))
    cache, out, outputs = DynamicCache(), None, []
    for step in range(steps):
        mask = torch.cat([seen, *[here == there] * step], dim=1)
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        padded = torch.cat([ids[1 + step :], ids.new_zeros(step)])[None]
        state = {"features": features[None, :-1]} if out is None else {"hidden_states": out.hidden_states}
        positions = torch.arange(step, step + rows)[None]
        out = draft(padded, **state, position_ids=positions, attention_mask=mask, past_key_values=cache)
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", SPECULATORS + SPECFORGE)
def test_drafting_gives_the_logits_of_the_peer(case: str, attention: str) -> None:
    io, draft = outputs(case), load_draft(case, attn_implementation=attention)
    x, g = io["input_ids"], io["aux_hidden_states"]
    for i, length in enumerate(io["ar_prefix_len"].tolist()):
        logits, guesses = chain(draft, x[1 : length + 1], g[:length], 4, DynamicCache())
        torch.testing.assert_close(logits, io["ar_logits"][i], **CLOSE)
        assert guesses.tolist() == io["ar_tokens"][i].tolist()


@pytest.mark.parametrize("case", SPECULATORS + SPECFORGE)
@torch.no_grad()
def test_unrolling_gives_the_logits_and_states_of_the_peer(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    window = 4 if case == SLIDING else None
    outs = unroll(draft, io["input_ids"], io["aux_hidden_states"], len(io["ttt_logits"]), window)
    for step, out in enumerate(outs):
        rows = io["ttt_valid"][step]
        torch.testing.assert_close(out.logits[0, rows], io["ttt_logits"][step, rows], **CLOSE)
        state = io["ttt_prenorm_hidden"][step, rows]
        state = draft.norm(state) if draft.config.norm_output else state
        torch.testing.assert_close(out.hidden_states[0, rows], state, **CLOSE)


@pytest.mark.parametrize("case", SAFEAILAB)
@torch.no_grad()
def test_the_original_eagle_drafts_give_the_logits_of_their_code(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    x, g = io["input_ids"], io["features"]
    out = draft(x[None, 1:], features=g[None])
    torch.testing.assert_close(out.logits[0], io["row_logits"], **CLOSE)
    torch.testing.assert_close(out.hidden_states[0], io["row_hidden"], **CLOSE)
    logits, guesses = chain(draft, x[1:], g, 4, DynamicCache())
    torch.testing.assert_close(logits, io["chain_logits"], **CLOSE)
    assert guesses.tolist() == io["chain_tokens"].tolist()


@pytest.mark.parametrize("case", END_TO_END)
def test_the_first_chain_on_a_real_target_is_the_peers(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    ids = torch.cat([io["prompt"][1:], io["greedy_ids"][len(io["prompt"])][None]])
    logits, guesses = chain(draft, ids, io["prompt_aux"], 4, DynamicCache())
    torch.testing.assert_close(logits, io["first_draft_logits"], **CLOSE)
    assert guesses.tolist() == io["first_draft_tokens"].tolist()


@torch.no_grad()
def test_the_first_depth_of_a_parallel_draft_is_one_step() -> None:
    io, draft = outputs("sp_peagle_llama"), load_draft("sp_peagle_llama")
    out = draft(io["input_ids"][None, 1:], features=io["aux_hidden_states"][None, :-1])
    torch.testing.assert_close(out.logits[0], io["parallel_logits"][:, 0], **CLOSE)


@torch.no_grad()
def test_features_are_those_hidden_states_of_the_target() -> None:
    for case in ("eagle1_orig_a", "eagle3_orig_a"):
        io, draft, target = outputs(case), load_draft(case), load_target(case)
        states = target(io["e2e/prompt"][None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in draft.feature_layers(target)], dim=-1)
        key = "e2e/prompt_last_hidden" if case.startswith("eagle1") else "e2e/prompt_features"
        torch.testing.assert_close(features[0], io[key], **CLOSE)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output", "norm_before_lm_head"])
def test_a_wrong_flag_is_far_outside_the_tolerance(flag: str) -> None:
    case = "sp_eagle3_llama_ff"
    io, draft = outputs(case), load_draft(case)
    setattr(draft.config, flag, not getattr(draft.config, flag))
    draft.layers[0].norm_before_residual = draft.config.norm_before_residual
    logits, _ = chain(draft, io["input_ids"][1:14], io["aux_hidden_states"][:13], 4, DynamicCache())
    assert (logits - io["ar_logits"][2]).abs().max() > 0.05


def test_a_window_cache_drafts_like_a_full_one() -> None:
    io, draft = outputs(SLIDING), load_draft(SLIDING)
    x, g = io["input_ids"], io["aux_hidden_states"]
    full, _ = chain(draft, x[1:14], g[:13], 4, DynamicCache())
    small, _ = chain(draft, x[1:14], g[:13], 4, DynamicCache(config=draft.config))
    torch.testing.assert_close(small, full, **CLOSE)
    draft.config.layers.layer_types = ["full_attention"]
    other, _ = chain(draft, x[1:14], g[:13], 4, DynamicCache())
    assert (other - full).abs().max() > 0.05


@pytest.mark.parametrize(("kind", "count"), [("llama", 1), ("llama", 3), ("qwen3", 2)])
@torch.no_grad()
def test_steps_over_a_cache_equal_one_pass(kind: str, count: int) -> None:
    draft = tiny_draft({"model_type": kind, "num_hidden_layers": count}, draft_vocab_size=40)
    ids, features = tokens(2, 9), noise(2, 9, 96)
    whole = draft(ids, features=features)
    cache, parts = DynamicCache(), []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        parts.append(draft(ids[:, part], features=features[:, part], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.logits)
    last = draft(ids, features=features, logits_to_keep=2)
    torch.testing.assert_close(last.logits, whole.logits[:, -2:])
    torch.testing.assert_close(last.hidden_states, whole.hidden_states)


@torch.no_grad()
def test_padded_rows_equal_rows_of_their_own() -> None:
    draft = tiny_draft()
    ids, features = tokens(2, 7), noise(2, 7, 96)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    both = draft(ids, features=features, attention_mask=mask, position_ids=positions).logits
    alone = draft(ids[1:, 3:], features=features[1:, 3:]).logits
    torch.testing.assert_close(both[1:, 3:], alone)


def test_masks_are_asked_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_draft({"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    asked = []
    plain = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def counting(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["kv_length"])
        return plain(*args, **kwargs)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", counting)
    draft(tokens(1, 5), features=noise(1, 5, 96))
    assert asked == [5]


def test_losses_of_later_steps_reach_the_features_and_every_trained_weight() -> None:
    flags = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
    draft = tiny_draft({"num_hidden_layers": 2}, draft_vocab_size=40, **flags).train()
    features = noise(8, 96).requires_grad_()
    before = features.detach().clone()
    outs = unroll(draft, tokens(8), features, 3)
    outs[2].logits.square().sum().backward()
    assert torch.equal(features, before)
    assert features.grad.abs().sum() > 0
    without = [name for name, weight in draft.named_parameters() if weight.requires_grad and weight.grad is None]
    assert without == []
    assert draft.embed_tokens.weight.grad is None
    assert not draft.embed_tokens.weight.requires_grad


def test_a_draft_says_which_input_it_wants() -> None:
    draft = tiny_draft()
    with pytest.raises(ValueError, match="either features"):
        draft(tokens(1, 3))
    with pytest.raises(ValueError, match="not both"):
        draft(tokens(1, 3), features=noise(1, 3, 96), hidden_states=noise(1, 3, 32))


# --- what the target lends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 96])
@torch.no_grad()
def test_a_lent_head_and_embedding_equal_copies_of_them(size: int) -> None:
    target = tiny_target()
    own = tiny_draft(draft_vocab_size=size)
    borrower = tiny_draft(draft_vocab_size=size, shared_with_target=["embed_tokens", "lm_head"])
    ids = torch.arange(size) * 96 // size
    for draft in (own, borrower):
        if size < 96:
            draft.set_vocabulary(ids)
    borrower.load_state_dict(
        {k: v for k, v in own.state_dict().items() if k.split(".")[0] not in ("embed_tokens", "lm_head")}
    )
    own.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    own.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
    with pytest.raises(ValueError, match="bind"):
        borrower(tokens(1, 5), features=noise(1, 5, 96))
    borrower.bind(target)
    given = {"input_ids": tokens(1, 5), "features": noise(1, 5, 96)}
    assert torch.equal(borrower(**given).logits, own(**given).logits)
    assert borrower.to_target_ids(torch.arange(size)).tolist() == ids.tolist()


def test_what_is_lent_is_neither_copied_nor_trained_nor_saved(tmp_path: Any) -> None:
    target = tiny_target()
    draft = tiny_draft(shared_with_target=["embed_tokens", "lm_head"])
    draft.bind(target)
    assert draft._lent["embed_tokens"] is target.get_input_embeddings().weight
    assert draft._lent["lm_head"] is target.get_output_embeddings().weight
    draft(tokens(1, 5), features=noise(1, 5, 96)).logits.sum().backward()
    assert draft.fc.weight.grad is not None
    assert [name for name, weight in target.named_parameters() if weight.grad is not None] == []
    assert not [name for name in draft.state_dict() if "embed" in name or "head" in name]
    draft.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    again.bind(target)
    given = {"input_ids": tokens(1, 5), "features": noise(1, 5, 96)}
    assert torch.equal(again(**given).logits, draft(**given).logits)


@pytest.mark.parametrize("reduced", [{}, {"draft_vocab_size": 40}], ids=["whole", "reduced"])
def test_what_is_lent_is_in_no_pickle_and_not_doubled_by_copies(reduced: dict[str, int]) -> None:
    target, given = tiny_target(), {"input_ids": tokens(1, 5), "features": noise(1, 5, 96)}
    draft = tiny_draft(shared_with_target=["embed_tokens", "lm_head"], **reduced)
    unbound = len(pickle.dumps(draft))
    draft.bind(target)
    assert len(pickle.dumps(draft)) == unbound
    read = pickle.loads(pickle.dumps(draft))
    with pytest.raises(ValueError, match=r"call draft\.bind\(target\) first"):
        read(**given)
    read.bind(target)
    copied = copy.deepcopy(draft)
    assert copied._lent["embed_tokens"] is target.get_input_embeddings().weight
    assert copied.fc.weight is not draft.fc.weight
    for other in (read, copied):
        assert torch.equal(other(**given).logits, draft(**given).logits)


def test_binding_again_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in another thread may be guessing with the same draft while one begins."""
    target, draft = tiny_target(), tiny_draft(shared_with_target=["embed_tokens", "lm_head"])
    draft.bind(target)
    head, given = target.get_output_embeddings(), {"input_ids": tokens(1, 5), "features": noise(1, 5, 96)}
    expected, meanwhile = draft(**given).logits, []

    def guess() -> Any:
        meanwhile.append(draft(**given).logits)
        return head

    monkeypatch.setattr(target, "get_output_embeddings", guess)
    draft.bind(target)
    assert meanwhile
    assert all(torch.equal(logits, expected) for logits in meanwhile)


def test_a_target_of_another_width() -> None:
    target = tiny_target(hidden_size=48)
    config = Eagle3SpeculatorConfig.for_target(
        target.config, {"hidden_size": 32, "head_dim": 8}, target_hidden_size=48, fc_norm=True
    )
    draft = Eagle3DraftModel(config)
    draft.bind(target)
    assert draft(tokens(1, 4), features=noise(1, 4, 3 * 48)).logits.shape == (1, 4, 96)
    borrower = Eagle3DraftModel(type(config)(**config.to_dict() | {"shared_with_target": ["embed_tokens"]}))
    with pytest.raises(ValueError, match="needs its own"):
        borrower.bind(target)


def test_a_draft_refuses_a_target_it_was_not_made_for() -> None:
    draft = tiny_draft(eagle_aux_hidden_state_layer_ids=[1, 4, 8])
    draft.check(tiny_target())
    for other, named in (
        (tiny_target(vocab_size=97), "vocab_size is 96"),
        (tiny_target(hidden_size=48), "target's is 48"),
        (tiny_target(num_hidden_layers=7), "7 layers"),
    ):
        with pytest.raises(ValueError, match=named):
            draft.check(other)


def test_the_draft_vocabulary_must_ascend() -> None:
    draft = tiny_draft(draft_vocab_size=4)
    draft.set_vocabulary(torch.tensor([3, 5, 9, 95]))
    assert draft.to_target_ids(torch.tensor([[0, 3], [1, 2]])).tolist() == [[3, 95], [5, 9]]
    assert draft.t2d.nonzero()[:, 0].tolist() == draft.target_ids.tolist() == [3, 5, 9, 95]
    for bad in ([3, 9, 5, 95], [3, 3, 5, 9], [-1, 2, 3, 4], [1, 2, 3, 96]):
        with pytest.raises(ValueError, match="ascend"):
            draft.set_vocabulary(torch.tensor(bad))
    with pytest.raises(ValueError, match="predicts 4 tokens"):
        draft.set_vocabulary(torch.arange(3))
    assert draft.target_ids.tolist() == [3, 5, 9, 95]
    with pytest.raises(ValueError, match="draft_vocab_size"):
        tiny_draft().set_vocabulary(torch.arange(4))


def test_an_eagle_draft_reads_the_last_hidden_state_and_uses_the_targets_head() -> None:
    target = tiny_target()
    config = EagleSpeculatorConfig.for_target(target.config, shared_with_target=["lm_head"])
    draft = EagleDraftModel(config).eval()
    draft.bind(target)
    out = draft(tokens(1, 4), features=noise(1, 4, 32))
    torch.testing.assert_close(out.logits, target.lm_head(out.hidden_states))
    assert draft.feature_layers(target) == (-1,)


def test_the_vocabulary_cannot_be_resized() -> None:
    with pytest.raises(ValueError, match="vocabulary of its target"):
        tiny_draft().resize_token_embeddings(200)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_transformers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """And torch's own, of which CUDA has one kernel; in half precision it rounds once less."""
    norm, hidden = kind(16, eps=1e-3).to(dtype), noise(3, 5, 16).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1.5 + 0.1 * noise(16))
    own = nn.Sequential(copy.deepcopy(norm))
    with_torch_norms(own)
    assert type(own[0]) is RMSNorm and list(own.state_dict()) == ["0.weight"]
    torch.testing.assert_close(own(hidden), norm(hidden), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):  # weights stay in float32
        assert own.float()(hidden.bfloat16()).dtype == norm.float()(hidden.bfloat16()).dtype == torch.float32


def test_drafts_have_no_other_norms() -> None:
    draft = tiny_draft({"num_hidden_layers": 2}, fc_norm=True)
    norms = [one for one in draft.modules() if "Norm" in type(one).__name__]
    assert len(norms) == 9 and {type(one) for one in norms} == {RMSNorm}
