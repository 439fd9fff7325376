"""Drafts that bring their code: read and decoding in a process where hf_spec cannot be imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, dynamic_module_utils

import hf_spec
from hf_spec import AutoDraftModel, DraftModel, SpeculationConfig, demo
from hf_spec.bundle import FILE, GENERATE, code_files
from hf_spec.bundling import DECODING, IMPORT, absolute, needed
from hf_spec.checkpoints.kinds import DRAFT_MODELS
from hf_spec.cli import main
from hf_spec.decode.entry import generate
from hf_spec.wrappers import wraps

EXAMPLES = Path(__file__).parents[2] / "examples"
IDS = [[1, 581, 614, 263, 453, 16, 442, 297, 263, 493]]
USUAL = ("Eagle3DraftModel", "MedusaDraftModel", "DSparkDraftModel")
OTHERS = tuple(one.__name__ for one in DRAFT_MODELS if one.__name__ not in USUAL)
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}

WITHOUT = """
import sys, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_spec":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from pathlib import Path
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

torch.set_num_threads(1)
folder, target_path, examples = map(Path, sys.argv[1:])
target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
given = torch.load(folder / "expected.pt")
call = {"do_sample": False, "max_new_tokens": 20, "trust_remote_code": True, "return_dict_in_generate": True}
for name, (inputs, logits) in given["drafts"].items():
    try:
        AutoModel.from_pretrained(folder / name)
        raise AssertionError("read without trust")
    except (ValueError, EOFError) as error:  # transformers asks, where somebody could answer
        assert not [*(folder / "modules").rglob(f"*/{name}/*/modeling_hf_spec.py")], error
    draft = AutoModel.from_pretrained(folder / name, trust_remote_code=True, dtype=torch.float32)
    assert "hf_spec" not in sys.modules and type(draft).__name__ == name
    with torch.no_grad():
        draft.bind(target)
        assert torch.equal(draft(**inputs).logits, logits), name
    as_dict = GenerationConfig(speculation_config={"num_speculative_tokens": 3})
    for asked in ({}, {"num_speculative_tokens": 3}, {"generation_config": as_dict}):
        out = target.generate(given["ids"], custom_generate=str(folder / name), speculator=draft, **asked, **call)
        assert torch.equal(out.sequences, given["plain"]), name
        assert out.speculation.emitted and (not asked or "as asked for" in out.speculation.draft_lengths)
    draft.save_pretrained(folder / f"{name}-again")
for speculator in (draft, "ngram"):
    try:
        target.generate(given["ids"], custom_generate=str(examples), speculator=speculator, **call)
    except ImportError as error:
        print("said:", error)
try:
    target.generate(given["ids"], custom_generate=str(folder / name), speculator="ngram", **call)
except TypeError as error:
    print("said:", error)
