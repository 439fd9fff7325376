"""Train the demo family of hf_spec from scratch: a small Llama target and a draft model distilled from it.

    python examples/prepare_demo_corpus.py --corpus DIR --work WORK
    python examples/train_demo_family.py train --work WORK --role target
    python examples/train_demo_family.py train --work WORK --role draft
    python examples/train_demo_family.py export --work WORK --output hf_spec/demo

`train` can be stopped at any time and resumes from its last checkpoint. The draft learns from the target's checkpoint.
`export` writes bfloat16 directories, then prints held-out losses and samples. docs/demo-family.md describes the data
and the results.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Share of the sampled documents from each group; `story_chat` is a story in answer to a request.
MIXTURE = {"story": 0.5, "story_chat": 0.2, "dialogue": 0.3}
# Sequences are short first, for speed, and long in the last part of the training.
SHORT, LONG, LONG_FROM = 256, 512, 0.75
DISTIL_FROM = 2 / 3  # before, a draft learns from the text, which is cheaper
MUON_SCALE = 7.0  # Muon's learning rate over AdamW's

SAMPLE_PROMPTS = ("Once upon a time, there was a little dog named Max.", "One day, Lily and her mom went to the park.")

Document: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"  # (tokens,)


def load_documents(path: Path) -> list[Document]:
    """Return the token ids of each document that examples/prepare_demo_corpus.py wrote to `path`."""
    with np.load(path) as file:
        return np.split(file["ids"].astype(np.int64), file["ends"][:-1])


def batch_of(groups: dict[str, list[Document]], step: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """Return packed documents (rows, length + 1); they depend on the step alone, so a resumed run sees the same."""
    rng = np.random.default_rng((seed, step))
    batch = np.empty((rows, length + 1), dtype=np.int64)
    for row in batch:
        filled = 0
        while filled < len(row):
            group = groups[str(rng.choice(list(MIXTURE), p=list(MIXTURE.values())))]
            document = group[int(rng.integers(len(group)))][: len(row) - filled]
            row[filled : filled + len(document)] = document
            filled += len(document)
    return torch.from_numpy(batch)


def new_model(role: str, vocabulary: int) -> LlamaForCausalLM:
    """Return an untrained target (deep and narrow: many cheap layers to save) or draft (one layer)."""
    shapes = {
        "target": {"num_hidden_layers": 10, "hidden_size": 144, "intermediate_size": 384, "num_attention_heads": 3},
        "draft": {"num_hidden_layers": 1, "hidden_size": 112, "intermediate_size": 256, "num_attention_heads": 2},
    }
    config = LlamaConfig(
        **shapes[role],
        num_key_value_heads=1,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def schedule(step: int, steps: int, warmup: int = 100) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then a cosine to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def load_trained(work: Path, role: str) -> LlamaForCausalLM:
    """Return the model of the last checkpoint, in float32 and evaluation mode."""
    path = work / f"{role}.pt"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run `train --role {role}` with the same --work first.")
    state = torch.load(path, weights_only=True)["model"]
    model = new_model(role, state["model.embed_tokens.weight"].shape[0])
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, validation: list[Document]) -> float:
    """Return the mean negative log-likelihood per token, each document on its own."""
    total, count = 0.0, 0
    for document in validation:
        ids = torch.from_numpy(document[:1024])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()  # (length - 1, vocab)
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def new_optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the embedding and the norms."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(inside, lr=MUON_SCALE * learning_rate, weight_decay=0.05),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Write all that a resumed run needs; an interruption leaves the checkpoint before it whole."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    partial = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizers": states, "step": step}, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore model and optimizers in place; return the number of steps done."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(saved["step"])


def train(args: argparse.Namespace) -> None:
    """Train one model, resuming from its checkpoint if there is one."""
    torch.manual_seed(args.seed)
    groups = {name: load_documents(args.work / f"{name}.npz") for name in MIXTURE}
    validation = load_documents(args.work / "validation.npz")[:40]
    model = new_model(args.role, len(PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")))
    teacher = load_trained(args.work, "target") if args.role == "draft" else None
    optimizers = new_optimizers(model, args.learning_rate)
    peaks = [optimizer.defaults["lr"] for optimizer in optimizers]
    checkpoint = args.work / f"{args.role}.pt"
    start = load_checkpoint(checkpoint, model, optimizers) if checkpoint.exists() else 0
    print(f"{args.role}: {model.num_parameters()} parameters, from step {start} to {args.steps}", flush=True)
    # Two sequence lengths mean two compiled graphs; a graph for any length would be slower.
    run, teach = (torch.compile(m, dynamic=False) if args.compile and m else m for m in (model, teacher))
    began, losses = time.monotonic(), []
    for step in range(start, args.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, args.steps)
        length = SHORT if step < LONG_FROM * args.steps else LONG
        taught = teach if step >= DISTIL_FROM * args.steps else None
        loss = train_loss(run, taught, batch_of(groups, step, args.tokens // length, length, args.seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            speed = (step + 1 - start) * args.tokens / (time.monotonic() - began)
            held_out = validation_loss(model, validation)
            mean = sum(losses) / len(losses)
            print(f"step {step + 1} loss {mean:.4f} held-out {held_out:.4f} {speed:.0f} tokens/s", flush=True)
            losses.clear()
            save_checkpoint(checkpoint, model, optimizers, step + 1)


def train_loss(model: Any, teacher: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return cross-entropy on packed `batch` (rows, length + 1), or the divergence from a teacher's distribution."""
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits  # (rows, length, vocab)
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(input_ids=inputs, use_cache=False).logits
    logits = logits.flatten(0, 1).float()
    if teacher is None:
        return F.cross_entropy(logits, labels.flatten())
    log_probs = taught.flatten(0, 1).float().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), log_probs, log_target=True, reduction="batchmean")


