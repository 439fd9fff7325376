"""The shipped demo family: complete, small, consistent, and as good as its documentation says."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import demo
from hf_spec.training import unroll
from hf_spec.training.teacher import Reader

EXCERPT = Path(__file__).parents[1] / "fixtures" / "stories_excerpt.txt"
_notice, *STORIES = EXCERPT.read_text(encoding="utf-8").strip().split("\n----\n")
LANGUAGE_MODELS = ("target", "draft-vanilla")
CHAT = [
    {"role": "user", "content": "Tell me a story about a cat."},
    {"role": "assistant", "content": "Once upon a time, there was a cat."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "The cat went home."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.path())


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {
        name: AutoModelForCausalLM.from_pretrained(demo.path(name), dtype=torch.float32) for name in LANGUAGE_MODELS
    }


@torch.no_grad()
def excerpt_loss(model, tokenizer) -> float:
    """Mean negative log-likelihood per token of the excerpt's stories, each on its own."""
    total, count = 0.0, 0
    for story in STORIES:
        ids = tokenizer(story, return_tensors="pt").input_ids
        total += F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def test_unknown_name_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match="draft-vanilla"):
        demo.path("draft")


def test_family_is_small():
    files = [file for name in demo.MODELS for file in demo.path(name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 11_500_000
    assert (demo.path("draft-dspark") / "model.safetensors").stat().st_size <= 1_500_000


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_weights_are_tied_bfloat16(name):
    model = AutoModelForCausalLM.from_pretrained(demo.path(name), dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_ids_of_tokenizer_config_and_generation_config_agree(models, name):
    tokenizer, model = AutoTokenizer.from_pretrained(demo.path(name)), models[name]
    assert len(tokenizer) == model.config.vocab_size
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        expected = getattr(tokenizer, key)
        assert expected == getattr(model.config, key) == getattr(model.generation_config, key)
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_both_models_have_one_tokenizer():
    target, draft = ((demo.path(name) / "tokenizer.json").read_bytes() for name in LANGUAGE_MODELS)
    assert target == draft


@pytest.mark.parametrize(
    "text", ["Once upon a time,", '  Two  spaces,\n\n"quotes" and\ttabs', "naïve café, 東京, 🙂", ""]
)
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_marks_exactly_the_assistant_tokens(tokenizer):
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, mask in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == CHAT[1]["content"] + "<|end|>" + CHAT[3]["content"] + "<|end|>"
    assert chat["input_ids"].count(tokenizer.bos_token_id) == 1


def test_generation_prompt_is_the_beginning_of_the_answer(tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    answered = tokenizer.apply_chat_template(CHAT[:2], return_dict=True)["input_ids"]
    assert answered[: len(prompt)] == prompt


def test_chat_template_refuses_other_roles(tokenizer):
    with pytest.raises(Exception, match="system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}])


def test_greedy_text_is_deterministic_and_reads_like_a_story(models, tokenizer):
    inputs = tokenizer("Once upon a time, there was a little girl named", return_tensors="pt")
    first, again = (models["target"].generate(**inputs, max_new_tokens=40, do_sample=False) for _ in range(2))
    assert torch.equal(first, again)
    words = tokenizer.decode(first[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).split()
    known = set(" ".join(STORIES).lower().split())
    assert len(words) > 15
    assert sum(word.lower() in known for word in words) > len(words) / 2


@pytest.mark.parametrize(("name", "bound"), [("target", 2.1), ("draft-vanilla", 2.75)])
def test_loss_on_unseen_stories(models, tokenizer, name, bound):
    loss = excerpt_loss(models[name], tokenizer)
    assert 0.5 < loss < bound


def test_draft_agrees_with_target_far_more_often_than_another_model_would(models, tokenizer):
    ids = tokenizer(STORIES[0], return_tensors="pt").input_ids
    with torch.no_grad():
        target, draft = (models[name](input_ids=ids).logits[0].argmax(-1) for name in LANGUAGE_MODELS)
    match_length = (target == draft).float().mean()
    shuffled = (target == draft.roll(1)).float().mean()  # negative control
    assert match_length > 0.4 > 0.2 > shuffled


@pytest.mark.parametrize(("kind", "bound"), [("eagle3", 1.8), ("medusa", 1.3), ("mtp", 1.8), ("dspark", 1.7)])
def test_drafts_over_the_targets_states_guess_stories(models, tokenizer, kind, bound):
    draft = AutoModel.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32)
    inputs = tokenizer(["Once upon a time, there was a little dog", "One day, Tom"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 48, "do_sample": False}
    plain = models["target"].generate(**inputs, **options)
    for tree in (None, "dynamic"):
        config = hf_spec.SpeculationConfig(num_speculative_tokens=4, tree=tree, tree_topk=4, num_tree_tokens=12)
        out = models["target"].generate(
            **inputs, **options, speculator=draft, speculation_config=config, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        assert out.speculation.mean_accepted_length > bound


def steps_by_teacher_forcing(right: torch.Tensor, first: int, new_tokens: int) -> int:
    """Count the forwards behind the prompt's if guess k after token i is right where ``right[k, i]`` says so."""
    root, left, steps = first, new_tokens - 1, 0  # the prompt's own forward gives the token at `first`
    while left:
        guesses = right[: min(len(right), left - 1), root]
        emitted = 1 + int(guesses.cumprod(0).sum())
        root, left, steps = root + emitted, left - emitted, steps + 1
    return steps


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_generate_accepts_what_teacher_forcing_predicts(models, tokenizer, kind):
    """Unrolled over the finished text, a draft is right where it was when the text was made: step for step."""
    target, guesses, new_tokens = models["target"], 5, 64
    draft = AutoModel.from_pretrained(demo.path(f"draft-{kind}"), dtype=torch.float32).eval()
    total = emitted = 0
    for story in STORIES[:6]:
        prompt = tokenizer(story, return_tensors="pt").input_ids[:, :24]
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        out = target.generate(
            prompt, **options, speculator=draft, num_speculative_tokens=guesses, return_dict_in_generate=True
        )
        ids = out.sequences
        layers, _ = Reader(target, draft.feature_layers(target)).read(ids)
        draft.bind(target)
        logits = unroll(draft, ids[:, 1:], torch.cat(layers, dim=-1)[:, :-1], guesses)
        said = F.pad(ids[0], (0, guesses), value=-1)
        right = torch.zeros(guesses, ids.shape[1], dtype=torch.long)
        for k, step in enumerate(logits):  # row i has read token i + 1 and guesses token i + 2 + k
            right[k, 1:] = step[0].argmax(-1) == said[2 + k : 2 + k + step.shape[1]]
        assert out.speculation.steps == steps_by_teacher_forcing(right, prompt.shape[1], new_tokens)
        total, emitted = total + out.speculation.steps, emitted + new_tokens - 1
    assert emitted / total > 2  # so that there was something to predict


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["draft-vanilla", "draft-eagle3", "draft-medusa", "draft-mtp", "draft-dspark"])
def test_no_name_is_used_that_transformers_gave_up(models, tokenizer, name, static) -> None:
    """As ``past_key_values``, in 5.24: what warns today fails some versions later."""
    draft = models[name] if name in models else AutoModel.from_pretrained(demo.path(name), dtype=torch.float32)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    options = {"cache_implementation": "static"} if static else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        out = models["target"].generate(
            **inputs, **options, speculator=draft, max_new_tokens=8, do_sample=False, return_dict_in_generate=True
        )
    assert out.speculation.steps
