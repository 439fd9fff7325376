"""Draft with a language model that has another tokenizer than the target."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...device_tensors import to_list
from ...proposal import Proposal
from ...scoring.architectures import keeps_own_states, why_unsupported
from ...scoring.cache import has_states
from ...scoring.checkpointing import drops_cache
from ...scoring.factory import runner_for
from ...scoring.plain import input_device, new_cache, padded, position_limit, scored_vocabulary
from ...settings import SpeculationConfig
from ..base import AcceptedTokens, DraftContext, Drafter, Speculator
from ..static import not_compiled
from ..trees import grow
from .reading import Reading
from .token_bytes import TokenBytes, shared_tokens, whole_characters
from .ways import TEXT, TOKENS, Ways

UNSHARED = -1  # in place of a draft's token
MOST_FORWARDS = 3  # of the draft for each draft token of the target, when it writes text

logger = logging.get_logger(__name__)


class TranslatedSpeculator(Speculator):
    """Draft with ``model``, a causal language model whose ``tokenizer`` is not ``target_tokenizer``.

    transformers calls this universal assisted decoding. There are two ways:

    - *by shared tokens*: the draft is restricted to tokens that write the same bytes in both tokenizers. So their
      distribution is known, also in trees, and draft tokens can be sampled. (TLI)
    - *by text*: the draft writes freely, and the target's tokenizer encodes that. Such draft tokens are
      deterministic. (SLEM)

    Sampled draft tokens and trees are drafted by shared tokens. So is whatever a rule verifies that is not lossless.
    Greedy chains take the way by which more tokens were accepted, which is tried for the first steps.

    Source: Timor et al., arXiv 2502.05202.

    Raises:
        ValueError: for a tokenizer that is not of the tokenizers library.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, target_tokenizer: Any) -> None:
        self.model = model
        self.tokenizers = tokenizer, target_tokenizer
        self.own, self.targets = TokenBytes.known(tokenizer), TokenBytes.known(target_tokenizer)
        self.shared = shared_tokens(self.targets, self.own)
        self.ways = Ways.of(model, target_tokenizer)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        """Raise a ValueError if the draft cannot take draft tokens back, or shares no tokens where it has to."""
        name, cache, other = type(self.model).__name__, new_cache(self.model), "use another draft, or 'ngram'"
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder model, for which no draft with another tokenizer can "
                "read the source; use a draft of its own kind, or 'ngram'"
            )
        if self.model is target:
            raise ValueError("the draft is the target itself, which has one tokenizer; use a smaller model")
        if drops_cache(self.model):
            raise ValueError(
                f"the draft {name} is in training mode with activation checkpointing, which drops its cache; call "
                "draft.eval() first"
            )
        if (reason := why_unsupported(self.model, cache)) is not None:
            raise ValueError(f"{name} cannot be a draft: {reason}; {other}")
        if keeps_own_states(self.model) or has_states(cache):
            raise ValueError(
                f"{name} cannot be a draft with another tokenizer: it keeps recurrent states, which do not go back to "
                f"where a text is encoded anew; {other}"
            )
        if config is not None and config.tree is not None and not self.shared_with(target):
            raise ValueError(
                f"the tokenizers of draft and target share no tokens, which trees are made of; use a chain "
                f"(tree=None), {other}"
            )

    def shared_with(self, target: PreTrainedModel) -> dict[int, int]:
        """Map the tokens of ``target`` to those of the draft that mean the same, the end of a text included."""
        known, own = scored_vocabulary(target), scored_vocabulary(self.model)
        found = {id: one for id, one in self.shared.items() if id < known and one < own}
        ends, own_ends = _ends(target, self.targets.tokenizer), _ends(self.model, self.own.tokenizer)
        if ends and own_ends and not found.keys() & ends:
            taken = {*found.values()}
            free = [one for one in own_ends if one not in taken]
            if free and ends[0] < known:
                found[ends[0]] = free[0]
        return found

    @property
    def profile_key(self) -> tuple[Hashable, ...]:
        """Name the tokenizers."""
        return (*super().profile_key, id(self.own), id(self.targets))

    def drafter(self, request: DraftContext) -> Drafter:
        """Read the prompt with the draft."""
        if request.compiler is not None:
            not_compiled(self.model, "its tokens are translated on the CPU")
        return TranslatedDrafter(self, request)


