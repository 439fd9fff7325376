"""Speculative decoding in lm-eval, the evaluation harness of EleutherAI: the same scores in less time.

    python -m hf_spec.bench.harness run --model hf-spec --model_args pretrained=MODEL,speculator=DRAFT --tasks gsm8k

The command takes the options of ``lm_eval``. Only tasks that generate text become faster, because
log-likelihoods need no drafts.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from ..defaults import set_speculator
from ..settings import SpeculationConfig

NAME = "hf-spec"
MISSING = "lm-eval is not installed: pip install 'hf-spec[eval]'"


@cache
def harness_model() -> type[Any]:
    """Return lm-eval's model of transformers with two more arguments, and register it as "hf-spec".

    ``speculator`` is "auto", "ngram", a directory or Hub id, or a speculator ("ngram"). ``num_speculative_tokens`` is
    the draft length (adaptive). All others are those of ``lm_eval.models.huggingface.HFLM``.

    Errors: ImportError if lm-eval is missing.
    """
    try:
        base: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
        register = importlib.import_module("lm_eval.api.registry").register_model
    except ImportError as error:
        raise ImportError(MISSING) from error

    class SpeculativeLM(base):  # type: ignore[misc]  # a class of an optional library
        """A model of transformers whose ``generate`` uses a speculator."""

        def __init__(
            self,
            pretrained: Any,
            speculator: Any = "ngram",
            num_speculative_tokens: int | None = None,
            **options: Any,
        ) -> None:
            super().__init__(pretrained, **options)
            length = None if num_speculative_tokens is None else int(num_speculative_tokens)
            set_speculator(self.model, speculator, SpeculationConfig(num_speculative_tokens=length))

    return register(NAME)(SpeculativeLM)  # type: ignore[no-any-return]


def main() -> None:
    """Run lm-eval's command with the model "hf-spec"."""
    harness_model()
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
