"""Train Medusa heads for any causal language model, on conversations or plain text.

    python examples/train_medusa.py --target ORG/MODEL --data chats.jsonl --output draft

`--data` is a jsonl file with `messages` or `text` (see hf_spec.training.prepare_dataset). Heads learn best from
answers of the target itself, which hf_spec.training.regenerate makes. Start the script with `accelerate launch` to use
several devices.
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft, prepare_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--heads", type=int, default=4, help="draft tokens of a step")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks of a head")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
    data = prepare_dataset(options.data, tokenizer, max_length=options.length, packing=True)
    data = data.train_test_split(test_size=min(64, len(data) // 10 or 1), seed=0)

    config = MedusaSpeculatorConfig.for_target(
        target.config, num_heads=options.heads, num_hidden_layers=options.blocks
    )
    draft = new_draft(config, target)
    args = DraftTrainingArguments(
        output_dir=options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=1 / options.evaluations,
        save_steps=1 / options.evaluations,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_acceptance_length",
    )
    trainer = DraftTrainer(
        draft,
        target,
        args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
