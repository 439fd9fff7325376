"""Resuming training from the last complete checkpoint, and errors that say when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..checkpoints.fingerprint import differences, lasting
from ..processes import Processes

logger = logging.get_logger(__name__)

STATE = "trainer_state.json"  # the file that Trainer writes last
DEEPSPEED = "global_step*"  # the directory of DeepSpeed's weights, optimizer and schedule
WEIGHTS = ("*model*", DEEPSPEED)  # weights of a draft or an adapter, in one file or in shards
# Without them Trainer would start anew, and say nothing. FSDP's optimizer may be a directory, as optimizer_0.
PROGRESS = {"optimizer": "*optimizer*", "learning rate schedule": "scheduler.pt"}
MOVING = ("params", "lr")  # keys of an optimizer's group that change during training
# Keys of a config that are set after training began: by us (the target's name) and by Trainer (from the tokenizer).
SET_LATER = ("speculators_config", "bos_token_id", "eos_token_id", "pad_token_id")
# Keys of an adapter's config that say what it computes. PEFT reads none from a checkpoint of an adapter at hand.
OF_ADAPTER = """base_model_name_or_path peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora bias
    fan_in_fan_out target_modules exclude_modules layers_to_transform layers_pattern modules_to_save""".split()
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How safetensors and torch say that a file could not be written to its end.
FULL_MESSAGES = (*(f"os error {number}" for number in FULL), "PytorchStreamWriter failed", "unexpected pos")


def asks_to_resume(asked: str | bool | None) -> bool:
    """Tell whether ``resume_from_checkpoint`` is set; a command line gives ``false`` as text."""
    return bool(asked) and str(asked).lower() != "false"


def checkpoint_to_resume(asked: str | bool | None, output_dir: str | os.PathLike[str]) -> str | None:
    """Return the checkpoint that ``resume_from_checkpoint`` asks for; ``None`` to start from the beginning.

    ``True``, also as text, is the last complete one in ``output_dir``. Errors: a ValueError if the named one is not
    complete.
    """
    if not asks_to_resume(asked):
        return None
    if isinstance(asked, str) and asked.lower() != "true":
        if problem := _problem(Path(asked)):
            raise ValueError(
                f"training cannot resume from {asked}, which {problem}: name another, or true for the last"
            )
        return asked
    for checkpoint in reversed(checkpoints(output_dir)):
        if not (problem := _problem(checkpoint)):
            return str(checkpoint)
        logger.warning(f"{checkpoint} {problem}: looking for an earlier checkpoint to resume from")
    logger.warning(f"there is no complete checkpoint in {output_dir}: training starts from the beginning")
    return None


def check_same_everywhere(checkpoint: str | None, processes: Processes) -> None:
    """Raise a ValueError if processes, maybe on several machines, have found different checkpoints."""
    found = processes.together(lambda: None if checkpoint is None else Path(checkpoint).name)
    if len({*found}) > 1:
        raise ValueError(
            f"processes resume from different checkpoints ({', '.join(str(one) for one in dict.fromkeys(found))}): "
            "give all machines the same output_dir, or name a checkpoint that each has"
        )


def checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a directory, in the order of their steps."""
    found = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = {int(number): path for path in found if (number := path.name.rpartition("-")[2]).isdecimal()}
    return [steps[step] for step in sorted(steps)]


def check_draft(checkpoint: str | None, draft: Any, adapter: Any) -> None:
    """Raise a ValueError if a checkpoint is of another ``draft``, or of another adapter on it.

    ``adapter`` is the config of the adapter that is trained; ``None`` if the draft itself is.
    """
    config, of_adapter = (Path(checkpoint or "", name) for name in ("config.json", "adapter_config.json"))
    if checkpoint is None or not (config.exists() or of_adapter.exists()):  # DeepSpeed writes neither
        return
    if of_adapter.exists() != (adapter is not None):
        found = ["it is an adapter of PEFT" if adapter is None else "it has no adapter of PEFT"]
    elif adapter is not None:
        saved, own = map(_of_adapter, (json.loads(of_adapter.read_text("utf-8")), adapter.to_dict()))
        found = differences(saved, dict.fromkeys(saved) | own)
    else:
        saved, own = (_flat(json.loads(one)) for one in (config.read_text("utf-8"), draft.config.to_json_string()))
        kind_first = sorted({**saved, **own}, key=lambda name: "model_type" not in name)
        found = differences(saved, {name: own.get(name) for name in kind_first})
    if found:
        raise ValueError(
            f"training cannot resume from {checkpoint}, which holds another draft: {'; '.join(found[:3])}. Repeat the "
            "recipe that began it, or name another output_dir"
        )


