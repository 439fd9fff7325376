"""Stress a server with requests that come, go and fail, and check its memory and every text.

    pip install "hf-spec[train,serve]"
    python examples/soak_server.py --minutes 30
    python examples/soak_server.py --minutes 30 --one-by-one --speculator ngram

A server of the demo family runs on the loopback address, in a process of its own. Clients send requests at random
moments, for texts of mixed length, streamed or whole, greedy or sampled, with or without stop strings. Some clients
read slowly, some leave, some send invalid requests. Greedy texts are compared with those of plain `generate`.

Each line of the output counts answers, wrong texts, and running and waiting requests. It shows what the engine keeps,
and the server's memory. The exit status is 1 if a text was wrong, if the engine keeps something, or if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from openai import APIConnectionError, APIError, AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec import demo

PROMPTS = (
    "Once upon a time, there was a little dog",
    "Lily went to the park with",
    "Tom found a big red ball. The big red ball was",
    "Sara and Ben",
    "The sun was",
    'Mom said, "You can have a cookie if you',
    "One day, a boy named Tim found a small box in the",
    "There was a cat who wanted to",
)
LENGTHS = (1, 3, 10, 30, 80, 200)
STOPS = ("day", ".", "and the")
MOST_GROWTH = 1.05  # of the memory after a third of the time, when pools, caches and Python itself are warm
SAMPLED = '{"do_sample": true, "max_new_tokens": 60}'


def plain_texts(target: str) -> dict[tuple[str, int, str | None], str]:
    """Return the text of plain `generate` for every possible greedy request."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(target, dtype="float32"),
        AutoTokenizer.from_pretrained(target),
    )
    texts = {}
    for prompt in PROMPTS:
        for stop in (None, *STOPS):
            inputs = tokenizer(prompt, return_tensors="pt")
            stops = {} if stop is None else {"stop_strings": stop, "tokenizer": tokenizer}
            ids = model.generate(**inputs, max_new_tokens=max(LENGTHS), do_sample=False, **stops)[0]
            new = ids[inputs.input_ids.shape[1] :]
            texts |= {(prompt, n, stop): tokenizer.decode(new[:n], skip_special_tokens=True) for n in LENGTHS}
    return texts


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, url: str, target: str, seed: int) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self.url, self.target, self.expected = url, target, plain_texts(target)
        self.seen: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.wrong: list[str] = []

    async def run(self, seconds: float, most: int, pid: int) -> list[float]:
        """Send requests for `seconds`, at most `most` at a time; return the server's memory over time, in MB."""
        start, asked, memory = time.monotonic(), set[asyncio.Task[None]](), []
        interval = max(5.0, seconds / 60)
        while (now := time.monotonic() - start) < seconds:
            if len(asked) < most:
                task = asyncio.create_task(self.ask())
                asked.add(task)
                task.add_done_callback(asked.discard)
            if now >= interval * len(memory):
                memory.append(resident(pid))
                await self.report(now, memory[-1])
            await asyncio.sleep(self.random.expovariate(20))
        await asyncio.gather(*asked)
        return memory

    async def ask(self) -> None:
        """Send one request of some kind."""
        kind = self.random.choices(
            ("whole", "stream", "slow", "stop", "sampled", "leave", "hang up", "bad"), (30, 25, 5, 10, 10, 10, 5, 5)
        )[0]
        prompt, new = self.random.choice(PROMPTS), self.random.choice(LENGTHS)
        options: dict[str, Any] = {"model": self.target, "prompt": prompt, "max_tokens": new, "temperature": 0}
        stop = self.random.choice(STOPS) if kind == "stop" else None
        if stop is not None:
            options["stop"] = [stop]
        try:
            text = await self.text(kind, options)
        except APIError as error:
            if not (kind == "bad" and getattr(error, "status_code", None) == 400):
                self.wrong.append(f"{kind} {prompt!r} {new}: {error!r}")
        else:
            greedy = kind in ("whole", "stream", "slow", "stop")
            if greedy and text != self.expected[prompt, new, stop]:
                self.wrong.append(f"{kind} {prompt!r} {new} {stop!r}: {text!r}")
            if kind == "bad":
                self.wrong.append(f"an invalid request was answered: {options}")
        self.seen[kind] += 1

    async def text(self, kind: str, options: dict[str, Any]) -> str:
        """Return the answer to one request, or the part that was sent before its client left."""
        if kind == "bad":
            options |= self.random.choice(({"max_tokens": -1}, {"temperature": -2}, {"stop": ""}, {"prompt": ""}))
        if kind == "sampled":
            options |= {
                "temperature": self.random.choice((0.3, 0.8, 1.2)),
                "extra_body": {"generation_config": SAMPLED},
            }
        if kind == "hang up":
            options |= {"max_tokens": 600}
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.client.completions.create(**options), self.random.uniform(0.01, 1))
            return ""
        if kind not in ("stream", "slow", "leave"):
            return (await self.client.completions.create(**options)).choices[0].text
        text = ""
        async with await self.client.completions.create(stream=True, **options) as answer:
            async for chunk in answer:
                text += chunk.choices[0].text
                if kind == "leave" and self.random.random() < 0.1:
                    break
                await asyncio.sleep(0.1 if kind == "slow" else 0)
        return text

    async def report(self, now: float, memory: float) -> None:
        """Print one line."""
        found = await self.metrics()
        kept = " ".join(f"{name} {found[name]:.2f}" for name in ("cache_used", "draft_slots") if name in found)
        print(
            f"{now / 60:6.1f} min  {sum(self.seen.values()):6d} answered  {len(self.wrong)} wrong  "
            f"{found['requests_running']:.0f} running  {found['requests_waiting']:.0f} waiting  {kept}  "
            f"tau {found['mean_accepted_length']:.2f}  {memory:.0f} MB",
            flush=True,
        )

    async def metrics(self) -> dict[str, float]:
        """Read those numbers of /metrics that have no labels."""
        text = await self.client.get(f"{self.url}/metrics", cast_to=str)
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name.removeprefix("hf_spec_"): sample.value for sample in samples if not sample.labels}

    async def is_left_clean(self) -> bool:
        """Tell whether nothing runs, waits or is kept; what was cancelled may take a moment."""
        for _ in range(300):
            found = await self.metrics()
            names = ("requests_running", "requests_waiting", "cache_used", "draft_slots")
            if not any(found.get(name) for name in names):
                return True
            await asyncio.sleep(0.1)
        print(f"still kept: { {name: found.get(name) for name in names} }")
        return False


