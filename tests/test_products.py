"""Large float32 products take the faster of torch's two libraries, and nobody else notices."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import build, prompts
from test_exactness import noisy_copy
from torch import Tensor, nn
from transformers import PreTrainedModel
from twins import draft, target

import hf_spec
from hf_spec.decoding.ranks import Ranks
from hf_spec.scoring import products
from hf_spec.scoring.products import product, quick_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


class Watched:
    """Note which library multiplies."""

    def __init__(self) -> None:
        self.by_onednn: list[bool] = []
        self._multiply = products._multiply

    def __call__(self, by_onednn: bool, *given: Any) -> Tensor:
        self.by_onednn.append(by_onednn)
        return self._multiply(by_onednn, *given)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(products, "_multiply", watched)
    return watched


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small layers count as large ones, in races of their own."""
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "_races", defaultdict(products._Race))


@pytest.fixture
def onednn_has_won(every_layer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def won() -> products._Race:
        race = products._Race()
        race.winner = True
        return race

    monkeypatch.setattr(products, "_races", defaultdict(won))


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def large_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(512, 1024, bias=bias)


@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(512,), (1, 512), (3, 512), (2, 5, 512), (2, 0, 512)], ids=str)
def test_both_libraries_give_the_same_product(shape: tuple[int, ...], bias: bool, watched: Watched) -> None:
    layer, states = large_layer(bias), torch.randn(shape)
    plain = layer(states)
    with quick_products([layer]):
        quick = layer(states)
    assert quick.shape == plain.shape and torch.allclose(quick, plain, atol=1e-4)
    assert watched.by_onednn == [True] * (states.numel() > 0)


@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
def test_states_need_not_lie_side_by_side(watched: Watched) -> None:
    layer, wide = large_layer(), torch.randn(4, 3, 1024)
    for states in (wide[:, -1:, ::2], wide[..., :512], wide.transpose(0, 1)[:, :2, 512:]):
        with quick_products([layer]):
            quick = layer(states)
        assert torch.allclose(quick, layer(states), atol=1e-4)
    assert watched.by_onednn == [True] * 3


