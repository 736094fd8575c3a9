"""Shapes that follow the draft's entropy: the rules by hand, their law by enumeration, and drafters that use them."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from exact_law import (
    Context,
    Model,
    Row,
    completed,
    constant,
    first_token_law,
    history_draft,
    history_target,
    mean_emitted,
    sequence_law,
)
from tree_law import TreeRule, children_drawn, drawn_law, traversal_outcomes, tree_laws, tree_outcomes

from specbench.engine.drafters.adaptive import (
    AdaptiveRules,
    AdaptiveShape,
    EntropyBudget,
    EntropyStopper,
    StopRule,
    entropies,
)
from specbench.engine.tree import TokenTree
from specbench.engine.verify import verify_sequential, verify_traversal
from specbench.errors import InputError
from specbench.scenario.cases import expand
from specbench.scenario.schema import Scenario

# The rules by hand ---------------------------------------------------------------------------------------------------


def test_the_entropy_of_rows_is_in_nats() -> None:
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]])
    expected = [math.log(4), 0.0, math.log(2), -0.7 * math.log(0.7) - 0.3 * math.log(0.1)]
    assert entropies(rows) == pytest.approx(expected, abs=1e-6)
    assert entropies(rows)[3] == entropies(rows[3:])[0]


def test_lambda_of_seven_tenths_stops_above_045_nats() -> None:
    """H > (1 - lambda)^2 / gamma; the first level is drafted whatever its entropy."""
    stopper = EntropyStopper(StopRule(0.7, gamma=0.2))
    assert stopper.allows(0.4499, 1)
    assert not stopper.allows(0.4501, 1)
    assert not stopper.allows(0.4501, 7)
    assert stopper.allows(9.0, 0)
    assert not EntropyStopper(StopRule(0.7, gamma=0.4)).allows(0.4499, 1)


def test_the_hand_worked_trace_of_lambda() -> None:
    """Target .85, lambda .5, drafts of up to 4 levels: 4/4, 1/4, 4/4, 3/3."""
    stopper = EntropyStopper(StopRule(0.5, target=0.85))
    assert stopper.rate == 0.85
    found = []
    for accepted, drafted in ((4, 4), (1, 4), (4, 4), (3, 3)):
        stopper.observe(drafted, accepted, 4)
        found.append((stopper.rate, stopper.bound))
    assert [rate for rate, _ in found] == pytest.approx([0.925, 0.5875, 0.79375, 0.896875], abs=1e-12)
    assert [bound for _, bound in found] == pytest.approx([0.5, 0.501, 0.502, 0.501], abs=1e-12)


def test_nothing_drafted_teaches_nothing_and_without_a_target_lambda_stays() -> None:
    stopper = EntropyStopper(StopRule(0.5, target=0.85))
    stopper.observe(0, 0, 0)
    assert (stopper.rate, stopper.bound) == (0.85, 0.5)
    fixed = EntropyStopper(StopRule(0.5))
    fixed.observe(4, 0, 4)
    assert fixed.bound == 0.5


def test_a_new_request_starts_anew() -> None:
    """Fault 56: what one request taught does not reach the next."""
    stopper = EntropyStopper(StopRule(0.5, target=0.85))
    for _ in range(5):
        stopper.observe(4, 0, 4)
    assert stopper.bound > 0.5
    stopper.start(None)
    assert (stopper.rate, stopper.bound) == (0.85, 0.5)


def test_a_budget_is_spent_along_the_path() -> None:
    """Two children of the root, each with a child: the entropies above a node add up, those beside it do not."""
    shape = AdaptiveShape(AdaptiveRules(budget=EntropyBudget(1.0)))
    shape.begin(4, 1)
    assert shape.feeds(-1)
    shape.grown(-1, (0, 1), 0.6)
    shape.grown(0, (2,), 0.4)
    shape.grown(1, (3,), 0.5)
    assert [shape.feeds(node) for node in range(4)] == [True, True, True, False]
    assert shape.expands(1, 99.0)
    shape.begin(4, 2)
    shape.grown(-1, (0,), 5.0)
    assert shape.feeds(-1)
    assert not shape.feeds(0)


def test_levels_are_those_of_the_tree() -> None:
    shape = AdaptiveShape(AdaptiveRules(StopRule(0.5, target=0.85)))
    shape.begin(3, 7)
    assert shape.expands(-1, 9.0)
    shape.grown(-1, (0, 1), 9.0)
    assert not shape.expands(1, 9.0)
    shape.grown(0, (2,), 0.1)
    shape.begin(3, 7 + 2 + 1)
    stopper = shape.stopper
    assert stopper is not None
    assert stopper.rate == pytest.approx(0.925)  # 2 of 2 levels
    assert stopper.bound == pytest.approx(0.499)  # and there was room for 3


def test_rules_are_read_from_a_drafters_options() -> None:
    assert AdaptiveRules.of({"layers": 8, "stop_below": None}) is None
    full = {"stop_below": 0.7, "stop_gamma": 0.3, "stop_target": 0.9, "entropy_budget": 2}
    assert AdaptiveRules.of(full) == AdaptiveRules(StopRule(0.7, 0.3, 0.9), EntropyBudget(2.0))
    assert AdaptiveRules.of({"stop_below": 0.7}) == AdaptiveRules(StopRule(0.7, 0.2, None))
    assert AdaptiveRules.of({"entropy_budget": 0.0}) == AdaptiveRules(None, EntropyBudget(0.0))


# Their law -----------------------------------------------------------------------------------------------------------

Keep = Callable[[int, Row], bool]


def nats(law: Row) -> float:
    return -sum(float(x) * math.log(x) for x in law if x)


def grown_trees(
    draft: Model,
    widths: Sequence[int],
    siblings: str,
    adaptive: AdaptiveShape,
    keep: Keep = lambda token, law: True,
    num_tokens: int = 1,
) -> Iterator[tuple[TokenTree, F]]:
    """Every tree that a drafter with `adaptive` draws, with its probability. `keep` judges each token after it was
    drawn, by its own law: one that is not kept is dropped, with all below it."""

    def level(
        tokens: list[int], parents: list[int], frontier: list[tuple[int, Context]], state: AdaptiveShape, depth: int
    ) -> Iterator[tuple[TokenTree, F]]:
        fed = [(node, context) for node, context in frontier if state.feeds(node)] if depth < len(widths) else []
        fed = [(node, context) for node, context in fed if state.expands(node, nats(draft(context)))]
        if not fed:
            yield TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)), F(1)
            return
        draws = [list(children_drawn(draft(context), widths[depth], siblings)) for _, context in fed]
        for chosen in itertools.product(*draws):
            more, above, below, after = list(tokens), list(parents), [], copy.deepcopy(state)
            share = F(1)
            for (node, context), (children, mass) in zip(fed, chosen, strict=True):
                share *= mass
                kept = [token for token in children if keep(token, draft(context))]
                numbers = range(len(more), len(more) + len(kept))
                below += [(number, (*context, token)) for number, token in zip(numbers, kept, strict=True)]
                more += kept
                above += [node] * len(kept)
                after.grown(node, numbers, nats(draft(context)))
            for tree, mass in level(more, above, below, after, depth + 1):
                yield tree, share * mass

    state = copy.deepcopy(adaptive)
    state.begin(len(widths), num_tokens)
    yield from level([], [], [(-1, ())], state, 0)


JUDGES: dict[str, tuple[TreeRule, Callable]] = {
    "sequential": (verify_sequential, tree_outcomes),
    "traversal": (verify_traversal, traversal_outcomes),
}


def adaptive_law(
    judge: str,
    widths: Sequence[int],
    siblings: str,
    adaptive: AdaptiveShape,
    target: Model,
    draft: Model,
    **options: Keep,
) -> tuple[dict[Context, F], set[tuple[int, ...]]]:
    """Law of one step's emission, and the shapes that came about."""
    rule, outcomes = JUDGES[judge]
    law: dict[Context, F] = defaultdict(F)
    shapes = set()
    for tree, mass in grown_trees(draft, widths, siblings, adaptive, **options):
        shapes.add(tuple(tree.parents.tolist()))
        for emitted, share in outcomes(rule, target, tree, draft if len(tree) else None, siblings).items():
            law[emitted] += mass * share
    return law, shapes


