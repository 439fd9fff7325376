"""Continuous batching with guesses: each request's text is plain ``generate``'s, whoever comes and goes beside it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from architectures import LONG_ROPE, build
from batches import EOS, batching, flawed, greedy, plain_texts, prompts_of, serve
from test_distribution_end_to_end import PROMPTS, VANILLA, VOCAB, Lying, distribution, guesser
from test_distribution_end_to_end import model as tiny
from test_verification import TOO_FAR, deviation
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api
from transformers.utils import logging
from twins import CHAIN, TREE, draft, target

import hf_spec
from hf_spec import (
    DraftContext,
    Drafter,
    HybridSpeculator,
    NgramSpeculator,
    Proposal,
    RequestOutput,
    SpeculationConfig,
    SpeculationStats,
    Speculator,
    VanillaSpeculator,
)
from hf_spec.batching.drafting import join_proposals, split_proposal
from hf_spec.batching.engine import SpeculativeManager
from hf_spec.batching.sizes import longest_text
from hf_spec.drafts.ngram.history_file import SavedHistory
from hf_spec.drafts.ngram.hybrid import with_chains
from hf_spec.many.engine import why_not_engine
from hf_spec.sampling import is_seeded


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Copy the target, so that its generation config is our own."""
    logging.warning_once.cache_clear()
    model = copy.deepcopy(target())
    yield model
    hf_spec.set_speculator(model, None)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the warnings that are given."""
    found: list[str] = []
    for module in (hf_spec.batching.hooks, hf_spec.batching.refusals):
        monkeypatch.setattr(module.logger, "warning", lambda text, *args: found.append(text))
    return found


# --- The same text ---------------------------------------------------------------------------------------------------

PROMPT_LIST = prompts_of(14, 99)


def speculators(texts: list[list[int]]) -> dict[str, Any]:
    return {"n-gram": flawed(texts, 99), "vanilla": draft()}


@pytest.mark.parametrize("at_most", [1, 4, 16])
@pytest.mark.parametrize("kind", ["n-gram", "vanilla"])
def test_greedy_text_is_plain_generates(kind: str, at_most: int) -> None:
    texts = plain_texts(target(), PROMPT_LIST, greedy())
    assert any(text[-1] == EOS for text in texts)
    start = time.perf_counter()
    found, manager = serve(
        target(), PROMPT_LIST, at_most, seed=at_most, speculator=speculators(texts)[kind], speculation_config=CHAIN
    )
    seconds = time.perf_counter() - start
    assert [output.generated_tokens for output in found] == texts
    for output in found:  # a request begins when it is made, not when its turn comes
        waited, lived = (moment - output.created_time for moment in output.lifespan)
        assert waited < output.speculation.time_to_first_token <= lived <= output.speculation.total_seconds
    stats = SpeculationStats.merge([output.speculation for output in found])
    assert stats.propose_seconds + stats.target_seconds + stats.verify_seconds < seconds, "shared by the requests"
    assert 0 < stats.accepted < stats.proposed
    assert stats.emitted + len(texts) == sum(map(len, texts))
    assert vars(manager.speculation.counts) == vars(stats.counts)
    assert manager.speculation.draft_slots == 0


@pytest.mark.parametrize("options", [{"return_logprobs": True}, {"scheduler_type": "prefill_first"}], ids=str)
def test_options_of_the_engine(options: dict[str, Any]) -> None:
    def run(**speculation: Any) -> dict[str, Any]:
        config = batching(4, **options)
        outputs = target().generate_batch(PROMPT_LIST, greedy(), config, warmup=False, **speculation)
        return {name: (output.generated_tokens, output.logprobs) for name, output in outputs.items()}

    expected = run(speculator=False)
    found = run(speculator=speculators([tokens for tokens, _ in expected.values()])["n-gram"])
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    for name, (_, log_probs) in expected.items():
        torch.testing.assert_close(torch.tensor(found[name][1]), torch.tensor(log_probs), atol=1e-4, rtol=1e-4)


def test_a_full_cache_puts_requests_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put aside begins anew with the text it had; guesses never need the last block."""
    prompts = [[*range(10, 10 + length)] for length in (9, 13, 11, 7)]
    texts = plain_texts(target(), prompts, greedy(eos_token_id=None))
    aside = []
    again = continuous_api.RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        continuous_api.RequestState,
        "create_equivalent_initial_request",
        lambda state: aside.append(state.request_id) or again(state),
    )
    for speculator in speculators(texts).values():
        engine = batching(4, page_size=4, num_blocks=16, max_batch_tokens=64)
        found = target().generate_batch(
            prompts, greedy(eos_token_id=-1), engine, warmup=False, speculator=speculator, speculation_config=CHAIN
        )
        assert [output.generated_tokens for output in found.values()] == texts
        assert aside, "nobody was put aside"
        aside.clear()


