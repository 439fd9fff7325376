"""What commands share: how one is declared, and what it loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.resolve import as_speculator, load_draft
from ..drafts.base import Speculator
from ..scoring.runner import input_device

WITHOUT_WEIGHTS = ("ngram", "mtp")
TEMPERATURE_HELP = "0 decodes greedily; left out: as the model says"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def command(commands: Any, run: Any, name: str, description: str) -> Any:
    """Add a subcommand and return its ``add_argument``."""
    parser = commands.add_parser(name, help=description, description=description)
    parser.set_defaults(run=run)
    return parser.add_argument


def add_device_options(add: Any) -> None:
    """Declare where and how models run."""
    add("--dtype", choices=DTYPES, default="auto", help="of target and draft; auto: as they are stored (%(default)s)")
    add("--device", help="cpu, cuda, cuda:1, ..., or auto for all; left out: an accelerator if there is one")
    add("--threads", type=int, metavar="N", help="of the CPU")


def load_target(name: str, dtype: str, device: str | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; ``device`` may be anything that ``device_map`` takes, ``None`` chooses."""
    device = device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
    return model, AutoTokenizer.from_pretrained(name)


def load_speculator(name: str, target: PreTrainedModel, dtype: str) -> Speculator:
    """Load what a user names as a draft: a rule, a draft of any format, or else a causal language model."""
    if name in WITHOUT_WEIGHTS:
        return as_speculator(name, target)
    return as_speculator(load_draft(name, target, dtype=dtype).to(input_device(target)), target)


def sampling(temperature: float | None) -> dict[str, Any]:
    """Return what ``generate`` is told of a temperature; nothing of ``None``."""
    if temperature is None:
        return {}
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def writable(text: str) -> Path:
    """Return the path of a file in a directory that exists, so that no result is lost after a long run."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a directory; make it first")
    return path


def existing(text: str) -> Path:
    """Return the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path
