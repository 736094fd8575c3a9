"""Crossings are bracketed by what was measured; closed forms agree with published figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline import breakeven as be
from specbench.roofline.breakeven import Crossing, find_crossing
from specbench.roofline.hardware import hardware
from specbench.roofline.model import critical_tokens


def linear_speedup(batch: float) -> float:
    """AR step 10 ms, speculative step 10 + 1.5 B ms, 2.5 tokens a step: crosses 1 at batch 10."""
    return be.predicted_speedup(2.5, 0.010, (10 + 1.5 * batch) / 1000)


def test_fault_54_bracket_holds_the_true_crossing() -> None:
    assert linear_speedup(10) == pytest.approx(1.0)
    crossing = find_crossing([8, 16], [linear_speedup(8), linear_speedup(16)])
    assert (crossing.kind, crossing.low_batch, crossing.high_batch) == ("bracket", 8, 16)
    assert crossing.estimate == pytest.approx(10, rel=0.03)
    assert crossing.describe() == "(8, 16] ≈ 9.81"
    below = find_crossing([16, 32], [linear_speedup(16), linear_speedup(32)])
    assert (below.kind, below.low_batch, below.high_batch, below.estimate) == ("below_grid", None, 16, None)
    none = find_crossing([1, 2, 4], [linear_speedup(batch) for batch in (1, 2, 4)])
    assert (none.kind, none.low_batch, none.high_batch, none.estimate) == ("none_in_grid", 4, None, None)


def test_fault_57_break_even_from_measured_cost() -> None:
    assert be.break_even_tokens(0.010, 0.015, 4 * 0.001) == pytest.approx(1.9)
    assert be.predicted_speedup(1.9, 0.010, 0.015, 0.004) == pytest.approx(1.0)


def test_fault_10_depth_is_ranked_by_speed_not_by_acceptance() -> None:
    # always 2 accepted: acceptance rate 1, .5, .25 at depth 2, 4, 8 with 3 tokens a step each
    step_s = {2: 0.012, 4: 0.010, 8: 0.016}
    rates = {depth: 3 / seconds for depth, seconds in step_s.items()}
    assert be.best_depth({1: rates, 2: {1: 5.0, 2: 5.0}, 4: {1: None}, 8: {}}) == {1: 4, 2: 1, 4: None, 8: None}


def test_single_point() -> None:
    assert find_crossing([4], [1.2]) == Crossing("none_in_grid", low_batch=4)
    assert find_crossing([4], [0.8]) == Crossing("below_grid", high_batch=4)
    assert find_crossing([4], [1.0]).kind == "unclear"
    assert find_crossing([], []).kind == "no_data"


def test_ties_and_order() -> None:
    crossing = find_crossing([4, 1, 2], [0.8, 1.2, 1.0])
    assert (crossing.low_batch, crossing.high_batch, crossing.estimate) == (1, 4, 2.0)
    assert not crossing.recrosses
    started = find_crossing([1, 2, 4], [1.0, 0.9, 0.8])
    assert (started.kind, started.high_batch) == ("below_grid", 2)


def test_several_crossings_report_the_first_fall() -> None:
    crossing = find_crossing([1, 2, 4, 8], [1.2, 0.9, 1.1, 0.8])
    assert (crossing.low_batch, crossing.high_batch, crossing.recrosses) == (1, 2, True)
    hump = find_crossing([1, 2, 4], [0.9, 1.3, 0.8])
    assert (hump.kind, hump.low_batch, hump.high_batch, hump.recrosses) == ("bracket", 2, 4, True)
    rising = find_crossing([1, 2], [0.9, 1.3])
    assert (rising.kind, rising.low_batch, rising.recrosses) == ("none_in_grid", 2, True)
    assert "more than once" in hump.note


def test_missing_cells_are_named_and_widen_the_bracket() -> None:
    crossing = find_crossing([1, 2, 4, 8], [1.5, 1.2, None, 0.8])
    assert (crossing.low_batch, crossing.high_batch, crossing.skipped) == (2, 8, (4,))
    assert "no value at batch 4" in crossing.note
    empty = find_crossing([1, 2], [None, math.nan])
    assert (empty.kind, empty.skipped) == ("no_data", (1, 2))


def test_interval_is_where_the_bounds_cross() -> None:
    crossing = find_crossing([1, 2, 4, 8], [1.6, 1.2, 0.9, 0.7], [1.5, 1.1, 0.8, 0.6], [1.7, 1.3, 1.1, 0.8])
    assert crossing.interval is not None
    low, high = crossing.interval
    assert low is not None
    assert high is not None
    assert crossing.estimate is not None
    assert 2 < low < crossing.estimate < 4 < high < 8


def test_interval_sides_beyond_the_grid_are_none() -> None:
    right = find_crossing([1, 2], [1.5, 0.95], [1.4, 0.8], [1.6, 1.1])
    assert right.kind == "bracket"
    assert right.interval is not None
    assert right.interval[0] is not None
    assert right.interval[1] is None
    assert "beyond the grid" in right.note
    left = find_crossing([1, 2], [1.1, 0.8], [0.9, 0.7], [1.2, 0.9])
    assert left.interval is not None
    assert left.interval[0] is None
    last = find_crossing([1, 2], [1.5, 1.02], [1.4, 0.97], [1.6, 1.07])
    assert last.kind == "none_in_grid"
    assert last.interval is not None
    assert 1 < (last.interval[0] or 0) < 2
    first = find_crossing([1, 2], [0.98, 0.8], [0.9, 0.7], [1.05, 0.9])
    assert first.kind == "below_grid"
    assert first.interval is not None
    assert first.interval[0] is None
    assert 1 < (first.interval[1] or 0) < 2


def test_certain_ends_have_no_interval() -> None:
    assert find_crossing([1, 2], [1.5, 1.4], [1.4, 1.3], [1.6, 1.5]).interval is None
    assert find_crossing([1, 2], [0.8, 0.7], [0.7, 0.6], [0.9, 0.8]).interval is None


@pytest.mark.parametrize("values", [[1.02, 0.99], [1.02, 1.01], [0.99, 0.98], [1.01]])
def test_intervals_that_include_one_throughout_are_unclear(values: list[float]) -> None:
    crossing = find_crossing(
        [1, 2][: len(values)], list(values), [v - 0.05 for v in values], [v + 0.05 for v in values]
    )
    assert (crossing.kind, crossing.estimate, crossing.interval) == ("unclear", None, None)


def test_a_bound_that_misses_its_estimate_is_widened() -> None:
    crossing = find_crossing([1, 2], [1.2, 0.8], [1.3, 0.9], [1.1, 0.7])
    assert crossing.interval == pytest.approx((crossing.estimate, crossing.estimate))


def test_missing_bounds_give_no_interval() -> None:
    crossing = find_crossing([1, 2], [1.2, 0.8], [1.1, None], [1.3, 0.9])
    assert (crossing.kind, crossing.interval) == ("bracket", None)
    assert "bounds are missing" in crossing.note


def test_wrong_input() -> None:
    with pytest.raises(InputError, match="differ in length"):
        find_crossing([1, 2], [1.0])
    with pytest.raises(InputError, match="once each"):
        find_crossing([1, 1], [1.0, 2.0])
    with pytest.raises(InputError):
        be.expected_tokens(1.1, 3)


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=8), st.floats(0.01, 0.5))
def test_never_extrapolates(values: list[float], half: float) -> None:
    batches = [2**index for index in range(len(values))]
    crossing = find_crossing(batches, values, [v * (1 - half) for v in values], [v * (1 + half) for v in values])
    sides = [side for side in crossing.interval or () if side is not None]
    estimates = [crossing.estimate] if crossing.estimate is not None else []
    for point in sides + estimates:
        assert batches[0] <= point * (1 + 1e-9)
        assert point <= batches[-1] * (1 + 1e-9)
    if crossing.kind == "bracket":
        assert crossing.low_batch is not None
        assert crossing.high_batch is not None
        assert crossing.estimate is not None
        low, high = crossing.interval or (None, None)
        assert crossing.low_batch <= crossing.estimate <= crossing.high_batch
        assert low is None or low <= crossing.estimate * (1 + 1e-9)
        assert high is None or crossing.estimate <= high * (1 + 1e-9)
        assert values[batches.index(crossing.low_batch)] > 1 > values[batches.index(crossing.high_batch)]


PUBLISHED = {0.6: (1.60, 2.18, 2.38, 2.46), 0.7: (1.70, 2.53, 2.94, 3.14), 0.8: (1.80, 2.95, 3.69, 4.16)}


@pytest.mark.parametrize("alpha", PUBLISHED)
def test_expected_tokens(alpha: float) -> None:
    for gamma, want in zip((1, 3, 5, 7), PUBLISHED[alpha], strict=True):
        assert be.expected_tokens(alpha, gamma) == pytest.approx(want, abs=0.006)
        assert be.expected_tokens_curve([alpha] * gamma) == pytest.approx(be.expected_tokens(alpha, gamma))
        assert be.break_even_alpha(be.expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-6)
    assert be.expected_tokens(1.0, 7) == 8
    assert be.expected_tokens_curve([0.92, 0.68, 0.38]) == pytest.approx(1 + 0.92 + 0.6256 + 0.237728)
    assert be.break_even_alpha(9.0, 7) is None
    assert be.break_even_alpha(0.9, 7) == 0.0


@pytest.mark.parametrize(
    ("alpha", "want"), [(0.6, (229, 150, 105, 78)), (0.7, (244, 176, 132, 103)), (0.8, (258, 207, 169, 141))]
)
def test_closed_form_batch_on_h100(alpha: float, want: tuple[int, ...]) -> None:
    roof = hardware("h100-sxm").roof("bf16")
    assert roof is not None
    tokens = critical_tokens(roof, 2)
    for gamma, batch in zip((1, 3, 5, 7), want, strict=True):
        got = be.closed_form_batch(tokens, be.expected_tokens(alpha, gamma), gamma, 0.05)
        assert got == pytest.approx(batch, abs=1.0)
    assert be.closed_form_batch(tokens, 1.0, 7, 0.2) is None


def test_implied_overhead() -> None:
    assert be.implied_overhead(5.71, 3.02) == pytest.approx(0.89, abs=0.005)
    with pytest.raises(InputError):
        be.implied_overhead(2.0, 0.0)
