"""The loop: propose, score, verify, commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .choice import Chooser
from .configuration import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig
from .drafts.base import Request
from .logits import Processors
from .metrics import SpeculationStats
from .proposal import Proposal
from .record import Record
from .recurrent import runner_for
from .selfcheck import check_target
from .speculators import as_speculator
from .stopping import Stops
from .support import refuse_call
from .target import TargetRunner
from .text import Text

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``generate(..., return_dict_in_generate=True)`` returns, and ``speculation``: how the guessing went."""

    speculation: SpeculationStats | None = None


class SpeculativeDecoding:
    """Decode with a draft: ``model.generate(..., custom_generate=SpeculativeDecoding(draft))``.

    The same loop as ``generate(..., speculator=draft)``, without the keyword. transformers keeps streamer and
    tokenizer from a ``custom_generate`` callable, so they are given here: ``streamer`` gets prompt and text,
    ``tokenizer`` serves the statistics. The object keeps nothing of a call and may be used again.
    """

    def __init__(
        self,
        speculator: Any,
        config: SpeculationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
    ) -> None:
        if config is not None and not isinstance(config, SpeculationConfig):
            raise TypeError(f"speculation_config must be a hf_spec.SpeculationConfig, got {config!r:.80}")
        self.speculator = speculator
        self.config = config
        self.streamer = streamer
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        speculator = as_speculator(self.speculator, model)
        config = self.config or speculator.defaults()
        text = Text(input_ids, Stops(stopping_criteria), generation_config._pad_token_tensor, self.streamer)
        refuse_call(model, generation_config, model_kwargs, config, text)
        speculator.check(model, config)
        if config.self_check:
            check_target(model, trees=config.tree is not None)

        stats = SpeculationStats(batch_size=len(input_ids), tokenizer=self.tokenizer)
        record = Record(generation_config, len(input_ids))
        chooser = Chooser(Processors(logits_processor), text, bool(generation_config.do_sample), config, record)
        target = runner_for(
            model,
            model_kwargs.get("past_key_values", model_kwargs.get("cache_params")),
            speculator.feature_layers(model),
            record.hidden_states,
            one_chain=config.tree is None,
        )
        prompt_mask = _prompt_mask(input_ids, model_kwargs.get("attention_mask"))

        text.begin()
        prompt = target.prefill(input_ids, generation_config, model_kwargs)
        record.prompt(prompt.hidden_states)
        choice = chooser.choose(Proposal.nothing(input_ids.new_zeros(len(input_ids))), prompt.last())
        stats.prefilled([tokens[0] for tokens in choice.emitted])
        sample = chooser.samples_row_by_row and config.draft_sampling is not False
        only_best = config.tree is None and not sample and config.min_confidence == 0
        drafter = speculator.drafter(
            Request(
                target=model,
                input_ids=input_ids,
                attention_mask=prompt_mask,
                features=prompt.features,
                config=config,
                law=chooser.processors.draft_law(only_best),
                sample=sample,
            )
        )
        features = prompt.last().features
        del prompt  # as large as the prompt is long
        returns_cache = bool(generation_config.return_dict_in_generate) or target.slots.cache_is_the_users
        length = DraftLength(config)

        rows = list(range(len(input_ids)))
        while text.rows:
            growing = set(text.rows)
            going_on = [i for i, row in enumerate(rows) if row in growing]
            if len(going_on) < len(rows):
                index = torch.tensor(going_on, device=input_ids.device)
                target.keep_rows(index, keep_finished=returns_cache)
                drafter.keep_rows(index)
            rows = text.rows
            news = choice.news(features, going_on)
            with stats.timed("propose"):
                limit = min(length.limit(stats), text.room - 1)
                proposal = target.fit(drafter.propose(news, limit), limit)
            with stats.timed("verify"):
                scores = target.score(proposal)
            with stats.timed("choose"):
                choice = chooser.choose(proposal, scores)
                target.commit(choice.path, choice.kept, in_place=proposal.is_chain)
                stats.step(rows, choice.proposed, choice.accepted, choice.kept, choice.deepest, choice.emitted)
            features = scores.features
            del proposal, scores  # nodes x vocabulary each
        stats.finish()
        return self._output(text, target, record, stats, generation_config, returns_cache)

    def _output(
        self,
        text: Text,
        target: TargetRunner,
        record: Record,
        stats: SpeculationStats,
        generation_config: GenerationConfig,
        returns_cache: bool,
    ) -> Tensor | SpeculativeOutput:
        sequences = text.finish()
        emitted = text.length - text.prompt_length
        cache = target.release(emitted - 1) if returns_cache else None
        if not generation_config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=cast(torch.LongTensor, sequences),
            past_key_values=cache,
            speculation=stats,
            **record.outputs(emitted),
        )


class DraftLength:
    """Say how deep to guess: a fixed number, or the one that promises most text per second so far.

    With acceptance rate a and a guess that costs c target forwards, a chain of k emits (1 - a^(k+1)) / (1 - a) tokens
    for 1 + c k forwards (Leviathan et al., arXiv 2211.17192, theorem 3.8). ``"auto"`` measures a and c as it goes.
    """

    LONGEST = 16

    def __init__(self, config: SpeculationConfig) -> None:
        self._adapts = config.num_speculative_tokens == "auto"
        self._fixed = self._default(config)

    @staticmethod
    def _default(config: SpeculationConfig) -> int:
        if isinstance(config.num_speculative_tokens, int):
            return config.num_speculative_tokens
        if config.tree is not None and not isinstance(config.tree, str):
            return max(len(path) for path in config.tree)
        return DEFAULT_NUM_SPECULATIVE_TOKENS

    def limit(self, stats: SpeculationStats) -> int:
        """Return how deep the next proposal should go."""
        if not self._adapts or stats.steps < 2 or not stats.verify_seconds:
            return self._fixed
        counts = stats.counts
        # Only behind an accepted guess is the next one tried.
        tried = sum(map(min, counts.offered, [counts.steps, *counts.reached]))
        accept = min(0.98, counts.accepted / max(1, tried))
        depth = sum(counts.offered) / counts.steps  # that rows reach on average; all of them in the same forwards
        cost = stats.propose_seconds / max(1.0, depth) / stats.verify_seconds

        def speed(k: int) -> float:
            return (1 - accept ** (k + 1)) / (1 - accept) / (1 + cost * k)

        return max(range(1, self.LONGEST + 1), key=speed)


def _prompt_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mask of ``input_ids`` alone: the host's may begin earlier (a cache) or belong to embeddings."""
    length = input_ids.shape[1]
    if attention_mask is None or attention_mask.shape[1] < length:
        return torch.ones_like(input_ids)
    return attention_mask[:, attention_mask.shape[1] - length :]
