"""What holds on the CPU holds on a GPU, and where target and draft sit on different devices.

Every test runs on the CPU and on a simulated device, too, where it cannot rot; the GPU has the CPU's results to meet.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import encoder_decoders
import pytest
import simulated_device
import torch
from architectures import build, prompts
from pairs import each_value
from test_trainer import STEPS, arguments, eagle3, losses, medusa, mtp, sharp_target, text
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from twins import SHAPES, noisy, target

from hf_spec import HybridSpeculator, NgramSpeculator, SpeculationConfig, generate_many, invariant
from hf_spec.device_tensors import to_device, to_list
from hf_spec.drafts.dflash.configuration import DFlashSpeculatorConfig
from hf_spec.drafts.drawn_trees import plan_drawn
from hf_spec.drafts.dspark.configuration import DSparkSpeculatorConfig
from hf_spec.drafts.eagle.configuration import EagleSpeculatorConfig
from hf_spec.drafts.eagle3.configuration import Eagle3SpeculatorConfig
from hf_spec.drafts.medusa.configuration import MedusaSpeculatorConfig
from hf_spec.drafts.mtp.configuration import MTPSpeculatorConfig
from hf_spec.drafts.peagle.configuration import PEagleSpeculatorConfig
from hf_spec.training import DraftTrainer, new_draft, unroll

DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if simulated_device.is_wanted():
    DEVICES = [simulated_device.NAME]
ELSEWHERE = DEVICES[-1:]  # for what other tests show on the CPU
DTYPES = [torch.float32] if simulated_device.is_wanted() else [torch.float32, torch.bfloat16, torch.float16]
PRECISIONS = ["float32"] if simulated_device.is_wanted() else ["float32", "bf16"]  # Trainer knows who has bfloat16
LAYERS = {"num_hidden_layers": 2, "head_dim": 8}
BLOCKS = {"aux_hidden_state_layer_ids": [0, 1, 2], "mask_token_id": 3, "block_size": 5}
HEADS = {"markov_rank": 8, "markov_head_type": "rnn"}
CONFIGS: dict[str, Any] = {
    "eagle3": lambda config: Eagle3SpeculatorConfig.for_target(config, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "dflash": lambda config: DFlashSpeculatorConfig.for_target(config, LAYERS, **BLOCKS),
    "dspark": lambda config: DSparkSpeculatorConfig.for_target(config, LAYERS, **BLOCKS, **HEADS),
    "peagle": lambda config: PEagleSpeculatorConfig.for_target(
        config, mask_token_id=3, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    ),
    "eagle": EagleSpeculatorConfig.for_target,
    "medusa": MedusaSpeculatorConfig.for_target,
    "mtp": MTPSpeculatorConfig.for_target,
}


def draft_of(kind: str, model: PreTrainedModel) -> Any:
    torch.manual_seed(1)
    return noisy(model) if kind == "vanilla" else new_draft(CONFIGS[kind](model.config), model).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", [[3, -1], [[1, 2], [3, 4]], [[True], [False]], [], [5_000_000_000]], ids=str)
def test_numbers_arrive_as_they_are(values: list[Any], device: str) -> None:
    for _ in range(20):  # the memory they are sent from is used again
        put = [to_device(values, torch.device(device)) for _ in range(20)]
        assert all(one.device.type == device and torch.equal(one.cpu(), torch.tensor(values)) for one in put)
        assert all(to_list(one) == to_list(one.clone()) == values for one in put)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "shape"), each_value(["vanilla", *CONFIGS], SHAPES))
def test_same_text_as_plain_generate(kind: str, shape: str, device: str) -> None:
    model, draft = target(), draft_of(kind, target())
    there, inputs = copy.deepcopy(model).to(device), prompts(3)
    given = {name: tensor.to(device) for name, tensor in inputs.items()}
    # The sibling on the CPU guesses for the target on the device; drafts over its states have to sit beside it.
    places = [device, "cpu"] if kind == "vanilla" else [device]
    for place in places:
        options = {"speculator": copy.deepcopy(draft).to(place), "speculation_config": SHAPES[shape]}
        out = there.generate(**given, max_new_tokens=20, **options)
        assert torch.equal(out.cpu(), model.generate(**inputs, max_new_tokens=20))
        sampled = there.generate(**given, max_new_tokens=20, do_sample=True, top_p=0.9, **options)
        assert sampled.device.type == device and sampled.shape[0] == 3


def compiled() -> dict[str, Any]:
    """Compile over a static cache wherever this is, by a backend that runs what torch has traced.

    The mode is one in which torch records graphs, so that buffers are kept for the next call.
    """
    config = CompileConfig(backend="eager", fullgraph=True)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


class LastTwice(LogitsProcessor):
    """Make the last token a little likelier; undeclared, so that it is asked token by token for the whole batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])


