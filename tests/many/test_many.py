"""Many prompts: each gets the text that plain ``generate`` writes for it alone, and is read when it is needed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import PartialState
from architectures import LONG_ROPE, build
from groups import leave, run_two
from pairs import each_value, pairwise, usual
from peft import LoraConfig, get_peft_model
from PIL import Image
from test_multimodal import IMAGE, llava
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlavaProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.clip import CLIPImageProcessor
from twins import SHAPES, by_code, draft, noisy, target, tokenizer

import hf_spec
from hf_spec import Completion, SpeculationStats, generate_many
from hf_spec.many.batches import Batches
from hf_spec.progress import working

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
QUIET: dict[str, Any] = {"progress": False, "batch_size": 4}


def texts(lengths: tuple[int, ...] = (5, 13, 2, 9, 9, 1, 30, 4, 4, 7)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]


def alone(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Generate plainly for each prompt by itself: the new tokens."""
    given = GREEDY | options
    return [model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist() for ids in prompts]


def many(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
    """Generate for all of them: the new tokens of each, in their order."""
    found = sorted(generate_many(model, prompts, **QUIET | GREEDY | options), key=lambda one: one.index)
    assert [one.index for one in found] == list(range(len(found)))
    return [one.tokens for one in found]


def frequent(model: Any) -> int:
    """Find a token that ends several of the texts early, if it is made the end of a text."""
    written = alone(model, texts())
    return max(range(99), key=lambda token: sum(token in one[3:-2] for one in written))


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "speculator", "engine"),
    pairwise(["llama", "gemma2", "qwen2_moe"], [None, "ngram", "chain", "tree"], ["generate", "generate_batch"]),
)
def test_each_prompt_gets_its_own_text(name: str, speculator: str | None, engine: str) -> None:
    model = target(name)
    options: dict[str, Any] = {"speculator": speculator, "engine": engine}
    if speculator in SHAPES:
        options |= {"speculator": draft(name), "speculation_config": SHAPES[speculator]}
    if engine == "generate_batch" and name == "gemma2":
        with pytest.raises(ValueError, match=r"generate_batch cannot answer these prompts: .*window"):
            many(model, texts(), **options)
        return
    assert many(model, texts(), **options) == alone(model, texts())


@pytest.mark.parametrize("name", usual(["mamba", "jamba", "qwen3_next", "lfm2"], ["mamba", "qwen3_next"]))
def test_recurrent_and_hybrid_models(name: str) -> None:
    model = build(name)
    assert many(model, texts(), speculator=noisy(model)) == alone(model, texts())


@pytest.mark.parametrize(("pad", "speculator"), each_value([0, None, "the end"], [None, "ngram"]))
def test_texts_that_end(speculator: str | None, pad: Any) -> None:
    model = target()
    end = frequent(model)
    plain = alone(model, texts(), eos_token_id=end)
    assert len({len(one) for one in plain}) > 2
    config = GenerationConfig(**GREEDY, eos_token_id=end, pad_token_id=end if pad == "the end" else pad)
    found = generate_many(model, texts(), generation_config=config, speculator=speculator, ordered=True, **QUIET)
    assert [one.tokens for one in found] == plain


@pytest.mark.parametrize(("end", "speculator"), each_value([2, None], [None, "ngram"]))
def test_stop_strings(speculator: str | None, end: int | None) -> None:
    """Without an end of text, plain generate writes on in a row until all are done: such rows are alone."""
    model = target()
    stop = tokenizer().decode(alone(model, texts())[3][5:7])
    options = {"stop_strings": [stop], "eos_token_id": end, "tokenizer": tokenizer()}
    plain = alone(model, texts(), **options)
    assert len({len(one) for one in plain}) > 1
    assert many(model, texts(), speculator=speculator, **options) == plain


