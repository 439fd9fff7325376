"""Training of block drafts: the guesses, losses and gradients of the other projects, and those of drafting itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from datasets import Dataset
from golden import CLOSE, DFLASH, DSPARK, GOLDENS, PEAGLE, load_draft, load_target, outputs, tiny_target
from safetensors.torch import load_file
from test_block_drafts import drafter_of, news
from torch import Tensor

from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash.modeling import DFlashDraftModel
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.dspark.modeling import DSparkDraftModel
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.drafts.peagle.modeling import PEagleDraftModel
from hf_spec.training import DraftTrainer, DraftTrainingArguments
from hf_spec.training.losses import ChunkedLoss, chain_weights
from hf_spec.unroll.feedback import UnrollInput

CASES = (*DFLASH, *DSPARK)
LAYERS = {"num_hidden_layers": 2, "head_dim": 8}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def read(case: str) -> tuple[UnrollInput, Tensor]:
    """Return what a case was trained on, and its anchors (blocks,)."""
    io = outputs(case)
    if case.startswith("zl_"):
        ids, features = io["block_ids"], io["block_features"]
    else:
        ids = io["input_ids"]
        features = io["aux_hidden_states"] if "aux_hidden_states" in io else io["target_hidden_states"]
    anchors = io["block_anchors"] if "block_anchors" in io else io["anchors"]
    marked = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, anchors, True)
    documents = io["document_ids"][None] if "document_ids" in io else None
    return UnrollInput(ids[None], documents, features[None], marked[None]), anchors


def logits_of(draft: Any, given: UnrollInput) -> tuple[Tensor, Tensor | None]:
    """Return the teacher-forced logits (guesses, length - 1, draft vocabulary) and confidence of every position."""
    made = draft.unroll(given, draft.unroll_steps(7))
    logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)])
    said = None if made.confidence is None else torch.stack([made.confidence(states[0]) for states in made.states])
    return logits, said


@pytest.mark.parametrize("block", [3, 128])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_all_blocks_at_once_are_those_of_the_peers_code(case: str, block: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("hf_spec.unroll.key_ranges.BLOCK", block)
    io, draft = outputs(case), load_draft(case)
    given, anchors = read(case)
    logits, confidence = logits_of(draft, given)
    found = logits[:, anchors - 1].transpose(0, 1)  # (blocks, guesses, draft vocabulary)
    wanted = io["block_logits"][:, -draft.config.num_draft_tokens :]
    known = io["block_eval_mask"] if "block_eval_mask" in io else torch.ones(wanted.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(found[known], wanted[known], **CLOSE)
    if confidence is not None:
        torch.testing.assert_close(confidence[:, anchors - 1].T[known], io["block_confidence"][known], **CLOSE)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("ds_")])
def test_losses_and_gradients_are_those_of_deepspec(case: str) -> None:
    io, draft = outputs(case), load_draft(case)
    given, anchors = read(case)
    weights = torch.zeros(draft.config.num_draft_tokens, 1, given.input_ids.shape[1] - 1)
    decay = torch.exp(-torch.arange(draft.config.num_draft_tokens) / 4.0)
    weights[:, 0, anchors - 1] = (io["block_eval_mask"] * decay).T
    objective = "0.1 nll + 1.8 tv" if "dspark" in case else "nll"
    for layer in draft.output_layers:
        layer.requires_grad_(False)
    draft.embed_tokens.requires_grad_(False)
    made = draft.unroll(given, draft.config.num_draft_tokens)
    head = load_target(case).get_output_embeddings()
    loss = ChunkedLoss(made.head, head, objective=objective, chunk=5, confidence=made.confidence)
    total, _ = loss.compute(
        made.states, io["target_last_hidden_states"][None], weights / weights.sum(), made.trained, given.input_ids
    )
    torch.testing.assert_close(total, io["loss/total"], atol=2e-5, rtol=1e-5)
    total.backward()
    check_gradients(draft, {name.removeprefix("gradnorm/"): io[name] for name in io if name.startswith("gradnorm/")})


def check_gradients(draft: Any, norms: dict[str, Tensor]) -> None:
    found = {name: weight.grad.norm() for name, weight in draft.named_parameters() if weight.grad is not None}
    if "__all__" in norms:
        found["__all__"] = torch.stack(list(found.values())).norm()
    assert found.keys() == norms.keys()
    for name, norm in norms.items():
        torch.testing.assert_close(found[name], norm, atol=1e-5, rtol=2e-4, msg=name)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("sp_")])
def test_losses_and_gradients_are_those_of_speculators(case: str) -> None:
    """Its divisor counts what the loss leaves weights out of, so the sum is taken here; the rest is ours."""
    io, draft = outputs(case), load_draft(case)
    given, anchors = read(case)
    guesses = draft.config.num_draft_tokens
    logits, confidence = logits_of(draft, given)
    q = logits[:, anchors - 1].transpose(0, 1).log_softmax(-1)  # (blocks, guesses, draft vocabulary)
    p = io["block_targets"][:, -guesses:].log_softmax(-1)
    mask = io["block_loss_mask"][:, -guesses:]
    decay = mask * torch.exp(-torch.arange(guesses) / 4.0)
    total = ((p.exp() * (p - q)).sum(-1) * decay).sum() / (mask.sum() + 1e-5)
    name = next(name for name in ("kl", "fixed-exp-decay") if f"loss/{name}/total" in io)
    if confidence is not None:
        rate = torch.minimum(p.exp(), q.exp()).sum(-1).detach()
        said = confidence[:, anchors - 1].T
        wrong = torch.nn.functional.binary_cross_entropy_with_logits(said, rate, reduction="none")
        total = total + (wrong * decay).sum() / (mask.sum() + 1e-8)
    torch.testing.assert_close(total, io[f"loss/{name}/total"], atol=2e-5, rtol=1e-5)
    for layer in draft.output_layers:
        layer.requires_grad_(False)
    total.backward()
    prefix = f"gradnorm/{name}/"
    norms = {one.removeprefix(prefix): io[one] for one in io if one.startswith(prefix)}
    frozen = {name for name, _ in draft.named_parameters() if name.startswith(("lm_head", "embed_tokens"))}
    for one in frozen:
        draft.get_parameter(one).grad = None
    check_gradients(draft, norms)


@pytest.mark.parametrize(
    ("name", "objective", "smoothing"),
    [("kl", "kl", None), ("recipe", "0.1 ce + 0.9 tv", None), ("dpace", "ce", 0.5)],
)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("sp_") and case != "sp_dflash_qwen3"])
def test_objectives_are_those_of_speculators(case: str, name: str, objective: str, smoothing: float | None) -> None:
    """Its ``recipe`` is that of published DSpark drafts; ``dpace`` weighs a block by how far the draft gets in it."""
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    given, anchors = read(case)
    guesses = draft.config.num_draft_tokens
    decay = torch.exp(-torch.arange(guesses) / 4.0) if smoothing is None else torch.ones(guesses)
    mask = io["block_loss_mask"][:, -guesses:]  # (blocks, guesses)
    weights = torch.zeros(guesses, 1, given.input_ids.shape[1] - 1)
    weights[:, 0, anchors - 1] = (mask * decay / (mask.sum() + 1e-5)).T
    for layer in draft.output_layers:
        layer.requires_grad_(False)
    made = draft.unroll(given, guesses)
    loss = ChunkedLoss(
        made.head,
        lambda hidden: target.get_output_embeddings()(target.get_decoder().norm(hidden)),
        draft.target_ids,
        objective,
        "keep",
        chunk=5,
        smoothing=smoothing,
    )
    total, metrics = loss.compute(made.states, io["last_hidden_states"][None], weights, made.trained, given.input_ids)
    confidence = io.get(f"loss/{name}/confidence", 0)
    torch.testing.assert_close(total, io[f"loss/{name}/total"] - confidence, atol=3e-5, rtol=1e-5)
    # What its metric counts: guesses that are right one behind the other, and the target's own token.
    right = metrics.correct[:, 0, anchors - 1] & (mask.T > 0)
    assert float(right.long().cumprod(0).sum() + len(anchors)) == float(io["metric/eal_sum"])
    if f"gradnorm/{name}/fc.weight" in io and made.confidence is None:
        total.backward()
        prefix = f"gradnorm/{name}/"
        check_gradients(draft, {one.removeprefix(prefix): io[one] for one in io if one.startswith(prefix)})


def test_weights_of_a_chain_are_how_far_it_gets() -> None:
    sure = torch.tensor([0.5, 0.2, 0.8])[:, None, None]
    counted = torch.ones(3, 1, 1, dtype=torch.bool)
    reached = [0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.9]
    expected = torch.tensor([sum(reached), sum(reached[1:]), reached[2]])[:, None, None]
    torch.testing.assert_close(chain_weights(sure, counted, 0.5), expected)
    assert torch.equal(chain_weights(sure, counted, 1.0).flatten(), torch.tensor([3.0, 2.0, 1.0]))
    counted[1] = False
    torch.testing.assert_close(chain_weights(sure, counted, 0.5).flatten()[1:], torch.tensor([0.0, 0.75 * 0.9]))


def test_peagle_guesses_of_all_depths_are_those_of_speculators() -> None:
    case = PEAGLE[1]
    io, draft = outputs(case), load_draft(case)
    given = UnrollInput(io["input_ids"][None], None, io["aux_hidden_states"][None])
    steps = io["parallel_logits"].shape[1]
    made = draft.unroll(given, steps)
    logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)], dim=1)
    valid = io["parallel_valid"]
    torch.testing.assert_close(logits[valid], io["parallel_logits"][valid], **CLOSE)
    # The rows that its sampler (COD) picks say the same among fewer others, for a depth sees its own chain alone.
    torch.testing.assert_close(logits[io["cod/anchor_pos"], io["cod/depth"]], io["cod/logits"], **CLOSE)
    row, depth = valid.nonzero(as_tuple=True)
    hidden = load_file(GOLDENS / case / "target.safetensors")
    states = io["last_hidden_states"][row + depth + 1]
    states = states * (states.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * hidden["model.norm.weight"]
    p = (states @ hidden["lm_head.weight"].T)[:, draft.target_ids].log_softmax(-1)
    q = logits[row, depth].log_softmax(-1)
    mask = io["loss_mask"][row + depth + 1]
    loss = ((p.exp() * (p - q)).sum(-1) * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, io["loss_full/total"], atol=2e-5, rtol=1e-5)
    loss.backward()
    norms = {name.removeprefix("gradnorm_full/"): io[name] for name in io if name.startswith("gradnorm_full/")}
    found = {name: weight.grad.norm() for name, weight in draft.named_parameters() if weight.grad is not None}
    for name in norms:
        torch.testing.assert_close(found[name], norms[name], atol=1e-5, rtol=2e-4, msg=name)


def test_peagle_losses_of_packed_documents_are_those_of_speculators() -> None:
    case = PEAGLE[0]
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    anchor, depth = io["grid/anchor"], io["grid/depth"]
    size = int((io["grid/document_ids"] == io["grid/document_ids"][0]).sum())  # rows fed of the first document
    place = torch.arange(len(io["grid/fed_ids"]))
    place = place + (place >= size)  # between them stands one that reads across
    features = torch.zeros(len(io["grid/ids"]), io["grid/features"].shape[1])
    features[place] = io["grid/features"]
    documents = (torch.arange(len(features)) > size).long()
    made = draft.unroll(UnrollInput(io["grid/ids"][None], documents[None], features[None]), int(depth.max()) + 1)
    logits = torch.stack([made.head(step, states[0]) for step, states in enumerate(made.states)])
    found = logits[depth, place[anchor]]  # (entries, draft vocabulary)
    torch.testing.assert_close(found, io["grid/logits"], **CLOSE)
    hidden = target.get_decoder().norm(io["grid/last_hidden"][anchor + depth])
    p = target.get_output_embeddings()(hidden)[:, draft.target_ids].log_softmax(-1)
    mask = io["grid/loss_mask"][anchor + depth]
    loss = ((p.exp() * (p - found.log_softmax(-1))).sum(-1) * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, io["grid/loss"], atol=2e-5, rtol=1e-5)
    loss.backward()
    norms = {name.removeprefix("gradnorm/"): io[name] for name in io if name.startswith("gradnorm/")}
    found_norms = {name: weight.grad.norm() for name, weight in draft.named_parameters() if weight.grad is not None}
    assert {"mask_hidden", "fc.weight"} <= norms.keys() & found_norms.keys()
    for name in norms.keys() & found_norms.keys():
        torch.testing.assert_close(found_norms[name], norms[name], atol=1e-5, rtol=2e-4, msg=name)


# -- training equals drafting -----------------------------------------------------------------------------------------


def new_draft(kind: str, target: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    flags: dict[str, Any] = {"mask_token_id": 0, "aux_hidden_state_layer_ids": [2, 4]}
    if kind == "peagle":
        own = {"mask_token_id": 0, "eagle_aux_hidden_state_layer_ids": [2, 4]}
        return PEagleDraftModel(PEagleSpeculatorConfig.for_target(target.config, {"model_type": "qwen3"}, **own))
    if kind in ("dflash", "jetspec"):
        more |= {"block_causal": kind == "jetspec"}
        config = DFlashSpeculatorConfig.for_target(target.config, LAYERS | WINDOW, block_size=5, **flags | more)
        return DFlashDraftModel(config)
    own = {"markov_rank": 8, "markov_head_type": kind, "sample_from_anchor": kind != "rnn"}
    config = DSparkSpeculatorConfig.for_target(target.config, LAYERS, block_size=5, **flags | own | more)
    return DSparkDraftModel(config)


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "vanilla", "gated", "rnn"])
@torch.no_grad()
def test_a_block_in_training_is_that_of_drafting(kind: str) -> None:
    target = tiny_target()
    draft = new_draft(kind, target).eval()
    draft.bind(target)
    ids, features = torch.randint(96, (2, 20)), torch.randn(2, 20, 64)
    documents = torch.tensor([[0] * 20, [0] * 7 + [1] * 13])
    anchors = torch.zeros(2, 20, dtype=torch.bool)
    anchors[0, [3, 9, 14]], anchors[1, [4, 11]] = True, True
    made = draft.unroll(UnrollInput(ids, documents, features, anchors), draft.config.num_draft_tokens)
    for row, start, root in ((0, 0, 3), (0, 0, 9), (0, 0, 14), (1, 0, 4), (1, 7, 11)):
        out = draft(ids[row : row + 1, root : root + 1], features=features[row : row + 1, start:root])
        hidden = out.hidden_states[:, None]
        states = draft.trained_states(hidden, ids[row : row + 1], torch.tensor([[root]]))
        alone = draft.trained_logits(states)[0, 0]
        for step, laid in enumerate(made.states):
            torch.testing.assert_close(made.head(step, laid[row, root - 1]), alone[step], **CLOSE)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn"])
@torch.no_grad()
def test_training_on_what_was_guessed_says_what_drafting_said(kind: str, from_anchor: bool, tree: Any) -> None:
    """Each guess is corrected by the one before it, the first by the root, with the state that has come so far."""
    target = tiny_target()
    draft = new_draft(kind, target, sample_from_anchor=from_anchor).eval()
    draft.bind(target)
    if kind != "dflash":
        draft.markov_head.markov_w1.weight.mul_(100)  # a correction that is seen
    torch.manual_seed(3)
    ids, features, guesses = torch.randint(96, (1, 20)), torch.randn(1, 20, 64), draft.config.num_draft_tokens
    drafter, _ = drafter_of(draft, target, ids[:, :10], features[:, :10], sample=True, tree=tree)
    proposal = drafter.propose(news(ids[:, 10:11], features[:, 9:10]), guesses)
    anchors = torch.zeros(1, 20, dtype=torch.bool)
    anchors[0, 10] = True
    leaves = set(range(proposal.tokens.shape[1])) - set(proposal.parents[0].tolist())
    for leaf in leaves:
        path = [node for node in range(leaf + 1) if proposal.ancestors[0, leaf, node]]
        ids[0, 10 : 10 + len(path)] = proposal.tokens[0, path]
        made = draft.unroll(UnrollInput(ids, None, features, anchors), guesses)
        for step, node in enumerate(path[:-1]):
            found = made.head(step, made.states[step][0, 9]).softmax(-1)
            torch.testing.assert_close(found, proposal.q[0, node], **CLOSE)
    assert len(leaves) == (1 if tree is None else 4)


@torch.no_grad()
def test_all_depths_in_training_are_those_of_drafting() -> None:
    target = tiny_target()
    draft = new_draft("peagle", target).eval()
    draft.bind(target)
    torch.manual_seed(2)
    ids, features = torch.randint(96, (1, 20)), torch.randn(1, 20, 64)
    made = draft.unroll(UnrollInput(ids, None, features), 5)
    for place in (0, 6, 13):  # beside the root, which is the next token
        tokens, beside = draft.with_masks(ids[:, 1 : place + 2], features[:, : place + 1], 4)
        alone = draft(tokens, features=beside).logits[0, -5:]
        for depth, laid in enumerate(made.states):
            torch.testing.assert_close(made.head(depth, laid[0, place]), alone[depth], **CLOSE)


def examples(target: Any, count: int = 4, length: int = 24) -> list[dict[str, list[int]]]:
    """Let the target write texts, of which all but the first tokens are answers."""
    torch.manual_seed(0)
    text = target.generate(torch.randint(5, 90, (count, 4)), max_new_tokens=length - 4, do_sample=False)
    return [{"input_ids": row, "loss_mask": [0] * 4 + [1] * (length - 4)} for row in text.tolist()]


def trainer(draft: Any, target: Any, path: Any, rows: Any, **settings: Any) -> DraftTrainer:
    given = {
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 150,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "step_decay": 0.7788,
        "normalizer": "draft_token",
        "eval_max_new_tokens": 20,
        "disable_tqdm": True,
    }
    args = DraftTrainingArguments(str(path), **given | settings)
    return DraftTrainer(
        draft, target, args, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows)
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dflash", {"objective": "nll"}),
        pytest.param(
            "jetspec",
            {
                "objective": "kl",
                "step_decay": 1.0,
                "learning_rate": 1e-2,
                "max_steps": 350,
                "lr_scheduler_type": "linear",
            },
            marks=pytest.mark.slow,
        ),
        ("jetspec", {"objective": "nll"}),
        pytest.param("vanilla", {"objective": "ce + 0.2 tv", "num_anchors": 10}, marks=pytest.mark.slow),
        ("rnn", {"objective": "nll + 0.2 tv", "activation_checkpointing": True}),
        ("peagle", {"objective": "ce", "normalizer": "token", "step_decay": 1.0, "unroll_steps": 5}),
    ],
)
def test_overfitting_one_batch_drives_acceptance_to_one(kind: str, settings: dict[str, Any], tmp_path: Any) -> None:
    target = build("llama", vocab_size=96, tie_word_embeddings=False)
    draft, rows = new_draft(kind, target), examples(target)
    if kind == "peagle":
        draft.config.speculators_config["proposal_methods"][0]["speculative_tokens"] = 5
    one = trainer(draft, target, tmp_path, rows, **settings)
    before = one.evaluate()
    one.train()
    after = one.evaluate()
    guesses = draft.config.num_speculative_tokens
    assert after["eval_loss"] < before["eval_loss"]
    # KL learns the distribution of a random target, which is far from one-hot. Overlaps reach 0.99, but in 2 to 4 of
    # about 70 places another token is the draft's best: 0.965 of the longest. The causal mask is not the cause: with
    # `nll` the same draft reaches 1.0, and a block that sees all of itself 0.985 with KL. All drafts are accepted.
    most = 0.94 if settings["objective"] == "kl" else 0.97
    assert before["eval_expected_length"] < 2 < most * (1 + guesses) < after["eval_expected_length"]
    assert min(after[f"eval_acceptance_{k}"] for k in range(1, 1 + guesses)) > 0.9
    if kind in ("vanilla", "rnn"):
        assert abs(confidence_of(draft, target, rows) - after["eval_overlap_1"]) < 0.1
    one.save_model(str(tmp_path / "saved"))
    again = type(draft).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(weight, draft.state_dict()[name]) for name, weight in again.state_dict().items())
    assert again.config.num_speculative_tokens == guesses


@torch.no_grad()
def confidence_of(draft: Any, target: Any, rows: list[dict[str, list[int]]]) -> float:
    """Return how probable the draft thinks it on average that a first guess in the texts is accepted."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in draft.feature_layers(target)], dim=-1)
    made = draft.unroll(UnrollInput(ids, None, features), draft.config.num_draft_tokens)
    assert made.confidence is not None
    return float(made.confidence(made.states[0][:, 4:14]).sigmoid().mean())


def test_anchors_are_drawn_in_answers(tmp_path: Any) -> None:
    target = tiny_target()
    one = trainer(new_draft("vanilla", target), target, tmp_path, examples(target), num_anchors=3)
    mask = torch.zeros(2, 24, dtype=torch.long)
    mask[0, 10:20], mask[1, 5:7] = 1, 1
    drawn = set()
    for number in range(20):
        one.state.global_step = number // 2
        inputs = {"input_ids": mask, "loss_mask": mask}
        one._choose_anchors(inputs, number % 2)
        assert inputs["anchors"].sum(1).tolist() == [3, 1]
        assert not (inputs["anchors"] & (mask == 0)).any() and not inputs["anchors"][0, 19]
        drawn.add(tuple(inputs["anchors"][0].nonzero()[:, 0].tolist()))
    assert len(drawn) > 5
    fixed = [{"input_ids": mask, "loss_mask": mask} for _ in range(2)]
    for inputs in fixed:
        one._choose_anchors(inputs, None)
    assert torch.equal(fixed[0]["anchors"], fixed[1]["anchors"])
