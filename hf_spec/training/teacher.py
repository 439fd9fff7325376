"""Forward passes of a language model over texts: features, last hidden states, and logits at a few positions."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..scoring.features import Features, decoder_of
from ..scoring.hooks import hooked
from ..scoring.plain import input_device
from ..scoring.trials import tried_once
from ..unroll.feedback import positions


class Reader:
    """The forward pass of ``model`` over complete texts, without the logits."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()) -> None:
        self.model: Any = model
        self.feature_layers = tuple(feature_layers)
        self._features = Features(model, self.feature_layers)

    def read(self, input_ids: Tensor, document_ids: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the states of each feature layer (batch, length, width) and the last ones (batch, length, hidden).

        Packed documents (batch, length) do not attend to each other. Padding is on the right, where no token of the
        text attends to it.
        """
        if document_ids is None or not bool((document_ids != document_ids[:, :1]).any()):
            return self._read(input_ids)
        position_ids = positions(input_ids, document_ids)
        if separates_documents(self.model):
            return self._read(input_ids, position_ids)
        return self._read_in_rows(input_ids, (position_ids == 0).flatten().nonzero()[:, 0])

    @torch.no_grad()
    def check(self) -> None:
        """Raise a ValueError if states are not finite, or if tokens attend to later ones, which drafts predict."""
        ids = _some_ids(self.model)
        states = self._read(ids)[1]
        if not bool(states.isfinite().all()):
            raise ValueError(
                f"the states of {type(self.model).__name__} are not finite: load it in bfloat16 or float32, or repair "
                "its weights"
            )
        if not _alike(states[:, :4], self._read(ids[:, :4])[1]):
            raise ValueError(
                f"{type(self.model).__name__} lets tokens attend to later ones, as prefix models do. Its states "
                "contain what follows, so no draft can learn from them: take another target, or draft with "
                "speculator='ngram'"
            )

    def _read(self, input_ids: Tensor, position_ids: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False} | self._features.asked
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        if self.model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = torch.tensor([-1])  # a tensor: given the number 1, Gemma 4 cuts the states too
        last: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            last.append(output)

        with hooked([decoder_of(self.model)], after=keep), self._features.watching() as caught:
            outputs = self.model(**kwargs, return_dict=True)
        return self._features.states(outputs, caught), last[-1].last_hidden_state

    def _read_in_rows(self, input_ids: Tensor, starts: Tensor) -> tuple[list[Tensor], Tensor]:
        """Read each document as its own batch row, as many at a time as need no more memory than the batch.

        ``starts`` (documents,) are their first tokens in the flattened batch.
        """
        lengths = starts.diff(append=starts.new_tensor([input_ids.numel()])).tolist()
        documents = input_ids.flatten().split(lengths)
        states: dict[int, list[Tensor]] = {}
        rest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while rest:
            count = max(1, input_ids.numel() // lengths[rest[0]])
            together, rest = rest[:count], rest[count:]
            layers, last = self._read(pad_sequence([documents[i] for i in together], batch_first=True))
            for row, i in enumerate(together):
                states[i] = [layer[row, : lengths[i]] for layer in (*layers, last)]
        by_layer = zip(*(states[i] for i in range(len(documents))), strict=True)
        *layers, last = (torch.cat(parts).unflatten(0, input_ids.shape) for parts in by_layer)
        return layers, last

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (n, vocabulary) of the last hidden states (n, hidden) of any n positions.

        The model's own ``forward`` computes them, with its decoder replaced by one that returns these states. So they
        are capped and scaled where the model does that.
        """
        with _answering(decoder_of(self.model), _Answer(last_hidden_state=hidden[None])):
            outputs = self.model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long), return_dict=True)
        return cast(Tensor, outputs.logits[0])


@tried_once
def separates_documents(model: PreTrainedModel) -> bool:
    """Tell whether ``model`` keeps packed documents separate when the position ids restart at each one.

    Many models of transformers accept position ids but do not find the documents' beginnings in them.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    ids, reader = _some_ids(model).expand(2, -1), Reader(model)  # kernels of flash attention look at one row alone
    place = torch.arange(8, device=ids.device)
    _, packed = reader._read(ids, torch.stack([place % 4, place % 3]))
    _, alone = reader._read(torch.stack([ids[0, 4:6], ids[1, 6:]]))
    return _alike(torch.stack([packed[0, 4:6], packed[1, 6:]]), alone)


def _some_ids(model: PreTrainedModel) -> Tensor:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return torch.arange(11, 19, device=input_device(model))[None] % size


def _alike(states: Tensor, others: Tensor) -> bool:
    return bool(((states - others).norm(dim=-1) < 0.05 * others.norm(dim=-1)).all())


class _Answer(BaseModelOutputWithPast):
    """A decoder's output with last hidden states; any further field that a model reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


_one_answer_at_a_time = threading.Lock()


@contextlib.contextmanager
def _answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Let ``module`` return ``output`` for any call of this thread; other threads get its own ``forward``."""
    thread = threading.get_ident()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return output if threading.get_ident() == thread else own_forward(*args, **kwargs)

    with _one_answer_at_a_time:
        wrapped = module.__dict__.get("forward")  # accelerate sets one where a model is split over devices
        own_forward = module.forward
        module.forward = forward
        try:
            yield
        finally:
            del module.forward
            if wrapped is not None:
                module.forward = wrapped
