"""Causal blocks (JetSpec): numbers, trees and losses of its own code, every file that says which slots see which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import CLOSE, GOLDENS, JETSPEC, load_draft, load_target, outputs, tiny_target
from test_block_drafts import Logits, drafter_of, news
from test_block_exactness import FLAGS, LAYERS, WINDOW, fitted
from test_exactness import BATCHES, CHAIN, TREE, Way, plain, prompts, speculative
from torch import Tensor
from torch.nn import functional

from hf_spec import SpeculationConfig, demo
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.inspection import inspect
from hf_spec.drafts.base import DraftContext
from hf_spec.drafts.block_drafting import BlockDrafter
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.training.losses import ChunkedLoss
from hf_spec.training.recipe import read_recipe, training_arguments
from hf_spec.unroll.feedback import UnrollInput

SMALL = {"atol": 2e-5, "rtol": 1e-5}


def bidirectional(draft: Any) -> Any:
    """Read the draft as if every slot saw all others: a mistake."""
    draft.config.block_causal, draft.config.sliding_window_non_causal = False, True
    return draft


def blocks(draft: Any, io: dict[str, Tensor], limit: int | None = None) -> list[Any]:
    ids, features = io["draft/ids"][None], io["draft/features"][None]
    lengths = io["draft/context_len"].tolist()
    return [draft(ids[:, n : n + 1], features=features[:, :n], num_draft_tokens=limit) for n in lengths]


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", JETSPEC)
@torch.no_grad()
def test_slots_say_what_they_say_in_jetspecs_code(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    assert draft.config.block_causal and not draft.config.sliding_window_non_causal
    for out, hidden, logits in zip(blocks(draft, io), io["draft/hidden"], io["draft/logits"], strict=True):
        torch.testing.assert_close(out.hidden_states[0], hidden, **CLOSE)
        torch.testing.assert_close(out.logits[0], logits, **CLOSE)
    wrong = [out.logits[0] for out in blocks(bidirectional(draft), io)]
    for found, theirs, right in zip(wrong, io["draft/bidirectional_logits"], io["draft/logits"], strict=True):
        torch.testing.assert_close(found, theirs, **CLOSE)
        assert (found - right).abs().max() > 0.1
    if case == "jet_qwen3":
        assert not torch.equal(torch.stack(wrong).argmax(-1), io["draft/tokens"])


@pytest.mark.parametrize("case", JETSPEC)
@torch.no_grad()
def test_a_causal_block_may_end_anywhere(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    for wrong in (False, True):
        whole, short = (blocks(draft, io, limit) for limit in (None, 2))
        pairs = [(one.logits[:, :2], other.logits) for one, other in zip(whole, short, strict=True)]
        assert all(torch.allclose(one, other, **CLOSE) is not wrong for one, other in pairs)
        bidirectional(draft)


@pytest.mark.parametrize("case", JETSPEC)
@torch.no_grad()
def test_the_tree_is_the_best_by_sums_of_log_probabilities(case: str) -> None:
    """JetSpec puts all children of a node into its tree together; ours takes the best nodes, which promise more."""
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    prompt, features = io["e2e/prompt"][None], io["e2e/prompt_features"][None]
    depths, budget = draft.config.num_draft_tokens, io["tree/tokens"].shape[1]
    settings = {"tree": "dynamic", "tree_topk": 8, "num_tree_tokens": budget - 1, "num_speculative_tokens": depths}
    drafter, _ = drafter_of(draft, target, prompt, features, **settings)
    root = io["tree/tokens"][0, :1][None]
    proposal = drafter.propose(news(root, features[:, -1:]), depths)
    log_probs = draft(root, features=features).logits[0].log_softmax(-1)  # (depths, vocabulary)

    def promised(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return depth and sum of log-probabilities of the nodes of a tree."""
        depth, total = torch.zeros_like(parents), torch.zeros(len(parents))
        for node in range(1, len(parents)):
            above = int(parents[node])
            depth[node] = depth[above] + 1
            total[node] = total[above] + log_probs[int(depth[node]) - 1, tokens[node]]
        return depth, total

    depth, theirs = promised(io["tree/tokens"][0], io["tree/parents"][0])
    assert depth.tolist() == io["tree/depth"][0].tolist()
    torch.testing.assert_close(theirs, io["tree/cum_logprob"][0], **CLOSE)
    depth, ours = promised(proposal.tokens[0], proposal.parents[0])
    assert proposal.tokens.shape[1] == budget and int(depth.max()) <= depths
    assert ours.exp().sum() >= theirs.exp().sum() - 1e-6
    others = {(int(d), int(t)) for d, t in zip(io["tree/depth"][0], io["tree/tokens"][0], strict=True)}
    assert others & {(int(d), int(t)) for d, t in zip(depth, proposal.tokens[0], strict=True)}


