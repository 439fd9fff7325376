"""Cut a draft model of a few layers out of a target, as the start of a distillation.

    python examples/real_model/two_layers.py HuggingFaceTB/SmolLM2-135M-Instruct two-layers

It keeps the embeddings, the final norm, the output layer, and the chosen layers: by default the first and the last.
"""

import argparse

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="directory or Hub id of a model like Llama")
    parser.add_argument("output", help="directory to write")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, -1])
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    kept = [target.model.layers[number] for number in args.layers]
    target.model.layers = nn.ModuleList(kept)
    target.config.num_hidden_layers = len(kept)
    if getattr(target.config, "layer_types", None):
        kinds = AutoConfig.from_pretrained(args.target).layer_types
        target.config.layer_types = [kinds[number] for number in args.layers]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number
    target.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.target).save_pretrained(args.output)


if __name__ == "__main__":
    main()
