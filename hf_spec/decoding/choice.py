"""Choose what becomes text: the target's distribution, the verification rule, and the end of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafts.base import News
from ..proposal import Proposal
from ..sampling import draw
from ..scoring.runner import Scores
from ..settings import SpeculationConfig
from .outputs import Record
from .processors import NodeScores, Processors
from .text import Text
from .verification import Verdict, follow, match, rule_for


@dataclass(frozen=True)
class Choice:
    """What a step emitted: ``tokens`` (rows, m), of which ``kept[b]`` became text, after the nodes ``path`` (rows, m).

    Per row, ``emitted`` are the kept tokens, ``accepted`` of them were guesses, ``proposed`` counts the guesses and
    ``deepest`` the longest guessed path.
    """

    path: Tensor
    tokens: Tensor
    kept: list[int]
    emitted: list[list[int]]
    accepted: list[int]
    proposed: list[int]
    deepest: list[int]

    def news(self, features: Tensor | None, rows: list[int]) -> News:
        """Tell the drafter about ``rows``: each emitted token beside the features of the node before it."""
        width = max(self.kept[row] for row in rows)
        amounts = [self.kept[row] for row in rows]
        counts = torch.tensor(amounts, device=self.tokens.device)
        if features is None and len(rows) == len(self.kept):
            return News(self.tokens[:, :width], counts, None, amounts)
        index = torch.tensor(rows, device=self.tokens.device)
        if features is not None:
            path = self.path[index, :width].to(features.device)
            features = features[index.to(features.device)[:, None], path]  # (rows, width, features)
        return News(self.tokens[index, :width], counts, features, amounts)


class Chooser:
    """Turn scores of a proposal into text, row by row or, where a processor or criterion demands it, in lockstep."""

    def __init__(
        self, processors: Processors, text: Text, sample: bool, config: SpeculationConfig, record: Record
    ) -> None:
        self.processors, self.text, self.record = processors, text, record
        self.sample, self.config = sample, config
        self.rule = rule_for(config)
        stops, several = text.stops, len(text.rows) > 1
        token_by_token = self.rule.weigh is None and self.rule.accept is None
        self.lockstep = (
            processors.lockstep or stops.lockstep or (sample and token_by_token) or (stops.waits and several)
        )
        self.lossy = self.rule.accept if sample or self.rule.when_greedy else None
        if self.lossy is not None and self.lockstep:
            raise ValueError(
                f"acceptance={config.acceptance!r} weighs whole paths, but a processor or stopping criterion of this "
                "call has to see the text token by token; declare a processor with hf_spec.pure or use "
                "acceptance='lossless'"
            )

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
        nodes = NodeScores(
            self.processors, logits, proposal, text.ids, text.row_lengths, text.rows, text.stops.last_tokens
        )
        verdict = self._verdict(proposal, nodes)
        figures = _figures(proposal, verdict, logits)
        if proposal.max_depth and not all(figure[3] for figure in figures):
            return None
        rows = text.rows
        emitted = [tokens[:count] for count, _, _, _, *tokens in figures]
        if any(new[-1] < 0 for new in emitted):
            raise RuntimeError(
                "no token can be drawn (plain generate fails there, too): a row's scores are all -inf, or one is nan. "
                "Look for a logits processor that leaves no token, or for logits that overflow."
            )
        kept = text.extend(verdict.tokens, emitted)
        self.record.add(rows, verdict.path, kept, logits, scores.hidden_states, nodes.at)
        return Choice(
            verdict.path,
            verdict.tokens,
            kept,
            emitted=[tokens[:count] for tokens, count in zip(emitted, kept, strict=True)],
            accepted=[min(count, figure[0] - 1) for figure, count in zip(figures, kept, strict=True)],
            proposed=[figure[1] for figure in figures],
            deepest=[figure[2] for figure in figures],
        )

    def _verdict(self, proposal: Proposal, nodes: NodeScores) -> Verdict:
        if self.lossy is not None:
            return self.lossy(proposal, nodes.every().softmax(-1), self.config, self.sample)
        if proposal.max_depth == 0:
            return self._ordinary(proposal, nodes)
        if self.sample and self.rule.weigh is not None and proposal.q is not None:
            return self.rule.weigh(proposal, nodes.every().softmax(-1))
        if self.sample:
            return follow(proposal, lambda node: draw(nodes.at(node).softmax(-1)))
        if not self.processors.memoryless:  # costly: ask only at the nodes on the way
            return follow(proposal, lambda node: nodes.at(node).argmax(-1))
        return match(proposal, nodes.best())

    def _ordinary(self, proposal: Proposal, nodes: NodeScores) -> Verdict:
        """Emit one token behind every root, where there is no guess to look at."""
        root = torch.zeros_like(proposal.root)
        if self.processors.is_empty and not self.sample:
            return Verdict(root[:, None], nodes.best(), torch.ones_like(root))
        scores = nodes.at(root)  # (rows, vocabulary)
        token = draw(scores.softmax(-1)) if self.sample else scores.argmax(-1)
        return Verdict(root[:, None], token[:, None], torch.ones_like(root))

    # -- all rows advance together ------------------------------------------------------------------------------------

    def _together(self, proposal: Proposal, logits: Tensor, scores: Scores) -> Choice | None:
        """Emit token by token with exactly the calls, and the random draws, of plain ``generate``.

        Goes on as long as every growing row's token was guessed: the next call needs scores for all of them.
        """
        if proposal.max_depth and not bool(_is_sound(proposal, logits).all()):
            return None
        rows, row_index = self.text.rows, torch.arange(len(self.text.rows), device=logits.device)
        node = torch.zeros_like(row_index)
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
        return Choice(torch.stack(path, 1), emitted, kept, texts, accepted, proposed, deepest)

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


def _figures(proposal: Proposal, verdict: Verdict, logits: Tensor) -> list[list[int]]:
    """Ask the device once, row by row: how many tokens count, how many guesses there were, how deep they went, whether
    the logits are sound, and the tokens."""
    if proposal.max_depth == 0:
        return [[1, 0, 0, True, *tokens] for tokens in verdict.tokens.tolist()]
    sound, size = _is_sound(proposal, logits)[:, None], _size(proposal)
    figures: list[list[int]] = torch.cat([verdict.counts[:, None], size, sound, verdict.tokens], dim=1).tolist()
    return figures


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
