"""DeepSpec's drafts of Gemma 4 layers, against plain tensor arithmetic that knows none of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, linear

import hf_spec
from hf_spec.checkpoints.auto import AutoDraftModel
from hf_spec.checkpoints.conversion import convert
from hf_spec.checkpoints.inspection import inspect
from hf_spec.unroll.feedback import UnrollInput

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
WIDTH, HEAD, HEADS, VOCABULARY, LAYERS, CAP, THETA, TURNED = 32, 16, 4, 96, 2, 3.0, 5000.0, 0.5
# A draft's config has all fields of its target: those of sliding layers, which drafts lack, beside the others'.
FLAT = {
    "model_type": "gemma4_text",
    "target_layer_ids": [0, 2, 3],
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "hidden_size_per_layer_input": 0,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_global_key_value_heads": 1,
    "global_head_dim": HEAD,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": CAP,
    "sliding_window": 4,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": TURNED},
    },
}
BLOCK = {"architectures": ["Gemma4DSparkModel"], "block_size": 4, "mask_token_id": 3, "num_anchors": 8}
HEADS_ON = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
HEADS_ON["confidence_head_with_markov"] = True
HEADS_OFF = {"markov_rank": 0, "enable_confidence_head": False}
EAGLE = {"architectures": ["Gemma4Eagle3Model"], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
EAGLE |= {"ttt_length": 4, "step_loss_decay": 0.8}
CONFIGS = {"dspark": BLOCK | HEADS_ON, "dflash": BLOCK | HEADS_OFF, "eagle3": EAGLE}


def tensors_of(kind: str, key_is_value: bool) -> dict[str, Tensor]:
    """Make up the tensors of a file of DeepSpec."""
    generator = torch.Generator().manual_seed(5)
    queries, keys = HEADS * HEAD, HEAD * (1 if key_is_value else 2)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 4) + (
            len(shape) == 1
        )

    read = 2 * WIDTH if kind == "eagle3" else WIDTH
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, WIDTH), "norm.weight": (WIDTH,)}
    shapes |= {"lm_head.weight": (VOCABULARY, WIDTH), "fc.weight": (WIDTH, 3 * WIDTH)}
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms += ["hidden_norm"] * (kind == "eagle3")
    for layer in range(1 if kind == "eagle3" else LAYERS):
        place = f"layers.{layer}."
        shapes |= {f"{place}{norm}.weight": (WIDTH,) for norm in norms} | {f"{place}layer_scalar": (1,)}
        attention = {"q_proj": (queries, read), "k_proj": (keys, read), "o_proj": (WIDTH, queries)}
        attention |= {} if key_is_value else {"v_proj": (keys, read)}
        attention |= {"q_norm": (HEAD,), "k_norm": (HEAD,)}
        shapes |= {f"{place}self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlp = {"gate_proj": (48, WIDTH), "up_proj": (48, WIDTH), "down_proj": (WIDTH, 48)}
        shapes |= {f"{place}mlp.{name}.weight": shape for name, shape in mlp.items()}
    if kind != "eagle3":
        shapes["hidden_norm.weight"] = (WIDTH,)
    if kind == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (VOCABULARY, 6), "markov_head.markov_w2.weight": (VOCABULARY, 6)}
        shapes |= {"confidence_head.proj.weight": (1, WIDTH + 6), "confidence_head.proj.bias": (1,)}
    return {name: some(*shape) for name, shape in shapes.items()}


def write(path: Path, kind: str, key_is_value: bool = True, **changes: Any) -> dict[str, Tensor]:
    path.mkdir()
    tensors = tensors_of(kind, key_is_value)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = FLAT | CONFIGS[kind] | {"attention_k_eq_v": key_is_value} | changes
    (path / "config.json").write_text(json.dumps(raw))
    return tensors


# -- the slow twin ----------------------------------------------------------------------------------------------------


def normed(states: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Turn the first of the pairs (i, i + half) of each head, (length, heads, size)."""
    half = HEAD // 2
    pairs = int(TURNED * half)
    speed = torch.zeros(half)
    speed[:pairs] = THETA ** (-torch.arange(pairs) * 2.0 / HEAD)
    angle = (positions[:, None] * speed)[:, None]  # (length, 1, half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