STOP = AdaptiveRules(StopRule(0.55))  # laws of .956 nats go on, of 1.079 nats stop
BUDGET = AdaptiveRules(budget=EntropyBudget(1.95))
RULES = {"stop": STOP, "budget": BUDGET, "both": AdaptiveRules(STOP.stop, BUDGET.budget)}


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    ("name", "widths", "siblings"),
    [
        ("stop", (1, 1, 1), "independent"),
        ("budget", (1, 1, 1), "independent"),
        ("both", (1, 1, 1), "independent"),
        ("stop", (2, 1), "without_replacement"),
        ("stop", (2, 1), "independent"),
        ("budget", (2, 1, 1), "without_replacement"),
    ],
)
def test_entropy_rules_keep_the_targets_law(name: str, widths: tuple[int, ...], siblings: str, judge: str) -> None:
    adaptive = AdaptiveShape(RULES[name])
    law, shapes = adaptive_law(judge, widths, siblings, adaptive, history_target, history_draft)
    assert len(shapes) > 1, "the rule never decided anything"
    length = len(widths) + 1
    assert completed(law, history_target, length) == sequence_law(history_target, length)


def test_a_stop_saves_drafts_at_little_cost() -> None:
    full = drawn_law(verify_sequential, history_target, history_draft, (1, 1), "independent")
    less, _ = adaptive_law("sequential", (1, 1), "independent", AdaptiveShape(STOP), history_target, history_draft)
    one = drawn_law(verify_sequential, history_target, history_draft, (1,), "independent")
    assert mean_emitted(one) < mean_emitted(less) < mean_emitted(full)


