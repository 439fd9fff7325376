"""Compare one small ragged block with plain steps before a target is trusted with slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. What the slot layout gets wrong shows
in the logits at once, though often not in the tokens for a long time, so logits are compared.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .proposal import Proposal
from .recurrent import runner_for
from .target import new_cache, plain_logits

PROMPT = 7
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 1, 2, 2]
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.25}

_passed: WeakKeyDictionary[PreTrainedModel, set[tuple[str, str, bool]]] = WeakKeyDictionary()


def check_target(model: PreTrainedModel, trees: bool, padded: bool = True) -> None:
    """Raise a ValueError if ``model`` scores chains (or ``trees``) over slots unlike its own steps.

    Asked once per model, attention implementation and ``padded``: whether rows may be padded on the left.
    """
    if model.training:  # dropout: no two forwards agree
        return
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    passed = _passed.setdefault(model, set())
    for name, parents in (("chain", CHAIN), ("tree", TREE))[: 1 + trees]:
        if (name, implementation, padded) in passed:
            continue
        cure = "use a chain (tree=None)" if name == "tree" else "generate without `speculator`"
        try:
            difference = difference_from_plain(model, parents, padded)
        except Exception as error:  # whatever an unforeseen architecture makes of a ragged block
            raise ValueError(f"{type(model).__name__} cannot score a {name} of guesses ({error}); {cure}.") from error
        if not difference <= TOLERANCE.get(model.dtype, 1e-2):  # nan is refused too
            raise ValueError(
                f"{type(model).__name__} scores a {name} of guesses differently from single steps "
                f"(by {difference:.2g} of its logits' spread), so the text would not be plain generate's; {cure}."
            )
        passed.add((name, implementation, padded))


@torch.no_grad()
def difference_from_plain(model: PreTrainedModel, parents: list[int], padded: bool = True) -> float:
    """Score a block of two rows of different lengths and compare it with plain steps along every path.

    The difference in logits is a share of their standard deviation: the worst one in float32, the median one in half
    precision, where a mixture of experts may route one token otherwise.
    """
    ids, mask = _prompt(model, padded)
    is_chain = parents == CHAIN
    runner = runner_for(model, new_cache(model), one_chain=is_chain)
    runner.prefill_tokens(ids, mask)
    shape = torch.tensor([parents, parents], device=ids.device)
    first = Proposal(ids[:, 1 : 1 + len(parents)], shape, len(parents), is_chain=is_chain)
    second = Proposal(first.tokens.flip(0), shape, len(parents), is_chain=is_chain)
    runner.score(first)
    child = len(parents) - 1 - parents[::-1].index(0)  # the root's last: in a tree its states must move to be kept
    runner.commit(torch.tensor([[0, child], [0, 0]], device=ids.device), [2, 1])
    logits = runner.score(second).logits.float()  # (2, nodes, vocabulary)

    paths = [second.ancestors[0, leaf].nonzero()[:, 0] for leaf in sorted(set(range(len(parents))) - set(parents))]
    read = []  # what follows the prompts along each path, for both rows; the second ends in a token too many
    for path in paths:
        read.append(torch.cat([first.tokens[0, [0, child]], second.tokens[0, path]]))
        read.append(torch.cat([first.tokens[1, [0]], second.tokens[1, path], path[:1]]))
    ids, mask = ids.repeat(len(paths), 1), mask.repeat(len(paths), 1)
    expected = plain_logits(model, ids, mask, torch.stack(read).split(1, dim=1)).float()
    differences = []
    for i, path in enumerate(paths):
        for row, start in enumerate((2, 1)):
            wanted = expected[2 * i + row, start : start + len(path)]  # (path, vocabulary)
            differences.append((logits[row, path] - wanted).abs().amax(-1) / wanted.std(-1))
    found = torch.cat(differences)
    return float(found.max() if model.dtype == torch.float32 else found.median())


def _prompt(model: PreTrainedModel, padded: bool) -> tuple[Tensor, Tensor]:
    """Return two rows of low token ids, which are seldom special, the second one ``padded`` on the left."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = (torch.arange(2 * PROMPT, device=model.device).view(2, PROMPT) * 7 % 31 + 11) % vocabulary
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :2] = 0
    return ids, mask
