"""Benchmarks: what they read, what they measure, and that they would notice a wrong text."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from twins import by_code

import hf_spec
from hf_spec import Drafter, Proposal, SpeculationConfig, Speculator, VanillaSpeculator, demo
from hf_spec.bench import (
    BenchReport,
    BenchSettings,
    Contender,
    Figures,
    Prompt,
    import_pyplot,
    rank_accuracies,
    read_prompts,
    run_bench,
)
from hf_spec.bench.rounds import RoundLog, Run
from hf_spec.bench.runner import ForwardClock, _methods
from hf_spec.cli.bench import contender, numbered
from hf_spec.cli.loading import refuse_without_template, with_own_history
from hf_spec.sampling import is_seeded

STORY, CAT = Prompt(("Once upon a time",), chat=False), Prompt(("Tell me about a cat, a cat, a cat",), "chat")
CHAIN = SpeculationConfig(num_speculative_tokens=3)


def tiny_llama(spread: float = 0.5) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        initializer_range=spread,
        rms_norm_eps=1e-3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.path())


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def twin():
    """A draft that is always right."""
    return tiny_llama()


# -- prompts ----------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_every_form_of_a_prompt_is_read(tmp_path):
    system, user, answer = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "a"},
        "",
        {"text": "b", "category": "raw"},
        {"messages": [system, user, answer]},
        {"question_id": 81, "category": "writing", "turns": ["c", "d"]},
    )
    assert read_prompts(path) == [
        Prompt(("a",), chat=False),
        Prompt(("b",), "raw", chat=False),
        Prompt(("user",), history=(system,)),
        Prompt(("c", "d"), "writing"),
    ]


def test_turns_of_speed_bench_are_read_from_both_of_its_kinds_of_files(tmp_path):
    """The columns are those of nvidia/SPEED-Bench; its script writes JSON lines with messages in place of turns."""
    rows = [
        {"question_id": "0a", "category": "coding", "sub_category": None, "turns": ["c", "d"], "multiturn": True},
        {"question_id": "0b", "category": "math", "sub_category": "x", "turns": ["e"], "multiturn": False},
    ]
    expected = [Prompt(("c", "d"), "coding"), Prompt(("e",), "math")]
    pytest.importorskip("pyarrow.parquet").write_table(
        pytest.importorskip("pyarrow").Table.from_pylist(rows), tmp_path / "test.parquet"
    )
    assert read_prompts(tmp_path / "test.parquet") == expected
    lines = [
        {name: one for name, one in row.items() if name != "turns"}
        | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]}
        for row in rows
    ]
    assert read_prompts(write_lines(tmp_path / "qualitative.jsonl", *lines)) == expected
    system = {"role": "system", "content": "s"}
    lines[0]["messages"].insert(0, system)
    assert read_prompts(write_lines(tmp_path / "system.jsonl", lines[0])) == [
        Prompt(("c", "d"), "coding", history=(system,))
    ]


def test_a_placeholder_of_speed_bench_and_a_broken_file_are_refused(tmp_path):
    """Texts of others are fetched by SPEED-Bench's script; a placeholder would be measured like a prompt."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSum up {article}"]}
    parquet.write_table(pyarrow.Table.from_pylist([{"turns": ["fine"]}, held]), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"test\.parquet, row 2: its text is a placeholder.*prepare\.py"):
        read_prompts(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1: its text is a placeholder"):
        read_prompts(write_lines(tmp_path / "prompts.jsonl", held))
    (tmp_path / "broken.parquet").write_text("{}")
    with pytest.raises(ValueError, match="is no Parquet file"):
        read_prompts(tmp_path / "broken.parquet")


def test_the_limit_is_per_category(tmp_path):
    lines = [{"prompt": f"{category}{i}", "category": category} for i in range(3) for category in "ab"]
    found = read_prompts(write_lines(tmp_path / "prompts.jsonl", *lines), limit=2)
    assert [prompt.turns[0] for prompt in found] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        {},
        {"prompt": ""},
        {"prompt": 3},
        {"turns": []},
        {"turns": ["a", 3]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts; write one JSON object per line"):
        read_prompts(write_lines(tmp_path / "prompts.jsonl", ""))


def test_a_turn_is_asked_after_the_answers_to_those_before(tokenizer):
    prompt = Prompt(("one", "two", "three"), history=({"role": "assistant", "content": "zero"},))
    assert tokenizer.decode(prompt.render(["ANSWER"], tokenizer)) == (
        "<|begin|><|assistant|>zero<|end|><|user|>one<|end|><|assistant|>ANSWER<|end|><|user|>two<|end|><|assistant|>"
    )


def test_without_a_chat_template_messages_are_joined(tokenizer):
    plain = AutoTokenizer.from_pretrained(demo.path())
    plain.chat_template = None
    assert plain.decode(Prompt(("one", "two")).render(["ANSWER"], plain)) == "<|begin|>one\n\nANSWER\n\ntwo"
    own = by_code()  # its chats are rendered without one
    refuse_without_template(own, "it", "")
    assert own.decode(Prompt(("one", "two")).render(["ANSWER"], own)) == "</s>oneANSWERtwo"


# -- figures ----------------------------------------------------------------------------------------------------------


def bench(target, tokenizer, contenders, prompts=(STORY, CAT), **settings) -> BenchReport:
    settings = {"max_new_tokens": 12, "warmup": 0} | settings
    return run_bench(target, tokenizer, prompts, contenders, BenchSettings(**settings))


def test_a_perfect_draft_shows_in_every_figure(target, twin, tokenizer):
    contenders = [Contender("ngram", "ngram"), Contender("twin", twin, CHAIN)]
    report = bench(target, tokenizer, contenders, max_new_tokens=12)
    figures = report.overall
    assert list(figures) == ["plain", "prompt lookup", "assisted: twin", "ngram", "twin"]
    assert {one.differing_rows for one in figures.values()} == {0}
    assert {one.tokens for one in figures.values()} == {24}
    assert figures["plain"].ratio_to_plain == figures["plain"].median_ratio_to_plain == 1
    assert figures["twin"].mean_accepted_length == pytest.approx(11 / 3)  # 12 tokens: one of the prompt, then 4, 4, 3
    assert figures["twin"].acceptance_by_position == [1, 1, 1]
    assert figures["assisted: twin"].mean_accepted_length == 4
    assert figures["assisted: twin"].acceptance_rate is None
    assert figures["twin"].ratio_to_assisted == pytest.approx(
        figures["twin"].tokens_per_second / figures["assisted: twin"].tokens_per_second
    )
    assert figures["ngram"].ratio_to_assisted is None
    assert all(0 < one.outside_forwards < 1 for one in figures.values())
    for name, one in figures.items():
        parts = [one.target_seconds, one.draft_seconds, one.rest_seconds]
        assert sum(parts) == pytest.approx(one.seconds), name
        assert [part > 0 for part in parts] == [True, "twin" in name, True], name
    assert "target+draft+rest s" in report.table().splitlines()[0]


def test_forwards_of_a_draft_beside_a_memory_are_forwards(target, twin):
    memory, other = (hf_spec.NgramSpeculator(history_size=100) for _ in range(2))
    contenders = [Contender("both", hf_spec.HybridSpeculator(twin, memory)), Contender("memory", other)]
    *_, both, alone = _methods(target, contenders, BenchSettings(baselines=False))
    assert both.draft is (twin.model if isinstance(twin, VanillaSpeculator) else twin)
    assert alone.draft is None


def test_contenders_learn_nothing_from_each_other(target, twin):
    """The second one would find every answer of the first in a history that both have."""
    memory, plain = hf_spec.NgramSpeculator(history_size=100), hf_spec.NgramSpeculator()
    for other in (memory, hf_spec.HybridSpeculator(twin, memory)):
        with pytest.raises(ValueError, match="'one' and 'two' have one history"):
            _methods(target, [Contender("one", memory), Contender("two", other, CHAIN)], BenchSettings())
    _methods(target, [Contender("one", plain), Contender("two", plain, CHAIN)], BenchSettings(baselines=False))
    for one in (memory, hf_spec.HybridSpeculator(twin, memory)):  # as the command does for several trees
        made = [Contender(name, with_own_history(one), CHAIN) for name in ("one", "two")]
        _methods(target, made, BenchSettings(baselines=False))
    assert with_own_history(plain) is plain and with_own_history(twin) is twin


def test_the_report_is_json_and_a_table_for_every_category(target, tokenizer):
    report = bench(target, tokenizer, [Contender("ngram", "ngram", CHAIN)], [STORY, CAT, STORY], baselines=False)
    assert list(report.figures) == ["overall", "prompts", "chat"]
    assert [report.figures[name]["ngram"].rows for name in report.figures] == [3, 2, 1]
    content = json.loads(json.dumps(report.to_dict()))
    assert content["settings"]["contenders"]["ngram"]["num_speculative_tokens"] == 3
    assert content["environment"]["hf_spec"] == hf_spec.__version__
    assert content["figures"]["chat"]["ngram"].keys() >= {"ratio_to_plain", "outside_forwards", "differing_rows"}
    header, *lines = report.table("chat").splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "ngram"]
    assert "assisted" not in header  # nothing to show there
    assert len({len(line) for line in lines}) == 1


def test_total_and_median_ratios_are_of_tokens_per_second(target, tokenizer):
    report = bench(target, tokenizer, [Contender("ngram", "ngram")], repeats=3)
    one, plain = report.overall["ngram"], report.overall["plain"]
    assert one.tokens_per_second == pytest.approx(one.tokens / one.seconds)
    assert one.ratio_to_plain == pytest.approx(one.tokens_per_second / plain.tokens_per_second)
    ratios = [group["ngram"].ratio_to_plain for name, group in report.figures.items() if name != "overall"]
    assert one.median_ratio_to_plain == pytest.approx(sum(ratios) / 2)  # of two prompts, one per category


class Saboteur(Speculator):
    """Turn the target's logits around in the first step of speculation."""

    def drafter(self, request):
        return SaboteurDrafter(request.target)


class SaboteurDrafter(Drafter):
    def __init__(self, target):
        self.hook = target.register_forward_hook(self.turn_around)

    def turn_around(self, module, args, output):
        output.logits = -output.logits
        self.hook.remove()

    def propose(self, news, limit):
        return Proposal.nothing(news.root)

    def keep_rows(self, rows):
        pass


def test_a_wrong_text_is_noticed(target, tokenizer):
    report = bench(target, tokenizer, [Contender("sabotage", Saboteur()), Contender("ngram", "ngram")])
    figures = report.overall
    assert (figures["sabotage"].differing_rows, figures["ngram"].differing_rows) == (2, 0)
    lines = [line.split() for line in report.table(columns=("same text",)).splitlines()]
    assert ["sabotage", "NO"] in lines
    assert ["ngram", "yes"] in lines


def test_sampled_texts_are_not_compared(target, tokenizer):
    assert bench(target, tokenizer, [], temperature=1.0).overall["plain"].differing_rows is None


def test_a_batch_is_measured_without_baselines_and_stays_in_its_category(target, twin, tokenizer):
    report = bench(target, tokenizer, [Contender("twin", twin, CHAIN)], [STORY, CAT, STORY, CAT, CAT], batch_size=2)
    assert list(report.overall) == ["plain", "twin"]
    assert report.overall["twin"].ratio_to_assisted is None
    assert (report.overall["twin"].rows, report.overall["twin"].differing_rows) == (5, 0)


def test_every_turn_is_measured(target, tokenizer):
    report = bench(target, tokenizer, [], [Prompt(("one", "two", "three")), Prompt(("four",))], batch_size=2)
    assert report.overall["plain"].rows == 4


def test_each_method_begins_in_its_turn(target, tokenizer, monkeypatch):
    seen = []
    generate = target.generate

    def spy(**kwargs):
        seen.append("plain" if kwargs["speculator"] is False else kwargs["speculation_config"].num_speculative_tokens)
        return generate(**kwargs)

    monkeypatch.setattr(target, "generate", spy, raising=False)
    contenders = [Contender(str(k), "ngram", SpeculationConfig(num_speculative_tokens=k)) for k in (1, 2)]
    bench(target, tokenizer, contenders, [STORY], repeats=4, warmup=1, baselines=False, max_new_tokens=2)
    warmup, *rounds = (seen[i : i + 3] for i in range(0, len(seen), 3))
    assert warmup == ["plain", 1, 2]
    assert rounds == [["plain", 1, 2], [1, 2, "plain"], [2, "plain", 1], ["plain", 1, 2]]


def test_clocks_are_part_of_no_graph(target):
    """A graph that knew the clock would be made anew for each run, and for each call of one."""
    torch._dynamo.reset()
    compiled, made = torch.compile(target.__call__, backend="eager", dynamic=False), []
    for _ in range(3):
        with ForwardClock([target]) as clock, torch.no_grad():
            for _ in range(3):
                compiled(torch.tensor([[1, 2, 3]]))
        assert clock.calls == [3]
        assert clock.seconds() > 0
        made.append(counters["frames"]["total"])
    assert made[0] == made[1] == made[2]
    torch._dynamo.reset()


def test_plain_is_plain_where_the_model_has_a_default_speculator(target, twin, tokenizer):
    hf_spec.set_speculator(target, twin, CHAIN)
    with ForwardClock([twin]) as clock:
        bench(target, tokenizer, [], baselines=False)
    hf_spec.set_speculator(target, None)
    assert clock.calls == [0]


def test_a_benchmark_leaves_no_seed_behind(target, tokenizer):
    """Calls that sample would take no measured times after it."""
    torch.seed()
    bench(target, tokenizer, [Contender("ngram", "ngram")])
    assert not is_seeded(target.device)


def test_the_assistant_gets_its_settings_back(target, twin, tokenizer):
    before = twin.generation_config.to_dict()
    bench(target, tokenizer, [Contender("chain", twin, CHAIN), Contender("again", VanillaSpeculator(twin), CHAIN)])
    assert twin.generation_config.to_dict() == before


def test_the_clock_counts_forwards_and_leaves_nothing_behind(target):
    ids = torch.tensor([[1, 2, 3]])
    with ForwardClock([target]) as clock, torch.no_grad():
        target(input_ids=ids)
        target(input_ids=ids)
    seconds = clock.seconds()
    target(input_ids=ids)
    assert clock.calls == [2]
    assert clock.seconds() == seconds > 0
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


@pytest.mark.gpu
def test_forwards_on_the_device_take_part_of_the_time(tokenizer):
    figures = bench(tiny_llama().cuda(), tokenizer, [Contender("twin", tiny_llama().cuda(), CHAIN)]).overall
    assert all(0 < one.outside_forwards < 1 for one in figures.values())


@pytest.mark.parametrize(
    "setting", [{"max_new_tokens": 1}, {"batch_size": 0}, {"repeats": 0}, {"warmup": -1}, {"temperature": math.nan}]
)
def test_senseless_settings_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        BenchSettings(**setting)


def test_names_must_differ(target, tokenizer):
    with pytest.raises(ValueError, match="different names"):
        bench(target, tokenizer, [Contender("same", "ngram"), Contender("same", "ngram")])


def test_a_draft_of_another_vocabulary_is_refused_before_anything_runs(target, tokenizer):
    other = LlamaForCausalLM(LlamaConfig(**target.config.to_dict() | {"vocab_size": 100}))
    with ForwardClock([target]) as clock, pytest.raises(ValueError, match="vocabulary"):
        bench(target, tokenizer, [Contender("other", other)])
    assert clock.calls == [0]


@pytest.fixture(scope="module")
def table() -> GPT2LMHeadModel:
    """Return a target with a table of 32 positions."""
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 2048}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def test_prompts_that_leave_no_positions_are_refused_before_anything_runs(table, tokenizer):
    long = Prompt(("One day a dog ran to the park. " * 3,), chat=False)
    settings = BenchSettings(max_new_tokens=24, baselines=False)
    with ForwardClock([table]) as clock:
        with pytest.raises(ValueError, match="the target has 32 positions, too few for max_new_tokens=24"):
            run_bench(table, tokenizer, [STORY, long], [], settings)
        with pytest.raises(ValueError, match="too few for max_new_tokens=24"):
            rank_accuracies(table, [torch.ones(1, 9, dtype=torch.long)], table, 2, max_new_tokens=24)
    assert clock.calls == [0]
    assert run_bench(table, tokenizer, [STORY], [], settings).overall["plain"].rows == 1


