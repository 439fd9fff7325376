"""Drafting with EAGLE models: the trees of the original code, and a cached drafter against an uncached twin."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from architectures import build, prompts
from golden import CLOSE, END_TO_END, SAFEAILAB, load_draft, load_target, outputs, tiny_target
from pairs import each_value
from torch import Tensor
from transformers.utils import output_capturing
from twins import fitted

from hf_spec import AcceptedTokens, DraftContext, SpeculationConfig
from hf_spec.drafts import modeling
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel

# total_token (root included), depth (expansions after the root's) and top_k of the trees in each case.
TREES = {
    "eagle1_orig_a": [(12, 3, 4), (24, 4, 6)],
    "eagle3_orig_a": [(12, 3, 4), (26, 5, 6), (60, 7, 10)],
    "eagle3_orig_b_fullvocab": [(16, 3, 4), (20, 4, 5)],
}


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def request(
    draft: Any, target: Any, ids: Tensor, features: Tensor, config: SpeculationConfig, **kwargs: Any
) -> DraftContext:
    given = {"attention_mask": torch.ones_like(ids), "log_probs": log_softmax, "sample": False} | kwargs
    return DraftContext(target=target, input_ids=ids, features=features, config=config, **given)


@pytest.mark.parametrize(("case", "number"), [(case, i) for case in SAFEAILAB for i in range(len(TREES[case]))])
@torch.no_grad()
def test_dynamic_trees_are_those_of_the_original_code(case: str, number: int) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    total, depth, top_k = TREES[case][number]
    config = SpeculationConfig(
        tree="dynamic", tree_topk=top_k, num_tree_tokens=total - 1, num_speculative_tokens=depth + 1
    )
    ids, features = io["input_ids"][None], io["features"][None]
    known = features.shape[1]
    drafter = draft.drafter(request(draft, target, ids[:, :known], features, config))
    proposal = drafter.propose(AcceptedTokens(ids[:, known:], torch.tensor([1]), features[:, -1:]), depth + 1)
    assert proposal.tokens[0].tolist() == io[f"tree{number}/draft_tokens"].tolist()
    assert proposal.parents[0].tolist() == io[f"tree{number}/parents"].tolist()
    assert proposal.depth[0].tolist() == io[f"tree{number}/tree_position_ids"].tolist()
    if number > 0:
        return
    # A second round: some guesses became text, and the drafter goes on with its cache.
    news = io["cont/input_ids"][None, ids.shape[1] :]
    proposal = drafter.propose(
        AcceptedTokens(news, torch.tensor([news.shape[1]]), io["cont/features"][None]), depth + 1
    )
    assert proposal.tokens[0].tolist() == io["cont/draft_tokens"].tolist()
    assert proposal.parents[0].tolist() == io["cont/parents"].tolist()


@pytest.mark.parametrize("case", END_TO_END + SAFEAILAB)
def test_generation_accepts_what_the_peer_accepted(case: str) -> None:
    io, draft, target = outputs(case), load_draft(case), load_target(case)
    prefix = "" if case in END_TO_END else "e2e/"
    prompt, expected, accepted = io[prefix + "prompt"], io[prefix + "greedy_ids"], io[prefix + "accept_len"]
    settings: dict[str, Any] = {"num_speculative_tokens": 4}
    if case in SAFEAILAB:
        total, depth, top_k = TREES[case][0]
        settings = {
            "tree": "dynamic",
            "tree_topk": top_k,
            "num_tree_tokens": total - 1,
            "num_speculative_tokens": depth + 1,
        }
    out = target.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=len(expected) - len(prompt),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        speculator=draft,
        speculation_config=SpeculationConfig(**settings),
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == expected.tolist()
    # The peer's lengths count the whole of its last block, of which generate may need only the beginning.
    emitted = len(expected) - len(prompt) - 1
    steps = int(((accepted + 1).cumsum(0) < emitted).sum()) + 1
    assert out.speculation.steps == steps
    assert out.speculation.mean_accepted_length == pytest.approx(emitted / steps)


def drafts() -> list[Any]:
    target = tiny_target().config
    flags = {"draft_vocab_size": 40, "norm_output": True, "norm_before_fc": True}
    window = {"model_type": "qwen3", "num_hidden_layers": 2, "sliding_window": 4, "use_sliding_window": True}
    window["layer_types"] = ["sliding_attention", "full_attention"]
    torch.manual_seed(1)
    return [
        pytest.param(Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(target)), id="eagle3"),
        pytest.param(Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(target, window, **flags)), id="eagle3-window"),
        pytest.param(EagleDraftModel(EagleSpeculatorConfig.for_target(target)), id="eagle"),
    ]


def uncached_chain(draft: Any, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Draft a chain behind one row of text ``ids``, running everything anew at every step: the logits of each."""
    found: list[Tensor] = []
    if isinstance(draft, Eagle3DraftModel):
        features = draft.fuse(features)
    fed, tokens = features[None], ids[None, 1:]
    for _ in range(steps):
        out = draft(tokens, hidden_states=fed)
        found.append(out.logits[0, -1])
        guess = draft.to_target_ids(found[-1].argmax())
        fed = torch.cat([fed, out.hidden_states[:, -1:]], dim=1)
        tokens = torch.cat([tokens, guess.view(1, 1)], dim=1)
    return found


