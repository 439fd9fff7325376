"""Load what hf_spec writes in the speculators library, and compare its logits with ours.

    python examples/engines/compare_speculators.py --work WORK --speculators VENV/bin/python
    python examples/engines/compare_speculators.py --work WORK --read     # the table of what was compared

Every draft has random weights and is saved in the layout of speculators. Its config names the folder of a tiny target.
Both libraries run their training forward over the same tokens and features, and all logits that losses read are
compared. Of MTP layers and of EAGLE-3 with windows it is the first step's, because the library's later steps are not
what drafting computes. The last column is what `hf-spec inspect` says of the same files. The raw file is
WORK/speculators.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators_worker import DEPTHS, STEPS
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_speed import machine  # the folder is no package

import hf_spec
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.kinds import config_classes
from hf_spec.training import new_draft
from hf_spec.unroll.feedback import UnrollInput
from hf_spec.whole_files import write_files

CLOSE = 1e-4  # of logits, where the absolute ones reach about 10
VERSIONS = """import importlib.metadata as m, json
print(json.dumps({one: m.version(one) for one in ("speculators", "transformers", "torch")}))"""
LENGTH, ANCHORS = 24, [3, 4, 9, 15]
QWEN = {"model_type": "qwen3", "head_dim": 8}
SLIDES = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
SLIDES |= {"use_sliding_window": True}  # transformers drops a window without it
BLOCK = {"layers": {"num_hidden_layers": 2}, "block_size": 4, "mask_token_id": 0}
SMALL = {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
OWN = {"draft_vocab_size": 40, "shared_with_target": []}
UNNAMED = {"speculators_config": None}  # the config names no target
# For each case: kind, and what `for_target` is given.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", {}),
    "EAGLE-3.1, qwen3": (
        "eagle3",
        {"layers": QWEN, "norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    ),
    "EAGLE-3, own vocabulary, two layers, window": (
        "eagle3",
        {"layers": QWEN | SLIDES, "fc_norm": True, **OWN},
    ),
    "EAGLE-3, no norm before the head": ("eagle3", {"norm_before_lm_head": False}),
    "EAGLE-3, target not named": ("eagle3", UNNAMED),
    "EAGLE-3, target not named, nothing lent": ("eagle3", {**UNNAMED, "shared_with_target": []}),
    "P-EAGLE": ("peagle", {"mask_token_id": 0}),
    "P-EAGLE, own vocabulary": ("peagle", {"mask_token_id": 0, **OWN}),
    "DFlash": ("dflash", BLOCK),
    "DFlash, own vocabulary": ("dflash", {**BLOCK, "draft_vocab_size": 40}),
    "DFlash, target not named": ("dflash", {**BLOCK, **UNNAMED}),
    "DFlash, target not named, nothing lent": ("dflash", {**BLOCK, **UNNAMED, "shared_with_target": []}),
    "DFlash, windows, causal in them": (
        "dflash",
        {**BLOCK, "layers": SLIDES},
    ),
    "DFlash, windows": ("dflash", {**BLOCK, "layers": SLIDES, "sliding_window_non_causal": True}),
    "DFlash, root predicts": ("dflash", {**BLOCK, "sample_from_anchor": True}),
    "DFlash, windows end at each slot": ("dflash", {**BLOCK, "layers": SLIDES, "sliding_window_per_slot": True}),
    "DFlash, scaled": ("dflash", {**BLOCK, "output_multiplier": 0.5}),
    "DFlash, own embeddings": ("dflash", {**BLOCK, **OWN}),
    "DFlash, own embeddings and head": ("dflash", {**BLOCK, "shared_with_target": []}),
    "DFlash, sliding layers without a window": (
        "dflash",
        {**BLOCK, "layers": SLIDES | {"sliding_window": None}, "sliding_window_per_slot": True},
    ),
    "JetSpec": ("dflash", {**BLOCK, "block_causal": True}),
    "JetSpec, windows only": (
        "dflash",
        {**BLOCK, "layers": SLIDES | {"layer_types": ["sliding_attention"] * 2}, "block_causal": True},
    ),
    "DFlash2": ("dflash2", {**BLOCK, **SMALL}),
    "DFlash2, root predicts": ("dflash2", {**BLOCK, **SMALL, "sample_from_anchor": True}),
    "DFlash2, windows": ("dflash2", {**BLOCK, **SMALL, "layers": SLIDES}),
    "DSpark": ("dspark", {**BLOCK, "markov_rank": 8}),
    "DSpark, gated": ("dspark", {**BLOCK, "markov_rank": 8, "markov_head_type": "gated"}),
    "DSpark, recurrent, own vocabulary": (
        "dspark",
        {**BLOCK, "markov_rank": 8, "markov_head_type": "rnn", "draft_vocab_size": 40},
    ),
    "DSpark, no heads": ("dspark", {**BLOCK, "markov_rank": 0, "enable_confidence_head": False}),
    "DSpark, recurrent, root predicts nothing": (
        "dspark",
        {**BLOCK, "markov_rank": 8, "markov_head_type": "rnn", "sample_from_anchor": False},
    ),
    "MTP, qwen3": ("mtp", {"layers": QWEN, "shared_with_target": ["embed_tokens", "lm_head"]}),
    "MTP, qwen3, features before the norm": (
        "mtp",
        {"layers": QWEN, "features_after_norm": False, "shared_with_target": ["embed_tokens", "lm_head"]},
    ),
    "MTP, qwen3, hidden state first": (
        "mtp",
        {"layers": QWEN, "hidden_first": True, "shared_with_target": ["embed_tokens", "lm_head"]},
    ),
    "MTP, llama": ("mtp", {"shared_with_target": ["embed_tokens", "lm_head"]}),
}


def tiny_target(path: Path) -> Any:
    """Make a target of eight layers, and save it."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8, "intermediate_size": 48}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    target = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    target.save_pretrained(path)
    return target


