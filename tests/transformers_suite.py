"""Run transformers' own generation tests through ``speculator=``.

    python tests/transformers_suite.py CHECKOUT                       # an oracle draft, a third of its tokens wrong
    python tests/transformers_suite.py CHECKOUT --draft ngram -n 2    # what follows is passed on to pytest
    python tests/transformers_suite.py CHECKOUT --draft assistant --models llama gpt2

``CHECKOUT`` is a checkout of transformers of the installed version, with its ``tests``. Of every model's tests those
of ``GenerationTesterMixin`` are run. Each call of ``generate`` in them is made twice: plainly, and with the same
arguments and random state with a speculator, whose output the test is given. Greedy text has to be the same. A call
that hf_spec refuses goes on plainly, and the reason is counted. ``--draft assistant`` changes only those calls that
pass an ``assistant_model``: it becomes the speculator.

The last lines say how many calls were compared, sampled and refused, by reason, and which tests failed. The exit
status is 0 where no test failed but those in ``KNOWN``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

DRAFTS = ("oracle", "ngram", "assistant")
WRONG = 3  # every third token of the oracle is wrong
MIXIN = "GenerationTesterMixin"

# Tests that look at how plain decoding works, by a part of their names, and what they look at.
KNOWN = {
    "test_generate_compile_model_forward_fullgraph": "which function transformers compiles for its own loop",
    "test_generate_compilation_all_outputs": "the compiled call that transformers' own loop keeps on the model",
    "attention_outputs": "attentions, which a block of draft tokens does not give one by one",
}


def main() -> int:
    """Run the tests of a checkout in a process of their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="checkout of transformers, of the installed version")
    parser.add_argument("--draft", choices=DRAFTS, default="oracle")
    parser.add_argument("--models", nargs="*", default=[], help="folders of tests/models; all of them by default")
    asked, others = parser.parse_known_args()
    tests = asked.checkout / "tests"
    if not (tests / "generation" / "test_utils.py").is_file():
        parser.error(f"{asked.checkout}: no tests/generation/test_utils.py; pass a checkout of transformers")
    folders = [tests / "models" / name for name in asked.models] or [tests / "models"]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        parser.error(f"{', '.join(missing)}: no such folder")
    here = Path(__file__).resolve().parent
    paths = [str(here.parent), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "--draft", asked.draft, *others]
    found = sorted(str(file.resolve()) for folder in folders for file in folder.rglob("test_modeling_*.py"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*command, *found], cwd=asked.checkout, env=environment, check=False).returncode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draft", choices=DRAFTS, default="oracle", help="what drafts in transformers' tests")


def pytest_configure(config: pytest.Config) -> None:
    from transformers import GenerationMixin

    import hf_spec  # noqa: F401  teaches generate the keyword

    torch.set_num_threads(1)
    calls = Calls(config.getoption("--draft"))
    GenerationMixin.generate = calls.around(GenerationMixin.generate)  # type: ignore[method-assign]
    config.pluginmanager.register(calls)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary())


class Calls:
    """Calls of ``generate`` in the test that runs, each made plainly and with a speculator."""

    def __init__(self, draft: str) -> None:
        self.draft = draft
        self.seen: list[str] = []  # what became of each call of this test
        self._is_inside = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if _is_of_mixin(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.seen = []
        try:
            yield
        finally:
            item.user_properties.append(("calls", self.seen))

    def around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``generate`` so that outermost calls without a speculator are made in both ways."""

        @functools.wraps(generate)
        def both(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or kwargs.get("speculator") is not None:
                return generate(model, *args, **kwargs)
            self._is_inside = True
            try:
                if not self._is_meant(kwargs):
                    return generate(model, *args, **kwargs)
                return self._in_both_ways(generate, model, args, kwargs)
            finally:
                self._is_inside = False

        return both

    def _is_meant(self, kwargs: dict[str, Any]) -> bool:
        return (kwargs.get("assistant_model") is not None) == (self.draft == "assistant")

    def _in_both_ways(self, generate: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        again, before = copy.deepcopy((args, kwargs)), torch.get_rng_state()
        plain = generate(model, *args, **kwargs)
        after, text = torch.get_rng_state(), getattr(plain, "sequences", plain)
        torch.set_rng_state(before)
        try:
            ours = generate(model, *again[0], **again[1] | self._speculator(model, text, again[1]))
        except Exception as error:
            if not _is_refusal(error):
                raise
            self.seen.append(f"refused: {_reason(error)}")
            torch.set_rng_state(after)
            return plain
        self._compare(model, kwargs, text, getattr(ours, "sequences", ours))
        return ours

    def _speculator(self, model: Any, text: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        from twins import Oracle

        from hf_spec import SpeculationConfig

        if self.draft == "ngram":
            return {"speculator": "ngram"}
        if self.draft == "assistant":
            return {"speculator": kwargs["assistant_model"], "assistant_model": None}
        oracle = Oracle(text, wrong=WRONG, vocab_size=model.config.get_text_config().vocab_size)
        return {"speculator": oracle, "speculation_config": SpeculationConfig(num_speculative_tokens=4)}

    def _compare(self, model: Any, kwargs: dict[str, Any], plain: torch.Tensor, ours: torch.Tensor) -> None:
        from hf_spec.decode.options import option

        if option(model, kwargs, "do_sample"):
            self.seen.append("sampled")
        elif torch.equal(plain, ours):
            self.seen.append("greedy, equal to plain")
        else:
            self.seen.append("greedy, not equal to plain")
            raise AssertionError(f"plain text {plain.tolist()}\nspeculative text {ours.tolist()}")


class Summary:
    """What became of all calls and tests, printed at the end."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        self.tests[report.outcome] += 1
        self.calls.update(call for name, calls in report.user_properties if name == "calls" for call in calls)
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and all(_known(name) for name in self.failed):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        write("calls of generate:")
        for call, count in self.calls.most_common():
            write(f"  {count:6} {call}")
        for name in self.failed:
            known = _known(name)
            write(f"  not held: {name}" + (f" (known: it looks at {known})" if known else ""))
        write(", ".join(f"{count} {outcome}" for outcome, count in sorted(self.tests.items())))


def _known(name: str) -> str | None:
    return next((what for part, what in KNOWN.items() if part in name), None)


def _is_of_mixin(item: Any) -> bool:
    mixins = [kind for kind in getattr(item.cls, "__mro__", ()) if kind.__name__ == MIXIN]
    return any(getattr(item, "originalname", item.name) in vars(kind) for kind in mixins)


def _is_refusal(error: Exception) -> bool:
    """Tell whether hf_spec itself raised ``error``, in words of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = f"{os.sep}hf_spec{os.sep}"
    return isinstance(error, ValueError | TypeError | NotImplementedError) and ours in frames[-1].filename


def _reason(error: Exception) -> str:
    """Shorten a refusal to its first sentence, without names of classes and numbers, so that like ones count once."""
    first = str(error).partition(". ")[0]
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"\b[A-Z]\w*(For|Model|LM)\w*", "MODEL", first))[:160]


if __name__ == "__main__":
    sys.exit(main())