class Twin:
    """Work out one layer of a draft, of tensors by the names of the file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, layer: int, residual: Tensor, reads: Tensor, positions: Tensor, context: Any, seen: Any) -> Any:
        """Return what follows ``residual``; attention reads ``reads`` and, before them, keys and values of context."""
        of = {name.removeprefix(f"layers.{layer}."): one for name, one in self.tensors.items()}
        query = linear(reads, of["self_attn.q_proj.weight"]).unflatten(-1, (-1, HEAD))
        query = turned(normed(query, of["self_attn.q_norm.weight"]), positions)
        keys, values = self.keys_and_values(layer, reads, positions)
        if context is not None:
            before = self.keys_and_values(layer, context, torch.arange(len(context)))
            keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
        share = HEADS // keys.shape[1]
        keys, values = (one.repeat_interleave(share, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys)  # not scaled: queries and keys are normed
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        attended = linear(attended, of["self_attn.o_proj.weight"])
        hidden = residual + normed(attended, of["post_attention_layernorm.weight"])
        inner = normed(hidden, of["pre_feedforward_layernorm.weight"])
        gate = gelu(linear(inner, of["mlp.gate_proj.weight"]), approximate="tanh")
        inner = linear(gate * linear(inner, of["mlp.up_proj.weight"]), of["mlp.down_proj.weight"])
        return (hidden + normed(inner, of["post_feedforward_layernorm.weight"])) * of["layer_scalar"]

    def keys_and_values(self, layer: int, reads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        place = f"layers.{layer}.self_attn."
        raw = linear(reads, self.tensors[f"{place}k_proj.weight"]).unflatten(-1, (-1, HEAD))
        values = raw
        if f"{place}v_proj.weight" in self.tensors:
            values = linear(reads, self.tensors[f"{place}v_proj.weight"]).unflatten(-1, (-1, HEAD))
        return turned(normed(raw, self.tensors[f"{place}k_norm.weight"]), positions), normed(values)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tensors["embed_tokens.weight"][ids] * WIDTH**0.5

    def logits(self, hidden: Tensor) -> Tensor:
        return CAP * (linear(hidden, self.tensors["lm_head.weight"]) / CAP).tanh()

    def block(self, root: int, features: Tensor, guesses: int) -> Tensor:
        """Return the normed states of the slots (guesses, hidden) behind ``root``."""
        context = normed(linear(features, self.tensors["fc.weight"]), self.tensors["hidden_norm.weight"])
        hidden = self.embed(torch.tensor([root] + [3] * (guesses - 1)))
        positions = len(features) + torch.arange(guesses)
        for layer in range(LAYERS):
            reads = normed(hidden, self.tensors[f"layers.{layer}.input_layernorm.weight"])
            hidden = self(layer, hidden, reads, positions, context, None)
        return normed(hidden, self.tensors["norm.weight"])

    def rows(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the states of an EAGLE-3 draft (length, hidden) before the last norm."""
        hidden = linear(features, self.tensors["fc.weight"])
        embeds = normed(self.embed(tokens), self.tensors["layers.0.input_layernorm.weight"])
        reads = torch.cat([embeds, normed(hidden, self.tensors["layers.0.hidden_norm.weight"])], dim=-1)
        place = torch.arange(len(tokens))
        return self(0, hidden, reads, place, None, place <= place[:, None])