class Until(StoppingCriteria):
    """End a text at one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("speculator", [None, "ngram"])
def test_the_last_token_of_a_text_may_be_any(speculator: str | None) -> None:
    """None of them is taken for what fills rows up: token 0 is a common word of many tokenizers."""
    for last in (0, 98):
        model, often = copy.deepcopy(target()), frequent(target())
        with torch.no_grad():  # so that the token is written now and then
            words = model.get_output_embeddings().weight
            words[[last, often]] = words[[often, last]]
        options = {"stopping_criteria": [Until(last)], "eos_token_id": 2}
        plain = alone(model, texts()[:4], **options)
        assert any(one[-1] == last for one in plain)
        found = [
            generate_many(model, [one], speculator=speculator, **GREEDY, **options, **QUIET) for one in texts()[:4]
        ]
        assert [one.tokens for (one,) in map(list, found)] == plain


PENALTIES: list[dict[str, Any]] = [{"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 2}]
PENALTIES += [{"bad_words_ids": [[28, 28], [35]]}, {"sequence_bias": {(87,): -5.0}}, {"forced_bos_token_id": 3}]


@pytest.mark.parametrize("option", PENALTIES, ids=str)
def test_what_looks_at_whole_rows_sees_no_padding(option: dict[str, Any]) -> None:
    model = target()
    plain = alone(model, texts(), **option)
    assert plain != alone(model, texts())
    assert many(model, texts(), speculator=draft(), **option) == plain


def test_padding_changes_what_looks_at_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: put together, the token that pads is forbidden."""
    model = target()
    plain = alone(model, texts(), no_repeat_ngram_size=1)
    filler = plain[5][0]
    before = Batches.__init__

    def careless(self: Batches, *args: Any) -> None:
        before(self, *args)
        self.pads, self.filler = True, filler

    monkeypatch.setattr(Batches, "__init__", careless)
    assert many(model, texts(), no_repeat_ngram_size=1) != plain


