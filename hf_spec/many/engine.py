"""Generation by transformers' continuous batching, where a prompt takes the place of a finished one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..batching.hooks import KEYWORDS
from ..batching.refusals import refuse_batch, refuse_dropped, refuse_plain
from ..batching.sizes import sized
from ..decode.options import option
from ..decode.refusals import Refusal
from ..defaults import default_speculator, fill_in
from ..invariance.mode import is_invariant
from ..scoring.adapters import base_model, why_in_generate
from ..scoring.trials import in_evaluation
from ..settings import SpeculationConfig
from .prompts import Completion, Pending

OURS = ("continuous_batching_config", "generation_config", "tokenizer", *KEYWORDS)


class Engine:
    """Generation by ``model``'s continuous batching, at most ``size`` prompts at a time."""

    def __init__(self, model: Any, size: int, options: dict[str, Any]) -> None:
        self.model, self.size, self.options = model, size, options
        self.config = merged_config(model, options)[0]

    def answer(self, prompts: Sequence[Pending]) -> Iterator[Completion]:
        """Generate for ``prompts``, the longest first. Errors: a RuntimeError that names the prompt that failed."""
        if not prompts:  # there are more processes than prompts left
            return
        waiting = {str(one.index): one for one in sorted(prompts, key=lambda one: (-len(one.ids), one.index))}
        if with_tensors := [one.index for one in prompts if one.per_token or one.others]:
            raise ValueError(
                f"prompt {with_tensors[0]} has more than token ids, which the engine does not take: pass "
                "engine='generate'"
            )
        new = self.config.max_new_tokens
        hints = WorkloadHints(max(len(one.ids) for one in prompts), new, len(prompts))
        given = self.options.get("continuous_batching_config")
        engine = self.model.continuous_batching_context_manager(
            generation_config=self.config,
            continuous_batching_config=sized(self.model, given, hints, min(self.size, len(prompts))),
            warmup=False,
            workload_hints=hints,
            **{name: self.options[name] for name in KEYWORDS if name in self.options},
        )
        with in_evaluation(base_model(self.model)), engine as manager:  # a manager leaves the model in that mode
            try:
                for name, one in waiting.items():
                    manager.add_request(one.ids, request_id=name, max_new_tokens=new)
                while waiting:
                    result = manager.get_result(timeout=1)
                    if result is None:
                        if not manager.is_running():
                            raise RuntimeError(f"continuous batching ended without {len(waiting)} of its answers")
                    elif result.is_finished():
                        yield _completion(waiting.pop(result.request_id), result)
            finally:
                for name in waiting:  # the caller stopped reading: else the engine would first answer them all
                    manager.cancel_request(name)


def why_not_engine(model: Any, options: dict[str, Any]) -> str | None:
    """Say why the engine cannot do the same as ``generate`` with these ``options``; None if it can."""
    config, others = merged_config(model, options)
    if others:
        return f"it takes no {sorted(others)[0]}"
    if (adapter := why_in_generate(model)) is not None:
        return f"it goes past PEFT's generate, which the adapter ({adapter}) needs"
    model = base_model(model)
    if (getattr(model, "tp_size", None) or 1) > 1 or len(getattr(model, "hf_device_map", None) or ()) > 1:
        return "the model is spread over several devices"
    if option(model, options, "cache_implementation"):
        return "it has a cache of its own, and no cache_implementation"
    layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if "sliding_attention" in layers and not is_invariant(model):
        # Also without draft tokens: 2 of 18 greedy texts of a tiny random Gemma 2 differed, at near-ties.
        return "with layers of a sliding window it does not always write what generate does"
    speculator, settings = options.get("speculator"), options.get("speculation_config")
    if speculator is None:
        speculator, stored = default_speculator(model, options.get("generation_config"))
        settings = settings or stored
    found = speculator.settings(settings) if speculator else SpeculationConfig()
    try:
        refuse_dropped(config)
        refuse_batch(model, config, found, speculator or None)
        if speculator:
            speculator.check(model, found)
        else:
            refuse_plain(model)
    except Refusal as refusal:
        return refusal.reason
    return None


def merged_config(model: Any, options: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Merge the options of a call and two generation configs as ``generate`` does; also return unknown options."""
    config = copy.deepcopy(options.get("generation_config") or GenerationConfig())
    fill_in(model, config)
    others: dict[str, Any] = config.update(**{name: value for name, value in options.items() if name not in OURS})
    return config, others


def _completion(one: Pending, result: Any) -> Completion:
    if result.error is not None:
        raise RuntimeError(f"prompt {one.index} failed: {result.error}")
    return Completion(
        one.index, one.ids, list(result.generated_tokens), speculation=getattr(result, "speculation", None)
    )
