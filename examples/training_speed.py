"""Compare time and memory of a training step of an EAGLE-3 draft with those of the speculators library.

    python examples/training_speed.py --speculators VENV/bin/python

`--speculators` is the Python of an environment with speculators 0.9.0, which needs another transformers. Every figure
comes from a process of its own. A step is forward and backward of seven unrolled steps, batch 1, float32, one Llama
layer with a frozen output layer, given features, one thread. Time is process time, the fastest of three steps. Memory
is the growth of the resident set above the built model, with an allocator that returns freed blocks at once. In
brackets: with glibc's defaults. docs/training.md shows the results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

STEPS = 7
DECAY = 0.8
SHAPES = [(512, 2048, 512), (2048, 2048, 512), (512, 32000, 256), (2048, 32000, 256)]  # tokens, vocabulary, width


def layers(vocabulary: int, width: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=(width * 8 // 3 + 63) // 64 * 64,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        num_hidden_layers=1,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )


def ours(tokens: int, vocabulary: int, width: int) -> Callable[[], torch.Tensor]:
    """Return a function that computes the loss of a step."""
    from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
    from hf_spec.drafts.eagle3.modeling import Eagle3DraftModel
    from hf_spec.training.losses import ChunkedLoss, counted_positions, position_weights
    from hf_spec.training.unrolling import unrolled
    from hf_spec.unroll.feedback import UnrollInput

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers(vocabulary, width),
        draft_vocab_size=vocabulary,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    draft = Eagle3DraftModel(config).float()
    draft.lm_head.requires_grad_(False)
    ids, features, hidden, head = given(tokens, vocabulary, width)

    def target_head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, (width,)) @ head.T

    def loss() -> torch.Tensor:
        draft.zero_grad()
        made = unrolled(draft, UnrollInput(ids, None, features), STEPS)
        weights, divisor = position_weights(counted_positions(torch.ones_like(ids), STEPS), "token")
        weights = weights * (DECAY ** torch.arange(STEPS) / divisor)[:, None, None]
        return ChunkedLoss(made.head, target_head).compute(made.states, hidden, weights, made.trained)[0]

    return loss


def theirs(tokens: int, vocabulary: int, width: int) -> Callable[[], torch.Tensor]:
    """Return a function that computes the loss of a step."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    decoder = layers(vocabulary, width)
    decoder._attn_implementation = "sdpa"  # the default, FlexAttention, has no gradients on a CPU
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=vocabulary,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    draft = Eagle3DraftModel(config).float().train()
    ids, features, hidden, head = given(tokens, vocabulary, width)
    with torch.no_grad():
        draft.verifier_lm_head.weight.copy_(head)
        draft.lm_head.weight.copy_(head)
        draft.embed_tokens.weight.normal_(std=0.02)
    marked = torch.ones(1, tokens, dtype=torch.bool)

    def loss() -> torch.Tensor:
        draft.zero_grad()
        _, loss, _ = draft(
            hidden_states=features[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros_like(marked, dtype=torch.long),
            loss_mask=marked,
            verifier_last_hidden_states=hidden[:, 1:],
            ttt_steps=STEPS,
            ttt_step_loss_decay=DECAY,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        return loss

    return loss


def given(tokens: int, vocabulary: int, width: int) -> list[torch.Tensor]:
    """Return token ids, features, last hidden states and the target's output layer."""
    ids = torch.randint(0, vocabulary, (1, tokens + 1))
    shapes = (1, tokens + 1, 3 * width), (1, tokens + 1, width), (vocabulary, width)
    return [ids, *(scale * torch.randn(shape) for shape, scale in zip(shapes, (1, 0.5, 0.08), strict=True))]


def measure(who: str, shape: list[int]) -> tuple[float, float]:
    """Return the seconds and the megabytes of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loss = {"ours": ours, "theirs": theirs}[who](*shape)
    built, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        start = time.process_time()
        loss().backward()
        seconds.append(time.process_time() - start)
    return min(seconds[1:]), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - built) / 1024


def run(python: str, who: str, shape: tuple[int, ...], **environment: str) -> Any:
    command = [python, __file__, "--child", who, *map(str, shape)]
    # What is wrong with an environment stands in the errors of its process, which everybody may see.
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", metavar="PYTHON")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument(
        "--json", type=Path, help="raw file with commit, machine and versions; what it has is not run again"
    )
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child[0], [int(size) for size in options.child[1:]])))
        return
    if not options.speculators:
        parser.error("--speculators: name the Python of an environment that has it")
    from engine_speed import earlier, machine  # the other environment has not what it imports

    from hf_spec.whole_files import write_files

    made_from = machine() | {"argv": sys.argv[1:]}
    content: dict[str, Any] = {"made_from": made_from, "steps": {}} | earlier(options.json, made_from)
    for shape in SHAPES:
        for python, who in ((options.speculators, "theirs"), (sys.executable, "ours")):
            found = content["steps"].setdefault(" ".join(map(str, shape)), {})
            if who not in found:
                seconds, resident = run(python, who, shape)
                found[who] = [seconds, run(python, who, shape, MALLOC_MMAP_THRESHOLD_="65536")[1], resident]
                print(f"{shape} {who}: {found[who]}", file=sys.stderr, flush=True)
                if options.json:
                    write_files({options.json.name: json.dumps(content) + "\n"}, options.json.absolute().parent)
    print(table(content))


def table(content: dict[str, Any]) -> str:
    """Write the shapes of a raw file that are complete."""
    lines = [
        "| tokens | vocabulary | width | speculators: time, memory | hf_spec: time, memory | ratios |",
        "|---" * 6 + "|",
    ]
    for shape, found in content["steps"].items():
        if len(found) < 2:
            continue
        figures = found["theirs"], found["ours"]
        cells = [f"{seconds:.2f} s, {held:,.0f} MB ({resident:,.0f})" for seconds, held, resident in figures]
        ratios = [mine / other for other, mine in zip(*figures, strict=True)]
        row = [*(f"{int(size):,}" for size in shape.split()), *cells, "{:.2f}, {:.2f} ({:.2f})".format(*ratios)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
