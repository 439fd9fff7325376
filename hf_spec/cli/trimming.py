"""``hf-spec convert --vocabulary``: choose a draft's tokens, and tell what that costs in accepted length."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..bench import Prompt, read_prompts
from ..checkpoints.auto import AutoDraftModel
from ..checkpoints.conversion import check_layout
from ..checkpoints.trimming import check_size, check_whole, frequent, read_vocabulary, trimmed
from ..metrics import SpeculationStats
from ..progress import counted
from ..scoring.plain import input_device
from ..untrusted import printable
from .loading import limited_length, load_target, outline_of

if TYPE_CHECKING:
    from ..integration import SpeculativeModel

ANSWER = 128  # tokens of an answer that are counted, or measured


def chosen_vocabulary(
    draft: str, vocabulary: str, target: str | None, prompts: str | None, to: str
) -> tuple[list[int], Any]:
    """Return the tokens that the draft at the path ``draft`` is cut to, and the target if there are prompts.

    They are those of a file, or as many frequent ones.

    With ``prompts``, prints the draft's mean accepted length before and after. It is measured over every second
    prompt. The frequent tokens are those of the other prompts and of the target's answers to them.

    Errors: a ValueError if prompts or the target are missing, or if the draft cannot be cut, or not be written in the
    layout ``to``; those of reading them.
    """
    size = int(vocabulary) if vocabulary.isdecimal() else None
    if size is not None and not (prompts and target):
        raise ValueError(
            f"--vocabulary {size} needs --prompts FILE and --target MODEL, whose answers are counted; or name a file "
            "with a JSON list of token ids"
        )
    ids = [] if size is not None else read_vocabulary(vocabulary)
    if not prompts:
        return ids, None
    if not target:
        raise ValueError("--prompts needs --target MODEL, the model that answers them")
    asked = read_prompts(prompts)
    if size is not None and len(asked) < 2:
        raise ValueError(
            f"{prompts} holds one prompt, and the draft is measured on others than those whose tokens are counted: "
            "write at least two"
        )
    counting, measured = asked[::2], asked[1::2] or asked  # a file's tokens were counted on none of them
    outline = outline_of(target)
    whole = outline.config.get_text_config().vocab_size
    if size is not None:
        check_size(size, whole)
    fitting = AutoDraftModel.from_pretrained(draft, target=outline)
    check_whole(fitting)
    check_layout(fitting, to)
    model, tokenizer = load_target(target, "auto", None)
    loaded = AutoDraftModel.from_pretrained(draft, target=model, dtype=model.dtype).to(input_device(model))
    loaded.sort_features()
    if size is not None:
        texts, _ = _answers(model, tokenizer, loaded, counting)
        ids = frequent(texts, size, whole, _ends(model))
    smaller = trimmed(loaded, ids)  # first, because measuring takes long
    before, after = (_length(model, tokenizer, one, measured) for one in (loaded, smaller))
    print(
        printable(
            f"{len(ids)} of {whole} tokens; mean accepted length over "
            f"{counted(len(measured), 'prompt')}: {before:.3f} before, {after:.3f} after"
        ),
        file=sys.stderr,
    )
    return ids, model


def _length(model: Any, tokenizer: Any, draft: Any, prompts: Sequence[Prompt]) -> float:
    return _answers(model, tokenizer, draft, prompts)[1].mean_accepted_length


def _answers(
    model: Any, tokenizer: Any, draft: Any, prompts: Sequence[Prompt]
) -> tuple[list[list[int]], SpeculationStats]:
    """Answer ``prompts`` greedily, with drafts of one length; return prompts with answers, and the statistics."""
    texts: list[list[int]] = []
    stats: list[SpeculationStats] = []
    for prompt in prompts:
        ids = torch.tensor([prompt.render([], tokenizer)], device=input_device(model))
        out = cast("SpeculativeModel", model).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speculator=draft,
            speculation_config=draft.defaults(),
            max_new_tokens=limited_length(ANSWER, ids.shape[1], model),
            do_sample=False,
            return_dict_in_generate=True,
        )
        texts.append(out.sequences[0].tolist())
        stats.append(cast(SpeculationStats, out.speculation))
    return texts, SpeculationStats.merge(stats)


def _ends(model: Any) -> list[int]:
    """List the tokens that end a text: a draft that never proposes them always fails at the end."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
