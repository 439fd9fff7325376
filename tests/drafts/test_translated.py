"""Drafts with another tokenizer: what tokens write, texts in the draft's tokens, and whole calls of ``generate``."""

from __future__ import annotations

import copy
import difflib
import functools
import gc
import itertools
import json
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, prompts
from batches import batching, greedy
from pairs import usual
from test_verification import TOO_FAR, deviation
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.models.clip import CLIPImageProcessor
from transformers.utils import logging
from twins import by_code, noisy

import hf_spec
from hf_spec import (
    DraftContext,
    Drafter,
    HybridSpeculator,
    SpeculationConfig,
    TranslatedSpeculator,
    VanillaSpeculator,
    demo,
)
from hf_spec.checkpoints import resolve
from hf_spec.cli.loading import load_speculator
from hf_spec.drafts.translated import reading
from hf_spec.drafts.translated.reading import Reading
from hf_spec.drafts.translated.speculator import TranslatedDrafter
from hf_spec.drafts.translated.token_bytes import TokenBytes, shared_tokens, whole_characters
from hf_spec.drafts.translated.ways import TEXT, TOKENS, TRIED, Ways

STORIES = (Path(__file__).parents[1] / "fixtures" / "stories_excerpt.txt").read_text(encoding="utf-8")
ODD = 'Tom said: "naïve café!"\n\n  Two  spaces, 東京 and 🙂🙂. The end\n'
PROMPTS = ["Once upon a time, there was a little dog", "Tom and Lily went to the park. They saw", "The"]
CHAIN = SpeculationConfig(num_speculative_tokens=4)
TREE = SpeculationConfig(num_speculative_tokens=3, tree="dynamic", tree_topk=2, num_tree_tokens=6)


# --- Tokenizers ------------------------------------------------------------------------------------------------------


def trained(backend: Tokenizer, trainer: Any, **special: str) -> PreTrainedTokenizerFast:
    backend.train_from_iterator(STORIES.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@functools.cache
def tokenizer(kind: str, size: int = 400) -> PreTrainedTokenizerFast:
    """Train a small tokenizer of a kind."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    first = ["<unk>", "<s>", "</s>"]
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=size, special_tokens=first, initial_alphabet=alphabet)
    elif kind == "sentencepiece":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=first + [f"<0x{byte:02X}>" for byte in range(256)]
        )
        made = trained(backend, trainer, unk_token="<unk>", **names)
        # Tokens for single bytes are ordinary ones, as in published files.
        saved = json.loads(made.backend_tokenizer.to_str())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if "<0x" not in token["content"]]
        backend = Tokenizer.from_str(json.dumps(saved))
        return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **names)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=first, unk_token="<unk>")
    else:
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first)
    return trained(backend, trainer, unk_token="<unk>", **names)


KINDS = ["byte-level", "sentencepiece", "wordpiece"]
ROUND = zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)  # each kind once on either side


@functools.cache
def target() -> tuple[PreTrainedModel, Any]:
    words = AutoTokenizer.from_pretrained(demo.path())
    words.padding_side = "left"
    return AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval(), words


@functools.cache
def draft() -> tuple[PreTrainedModel, Any]:
    """Give the demo draft model other ids and fewer tokens: the later half of its merges is left out."""
    words = target()[1]
    saved = json.loads(words.backend_tokenizer.to_str())
    special = [token["content"] for token in saved["added_tokens"]]
    vocabulary, merges = saved["model"]["vocab"], saved["model"]["merges"]
    gone = {"".join(pair) for pair in merges[len(merges) // 2 :]}
    kept = [token for token in vocabulary if token not in gone or token in special]
    random.Random(0).shuffle(kept)
    ids = {token: i for i, token in enumerate(kept)}
    saved["model"] |= {"vocab": ids, "merges": merges[: len(merges) // 2]}
    for token in saved["added_tokens"]:
        token["id"] = ids[token["content"]]
    saved["post_processor"] = None
    names = {"bos_token": words.bos_token, "eos_token": words.eos_token}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved)), **names)
    model: Any = AutoModelForCausalLM.from_pretrained(demo.path("draft-vanilla"), dtype=torch.float32).eval()
    rows = torch.tensor([vocabulary[token] for token in kept])
    embeddings, head = (one.weight.detach()[rows] for one in (model.get_input_embeddings(), model.lm_head))
    model.resize_token_embeddings(len(kept))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings)
        model.lm_head.weight.copy_(head)
    return model, other


def translated() -> TranslatedSpeculator:
    return TranslatedSpeculator(*draft(), target()[1])


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Take one way, or whichever is better."""
    if request.param is not None:
        monkeypatch.setattr(Ways, "choose", lambda self: request.param)
    return request.param


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [True, False])
def test_tokens_write_the_text_that_they_were_made_of(kind: str, starts: bool) -> None:
    known = TokenBytes(tokenizer(kind))
    text = STORIES[:300].lower().replace(".", "").replace(",", "").replace("\n", " ") if kind == "wordpiece" else ODD
    if kind == "wordpiece":  # it writes words, and knows nothing else of a text
        text = " ".join(word for word in text.split() if word.isalpha())
    written = known.written(known.encode(text.encode(), starts)).decode()
    assert written in ((f" {text}",) if kind == "wordpiece" or (starts and kind == "sentencepiece") else (text,))


