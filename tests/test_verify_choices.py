"""Verification choices by name: each has the target's law on what it takes, and refuses the rest with a remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction as F
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from bench_tools import blocks, measured, one_case, one_thread, text_model, write_prompts
from exact_law import Context, completed, history_draft, history_target, mean_emitted, sequence_law
from tree_law import (
    block_ways,
    drawn_trees,
    outcomes_of,
    sequential_ways,
    traversal_ways,
    tree_laws,
)

from specbench.bench.choices import METHOD_OF, why_not_verified
from specbench.bench.plan import Planner
from specbench.engine import decode as decode_module
from specbench.engine.sampling import RequestGenerator, SamplingParams
from specbench.engine.tree import TokenTree
from specbench.engine.verify import METHODS, Method, Proposal, Verification, verify
from specbench.errors import InputError
from specbench.scenario.cases import Case, SamplingSpec, TargetSpec, Workload
from specbench.scenario.drafter_spec import DrafterSpec
from specbench.scenario.schema import Verification as Named

WARM, GREEDY = SamplingParams(0.5, seed=0), SamplingParams()
CHAIN, FORK = ((-1, 0), (-1, -1))
DRAWN = ("independent", "without_replacement")


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


class Coins:
    def __init__(self, values: Sequence[float]) -> None:
        self.request_id, self.values = "r", values

    def uniforms(self, count: int) -> np.ndarray:
        assert count == len(self.values)
        return np.array(self.values)


def by_choice(method: Method) -> Callable[..., Verification]:
    """The rule under test is `verify` itself, under the choice's name."""

    def rule(
        p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, uniforms: np.ndarray
    ) -> Verification:
        proposal = Proposal(tree, q, "chosen" if q is None else siblings)  # type: ignore[arg-type]
        return verify([proposal], 0.5 * p.log(), [WARM], [Coins(uniforms)], method=method)[0]

    return rule


def law_of(method: Method, trees: Sequence[tuple[TokenTree, F]], siblings: str | None) -> dict[Context, F]:
    """Law of the emission under a choice; `siblings` None: the trees are chosen."""
    law: dict[Context, F] = defaultdict(F)
    told = siblings or "chosen"
    for tree, mass in trees:
        p, q = tree_laws(history_target, tree, None if siblings is None else history_draft)
        if method == "traversal":
            ways = traversal_ways(p, tree, q, told)
        elif method == "block":
            ways = block_ways(p, tree, q)
        else:
            ways = sequential_ways(p, tree, q, told)
        for emitted, share in outcomes_of(ways, by_choice(method), p, tree, q, told).items():
            law[emitted] += mass * share
    return law


# The law -------------------------------------------------------------------------------------------------------------

TAKEN = [
    *(("sequential", shape, siblings) for shape in ((1, 1), (2, 1)) for siblings in DRAWN),
    ("chain", (1, 1), "independent"),
    ("block", (1, 1), "independent"),
    *((method, shape, siblings) for method in ("recursive", "traversal") for shape in ((2, 1),) for siblings in DRAWN),
    ("recursive", (1, 1), "independent"),
    ("traversal", (1, 1), "independent"),
]


@pytest.mark.parametrize(("method", "shape", "siblings"), TAKEN, ids=lambda value: str(value))
def test_each_choice_has_the_targets_law_on_drawn_drafts(method: Method, shape: tuple[int, ...], siblings: str) -> None:
    law = law_of(method, list(drawn_trees(history_draft, shape, siblings)), siblings)
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


@pytest.mark.parametrize(
    ("method", "parents"),
    [
        *((m, CHAIN) for m in ("sequential", "chain", "block", "target_only")),
        ("sequential", FORK),
        ("target_only", FORK),
    ],
    ids=lambda value: str(value),
)
def test_each_choice_has_the_targets_law_on_chosen_drafts(method: Method, parents: tuple[int, ...]) -> None:
    for tokens in ([0, 2], [1, 0], [2, 1]):
        law = law_of(method, [(tree_of(tokens, parents), F(1))], None)
        assert completed(law, history_target, 3) == sequence_law(history_target, 3)


def test_target_only_on_the_tree_of_the_vector() -> None:
    """{0 -> {0, 2}, 1 -> {1}}: 23/12 tokens a step."""
    law = law_of("target_only", [(tree_of([0, 1, 0, 2, 1], [-1, -1, 0, 0, 1]), F(1))], None)
    assert mean_emitted(law) == F(23, 12)
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


@pytest.mark.parametrize(
    ("method", "siblings", "mean"),
    [
        ("recursive", "without_replacement", F(16, 9)),
        ("recursive", "independent", F(250, 147)),
        ("traversal", "without_replacement", F(16, 9)),
        ("traversal", "independent", F(250, 147)),
    ],
)
def test_one_level_of_two_children(method: Method, siblings: str, mean: F) -> None:
    assert mean_emitted(law_of(method, list(drawn_trees(history_draft, (2,), siblings)), siblings)) == mean