class Shifting(LogitsProcessor):
    """Favour another token at every call: a processor that keeps a state, and sees the batch in lockstep."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, (self.calls * 7 + input_ids.shape[1]) % 99] += 4.0
        return scores


@pytest.mark.parametrize("speculator", [None, "ngram", "draft"])
def test_processors_and_criteria_that_keep_a_state(speculator: str | None) -> None:
    model, batches = target(), []

    def processors(indices: list[int]) -> LogitsProcessorList:
        batches.append(indices)
        return LogitsProcessorList([Shifting()])

    def criteria(indices: list[int]) -> StoppingCriteriaList:
        return StoppingCriteriaList([lambda ids, scores: ids[:, -1] % 9 == 0])

    fresh = [
        alone(model, [ids], logits_processor=processors([0]), stopping_criteria=criteria([0]), eos_token_id=2)[0]
        for ids in texts()
    ]
    batches.clear()
    options = {"logits_processor": processors, "stopping_criteria": criteria, "eos_token_id": 2}
    assert many(model, texts(), speculator=draft() if speculator == "draft" else speculator, **options) == fresh
    assert sorted(itertools.chain(*batches)) == list(range(10)) and max(map(len, batches)) == 2


@pytest.mark.parametrize("declare", [hf_spec.pure, lambda function: function])
def test_allowed_tokens_are_those_of_the_prompt(declare: Any) -> None:
    model = target()

    def allowed(index: int, ids: Tensor) -> list[int]:
        return list(range(index + 3, 99, 5))

    plain = [
        alone(model, [ids], prefix_allowed_tokens_fn=lambda row, prefix, index=index: allowed(index, prefix))[0]
        for index, ids in enumerate(texts())
    ]
    assert many(model, texts(), speculator=draft(), prefix_allowed_tokens_fn=declare(allowed)) == plain


def test_adapters_are_those_of_the_prompt() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model: Any = get_peft_model(noisy(target(), 0.0), lora, "one")
    model.add_adapter("two", lora)
    model.eval()
    prompts, names = texts((5, 13, 2, 9, 30)), ["one", "two", "__base__", "two", "one"]
    plain = [alone(model, [ids], adapter_names=[name])[0] for ids, name in zip(prompts, names, strict=True)]
    assert plain[:2] != alone(model, prompts[:2], adapter_names=["__base__"]), "the adapters do nothing"
    assert many(model, prompts, adapter_names=names, speculator="ngram") == plain
    with pytest.raises(ValueError, match="adapter_names has the length 4, and prompts 5: pass a list of prompts"):
        many(model, prompts, adapter_names=names[:4])


def test_images() -> None:
    """Prompts with one image, with two, and with none; the last token of the vocabulary is no padding there."""
    model, both = llava()
    model.config.image_token_id = 98
    both["input_ids"][both["input_ids"] == IMAGE] = 98
    rows = [both["attention_mask"][row].bool() for row in range(2)]
    images = [both["pixel_values"][:1], both["pixel_values"][1:]]
    prompts: list[Any] = [
        {"input_ids": both["input_ids"][row, seen], "pixel_values": images[row]} for row, seen in enumerate(rows)
    ]
    prompts += [{name: value[1:] if name != "pixel_values" else images[1] for name, value in both.items()}, [5, 6, 7]]
    plain = [
        model.generate(torch.atleast_2d(torch.as_tensor(one["input_ids"])), pixel_values=one["pixel_values"], **GREEDY)
        for one in prompts[:2]
    ]
    wanted = [out[0, -12:].tolist() for out in plain] + [plain[1][0, -12:].tolist(), *alone(model, [[5, 6, 7]])]
    for speculator in (None, "ngram", noisy(target())):
        found = many(model, prompts, speculator=speculator)
        assert found == wanted


def test_pictures_in_chats_are_opened() -> None:
    model, _ = llava()
    vision, words = model.config.vision_config, copy.copy(tokenizer())
    sizes = dict.fromkeys(("height", "width"), vision.image_size)
    template = (
        "{% for m in messages %}{% for c in m.content %}{{ IMAGE if c.type == 'image' else c.text }}{% endfor %}"
        "{% endfor %}:"
    )
    token = words.convert_ids_to_tokens(IMAGE)
    words.chat_template = template = template.replace("IMAGE", f"'{token}'")
    processor = LlavaProcessor(
        *(CLIPImageProcessor(size={"shortest_edge": vision.image_size}, crop_size=sizes), words),
        *(vision.patch_size, "default", template, token),
        num_additional_image_tokens=1,
    )
    picture = numpy.random.default_rng(0).integers(0, 256, (2, vision.image_size, vision.image_size, 3), numpy.uint8)
    parts = [[{"type": "image", "image": Image.fromarray(one)}, {"type": "text", "text": "AB"}] for one in picture]
    chats = [[{"role": "user", "content": one}] for one in (*parts, parts[0][1:])]
    form: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    wanted = [
        model.generate(**processor.apply_chat_template(one, **form), **GREEDY)[0, -12:].tolist() for one in chats
    ]
    assert many(model, chats, tokenizer=processor) == wanted and wanted[0] != wanted[1]
    for reader, part, problem in (
        (words, parts[0], "part of type 'image', and the tokenizer reads text alone: pass the model's processor"),
        (words, [{"image": "a.png"}], "part of type 'image'"),
        (
            processor,
            [{"type": "input_image", "text": "A"}],
            "the processor opens nothing for its part of type 'input_image'",
        ),
    ):
        with pytest.raises(ValueError, match=f"prompt 1.*{problem}"):
            many(model, [[5], [{"role": "user", "content": part}]], tokenizer=reader)
    words.chat_template = None  # that of the processor is enough
    assert many(model, chats, tokenizer=processor) == wanted
    processor.chat_template = None
    with pytest.raises(ValueError, match="prompt 0 is a chat, but the processor has no chat template"):
        many(model, chats, tokenizer=processor)


def test_the_distribution_is_the_targets() -> None:
    torch.manual_seed(0)
    check_distribution("generate", 1000)


def check_distribution(engine: str, rounds: int) -> None:
    """Sample two tokens of the three best, of prompts of two lengths at a time, against exact probabilities."""
    model, prompts = target(), texts((3, 6))
    options = {"do_sample": True, "top_k": 3, "max_new_tokens": 3, "speculator": draft(), "batch_size": 500}
    found = many(model, prompts * rounds, engine=engine, **options)
    for which, ids in enumerate(prompts):
        seen: dict[tuple[int, ...], int] = {}
        for tokens in found[which::2]:
            seen[tuple(tokens[:2])] = seen.get(tuple(tokens[:2]), 0) + 1
        chances = {(a, b): p * q for a, p in best(model, ids).items() for b, q in best(model, [*ids, a]).items()}
        assert seen.keys() <= chances.keys()
        square = sum((seen.get(pair, 0) - rounds * p) ** 2 / (rounds * p) for pair, p in chances.items())
        assert square < 26.1  # 8 degrees of freedom, one in a thousand


@pytest.mark.parametrize(
    ("given", "engine"),
    each_value(
        [{}, {"generation_config": GenerationConfig(temperature=9.0)}, {"top_k": None}], ["generate", "generate_batch"]
    ),
)
def test_options_that_are_left_out_are_those_of_generate(given: dict[str, Any], engine: str) -> None:
    """Of which ``top_k`` is 50."""
    model = copy.deepcopy(target())
    model.generation_config.temperature = 9.0
    options = {"do_sample": True, "max_new_tokens": 1, "speculator": "ngram", "batch_size": 200}
    found = {token for [token] in many(model, texts((5,)) * 600, engine=engine, **options | given)}
    assert (len(found) <= 50) == ("top_k" not in given)


@torch.no_grad()
def best(model: PreTrainedModel, ids: list[int]) -> dict[int, float]:
    scores, tokens = model(torch.tensor([ids])).logits[0, -1].topk(3)
    return dict(zip(tokens.tolist(), scores.softmax(0).tolist(), strict=True))


# -- transformers' engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_the_engine_takes_windows_of_a_stream(ordered: bool) -> None:
    """Texts end early or late; the model's own options stand beside those of the call and of a generation config."""
    model = build("llama", num_hidden_layers=2)
    model.generation_config.eos_token_id = end = frequent(model)
    plain = alone(model, texts(), eos_token_id=end)
    given = {"engine": "generate_batch", "look_ahead": 4, "ordered": ordered, "generation_config": GenerationConfig()}
    found = list(generate_many(model, iter(texts()), speculator=draft(), **given, **QUIET, **GREEDY))
    assert [one.tokens for one in sorted(found, key=lambda one: one.index)] == plain
    for one in found:
        assert one.speculation.batch_size == 1 and one.speculation.per_row[0].tokens == one.tokens
    assert [one.index for one in found] == list(range(10)) or not ordered
    assert sorted(one.index for one in found[:4]) == [0, 1, 2, 3]
    next(generate_many(model, iter(texts()), speculator="ngram", **given, **QUIET, **GREEDY))  # and no more is read


