"""Compare one small ragged block with plain forwards before a target is trusted with slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. What the slot layout gets wrong shows
in the logits at once, though often not in the tokens for a long time, so logits are compared.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import has_states
from .proposal import Proposal
from .recurrent import runner_for
from .target import TargetRunner, new_cache, plain_logits

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
    cache, is_chain = new_cache(model), parents == CHAIN
    runner = runner_for(model, cache, one_chain=is_chain)
    runner.prefill_tokens(ids, mask)
    shape = torch.tensor([parents, parents], device=ids.device)
    child = len(parents) - 1 - parents[::-1].index(0)  # the root's last: in a tree its states must move to be kept
    path = torch.tensor([[0, child], [0, 0]], device=ids.device)
    first = ids[:, 1 : 1 + len(parents)]
    runner.score(Proposal(first, shape, len(parents), is_chain=is_chain))
    runner.commit(path, [2, 1])
    second = Proposal(first.flip(0), shape, len(parents), is_chain=is_chain)
    logits = runner.score(second).logits  # (2, nodes, vocabulary)
    texts = [torch.cat([ids[0], first[0, path[0]]]), torch.cat([ids[1], first[1, :1]])]
    differences = []
    for node in sorted(set(range(1, len(parents))) - set(parents)):
        for row, text in enumerate(texts):
            whole = torch.cat([text, second.tokens[row][second.ancestors[row, node]]])
            expected = _plain_logits(model, whole, mask[row], by_token=has_states(cache))
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


def _plain_logits(model: PreTrainedModel, whole: Tensor, mask: Tensor, by_token: bool) -> Tensor:
    """Score the end of a row ``whole`` (tokens) that begins with a prompt, in one forward or as plain ``generate``."""
    ids = whole[None]
    if by_token:  # what has a state may read a prompt differently from single tokens
        rest = ids[:, PROMPT:].split(1, dim=1)
        return plain_logits(model, ids[:, :PROMPT], mask[None], rest)[0, -1].float()
    ones = torch.nn.functional.pad(mask, (0, len(whole) - PROMPT), value=1)[None]
    plain = TargetRunner(model).prefill_tokens(ids, ones)
    assert plain is not None
    return plain.logits[0, -1].float()
