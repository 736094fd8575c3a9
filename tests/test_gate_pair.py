"""The estimate of a ratio: against closed forms, with outliers, with correlated blocks, and calibrated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specbench.gate.fdr import q_values
from specbench.gate.pair import fit, inflated, pooled, serial
from specbench.gate.persist import half_masks, halves, persists


def paired(baseline: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """float64[tests, blocks] each -> one group a block."""
    return np.stack([baseline, candidate], axis=2)[..., None]


def repeated(baseline: np.ndarray, candidate: np.ndarray, groups: int) -> np.ndarray:
    """Block k is in group k mod `groups`."""
    both = np.stack([baseline, candidate], axis=1)
    tests, _, blocks = both.shape
    return both.reshape(tests, 2, blocks // groups, groups).transpose(0, 3, 1, 2)


def test_pairs_without_outliers_are_the_paired_t_test() -> None:
    rng = np.random.default_rng(1)
    base, cand = rng.uniform(-1, 1, (1, 8)), rng.uniform(-1, 1, (1, 8))
    found = fit(paired(base, cand))
    exact = stats.ttest_rel(cand[0], base[0])
    assert found.delta[0] / found.se[0] == pytest.approx(exact.statistic, rel=0.15, abs=0.15)
    assert found.dof[0] == 7
    assert found.pairs[0] == 8
    assert found.delta[0] == pytest.approx(float(np.mean(cand - base)), abs=0.2)


def test_equal_noise_gives_the_textbook_error() -> None:
    """Residuals of one size weigh the same, so the mean is that of the t-tests, and the error nearly."""
    signs = np.array([[1, -1, 1, -1, 1, -1.0]])
    found = fit(paired(np.zeros((1, 6)), 0.1 + 0.02 * signs))
    assert found.delta[0] == pytest.approx(0.1)
    assert found.se[0] == pytest.approx(np.std(0.02 * signs, ddof=1) / math.sqrt(6), rel=0.2)
    one_group = fit(repeated(0.02 * signs, 0.1 + 0.02 * signs, 1))
    exact = stats.ttest_ind((0.1 + 0.02 * signs)[0], (0.02 * signs)[0])
    assert one_group.delta[0] / one_group.se[0] == pytest.approx(exact.statistic, rel=0.2)
    assert one_group.dof[0] == 10


@pytest.mark.parametrize("groups", [1, 4, 12])
def test_what_the_prompts_do_cancels(groups: int) -> None:
    rng = np.random.default_rng(2)
    prompts = np.tile(rng.normal(size=(1, groups)), 12 // groups)
    noise = 0.01 * rng.normal(size=(2, 1, 12))
    make = (lambda a, b: paired(a, b)) if groups == 12 else (lambda a, b: repeated(a, b, groups))
    with_prompts = fit(make(prompts + noise[0], prompts + noise[1] - 0.08))
    without = fit(make(noise[0], noise[1] - 0.08))
    assert with_prompts.delta[0] == pytest.approx(without.delta[0], abs=1e-12)
    assert with_prompts.se[0] == pytest.approx(without.se[0], rel=1e-9)


def test_an_outlier_moves_the_mean_and_not_the_estimate() -> None:
    rng = np.random.default_rng(3)
    base, cand = 0.01 * rng.normal(size=(1, 12)), 0.01 * rng.normal(size=(1, 12))
    clean = fit(paired(base, cand)).delta[0]
    cand[0, 5] -= 0.5
    found = fit(paired(base, cand))
    assert float(np.mean(cand - base)) - clean < -0.03
    assert abs(found.delta[0] - clean) < 0.005
    assert (found.below[0], found.above[0]) == (1, 0)


def test_groups_of_one_run_alone_and_tests_without_blocks_say_nothing() -> None:
    values = np.full((3, 4, 2, 1), np.nan)
    values[0, :, 0, 0] = 1.0  # no candidate
    values[1, 0, :, 0] = [1.0, 1.5]  # one pair: a ratio, no error
    values[2, :2, :, 0] = [[1.0, 1.5], [2.0, 2.5]]
    values[2, 2, 0, 0] = 99.0
    found = fit(values)
    assert np.isnan(found.delta[0])
    assert np.isnan(found.se[0])
    assert found.delta[1] == pytest.approx(0.5)
    assert np.isnan(found.se[1])
    assert found.delta[2] == pytest.approx(0.5)
    assert found.se[2] == 0
    assert list(found.pairs) == [0, 1, 2]
    assert np.isnan(found.residuals[2, 2, 0, 0])


@pytest.mark.parametrize("correlation", [0.0, 0.3])
@pytest.mark.parametrize("layout", [1, 4, 12])
def test_p_is_what_it_says(layout: int, correlation: float) -> None:
    """Where nothing changed, p < 0.01 happens in about 1 % of tests, also when blocks follow each other."""
    rng = np.random.default_rng(4)
    tests, blocks = 8000, 12
    noise = rng.normal(size=(2, tests, blocks))
    for block in range(1, blocks):
        fresh = math.sqrt(1 - correlation**2) * noise[..., block]
        noise[..., block] = correlation * noise[..., block - 1] + fresh
    make = (lambda v: paired(v[0], v[1])) if layout == 12 else (lambda v: repeated(v[0], v[1], layout))
    values = make(noise)
    order = make(np.broadcast_to(np.arange(float(blocks)), noise.shape))
    found = fit(values)
    rho = pooled(serial(found.residuals, order), np.arange(tests) // 20)
    se, dof = inflated(found.se, found.dof, rho, np.zeros(tests))
    share = float((stats.t.cdf(found.delta / se, dof) < 0.01).mean())
    assert 0.005 <= share <= 0.016
    assert float(rho.mean()) == pytest.approx(correlation, abs=0.09)
    if correlation:
        assert float((stats.t.cdf(found.delta / found.se, found.dof) < 0.01).mean()) > 0.025


def test_runs_that_differ_by_themselves_widen_the_error() -> None:
    se, dof = inflated(np.array([0.0, 0.01]), np.array([5.0, 5.0]), np.zeros(2), np.array([0.01, 0.01]))
    assert se == pytest.approx([0.01 * math.sqrt(2), 0.01 * math.sqrt(3)])
    assert dof[0] == 1e6
    assert dof[1] == pytest.approx(5 * 9)


# ---- Benjamini-Hochberg


def test_q_values_are_those_of_the_definition() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.005, np.nan])
    expected = stats.false_discovery_control(p[:4])
    q = q_values(p, np.zeros(5, dtype=np.int64))
    assert q[:4] == pytest.approx(expected)
    assert np.isnan(q[4])


def test_families_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(5)
    p, family = rng.random(60) ** 3, rng.integers(4, size=60)
    q = q_values(p, family)
    for one in range(4):
        assert q[family == one] == pytest.approx(stats.false_discovery_control(p[family == one]))
    assert q_values(np.array([]), np.array([], dtype=np.int64)).shape == (0,)


# ---- Halves


def test_halves_are_the_earlier_and_the_later_blocks_of_both_runs() -> None:
    index = np.broadcast_to(np.arange(6.0)[None, :, None, None], (1, 6, 2, 1))
    early, late = half_masks(index, np.ones((1, 6, 2, 1), dtype=bool))
    assert early[0, :, 0, 0].tolist() == [True] * 3 + [False] * 3
    assert (early ^ late).all()
    values = paired(np.zeros((1, 6)), np.array([[-0.2, -0.2, -0.2, 0.0, 0.0, 0.0]]))
    found = halves(values, index)
    assert found[0] == pytest.approx([-0.2, 0.0])
    assert not persists(found, np.array([-1.0]), np.array([0.05]))[0]
    assert persists(np.array([[-0.05, -0.06]]), np.array([-1.0]), np.array([0.05]))[0]
    assert not persists(np.array([[-0.05, 0.06]]), np.array([-1.0]), np.array([0.05]))[0]


def test_a_half_of_one_pair_says_nothing() -> None:
    index = np.broadcast_to(np.arange(3.0)[None, :, None, None], (1, 3, 2, 1))
    found = halves(paired(np.zeros((1, 3)), np.full((1, 3), -0.2)), index)
    assert np.isnan(found[0]).tolist() == [False, True]
    assert not persists(found, np.array([-1.0]), np.array([0.05]))[0]
