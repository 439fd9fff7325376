"""Write a speculator of your own: here one that completes phrases from a dictionary.

    python examples/own_speculator.py

A ``Speculator`` is passed to ``generate`` and starts a ``Drafter`` per call. The drafter gets the accepted tokens and
proposes the next ones. Wrong draft tokens cost time and change nothing.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, Speculator, demo

PHRASES = [
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "in the park with her mom and dad.",
]


class PhraseSpeculator(Speculator):
    """A draft that completes phrases in which the last ``context`` tokens of the text occur."""

    def __init__(self, phrases: list[list[int]], context: int = 2) -> None:
        self.context = context
        self.following = {
            tuple(phrase[i : i + context]): phrase[i + context :]
            for phrase in phrases
            for i in range(len(phrase) - context)
        }

    def drafter(self, request: DraftContext) -> Drafter:
        return PhraseDrafter(self, request)


class PhraseDrafter(Drafter):
    """The state of one call: the text of each sequence."""

    def __init__(self, speculator: PhraseSpeculator, request: DraftContext) -> None:
        self.speculator = speculator
        self.ends = request.input_ids.tolist()

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        for end, tokens, count in zip(self.ends, accepted.tokens.tolist(), accepted.counts.tolist(), strict=True):
            end += tokens[:count]
        found = [self.speculator.following.get(tuple(end[-self.speculator.context :]), []) for end in self.ends]
        found = [tokens[:limit] for tokens in found]
        width = max(map(len, found))
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        tokens = torch.tensor(padded, dtype=torch.long, device=accepted.tokens.device).view(len(found), width)
        return Proposal.chain(accepted.root, tokens, torch.tensor([*map(len, found)], device=tokens.device))

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.ends = [self.ends[row] for row in rows.tolist()]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path())
    speculator = PhraseSpeculator(tokenizer(PHRASES, add_special_tokens=False)["input_ids"])
    inputs = tokenizer("Once upon", return_tensors="pt")
    out = target.generate(**inputs, speculator=speculator, max_new_tokens=40, return_dict_in_generate=True)
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True), out.speculation, sep="\n\n")


if __name__ == "__main__":
    main()
