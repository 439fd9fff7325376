"""``hf-spec serve``: transformers' OpenAI-compatible server with speculative decoding."""

from __future__ import annotations

import argparse
import inspect
import os
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ..serving.policy import (
    ACCEPTANCE,
    CHARACTERS_PER_TOKEN,
    DEEPEST_NESTING,
    LONGEST_STOP_STRING,
    MOST_STOP_STRINGS,
    Policy,
    check_address,
    is_host,
    is_key,
)
from .common import (
    TREE_HELP,
    add_invariant,
    add_no_pack,
    add_proposal_options,
    add_speculator,
    asked_for,
    at_least,
    command,
    tree_of,
)
from .history_file import add_history_file, check_history_file, keeping_history

if TYPE_CHECKING:
    from ..drafts.base import Speculator
    from ..settings import SpeculationConfig

USAGE = "%(prog)s TARGET [--speculator X] [options of transformers serve]"
MORE = """
All options of `transformers serve` may be given, too (see `transformers serve --help`). Some of them:
  --host NAME, --port N     where to listen (localhost, 8000)
  --continuous-batching     many requests at a time
  --cb-num-blocks N, --cb-max-memory-percent SHARE
                            its paged cache: N blocks of 256 tokens, or a share of the memory (0 to 1); by default
                            2 GiB on a CPU, or a quarter of the free memory if that is less, and half of the free
                            memory of an accelerator
  --compile                 static cache and torch.compile
  --device, --dtype, --quantization, --attn-implementation

Answers POST /v1/chat/completions, /v1/completions, /v1/responses, and GET /metrics, for Prometheus.
"""
FIXED = (
    f"\nFixed limits: {MOST_STOP_STRINGS} stop strings of {LONGEST_STOP_STRING} characters, {DEEPEST_NESTING} "
    f"levels of lists and objects,\nand {CHARACTERS_PER_TOKEN} characters for each token of the longest prompt."
)

KEY = "HF_SPEC_API_KEY"


def add_serve(commands: Any) -> None:
    """Declare ``hf-spec serve``."""
    add = command(commands, _serve, "serve", "answer OpenAI's clients with speculative decoding", MORE + FIXED, USAGE)
    add_speculator(add)
    add("--tree", type=tree_of, metavar="SHAPE", help=TREE_HELP)
    add_proposal_options(add)
    add_history_file(add)
    add_no_pack(add)
    add_invariant(add)
    _add_policy(add)


def _add_policy(add: Any) -> None:
    """Declare the limits for clients, the fields of ``Policy``."""

    def limit(name: str, meaning: str, least: int = 1) -> None:
        usual = getattr(Policy, name.strip("-").replace("-", "_"))
        add(name, type=at_least(least), metavar="N", default=usual, help=f"{meaning} (%(default)s)")

    limit("--max-prompt-tokens", "longest prompt; a longer one is refused")
    limit("--max-new-tokens", "longest text, which ends there")
    limit("--max-beams", "most beams of a request")
    limit("--max-request-mib", "largest request, with its pictures, in MiB")
    limit("--shutdown-seconds", "how long texts may continue after the server is stopped", least=0)
    add("--api-key", type=key_of, metavar="KEY", default=os.environ.get(KEY), help="what clients have to send as "
        f"Authorization: Bearer KEY, but for /health; left out: {KEY} of the environment, or nothing")  # fmt: skip
    add("--media-hosts", type=hosts_of, metavar="HOST,...", default=(), help="from where pictures and sounds that a "
        "request names by URL are fetched, HOST or HOST:PORT; left out: from nowhere; requests may hold them as data: "
        "URLs")  # fmt: skip
    add("--docs", action="store_true", help="answer /docs, /redoc and /openapi.json, too")
    add("--admin", action="store_true", help="answer /reset and /load_model, too")
    add("--per-request-spec-decode-metrics", choices=ACCEPTANCE, default=Policy.per_request_spec_decode_metrics,
        help="summary: each answer tells "
        "how many draft tokens its text accepted, under vLLM's names (%(default)s)")  # fmt: skip


def _serve(args: argparse.Namespace) -> None:
    check_history_file(args)
    options = _options_of_transformers(args.rest)
    target = options.pop("force_model")
    if target is None:
        raise ValueError("serve needs a target: hf-spec serve TARGET; a directory or Hub id")
    check_address(options["host"], options["port"])
    if args.invariant and options["compile"]:
        raise ValueError("--invariant is for eager forwards, and --compile compiles them: pass one of them")

    # In continuous batching trees are used only on request, also by drafts whose default is a tree.
    tree = args.tree or ("chain" if options["continuous_batching"] else None)

    def config(speculator: Speculator) -> SpeculationConfig:
        asked = asked_for(speculator, args, tree)
        # By every other rule a sampled text depends on the draft tokens, which may come from texts of others.
        return asked.merge(verification="exact") if args.invariant else asked

    from transformers import AutoTokenizer

    from ..serving.server import Server
    from .loading import pack_models

    speculator = _checked(target, args.speculator, options["dtype"], config)
    tokenizer = None if args.history_file is None else AutoTokenizer.from_pretrained(target)
    with keeping_history(args, speculator, tokenizer):
        policy = {one.name: getattr(args, one.name) for one in fields(Policy)}
        Server(target, speculator, config, loaded=partial(pack_models, args), **options, **policy)


def key_of(text: str) -> str:
    """Read an API key."""
    if is_key(text):
        return text
    raise argparse.ArgumentTypeError("a key has visible ASCII characters, at least one, and no spaces")


def hosts_of(text: str) -> tuple[str, ...]:
    """Read host names, separated by commas."""
    if all(map(is_host, hosts := tuple(text.lower().split(",")))):
        return hosts
    raise argparse.ArgumentTypeError(f"{text!r} is no list of HOST or HOST:PORT with commas between them")


def _checked(target: str, name: str, dtype: str | None, config: Any) -> Any:
    """Load a draft and check it before the target's weights are read, if the target's config can be read."""
    from .loading import load_drafts, outline_of, unloaded

    try:
        outline = outline_of(target)
    except (OSError, ValueError) as error:  # remote code, or ORG/MODEL@REVISION:FILE, which the server reads
        if isinstance(error, FileNotFoundError) and not {"@", ":"} & set(target):
            raise
        return unloaded(name)
    return load_drafts(outline, [name], dtype or "auto", lambda draft: [config(draft)]).get(name) or unloaded(name)


def _options_of_transformers(rest: list[str]) -> dict[str, Any]:
    """Parse the options of ``transformers serve``; ValueError for unknown ones, ImportError if it is not installed."""
    import typer
    from transformers.cli.serve import Serve
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("the server needs packages of its own: pip install 'hf-spec[serve]'")

    def options(**given: Any) -> dict[str, Any]:
        return given

    options.__signature__ = inspect.signature(Serve)  # type: ignore[attr-defined]
    reader = typer.Typer(add_completion=False)
    reader.command()(options)
    try:
        read = typer.main.get_command(reader).main(rest, prog_name="hf-spec serve", standalone_mode=False)
    except Exception as error:
        if (message := getattr(error, "format_message", None)) is None:
            raise
        raise ValueError(f"{message()} (`transformers serve --help` lists its options)") from error
    return dict(read)