@torch.no_grad()
def greedy_agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, validation: list[Document]) -> float:
    """Return the share of held-out positions at which target and draft prefer the same token."""
    same = count = 0
    for document in validation:
        ids = torch.from_numpy(document[:1024])[None]
        a, b = (m(input_ids=ids, use_cache=False).logits[0, :-1].argmax(-1) for m in (target, draft))
        same += int((a == b).sum())
        count += len(a)
    return same / count


def export(args: argparse.Namespace) -> None:
    """Write both models in bfloat16 with their tokenizer, then report on what was written."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    for role, name in (("target", "target"), ("draft", "draft-vanilla")):
        if not (args.work / f"{role}.pt").exists():
            print(f"{role} is not trained yet: skipped")
            continue
        model = load_trained(args.work, role).to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(args.output / name)
        tokenizer.save_pretrained(args.output / name)
    report(args.work, args.output)


def report(work: Path, output: Path) -> None:
    """Print held-out losses, greedy agreement and samples of the exported models, computed in float32."""
    validation = load_documents(work / "validation.npz")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output / "target")
    loaded = {
        name: LlamaForCausalLM.from_pretrained(output / name, dtype=torch.float32).eval()
        for name in ("target", "draft-vanilla")
        if (output / name).exists()
    }
    for name, model in loaded.items():
        print(f"{name}: {model.num_parameters()} parameters, held-out loss {validation_loss(model, validation):.4f}")
    if len(loaded) == 2:
        print(f"greedy agreement {greedy_agreement(loaded['target'], loaded['draft-vanilla'], validation):.4f}")
    request = [{"role": "user", "content": "Tell me a story about a little cat named Tom."}]
    prompts = [tokenizer.encode(prompt) for prompt in SAMPLE_PROMPTS]
    prompts.append(tokenizer.apply_chat_template(request, add_generation_prompt=True, return_dict=False))
    for prompt in prompts:
        ids = loaded["target"].generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)
        print("---", tokenizer.decode(ids[0]), sep="\n")


def main() -> None:
    """Parse the command line and run one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    for function in (train, export):
        step = steps.add_parser(function.__name__, help=function.__doc__)
        step.set_defaults(function=function)
        step.add_argument("--work", type=Path, required=True, help="directory for token ids and checkpoints")
        if function is train:
            step.add_argument("--seed", type=int, default=0)
            step.add_argument("--role", choices=("target", "draft"), required=True)
            step.add_argument("--steps", type=int, default=1500)
            step.add_argument("--tokens", type=int, default=4096, help="per step")
            step.add_argument("--learning-rate", type=float, default=3e-3)
            step.add_argument("--log-every", type=int, default=100, help="steps between reports and checkpoints")
            step.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
        else:
            step.add_argument("--output", type=Path, required=True, help="receives target/ and draft-vanilla/")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