def resident(pid: int) -> float:
    """Return the memory of a process in MB, as Linux counts it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def start(target: str, speculator: str, one_by_one: bool) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server, and return its process and address."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hf_spec", "serve", target, "--speculator", speculator, "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    if not one_by_one:
        command += [
            "--continuous-batching",
            "--cb-block-size",
            "16",
            "--cb-num-blocks",
            "96",
            "--cb-max-batch-tokens",
            "256",
        ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL), f"http://localhost:{port}"  # its errors are shown


async def soak(args: argparse.Namespace, process: subprocess.Popen[bytes], url: str) -> bool:
    """Run the clients, and tell whether all is well. Errors: a SystemExit if the server does not start."""
    clients = Soak(url, args.target, args.seed)
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}, before it answered")
        with contextlib.suppress(APIConnectionError):
            await clients.metrics()
            break
        await asyncio.sleep(0.2)
    memory = await clients.run(args.minutes * 60, args.clients, process.pid)
    clean = await clients.is_left_clean()
    warm = memory[len(memory) // 3]
    print(f"{dict(clients.seen)}; memory {warm:.0f} MB when warm, {memory[-1]:.0f} MB at the end, clean: {clean}")
    for line in clients.wrong:
        print(f"WRONG: {line}")
    return clean and not clients.wrong and memory[-1] <= MOST_GROWTH * warm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24, help="requests at a time (%(default)s)")
    parser.add_argument("--target", default=str(demo.path()))
    # Drafts over hidden states share no prefixes, so nothing of the paged cache is kept for later.
    parser.add_argument("--speculator", default=str(demo.path("draft-eagle3")))
    parser.add_argument("--one-by-one", action="store_true", help="without continuous batching")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    process, url = start(args.target, args.speculator, args.one_by_one)
    try:
        return 0 if asyncio.run(soak(args, process, url)) else 1
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