def test_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are shared hold accepted tokens alone."""
    prompts = [[*range(10, 32), *end] for end in ([40], [40, 41], [50], [40, 41, 42])] * 2
    texts = plain_texts(target(), prompts, greedy())
    prompts += [prompt + text[:15] for prompt, text in zip(prompts, texts, strict=True)]  # what was written is shared
    texts = plain_texts(target(), prompts, greedy())
    shared = []
    search = continuous_api.PagedAttentionCache.search_prefix_match

    def searched(cache: Any, name: str, ids: list[int]) -> int:
        shared.append(search(cache, name, ids))
        return shared[-1]

    monkeypatch.setattr(continuous_api.PagedAttentionCache, "search_prefix_match", searched)
    found, _ = serve(target(), prompts, 2, page_size=4, speculator=speculators(texts)["n-gram"])
    assert [output.generated_tokens for output in found] == texts
    assert max(shared) > 22, "nothing but prompts was shared"


def test_several_answers_to_a_prompt() -> None:
    prompts = PROMPT_LIST[:3]
    texts = plain_texts(target(), prompts, greedy())
    for speculator in speculators(texts).values():
        outputs = target().generate_batch(
            prompts,
            greedy(num_return_sequences=3, do_sample=True, top_k=1),
            batching(4),
            warmup=False,
            speculator=speculator,
        )
        assert [output.generated_tokens for output in outputs.values()] == [text for text in texts for _ in range(3)]
        assert all(output.speculation.emitted for output in outputs.values())


def test_each_request_has_its_own_end() -> None:
    """Lengths and end-of-sequence tokens of single requests are heeded inside a block."""
    prompts = PROMPT_LIST[:6]
    texts = plain_texts(target(), prompts, greedy(eos_token_id=None))
    with target().continuous_batching_context_manager(
        greedy(), continuous_batching_config=batching(4), warmup=False, speculator=flawed(texts, 99)
    ) as manager:
        for i, prompt in enumerate(prompts):
            manager.add_request(prompt, str(i), max_new_tokens=i + 1, eos_token_id=texts[i][3])
        found = {(output := manager.get_result(timeout=60)).request_id: output.generated_tokens for _ in prompts}
    for i, text in enumerate(texts):
        end = min(text.index(text[3]) + 1, i + 1)
        assert found[str(i)] == text[:end]


@pytest.mark.parametrize("bad", [[1, 99999], [-1], [], "abc", [1.5]], ids=str)
def test_a_bad_prompt_of_one_client_ends_no_text_of_another(bad: Any) -> None:
    (text,) = plain_texts(target(), PROMPT_LIST[:1], greedy(eos_token_id=None))
    with target().continuous_batching_context_manager(
        greedy(eos_token_id=-1), continuous_batching_config=batching(4), warmup=False, speculator=flawed([text], 99)
    ) as manager:
        manager.add_request(PROMPT_LIST[0], "one")
        with pytest.raises((TypeError, ValueError), match="the prompt"):
            manager.add_request(bad, "other")
        manager.add_request(torch.tensor(PROMPT_LIST[0]), "again")
        found = {(output := manager.get_result(timeout=60)).request_id: output.generated_tokens for _ in range(2)}
    assert found == {"one": text, "again": text}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_a_request_without_space_ends_no_text_of_another(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt without space fails alone; a text ends where the cache does, unless it needs no more than windows."""
    model, short, long = build(name), [*range(10, 20)], [*range(10, 90)]
    (text,) = plain_texts(model, [short], greedy(max_new_tokens=80, eos_token_id=None))
    asked = {"long": (long, 1), "short": (short, 80)} | ({} if name == "mistral" else {"without end": (short, None)})
    engine = batching(2, page_size=4, num_blocks=12)
    given = {"continuous_batching_config": engine, "warmup": False, "speculator": "ngram"}
    with model.continuous_batching_context_manager(greedy(max_new_tokens=None, eos_token_id=-1), **given) as manager:
        for request, (prompt, new) in asked.items():
            manager.add_request(prompt, request, max_new_tokens=new)
        found = {(output := manager.get_result(timeout=60)).request_id: output for _ in asked}
        room = longest_text(manager.batch_processor.cache)
    failed = found.pop("long").error
    assert (
        failed is None
        if name == "mistral"
        else f"80 tokens, and the paged cache, with one new token, has room for {room + 1};" in failed
    )
    assert all(output.generated_tokens == text[: room + 1 - len(short)] for output in found.values())
    told = "new tokens of request short, and its text ends there. For more room, set num_blocks of a Continuous"
    assert (told in caplog.text) == (name != "mistral")
    if name == "llama":  # generate_batch waits for every answer to a prompt
        outputs = model.generate_batch([short, long], greedy(num_return_sequences=2, do_sample=True, top_k=1), **given)
        assert [output.error is None for output in outputs.values()] == [True, True, False, False]