@pytest.mark.parametrize("case", JETSPEC)
def test_trees_give_the_targets_text_in_fewer_steps(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    prompt, expected = io["e2e/prompt"][None], io["e2e/greedy_ids"].tolist()
    steps = {}
    for tree in (None, "dynamic"):
        config = SpeculationConfig(
            num_speculative_tokens=draft.config.num_draft_tokens, tree=tree, tree_topk=3, num_tree_tokens=11
        )
        out = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(expected) - prompt.shape[1],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            speculator=draft,
            speculation_config=config,
            return_dict_in_generate=True,
        )
        assert out.sequences[0].tolist() == expected
        steps[tree] = out.speculation.counts.accepted
    assert steps["dynamic"] >= steps[None]


@torch.no_grad()
def test_fixed_slots_see_the_same() -> None:
    case = JETSPEC[1]
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    ids, features, n = io["draft/ids"][None], io["draft/features"][None], int(io["draft/context_len"][-1])
    mask = torch.ones_like(ids[:, :n])
    found = []
    for static in (False, True):
        said = Logits()
        config = SpeculationConfig(num_speculative_tokens=3)
        request = DraftContext(target, ids[:, :n], mask, features[:, :n], config, said, False)
        drafter = BlockDrafter(draft, request, static=static)
        if static:
            drafter.make_room(32)
        drafter.propose(news(ids[:, n : n + 1], features[:, n - 1 : n]), 3)
        found.append(said.seen[0])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    torch.testing.assert_close(found[0][0], io["draft/logits"][-1][:3], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_same_text_as_plain_generate(name: str) -> None:
    model = build(name)
    texts = {batch: plain(model, batch) for batch in (1, 3)}
    mask = functional.pad(prompts(3, BATCHES[3])["attention_mask"], (0, texts[3].shape[1] - 13), value=1)
    torch.manual_seed(0)
    flags = FLAGS | {"block_causal": True, "sliding_window_per_slot": True}
    config = DFlashSpeculatorConfig.for_target(model.config, LAYERS | WINDOW, block_size=5, **flags)
    draft = fitted(DFlashDraftModel(config), model, texts[3], mask)
    for shape, settings in {"chain": CHAIN, "dynamic": TREE}.items():
        accepted = 0
        for batch, text in texts.items():
            out = speculative(model, batch, Way(shape, draft, settings))
            assert torch.equal(out.sequences, text), f"{shape}, batch {batch}"
            accepted += out.speculation.counts.accepted
        assert accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_embeddings_are_scaled_as_the_targets_where_its_own_files_say_nothing(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Its code calls Gemma's embeddings, which multiply by a root that is rounded; our drafts read the table."""
    model = build("gemma3_text").to(dtype)
    flags = {"block_causal": True, "sliding_window_per_slot": True, "mask_token_id": 3}
    config = DFlashSpeculatorConfig.for_target(model.config, LAYERS, block_size=5, **flags)
    draft = DFlashDraftModel(config).to(dtype)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "flat", "dflash")
    file, ids = tmp_path / "flat" / "config.json", torch.tensor([[5, 6, 7]])
    for says_nothing in (False, True):
        given = json.loads(file.read_text())
        if says_nothing:  # as in JetSpec's own files
            for name in ("causal", "input_embedding_scale"):
                given["dflash_config"].pop(name, None)
            del given["is_causal"]
            given["dflash_config"]["final_logit_softcapping"] = 30.0  # of Gemma's logits, and says nothing of these
            file.write_text(json.dumps(given))
        told = any("leaves out embeds_as_target" in one for one in inspect(tmp_path / "flat").engines["vLLM"])
        assert told is says_nothing
        for folder in ("flat", "again"):
            found = AutoDraftModel.from_pretrained(tmp_path / folder, target=model, dtype=dtype)
            raw, scaled = (
                functional.embedding(ids, model.get_input_embeddings().weight),
                model.get_input_embeddings()(ids),
            )
            assert torch.equal(found.embed(ids), scaled if says_nothing else raw) and not torch.equal(raw, scaled)
            found.save_pretrained(tmp_path / "again")
            convert(tmp_path / "again", tmp_path / f"flat {folder}", "dflash")
            once_more = AutoDraftModel.from_pretrained(tmp_path / f"flat {folder}", target=model, dtype=dtype)
            assert torch.equal(once_more.embed(ids), found.embed(ids))
            shutil.rmtree(tmp_path / f"flat {folder}")
        shutil.rmtree(tmp_path / "again")
    text = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, model.generate(ids, max_new_tokens=8, do_sample=False, speculator=found))


