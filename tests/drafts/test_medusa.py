"""Medusa heads: every layout in circulation, the trees of the original code, and typical acceptance."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import CLOSE, GOLDENS, MEDUSA, load_draft, load_target, outputs, tiny_target
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel
from twins import paths_of

from hf_spec import AcceptedTokens, DraftContext, Proposal, SpeculationConfig
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MEDUSA_TREE, MedusaDraftModel
from hf_spec.verify.rules import accept_typical

V1 = "medusa_v1_pt"
HEADS = {"medusa_v1_pt": 5, "medusa_v2_pt": 3, "medusa_v2_safetensors": 4, "medusa2_combined": 3}
# Settings of the original code's runs: the tree, and temperature, threshold and alpha of its decisions.
TREES: dict[str, list[tuple[int, ...]]] = {
    "medusa_v1_pt": [(0, 0), (0, 1), (0, 2), (0, 0, 1), (1, 0), (2,), (3,), (0, 0, 0, 0)],
    "medusa_v2_pt": [(0, 0, 0), (0, 1), (1, 0), (2,)],
    "medusa_v2_safetensors": [(0, 0, 0, 0), (0, 1), (1,)],
    "medusa2_combined": [(0, 0, 0), (0, 1), (1, 0)],
}
TREES = {  # with the paths that lead to these
    case: sorted({path[:end] for path in paths for end in range(1, 1 + len(path))}) for case, paths in TREES.items()
}
POSTERIOR = {
    "medusa_v1_pt": [(0.7, 0.09, 0.3), (1.0, 0.3, 0.09), (0.4, 0.2, 0.6)],
    "medusa_v2_pt": [(0.7, 0.09, 0.3), (1.0, 0.09, 0.3)],
    "medusa_v2_safetensors": [(0.5, 0.09, 0.3)],
    "medusa2_combined": [(0.7, 0.09, 0.3)],
}


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def propose(draft: Any, target: Any, state: Tensor, limit: int = 8, sample: bool = False, **config: Any) -> Proposal:
    """Let ``draft`` guess behind one ``state`` (batch, hidden)."""
    ids = torch.zeros(len(state), 1, dtype=torch.long)
    request = DraftContext(
        target=target,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        features=state[:, None],
        config=SpeculationConfig(**config),
        log_probs=log_softmax,
        sample=sample,
    )
    return draft.drafter(request).propose(
        AcceptedTokens(ids + 7, torch.ones(len(ids), dtype=torch.long), state[:, None]), limit
    )


def head_logits(draft: Any, case: str) -> Tensor:
    return draft(features=outputs(case)["hidden_states"][None]).logits[0].transpose(0, 1)


# --- the original code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MEDUSA)
@torch.no_grad()
def test_heads_say_what_they_say_in_the_original_code(case: str) -> None:
    draft = load_draft(case)
    assert draft.config.num_heads == HEADS[case]
    torch.testing.assert_close(head_logits(draft, case), outputs(case)["head_logits"], **CLOSE)


@pytest.mark.parametrize("case", MEDUSA)
@torch.no_grad()
def test_static_trees_are_those_of_the_original_code(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    state = target(io["input_ids"][None], output_hidden_states=True).hidden_states[-1][:, -1]
    proposal = propose(draft, target, state, tree=TREES[case])
    assert proposal.tokens[0, 1:].tolist() == io["tree/tree_tokens"][1:].tolist()
    assert proposal.depth[0].tolist() == io["tree/position_ids"].tolist()
    assert torch.equal(proposal.ancestors[0], io["tree/attn_mask"].bool())


@pytest.mark.parametrize("rule", ["greedy", "typical"])
@pytest.mark.parametrize("case", MEDUSA)
def test_generation_accepts_what_the_original_code_accepted(case: str, rule: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    prompt, expected, accepted = io["e2e/prompt"], io[f"e2e/{rule}_ids"], io[f"e2e/{rule}_accept_len"]
    temperature, threshold, alpha = POSTERIOR[case][0]
    sampling: dict[str, Any] = {"do_sample": False}
    settings: dict[str, Any] = {"tree": TREES[case]}
    if rule == "typical":
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        settings |= {"acceptance": "typical", "posterior_threshold": threshold, "posterior_alpha": alpha}
    out = target.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=len(expected) - len(prompt),
        eos_token_id=None,
        pad_token_id=0,
        speculator=draft,
        speculation_config=SpeculationConfig(**settings),
        return_dict_in_generate=True,
        **sampling,
    )
    assert out.sequences[0].tolist() == expected.tolist()
    emitted = len(expected) - len(prompt) - 1
    assert out.speculation.steps == int(((accepted + 1).cumsum(0) < emitted).sum()) + 1


def typical(threshold: float, alpha: float) -> SpeculationConfig:
    return SpeculationConfig(acceptance="typical", posterior_threshold=threshold, posterior_alpha=alpha)


@pytest.mark.parametrize(("case", "number"), [(case, i) for case in MEDUSA for i in range(len(POSTERIOR[case]))])
def test_typical_acceptance_decides_as_the_original_code(case: str, number: int) -> None:
    io, (temperature, threshold, alpha) = outputs(case), POSTERIOR[case][number]
    logits, candidates = io["post/logits"], io["post/candidates"]  # (batch, paths, depth, vocabulary)
    batch, paths, depth, vocabulary = logits.shape
    # The paths begin with tokens of their own, so they hang side by side below one more node that makes all typical.
    parents = torch.arange(paths * depth) - 1 + 1
    parents = torch.where(torch.arange(paths * depth) % depth == 0, 0, parents)
    tree = torch.cat([torch.tensor([-1]), parents]).expand(batch, -1)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.long), candidates.flatten(1)], 1)
    top = torch.zeros(batch, 1, vocabulary).scatter(2, candidates[:, None, :, 0], 1 / paths)
    p = torch.cat([top, (logits / temperature).softmax(-1).flatten(1, 2)], 1)
    verdict = accept_typical(Proposal(tokens, tree, depth), p, typical(threshold, alpha))
    chosen = (verdict.path[:, 1] - 1) // depth
    assert torch.stack([chosen, verdict.counts - 2], 1).tolist() == io["post/decisions"][1 + number].tolist()
    last = verdict.path[:, -1]
    emitted = verdict.tokens.gather(1, verdict.counts[:, None] - 1)[:, 0]
    assert torch.equal(emitted, p[torch.arange(batch), last].argmax(-1))


def test_typical_acceptance_never_takes_what_is_impossible_or_absent() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    tokens = torch.tensor([[0, 0, 1, 1]])
    verdict = accept_typical(Proposal(tokens, torch.tensor([[-1, 0, 1, 2]]), 3), p, typical(0.0, 0.0))
    assert verdict.counts.tolist() == [1]  # p = 0 is never above a threshold of 0
    verdict = accept_typical(Proposal(tokens, torch.tensor([[-1, -2, 0, -2]]), 1), p, typical(0.09, 0.3))
    assert (verdict.counts.tolist(), verdict.tokens.tolist()) == ([2], [[1, 0]])


# --- drafting --------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "static": {"tree": TREES[V1]},
    "published": {"tree": MEDUSA_TREE},
    "dynamic": {"tree": "dynamic", "tree_topk": 3, "num_tree_tokens": 8, "num_speculative_tokens": 4},
    "sampled": {"tree": "sampled", "tree_topk": 3, "num_tree_tokens": 8, "num_speculative_tokens": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_text_is_that_of_plain_generate(shape: str, batch: int) -> None:
    draft, target, io = load_draft(V1), load_target(V1), outputs(V1)
    ids, mask = torch.zeros(batch, 5, dtype=torch.long), torch.zeros(batch, 5, dtype=torch.long)
    for row, length in zip(range(batch), itertools.cycle([5, 2, 4])):
        ids[row, -length:], mask[row, -length:] = (io["e2e/prompt"][:length] + 3 * row) % 72, 1
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    call |= {"eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, **call)
    config = SpeculationConfig(**SHAPES[shape])
    call |= {"speculator": draft, "speculation_config": config, "return_dict_in_generate": True}
    out = target.generate(ids, **call)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.steps < 23  # some guesses were right


@torch.no_grad()
def test_a_dynamic_tree_is_the_most_probable_one() -> None:
    draft, target = load_draft(V1), load_target(V1)
    state = outputs(V1)["hidden_states"][:3]
    distributions = draft(features=state[:, None]).logits[:, 0].softmax(-1)  # (batch, heads, vocabulary)
    proposal = propose(draft, target, state, limit=3, tree="dynamic", tree_topk=12, num_tree_tokens=12)
    for row in range(3):
        best = distributions[row].topk(12).indices.tolist()
        paths = [path for depth in (1, 2, 3) for path in itertools.product(*best[:depth])]
        chance = {
            path: float(torch.stack([distributions[row, i, t] for i, t in enumerate(path)]).prod()) for path in paths
        }
        expected = sorted(chance, key=chance.__getitem__, reverse=True)[:12]
        assert sorted(paths_of(proposal, row)) == sorted(expected)


@torch.no_grad()
def test_drawn_guesses_carry_the_distribution_of_their_head() -> None:
    draft, target, state = load_draft(V1), load_target(V1), outputs(V1)["hidden_states"][:3]
    distributions = draft(features=state[:, None]).logits[:, 0].softmax(-1)
    for shape in ("chain", "sampled"):
        proposal = propose(draft, target, state, limit=4, sample=True, **SHAPES[shape])
        assert proposal.q is not None
        for node in range(proposal.q.shape[1]):
            if (proposal.parents == node).any():
                torch.testing.assert_close(proposal.q[:, node], distributions[:, proposal.depth[0, node]], **CLOSE)


@torch.no_grad()
def test_new_heads_guess_what_the_target_says_one_token_earlier() -> None:
    target = tiny_target()
    draft = MedusaDraftModel(MedusaSpeculatorConfig.for_target(target.config, num_heads=3, num_hidden_layers=2)).eval()
    draft.bind(target)
    assert not any("lm_head" in name for name in draft.state_dict())
    outs = target(torch.arange(6)[None], output_hidden_states=True)
    logits = draft(features=outs.hidden_states[-1]).logits
    torch.testing.assert_close(logits, outs.logits[:, :, None].expand_as(logits), **CLOSE)
    blocks = [block.linear.weight for head in draft.heads for block in head]
    assert len({weight.data_ptr() for weight in blocks}) == 6
    draft.heads[0][0].linear.bias.add_(1.0)  # blocks and heads are not shared
    changed = (draft(features=outs.hidden_states[-1]).logits - logits).abs().amax((0, 1, 3)) > 1e-3
    assert changed.tolist() == [True, False, False]


# --- trees -----------------------------------------------------------------------------------------------------------


def test_the_published_tree_has_63_nodes_with_all_their_parents() -> None:
    assert len(set(MEDUSA_TREE)) == 63
    assert all(len(path) == 1 or path[:-1] in MEDUSA_TREE for path in MEDUSA_TREE)
    assert [sum(len(path) == depth for path in MEDUSA_TREE) for depth in (1, 2, 3, 4, 5)] == [10, 28, 23, 2, 0]


# --- files -----------------------------------------------------------------------------------------------------------


def published(case: str = V1) -> dict[str, Tensor]:
    return {
        name: tensor.float().clone() for name, tensor in read_checkpoint(GOLDENS / case / "checkpoint").tensors.items()
    }


def write(path: Path, tensors: dict[str, Tensor], name: str = "medusa_lm_head.safetensors", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2} | config))
    if name.endswith(".pt"):
        torch.save(tensors, path / name)
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    return path


@pytest.mark.parametrize("case", MEDUSA)
@torch.no_grad()
def test_what_is_saved_is_loaded_by_the_auto_classes(case: str, tmp_path: Path) -> None:
    expected = head_logits(load_draft(case), case)
    convert(GOLDENS / case / "checkpoint", tmp_path / "ours")
    for loader in (AutoModel, AutoDraftModel):
        draft = loader.from_pretrained(tmp_path / "ours", dtype=torch.float32)
        assert isinstance(draft, MedusaDraftModel)
        draft.bind(load_target(case))
        assert torch.equal(head_logits(draft, case), expected)


@torch.no_grad()
def test_heads_of_several_blocks_are_read_without_sharing_them(tmp_path: Path) -> None:
    """The original code stores one block under several names."""
    tensors = {f"{head}.{j}.linear.{kind}": published()[f"{head}.0.linear.{kind}"] for head in range(5) for j in (0, 1)
               for kind in ("weight", "bias")}  # fmt: skip
    for head in range(5):
        tensors[f"{head}.1.linear.weight"] = tensors[f"{head}.0.linear.weight"]
        tensors[f"{head}.2.weight"] = published()[f"{head}.1.weight"]
    draft = AutoDraftModel.from_pretrained(write(tmp_path, tensors, "medusa_lm_head.pt"))
    assert (draft.config.num_heads, draft.config.num_hidden_layers) == (5, 2)
    state = outputs(V1)["hidden_states"][None]
    hidden = state
    for _ in range(2):
        weight, bias = tensors["1.0.linear.weight"], tensors["1.0.linear.bias"]
        hidden = hidden + torch.nn.functional.silu(hidden @ weight.T + bias)
    torch.testing.assert_close(draft(features=state).logits[:, :, 1], hidden @ tensors["1.2.weight"].T, **CLOSE)
    weights = [weight.data_ptr() for weight in draft.parameters()]
    assert len(set(weights)) == len(weights)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@torch.no_grad()
def test_the_format_that_vllm_had_is_read(prefix: str, tmp_path: Path) -> None:
    given, ids = published(), torch.tensor([9, 3, 50, 71, 20])
    tensors = {f"{prefix}token_map": ids}
    for head in range(5):
        tensors[f"{prefix}blocks.{head}.layers.0.weight"] = given[f"{head}.0.linear.weight"]
        tensors[f"{prefix}lm_heads.{head}.weight"] = given[f"{head}.1.weight"][ids]
    config = {"model_type": "medusa", "num_heads": 5, "hidden_size": 32, "vocab_size": 72, "truncated_vocab_size": 5}
    draft = AutoDraftModel.from_pretrained(write(tmp_path, tensors, "model.safetensors", **config))
    assert draft.target_ids.tolist() == sorted(ids.tolist())
    for name in given:
        if name.endswith("bias"):
            given[name].zero_()
    twin = AutoDraftModel.from_pretrained(write(tmp_path / "twin", given))
    expected = head_logits(twin, V1)
    # Products of another width may be summed in another order, which differs from processor to processor.
    torch.testing.assert_close(head_logits(draft, V1), expected[..., ids.sort().values], **CLOSE)
    whole = draft.over_target(head_logits(draft, V1))
    torch.testing.assert_close(whole[..., ids], expected[..., ids], **CLOSE)
    assert whole.isinf().sum(-1).unique().tolist() == [67]


@torch.no_grad()
def test_heads_that_vllm_let_end_in_one_layer_are_read(tmp_path: Path) -> None:
    given = published()
    tensors = {f"blocks.{head}.layers.0.{kind}": given[f"{head}.0.linear.{kind}"] for head in range(5)
               for kind in ("weight", "bias")}  # fmt: skip
    tensors["lm_head.weight"] = given["2.1.weight"]
    draft = AutoDraftModel.from_pretrained(write(tmp_path, tensors, "model.safetensors", vocab_size=72))
    torch.testing.assert_close(head_logits(draft, V1)[2], outputs(V1)["head_logits"][2], **CLOSE)
    assert len({head[-1].weight.data_ptr() for head in draft.heads}) == 5


def drop_end(tensors: dict[str, Tensor]) -> None:
    del tensors["3.1.weight"]


def drop_head(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("2.")]:
        del tensors[name]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(1)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["1.0.linear.weight"] = torch.zeros(16, 16)


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["0.1.weight"][3, 4] = torch.nan


BROKEN = [
    (drop_end, "heads.3.1.weight is missing"),
    (drop_head, "heads.2.0.linear.bias is missing"),
    (add, "fc.weight is not part of this draft"),
    (narrow, r"heads.1.0.linear.weight has shape \(16, 16\)"),
    (spoil, "heads.0.1.weight holds values that are not finite"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    tensors = published()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        AutoDraftModel.from_pretrained(write(tmp_path, tensors))


def test_heads_of_another_layout_are_refused(tmp_path: Path) -> None:
    """Weights of one layout under our config of the other, which the original code loads with random output layers."""
    convert(GOLDENS / V1 / "checkpoint", tmp_path / "v1")
    convert(GOLDENS / "medusa_v2_pt" / "checkpoint", tmp_path / "v2")
    (tmp_path / "v1" / "config.json").write_text((tmp_path / "v2" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"heads\.0\.1\.weight is not part of this draft"):
        AutoModel.from_pretrained(tmp_path / "v1")


@pytest.mark.parametrize(("size", "message"), [({"hidden_size": 48}, "hidden_size is 32"), ({}, "vocab_size is 72")])
def test_heads_for_another_target_are_refused(size: dict[str, int], message: str) -> None:
    target = tiny_target(**({"vocab_size": 72} if size else {}), **size)
    with pytest.raises(ValueError, match=message):
        target.generate(torch.ones(1, 3, dtype=torch.long), speculator=load_draft(V1), max_new_tokens=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0, "vocab_size": 9}, "num_heads is 0"),
        ({"num_hidden_layers": True, "vocab_size": 9}, "num_hidden_layers is True"),
        ({}, "vocab_size is None"),
        ({"vocab_size": 9, "draft_vocab_size": 10}, "draft_vocab_size is 10"),
        ({"vocab_size": 9, "shared_with_target": ["embed_tokens"]}, "shared_with_target"),
    ],
)
def test_unusable_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaSpeculatorConfig(**fields)


@pytest.mark.parametrize("case", MEDUSA)
def test_inspect_tells_heads_and_where_they_end(case: str) -> None:
    report = str(inspect(GOLDENS / case / "checkpoint"))
    assert f"medusa, {HEADS[case]} heads of 1 residual block(s)" in report
    assert ("from target  lm_head" in report) == ("v2" in case)
    assert "serves no Medusa heads" in report


def test_a_path_is_enough_to_generate() -> None:
    case = "medusa_v2_pt"
    target, prompt = load_target(case), outputs(case)["e2e/prompt"][None]
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = target.generate(prompt, **call)
    assert torch.equal(target.generate(prompt, speculator=GOLDENS / case / "checkpoint", **call), expected)


# --- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"acceptance": "nucleus"}, "acceptance must be one of"),
        ({"acceptance": "typical", "verification": "token"}, "verification of its own"),
        ({"posterior_alpha": 1.5}, "posterior_alpha must be a number between 0 and 1"),
    ],
)
def test_acceptance_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**settings)


def test_typical_acceptance_refuses_what_needs_the_text_token_by_token() -> None:
    def custom(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    with pytest.raises(ValueError, match="acceptance='typical' weighs whole paths"):
        load_target(V1).generate(
            torch.ones(1, 3, dtype=torch.long),
            speculator="ngram",
            speculation_config=SpeculationConfig(acceptance="typical"),
            do_sample=True,
            logits_processor=[custom],
            max_new_tokens=3,
        )