def test_block_and_chain_on_the_vector() -> None:
    chains = list(drawn_trees(history_draft, (1, 1), "independent"))
    assert mean_emitted(law_of("chain", chains, "independent")) == F(1219, 588)
    assert mean_emitted(law_of("block", chains, "independent")) == F(613, 294)


# What each refuses ---------------------------------------------------------------------------------------------------

Q = torch.full((2, 3), 1 / 3)
DRAFTS = {
    "chosen chain": Proposal(tree_of([0, 1], CHAIN)),
    "drawn chain": Proposal(tree_of([0, 1], CHAIN), Q, "independent"),
    "chosen fork": Proposal(tree_of([0, 1], FORK)),
    "drawn fork": Proposal(tree_of([0, 1], FORK), Q, "without_replacement"),
    "nothing": Proposal(tree_of([], [])),
}
REFUSED: dict[str, dict[str, str]] = {
    "sequential": {},
    "greedy": dict.fromkeys(DRAFTS, "exact at temperature 0 only"),
    "chain": {"chosen fork": "judges chains", "drawn fork": "judges chains"},
    "block": {"chosen fork": "judges chains", "drawn fork": "judges chains"},
    "target_only": {"drawn chain": "a draft was sampled", "drawn fork": "a draft was sampled"},
    "recursive": {"chosen chain": "a draft was chosen", "chosen fork": "a draft was chosen"},
    "traversal": {"chosen chain": "a draft was chosen", "chosen fork": "a draft was chosen"},
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_choice_takes_what_it_is_for_and_refuses_the_rest(method: Method, name: str) -> None:
    proposal = DRAFTS[name]
    logits = torch.zeros(len(proposal.tree) + 1, 3)
    generator = RequestGenerator(0, "a")
    message = REFUSED[method].get(name)
    if message is None:
        assert verify([proposal], logits, [WARM], [generator], method=method)[0].error is None
        return
    with pytest.raises(InputError, match=f"request a: {method} verification .*{message}") as caught:
        verify([proposal], logits, [WARM], [generator], method=method)
    assert caught.value.remedy
    assert caught.value.key == "sampling.verification"
    assert generator.num_drawn == 0


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_are_judged_greedily_under_every_choice(method: Method) -> None:
    """Alone, and beside a sampled request that the choice takes; a fork is still none for chain and block."""
    logits = torch.eye(3)
    chosen = verify([DRAFTS["chosen chain"]], logits, [GREEDY], [RequestGenerator(0, "a")], method=method)[0]
    assert chosen.tokens == (0, 1, 2)
    if method in ("chain", "block"):
        with pytest.raises(InputError, match="judges chains"):
            verify([DRAFTS["chosen fork"]], logits, [GREEDY], [RequestGenerator(0, "a")], method=method)
    else:
        forked = verify([DRAFTS["chosen fork"]], logits, [GREEDY], [RequestGenerator(0, "a")], method=method)[0]
        assert forked.tokens == (0, 1)
    if method != "greedy":
        beside = "drawn chain" if method in ("recursive", "traversal") else "chosen chain"
        mixed = [DRAFTS["chosen chain"], DRAFTS[beside]]
        generators = [RequestGenerator(0, "a"), RequestGenerator(0, "b")]
        verdicts = verify(mixed, logits.repeat(2, 1), [GREEDY, WARM], generators, method=method)
        assert verdicts[0].tokens == (0, 1, 2)


def test_the_first_refused_request_is_named_and_no_coin_is_spent() -> None:
    generators = [RequestGenerator(0, "a"), RequestGenerator(0, "b")]
    drafts = [DRAFTS["chosen chain"], DRAFTS["drawn chain"]]
    with pytest.raises(InputError, match="request b: target_only"):
        verify(drafts, torch.zeros(6, 3), [WARM, WARM], generators, method="target_only")
    assert [each.num_drawn for each in generators] == [0, 0]


def test_traversal_has_no_kernel_and_says_so() -> None:
    verifier = pytest.importorskip("specbench.engine.verify_triton")
    with pytest.raises(InputError, match="traversal verification has no kernel for backend triton") as caught:
        verify(
            [DRAFTS["drawn fork"]],
            torch.zeros(3, 3),
            [WARM],
            [RequestGenerator(0, "a")],
            method="traversal",
            backend=verifier.verify_triton,
        )
    assert "backend cpu or torch" in str(caught.value.remedy)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "traversal"])
