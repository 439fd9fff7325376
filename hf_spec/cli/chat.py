"""``hf-spec chat``: chat with a target in a terminal, decoded speculatively."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from .common import (
    add_answer_options,
    add_no_pack,
    add_speculator,
    asked_for,
    command,
    configured,
    read_utf8,
    sampling,
    text_of,
)
from .history_file import add_history_file, check_history_file, keeping_history

if TYPE_CHECKING:
    from ..metrics import SpeculationStats

HELP = """/reset  start a new chat         /stats  print the statistics
/exit   end, as Ctrl-D does      Ctrl-C  stop an answer"""


def add_chat(commands: Any) -> None:
    """Declare ``hf-spec chat``."""
    add = command(commands, _chat, "chat", "talk to a model in the terminal", f"While it runs:\n{HELP}")
    add("model", help="target: directory or Hub id, with a chat template")
    add_speculator(add)
    add("--system", type=text_of, metavar="TEXT", help="system message, before the first message")
    add_history_file(add)
    add_answer_options(add, 512)
    add_no_pack(add)


def _chat(args: argparse.Namespace) -> None:
    check_history_file(args)
    from ..sampling import set_seed
    from .loading import load_models, pack_models, refuse_without_template

    target, tokenizer, speculators = load_models(
        args.model, [args.speculator], args.dtype, args.device, lambda draft: [configured(draft, args, args.tree)]
    )
    refuse_without_template(tokenizer, args.model, "use hf-spec generate")
    speculator = speculators[args.speculator]
    pack_models(args, target, speculator)
    if args.seed is not None:
        set_seed(args.seed)
    options = {
        "speculator": speculator,
        "speculation_config": asked_for(speculator, args, args.tree),
        "max_new_tokens": args.max_new_tokens,
        **sampling(args.temperature),
    }
    with keeping_history(args, speculator, tokenizer):
        _Chat(target, tokenizer, args.system, options).run()


class _Chat:
    """The messages of a chat, and the statistics of its answers."""

    def __init__(self, target: Any, tokenizer: Any, system: str | None, options: dict[str, Any]) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options
        self.beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.beginning)
        self.answers: list[SpeculationStats] = []

    def run(self) -> None:
        """Read lines and answer them until there are no more."""
        is_terminal = sys.stdin.isatty()
        read_utf8()
        if is_terminal:
            with contextlib.suppress(ImportError):  # on some systems
                import readline  # noqa: F401, which lets input() edit lines and recall earlier ones
            print(HELP)
        while True:
            try:
                line = text_of(input("> " if is_terminal else "").strip())
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends the chat)")
            except EOFError:
                return
            else:
                if line in ("/exit", "/quit"):
                    return
                self._handle(line)

    def _handle(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self.beginning)
        elif line == "/stats":
            self._print_stats()
        elif line.startswith("/"):
            print(HELP if line == "/help" else f"{line.split()[0]} is not a command\n{HELP}")
        elif line:
            self._answer(line)

    def _print_stats(self) -> None:
        from ..metrics import SpeculationStats

        if not self.answers:
            print("no answer was generated yet")
            return
        print(f"the last answer:\n{self.answers[-1]}")
        if len(self.answers) > 1:
            print(f"all {len(self.answers)} answers:\n{SpeculationStats.merge(self.answers)}")

    def _answer(self, line: str) -> None:
        """Answer one message. Of a stopped answer, the part that was generated stays in the chat."""
        from jinja2 import TemplateError

        from ..decode.refusals import refuse_growing_rope
        from ..scoring.plain import input_device
        from .loading import limited_length

        self.messages.append({"role": "user", "content": line})
        try:
            inputs = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(input_device(self.target))
        except TemplateError as error:
            raise ValueError(f"the chat template of the model does not take this chat: {error}") from error
        length = inputs.input_ids.shape[1]
        try:
            new = limited_length(self.options["max_new_tokens"], length, self.target)
            refuse_growing_rope(self.target, {}, length, length + new)
        except ValueError as error:
            print(f"({str(error).rstrip('.')}, or /reset starts a new chat)")
            self.messages.pop()
            return
        shown = _shown(self.tokenizer)
        options = self.options | {"max_new_tokens": new}
        try:
            out = self.target.generate(**inputs, streamer=shown, return_dict_in_generate=True, **options)
        except KeyboardInterrupt:
            shown.end()
            print("(stopped)")
        else:
            self.answers.append(out.speculation)
        self.messages.append({"role": "assistant", "content": "".join(shown.pieces)})


def _shown(tokenizer: Any) -> Any:
    """Return a streamer that prints the text and keeps it in ``pieces``."""
    from transformers import TextStreamer

    class Shown(TextStreamer):  # type: ignore[misc, unused-ignore]
        pieces: list[str]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.pieces.append(text)
            super().on_finalized_text(text, stream_end)

    shown = Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
    shown.pieces = []
    return shown
