"""Processes that hold a model among them: two models of two each, and the first process of the second has rank 2."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from groups import forked
from torch.distributed.device_mesh import init_device_mesh

from hf_spec import Proposal
from hf_spec.parallel import ModelParallelGroup
from hf_spec.proposal import NO_PARENT, PAD_NODE


def proposal_of(rank: int, kind: str) -> Proposal:
    """Guess what, and as many tokens as, one process's own random numbers say."""
    torch.manual_seed(rank)
    tokens = torch.randint(50, (2, 3 + rank))
    if kind == "nothing":
        return Proposal.nothing(tokens[:, 0])
    if kind == "chain":
        return Proposal.path(tokens, torch.tensor([2 + rank, 1]))
    if kind == "drawn":
        return Proposal.path(tokens, None, torch.rand(2, 2 + rank, 50).softmax(-1))
    shape = (NO_PARENT, 0, 0, *[1] * rank)
    parents = torch.tensor([[*shape], [NO_PARENT, 0, *[PAD_NODE] * (1 + rank)]])
    q, chosen = torch.rand(2, 2, 50).softmax(-1), torch.rand(tokens.shape) < 0.5
    return Proposal(tokens, parents, 2, q, shape=shape, deterministic=chosen)


def told(proposal: Proposal) -> list[Any]:
    tensors = (proposal.tokens, proposal.parents, proposal.q, proposal.deterministic)
    return [None if one is None else one.tolist() for one in tensors] + [
        proposal.max_depth,
        proposal.is_chain,
        proposal.shape,
    ]


def work(rank: int, folder: str) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks: Any = ModelParallelGroup(SimpleNamespace(_device_mesh=mesh))  # type: ignore[arg-type]
    first = rank // 2 * 2
    assert not ranks.is_alone and ranks.broadcast(f"of {rank}") == f"of {first}"
    for kind in ("nothing", "chain", "drawn", "mixed"):
        assert told(ranks.broadcast_proposal(proposal_of(rank, kind))) == told(proposal_of(first, kind)), kind
    torch.manual_seed(rank)
    ranks.share_random_numbers(torch.device("cpu"))
    drawn = torch.rand(3)
    torch.manual_seed(first)
    assert torch.equal(drawn, torch.rand(3))
    dist.barrier()
    os._exit(0)  # threads of gloo race with the end of the interpreter


def test_the_first_process_of_each_model_decides(tmp_path: Path) -> None:
    processes = [forked(work, rank, str(tmp_path)) for rank in range(4)]
    for process in processes:
        process.join(80)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_process_by_itself_asks_nobody() -> None:
    ranks, proposal = ModelParallelGroup(), proposal_of(1, "mixed")
    assert ranks.is_alone and ranks.broadcast("text") == "text"
    assert ranks.broadcast_proposal(proposal) is proposal
