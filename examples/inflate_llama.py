"""Inflate a small Llama to the cost of a big one without changing its text, to measure speed with real acceptance.

    python examples/inflate_llama.py SMALL OUT --hidden-size 1152 --intermediate-size 4608 --layers 16

`hf_spec.demo.inflation` explains how. A draft model for SMALL works for OUT. So does a draft over hidden states, as
`Narrowed(draft, small)` in Python. Acceptance is SMALL's, and says nothing about any big model's.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_spec.demo.inflation import inflate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("small", help="a Llama: directory or Hub id")
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--hidden-size", type=int, default=1152)
    parser.add_argument("--intermediate-size", type=int, default=4608)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    small = LlamaForCausalLM.from_pretrained(args.small, dtype=torch.float32)
    large = inflate(small, args.hidden_size, args.intermediate_size, args.layers)
    large.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.small).save_pretrained(args.out)
    print(f"{large.num_parameters() / 1e6:.0f} M parameters in {args.out}")


if __name__ == "__main__":
    main()
