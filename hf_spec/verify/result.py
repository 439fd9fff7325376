"""The result of verification on the device, and the one table in which the host reads it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..device_tensors import cached_arange
from ..proposal import PAD_NODE, Proposal


@dataclass(frozen=True)
class VerificationResult:
    """The accepted path and the emitted tokens of every sequence, on the device.

    ``path`` (batch, max_depth + 1) are the accepted nodes, the root first; columns beyond them repeat the last one.
    ``tokens`` (batch, max_depth + 1): ``tokens[:, j]`` is the token emitted after node ``path[:, j]``. ``counts``
    (batch,) of them count: the accepted draft tokens and one more token; columns beyond repeat that one.
    """

    path: Tensor
    tokens: Tensor
    counts: Tensor


def emit_path(proposal: Proposal, node: Tensor, emitted: Tensor) -> VerificationResult:
    """Accept the path to ``node`` (batch,), and emit its draft tokens followed by ``emitted`` (batch,)."""
    path, accepted = path_to(proposal, node)
    following = proposal.tokens[:, 1:] if proposal.is_chain else proposal.tokens.gather(1, path[:, 1:])
    steps = cached_arange(path.shape[1], path.device)
    tokens = torch.cat([following, emitted[:, None]], dim=1)
    return VerificationResult(path, torch.where(steps < accepted[:, None], tokens, emitted[:, None]), accepted + 1)


def path_to(proposal: Proposal, node: Tensor) -> tuple[Tensor, Tensor]:
    """Return the path to ``node`` (batch,), (batch, max_depth + 1), and how many of its nodes are draft tokens."""
    width = proposal.max_depth + 1
    if proposal.is_chain:
        return cached_arange(width, node.device).minimum(node[:, None]), node
    nodes = proposal.tokens.shape[1]
    row, number = cached_arange(len(node), node.device), cached_arange(nodes, node.device)
    leads_there = proposal.ancestors[row, node]  # (batch, nodes)
    path = torch.where(leads_there, number, nodes).sort(dim=1).values[:, :width].minimum(node[:, None])
    return path, leads_there.sum(1) - 1


def deepest_node(proposal: Proposal, wrong: Tensor) -> Tensor:
    """Return the deepest node (batch,) with no ``wrong`` (batch, nodes) one on its path; the root is never wrong."""
    blocked = (proposal.ancestors[:, :, 1:] & wrong[:, None, 1:]).any(2)
    return proposal.depth.masked_fill(blocked, -1).argmax(1)


class HostResult(NamedTuple):
    """What the host has to know of a result.

    For each sequence: the emitted ``tokens``, the accepted nodes of its ``path``, the draft tokens that were
    ``proposed``, and the length of the ``longest`` proposed path. For all of them: whether the logits ``are_finite``,
    and whether the accepted nodes are 0, 1, 2, ... (``in_place``).
    """

    tokens: list[list[int]]
    path: list[list[int]]
    proposed: list[int]
    longest: list[int]
    are_finite: bool
    in_place: bool


def result_table(proposal: Proposal, result: VerificationResult, finite: Tensor | None) -> Tensor:
    """Put what ``read_table`` reads into one tensor (batch, columns), so that the device is asked once a step::

        counts │ tokens ... │ finite ... │ parents ...            │ path ... depth ...
        1      │ steps      │ nodes      │ unless all are present │ trees alone

    ``finite`` (batch, nodes) tells where the logits hold no nan and no inf; ``None`` where there is no draft token to
    blame. Then the table holds the tokens alone.
    """
    if finite is None:
        return result.tokens
    parts = [result.counts[:, None], result.tokens, finite]
    if not proposal.is_unpadded:
        parts.append(proposal.parents)
    if not proposal.is_chain:
        parts += [result.path, proposal.depth]
    return torch.cat(parts, dim=1)


def read_table(proposal: Proposal, result: VerificationResult, table: Tensor) -> HostResult:
    """Move the ``table`` of a result to the host, and read it."""
    if proposal.max_depth == 0:
        none = [0] * table.shape[0]
        return HostResult(table.tolist(), [[0]] * table.shape[0], none, none, are_finite=True, in_place=True)
    nodes, steps = proposal.tokens.shape[1], result.tokens.shape[1]
    widths = [1, steps, nodes] + [nodes] * (not proposal.is_unpadded) + [steps, nodes] * (not proposal.is_chain)
    ends = list(itertools.accumulate(widths))
    slices = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
    rows = [_read_row(proposal, [row[part] for part in slices]) for row in table.tolist()]
    tokens, path, proposed, longest, finite, in_place = map(list, zip(*rows, strict=True))
    return HostResult(tokens, path, proposed, longest, all(finite), all(in_place))


def _read_row(proposal: Proposal, parts: list[list[int]]) -> tuple[list[int], list[int], int, int, bool, bool]:
    [count], tokens, finite, *parts = parts
    present = [parent != PAD_NODE for parent in parts.pop(0)] if not proposal.is_unpadded else [True] * len(finite)
    path, depth = (list(range(len(tokens))), list(range(len(finite)))) if proposal.is_chain else parts
    return (
        tokens[:count],
        path[:count],
        sum(present) - 1,
        max(itertools.compress(depth, present)),
        all(itertools.compress(finite, present)),
        path[:count] == list(range(count)),
    )
