"""The loop: propose, score, verify, commit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import StaticCache
from transformers.utils import logging

from ..device_tensors import to_device
from ..drafts.base import AcceptedTokens, DraftContext, Speculator, refuse_trees
from ..drafts.lazy import LazyDrafter
from ..drafts.ngram.beginnings import without_placeholders
from ..drafts.source import Source
from ..invariance.mode import is_invariant
from ..metrics import SpeculationStats
from ..parallel import ModelParallelGroup
from ..policy.base import DraftLengthPolicy, DraftSource, StepObservation
from ..policy.fixed import unbounded
from ..proposal import Proposal
from ..scoring.factory import runner_for
from ..scoring.graphs import Compiler
from ..scoring.names import CACHE, cache_among, text_arguments
from ..scoring.runner import Scores
from ..scoring.selfcheck import reads_prompts_causally
from ..scoring.target_keys import TargetKeys
from ..settings import SpeculationConfig
from ..verify.processors import Processors
from ..verify.verifier import StepResult
from .draft_length import most_nodes
from .emission import Emitter
from .outputs import Record, SpeculativeEncoderDecoderOutput, SpeculativeOutput, output_of, remember_speculation
from .sequences import Sequences

NEVER_RIGHT = 20  # steps with draft tokens, counted per row, in which none was accepted

logger = logging.get_logger(__name__)


@dataclass
class GenerateArguments:
    """What ``generate`` passes to its decoding method, the tokenizer for the statistics, and an encoder's source."""

    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    logits_processor: LogitsProcessorList
    tokenizer: Any = None
    source: Source | None = None


