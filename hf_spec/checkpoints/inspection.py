"""A report on a draft checkpoint: what it is, and which engines can load it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..configuration import SpeculatorConfig
from ..drafts.files import Checkpoint, Format
from ..untrusted import printable
from .auto import load
from .files import read_checkpoint
from .kinds import find_format, is_added, is_saved_quantised, kind_of, translate


@dataclass(frozen=True)
class Report:
    """The result of ``inspect``; ``str()`` is for people.

    ``engines`` maps an engine to the problems it has with the files, [] if it loads them correctly. ``problem`` is why
    hf_spec itself refuses them, None if it does not.
    """

    path: str
    layout: str
    config: SpeculatorConfig
    parameters: int
    dtypes: tuple[str, ...]
    engines: dict[str, list[str]]
    problem: str | None

    def __str__(self) -> str:
        config, layers = self.config, self.config.layers
        verifier = (config.speculators_config or {})["verifier"]
        lines = {
            "format": self.layout,
            "draft": f"{config.speculators_model_type}, {config.shape} of width {layers.hidden_size}, "
            f"{_counted(self.parameters)} values ({', '.join(self.dtypes)})",
            "target": f"{verifier.get('name_or_path') or 'not named'}, vocabulary {layers.vocab_size or 'not named'}",
            "from target": ", ".join(config.shared_with_target or ()) or "nothing: what it needs is in the file",
        }
        lines |= config.describe()
        lines |= {name: "; ".join(found) or "reads it" for name, found in self.engines.items()}
        lines["hf_spec"] = self.problem or "reads it"
        rows = (f"  {name:12} {text}".replace("\n", " ") for name, text in lines.items())
        return printable("\n".join([self.path, *rows]))


def inspect(path: str | os.PathLike[str], **hub: Any) -> Report:
    """Describe the draft at ``path`` (directory or Hub id). Errors: those of reading it, or an unknown format."""
    checkpoint = read_checkpoint(path, **hub)
    if is_saved_quantised(checkpoint.config):
        raise ValueError(f"{path} was saved quantised. It loads by its path; inspect the unquantised draft")
    found = find_format(checkpoint)
    config, tensors = translate(checkpoint)
    engines = kind_of(config).engines(config, checkpoint, found.name)
    if is_added(found):
        engines = {name: ["does not read this format; convert to speculators and inspect that"] for name in engines}
    problem = None
    try:
        load(checkpoint)
    except ValueError as error:
        problem = str(error)
    return Report(
        path=str(path),
        layout=_name(checkpoint, found),
        config=config,
        parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})),
        engines=engines,
        problem=problem,
    )


def _counted(number: int) -> str:
    """Format a number with the largest unit that it reaches: 512, 21.5 k, 1.2 M, 3.0 G."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _name(checkpoint: Checkpoint, found: Format) -> str:
    kind = checkpoint.config.get("speculators_model_type", found.owner)
    return f"{found.name} ({kind})" if kind else found.name