def written(kind: str, given: dict[str, Any], target: Any, name: str, path: Path) -> Any:
    """Save a draft with random weights that all matter, and the input of both libraries."""
    torch.manual_seed(1)
    config = config_classes()[kind].for_target(target.config, **given)
    if "speculators_config" not in given:
        config.speculators_config["verifier"]["name_or_path"] = name
    draft = new_draft(config, target, torch.arange(target.config.vocab_size)).eval()
    draft.bind(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    draft.save_pretrained(path)
    width = getattr(draft.config, "num_features", 1) * target.config.hidden_size
    io = {
        "input_ids": torch.randint(1, target.config.vocab_size, (LENGTH,)),
        "features": torch.randn(LENGTH, width),
        "last": torch.randn(LENGTH, target.config.hidden_size),
        "anchors": torch.tensor(ANCHORS),
    }
    save_file(io, path / "ours.safetensors")
    if kind in ("eagle3", "peagle"):  # the library is given each feature with the token after it
        io = {name: (one[1:] if name == "input_ids" else one[:-1]).contiguous() for name, one in io.items()}
    save_file(io | {"anchors": torch.tensor(ANCHORS)}, path / "given.safetensors")
    return draft


@torch.no_grad()
def differences(kind: str, draft: Any, path: Path) -> dict[str, float]:
    """Return the largest absolute difference of each of the outputs that both libraries have."""
    io, theirs = load_file(path / "ours.safetensors"), load_file(path / "theirs.safetensors")
    ids = io["input_ids"][None]
    marked = (
        torch.zeros_like(ids, dtype=torch.bool).index_fill(1, io["anchors"], True) if draft.needs_anchors else None
    )
    wanted = DEPTHS if kind == "peagle" else STEPS
    made = draft.unroll(UnrollInput(ids, None, io["features"][None], marked), draft.unroll_steps(wanted))
    states = torch.stack([one[0] for one in made.states])  # (steps, positions, width)
    if marked is not None:
        states = states[:, io["anchors"] - 1]
    logits = torch.stack([made.head(step, one) for step, one in enumerate(states)])
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if kind == "mtp":
        found["logits"] = logits[0, : len(theirs["logits"])], theirs["logits"]
    elif kind == "eagle3":
        slides = "sliding_attention" in (getattr(draft.config.layers, "layer_types", None) or ())
        ends = [logits.shape[1] - step for step in range(1 if slides else STEPS)]  # the last have no token to be given
        ours, other = (
            [one[:end] for one, end in zip(each, ends, strict=False)] for each in (logits, theirs["logits"])
        )
        found["logits"] = torch.cat(ours), torch.cat(other)
    elif kind == "peagle":
        inside = theirs["rows"] >= 0  # the library also drafts from before the text
        found["logits"] = logits[theirs["depths"], theirs["rows"]][inside], theirs["logits"][inside]
    else:
        found["logits"] = logits.transpose(0, 1), theirs["logits"]
    if "scores" in theirs:
        assert made.selector is not None
        by_block = states.transpose(0, 1)
        scores, _ = made.selector(
            by_block.flatten(0, 1), logits.transpose(0, 1).flatten(0, 1), theirs["labels"].flatten()
        )
        found["selector"] = scores, theirs["scores"].flatten(0, 1)
    if "confidence" in theirs:
        assert made.confidence is not None
        found["confidence"] = made.confidence(states.transpose(0, 1)), theirs["confidence"]
    return {name: float((ours - other).abs().max()) for name, (ours, other) in found.items()}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Write all drafts, let the library run them, and compare."""
    target, drafts = tiny_target(args.work / "target"), {}
    paths = {case: args.work / str(number) for number, case in enumerate(CASES)}
    for case, (kind, given) in CASES.items():
        drafts[case] = written(kind, given, target, str(args.work / "target"), paths[case])
    command = [args.speculators, str(Path(__file__).with_name("speculators_worker.py")), *map(str, paths.values())]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    errors = {one["case"]: one["error"] for one in map(json.loads, lines)}
    results = {}
    for case, draft in drafts.items():
        error = errors[paths[case].name]
        far = {} if error else differences(CASES[case][0], draft, paths[case])
        results[case] = {"kind": CASES[case][0], "error": error, "differences": far, "equal": equal(error, far)}
        results[case]["inspect"] = inspect(paths[case]).engines.get("speculators")
    return results


def equal(error: str | None, far: dict[str, float]) -> bool:
    """Tell whether both libraries computed the same; NaN is not the same."""
    return error is None and all(one <= CLOSE for one in far.values())


def table(found: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = [", ".join(f"{name} {one}" for name, one in found["versions"].items()) + "."]
    wrong = [case for case, one in found["drafts"].items() if one["equal"] != (one["inspect"] == [])]
    lines += ["", f"`inspect` is wrong of {', '.join(wrong)}." if wrong else "`inspect` is right of all of them."]
    lines += ["", "| draft | largest difference | `inspect` says |", f"|{'---|' * 3}"]
    for case, one in found["drafts"].items():
        far = ", ".join(f"{value:.1g} ({name})" for name, value in one["differences"].items())
        says = "; ".join(one["inspect"] or []) or "reads it"
        error = (one["error"] or "").partition("\n")[0]
        lines.append(f"| {case} | {error or far} | {says} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the drafts and of the raw file")
    parser.add_argument("--speculators", metavar="PYTHON", help="of an environment with speculators 0.9.0")
    parser.add_argument("--read", action="store_true", help="compare nothing; write the table of the raw file")
    args = parser.parse_args()
    if not (args.read or args.speculators):
        parser.error("give the Python of an environment with speculators: --speculators VENV/bin/python")
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    raw = args.work / "speculators.json"
    if not args.read:
        torch.set_num_threads(1)
        versions = json.loads(
            subprocess.run([args.speculators, "-c", VERSIONS], stdout=subprocess.PIPE, check=True).stdout
        )
        found = {"versions": versions, "made_from": machine() | {"date": f"{datetime.now(UTC):%d %B %Y}"}}
        found["drafts"] = compare(args)
        write_files({raw.name: json.dumps(found, indent=1) + "\n"}, raw.parent)
    print(table(json.loads(raw.read_text(encoding="utf-8"))))
    print(f"hf_spec {hf_spec.__version__}; raw figures in {raw}")


if __name__ == "__main__":
    main()
