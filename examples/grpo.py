"""Train a policy with TRL's GRPOTrainer, with and without speculation in its rollouts, and compare the time.

    pip install trl
    python examples/grpo.py  # the demo target, an EAGLE-3 draft that is trained on, and stories about dogs
    python examples/grpo.py --speculator history  # no draft: n-grams with a history of earlier rollouts

The text keeps the distribution of the policy, whose weights change from step to step. Acceptance would fall, so the
draft is trained on the latest rollouts now and then.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hf_spec import NgramSpeculator, demo, last_speculation
from hf_spec.metrics import Counts
from hf_spec.training import DraftTrainer, DraftTrainingArguments, RolloutCallback

PROMPTS = ["Once upon a time", "One day, a little", "Tom and Lily", "The sun was", "There was a big", "A girl named"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=demo.path(), help="the policy; a draft has to be made for it")
    parser.add_argument("--draft", default=demo.path("draft-eagle3"))
    parser.add_argument("--speculator", choices=["eagle3", "history"], default="eagle3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--every", type=int, default=5, help="steps between two trainings of the draft")
    parser.add_argument("--output", default="grpo")
    options = parser.parse_args()

    plain = Rollouts()
    train(plain, None, options)
    speculative = Rollouts()
    train(speculative, options.speculator, options)
    print(f"tokens per verification, policy and draft changing: {speculative.counts.mean_accepted_length:.2f}")
    print(f"generation: plain {plain.seconds:.1f} s, speculative {speculative.seconds:.1f} s")
    print(f"time per token: {speculative.per_token / plain.per_token:.2f} of plain")


class Rollouts:
    """The time of ``generate`` calls, and counts of their tokens and draft tokens."""

    def __init__(self) -> None:
        self.seconds, self.tokens, self.counts = 0.0, 0, Counts()

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    def watch(self, model: Any) -> None:
        generate = model.generate

        def timed(**options: Any) -> Any:
            start = time.perf_counter()
            out = generate(**options)
            self.seconds += time.perf_counter() - start
            if (speculation := last_speculation(model)) is not None:
                self.counts.add(speculation.counts)
            return out

        model.generate = timed

    def reward(self, completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """Reward dogs."""
        self.tokens += sum(map(len, completion_ids))
        return [float(text.count("dog")) for text in completions]


def train(rollouts: Rollouts, speculator: str | None, options: argparse.Namespace) -> None:
    policy = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    rollouts.watch(policy)
    common: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    args = GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        num_generations=options.generations,
        per_device_train_batch_size=options.generations,
        max_completion_length=options.tokens,
        learning_rate=1e-4,
        bf16=False,  # all trainers of a process need the same precision
        seed=0,
        **common,
    )
    callbacks = []
    if speculator == "history":
        callbacks.append(RolloutCallback(NgramSpeculator(history_size=100_000)))
    elif speculator == "eagle3":
        draft = AutoModel.from_pretrained(options.draft)
        learning = DraftTrainingArguments(
            output_dir=f"{options.output}/draft", num_train_epochs=1, per_device_train_batch_size=8, **common
        )
        callbacks.append(RolloutCallback(draft_trainer=DraftTrainer(draft, policy, learning), every=options.every))
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=rollouts.reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(options.target),
        callbacks=callbacks,
    )
    trainer.train()


if __name__ == "__main__":
    main()
