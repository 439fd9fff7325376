"""Generate a batch with a draft, in a chain and in a tree, and print the statistics.

    python examples/generate.py

Runs offline on the small models in the package; put a target and a draft of your own in their place.
"""

from __future__ import annotations

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec import demo


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.path(), padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(demo.path())
    draft = AutoModel.from_pretrained(demo.path("draft-eagle3"))

    prompts = ["Once upon a time, there was a little dog", "Lily and her mom", "Tom was sad because"]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    tree = hf_spec.SpeculationConfig(tree="dynamic", num_tree_tokens=12, tree_topk=4)
    for config in (None, tree):
        out = target.generate(
            **inputs,
            speculator=draft,
            speculation_config=config,
            tokenizer=tokenizer,  # for the colours of out.speculation in a notebook
            max_new_tokens=60,
            do_sample=True,
            temperature=0.7,
            return_dict_in_generate=True,
        )
        print(*tokenizer.batch_decode(out.sequences, skip_special_tokens=True), out.speculation, sep="\n\n")


if __name__ == "__main__":
    main()
