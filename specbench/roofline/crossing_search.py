"""Which batch size to measure next, to find where the speedup falls through 1.0 with few cells.

Both ends first; then bisection over powers of two (a range of 1 to 256 takes 3 more), then between their neighbours
until the bracket is narrow. A batch whose interval holds 1.0 is no decision, and neither is a cell that failed: the
search goes on beside it, towards the nearest win below and the nearest loss above. Everything follows from what was
measured so far, so a search that was interrupted goes on where it stood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from specbench.errors import InputError

Side = Literal["win", "loss", "unclear", "blocked"]
"""Of 1.0: above, below, neither, or no speedup could be measured (memory, a failed or an invalid cell)."""
MAX_CELLS = 24


def side_of(speedup: float | None, low: float | None, high: float | None) -> Side:
    """What one cell says: a side only where the whole interval is on it."""
    if speedup is None:
        return "blocked"
    if low is None or high is None or low <= 1.0 <= high:
        return "unclear"
    return "win" if low > 1.0 else "loss"


def next_batch(sides: Mapping[int, Side], low: int, high: int, within: float = 0.25) -> int | None:
    """The batch in [low, high] to measure next, or None where the search is over.

    `sides` holds what was measured. It is over where a win and the next loss are within the factor 1 + `within` or next
    to each other, apart from open batches between them that leave gaps no wider than that; where nothing loses up to
    `high`; and where nothing gains at `low`, in the middle and at `high` (a curve may rise before it falls). Towards a
    batch that could not be measured a factor of 2 is enough.
    """
    if not 1 <= low < high or not within > 0:
        raise InputError(f"a search from {low} to {high} within {within}", key="sweep.batch_size")
    for end in (low, high):
        if end not in sides:
            return end
    if len(sides) >= MAX_CELLS or set(sides.values()) == {"blocked"}:
        return None
    bracket = _bracket(sides, low, high)
    if bracket is None:
        asked = any(low < batch < high for batch in sides)
        return None if asked or sides[low] == "win" else _middle(low, high, sides)
    # What lies between was not decided: a win or a loss there would have been an end.
    marks = sorted(batch for batch in sides if bracket[0] <= batch <= bracket[1])
    gaps = [(b / a, a, b) for a, b in pairwise(marks)]
    # Beside an open batch only the gaps to the win and to the loss matter.
    outer = gaps if len(gaps) == 1 else [gaps[0], gaps[-1]]
    for ratio, a, b in sorted(outer, reverse=True):
        limit = 2.0 if sides[b] == "blocked" else 1 + within
        if ratio > limit and b - a > 1:
            found = _middle(a, b, sides)
            if found is not None:
                return found
    return None


def _bracket(sides: Mapping[int, Side], low: int, high: int) -> tuple[int, int] | None:
    """(below, above) between which the first fall is: from the last win before a loss to that loss, else to what could
    not be measured above the last win, else to what could not be decided; from an open start to the first loss. None
    where nothing falls."""
    decided = [batch for batch in sorted(sides) if sides[batch] in ("win", "loss")]
    win: int | None = None
    for batch in decided:
        if sides[batch] == "win":
            win = batch
        elif win is not None:
            return win, batch
    if win is not None:
        blocked = [batch for batch in sides if batch > win and sides[batch] == "blocked"]
        opened = [batch for batch in sides if batch > win and sides[batch] == "unclear"]
        return (win, max(blocked) if blocked else min(opened)) if blocked or opened else None
    if sides[low] == "unclear" and decided:
        opened = [batch for batch in sides if sides[batch] == "unclear" and batch < decided[0]]
        return (max(opened), decided[0]) if opened else None
    return None


def _middle(a: int, b: int, sides: Mapping[int, Side]) -> int | None:
    """An unmeasured batch between a and b: the power of two nearest to their geometric mean, where one lies between,
    else the batch nearest to it; None where all are measured."""
    mean = math.sqrt(a * b)
    powers = [1 << e for e in range(a.bit_length() - 1, b.bit_length() + 1) if a < 1 << e < b and 1 << e not in sides]
    if powers:
        return min(powers, key=lambda batch: (abs(math.log(batch / mean)), batch))
    free = [batch for batch in range(a + 1, b) if batch not in sides]
    return min(free, key=lambda batch: (abs(math.log(batch / mean)), batch)) if free else None