# -- training ---------------------------------------------------------------------------------------------------------


def read(io: dict[str, Tensor], anchors: Tensor) -> UnrollInput:
    marked = torch.zeros_like(io["block_ids"], dtype=torch.bool).index_fill(0, anchors, True)
    return UnrollInput(io["block_ids"][None], None, io["block_features"][None], marked[None])


@pytest.mark.parametrize("case", JETSPEC)
@torch.no_grad()
def test_training_sees_what_drafting_sees(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    anchors, steps = io["block_anchors"], draft.config.num_draft_tokens
    wanted = io["block_logits"][:, 1:]
    for wrong in (False, True):
        made = draft.unroll(read(io, anchors), steps)
        logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)])
        found = logits[:, anchors - 1].transpose(0, 1)
        assert torch.allclose(found, wanted, **CLOSE) is not wrong
        bidirectional(draft)


@pytest.mark.parametrize("case", JETSPEC)
@pytest.mark.parametrize(("name", "temperature"), [("kl", 1.0), ("kl_T2", 2.0)])
def test_losses_and_gradients_are_those_of_its_recipe(case: str, name: str, temperature: float) -> None:
    """KL from the target, the mean over all slots: `kl` without a decay. Its first block stands before any context."""
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    ids, guesses, anchors = io["block_ids"][None], draft.config.num_draft_tokens, io["loss_anchors"]
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states[-1]
        p = (target.get_output_embeddings()(hidden)[0] / temperature).log_softmax(-1)  # (length, vocabulary)
    count = len(anchors) * guesses
    given = read(io, anchors[anchors > 0])
    weights = torch.zeros(guesses, 1, ids.shape[1] - 1)
    weights[:, 0, anchors[anchors > 0] - 1] = 1 / count
    made = draft.unroll(given, guesses)
    loss = ChunkedLoss(made.head, target.get_output_embeddings(), objective="kl", chunk=5, temperature=temperature)
    total, _ = loss.compute(made.states, hidden, weights, made.trained, ids)
    assert anchors[0] == 0
    first = (draft(ids[:, :1], features=io["block_features"][None, :0]).logits[0] / temperature).log_softmax(-1)
    total = total + temperature**2 * (p[:guesses].exp() * (p[:guesses] - first)).sum() / count
    torch.testing.assert_close(total, io[f"loss/{name}"], **SMALL)
    total.backward()
    for weight_name, weight in draft.named_parameters() if temperature == 1 else ():
        norm = weight.grad.norm()
        torch.testing.assert_close(norm, io[f"gradnorm/{weight_name}"], atol=1e-5, rtol=2e-4, msg=weight_name)


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "examples" / "train_jetspec.yaml", target=str(demo.path()))
    given = dict(recipe["draft"])
    kind, layers = given.pop("kind"), given.pop("layers")
    config = DFlashSpeculatorConfig.for_target(load_target(JETSPEC[0]).config, layers | LAYERS, **given)
    assert (kind, config.block_causal, config.num_draft_tokens) == ("dflash", True, 15)
    trainer = recipe["trainer"] | {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    args = training_arguments(trainer, [])
    assert (args.objective, args.step_decay, args.normalizer) == ("kl", 1.0, "draft_token")


# -- files ------------------------------------------------------------------------------------------------------------


def rewritten(tmp_path: Path, changes: dict[str, Any], inside: dict[str, Any]) -> Path:
    shutil.copytree(GOLDENS / "zl_dflash_qwen3" / "checkpoint", tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text()) | changes
    config["dflash_config"] |= inside
    file.write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    return tmp_path / "draft"


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "inside", "expected"),  # block_causal, sliding_window_non_causal
    [
        ({}, {}, (False, True)),
        (SLIDES, {}, (False, False)),  # unless the file says otherwise
        (SLIDES | {"is_causal": False}, {}, (False, True)),
        (SLIDES | {"is_causal": True}, {}, (True, False)),
        ({"is_causal": True}, {}, (True, False)),
        ({}, {"causal": True}, (True, False)),
        (SLIDES, {"causal": False}, (False, True)),
        (SLIDES, {"causal_head": True}, (True, False)),
        (SLIDES, {"causal_head": False}, (False, False)),
        (SLIDES, {"is_causal": False}, (False, True)),
    ],
)
def test_files_say_which_slots_see_which(
    changes: dict[str, Any], inside: dict[str, Any], expected: tuple[bool, bool], tmp_path: Path
) -> None:
    draft = AutoDraftModel.from_pretrained(rewritten(tmp_path, changes, inside), dtype=torch.float32)
    assert (draft.config.block_causal, draft.config.sliding_window_non_causal) == expected
    objected = [one for one in inspect(tmp_path / "draft").engines["vLLM"] if "later ones; convert to dflash" in one]
    assert bool(objected) == (inside == {"causal_head": True})  # which vLLM does not know
    convert(tmp_path / "draft", tmp_path / "nested")
    convert(tmp_path / "nested", tmp_path / "flat", "dflash")
    for place in ("nested", "flat"):
        again = AutoDraftModel.from_pretrained(tmp_path / place).config
        assert (again.block_causal, again.sliding_window_non_causal) == expected, place
    raw = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert raw.get("is_causal") == {(True, False): True, (False, True): False}.get(expected)
    assert raw["dflash_config"].get("causal_head", False) is expected[0]
    assert "see later ones" not in str(inspect(tmp_path / "flat"))


