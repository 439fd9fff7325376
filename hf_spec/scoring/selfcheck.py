"""Compare one small ragged block with plain steps before a target is trusted with slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. What the slot layout gets wrong shows
in the logits at once, though often not in the tokens for a long time, so logits are compared.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..proposal import Proposal
from .architectures import why_one_row
from .recurrent import runner_for
from .runner import TargetRunner, input_device, left_alone, new_cache, plain_logits, prompt_kwargs

PROMPT = 7
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 1, 2, 2]
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.25}

_passed: WeakKeyDictionary[PreTrainedModel, set[tuple[str, str]]] = WeakKeyDictionary()
_causal: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


def check_target(model: PreTrainedModel, trees: bool) -> None:
    """Raise a ValueError if ``model`` scores chains (or ``trees``) over slots unlike its own steps.

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
            with left_alone(model):
                difference = difference_from_plain(model, parents)
        except Exception as error:  # whatever an unforeseen architecture makes of a ragged block
            raise ValueError(f"{type(model).__name__} cannot score a {name} of guesses ({error}); {cure}.") from error
        if not difference <= _tolerance(model):  # nan is refused too
            raise ValueError(
                f"{type(model).__name__} scores a {name} of guesses differently from single steps "
                f"(by {difference:.2g} of its logits' spread), so the text would not be plain generate's; {cure}."
            )
        passed.add((name, implementation))


@torch.no_grad()
def reads_prompts_causally(model: PreTrainedModel) -> bool:
    """Tell whether the end of a prompt says the same when guesses are read with it; measured once.

    Prefix language models (PaliGemma) let a whole prompt look at all of itself.
    """
    if model.training:
        return False
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    known = _causal.setdefault(model, {})
    if implementation not in known:
        prompt, guesses = _prompt(model)[0][:1].tensor_split([PROMPT // 2], dim=1)
        seen, chain = torch.ones_like(prompt), Proposal.chain(prompt[:, -1], guesses)
        with left_alone(model):
            alone = TargetRunner(model).prefill_tokens(prompt, seen)
            kwargs = prompt_kwargs(model, prompt, seen)
            together = TargetRunner(model).prefill_guessing(prompt, GenerationConfig(), kwargs, chain)
        assert alone is not None
        first, again = alone.logits[:, 0].float(), together.logits[:, 0].float()  # (1, vocabulary)
        known[implementation] = bool((first - again).abs().max() <= _tolerance(model) * first.std())
    return known[implementation]


class _Read(NamedTuple):
    """What a row read along one path of the block: ``following`` comes after its prompt, and ``logits`` (path,
    vocabulary) are the block's own from token ``start`` of that on."""

    prompt: Tensor
    mask: Tensor
    following: Tensor
    start: int
    logits: Tensor


@torch.no_grad()
def difference_from_plain(model: PreTrainedModel, parents: list[int]) -> float:
    """Score a block of two rows of different lengths, or one if the model takes no more, and compare it with plain
    steps along every path.

    The difference in logits is a share of their standard deviation, the worst one of a path: of all paths in float32,
    of the median path in half precision, where a mixture of experts may route one token otherwise. Some models of
    transformers read a padded row unlike the same row alone (Git): then the row alone is what counts.
    """
    reads = _read_block(model, parents)
    together = _difference(model, reads, _plain(model, reads))
    if together <= _tolerance(model):
        return together
    alone = [read._replace(prompt=read.prompt[read.mask > 0], mask=read.mask[read.mask > 0]) for read in reads]
    return min(together, _difference(model, reads, torch.cat([_plain(model, [read]) for read in alone])))


def _read_block(model: PreTrainedModel, parents: list[int]) -> list[_Read]:
    """Let the rows advance differently in one block and read another one, each as wide as ``parents``."""
    ids, mask = _prompt(model)
    rows = range(len(ids))
    is_chain = parents == CHAIN
    runner = runner_for(model, new_cache(model), one_chain=is_chain)
    runner.prefill_tokens(ids, mask)
    shape = torch.tensor([parents for _ in rows], device=ids.device)
    first = Proposal(ids[:, 1 : 1 + len(parents)], shape, len(parents), is_chain=is_chain)
    second = Proposal(first.tokens.flip(0, 1), shape, len(parents), is_chain=is_chain)
    runner.score(first)
    child = len(parents) - 1 - parents[::-1].index(0)  # the root's last: in a tree its states must move to be kept
    kept = [[0, child], [0]][: len(ids)]
    runner.commit(torch.tensor([[0, child], [0, 0]], device=ids.device)[: len(ids)], [len(nodes) for nodes in kept])
    logits = runner.score(second).logits.float()  # (rows, nodes, vocabulary)
    reads = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = second.ancestors[0, leaf].nonzero()[:, 0]
        for row, nodes in zip(rows, kept, strict=True):
            following = torch.cat([first.tokens[row, nodes], second.tokens[row, path]])
            # Equally long; the last is not compared.
            following = torch.nn.functional.pad(following, (0, 2 - len(nodes)))
            reads.append(_Read(ids[row], mask[row], following, len(nodes), logits[row, path]))
    return reads


def _plain(model: PreTrainedModel, reads: list[_Read]) -> Tensor:
    """Score what follows the prompts as plain ``generate`` does, token by token: (reads, tokens, vocabulary)."""
    prompt, mask, following = (torch.stack(part) for part in list(zip(*reads, strict=True))[:3])
    return plain_logits(model, prompt, mask, following.split(1, dim=1)).float()


def _difference(model: PreTrainedModel, reads: list[_Read], plain: Tensor) -> float:
    differences = []
    for read, whole in zip(reads, plain, strict=True):
        expected = whole[read.start : read.start + len(read.logits)]  # (path, vocabulary)
        differences.append(((read.logits - expected).abs().amax(-1) / expected.std(-1)).max())
    found = torch.stack(differences)
    return float(found.max() if model.dtype == torch.float32 else found.median())


def _tolerance(model: PreTrainedModel) -> float:
    return TOLERANCE.get(model.dtype, 1e-2)


def _prompt(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return two rows of low token ids, which are seldom special, the second one padded on the left; or the first."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = (torch.arange(2 * PROMPT, device=input_device(model)).view(2, PROMPT) * 7 % 31 + 11) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    count = 2 if why_one_row(model) is None else 1
    return ids[:count], mask[:count]
