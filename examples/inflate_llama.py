"""Inflate a small Llama to the cost of a big one without changing what it says, to measure speed with real acceptance.

    python examples/inflate_llama.py SMALL OUT --hidden-size 1152 --intermediate-size 4608 --layers 16

Random weights of a big model would accept nothing, and a real big model does not fit everywhere. Here the small
model's distribution stays and only the arithmetic grows: widths are padded with zeros, and heads that see nothing and
layers that add nothing are appended. RMSNorm divides by the mean square over the width, which the zeros lower by small
/ large: its epsilon shrinks by that factor, and its weights by the square root of it.

The draft for SMALL is a draft for OUT. Acceptance is then SMALL's, which says nothing about any big model's.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def inflate(
    small: LlamaForCausalLM, hidden_size: int, intermediate_size: int, num_hidden_layers: int
) -> LlamaForCausalLM:
    """Return a model of the given sizes with the logits of ``small``, up to rounding.

    The head dimension and the ratio of query to key heads stay; the heads fill ``hidden_size``.

    Raises:
        ValueError: if a size is below that of ``small``, or ``hidden_size`` holds no whole number of heads.
    """
    config = _inflated_config(small.config, hidden_size, intermediate_size, num_hidden_layers)
    large = LlamaForCausalLM(config).to(small.dtype)
    ratio = (small.config.hidden_size / hidden_size) ** 0.5
    with torch.no_grad():
        for layer in large.model.layers[small.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for name, weight in small.named_parameters():
            _embed(weight * ratio if "norm" in name else weight, large.get_parameter(name))
    large.generation_config = copy.deepcopy(small.generation_config)
    return large.eval()


def _inflated_config(small: LlamaConfig, hidden_size: int, intermediate_size: int, layers: int) -> LlamaConfig:
    changes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    for name, size in changes.items():
        if size < getattr(small, name):
            raise ValueError(f"{name} is {size}, below the small model's {getattr(small, name)}; choose at least that")
    group = small.num_attention_heads // small.num_key_value_heads
    key_heads, rest = divmod(hidden_size, small.head_dim * group)
    if rest:
        raise ValueError(
            f"hidden_size is {hidden_size}; choose a multiple of {small.head_dim * group}, for whole heads"
        )
    changes |= {"num_attention_heads": key_heads * group, "num_key_value_heads": key_heads}
    epsilon = small.rms_norm_eps * small.hidden_size / hidden_size
    return LlamaConfig(**small.to_dict() | changes | {"rms_norm_eps": epsilon})


def _embed(weight: Tensor, into: Tensor) -> None:
    """Put ``weight`` into the corner of a parameter that is zero elsewhere."""
    into.zero_()
    into[tuple(slice(size) for size in weight.shape)] = weight


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