assert "hf_spec" not in sys.modules
"""


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32)


def draft_of(kind: type[Any], target: Any) -> tuple[Any, dict[str, Any]]:
    """Return a draft of ``kind`` for ``target``, and inputs of its forward."""
    torch.manual_seed(0)
    path = {kind.__name__: demo.path(f"draft-{name}") for name, kind in shipped().items()}.get(kind.__name__)
    if path is not None:
        draft = AutoDraftModel.from_pretrained(path, target, dtype=torch.float32)
    else:
        fields = kind.config_class.__dataclass_fields__
        shape = {key: value for key, value in {"block_size": 4, "mask_token_id": 3}.items() if key in fields}
        draft = kind(kind.config_class.for_target(target.config, **shape)).eval()
        draft.bind(target)
    width = target.config.hidden_size * len(draft.feature_layers(target))
    features = torch.randn(1, 6, width)
    if not kind.needs_anchors:
        return draft, {"input_ids": torch.tensor([IDS[0][:6]]), "features": features}
    return draft, {"input_ids": torch.tensor([[5]]), "features": features}


def shipped() -> dict[str, type[Any]]:
    kinds = {kind.config_class.speculators_model_type: kind for kind in DRAFT_MODELS}
    return {name: kinds[name] for name in ("eagle3", "medusa", "dspark", "mtp")}


@pytest.mark.parametrize("names", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_drafts_are_read_and_decode_without_hf_spec(names: tuple[str, ...], target: Any, tmp_path: Path) -> None:
    ids = torch.tensor(IDS)
    given: dict[str, Any] = {"ids": ids, "plain": target.generate(ids, **CALL), "drafts": {}}
    for kind in DRAFT_MODELS:
        if kind.__name__ in names:
            draft, inputs = draft_of(kind, target)
            with torch.no_grad():
                given["drafts"][kind.__name__] = inputs, draft(**inputs).logits
            draft.save_pretrained(tmp_path / kind.__name__, with_code=True)
    assert len(given["drafts"]) == len(names)
    torch.save(given, tmp_path / "expected.pt")
    environment = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    call = [sys.executable, "-c", WITHOUT, str(tmp_path), str(demo.path()), str(EXAMPLES)]
    more = {"PATH": os.environ.get("PATH", ""), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(call, capture_output=True, text=True, env=environment | more, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("said: this way of decoding needs hf_spec: pip install git+https://github.com/") == 2
    assert done.stdout.count("said: pass speculator=draft") == 1
    for name in names:
        files = (FILE, "custom_generate/generate.py", "config.json")
        first, again = ([Path(f"{tmp_path / name}{end}", one).read_text() for one in files] for end in ("", "-again"))
        assert first[:2] == again[:2], "a draft without hf_spec is saved with its code once more"
        assert json.loads(first[2])["auto_map"] == json.loads(again[2])["auto_map"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=[] if one.__name__ == USUAL[0] else pytest.mark.slow) for one in DRAFT_MODELS],
    ids=lambda kind: kind.__name__,
)
def test_the_file_is_what_the_library_says(kind: type[Any], tmp_path: Path) -> None:
    text = code_files(kind)[FILE]
    absolute.cache_clear()
    assert code_files(kind)[FILE] == text, "always the same"
    file = tmp_path / FILE
    file.write_text(text, encoding="utf-8")
    assert dynamic_module_utils.get_relative_imports(file) == []
    assert set(dynamic_module_utils.get_imports(file)) <= sys.stdlib_module_names
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    sources = {
        ast.literal_eval(node.targets[0].slice): ast.literal_eval(node.value)
        for node in assigned
        if isinstance(node.targets[0], ast.Subscript)
    }
    module = kind.__module__.removeprefix("hf_spec.")
    assert sources.keys() == needed(module, DECODING)
    assert module in sources and not any(name.startswith(("training", "unroll", "cli")) for name in sources)
    for name, source in sources.items():
        path = Path(hf_spec.__path__[0], *name.split("."))
        own = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        lines = own.read_text(encoding="utf-8").splitlines() if name else []
        pairs = [*zip(lines, source.splitlines(), strict=True)]
        assert all(IMPORT.match(ours) for ours, theirs in pairs if ours != theirs), name


def test_code_is_off_by_default_and_changes_nothing_where_hf_spec_is(target: Any, tmp_path: Path) -> None:
    draft = AutoModel.from_pretrained(demo.path("draft-eagle3"))
    draft.save_pretrained(tmp_path / "plain")
    draft.save_pretrained(tmp_path / "coded", with_code=True)
    assert not [*(tmp_path / "plain").glob("*.py")]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "coded")]
    assert configs[1].pop("auto_map").keys() == {"AutoConfig", "AutoModel"} and configs[0] == configs[1]
    assert not hasattr(draft.config, "auto_map")
    for options in ({}, {"trust_remote_code": True}):  # an imported hf_spec comes first
        assert type(AutoModel.from_pretrained(tmp_path / "coded", **options)) is type(draft)
    again = AutoDraftModel.from_pretrained(tmp_path / "coded", target)
    again.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert not [*tmp_path.rglob("*.partial")]


@pytest.mark.parametrize("own", [True, False])
def test_code_of_an_earlier_call_is_removed(own: bool, tmp_path: Path) -> None:
    """Files of the user stay, even where they have the name of one of ours."""
    draft = AutoModel.from_pretrained(demo.path("draft-medusa"))
    draft.save_pretrained(tmp_path, with_code=True)
    if own:
        (tmp_path / "custom_generate/generate.py").write_text("def generate(model): ...")
        (tmp_path / "modeling_own.py").write_text("")
    again = AutoModel.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path, is_main_process=False)
    assert (tmp_path / FILE).exists()
    again.save_pretrained(tmp_path)
    found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.py")}
    assert found == ({"modeling_own.py", "custom_generate/generate.py"} if own else set())
    assert (tmp_path / "custom_generate").exists() == own
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    again.save_pretrained(tmp_path, with_code=True)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(draft) and (tmp_path / FILE).exists()


def test_what_cannot_be_brought_along_is_refused_before_anything_is_written(target: Any, tmp_path: Path) -> None:
    draft = AutoModel.from_pretrained(demo.path("draft-eagle3"))
    kind = type("OwnDraftModel", (type(draft),), {"__module__": "elsewhere"})
    own = kind(draft.config)
    with pytest.raises(ValueError, match="OwnDraftModel is defined in elsewhere, outside of hf_spec"):
        own.save_pretrained(tmp_path / "own", with_code=True)
    with pytest.raises(ValueError, match=r"use push_to_hub\(with_code=True\)"):
        draft.save_pretrained(tmp_path / "own", with_code=True, push_to_hub=True)
    assert not (tmp_path / "own").exists()


def test_the_command_converts_with_the_code_of_save_pretrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(demo.path("draft-eagle3"))
    main(["convert", source, str(tmp_path / "flat"), "--to", "sglang"])
    main(["convert", str(tmp_path / "flat"), str(tmp_path / "coded"), "--with-code"])
    assert "reads it" in capsys.readouterr().out
    AutoDraftModel.from_pretrained(tmp_path / "flat").save_pretrained(tmp_path / "saved", with_code=True)
    written = [
        {
            str(one.relative_to(tmp_path / name)): one.read_bytes()
            for one in (tmp_path / name).rglob("*")
            if one.is_file()
        }
        for name in ("coded", "saved")
    ]
    assert written[0] == written[1] and {FILE, "custom_generate/generate.py"} < written[0].keys()
    main(["convert", source, str(tmp_path / "plain")])
    assert not [*(tmp_path / "plain").rglob("*.py")]
    assert main(["convert", source, str(tmp_path / "no"), "--to", "sglang", "--with-code"])
    assert "--with-code goes with --to speculators" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_pushing_uploads_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload itself is transformers' own; here it gives its folder."""
    draft, sent = AutoModel.from_pretrained(demo.path("draft-medusa")), []

    def upload(self: Any, folder: str, *args: Any, **kwargs: Any) -> None:
        sent.append({str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()})

    class Api:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("card")

    monkeypatch.setattr(DraftModel, "_upload_modified_files", upload)
    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *args, **kwargs: Card())
    draft.push_to_hub("me/draft", with_code=True)
    draft.push_to_hub("me/draft")
    code = {FILE, "custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert sent[0] - sent[1] == code and "config.json" in sent[1]


def test_two_copies_decode_in_one_process(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wrap functions of transformers; each works through the wrapper of the other."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    ours = AutoDraftModel.from_pretrained(demo.path("draft-eagle3"), target, dtype=torch.float32)
    ours.save_pretrained(tmp_path / "coded", with_code=True)
    place = f"{FILE.removesuffix('.py')}.{type(ours).__name__}"
    kind: Any = dynamic_module_utils.get_class_from_dynamic_module(place, tmp_path / "coded")
    theirs = kind.from_pretrained(tmp_path / "coded", dtype=torch.float32)
    assert not isinstance(theirs, DraftModel)
    with pytest.raises(TypeError, match=r"loaded with code of its own, before hf_spec was imported\. Load it again"):
        hf_spec.as_speculator(theirs, target)
    home = sys.modules[kind.__module__]
    ids = torch.tensor([*IDS, [3, 3, 3, *IDS[0][:7]]])
    call: dict[str, Any] = {"attention_mask": (ids != 3).long(), **CALL, "max_new_tokens": 12}
    plain = target.generate(ids, **call)
    tree: dict[str, Any] = {"tree": "dynamic", "num_tree_tokens": 8}
    config = sys.modules[f"{home.PACKAGE}.settings"].SpeculationConfig(**tree)
    for _ in range(2):
        assert torch.equal(home.generate(target, theirs, inputs=ids, speculation_config=config, **call), plain)
        text = target.generate(ids, speculator=ours, speculation_config=SpeculationConfig(**tree), **call)
        assert torch.equal(text, plain)


def test_code_of_a_draft_decodes_with_a_draft_or_not_at_all(target: Any) -> None:
    names: dict[str, Any] = {}
    exec(GENERATE, names)  # what transformers does with the file
    with pytest.raises(TypeError, match=r"pass speculator=draft, .* none was passed"):
        names["generate"](target, inputs=torch.tensor(IDS), **CALL)


def test_a_refused_call_ends_the_stream_that_another_thread_may_read(target: Any) -> None:
    draft = AutoDraftModel.from_pretrained(demo.path("draft-eagle3"), target, dtype=torch.float32)
    for given in ({"num_beams": 2}, {"speculation_config": 3}, {"assistant_model": target}):
        stream = TextIteratorStreamer(AutoTokenizer.from_pretrained(demo.path()), timeout=5)
        with pytest.raises((ValueError, TypeError)):
            generate(target, draft, inputs=torch.tensor(IDS), streamer=stream, **{**CALL, **given})
        assert list(stream) == [""]


def test_a_wrapper_is_known_below_another_one() -> None:
    def inner() -> None: ...

    def outer() -> None: ...

    assert not wraps(inner, "ours")
    inner._hf_spec = "ours"  # type: ignore[attr-defined]
    outer._hf_spec, outer._hf_spec_original = "theirs", inner  # type: ignore[attr-defined]
    assert wraps(outer, "ours") and wraps(outer, "theirs") and not wraps(inner, "theirs")
