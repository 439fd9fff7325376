"""The first layers of a target, with its final norm and its head, as a model that reads the target's own cache."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..proposal import Proposal
from .changes import foreign_hooks
from .features import Features, decoder_of
from .hooks import hooked
from .plain import coarsest_precision, difference, input_device, rounding_of_a_forward
from .prompts import tokens_for
from .runner import ModelRunner, Scores
from .trials import in_evaluation, in_short, tried_once

PROBE_TOKENS = 8  # that tell whether a model can do without its last layers
# What replaces the forward of one module: bound to the whole model, it would run all layers.
REPLACED = ("forward", "_old_forward", "_compiled_call_impl")


class FirstLayers:
    """The first ``count`` layers of a runner's model, run over the cache of that runner.

    The layers have read the text together with the others, so there is nothing to prefill. Draft tokens are written
    after the committed ones. ``reuses``: the forward that scores a chain begins with what these layers have computed
    of it. Otherwise it runs them once more, and writes the same keys again.
    """

    def __init__(self, runner: ModelRunner, count: int, reuses: bool = False) -> None:
        self._runner, self._model = runner, first_layers(runner.model, count)
        self._others = OtherLayers(runner.model, count) if reuses else None
        self._last = [_layers_of(runner.model)[count - 1]] if reuses else []
        self._outputs: list[Any] = []  # of the last of these layers, one for each forward

    @contextlib.contextmanager
    def drafting(self) -> Iterator[ModelRunner]:
        """Lend a runner of these layers, and drop what it has written."""
        runner, slots = self._runner_of(self._model), self._runner.slots
        self._outputs = []
        try:
            with hooked(self._last, after=lambda module, args, output: self._outputs.append(output)):
                yield runner
        finally:
            rows = len(slots.cache.rows.cpu_lengths)
            slots.commit(torch.zeros(rows, 0, dtype=torch.long), [0] * rows, in_place=True)

    def _runner_of(self, model: PreTrainedModel) -> ModelRunner:
        runner = copy.copy(self._runner)  # anew each time: rows and positions of the original change
        runner.model, runner.features = model, Features(model)
        return runner

    def hand_over(self, proposal: Proposal) -> None:
        """Let the runner score ``proposal``, drafted one token at a time, with what was computed of it."""
        if self._others is not None and proposal.is_chain:
            self._runner.begun = functools.partial(self._score, self._others, proposal.tokens, self._outputs)

    def _score(self, others: OtherLayers, drafted: Tensor, outputs: list[Any], proposal: Proposal) -> Scores | None:
        """Score ``proposal`` by the ``others``, after ``outputs`` of these layers; ``None`` if they are not of it.

        The last draft token was not read while drafting. It is read first, without the head.
        """
        count, read = proposal.tokens.shape[1], len(outputs)
        if count == 1 or not _begins(proposal.tokens, drafted):
            return None
        if count > read:
            with self.drafting() as runner:
                runner.slots.cache.rows.draft_nodes = read  # their keys are still there
                if runner.model._supports_logits_to_keep():
                    nothing = torch.empty(0, dtype=torch.long, device=runner.slots.device)
                    runner._step_kwargs = {**runner._step_kwargs, "logits_to_keep": nothing}
                runner.score_nodes(proposal.tokens[:, read:])
            outputs = [*outputs, *self._outputs]
        with others.after(outputs[:count]) as model:
            return self._runner_of(model).score_nodes(proposal.tokens)


class OtherLayers:
    """The layers of ``model`` after the first ``count``, which have run already, with its final norm and its head.

    It is a model that shares all modules of ``model`` but the first layers. Embeddings, masks and positions are
    computed as usual.
    """

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        self._first = _Output()
        layers = [*_layers_of(model)]
        self._model = _with_layers(model, [_Computed(one, self._first) for one in layers[:count]] + layers[count:])

    @contextlib.contextmanager
    def after(self, outputs: Sequence[Any]) -> Iterator[PreTrainedModel]:
        """Lend the model, whose first layers gave ``outputs``, the next tokens each: (..., batch, nodes, width)."""
        states = [output if isinstance(output, Tensor) else output[0] for output in outputs]
        joined, last = torch.cat(states, dim=-2), outputs[-1]
        self._first.value = joined if isinstance(last, Tensor) else (joined, *last[1:])
        try:
            yield self._model
        finally:
            self._first.value = None


class _Output:
    """What the first layers gave. By itself: layers that held ``OtherLayers``, which hold them, would not be freed."""

    value: Any = None


class _Computed(nn.Module):
    """Stands for a ``layer`` that has run: returns the output of the first layers, whatever it is given.

    A model may ask it for attributes of the layer. No hooks are called.
    """

    def __init__(self, layer: nn.Module, first: _Output) -> None:
        super().__init__()
        vars(self).update(_of=(layer, first), training=layer.training)  # in a tuple: it is no module of this one

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_of"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the first layers."""
        return vars(self)["_of"][1].value


