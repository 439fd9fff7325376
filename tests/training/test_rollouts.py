"""Weights of the policy change between rollouts: nothing of the old ones is used, and a draft learns the new ones."""

from __future__ import annotations

import copy
import runpy
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from pairs import each_value
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from hf_spec import DraftContext, Drafter, NgramSpeculator, SpeculationConfig, demo, get_speculator, set_speculator
from hf_spec.defaults import stored_for
from hf_spec.drafts.base import network_of
from hf_spec.training import DraftTrainer, DraftTrainingArguments, RolloutCallback, train_on
from hf_spec.training.rollouts import _Recording

PROMPTS = ["Once upon a time", "Tom and Lily", "The sun was", "One day, a cat"]


def policy() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)


def inputs() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(demo.path(), padding_side="left")
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


def draft(kind: str) -> Any:
    return AutoModel.from_pretrained(demo.path(f"draft-{kind}"))


def learn(model: PreTrainedModel, seed: int) -> None:
    """Change all weights in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)


SPECULATORS: dict[str, Any] = {
    "eagle3": lambda: draft("eagle3"),
    "medusa": lambda: draft("medusa"),
    "mtp": lambda: draft("mtp"),
    "memory": lambda: NgramSpeculator(history_size=1000),
}


@pytest.mark.parametrize(("kind", "tree"), each_value(SPECULATORS, [None, "dynamic"]))
def test_text_follows_the_weights(kind: str, tree: Any) -> None:
    model, rows, speculator = policy(), inputs(), SPECULATORS[kind]()
    call = {"max_new_tokens": 20, "do_sample": False}
    texts = []
    for step in range(3):
        plain = model.generate(**rows, **call)
        config = SpeculationConfig(num_speculative_tokens=4, tree=tree, num_tree_tokens=8, tree_topk=2)
        assert torch.equal(model.generate(**rows, **call, speculator=speculator, speculation_config=config), plain)
        texts.append(plain)
        learn(model, step)
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[1], texts[2])


def test_a_stale_cache_is_found() -> None:
    """A negative control: keys and values of the old weights give another text than the new weights do."""
    model, rows = policy(), inputs()
    one = {"input_ids": rows["input_ids"][3:], "attention_mask": rows["attention_mask"][3:]}
    call = {"max_new_tokens": 20, "do_sample": False, "speculator": draft("eagle3")}
    cache = model.generate(**one, **call | {"max_new_tokens": 1}, return_dict_in_generate=True).past_key_values
    learn(model, 0)
    plain = model.generate(**one, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(**one, **call), plain)
    assert not torch.equal(model.generate(**one, **call, past_key_values=cache), plain)


def test_features_are_those_of_the_weights() -> None:
    model, rows, speculator = policy(), inputs(), draft("eagle3")
    seen: list[DraftContext] = []
    start = speculator.drafter

    def noting(request: DraftContext) -> Drafter:
        seen.append(request)
        return start(request)

    speculator.drafter = noting
    for step in range(2):
        model.generate(**rows, max_new_tokens=4, do_sample=False, speculator=speculator, num_speculative_tokens=2)
        with torch.no_grad():
            states = model(**rows, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer] for layer in speculator.feature_layers(model)], dim=-1)
        counted = rows["attention_mask"].bool()
        torch.testing.assert_close(seen[step].features[counted], wanted[counted], rtol=1e-4, atol=1e-4)
        learn(model, step)
    assert not torch.allclose(seen[0].features, seen[1].features, atol=1e-2)


def test_texts_with_placeholders_are_learnt_but_not_trained_on() -> None:
    history, texts = NgramSpeculator(history_size=99), deque[list[int]]()
    _Recording(history, texts, (None, None)).learn([[5, 6], [-1, -1, 7], (8, 9)])
    assert list(texts) == [[5, 6], [8, 9]]
    assert history.history is not None
    assert history.history.tokens() == [5, 6, -1, -1, -1, 7, -1, 8, 9, -1]


@pytest.mark.parametrize("version", [1, 2])
def test_a_sharded_policy_generates_without_a_speculator(version: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two processes would have to take the same number of forwards."""
    model, callback = policy(), RolloutCallback(draft("eagle3"))
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sharded: Any = (
            FullyShardedDataParallel(model, device_id=torch.device("cpu")) if version == 1 else fully_shard(model)
        )
        callback.on_train_begin(None, None, None, model=sharded)
        assert "generates without a speculator" in caplog.text and get_speculator(sharded) is None
        callback.on_train_end(None, None, None, model=sharded)
        if version == 2:
            with pytest.raises(ValueError, match="synced_gpus"):
                sharded.generate(**inputs(), max_new_tokens=2, speculator="ngram")
    finally:
        torch.distributed.destroy_process_group()