def test_a_stream_is_told_every_step() -> None:
    (text,) = plain_texts(target(), PROMPT_LIST[:1], greedy(eos_token_id=None))
    with target().continuous_batching_context_manager(
        greedy(eos_token_id=-1), continuous_batching_config=batching(4), warmup=False, speculator=flawed([text], 99)
    ) as manager:
        manager.add_request(PROMPT_LIST[0], "one", streaming=True)
        told = list(manager.request_id_iter("one"))
    assert all(text[: len(output.generated_tokens)] == output.generated_tokens for output in told)
    lengths = [len(output.generated_tokens) for output in told]
    assert lengths == sorted(set(lengths)) and len(lengths) < lengths[-1] == 20


# --- The same distribution -------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 4, "top_p": 0.95, "eos_token_id": -1, "max_new_tokens": 5}


def drawn(speculator: Any, config: SpeculationConfig, texts: int = 1000, **options: Any) -> Tensor:
    """Draw ``texts`` after each of two prompts in one engine and number them, as ``distribution`` does: (texts,)."""
    torch.manual_seed(0)
    prompts = [PROMPTS[0].tolist(), PROMPTS[1, 2:].tolist()]
    engine = ContinuousBatchingConfig(
        num_blocks=80, page_size=16, max_batch_tokens=256, max_requests_per_batch=64, seed=0
    )
    outputs = tiny().generate_batch(
        prompts * texts,
        GenerationConfig(**SAMPLED | options),
        engine,
        warmup=False,
        speculator=speculator,
        speculation_config=config,
    )
    assert sum(output.speculation.accepted for output in outputs.values()) > texts / 2
    number = torch.arange(2).repeat(texts)
    for token in torch.tensor([output.generated_tokens[:4] for output in outputs.values()]).unbind(1):
        number = VOCAB * number + token
    return number


NGRAM = NgramSpeculator(max_ngram=2, corpus=[[4, 2, 4, 1, 3, 4, 2, 2, 0, 1, 1, 3]])


def test_drawn_guesses_change_no_distribution() -> None:
    assert deviation(drawn(guesser(), VANILLA["chain, block"], 400), distribution()) < TOO_FAR


def test_a_draft_that_lies_about_its_distribution_is_found() -> None:
    config = SpeculationConfig(num_speculative_tokens=3)
    assert deviation(drawn(Lying(), config, 400), distribution()) > 2 * TOO_FAR


@pytest.mark.slow
@pytest.mark.parametrize("case", VANILLA)
def test_no_rule_changes_the_distribution(case: str) -> None:
    assert deviation(drawn(guesser(), VANILLA[case]), distribution()) < TOO_FAR


@pytest.mark.slow
def test_looked_up_guesses_change_no_distribution() -> None:
    assert deviation(drawn(NGRAM, SpeculationConfig(num_speculative_tokens=3)), distribution()) < TOO_FAR


def test_each_request_has_its_own_settings() -> None:
    """A request that only its best token may follow is greedy beside one that draws."""
    engine = batching(4, per_request_processors=True, seed=0)
    options = greedy(do_sample=True, temperature=3.0, top_k=90)
    texts = plain_texts(target(), PROMPT_LIST[:4], greedy())
    for speculator in speculators(texts).values():
        with target().continuous_batching_context_manager(
            options, continuous_batching_config=engine, warmup=False, speculator=speculator, num_speculative_tokens=4
        ) as manager:
            for i, prompt in enumerate(PROMPT_LIST[:4]):
                manager.add_request(prompt, f"best {i}", top_k=1)
                manager.add_request(prompt, f"drawn {i}")
            found = {(output := manager.get_result(timeout=60)).request_id: output for _ in range(8)}
        assert [found[f"best {i}"].generated_tokens for i in range(4)] == texts
        assert all(found[f"drawn {i}"].generated_tokens != texts[i] for i in range(4))
        assert sum(found[f"best {i}"].speculation.accepted for i in range(4))


# --- Coming and going ------------------------------------------------------------------------------------------------


