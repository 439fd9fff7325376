"""Every mistake that is planted in a draft is found by its name; a draft without one is not blamed for any."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from hf_spec import Eagle3SpeculatorConfig, cli, demo
from hf_spec.bench import Prompt
from hf_spec.cli import loading
from hf_spec.doctor import Diagnosis, diagnose
from hf_spec.doctor.diagnosis import _lost_outside
from hf_spec.training import new_draft

STORIES = (Path(__file__).parents[1] / "fixtures" / "stories_excerpt.txt").read_text(encoding="utf-8").split("\n\n")
PROMPTS = [Prompt((story[:80],), chat=False) for story in STORIES if len(story) > 80]
NEW = 24
TOKENIZER = AutoTokenizer.from_pretrained(demo.path())
NO_TEMPLATE = copy.deepcopy(TOKENIZER)  # raw prompts are not answered again as messages
NO_TEMPLATE.chat_template = None


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    return model


def load(name: str) -> Any:
    return AutoModel.from_pretrained(demo.path(f"draft-{name}"), dtype=torch.float32)


def examine(
    target: PreTrainedModel,
    draft: Any,
    prompts: list[Prompt] = PROMPTS[:4],
    tokenizer: Any = NO_TEMPLATE,
    new: int = NEW,
) -> Diagnosis:
    return diagnose(target, draft, tokenizer, prompts, new)


def rebuilt(draft: Any, change: Callable[[Any], None]) -> Any:
    """Return the draft with its own weights and another config."""
    config = copy.deepcopy(draft.config)
    change(config)
    config.validate()
    other = type(draft)(config)
    other.load_state_dict(draft.state_dict())
    return other.eval()


def one_off(config: Any) -> None:
    config.eagle_aux_hidden_state_layer_ids = [1, 4, 6]


def other_theta(config: Any) -> None:
    config.layers.rope_parameters = {"rope_type": "default", "rope_theta": 60.0}


def setting(**fields: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in fields.items():
            setattr(config, name, value)

    return change


PLANTED = [
    ("layer ids", "eagle3", one_off, "[2, 5, 7]"),
    ("norm_before_residual", "eagle3", setting(norm_before_residual=True), "false"),
    ("norm_output", "eagle3", setting(norm_output=True), "false"),
    ("rope", "eagle3", other_theta, "10000.0"),
    ("hidden_first", "mtp", setting(hidden_first=True), "false"),
]


@pytest.mark.parametrize(("cause", "kind", "change", "cure"), PLANTED, ids=[f"{one[1]}-{one[0]}" for one in PLANTED])
def test_what_is_set_wrongly_is_named_with_its_cure(
    target: PreTrainedModel, cause: str, kind: str, change: Callable[[Any], None], cure: str
) -> None:
    small = cause in ("layer ids", "rope")  # seldom turns a guess: takes more text to be seen
    asked: dict[str, Any] = {"prompts": PROMPTS[:12], "new": 40} if small else {}
    found = examine(target, rebuilt(load(kind), change), **asked)
    assert found.findings[0].cause == cause and cure in found.findings[0].cure, str(found)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_draft_without_mistakes_is_blamed_for_none(target: PreTrainedModel, kind: str) -> None:
    found = examine(target, load(kind))
    assert [one.cause for one in found.findings] == ["training"], str(found)
    assert found.measured == pytest.approx(found.expected, abs=1e-6)
    assert f"{1 + sum(found.measured):.2f}" in str(found)


def test_nothing_is_explained_where_guesses_are_accepted(target: PreTrainedModel) -> None:
    found = examine(target, copy.deepcopy(target))
    assert found.findings == [] and found.measured == [1.0] * 5
    assert "5.00 of 5 draft tokens" in str(found) and "cause" not in str(found)


def test_a_draft_for_another_target_is_known_by_its_name(target: PreTrainedModel) -> None:
    draft, named = load("eagle3"), copy.deepcopy(target)
    draft.config.speculators_config["verifier"]["name_or_path"] = "somebody/another-model"
    named.config.name_or_path = "org/model"
    found = examine(named, draft)
    assert found.findings[0].cause == "another target" and "somebody/another-model" in found.findings[0].evidence
    assert found.findings[1].cause == "training"  # a name says little


def test_a_directory_says_nothing_of_its_name_on_the_hub(target: PreTrainedModel) -> None:
    draft = load("eagle3")
    draft.config.speculators_config["verifier"]["name_or_path"] = "org/model"
    assert "another target" not in [one.cause for one in examine(target, draft).findings]


def test_a_draft_for_a_target_of_another_shape_is_known_by_that(target: PreTrainedModel) -> None:
    draft = load("eagle3")
    draft.config.speculators_config["verifier"] |= {"name_or_path": "org/model", "num_hidden_layers": 30}
    found = examine(target, draft).findings[0]
    assert found.cause == "another target" and "org/model with num_hidden_layers 30" in found.evidence


def test_a_target_in_the_cache_of_the_hub_has_its_name(target: PreTrainedModel) -> None:
    draft, moved = load("eagle3"), copy.deepcopy(target)
    draft.config.speculators_config["verifier"]["name_or_path"] = "org/model"
    moved.config.name_or_path = "/cache/models--org--model/snapshots/" + "0" * 40
    assert "another target" not in [finding.cause for finding in examine(moved, draft).findings]


@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_what_lies_behind_an_end_is_counted_on_both_sides(target: PreTrainedModel, kind: str) -> None:
    """The target ends its answers at once or soon, in the middle of tokens, which nobody is to blame for."""
    ended = copy.deepcopy(target)
    ended.generation_config.eos_token_id = TOKENIZER(" and the", add_special_tokens=False)["input_ids"]
    draft = copy.deepcopy(target) if kind == "vanilla" else load(kind)
    found = examine(ended, draft, PROMPTS[:6])
    assert found.tokens < 6 * NEW
    assert found.measured == pytest.approx(found.expected, abs=1e-6)
    assert "generate" not in [finding.cause for finding in found.findings]


def test_a_target_that_was_trained_on_is_no_fault_of_the_config(target: PreTrainedModel) -> None:
    moved = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.3 * weight.std() * torch.randn_like(weight)
    was, now = (examine(one, load("eagle3")) for one in (target, moved))
    assert sum(now.expected) < 0.8 * sum(was.expected)
    assert now.findings[0].cause == "training", str(now)


def test_weights_that_lost_their_precision_are_named(target: PreTrainedModel) -> None:
    """Large offsets that cancel out in float32 swallow what bfloat16 has to say."""
    draft = load("eagle3").to(torch.bfloat16)

    class Coarse(type(draft)):  # type: ignore[misc]
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return (super().logits(hidden) + 1024) - 1024  # type: ignore[no-any-return]

    draft.__class__ = Coarse
    found = examine(target, draft)
    assert found.findings[0].cause == "dtype" and "float32" in found.findings[0].cure, str(found)


def test_tokens_outside_of_the_draft_vocabulary_are_counted(target: PreTrainedModel) -> None:
    draft = load("medusa")
    assert draft.d2t is not None
    draft.set_vocabulary(torch.arange(2048 - len(draft.d2t), 2048))  # the rare half
    found = examine(target, draft)
    assert "draft vocabulary" in [one.cause for one in found.findings], str(found)


def untrained(target: PreTrainedModel, size: int) -> Any:
    """Return a new draft that can guess the ``size`` most frequent tokens of the stories."""
    counts = torch.bincount(torch.tensor(TOKENIZER(" ".join(STORIES)).input_ids), minlength=2048)
    torch.manual_seed(0)
    config = Eagle3SpeculatorConfig.for_target(target.config, draft_vocab_size=size)
    return new_draft(config, target, counts).eval()


def test_an_untrained_draft_is_not_its_vocabulary_s_fault(target: PreTrainedModel) -> None:
    """Other hints that explain nothing do not hide it, either."""
    draft = untrained(target, 180)
    draft.config.layers.max_position_embeddings = 24
    causes = [one.cause for one in examine(target, draft).findings]
    assert causes[0] == "training" and {"draft vocabulary", "position limit"} <= {*causes[1:]}


def test_a_vocabulary_without_most_tokens_is_the_cause(target: PreTrainedModel) -> None:
    assert examine(target, untrained(target, 4)).findings[0].cause == "draft vocabulary"


@pytest.mark.parametrize(
    ("known", "right", "lost"),
    [
        ([1, 1, 1, 1, 0], [1, 1, 0, 0, 0], 0.2 * 0.5),
        ([1, 1, 1, 1, 0], [1, 1, 1, 1, 0], 0.2),
        ([1, 1, 0, 0, 0], [0, 1, 0, 0, 0], 0.6),
        ([1, 1, 1, 1, 0], [0, 0, 0, 0, 0], 0.0),
        ([0, 0], [0, 0], 1.0),
        ([1, 1], [0, 1], 0.0),
    ],
)
def test_what_tokens_outside_of_a_vocabulary_cost(known: list[int], right: list[int], lost: float) -> None:
    assert _lost_outside(torch.tensor(known).bool(), torch.tensor(right).bool()) == pytest.approx(lost)


def test_texts_beyond_the_positions_of_the_draft_are_named(target: PreTrainedModel) -> None:
    draft = load("eagle3")
    draft.config.layers.max_position_embeddings = 24
    found = examine(target, draft)
    (limit,) = (one for one in found.findings if one.cause == "position limit")
    assert "made for 24" in limit.evidence


def test_prompts_beyond_the_positions_of_the_draft_leave_nothing_to_compare(target: PreTrainedModel) -> None:
    draft = load("eagle3")
    draft.config.layers.max_position_embeddings = 3
    (limit,) = (one for one in examine(target, draft).findings if one.cause == "position limit")
    assert limit.evidence.endswith("the draft is made for 3") and limit.gain == 0


def gpt2(positions: int) -> GPT2LMHeadModel:
    """Return a language model with a table of ``positions`` and the demo's tokens."""
    sizes = {"n_positions": positions, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 2048}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def test_a_language_model_proposes_nothing_beyond_its_table_of_positions(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    gpt2(24).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    short = [Prompt(("Once upon a time",), chat=False)]
    for prompts, depth in ((PROMPTS[:2], 0), (short, 5)):
        found = examine(target, draft, prompts)
        (limit,) = (one for one in found.findings if one.cause == "position limit")
        assert "the draft is made for 24" in limit.evidence
        assert len(found.measured) == depth


def test_prompts_that_leave_the_target_no_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=f"has 32 positions, too few for max_new_tokens={NEW} after it"):
        examine(gpt2(32), gpt2(64))


