"""Whatever raises in the middle of a call, the next call on the same model, draft and cache is right."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import test_block_exactness as blocks
import torch
from architectures import build, prompts
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from twins import CHAIN, TREE, Oracle, fitted, noisy

import hf_spec
from hf_spec import AcceptedTokens, DraftContext, Drafter, NgramSpeculator, Proposal, SpeculationConfig, Speculator
from hf_spec.checkpoints.resolve import as_speculator
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle.modeling import EagleDraftModel
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.medusa.modeling import MedusaDraftModel
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.scoring.factory import reads_blocks
from hf_spec.scoring.hooks import hooked
from hf_spec.scoring.selfcheck import check_target

NEW_TOKENS = 14
LENGTHS = (9, 13, 12)
ATTENDING, RECURRENT = ("llama", "gemma2"), ("qwen3_next", "jamba")  # all full, some windows; lazy commit, stepping
KINDS = ("ngram", "oracle", "vanilla", "medusa", "mtp", "eagle3", "eagle", "dflash", "dspark")
FOR_STATES = ("ngram", "oracle", "vanilla", "medusa", "mtp")
PLACES = ("streamer", "criterion", "processor", "pure processor", "drafter", "forward", "end of the stream")
SEEDS, QUICK = 200, 36  # of the seeds, those that every run takes


class Boom(Exception):
    pass


class Fuse:
    """Raise at the ``burns``-th call, once."""

    def __init__(self, burns: int, error: type[BaseException]) -> None:
        self.left, self.error = burns, error

    def burn(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


class Columns:
    """A streamer that keeps what it is shown; two fuses burn as it is."""

    def __init__(self, fuse: Fuse | None = None, last: Fuse | None = None) -> None:
        self.fuse, self.last = fuse, last
        self.columns: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.columns.append(value if value.ndim == 2 else value[:, None])
        if self.fuse is not None:
            self.fuse.burn()

    def end(self) -> None:
        if self.last is not None:
            self.last.burn()


class FailingCriterion(StoppingCriteria):
    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.fuse.burn()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingProcessor(LogitsProcessor):
    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.fuse.burn()
        return scores


class FailingSpeculator(Speculator):
    """Do as another one, but let its drafter raise when it is asked."""

    def __init__(self, inner: Speculator, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return self.inner.feature_layers(target)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        self.inner.check(target, config)

    def drafter(self, request: DraftContext) -> Drafter:
        return _FailingDrafter(self.inner.drafter(request), self.fuse)


class _FailingDrafter(Drafter):
    def __init__(self, inner: Drafter, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        if self.fuse.left % 2:
            self.fuse.burn()  # before it has taken anything in
            return self.inner.propose(news, limit)
        proposal = self.inner.propose(news, limit)
        self.fuse.burn()
        return proposal

    def keep_rows(self, rows: Tensor) -> None:
        self.inner.keep_rows(rows)


@functools.cache
def target(name: str) -> PreTrainedModel:
    model = build(name)
    check_target(model, trees=True)  # once, before forwards fail
    return model


@functools.cache
def given(batch: int) -> dict[str, Tensor]:
    return prompts(batch, LENGTHS[:batch])


@functools.cache
def text(name: str, batch: int) -> Tensor:
    return target(name).generate(**given(batch), max_new_tokens=NEW_TOKENS + 8, do_sample=False)


@functools.cache
def speculator(name: str, kind: str, batch: int) -> Any:
    """Make a draft that is right now and then; those with weights are the same for every batch."""
    if kind == "oracle":
        return Oracle(text(name, batch), wrong=5)
    if kind == "ngram":
        flawed = text(name, 3).clone()
        flawed[:, ::5] = (flawed[:, ::5] + 1) % 99
        return NgramSpeculator(corpus=flawed.tolist())
    return draft(name, kind)


@functools.cache
def draft(name: str, kind: str) -> Any:
    model, config = target(name), target(name).config
    if kind == "vanilla":
        return noisy(model)
    texts = text(name, 3)
    mask = torch.nn.functional.pad(given(3)["attention_mask"], (0, texts.shape[1] - max(LENGTHS)), value=1)
    if kind in ("dflash", "dspark"):
        return blocks.fitted(blocks.drafts_for(model)[kind], model, texts, mask, steps=30)
    torch.manual_seed(0)
    size = {"intermediate_size": 64, "num_attention_heads": 4}
    if kind == "medusa":
        made: Any = MedusaDraftModel(MedusaSpeculatorConfig.for_target(config, num_heads=3))
    elif kind == "mtp":
        made = MTPDraftModel(MTPSpeculatorConfig.for_target(config, size))
    elif kind == "eagle":
        made = EagleDraftModel(EagleSpeculatorConfig.for_target(config, size))
    else:
        made = Eagle3DraftModel(
            Eagle3SpeculatorConfig.for_target(config, size, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        )
    return fitted(made, model, texts, mask, steps=18)


@contextlib.contextmanager
def failing(place: str, fuse: Fuse, model: PreTrainedModel, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Give the arguments of a call in which ``fuse`` burns at ``place``."""
    options: dict[str, Any] = {"streamer": Columns()}
    if place == "streamer":
        options["streamer"] = Columns(fuse)
    elif place == "end of the stream":
        options["streamer"] = Columns(last=Fuse(1, fuse.error))
    elif place == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([FailingCriterion(fuse)])
    elif "processor" in place:
        processor = FailingProcessor(fuse)
        options["logits_processor"] = LogitsProcessorList([hf_spec.pure(processor) if "pure" in place else processor])
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    assert layers
    with hooked([rng.choice(layers)] if place == "forward" else [], after=fuse.burn):
        yield options


