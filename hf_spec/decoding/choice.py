"""Choose what becomes text: the target's distribution, the verification rule, and the end of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..counting import numbers, repeated, uploaded
from ..drafts.base import AcceptedTokens
from ..proposal import Proposal
from ..sampling import draw, likeliest
from ..scoring.graphs import Compiler
from ..scoring.runner import Scores
from ..settings import SpeculationConfig
from .judging import CompiledJudge, Figures, figures_of, table_of
from .outputs import Record
from .processors import NodeScores, Processors
from .refusals import Refusal
from .text import Text
from .verification import Verdict, follow, match, rule_for


@dataclass(frozen=True)
class Choice:
    """What a step emitted: ``tokens`` (rows, m), of which ``kept[b]`` became text, after the nodes ``path`` (rows, m).

    Per row, ``emitted`` are the kept tokens, ``accepted`` of them were guesses, ``proposed`` counts the guesses and
    ``deepest`` the longest guessed path. ``in_place``: the kept nodes are 0, 1, 2, ... in every row. ``counts``
    (rows,) is ``kept`` on the device, if it is there.
    """

    path: Tensor
    tokens: Tensor
    kept: list[int]
    emitted: list[list[int]]
    accepted: list[int]
    proposed: list[int]
    deepest: list[int]
    in_place: bool = False
    counts: Tensor | None = None

    def accepted_tokens(self, features: Tensor | None, rows: list[int], index: Tensor | None = None) -> AcceptedTokens:
        """Tell the drafter about ``rows``: each emitted token beside the features of the node before it.

        ``index`` is the same on the device, ``None`` if these are all rows.
        """
        amounts, emitted = self.kept, self.emitted
        if index is not None:
            amounts, emitted = [amounts[row] for row in rows], [emitted[row] for row in rows]
        width, device = max(amounts), self.tokens.device
        counts = self.counts if index is None or self.counts is None else self.counts[index]
        if counts is None and len(set(amounts)) == 1:
            counts = repeated(width, len(rows), device)
        if counts is None:
            counts = uploaded(amounts, device)
        tokens, path = self.tokens[:, :width], self.path[:, :width]
        if index is not None:
            tokens, path = tokens[index], path[index]
            features = None if features is None else features[index.to(features.device)]
        if features is not None and self.in_place:
            features = features[:, :width]
        elif features is not None:
            wide = path[:, :, None].expand(-1, -1, features.shape[2])
            features = features.gather(1, wide.to(features.device))  # (rows, width, features)
        return AcceptedTokens(tokens, counts, features, amounts, emitted)


class Chooser:
    """Turn scores of a proposal into text, row by row or, where a processor or criterion demands it, in lockstep."""

    def __init__(
        self, processors: Processors, text: Text, sample: bool, config: SpeculationConfig, record: Record
    ) -> None:
        self.processors, self.text, self.record = processors, text, record
        self.sample, self.config = sample, config
        self.rule = rule_for(config)
        self.judge: CompiledJudge | None = None  # from the prefill on, if the target is compiled
        stops, several = text.stops, len(text.rows) > 1
        token_by_token = self.rule.weigh is None and self.rule.accept is None
        self.lockstep = (
            processors.lockstep or stops.lockstep or (sample and token_by_token) or (stops.waits and several)
        )
        self.lossy = self.rule.accept if sample or self.rule.when_greedy else None
        if self.lossy is not None and self.lockstep:
            raise Refusal(
                f"acceptance={config.acceptance!r} weighs whole paths, but a processor or stopping criterion of this "
                "call has to see the text token by token; declare a processor with hf_spec.pure or use "
                "acceptance='lossless'"
            )

    def judge_compiled(self, compiler: Compiler, nodes: int) -> None:
        """Weigh drawn guesses in proposals of ``nodes`` nodes in a graph, if scores are processed at all of them."""
        if self.samples_row_by_row and self.rule.weigh is not None and self.processors.together:
            self.judge = CompiledJudge(compiler, nodes, self.rule.weigh)

    def choose(self, proposal: Proposal, scores: Scores) -> Choice | None:
        """Emit what the target's distribution makes of ``proposal``: at least one token per row.

        ``None``, and nothing is emitted: a guess may have spoilt the scores, see ``_is_sound``. Score no guesses then.
        """
        logits = scores.logits.to(proposal.tokens.device)
        return (self._together if self.lockstep else self._row_by_row)(proposal, logits, scores)

    @property
    def samples_row_by_row(self) -> bool:
        """Tell whether drawn guesses help: in lockstep the target's own draws decide, and the best guess is best."""
        return self.sample and not self.lockstep and self.rule.weigh is not None

    # -- rows advance by different amounts ----------------------------------------------------------------------------

    def _row_by_row(self, proposal: Proposal, logits: Tensor, scores: Scores) -> Choice | None:
        text = self.text
        ids = text.ids if not self.processors.memoryless else None
        nodes = NodeScores(self.processors, logits, proposal, ids, text.row_lengths, text.rows, text.stops)
        verdict, figures = self._judged(proposal, nodes, logits)
        if not figures.are_sound:
            return None
        rows, emitted = text.rows, figures.tokens
        if any(new[-1] < 0 for new in emitted):
            raise RuntimeError(
                "no token can be drawn (plain generate fails there, too): a row's scores are all -inf, or one is nan. "
                "Look for a logits processor that leaves no token, or for logits that overflow."
            )
        kept = text.extend(emitted)
        self.record.add(rows, verdict.path, kept, logits, scores.hidden_states, nodes.at)
        accepted = [min(count, len(tokens) - 1) for tokens, count in zip(emitted, kept, strict=True)]
        counts: Tensor | None = verdict.counts
        if kept != list(map(len, emitted)):
            counts, emitted = None, [tokens[:count] for tokens, count in zip(emitted, kept, strict=True)]
        sizes = figures.guesses, figures.deepest, figures.in_place
        return Choice(verdict.path, verdict.tokens, kept, emitted, accepted, *sizes, counts)

    def _judged(self, proposal: Proposal, nodes: NodeScores, logits: Tensor) -> tuple[Verdict, Figures]:
        judge = self.judge
        if judge is not None and judge.takes(proposal):
            verdict, table = judge(proposal, logits, None if self.processors.is_empty else nodes.every())
        else:
            verdict = self._verdict(proposal, nodes)
            table = table_of(proposal, verdict, nodes.are_sound() if proposal.max_depth else None)
        return verdict, figures_of(proposal, verdict, table)

    def _verdict(self, proposal: Proposal, nodes: NodeScores) -> Verdict:
        if self.lossy is not None:
            return self.lossy(proposal, nodes.every().softmax(-1), self.config, self.sample)
        if proposal.max_depth == 0:
            return self._ordinary(proposal, nodes)
        if self.sample and self.rule.weigh is not None and proposal.q is not None:
            return self.rule.weigh(proposal, nodes.every().softmax(-1))
        if self.sample and proposal.is_chain and self.processors.together:  # what `follow` would ask for, at once
            return match(proposal, draw(nodes.every().softmax(-1)))
        if self.sample:
            return follow(proposal, lambda node: draw(nodes.at(node).softmax(-1)))
        if not self.processors.together:  # costly: ask only at the nodes on the way
            return follow(proposal, lambda node: nodes.at(node).argmax(-1))
        return match(proposal, nodes.best())

    def _ordinary(self, proposal: Proposal, nodes: NodeScores) -> Verdict:
        """Emit one token behind every root, where there is no guess to look at."""
        rows, device = proposal.tokens.shape[0], proposal.tokens.device
        scores = nodes.at_root()  # (rows, vocabulary)
        token = draw(scores.softmax(-1)) if self.sample else likeliest(scores)
        return Verdict(repeated(0, rows, device)[:, None], token[:, None], repeated(1, rows, device))

    # -- all rows advance together ------------------------------------------------------------------------------------

    def _together(self, proposal: Proposal, logits: Tensor, scores: Scores) -> Choice | None:
        """Emit token by token with exactly the calls, and the random draws, of plain ``generate``.

        Goes on as long as every growing row's token was guessed: the next call needs scores for all of them.
        """
        if proposal.max_depth and not bool(_is_sound(proposal, logits).all()):
            return None
        rows, row_index = self.text.rows, numbers(len(self.text.rows), logits.device)
        node = repeated(0, len(rows), logits.device)
        path: list[Tensor] = []
        tokens: list[Tensor] = []
        kept, accepted = [0] * len(rows), [0] * len(rows)
        while True:
            processed = self._plain_scores(rows, logits[row_index, node])
            token = self._plain_pick(processed)
            growing = [i for i, row in enumerate(rows) if row in self.text.rows]
            path.append(node)
            tokens.append(token[rows])
            self.record.add_column(rows, growing, logits, scores.hidden_states, node, processed[rows])
            self.text.extend_together(token, self.record.scores_so_far())
            child = proposal.child(node, tokens[-1])
            guessed = (child >= 0).tolist()
            for i in growing:
                kept[i] += 1
                accepted[i] += guessed[i]
            if not all(guessed[i] for i in growing if rows[i] in self.text.rows) or not self.text.rows:
                break
            node = child.clamp(min=0)
        emitted = torch.stack(tokens, dim=1)  # (rows, m)
        texts = [row[:count] for row, count in zip(emitted.tolist(), kept, strict=True)]
        proposed, deepest = _size(proposal).T.tolist()
        return Choice(torch.stack(path, 1), emitted, kept, texts, accepted, proposed, deepest, proposal.is_chain)

    def _plain_scores(self, rows: list[int], logits: Tensor) -> Tensor:
        """Call the user's processors on the whole batch, as plain ``generate`` does; finished rows score zeros."""
        ids = self.text.padded()
        scores = logits.new_zeros((len(ids), logits.shape[-1]), dtype=torch.float32)
        scores[rows] = logits.float()
        return self.processors(ids, scores)

    def _plain_pick(self, scores: Tensor) -> Tensor:
        if self.sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        return scores.argmax(-1)


def _is_sound(proposal: Proposal, logits: Tensor) -> Tensor:
    """Tell whose ``logits`` (rows, nodes, vocabulary) hold no nan and no inf at the nodes that exist: (rows,) bool.

    A guess whose forward overflows spoils the other nodes too: attention gives it no weight, but 0 * nan is nan.
    """
    return ((logits.amax(-1) < torch.inf) | ~proposal.present).all(1)


def _size(proposal: Proposal) -> Tensor:
    """Count the guesses and the longest path of each row, (rows, 2)."""
    guesses = proposal.present.sum(1) - 1
    if proposal.is_chain:
        return torch.stack([guesses, guesses], dim=1)
    deepest = proposal.depth.masked_fill(~proposal.present, 0).amax(1)
    return torch.stack([guesses, deepest], dim=1)
