"""``hf-spec generate``: stream a text and print its statistics, or answer a file of prompts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, cast

from .common import (
    add_answer_options,
    add_invariant,
    add_no_pack,
    add_speculator,
    asked_for,
    at_least,
    check_outputs,
    command,
    configured,
    existing,
    read_utf8,
    resumable,
    resume_hint,
    sampling,
    text_of,
)
from .history_file import add_history_file, check_history_file, keeping_history
from .many import answer_file, check_options

if TYPE_CHECKING:
    from ..integration import SpeculativeModel


def add_generate(commands: Any) -> None:
    """Declare ``hf-spec generate``."""
    add = command(commands, _generate, "generate", "stream text decoded with a speculator, then print its statistics",
                  resumes=resume_hint("out"))  # fmt: skip
    add("model", help="target: directory or Hub id")
    add_speculator(add)
    add(
        "--prompt",
        type=text_of,
        metavar="TEXT",
        help="read from standard input if left out, without the newline at its end",
    )
    add("--prompts", type=existing, metavar="FILE", help="JSON lines: answer them all, into --out")
    add("--out", type=resumable, metavar="FILE", help="JSON lines with the answers; an existing file is continued")
    add("--batch-size", type=at_least(1), default=8, metavar="N", help="of --prompts decoded together (%(default)s)")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add_history_file(add)
    add_answer_options(add, 256)
    add_no_pack(add)
    add_invariant(add)


def _generate(args: argparse.Namespace) -> None:
    check_options(args)
    check_outputs(args, ("out", "history_file"), ("prompts",))
    check_history_file(args)
    if args.prompts is not None:
        answer_file(args)
        return
    text = _read_prompt() if args.prompt is None else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; pass --prompt TEXT or write it to standard input")
    import torch
    from transformers import TextStreamer

    from ..bench import Prompt
    from ..sampling import set_seed
    from ..scoring.plain import input_device
    from .loading import limited_length, load_models, pack_models, refuse_without_template

    target, tokenizer, speculators = load_models(
        args.model, [args.speculator], args.dtype, args.device, lambda draft: [configured(draft, args, args.tree)]
    )
    if args.chat:
        refuse_without_template(tokenizer, args.model, "leave --chat out")
    speculator = speculators[args.speculator]
    pack_models(args, target, speculator)
    input_ids = torch.tensor([Prompt((text,), chat=args.chat).render([], tokenizer)], device=input_device(target))
    new = limited_length(args.max_new_tokens, input_ids.shape[1], target)
    if args.seed is not None:
        set_seed(args.seed)
    with keeping_history(args, speculator, tokenizer):
        out = cast("SpeculativeModel", target).generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            speculator=speculator,
            speculation_config=asked_for(speculator, args, args.tree),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=new,
            return_dict_in_generate=True,
            **sampling(args.temperature),
        )
    print(out.speculation, file=sys.stderr)


def _read_prompt() -> str:
    """Read standard input without the newline that shells and editors put at its end."""
    read_utf8()
    return text_of(sys.stdin.read().removesuffix("\n").removesuffix("\r"))
