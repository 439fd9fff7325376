"""``hf-spec serve``: transformers' OpenAI-compatible server, with a target that guesses."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING, Any

from .common import SPECULATOR_HELP, TREE_HELP, add_proposal_options, asked_for, command, draft_of, tree_of
from .remembering import add_memory_file, check_memory_file, remembering

if TYPE_CHECKING:
    from ..drafts.base import Speculator
    from ..settings import SpeculationConfig

USAGE = "%(prog)s TARGET --speculator X [options of transformers serve]"
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

Answers POST /v1/chat/completions, /v1/completions, /v1/responses, and GET /metrics, for Prometheus."""


def add_serve(commands: Any) -> None:
    """Declare ``hf-spec serve``."""
    add = command(commands, _serve, "serve", "answer OpenAI's clients with a target that guesses", MORE, USAGE)
    add("--speculator", type=draft_of, required=True, metavar="X", help=SPECULATOR_HELP)
    add("--tree", type=tree_of, metavar="SHAPE", help=TREE_HELP)
    add_proposal_options(add)
    add_memory_file(add)


def _serve(args: argparse.Namespace) -> None:
    check_memory_file(args)
    options = _options_of_transformers(args.rest)
    target = options.pop("force_model")
    if target is None:
        raise ValueError("serve needs a target: hf-spec serve TARGET --speculator X; a directory or Hub id")

    # Where requests are batched, a draft that guesses trees does so only if it is asked to.
    tree = args.tree or ("chain" if options["continuous_batching"] else None)

    def config(speculator: Speculator) -> SpeculationConfig:
        return asked_for(speculator, args, tree)

    from transformers import AutoTokenizer

    from ..serving.server import Server

    speculator = _checked(target, args.speculator, options["dtype"], config)
    tokenizer = None if args.memory_file is None else AutoTokenizer.from_pretrained(target)
    with remembering(args, speculator, tokenizer):
        Server(target, speculator, config, **options)


def _checked(target: str, name: str, dtype: str | None, config: Any) -> Any:
    """Load a draft and check it before the target's weights are read, where the target's outline can be had."""
    from .loading import load_drafts, outline_of, to_be_read

    try:
        outline = outline_of(target)
    except (OSError, ValueError) as error:  # code of its own, or ORG/MODEL@REVISION:FILE: transformers knows more
        if isinstance(error, FileNotFoundError) and not {"@", ":"} & set(target):
            raise
        return to_be_read(name)
    return load_drafts(outline, [name], dtype or "auto", lambda draft: [config(draft)]).get(name) or to_be_read(name)


def _options_of_transformers(rest: list[str]) -> dict[str, Any]:
    """Read what ``transformers serve`` would; ValueError for what it does not know, ImportError if it is not there."""
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
