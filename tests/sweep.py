"""Try the self-check on every architecture, in bfloat16 and float32, with text and with what else a model reads.

    python tests/sweep.py found.jsonl           # goes on where it was stopped
    python tests/sweep.py found.jsonl --write   # puts what was found into docs/architectures.md

A line of the file is one finding: architecture, precision, inputs, and for chains and trees "passes", or why not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from architectures import build, names
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.scoring.architectures import arguments_of, why_no_trees, why_one_row, why_unsupported
from hf_spec.scoring.plain import new_cache
from hf_spec.scoring.prompts import Prompt
from hf_spec.scoring.selfcheck import check_target

TABLE = Path(__file__).parents[1] / "docs" / "architectures.md"
BEGIN, END = "<!-- the sweep begins -->", "<!-- the sweep ends -->"
IMAGE = 90  # the token that stands for a part of an image
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def passes(model: PreTrainedModel, prompt: Prompt | None = None) -> dict[str, str]:
    """Say for chains and trees whether the self-check passes, or why not."""
    rows = 1 if why_one_row(model) is not None else 2
    found = {}
    for kind in ("chain", "tree"):
        try:
            why = why_unsupported(model, new_cache(model), rows) or (why_no_trees(model) if kind == "tree" else None)
            if why is None:
                check_target(model, trees=kind == "tree", prompt=prompt)
        except ValueError as error:
            why = str(error)
        found[kind] = "passes" if why is None else why
    return found


def inputs_of(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield what ``model`` reads beside text, by name: token types, images in front of the text, or among it."""
    mask, known = torch.ones_like(ids), arguments_of(model)
    if "token_type_ids" in known and "pixel_values" not in known:
        types = (torch.arange(ids.shape[1]) % 2).expand_as(ids)
        yield "token types", {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    vision = getattr(model.config, "vision_config", None)
    if "pixel_values" not in known or vision is None or not isinstance(getattr(vision, "image_size", None), int):
        return
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(len(ids), 3, vision.image_size, vision.image_size, generator=generator).to(model.dtype)
    if not hasattr(model.config, "image_token_id"):
        yield "images", {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        return
    model.config.image_token_id = IMAGE
    features = model.get_image_features(pixel_values=pixels)
    features = getattr(features, "pooler_output", features)
    count = sum(len(one.flatten(0, -2)) for one in features) // len(ids)
    image = torch.full((len(ids), count), IMAGE)
    ids = torch.cat([ids[:, :3], image, ids[:, 3:]], dim=1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in known:  # PaliGemma's processor gives the type 0 to the whole of what is seen from everywhere
            given[name] = (ids == IMAGE).long() * (model.config.model_type != "paligemma")
    yield "images", given


def prompt_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Prompt | None:
    """Take what ``generate`` hands to the first forward of a call with ``inputs``."""
    found: list[Prompt | None] = []

    def decode(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rest = ("logits_processor", "stopping_criteria", "generation_config")
        found.append(Prompt.of_call(input_ids, {name: kwargs[name] for name in kwargs if name not in rest}))
        return input_ids

    model.generate(**inputs, max_new_tokens=8, custom_generate=decode)  # type: ignore[operator]
    return found[0]


def findings(name: str, precision: str) -> Iterator[dict[str, str]]:
    """Yield what is found about an architecture: with text, and with what else it reads."""
    model = build(name, dtype=PRECISIONS[precision])
    yield {"inputs": "text", **passes(model)}
    ids = torch.arange(8, 22).view(2, 7)[: 1 if why_one_row(model) else 2]
    try:
        for inputs, given in inputs_of(model, ids):
            yield {"inputs": inputs, **passes(model, prompt_of(model, given))}
    except Exception as error:  # inputs that are made in another way: not tried
        yield {"inputs": "others", "error": f"{type(error).__name__}: {error}"[:200]}


def sweep(file: Path, only: list[str]) -> None:
    known = {(one["name"], one["precision"]) for one in read(file)}
    for precision in PRECISIONS:
        for name in only or names("all"):
            if (name, precision) in known:
                continue
            try:
                found = list(findings(name, precision))
            except Exception as error:  # the architecture itself fails
                found = [{"inputs": "text", "error": f"{type(error).__name__}: {error}"[:200]}]
            with file.open("a") as out:
                out.writelines(json.dumps({"name": name, "precision": precision, **one}) + "\n" for one in found)


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def cell(one: dict[str, str] | None, kind: str) -> str:
    if one is None or "error" in one:
        return "not tried"
    return "passes" if one[kind] == "passes" else "refused"


def table(found: list[dict[str, str]]) -> str:
    """Draw a row for every architecture and kind of inputs: chain and tree, in bfloat16 and in float32."""
    by = {(one["name"], one["inputs"], one["precision"]): one for one in found}
    lines = ["| architecture | inputs | bfloat16: chain | tree | float32: chain | tree |", "|---|---|---|---|---|---|"]
    for name, inputs in dict.fromkeys((one["name"], one["inputs"]) for one in found if one["inputs"] != "others"):
        cells = [
            cell(by.get((name, inputs, precision)), kind) for precision in PRECISIONS for kind in ("chain", "tree")
        ]
        lines.append(f"| `{name}` | {inputs} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = Path(sys.argv[1])
    if "--write" in sys.argv:
        text = TABLE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        TABLE.write_text(f"{before}{BEGIN}\n{table(read(results))}\n{END}{after}", encoding="utf-8")
    else:
        sweep(results, sys.argv[2:])
