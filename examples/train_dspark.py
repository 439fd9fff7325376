"""Train a DSpark or DFlash draft for any causal language model, on conversations or plain text.

    python examples/train_dspark.py --target ORG/MODEL --data chats.jsonl --output draft --mask-token "<|reserved_1|>"

`--data` is a jsonl file with `messages` or `text` (see hf_spec.training.prepare_dataset). Drafts learn best from
answers of the target itself, which hf_spec.training.regenerate makes. `--mask-token` is a token that never occurs in
text. Start the script with `accelerate launch` to use several devices.
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec import DFlashSpeculatorConfig, DSparkSpeculatorConfig
from hf_spec.training import DraftTrainer, DraftTrainingArguments, new_draft, prepare_dataset

# As in the papers: DFlash (arXiv 2602.06036) learns the text, DSpark (2607.05147) the target's distribution, too.
OBJECTIVES = {"dflash": "nll", "dspark": "0.1 nll + 1.8 tv"}
CONFIGS = {"dflash": DFlashSpeculatorConfig, "dspark": DSparkSpeculatorConfig}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--mask-token", help="the tokenizer's padding token by default")
    parser.add_argument("--kind", choices=CONFIGS, default="dspark")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block", type=int, default=7, help="slots of a block, the one of the last token included")
    parser.add_argument("--rank", type=int, default=256, help="of DSpark's Markov head")
    parser.add_argument("--anchors", type=int, default=512, help="blocks drafted in each example")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    mask = tokenizer.pad_token if options.mask_token is None else options.mask_token
    if mask not in tokenizer.get_vocab():
        parser.error(f"--mask-token: the target has no token {mask}; name one that never occurs in text")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
    data = prepare_dataset(options.data, tokenizer, max_length=options.length, packing=True)
    data = data.train_test_split(test_size=min(64, len(data) // 10 or 1), seed=0)

    flags = {"block_size": options.block, "mask_token_id": tokenizer.convert_tokens_to_ids(mask)}
    if options.kind == "dspark":
        flags["markov_rank"] = options.rank
    layers = {"num_hidden_layers": options.layers}
    draft = new_draft(CONFIGS[options.kind].for_target(target.config, layers, **flags), target)
    args = DraftTrainingArguments(
        output_dir=options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        warmup_steps=0.04,
        max_grad_norm=1.0,
        num_anchors=options.anchors,
        objective=OBJECTIVES[options.kind],
        normalizer="draft_token",
        step_decay=0.7788,  # exp(-1 / 4)
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
