"""Compare one small ragged block with plain steps before a target is trusted with slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. What the slot layout gets wrong shows
in the logits at once, though often not in the tokens for a long time, so logits are compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..proposal import Proposal
from .adapters import adapter_of_inputs
from .architectures import why_one_row
from .factory import runner_for
from .graphs import is_compiled
from .plain import difference, input_device, new_cache, new_static_cache, plain_logits, precision, prompt_kwargs
from .runner import ModelRunner
from .trials import in_short, tried_once

PROMPT = 7
CACHE_LENGTH = 64  # more than all that is read


class _Shape(NamedTuple):
    """A shape of guesses that is tried: the parents of its nodes, and which nodes the first row keeps of them."""

    parents: tuple[int, ...]
    kept: tuple[int, ...]


# The first row keeps the root and a child, the second row the root: so the rows advance differently.
CHAIN = _Shape(parents=(-1, 0, 1, 2), kept=(0, 1))
TREE = _Shape(parents=(-1, 0, 0, 1, 2, 2), kept=(0, 2))  # of two children the second: its states have to move
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.25}


def check_target(model: PreTrainedModel, trees: bool, static: bool = False) -> None:
    """Raise a ValueError if ``model`` scores chains (or ``trees``) over slots unlike its own steps."""
    if model.training:  # dropout: no two forwards agree
        return
    _check_shape(model, "chain", static)
    if trees:
        _check_shape(model, "tree", static)


@tried_once
def _check_shape(model: PreTrainedModel, name: str, static: bool) -> None:
    cure = "use a chain (tree=None)" if name == "tree" else "generate without `speculator`"
    if static:
        cure += ", or leave the cache dynamic"
    if model.config.get_text_config(decoder=True)._attn_implementation not in ("sdpa", "eager"):
        cure += ", or load it with attn_implementation='sdpa'"
    if (adapter := adapter_of_inputs(model)) is not None:
        cure += f"; its inputs are prepared by {adapter}, which may not know this version of transformers"
    try:
        apart = difference_from_plain(model, TREE if name == "tree" else CHAIN, static)
    except Exception as error:  # whatever an unforeseen architecture makes of a ragged block
        why = in_short(error)
        if is_compiled(model):
            cure += ", or without torch.compile as one graph (fullgraph=True) around the model, which knows no blocks"
        raise ValueError(f"{type(model).__name__} cannot score a {name} of guesses ({why}); {cure}.") from error
    if not apart <= _tolerance(model):  # nan is refused too
        raise ValueError(
            f"{type(model).__name__} scores a {name} of guesses differently from single steps "
            f"(by {apart:.2g} of its logits' spread), so the text would not be plain generate's; {cure}."
        )


def reads_prompts_causally(model: PreTrainedModel) -> bool:
    """Tell whether the end of a prompt says the same when guesses are read with it; measured once.

    Prefix language models (PaliGemma) let a whole prompt look at all of itself.
    """
    return not model.training and _reads_prompts_causally(model)


@tried_once
def _reads_prompts_causally(model: PreTrainedModel) -> bool:
    prompt, guesses = _prompt(model)[0][:1].tensor_split([PROMPT // 2], dim=1)
    seen, chain = torch.ones_like(prompt), Proposal.chain(prompt[:, -1], guesses)
    alone = ModelRunner(model).prefill_tokens(prompt, seen)
    kwargs = prompt_kwargs(model, prompt, seen)
    together = ModelRunner(model).prefill_guessing(prompt, GenerationConfig(), kwargs, chain)
    assert alone is not None
    return bool(difference(together.logits[:, 0], alone.logits[:, 0]).max() <= _tolerance(model))


class _Read(NamedTuple):
    """What a row read along one path of the block: ``following`` comes after its prompt, and ``logits`` (path,
    vocabulary) are the block's own from token ``start`` of that on."""

    prompt: Tensor
    mask: Tensor
    following: Tensor
    start: int
    logits: Tensor


@torch.no_grad()
def difference_from_plain(model: PreTrainedModel, shape: _Shape, static: bool = False) -> float:
    """Score a block of two rows of different lengths, or one if the model takes no more, and compare it with plain
    steps along every path.

    The difference in logits is the worst one of a path: of all paths in float32, of the median path in half precision,
    where a mixture of experts may route one token otherwise. Some models of transformers read a padded row unlike the
    same row alone (Git): then the row alone is what counts.
    """
    reads = _read_block(model, shape, static)
    together = _difference(model, reads, _plain(model, reads))
    if together <= _tolerance(model):
        return together
    alone = [read._replace(prompt=read.prompt[read.mask > 0], mask=read.mask[read.mask > 0]) for read in reads]
    return min(together, _difference(model, reads, torch.cat([_plain(model, [read]) for read in alone])))


def _read_block(model: PreTrainedModel, shape: _Shape, static: bool) -> list[_Read]:
    """Let the rows advance differently in one block and read another one, both of this ``shape``."""
    ids, mask = _prompt(model)
    is_chain = shape == CHAIN
    cache = new_static_cache(model, CACHE_LENGTH) if static else new_cache(model)
    runner = runner_for(model, cache, one_chain=is_chain)
    runner.prefill_tokens(ids, mask, cache)
    parents = torch.tensor([shape.parents for _ in ids], device=ids.device)  # (rows, nodes)
    first = Proposal(ids[:, 1 : 1 + parents.shape[1]], parents, len(shape.parents), is_chain=is_chain)
    second = Proposal(first.tokens.flip(0, 1), parents, len(shape.parents), is_chain=is_chain)
    runner.score(first)
    kept = [shape.kept, (0,)][: len(ids)]
    path = torch.tensor([shape.kept, (0, 0)], device=ids.device)[: len(ids)]
    runner.commit(path, [len(nodes) for nodes in kept])
    logits = runner.score(second).logits.float()  # (rows, nodes, vocabulary)
    reads = []
    for leaf in sorted(set(range(len(shape.parents))) - set(shape.parents)):
        path = second.ancestors[0, leaf].nonzero()[:, 0]
        for row, nodes in enumerate(kept):
            following = torch.cat([first.tokens[row, list(nodes)], second.tokens[row, path]])
            # Equally long; the last is not compared.
            following = torch.nn.functional.pad(following, (0, len(shape.kept) - len(nodes)))
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
        differences.append(difference(read.logits, expected).max())
    found = torch.stack(differences)
    return float(found.max() if precision(model) == torch.float32 else found.median())


def _tolerance(model: PreTrainedModel) -> float:
    return TOLERANCE.get(precision(model), 1e-2)


def _prompt(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return two rows of low token ids, which are seldom special, the second one padded on the left; or the first."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = (torch.arange(2 * PROMPT, device=input_device(model)).view(2, PROMPT) * 7 % 31 + 11) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    count = 2 if why_one_row(model) is None else 1
    return ids[:count], mask[:count]