@pytest.mark.parametrize("draft", drafts())
@torch.no_grad()
def test_a_cached_drafter_equals_an_uncached_one_after_every_rejection(draft: Any) -> None:
    draft.eval()
    target, steps = tiny_target(), 3
    generator = torch.Generator().manual_seed(5)
    width = draft.config.num_features * 32 if isinstance(draft, Eagle3DraftModel) else 32
    lengths = [7, 3, 5]
    texts = [torch.randint(0, 96, (40,), generator=generator) for _ in lengths]
    states = [torch.randn(40, width, generator=generator) for _ in lengths]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    features = torch.randn(3, 7, width, generator=generator)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = texts[row][:length], 1
        features[row, -length:] = states[row][:length]
    seen: list[Tensor] = []

    def distribution(logits: Tensor) -> Tensor:
        seen.append(logits)
        return log_softmax(logits)

    config = SpeculationConfig(num_speculative_tokens=steps)
    drafter = draft.drafter(request(draft, target, ids, features, config, attention_mask=mask, log_probs=distribution))
    rows = [0, 1, 2]
    # What the target makes of the guesses, per round and row: these tokens are never what was guessed.
    for counts in ([1, 1, 1], [1, 3, 2], [4, 1, 2], [2, 2, 1], [1, 4], [3, 3], [20, 1], [1, 19]):
        if len(counts) < len(rows):
            rows = [0, 2]
            drafter.keep_rows(torch.tensor(rows))
        most = max(counts)
        news, beside = torch.zeros(len(rows), most, dtype=torch.long), torch.zeros(len(rows), most, width)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = lengths[row]
            news[i, :count] = texts[row][start : start + count]
            beside[i, :count] = states[row][start - 1 : start - 1 + count]
            lengths[row] += count
        seen.clear()
        drafter.propose(AcceptedTokens(news, torch.tensor(counts), beside), steps)
        for i, row in enumerate(rows):
            length = lengths[row]
            expected = uncached_chain(draft, texts[row][:length], states[row][: length - 1], steps)
            for depth in range(steps):
                logits = seen[depth][i, -1]
                logits = logits if draft.target_ids is None else logits[draft.target_ids]
                torch.testing.assert_close(logits, expected[depth], **CLOSE)


# --- the same text ---------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "static tree": {"tree": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]},
    "dynamic tree": {"tree": "dynamic", "tree_topk": 3, "num_tree_tokens": 8, "num_speculative_tokens": 4},
    "sampled tree": {"tree": "sampled", "tree_topk": 3, "num_tree_tokens": 8, "num_speculative_tokens": 4},
}
BATCHES = {1: (13,), 3: (13, 9, 5), 8: (13, 9, 5, 12, 3, 7, 13, 2)}
NEW_TOKENS = 16  # windows are 8 wide
WHOLE, FEWER = None, 60  # tokens of the draft, of 99


@functools.cache
def taught(name: str, vocabulary: int | None) -> tuple[Any, Any, dict[int, Tensor]]:
    """Build a target and a draft that knows its text by heart; also return the text for every batch."""
    target = build(name)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    texts = {batch: target.generate(**prompts(batch, lengths), **options) for batch, lengths in BATCHES.items()}
    mask = torch.nn.functional.pad(prompts(8, BATCHES[8])["attention_mask"], (0, NEW_TOKENS), value=1)
    flags = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "draft_vocab_size": vocabulary}
    torch.manual_seed(0)
    draft = Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(target.config, **flags))
    if vocabulary:
        draft.set_vocabulary(torch.arange(3, 3 + vocabulary))
    return target, fitted(draft, target, texts[8], mask), texts


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary"),
    each_value(["llama", "gemma3_text", "mixtral:swa", "qwen3_moe"], SHAPES, [WHOLE, FEWER]),
)
def test_greedy_text_is_that_of_plain_generate(name: str, shape: str, vocabulary: int | None) -> None:
    """With full attention, sliding windows, and experts, with and without windows."""
    target, draft, texts = taught(name, vocabulary)
    for batch, text in texts.items():
        out = target.generate(
            **prompts(batch, BATCHES[batch]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            speculator=draft,
            speculation_config=SpeculationConfig(**SHAPES[shape]),
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, text)
        assert 0 < out.speculation.accepted < out.speculation.proposed


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_without_asking_transformers_are_the_same(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are padded, or not, and that guesses get apart."""
    target, draft, texts = taught("llama", WHOLE)
    own, known, kept = modeling.DraftModel._masks, modeling.full_masks, []

    def compared(self: Any, *args: Any) -> list[Any]:
        masks = own(self, *args)
        with monkeypatch.context() as patch:
            patch.setattr(modeling, "full_masks", lambda *_: None)
            asked = own(self, *args)
        for one, other in zip(masks, asked, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
        return masks

    def counted(*args: Any) -> Any:
        found = known(*args)
        kept.append(found is not None)
        return found

    monkeypatch.setattr(modeling, "full_masks", counted)
    monkeypatch.setattr(modeling.DraftModel, "_masks", compared)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "speculator": draft}
    for batch, text in texts.items():
        kept.clear()
        config = SpeculationConfig(**SHAPES[shape])
        out = target.generate(**prompts(batch, BATCHES[batch]), **options, speculation_config=config)
        assert torch.equal(out, text)
        assert sum(kept) > 10, "transformers is always asked"


def test_a_target_that_was_unpickled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no model of the class was made, transformers does not know what to record of one."""
    target = build("llama")
    draft = Eagle3DraftModel(Eagle3SpeculatorConfig.for_target(target.config)).eval()
    options = {"max_new_tokens": 12, "speculator": draft, "num_speculative_tokens": 3, "return_dict_in_generate": True}
    known = target.generate(**prompts(3), **options)
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", type(output_capturing._CAN_RECORD_REGISTRY)())
    found = target.generate(**prompts(3), **options)
    assert torch.equal(found.sequences, known.sequences)
    assert found.speculation.counts.accepted == known.speculation.counts.accepted
