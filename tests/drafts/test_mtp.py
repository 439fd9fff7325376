"""The target's own multi-token-prediction layers, against transformers' and vLLM's numbers for tiny checkpoints."""

from __future__ import annotations

import functools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from architectures import build, prompts, redraw
from pairs import pairwise
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import hf_spec
from hf_spec import AcceptedTokens, DraftContext, SpeculationConfig, TargetMtp
from hf_spec.drafts.autoregressive import AutoregressiveDrafter
from hf_spec.scoring.features import decoder_of

GOLDENS = Path(__file__).parents[1] / "fixtures" / "goldens"
DEEPSEEK, GLM = "mtp_deepseek_v3_small", "mtp_glm4_moe_small"
CASES = {DEEPSEEK: "recycled_postnorm", GLM: "recycled_prenorm"}


@functools.cache
def golden(case: str) -> tuple[Any, TargetMtp, dict[str, Tensor]]:
    target = AutoModelForCausalLM.from_pretrained(GOLDENS / case / "checkpoint", dtype=torch.float32).eval()
    return target, TargetMtp.of(target), load_file(GOLDENS / case / "io.safetensors")


class FirstLayer:
    """The first of several layers, fed its own output from the second guess on."""

    num_modules = 1

    def __init__(self, draft: TargetMtp) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._draft(*args, **kwargs)


def draft_once(case: str, draft: Any, guesses: int) -> tuple[list[int], Tensor]:
    """Guess behind the case's whole text; also return the logits behind the root and each guess that was read."""
    target, _, io = golden(case)
    return draft_behind(target, draft, io["input_ids"][None], io["last_hidden"][None], guesses)