def following(model: Model, root: Context) -> Model:
    return lambda context: model((*root, *context))


def test_an_adapting_lambda_keeps_the_law_over_steps() -> None:
    """Two steps of one request: the second's lambda knows what the first one's verdict was."""
    start = 0.5622  # a thousandth more, and a law of .956 nats stops too
    first = AdaptiveShape(AdaptiveRules(StopRule(start, target=0.85)))
    law: dict[Context, F] = defaultdict(F)
    bounds, drafted = set(), defaultdict(set)
    for tree, mass in grown_trees(history_draft, (1, 1), "independent", first):
        for emitted, share in tree_outcomes(
            verify_sequential, history_target, tree, history_draft, "independent"
        ).items():
            second = copy.deepcopy(first)
            second.begin(2, 1)
            second.grown(-1, (0,), 0.0)
            if len(tree) > 1:
                second.grown(0, (1,), 0.0)
            second.begin(2, 1 + len(emitted))
            assert second.stopper is not None
            bounds.add(second.stopper.bound)
            after, before = following(history_target, emitted), following(history_draft, emitted)
            for more, part in grown_trees(before, (1, 1), "independent", second):
                drafted[second.stopper.bound].add(len(more))
                for tail, piece in tree_outcomes(verify_sequential, after, more, before, "independent").items():
                    law[(*emitted, *tail)] += mass * share * part * piece
    assert len(bounds) > 1
    assert drafted[max(bounds)] == {1}
    assert drafted[min(bounds)] == {1, 2}
    assert completed(law, history_target, 6) == sequence_law(history_target, 6)


def likely(token: int, law: Row) -> bool:
    return law[token] >= F(1, 4)


A = constant("1/2", "3/10", "1/5"), constant("1/5", "3/10", "1/2")