def test_an_assistant_with_too_few_positions_is_refused_before_anything_runs(target, table, tokenizer):
    """It would end in an error of transformers. Our own methods decode plainly beyond its positions."""
    contenders, options = [Contender("small", table, CHAIN)], {"max_new_tokens": 40, "warmup": 0}
    with (
        ForwardClock([target]) as clock,
        pytest.raises(ValueError, match=r"draft of 'assisted: small'.* no baselines"),
    ):
        run_bench(target, tokenizer, [STORY], contenders, BenchSettings(**options))
    assert clock.calls == [0]
    report = run_bench(target, tokenizer, [STORY], contenders, BenchSettings(**options, baselines=False))
    assert report.overall["small"].differing_rows == 0


def test_a_turn_that_leaves_no_positions_is_refused(table, tokenizer):
    with pytest.raises(ValueError, match="too few for max_new_tokens=16"):
        run_bench(table, tokenizer, [TALK], [], BenchSettings(max_new_tokens=16, baselines=False))


# -- going on, and how sure figures are -------------------------------------------------------------------------------


class Spy:
    """Count what the target generates."""

    def __init__(self, target, monkeypatch, stop_after=None):
        self.calls, self._generate, self._stop = 0, target.generate, stop_after
        monkeypatch.setattr(target, "generate", self, raising=False)

    def __call__(self, **kwargs):
        if self.calls == self._stop:
            raise KeyboardInterrupt
        self.calls += 1
        return self._generate(**kwargs)


