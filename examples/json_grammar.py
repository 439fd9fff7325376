"""Generate valid JSON in fewer forwards: a grammar and a draft together.

    pip install xgrammar
    python examples/json_grammar.py

A grammar leaves little choice in many places, so draft tokens that only copy the shape of the answer are accepted. Any
processor may be used like this. Those that keep a state are called as plain ``generate`` calls them.
"""

from __future__ import annotations

import json

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

import hf_spec
from hf_spec import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["dog", "cat", "bird"]},
        "friends": {"type": "array", "items": {"enum": ["Lily", "Tom", "Max"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "animal", "friends"],
    "additionalProperties": False,
}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path())
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    def answer(**kwargs: object) -> torch.Tensor:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)  # one per call: it keeps a state
        return target.generate(
            **inputs, **kwargs, logits_processor=LogitsProcessorList([processor]), max_new_tokens=80, do_sample=False
        )

    inputs = tokenizer("Once upon a time, there was a little dog named", return_tensors="pt")
    shape = json.dumps({"name": "Max", "animal": "dog", "friends": ["Lily"]})
    speculator = hf_spec.NgramSpeculator(corpus=[tokenizer(shape, add_special_tokens=False)["input_ids"]])
    out = answer(speculator=speculator, return_dict_in_generate=True)
    said = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.loads(said), out.speculation, sep="\n\n")
    assert torch.equal(out.sequences, answer())  # the text of plain generate


if __name__ == "__main__":
    main()
