"""Compare drafts with another tokenizer: hf_spec's translation with transformers' universal assisted decoding.

    python examples/other_tokenizer.py TARGET DRAFT
    python examples/other_tokenizer.py TARGET DRAFT --json other.json  # keeps the figures, with machine and versions

counts the tokens that each forward of the target gives, greedy and sampled, at the same number of draft tokens. TARGET
and DRAFT are directories or Hub ids of language models with their tokenizers. --tokens, --draft-tokens and --prompts
(a file with one prompt a line) change what is generated. Forwards depend on no clock, and so on no other work of the
machine.

Greedy texts are compared with those of plain generate. Sampled ones cannot be, so the target is asked how probable it
finds them: the mean log-probability of their tokens should be that of plain sampling, but for chance.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from engine_speed import machine  # the folder is no package

import hf_spec
from hf_spec.drafts.translated.ways import TEXT, TOKENS, Ways
from hf_spec.whole_files import write_files

PROMPTS = [
    "Once upon a time, there was a little dog",
    "Tom and Lily went to the park. They saw",
    "One day, a girl named Mia found a",
    "The sun was hot, and the",
    "Ben had a big red ball. He",
    "A small bird sat on a tree and",
    "Mom made a cake. Anna wanted",
    "It was night, and the cat",
]


class One(Ways):
    """A way of drafting that is taken in every step, whatever is accepted."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def choose(self) -> str:
        return self.way


def count_forwards(target: Any, generate: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return what is generated, and how many forwards of ``target`` that took."""
    count = 0

    def note(*given: Any) -> None:
        nonlocal count
        count += 1

    with target.register_forward_hook(note):
        return generate(), count


def ways(target: Any, draft: Any, words: Any, own: Any, draft_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``generate`` for each way of drafting."""
    assistant = copy.deepcopy(draft)  # transformers replaces its embeddings and its head where it samples
    assistant.generation_config.update(
        num_assistant_tokens=draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    found: dict[str, dict[str, Any]] = {"plain": {}}
    found["transformers"] = {"assistant_model": assistant, "tokenizer": words, "assistant_tokenizer": own}
    config = hf_spec.SpeculationConfig(num_speculative_tokens=draft_tokens, self_check=False)
    for name, way in {"hf_spec": "", "hf_spec, by text": TEXT, "hf_spec, by shared tokens": TOKENS}.items():
        speculator = hf_spec.TranslatedSpeculator(draft, own, words)
        speculator.ways = One(way) if way else Ways()
        found[name] = {"speculator": hf_spec.as_speculator(speculator, target), "speculation_config": config}
    return found


def measure(
    target: Any, words: Any, prompts: list[str], options: dict[str, Any], **how: Any
) -> tuple[float, float, list[Any]]:
    """Return the tokens per forward of the target, their mean log-probability in it, and the texts."""
    tokens, forwards, likely, texts = 0, 0, 0.0, []
    for number, prompt in enumerate(prompts):
        inputs = words(prompt, return_tensors="pt", return_token_type_ids=False).to(target.device)
        set_seed(number)
        text, count = count_forwards(target, functools.partial(target.generate, **inputs, **options, **how))
        start = inputs["input_ids"].shape[1]
        tokens += text.shape[1] - start
        forwards += count
        with torch.no_grad():
            log_probs = target(input_ids=text).logits[:, start - 1 : -1].float().log_softmax(-1)
        likely += float(log_probs.gather(2, text[:, start:, None]).sum())
        texts.append(text[0].tolist())
    return tokens / forwards, likely / tokens, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--draft-tokens", type=int, default=4, help="draft tokens in each step")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="write commit, machine, versions and the figures")
    args = parser.parse_args()

    target, draft = (
        AutoModelForCausalLM.from_pretrained(place, dtype=args.dtype) for place in (args.target, args.draft)
    )
    words, own = (AutoTokenizer.from_pretrained(place) for place in (args.target, args.draft))
    prompts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS
    shared = len(hf_spec.TranslatedSpeculator(draft, own, words).shared)
    same = len(words.get_vocab().keys() & own.get_vocab().keys())
    print(f"shared tokens: {shared} by what they write, {same} by name")
    print(f"tokens per forward of the target, {len(prompts)} texts of {args.tokens} tokens:")
    kept: dict[str, Any] = {"made_from": machine() | {"argv": sys.argv[1:]}, "shared": shared, "figures": {}}
    for label, sampling in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "top_k": 0})):
        options = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "pad_token_id": 0, **sampling}
        found = {}
        for name, how in ways(target, draft, words, own, args.draft_tokens).items():
            try:
                found[name] = measure(target, words, prompts, options, **how)
            except Exception as error:
                if name != "transformers":  # whose own way fails with some pairs of tokenizers
                    raise
                kept["figures"].setdefault(name, {})[label] = {"error": f"{type(error).__name__}: {error}"}
                print(f"{label:8} {name:13} fails: {type(error).__name__}: {error}")
        for name, (rate, likely, texts) in found.items():
            equal = sum(one == other for one, other in zip(texts, found["plain"][2], strict=True))
            check = f"{equal} of {len(texts)} texts as plain" if label == "greedy" else f"log-probability {likely:.2f}"
            print(f"{label:8} {name:13} {rate:.2f}  {check}")
            figures = {"tokens_per_forward": rate, "log_probability": likely, "as_plain": equal, "texts": len(texts)}
            kept["figures"].setdefault(name, {})[label] = figures
    if args.json:
        write_files({args.json.name: json.dumps(kept, indent=1) + "\n"}, args.json.absolute().parent)


def table(content: dict[str, Any]) -> str:
    """Write the figures of a raw file as Markdown."""
    head = ("way", "greedy", "texts as plain", "sampled", "mean log-probability of sampled tokens")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, found in content["figures"].items():
        cells = []
        for label, then in (("greedy", "{as_plain} of {texts}"), ("sampled", "{log_probability:.2f}")):
            failed = "error" in found[label]
            cells += (
                ["fails", ""] if failed else [f"{found[label]['tokens_per_forward']:.2f}", then.format(**found[label])]
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
