"""Trimming of drafts to frequent tokens: the same logits for those, nothing for the others, and what it costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GOLDENS, load_draft, load_target, tiny_target
from transformers import AutoModel
from twins import tokenizer

from hf_spec import demo
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.trimming import frequent, read_vocabulary, trimmed
from hf_spec.cli import main

# Drafts of the whole vocabulary: one with a head of its own, one that shares the target's, one with a Markov head.
CASES = ("sp_eagle3_llama_ft_fullvocab", "zl_dflash_qwen3", "ds_dspark_qwen3")
KEPT = [70, 3, 11, 12, 40, 41, 7]


def logits_of(draft: Any) -> torch.Tensor:
    torch.manual_seed(0)
    features = torch.randn(1, 4, draft.fc.in_features)
    with torch.no_grad():
        if not hasattr(draft.config, "block_size"):
            return draft(torch.tensor([[5, 6, 7, 8]]), features=features).logits
        out = draft(torch.tensor([[5]]), features=features)
        if getattr(draft, "markov_head", None) is None:
            return out.logits
        reading, _ = draft.read(torch.tensor([[5]]), out.hidden_states[:, :1])
        return draft.correct(out.logits[:, :1], reading)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_kept_tokens_stay(case: str, tmp_path: Path) -> None:
    draft = load_draft(case)
    before = logits_of(draft)
    small = trimmed(draft, KEPT)
    if small.config.shared_with_target:
        small.bind(load_target(case))
    after, ids = logits_of(small), sorted(KEPT)
    torch.testing.assert_close(after, before[..., ids])
    assert small.target_ids.tolist() == ids
    assert small.t2d.nonzero()[:, 0].tolist() == ids
    assert not torch.equal(after, before[..., : len(ids)])  # which the first rows would give
    assert torch.isinf(small.over_target(after)[..., 50]).all()
    assert small.config.shared_with_target == draft.config.shared_with_target
    convert(GOLDENS / case / "checkpoint", tmp_path / "small", vocabulary=KEPT)
    lends = any("--self-contained TARGET" in one for one in inspect(tmp_path / "small").engines["vLLM"])
    assert lends == ("lm_head" in (small.config.shared_with_target or ()))
    for loader in (AutoModel, AutoDraftModel):
        again = loader.from_pretrained(tmp_path / "small", dtype=torch.float32)
        if again.config.shared_with_target:
            again.bind(load_target(case))
        torch.testing.assert_close(logits_of(again), after)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["draft_vocab_size"] == len(ids)


def test_a_draft_that_lists_layers_in_another_order_is_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_spec.cli.trimming.ANSWER", 2)
    draft = Path(shutil.copytree(demo.path("draft-eagle3"), tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [7, 2, 5]}
    (draft / "config.json").write_text(json.dumps(config))
    (tmp_path / "ids.json").write_text(json.dumps(KEPT))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "One day"}))
    given = ["--target", str(demo.path()), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert (
        main(["convert", str(draft), str(tmp_path / "small"), "--vocabulary", str(tmp_path / "ids.json"), *given]) == 0
    )
    small = AutoModel.from_pretrained(tmp_path / "small")
    assert small.config.eagle_aux_hidden_state_layer_ids == [2, 5, 7]
    assert small.target_ids.tolist() == sorted(KEPT)


def test_what_cannot_be_trimmed_is_refused() -> None:
    draft = load_draft(CASES[0])
    for ids, message in (
        ([3, 3], "each of them once"),
        ([], "each of them once"),
        ([-1, 4], "tokens of 0 to 79"),
        ([4, 80], "tokens of 0 to 79"),
        (range(80), "nothing is trimmed"),
    ):
        with pytest.raises(ValueError, match=message):
            trimmed(draft, ids)
    with pytest.raises(ValueError, match=r"proposes 7 of 80 tokens already"):
        trimmed(trimmed(draft, KEPT), [3, 4])
    with pytest.raises(ValueError, match="of kind 'mtp' proposes all tokens"):
        trimmed(load_draft("sp_mtp_qwen3"), KEPT)
    with pytest.raises(ValueError, match="draft_vocab_size"):
        trimmed(load_draft("sp_dflash2_qwen3"), KEPT)


def test_the_command_refuses_before_the_target_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target").mkdir()  # without weights, so that reading it would be the error
    shutil.copy(demo.path() / "config.json", tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One day"}\n{"prompt": "Lily had a"}')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    convert(demo.path("draft-eagle3"), tmp_path / "cut", vocabulary=KEPT)
    given = ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl")]
    for draft, out, size, more, said in (
        (demo.path("draft-eagle3"), "full", 200, [], "full exists; choose another directory"),
        (demo.path("draft-eagle3"), "out", 200, ["--verifier", "a/b/c"], "verifier is 'a/b/c', which is neither"),
        (
            demo.path("draft-eagle3"),
            "out",
            200,
            ["--with-code", "--to", "eagle3"],
            "--with-code goes with --to speculators",
        ),
        (demo.path("draft-eagle3"), "out", 9999999, [], "of 9999999 tokens cannot be chosen from"),
        (demo.path("draft-dspark"), "out", 200, ["--to", "eagle3"], "has no eagle3 layout"),
        (tmp_path / "cut", "out", 3, [], f"proposes {len(KEPT)} of "),
    ):
        assert main(["convert", str(draft), str(tmp_path / out), "--vocabulary", str(size), *given, *more]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("counted", [True, False])
def test_a_draft_that_takes_its_vocabulary_from_the_target_is_trimmed(
    counted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_spec.cli.trimming.ANSWER", 2)
    source, out = GOLDENS / "hf_muse_glimmer", tmp_path / "small"
    target = str(shutil.copytree(source / "target", tmp_path / "target"))
    given: list[str] = []
    (tmp_path / "ids.json").write_text(json.dumps(KEPT))
    if counted:
        tokenizer(80).save_pretrained(target)
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "AB"}\n{"prompt": "BC"}')
        given += ["--prompts", str(tmp_path / "prompts.jsonl")]
    kept = str(len(KEPT)) if counted else str(tmp_path / "ids.json")
    command = ["convert", str(source / "checkpoint"), str(out), "--vocabulary", kept, *given]
    assert main(command) == 1
    assert "--target" in capsys.readouterr().err
    assert main([*command, "--target", target]) == 0
    assert AutoDraftModel.from_pretrained(out).config.draft_vocab_size == len(KEPT)


def test_the_most_frequent_tokens_are_kept() -> None:
    texts = [[5, 5, 9, 1], [9, 5, 2]]
    assert frequent(texts, 3, 12) == [1, 5, 9]  # 1 and 2 are equally frequent
    assert frequent(texts, 3, 12, always=[11, 99]) == [5, 9, 11]
    for size in (0, 12):
        with pytest.raises(ValueError, match="cannot be chosen from 12; take 1 to 11"):
            frequent(texts, size, 12)


def test_lists_of_tokens_are_read(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[4, 2, 9]")
    torch.save([4, 2, 9], tmp_path / "list.pt")
    torch.save(torch.tensor([4, 2, 9]), tmp_path / "tensor.pt")
    assert all(read_vocabulary(tmp_path / name) == [4, 2, 9] for name in ("ids.json", "list.pt", "tensor.pt"))
    with pytest.raises(FileNotFoundError, match=r"absent\.json with the tokens to keep; write"):
        read_vocabulary(tmp_path / "absent.json")
    for text in ('{"a": 1}', "[]", "[1.5]", "[true]", "no JSON"):
        (tmp_path / "ids.json").write_text(text)
        with pytest.raises(ValueError, match="holds no list of token ids"):
            read_vocabulary(tmp_path / "ids.json")


def test_a_list_of_tokens_that_would_grow_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1, dtype=torch.long).expand(1 << 24), tmp_path / "ids.pt")
    with pytest.raises(OSError, match=r"ids\.pt describes tensors of 134,217,728 bytes and holds 8"):
        read_vocabulary(tmp_path / "ids.pt")


def test_the_command_tells_accepted_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_spec.cli.trimming.ANSWER", 16)
    prompts = [{"prompt": text} for text in ("Once upon a time", "One day", "Lily had a", "The dog ran")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    draft, out = str(demo.path("draft-dspark")), str(tmp_path / "small")
    command = ["convert", draft, out, "--vocabulary", "200"]
    assert main(command) == 1
    assert "--vocabulary 200 needs --prompts FILE and --target MODEL" in capsys.readouterr().err
    assert main(["convert", draft, out, "--prompts", "x"]) == 1
    assert "--prompts and --target are for --vocabulary" in capsys.readouterr().err
    given = ["--target", str(demo.path()), "--prompts", str(tmp_path / "prompts.jsonl")]
    (tmp_path / "one.jsonl").write_text(json.dumps(prompts[0]))
    assert main([*command, *given[:3], str(tmp_path / "one.jsonl")]) == 1
    assert "one.jsonl holds one prompt, and the draft is measured on others than those" in capsys.readouterr().err
    if AutoDraftModel.from_pretrained(draft).d2t is None:
        assert main(command + given) == 0
        said = capsys.readouterr()
        assert "200 of " in said.err and "over 2 prompts" in said.err and " before, " in said.err
        assert "200 of " in said.out  # the report on what was written
        made = AutoDraftModel.from_pretrained(out)
        assert made.config.draft_vocab_size == 200
    (tmp_path / "ids.json").write_text(json.dumps(list(range(2, 90))))
    assert main(["convert", draft, str(tmp_path / "listed"), "--vocabulary", str(tmp_path / "ids.json")]) == 0
    assert AutoDraftModel.from_pretrained(tmp_path / "listed").target_ids.tolist() == list(range(2, 90))
    assert tiny_target().config.vocab_size == 96