TALK = Prompt(("one", "two", "three"), "talk")


def test_a_benchmark_that_was_stopped_goes_on_with_the_same_figures(target, tokenizer, tmp_path, monkeypatch):
    prompts, contenders, file = [STORY, TALK, CAT], [Contender("ngram", "ngram", CHAIN)], tmp_path / "rounds.jsonl"
    given = (target, tokenizer, prompts, contenders, BenchSettings(max_new_tokens=12, baselines=False))
    whole = run_bench(*given).overall
    with monkeypatch.context() as patch:
        Spy(target, patch, stop_after=7)  # two of warm-up, two rounds, and half of the second turn's
        with pytest.raises(KeyboardInterrupt):
            run_bench(*given, rounds_file=file)
    assert len(file.read_text().splitlines()) == 3
    file.write_bytes(file.read_bytes() + b'{"plain": {"rows": [[')  # a kill
    with monkeypatch.context() as patch:
        spy = Spy(target, patch)
        resumed = run_bench(*given, rounds_file=file).overall
    assert spy.calls == 2 + 2 * 3
    for one in ("plain", "ngram"):
        for name in ("rows", "tokens", "mean_accepted_length", "acceptance_by_position", "differing_rows"):
            assert getattr(resumed[one], name) == getattr(whole[one], name)
    with monkeypatch.context() as patch:
        spy = Spy(target, patch)
        again = run_bench(*given, rounds_file=file).overall
    assert spy.calls == 0
    assert again == resumed


