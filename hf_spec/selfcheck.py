"""Compare one small ragged block with plain forwards before a target is trusted with slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. What the slot layout gets wrong shows
in the logits at once, though often not in the tokens for a long time, so logits are compared.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .proposal import ancestors_of
from .target import TargetRunner

PROMPT = 7
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 1, 2, 2]
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.25}

_passed: WeakKeyDictionary[PreTrainedModel, set[tuple[str, str]]] = WeakKeyDictionary()


def check_target(model: PreTrainedModel, trees: bool) -> None:
    """Raise a ValueError if ``model`` scores chains (or ``trees``) over slots unlike its own forward.

    Asked once per model and attention implementation.
    """
    if model.training:  # dropout: no two forwards agree
        return
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    passed = _passed.setdefault(model, set())
    for name, parents in (("chain", CHAIN), ("tree", TREE))[: 1 + trees]:
        if (name, implementation) in passed:
            continue
        cure = "use a chain (tree=None)" if name == "tree" else "generate without `speculator`"
        try:
            difference = difference_from_plain(model, parents)
        except Exception as error:  # whatever an unforeseen architecture makes of a ragged block
            raise ValueError(f"{type(model).__name__} cannot score a {name} of guesses ({error}); {cure}.") from error
        if not difference <= TOLERANCE.get(model.dtype, 1e-2):  # nan is refused too
            raise ValueError(
                f"{type(model).__name__} scores a {name} of guesses differently from single steps "
                f"(by {difference:.2g} of its logits' spread), so the text would not be plain generate's; {cure}."
            )
        passed.add((name, implementation))


@torch.no_grad()
def difference_from_plain(model: PreTrainedModel, parents: list[int]) -> float:
    """Score a block of two left-padded rows of different lengths and compare its leaves with plain forwards.

    The difference in logits is a share of their standard deviation: the worst one in float32, the median one in half
    precision, where a mixture of experts may route one token otherwise. A wrong layout shows at most nodes.
    """
    ids, mask = _prompt(model)
    runner = TargetRunner(model)
    runner.prefill_tokens(ids, mask)
    shape = torch.tensor([parents, parents], device=ids.device)
    ancestors = ancestors_of(shape, len(parents))
    child = len(parents) - 1 - parents[::-1].index(0)  # the root's last: in a tree its states must move to be kept
    path = torch.tensor([[0, child], [0, 0]], device=ids.device)
    first = ids[:, 1 : 1 + len(parents)]
    runner.extend(first, ancestors)
    runner.slots.commit(path, [2, 1])
    second = first.flip(0)
    logits = runner.extend(second, ancestors).logits  # (2, nodes, vocabulary)
    texts = [torch.cat([ids[0], first[0, path[0]]]), torch.cat([ids[1], first[1, :1]])]
    differences = []
    for node in sorted(set(range(1, len(parents))) - set(parents)):
        for row, text in enumerate(texts):
            whole = torch.cat([text, second[row][ancestors[row, node]]])[None]
            plain = TargetRunner(model).prefill_tokens(whole, _with_ones(mask[row], whole.shape[1]))
            assert plain is not None
            expected = plain.logits[0, -1].float()
            differences.append((logits[row, node].float() - expected).abs().max() / expected.std())
    found = torch.stack(differences)
    return float(found.max() if model.dtype == torch.float32 else found.median())


def _prompt(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return two rows of low token ids, which are seldom special, the second one padded on the left."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = (torch.arange(2 * PROMPT, device=model.device).view(2, PROMPT) * 7 % 31 + 11) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return ids, mask


def _with_ones(mask: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, length - mask.shape[0]), value=1)[None]
