"""What the tests of continuous batching share: requests that come at any moment, and the plain text of each."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_spec import NgramSpeculator, RequestOutput
from hf_spec.batching.engine import SpeculativeManager

EOS = 7


def greedy(**options: Any) -> GenerationConfig:
    """Return the options of greedy decoding; a few texts end at EOS before 20 tokens."""
    return GenerationConfig(
        **{"max_new_tokens": 20, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0} | options
    )


def batching(at_most: int, **options: Any) -> ContinuousBatchingConfig:
    """Return a small engine, with few tokens per batch, so that prompts are read in parts and guesses are cut."""
    sizes = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 24}
    return ContinuousBatchingConfig(**sizes | {"max_requests_per_batch": at_most} | options)


def prompts_of(count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts of mixed length, some with a common beginning."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(8, vocabulary) for _ in range(draw.choice((1, 4, 9, 13, 30)))] for _ in range(count)]
    prompts[-1] = prompts[0][:3] + prompts[-1]
    return prompts


def plain_texts(model: PreTrainedModel, prompts: list[list[int]], options: GenerationConfig) -> list[list[int]]:
    """Return what plain ``generate`` writes behind each prompt alone."""
    return [
        model.generate(torch.tensor([prompt]), generation_config=options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def flawed(texts: list[list[int]], vocabulary: int) -> NgramSpeculator:
    """Look guesses up in texts with a wrong token at every fourth place: they are right for a while."""
    wrong = [
        [(token + (place % 4 == 3)) % vocabulary for place, token in enumerate(text)]
        for text in texts
        if len(text) > 1
    ]
    return NgramSpeculator(corpus=wrong)


def serve(
    model: PreTrainedModel, prompts: list[list[int]], at_most: int, seed: int = 0, **options: Any
) -> tuple[list[RequestOutput], SpeculativeManager]:
    """Answer ``prompts``, which come in random order: some at once, and one more with each that is done."""
    engine = {name: options.pop(name) for name in ("page_size", "num_blocks", "max_batch_tokens") if name in options}
    options = {"generation_config": greedy(), "continuous_batching_config": batching(at_most, **engine)} | options
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    found: dict[str, RequestOutput] = {}
    with model.continuous_batching_context_manager(warmup=False, **options) as manager:
        waiting = iter(order)
        for index in [*waiting][: len(order) // 2]:
            manager.add_request(prompts[index], request_id=str(index))
        rest = order[len(order) // 2 :]
        while len(found) < len(prompts):
            output = manager.get_result(timeout=1)
            if output is None:
                assert manager.is_running(), manager.background_thread_status.fatal_error
                continue
            assert output.error is None, output.error
            found[output.request_id] = output
            for index in rest[:1]:
                manager.add_request(prompts[index], request_id=str(index))
            rest = rest[1:]
    return [found[str(index)] for index in range(len(prompts))], manager