def test_the_engine_makes_room_for_no_more_prompts_than_there_are() -> None:
    options = {"engine": "generate_batch", "batch_size": 10**6, "look_ahead": 8}
    assert many(target(), texts(), **options) == alone(target(), texts())


@pytest.mark.slow
def test_the_engine_samples_from_the_targets_distribution() -> None:
    torch.manual_seed(0)
    check_distribution("generate_batch", 300)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor needs the text"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor needs the text"),
        ({"stop_strings": ["a"], "tokenizer": tokenizer()}, "stop_strings: the engine ends requests"),
        ({"logits_processor": LogitsProcessorList([Shifting()])}, "it takes no logits_processor"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "it takes no prefix_allowed_tokens_fn"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"dola_layers": "low"}, "dola_layers is another way"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "no cache_implementation"),
    ],
)
@pytest.mark.filterwarnings("error:Passing")  # of inputs_embeds, which nobody gave
def test_what_the_engine_would_drop_is_decoded_in_batches(given: dict[str, Any], problem: str) -> None:
    for speculator in (None, "ngram"):
        with pytest.raises(ValueError, match=problem) as told:
            generate_many(target(), texts(), speculator=speculator, engine="generate_batch", **QUIET, **GREEDY | given)
        assert str(told.value).endswith(". Leave engine at 'auto', which decodes them in batches")
        assert ".." not in str(told.value) and "generate(" not in str(told.value) and "unset" not in str(told.value)
    generate_many(target(), texts(), speculator="ngram", **QUIET, **GREEDY | given)


