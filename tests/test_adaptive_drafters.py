"""Drafters with entropy rules, in the engine: what they draft is what the laws say, and outputs keep their law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_tools import one_case, one_thread, text_model
from coin_law import Draft, ForcedCoins, TinyLaw, Tokens, cells
from engine_tools import decode, history_logits, make_decoder, make_request, outputs, perturbed
from engine_world import V, World, build_world
from test_decode_law import coin_paths

from specbench.bench.target import Target
from specbench.engine import decode as decode_module
from specbench.engine.drafters import levels as levels_module
from specbench.engine.drafters.adaptive import AdaptiveRules, EntropyBudget, StopRule, entropies
from specbench.engine.drafters.base import Drafter, DraftPass
from specbench.engine.drafters.levels import DynamicShape, LevelDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.models.decoder import Decoder
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams, distribution
from specbench.engine.verify import Proposal

WIDE = StaticTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [0, 1, 0], [2, 0, 0], [2, 0, 1]])
RULES = {
    "stop": AdaptiveRules(StopRule(0.6)),
    "budget": AdaptiveRules(budget=EntropyBudget(0.9)),
    "both": AdaptiveRules(StopRule(0.5), EntropyBudget(1.2)),
}


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


def drafter_of(
    world: World,
    who: str,
    tree: StaticTree | DynamicShape | None,
    children: str | None,
    rules: AdaptiveRules | None,
    target: Decoder | None = None,
) -> LevelDrafter:
    if who == "early exit":
        return EarlyExitDrafter(target or world.target, 1, tree, children).adapting(rules)  # type: ignore[arg-type]
    decoder = make_decoder(world.spec, perturbed(world.weights, 0.08), max_rows=48)
    return DraftModelDrafter(decoder, V, tree, children).adapting(rules)  # type: ignore[arg-type]


class Watched:
    """Passes everything on to a drafter; keeps each proposal with the tokens before it and the levels allowed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.synthetic, self.capture = inner, inner.synthetic, inner.capture
        self.seen: list[tuple[ActiveRequest, Tokens, int, Proposal]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = self.inner.propose(active, depths)
        for one, depth, proposal in zip(active, depths, proposals, strict=True):
            self.seen.append((one, (*one.request.prompt_ids, *one.tokens), depth, proposal))
        return proposals


def nats(law: np.ndarray) -> float:
    law = law[law > 0]
    return float(-(law * np.log(law)).sum())


# What is drafted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("tree", "children", "temperature"),
    [
        (None, None, 0.0),
        (None, "independent", 0.9),
        (WIDE, "top", 0.9),
        (WIDE, "without_replacement", 0.9),
        (WIDE, "top", 0.0),
    ],
    ids=["greedy chain", "drawn chain", "chosen tree", "drawn tree", "greedy tree"],
)
@pytest.mark.parametrize("who", ["draft model", "early exit"])
def test_a_node_has_children_where_the_rules_say(
    world: World, who: str, tree: StaticTree | None, children: str | None, temperature: float, name: str
) -> None:
    """Against laws computed from scratch: of the draws where children are drawn, else the model's plain softmax."""
    rules = RULES[name]
    target = make_decoder(world.spec, world.weights, max_rows=64, max_context=144)
    watched = Watched(drafter_of(world, who, tree, children, rules, target))
    params = SamplingParams(temperature, seed=3)
    requests = [replace(one, params=params) for one in world.requests]
    trace = decode(target, requests, watched, batch_size=3, depth=3)  # type: ignore[arg-type]
    if temperature == 0:
        assert outputs(trace) == world.truth
    weights = world.weights if who == "early exit" else perturbed(world.weights, 0.08)
    scratch = make_decoder(world.spec, weights, max_rows=80)
    drawn = children in ("independent", "without_replacement") and temperature > 0
    decided: Counter[bool] = Counter()
    for _, text, depth, proposal in watched.seen:
        shape = StaticTree.chain(depth) if tree is None else tree.cut(depth)
        place_of = {-1: -1}
        spent = {-1: 0.0}
        for node in range(-1, len(proposal.tree)):
            wanted = shape.children[place_of[node] + 1]
            nodes = proposal.tree.children[node + 1]
            path = proposal.tree.path_to(node)
            if not wanted:
                assert not nodes
                continue
            tokens = proposal.tree.tokens[list(path)].tolist()
            logits = history_logits(scratch, (*text, *tokens), 1 if who == "early exit" else None)[-1:]
            law = distribution(logits, [params])[0] if drawn else logits.softmax(dim=-1)[0]
            entropy = nats(law.numpy())
            going = rules.budget is None or rules.budget.allows(spent[node])
            if rules.stop is not None and path:
                going = going and 1 - math.sqrt(0.2 * entropy) >= rules.stop.below
            assert bool(nodes) == going
            if path:
                decided[going] += 1
            for child, place in zip(nodes, wanted, strict=False):
                place_of[child], spent[child] = place, spent[node] + entropy
    assert decided[True] > 5
    assert decided[False] > 5


