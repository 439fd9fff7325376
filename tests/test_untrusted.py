"""Files of others that would harm: pipes, bombs, numbers without an end, names that steer a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from golden import GOLDENS, load_draft, load_target
from safetensors.torch import save_file
from test_damaged_checkpoints import write_draft
from test_training_data import tokenizer
from transformers import AutoModel

from hf_spec import NgramSpeculator, config_keys, configuration
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect
from hf_spec.checkpoints.resolve import common_tokens
from hf_spec.cli import main
from hf_spec.drafts.ngram.history_file import SavedHistory, write_history
from hf_spec.drafts.ngram.suffix_index import FIRST_PLACES, SuffixIndex
from hf_spec.training import FeatureCache, regenerate
from hf_spec.training.recipe import read_recipe
from hf_spec.training.resuming import checkpoint_to_resume
from hf_spec.training.sources import is_prepared, load_raw
from hf_spec.untrusted import check_sound, printable

# -- pipes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[None]:
    """Fail instead of waiting for ever."""
    if sys.platform == "win32":
        pytest.skip("there are no pipes with names")

    def fail(*_: Any) -> None:
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def draft_with(name: str, path: Path) -> Path:
    """Write a draft of which one file is a pipe."""
    if name == "config.json":
        path.mkdir()
    else:
        write_draft(path, {})
        (path / "model.safetensors").unlink()
    os.mkfifo(path / name)
    return path


def checkpoint_with(name: str, path: Path) -> Path:
    folder = path / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes((GOLDENS / "eagle3_orig_a/io.safetensors").read_bytes())
    os.mkfifo(folder / name)
    return path


PIPES: dict[str, Callable[[Path], Any]] = {
    "recipe": lambda path: read_recipe(path),
    "memory": lambda path: NgramSpeculator.load(path, tokenizer()),
    "data": lambda path: load_raw(str(path)),
    "answers": lambda path: regenerate([], None, tokenizer(), path),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("reader", PIPES)
def test_no_reader_waits_for_a_pipe(reader: str, tmp_path: Path, ends: None) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises((OSError, ValueError), match=re.escape(str(pipe))):
        PIPES[reader](pipe)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_no_loader_of_drafts_waits_for_a_pipe(name: str, tmp_path: Path, ends: None) -> None:
    path = draft_with(name, tmp_path / "draft")
    for load in (AutoDraftModel.from_pretrained, inspect):
        with pytest.raises(OSError, match=re.escape(str(path))):
            load(path)


def test_pipes_in_what_training_left_are_passed_over(tmp_path: Path, ends: None) -> None:
    for name in ("trainer_state.json", "optimizer.pt", "extra.safetensors"):
        assert checkpoint_to_resume(True, checkpoint_with(name, tmp_path / name)) is None
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(OSError, match="is a pipe or a device"):
        FeatureCache(tmp_path)


# -- what would grow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["1" + "0" * 15, "0", "9" * 5000, "-1", "1e9", "\u0661"])
def test_a_memory_file_says_its_size_and_takes_no_room_for_it(size: str, tmp_path: Path) -> None:
    file = tmp_path / "memory"
    write_history(file, SavedHistory(size, [1, 2, 3]), tokenizer())  # type: ignore[arg-type]
    if size[:2] != "10":
        with pytest.raises(OSError, match="holds no token ids of this tokenizer"):
            NgramSpeculator.load(file, tokenizer())
        return
    memory = NgramSpeculator.load(file, tokenizer()).history
    assert memory is not None and memory.size == 10**15 and memory.nbytes < 1_000_000


def test_a_memory_that_grows_finds_what_one_of_its_full_size_does(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 9, (50,), generator=generator).tolist() for _ in range(200)]
    growing = SuffixIndex(20_000)
    monkeypatch.setattr("hf_spec.drafts.ngram.suffix_index.FIRST_PLACES", 30)
    whole = SuffixIndex(20_000)
    assert growing.nbytes < whole.nbytes
    for text in texts:
        growing.add(text)
        whole.add(text)
    assert len(growing.tokens()) > 2 << FIRST_PLACES and growing.tokens() == whole.tokens()
    for text in texts[::20]:
        for size in (8, 4, 2):  # of shorter ones only the latest places are looked at, which other hashes share
            assert growing.find(text[:30], size, 4) == whole.find(text[:30], size, 4)


def write_bin(path: Path, content: Any) -> Path:
    write_draft(path, {})
    (path / "model.safetensors").unlink()
    torch.save(content, path / "pytorch_model.bin")
    return path


def weights() -> dict[str, Any]:
    return dict(read_checkpoint(GOLDENS / "eagle3_orig_a" / "checkpoint").tensors)


@pytest.mark.parametrize(
    "odd",
    [
        {"odd": torch.zeros(1).expand(1 << 20, 1 << 12)},
        {f"odd{i}": torch.zeros(1 << 18) for i in range(1)} | {"odd": torch.zeros(1).expand(1 << 34)},
        {
            "odd": torch.sparse_coo_tensor(
                torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (1 << 20, 1 << 20), check_invariants=False
            )
        },
        {"odd": torch.empty(1 << 30, device="meta")},
        {1: torch.zeros(1)},
        {"odd": [1]},
    ],
    ids=["stride 0", "stride 0 beside weights", "sparse", "meta", "numbered", "list"],
)
def test_tensors_that_hold_less_than_they_say_are_refused(odd: Any, tmp_path: Path) -> None:
    path = write_bin(tmp_path / "draft", weights() | odd)
    with pytest.raises(OSError, match=r"pytorch_model\.bin"):
        AutoDraftModel.from_pretrained(path)


def test_many_names_of_one_tensor_are_no_more_than_it(tmp_path: Path) -> None:
    one = torch.zeros(1 << 20)
    path = write_bin(tmp_path / "draft", weights() | {f"odd{i}": one for i in range(1000)})
    with pytest.raises(OSError, match="repeat the same values"):
        read_checkpoint(path)
    tied = write_bin(tmp_path / "tied", weights() | {"one": one, "two": one})
    assert len(read_checkpoint(tied).tensors) == len(weights()) + 2


@pytest.mark.parametrize("how", ["deflated", "twice"])
def test_a_zip_that_grows_is_refused_by_every_loader(how: str, tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file, plain = tmp_path / "pytorch_model.bin", tmp_path / "plain.bin"
    torch.save(load_draft("eagle3_orig_a").state_dict() | {"odd": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as given, zipfile.ZipFile(file, "w") as made:
        for part in given.infolist():
            kind = zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED
            made.writestr(part.filename, given.read(part), compress_type=kind)
        if how == "twice":  # the same bytes under several names
            largest = max(made.filelist, key=lambda part: part.file_size)
            made.filelist += [largest] * 3
    for load in (AutoModel.from_pretrained, AutoDraftModel.from_pretrained):
        with pytest.raises(OSError, match="would take more memory than it is large"):
            load(tmp_path)


def test_a_config_that_describes_more_than_a_pickled_file_holds_is_refused(tmp_path: Path) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"odd": torch.zeros(1).expand(1 << 34)}, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["intermediate_size"] = 10**8
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (AutoModel.from_pretrained, AutoDraftModel.from_pretrained):
        with pytest.raises((OSError, ValueError), match="describes"):
            load(tmp_path)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
RECIPES = {
    "aliases": (BOMB, "its aliases stand for more than"),
    "merged": (BOMB.replace(" [", "\n  <<: [").replace("\n  <<: [x, x]", " {x: 1}"), "its aliases stand for more"),
    "itself": ("target: &a [*a]", "its aliases stand for more than"),
    "digits": (f"data: {'9' * 6000}", "a number has 6,000 digits"),
    "hexadecimal": (f"data: 0x{'f' * 6000}", "a number has 6,002 digits"),
    "minutes": (f"data: {'1:' * 6000}1", "a number has 12,001 digits"),
    "depth": (f"data: {'[' * 3000}{']' * 3000}", "within each other more than 50 deep"),
    "date": ("data: 2001-99-99", "month must be"),
    "tagged": ("data: !!int ''", "string index"),
    "surrogate": ('data: "\\ud800"', "half of a surrogate pair"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_would_grow_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = RECIPES[case]
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(file))} is no YAML: .*{re.escape(message)[:40]}"):
        read_recipe(file)


def test_a_recipe_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("target: &name here\ndraft: *name\ndata: *name\n")
    assert read_recipe(tmp_path / "recipe.yaml")["draft"] == "here"


# -- names ------------------------------------------------------------------------------------------------------------

STEERING = "\x1b]0;owned\x07\x9b2J\u202e"


def test_names_of_tensors_do_not_reach_the_terminal_as_they_are(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    path = write_draft(tmp_path / "draft", {}, {STEERING: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"x1b]0;owned") as refused:
        AutoDraftModel.from_pretrained(path)
    assert str(refused.value) == printable(refused.value)
    assert main(["inspect", str(path)]) == 0
    said = "".join(capsys.readouterr()).replace("\r", "")  # of progress bars
    assert "owned" in said and said == printable(said) and STEERING not in caplog.text


def test_names_of_tensors_that_transformers_reads_do_not_reach_the_terminal(tmp_path: Path, caplog: Any) -> None:
    draft = load_draft("eagle3_orig_a")
    draft.save_pretrained(tmp_path)
    save_file(draft.state_dict() | {STEERING: torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="owned") as refused:
        AutoModel.from_pretrained(tmp_path)
    assert str(refused.value) == printable(refused.value) and STEERING not in caplog.text


@pytest.mark.parametrize("name", ["_name", "d2t"])
def test_names_in_configs_do_not_reach_the_terminal_as_they_are(name: str, tmp_path: Path, capsys: Any) -> None:
    load_draft("eagle3_orig_a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = f"{STEERING}\n  hf_spec      reads it"
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name == "d2t":  # refused for its type
        save_file(
            {f"{STEERING}d2t": torch.zeros(3), f"{STEERING}.d2t": torch.zeros(3)}, tmp_path / "model.safetensors"
        )
        with pytest.raises(ValueError, match="owned") as refused:
            AutoDraftModel.from_pretrained(tmp_path)
        assert str(refused.value) == printable(refused.value)
        return
    told = str(inspect(tmp_path))
    assert "owned" in told and told == printable(told)
    assert len([line for line in told.splitlines() if line.startswith("  hf_spec")]) == 1


def test_warnings_of_a_config_do_not_reach_the_terminal_as_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    told: list[str] = []
    for module in (configuration, config_keys):
        monkeypatch.setattr(module.logger, "warning_once", told.append)
    draft = load_draft("eagle3_orig_a")
    draft.config.speculators_config["verifier"] |= {"name_or_path": STEERING, "num_hidden_layers": 99}
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {STEERING: 1}))
    AutoDraftModel.from_pretrained(tmp_path, target=load_target("eagle3_orig_a"))
    assert len(told) == 2 and all("owned" in one and one == printable(one) for one in told)


def test_the_draft_of_an_adapter_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": STEERING}))
    with pytest.raises(OSError, match="owned") as refused:
        AutoDraftModel.from_pretrained(tmp_path)
    assert str(refused.value) == printable(refused.value)


def test_a_command_prints_no_escapes(tmp_path: Path, capsys: Any) -> None:
    assert main(["train", str(tmp_path / f"{STEERING}.yaml")]) == 1
    said = "".join(capsys.readouterr())
    assert "owned" in said and said == printable(said)


def test_what_can_be_printed_stays() -> None:
    assert printable("Größe\t∑ 你好 😀\n") == "Größe\t∑ 你好 😀\n"
    assert printable("\x1b[2J\r") == "\\x1b[2J\\r"


def test_what_cannot_be_written_is_named() -> None:
    check_sound({"a": [1, None, {"b": "\U0001f600"}]})
    for value in ("\ud800", {"\udfff": 1}, ["ok", {"a": "b\ud83d"}]):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            check_sound(value)
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="more than 50 deep"):
        check_sound(deep)


# -- names of data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x[a].jsonl", "x*.jsonl", "x?.jsonl", "**.jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_data_are_no_patterns(name: str, streaming: bool, tmp_path: Path) -> None:
    for one in (name, "xa.jsonl", "xb.jsonl"):
        (tmp_path / one).write_text(json.dumps({"text": one}) + "\n")
    assert [row["text"] for row in load_raw(str(tmp_path / name), streaming=streaming)] == [name]


def test_directories_and_names_that_datasets_would_take_apart_are_refused(tmp_path: Path) -> None:
    for folder in ("d[x]", "dx"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.jsonl").write_text(json.dumps({"text": folder}) + "\n")
    with pytest.raises(ValueError, match="takes for a pattern: rename it"):
        load_raw(str(tmp_path / "d[x]"))
    assert load_raw(str(tmp_path / "d[x]" / "one.jsonl"))["text"] == ["d[x]"]
    (tmp_path / "a::b.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="has :: in its name: rename it"):
        load_raw(str(tmp_path / "a::b.jsonl"))


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path)
    (tmp_path / "train" / "state.json").write_text("{}")
    for read in (load_raw, is_prepared):
        with pytest.raises(ValueError, match=f"the dataset in {re.escape(str(tmp_path))} is damaged"):
            read(str(tmp_path))


# -- files beside ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"', "[]", "\x00"])
def test_a_damaged_tokenizer_beside_a_draft_is_a_warning(content: str, tmp_path: Path, caplog: Any) -> None:
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
        tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "draft" / "tokenizer.json").write_text(content)
    caplog.set_level("WARNING", "hf_spec")
    for _ in range(2):
        assert common_tokens(str(tmp_path / "draft"), str(tmp_path / "target")) == 1.0


def test_configs_that_are_nested_too_deeply_or_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for content in ('{"a": "\\ud800"}', '{"a": ' + "[" * 300 + "]" * 300 + "}", '{"a": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(OSError, match=r"config\.json is not valid JSON"):
            AutoDraftModel.from_pretrained(tmp_path)