# -- a trainer of TRL -------------------------------------------------------------------------------------------------


class Seeds(TrainerCallback):
    """Draw the same random numbers in a step of every run, whatever was drawn before."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def reinforce(folder: Path, callback: RolloutCallback | None, model: Any, frozen: Any = None) -> list[list[int]]:
    """Train ``model`` for a few steps and return its completions; with ``frozen``, those of that model."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    written: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        written.extend(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    args = trl.GRPOConfig(
        output_dir=str(folder / "policy"),
        max_steps=4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-3,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(demo.path()),
        callbacks=[Seeds(), *([] if callback is None else [callback])],
    )
    if frozen is not None:
        model.generate = frozen.generate
    trainer.train()
    return written


def draft_trainer(folder: Path, model: Any, speculator: Any, **more: Any) -> DraftTrainer:
    args = DraftTrainingArguments(
        output_dir=str(folder / "draft"),
        per_device_train_batch_size=4,
        unroll_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **{"num_train_epochs": 1} | more,
    )
    return DraftTrainer(speculator, model, args)


@pytest.mark.slow
def test_a_policy_is_trained_as_it_is_without_guesses(tmp_path: Path) -> None:
    """With ``verification="exact"`` the same random numbers give the same completions, and so the same weights.

    The draft is trained in between. The negative control generates with the weights from the beginning.
    """
    plain, guessing, stale = policy(), policy(), policy()
    wanted = reinforce(tmp_path, None, plain)
    speculator = draft("eagle3")
    before = copy.deepcopy(speculator.state_dict())
    trainer = draft_trainer(tmp_path, guessing, speculator)
    config = SpeculationConfig(verification="exact", num_speculative_tokens=3)
    callback = RolloutCallback(config=config, draft_trainer=trainer, every=2)
    assert reinforce(tmp_path, callback, guessing) == wanted
    assert len(wanted) == 16
    for name, weight in guessing.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(weight, before[name]) for name, weight in speculator.state_dict().items())
    assert trainer.state.global_step == 2 and get_speculator(guessing) is None
    assert not speculator.training
    assert reinforce(tmp_path, None, stale, frozen=copy.deepcopy(stale)) != wanted


def test_refreshing_teaches_the_draft_what_was_written(tmp_path: Path) -> None:
    """Texts of changed weights: after two refreshings, the draft guesses more of them."""
    model, rows, speculator = policy(), inputs(), draft("eagle3")
    learn(model, 0)
    trainer = draft_trainer(tmp_path, model, speculator, num_train_epochs=8, learning_rate=1e-3)
    callback = RolloutCallback(draft_trainer=trainer, every=2, keep=6)
    set_speculator(model, "ngram")
    default = get_speculator(model)
    callback.on_train_begin(None, None, None, model=model)
    lengths, texts = [], []
    for step in range(1, 6):
        out = model.generate(**rows, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
        lengths.append(out.speculation.mean_accepted_length)
        texts.append(len(callback.texts))
        trainer.state.global_step = step
        callback.on_step_end(None, trainer.state, None)
    assert texts == [4, 6, 4, 6, 4]
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3] < lengths[4]
    callback.on_train_end(None, None, None, model=model)
    assert get_speculator(model) is default


