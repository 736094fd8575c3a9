"""What a sample could have shown, and how many more blocks would settle what it could not."""

from __future__ import annotations

import numpy as np
from scipy.special import stdtrit

from specbench.gate.decide import INCONCLUSIVE, Decisions, Evidence, Rule
from specbench.gate.pair import FloatArray
from specbench.gate.policy import Policy

MOST = 10_000
STEPS = np.unique(np.round(np.geomspace(1, MOST, 80))).astype(np.float64)
"""Numbers of further blocks that are tried."""


def detectable(decided: Decisions, policy: Policy, tests: int) -> FloatArray:
    """The smallest change (log, > 0) that these blocks could have called significant, among `tests` tests: with the
    single smallest p, Benjamini-Hochberg asks for false_discovery / tests. NaN where nothing is known of the noise."""
    level = policy.false_discovery / max(tests, 1)
    return np.asarray(stdtrit(np.maximum(decided.dof, 1.0), 1 - level) * decided.se, dtype=np.float64)


def more_blocks(found: Evidence, decided: Decisions, rule: Rule, policy: Policy, tests: int) -> FloatArray:
    """How many more blocks of the candidate would probably settle each undecided test, were its log ratio what it
    seems; NaN where no number up to 10,000 would: the baseline's own blocks, or runs that differ by themselves, are in
    the way.

    With n blocks in common the variance of the ratio is v, half of it the candidate's; m more leave
    v (n / (n + m) + 1) / 2, and the part from run to run. A test above minus the effect is settled when its interval
    is, one below it when its p is small enough.
    """
    needed = np.full(len(found.delta), np.nan)
    open_ = np.flatnonzero((decided.code == INCONCLUSIVE) & np.isfinite(decided.se) & np.isfinite(found.delta))
    if len(open_) == 0:
        return needed
    run_sd, sign, worse, better, both = (
        part[open_][:, None] for part in (rule.run_sd, rule.sign, rule.worse, rule.better, rule.both)
    )
    n = np.maximum(found.blocks[open_], 1).astype(np.float64)[:, None]
    runs = 2 * run_sd**2
    blocks = np.maximum(decided.se[open_][:, None] ** 2 - runs, 0.0)
    shrunk = np.sqrt(blocks * (n / (n + STEPS) + 1) / 2 + runs)
    dof = np.maximum(decided.dof[open_][:, None] * (n + STEPS) / n, 1.0)
    z = found.delta[open_][:, None] * sign
    level = policy.false_discovery / max(tests, 1)
    inside = np.where(both, np.minimum(z + worse, better - z), z + worse)
    passes = stdtrit(dof, (1 + policy.confidence) / 2) * shrunk < inside
    fails = stdtrit(dof, 1 - level) * shrunk <= np.abs(z)
    enough = np.where(inside > 0, passes, fails) & (n + STEPS >= policy.min_blocks)
    needed[open_] = np.where(enough.any(axis=1), STEPS[enough.argmax(axis=1)], np.nan)
    return needed
