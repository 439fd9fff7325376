"""Tensor- and pipeline-parallel processes: the first one decides whatever could differ between them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from .proposal import Proposal

T = TypeVar("T")


class ModelParallelGroup:
    """The processes that one model is split over by tensor or pipeline parallelism.

    Every process runs the complete loop on the same tokens. All must make the same forwards of the same widths, or
    they deadlock. Measured times and random numbers differ between processes. So the first process decides whatever
    depends on them, and broadcasts it. In a single process every method returns its argument.
    """

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._groups = [] if model is None else _groups(model)

    @property
    def is_alone(self) -> bool:
        """Tell whether no other process holds a part of the model."""
        return not self._groups

    def broadcast(self, value: T) -> T:
        """Return the ``value`` of the first process; it must be picklable and hold no tensor on an accelerator."""
        for group in self._groups:
            box = [value]
            dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
            value = box[0]
        return value

    def broadcast_proposal(self, proposal: Proposal) -> Proposal:
        """Return the proposal of the first process: a drafter may depend on measured times, or sample."""
        if not self._groups:
            return proposal
        device = proposal.tokens.device
        q_shape = None if proposal.q is None else proposal.q.shape
        fields = (proposal.max_depth, proposal.is_chain, proposal.shape, q_shape)
        deterministic = proposal.deterministic
        parts = [proposal.tokens, proposal.parents, *([] if deterministic is None else [deterministic.long()])]
        table = torch.stack(parts).cpu()  # (2 or 3, batch, nodes)
        table, (max_depth, is_chain, shape, q_shape) = self.broadcast((table, fields))
        q = None if q_shape is None else self._broadcast_tensor(proposal.q, q_shape, device)
        tokens, parents, *rest = table.to(device)
        return Proposal(tokens, parents, max_depth, q, is_chain, shape, rest[0].bool() if rest else None)

    def _broadcast_tensor(self, own: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the first process's float32 tensor, without pickling it: one distribution per node is large."""
        fits = own is not None and own.shape == shape
        tensor = own.contiguous() if fits and own is not None else torch.empty(shape, device=device)
        for group in self._groups:
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group)
        return tensor

    def share_random_numbers(self, device: torch.device) -> None:
        """Give every process the random state of the first one, on the CPU and on ``device``."""
        if not self._groups:
            return
        states = [torch.get_rng_state()]
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if module is not None:
            states.append(module.get_rng_state(device).cpu())
        states = self.broadcast(states)
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1], device)


def _groups(model: PreTrainedModel) -> list[Any]:
    """List the process groups of the mesh dimensions that ``model`` is split along.

    A broadcast in one after the other reaches all processes. Along other dimensions, such as FSDP's, every process
    has a batch of its own.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        return []
    if mesh.mesh_dim_names is None:
        return [mesh.get_group()] if mesh.size() > 1 else []
    return [mesh[name].get_group() for name in ("tp", "pp") if name in mesh.mesh_dim_names and mesh[name].size() > 1]