def with_other_tokenizer(folder: Path) -> None:
    """Write the demo's small language model with other tokens into ``folder``."""
    shutil.copytree(demo.path("draft-vanilla"), folder)
    file = folder / "tokenizer.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    tokens = saved["model"]["vocab"]
    saved["model"]["vocab"] = dict(zip(tokens, reversed(tokens.values()), strict=True))
    file.write_text(json.dumps(saved), encoding="utf-8")


def test_another_tokenizer_is_named(target: PreTrainedModel, tmp_path: Path) -> None:
    with_other_tokenizer(tmp_path / "small")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    found = examine(target, draft)
    assert found.findings[0].cause == "tokenizer", str(found)


def test_prompts_outside_of_the_template_are_named(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Prompt((f"Tell me a story about a little {animal}.",), chat=False) for animal in ("cat", "dog", "bird")]
    raw, chat = (
        examine(target, load("eagle3"), [Prompt(one.turns, chat=is_chat) for one in asked], TOKENIZER)
        for is_chat in (False, True)
    )
    named = "template" in [one.cause for one in raw.findings]
    assert named == (sum(chat.measured) - sum(raw.measured) > 0.05)
    assert "template" not in [one.cause for one in chat.findings]


def test_only_raw_prompts_are_compared_with_the_template(target: PreTrainedModel) -> None:
    """Prompts in the template, of which the draft is right about less, say nothing of the others."""
    asked = [Prompt((f"Tell me a story about a little {animal}.",), chat=False) for animal in ("cat", "dog")]
    odd = [Prompt((text,), chat=True) for text in ("zq xv 7", "&&& 0 ))", "WXYZ QQ")] * 2
    alone, mixed = (examine(target, load("eagle3"), prompts, TOKENIZER) for prompts in (asked, asked + odd))
    assert sum(mixed.measured) != sum(alone.measured)
    told = [
        [(one.cause, one.evidence) for one in found.findings if one.cause == "template"] for found in (alone, mixed)
    ]
    assert told[0] == told[1]