class TranslatedDrafter(Drafter):
    """The texts of a call in the draft's own tokens, and the draft's cache.

    The cache holds what was read of them. Where a text is encoded anew, its last tokens are taken back and read again.
    """

    def __init__(self, speculator: TranslatedSpeculator, request: DraftContext) -> None:
        self._request, self.own, self._targets = request, speculator.own, speculator.targets
        self._ways, model = speculator.ways, speculator.model
        self._device = input_device(model)
        shared = speculator.shared_with(request.target)
        self._to_own = torch.full((request.vocabulary,), UNSHARED)
        self._to_own[list(shared)] = torch.tensor(list(shared.values()), dtype=torch.long)
        self._to_own = self._to_own.to(self._device)
        self._is_shared = self._to_own >= 0
        self._has_shared = bool(shared)
        ends = _ends(request.target, self._targets.tokenizer)
        self.end, self._own_ends = next(iter(ends), None), {*_ends(model, self.own.tokenizer)}
        special = {id: own for id, own in shared.items() if self._targets.is_special(id)}
        head = _head(self.own.tokenizer)
        if head:  # it has a beginning already
            special = {id: own for id, own in special.items() if own != head[0]}
        self._rows = [Reading(self._targets, self.own, special, head) for _ in request.input_ids]
        for row, prompt in zip(self._rows, request.prompts(), strict=True):
            row.extend(prompt)
            if not row.ids:  # nothing to read: any token will do
                row.ids.append(next(iter(self._own_ends), 0))
        self._limit, self._reads = position_limit(model), True
        self._last: tuple[str, int] | None = None  # the way of the last proposal and its depth, if it was free
        self._runner = runner_for(model, new_cache(model), one_chain=False)
        self._padding = self._prefill()

    def propose(self, accepted: AcceptedTokens, limit: int) -> Proposal:
        """Read what is new, and draft in one of the two ways. A text that ends within a character gets no draft."""
        for row, tokens in zip(self._rows, accepted.emitted, strict=True):
            row.extend(tokens)
        if self._last is not None:
            way, depth = self._last
            amounts = [min(count - 1, depth) for count in accepted.amounts]
            self._ways.record(way, sum(amounts) / len(amounts))
            self._last = None
        root = accepted.root
        unfinished = [row.is_unfinished for row in self._rows]
        self._reads = self._reads and self._has_positions(limit)
        if limit == 0 or all(unfinished) or not self._reads:
            return Proposal.nothing(root)
        logits = self._catch_up()
        way = self._way()
        proposal = (self._by_text if way == TEXT else self._by_tokens)(root, logits, limit)
        if self._is_free:
            self._last = way, proposal.max_depth
        if any(unfinished):
            proposal = proposal.truncate_rows([0 if one else limit for one in unfinished])
        return proposal

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        kept = to_list(rows)
        self._rows, self._padding = [self._rows[i] for i in kept], [self._padding[i] for i in kept]
        if self._reads:  # else the prompts were too long, or the texts are now
            self._runner.keep_rows(rows.to(self._device))

    @property
    def _is_free(self) -> bool:
        """Tell whether draft tokens may be drafted either way."""
        request = self._request
        # With `sample_draft=False` the number of random draws depends on the way, and a seed must give one text.
        free = not request.sample and request.config.tree is None and request.config.sample_draft
        # By other rules the text depends on the draft tokens, and earlier calls must not change it.
        return free and self._has_shared and request.config.acceptance == "lossless"

    def _way(self) -> str:
        if self._is_free:
            return self._ways.choose()
        return TOKENS if self._has_shared else TEXT

    def ends_with(self, token: int) -> bool:
        """Tell whether ``token`` of the draft ends a text."""
        return token in self._own_ends

    def _has_positions(self, limit: int) -> bool:
        if self._limit is None:
            return True
        longest = max(padding + len(row.ids) for padding, row in zip(self._padding, self._rows, strict=True))
        if longest + MOST_FORWARDS * (1 + limit) <= self._limit:
            return True
        logger.warning_once(
            f"the draft has positions for {self._limit} tokens only: longer text is decoded by plain steps"
        )
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def _prefill(self) -> list[int]:
        """Read the prompts, and return the padding of each row."""
        inputs = padded([row.ids for row in self._rows], 0, self._device)
        width = inputs["input_ids"].shape[1]
        if self._limit is not None and width > self._limit:
            self._reads = False
            return [0] * len(self._rows)
        self._runner.prefill_tokens(inputs["input_ids"], inputs["attention_mask"])
        for row in self._rows:
            row.read = len(row.ids)
        return [width - len(row.ids) for row in self._rows]

    def _catch_up(self) -> Tensor:
        """Read what is new of each text, at least its last token; return the logits after it (rows, vocabulary)."""
        for row in self._rows:
            row.read = min(row.read, len(row.ids) - 1)
        self._runner.shorten([padding + row.read for padding, row in zip(self._padding, self._rows, strict=True)])
        new = [row.ids[row.read :] for row in self._rows]
        counts = list(map(len, new))
        block = torch.tensor([ids + [0] * (max(counts) - len(ids)) for ids in new], device=self._device)
        logits = self._runner.extend(block).logits
        self._runner.commit(block, counts, in_place=True)
        for row in self._rows:
            row.read = len(row.ids)
        return logits[torch.arange(len(new)), torch.tensor(counts) - 1]

    # -- by shared tokens ---------------------------------------------------------------------------------------------

    def _by_tokens(self, root: Tensor, logits: Tensor, limit: int) -> Proposal:
        request, root = self._request, root.to(self._device)
        asked = (request.config, limit, request.sample)
        return grow(root, self._log_probs(logits), self._step, *asked).to(request.input_ids.device)

    def _step(self, tokens: Tensor, depth: int, parents: Tensor | None, ancestors: Tensor | None) -> Tensor:
        own = self._to_own[tokens].clamp(min=0)  # others are drafted only where nothing shared is possible
        return self._log_probs(self._runner.extend(own, ancestors, depth - 1).logits)

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Turn draft logits (..., draft vocabulary) into log-probabilities over the target's vocabulary."""
        over_target = logits[..., self._to_own.clamp(min=0)].float().masked_fill(~self._is_shared, -torch.inf)
        return self._request.log_probs(over_target.to(self._request.input_ids.device)).to(self._device)

    # -- by text ------------------------------------------------------------------------------------------------------

    def _by_text(self, root: Tensor, logits: Tensor, limit: int) -> Proposal:
        """Let the draft write, greedily, until the target's tokens for that are enough in each row."""
        written = [_Written(self, row.end) for row in self._rows]
        threshold = self._request.config.confidence_threshold
        for _ in range(MOST_FORWARDS * (1 + limit)):
            best = logits.argmax(-1)
            confidence = logits.float().softmax(-1).amax(-1).tolist() if threshold > 0 else None
            for number, (one, token) in enumerate(zip(written, best.tolist(), strict=True)):
                one.add(token)
                if confidence is not None and confidence[number] < threshold:
                    one.stop()
            if all(one.is_done or len(one.tokens) > limit for one in written):
                break
            logits = self._runner.extend(best[:, None]).logits[:, -1]
        drafts = [one.draft_tokens(limit) for one in written]
        counts = list(map(len, drafts))
        if not any(counts):
            return Proposal.nothing(root)
        table = torch.tensor([draft + [0] * (max(counts) - len(draft)) for draft in drafts], device=root.device)
        return Proposal.chain(root, table, torch.tensor(counts, device=root.device))

    def encoded(self, end: bytes, written: bytes) -> list[int]:
        """Return the target's tokens for what was ``written`` after a text with this ``end``."""
        written_whole = whole_characters(written)
        tokens = self._targets.encode(end + written_whole, starts=False)
        place = 0
        for number, token in enumerate(tokens):
            if place == len(end):
                return tokens[number:]
            place += len(self._targets.written([token]))
        return self._targets.encode(written_whole, starts=False)  # the end would be encoded in another way