def test_contradictions_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {"is_causal": False}, {"causal_head": True})
    with pytest.raises(ValueError, match="contradict each other"):
        AutoDraftModel.from_pretrained(path)
    with pytest.raises(ValueError, match="block_causal and sliding_window_non_causal are both True"):
        DFlashSpeculatorConfig.for_target(
            tiny_target().config, mask_token_id=3, block_causal=True, sliding_window_non_causal=True
        )


def test_sliding_layers_are_read_as_z_lab_reads_them(tmp_path: Path) -> None:
    """Without a key they are causal; the reading of before is the negative control."""
    case = "zl_dflash_qwen3"
    io = outputs(case)
    path = rewritten(tmp_path, SLIDES, {})
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32, target=load_target(case))
    with torch.no_grad():
        right = torch.stack([out.logits[0] for out in blocks(draft, io)])
        wrong = torch.stack([out.logits[0] for out in blocks(bidirectional(draft), io)])
    torch.testing.assert_close(right, io["sliding_causal/logits"], **CLOSE)
    torch.testing.assert_close(wrong, io["sliding/logits"], **CLOSE)
    assert (right - wrong).abs().max() > 0.1


def test_sizes_are_looked_up_inside_first(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {"block_size": 9, "target_layer_ids": [0]}, {"block_size": 4, "output_multiplier": 0.5})
    config = AutoDraftModel.from_pretrained(path).config
    assert (config.block_size, config.aux_hidden_state_layer_ids) == (4, [2, 3, 5])
    assert config.output_multiplier == 0.5
    (tmp_path / "draft").rename(tmp_path / "other")
    given = {"block_size": 4, "target_layer_ids": [1, 2, 4], "mask_token_id": 3}
    path = rewritten(tmp_path, given, {"target_layer_ids": None, "mask_token_id": None})
    assert AutoDraftModel.from_pretrained(path).config.aux_hidden_state_layer_ids == [2, 3, 5]