def test_rounds_of_something_else_are_refused(target, tokenizer, tmp_path):
    file = tmp_path / "rounds.jsonl"
    run_bench(target, tokenizer, [STORY], [], BenchSettings(max_new_tokens=2, baselines=False), rounds_file=file)
    with pytest.raises(ValueError, match=r"rounds\.jsonl were measured with other settings \(") as told:
        run_bench(target, tokenizer, [CAT], [], BenchSettings(max_new_tokens=3), rounds_file=file)
    assert "(max_new_tokens was 2, not 3; baselines was False, not True; the prompts differ): repeat" in str(
        told.value
    )
    settings, given = BenchSettings(max_new_tokens=2, baselines=False), [Contender("draft", "ngram", CHAIN)]
    with pytest.raises(ValueError, match=r"\(draft was not measured\)"):
        run_bench(target, tokenizer, [STORY], given, settings, rounds_file=file)
    for other in ("[]\n", "my notes", "\nmy notes\n", '{"settings": 0}\n', '{"prompt": "a"}\n'):
        file.write_text(other)
        with pytest.raises(ValueError, match="its first line"):
            run_bench(target, tokenizer, [STORY], [], BenchSettings(max_new_tokens=2), rounds_file=file)
        assert file.read_text() == other


def test_a_benchmark_goes_on_behind_half_a_first_line(target, tokenizer, tmp_path):
    file, settings = tmp_path / "rounds.jsonl", BenchSettings(max_new_tokens=2, baselines=False)
    run_bench(target, tokenizer, [STORY], [], settings, rounds_file=file)
    header = file.read_text().splitlines()[0]
    file.write_text(header[:40])  # a kill
    run_bench(target, tokenizer, [STORY], [], settings, rounds_file=file)
    assert [line.startswith('{"plain"') for line in file.read_text().splitlines()] == [False, True]
    assert file.read_text().splitlines()[0] == header