@pytest.mark.usefixtures("every_layer", "no_gradients")
@pytest.mark.parametrize(("onednn", "wins"), [(0.5, True), (0.95, False), (2.0, False)])
def test_the_libraries_take_turns_until_one_has_won(
    onednn: float, wins: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:
        return now

    def taking(by_onednn: bool, *given: Any) -> Tensor:
        nonlocal now
        now += onednn if by_onednn else 1.0
        return watched(by_onednn, *given)

    monkeypatch.setattr(products.time, "perf_counter", clock)
    monkeypatch.setattr(products, "_multiply", taking)
    layer = large_layer()
    with quick_products([layer]):
        for _ in range(12):
            layer(torch.ones(1, 512))
        assert watched.by_onednn == [False, True] * products.TURNS + [wins] * (12 - 2 * products.TURNS)
        watched.by_onednn.clear()
        layer(torch.ones(6, 512))  # of another number of tokens nothing is known yet
    assert watched.by_onednn == [False]


@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
def test_a_layer_is_given_back_when_the_last_call_ends() -> None:
    layer, other = large_layer(), large_layer()
    with quick_products([layer]):
        with pytest.raises(KeyboardInterrupt), quick_products([layer, other]):
            raise KeyboardInterrupt
        assert "forward" in vars(layer) and "forward" not in vars(other)
    assert "forward" not in vars(layer) and not products._borrowers


@pytest.mark.usefixtures("onednn_has_won")
def test_nothing_changes_in_other_threads(watched: Watched) -> None:
    layer, states = large_layer(), torch.randn(3, 512)
    found: list[Tensor] = []

    @torch.no_grad()
    def multiply() -> None:
        found.append(layer(states))

    with quick_products([layer]):
        multiply()
        elsewhere = threading.Thread(target=multiply)
        elsewhere.start()
        elsewhere.join()
    multiply()
    assert watched.by_onednn == [True]
    assert torch.equal(found[1], found[2])


@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
def test_a_copy_made_meanwhile_has_its_own_weights() -> None:
    network, states = nn.Sequential(large_layer()), torch.randn(3, 512)
    with quick_products([network]):
        other = copy.deepcopy(network)
        other[0].weight.data.zero_()
        other[0].bias.data.zero_()
        assert not other(states).any() and network(states).any()


class Special(nn.Linear):
    pass


def hooked_by_others(layer: nn.Linear) -> nn.Module:
    layer.forward = nn.Linear.forward.__get__(layer)  # type: ignore[method-assign]  # as accelerate does
    return layer


def compiled(layer: nn.Linear) -> nn.Module:
    layer.compile(backend="eager")
    return layer


LEFT_ALONE = {
    "half precision": lambda: large_layer().bfloat16(),
    "a class of its own": lambda: Special(512, 1024),
    "small": lambda: nn.Linear(8, 8),
    "a norm of its weights": lambda: nn.utils.parametrizations.weight_norm(large_layer()),
    "changed by others": lambda: hooked_by_others(large_layer()),
    "compiled": lambda: compiled(large_layer()),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_layers_that_are_something_else_are_left_alone(kind: str) -> None:
    layer = LEFT_ALONE[kind]()
    before = vars(layer).get("forward")
    with quick_products([layer]):
        assert vars(layer).get("forward") is before
    assert vars(layer).get("forward") is before


@pytest.mark.usefixtures("onednn_has_won")
def test_gradients_and_autocast_have_their_way(watched: Watched) -> None:
    layer, states = large_layer(), torch.randn(3, 512)
    with quick_products([layer]):
        layer(states).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(states).dtype == torch.bfloat16
        assert layer.weight.grad is not None and not watched.by_onednn
        with torch.inference_mode():
            layer(states)
    assert watched.by_onednn == [True]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
def test_a_clock_decides_nothing_where_torch_is_deterministic(watched: Watched) -> None:
    layer = large_layer()
    torch.use_deterministic_algorithms(True)
    try:
        with quick_products([layer]):
            layer(torch.ones(1, 512))
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.backends.mkldnn.flags(enabled=False), quick_products([layer]):
        layer(torch.ones(1, 512))
    assert not watched.by_onednn


def drafts(model: PreTrainedModel) -> dict[str, Any]:
    return {"ngram": "ngram", "vanilla": noisy_copy(model, seed=1), "eagle3": draft()}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["ngram", "vanilla", "eagle3"])
@pytest.mark.usefixtures("onednn_has_won")
def test_the_text_is_that_of_plain_generate(kind: str, rows: int, watched: Watched) -> None:
    model = target()
    given = prompts(rows)
    plain = model.generate(**given, max_new_tokens=24, do_sample=False)
    assert not watched.by_onednn
    for tree in (None, "dynamic"):
        config = hf_spec.SpeculationConfig(num_speculative_tokens=4, tree=tree)
        text = model.generate(
            **given, max_new_tokens=24, do_sample=False, speculator=drafts(model)[kind], speculation_config=config
        )
        assert torch.equal(text, plain)
    assert watched.by_onednn and all(watched.by_onednn)
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.usefixtures("every_layer")
def test_a_race_in_the_middle_of_a_text_changes_nothing(watched: Watched) -> None:
    model = build("qwen3")
    given = prompts(3)
    plain = model.generate(**given, max_new_tokens=24, do_sample=False)
    assert torch.equal(model.generate(**given, max_new_tokens=24, do_sample=False, speculator="ngram"), plain)
    assert set(watched.by_onednn) == {False, True}


@pytest.mark.usefixtures("onednn_has_won")
def test_graphs_keep_the_products_that_torch_gives_them(watched: Watched) -> None:
    model = target()
    given = prompts(1)
    settings: Any = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    plain = model.generate(**given, **settings, disable_compile=True)
    assert torch.equal(model.generate(**given, **settings, disable_compile=True, speculator="ngram"), plain)
    assert not watched.by_onednn


@pytest.mark.usefixtures("onednn_has_won")
def test_processes_that_share_a_model_multiply_alike(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of each would decide, and replicated layers would differ in the last digit."""
    monkeypatch.setattr(Ranks, "is_alone", False)
    model = target()
    model.generate(**prompts(1), max_new_tokens=12, do_sample=False, speculator="ngram")
    assert not watched.by_onednn


@pytest.mark.usefixtures("onednn_has_won", "no_gradients")
def test_weights_that_belong_to_no_layer_are_multiplied_alike(watched: Watched) -> None:
    states, weight = torch.randn(2, 512), torch.randn(1024, 512)
    plain = product(states, weight)
    with quick_products([]):
        assert torch.allclose(product(states, weight), plain, atol=1e-3)
    assert watched.by_onednn == [True]