# Of a call in greedy decoding: the target, and what is asked for.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "processors of the prefix": (
        "llama",
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "bad_words_ids": [[7], [8, 9]]},
    ),
    "a processor in lockstep": ("llama", {"logits_processor": LogitsProcessorList([LastTwice()])}),
    "an end": ("llama", {"eos_token_id": list(range(30, 45))}),
    "a window": ("mistral", {}),
    "two kinds of layers": ("gemma2", {}),
    "experts": ("mixtral", {}),
    "states": ("mamba2", {}),
    "states and keys": ("qwen3_next", {}),
    "slots of fixed shape": ("llama", {"cache_implementation": "static"}),
    "graphs": ("llama", compiled()),
    "graphs and a window": ("gemma2", compiled()),
}
SPECULATORS = {
    "n-grams": lambda small: NgramSpeculator(max_ngram=2),
    "memory": lambda small: NgramSpeculator(history_size=1000),
    "small": lambda small: small,
    "small and memory": HybridSpeculator,
}


@pytest.mark.parametrize(("kind", "tree"), each_value(["vanilla", *CONFIGS], [None, "dynamic", "sampled"]))
def test_defaults_of_torch_change_nothing(kind: str, tree: str | None) -> None:
    """A dtype and a device for what the caller makes; nothing of them is left in what is kept for later calls."""
    model, config = target(), SpeculationConfig(num_speculative_tokens=3, tree=tree, num_tree_tokens=6)
    draft, inputs = draft_of(kind, model), prompts(3)

    def drawn() -> Tensor:
        plan_drawn.cache_clear()
        torch.manual_seed(0)
        options = {"do_sample": True, "max_new_tokens": 12, "speculation_config": config}
        return model.generate(**inputs, **options, speculator=draft)

    expected = drawn()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = drawn()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize(("call", "kind"), each_value(CALLS, SPECULATORS))
def test_same_text_in_every_kind_of_call(call: str, kind: str, device: str) -> None:
    name, options = CALLS[call]
    model, inputs = target(name), prompts(3)
    there, speculator = copy.deepcopy(model).to(device), SPECULATORS[kind](noisy(model).to(device))
    given = {name: tensor.to(device) for name, tensor in inputs.items()}
    plain = {name: value for name, value in options.items() if name not in ("cache_implementation", "compile_config")}
    text = model.generate(**inputs, **plain, max_new_tokens=20)
    for _ in range(2):  # a memory knows the text the second time
        out = there.generate(**given, **options, max_new_tokens=20, speculator=speculator, num_speculative_tokens=4)
        assert out.device.type == device and torch.equal(out.cpu(), text)


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize(
    ("tree", "deterministic"),
    [
        *((tree, False) for tree in (None, "dynamic", "sampled", ((0,), (1,), (0, 0)), "graphs")),
        *((tree, True) for tree in (None, "sampled")),
    ],
    ids=str,
)
def test_drawn_guesses_and_all_that_is_returned(tree: Any, deterministic: bool, device: str) -> None:
    """Where one token has nearly all of the probability, what is drawn is what is chosen.

    Deterministic algorithms of torch are other ones on an accelerator, and some operators have none.
    """
    model, inputs = target(), prompts(3)
    there, draft = copy.deepcopy(model).to(device), noisy(model).to(device)
    given = {name: tensor.to(device) for name, tensor in inputs.items()}
    asked = {"max_new_tokens": 16, "do_sample": True, "temperature": 1e-4, "return_dict_in_generate": True}
    asked |= {"output_scores": True, "output_hidden_states": True}
    way, shape = (compiled(), None) if tree == "graphs" else ({}, tree)
    config = SpeculationConfig(num_speculative_tokens=3, tree=shape)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = there.generate(**given, **asked, **way, speculator=draft, speculation_config=config)
    finally:
        torch.use_deterministic_algorithms(False)
    plain = model.generate(**inputs, **asked)
    assert torch.equal(found.sequences.cpu(), plain.sequences)
    for mine, others in zip(found.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1][:, -1].cpu(), others[-1][:, -1], atol=1e-3, rtol=1e-3)
    assert {score.device.type for score in found.scores} == {device}
    assert found.speculation.mean_accepted_length > 1.5