def test_dropping_a_token_for_its_own_probability_is_not_lossless() -> None:
    """Its position is then sampled from p: (.4, .36, .24) instead of (.5, .3, .2). The same machinery, the same draft,
    with a stop that looks at the law alone, gives p."""
    off = AdaptiveShape(AdaptiveRules())
    wrong, shapes = adaptive_law("sequential", (1,), "independent", off, *A, keep=likely)
    assert shapes == {(), (-1,)}
    assert first_token_law(wrong, 3) == (F(2, 5), F(9, 25), F(6, 25))
    assert completed(wrong, A[0], 2) != sequence_law(A[0], 2)
    for rules in (AdaptiveRules(), STOP, AdaptiveRules(budget=EntropyBudget(0.0))):
        right, _ = adaptive_law("sequential", (1, 1), "independent", AdaptiveShape(rules), *A)
        assert first_token_law(right, 3) == A[0](())
        assert completed(right, A[0], 3) == sequence_law(A[0], 3)


def test_dropping_one_of_two_siblings_is_not_lossless_either() -> None:
    off = AdaptiveShape(AdaptiveRules())
    for judge in JUDGES:
        wrong, _ = adaptive_law(judge, (2,), "independent", off, *A, keep=likely)
        assert first_token_law(wrong, 3) != A[0](())


def test_taking_the_best_token_but_judging_it_as_sampled_is_not_lossless() -> None:
    """(.6, 0, .4); as a chosen token it is."""
    best = TokenTree.chain(np.array([2]))
    p, q = tree_laws(A[0], best, A[1])
    assert q is not None
    told = tree_outcomes(verify_sequential, A[0], best, A[1], "independent")
    assert first_token_law(told, 3) == (F(3, 5), F(0), F(2, 5))
    assert first_token_law(tree_outcomes(verify_sequential, A[0], best, None, "chosen"), 3) == p[0]


# The scenario --------------------------------------------------------------------------------------------------------


def scenario(**options: Any) -> Scenario:
    drafter = {"kind": "early_exit", "layers": 8} | options
    data = {"name": "n", "question": "q?", "target": {"model": "m"}, "drafters": [drafter], "sweep": {"depth": 4}}
    return Scenario.from_dict(data)


def test_the_rules_are_axes_and_leave_other_cases_as_they_were() -> None:
    plain = expand(scenario())
    cases = expand(scenario(stop_below=[None, 0.5, 0.7], entropy_budget=[None, 2]))
    assert [case.drafter.name for case in cases] == [
        "early_exit(8)",
        "early_exit(8, entropy budget 2)",
        "early_exit(8, stop below 0.5)",
        "early_exit(8, entropy budget 2, stop below 0.5)",
        "early_exit(8, stop below 0.7)",
        "early_exit(8, entropy budget 2, stop below 0.7)",
    ]
    assert cases[0].hash == plain[0].hash
    assert len({case.hash for case in cases}) == 6
    full = expand(scenario(stop_below=0.7, stop_gamma=0.3, stop_target=0.85))[0].drafter
    assert AdaptiveRules.of(dict(full.options)) == AdaptiveRules(StopRule(0.7, 0.3, 0.85))
    assert AdaptiveRules.of(dict(plain[0].drafter.options)) is None


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"stop_gamma": 0.3}, "drafters.stop_gamma", "belongs to stop_below"),
        ({"stop_target": 0.9, "stop_below": [None, 0.5]}, "drafters.stop_target", "belongs to stop_below"),
        ({"stop_below": 1.5}, "drafters.stop_below", "out of range"),
        ({"stop_below": 0.5, "stop_gamma": 0}, "drafters.stop_gamma", "out of range"),
        ({"entropy_budget": -1}, "drafters.entropy_budget", "out of range"),
    ],
)
def test_rules_that_mean_nothing_are_refused(options: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        scenario(**options)
    assert re.sub(r"\[\d+\]", "", str(caught.value.key)) == key