@pytest.mark.parametrize("key_is_value", [True, False])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@torch.no_grad()
def test_blocks_are_those_of_plain_arithmetic(kind: str, key_is_value: bool, tmp_path: Path) -> None:
    twin = Twin(write(tmp_path / "draft", kind, key_is_value))
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    torch.manual_seed(1)
    features = torch.randn(9, 3 * WIDTH)
    out = draft(torch.tensor([[7]]), features=features[None])
    expected = twin.block(7, features, 4)
    torch.testing.assert_close(out.hidden_states[0], expected, **CLOSE)
    torch.testing.assert_close(out.logits[0], twin.logits(expected), **CLOSE)
    if kind == "dspark":
        before = torch.tensor([7, 20, 30, 40])
        reading, confidence = draft.read(before[None], out.hidden_states)
        token = twin.tensors["markov_head.markov_w1.weight"][before]
        bias = linear(token, twin.tensors["markov_head.markov_w2.weight"])
        torch.testing.assert_close(draft.correct(out.logits, reading)[0], twin.logits(expected) + bias, **CLOSE)
        weight, shift = (twin.tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        said = linear(torch.cat([expected, token], dim=-1), weight, shift)[:, 0]
        torch.testing.assert_close(confidence[0], said, **CLOSE)


@torch.no_grad()
def test_rows_of_eagle3_are_those_of_plain_arithmetic(tmp_path: Path) -> None:
    twin = Twin(write(tmp_path / "draft", "eagle3"))
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert draft.config.eagle_aux_hidden_state_layer_ids == [1, 3, 4]  # outputs of layers 0, 2 and 3
    assert draft.config.num_speculative_tokens == 4
    torch.manual_seed(1)
    tokens, features = torch.randint(VOCABULARY, (9,)), torch.randn(9, 3 * WIDTH)
    out = draft(tokens[None], features=features[None])
    expected = twin.rows(tokens, features)
    torch.testing.assert_close(out.hidden_states[0], expected, **CLOSE)
    torch.testing.assert_close(out.logits[0], twin.logits(normed(expected, twin.tensors["norm.weight"])), **CLOSE)


@pytest.mark.parametrize("wrong", ["embed", "logits", "layer_scalar"])
@torch.no_grad()
def test_the_twin_finds_what_is_left_out(wrong: str, tmp_path: Path) -> None:
    twin = Twin(write(tmp_path / "draft", "dflash"))
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    if wrong == "embed":
        draft.config.layers.hidden_size = 1  # which the embeddings are scaled by the root of
    if wrong == "logits":
        draft.config.layers.final_logit_softcapping = None
    if wrong == "layer_scalar":
        draft.layers[0].layer_scalar.fill_(1.0)
    features = torch.randn(9, 3 * WIDTH)
    out = draft(torch.tensor([[7]]), features=features[None])
    assert not torch.allclose(out.logits[0], twin.logits(twin.block(7, features, 4)), atol=1e-2)


# -- in use -----------------------------------------------------------------------------------------------------------


def target_for() -> Any:
    return build("gemma4_text", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=4).eval()


@pytest.mark.parametrize("kind", [hf_spec.DFlashSpeculatorConfig, hf_spec.DSparkSpeculatorConfig])
def test_a_new_block_draft_has_heads_as_the_targets_first_layer(kind: Any) -> None:
    target = target_for().config
    assert target.is_heterogeneous
    assert kind.for_target(target, mask_token_id=3).layers.head_dim == target.per_layer_config[0].head_dim


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("tree", [None, "dynamic"])
def test_greedy_text_is_that_of_plain_generate(kind: str, tree: Any, tmp_path: Path) -> None:
    write(tmp_path / "draft", kind)
    target = target_for()
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32, target=target)
    torch.manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :1] = 0
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    config = hf_spec.SpeculationConfig(num_speculative_tokens=4, tree=tree)
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, **options, speculator=draft, speculation_config=config), plain)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_saved_says_the_same(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", kind)
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    torch.manual_seed(2)
    ids, features = torch.randint(VOCABULARY, (1, 1 if kind != "eagle3" else 5)), torch.randn(1, 5, 3 * WIDTH)
    expected = draft(ids, features=features).logits
    draft.save_pretrained(tmp_path / "ours")
    assert torch.equal(AutoDraftModel.from_pretrained(tmp_path / "ours")(ids, features=features).logits, expected)
    report = inspect(tmp_path / "draft")
    assert (report.layout, report.problem) == ("deepspec (DeepSpec)", None)
    if kind == "eagle3":
        assert report.engines["vLLM"] == ["serves no EAGLE-3 of Gemma 4's layers"]
        return
    assert report.engines["vLLM"] == []
    assert any("convert to deepspec" in one for one in inspect(tmp_path / "ours").engines["vLLM"])
    convert(tmp_path / "ours", tmp_path / "back", "deepspec", dtype=torch.float32)
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    names = ("architectures", "global_head_dim", "num_global_key_value_heads", "target_layer_ids", "model_type")
    assert {name: raw[name] for name in names} == {name: (FLAT | CONFIGS[kind])[name] for name in names}
    assert torch.equal(AutoDraftModel.from_pretrained(tmp_path / "back")(ids, features=features).logits, expected)


@torch.no_grad()
def test_training_makes_the_blocks_of_drafting(tmp_path: Path) -> None:
    write(tmp_path / "draft", "dspark")
    draft = AutoDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    torch.manual_seed(3)
    ids, features = torch.randint(VOCABULARY, (1, 12)), torch.randn(1, 12, 3 * WIDTH)
    made = draft.unroll(UnrollInput(ids, None, features), 4)
    for root in (2, 7):
        out = draft(ids[:, root : root + 1], features=features[:, :root])
        states = draft.trained_states(out.hidden_states[:, None], ids, torch.tensor([[root]]))
        alone = draft.trained_logits(states)[0, 0]
        for step, laid in enumerate(made.states):
            torch.testing.assert_close(made.head(step, laid[0, root - 1]), alone[step], **CLOSE)


# -- what such drafts have not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is True: drafts of gemma4_text layers have full attention"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8"),
        ({"rope_parameters": None}, "rope_parameters is None; give those of 'full_attention'"),
        ({"target_layer_ids": [0, 9, 3]}, "do not fit a target of 4 layers"),
        ({"hidden_activation": "gelo"}, "hidden_activation is 'gelo'; transformers knows"),
    ],
)
def test_what_they_have_not_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", "dspark", **changes)
    with pytest.raises(ValueError, match=message):
        AutoDraftModel.from_pretrained(tmp_path / "draft", target=target_for())


def test_other_kinds_are_not_made_of_such_layers() -> None:
    layers = {"model_type": "gemma4_text", "rope_parameters": FLAT["rope_parameters"]}
    for kind in (hf_spec.DFlashSpeculatorConfig, hf_spec.EagleSpeculatorConfig):
        with pytest.raises(ValueError, match="model_type is 'gemma4_text'; build the draft from one of"):
            kind(transformer_layer_config=layers)
