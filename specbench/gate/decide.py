"""Log ratios and their errors -> verdicts, for many tests at once. Pure: the gate, its self-test and its simulation
all decide here.

With z the log ratio turned so that worse is negative, e the minimum effect and [low, high] the interval of z:

    REGRESSION    z <= -e, q <= the false discovery rate, and both halves of the blocks say so
    IMPROVEMENT   the same upwards
    PASS          low > -e (both ends inside, where any change counts), and no pile of blocks stands far out on the bad
                  side: what slows one block in five is a loss, though the estimate leaves such blocks out
    INCONCLUSIVE  all else, and whatever has fewer blocks than the policy asks for
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from specbench.gate.fdr import q_values
from specbench.gate.pair import FloatArray, fit, inflated, pooled, serial
from specbench.gate.persist import halves, persists
from specbench.gate.policy import Policy
from specbench.gate.types import Direction, Verdict

CODES: tuple[Verdict, ...] = ("PASS", "REGRESSION", "IMPROVEMENT", "INCONCLUSIVE")
PASS, REGRESSION, IMPROVEMENT, INCONCLUSIVE = range(4)


@dataclass(frozen=True)
class Rule:
    """What decides a test: one entry a test. `worse` and `better` are the minimum effect as logs, > 0: a speed 5 % down
    is a ratio of 0.95, a latency 5 % up one of 1.05. `sign` is +1 where up is good, -1 where down is; `both` marks
    tests where any change is a regression."""

    sign: FloatArray
    worse: FloatArray
    better: FloatArray
    both: NDArray[np.bool_]
    run_sd: FloatArray

    @staticmethod
    def of(direction: Direction, min_effect: float, run_sd: float, size: int) -> Rule:
        """The same rule for `size` tests."""
        down, up = -np.log1p(-min_effect), np.log1p(min_effect)
        worse, better = (up, down) if direction == "down" else (down, up)
        full = np.ones(size)
        sign = full * (-1.0 if direction == "down" else 1.0)
        return Rule(sign, full * worse, full * better, np.full(size, direction == "both"), full * run_sd)

    @staticmethod
    def join(rules: list[Rule]) -> Rule:
        names = [one.name for one in fields(Rule)]
        return Rule(**{name: np.concatenate([getattr(one, name) for one in rules]) for name in names})


@dataclass(frozen=True)
class Evidence:
    """What blocks say, one entry a test: log ratio, standard error of the blocks alone, degrees of freedom, the two
    halves, blocks in common (the smaller run's), outlying blocks of the candidate on either side, and what
    `pair.serial` tells."""

    delta: FloatArray
    se: FloatArray
    dof: FloatArray
    halves: FloatArray
    blocks: NDArray[np.int64]
    below: NDArray[np.int64]
    above: NDArray[np.int64]
    serial: FloatArray

    @staticmethod
    def empty(size: int) -> Evidence:
        nan, zero = np.full(size, np.nan), np.zeros(size, dtype=np.int64)
        return Evidence(nan, nan, np.zeros(size), np.full((size, 2), np.nan), zero, zero, zero, np.zeros((size, 4)))

    @staticmethod
    def join(parts: list[Evidence]) -> Evidence:
        names = [one.name for one in fields(Evidence)]
        return Evidence(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in names})

    def take(self, places: NDArray[np.int64]) -> Evidence:
        return Evidence(**{one.name: getattr(self, one.name)[places] for one in fields(Evidence)})


@dataclass(frozen=True)
class Decisions:
    """One entry a test: index into CODES, interval of the log ratio, p towards worse, its q, total standard error (with
    correlation and run to run), its degrees of freedom, and whether the halves agree."""

    code: NDArray[np.int64]
    low: FloatArray
    high: FloatArray
    p: FloatArray
    q: FloatArray
    se: FloatArray
    dof: FloatArray
    persistent: NDArray[np.bool_]


def evidence(values: FloatArray, index: FloatArray) -> Evidence:
    """The evidence in blocks: `values` are logs, `index` their numbers, float64[tests, groups, 2, repetitions]."""
    fitted = fit(values)
    there = np.isfinite(fitted.residuals)
    blocks = there.sum(axis=(1, 3)).min(axis=1)
    return Evidence(
        fitted.delta,
        fitted.se,
        fitted.dof,
        halves(values, index),
        blocks.astype(np.int64),
        fitted.below,
        fitted.above,
        serial(fitted.residuals, index),
    )


def decide(
    found: Evidence, rule: Rule, policy: Policy, family: NDArray[np.int64], noise: NDArray[np.int64]
) -> Decisions:
    """Verdicts of all tests. `family`: the gate run a test belongs to, for Benjamini-Hochberg; `noise`: tests whose
    blocks share one correlation (a metric of a run). Both are numbered from 0."""
    rho = pooled(found.serial, noise)
    se, dof = inflated(found.se, found.dof, rho, rule.run_sd)
    z = found.delta * rule.sign
    usable = np.isfinite(z) & np.isfinite(se) & (found.blocks >= policy.min_blocks)
    p_worse, p_better = _tails(z, se, dof)
    p = np.where(usable, np.where(rule.both, np.minimum(2 * np.minimum(p_worse, p_better), 1.0), p_worse), np.nan)
    q = q_values(p, family)
    q_better = q_values(np.where(usable & ~rule.both, p_better, np.nan), family)
    reach = stdtrit(np.maximum(dof, 1.0), (1 + policy.confidence) / 2) * se
    piled = outlying(found, rule)
    with np.errstate(invalid="ignore"):
        low, high = z - reach, z + reach
        is_worse = persists(found.halves, -rule.sign, rule.worse)
        is_better = persists(found.halves, rule.sign, rule.better)
        found_worse = usable & (z <= -rule.worse) & (q <= policy.false_discovery)
        found_up = usable & (z >= rule.better)
        worse = (found_worse & is_worse) | (rule.both & found_up & (q <= policy.false_discovery) & is_better)
        better = ~rule.both & found_up & (q_better <= policy.false_discovery) & is_better
        fine = usable & (low > -rule.worse) & (~rule.both | (high < rule.better)) & ~piled
    code = np.select([worse, better, fine], [REGRESSION, IMPROVEMENT, PASS], INCONCLUSIVE)
    flipped = rule.sign < 0
    return Decisions(
        code.astype(np.int64),
        np.where(flipped, -high, low),
        np.where(flipped, -low, high),
        p,
        q,
        se,
        dof,
        is_worse | is_better,
    )


def outlying(found: Evidence, rule: Rule) -> NDArray[np.bool_]:
    """Whether more of the candidate's blocks stand far out on the bad side than on the good one, by at least 3 and by a
    seventh of all."""
    more = np.where(rule.sign > 0, found.below - found.above, found.above - found.below)
    more = np.where(rule.both, np.abs(more), more)
    return np.asarray((more >= 3) & (more >= found.blocks / 7), dtype=np.bool_)


def _tails(z: FloatArray, se: FloatArray, dof: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Chance of a z as low, and of one as high, where nothing changed. Blocks without any scatter leave no doubt."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(se > 0, z / se, np.where(z == 0, 0.0, np.sign(z) * np.inf))
    lower = stdtr(np.maximum(dof, 1.0), t)
    upper = stdtr(np.maximum(dof, 1.0), -t)
    return np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
