"""Train drafts over the demo target's states, in part on text that the target wrote itself.

    python examples/prepare_demo_corpus.py --corpus DIR --work WORK --tokenizer hf_spec/demo/target
    python examples/train_demo_drafts.py --work WORK --output hf_spec/demo --kind eagle3

The target continues the beginnings of stories and chats, greedily and by sampling. Most of the text is read as it is,
because generating is slow on one core. A run that was interrupted goes on. docs/demo-family.md describes the results.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from train_demo_family import load_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec import demo
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.dflash2.configuration import DFlash2SpeculatorConfig
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, count_tokens, new_draft

LENGTH = 256
# Documents, number of examples of LENGTH tokens, and temperature of the continuation (None: read as they are).
MIXTURE = [
    ("story", 300, 0.0),
    ("story", 400, 0.7),
    ("story_chat", 150, 0.7),
    ("dialogue", 150, 0.7),
    ("story", 3200, None),
    ("story_chat", 700, None),
    ("dialogue", 500, None),
]
# For each kind: configuration class, its fields, and training arguments. Medusa heads that ended in the target's own
# output layer, which is only 144 wide, were accepted less often however they were trained.
MUON = {"muon_learning_rate": 42e-3, "learning_rate": 6e-3, "weight_decay": 0.05}
BLOCK = {"layers": {"num_hidden_layers": 2}, "block_size": 8, "mask_token_id": 0}  # padding, which no text has
OF_BLOCKS = {**MUON, "num_anchors": 96, "normalizer": "draft_token", "num_train_epochs": 2.2}
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "eagle3": (
        Eagle3SpeculatorConfig,
        {},
        {**MUON, "unroll_steps": 5, "num_train_epochs": 2.2},
    ),
    "medusa": (
        MedusaSpeculatorConfig,
        {"num_heads": 4, "num_hidden_layers": 2, "draft_vocab_size": 1024, "shared_with_target": []},
        {"num_train_epochs": 3.5, "learning_rate": 1e-2},
    ),
    "mtp": (
        MTPSpeculatorConfig,
        {"shared_with_target": ["embed_tokens", "lm_head"]},
        {**MUON, "unroll_steps": 4, "num_train_epochs": 2},
    ),
    "dspark": (
        DSparkSpeculatorConfig,
        {
            **BLOCK,
            "block_size": 7,  # the root's slot predicts, too
            "markov_head_type": "rnn",
            "markov_rank": 48,
        },
        OF_BLOCKS,
    ),
    "dflash": (DFlashSpeculatorConfig, BLOCK, OF_BLOCKS),
    "jetspec": (DFlashSpeculatorConfig, {**BLOCK, "block_causal": True}, {**OF_BLOCKS, "step_decay": 1.0}),
    "dflash2": (DFlash2SpeculatorConfig, {**BLOCK, "selector_rank": 48}, OF_BLOCKS),
}
BEGINNINGS = (8, 16, 32, 64)  # tokens of a document before the target continues


@torch.no_grad()
def continued(target: PreTrainedModel, documents: list[list[int]], beginning: int, temperature: float) -> Any:
    """Let the target continue the first tokens of every document."""
    ids = torch.tensor([document[:beginning] for document in documents])
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_length=LENGTH, **options)  # type: ignore[operator]
    end = target.generation_config.eos_token_id
    for row in out.tolist():
        yield row[: row.index(end) + 1] if end in row else row


def rows_of(target: PreTrainedModel, work: Path, part: tuple[str, int, float | None], batch: int = 64) -> list[Any]:
    """Return examples of one part of the mixture: concatenated documents, cut to LENGTH tokens."""
    name, count, temperature = part
    documents = [list(map(int, document)) for document in load_documents(work / f"{name}.npz")]
    random.shuffle(documents)
    tokens: list[int] = []
    numbers: list[int] = []
    for turn in range(0, 100 * len(documents), batch):
        beginning = random.choice(BEGINNINGS)
        chosen = [documents[i % len(documents)] for i in range(turn, turn + batch)]
        chosen = [document for document in chosen if len(document) > beginning]
        for text in chosen if temperature is None else continued(target, chosen, beginning, temperature):
            numbers += [numbers[-1] + 1 if numbers else 0] * len(text)
            tokens += text
        if len(tokens) >= count * LENGTH:
            break
    cut = [slice(i * LENGTH, (i + 1) * LENGTH) for i in range(count)]
    return [{"input_ids": tokens[i], "loss_mask": [1] * LENGTH, "document_ids": numbers[i]} for i in cut]


def shorter(options: argparse.Namespace, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the training arguments that the command line sets in place of the recipe's."""
    given = {"num_train_epochs": options.epochs}
    if "num_anchors" in recipe:
        given["num_anchors"] = options.anchors
    return {name: value for name, value in given.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="receives draft-KIND/")
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, help="instead of the recipe's, to compare kinds in less time")
    parser.add_argument("--anchors", type=int, help="blocks of an example, instead of the recipe's")
    options = parser.parse_args()

    random.seed(options.seed)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    target = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)
    if (options.work / "tokenizer/tokenizer.json").read_bytes() != (demo.path() / "tokenizer.json").read_bytes():
        parser.error(f"the tokens in {options.work} are not the target's: prepare them with --tokenizer {demo.path()}")
    cache = options.work / "draft_rows"
    if not cache.exists():
        rows = [row for part in MIXTURE for row in rows_of(target, options.work, part)]
        shutil.rmtree(part := cache.with_name("draft_rows.part"), ignore_errors=True)  # of an interrupted run
        Dataset.from_list(rows).save_to_disk(str(part))
        part.rename(cache)
    data = Dataset.load_from_disk(str(cache))

    name = f"draft-{options.kind}"
    make, shape, recipe = KINDS[options.kind]
    recipe = recipe | shorter(options, recipe)
    config = make.for_target(target.config, **shape)
    config.speculators_config["verifier"]["name_or_path"] = None  # the family is where the package is
    changes = {"seed": options.seed or None, "epochs": options.epochs, "anchors": options.anchors}
    own = [f"{option}{value:g}" for option, value in changes.items() if value is not None]
    args = DraftTrainingArguments(
        output_dir=str(options.work / "-".join([name, *own])),  # a run goes on from checkpoints of its own alone
        per_device_train_batch_size=8,
        max_grad_norm=1.0,
        warmup_steps=0.05,
        logging_steps=50,
        save_steps=100,
        save_total_limit=1,
        report_to=[],
        seed=options.seed,
        **recipe,
    )
    draft = new_draft(config, target, count_tokens(data, target.config.vocab_size))
    trainer = DraftTrainer(draft, target, args, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    trainer.draft.to(torch.bfloat16).save_pretrained(options.output / name)


if __name__ == "__main__":
    main()