def _begins(tokens: Tensor, drafted: Tensor) -> bool:
    """Tell whether ``tokens`` are the first columns of ``drafted`` itself: no value has to be asked of the device.

    Other tensors have other places, because ``drafted`` is still there.
    """
    same_rows = len(tokens) == len(drafted) and tokens.stride() == drafted.stride()
    return same_rows and tokens.device == drafted.device and tokens.data_ptr() == drafted.data_ptr()


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a model of the first ``count`` layers of ``model``, which shares its modules, weights and hooks.

    Errors: a ValueError if the layers of ``model`` are not one list of modules.
    """
    return _with_layers(model, [*_layers_of(model)][:count])


def _with_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> PreTrainedModel:
    """Return a model of these ``layers``, which shares all other modules with ``model``."""
    *above, last = _path_to_layers(model)
    changed = module = _without_children(model)
    for name in above:
        child = _without_children(module._modules[name])
        module._modules[name], module = child, child
    module._modules[last] = nn.ModuleList(layers)
    return cast(PreTrainedModel, changed)


def _layers_of(model: PreTrainedModel) -> Any:
    """Return the list of the layers of the decoder of ``model``."""
    return model.get_submodule(".".join(_path_to_layers(model)))


def _without_children(module: Any) -> Any:
    """Copy ``module`` without copying what it holds, so that its submodules can be exchanged."""
    twin = object.__new__(type(module))
    vars(twin).update((name, value) for name, value in vars(module).items() if name not in REPLACED)
    twin._modules = dict(module._modules)
    return twin


def _path_to_layers(model: PreTrainedModel) -> list[str]:
    """Name the modules on the way from ``model`` to the list of its decoder's layers."""
    count, inside = model.config.get_text_config(decoder=True).num_hidden_layers, {*decoder_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and module in inside:
            path: list[str] = name.split(".")
            return path
    raise ValueError(f"the layers of {type(model).__name__} are not one list of {count} modules")


def why_no_early_exit(model: PreTrainedModel, count: int) -> str | None:
    """Say why ``model`` cannot do without the layers after the first ``count``, or return ``None`` if it can.

    It is tried once. A model without weights cannot be tried.
    """
    if model.device.type == "meta":
        return None
    with in_evaluation(model):
        return _why_no_exit(model, count)


@tried_once
def _why_no_exit(model: PreTrainedModel, count: int) -> str | None:
    """Compare the first layers with the whole model, whose later layers pass on what they are given."""
    name = type(model).__name__
    try:
        shallow = first_layers(model, count)
        ids = tokens_for(model, 1, PROBE_TOKENS).to(input_device(model))
        with passing_on(model, count):
            expected = model(input_ids=ids, use_cache=False).logits
        logits = shallow(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:  # which tells nothing of the model
        raise
    except Exception as error:  # whatever an unforeseen architecture makes of fewer layers
        return f"{name} cannot run its first {count} layers alone ({in_short(error)})"
    apart = float(difference(logits, expected).max())
    if not apart <= rounding_of_a_forward(coarsest_precision(model)):  # nan is refused too
        return f"the first {count} layers of {name} alone compute something else than within it"
    return None


def passing_on(model: PreTrainedModel, count: int) -> contextlib.AbstractContextManager[None]:
    """Let the layers of ``model`` after the first ``count`` return what they are given."""
    layers = _layers_of(model)
    given: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given[module] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return given[module] if isinstance(output, Tensor) else (given[module], *output[1:])

    return hooked(list(layers)[count:], before, after)


def can_reuse(model: PreTrainedModel, count: int) -> bool:
    """Tell whether the layers after the first ``count`` need nothing of them but their output and the cache.

    It is tried once. Hooks of other packages have to see every layer run.
    """
    return not (model.training or model.device.type == "meta" or foreign_hooks(model)) and _reuses(model, count)


@tried_once
def _reuses(model: PreTrainedModel, count: int) -> bool:
    """Compare a chain that is scored after its first layers, and a token after it, with a forward without a cache."""
    ids = tokens_for(model, 1, PROBE_TOKENS).to(input_device(model))
    runner = ModelRunner(model)
    try:
        expected = model(input_ids=ids, use_cache=False).logits[:, 4:]
        runner.prefill_tokens(ids[:, :4], torch.ones_like(ids[:, :4]))
        layers, proposal = FirstLayers(runner, count, reuses=True), Proposal.path(ids[:, 4:7])
        with layers.drafting() as first:
            for column in (4, 5):
                first.score_nodes(ids[:, column : column + 1])
        layers.hand_over(proposal)
        logits = runner.score(proposal).logits
        runner.commit(torch.zeros_like(ids[:, :0]), [3], in_place=True)
        logits = torch.cat([logits, runner.extend(ids[:, 7:]).logits], dim=1)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever an unforeseen architecture makes of layers that have run
        return False
    return bool(difference(logits, expected).max() <= rounding_of_a_forward(coarsest_precision(model)))
