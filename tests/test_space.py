"""The demo for the Hub, ``examples/space``: its function without a browser, and its page where gradio is installed."""

from __future__ import annotations

import html
import re
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

SPACE = Path(__file__).parents[1] / "examples" / "space"
PROMPT = "Once upon a time, there was a little dog named Max."


@pytest.fixture(scope="module")
def app() -> dict[str, Any]:
    return runpy.run_path(str(SPACE / "app.py"))


@pytest.fixture(scope="module")
def models(app: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    return app["load"]({"HF_SPEC_TARGET": "small"})


def plain_text(shown: str) -> str:
    return html.unescape(re.sub("<[^>]+>", "", shown))


def test_both_texts_stream_and_accepted_tokens_are_coloured(app: dict[str, Any], models: Any) -> None:
    assert [*models.drafts] == ["vanilla", "eagle3", "medusa", "mtp", "dspark", "n-grams"]
    inputs = models.tokenizer(PROMPT, return_tensors="pt")
    out = models.target.generate(**inputs, max_new_tokens=16, do_sample=False)
    expected = models.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for _ in range(2):  # the second call is warm
        frames = [*app["compare"](models, PROMPT, "eagle3", 16, 0)]
        plain, plain_figures, text, text_figures = frames[-1]
        assert plain_text(plain) == plain_text(text) == expected
        assert "<span" in text and "<span" not in plain
        assert "accepted draft tokens" in text_figures and "x plain" in text_figures and "x plain" not in plain_figures
        for column in (0, 2):  # texts only grow
            grown = [plain_text(frame[column]) for frame in frames]
            assert all(after.startswith(before) for before, after in pairwise(grown))


def test_a_text_that_nobody_waits_for_ends(app: dict[str, Any], models: Any) -> None:
    before = {*app["threading"].enumerate()}
    stream = app["compare"](models, PROMPT, "n-grams", 100_000, 1.0)
    models.warm.add("n-grams")
    assert "recorded" in next(stream)[3]
    stream.close()
    assert {*app["threading"].enumerate()} <= before


def test_text_is_escaped_and_errors_reach_the_page(app: dict[str, Any], models: Any) -> None:
    tokens = models.tokenizer("<b>&", add_special_tokens=False)["input_ids"]
    assert "&lt;b&gt;&amp;</div>" in app["text_of"](models, app["Run"](tokens))
    inputs = models.tokenizer(PROMPT, return_tensors="pt")
    with pytest.raises(ValueError, match="temperature"):
        [*app["streamed"](models, inputs, {"temperature": -1.0, "do_sample": True})]


def test_drafts_need_names(app: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'ORG/DRAFT' is not NAME=PLACE"):
        app["load"]({"HF_SPEC_TARGET": "ORG/MODEL", "HF_SPEC_DRAFTS": "ORG/DRAFT"})


def test_the_page_is_built_and_called(app: dict[str, Any], models: Any) -> None:
    pytest.importorskip("gradio", reason="the page needs the extra [space], which the other tests do without")
    client = pytest.importorskip("gradio_client")
    page = app["build"](models)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True)
    try:
        found = client.Client(url, verbose=False).predict(PROMPT, "eagle3", 12, 0, api_name="/compare")
    finally:
        page.close()
    assert plain_text(found[0]) == plain_text(found[2]) != "" and "x plain" in found[3]


def test_the_space_is_built_with_a_version_that_the_library_takes() -> None:
    """The Hub's default is older."""
    asked = re.search(r'^python_version: "(.*)"$', (SPACE / "README.md").read_text(encoding="utf-8"), re.M)
    assert asked is not None
    project = tomllib.loads((SPACE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert asked[1] in SpecifierSet(project["requires-python"])