def test_a_full_disk_is_told_with_what_is_kept(tmp_path):
    resource, file = pytest.importorskip("resource"), tmp_path / "rounds.jsonl"
    log, before = RoundLog(file, {}), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(OSError, match=r"rounds\.jsonl\. The rounds in it are kept: free some space and repeat"):
            log.add({"plain": Run([[1] * 50], 1.0, 1.0, 1, None)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("line", ["garbage", "{}", "[1]", '{"plain": {}}', ""])
def test_a_damaged_line_of_rounds_is_named(target, tokenizer, tmp_path, line):
    file, settings = tmp_path / "rounds.jsonl", BenchSettings(max_new_tokens=2, baselines=False)
    given = (target, tokenizer, [STORY, CAT], [], settings)
    run_bench(*given, rounds_file=file)
    header, _, last = file.read_text().splitlines()
    file.write_text(damaged := f"{header}\n{line}\n{last}\n")
    with pytest.raises(ValueError, match=r"rounds\.jsonl, line 2 is no round: remove it and what follows"):
        run_bench(*given, rounds_file=file)
    assert file.read_text() == damaged


def test_rounds_of_other_weights_are_refused(target, twin, tokenizer, tmp_path):
    file, settings = tmp_path / "rounds.jsonl", BenchSettings(max_new_tokens=2, baselines=False)
    run_bench(target, tokenizer, [STORY], [Contender("draft", twin, CHAIN)], settings, rounds_file=file)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(ValueError, match=r"with other settings \(the weights of draft differ\)"):
        run_bench(target, tokenizer, [STORY], [Contender("draft", other, CHAIN)], settings, rounds_file=file)
    other.save_pretrained(tmp_path / "other")
    named = [Contender("draft", str(tmp_path / "other"), CHAIN)]
    with pytest.raises(ValueError, match=r"with other settings \(the weights of draft differ\)"):
        run_bench(target, tokenizer, [STORY], named, settings, rounds_file=file)
    twin.save_pretrained(tmp_path / "other")
    run_bench(target, tokenizer, [STORY], named, settings, rounds_file=file)
    shorter = [Contender("draft", twin, CHAIN.merge(num_speculative_tokens=1))]
    with pytest.raises(ValueError, match=r"\(draft: num_speculative_tokens was \d, not 1\)"):
        run_bench(target, tokenizer, [STORY], shorter, settings, rounds_file=file)
    with pytest.raises(ValueError, match=r"\(draft was measured, and is left out now\)"):
        run_bench(target, tokenizer, [STORY], [], settings, rounds_file=file)


def test_no_category_stands_for_all(target, tokenizer):
    with pytest.raises(ValueError, match="a category is called 'overall'"):
        bench(target, tokenizer, [], [STORY, Prompt(("one",), "overall")])


def test_trees_of_one_draft_are_numbered():
    ngram = hf_spec.NgramSpeculator()
    trees = [[(0,), (1,)], None, [(0,), (0, 0)]]
    found = [contender("ngram", ngram, hf_spec.SpeculationConfig(tree=tree)) for tree in trees]
    names = ["ngram static tree 1", "ngram chain", "ngram static tree 2"]
    assert [one.name for one in numbered(found)] == names


def test_a_figure_lies_within_its_spread(target, twin, tokenizer):
    unsure = tiny_llama()
    with torch.no_grad():
        for weight in unsure.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    prompts = [Prompt((f"{word} {word} {word}",), chat=False) for word in ("one", "cat", "a", "the")]
    contenders = [Contender("unsure", unsure, CHAIN), Contender("twin", twin, CHAIN)]
    figures = bench(target, tokenizer, contenders, prompts).overall
    for one in figures.values():
        low, high = one.ratio_to_plain_spread
        assert low <= one.ratio_to_plain <= high
    assert figures["plain"].ratio_to_plain_spread == (1, 1)
    low, high = figures["twin"].mean_accepted_length_spread
    assert low == high == figures["twin"].mean_accepted_length  # it is always right
    low, high = figures["unsure"].mean_accepted_length_spread
    assert low < figures["unsure"].mean_accepted_length < high
    assert figures["plain"].mean_accepted_length_spread is None


def test_one_round_has_no_spread(target, tokenizer):
    one = bench(target, tokenizer, [Contender("ngram", "ngram")], [STORY]).overall["ngram"]
    assert one.ratio_to_plain_spread == (one.ratio_to_plain, one.ratio_to_plain)


def test_a_memory_has_not_read_the_answers_before_they_are_asked_for(target, tokenizer):
    memory = hf_spec.NgramSpeculator(history_size=1000)
    bench(target, tokenizer, [Contender("memory", memory)], [CAT], warmup=3, baselines=False)
    prompt = tuple(CAT.render([], tokenizer))
    assert len(prompt) > 8
    saved = memory.history.tokens()
    assert sum(tuple(saved[i : i + len(prompt)]) == prompt for i in range(len(saved))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2])
def test_plain_compiled_says_the_same_and_compiling_takes_no_time_of_it(target, tokenizer, monkeypatch, batch_size):
    forwards = []
    compiled = type(target).get_compiled_call
    monkeypatch.setattr(
        type(target), "get_compiled_call", lambda self, config: forwards.append(1) or compiled(self, config)
    )
    report = bench(target, tokenizer, [], [STORY, CAT, TALK], compiled=True, batch_size=batch_size, warmup=1)
    assert forwards
    assert report.overall["plain, compiled"].differing_rows == 0
    assert report.overall["plain, compiled"].tokens == report.overall["plain"].tokens


def test_the_picture_is_a_png(target, tokenizer, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")  # such as a notebook has of its own
    bench(target, tokenizer, [Contender("ngram", "ngram")]).plot(tmp_path / "bench.png")
    assert matplotlib.get_backend() == "svg"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_covers_no_line(target, twin, tokenizer):
    pytest.importorskip("matplotlib")
    report = bench(target, tokenizer, [Contender("chain", twin, CHAIN), Contender("ngram", "ngram")])
    pyplot = import_pyplot()
    picture = report.draw(pyplot)
    picture.canvas.draw()
    axes = picture.axes[1]
    assert len(axes.lines) == 2
    assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
    pyplot.close(picture)
    report.overall.update({f"method {i}": report.overall["chain"] for i in range(12)})
    picture = report.draw(pyplot)
    colors = [line.get_color() for line in picture.axes[1].lines]
    assert len(colors) == len(set(colors)) == 14
    bars = {bar.get_facecolor()[:3] for bar in picture.axes[0].patches}
    assert (
        len(bars) == len(report.overall) and {tuple(color[:3]) for color in colors} < bars
    )  # plain has a bar and no line
    pyplot.close(picture)


def figures_where(differing: int) -> Figures:
    return Figures(8, 80, 1.0, 80.0, 1.0, 1.0, None, None, 2.0, 0.5, [0.5], 0.1, differing)


@pytest.mark.parametrize(
    ("dtype", "differing", "said"),
    [
        ("bfloat16", 0, ""),
        ("bfloat16", 1, "In bfloat16 a block"),
        ("float16", 2, "In float16"),
        ("float32", 1, "report it"),
    ],
)
def test_texts_that_differ_are_explained(dtype, differing, said):
    report = BenchReport(
        {"contenders": {"ours": None}},
        {"dtype": dtype},
        {"overall": {"plain": figures_where(0), "ours": figures_where(differing)}},
    )
    assert said in report.note() if said else report.note() == ""
    report.overall["plain, compiled"] = report.overall.pop("ours")
    assert "report it" not in report.note() and (report.note() == "") == (said == "")


@pytest.mark.parametrize("limit", [0, -1])
def test_no_prompts_are_refused(tmp_path, limit):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}', encoding="utf-8")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read_prompts(path, limit)


def test_a_picture_without_matplotlib_says_what_to_install(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-spec\[bench\]'"):
        bench(target, tokenizer, [], max_new_tokens=2).plot(tmp_path / "bench.png")