@pytest.mark.parametrize("speculator", [None, "ngram"])
def test_rotary_frequencies_that_the_engine_would_share(speculator: str | None) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=60)
    with pytest.raises(ValueError, match="the longest text of a batch decides"):
        many(model, texts(), speculator=speculator, engine="generate_batch")
    assert many(model, texts(), speculator=speculator) == alone(model, texts())
    # The prompts of a batch are on one side of the length.
    model = build("llama", rope_parameters=LONG_ROPE | {"original_max_position_embeddings": 30})
    prompts = texts((5, 33, 2, 9, 31, 3))
    assert many(model, prompts, speculator=speculator) == alone(model, prompts)
    if speculator is None:  # a text that gets beyond the length is alone
        prompts = texts((5, 25, 33, 9))
        assert many(model, prompts) == alone(model, prompts)


def test_a_policy_is_in_training_mode_again_afterwards() -> None:
    model = copy.deepcopy(target()).train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    for answered in (1, 3):
        answers = generate_many(model, texts()[:3], engine="generate_batch", **QUIET, **GREEDY)
        for _ in range(answered):
            next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert [module.training for module in model.modules()] == before


def test_models_that_the_engine_does_not_take() -> None:
    for name in ("mamba", "jamba"):
        with pytest.raises(ValueError, match="generate_batch cannot answer"):
            generate_many(build(name), texts(), engine="generate_batch", **QUIET, **GREEDY)
    images = [{"input_ids": [[5, 6]], "pixel_values": torch.zeros(1, 3, 4, 4)}]
    with pytest.raises(ValueError, match=r"prompt 0 has more than token ids.*pass engine='generate'"):
        list(generate_many(target(), images, engine="generate_batch", **QUIET, **GREEDY))
    with pytest.raises(ValueError, match="engine is 'fast'"):
        generate_many(target(), texts(), engine="fast", **QUIET, **GREEDY)


# -- an iterator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_prompts_are_read_as_they_are_needed(ordered: bool) -> None:
    read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal read
        for ids in itertools.cycle(texts()):
            read += 1
            yield ids

    completions = generate_many(target(), endless(), look_ahead=8, ordered=ordered, **QUIET, **GREEDY)
    assert read == 0
    order = []
    for place, one in enumerate(itertools.islice(completions, 40)):
        assert read <= place - place % 8 + 8
        order.append(one.index)
    assert (order == sorted(order)) is ordered and sorted(order) == list(range(40))


def test_shapes_of_prompts_and_texts() -> None:
    model, words = target(), tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    ids = words("ABC:")["input_ids"]
    prompts = [
        *("ABC:", ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]), torch.tensor(ids).numpy()),
        *([{"role": "user", "content": "ABC"}], {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}),
    ]
    found = list(generate_many(model, prompts, tokenizer=words, **QUIET, **GREEDY))
    assert all(one.prompt_ids == ids and one.tokens == found[0].tokens for one in found)
    assert found[0].text == words.decode(found[0].tokens, skip_special_tokens=True)
    assert isinstance(found[0], Completion)
    assert next(generate_many(model, [ids], **QUIET, **GREEDY)).text is None
    assert list(generate_many(model, [], **QUIET, **GREEDY)) == []


@pytest.mark.parametrize("inside", [False, True])
def test_chats_that_are_rendered_by_code(inside: bool) -> None:
    model, words = target(), by_code()
    reader = LlavaProcessor(CLIPImageProcessor(), words) if inside else words
    prompts = ["ABC", [{"role": "user", "content": "ABC"}]]
    text, chat = generate_many(model, prompts, tokenizer=reader, ordered=True, **QUIET, **GREEDY)
    ids = words("ABC")["input_ids"]
    assert [text.prompt_ids, chat.prompt_ids] == [ids, [words.eos_token_id, *ids]]
    assert [text.tokens, chat.tokens] == alone(model, [text.prompt_ids, chat.prompt_ids])
    assert text.text == words.decode(text.tokens, skip_special_tokens=True)


