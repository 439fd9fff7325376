"""A target that two processes hold together: they have to agree on every width, and on the text."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architectures import build, prompts
from groups import leave, run_two
from transformers import AutoModelForCausalLM, DistributedConfig
from twins import noisy

from hf_spec import AcceptedTokens, DraftContext, Drafter, Proposal, SpeculationConfig, Speculator, VanillaSpeculator

NEW = 14
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


class Slowed(Speculator):
    """Guess as ``draft`` does, but take one process a while."""

    def __init__(self, draft: Any) -> None:
        self.draft = VanillaSpeculator(draft)

    def drafter(self, request: DraftContext) -> Drafter:
        drafter = self.draft.drafter(request)
        propose = drafter.propose

        def slow(news: AcceptedTokens, limit: int) -> Proposal:
            if dist.get_rank() == 1:
                time.sleep(0.02)
            return propose(news, limit)

        drafter.propose = slow  # type: ignore[method-assign]
        return drafter


class Whimsical(Speculator):
    """Guess what and as many as this process's own random numbers say, drawn or chosen."""

    def drafter(self, request: DraftContext) -> Drafter:
        sample = request.sample

        class Guesser(Drafter):
            def propose(self, news: AcceptedTokens, limit: int) -> Proposal:
                size = (len(news.counts), random.randint(0, limit))
                guesses = torch.tensor(random.choices(range(99), k=size[0] * size[1]), dtype=torch.long).view(size)
                return Proposal.chain(news.root, guesses, None, torch.full((*size, 99), 1 / 99) if sample else None)

            def keep_rows(self, rows: torch.Tensor) -> None:
                pass

        return Guesser()


def work(folder: str) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    shared = {"distributed_config": DistributedConfig(tp_plan="auto")}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/target", **shared)
    assert model.tp_size == 2
    draft, inputs = noisy(build("llama")), prompts(3)
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())  # a process knows nothing of the others' seeds

    def ours(**given: Any) -> Any:
        text = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | given)
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, text.tolist())
        assert texts[0] == texts[1], given
        return text

    plain = ours()
    greedy = {"speculator": Slowed(draft)}
    together = Slowed(AutoModelForCausalLM.from_pretrained(f"{folder}/draft", **shared))
    assert torch.equal(ours(speculator=together, num_speculative_tokens="auto"), plain)
    for tree in (None, "dynamic", TREE):
        config = SpeculationConfig(num_speculative_tokens="auto", tree=tree, tree_topk=2, num_tree_tokens=6)
        assert torch.equal(ours(**greedy, speculation_config=config), plain)
        ours(**greedy, speculation_config=config, do_sample=True)
    ours(
        **greedy, speculation_config=SpeculationConfig(tree="sampled", num_tree_tokens=6, tree_topk=2), do_sample=True
    )
    ours(**greedy, speculation_config=SpeculationConfig(confidence_threshold=0.4), do_sample=True)
    assert torch.equal(ours(speculator=Whimsical()), plain)
    ours(speculator=Whimsical(), do_sample=True)
    # Each process has a clock of its own and random numbers of its own.
    ours(**greedy, max_new_tokens=2000, max_time=0.4)
    ours(
        **greedy,
        max_new_tokens=2000,
        stopping_criteria=[lambda ids, scores: torch.full((3,), bool(random.random() > 0.8))],
    )
    leave()


def test_processes_that_share_a_target_agree(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "target")
    noisy(build("llama")).save_pretrained(tmp_path / "draft")
    run_two(tmp_path, f"import test_tensor_parallel\ntest_tensor_parallel.work({str(tmp_path)!r})")
