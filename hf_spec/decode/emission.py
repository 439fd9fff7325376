"""Emission of tokens: each sequence is verified by itself, or all of them advance in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device_tensors import cached_arange, cached_full
from ..proposal import Proposal
from ..scoring.graphs import Compiler
from ..scoring.runner import Scores
from ..settings import SpeculationConfig
from ..verify.processors import Processors
from ..verify.scores import NodeScores
from ..verify.verifier import StepResult, Verifier
from .outputs import Record
from .refusals import Refusal
from .sequences import Sequences


class Emitter:
    """What turns the scores of a proposal into emitted tokens.

    Sequences advance by different amounts, or in ``lockstep`` where a processor or criterion has to see every token of
    the complete batch.
    """

    def __init__(
        self, processors: Processors, sequences: Sequences, sample: bool, config: SpeculationConfig, record: Record
    ) -> None:
        self.processors, self.sequences, self.record, self.sample = processors, sequences, record, sample
        self.verifier = Verifier(config, sample)
        self._generators = _generators(config.row_seeds, sequences)
        stops, several = sequences.stops, len(sequences.rows) > 1
        rule = self.verifier.rule
        token_by_token = rule.sampled is None and rule.lossy is None
        runs_on = stops.runs_until_all_stop and several
        self.lockstep = processors.lockstep or stops.lockstep or (sample and token_by_token) or runs_on
        if self.verifier.lossy is not None and self.lockstep:
            raise Refusal(
                f"acceptance={config.acceptance!r} weighs whole paths, but a processor or stopping criterion of this "
                "call has to see the text token by token; declare a processor with hf_spec.pure or use "
                "acceptance='lossless'"
            )

    def compile(self, compiler: Compiler, nodes: int) -> None:
        """Verify sampled proposals of ``nodes`` nodes in a graph, if processors take all nodes at once."""
        if not self.lockstep and self.processors.vectorized:
            self.verifier.compile(compiler, nodes)

    def emit(self, proposal: Proposal, scores: Scores) -> StepResult | None:
        """Verify ``proposal`` and emit at least one token per sequence.

        ``None``: nothing is emitted, as a draft token may have spoilt the scores. Score the roots alone then.
        """
        logits = scores.logits.to(proposal.tokens.device)
        return (self._in_lockstep if self.lockstep else self._by_itself)(proposal, logits, scores)

    @property
    def takes_samples(self) -> bool:
        """Tell whether sampled draft tokens help; they do not in lockstep, where the target's own samples decide."""
        return not self.lockstep and self.verifier.takes_samples

    def _by_itself(self, proposal: Proposal, logits: Tensor, scores: Scores) -> StepResult | None:
        """Let each sequence advance by itself."""
        sequences, rows = self.sequences, self.sequences.rows
        ids = sequences.ids if not self.processors.stateless else None
        nodes = NodeScores(self.processors, logits, proposal, ids, sequences.row_lengths, rows, sequences.stops)
        result = self.verifier(proposal, nodes, sequences.extend)
        if result is not None:
            self.record.add(rows, result.path, result.kept, logits, scores.hidden_states, nodes.at)
        return result

    def _in_lockstep(self, proposal: Proposal, logits: Tensor, scores: Scores) -> StepResult | None:
        """Emit token by token with exactly the calls, and the random draws, of plain ``generate``.

        This goes on while the token of every growing sequence is a draft token: the next call needs scores for all.
        """
        if proposal.max_depth and not bool(_are_finite(proposal, logits).all()):
            return None
        rows, row_index = self.sequences.rows, cached_arange(len(self.sequences.rows), logits.device)
        node = cached_full(0, len(rows), logits.device)
        path: list[Tensor] = []
        tokens: list[Tensor] = []
        kept, accepted = [0] * len(rows), [0] * len(rows)
        while True:
            processed = self._plain_scores(rows, logits[row_index, node])
            token = self._plain_pick(processed)
            growing = [i for i, row in enumerate(rows) if row in self.sequences.rows]
            path.append(node)
            tokens.append(token[rows])
            self.record.add_column(rows, growing, logits, scores.hidden_states, node, processed[rows])
            self.sequences.append_column(token, self.record.scores_so_far())
            child = proposal.child(node, tokens[-1])
            drafted = (child >= 0).tolist()
            for i in growing:
                kept[i] += 1
                accepted[i] += drafted[i]
            if not all(drafted[i] for i in growing if rows[i] in self.sequences.rows) or not self.sequences.rows:
                break
            node = child.clamp(min=0)
        emitted = torch.stack(tokens, dim=1)  # (rows, m)
        texts = [row[:count] for row, count in zip(emitted.tolist(), kept, strict=True)]
        proposed, deepest = _size(proposal).T.tolist()
        return StepResult(torch.stack(path, 1), emitted, kept, texts, accepted, proposed, deepest, proposal.is_chain)

    def _plain_scores(self, rows: list[int], logits: Tensor) -> Tensor:
        """Call the user's processors on the complete batch, as plain ``generate`` does.

        Finished rows have the logits of a growing one: what a processor makes of them can be drawn from.
        """
        ids = self.sequences.padded()
        scores = logits[:1].float().repeat(len(ids), 1)
        scores[rows] = logits.float()
        return self.processors(ids, scores)

    def _plain_pick(self, scores: Tensor) -> Tensor:
        if self.sample and self._generators is not None:
            rows = zip(scores.split(1), self._generators, strict=True)
            return torch.cat([torch.multinomial(row.softmax(-1), 1, generator=own) for row, own in rows])[:, 0]
        if self.sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        return scores.argmax(-1)


def _generators(seeds: Sequence[int] | None, sequences: Sequences) -> list[torch.Generator] | None:
    """Make a generator for each row, of which there are as many as ``seeds``."""
    if seeds is None:
        return None
    device = sequences.ids.device
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def _are_finite(proposal: Proposal, logits: Tensor) -> Tensor:
    """Tell whose ``logits`` (rows, nodes, vocab) hold no nan and no inf at the nodes that exist: (rows,) bool.

    A draft token whose forward overflows spoils the other nodes too: attention gives it no weight, but 0 * nan is nan.
    """
    return ((logits.amax(-1) < torch.inf) | ~proposal.present).all(1)


def _size(proposal: Proposal) -> Tensor:
    """Count the draft tokens and the longest path of each row, (rows, 2)."""
    drafted = proposal.present.sum(1) - 1
    if proposal.is_chain:
        return torch.stack([drafted, drafted], dim=1)
    deepest = proposal.depth.masked_fill(~proposal.present, 0).amax(1)
    return torch.stack([drafted, deepest], dim=1)
