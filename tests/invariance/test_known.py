"""The mode remembers what was tried, notices what has changed since, and runs few operators."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from architectures import prompts
from test_invariance import OPTIONS, row_of, same_bits, target
from test_invariance import short_parts as short_parts
from test_invariant_layers import OfAllRows, adapted
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import hf_spec
from hf_spec import Proposal
from hf_spec.invariance import attention, columns, mode
from hf_spec.packing.weight import PackedWeight
from hf_spec.scoring.factory import runner_for


def small() -> Any:
    return copy.deepcopy(target(num_hidden_layers=1, hidden_size=256, intermediate_size=512, vocab_size=512))


def own_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = types.MethodType(lambda self, states: nn.functional.linear(states, self.weight), layer)


def other_module(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(256, 512, bias=False).requires_grad_(False)


def pack(model: Any) -> None:
    assert not isinstance(model.lm_head.weight, PackedWeight)
    if not hf_spec.pack(model, force=True).packed:
        model.lm_head.weight.detach().add_(1)  # this processor packs nothing


def unpack(model: Any) -> None:
    assert isinstance(model.lm_head.weight, PackedWeight) or not hf_spec.pack(model, force=True).packed  # as it was
    hf_spec.unpack(model)
    model.lm_head.weight.detach().add_(1)


CHANGES: dict[str, Callable[[Any], object]] = {
    "threads": lambda model: torch.set_num_threads(2),
    "threads again": lambda model: torch.set_num_threads(1),
    "weights": lambda model: model.lm_head.weight.detach().mul_(2),
    "other memory": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "hook": lambda model: model.model.norm.register_forward_hook(lambda module, args, output: output * 1),
    "forward": own_forward,
    "module": other_module,
    "packed": pack,
    "unpacked": unpack,
    "attention": lambda model: model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "products": lambda model: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "precision": lambda model: model.bfloat16(),
    "adapters": adapted,
}


def test_what_changed_is_compared_anew_and_what_did_not_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads, calls, check = small(), torch.get_num_threads(), [], mode.check_bits

    def counting(model: Any) -> Tensor:
        calls.append(model)
        return check(model)

    monkeypatch.setattr(mode, "check_bits", counting)
    torch.set_num_threads(1)
    try:
        found = []
        for wanted in (1, 1):
            with hf_spec.invariant(model):
                found.append(model.generate(**prompts(2, (28, 9)), **OPTIONS, speculator="ngram"))
            assert len(calls) == wanted
        assert all(torch.equal(one, other) for one, other in zip(found[0].logits, found[1].logits, strict=True))
        for wanted, (name, change) in enumerate(CHANGES.items(), 2):
            change(model)
            for _ in range(2):
                hf_spec.invariant(model).close()
                assert len(calls) == wanted, name
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_settings_that_change_in_the_mode_are_tried_and_compared_before_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls, check = small(), [], mode.check_bits
    monkeypatch.setattr(mode, "check_bits", lambda model: calls.append(check(model)))
    monkeypatch.setattr(mode, "_logits_outside", lambda model: None)
    attention._tried.cache_clear()
    products = torch.backends.cuda.matmul
    try:
        with hf_spec.invariant(model):
            tried = attention._tried.cache_info().misses
            products.fp32_precision = "tf32"
            for _ in range(2):  # and not again
                model.generate(**prompts(1), max_new_tokens=1)
                assert len(calls) == 2 and attention._tried.cache_info().misses == 2 * tried
    finally:
        products.fp32_precision = "none"


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda model: model.to("meta"), "offloaded: meta"), (lambda model: model.compile(), "it is compiled")],
    ids=["moved", "compiled"],
)
def test_a_model_that_is_moved_or_compiled_in_the_mode_ends_it(change: Callable[[Any], object], reason: str) -> None:
    model = small()
    with hf_spec.invariant(model):
        change(model)
        with pytest.raises(ValueError, match=reason):
            model.generate(**prompts(1), max_new_tokens=1)
        assert not mode.is_invariant(model)


def test_a_hook_that_looks_at_all_rows_is_found_though_the_model_was_compared_before() -> None:
    model = small()
    hf_spec.invariant(model).close()
    handle = model.model.norm.register_forward_hook(lambda module, args, output: OfAllRows()(output))
    with pytest.raises(ValueError, match="computes other bits"):
        hf_spec.invariant(model)
    handle.remove()
    hf_spec.invariant(model).close()
    model.model.layers[0].mlp.act_fn.forward = OfAllRows().forward
    with pytest.raises(ValueError, match="computes other bits"):
        hf_spec.invariant(model)


def test_products_of_a_shape_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has few shapes, and another model of the same ones has none to try."""
    tried, found = [], mode._sizes_of
    monkeypatch.setattr(mode, "_tried", {})
    monkeypatch.setattr(mode, "_sizes_of", lambda module, *rest: tried.append(module) or found(module, *rest))
    hf_spec.invariant(small()).close()
    shapes = [(one.in_features, one.out_features) for one in tried if isinstance(one, nn.Linear)]
    assert len(shapes) == len(set(shapes)) > 2
    count = len(tried)
    hf_spec.invariant(small()).close()
    assert len(tried) == count


