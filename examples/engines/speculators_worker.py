"""Run drafts in the speculators library, for compare_speculators.py; run by the Python of an environment that has it.

    python examples/engines/speculators_worker.py FOLDER FOLDER ...

Each folder has a draft and given.safetensors: ``input_ids``, ``features``, ``last`` and ``anchors``. What the
library's own training forward computes goes to theirs.safetensors. Each folder is answered by one line of JSON: its
name, and an error or null. Attention is eager, because the library would compile masks for its own kind.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS = 3  # of EAGLE-3 and of MTP layers
DEPTHS = 4  # of P-EAGLE


def loaded(path: Path) -> Any:
    """Load a draft by the library's own rules."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(path, config=config).eval()


def seen_by_losses(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Run the forward, and return what it gives its losses, by the names of their arguments.

    The losses themselves, which need Triton, are not computed.
    """
    module = import_module(type(model).__module__)
    losses, seen = module.compute_metrics, {}

    def noted(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        seen.update(dict(zip(losses.__code__.co_varnames, args, strict=False)) | kwargs)
        return torch.zeros(()), {}

    module.compute_metrics = noted
    try:
        model(**call)
    finally:
        module.compute_metrics = losses
    return seen


@torch.no_grad()
def answer(path: Path) -> dict[str, Tensor]:
    """Return what the draft in ``path`` computes."""
    model, given = loaded(path), load_file(path / "given.safetensors")
    ids, anchors = given["input_ids"][None], given["anchors"]
    mask = torch.zeros_like(ids)
    mask[0, anchors] = 1
    kind = model.config.speculators_model_type
    call = {"input_ids": ids, "hidden_states": given["features"][None], "document_ids": torch.zeros_like(ids)}
    if kind == "mtp":
        logits, _, _ = model(input_ids=ids, hidden_states=given["features"][None])
        return {"logits": logits[0][0]}  # of the first step: the library's later ones are not what drafting computes
    if kind == "eagle3":
        found: list[Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, args, output: found.append(output[0]))
        model(**call, ttt_steps=STEPS)
        hook.remove()
        return {"logits": torch.stack(found)}
    call |= {"verifier_last_hidden_states": given["last"][None]}
    if kind == "peagle":
        more = {"num_depths": DEPTHS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
        seen = seen_by_losses(model, call | more | {"loss_mask": torch.ones_like(ids)})
        return {"logits": seen["logits"][0], "rows": seen["anchor_pos"], "depths": seen["depth"]}
    seen = seen_by_losses(model, call | {"loss_mask": mask, "max_anchors": len(anchors)})
    unused = int(not model.config.sample_from_anchor)

    def by_block(values: Tensor) -> Tensor:
        return values[0].unflatten(0, (len(anchors), -1))[:, unused:].contiguous()

    kept = {"logits": by_block(seen["unary_logits" if kind == "dflash2" else "logits"])}
    if kind == "dflash2":
        kept |= {"scores": by_block(seen["candidate_logits"]), "labels": by_block(seen["targets"].argmax(-1))}
    if seen.get("confidence_logits") is not None:
        kept["confidence"] = by_block(seen["confidence_logits"])
    return kept


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for path in map(Path, sys.argv[1:]):
        error = None
        try:
            save_file(answer(path), path / "theirs.safetensors")
        except Exception as found:  # what the library refuses is a result
            error = f"{type(found).__name__}: {found}"
        print(json.dumps({"case": path.name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