@pytest.mark.parametrize("name", RULES)
def test_a_dynamic_tree_goes_on_where_the_rules_let_it(world: World, name: str) -> None:
    """Greedy outputs stand, fewer nodes are fed and named, and nothing grows below a node that was stopped."""
    found = {}
    for rules in (None, RULES[name]):
        drafter = drafter_of(world, "draft model", DynamicShape(3, 12), None, rules)
        target = make_decoder(world.spec, world.weights, max_rows=64, max_context=144)
        trace = decode(target, world.requests, drafter, batch_size=3, depth=4)
        assert outputs(trace) == world.truth
        found[rules is None] = (int(trace.num_draft.sum()), float(trace.flops.sum()))
    assert 0 < found[False][0] < found[True][0]
    assert found[False][1] < found[True][1]


def test_a_budget_is_not_even_fed(world: World) -> None:
    """A node without children left to it costs no row of a draft pass; a stop costs the row that told it."""

    def fed(rules: AdaptiveRules | None) -> int:
        drafter = Passes(drafter_of(world, "draft model", None, None, rules))
        trace = decode(world.target, world.requests[:3], drafter, batch_size=3, depth=4)  # type: ignore[arg-type]
        assert trace.num_draft.max() == 1 if rules is not None else True
        return max(len(passes) for passes in drafter.by_step if passes)

    assert fed(None) == 4
    assert fed(AdaptiveRules(budget=EntropyBudget(0.0))) == 1
    assert fed(AdaptiveRules(StopRule(1.0))) == 2


class Passes(Watched):
    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.by_step: list[list[DraftPass]] = []

    def take_passes(self) -> list[DraftPass]:
        self.by_step.append(self.inner.take_passes())
        return self.by_step[-1]


# Requests of their own -----------------------------------------------------------------------------------------------

ADAPTING = AdaptiveRules(StopRule(0.62, target=0.95))


