"""Drawn guesses that are weighed in a graph meet the same fate as elsewhere, and what graphs gave is read in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lengths import force_lengths
from pairs import each_value
from test_compiled_drafts import DEPTH, SHAPES, draft_of, short_slots, text_and_out  # noqa: F401  # with a fixture
from test_static import Forwards, generate, on_any_device
from torch import Tensor, fx
from twins import paths_of, target

from hf_spec import Proposal
from hf_spec.decode.emission import _are_finite
from hf_spec.drafts.trees import grow
from hf_spec.proposal import NO_PARENT, PAD_NODE
from hf_spec.scoring import graphs, rings
from hf_spec.scoring.graphs import Compiler
from hf_spec.verify.compiled import CompiledVerifier
from hf_spec.verify.result import read_table, result_table
from hf_spec.verify.rules import block_verification, token_verification, verify_against_tokens

VOCABULARY = 24
Rule = Callable[..., Any]


def proposal_of(shape: str, rows: int, seed: int) -> tuple[Proposal, Tensor]:
    """Draw guesses where some tokens are impossible, and return with them what a similar target says, as logits."""
    torch.manual_seed(seed)
    tables = 3 * torch.randn(4, VOCABULARY)
    tables[torch.rand(tables.shape) < 0.3] = -torch.inf
    tables = tables.log_softmax(-1)
    root = torch.randint(VOCABULARY, (rows,))
    step = lambda tokens, *_: tables[tokens % 4]  # noqa: E731
    config = SHAPES["dynamic" if shape == "mixed" else shape]
    proposal = grow(root, tables[root % 4], step, config, DEPTH, sample=True)
    if shape == "mixed":  # of what was drawn and what was chosen
        proposal = replace(proposal, deterministic=torch.rand(proposal.tokens.shape) < 0.4)
    if shape == "dynamic":  # a text that ends leaves out the deepest guesses
        proposal = proposal.truncate_rows([DEPTH - row % 3 for row in range(rows)])
        assert rows == 1 or bool((proposal.parents == PAD_NODE).any())
    logits = tables.clamp(min=-4)[proposal.tokens % 4] + 0.5 * torch.randn(*proposal.tokens.shape, VOCABULARY)
    return proposal, logits.index_fill(2, torch.tensor(3), -torch.inf)


@pytest.fixture(params=["as it is", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    torch._dynamo.reset()
    monkeypatch.setattr(graphs, "_compiled", [])
    graphs._failed.clear()
    if request.param == "as it is":
        monkeypatch.setattr(Compiler, "__call__", lambda compiler, function, owner, *args, **_: function(*args))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield Compiler(None, DEPTH)
    else:
        yield Compiler(on_any_device(backend=request.param), DEPTH)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("rule", "shape"),
    each_value([token_verification, block_verification], ["chain", "sampled", "dynamic", "mixed"]),
)
def test_the_same_coins_give_the_same_verdict(rule: Rule, shape: str, compiler: Compiler) -> None:
    """In 1 to 8 rows, where some guesses are PAD_NODE, with and without processors: and one graph for each size."""
    seen, others, nodes = set(), 0, proposal_of(shape, 1, 0)[0].tokens.shape[1]
    judge = CompiledVerifier(compiler, nodes, rule)
    for seed, rows in enumerate((1, 3, 8, 4, 7)):
        proposal, logits = proposal_of(shape, rows, seed)
        logits[0, nodes - 1, 0] = torch.nan if seed == 1 else 0.0
        for scores in (None, logits / 0.7):
            assert judge.takes(proposal)
            torch.manual_seed(seed)
            verdict, table = judge(proposal, logits, scores)
            figures = read_table(proposal, verdict, table)
            torch.manual_seed(seed)
            p = (logits if scores is None else scores).softmax(-1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: False)
                plain = rule(proposal, p)
                expected = read_table(proposal, plain, result_table(proposal, plain, logits.amax(-1) < torch.inf))
                others += int(not torch.equal(rule(proposal, p).tokens, plain.tokens))
            assert figures == expected
            assert torch.equal(verdict.tokens, plain.tokens) and torch.equal(verdict.path, plain.path)
            seen |= set(map(len, figures.tokens))
    assert seen > {1, 2} and others  # other coins, other verdicts
    runs_as_it_is = torch.compiler.is_compiling()
    assert compiler.graphs.made == (0 if runs_as_it_is else 6)  # batches of 1, 4 and 8, with and without processors


def test_inductor_weighs_a_drawn_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow tests do it for every shape and size."""
    monkeypatch.setattr(graphs, "_compiled", [])
    proposal, logits = proposal_of("dynamic", 3, 5)
    nodes = proposal.tokens.shape[1]
    judge = CompiledVerifier(Compiler(on_any_device(backend="inductor"), DEPTH), nodes, block_verification)
    torch.manual_seed(0)
    verdict, _ = judge(proposal, logits, None)
    torch.manual_seed(0)
    plain = block_verification(proposal, logits.softmax(-1))
    assert torch.equal(verdict.tokens, plain.tokens) and torch.equal(verdict.path, plain.path)
    assert judge.graphs.made == 1
    torch._dynamo.reset()


