"""Medusa heads (arXiv 2401.10774): several draft tokens at once from the target's last hidden state.

From the hidden state at token t the target predicts token t + 1, the root. Head i predicts token t + 2 + i from the
same state. All heads run at once, so none depends on the draft tokens of the ones before it::

    state at t ─┬─ target's own head   t + 1   root
                ├─ head 0              t + 2   depth 1
                └─ head 1              t + 3   depth 2, the same distribution after every draft token of depth 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers import initialization as init

from ...policy.cost import ModelShape, shape_of
from ...proposal import Proposal
from ..base import AcceptedTokens, DraftContext, Drafter, DraftOutput, draft_log_probs
from ..files import Checkpoint
from ..modeling import DraftModel, only_one
from ..static import PutBuffer, StaticDrafter
from ..trees import PreparedDraft, grow_at_once
from .configuration import MedusaSpeculatorConfig
from .formats import FORMATS, unserved

if TYPE_CHECKING:
    from ...unroll.feedback import Unrolled, UnrollInput

# How many children each node has in "mc_sim_7b_63", the shape published with the heads for Vicuna 7B: the node "01" is
# the second-best token of head 1 after the best one of head 0. Data of FasterDecoding/Medusa (Apache-2.0).
_CHILDREN = {"": 10, "0": 10, "1": 7, "2": 3, "3": 2, **dict.fromkeys("456789", 1)}
_CHILDREN |= {"00": 10, "01": 3, "02": 2, **dict.fromkeys(("03", "04", "05", "06", "07"), 1), "10": 2, "20": 1}
_CHILDREN |= {"000": 2}
MEDUSA_TREE = [(*map(int, node), rank) for node, children in _CHILDREN.items() for rank in range(children)]


class ResidualBlock(nn.Module):
    """A residual block x + silu(W x + b): the identity before training, when W and b are zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + functional.silu(self.linear(hidden))


class MedusaDrafter(StaticDrafter):
    """A drafter without state: the distribution after a node depends only on its depth."""

    attends = False

    def __init__(self, draft: MedusaDraftModel, request: DraftContext, static: bool = False) -> None:
        self._draft = draft
        self._request = request.without_features
        self.deepest = len(draft.heads)

    def grow_proposal(self, accepted: AcceptedTokens, limit: int, prepared: PreparedDraft | None = None) -> Proposal:
        assert accepted.features is not None
        logits = self._draft(features=accepted.last(accepted.features)).logits[:, 0]
        log_probs = draft_log_probs(self._draft, self._request, logits)  # (batch, heads, vocabulary) by depth
        return grow_at_once(accepted.root, log_probs, self._request.config, limit, self._request.sample, prepared)

    def read(self, accepted: AcceptedTokens) -> None:
        """Do nothing: only the last state counts."""

    def make_room(self, columns: int) -> bool:
        """Return False: there is no cache."""
        return False

    def move(self, put: PutBuffer) -> None:
        """Do nothing: there is no buffer."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep ``rows`` only: there is no state per row."""

    def join(self, other: Drafter) -> bool:
        """Append the rows of ``other``: there is no state per row."""
        return True


class MedusaDraftModel(DraftModel):
    """Medusa heads. New ones that end in the target's head all predict the root, as the target does."""

    config_class = MedusaSpeculatorConfig
    drafter_class = MedusaDrafter
    formats = FORMATS
    _no_split_modules = ["ResidualBlock"]  # noqa: RUF012

    def __init__(self, config: MedusaSpeculatorConfig) -> None:
        super().__init__(config, config.draft_vocab_size or config.vocab_size or 0)
        self.post_init()

    def _add_ends(self, layers: Any, draft_vocab_size: int) -> None:
        config: MedusaSpeculatorConfig = self.config
        self.embed_tokens = self.lm_head = None
        self.heads = nn.ModuleList()
        for _ in range(config.num_heads):
            head = nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_hidden_layers)))
            if not config.shared_with_target:
                head.append(nn.Linear(config.hidden_size, draft_vocab_size, bias=False))
            self.heads.append(head)

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List one forward: all heads together have about as many operators as a layer."""
        shapes = [ModelShape(1, shape_of(self).parameters)]
        return lambda length: shapes * min(length, 1)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # transformers skips modules without weights of their own, such as the block around this one.
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.weight)

    @property
    def output_layers(self) -> list[nn.Module]:
        """Return the last layer of each head; none if the heads end in the target's."""
        return [] if self.config.shared_with_target else [head[-1] for head in self.heads]  # type: ignore[index]

    def forward(
        self,
        input_ids: Tensor | None = None,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> DraftOutput:
        """Run all heads on ``features`` (batch, length, hidden), the only input that they read.

        The ``logits`` are (batch, length, heads, draft vocabulary). Nothing is fed back.
        """
        state = only_one(features, hidden_states)[:, -logits_to_keep:]
        ends = torch.stack([head(state) for head in self.heads], dim=2)  # (batch, length, heads, hidden or vocabulary)
        return DraftOutput(self.logits(ends) if self.config.shared_with_target else ends)

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Read ``hidden_states[-1]``, the one after the final norm."""
        return (-1,)

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        return unserved()

    def keep_borrowed(self) -> None:
        """Refuse: the heads end in the target's layer or in their own from the start."""
        raise ValueError("Medusa heads that end in the target's output layer have no place for one of their own")

    def unroll(self, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
        """Run every head on the same states: head k is step k, and nothing is fed back."""
        from ...unroll.feedback import Unrolled

        assert given.features is not None  # the trainer reads the layers that the draft names
        features = given.features[:, :-1].to(self.dtype)
        layers = self.output_layers
        if not layers:
            return Unrolled([head(features) for head in self.heads], lambda step, states: self.logits(states), [], [])
        states = [cast(nn.Sequential, head)[:-1](features) for head in self.heads]
        return Unrolled(states, lambda step, states: cast(Tensor, layers[step](states)), self.trained_parameters, [])

    def unroll_steps(self, wanted: int) -> int:
        """Return the number of heads: each is a step, and all are trained together."""
        return len(self.heads)
