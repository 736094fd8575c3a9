"""Acceptance by position: yields by hand and by exact enumeration, and what no curve can be."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline.acceptance import LONG_OUTPUT, AcceptanceCurve
from specbench.roofline.breakeven import expected_tokens

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.6, 1), (0.7, 3), (0.8, 5), (0.9, 7), (0.0, 4), (1.0, 4)])
def test_a_constant_curve_is_the_closed_form(alpha: float, gamma: int) -> None:
    assert AcceptanceCurve.constant(alpha).expected_tokens(gamma) == pytest.approx(expected_tokens(alpha, gamma))


def test_published_values_of_the_closed_form() -> None:
    curve = AcceptanceCurve.constant(0.8)
    assert [round(curve.expected_tokens(depth), 2) for depth in (1, 3, 5, 7)] == [1.80, 2.95, 3.69, 4.16]


def test_a_falling_curve_yields_less_than_its_first_rate_promises() -> None:
    curve = AcceptanceCurve.from_joint([0.92, 0.68, 0.38])
    assert curve.conditional == pytest.approx((0.92, 0.68 / 0.92, 0.38 / 0.68))
    assert curve.expected_tokens(3) == pytest.approx(1 + 0.92 + 0.68 + 0.38)
    assert curve.expected_tokens(3) < expected_tokens(0.92, 3)


def test_the_last_rate_holds_beyond_the_curve() -> None:
    curve = AcceptanceCurve((0.8, 0.5))
    assert curve.rates(4) == (0.8, 0.5, 0.5, 0.5)
    assert curve.joint(3) == pytest.approx((0.8, 0.4, 0.2))
    assert curve.expected_tokens(0) == 1


def test_from_a_row_counts_steps_without_a_draft() -> None:
    """Fault 1's counts: k=3, accepted 3, 0, 1; and two steps that drafted nothing."""
    metrics: dict[str, Any] = {"accepted_histogram": [1, 1, 0, 1], "num_steps": 5, "num_draft_tokens": 9}
    curve = AcceptanceCurve.from_row(metrics, num_nodes=3)
    assert curve.expected_tokens(3) == pytest.approx(1 + 4 / 5)
    assert curve.drafted == pytest.approx(9 / 15)
    assert curve.step_yield(3, 10).drafted_share == pytest.approx(0.6)
    assert curve.status == "measured"


def test_from_a_row_without_a_histogram() -> None:
    assert AcceptanceCurve.from_row({"acceptance_conditional_at": [0.8, None]}).conditional == (0.8, 0.0)
    assert AcceptanceCurve.from_row({"acceptance_at": [0.8, 0.4]}).conditional == pytest.approx((0.8, 0.5))
    with pytest.raises(InputError, match="no acceptance by position"):
        AcceptanceCurve.from_row({"num_steps": 3})


def test_a_forced_length_is_had_exactly() -> None:
    for length in (1.0, 1.5, 2.0, 3.25, 4.0):
        assert AcceptanceCurve.of_length(length, 3).expected_tokens(3) == pytest.approx(length)
    with pytest.raises(InputError, match="can't be had"):
        AcceptanceCurve.of_length(4.5, 3)


@pytest.mark.parametrize(
    "rates", [(-0.1,), (1.1,), (0.5, float("nan")), (0.5, float("inf")), (True,), ("0.5",), (80,)], ids=repr
)
def test_rates_outside_0_to_1_are_refused(rates: Any) -> None:
    with pytest.raises(InputError, match="acceptance at position") as caught:
        AcceptanceCurve(rates)
    assert "between 0 and 1" in str(caught.value.remedy)


def test_a_rising_joint_curve_is_refused() -> None:
    with pytest.raises(InputError, match=r"rises from 0\.5 to 0\.6 at position 2") as caught:
        AcceptanceCurve.from_joint([0.5, 0.6])
    assert "can only fall" in str(caught.value.remedy)
    assert AcceptanceCurve.from_joint([0.5, 0.5, 0.0, 0.0]).conditional == (0.5, 1.0, 0.0, 0.0)


def test_empty_and_absurd_curves_are_refused() -> None:
    for call in (lambda: AcceptanceCurve(()), lambda: AcceptanceCurve((0.5,) * 5000)):
        with pytest.raises(InputError):
            call()
    with pytest.raises(InputError, match="depth"):
        AcceptanceCurve((0.5,)).rates(-1)
    with pytest.raises(InputError, match="output"):
        AcceptanceCurve((0.5,)).expected_tokens(2, 0)


def enumerated_steps(rates: tuple[float, ...], output: int) -> float:
    """E[steps] of a request by walking every outcome of its coins."""
    if output <= 0:
        return 0.0
    depth = min(len(rates), output - 1)
    total = 1.0
    for coins in product((0, 1), repeat=depth):
        accepted = next((index for index, coin in enumerate(coins) if not coin), depth)
        chance = 1.0
        for rate, coin in zip(rates, coins, strict=False):
            chance *= rate if coin else 1 - rate
        if chance:
            total += chance * enumerated_steps(rates, output - 1 - accepted)
    return total


@given(RATES.filter(lambda rates: len(rates) <= 3), st.integers(1, 6))
def test_a_short_request_yields_what_enumeration_says(rates: list[float], output: int) -> None:
    curve = AcceptanceCurve(tuple(rates))
    found = curve.step_yield(len(rates), output)
    assert found.tokens == pytest.approx(output / enumerated_steps(tuple(rates), output))
    assert 0 <= found.drafted_share <= 1


def test_an_oracle_of_depth_5_over_31_tokens() -> None:
    """Five steps of six tokens and a last one of one, which drafts nothing."""
    found = AcceptanceCurve((1.0,)).step_yield(5, 31)
    assert found.tokens == pytest.approx(31 / 6)
    assert found.drafted_share == pytest.approx(5 / 6)


@given(RATES, st.integers(1, 8))
def test_a_long_request_is_as_good_as_an_endless_one(rates: list[float], depth: int) -> None:
    curve = AcceptanceCurve(tuple(rates))
    endless = curve.expected_tokens(depth)
    assert 1 <= endless <= depth + 1
    assert curve.expected_tokens(depth, 2000) == pytest.approx(endless, rel=0.01)
    assert curve.expected_tokens(depth, LONG_OUTPUT + 1) == endless
    assert curve.expected_tokens(depth, 4) <= endless + 1e-9