def test_ngrams_have_nothing_to_examine(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="hf-spec bench"):
        examine(target, "ngram")


@pytest.mark.parametrize(
    ("prompts", "error", "cause"),
    [([], ValueError, "prompts is empty"), (["Once"], TypeError, "prompt 0 is 'Once'"), ("Once", TypeError, "a str")],
)
def test_prompts_are_those_of_the_benchmark(
    target: PreTrainedModel, prompts: Any, error: type[Exception], cause: str
) -> None:
    with pytest.raises(error, match=f"{cause}.*read_prompts"):
        diagnose(target, "ngram", TOKENIZER, prompts)


def test_the_command_refuses_a_draft_with_another_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_other_tokenizer(tmp_path / "small")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once"}) + "\n", encoding="utf-8")
    monkeypatch.setattr(loading, "load_target", lambda *given: pytest.fail("the target was read"))
    command = ["doctor", str(demo.path()), "--speculator", str(tmp_path / "small"), "--prompts", str(prompts)]
    assert cli.main(command) != 0
    assert "the draft has another tokenizer than the target" in capsys.readouterr().err


def test_the_command_prints_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = rebuilt(load("eagle3"), setting(norm_before_residual=True))
    draft.save_pretrained(tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one.turns[0]}) + "\n" for one in PROMPTS[:4]), encoding="utf-8")
    command = ["doctor", str(demo.path()), "--speculator", str(tmp_path / "draft"), "--prompts", str(prompts)]
    assert cli.main([*command, "--max-new-tokens", "24", "--dtype", "float32", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "likeliest cause: norm_before_residual" in told and '"norm_before_residual": false' in told