def test_other_shapes_are_left_to_the_rule() -> None:
    judge = CompiledVerifier(Compiler(None, DEPTH), DEPTH + 1, block_verification)
    chain, _ = proposal_of("chain", 3, 0)
    assert judge.takes(chain)
    assert not judge.takes(chain.truncate(DEPTH - 1))
    assert not judge.takes(chain.truncate_rows([1, 3, 3]))  # the end of a text: not worth a graph
    assert not judge.takes(Proposal.path(chain.tokens))  # was not drawn


@pytest.mark.parametrize("is_chain", [True, False])
def test_what_stands_where_a_row_has_no_guess_counts_for_nothing(is_chain: bool) -> None:
    """Neither as a guess, nor by its depth, nor if its logits are nan."""
    torch.manual_seed(0)
    moved = 0
    for _ in range(30):
        counts, tokens = torch.randint(5, (3,)), torch.randint(2, (3, 5))
        parents = torch.tensor(
            [[NO_PARENT, *(int(torch.randint(node, ())) for node in range(1, 5))] for _ in range(3)]
        )
        parents = parents.masked_fill(torch.arange(5) > counts[:, None], PAD_NODE)
        proposal = Proposal.path(tokens, counts) if is_chain else Proposal(tokens, parents, 4)
        verdict = verify_against_tokens(proposal, torch.randint(2, (3, 5)))
        kept = [path[:count] for path, count in zip(verdict.path.tolist(), verdict.counts.tolist(), strict=True)]
        there = proposal.present.nonzero().tolist()
        for spoilt in (None, *there[:: len(there) // 2 + 1]):
            logits = torch.zeros(3, 5, 4).masked_fill(~proposal.present[:, :, None], torch.nan)
            if spoilt is not None:
                logits[spoilt[0], spoilt[1], 2] = torch.nan
            found = read_table(proposal, verdict, result_table(proposal, verdict, logits.amax(-1) < torch.inf))
            assert found.proposed == counts.tolist()
            assert found.longest == [max(map(len, paths_of(proposal, row)), default=0) for row in range(3)]
            assert list(map(len, found.tokens)) == verdict.counts.tolist()
            assert found.in_place == all(path == list(range(len(path))) for path in kept)
            assert found.are_finite == bool(_are_finite(proposal, logits).all()) == (spoilt is None)
        moved += not found.in_place
    assert is_chain != bool(moved)


# -- whole calls ------------------------------------------------------------------------------------------------------


PROCESSORS = {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("batch", "shape", "options"),
    [pytest.param(1, "chain", {}, marks=pytest.mark.slow), (3, "dynamic", PROCESSORS)],
    ids=["one row", "three rows"],
)
def test_the_same_seed_gives_the_same_text(
    batch: int, shape: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "SHORTEST", 64)  # few graphs
    model, texts = target("llama"), []
    compiled = {"cache_implementation": "static", "compile_config": on_any_device()}
    torch._dynamo.reset()
    own = {"speculator": draft_of("eagle3"), "speculation_config": SHAPES[shape], "do_sample": True}
    for ways in ({}, compiled):
        torch.manual_seed(7)
        texts.append(generate(model, batch, **own, **options, **ways))
    assert torch.equal(*texts)
    torch._dynamo.reset()


def test_a_choice_is_a_graph_where_guesses_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(rings, "SHORTEST", 64)  # few graphs
    judged: list[int] = []
    call = CompiledVerifier.__call__

    def noted(judge: CompiledVerifier, *args: Any) -> Any:
        found = call(judge, *args)
        judged.append(judge.graphs.made)
        return found

    monkeypatch.setattr(CompiledVerifier, "__call__", noted)
    text_and_out("eagle3", "chain", 1)
    assert not judged  # looked up
    _, out = text_and_out("eagle3", "chain", 1, do_sample=True)
    assert judged and set(judged) == {1}
    forwards = Forwards(monkeypatch)
    _, again = text_and_out("eagle3", "chain", 1, do_sample=True)
    assert out.speculation.graphs > again.speculation.graphs == len(forwards.compiled) == 0
    torch._dynamo.reset()


# -- what graphs give -------------------------------------------------------------------------------------------------


class Reusing:
    """A backend that writes over all its graphs gave once the next step begins, as CUDA graphs do."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.written = 0

    def backend(self) -> Callable[..., Any]:
        """Return it as a function, which nobody makes a copy of."""
        return lambda graph, inputs: lambda *args: self._run(graph, args)

    def _run(self, graph: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        outputs = graph.forward(*args)
        held = {one.untyped_storage().data_ptr() for one in (*args, *graph.buffers()) if isinstance(one, Tensor)}
        new = [one for one in outputs if isinstance(one, Tensor) and one.numel()]
        self.given += [one for one in new if one.untyped_storage().data_ptr() not in held]
        return outputs

    def begin_step(self) -> None:
        with torch.no_grad():
            for one in self.given:
                one.untyped_storage().fill_(0x7F)  # nan, or a number beyond all tokens and nodes
        self.written += len(self.given)
        self.given.clear()


@pytest.fixture
def reusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reusing]:
    torch._dynamo.reset()
    reusing = Reusing()
    monkeypatch.setattr(graphs, "_compiled", [])
    monkeypatch.setattr(graphs, "NEW_MEMORY", ())
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", reusing.begin_step)
    yield reusing
    reusing.given.clear()  # dynamo may keep the backend
    torch._dynamo.reset()


def texts(reusing: Reusing, kind: str, shape: str, sample: bool) -> list[Tensor]:
    """Return what is generated with graphs and without, rows ending apart and ordinary steps in between."""
    model, found = target("llama"), []
    ends = {"eos_token_id": int(generate(model, 3)[0, 20]), "pad_token_id": 0}  # of one row: each size is a graph
    own = {"speculator": draft_of(kind), "speculation_config": SHAPES[shape], "do_sample": sample}
    own |= {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    graphs = {"cache_implementation": "static", "compile_config": on_any_device(backend=reusing.backend())}
    for ways in ({}, graphs):
        chance = random.Random(3)
        with pytest.MonkeyPatch.context() as patch:
            force_lengths(patch, lambda rows: chance.choice([0, DEPTH, DEPTH]))  # noqa: B023
            torch.manual_seed(2)
            out = generate(model, 3, **own, **ends, **ways)
        found.append(out.sequences)
        assert all(bool(torch.isfinite(step).all()) for step in out.logits)
        assert all(bool(torch.isfinite(layer).all()) for step in out.hidden_states for layer in step)
    return found


@pytest.mark.parametrize(
    ("kind", "shape", "sample"),
    [
        pytest.param("mtp", "chain", False, marks=pytest.mark.slow),
        ("eagle3", "chain", True),
        pytest.param("eagle3", "dynamic", True, marks=pytest.mark.slow),
    ],
)
def test_what_graphs_gave_is_read_in_time(kind: str, shape: str, sample: bool, reusing: Reusing) -> None:
    plain, graphs = texts(reusing, kind, shape, sample)
    assert torch.equal(graphs, plain)
    assert reusing.written > 20


def test_what_is_read_too_late_is_seen(reusing: Reusing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied here: the test above must be able to fail."""
    monkeypatch.setattr(graphs, "NEW_MEMORY", ("cpu",))
    try:
        plain, compiled = texts(reusing, "eagle3", "chain", sample=True)
    except (AssertionError, IndexError, RuntimeError):
        return
    assert not torch.equal(compiled, plain)