def filled(model: PreTrainedModel, prompt: dict[str, Tensor], rng: random.Random) -> DynamicCache:
    """Make a user's cache, which may have read the head of the prompt already."""
    cache = DynamicCache(config=model.config)
    if not reads_blocks(model):  # plain generate itself goes on from such a state with one token at a time only
        return cache
    if (length := rng.choice([0, 0, 4, 10])) and len(prompt["input_ids"]) == 1:
        with torch.no_grad():
            model(prompt["input_ids"][:, : min(length, prompt["input_ids"].shape[1] - 1)], past_key_values=cache)
    return cache


def pre_hooks(module: torch.nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(n, marks=pytest.mark.slow) for n in range(QUICK, SEEDS))]
)
def test_the_next_call_is_right(seed: int) -> None:
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    name = rng.choice(ATTENDING + (RECURRENT if kind in FOR_STATES else ()))
    batch, shape = (1 if name in RECURRENT else rng.choice([1, 2, 3])), rng.choice([CHAIN, TREE])
    model, prompt, guesser = target(name), given(batch), speculator(name, kind, batch)
    ended = {}
    if rng.random() < 0.5:  # a row may end early
        ended = {"eos_token_id": int(text(name, batch)[-1, -rng.randrange(8, 18)]), "pad_token_id": 0}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "speculation_config": shape, **ended}
    place, error = rng.choice(PLACES), rng.choice([Boom, KeyboardInterrupt])
    fuse, cache = Fuse(rng.randrange(1, 12), error), filled(model, prompt, rng)
    before = cache.get_seq_length()
    with failing(place, fuse, model, rng) as failure:
        failed = FailingSpeculator(as_speculator(guesser, model), fuse) if place == "drafter" else guesser
        with contextlib.suppress(Boom, KeyboardInterrupt):
            model.generate(**prompt, **options, **failure, speculator=failed, past_key_values=cache)
    ids = torch.cat(failure["streamer"].columns or [prompt["input_ids"]], dim=1)
    said = ids.shape[1] - prompt["input_ids"].shape[1]
    assert cache.get_seq_length() < ids.shape[1]
    if not said:
        assert cache.get_seq_length() == before
    elif not ended and batch == 1:
        assert cache.get_seq_length() == ids.shape[1] - 1, "plain generate has all but the last token"
    # What was said so far, without padding behind rows that ended, is the prompt of the next call.
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, said), value=1)
    for row, new in enumerate(ids[:, prompt["input_ids"].shape[1] :].tolist()):
        if ended and ended["eos_token_id"] in new:
            mask[row, prompt["input_ids"].shape[1] + 1 + new.index(ended["eos_token_id"]) :] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **options)
    again: dict[str, Any] = {}
    if rng.random() < 0.5 and kind != "oracle":  # which knows the first text alone
        again = {"speculator": guesser, "speculation_config": shape}
    assert torch.equal(model.generate(ids, **options, past_key_values=cache, **again), expected)
    assert torch.equal(model.generate(ids, **options, **again), expected)
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks.values(), *pre_hooks(module))]
    assert not [hook for hook in hooks if hook.__module__.startswith("hf_spec")]


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_states_alone_are_left_where_plain_generate_leaves_them(name: str) -> None:
    """Such a cache does not tell how much it has read, so it has to be exactly as much."""
    model, prompt = target(name), given(1)
    whole = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    for shown in range(2, 8):
        caches = []
        for options in ({}, {"speculator": Oracle(whole, wrong=3), "speculation_config": CHAIN}):
            caches.append(DynamicCache(config=model.config))
            streamer = Columns(Fuse(shown, Boom))
            with pytest.raises(Boom):
                model.generate(
                    **prompt, **options, max_new_tokens=12, do_sample=False, streamer=streamer, cache_params=caches[-1]
                )
        for theirs, mine in zip(*(cache.layers for cache in caches), strict=True):
            for kept in ("conv_states", "recurrent_states"):
                for number, state in getattr(theirs, kept).items():
                    torch.testing.assert_close(getattr(mine, kept)[number], state, atol=1e-4, rtol=1e-4)