def test_a_policy_gets_its_default_back() -> None:
    """With its settings, and also where an error ended an earlier training."""
    model, config = policy(), SpeculationConfig(num_speculative_tokens=3)
    set_speculator(model, "ngram", config)
    default = stored_for(model)
    for ends in ((True,), (False, True)):
        callback = RolloutCallback(NgramSpeculator(history_size=100))
        for is_unpadded in ends:
            callback.on_train_begin(None, None, None, model=model)
            if is_unpadded:
                callback.on_train_end(None, None, None, model=model)
        assert stored_for(model) == default and default[1] is config
    RolloutCallback("ngram").on_train_begin(None, None, None, model=model)
    other = RolloutCallback("ngram")
    other.on_train_begin(None, None, None, model=model)
    other.on_train_end(None, None, None, model=model)
    assert stored_for(model) == default


def test_a_policy_is_read_as_it_generates(tmp_path: Path) -> None:
    """Refreshing and evaluation come in the middle of the policy's own training, in which it drops units."""
    model, speculator = policy(), draft("eagle3")
    trainer = draft_trainer(tmp_path, model, speculator)
    trainer_of = type(trainer)
    modes: list[bool] = []
    states = trainer_of._states

    def noting(self: DraftTrainer, inputs: Any) -> Any:
        modes.append(model.training)
        return states(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_of, "_states", noting)
        for training in (True, False):
            model.train(training).lm_head.eval()  # as the owner leaves parts that are not trained
            train_on(trainer, texts := [list(range(1, 20))] * 4)
            metrics = trainer.evaluate([{"input_ids": text, "loss_mask": [1] * len(text)} for text in texts[:2]])
            assert metrics["eval_acceptance_length"] >= 1
            assert model.training == training and not model.lm_head.training
    assert len(modes) == 4 and not any(modes)


def test_a_memory_serves_rollouts() -> None:
    model, rows = policy(), inputs()
    callback = RolloutCallback(NgramSpeculator(history_size=2000), SpeculationConfig(num_speculative_tokens=6))
    callback.on_train_begin(None, None, None, model=model)
    lengths = [
        model.generate(**rows, max_new_tokens=24, do_sample=False, return_dict_in_generate=True).speculation
        for _ in range(2)
    ]
    assert lengths[1].mean_accepted_length > 1.5 * lengths[0].mean_accepted_length
    assert [len(text) for text in callback.texts] == [int(seen) + 24 for seen in rows["attention_mask"].sum(1)] * 2


@pytest.mark.parametrize("kind", SPECULATORS)
def test_a_speculator_that_is_listened_to_answers_as_it_does_alone(kind: str) -> None:
    model, alone = policy(), SPECULATORS[kind]()
    RolloutCallback(alone).on_train_begin(None, None, None, model=model)
    heard = get_speculator(model)
    assert heard is not alone
    assert network_of(heard) is network_of(alone)
    assert [heard.estimates_acceptance(rows) for rows in (1, 4)] == [
        alone.estimates_acceptance(rows) for rows in (1, 4)
    ]
    assert (heard.supports_early_stop, heard.defaults()) == (alone.supports_early_stop, alone.defaults())


@pytest.mark.parametrize("given", [{"every": 0}, {"every": 2.5}, {"every": True}, {"keep": 0}, {"keep": 2.5}])
def test_refused(given: dict[str, Any]) -> None:
    [(name, number)] = given.items()
    with pytest.raises(ValueError, match=f"{name} is {number}; set a whole number of at least 1"):
        RolloutCallback("ngram", **given)
    with pytest.raises(TypeError, match="pass a speculator, a draft_trainer, or both"):
        RolloutCallback()


@pytest.mark.slow
def test_the_example_compares_the_time(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("trl")
    script = Path(__file__).parents[2] / "examples" / "grpo.py"
    options = ["--steps", "2", "--generations", "2", "--tokens", "8", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "tokens per verification" in out and "time per token: " in out
