"""When the tokens of a draft are translated, and warnings about tokenizers that look alike."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoders import build
from test_shared_encoders import alone, pair
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging
from twins import by_code

import hf_spec
from hf_spec import TranslatedSpeculator, VanillaSpeculator, demo
from hf_spec.checkpoints import resolve
from hf_spec.checkpoints.same_tokens import needs_translation
from hf_spec.cli.loading import load_speculator

WORDS = ["once", "upon", "a", "time"]
ADDED = ["<end>", "<user>", "<reserved-0>", "<reserved-1>"]
TEMPLATE = "{{ '<user>' + messages[0]['content'] }}"


def words(trained: list[str], added: list[str], template: str | None = TEMPLATE) -> Any:
    """Make a tokenizer whose ids are the places in both lists."""
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(trained)}, unk_token="once"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=added[0], chat_template=template)
    made.add_special_tokens({"additional_special_tokens": added[1:]})
    assert made.convert_tokens_to_ids(added) == [*range(len(trained), len(trained) + len(added))]
    return made


@pytest.mark.parametrize(
    ("trained", "added", "expected"),
    [
        (WORDS, ADDED, False),
        (WORDS, [*ADDED, "<more>", "<user-2>"], False),
        (WORDS, ADDED[:3], False),
        (WORDS, [*ADDED[:2], "<other>", "<reserved-1>"], False),  # a reserved token with another name
        (WORDS, [*ADDED[:2], *ADDED[:1:-1]], False),  # reserved tokens that changed places
        (["upon", "once", *WORDS[2:]], ADDED, True),
        (WORDS, ["<user>", "<end>", *ADDED[2:]], True),  # an end, and what the template names
        (WORDS, [ADDED[0], "<reserved-0>", "<user>", ADDED[3]], True),
        ([*WORDS, "new"], ADDED, True),  # all that were added moved by one
        (WORDS, [ADDED[0], "<somebody>", *ADDED[2:]], True),  # the template's token is another one
        ([*WORDS, *map(str, range(600))], ADDED, True),
        (["one", "other", "kind", "entirely"], ADDED, True),
    ],
)
def test_tokens_that_texts_use_count(trained: list[str], added: list[str], expected: bool) -> None:
    own, wanted = words(trained, added, template=None), words(WORDS, ADDED)
    assert needs_translation(own, wanted) == expected
    assert needs_translation(own, own) is False


def test_a_template_is_what_makes_an_added_token_count() -> None:
    moved = words(WORDS, [ADDED[0], "<reserved-0>", "<user>", ADDED[3]], template=None)
    assert needs_translation(moved, words(WORDS, ADDED))
    assert not needs_translation(moved, words(WORDS, ADDED, template=None))


def test_a_tokenizer_without_a_list_of_added_tokens() -> None:
    assert not needs_translation(by_code(), by_code())
    assert needs_translation(by_code(), words(WORDS, ADDED))


def with_vocabulary(place: Path, change: Any) -> str:
    """Save the demo draft with a tokenizer that ``change`` was applied to, as it is written in its file."""
    AutoModelForCausalLM.from_pretrained(demo.path("draft-vanilla")).save_pretrained(place)
    AutoTokenizer.from_pretrained(demo.path()).save_pretrained(place)
    saved = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    change(saved["model"]["vocab"])
    (place / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    return str(place)


def test_the_command_line_translates_a_few_moved_tokens(tmp_path: Path) -> None:
    """Two trained tokens are exchanged: far less than one in ten, and each text with them was read wrongly."""

    def exchange(vocabulary: dict[str, int]) -> None:
        one, other = "\u0120the", "\u0120and"
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    found = load_speculator(with_vocabulary(tmp_path / "moved", exchange), target, "float32")
    assert isinstance(found, TranslatedSpeculator)
    found = load_speculator(with_vocabulary(tmp_path / "same", lambda vocabulary: None), target, "float32")
    assert isinstance(found, VanillaSpeculator)


# --- Versions of Whisper ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder_alone", [False, True])
def test_versions_of_whisper(decoder_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their vocabularies differ by one language, and so all special tokens after it by one."""
    warned: list[str] = []
    logging.warning_once.cache_clear()
    monkeypatch.setattr(resolve.logger, "warning_once", warned.append)
    model: Any = build("whisper")
    draft: PreTrainedModel = copy.deepcopy(alone() if decoder_alone else pair("whisper"))
    hf_spec.as_speculator(draft, model)
    model.generation_config.no_timestamps_token_id = 51
    draft.generation_config.no_timestamps_token_id = 51  # type: ignore[union-attr]
    hf_spec.as_speculator(draft, model)
    assert not warned
    draft.generation_config.no_timestamps_token_id = 50  # type: ignore[union-attr]
    hf_spec.as_speculator(draft, model)
    assert len(warned) == 1 and "<|notimestamps|> is 50 in the draft and 51 in the target" in warned[0]
    assert "Use a draft of the target's version" in warned[0]