def test_cancelled_requests_leave_nothing_behind() -> None:
    texts = plain_texts(target(), PROMPT_LIST[:3], greedy())
    for speculator in speculators(texts).values():
        with target().continuous_batching_context_manager(
            greedy(eos_token_id=-1), continuous_batching_config=batching(4), warmup=False, speculator=speculator
        ) as manager:
            for name in "abcdefgh":
                manager.add_request(
                    PROMPT_LIST[1], name, max_new_tokens=10_000 if name in "abc" else 5, streaming=True
                )
            heard: dict[str, int] = {}
            while len(heard) < 4:  # of the three long ones and one short one that waits for the fourth place
                heard[manager.get_result(timeout=60).request_id] = 1
            cache = manager.batch_processor.cache
            free = cache.compute_free_capacity()
            assert 0 < manager.speculation.draft_slots <= 4
            for name in "abch":
                manager.cancel_request(name)
            left = set("defg")
            while left:
                if (output := manager.get_result(timeout=60)).is_finished():
                    left.discard(output.request_id)
            while manager.batch_processor.has_pending_requests() or manager.speculation.draft_slots:
                time.sleep(0.01)
            cache.evict_cached_blocks()
            assert cache.compute_free_capacity() == 1.0 > free
            manager.add_request(PROMPT_LIST[0], "later", eos_token_id=EOS)
            while (output := manager.get_result(timeout=60)).request_id != "later":
                pass
            assert output.generated_tokens == texts[0]


def test_a_manager_that_is_kept(model: PreTrainedModel) -> None:
    """It is used again by calls that guess the same way, and by no other."""
    texts = plain_texts(model, PROMPT_LIST[:4], greedy())

    def run(**speculation: Any) -> Any:
        outputs = model.generate_batch(
            PROMPT_LIST[:4], greedy(), batching(4), warmup=False, persistent_manager=True, **speculation
        )
        assert [output.generated_tokens for output in outputs.values()] == texts
        return model._cached_continuous_batching_manager

    ngram = NgramSpeculator()
    first = run(speculator=ngram)
    assert run(speculator=ngram) is first and isinstance(first, SpeculativeManager)
    other = run(speculator=ngram, num_speculative_tokens=2)
    assert other is not first and isinstance(other, SpeculativeManager)
    assert not isinstance(run(), SpeculativeManager)
    small = build("llama")
    for speculator in ("ngram", small, HybridSpeculator(small)):  # around which every call puts another object
        kept = run(speculator=speculator)
        assert run(speculator=speculator) is kept and isinstance(kept, SpeculativeManager)
    assert run(speculator=build("llama", seed=1)) is not run(speculator=small)
    history = NgramSpeculator(history_size=500)
    short, long, again = (run(speculator=HybridSpeculator(small, history, draft_tokens=count)) for count in (1, 8, 8))
    assert short is not long and long is again
    kept = model._cached_continuous_batching_manager
    sampled = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=5.0, eos_token_id=EOS, pad_token_id=0)
    options = {"warmup": False, "persistent_manager": True, "speculator": small}
    outputs = model.generate_batch(PROMPT_LIST[:4], sampled, batching(4), **options)
    assert model._cached_continuous_batching_manager is not kept, "it would decode greedily"
    assert any(output.generated_tokens != text[:8] for output, text in zip(outputs.values(), texts, strict=True))
    model.destroy_cached_continuous_batching_manager()


class Noting(Speculator):
    """A draft model that keeps the texts it has helped to write."""

    def __init__(self, model: Any) -> None:
        self.model, self.texts = model, list[list[int]]()

    def drafter(self, request: DraftContext) -> Drafter:
        return VanillaSpeculator(self.model).drafter(request)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts += map(list, texts)


def test_a_kept_manager_takes_no_own_speculator_for_another(model: PreTrainedModel) -> None:
    """Two of one class with the same weights may still hold other things."""
    small = draft()
    speculators = [Noting(small), Noting(small)]
    for speculator in speculators:
        options: dict[str, Any] = {"warmup": False, "persistent_manager": True, "speculator": speculator}
        model.generate_batch(PROMPT_LIST[:2], greedy(), batching(4), **options)
    assert [len(one.texts) for one in speculators] == [2, 2]
    model.destroy_cached_continuous_batching_manager()


def kept_run(model: PreTrainedModel, options: GenerationConfig, **engine: Any) -> tuple[list[Any], Any]:
    """Answer two prompts by an engine that is kept; return the answers and the engine."""
    given: dict[str, Any] = {"warmup": False, "persistent_manager": True, "speculator": "ngram"}
    outputs = model.generate_batch(KEPT_PROMPTS, options, batching(4, page_size=4, **engine), **given)
    return [*outputs.values()], model._cached_continuous_batching_manager


