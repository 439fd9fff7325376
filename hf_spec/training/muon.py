"""Train the matrices of a draft with Muon, which needs fewer steps than AdamW, and all the rest with AdamW.

Muon (Jordan, 2024; ``torch.optim.Muon``) takes steps of equal size in all directions of a matrix. Embeddings, output
layers, biases and norms do not map hidden states to hidden states, so AdamW trains them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..drafts.modeling import DraftModel
from ..scoring.adapters import base_model
from .arguments import DraftTrainingArguments


class Muon(torch.optim.Muon):
    """Muon whose products are float32's on a CPU.

    torch multiplies in bfloat16 everywhere. A processor without instructions for it took 16 times as long.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _one_step(weight, weight.grad, self.state[weight], group)
        return loss


def _one_step(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
    update = orthogonal(grad.lerp(average, group["momentum"]), group)
    rows, columns = weight.shape
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Move the singular values of ``matrix`` near 1, by Newton and Schulz's iteration."""
    a, b, c = group["ns_coefficients"]
    wide = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    wide = wide.T if len(matrix) > matrix.shape[1] else wide
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if len(matrix) > matrix.shape[1] else wide


class MuonAndAdamW(torch.optim.Optimizer):
    """Both optimizers with one schedule and one checkpoint; the first group of parameters is Muon's.

    An optimizer without parameters is omitted: adapters, for example, have only matrices.
    """

    def __init__(self, matrices: list[Tensor], others: list[Tensor], args: DraftTrainingArguments) -> None:
        betas = (args.adam_beta1, args.adam_beta2)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            rate = args.muon_learning_rate or 0.0
            self._parts.append(Muon(matrices, lr=rate, weight_decay=args.weight_decay))
        if others:
            rate = args.learning_rate
            self._parts.append(torch.optim.AdamW(others, rate, betas, args.adam_epsilon, weight_decay=0.0))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both optimizers use the groups and the state of this one, because only these are saved."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with each optimizer."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def factory(args: DraftTrainingArguments) -> tuple[Callable[[], Callable[[nn.Module], MuonAndAdamW]], dict[str, Any]]:
    """Return what ``Trainer`` takes as ``optimizer_cls_and_kwargs``."""
    return lambda: functools.partial(_made_for, args), {}


def _made_for(args: DraftTrainingArguments, draft: Any) -> MuonAndAdamW:
    learning = [weight for weight in draft.parameters() if weight.requires_grad]
    matrices = {id(weight) for weight in inner_matrices(draft)}
    return MuonAndAdamW(
        [weight for weight in learning if id(weight) in matrices],
        [weight for weight in learning if id(weight) not in matrices],
        args,
    )


def inner_matrices(draft: Any) -> list[Tensor]:
    """List the trained matrices of ``draft``'s linear layers, except those that output a vocabulary or one number.

    The draft names its output layers, because other layers may happen to have the width of a vocabulary.
    """
    inside = base_model(draft)
    heads = [inside.get_output_embeddings()]
    if isinstance(inside, DraftModel):
        heads = inside.trained_heads
    within = {module for head in heads if head is not None for module in head.modules()}  # includes their adapters
    config = inside.config
    sizes = {getattr(config, "layers", config.get_text_config()).vocab_size, getattr(config, "draft_vocab_size", None)}
    linear = [module for module in draft.modules() if isinstance(module, nn.Linear)]
    inner = [one.weight for one in linear if not (one in within and len(one.weight) in sizes)]
    return [weight for weight in inner if weight.requires_grad and len(weight) > 1]
