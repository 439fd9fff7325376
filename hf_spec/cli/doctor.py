"""``hf-spec doctor``: find out why few draft tokens are accepted."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .bench import PROMPTS_HELP
from .common import add_device_options, add_no_pack, at_least, command, draft_of

if TYPE_CHECKING:
    from ..drafts.base import Speculator
    from ..settings import SpeculationConfig


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
    from ..doctor.diagnosis import refuse_draft
    from .loading import load_models, pack_models

    prompts = read_prompts(args.prompts, args.limit)

    def settings(draft: Speculator) -> list[SpeculationConfig]:
        refuse_draft(draft)  # before the target's weights are read
        return [draft.settings(None)]

    target, tokenizer, drafts = load_models(args.model, [args.speculator], args.dtype, args.device, settings)
    pack_models(args, target, *drafts.values())
    progress = sys.stderr.isatty()
    print(diagnose(target, drafts[args.speculator], tokenizer, prompts, args.max_new_tokens, progress))
