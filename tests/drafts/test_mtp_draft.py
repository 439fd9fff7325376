"""MTP layers that stand by themselves: of the speculators library, of Qwen3-Next and of MiMo."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LLAMA4, build, prompts
from golden import CLOSE, GOLDENS, outputs, tiny_target
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_spec import AcceptedTokens, DraftContext, SpeculationConfig, as_speculator
from hf_spec.checkpoints.auto import AutoDraftModel, load
from hf_spec.checkpoints.conversion import convert, export
from hf_spec.checkpoints.files import read_checkpoint
from hf_spec.checkpoints.inspection import inspect
from hf_spec.configuration import sizes_of
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.files import Checkpoint
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.drafts.mtp.target import TargetMtp
from hf_spec.drafts.vanilla.speculator import VanillaSpeculator
from hf_spec.scoring.runner import ModelRunner
from hf_spec.training import new_draft
from hf_spec.versions import older_than

SPECULATORS, QWEN = "sp_mtp_qwen3", "mtp_qwen3_next_native"


@functools.cache
def target_of(case: str) -> Any:
    if case == QWEN:
        return AutoModelForCausalLM.from_pretrained(GOLDENS / case / "checkpoint", dtype=torch.float32).eval()
    weights, target = load_file(GOLDENS / case / "target.safetensors"), tiny_target(96, 32, 4)
    target.get_input_embeddings().weight.data.copy_(weights["model.embed_tokens.weight"])
    target.lm_head.weight.data.copy_(weights["lm_head.weight"])
    return target


def draft_of(case: str) -> Any:
    return AutoDraftModel.from_pretrained(GOLDENS / case / "checkpoint", target=target_of(case), dtype=torch.float32)


def states(case: str) -> Tensor:
    io = outputs(case)
    return (io["last_hidden_states"] if case == SPECULATORS else io["last_hidden"])[None]


def draft_behind(draft: Any, target: Any, ids: Tensor, features: Tensor, guesses: int) -> tuple[list[int], Tensor]:
    """Guess a chain behind ``ids`` (1, length); also return the logits of each guess."""
    seen: list[Tensor] = []

    def distribution(logits: Tensor) -> Tensor:
        seen.append(logits[:, -1])
        return logits.log_softmax(-1)

    known = ids.shape[1] - 1
    config, mask = SpeculationConfig(num_speculative_tokens=guesses), torch.ones_like(ids[:, :known])
    request = DraftContext(target, ids[:, :known], mask, features[:, :known], config, distribution, sample=False)
    news = AcceptedTokens(ids[:, known:], torch.tensor([1]), features[:, known - 1 : known])
    proposal = draft.drafter(request).propose(news, guesses)
    return proposal.tokens[0, 1:].tolist(), torch.cat(seen)


# --- the other projects' numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [SPECULATORS, QWEN])
@torch.no_grad()
def test_a_layer_says_what_it_says_in_speculators(case: str) -> None:
    io, draft = outputs(case), draft_of(case)
    out = draft(io["input_ids"][None, 1:], features=states(case)[:, :-1])
    torch.testing.assert_close(out.logits[0], io["row_logits"], **CLOSE)
    torch.testing.assert_close(out.hidden_states[0], io["row_hidden"], **CLOSE)


@pytest.mark.parametrize("case", [SPECULATORS, QWEN])
@torch.no_grad()
def test_chains_are_those_that_engines_serve(case: str) -> None:
    io = outputs(case)
    tokens, logits = draft_behind(draft_of(case), target_of(case), io["input_ids"][None], states(case), 4)
    assert tokens == io["chain/tokens"].tolist()
    torch.testing.assert_close(logits, io["chain/logits"], **CLOSE)


@torch.no_grad()
def test_the_features_are_those_that_the_layer_was_trained_with() -> None:
    """The speculators library trains before the target's final norm, Qwen after it."""
    speculators, qwen = draft_of(SPECULATORS), draft_of(QWEN)
    assert speculators.feature_layers(target_of(SPECULATORS)) == (4,)
    assert qwen.feature_layers(target_of(QWEN)) == (-1,)