def test_entering_reads_few_rows() -> None:
    """A shape's trial took 2,300 rows before, and the comparison as many as that."""
    model, rows = target(num_hidden_layers=2), []
    # Before the module's own forward, so as the mode calls it.
    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: rows.append(args[0].numel() // args[0].shape[-1])
    )
    hf_spec.invariant(model).close()
    handle.remove()
    assert 300 < sum(rows) < 1_800


# -- operators --------------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts operators, and calls of the kernel of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.kernels += "flash_attention" in str(function)
        return function(*args, **(kwargs or {}))


def counted(model: Any, text: int, parents: list[int], padded: Sequence[int] = (0,)) -> Count:
    """Count what scoring draft tokens after a text takes, in a batch whose rows are ``padded`` by so many tokens."""
    runner = runner_for(model, DynamicCache(config=model.config), hidden_states=False, one_chain=False)
    ids = (torch.arange(text)[None] % 90).repeat(len(padded), 1)
    runner.prefill_tokens(ids, (torch.arange(text) >= torch.tensor(padded)[:, None]).long())
    is_chain = parents == list(range(-1, len(parents) - 1))
    tokens, above = torch.full((len(padded), len(parents)), 7), torch.tensor([parents] * len(padded))
    proposal = Proposal(tokens, above, len(parents), is_chain=is_chain)
    for _ in range(2):
        with Count() as count:
            runner.score(proposal)
        runner.rollback()
    return count


@torch.no_grad()
def test_a_forward_runs_few_operators_and_two_kernels_however_long_a_real_text_is() -> None:
    models = [target(num_hidden_layers=layers) for layers in (2, 4)]
    chain, tree = list(range(-1, 5)), [-1, 0, 0, 1, 1, 2, 2]
    found = {}
    for text in (140, 400):
        plain = [counted(model, text, chain) for model in models]
        with hf_spec.invariant(models[0]), hf_spec.invariant(models[1]):
            for shape in (chain, tree):
                few, many = (counted(model, text, shape) for model in models)
                found[text, len(shape)] = (many.operators - few.operators) / 2
                assert (many.kernels - few.kernels) / 2 == 2  # of early keys, and of late ones
        found[text, 0] = (plain[1].operators - plain[0].operators) / 2
    # 183 more a layer after 1,024 tokens were 73 more after 256 in the beginning, and 15 for each block of keys.
    assert found[140, 6] < found[140, 0] + 32
    assert found[140, 7] < found[140, 0] + 48
    assert all(found[400, shape] == found[140, shape] for shape in (0, 6, 7))


@torch.no_grad()
@pytest.mark.parametrize("padded", [(0, 0, 0), (0, 3, 6)], ids=str)
def test_rows_with_as_many_early_keys_attend_in_one_call(padded: tuple[int, ...]) -> None:
    model = target()
    layers = model.config.num_hidden_layers
    for shape in (list(range(-1, 5)), [-1, 0, 0, 1, 1, 2, 2]):
        with hf_spec.invariant(model):
            assert counted(model, 94, shape, padded).kernels == 2 * layers
            assert counted(model, 94, shape, (0, 50, 80)).kernels == 5 * layers, "80 early keys, 32, and none"


