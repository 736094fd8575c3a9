"""Statistics: exact values where there are any, and simulated coverage where there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from specbench import stats
from specbench.errors import InputError
from specbench.stats import Interval

Arms = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def draw(rng: np.random.Generator, n: int) -> Arms:
    """n prompts: lengths vary, tokens per step are skewed, both arms see the same prompt's slowness."""
    length = rng.integers(24, 65, n).astype(float)
    tokens_per_step = np.clip(rng.lognormal(0.6, 0.45, n), 1, 6)
    slow = rng.lognormal(0, 0.1, n)
    return length, length / tokens_per_step * 0.013 * slow * rng.lognormal(0, 0.05, n), length, length * 0.01 * slow


def test_the_value_is_a_ratio_of_sums() -> None:
    got = stats.bootstrap_ratio([10, 30, 20], [1, 1, 1], [10, 30, 20], [2, 2, 2])
    assert got.value == pytest.approx(2.0)
    uneven = stats.bootstrap_ratio([10, 90, 10], [1, 1, 1], [10, 90, 10], [2, 8, 2])
    assert uneven.value == pytest.approx(12 / 3)  # the mean of the prompts' own ratios would be that as well: 2, 8, 2
    weighted = stats.bootstrap_ratio([10, 90, 10], [1, 4, 1], [10, 90, 10], [1, 16, 1])
    assert weighted.value == pytest.approx(18 / 6)  # the mean of 1, 4, 1 would be 2
    assert stats.bootstrap_rate([10, 90, 20], [1, 3, 2]).value == pytest.approx(20)


def test_pairing_removes_what_both_arms_share() -> None:
    """Prompts differ by a factor of 100 in both arms, their ratio by 1 %: the interval is as narrow as the ratio."""
    rng = np.random.default_rng(1)
    slow = np.geomspace(1, 100, 20)
    spec_s, ar_s, tokens = slow * rng.normal(1, 0.01, 20), 2 * slow, np.full(20, 64.0)
    paired = stats.relative_halfwidth(stats.bootstrap_ratio(tokens, spec_s, tokens, ar_s))
    unpaired = stats.relative_halfwidth(stats.bootstrap_ratio(tokens, spec_s, tokens, ar_s[::-1]))
    assert paired is not None
    assert unpaired is not None
    assert paired < 0.02 < 0.5 < unpaired


@pytest.mark.parametrize("n", [3, 5, 8, 24])
def test_coverage_is_about_nominal(n: int) -> None:
    """Of 400 seeded experiments, about 95 % hold the truth; 92 to 98 % is nominal within 2.8 standard errors."""
    rng = np.random.default_rng(100 + n)
    sums = [column.sum() for column in draw(np.random.default_rng(9), 1_000_000)]
    truth = sums[0] / sums[1] / (sums[2] / sums[3])
    hits = 0
    for experiment in range(400):
        got = stats.bootstrap_ratio(*draw(rng, n), resamples=600, seed=experiment)
        assert got.low is not None
        assert got.high is not None
        hits += got.low <= truth <= got.high
    assert 0.92 <= hits / 400 <= 0.98


def test_coverage_of_a_rate_at_another_confidence() -> None:
    rng = np.random.default_rng(5)
    sums = [column.sum() for column in draw(np.random.default_rng(9), 1_000_000)]
    hits = 0
    for experiment in range(400):
        tokens, seconds, *_ = draw(rng, 10)
        got = stats.bootstrap_rate(tokens, seconds, confidence=0.8, resamples=600, seed=experiment)
        assert got.low is not None
        assert got.high is not None
        hits += got.low <= sums[0] / sums[1] <= got.high
    assert 0.74 <= hits / 400 <= 0.86


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_prompts_give_a_reason_and_no_interval(n: int) -> None:
    got = stats.bootstrap_ratio([4.0] * n, [1.0] * n, [4.0] * n, [2.0] * n)
    assert not got.is_known
    assert got.low is got.high is None
    assert got.reason
    assert got.value == (2.0 if n else None)
    assert stats.relative_halfwidth(got) is None


def test_entries_of_one_cluster_are_one_prompt() -> None:
    rng = np.random.default_rng(3)
    spec_tokens, spec_s, ar_tokens, ar_s = draw(rng, 6)
    whole = stats.bootstrap_ratio(spec_tokens, spec_s, ar_tokens, ar_s)
    columns = (spec_tokens, spec_s, ar_tokens, ar_s)
    labels = [f"prompt {index // 2}" for index in range(12)]
    uneven = [
        np.outer(column, [share, 1 - share]).ravel() for column, share in zip(columns, rng.random(4), strict=True)
    ]
    joined = stats.bootstrap_ratio(*uneven, clusters=labels)
    assert joined.num_clusters == 6
    assert (joined.low, joined.high) == pytest.approx((whole.low, whole.high))
    halves = [np.repeat(column / 2, 2) for column in columns]
    naive = stats.bootstrap_ratio(*halves)
    assert stats.relative_halfwidth(naive) < stats.relative_halfwidth(whole)  # type: ignore[operator]
    two = stats.bootstrap_ratio(*halves, clusters=["a"] * 6 + ["b"] * 6)
    assert (two.low, two.num_clusters) == (None, 2)


