"""The conversation of an engine in a process of its own with engine_speed.py and compare.py: lines of JSON.

It reads requests from its input, one JSON object per line, and answers each with one line. The first line that it
writes is ``{"ready": version, ...}``, or ``{"error": ...}``. All else that an engine prints goes to the standard
error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]) -> None:
    """Answer requests until the input ends; ``start`` gets the settings, and returns versions and what answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        versions, answer = start(json.loads(sys.argv[1]))
        say(versions)
        for line in sys.stdin:
            say(answer(json.loads(line)))
    except Exception as error:  # whatever an engine of another project raises is its answer
        say({"error": f"{type(error).__name__}: {error}"})
        raise
