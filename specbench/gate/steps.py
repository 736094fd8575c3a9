"""Steps in a series of runs: where the level changed, found by ranks, so that one bad night is no step.

A series is split where the standardised rank sum (Wilcoxon's, at its largest over all places: Pettitt's test with equal
chances for all places; A. N. Pettitt, Applied Statistics 28, 1979) is larger than chance lets it be. The chance is not
approximated: it comes from random orders of as many runs, which is exact for any noise that has no order. Each side is
then split again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
MIN_SIDE = 2
ORDERS = 4000
JUMP_SDS = 4.0
_MAD_TO_SD = 1.4826


@dataclass(frozen=True)
class Step:
    """The level changed before run `at` (0-based): `ratio` = median after / median before, of the runs up to the next
    step. `confirmed` is False where so few runs can't tell a step from chance, but the last ones stand far off."""

    at: int
    ratio: float
    confirmed: bool


def find_steps(values: Sequence[float], min_effect: float, *, exact: bool = False) -> list[Step]:
    """Steps of a series of positive values, oldest first.

    A step is of at least `min_effect` (relative), and confirmed at ALPHA for the whole series. `exact`: the value has
    no noise, so every change is a step. Values that are zero or negative have no ratio: then only `exact` finds steps
    (ratio infinite or 0 where one side is zero).
    """
    data = np.asarray(values, dtype=np.float64)
    if exact:
        places = [at for at in range(1, len(data)) if not np.isclose(data[at], data[at - 1], rtol=1e-9, atol=0)]
        return [Step(at, ratio(data[at], data[at - 1]), True) for at in places]
    if len(data) < 2 or np.any(data <= 0):
        return []
    logs = np.log(data)
    edges = [0, *_splits(logs, 0, len(logs), np.log1p(min_effect)), len(logs)]
    levels = [float(np.median(logs[begin:end])) for begin, end in pairwise(edges)]
    steps = [
        Step(at, float(np.exp(after - before)), True)
        for at, before, after in zip(edges[1:-1], levels, levels[1:], strict=False)
    ]
    jump = _jump(logs, edges[-2], np.log1p(min_effect))
    return steps if jump is None else [*steps, jump]


def ratio(after: float, before: float) -> float:
    """after / before; 1 where both are zero, infinite where only `before` is."""
    if before == 0:
        return 1.0 if after == 0 else float("inf")
    return float(after / before)


def could_confirm(runs: int) -> bool:
    """True if a series of so many runs could show a confirmed step at all, were it as clear as can be."""
    return runs >= 2 * MIN_SIDE and _threshold(runs) < _statistic(np.arange(runs, dtype=np.float64)[None])[0][0]


def _splits(logs: NDArray[np.float64], begin: int, end: int, effect: float) -> list[int]:
    """Confirmed steps in [begin, end)."""
    part = logs[begin:end]
    if len(part) < 2 * MIN_SIDE:
        return []
    largest, place = _statistic(_ranks(part)[None])
    at = int(place[0])
    size = abs(float(np.median(part[at:]) - np.median(part[:at])))
    if largest[0] <= _threshold(len(part)) or size < effect:
        return []
    return [*_splits(logs, begin, begin + at, effect), begin + at, *_splits(logs, begin + at, end, effect)]


def _jump(logs: NDArray[np.float64], begin: int, effect: float) -> Step | None:
    """The last runs of the last level, where they stand off by three effects and by JUMP_SDS of the noise before."""
    part = logs[begin:]
    for at in range(len(part) - 1, max(len(part) - 3, 1), -1):
        before, after = part[:at], part[at:]
        level = float(np.median(before))
        noise = _MAD_TO_SD * float(np.median(np.abs(before - level)))
        off = float(np.median(after)) - level
        alike = np.all(np.sign(after - level) == np.sign(off))
        if alike and np.min(np.abs(after - level)) > max(3 * effect, JUMP_SDS * noise):
            return Step(begin + at, float(np.exp(off)), False)
    return None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts + 1) / 2)[inverse]
    return ranks


def _statistic(ranks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """float64[series], int64[series]: the largest standardised rank sum over all places, and its place."""
    n = ranks.shape[1]
    left = np.arange(MIN_SIDE, n - MIN_SIDE + 1)
    excess = np.cumsum(ranks, axis=1)[:, left - 1] - left * (n - 1) / 2
    standard = np.abs(excess) / np.sqrt(left * (n - left) * (n + 1) / 12)
    place = np.argmax(standard, axis=1)
    return standard[np.arange(len(ranks)), place], left[place].astype(np.int64)


@lru_cache(maxsize=256)
def _threshold(n: int) -> float:
    """What the statistic exceeds in a share ALPHA of all orders of n runs, at most."""
    orders = np.random.default_rng(n).permuted(np.tile(np.arange(n, dtype=np.float64), (ORDERS, 1)), axis=1)
    found = np.sort(_statistic(orders)[0])
    return float(found[int(np.ceil((1 - ALPHA) * ORDERS)) - 1])