# --- generating ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesses", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_recurrent_target_writes_the_same_text_with_its_own_layer(guesses: int, batch: int) -> None:
    target, prompt = target_of(QWEN), outputs(QWEN)["e2e/prompt"]
    ids, mask = torch.zeros(batch, 5, dtype=torch.long), torch.ones(batch, 5, dtype=torch.long)
    for row in range(batch):
        padding = (0, 2, 1)[row % 3]
        ids[row, padding:], mask[row, :padding] = (prompt[: 5 - padding] + 5 * row) % 64, 0
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    call |= {"eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, **call)
    config = SpeculationConfig(num_speculative_tokens=guesses)
    call |= {"speculator": "mtp", "speculation_config": config, "return_dict_in_generate": True}
    out = target.generate(ids, **call)
    assert torch.equal(out.sequences, plain)
    assert max(len(row.proposed_at) for row in out.speculation.per_row) == guesses  # by a single layer


def test_a_layer_of_another_kind_serves_any_target() -> None:
    target = tiny_target()
    draft = MTPDraftModel(
        MTPSpeculatorConfig.for_target(target.config, shared_with_target=["embed_tokens", "lm_head"])
    )
    ids = torch.arange(3, 12)[None]
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, **call)
    assert torch.equal(target.generate(ids, speculator=draft.eval(), **call), plain)


@pytest.mark.parametrize("name", ["gemma4_text", "llama4_text", LLAMA4, "modernbert-decoder"])
@torch.no_grad()
def test_the_last_state_of_every_token_of_the_prompt_is_read(name: str) -> None:
    """Gemma 4 gives the last one only if the logits of one are wanted; of the others get_decoder is no decoder."""
    target, prompt = build(name), prompts(2, (7,))
    features = ModelRunner(target, (-1,)).prefill_tokens(**prompt).features
    torch.testing.assert_close(features, target(**prompt, output_hidden_states=True).hidden_states[-1])
    plain = target.generate(**prompt, max_new_tokens=12)
    for kind in (EagleSpeculatorConfig, MedusaSpeculatorConfig, MTPSpeculatorConfig):
        draft = new_draft(kind.for_target(target.config), target).eval()
        assert torch.equal(target.generate(**prompt, max_new_tokens=12, speculator=draft), plain)


@pytest.mark.skipif(older_than(Version("5.23")) is not None, reason="it reads DeepSeek-V3's layers by other names")
@torch.no_grad()
def test_several_layers_read_what_they_would_read_anew_after_every_rejection() -> None:
    case = GOLDENS / "mtp_deepseek_v3_small" / "checkpoint"
    target = AutoModelForCausalLM.from_pretrained(case, dtype=torch.float32).eval()
    draft, steps, hidden = TargetMtp.of(target), 4, target.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    lengths = [7, 4, 6]
    texts = [torch.randint(3, 64, (40,), generator=generator) for _ in lengths]
    features = [torch.randn(40, hidden, generator=generator) for _ in lengths]
    ids, mask, read = (
        torch.zeros(3, 7, dtype=torch.long),
        torch.zeros(3, 7, dtype=torch.long),
        torch.randn(3, 7, hidden),
    )
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:], read[row, -length:] = texts[row][:length], 1, features[row][:length]
    seen: list[Tensor] = []

    def distribution(logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.log_softmax(-1)

    config = SpeculationConfig(num_speculative_tokens=steps)
    drafter = draft.drafter(DraftContext(target, ids, mask, read, config, distribution, sample=False))
    rows = [0, 1, 2]
    for counts in ([1, 1, 1], [1, 3, 2], [4, 1, 2], [2, 3]):
        if len(counts) < len(rows):
            rows = [0, 2]
            drafter.keep_rows(torch.tensor(rows))
        news = torch.zeros(len(rows), max(counts), dtype=torch.long)
        beside = torch.zeros(len(rows), max(counts), hidden)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = lengths[row]
            news[i, :count], beside[i, :count] = texts[row][start : start + count], features[row][start - 1 :][:count]
            lengths[row] += count
        seen.clear()
        drafter.propose(AcceptedTokens(news, torch.tensor(counts), beside), steps)
        for i, row in enumerate(rows):
            expected = uncached(draft, texts[row][: lengths[row]], features[row][: lengths[row] - 1], steps)
            found = torch.stack([logits[i, -1] for logits in seen])
            torch.testing.assert_close(found, expected, **CLOSE)


def uncached(draft: TargetMtp, ids: Tensor, features: Tensor, steps: int) -> Tensor:
    """Guess with two layers, running both over the whole text at every step: (steps, vocabulary)."""
    first = draft(ids[None, 1:], features=features[None], module=0)
    logits, fed, tokens = [first.logits[0, -1]], first.hidden_states, ids[None, 2:]
    for _ in range(steps - 1):
        tokens = torch.cat([tokens, logits[-1].argmax().view(1, 1)], dim=1)
        second = draft(tokens, hidden_states=fed, module=1)
        logits.append(second.logits[0, -1])
        fed = torch.cat([fed, second.hidden_states[:, -1:]], dim=1)
    return torch.stack(logits)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [SPECULATORS, QWEN])
