"""Draft with one of Gemma 4's assistants: a small model of transformers that reads the keys of its target.

Each layer of an assistant has queries only. It attends to what the last target layer of its kind (sliding or full)
that computes keys of its own has cached. So nothing is read for a prompt, and nothing has to be rolled back::

    keys of the target   k0 k1 k2 k3 │                            text x0 ... x3, root x4 at position 4
    step 1               E(x4) | h3  → a, s1                      h: the target's last state, after its final norm
    step 2               E(a)  | s1  → b, s2                      s: the assistant's own states
    step 3               E(b)  | s2  → c, s3                      E: the target's embeddings

All steps ask at the root's position, over the same keys. transformers' own loop also shows the key of the draft token
that was rejected there, which is another text's. Here only committed tokens are seen.

No paper; source: ai.google.dev/gemma/docs/mtp, and transformers' ``Gemma4AssistantForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedConfig, PreTrainedModel

from ...parallel import ModelParallelGroup
from ...proposal import Proposal
from ...scoring.architectures import arguments_of
from ...scoring.plain import input_device, scored_vocabulary
from ...settings import SpeculationConfig
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator, draft_log_probs
from ..static import as_mask, not_compiled, why_not_static
from ..trees import grow

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class Gemma4AssistantSpeculator(Speculator):
    """Draft with ``model``, a ``Gemma4AssistantForCausalLM`` or a ``Gemma4UnifiedAssistantForCausalLM``.

    It may sit on another device or in another dtype than the target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        # Newer versions of transformers cut the nodes that come without logits, and fail if there are several.
        self._all_nodes = {"logits_to_keep": None} if "logits_to_keep" in arguments_of(self.model.model) else {}

    def feature_layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        return (-1,)  # the last state, after the final norm

    @property
    def reads_target_keys(self) -> bool:
        """Tell that drafters read ``DraftContext.target_keys``: always."""
        return True

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether chains end where ``DraftContext.keep_drafting`` says so: on a CPU, where looking is free."""
        return input_device(self.model).type == "cpu"

    def defaults(self) -> SpeculationConfig:
        """Return the number of draft tokens that the assistant's generation config names."""
        return SpeculationConfig(num_speculative_tokens=self.model.generation_config.num_assistant_tokens)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError if the assistant's layers cannot read the keys of ``target``."""
        name, other = type(self.model).__name__, type(target).__name__
        text = target.config.get_text_config(decoder=True)
        own: Any = self.model.config.get_text_config()
        sizes = {
            "hidden states of width": (self.model.config.backbone_hidden_size, text.hidden_size),
            "a vocabulary of": (own.vocab_size, scored_vocabulary(target)),
        }
        for kind, layer in _first_of_kind(own).items():
            source = keys_of_kind(text).get(kind)
            if source is None:
                raise ValueError(
                    f"the draft {name} reads keys of layers of kind {kind!r}, and {other} has none that compute keys: "
                    "use the target that the draft was made for"
                )
            theirs = _heads(text, source)
            sizes |= {f"{what} in {kind} layers": (one, theirs[what]) for what, one in _heads(own, layer).items()}
        for what, (wanted, given) in sizes.items():
            if wanted != given:
                raise ValueError(
                    f"the draft {name} was made for a target with {what} {wanted}, and {other} has {given}: use the "
                    "target that the draft was made for"
                )
        if not ModelParallelGroup(target).is_alone:
            raise ValueError(
                f"the keys of {other} are spread over several processes, and {name} needs all of them: load the "
                "target without a tensor or pipeline plan, or use another draft"
            )
        if "position_ids" not in arguments_of(target):
            raise ValueError(f"{other} takes no position_ids, and {name} needs the position of the next token")
        if (reason := why_not_static(self.model.model.config)) is not None:
            raise ValueError(f"the draft {name} cannot be given our masks: {reason}. Load it with 'sdpa'")

    def over_target(self, logits: Tensor) -> Tensor:
        """Return the logits: the vocabulary is the target's."""
        return logits

    def drafter(self, request: DraftContext) -> Drafter:
        """Start a drafter, which keeps nothing.

        Errors: a ValueError where the target's keys cannot be read.
        """
        if request.target_keys is None:
            raise ValueError(
                f"{type(self.model).__name__} reads the keys and values of the target, which are not at hand here "
                "(continuous batching keeps them in pages): use generate(..., speculator=...)"
            )
        if request.compiler is not None:
            not_compiled(self.model, "it reads the target's keys, whose number grows")
        return Gemma4AssistantDrafter(self, request)

    def step(self, embeds: Tensor, states: Tensor, seen: TextSeen) -> tuple[Tensor, Tensor]:
        """Read nodes, and return logits (rows, nodes, vocabulary) and the states that their children are given.

        ``embeds`` are those of the target, ``states`` those of the nodes' parents, (rows, nodes, target width) each.
        """
        model, nodes = self.model, embeds.shape[1]
        output = model.model(
            inputs_embeds=model.pre_projection(torch.cat([embeds, states], dim=-1)),
            attention_mask={kind: mask.expand(-1, -1, nodes, -1) for kind, mask in seen.masks.items()},
            position_ids=seen.position.expand(-1, nodes),
            shared_kv_states=dict(seen.keys),
            use_cache=False,
            **self._all_nodes,
        )
        hidden = output.last_hidden_state
        logits = model.lm_head(hidden) if model.masked_embedding is None else self._logits_of_clusters(hidden)
        return logits, model.post_projection(hidden)

    def _logits_of_clusters(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens in the best clusters, and -inf for all others.

        transformers gives the others the smallest logit of the whole tensor minus 1, so that one row's distribution
        would depend on the other rows'.
        """
        head, weight = self.model.masked_embedding, self.model.lm_head.weight
        clusters = head.centroids(hidden).topk(head.centroid_intermediate_top_k).indices  # (rows, nodes, clusters)
        tokens = head.token_ordering.long().view(head.num_centroids, -1)[clusters].flatten(-2)
        found = (embedding(tokens, weight) @ hidden[..., None])[..., 0]
        return hidden.new_full((*hidden.shape[:2], len(weight)), -torch.inf).scatter(-1, tokens, found)


class TextSeen:
    """What an assistant sees of the text in one proposal: keys and values, masks, and the position of the root.

    ``keys`` are pairs (rows, heads, slots, head size) by kind of layer, ``masks`` (rows, 1, 1, slots). ``position`` is
    (rows, 1).
    """

    def __init__(self, request: DraftContext, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        target = request.target_keys
        assert target is not None  # the speculator has asked
        self.position = target.position.to(device)
        self.keys: dict[str, tuple[Tensor, Tensor]] = {}
        self.masks: dict[str, Tensor] = {}
        sources = keys_of_kind(request.target.config.get_text_config(decoder=True))
        for kind in dict.fromkeys(config.layer_types):
            layer = target.of_layer(sources[kind])
            self.keys[kind] = layer.keys.to(device, dtype), layer.values.to(device, dtype)
            distance = layer.distance.to(device)
            shown = distance > 0
            if kind == "sliding_attention":
                shown &= distance <= config.sliding_window
            self.masks[kind] = as_mask(shown[:, None], config, dtype)


class Gemma4AssistantDrafter(Drafter):
    """The state of an assistant in one call: none, because all it reads is in the target's cache."""

    def __init__(self, speculator: Gemma4AssistantSpeculator, request: DraftContext) -> None:
        self._speculator, self._request = speculator, request.without_features
        self._device, self._dtype = input_device(speculator.model), speculator.model.dtype

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Draft from the root and the state of the token before it."""
        if limit == 0:
            return Proposal.nothing(accepted.root)
        assert accepted.features is not None  # the speculator names a feature layer
        request, device = self._request, self._device
        seen = TextSeen(request, self._speculator.model.model.config, device, self._dtype)
        growth = _Growth(self._speculator, request, seen, accepted.last(accepted.features).to(device, self._dtype))
        root = accepted.root.to(device)
        first = growth.step(root[:, None], 0, None, None)[:, 0]
        more = request.keep_drafting
        proposal = grow(root, first, growth.step, request.config, limit, request.sample, keep_drafting=more)
        return proposal.to(accepted.tokens.device)

    def keep_rows(self, rows: Tensor) -> None:
        """Do nothing: the target keeps the rows."""


class _Growth:
    """The states (rows, nodes, target width) of the nodes that were read last, while a proposal grows."""

    def __init__(
        self, speculator: Gemma4AssistantSpeculator, request: DraftContext, seen: TextSeen, states: Tensor
    ) -> None:
        self._speculator, self._request, self._seen, self._states = speculator, request, seen, states
        self._embeddings: Any = request.target.get_input_embeddings()

    def step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        """Read new nodes, as a ``Step`` does: log-probabilities (rows, new, vocabulary).

        Nodes do not see each other, so that their ancestors do not matter beyond their parents' states.
        """
        width, target = self._states.shape[-1], self._request.target
        if parents is None:
            above = self._states.expand(-1, tokens.shape[1], -1)
        else:
            above = self._states.gather(1, parents[:, :, None].expand(-1, -1, width))
        embeds = self._embeddings(tokens.to(input_device(target))).to(above)
        logits, self._states = self._speculator.step(embeds, above, self._seen)
        return draft_log_probs(self._speculator, self._request, logits)


def keys_of_kind(text: PreTrainedConfig) -> dict[str, int]:
    """Map each kind of layer of a target to the last layer of it that computes keys and values of its own."""
    kinds = _kinds(text)
    shared: int = getattr(text, "num_kv_shared_layers", None) or 0
    return {kind: layer for layer, kind in enumerate(kinds[: len(kinds) - shared])}


def _first_of_kind(text: PreTrainedConfig) -> dict[str, int]:
    kinds = _kinds(text)
    return {kind: kinds.index(kind) for kind in kinds}


def _kinds(text: Any) -> Sequence[str]:
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    return kinds or ["full_attention"] * text.num_hidden_layers


def _heads(text: Any, number: int) -> dict[str, int]:
    """Return size and number of the key heads of layer ``number``."""
    layer = text.per_layer_config[number] if text.is_heterogeneous else text
    size = getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads
    count = getattr(layer, "num_key_value_heads", None) or text.num_attention_heads
    return {"keys of size": size, "key heads": count}
