"""Commands pack on a CPU by default, say so in one line, and take --no-pack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_spec import cli
from hf_spec.packing import packing
from hf_spec.packing.packing import why_not_here

pytestmark = pytest.mark.skipif(
    why_not_here(torch.float32, force=True) is not None, reason=str(why_not_here(torch.float32, force=True))
)
WORDS = ["<s>", "a", "b", "c", "d", "e", *(f"w{number}" for number in range(506))]
COMMANDS = {
    "generate": ["generate", "MODEL", "--prompt", "a b a b a b", "--max-new-tokens", "8", "--temperature", "0"],
    "many": ["generate", "MODEL", "--prompts", "FILE", "--out", "OUT", "--max-new-tokens", "8", "--temperature", "0"],
    "bench": ["bench", "MODEL", "--prompts", "FILE", "--max-new-tokens", "8", "--warmup", "0", "--no-baselines"],
    "doctor": ["doctor", "MODEL", "--speculator", "MODEL", "--prompts", "FILE", "--max-new-tokens", "8"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, eos_token_id=None)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<s>").save_pretrained(folder)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a b a b a b"}) + "\n")
    return folder


def run(name: str, place: Path, out: Path, *more: str) -> int:
    names = {"MODEL": str(place), "FILE": str(place / "prompts.jsonl"), "OUT": str(out)}
    return cli.main([*(names.get(word, word) for word in COMMANDS[name]), "--device", "cpu", *more])


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_pack_by_default_and_say_so(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")  # others pack float32 as well
    seen: list[bool] = []
    undone = packing.Storage.unpack
    monkeypatch.setattr(packing.Storage, "unpack", lambda *args: seen.append(True) or undone(*args))
    outputs = []
    for number, more in enumerate(([], ["--no-pack"])):
        assert run(name, place, tmp_path / f"{number}.jsonl", *more) == 0
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if "packed" in line]
        assert len(lines) == (0 if more else 1), err
        assert more or (lines[0].startswith("hf-spec: ") and "weights are packed (" in lines[0])
        outputs.append(out if name == "generate" else "")
    assert not seen  # nothing on the way has undone it
    assert outputs[0] == outputs[1]
    if name == "many":
        assert (tmp_path / "0.jsonl").read_text() == (tmp_path / "1.jsonl").read_text()


def test_nothing_is_said_where_nothing_is_gained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert run("generate", place, tmp_path / "out") == 0
    assert "packed" not in capsys.readouterr().err


def test_what_bench_compiles_is_not_packed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from argparse import Namespace

    from hf_spec.cli.loading import load_target, pack_models

    target, _ = load_target(str(place), "float32", "cpu")
    pack_models(Namespace(no_pack=False, compiled=True), target)
    assert not packing.is_packed(target) and capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [[], ["--no-pack"], ["--compile"]], ids=["packed", "--no-pack", "--compile"])
def test_the_server_packs_what_it_loads(
    options: list[str], place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from hf_spec.serving.server import Server

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    loaded: list[Any] = []
    monkeypatch.setattr(Server, "_run", lambda server: loaded.extend(server._model_manager.loaded_models.values()))
    arguments = ["serve", str(place), "--speculator", "ngram", "--device", "cpu", "--dtype", "float32", "--port", "0"]
    assert cli.main([*arguments, *options]) == 0
    assert packing.is_packed(loaded[0].model) == ("--no-pack" not in options)
    assert ("weights are packed" in capsys.readouterr().err) == ("--no-pack" not in options)
