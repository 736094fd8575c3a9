"""Benjamini-Hochberg: of many comparisons, how many alarms are false (J. R. Statist. Soc. B 57, 1995)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def q_values(p: FloatArray, family: NDArray[np.int64]) -> FloatArray:
    """The smallest false discovery rate at which each test would be an alarm, within its family.

    q of the i-th smallest of m values is min over j >= i of p[j] * m / j, at most 1. A NaN is no test: it's not counted
    and stays NaN. Where nothing has changed, an alarm at q <= a has a chance of at most a per family.
    """
    q = np.full(len(p), np.nan)
    tested = np.flatnonzero(np.isfinite(p))
    if len(tested) == 0:
        return q
    order = tested[np.lexsort((p[tested], family[tested]))]
    group = family[order]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    sizes = np.diff(np.r_[starts, len(order)])
    rank = np.arange(len(order)) - np.repeat(starts, sizes) + 1
    raw = np.minimum(p[order] * np.repeat(sizes, sizes) / rank, 1.0)
    # Families lie two apart, so that the running minimum from the back begins anew in each.
    lifted = raw + 2.0 * np.repeat(np.arange(len(starts)), sizes)
    running = np.minimum.accumulate(lifted[::-1])[::-1]
    q[order] = np.clip(running - 2.0 * np.repeat(np.arange(len(starts)), sizes), 0.0, 1.0)
    return q