def test_each_completion_has_its_statistics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)  # the command turns bars off for its process
    found = list(generate_many(target(), texts(), speculator=draft(), batch_size=4, **GREEDY))
    stats = [one.speculation for one in found]
    for one, own in zip(found, stats, strict=True):
        assert own.batch_size == 1 and own.steps == own.row_steps == own.counts.steps
        assert own.per_row[0].tokens == one.tokens and own.emitted == len(one.tokens) - 1 + own.first_tokens_in_steps
        assert own.mean_accepted_length >= 1 and own.total_seconds >= own.time_to_first_token > 0
        assert own.decode_seconds == own.per_row[0].seconds
    together = SpeculationStats.merge(stats)
    assert f"τ {together.mean_accepted_length:.2f}" in capsys.readouterr().err
    ids = torch.tensor(texts()[3:5])
    whole = target().generate(ids, **GREEDY, speculator=draft(), return_dict_in_generate=True).speculation
    rows = SpeculationStats.merge([whole.of_row(0), whole.of_row(1)])
    assert rows.counts == whole.counts
    for name in ("propose_seconds", "target_seconds", "verify_seconds"):
        assert getattr(rows, name) == pytest.approx(getattr(whole, name))


def test_progress_counts_the_prompts_that_are_not_left_out() -> None:
    class Fewer(list[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            while len(self) > 8:
                self.pop()
            return super().__iter__()

    completions = generate_many(target(), Fewer(texts()), **QUIET, **GREEDY)
    next(completions)
    assert str(working[-1]).startswith("Generating, 1 of 8 prompts, about ")
    assert [*map(str, working)] and len([*completions]) == 7 and working == []


def test_the_models_default_speculator_is_used_and_refused_calls_are_plain() -> None:
    model = build("llama", num_hidden_layers=2)
    hf_spec.set_speculator(model, "ngram")
    assert next(generate_many(model, texts(), **QUIET, **GREEDY)).speculation is not None
    assert next(generate_many(model, texts(), speculator=False, **QUIET, **GREEDY)).speculation is None
    beams = GREEDY | {"num_beams": 2}
    found = list(generate_many(model, texts(), ordered=True, **QUIET, **beams))
    assert [one.tokens for one in found] == alone(model, texts(), speculator=False, num_beams=2)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"max_new_tokens": None}, "needs max_new_tokens"),
        ({"max_length": 20}, "max_length is not for generate_many: it would count padding"),
        ({"num_return_sequences": 2}, "pass each prompt as often as you want an answer"),
        ({"generation_config": GenerationConfig(do_sample=True, num_return_sequences=3)}, "pass each prompt as often"),
        ({"generation_config": GenerationConfig(min_length=30)}, "use min_new_tokens"),
        ({"streamer": object()}, "stream one prompt with generate"),
        ({"guidance_scale": 1.5, "negative_prompt_ids": torch.ones(1, 2)}, "batches have other prompts"),
        ({"adapter_names": ["one"]}, "adapter_names has the length 1, and prompts has none: pass a list"),
        ({"task_ids": torch.zeros(1)}, "task_ids is not for generate_many: batches have other prompts"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "2"}, "batch_size is '2'; set a whole number"),
        ({"look_ahead": 0}, "look_ahead is 0"),
        ({"speculator": "ngram", "speculation_config": {"tree": "dynamic"}}, "must be a hf_spec.SpeculationConfig"),
    ],
)
def test_refused_before_anything_is_read(given: dict[str, Any], problem: str) -> None:
    def unread() -> Iterator[Any]:
        raise AssertionError
        yield

    with pytest.raises((ValueError, TypeError), match=problem):
        generate_many(target(), unread(), **QUIET | GREEDY | given)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "prompt 1 is empty"),
        ("text", "prompt 1 is text, which needs the model's tokenizer"),
        (1.5, "prompt 1 is 1.5; pass a text"),
        ([1, "a"], "prompt 1 is"),
        ([True, False], "prompt 1 is"),
        ([5, 99], "prompt 1 has token 99, but the model knows 99"),
        (torch.tensor([[-1, 5]]), "prompt 1 has token -1"),
        ({"pixel_values": torch.zeros(1)}, "prompt 1 has no input_ids"),
        ([{"role": "user"}], "prompt 1: the chat template does not take its messages .*content"),
        ({"input_ids": torch.ones(2, 3)}, "one prompt at a time"),
        (
            {"prompt": "Once"},
            r"prompt 1 has no input_ids, only \['prompt'\]: pass the text or the messages themselves",
        ),
        ({"input_ids": [5], "text": "Once"}, "prompt 1 has text 'Once', of which no tensor can be made"),
        ({"input_ids": [5], "texts": ["a"]}, r"prompt 1 has texts \['a'\], of which"),
        ({"input_ids": [5], "row": {}}, "prompt 1 has row {}, of which"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, problem: str) -> None:
    words = copy.copy(tokenizer()) if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else None
    if words is not None:
        words.chat_template = "{{ messages[0].content + eos_token }}"
    with pytest.raises((ValueError, TypeError), match=problem):
        list(generate_many(target(), [[5], prompt], tokenizer=words, **QUIET, **GREEDY))
    for prompts, problem in (
        ("text", "one text"),
        (tokenizer()(["a", "b"]), "one BatchEncoding: pass a list"),
        (5, "prompts is 5"),
        (None, "prompts is None"),
    ):
        with pytest.raises(TypeError, match=problem):
            generate_many(target(), prompts, tokenizer=tokenizer(), **QUIET, **GREEDY)


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_functions_that_make_no_list_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"the function {name} returned 3: it must return a list"):
        list(generate_many(target(), [[5]], **QUIET, **GREEDY | {name: lambda indices: 3}))


