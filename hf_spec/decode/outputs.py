"""The output of ``generate(..., return_dict_in_generate=True)``, collected sequence by sequence."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from ..metrics import SpeculationStats
from ..scoring.adapters import base_model
from ..scoring.features import in_own_layout
from .parts import Parts, is_part


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of ``generate(..., return_dict_in_generate=True)``; ``speculation`` holds the call's statistics.

    The cache is ``None`` where sequences of a recurrent target end at different lengths: a state cannot be padded.
    """

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same of an encoder-decoder model, with the states of its encoder and decoder under their own names.

    Whisper decodes sound in windows, some of them several times: ``speculation`` holds the sum.
    """

    speculation: SpeculationStats | None = None


def output_of(
    model: PreTrainedModel, found: dict[str, Any], encoder_outputs: Any
) -> SpeculativeOutput | SpeculativeEncoderDecoderOutput:
    """Return what was ``found``, by the names of a decoder-only output, as ``generate`` of ``model`` does.

    ``encoder_outputs`` are those of an encoder-decoder model, ``None`` of others.
    """
    if encoder_outputs is None:
        return SpeculativeOutput(**found)
    if isinstance(model, WhisperGenerationMixin):
        found["speculation"] = None  # its own ``generate`` cuts every field into rows
    states = found.pop("hidden_states")
    of_encoder = None if states is None else getattr(encoder_outputs, "hidden_states", None)
    return SpeculativeEncoderDecoderOutput(**found, decoder_hidden_states=states, encoder_hidden_states=of_encoder)


# Number and statistics of the last call of each model. None: the call drafted nothing.
_last: WeakKeyDictionary[nn.Module, tuple[int, SpeculationStats | None]] = WeakKeyDictionary()
_calls = itertools.count()


def last_speculation(model: PreTrainedModel) -> SpeculationStats | None:
    """Return the statistics of the last ``generate`` call of ``model`` with a speculator; None if there was none.

    For callers that see no output of ``generate``, such as those of a pipeline. None, too, if a default speculator
    could not serve the last call. Some models let an inner model generate (BLIP-2): then its last call counts. Of
    Whisper it is the sum over all windows and fallbacks of a call.
    """
    found = [known for module in base_model(model).modules() if (known := _last.get(module)) is not None]
    return max(found, key=lambda known: known[0])[1] if found else None


def remember_speculation(model: PreTrainedModel, stats: SpeculationStats) -> None:
    """Store ``stats`` as those of the last call of ``model``, or as those of a part of a call that goes on."""
    if not is_part(model, stats):
        _last[model] = next(_calls), stats


def with_speculation(output: Any, parts: Parts) -> Any:
    """Store the sum of the ``parts`` of a call, and return its ``output`` with it, if that has named fields."""
    stats = parts.together()
    if stats is not None:
        remember_speculation(parts.model, stats)
        if isinstance(output, dict):  # a ModelOutput is one, too
            output["speculation"] = stats
    return output


def forget_speculation(model: PreTrainedModel) -> None:
    """Note that the last call of ``model`` drafted nothing."""
    _last[base_model(model)] = next(_calls), None


class Record:
    """Scores, logits and hidden states of emitted tokens, in the layout of plain ``generate``.

    Sequences emit at different times, so each keeps a list of its own. One that ends early is padded with zeros.
    """

    def __init__(self, generation_config: GenerationConfig, batch_size: int) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.hidden_states = wanted and bool(generation_config.output_hidden_states)
        self._scores = wanted and bool(generation_config.output_scores)
        self._logits = wanted and bool(generation_config.output_logits)
        self._prompt_states: tuple[Tensor, ...] = ()
        self._rows: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(batch_size)])
        self._layers = 0  # whose hidden states are kept
        self._stacked: list[Tensor] = []

    def prompt(self, states: tuple[Tensor, ...]) -> None:
        """Keep the hidden states of the prompt, one (batch, prompt, ...) per layer."""
        self._prompt_states = in_own_layout(states)

    def add(
        self,
        rows: Sequence[int],
        path: Tensor,
        kept: Sequence[int],
        logits: Tensor,
        states: tuple[Tensor, ...],
        scores_at: Callable[[Tensor], Tensor],
    ) -> None:
        """Add the tokens that ``rows`` emitted after the first ``kept[b]`` nodes of ``path`` (rows, m)."""
        if not (self._scores or self._logits or self.hidden_states):
            return
        for step in range(max(kept)):
            emitting = [i for i, count in enumerate(kept) if step < count]
            node = path[:, step]
            self.add_column(rows, emitting, logits, states, node, scores_at(node) if self._scores else None)

    def add_column(
        self,
        rows: Sequence[int],
        emitting: Sequence[int],
        logits: Tensor,
        states: tuple[Tensor, ...],
        node: Tensor,
        scores: Tensor | None,
    ) -> None:
        """Add the token after ``node`` (rows,) of each ``emitting`` row; ``scores`` are (rows, vocabulary)."""
        index = torch.arange(len(rows), device=logits.device)
        if self._scores and scores is not None:
            self._keep("scores", rows, emitting, scores)
        if self._logits:
            self._keep("logits", rows, emitting, logits[index, node].float())
        if self.hidden_states:
            self._layers = len(states)
            for number, layer in enumerate(states):  # not of one shape in all models
                here = layer[index.to(layer.device), node.to(layer.device)].to(logits.device)
                self._keep(f"layer {number}", rows, emitting, here)

    def _keep(self, name: str, rows: Sequence[int], emitting: Sequence[int], values: Tensor) -> None:
        for i in emitting:
            self._rows[name][rows[i]].append(values[i].clone())

    def scores_so_far(self) -> tuple[Tensor, ...] | None:
        """Return the scores that a stopping criterion may read; ``None`` where none were asked for."""
        if not self._scores:
            return None
        self._stacked += self._columns("scores", len(self._stacked))
        return tuple(self._stacked)

    def outputs(self, length: int) -> dict[str, Any]:
        """Return ``scores``, ``logits`` and ``hidden_states`` of the first ``length`` emitted tokens."""
        layers = [self._columns(f"layer {number}")[1:length] for number in range(self._layers)]
        steps = [in_own_layout([layer[:, None] for layer in step]) for step in zip(*layers, strict=True)]
        return {
            "scores": self._columns("scores")[:length] if self._scores else None,
            "logits": self._columns("logits")[:length] if self._logits else None,
            "hidden_states": (self._prompt_states, *steps) if self.hidden_states else None,
        }

    def _columns(self, name: str, first: int = 0) -> tuple[Tensor, ...]:
        """Stack the rows for each emitted token from number ``first`` on: (batch, ...) each."""
        rows = self._rows[name]
        longest = max(rows, key=len)
        return tuple(
            torch.stack([row[step] if step < len(row) else torch.zeros_like(longest[step]) for row in rows])
            for step in range(first, len(longest))
        )
