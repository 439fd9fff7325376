"""Self-check: compare a small ragged block with plain steps before a target is run over slots and trees.

Architectures differ in masks, positions and caches in ways that nobody can list. An error of the slot layout shows in
the logits at once, but often not in the tokens for a long time. So logits are compared.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..proposal import Proposal
from .adapters import adapter_of_inputs
from .changes import foreign_hooks
from .factory import runner_for
from .graphs import is_compiled
from .names import cache_among
from .plain import coarsest_precision, compute_dtypes, difference, logits_of_ways, prompt_kwargs
from .prompts import PROMPT_TOKENS, Prompt, tokens_for
from .runner import ModelRunner
from .trials import ExplainedError, in_evaluation, in_short, tried_once


class _Shape(NamedTuple):
    """A shape of proposal to try: the parents of its nodes, and the nodes that the first row commits.

    The second proposal has the same shape, or, ``then_plain``, the root alone.
    """

    parents: tuple[int, ...]
    kept: tuple[int, ...]
    then_plain: bool = False

    @property
    def leaves(self) -> list[int]:
        """List the leaf nodes of the second proposal."""
        return [0] if self.then_plain else sorted(set(range(len(self.parents))) - set(self.parents))


# The first row commits the root and a child, the others the root only: so the rows advance differently.
CHAIN = _Shape(parents=(-1, 0, 1, 2), kept=(0, 1))
TREE = _Shape(parents=(-1, 0, 0, 1, 2, 2), kept=(0, 2))  # the second of two children: its slots have to move
STEP = CHAIN._replace(then_plain=True)
SHAPES = {"chain": CHAIN, "tree": TREE, "plain step after a chain": STEP}
# Largest difference that may be due to rounding in any model, as a share of the logits' spread.
CHECK_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.25}
# In half precision the limit is lower if two plain readings of the same tokens differ less: TIMES_APART times their
# difference, but at least LEAST.
TIMES_APART = 4
ROUNDING_FLOOR = {torch.float16: 0.03, torch.bfloat16: 0.1}
TRIES = 3  # tries with other tokens in half precision, where rounding may route a token to other experts


def check_target(model: PreTrainedModel, trees: bool, static: bool = False, prompt: Prompt | None = None) -> None:
    """Raise a ValueError if ``model`` scores chains (and ``trees``) over slots differently from its plain steps.

    ``prompt``: the inputs of the call's prefill, if they are more than text; see ``Prompt.of_call``.
    """
    shapes = ["chain"]
    if model.config.is_encoder_decoder:  # they have masks and biases of their own for a single token
        shapes.append("plain step after a chain")
    if trees:
        shapes.append("tree")
    with in_evaluation(model):
        for name in shapes:
            _check_shape(model, name, static, prompt)


@tried_once
def _check_shape(model: PreTrainedModel, name: str, static: bool, prompt: Prompt | None) -> None:
    if prompt is None:
        reason = _why_not_text(model, name, static, str(model.device), frozenset(_computes_in(model)))
    else:  # images and sources of another call may be read without a difference
        reason = _why_apart(model, name, static, prompt)
    if reason is not None:
        raise ValueError(reason)


@tried_once
def _why_not_text(model: PreTrainedModel, name: str, static: bool, *way: Hashable) -> str | None:
    """Remember what ``_why_apart`` says of text: a default speculator asks in every call. Another ``way`` may do."""
    return _why_apart(model, name, static, None)


def _why_apart(model: PreTrainedModel, name: str, static: bool, prompt: Prompt | None) -> str | None:
    """Say why ``model`` cannot score a shape, if its scores differ. What may not come again is raised."""
    cure = "use a chain (tree=None)" if name == "tree" else "generate without `speculator`"
    if static:
        cure += ", or leave the cache dynamic"
    if model.config.get_text_config(decoder=True)._attn_implementation not in ("sdpa", "eager"):
        cure += ", or load it with attn_implementation='sdpa'"
    if (adapter := adapter_of_inputs(model)) is not None:
        cure += f"; its inputs are prepared by {adapter}, which may not know this version of transformers"
    if hooks := foreign_hooks(model):
        cure += f"; it has hooks of others, which may treat several tokens unlike one ({hooks[0]})"
    if _is_quantized(model) and torch.float32 in _computes_in(model):
        cure += (
            "; its quantised weights are multiplied in float32: try bfloat16 compute (dtype=torch.bfloat16, and for "
            "bitsandbytes bnb_4bit_compute_dtype=torch.bfloat16)"
        )
    apart: float | None = None
    try:
        apart, most = difference_from_plain(model, SHAPES[name], static, prompt)
    except ExplainedError:
        raise
    except torch.OutOfMemoryError:  # which tells nothing of the model
        most = 0.0
    except Exception as error:  # whatever an unforeseen architecture makes of a ragged block
        if is_compiled(model):
            cure += ", or without torch.compile as one graph (fullgraph=True) around the model, which knows no blocks"
        raise ValueError(f"{_why_not_scored(model, name, static, prompt, error)}; {cure}.") from error
    if apart is None:  # out here, where the error holds no memory any more
        raise ExplainedError(
            f"there is too little memory to compare {type(model).__name__} with its single steps; pass fewer rows, or "
            "SpeculationConfig(self_check=False)"
        )
    if apart <= most:
        return None
    reason = (
        f"{type(model).__name__} scores a {name} of draft tokens differently from single steps "
        f"(by {apart:.2g} of its logits' spread), so the text would not be plain generate's; {cure}."
    )
    if math.isnan(apart):  # of these weights, and others may be loaded
        raise ValueError(reason)
    return reason


def _is_quantized(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` was loaded with quantised weights, or has had modules with such weights put in."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    return any(type(one).__module__.startswith("bitsandbytes") for one in model.modules())


def _computes_in(model: PreTrainedModel) -> set[torch.dtype]:
    """Return the dtypes of matrix products; modules with packed weights name their own."""
    return compute_dtypes(model) or {model.dtype}


def _why_not_scored(model: PreTrainedModel, shape: str, static: bool, prompt: Prompt | None, error: Exception) -> str:
    """Say what raised ``error``: the block only, or plain steps as well, because of what they are given."""
    name, given = type(model).__name__, "text alone"
    if prompt is not None:
        given = f"the {', '.join(prompt.extra)} of this call"
    try:
        start = Prompt.of_text(model) if prompt is None else prompt
        _plain(model, start, [tokens_for(model, len(start.ids), 1).to(start.ids.device)], static)
    except Exception as own:  # any error of a model that gets too few inputs
        return f"{name} cannot be compared with its own plain steps, which fail with {given} ({in_short(own)})"
    with_what = f" with {given}" if prompt is not None else ""
    return f"{name} cannot score a {shape} of draft tokens{with_what} ({in_short(error)})"


def reads_prompts_causally(model: PreTrainedModel) -> bool:
    """Tell whether a prompt's last logits are the same when draft tokens are read with it; measured once.

    They differ in prefix language models (PaliGemma), where every token of a prompt sees the complete prompt.
    """
    return not model.training and _reads_prompts_causally(model)


@tried_once
def _reads_prompts_causally(model: PreTrainedModel) -> bool:
    prompt, rest = tokens_for(model, 1, PROMPT_TOKENS).tensor_split([PROMPT_TOKENS // 2], dim=1)
    seen, chain = torch.ones_like(prompt), Proposal.chain(prompt[:, -1], rest)
    alone = ModelRunner(model).prefill_tokens(prompt, seen)
    kwargs = prompt_kwargs(model, prompt, seen)
    together = ModelRunner(model).prefill_with_draft_tokens(prompt, GenerationConfig(), kwargs, chain)
    assert alone is not None
    return bool(difference(together.logits[:, 0], alone.logits[:, 0]).max() <= _most(model))


class _Read(NamedTuple):
    """What the rows read along one path of the block.

    ``following`` (rows, tokens) are the tokens after their prompts. ``logits``, one (path, vocabulary) for each row,
    are the block's, from token ``starts[row]`` of ``following`` on.
    """

    following: Tensor
    starts: list[int]
    logits: Tensor

    def apart(self, row: int, whole: Tensor) -> Tensor:
        """Return the largest difference of a row from ``whole`` (tokens, vocabulary), its logits of all tokens."""
        start = self.starts[row]
        return difference(self.logits[row], whole[start : start + self.logits.shape[1]]).amax()


@torch.no_grad()
def difference_from_plain(
    model: PreTrainedModel, shape: _Shape, static: bool = False, prompt: Prompt | None = None
) -> tuple[float, float]:
    """Compare a block over rows of different lengths with plain steps, along every path of every row.

    The rows are two of text or those of a call. Returns the difference in logits of the worst path and row, and the
    largest one that may be due to rounding. In half precision a path that differs too much is tried again with other
    tokens, and its smallest difference counts. Rounding may route one token to other experts, but an error shows with
    any tokens.
    """
    draws = TRIES if coarsest_precision(model) in ROUNDING_FLOOR else 1
    apart, most = _differences(model, shape, static, prompt, 0)
    for draw in range(1, draws):
        if bool((apart <= most).all()):
            break
        again, at_most = _differences(model, shape, static, prompt, draw)
        apart, most = torch.fmin(apart, again), max(most, at_most)
    return float(apart.max()), most


def _differences(
    model: PreTrainedModel, shape: _Shape, static: bool, given: Prompt | None, draw: int
) -> tuple[Tensor, float]:
    """Return the differences (paths, rows), and the largest one that may be due to rounding.

    Some models of transformers read a padded row differently from the same row alone (Git). Then the block may agree
    with either.
    """
    prompt = Prompt.of_text(model, draw) if given is None else given
    reads = _read_block(model, shape, static, prompt, draw)
    in_half = coarsest_precision(model) in ROUNDING_FLOOR
    followings, at_once = [read.following for read in reads], [False, True] if in_half else [False]
    steps, *again = _plain(model, prompt, followings, static, at_once)
    apart, most = _apart(reads, steps), _most(model)
    for others in again:
        rounding = max(float(difference(one, other).max()) for one, other in zip(others, steps, strict=True))
        most = min(most, max(TIMES_APART * rounding, ROUNDING_FLOOR[coarsest_precision(model)]))
    if bool((apart <= most).all()):
        return apart, most
    return torch.fmin(apart, _apart_alone(model, prompt, reads, static)), most


def _read_block(model: PreTrainedModel, shape: _Shape, static: bool, prompt: Prompt, draw: int) -> list[_Read]:
    """Score a block, commit different numbers of nodes per row, and score a second block of the same ``shape``."""
    rows, is_chain = len(prompt.ids), shape != TREE
    kwargs = prompt.handed(model, static)
    runner = runner_for(model, cache_among(kwargs), one_chain=is_chain)
    runner.prefill(prompt.ids, GenerationConfig(disable_compile=True), kwargs)
    parents = torch.tensor([shape.parents] * rows, device=runner.slots.device)  # (rows, nodes)
    tokens = tokens_for(model, rows, parents.shape[1], draw + 1).to(parents.device)
    first = Proposal(tokens, parents, len(shape.parents), is_chain=is_chain)
    second = Proposal(tokens.flip(0, 1), parents, len(shape.parents), is_chain=is_chain)
    if shape.then_plain:
        second = Proposal.nothing(second.root)
    runner.score(first)
    kept = [shape.kept if row == 0 else (0,) for row in range(rows)]
    nodes = torch.tensor([shape.kept if row == 0 else (0, 0) for row in range(rows)], device=parents.device)
    runner.commit(nodes, list(map(len, kept)))
    logits = runner.score(second).logits.float()  # (rows, nodes, vocabulary)
    reads = []
    for leaf in shape.leaves:
        path = second.ancestors[0, leaf].nonzero()[:, 0]
        following = [
            # Padded to equal lengths; the padding is not compared.
            torch.nn.functional.pad(
                torch.cat([first.tokens[row, list(own)], second.tokens[row, path]]), (0, 2 - len(own))
            )
            for row, own in enumerate(kept)
        ]
        reads.append(_Read(torch.stack(following), list(map(len, kept)), logits[:, path]))
    return reads


def _plain(
    model: PreTrainedModel,
    prompt: Prompt,
    followings: Sequence[Tensor],
    static: bool,
    at_once: Sequence[bool] = (False,),
) -> list[list[Tensor]]:
    """Score each of ``followings`` of the prompt as plain ``generate`` does: (rows, tokens, vocabulary) each.

    ``at_once`` False reads token by token, True in one forward as the rest of a prompt; each gets a list of its own.
    Over a ``static`` cache some models read a prompt differently (PaliGemma).
    """
    if prompt.extra:  # these arguments cannot be repeated: it is not known which rows they belong to
        texts, rows = list(followings), prompt
    else:
        texts, rows = [torch.cat(list(followings))], prompt.repeated(model, len(followings))
    ways = [text.split(text.shape[1] if whole else 1, dim=1) for whole in at_once for text in texts]
    scored = torch.cat(logits_of_ways(model, rows.ids, rows.handed(model, static), ways)).float()
    parts = scored.split(len(prompt.ids))
    return [list(parts[first : first + len(followings)]) for first in range(0, len(parts), len(followings))]


def _apart(reads: Sequence[_Read], plain: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [
            torch.stack([read.apart(row, own) for row, own in enumerate(rows)])
            for read, rows in zip(reads, plain, strict=True)
        ]
    )


def _apart_alone(model: PreTrainedModel, prompt: Prompt, reads: Sequence[_Read], static: bool) -> Tensor:
    """Return the differences (paths, rows) from plain steps of each row alone; inf where it cannot be separated."""
    nowhere = reads[0].logits.new_full((), float("inf"))
    apart: list[list[Tensor]] = [[] for _ in reads]
    for row in range(len(prompt.ids)):
        alone = prompt.alone(model, row)
        for read, found in zip(reads, apart, strict=True):
            if alone is None:
                found.append(nowhere)
            else:
                found.append(read.apart(row, _plain(model, alone, [read.following[row : row + 1]], static)[0][0][0]))
    return torch.stack([torch.stack(found) for found in apart])


def _most(model: PreTrainedModel) -> float:
    return CHECK_TOLERANCE.get(coarsest_precision(model), 1e-2)
