"""Adapt a draft to a domain: train a LoRA on it, from conversations or plain text of that domain.

    python examples/finetune_lora.py --target ORG/MODEL --draft ORG/DRAFT --data support.jsonl --output adapter

`--draft` is a draft of any kind and format, or a draft model. The adapter goes with the draft that it was
trained on:

    base = hf_spec.AutoDraftModel.from_pretrained("ORG/DRAFT", target=target)  # or a draft model, as it is
    draft = PeftModel.from_pretrained(base, "adapter")
    target.generate(**inputs, speculator=draft)

`--merged` writes the draft with the adapter in its weights, for vLLM and others that know no adapters of drafts.
"""

from __future__ import annotations

import argparse

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.checkpoints.resolve import load_draft
from hf_spec.training import DraftTrainer, DraftTrainingArguments, prepare_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--merged", help="directory to write the adapted draft to")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
    data = prepare_dataset(options.data, tokenizer, max_length=options.length, packing=True)
    data = data.train_test_split(test_size=min(64, len(data) // 10 or 1), seed=0)

    trainer = DraftTrainer(
        load_draft(options.draft, target, dtype="float32"),
        target,
        DraftTrainingArguments(
            output_dir=options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=options.learning_rate,
            logging_steps=10,
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
    )
    before = trainer.evaluate()["eval_acceptance_length"]
    trainer.train(resume_from_checkpoint=options.resume)
    after = trainer.evaluate()["eval_acceptance_length"]
    print(f"tokens per verification on held-out text: {before:.2f} before, {after:.2f} after")
    trainer.save_model()
    if options.merged:
        trainer.model.merge_and_unload().save_pretrained(options.merged)


if __name__ == "__main__":
    main()