def test_special_tokens_write_nothing_and_added_ones_their_text() -> None:
    words = copy.deepcopy(tokenizer("byte-level"))
    words.add_tokens(["naïve"])
    known = TokenBytes(words)
    ids = words("naïve</s>", add_special_tokens=False).input_ids
    assert [known.of[id] for id in ids] == ["naïve".encode(), None]
    assert known.is_special(ids[1]) and known.is_special(10**6) and known.specials["</s>"] == ids[1]


def test_tokens_are_shared_by_what_they_write() -> None:
    one, other = (TokenBytes(tokenizer(kind, 700)) for kind in ("byte-level", "sentencepiece"))
    shared = shared_tokens(one, other)
    assert len({*shared.values()}) == len(shared)
    for id, own in shared.items():
        assert one.of[id] == other.of[own]
    vocabularies = one.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    space = vocabularies[0]["Ġthe"], vocabularies[1]["▁the"]
    same_names = vocabularies[0].keys() & vocabularies[1].keys()
    assert shared[space[0]] == space[1] and len(shared) > len(same_names)
    assert shared[one.specials["</s>"]] == other.specials["</s>"]
    # The same character stands for another byte in each: as names they would be the same.
    assert shared.get(vocabularies[0]["é"]) != vocabularies[1].get("é", -2)


def test_characters_that_are_not_there_yet() -> None:
    data = "a🙂é".encode()
    expected = ["", "a", "a", "a", "a", "a🙂", "a🙂", "a🙂é"]
    assert [whole_characters(data[:end]).decode() for end in range(len(data) + 1)] == expected
    assert whole_characters(b"a\x80\x80\x80\x80") == b"a\x80\x80\x80\x80"


def test_tokenizers_that_nobody_needs_are_let_go() -> None:
    """Their bytes are known as long as they are there, and a speculator keeps those it was made with."""
    model, kinds = build("llama", num_hidden_layers=2, vocab_size=512), ("byte-level", "sentencepiece")
    one = hf_spec.TranslatedSpeculator(model, *(copy.deepcopy(tokenizer(kind)) for kind in kinds))
    copied = copy.deepcopy(one)
    watched = [weakref.ref(words) for words in one.tokenizers]
    for found in (one, copied):
        gc.collect()
        assert found.own.tokenizer is found.tokenizers[0] and found.targets.tokenizer is found.tokenizers[1]
    del one, found
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert copied.own.tokenizer is copied.tokenizers[0]


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="is no tokenizer of the tokenizers library"):
        TranslatedSpeculator(draft()[0], object(), target()[1])


# --- The text in the draft's tokens ----------------------------------------------------------------------------------


def pieces(ids: list[int], seed: int) -> Iterator[list[int]]:
    """Cut ``ids`` into pieces of one to five tokens."""
    generator, place = random.Random(seed), 0
    while place < len(ids):
        count = generator.randint(1, 5)
        yield ids[place : place + count]
        place += count