@pytest.mark.parametrize("device", ELSEWHERE)
def test_many_prompts_and_continuous_batching(device: str) -> None:
    model = target()
    there, draft = copy.deepcopy(model).to(device), noisy(model).to(device)
    texts = [row[mask > 0].tolist() for row, mask in zip(*prompts(5).values(), strict=True)]
    expected = [model.generate(torch.tensor([text]), max_new_tokens=12)[0, len(text) :].tolist() for text in texts]
    small = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)}
    found = generate_many(there, texts, speculator=draft, max_new_tokens=12, ordered=True, **small)
    assert [one.tokens for one in found] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_exact_verification_draws_what_plain_generate_draws(device: str) -> None:
    model = copy.deepcopy(target()).to(device)
    inputs = {name: tensor.to(device) for name, tensor in prompts(3).items()}
    texts = []
    for options in ({}, {"speculator": "ngram", "speculation_config": SpeculationConfig(verification="exact")}):
        torch.manual_seed(7)
        texts.append(model.generate(**inputs, max_new_tokens=20, do_sample=True, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize(("dtype", "shape"), each_value(DTYPES, SHAPES))
def test_bits_of_a_row_in_the_invariant_mode(dtype: torch.dtype, shape: str, device: str) -> None:
    """Alone or in a batch, plain or with draft tokens; the text and each logit."""
    there = copy.deepcopy(target()).to(device, dtype)
    draft = noisy(target()).to(device, dtype)
    inputs = {name: tensor.to(device) for name, tensor in prompts(3).items()}
    options: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    with invariant(there):
        fast = there.generate(**inputs, **options, speculator=draft, speculation_config=SHAPES[shape])
        plain = there.generate(**inputs, **options)
        for row, mask in enumerate(inputs["attention_mask"].bool()):
            alone = there.generate(inputs["input_ids"][row : row + 1, mask], **options)
            for found in (fast, plain):
                assert torch.equal(found.sequences[row, -12:], alone.sequences[0, -12:])
                assert all(torch.equal(one[row], own[0]) for one, own in zip(found.logits, alone.logits, strict=True))
    assert fast.speculation.mean_accepted_length > 1.2


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_requests_in_the_invariant_mode(shape: str | None, device: str) -> None:
    """In continuous batching, with windows and without; a tree has masks of its own."""
    there, draft = build("qwen2:swa").to(device), noisy(build("qwen2:swa")).to(device)
    there.generation_config.eos_token_id = None
    texts = [row[mask > 0].tolist() for row, mask in zip(*prompts(5).values(), strict=True)]
    options: dict[str, Any] = {"speculator": "plain" if shape is None else draft}
    options |= {} if shape is None else {"speculation_config": SHAPES[shape]}
    small = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=24)}
    with invariant(there):
        asked = [torch.tensor([text], device=device) for text in texts]
        expected = [there.generate(one, max_new_tokens=12)[0, one.shape[1] :].tolist() for one in asked]
        found = generate_many(
            there, texts, max_new_tokens=12, ordered=True, engine="generate_batch", **options, **small
        )
        assert [one.tokens for one in found] == expected