@torch.no_grad()
def test_what_is_saved_is_loaded_by_the_auto_classes(case: str, tmp_path: Path) -> None:
    draft, ids = draft_of(case), outputs(case)["input_ids"][None, 1:]
    expected = draft(ids, features=states(case)[:, :-1]).logits
    draft.save_pretrained(tmp_path)
    for loader in (AutoModel, AutoDraftModel):
        again = loader.from_pretrained(tmp_path)
        assert isinstance(again, MTPDraftModel)
        assert again.config.features_after_norm == draft.config.features_after_norm
        again.bind(target_of(case))
        torch.testing.assert_close(again(ids, features=states(case)[:, :-1]).logits, expected, rtol=0, atol=1e-5)
        assert all(torch.equal(weight, draft.state_dict()[name]) for name, weight in again.state_dict().items())


def test_a_layer_is_written_as_its_target_keeps_it(tmp_path: Path) -> None:
    convert(GOLDENS / QWEN / "checkpoint", tmp_path / "native", to="native")
    written = load_file(tmp_path / "native" / "mtp.safetensors")
    original = load_file(GOLDENS / QWEN / "checkpoint" / "model.safetensors")
    assert written.keys() == {name for name in original if name.startswith("mtp.")}
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())


def test_only_layers_that_engines_run_alike_are_written_for_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the layer is one of qwen3"):
        convert(GOLDENS / SPECULATORS / "checkpoint", tmp_path / "native", to="native")
    draft = draft_of(QWEN)
    draft.config.features_after_norm = False
    with pytest.raises(ValueError, match="features_after_norm is False, but the engines"):
        export(draft, tmp_path / "native", to="native")
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_what_speculators_converts_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its config describes the target, where the layer stands last, and its file has a place for the target's head."""
    draft = draft_of(QWEN)
    layers = json.loads((GOLDENS / QWEN / "checkpoint" / "config.json").read_text()) | changes
    config = json.loads((GOLDENS / SPECULATORS / "checkpoint" / "config.json").read_text())
    config |= {"transformer_layer_config": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = {"verifier_lm_head.weight": torch.full((64, 32), torch.nan)}
    save_file(draft.state_dict() | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoDraftModel.from_pretrained(tmp_path, target=target_of(QWEN))
    ids = outputs(QWEN)["input_ids"][None, 1:]
    given = {"input_ids": ids, "features": states(QWEN)[:, :-1]}
    assert torch.equal(again(**given).logits, draft(**given).logits)


def test_only_the_files_with_the_layer_are_read_of_a_target(tmp_path: Path) -> None:
    source = GOLDENS / QWEN / "checkpoint"
    tensors = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if "mtp." in name}
    save_file(tensors, tmp_path / "layer.safetensors")
    places = dict.fromkeys(tensors, "layer.safetensors") | {"model.norm.weight": "far-away.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copy(source / "config.json", tmp_path)
    draft = AutoDraftModel.from_pretrained(tmp_path)
    assert torch.equal(draft.mtp_layers[0].input_proj.weight, tensors["mtp.fc.weight"])


@pytest.mark.parametrize("case", [SPECULATORS, QWEN])
def test_a_layer_beside_quantised_weights_is_read_if_it_is_stored_whole(case: str) -> None:
    found = read_checkpoint(GOLDENS / case / "checkpoint")
    said = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    place = "transformer_layer_config"
    config = found.config | (said if case == QWEN else {place: found.config[place] | said})
    weights = load(Checkpoint("here", config, found.tensors), dtype=torch.float32).state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in draft_of(case).state_dict().items())
    scale = {"mtp.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(ValueError, match=r"weight_scale_inv is part of weights that are stored quantised"):
        load(Checkpoint("here", config, found.tensors | scale))


def mimo(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Make a target of MiMo's shape with a layer of its layout in the same file."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    layer = {name.removeprefix("model.layers.1."): tensors[name] for name in tensors if ".layers.1." in name}
    layer = {f"model.mtp_layers.0.{name}": tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in layer.items()}
    for name in ("token", "hidden", "final"):
        layer[f"model.mtp_layers.0.{name}_layernorm.weight"] = 1 + 0.3 * torch.randn(16)
    layer["model.mtp_layers.0.input_proj.weight"] = 0.3 * torch.randn(16, 32)
    save_file(tensors | layer, path / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(path).eval(), layer


@torch.no_grad()
def test_mimo_reads_the_state_before_the_norm_and_first(tmp_path: Path) -> None:
    target, layer = mimo(tmp_path)
    draft = as_speculator("mtp", target)
    assert isinstance(draft, MTPDraftModel)
    assert draft.feature_layers(target) == (2,)
    weights = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in layer.items()}

    def norm(states: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(states, (16,), weights[f"{name}.weight"], 1e-6)

    ids, state = torch.arange(5, 11)[None], torch.randn(1, 6, 16)
    embedded = norm(target.get_input_embeddings()(ids), "token_layernorm")
    joined = torch.cat([norm(state, "hidden_layernorm"), embedded], -1) @ weights["input_proj.weight"].T
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    twin = Qwen2ForCausalLM(config)
    inside = {name: tensor for name, tensor in weights.items() if name in twin.model.layers[0].state_dict()}
    twin.model.layers[0].load_state_dict(inside)
    twin.model.norm = torch.nn.Identity()
    hidden = twin.model(inputs_embeds=joined, use_cache=False).last_hidden_state
    out = draft(ids, features=state)
    torch.testing.assert_close(out.hidden_states, hidden, **CLOSE)
    torch.testing.assert_close(out.logits, target.lm_head(norm(hidden, "final_layernorm")), **CLOSE)
    call: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(target.generate(ids, speculator="mtp", **call), target.generate(ids, **call))
    export(draft, tmp_path / "native", to="native")
    assert load_file(tmp_path / "native" / "mtp.safetensors").keys() == layer.keys()


def test_a_model_with_a_layer_of_its_own_can_be_the_draft_of_a_larger_one(tmp_path: Path) -> None:
    small, _ = mimo(tmp_path)
    large = tiny_target(50, 32, 4)
    layer = as_speculator(tmp_path, small)
    assert isinstance(layer, MTPDraftModel)
    assert sizes_of(small.config).items() <= layer.config.made_for.items()
    for target in (large, tiny_target(50, 16, 4)):  # as wide as the small one, and deeper
        assert isinstance(as_speculator(tmp_path, target), VanillaSpeculator)
    ids = torch.arange(5, 11)[None]
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(large.generate(ids, speculator=str(tmp_path), **call), large.generate(ids, **call))


def test_inspect_tells_the_layer_and_its_flags() -> None:
    report = str(inspect(GOLDENS / QWEN / "checkpoint"))
    assert "mtp, 1 qwen3_next layer(s) of width 32" in report
    assert "features_after_norm=True" in report
    theirs = str(inspect(GOLDENS / SPECULATORS / "checkpoint"))  # a layer of qwen3, whose targets keep none
    assert "reads such a layer only as a part of its target" in theirs
    assert "convert to native" not in theirs


def test_a_layer_that_can_be_written_into_its_target_is_told_so(tmp_path: Path) -> None:
    AutoDraftModel.from_pretrained(GOLDENS / QWEN / "checkpoint").save_pretrained(tmp_path / "alone")
    assert "only as a part of its target; convert to native" in str(inspect(tmp_path / "alone"))
    convert(tmp_path / "alone", tmp_path / "layer", to="native")
    draft = AutoDraftModel.from_pretrained(tmp_path / "alone")
    assert "--to native" in draft.use_in_vllm(draft.config, "org/target", "me/draft")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_targets_without_a_layer_are_refused_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=r"no multi-token-prediction layers.*made in memory.*'ngram'"):
        as_speculator("mtp", target)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no multi-token-prediction layers.*holds no mtp"):
        as_speculator("mtp", loaded)
    (tmp_path / "mtp").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"For the directory 'mtp' here, write '\./mtp'"):
        as_speculator("mtp", loaded)


def test_layers_for_another_target_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size is 32, but the target's is 48"):
        draft_of(SPECULATORS).bind(tiny_target(hidden_size=48))
    with pytest.raises(ValueError, match="vocab_size is 96, but the target has 50"):
        draft_of(SPECULATORS).bind(tiny_target(vocab_size=50))


@pytest.mark.parametrize("name", ["gpt2", "cohere2", "gemma3_text"])
def test_layers_that_cannot_stand_by_themselves_are_refused(name: str) -> None:
    layers = {"model_type": name, "num_hidden_layers": 1, "vocab_size": 96, "layer_types": ["full_attention"]}
    with pytest.raises(ValueError, match=f"a layer of {name} cannot stand by itself: .* Use llama or qwen3"):
        MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layers))


def two_layers(**fields: Any) -> MTPSpeculatorConfig:
    return MTPSpeculatorConfig(transformer_layer_config={"model_type": "llama", "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (two_layers, ValueError, "num_hidden_layers is 2"),
        (lambda: MTPSpeculatorConfig(num_nextn_predict_layers=2), ValueError, "num_nextn_predict_layers is 2"),
        (lambda: MTPSpeculatorConfig(hidden_first="yes"), TypeError, "hidden_first is 'yes'"),
        (lambda: MTPSpeculatorConfig(transformer_layer_config=3), TypeError, "transformer_layer_config is a int"),
    ],
)
def test_unusable_configs_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