@pytest.mark.parametrize("who", ["draft model", "early exit"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_adapting_stop_does_not_depend_on_the_batch_or_on_what_ran_before(
    world: World, who: str, temperature: float
) -> None:
    """Fault 56: alone, in batches of two orders, and after other requests in the same slots."""
    requests = [replace(one, params=SamplingParams(temperature, seed=2)) for one in world.requests]

    def rows(order: Sequence, batch_size: int) -> dict[str, list[tuple[int, int]]]:
        drafter = drafter_of(world, who, None, None, ADAPTING)
        trace = decode(world.target, order, drafter, batch_size=batch_size, depth=4)
        found: dict[str, list[tuple[int, int]]] = {}
        for row, drafted, accepted in zip(trace.row_request, trace.num_draft, trace.num_accepted, strict=True):
            found.setdefault(trace.requests[row].request_id, []).append((int(drafted), int(accepted)))
        return found

    together = rows(requests, 1)
    for one in requests:
        assert rows([one], 1)[one.request_id] == together[one.request_id]
    assert rows(requests, 3) == together
    assert rows(requests[::-1], 4) == together


def test_lambda_follows_the_verdicts(world: World) -> None:
    """The stopper of a slot is, at the last draft, where the published rule leads, given the counts of those before."""
    drafter = drafter_of(world, "early exit", None, None, ADAPTING)
    seen: dict[str, float] = {}
    inner = drafter.finish

    def finish(active: ActiveRequest) -> None:
        stopper = drafter._shapes[active.slot].stopper
        assert stopper is not None
        seen[active.request.request_id] = stopper.bound
        inner(active)

    drafter.finish = finish  # type: ignore[method-assign]
    trace = decode(world.target, world.requests, drafter, batch_size=2, depth=4)
    assert ADAPTING.stop is not None
    for row, request in enumerate(trace.requests):
        mine = trace.row_request == row
        rate, bound, left = 0.95, ADAPTING.stop.below, len(request.token_ids) - 1
        counts = (trace.num_draft[mine], trace.num_accepted[mine], trace.num_committed[mine])
        for drafted, accepted, committed in zip(*(column.tolist()[:-1] for column in counts), strict=True):
            room = min(4, left - 1)
            left -= committed
            if not drafted:
                continue
            rate = 0.5 * rate + 0.5 * accepted / drafted
            wanted = bound + 0.01 if rate < 0.95 else bound if accepted == drafted == room else bound - 0.01
            bound = 0.9 * bound + 0.1 * wanted
        assert seen[request.request_id] == pytest.approx(bound, abs=1e-12)
    assert len(set(seen.values())) > 1


# The law -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["stop", "budget"])
@pytest.mark.parametrize("method", ["chain", "sequential"])
def test_the_whole_engine_has_the_targets_law_with_a_rule(
    which: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All coins of a request, cut into the cells on which its output is constant; the drafts that the rule leaves are
    written from the definitions."""
    depth, length = 2, 4
    tiny = TinyLaw(3, SamplingParams(1.0, seed=0))
    laws = [tiny.law("target", tokens, 1) for size in (1, 2, 3) for tokens in np.ndindex(*[3] * size)]
    middle = float(np.median([nats(law) for law in laws])) + 1e-6
    stop, budget = (StopRule(1 - math.sqrt(0.2 * middle)), None) if which == "stop" else (None, EntropyBudget(middle))
    lengths: Counter[int] = Counter()

    def drafts(tokens: Tokens, room: int) -> Iterator[Draft]:
        def grow(
            draft: Tokens, coins: tuple[float, ...], q: list[np.ndarray], share: float, spent: float
        ) -> Iterator[Draft]:
            law = tiny.law("target", (*tokens, *draft), 1)
            entropy = nats(law)
            over = len(draft) == room or (which == "budget" and spent > middle)
            if over or (which == "stop" and draft and entropy > middle):
                lengths[len(draft)] += 1
                yield draft, coins, q, share
                return
            for token, probability, coin in cells(law):
                yield from grow((*draft, token), (*coins, coin), [*q, law], share * probability, spent + entropy)

        yield from grow((), (), [], 1.0, 0.0)

    paths = list(coin_paths(tiny.target, drafts, depth, length))
    assert lengths[1] > 0 < lengths[2]
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    monkeypatch.setattr(levels_module, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16)
    drafter = EarlyExitDrafter(target, 1).adapting(AdaptiveRules(stop, budget))
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=tiny.params) for i in range(len(paths))]
    found = outputs(decode(target, requests, drafter, batch_size=16, depth=depth, method=method))
    emitted: Counter[Tokens] = Counter()
    for i, path in enumerate(paths):
        assert found[str(i)] == path.output
        emitted[path.output] += path.volume  # type: ignore[assignment]
    expected = tiny.output_law(length)
    assert set(emitted) == set(expected)
    for tokens, probability in expected.items():
        assert emitted[tokens] == pytest.approx(probability, abs=1e-9)


def test_the_entropy_of_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    laws = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(49_152), size=5), dtype=torch.float32)
    alone = [entropies(laws[row : row + 1])[0] for row in range(5)]
    assert entropies(laws) == alone
    assert entropies(laws[[3, 1]]) == [alone[3], alone[1]]


@pytest.mark.parametrize("kind", ["early_exit", "draft_model"])
def test_a_scenarios_rules_reach_the_drafter(kind: str, tmp_path: Path) -> None:
    text_model(tmp_path / "target")
    model = {"kind": kind} | ({"layers": 1} if kind == "early_exit" else {"model": str(tmp_path / "target")})
    target = {"model": str(tmp_path / "target"), "dtype": "fp32"}
    for options, rules in (
        ({}, None),
        (
            {"stop_below": 0.7, "stop_target": 0.9, "entropy_budget": 2},
            AdaptiveRules(StopRule(0.7, target=0.9), EntropyBudget(2.0)),
        ),
    ):
        case = one_case(model | options, target=target)
        with one_thread():
            drafter = Target(case.target).drafter(case, 64)
        assert isinstance(drafter, LevelDrafter)
        assert drafter._rules == rules