KEPT_PROMPTS = [[*range(10, 40)], [*range(10, 40), 41]]


def test_a_kept_manager_follows_the_adapters(model: PreTrainedModel) -> None:
    """Blocks of keys that other adapters or weights gave are not shared with later requests."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, lora).base_model
    plain, managers = [], []
    for switch in (adapted.enable_adapter_layers, adapted.disable_adapter_layers):
        switch()
        plain.append(plain_texts(model, KEPT_PROMPTS, greedy()))
        outputs, manager = kept_run(model, greedy())
        assert [output.generated_tokens for output in outputs] == plain[-1]
        managers.append(manager)
    assert plain[0] != plain[1] and managers[0] is not managers[1]
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_follows_the_weights(model: PreTrainedModel) -> None:
    plain = []
    for _ in range(2):
        plain.append(plain_texts(model, KEPT_PROMPTS, greedy()))
        outputs, _ = kept_run(model, greedy())
        assert [output.generated_tokens for output in outputs] == plain[-1]
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.data.mul_(-1)
    assert plain[0] != plain[1]
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_is_asked_for_no_other_options(model: PreTrainedModel) -> None:
    outputs, first = kept_run(model, greedy())
    assert not any(output.logprobs for output in outputs)
    assert kept_run(model, greedy())[1] is first
    outputs, other = kept_run(model, greedy(), return_logprobs=True)
    assert other is not first and all(output.logprobs for output in outputs)
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize(("waits", "speculator"), [(True, "ngram"), (False, "ngram"), (False, False)])
def test_what_a_call_has_left_is_no_answer_to_the_next(waits: bool, speculator: Any, model: PreTrainedModel) -> None:
    """A call that waits leaves a result that nobody read; one that is interrupted leaves a text that is written."""
    given: dict[str, Any] = {"continuous_batching_config": batching(4), "persistent_manager": True, "warmup": False}
    with model.continuous_batching_context_manager(greedy(), block=waits, speculator="ngram", **given) as manager:
        manager.add_request(PROMPT_LIST[0], max_new_tokens=3 if waits else 900, eos_token_id=-1)
    assert manager.is_running() is not waits
    outputs = model.generate_batch(PROMPT_LIST[:2], greedy(), **given, speculator=speculator)
    texts = plain_texts(model, PROMPT_LIST[:2], greedy())
    assert [output.generated_tokens for output in outputs.values()] == texts
    assert not manager.is_running()
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_draws_from_the_seed_of_each_call(model: PreTrainedModel) -> None:
    options = greedy(do_sample=True, temperature=5.0, top_k=90, eos_token_id=-1)
    found = []
    for seed in (3, 3, 4):
        outputs, _ = kept_run(model, options, seed=seed)
        found.append([output.generated_tokens for output in outputs])
    assert found[0] == found[1] != found[2]
    model.destroy_cached_continuous_batching_manager()
    torch.seed()


@pytest.mark.parametrize("speculator", [None, False, "refused"])
def test_plain_requests_leave_no_seed(speculator: Any, model: PreTrainedModel) -> None:
    """transformers' engine seeds torch, and later calls would take that for the user's seed."""
    options = greedy(do_sample=True)
    if speculator == "refused":
        hf_spec.set_speculator(model, "ngram")
        options, speculator = greedy(do_sample=True, repetition_penalty=1.5), None
    torch.seed()
    outputs = model.generate_batch(PROMPT_LIST[:2], options, batching(2), warmup=False, speculator=speculator)
    assert not any(isinstance(output, RequestOutput) for output in outputs.values())
    assert not is_seeded(model.device)


@pytest.mark.parametrize("seed", [None, "torch's", "the engine's"])
def test_draft_lengths_follow_no_clock_where_a_seed_was_set(seed: str | None, model: PreTrainedModel) -> None:
    """transformers' engine seeds torch in any case. That is no seed of the user's, for later calls either."""
    engine = batching(4, seed=3 if seed == "the engine's" else None)
    sampled = GenerationConfig(max_new_tokens=8, do_sample=True, eos_token_id=EOS, pad_token_id=0)
    options: dict[str, Any] = {"warmup": False, "persistent_manager": True, "speculator": build("llama")}
    managers, texts = [], []
    torch.seed()
    for _ in range(2):
        if seed == "torch's":
            torch.manual_seed(3)
        outputs = model.generate_batch(PROMPT_LIST[:2], sampled, engine, **options)
        texts.append([output.generated_tokens for output in outputs.values()])
        managers.append(model._cached_continuous_batching_manager)
        assert ("because a seed was set" in str(managers[-1].speculation.policy)) is (seed is not None)
        assert is_seeded(model.device) is (seed is not None)
    if seed is not None:  # which alone decides the text, whatever was written before
        assert managers[0] is not managers[1] and texts[0] == texts[1]
    else:
        assert managers[0] is managers[1]
        torch.manual_seed(4)
        model.generate_batch(PROMPT_LIST[:2], sampled, engine, **options)
        assert model._cached_continuous_batching_manager is not managers[0]
    model.destroy_cached_continuous_batching_manager()
    torch.seed()


def test_other_calls_wait_until_an_engine_is_done(model: PreTrainedModel) -> None:
    """Its forwards change a config that every thread sees: plain generate writes other text meanwhile, too."""
    model = copy.deepcopy(model)  # that nobody has looked at
    ids = torch.tensor([PROMPT_LIST[0]])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **call)
    config = GenerationConfig(max_new_tokens=400, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching(4)) as manager:
        assert torch.equal(model.generate(ids, **call, speculator="ngram"), expected), "it has nothing to do"
        manager.add_request(PROMPT_LIST[1], "other", max_new_tokens=400, streaming=True)
        assert manager.get_result(timeout=60)
        with pytest.raises(ValueError, match="an engine of continuous batching is decoding with this Llama"):
            model.generate(ids, **call, speculator="ngram")
        with manager.pause():
            assert manager.batch_processor.has_pending_requests()
            assert torch.equal(model.generate(ids, **call, speculator="ngram"), expected)
        manager.cancel_request("other")
    assert torch.equal(model.generate(ids, **call, speculator="ngram"), expected)


# --- The call --------------------------------------------------------------------------------------------------------


def test_a_default_speculator_serves_requests(model: PreTrainedModel, warned: list[str]) -> None:
    texts = plain_texts(model, PROMPT_LIST[:2], greedy())
    hf_spec.set_speculator(model, "ngram")

    def run(**options: Any) -> list[Any]:
        outputs = model.generate_batch(PROMPT_LIST[:2], greedy(**options.pop("more", {})), batching(2), **options)
        assert [output.generated_tokens for output in outputs.values()] == texts
        return [*outputs.values()]

    assert all(isinstance(output, RequestOutput) and output.speculation.emitted for output in run())
    assert not any(isinstance(output, RequestOutput) for output in run(speculator=False))
    assert warned == []
    assert not any(isinstance(output, RequestOutput) for output in run(more={"repetition_penalty": 1.0 + 1e-9}))
    (warning,) = warned
    assert "RepetitionPenaltyLogitsProcessor" in warning and "plain" in warning


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "processor": ("RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.5}, {}),
    "stop strings": ("stop_strings", {"stop_strings": ["a"]}, {}),
    "time": ("max_time", {"max_time": 3.0}, {}),
    "beams": ("num_beams=2", {"num_beams": 2}, {}),
    "layers": ("dola_layers is another way", {"dola_layers": "low"}, {}),
    "contrast": ("penalty_alpha is another way", {"penalty_alpha": 0.6}, {}),
    "lookup": ("prompt_lookup_num_tokens is another way", {"prompt_lookup_num_tokens": 3}, {}),
    "no cache": ("use_cache=False", {"use_cache": False}, {}),
    "length": ("max_length=40.*set max_new_tokens", {"max_length": 40, "max_new_tokens": None}, {}),
    "flash": ("flash_attention_2 takes no mask", {}, {"speculation_config": TREE}),
    "draft": ("vocabulary", {}, {"speculator": build("llama", vocab_size=40, num_hidden_layers=1)}),
}


@pytest.mark.filterwarnings("error:Passing")  # of inputs_embeds, which nobody gave
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, model: PreTrainedModel) -> None:
    cause, options, speculation = REFUSED[case]
    if case == "flash":
        model.config._attn_implementation_internal = "flash_attention_2"
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=cause):
        model.generate_batch(PROMPT_LIST, greedy(**options), batching(4), **{"speculator": "ngram"} | speculation)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["opt", "bert"])
def test_a_model_that_asks_the_paged_cache_for_a_length(name: str) -> None:
    """Every request of transformers' own engine fails, and ``generate_many`` leaves such models to ``generate``."""
    model = build(name)
    plain = model.generate_batch(PROMPT_LIST[:2], greedy(max_new_tokens=2), batching(2))
    assert all("get_seq_length" in str(output.error) for output in plain.values())
    cause = f"{type(model).__name__} asks its cache for the length"
    with pytest.raises(ValueError, match=rf"{cause}.*padded on the left, to generate\("):
        model.generate_batch(PROMPT_LIST[:2], greedy(), batching(2), speculator="ngram")
    assert cause in str(why_not_engine(model, {"max_new_tokens": 2}))