def test_rows_of_which_one_sees_all_late_keys_keep_their_masks() -> None:
    # One text has 14 late keys when the other has 16, which fill its part.
    model, inputs = target("phi"), prompts(2, (28, 30))
    with hf_spec.invariant(model):
        found = model.generate(**inputs, **OPTIONS)
        for row in range(2):
            assert same_bits(found, model.generate(**row_of(inputs, row), **OPTIONS), row)


def test_nodes_with_keys_of_their_own_keep_their_masks() -> None:
    hidden = columns.hidden_score(torch.float32)
    parts = [
        columns.Part((torch.zeros(1, 4, dtype=torch.long),), torch.tensor([[[[0.0] * seen + [hidden] * (4 - seen)]]]))
        for seen in (2, 3)
    ]
    joined = columns.Part.join(parts)
    assert torch.equal(joined.mask, torch.cat([part.mask for part in parts]))


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_trials_of_attention_see_what_depends_on_other_queries(
    dtype: torch.dtype, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, kept = (2, 3, 32, dtype, cap), attention.attend_part
    cpu = torch.device("cpu")

    def found(change: Callable[..., Any]) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
            output, sums = kept(query, key, value, *rest)
            return change(output, sums, query.shape, key.shape)

        monkeypatch.setattr(attention, "attend_part", attend)
        return attention._tried.__wrapped__(shape, cpu, 64, 1)

    whole = found(lambda output, sums, *_: (output, sums))
    assert whole.queries == attention.QUERIES and whole.step == attention.STEP
    alone = found(lambda output, sums, query, _: (output, sums * (1 + 2**-20 * (query[2] == 8))))
    assert alone.queries == attention.QUERIES[1:]
    by_length = found(lambda output, sums, _, key: (output * (1 + 2**-7 * (key[2] < 96)), sums))
    assert by_length.late == by_length.step == 96
    assert found(lambda output, sums, query, _: (output, sums + 2**-9 * torch.arange(query[2]))) is None
    assert found(lambda output, sums, query, _: (output, sums * (1 + 2**-20 * (query[0] > 1)))) is None
    assert found(lambda output, sums, _, key: (output, sums * (1 + 2**-20 * (key[0] > 1)))) is None


def test_long_texts_are_attended_to_in_pieces() -> None:
    model, inputs = target("qwen2:swa"), prompts(2, (28, 9))
    with hf_spec.invariant(model):
        wanted = model(**inputs).logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "NODES", 5)
            found = model(**inputs).logits
    mask = inputs["attention_mask"].bool()
    assert torch.equal(found[mask], wanted[mask])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2:swa"])
def test_trees_may_be_deeper_than_late_keys_are_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, depth = target(name), 30, 24  # early keys end at places 16, 32 and 48
    monkeypatch.setattr(columns, "COPIED", 96)  # of 2 to 6 nodes
    ids = prompts(1, (text + depth,))["input_ids"]
    # The text goes on along the even nodes. Each odd one is a leaf beside the next of them.
    parents = [-1] + [node - 2 + node % 2 for node in range(1, 2 * depth - 1)]
    tokens = torch.full((1, len(parents)), 7)
    tokens[0, ::2] = ids[0, text:]
    runner = runner_for(model, DynamicCache(config=model.config), hidden_states=False, one_chain=False)
    with hf_spec.invariant(model):
        wanted, cache = [], DynamicCache(config=model.config)
        for part in (ids[:, :text], *ids[:, text:].split(1, 1)):
            wanted.append(model(part, past_key_values=cache).logits[:, -1])
        runner.prefill_tokens(ids[:, :text], torch.ones((1, text), dtype=torch.long))
        found = runner.score(Proposal(tokens, torch.tensor([parents]), len(parents), is_chain=False)).logits
    assert torch.equal(found[0, ::2], torch.cat(wanted[1:]))
