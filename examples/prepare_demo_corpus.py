"""Prepare the text of the demo family: licensed sources only, case restored, a tokenizer, token ids.

    python examples/prepare_demo_corpus.py --corpus DIR --work WORK

DIR holds `*.jsonl.gz` files; a line has a "source" and either a "text" or "messages" of {"role", "content"}. WORK
receives what examples/train_demo_family.py reads. Drafts for an existing target need its tokenizer:
`--tokenizer hf_spec/demo/target`. docs/demo-family.md describes the data and the results.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_spec.demo import mended

# Only these sources may enter the shipped weights; every other source in the corpus files is ignored.
LICENCES = {
    "tinystories": "CDLA-Sharing-1.0",
    "tinystories_lower": "CDLA-Sharing-1.0",
    "self_dialogue": "BSD-3-Clause",
    "taskmaster4": "CC-BY-4.0",
}

BOS, EOS, PAD, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('This template knows the roles user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# ---------------------------------------------------------------------------------------------------------------------
# Case. Most published stories are lower-cased; the ones that are not teach which words carry a capital.


class TrueCaser:
    """Restore capitals of lower-cased English with counts from cased text and the start of sentences."""

    WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*")
    SPEECH = re.compile(
        r"\b(said|says|asked|replied|shouted|exclaimed|cried|yelled|whispered|answered|called|laughed|thought)\b(?!')"
    )
    NAMING = re.compile(r"\b(?:named|called|names? (?:is|was|were))\s+([a-z]+)")

    def __init__(self, cased: list[str]) -> None:
        self.words: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])  # word -> [lower, upper]
        self.pairs: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
        for text in cased:
            lower = text.lower()
            for previous, match in self._walk(lower):
                if previous is not None:  # the first word of a sentence says nothing about the word
                    upper = int(text[match.start()].isupper())
                    self.words[match.group()][upper] += 1
                    self.pairs[previous, match.group()][upper] += 1

    def _walk(self, lower: str) -> Iterator[tuple[str | None, re.Match[str]]]:
        """Yield each word with the word before it, None where a sentence starts."""
        matches = list(self.WORD.finditer(lower))
        for i, match in enumerate(matches):
            between = lower[matches[i - 1].end() if i else 0 : match.start()]
            following = " ".join(m.group() for m in matches[i : i + 3])
            yield None if i == 0 or self._starts(between, following) else matches[i - 1].group(), match

    def _starts(self, between: str, following: str) -> bool:
        if "\n" in between or re.search(r'(^|\s)["\u201c]$', between):  # a paragraph or an opening quote
            return True
        if re.search(r'[!?]["\u201d]\s', between):  # "Stop!" he said. / "Stop!" They ran.
            return self.SPEECH.search(following) is None
        return re.search(r"[.!?]", between) is not None

    def __call__(self, lower: str) -> str:
        """Return `lower` with capitals."""
        names = {name for name in self.NAMING.findall(lower) if not self.words.get(name, [0, 0])[0]}
        characters = list(lower)
        for previous, match in self._walk(lower):
            word = match.group()
            if previous is None or word == "i" or word.startswith("i'") or word.removesuffix("'s") in names:
                capital = True
            else:
                pair = self.pairs.get((previous, word), [0, 0])
                counts = pair if sum(pair) >= 2 else self.words.get(word, [0, 0])
                if not sum(counts):
                    counts = self.words.get(word.removesuffix("'s"), [0, 0])
                capital = counts[1] > counts[0]
            if capital:
                characters[match.start()] = characters[match.start()].upper()
        return "".join(characters)

    def error(self, cased: list[str]) -> float:
        """Return the share of words of `cased` that come back with another case."""
        wrong = total = 0
        for text in cased:
            restored = self(text.lower())
            for match in self.WORD.finditer(text):
                total += 1
                wrong += restored[match.start() : match.end()] != match.group()
        return wrong / max(total, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Corpus


def read_corpus(directory: Path) -> dict[str, list[Any]]:
    """Read every `*.jsonl.gz` of `directory`; return the texts or message lists of each licensed source."""
    rows: dict[str, list[Any]] = {source: [] for source in LICENCES}
    for path in sorted(directory.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row["source"] in rows:
                    rows[row["source"]].append(row.get("text") or row["messages"])
    if not any(rows.values()):
        raise ValueError(f"No *.jsonl.gz file in {directory} holds a source of {sorted(LICENCES)}.")
    return rows


def clean(text: str) -> str:
    """Mend text that was decoded wrongly and fold typographic characters, so that a small vocabulary suffices."""
    text = (
        mended(text)
        .translate(str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u00a0", "''\"\"-- "))
        .replace("\r", "")
    )
    return re.sub(r"\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def story_key(text: str) -> str:
    """Return what two publications of one story share: its letters."""
    return re.sub(r"[^a-z]", "", text.lower())


def stories_of(rows: dict[str, list[Any]], held_out: int) -> tuple[list[str], list[str]]:
    """Return training stories and held-out stories, the latter in their author's case; no story twice."""
    cased = {story_key(text): clean(text) for text in rows["tinystories"] if len(text) > 200}
    originals = list(cased.values())
    validation = originals[:: max(1, len(originals) // held_out)][:held_out]
    hidden = {story_key(text) for text in validation}
    caser = TrueCaser([text for text in originals if story_key(text) not in hidden])
    print(f"case restored with {caser.error(validation):.2%} wrong words on {held_out} held-out stories")
    for text in rows["tinystories_lower"]:
        if len(text) > 200:
            cased.setdefault(story_key(text), caser(clean(text)))
    return [text for key, text in cased.items() if key not in hidden], validation


def request_for(story: str, rng: np.random.Generator) -> str:
    """Return a request that `story` answers, about its hero where its first sentence shows one."""
    about = re.search(r"(?:there (?:was|lived)|lived) (an? [^,.!?\"]{3,60})", story[:200])
    if about is None or rng.random() < 0.1:
        return str(rng.choice(["Tell me a story.", "Can you tell me a story?", "Please write a short story."]))
    hero = re.split(r" (?:who|that|which|with|in|on|at|and|living) ", about.group(1))[0].strip()
    form = str(
        rng.choice(["Tell me a story about {}.", "Write a story about {}.", "Can you tell me a story about {}?"])
    )
    return form.format(hero)


def tidy_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Clean a conversation, merge neighbours of one role and start it at the user."""
    tidy: list[dict[str, str]] = []
    for message in messages:
        content = clean(message["content"])
        if not content or message["role"] not in ("user", "assistant") or (not tidy and message["role"] != "user"):
            continue
        if tidy and tidy[-1]["role"] == message["role"]:
            tidy[-1]["content"] += " " + content
        else:
            tidy.append({"role": message["role"], "content": content})
    return tidy


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and token ids


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that begins every plain text with the begin token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )


def save_documents(path: Path, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> int:
    """Tokenize complete documents (special tokens written out) to `path`; return the number of tokens."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    flat = np.concatenate([np.asarray(document, dtype=np.uint16) for document in ids])
    np.savez(path, ids=flat, ends=np.cumsum([len(document) for document in ids]))
    return len(flat)


def prepare(args: argparse.Namespace) -> None:
    """Write the tokenizer, the training groups and the held-out stories to the work directory."""
    rng = np.random.default_rng(args.seed)
    rows = read_corpus(args.corpus)
    stories, validation = stories_of(rows, args.held_out)
    dialogues = [tidy_messages(messages) for s in ("self_dialogue", "taskmaster4") for messages in rows[s]]
    dialogues = [messages for messages in dialogues if len(messages) >= 2]
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:  # stories are outnumbered by dialogue; repeat them so that the merges serve both
        texts = stories * 2 + [message["content"] for messages in dialogues for message in messages]
        tokenizer = train_tokenizer(texts, args.vocabulary)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.work / "tokenizer")

    def chat(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    def dialogue(story: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": request_for(story, rng)}, {"role": "assistant", "content": story}]

    groups = {
        "story": [BOS + story + EOS for story in stories],
        "story_chat": [chat(dialogue(story)) for story in stories],
        "dialogue": [chat(messages) for messages in dialogues],
        "validation": [BOS + story + EOS for story in validation],
    }
    for name, documents in groups.items():
        tokens = save_documents(args.work / f"{name}.npz", tokenizer, documents)
        print(f"{name}: {len(documents)} documents, {tokens} tokens")
    for name, texts in {"stories": stories, "validation": validation}.items():  # for ablations.py and comparisons
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (args.work / f"{name}.jsonl").write_text(lines)


def main() -> None:
    """Parse the command line and prepare the work directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory of *.jsonl.gz files")
    parser.add_argument("--work", type=Path, required=True, help="directory for tokenizer and token ids")
    parser.add_argument("--tokenizer", type=Path, help="take this one instead of training one")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=150, help="stories kept away from training")
    parser.add_argument("--seed", type=int, default=0)
    prepare(parser.parse_args())


if __name__ == "__main__":
    main()