def test_keywords_that_transformers_would_drop_are_refused(model: PreTrainedModel) -> None:
    given: dict[str, Any] = {"generation_config": greedy(), "continuous_batching_config": batching(1), "warmup": False}
    with pytest.raises(TypeError, match=r"does not know do_sample, temprature, .*set .* in generation_config, or use"):
        model.generate_batch(PROMPT_LIST[:1], **given, speculator="ngram", do_sample=True, temprature=0.5)
    hf_spec.set_speculator(model, "ngram")  # of which a call that is written for transformers knows nothing
    (output,) = model.generate_batch(PROMPT_LIST[:1], **given, temprature=0.5).values()
    assert isinstance(output, RequestOutput)


def test_a_length_that_the_call_sets_is_enough(model: PreTrainedModel) -> None:
    options = greedy(max_length=40, max_new_tokens=None)
    (output,) = model.generate_batch(
        PROMPT_LIST[:1], options, batching(1), warmup=False, speculator="ngram", max_new_tokens=5
    ).values()
    assert [output.generated_tokens] == plain_texts(model, PROMPT_LIST[:1], greedy(max_new_tokens=5))


def test_a_generation_config_sets_the_draft_length(model: PreTrainedModel) -> None:
    """As in ``generate``."""

    def length(options: GenerationConfig, **given: Any) -> Any:
        manager = model.init_continuous_batching(options, batching(1), speculator="ngram", **given)
        return manager.speculation.config.num_speculative_tokens

    assert length(greedy(num_speculative_tokens=2)) == 2
    assert length(greedy(num_speculative_tokens=2), num_speculative_tokens=3) == 3
    assert length(greedy(num_speculative_tokens=2), speculation_config=CHAIN) == CHAIN.num_speculative_tokens
    model.generation_config.num_speculative_tokens = 4
    assert length(greedy()) == 4


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_all_requests_would_share(kind: str, warned: list[str]) -> None:
    """They are decided by the longest text of a forward."""
    rope = LONG_ROPE | {"rope_type": kind, "original_max_position_embeddings": 40}
    logging.warning_once.cache_clear()
    model = build("llama", rope_parameters=rope, max_position_embeddings=40)
    prompts = [PROMPT_LIST[0], [*range(10, 23)]]
    options = {"warmup": False, "speculator": "ngram"}
    outputs = model.generate_batch(prompts, greedy(), batching(2), **options)
    assert [output.generated_tokens for output in outputs.values()] == plain_texts(model, prompts, greedy())
    with pytest.raises(ValueError, match="the longest text of a batch decides"):
        model.generate_batch([*prompts, [*range(10, 31)]], greedy(), batching(2), **options)
    with pytest.raises(ValueError, match="the longest text of a batch decides"):
        model.init_continuous_batching(greedy(), batching(2), speculator="ngram")
    hf_spec.set_speculator(model, "ngram")
    assert not isinstance(model.init_continuous_batching(greedy(), batching(2)), SpeculativeManager)
    assert len(warned) == 1


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "t5", "deepseek_v3", "gemma4_text", "nemotron"])
def test_models_that_the_engine_does_not_take(name: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 99}
    model = T5ForConditionalGeneration(T5Config(**sizes)) if name == "t5" else build(name)
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*generate\\("):
        model.generate_batch([[1, 2]], greedy(), batching(1), speculator="ngram")


BAD_PROMPTS: dict[str, tuple[type[Exception], str, Any]] = {
    "unknown token": (ValueError, "prompt 1 has token 99999, but the model knows 99", [[1, 5], [1, 99999]]),
    "negative": (ValueError, "prompt 0 has token -1", [[-1]]),
    "empty": (ValueError, "prompt 0 is empty", [[]]),
    "text": (TypeError, "prompt 0 is 'abc'.*tokenizer", ["abc"]),
    "flat": (TypeError, "prompt 0 is 1: it must be a list of token ids", [1, 5]),
    "row": (TypeError, r"prompt 0 is tensor.*tolist\(\)", [torch.tensor([1, 5])]),
    "tensor": (TypeError, r"a Tensor.*tolist\(\)", torch.tensor([[1, 5]])),
    "iterator": (TypeError, r"list_iterator.*list\(prompts\)", iter([[1, 5]])),
    "one text": (TypeError, "prompts is a str", "abc"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_named_before_anything_runs(case: str, model: PreTrainedModel) -> None:
    error, cause, prompts = BAD_PROMPTS[case]
    with pytest.raises(error, match=cause):
        model.generate_batch(prompts, greedy(), batching(1), speculator="ngram")


def test_prompts_are_checked_where_a_speculator_drafts(model: PreTrainedModel) -> None:
    hf_spec.set_speculator(model, "ngram")
    with pytest.raises(ValueError, match="prompt 0 has token 99999"):
        model.generate_batch(inputs=[[99999]], generation_config=greedy(), continuous_batching_config=batching(1))
    (found,) = model.generate_batch([[99999]], greedy(), batching(1), speculator=False).values()
    assert found.error


def test_settings_need_a_speculator(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="need a speculator"):
        model.generate_batch([[1, 2]], greedy(), batching(1), num_speculative_tokens=3)
    with pytest.raises(TypeError, match="SpeculationConfig"):
        model.generate_batch([[1, 2]], greedy(), batching(1), speculator="ngram", speculation_config={"tree": None})


def test_what_is_switched_off_is_named(model: PreTrainedModel, warned: list[str]) -> None:
    asked = {"use_async_batching": True, "max_blocks_per_request": 4, "cpu_offload_space": 1.0, "use_cuda_graph": True}
    manager = model.init_continuous_batching(greedy(), batching(2, **asked), speculator="ngram")
    config = manager.continuous_batching_config
    assert (config.use_async_batching, config.max_blocks_per_request, config.cpu_offload_space) == (False, 0, 0.0)
    assert config.cuda_graph_booleans == (False, False)
    for name in {*asked}:
        assert any(name in warning for warning in warned)
    assert len(warned) == len(asked)


def test_uninstall_leaves_transformers_as_it_was(model: PreTrainedModel) -> None:
    names = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
    mixin = continuous_api.ContinuousMixin
    ours = {name: getattr(mixin, name) for name in names}
    try:
        hf_spec.uninstall()
        for name in names:
            assert getattr(mixin, name) is ours[name].__wrapped__
            assert "speculator" not in getattr(mixin, name).__wrapped__.__code__.co_varnames
        outputs = model.generate_batch(PROMPT_LIST[:2], greedy(), batching(2))
        assert not any(isinstance(output, RequestOutput) for output in outputs.values())
    finally:
        hf_spec.install()


# --- A memory that requests share ------------------------------------------------------------------------------------


def test_requests_share_a_memory() -> None:
    texts = plain_texts(target(), PROMPT_LIST, greedy())
    speculator, lengths = NgramSpeculator(history_size=2_000), []
    for at_most in (4, 16):
        found, _ = serve(target(), PROMPT_LIST, at_most, speculator=speculator, speculation_config=CHAIN)
        assert [output.generated_tokens for output in found] == texts
        lengths.append(SpeculationStats.merge([output.speculation for output in found]).mean_accepted_length)
    assert lengths[1] > 1.5 * lengths[0]
    assert speculator.history is not None
    saved = list(SavedHistory(2_000, speculator.history.tokens()).texts())
    whole = [prompt + text for prompt, text in zip(PROMPT_LIST, texts, strict=True)]
    assert sorted(saved) == sorted(whole * 2)


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_draft_and_memory_together(config: SpeculationConfig) -> None:
    texts = plain_texts(target(), PROMPT_LIST, greedy())
    speculator, lengths = HybridSpeculator(draft()), []
    for _ in range(2):
        found, _ = serve(target(), PROMPT_LIST, 4, speculator=speculator, speculation_config=config)
        assert [output.generated_tokens for output in found] == texts
        lengths.append(SpeculationStats.merge([output.speculation for output in found]).mean_accepted_length)
    assert lengths[1] > lengths[0]


def test_chosen_guesses_stay_chosen_among_requests() -> None:
    root, drawn = torch.tensor([8, 9]), torch.tensor([[1, 2], [3, 4]])
    q = torch.rand(2, 2, 10).softmax(-1)
    proposal = with_chains(Proposal.chain(root, drawn, q=q), [(5, 6, 7), None])
    again = join_proposals(split_proposal(proposal), root.device)
    assert (
        proposal.deterministic is not None
        and again.deterministic is not None
        and proposal.q is not None
        and again.q is not None
    )
    assert torch.equal(again.deterministic & again.present, proposal.deterministic & proposal.present)
    assert torch.equal(again.q, proposal.q)
    cut = join_proposals([one.truncate(2) for one in split_proposal(proposal)], root.device)
    assert cut.deterministic is not None and cut.deterministic.tolist() == [[True, True], [False, False]]