def test_scales_and_caps_change_the_numbers_as_they_say(tmp_path: Path) -> None:
    case = "zl_dflash_qwen3"
    io, plain_draft = outputs(case), load_draft(case)
    scaled = {"output_multiplier": 0.6, "final_logit_softcapping": 7}
    path = rewritten(tmp_path, {"input_embedding_scale": 1.0}, scaled)
    draft = AutoDraftModel.from_pretrained(path, dtype=torch.float32, target=load_target(case))
    with torch.no_grad():
        before, after = (blocks(one, io)[0].logits for one in (plain_draft, draft))
        torch.testing.assert_close(after, 7 * (before * 0.6 / 7).tanh(), **CLOSE)
        draft.config.input_embedding_scale = 1.7
        ids = torch.tensor([[5, 3]])
        torch.testing.assert_close(draft.embed(ids), plain_draft.embed(ids) * 1.7, **CLOSE)
    draft.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["output_multiplier"], saved["input_embedding_scale"]) == (0.6, 1.7)
    assert "block_causal" not in saved  # which says nothing here
    convert(tmp_path / "saved", tmp_path / "flat", "dflash")
    again = AutoDraftModel.from_pretrained(tmp_path / "flat").config
    assert (again.input_embedding_scale, again.output_multiplier, again.final_logit_softcapping) == (1.7, 0.6, 7.0)
    for place in ("saved", "flat"):
        (found,) = [one for one in inspect(tmp_path / place).engines["vLLM"] if "leaves out" in one]
        assert found == "leaves out input_embedding_scale, output_multiplier, final_logit_softcapping"


def test_files_tell_vllm_how_slots_see_each_other(tmp_path: Path) -> None:
    """vLLM takes `sliding_window_non_causal: false` for causal blocks, in full layers too."""
    target = tiny_target()
    for causal in (False, True):
        config = DFlashSpeculatorConfig.for_target(target.config, LAYERS, mask_token_id=3, block_causal=causal)
        config.speculators_config["verifier"]["name_or_path"] = "some/target"
        assert config.sliding_window_non_causal is not causal
        DFlashDraftModel(config).save_pretrained(tmp_path / str(causal))
        report = inspect(tmp_path / str(causal))
        assert report.engines["vLLM"] == []
        assert f"block_causal={causal}" in str(report)
        assert any("causal" in one for one in report.engines["llama.cpp"]) is causal
    old = json.loads((tmp_path / "False" / "config.json").read_text()) | {"sliding_window_non_causal": False}
    (tmp_path / "False" / "config.json").write_text(json.dumps(old))
    assert any("set it to true" in one for one in inspect(tmp_path / "False").engines["vLLM"])