def draft_behind(target: Any, draft: Any, ids: Tensor, hidden: Tensor, guesses: int) -> tuple[list[int], Tensor]:
    """Guess behind a text (1, length + 1), all but the last token of which left ``hidden`` (1, length, hidden)."""
    length, seen = hidden.shape[1], []

    def distribution(logits: Tensor) -> Tensor:
        seen.append(logits[:, -1])
        return logits.log_softmax(-1)

    config = SpeculationConfig(num_speculative_tokens=guesses)
    mask = torch.ones(1, length, dtype=torch.long)
    request = DraftContext(target, ids[:, :length], mask, hidden, config, distribution, sample=False)
    news = AcceptedTokens(ids[:, length : length + 1], torch.tensor([1]), hidden[:, -1:])
    with torch.no_grad():
        proposal = AutoregressiveDrafter(draft, request).propose(news, guesses)
    return proposal.tokens[0, 1:].tolist(), torch.cat(seen)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_layer_gives_transformers_logits(case: str) -> None:
    _, draft, io = golden(case)
    ids, hidden = io["input_ids"][None], io["last_hidden"][None]
    length = hidden.shape[1]
    output = draft(ids[:, 1 : length + 1], features=hidden, position_ids=torch.arange(length)[None])
    torch.testing.assert_close(output.logits[0], io["mtp_logits"][0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_forward_in_another_thread_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    _, draft, io = golden(DEEPSEEK)
    ids = io["input_ids"][None, 1:9].expand(3, -1)
    given = {
        "features": io["last_hidden"][None, :8].expand(3, -1, -1),
        "attention_mask": prompts(3, (8, 5))["attention_mask"],
    }
    expected, layer = draft(ids, **given).logits, draft.forward_layer

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(draft, "forward_layer", layer)
        other = threading.Thread(target=draft, args=(ids[:1],), kwargs={"features": given["features"][:1]})
        other.start()
        other.join()
        return layer(*args, **kwargs)

    monkeypatch.setattr(draft, "forward_layer", disturbed)
    assert torch.equal(draft(ids, **given).logits, expected)
    assert not torch.equal(draft(ids, **given | {"attention_mask": None}).logits, expected), "the mask does nothing"


@pytest.mark.parametrize(("case", "feedback"), CASES.items())
def test_one_layer_fed_its_own_output_guesses_as_vllm_does(case: str, feedback: str) -> None:
    _, draft, io = golden(case)
    tokens, logits = draft_once(case, FirstLayer(draft), len(io[f"{feedback}/tokens"]))
    assert tokens == io[f"{feedback}/tokens"].tolist()
    torch.testing.assert_close(logits, io[f"{feedback}/logits"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_several_layers_guess_as_transformers_does(case: str) -> None:
    _, draft, io = golden(case)
    tokens, logits = draft_once(case, draft, len(io["draft_tokens"]))
    assert tokens == io["draft_tokens"].tolist()
    torch.testing.assert_close(logits, io["draft_logits"], atol=1e-4, rtol=1e-4)


KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_layer_types": ["dense", *["sparse"] * 3]}
SEVERAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "mellum": {},
    "vl:step3p7": {
        "sliding_window": 8,
        "mtp_layer_types": ["full_attention"] * 3,
        "mtp_mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "bailing_hybrid": KINDS | {"mtp_layer_types": ["full_attention"] * 3, "mtp_mlp_layer_types": ["sparse"] * 3},
}


@pytest.mark.parametrize(
    ("name", "layers"),
    [(name, layers) for name in SEVERAL for layers in (1, 2, 3) if layers == 1 or name != "mellum"],  # it has one
)
@torch.no_grad()
def test_layers_of_every_family_guess_as_transformers_does(name: str, layers: int) -> None:
    types = {key: value[:layers] if key.startswith("mtp_") else value for key, value in SEVERAL[name].items()}
    target = build(name, num_mtp_layers=layers, **types)
    draft, theirs = TargetMtp(target, layers).eval(), MtpModel(target, layers).eval()
    redraw(draft, seed=3)
    for weight in draft.parameters():
        if weight.ndim == 1:  # norms that only scale would hide whether a state has passed them
            weight.add_(0.5 * torch.randn(len(weight), generator=torch.Generator().manual_seed(4)))
    theirs.load_state_dict(draft.state_dict())
    ids = prompts(1, (12,))["input_ids"]
    caught: list[Any] = []
    hook = decoder_of(target).register_forward_hook(lambda module, args, output: caught.append(output))
    target(ids[:, :-1])
    hook.remove()
    hidden = caught[0].last_hidden_state
    positions = torch.arange(1, ids.shape[1])[None]
    tokens, logits, _ = theirs(ids[:, 1:], hidden, None, positions, MtpCache(config=theirs.config))
    guesses, found = draft_behind(target, draft, ids, hidden, layers)
    assert guesses == tokens[0].tolist()
    torch.testing.assert_close(found, logits[0], atol=1e-4, rtol=1e-4)


def test_layers_that_are_stored_quantised_are_refused(tmp_path: Path) -> None:
    """transformers leaves out scales that it does not know, and the draft would never be right."""
    shutil.copytree(GOLDENS / GLM / "checkpoint", tmp_path, dirs_exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    first = target.config.num_hidden_layers
    name = next(name for name in tensors if f"layers.{first}." in name and name.endswith("o_proj.weight"))
    TargetMtp.of(target)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1, 1)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"o_proj\.weight_scale_inv is part of MTP layers that are stored quantised"):
        TargetMtp.of(target)


def test_layers_after_an_offloaded_one_are_read_where_it_computes() -> None:
    """As ``device_map="auto"`` leaves them where memory is short."""
    target = AutoModelForCausalLM.from_pretrained(GOLDENS / GLM / "checkpoint", dtype=torch.float32)
    inputs, last = prompts(1, vocab_size=60), decoder_of(target).layers[-1]
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **options)
    cpu_offload(last, torch.device("cpu"))
    assert next(last.parameters()).is_meta
    out = target.generate(**inputs, **options, speculator="mtp", return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain) and out.speculation.proposed


@functools.cache
def with_layers(case: str, count: int) -> tuple[Any, TargetMtp]:
    """Load a case's target as if its checkpoint ended with MTP layer number ``count``."""
    checkpoint = GOLDENS / case / "checkpoint"
    config = AutoConfig.from_pretrained(checkpoint)
    config.num_nextn_predict_layers = count
    target = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()
    return target, TargetMtp.of(target)


@pytest.mark.parametrize(
    ("made", "guesses", "tree", "batch"),
    pairwise([(DEEPSEEK, 1), (DEEPSEEK, 2), (GLM, 1)], [1, 2, 3, 4], [None, "dynamic"], [1, 3, 8]),
)
def test_same_text_as_plain_generate(made: tuple[str, int], guesses: int, tree: Any, batch: int) -> None:
    case, layers = made
    target, draft = with_layers(case, layers)
    assert draft.num_modules == layers
    prompt = torch.cat([golden(case)[2]["input_ids"][None, :9] + row for row in range(8)]) % 64
    mask = torch.ones_like(prompt)
    for row, padding in enumerate((0, 3, 6, 1, 0, 8, 2, 5)):
        mask[row, :padding] = 0
    config = SpeculationConfig(num_speculative_tokens=guesses, tree=tree, tree_topk=3, num_tree_tokens=8)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = {"input_ids": prompt[:batch], "attention_mask": mask[:batch]}
    plain = target.generate(**inputs, **options)
    out = target.generate(
        **inputs, **options, speculator=draft, speculation_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    assert out.speculation.accepted > 0
    deepest = max(len(row.proposed_at) for row in out.speculation.per_row)
    assert deepest == guesses if tree is None else min(2, guesses) <= deepest <= guesses


OTHERS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "bailing_hybrid": (  # a recurrent target whose MTP layer has no state
        KINDS | {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]},
        "model.layers.4.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ),
    "mellum": ({"num_mtp_layers": 1}, "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


def with_new_layer(name: str, path: Path) -> Any:
    """Load a tiny target from a checkpoint that ends with an MTP layer made for it."""
    config, prefix, (embedding, hidden, projection, last) = OTHERS[name]
    target = build(name, **config)
    target.save_pretrained(path)
    longer = {"num_hidden_layers": 5} | {
        kinds: [*getattr(target.config, kinds), getattr(target.config, f"mtp_{kinds}")[0]]
        for kinds in ("layer_types", "mlp_layer_types")
    }
    build(name, **config | longer).save_pretrained(path / "longer")
    tensors = load_file(path / "longer" / "model.safetensors")
    block = f"{prefix}layers.0." if prefix == "mtp." else prefix
    layer = {key.replace("model.layers.4.", block): tensors[key] for key in tensors if ".layers.4." in key}
    torch.manual_seed(0)
    layer |= {f"{prefix}{norm}.weight": 1 + 0.3 * torch.randn(32) for norm in (embedding, hidden, last)}
    layer[f"{prefix}{projection}.weight"] = 0.2 * torch.randn(32, 64)
    save_file(load_file(path / "model.safetensors") | layer, path / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize("tree", [None, "dynamic"])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_families_serve_their_targets(name: str, tree: Any, tmp_path: Path) -> None:
    target = with_new_layer(name, tmp_path)
    prompt = torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for batch in (1, 3):
        inputs = {"input_ids": prompt[:batch], "attention_mask": mask[:batch]}
        config = SpeculationConfig(num_speculative_tokens=3, tree=tree, tree_topk=3, num_tree_tokens=8)
        plain = target.generate(**inputs, **options)
        assert torch.equal(target.generate(**inputs, **options, speculator="mtp", speculation_config=config), plain)


def test_layers_that_the_config_only_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not say what they are \(.*mtp_layer_types.*another speculator"):
        hf_spec.as_speculator("mtp", build("bailing_hybrid"))


def test_layers_with_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keep recurrent states, .*another speculator"):
        hf_spec.as_speculator("mtp", build("inkling_text", num_mtp_layers=2))


def test_the_word_mtp_reads_the_layers_of_the_checkpoint() -> None:
    target, draft, _ = golden("mtp_glm4_moe_small")
    found = hf_spec.as_speculator("mtp", target)
    assert isinstance(found, TargetMtp)
    for name, weight in draft.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no multi-token-prediction layers.*'ngram'"):
        hf_spec.as_speculator("mtp", build("llama"))


def test_layers_of_another_target_are_refused() -> None:
    _, draft, _ = golden("mtp_glm4_moe_small")
    with pytest.raises(ValueError, match="another target"):
        draft.check(build("llama"))
