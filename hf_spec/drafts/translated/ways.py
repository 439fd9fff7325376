"""Which of two ways of drafting with another tokenizer is taken: the one by which more tokens are accepted."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

TOKENS, TEXT = "by shared tokens", "by text"
TRIED = 8  # steps after which a way is known
AGAIN = 32  # steps after which the worse way gets another one: texts change
DECAY = 0.97  # by which earlier steps count less


class Ways:
    """How many draft tokens are accepted in a step of each way, over all calls."""

    def __init__(self) -> None:
        self._steps = {TOKENS: 0, TEXT: 0}
        self._weights = {TOKENS: 0.0, TEXT: 0.0}
        self._accepted = {TOKENS: 0.0, TEXT: 0.0}

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: object) -> Ways:
        """Return those of a draft ``model`` and the target's ``tokenizer``."""
        return _known.setdefault(model, WeakKeyDictionary()).setdefault(tokenizer, cls())

    def choose(self) -> str:
        """Return the way of the next step."""
        rarer = min(self._steps, key=lambda way: self._steps[way])
        if self._steps[rarer] < TRIED:
            return rarer
        better = max(self._steps, key=self.mean)
        if sum(self._steps.values()) % AGAIN == 0:
            return TEXT if better == TOKENS else TOKENS
        return better

    def mean(self, way: str) -> float:
        """Return how many draft tokens are accepted in a step."""
        return self._accepted[way] / max(self._weights[way], 1.0)

    def record(self, way: str, accepted: float) -> None:
        """Record that a step of this way had so many ``accepted`` draft tokens."""
        self._steps[way] += 1
        self._weights[way] = DECAY * self._weights[way] + 1
        self._accepted[way] = DECAY * self._accepted[way] + accepted


_known: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[object, Ways]] = WeakKeyDictionary()