@pytest.mark.parametrize("device", ELSEWHERE)
def test_models_with_one_config_compute_experts_alike_until_the_last_mode_ends(device: str) -> None:
    one = build("mixtral").to(device)
    other = type(one)(one.config).eval().to(device)
    experts, ids = one.get_experts_implementation(), torch.tensor([[5, 6, 7]], device=device)
    first, second = invariant(one), invariant(other)
    first.close()
    other.generate(ids, max_new_tokens=4)
    second.close()
    assert one.get_experts_implementation() == experts


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize(("name", "dtype"), each_value(["mixtral", "gemma2", "gemma3_text", "t5", "bart"], DTYPES))
def test_bits_of_other_families_in_the_invariant_mode(name: str, dtype: torch.dtype, device: str) -> None:
    """A mixture, caps of scores, windows, encoder-decoders."""
    of_source = name in ("t5", "bart")
    there = copy.deepcopy(encoder_decoders.build(name) if of_source else build(name, head_dim=16)).to(device, dtype)
    there.generation_config.eos_token_id = None
    inputs = encoder_decoders.sources(there, 3) if of_source else prompts(3)
    inputs = {key: tensor.to(device) for key, tensor in inputs.items()}
    options: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    experts = there.get_experts_implementation()
    with invariant(there):
        plain, fast = (there.generate(**inputs, **options, speculator=speculator) for speculator in (None, "ngram"))
        for row, mask in enumerate(inputs["attention_mask"].bool()):
            alone = there.generate(**{key: one[row : row + 1, mask] for key, one in inputs.items()}, **options)
            for found in (fast, plain):
                assert torch.equal(found.sequences[row, -12:], alone.sequences[0, -12:])
                assert all(torch.equal(one[row], own[0]) for one, own in zip(found.logits, alone.logits, strict=True))
    assert there.get_experts_implementation() == experts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", [{}, {"transformer_layer_config": {"num_hidden_layers": 2}}])
def test_gradients_of_the_unroll(flags: dict[str, Any], device: str) -> None:
    """On a GPU FlexAttention works them out, compiled; packed documents and a length that fills no block included."""
    model = sharp_target()
    config = Eagle3SpeculatorConfig.for_target(model.config, flags.get("transformer_layer_config"))
    torch.manual_seed(1)
    draft = new_draft(config, model)
    ids, features = torch.randint(3, 96, (2, 37)), torch.randn(2, 37, config.num_features * config.feature_size)
    documents = torch.tensor([[0] * 20 + [1] * 17, [2] * 37])
    found = []
    for place in ("cpu", device):
        one = copy.deepcopy(draft).to(place)
        logits = unroll(one, ids.to(place), features.to(place), STEPS, documents.to(place))
        sum(step.logsumexp(-1).sum() for step in logits).backward()
        gradients = [parameter.grad for parameter in one.parameters() if parameter.requires_grad]
        found.append([tensor.detach().cpu() for tensor in (*logits, *gradients)])
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)


def dspark(model: Any) -> Any:
    return draft_of("dspark", model)


def peagle(model: Any) -> Any:
    return draft_of("peagle", model)


def lent(model: Any) -> Any:
    """Return Medusa heads that are lent a copy: some rows of the target's output layer."""
    config = MedusaSpeculatorConfig.for_target(model.config, num_heads=STEPS, draft_vocab_size=40)
    return new_draft(config, model, torch.arange(96))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "make"), each_value(PRECISIONS, [eagle3, mtp, medusa, lent, dspark, peagle]))
def test_training_loses_alike(
    make: Any, precision: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for place, half in (("cpu", False), (device, precision == "bf16")):
        if simulated_device.is_wanted():  # Trainer does not look for such a device
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", place)
        model = sharp_target()
        args = arguments(tmp_path, use_cpu=place == "cpu", bf16=half)
        trainer = DraftTrainer(make(model), model, args, train_dataset=text(), eval_dataset=text(2, seed=5))
        trainer.train()
        assert trainer.draft.device.type == trainer.target.device.type == place
        assert {one.device.type for one in trainer.draft._lent.values() if one is not None} <= {place}
        found.append(losses(trainer))
        assert trainer.evaluate()["eval_acceptance_length"] >= 1
    assert found[1] == pytest.approx(found[0], rel=2e-2 if precision == "bf16" else 1e-3)
