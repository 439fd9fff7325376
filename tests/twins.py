"""What the tests of the loop share: small targets, and drafts that are partly right about them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from architectures import build
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, Speculator

CHAIN = SpeculationConfig(num_speculative_tokens=4)
TREE = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=6)
SHAPES = {"chain": CHAIN, "tree": TREE}
DEPTHS = {"gemma3n_text": 4, "gemma2": 4, "qwen3_next": 4}  # two layers of each kind
BATCHES = {"one": (1, (13,)), "ragged": (3, (13, 9, 5)), "eight": (8, (13, 9, 5, 1))}


class Heard(BaseStreamer):
    """A streamer that keeps every token that it is given, and -1 at the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def path_to(proposal: Proposal, row: int, node: int) -> tuple[int, ...]:
    """Follow the parents of a node up to the root and list the guesses on the way, the first one first."""
    parent = int(proposal.parents[row, node])
    return () if node == 0 else (*path_to(proposal, row, parent), int(proposal.tokens[row, node]))


def paths_of(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """List the paths to the guesses of a row, in the order of its nodes."""
    return [path_to(proposal, row, node) for node in proposal.present[row].nonzero()[1:, 0].tolist()]


def target(name: str = "llama", **overrides: Any) -> PreTrainedModel:
    return _target(name, **overrides)


@functools.cache
def _target(name: str, **overrides: Any) -> PreTrainedModel:
    return build(name, **{"num_hidden_layers": DEPTHS.get(name, 2)} | overrides)


def noisy(model: PreTrainedModel, noise: float = 0.04, seed: int = 1) -> PreTrainedModel:
    """Copy ``model`` with a little noise in its matrices: a draft that is right about half of the time."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return draft


def draft(name: str = "llama") -> PreTrainedModel:
    return _draft(name)


@functools.cache
def _draft(name: str) -> PreTrainedModel:
    return noisy(target(name))


def fitted(draft: Any, model: PreTrainedModel, text: Tensor, mask: Tensor, steps: int = 24) -> Any:
    """Teach ``draft`` by heart what ``model`` wrote, at its first step: it will be right now and then.

    ``text`` and ``mask`` are (batch, length), left-padded; the draft reads what it will read while guessing.
    """
    draft.bind(model)
    with torch.no_grad():
        states = model(text, attention_mask=mask, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in draft.feature_layers(model)], dim=-1)[:, :-2]
    optimizer = torch.optim.Adam(draft.parameters(), lr=0.01)
    labels = text[:, 2:]
    if draft.t2d is not None:
        labels = labels.where(draft.t2d[labels], -100)
        labels = labels.where(labels < 0, torch.searchsorted(draft.target_ids, labels.clamp(min=0)))
    for _ in range(steps):
        logits = draft(text[:, 1:-1], features=features, attention_mask=mask[:, 1:-1]).logits
        heads = logits.unbind(2) if logits.ndim == 4 else [logits]  # of Medusa, each one token further on
        optimizer.zero_grad()
        for i, head in enumerate(heads):
            known = head[:, : labels.shape[1] - i].flatten(0, 1)
            torch.nn.functional.cross_entropy(known, labels[:, i:].flatten()).backward(retain_graph=True)
        optimizer.step()
    return draft.eval()


@functools.cache
def tokenizer(vocab_size: int = 99) -> PreTrainedTokenizerFast:
    """Make a character of every token."""
    characters = ["<pad>", "<s>", "</s>", *(chr(32 + i) for i in range(vocab_size - 3))]
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left")


class ByCode(PreTrainedTokenizerFast):
    """A tokenizer that is made as Mistral's: over another library's, without a template, and its chats by code."""

    tokenizer, backend_tokenizer = "another library's", None

    def added_tokens_decoder(self) -> Any:
        raise NotImplementedError

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        assert tokenize, "such texts cannot be encoded again"
        ids = [self.eos_token_id, *self.encode("".join(one["content"] for one in messages))]
        kind = kwargs.get("return_tensors")
        return BatchEncoding({"input_ids": ids}, tensor_type=kind, prepend_batch_axis=kind is not None)


def by_code() -> Any:
    made: Any = copy.copy(tokenizer())
    made.__class__, made.chat_template = ByCode, None  # whose base reads the added tokens when it is made
    return made


class Oracle(Speculator):
    """Guess ``text`` (batch, length), the output of a plain call, but for every ``wrong``-th token.

    Acceptance is known, differs from row to row and costs no forward. In a tree every guess has a wrong elder sibling.
    """

    def __init__(self, text: Tensor, wrong: int = 4, vocab_size: int = 99) -> None:
        self.text = text
        self.wrong = wrong
        self.vocab_size = vocab_size

    def drafter(self, request: DraftContext) -> Drafter:
        return _OracleDrafter(self, request)


class _OracleDrafter(Drafter):
    def __init__(self, oracle: Oracle, request: DraftContext) -> None:
        self._vocab_size = oracle.vocab_size
        batch, length = oracle.text.shape
        self._device = request.input_ids.device
        self._text = torch.nn.functional.pad(oracle.text.to(self._device), (0, 64))
        place = self._numbers(length + 64) + self._numbers(batch)[:, None]
        self._text = torch.where(place % oracle.wrong == 0, (self._text + 1) % oracle.vocab_size, self._text)
        self._lengths = torch.full((batch,), request.input_ids.shape[1], device=self._device)
        self._tree = request.config.tree is not None
        self._depth = request.config.num_speculative_tokens or 4

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)

    def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
        self._lengths += news.counts
        depth = min(limit, self._depth)
        guesses = self._text.gather(1, self._lengths[:, None] + self._numbers(depth))  # (batch, depth)
        if not self._tree:
            return Proposal.chain(news.root, guesses)
        siblings = torch.stack([(guesses + 7) % self._vocab_size, guesses], dim=2).flatten(1)
        parents = torch.tensor([-1, *(2 * (node // 2) for node in range(2 * depth))], device=self._device)
        tokens = torch.cat([news.root[:, None], siblings], dim=1)
        return Proposal(tokens, parents.expand_as(tokens), depth)

    def keep_rows(self, rows: Tensor) -> None:
        self._text, self._lengths = self._text[rows], self._lengths[rows]
