"""``hf-spec doctor``: find out why few draft tokens are accepted."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .bench import PROMPTS_HELP
from .common import add_device_options, add_no_pack, at_least, command, draft_of


def add_doctor(commands: Any) -> None:
    """Declare ``hf-spec doctor``."""
    add = command(commands, _doctor, "doctor", "find out why few tokens of a draft are accepted")
    add("model", help="target: directory or Hub id")
    add(
        "--speculator",
        type=draft_of,
        required=True,
        metavar="DRAFT",
        help="directory or Hub id of a draft or a language model",
    )
    add("--prompts", required=True, metavar="FILE", help=PROMPTS_HELP)
    add("--limit", type=at_least(1), default=16, metavar="N", help="prompts per category (%(default)s)")
    add("--max-new-tokens", type=at_least(8), default=96, metavar="N", help="per prompt (%(default)s)")
    add_device_options(add)
    add_no_pack(add)


def _doctor(args: argparse.Namespace) -> None:
    from ..bench import read_prompts
    from ..doctor import diagnose
    from .loading import load_models, pack_models

    prompts = read_prompts(args.prompts, args.limit)
    target, tokenizer, drafts = load_models(
        args.model, [args.speculator], args.dtype, args.device, lambda draft: [draft.settings(None)]
    )
    pack_models(args, target, *drafts.values())
    progress = sys.stderr.isatty()
    print(diagnose(target, drafts[args.speculator], tokenizer, prompts, args.max_new_tokens, progress))