class Call:
    """One call: read the prompt, then propose, score, verify and commit until every row is done."""

    def __init__(
        self,
        model: PreTrainedModel,
        speculator: Speculator,
        config: SpeculationConfig,
        policy: DraftLengthPolicy,
        sequences: Sequences,
        ranks: ModelParallelGroup,
        arguments: GenerateArguments,
    ) -> None:
        # What the user passed.
        generation_config, model_kwargs = arguments.generation_config, arguments.model_kwargs
        self.model, self.speculator, self.config = model, speculator, config
        self.generation_config, self.model_kwargs = generation_config, model_kwargs
        self.source = arguments.source
        # What grows: the text, and what is returned about it.
        self.sequences = sequences
        self.stats = SpeculationStats(batch_size=len(sequences.rows), tokenizer=arguments.tokenizer)
        self.record = Record(generation_config, len(sequences.rows))
        # Who takes part in a step: the processes that share the model; the policy, which says how much to draft; the
        # drafter, made when it is first asked; the target, which scores draft tokens; and the emitter of text.
        self.ranks, self.policy = ranks, policy
        self.drafter: LazyDrafter
        self.processors = Processors(arguments.logits_processor, len(sequences.rows))
        self.emitter = Emitter(self.processors, sequences, bool(generation_config.do_sample), config, self.record)
        cache = cache_among(model_kwargs)
        self.nodes = most_nodes(policy, config, isinstance(cache, StaticCache))
        self.target = runner_for(
            model,
            cache,
            speculator.feature_layers(model),
            self.record.hidden_states,
            one_chain=config.tree is None,
            widest=self.nodes,
        )
        self.target.most_new_tokens = max(sequences.remaining_tokens(sequences.rows)) + 1
        self.compiler: Compiler | None = None  # of the drafter, from the prefill on, if the target is compiled
        # State of the loop: rows that were still growing in the last step, and features of the nodes that were
        # scored last, (rows, nodes, widths).
        self.rows = sequences.rows
        self.features: Tensor | None = None
        # What was scored and is not committed: the proposal, and the lengths of the rows before it.
        self.block: tuple[Proposal, list[int]] | None = None
        self.prompt_mask: Tensor
        self._was_plain = False  # the last step drafted nothing
        self._compiled = False  # the last step compiled something

    def run(self, input_ids: Tensor) -> Tensor | SpeculativeOutput | SpeculativeEncoderDecoderOutput:
        """Generate after ``input_ids`` (batch, length), and return what ``generate`` returns."""
        try:
            result = self.read_prompt(input_ids)
            while self.sequences.rows:
                result = self.step(result)
            return self.output()
        except BaseException:  # a stop button, too
            self.abandon()
            raise
        finally:
            self.target.free_buffers()
            if self.compiler is not None:
                self.compiler.free_buffers()

    def read_prompt(self, input_ids: Tensor) -> StepResult:
        """Emit the first token of every row, or the first step's where draft tokens are read with the prompt."""
        config, kwargs = self.generation_config, self.model_kwargs
        mask = _prompt_mask(input_ids, kwargs.get(text_arguments(self.model).mask))
        self.sequences.show_prompt()
        self.prompt_mask = mask
        # A draft model would have to read the prompt before the first token is shown.
        can_draft = self.speculator.source is DraftSource.NGRAM and not self.speculator.shares_target_cache
        if (
            can_draft
            and self.policy.longest > 0
            and self.config.tree is None
            and self.target.verifies_with_prompt(config, kwargs)
            and reads_prompts_causally(self.model)
        ):
            self.drafter = self._new_drafter(input_ids[:, :-1], mask[:, :-1], None)
            root = AcceptedTokens(input_ids[:, -1:], input_ids.new_ones(len(input_ids)))
            score = functools.partial(self.target.prefill_with_draft_tokens, input_ids, config, kwargs)
            start, proposal = self._propose(root)
            self._was_plain = proposal.max_depth == 0
            return self._step(proposal, start, score, self.target.restore_prompt_cache)
        scores = self.target.prefill(input_ids, config, kwargs)
        if (how := self.target.compile_config) is not None:
            self._compile_the_rest(how)
        self.record.prompt(scores.hidden_states)
        last = scores.last()
        result = self._verify(Proposal.nothing(input_ids.new_zeros(len(input_ids))), last)
        assert result is not None  # there is no draft token to blame
        self.block = None
        self.stats.prefilled([tokens[0] for tokens in result.emitted])
        self.drafter, self.features = self._new_drafter(input_ids, mask, scores.features), last.features
        return result

    def _compile_the_rest(self, config: CompileConfig) -> None:
        """Compile drafting and verification, too."""
        depth, nodes = self.policy.longest, self.nodes
        self.compiler = Compiler(config, depth, self.target.most_new_tokens)
        if nodes is not None:
            self.emitter.compile(Compiler(config, depth, begins_step=False), nodes)

    def step(self, result: StepResult) -> StepResult:
        """Take a step after the last ``result`` with the rows that still grow, or several plain ones."""
        going_on, index = list(range(len(self.rows))), None
        if len(self.sequences.rows) < len(self.rows):
            growing = set(self.sequences.rows)
            going_on = [i for i, row in enumerate(self.rows) if row in growing]
            index = to_device(going_on, result.tokens.device)
            self._drop_finished(going_on, index)
        self.rows = self.sequences.rows
        start, proposal = self._propose(result.accepted_tokens(self.features, going_on, index))
        self._align(proposal)
        if proposal.max_depth == 0 and self.target.scores_as_plain:
            result, start, proposal = self._plain_steps(start, proposal)
            self._was_plain = proposal.max_depth == 0
            if len(self.sequences.rows) < len(self.rows):
                return result
        return self._step(proposal, start, self.target.score, self.target.rollback)

    def _plain_steps(self, start: float, proposal: Proposal) -> tuple[StepResult, float, Proposal]:
        """Take plain steps until a row ends or something is proposed; return the last result and what was proposed."""
        emitted: list[list[list[int]]] = []
        usual, clock = self.stats.steps > 0, self.stats.clock
        scoring = verifying = 0.0
        try:
            with self.target.plain_steps() as score:
                while True:
                    begun = clock()
                    scores = score(proposal)
                    scored = clock()
                    result = self._verify(proposal, scores)
                    assert result is not None  # there is no draft token to blame
                    self._commit(proposal, scores, result)
                    emitted.append(result.emitted)
                    scoring, verifying = scoring + scored - begun, verifying + clock() - scored
                    self._observe(proposal, result, start, usual)
                    usual = True
                    if len(self.sequences.rows) < len(self.rows):
                        return result, start, proposal
                    start, proposal = self._propose(result.accepted_tokens(self.features, self.rows))
                    if proposal.max_depth:
                        return result, start, proposal
        finally:
            self.stats.book("target", scoring)
            self.stats.book("verify", verifying)
            self.stats.plain_steps(self.rows, [[*chain.from_iterable(row)] for row in zip(*emitted, strict=True)])

    def _drop_finished(self, going_on: list[int], index: Tensor) -> None:
        """Drop the other rows; a cache that is handed back first gets the last token of those that ended early.

        ``index`` is ``going_on`` where the text is.

        Plain ``generate`` pads a row that is done for as long as others grow, and so reads its last token, too. With
        ``max_length=9``, where only row 1 goes on::

            row 0   6 tokens, ended by EOS   early: its last token is read with row 1's next draft tokens, then it goes
            row 1   7 tokens                 goes on
            row 2   9 tokens                 goes now: nothing can follow, so plain generate does not read its end
        """
        staying = sorted(going_on + self._ended_early()) if self._returns_cache else going_on
        if len(staying) < len(self.rows):
            kept = index if len(staying) == len(going_on) else to_device(staying, index.device)
            self.target.keep_rows(kept, keep_finished=self._returns_cache)
        if len(going_on) < len(staying):
            last_tokens = self.sequences.last_tokens([self.rows[i] for i in staying])
            self.target.finish_rows([staying.index(i) for i in going_on], last_tokens)
        self.drafter.keep_rows(index)

    def _ended_early(self) -> list[int]:
        """List the places in ``self.rows`` of rows that are done while others get longer: row 0 in the picture above.

        Once no row grows, these are the rows that are shorter than the longest one.
        """
        sequences = self.sequences
        end = sequences.stops.max_length if sequences.rows else sequences.length
        done = [i for i, row in enumerate(self.rows) if row not in sequences.rows]
        return [i for i in done if end is None or sequences.lengths[self.rows[i]] < end]

    def _propose(self, accepted: AcceptedTokens) -> tuple[float, Proposal]:
        """Let the drafter propose after ``accepted``; return when that began, and the proposal."""
        start = time.perf_counter()
        limit = min(self.policy.longest, self.sequences.most_remaining(self.rows))
        proposal = self.ranks.broadcast_proposal(self.drafter.propose(accepted, limit))
        if proposal.max_depth:
            if self.config.tree is None:
                refuse_trees(proposal)
            remaining_tokens = self.sequences.remaining_tokens(self.rows)
            proposal = self.target.clip(proposal.truncate_rows(remaining_tokens), min(self.policy.planned, limit))
        self.stats.lap("propose", start)
        return start, proposal

    def _step(
        self, proposal: Proposal, start: float, score: Callable[[Proposal], Scores], roll_back: Callable[[], None]
    ) -> StepResult:
        """Score, verify and commit; ``roll_back`` draft tokens that spoil the scores, and score without."""
        usual, graphs = self.stats.steps > 0 and not self._compiled, self.stats.graphs
        with self.stats.timed("target"):
            scores = score(proposal)
        with self.stats.timed("verify"):
            result = self._verify(proposal, scores)
        self._note_compilation()
        if result is None:
            usual, proposal = False, Proposal.nothing(proposal.root)
            with self.stats.timed("target"):
                roll_back()
                scores = score(proposal)
            result = self._verify(proposal, scores)
            assert result is not None  # there is no draft token to blame
        with self.stats.timed("verify"):
            self._commit(proposal, scores, result)
            counts = (result.proposed, result.accepted, result.kept, result.deepest, result.emitted)
            self.stats.step(self.rows, *counts)
        self._compiled = self.stats.graphs != graphs  # then the next step records CUDA graphs
        self._observe(proposal, result, start, usual and not self._compiled)
        return result

    def _commit(self, proposal: Proposal, scores: Scores, result: StepResult) -> None:
        self.target.commit(result.path, result.kept, proposal.is_chain or result.in_place, result.counts)
        self.block, self.features = None, scores.features

    def _observe(self, proposal: Proposal, result: StepResult, start: float, usual: bool) -> None:
        """Tell the policy what the step did, and how long it took if that was as ``usual``."""
        seconds = time.perf_counter() - start if usual and not self.drafter.had_backlog else None
        self.policy.observe(StepObservation(proposal.max_depth, seconds, result.deepest, result.accepted))

    def _align(self, proposal: Proposal) -> None:
        """Align the rows where plain steps follow each other: it costs once what each of them would cost more."""
        if self._was_plain and proposal.max_depth == 0 and not self._returns_cache:
            self.target.align()
        self._was_plain = proposal.max_depth == 0

    def _note_compilation(self) -> None:
        self.stats.compiled(*self.target.compilation)
        if self.compiler is not None:
            self.stats.compiled(self.compiler.graphs.made, self.compiler.graphs.seconds, "propose")
        if (compiled := self.emitter.verifier.compiled) is not None:
            self.stats.compiled(compiled.graphs.made, compiled.graphs.seconds, "verify")

    def _verify(self, proposal: Proposal, scores: Scores) -> StepResult | None:
        self.block = proposal, self.sequences.row_lengths
        return self.emitter.emit(proposal, scores)

    def abandon(self) -> None:
        """Leave in the user's cache the text that was shown, except its last token, and no draft token.

        That is what plain ``generate`` leaves if a streamer or a criterion raises; if a processor does, plain has read
        one token more. Nothing was shown: the cache is as it was handed in.
        """
        emitted = self.sequences.shown - self.sequences.prompt_length
        if emitted == 0:
            self.target.restore_prompt_cache()
        elif self.target.slots.cache_is_the_users:
            if self.block is not None and self.target.slots.cache.rows.draft_nodes:
                self.target.commit(*self._shown_path(*self.block))
            self.target.abandon(emitted - 1)

    def _shown_path(self, proposal: Proposal, before: list[int]) -> tuple[Tensor, list[int]]:
        """Follow what was shown of the last block through its nodes: (rows, m), and how many of them count."""
        ids = self.sequences.padded()
        rows, first = (torch.tensor(values, device=ids.device) for values in (self.rows, before))
        ends = [min(self.sequences.lengths[row], self.sequences.shown) for row in self.rows]
        counts = [max(0, end - start) for start, end in zip(before, ends, strict=True)]
        path = [torch.zeros_like(proposal.root)]
        for step in range(max(counts) - 1):
            column = (first + step).clamp(max=ids.shape[1] - 1)
            path.append(proposal.child(path[-1], ids[rows, column]).clamp(min=0))
        return torch.stack(path, dim=1), counts

    def _new_drafter(self, read: Tensor, mask: Tensor, features: Tensor | None) -> LazyDrafter:
        """Start a drafter after the tokens that were ``read`` (batch, n), 0 in ``mask`` where padded."""
        sample = self.emitter.takes_samples and self.config.sample_draft
        only_best = self.config.tree is None and not sample and self.config.confidence_threshold == 0
        graphs_on = None if self.compiler is None else read.device
        distribution = self.processors.draft_distribution(only_best, graphs_on)
        asked = (self.model, read, mask, features, self.config, distribution, sample)
        rows, free = len(self.sequences.rows), unbounded(self.policy.acceptance)
        # In lockstep a draft token counts only if those of all rows are accepted, however probable it is.
        rows_wait = self.emitter.lockstep and rows > 1
        self.policy.stops_early &= not rows_wait
        plans_itself = (
            self.speculator.estimates_acceptance(rows)
            and self.config.tree is None
            and self.compiler is None
            and not rows_wait
        )
        own = self.policy if plans_itself or self.policy.stops_early else free
        runner, keys = self.target if self.speculator.shares_target_cache else None, TargetKeys(self.target)
        request = DraftContext(
            *asked, compiler=self.compiler, policy=own, runner=runner, target_keys=keys, source=self.source
        )
        start = functools.partial(self.speculator.drafter, request)
        return LazyDrafter(start, free if plans_itself else self.policy, self.speculator.source)

    @property
    def _returns_cache(self) -> bool:
        return bool(self.generation_config.return_dict_in_generate) or self.target.slots.cache_is_the_users

    def output(self) -> Tensor | SpeculativeOutput | SpeculativeEncoderDecoderOutput:
        """Close the stream and return what ``generate`` returns."""
        if self._returns_cache and (early := self._ended_early()):
            with self.stats.timed("target"):
                last_tokens = self.sequences.last_tokens(self.rows)
                self.target.read_last_tokens(last_tokens, [i in early for i in range(len(self.rows))])
        self.stats.finish(self.policy.plain_seconds(self.stats.batch_size))
        self.stats.draft_lengths, self.stats.invariant = str(self.policy), is_invariant(self.model)
        remember_speculation(self.model, self.stats)
        self._warn_if_never_right()
        token_ids = self.sequences.finish()
        if self.speculator.learns:
            self.speculator.learn(without_placeholders(self.sequences.unpadded(self.prompt_mask), self.model))
        emitted = self.sequences.length - self.sequences.prompt_length
        cache: Any = self.target.release(emitted - 1) if self._returns_cache else None
        if not self.generation_config.return_dict_in_generate:
            return token_ids
        found = {"sequences": token_ids, "speculation": self.stats, CACHE: cache, **self.record.outputs(emitted)}
        return output_of(self.model, found, None if self.source is None else self.source.kwargs["encoder_outputs"])

    def _warn_if_never_right(self) -> None:
        counts = self.stats.counts
        if counts.accepted == 0 and counts.proposed_at and counts.proposed_at[0] >= NEVER_RIGHT:
            logger.warning_once(
                f"{type(self.speculator).__name__}: no draft token was accepted in {NEVER_RIGHT} steps or "
                "more, so drafting costs time only. Either the draft is not trained yet, or it was trained for "
                "another target or tokenizer, or it is n-grams and the text repeats nothing, or it is early exit from "
                "a model that was not trained for it."
            )


def _prompt_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mask of ``input_ids`` alone: transformers' may begin earlier (a cache) or belong to embeddings."""
    length = input_ids.shape[1]
    if attention_mask is None or attention_mask.shape[1] < length:
        return torch.ones_like(input_ids)
    return attention_mask[:, attention_mask.shape[1] - length :]