@pytest.mark.parametrize("kinds", [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")])
@pytest.mark.parametrize(
    "text", [STORIES[:1500], ODD * 8, "東京は日本の首都です。" * 20], ids=["stories", "odd", "no spaces"]
)
def test_only_the_end_of_a_text_is_encoded_anew(
    kinds: tuple[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, own = (TokenBytes(tokenizer(kind, 700)) for kind in kinds)
    ids, sizes = theirs.encode(text.encode(), True), []
    encode = TokenBytes.encode
    monkeypatch.setattr(TokenBytes, "encode", lambda self, *given: sizes.append(len(given[0])) or encode(self, *given))
    row, cache = Reading(theirs, own, {}, []), []
    for new in pieces(ids, 0):
        row.extend(new)
        assert row.ids[: row.read] == cache[: row.read], "what was read is still what the text has"
        cache, row.read = list(row.ids), len(row.ids)
    assert max(sizes) <= reading.MOST_TAIL + 100
    assert own.written(row.ids).decode().strip() == text.strip()
    if "東" not in text:
        expected = encode(own, text.encode(), True)
        assert difflib.SequenceMatcher(None, row.ids, expected, autojunk=False).ratio() > 0.98


def test_a_text_may_end_within_a_character_and_special_tokens_are_translated() -> None:
    theirs, own = (TokenBytes(tokenizer(kind)) for kind in ("byte-level", "sentencepiece"))
    ids = theirs.encode("a 🙂".encode(), True)
    end, own_end = theirs.specials["</s>"], own.specials["</s>"]
    row = Reading(theirs, own, {end: own_end}, [1])
    row.extend(ids[:-1])
    assert row.is_unfinished and own.written(row.ids).decode().strip() == "a"
    row.extend([ids[-1], end, theirs.specials["<s>"], *theirs.encode(b" b", False)])
    assert not row.is_unfinished and own_end in row.ids and own.written(row.ids).decode() == " a 🙂 b"


# --- Calls -----------------------------------------------------------------------------------------------------------


def generate(count: int, **options: Any) -> Any:
    model, words = target()
    inputs = words(PROMPTS[:count], return_tensors="pt", padding=True, return_token_type_ids=False)
    return model.generate(**inputs, **{"max_new_tokens": 24, "do_sample": False} | options)


@pytest.mark.parametrize("way", [TOKENS, TEXT, None], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_text_is_that_of_plain_generate(way: str | None, count: int) -> None:
    plain = generate(count)
    ends = {"eos_token_id": [int(plain[0, -15]), int(plain[-1, -7])], "pad_token_id": 0}
    for options in ({}, ends, {"repetition_penalty": 1.3}):
        out = generate(
            count, speculator=translated(), speculation_config=CHAIN, return_dict_in_generate=True, **options
        )
        assert torch.equal(out.sequences, generate(count, **options))
        assert out.speculation.accepted > (0 if options is ends else 4)


@pytest.mark.parametrize("count", [1, 3])
def test_trees_are_drafted_by_shared_tokens(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TranslatedDrafter, "_by_text", None)
    for tree in (TREE, SpeculationConfig(tree=[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])):
        out = generate(count, speculator=translated(), speculation_config=tree, return_dict_in_generate=True)
        assert torch.equal(out.sequences, generate(count)) and out.speculation.accepted


@pytest.mark.parametrize("way", [TOKENS, TEXT], indirect=True)
@pytest.mark.parametrize("kinds", usual(itertools.permutations(KINDS, 2), ROUND), ids="-".join)
def test_all_kinds_of_tokenizers(way: str, kinds: tuple[str, str]) -> None:
    """Models of random weights, whose texts hold whatever bytes: also half characters, and special tokens."""
    words = [tokenizer(kind) for kind in kinds]
    models = [build("llama", vocab_size=len(one), seed=i) for i, one in enumerate(words)]
    inputs = prompts(3, vocab_size=len(words[0]))
    expected = models[0].generate(**inputs, max_new_tokens=20)
    speculator = TranslatedSpeculator(models[1], words[1], words[0])
    found = models[0].generate(**inputs, max_new_tokens=20, speculator=speculator, num_speculative_tokens=3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", [TOKENS, TEXT], indirect=True)
@pytest.mark.parametrize("kinds", [("unigram", "byte-level"), ("wordpiece", "unigram")], ids="-".join)
def test_unigram_tokenizers(way: str, kinds: tuple[str, str]) -> None:
    test_all_kinds_of_tokenizers(way, kinds)


@pytest.mark.parametrize("way", [TOKENS, TEXT], indirect=True)
@pytest.mark.parametrize("kinds", [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")], ids="-".join)
def test_a_stream_that_ends_within_characters(way: str, kinds: tuple[str, str]) -> None:
    """Random models write bytes that are no text, and characters whose bytes come in different steps."""
    words = [tokenizer(kind) for kind in kinds]
    models = [build("llama", vocab_size=len(one), seed=i) for i, one in enumerate(words)]
    inputs = {"input_ids": torch.tensor([words[0]("Tom said: naïve 東京").input_ids])}
    speculator = TranslatedSpeculator(models[1], words[1], words[0])
    heard = {}
    for name, options in {"plain": {}, "drafted": {"speculator": speculator, "num_speculative_tokens": 3}}.items():
        streamer: Any = TextIteratorStreamer(words[0], skip_prompt=True, timeout=120)
        call = functools.partial(models[0].generate, **inputs, max_new_tokens=60, do_sample=False, streamer=streamer)
        thread = threading.Thread(target=call, kwargs=options)
        thread.start()
        heard[name] = "".join(streamer)
        thread.join()
    assert heard["drafted"] == heard["plain"] and "\ufffd" in heard["plain"]


@pytest.mark.parametrize("name", usual(["gemma3_text", "gpt2", "bloom"], ["gemma3_text", "gpt2"]))
def test_other_architectures_of_drafts(name: str) -> None:
    """Windows that lose their oldest tokens, and tables of positions that end."""
    words = [tokenizer(kind) for kind in ("byte-level", "sentencepiece")]
    model, other = (build(one, vocab_size=len(own)) for one, own in zip(("llama", name), words, strict=True))
    inputs = {"input_ids": torch.tensor([TokenBytes.known(words[0]).encode(STORIES[:400].encode(), True)])}
    speculator = TranslatedSpeculator(other, words[1], words[0])
    for length in (40, 160):
        options = {"max_new_tokens": length, "use_cache": True}
        found = model.generate(**inputs, **options, speculator=speculator, num_speculative_tokens=3)
        assert torch.equal(found, model.generate(**inputs, **options))


def test_prompts_beyond_the_positions_of_the_draft() -> None:
    """Rows that end at different steps, too: a draft that has read nothing has no rows to keep."""
    words = [tokenizer(kind) for kind in ("byte-level", "sentencepiece")]
    model, other = build("llama", vocab_size=len(words[0])), build("gpt2", vocab_size=len(words[1]), n_positions=32)
    ids = torch.tensor([TokenBytes.known(words[0]).encode(STORIES[start : start + 400].encode(), True)[:60]
                        for start in (0, 300)])  # fmt: skip
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": plain[0, 64].item(), "pad_token_id": 0}
    plain = model.generate(ids, **options)
    assert bool((plain[0, 65:] == 0).all()) != bool((plain[1, 65:] == 0).all())  # one of them ends
    speculator = TranslatedSpeculator(other, words[1], words[0])
    assert torch.equal(model.generate(ids, **options, speculator=speculator, num_speculative_tokens=3), plain)


def test_a_draft_may_end_the_text() -> None:
    """The end of the draft's text is that of the target's: by role, whatever they are called."""
    model, words = target()
    known = translated().shared_with(model)
    assert known[words.eos_token_id] == draft()[1].eos_token_id
    renamed = copy.deepcopy(draft()[1])
    renamed.add_special_tokens({"eos_token": "<|other end|>"})
    shared = TranslatedSpeculator(draft()[0], renamed, words).shared_with(model)
    assert {*shared} <= {*range(2048)} and words.eos_token_id in shared


def test_calls_do_not_disturb_each_other() -> None:
    speculator, expected = translated(), generate(2)
    for other in (speculator, "ngram", HybridSpeculator(speculator), speculator):
        assert torch.equal(generate(2, speculator=other, num_speculative_tokens=3), expected)
    assert generate(1, speculator=speculator).shape == generate(1).shape  # of an adaptive length
    torch.manual_seed(0)
    once = generate(2, speculator=speculator, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(generate(2, speculator=speculator, do_sample=True), once)


def test_continuous_batching() -> None:
    model, words = target()
    texts = [words(prompt).input_ids for prompt in PROMPTS]
    options: dict[str, Any] = {"generation_config": greedy(max_new_tokens=12, eos_token_id=None)}
    options["continuous_batching_config"] = batching(3)
    found = model.generate_batch(texts, speculator=translated(), num_speculative_tokens=3, **options)
    plain = model.generate_batch(texts, **options)
    assert [one.generated_tokens for one in found.values()] == [one.generated_tokens for one in plain.values()]


# --- Distributions ---------------------------------------------------------------------------------------------------

DEPTH = 3


def small(words: list[str], merges: list[tuple[str, str]], end: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)


@functools.cache
def small_models() -> tuple[PreTrainedModel, PreTrainedModel, Any, Any]:
    words = small(["<e>", "a", "b", "c", "ab", "ca", "cab"], [("a", "b"), ("c", "a"), ("ca", "b")], "<e>")
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a")]
    others = small(["bc", "c", "abc", "b", "a", "ab", "</s>", "aa"], merges, "</s>")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model, other = (build("llama", vocab_size=n, num_key_value_heads=1, seed=n, **sizes) for n in (7, 8))
    with torch.no_grad():
        for one in (model, other):
            one.lm_head.weight.mul_(0.5)
    return model, other, words, others


@functools.cache
def distribution() -> Tensor:
    model = small_models()[0]
    texts = torch.tensor(list(itertools.product(range(7), repeat=DEPTH)))
    ids = torch.cat([torch.tensor([[1, 3, 2, 5]]).expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, 3:-1].double() / 0.8
    return logits.log_softmax(-1).gather(2, texts[:, :, None])[:, :, 0].sum(1).exp()


def sampled(speculator: Any, config: SpeculationConfig, texts: int = 8000) -> Tensor:
    model = small_models()[0]
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": DEPTH + 1, "eos_token_id": None}
    given = {"speculator": speculator, "speculation_config": config, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([[1, 3, 2, 5]]), num_return_sequences=texts, **options, **given)
    assert out.speculation.accepted
    return (out.sequences[:, 4 : 4 + DEPTH] * 7 ** torch.arange(DEPTH).flip(0)).sum(1)


CASES = {
    "chain": SpeculationConfig(num_speculative_tokens=3),
    "sampled tree": SpeculationConfig(num_speculative_tokens=2, tree="sampled", tree_topk=2, num_tree_tokens=4),
    "by text": SpeculationConfig(num_speculative_tokens=3),
}


@pytest.mark.parametrize("case", CASES)
def test_sampled_text_has_the_distribution_of_the_target(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = 4000
    if case == "by text":
        monkeypatch.setattr(TranslatedDrafter, "_way", lambda self: TEXT)
        texts = 3000
    speculator = TranslatedSpeculator(small_models()[1], small_models()[3], small_models()[2])
    assert deviation(sampled(speculator, CASES[case], texts), distribution()) < TOO_FAR


class Permuted(TranslatedSpeculator):
    """Gives the probability of each shared token to the next one in what is called ``q``."""

    def drafter(self, request: DraftContext) -> Drafter:
        drafter: Any = super().drafter(request)
        propose, shared = drafter.propose, drafter._is_shared.nonzero()[:, 0]

        def lie(*given: Any) -> Any:
            proposal = propose(*given)
            if proposal.q is not None:
                proposal.q[..., shared] = proposal.q[..., shared.roll(1)]
            return proposal

        drafter.propose = lie
        return drafter


def test_a_permuted_q_is_found_out() -> None:
    speculator = Permuted(small_models()[1], small_models()[3], small_models()[2])
    assert deviation(sampled(speculator, CASES["chain"]), distribution()) > 3 * TOO_FAR


@pytest.mark.parametrize("rule", ["near_best", "typical"])
def test_rules_that_are_not_lossless_give_one_text_whatever_was_accepted_before(rule: Any) -> None:
    model, other, words, others = small_models()
    config = CHAIN.merge(acceptance=rule, **({"accept_k": 3} if rule == "near_best" else {}))
    speculator, texts = TranslatedSpeculator(other, others, words), []
    for better in (TOKENS, TEXT):
        speculator.ways = Ways()
        for way in 2 * TRIED * (TOKENS, TEXT):
            speculator.ways.record(way, 4.0 if way == better else 0.0)
        given = {"speculator": speculator, "speculation_config": config, "return_dict_in_generate": True}
        given |= {"do_sample": rule == "typical", "max_new_tokens": 16, "eos_token_id": None}
        out = model.generate(torch.tensor([[1, 3, 2, 5]]), **given)
        assert out.speculation.accepted
        texts.append(out.sequences)
    assert torch.equal(*texts)


# --- The words of transformers, and errors ---------------------------------------------------------------------------


def test_generate_takes_the_tokenizers_as_assisted_generation_does(tmp_path: Path) -> None:
    (model, words), (other, own) = target(), draft()
    both = {"tokenizer": words, "assistant_tokenizer": own}
    expected = generate(1)
    other.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    for speculator in (other, VanillaSpeculator(other), tmp_path, str(tmp_path)):
        assert torch.equal(generate(1, speculator=speculator, num_speculative_tokens=3, **both), expected)
    options = {"speculator": other, "max_new_tokens": 24, "do_sample": False, "progress": False}
    for engine in ("generate", "generate_batch"):
        (found,) = hf_spec.generate_many(model, PROMPTS[:1], engine=engine, **options, **both)
        assert [*found.prompt_ids, *found.tokens] == expected[0].tolist() and found.speculation.accepted > 0
    loaded = load_speculator(str(tmp_path), model, "float32")  # on the command line the directory is enough
    assert isinstance(loaded, TranslatedSpeculator)
    assert torch.equal(generate(1, speculator=loaded), expected)
    inside = [LlavaProcessor(CLIPImageProcessor(), one) for one in (own, words)]
    assert isinstance(resolve.with_tokenizers(other, model, *inside), TranslatedSpeculator)
    same = resolve.with_tokenizers(demo_draft(), model, words, words)
    assert isinstance(same, VanillaSpeculator), "nothing is translated where the tokens are the same"
    with pytest.raises(ValueError, match="assistant_tokenizer needs the target's tokenizer, too"):
        generate(1, speculator=other, assistant_tokenizer=own)
    for keyword in ("ngram", "plain"):
        with pytest.raises(ValueError, match="is for a draft that is a language model, and str is none"):
            generate(1, speculator=keyword, **both)
    with pytest.raises(ValueError, match=r"their tokenizers differ.* Pass both: .*assistant_tokenizer="):
        generate(1, speculator=other)


@functools.cache
def demo_draft() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo.path("draft-vanilla"), dtype=torch.float32).eval()


def test_what_cannot_draft_is_refused() -> None:
    model, words = target()
    with pytest.raises(ValueError, match="the draft is the target itself"):
        generate(1, speculator=TranslatedSpeculator(model, draft()[1], words))
    with pytest.raises(ValueError, match=r"ByCode is no tokenizer of the tokenizers library.*mistral_format=False"):
        TranslatedSpeculator(draft()[0], by_code(), words)
    pair = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="is an encoder-decoder model, for which no draft with another tokenizer"):
        translated().check(pair)
    with pytest.raises(ValueError, match="keeps recurrent states, which do not go back"):
        generate(1, speculator=TranslatedSpeculator(build("mamba"), draft()[1], words))
    apart = TranslatedSpeculator(*draft(), words)
    apart.shared = {}
    other, kept = copy.copy(apart.own.tokenizer), apart.own._tokenizer
    apart.own._tokenizer = weakref.ref(other)
    try:
        assert torch.equal(generate(1, speculator=apart, num_speculative_tokens=3), generate(1))
    finally:
        apart.own._tokenizer = kept


def test_a_warning_where_tokenizers_look_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ids are exchanged, as versions of one tokenizer shift their special tokens."""
    warned: list[str] = []
    logging.warning_once.cache_clear()
    monkeypatch.setattr(resolve.logger, "warning_once", warned.append)
    model, words = copy.deepcopy(target()[0]), target()[1]
    saved = json.loads(words.backend_tokenizer.to_str())
    ids = saved["model"]["vocab"]
    one, other = [*ids][1000:1002]
    ids[one], ids[other] = ids[other], ids[one]
    for name, vocabulary in (("target", words.backend_tokenizer.to_str()), ("draft", json.dumps(saved))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
    small_draft = copy.deepcopy(demo_draft())
    model.config._name_or_path = model.name_or_path = str(tmp_path / "target")
    small_draft.name_or_path = str(tmp_path / "draft")
    hf_spec.as_speculator(small_draft, model)
    assert len(warned) == 1 and "look alike, but 2 tokens have other ids" in warned[0]
    hf_spec.as_speculator(TranslatedSpeculator(small_draft, *[draft()[1], words]), model)
    assert len(warned) == 1


# --- Which way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("better", [TOKENS, TEXT])
def test_the_way_is_chosen_by_what_is_accepted(better: str) -> None:
    ways, chosen = Ways(), []
    for _ in range(100):
        chosen.append(ways.choose())
        ways.record(chosen[-1], 2.0 if chosen[-1] == better else 1.0)
    assert chosen[: 2 * TRIED].count(TEXT) == TRIED
    assert chosen[2 * TRIED :].count(better) > 75 and len({*chosen[2 * TRIED :]}) == 2
    other = TEXT if better == TOKENS else TOKENS
    for _ in range(300):  # the texts change
        ways.record(way := ways.choose(), 3.0 if way == other else 0.5)
    assert ways.choose() == other


def test_ways_belong_to_a_draft() -> None:
    speculator, again = translated(), translated()
    assert speculator.ways is again.ways
    assert TranslatedSpeculator(noisy(draft()[0]), draft()[1], target()[1]).ways is not again.ways