class _Written:
    """What the draft has written freely after one text, and the target's tokens for that."""

    def __init__(self, drafter: TranslatedDrafter, end: bytes) -> None:
        self._drafter, self._end = drafter, end
        self._data = b""
        self.tokens: list[int] = []
        self.is_done = self._ended = False

    def add(self, token: int) -> None:
        """Append a ``token`` of the draft, unless something ended the text."""
        if self.is_done:
            return
        if self._drafter.ends_with(token) or self._drafter.own.is_special(token):
            self.is_done, self._ended = True, self._drafter.ends_with(token)
            return
        self._data += self._drafter.own.written([token])
        self.tokens = self._drafter.encoded(self._end, self._data)

    def stop(self) -> None:
        """Write no more."""
        self.is_done = True

    def draft_tokens(self, limit: int) -> list[int]:
        """Return at most ``limit`` tokens of the target. The last one may go on, unless the text has ended."""
        end = self._drafter.end
        if not self._ended:
            return self.tokens[:-1][:limit]
        return [*self.tokens, *([] if end is None else [end])][:limit]


def _ends(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """List the tokens that end a text of ``model``, those of its generation config first."""
    config = getattr(model, "generation_config", None)
    found = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    flat = [one for ends in found for one in (ends if isinstance(ends, list | tuple) else [ends]) if one is not None]
    return list(dict.fromkeys(map(int, flat)))


def _head(tokenizer: Any) -> list[int]:
    """Return what ``tokenizer`` puts before every text: the token of its beginning, or nothing."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    return [begin] if begin is not None and tokenizer("").input_ids[:1] == [begin] else []
