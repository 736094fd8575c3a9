"""A regression must show in two independent halves of the blocks: what came and went with a neighbour is no regression.

The halves are the earlier and the later blocks of each run, not odd and even ones: a disturbance lasts, and would be in
both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbench.gate.pair import FloatArray, fit

MIN_IN_HALF = 2
"""Pairs of blocks that a half needs."""


def half_masks(index: FloatArray, there: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which blocks are in the earlier half and which in the later, by their number in their run (`index`).

    float64[tests, groups, 2, repetitions] and bool of the same shape. The border is the middle of the numbers that both
    runs have, so that a block and the one it is compared with fall on the same side.
    """
    tests = len(index)
    number = np.where(there, index, np.nan)
    with np.errstate(invalid="ignore"):
        first = np.where(there, number, np.inf).min(axis=(1, 3)).max(axis=1)
        last = np.where(there, number, -np.inf).max(axis=(1, 3)).min(axis=1)
    border = np.where(np.isfinite(first) & np.isfinite(last), (first + last) / 2, 0.0).reshape(tests, 1, 1, 1)
    early = there & (number <= border)
    return early, there & ~early


def halves(values: FloatArray, index: FloatArray) -> FloatArray:
    """float64[tests, 2]: the log ratio by the earlier and by the later blocks alone; NaN with fewer than 2 pairs."""
    out = np.full((len(values), 2), np.nan)
    for column, mask in enumerate(half_masks(index, np.isfinite(values))):
        one = fit(np.where(mask, values, np.nan))
        # Pairs, or repetitions of a pair: either way at least two blocks of each run.
        blocks = (mask & np.isfinite(one.residuals)).sum(axis=(1, 3)).min(axis=1)
        out[:, column] = np.where(blocks >= MIN_IN_HALF, one.delta, np.nan)
    return out


def persists(early_late: FloatArray, sign: FloatArray, threshold: FloatArray) -> NDArray[np.bool_]:
    """Whether both halves say a change of at least half of `threshold` (logs, > 0) in the direction `sign`.

    A half has twice the variance of the whole. Where the whole stands at the threshold or beyond, half of it in each
    half can't come from one of the halves alone unless that one holds at least three quarters of the change.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray((early_late * sign[:, None] >= threshold[:, None] / 2).all(axis=1), dtype=np.bool_)