def test_what_fails_while_generating_names_the_prompts() -> None:
    grammar = [[5, 6], [7, 8]]  # one for a prompt
    options = QUIET | GREEDY | {"batch_size": 1, "prefix_allowed_tokens_fn": lambda index, ids: grammar[index]}
    completions = generate_many(target(), [[5], [6, 7], [98, 97]], **options)
    with pytest.raises(IndexError) as caught:
        list(completions)
    assert caught.value.__notes__ == ["while generating for the prompts [2]"]


# -- several processes ------------------------------------------------------------------------------------------------


def work(folder: str) -> None:
    """Be one of two processes, which share the prompts and get all texts."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    model, prompts = target(), texts()
    generated = 0
    whole = model.generate

    def counting(ids: Tensor, **options: Any) -> Any:
        nonlocal generated
        generated += len(ids)
        return whole(input_ids=ids, **options)

    model.generate = lambda input_ids, **options: counting(input_ids, **options)
    given = {"accelerator": state, "look_ahead": 3, "speculator": draft()}
    found = list(generate_many(model, iter(prompts), ordered=True, **given, **QUIET, **GREEDY))
    assert generated == 5
    del model.generate
    assert [one.tokens for one in found] == alone(model, prompts)
    assert [one.index for one in found] == list(range(10))
    assert all(one.speculation.steps for one in found)
    # Where one prompt is left, a process has none.
    left = list(generate_many(model, prompts[:1], engine="generate_batch", **given, **QUIET, **GREEDY))
    assert [one.tokens for one in left] == alone(model, prompts[:1])
    # What goes wrong in one process ends both.
    mine = prompts if state.process_index == 0 else prompts[::-1]
    with pytest.raises(ValueError, match="different prompts"):
        list(generate_many(model, mine, **given, **QUIET, **GREEDY))
    with pytest.raises(ValueError, match="different prompts"):
        list(generate_many(model, prompts[: 6 + state.process_index], **given, **QUIET, **GREEDY))
    broken = {"prefix_allowed_tokens_fn": lambda index, ids: [[5, 6]][index]}  # for the second prompt
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|process \d failed.*IndexError"):
        list(generate_many(model, [[5], [6]], **given, **QUIET, **GREEDY, **broken))
    leave()


def test_processes_share_the_prompts(tmp_path: Path) -> None:
    run_two(tmp_path, f"import test_many\ntest_many.work({str(tmp_path)!r})")