def _of_adapter(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in OF_ADAPTER if config.get(name)}
    return {name: sorted(one) if isinstance(one, list | set) else one for name, one in found.items()}


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in lasting(config).items():
        if name not in SET_LATER:
            found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


@contextlib.contextmanager
def checked_optimizer(optimizer: Any, checkpoint: str | None) -> Iterator[None]:
    """Raise a ValueError if the state loaded within is of another optimizer; warn of arguments that it overrides."""
    asked = _settings(optimizer)
    try:
        yield
        is_same = [one.keys() for one in _settings(optimizer)] == [one.keys() for one in asked]
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"training cannot resume from {checkpoint}, which was written with another optimizer, or trained other "
            "weights: repeat the optim, muon_learning_rate and freeze_lm_head of the run that began it, or start "
            "another one from its draft, in another output_dir"
        )
    pairs = zip(asked, _settings(optimizer), strict=True)
    if found := [one for wanted, have in pairs for one in differences(have, wanted)]:
        logger.warning(
            f"training continues with the optimizer of {checkpoint}, not with these arguments: "
            f"{'; '.join(dict.fromkeys(found))}. To use them, start another run from its draft, in another output_dir"
        )


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without those that change during training."""
    return [
        {name: list(one) if isinstance(one, tuple) else one for name, one in group.items() if name not in MOVING}
        for group in optimizer.param_groups
    ]


def place_in_stream(checkpoint: str, accumulated: int) -> tuple[int, int]:
    """Return the pass over a stream in which a checkpoint was written, and how many batches of that pass were read.

    Trainer does not know a stream's length, and would skip all batches within the first pass. ``accumulated`` batches
    make a step.
    """
    state = json.loads(Path(checkpoint, STATE).read_text(encoding="utf-8"))
    passes = math.ceil(state["epoch"]) - 1  # for a stream, Trainer takes max_steps as the length of an epoch
    return passes, round((state["epoch"] - passes) * state["max_steps"] * accumulated)


def check_output_dir(output_dir: str | os.PathLike[str], files: tuple[str, ...] = ()) -> None:
    """Raise a ValueError if another run left checkpoints, or any of ``files``, in a directory."""
    found = [*checkpoints(output_dir), *(Path(output_dir, name) for name in files)]
    if there := next((path.name for path in found if path.exists()), None):
        raise ValueError(
            f"{output_dir} has the {there} of another run: name another output_dir, or resume it by "
            "resume_from_checkpoint: true"
        )


@contextlib.contextmanager
def explain_full_disk(what: str) -> Iterator[None]:
    """Turn any error of a full disk while ``what`` is written into an OSError with that reason."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        if not full and not any(message in str(error) for message in FULL_MESSAGES):
            raise
        raise OSError(
            errno.ENOSPC,
            f"No space left on device: {what} could not be written. Free some space and set resume_from_checkpoint: "
            "true, to resume from the last complete checkpoint",
        ) from error


def _problem(checkpoint: Path) -> str:
    """Say what a checkpoint lacks; "" if it is complete."""
    if not checkpoint.is_dir():
        return "does not exist"
    for path in sorted(checkpoint.iterdir()):
        if not _is_complete(path):
            return f"has a {path.name} that is cut off"
    if not checkpoint.joinpath(STATE).exists():
        return f"has no {STATE}"
    if not any(any(checkpoint.glob(name)) for name in WEIGHTS):
        return "has no weights"
    if any(checkpoint.glob(DEEPSPEED)):  # which keeps all of it there
        return ""
    missing = [what for what, name in PROGRESS.items() if not any(checkpoint.glob(name))]
    if not missing:
        return ""
    return f"has no {' and no '.join(missing)}, because of save_only_model (another run may start from its draft)"


def _is_complete(path: Path) -> bool:
    """Tell whether a file is complete: a full disk or a kill cuts off its end."""
    if not path.is_file():
        return path.is_dir()  # anything else may be a pipe, which never ends
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
            return True
        except (OSError, ValueError, RecursionError):
            return False
    if path.suffix in (".pt", ".pth", ".bin"):
        return zipfile.is_zipfile(path)
    if path.suffix != ".safetensors":
        return True
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False