def test_backend_triton_knows_every_other_choice(method: Method) -> None:
    """The same verdicts as the reference, over draws of laws and coins."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    taken = [name for name in DRAFTS if name not in REFUSED[method]] or ["chosen chain"]
    params = GREEDY if method == "greedy" else WARM
    rng = np.random.default_rng(2)
    accepted = 0
    for seed in range(4):
        proposals = [DRAFTS[name] for name in taken if method != "greedy" or DRAFTS[name].q is None]
        logits = torch.tensor(rng.normal(size=(sum(len(each.tree) + 1 for each in proposals), 3)))
        found = []
        for backend, place in (("torch", "cpu"), ("triton", device)):
            moved = [replace(each, q=None if each.q is None else each.q.to(place)) for each in proposals]
            generators = [RequestGenerator(seed, f"{index}") for index in range(len(proposals))]
            laws = [params] * len(proposals)
            found.append(verify(moved, logits.to(place), laws, generators, method=method, backend=backend))
        assert found[0] == found[1]
        accepted += sum(verdict.accepted for verdict in found[0])
    assert accepted > 0


# The plan ------------------------------------------------------------------------------------------------------------

TREE = ((0,), (1,), (0, 0))


def case_of(kind: str, choice: str, temperature: float, depth: int = 2, **options: Any) -> Case:
    drafter = DrafterSpec(kind, tuple(options.items()))
    law = SamplingSpec(temperature, verification=choice)
    return Case(TargetSpec("m"), drafter, depth, Workload(), law)


def test_a_scenario_names_every_method_of_the_verifier() -> None:
    names = get_args(get_args(Named)[0])
    assert tuple(METHOD_OF) == names
    assert set(METHOD_OF.values()) == set(METHODS)


@pytest.mark.parametrize(
    ("case", "skip"),
    [
        (case_of("ngram", "token", 0.0), None),
        (case_of("ngram", "greedy", 0.0), None),
        (case_of("none", "greedy", 0.0), "no draft to verify as greedy"),
        (case_of("ngram", "greedy", 0.7), "exact at temperature 0 only"),
        (case_of("ngram", "chain", 0.0), "at temperature 0 it is no other"),
        (case_of("ngram", "chain", 0.7), None),
        (case_of("ngram", "target_only", 0.7), None),
        (case_of("ngram", "recursive", 0.7), "this draft was chosen"),
        (case_of("ngram", "traversal", 0.7), "this draft was chosen"),
        (case_of("early_exit", "target_only", 0.7, layers=1), "this draft was sampled"),
        (case_of("early_exit", "target_only", 0.7, layers=1, children="top"), None),
        (case_of("early_exit", "target_only", 0.7, layers=1, tree=TREE), None),
        (case_of("early_exit", "recursive", 0.7, layers=1), None),
        (case_of("early_exit", "recursive", 0.7, layers=1, tree=TREE), "this tree was chosen"),
        (case_of("early_exit", "traversal", 0.7, layers=1, tree=TREE, children="without_replacement"), None),
        (case_of("early_exit", "chain", 0.7, layers=1, tree=TREE), "this tree branches"),
        (case_of("early_exit", "block", 0.7, layers=1, tree=((0,), (0, 0), (0, 1)), depth=1), None),
        (case_of("another", "recursive", 0.7), None),
        (case_of("another", "chain", 0.7), None),
        (case_of("another", "traversal", 0.7, children="top"), "this draft was chosen"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_the_plan_skips_what_a_choice_is_not_exact_for(case: Case, skip: str | None) -> None:
    """A drafter that this table does not know is left to the verifier."""
    found = why_not_verified(case, "cpu")
    assert found is None if skip is None else skip in (found or "")


def test_the_plan_skips_traversal_on_triton() -> None:
    case = case_of("early_exit", "traversal", 0.7, layers=1)
    assert why_not_verified(case, "cpu") is None
    assert "no kernel for backend triton" in (why_not_verified(case, "triton") or "")
    assert why_not_verified(case_of("early_exit", "recursive", 0.7, layers=1), "triton") is None


# From a scenario to the verifier -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    text_model(root / "target")
    write_prompts(root / "prompts.jsonl", ("qa-1", "qa", ["Who wrote it?"]), ("qa-2", "qa", ["When? When? When?"]))
    return root


DRAWN_TREE = {"kind": "early_exit", "layers": 1, "tree": [[0], [1], [0, 0]], "children": "without_replacement"}


@pytest.mark.parametrize(
    ("drafter", "choice", "temperature"),
    [
        (DRAWN_TREE, "traversal", 0.8),
        (DRAWN_TREE, "recursive", 0.8),
        (DRAWN_TREE, "greedy", 0.0),
        (DRAWN_TREE | {"children": "top"}, "target_only", 0.8),
        ({"kind": "early_exit", "layers": 1}, "traversal", 0.8),
        ({"kind": "ngram"}, "chain", 0.8),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_scenarios_choice_reaches_the_verifier_and_the_row(
    drafter: dict[str, Any], choice: str, temperature: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    inner = decode_module.verify

    def watched(*args: Any, **options: Any) -> Any:
        seen.add(options["method"])
        return inner(*args, **options)

    monkeypatch.setattr(decode_module, "verify", watched)
    case = one_case(
        drafter,
        target={"model": str(folder / "target"), "dtype": "fp32"},
        workload={"prompts": str(folder / "prompts.jsonl"), "output_len": 8},
        sampling={"temperature": temperature, "verification": choice},
    )
    assert Planner(blocks(), None).plan(case).skip is None
    assert (case.axes["verification"], f" · {choice}" in case.name) == (choice, True)
    with one_thread():
        outcome = measured(case, blocks(2))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert seen == {choice}
    assert outcome.conditions["output_check"] == ("distribution" if temperature else "identical")