def test_seed_decides_and_more_confidence_is_wider() -> None:
    arms = draw(np.random.default_rng(4), 12)
    assert stats.bootstrap_ratio(*arms, seed=1) == stats.bootstrap_ratio(*arms, seed=1)
    assert stats.bootstrap_ratio(*arms, seed=1) != stats.bootstrap_ratio(*arms, seed=2)
    widths = [stats.relative_halfwidth(stats.bootstrap_ratio(*arms, confidence=c)) for c in (0.5, 0.8, 0.95)]
    assert widths == sorted(widths, key=float)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(0.01, 1000)] * 4), min_size=3, max_size=12),
    st.floats(0.01, 100),
    st.integers(0, 5),
)
def test_interval_holds_its_value_and_scales(rows: list[tuple[float, ...]], factor: float, seed: int) -> None:
    spec_tokens, spec_s, ar_tokens, ar_s = np.array(rows).T
    got = stats.bootstrap_ratio(spec_tokens, spec_s, ar_tokens, ar_s, resamples=100, seed=seed)
    assert got.low is not None
    assert got.high is not None
    assert got.value is not None
    assert 0 < got.low <= got.value <= got.high
    scaled = stats.bootstrap_ratio(spec_tokens, spec_s * factor, ar_tokens, ar_s, resamples=100, seed=seed)
    assert scaled.value == pytest.approx(got.value / factor)
    assert scaled.low == pytest.approx(got.low / factor)
    assert scaled.high == pytest.approx(got.high / factor)


def test_equal_prompts_give_an_interval_of_no_width() -> None:
    got = stats.bootstrap_ratio([8.0] * 5, [1.0] * 5, [8.0] * 5, [1.5] * 5)
    assert (got.low, got.value, got.high) == pytest.approx((1.5, 1.5, 1.5))
    assert got.num_clusters == 5


def test_zeros_give_reasons_not_infinities() -> None:
    nothing = stats.bootstrap_ratio([0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1])
    assert nothing == Interval(None, None, None, nothing.reason, 3)
    assert nothing.reason
    one_prompt_only = stats.bootstrap_ratio([9, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1])
    assert one_prompt_only.value == pytest.approx(3.0)
    assert one_prompt_only.low is None
    assert "resamples" in str(one_prompt_only.reason)


@pytest.mark.parametrize("bad", [[1, 2], [1, 2, math.nan], [1, 2, math.inf], [1, 2, -3], [[1, 2, 3]]])
def test_bad_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(InputError):
        stats.bootstrap_ratio([1, 2, 3], bad, [1, 2, 3], [1, 2, 3])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="labels"):
        stats.bootstrap_rate([1, 2, 3], [1, 2, 3], clusters=["a"])
    with pytest.raises(InputError, match="confidence"):
        stats.bootstrap_rate([1, 2, 3], [1, 2, 3], confidence=95)
    with pytest.raises(InputError, match="t quantile"):
        stats.student_t_quantile(0.975, 0)


@pytest.mark.parametrize("p", [0.005, 0.025, 0.1, 0.5, 0.9, 0.975, 0.995])
@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 1000])
def test_t_quantile(p: float, df: int) -> None:
    tolerance = 1e-9 if df <= 2 else 3e-3 if 0.025 <= p <= 0.975 else 1e-2
    assert stats.student_t_quantile(p, df) == pytest.approx(scipy_stats.t.ppf(p, df), rel=tolerance, abs=1e-9)


@pytest.mark.parametrize(("n", "p"), [(3, 0.1), (4, 0.0286), (5, 0.0079), (6, 0.0022), (7, 0.0006)])
def test_smallest_p_of_mann_whitney(n: int, p: float) -> None:
    assert stats.min_attainable_p(n, n) == pytest.approx(p, abs=5e-5)
    low, high = np.arange(n), np.arange(n) + n
    assert stats.min_attainable_p(n, n) == pytest.approx(
        scipy_stats.mannwhitneyu(low, high, alternative="two-sided", method="exact").pvalue
    )


def test_smallest_p_of_uneven_and_empty_samples() -> None:
    assert stats.min_attainable_p(3, 4) == stats.min_attainable_p(4, 3) == pytest.approx(2 / 35)
    assert stats.min_attainable_p(0, 5) == stats.min_attainable_p(1, 1) == 1.0
    with pytest.raises(InputError):
        stats.min_attainable_p(-1, 3)


def test_quantiles() -> None:
    assert stats.quantiles([1, 2, 3, 4], [0, 0.5, 1]) == [1, 2.5, 4]
    assert stats.quantiles([], [0.5, 0.99]) == [None, None]
    with pytest.raises(InputError):
        stats.quantiles([1.0, math.nan], [0.5])


def test_relative_halfwidth() -> None:
    assert stats.relative_halfwidth(Interval(2.0, 1.8, 2.4)) == pytest.approx(0.15)
    assert stats.relative_halfwidth(Interval(None, None, None)) is None


WIDE, NARROW, NONE = Interval(1.0, 0.8, 1.2), Interval(1.0, 0.97, 1.03), Interval(1.0, None, None, "2 prompts")


@pytest.mark.parametrize(
    ("interval", "blocks", "elapsed", "expected"),
    [
        (NARROW, 5, 1.0, "target"),
        (NARROW, 4, 1.0, None),
        (WIDE, 5, 1.0, None),
        (NONE, 5, 1.0, None),
        (None, 0, 0.0, None),
        (WIDE, 12, 1.0, "max_blocks"),
        (NONE, 13, 1.0, "max_blocks"),
        (WIDE, 6, 240.0, "budget"),
        (WIDE, 2, 500.0, "budget"),
        (NARROW, 12, 500.0, "target"),
        (NARROW, 2, 500.0, "budget"),
    ],
)
def test_stopping(interval: Interval | None, blocks: int, elapsed: float, expected: str | None) -> None:
    got = stats.stopping(interval, blocks, min_blocks=5, max_blocks=12, target=0.04, elapsed=elapsed, budget=240.0)
    assert got == expected
