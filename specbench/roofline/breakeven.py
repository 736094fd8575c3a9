"""Where speculation stops paying off: the crossing of a measured series, and closed forms to compare it with.

A crossing is bracketed between two measured batch sizes and never extrapolated beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from specbench.errors import InputError

Kind = Literal["bracket", "none_in_grid", "below_grid", "unclear", "no_data"]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Crossing:
    """Where the speedup falls below 1.0.

    `bracket`: above 1 at `low_batch`, below 1 at `high_batch`: the crossing lies in (low_batch, high_batch].
    `none_in_grid`: no fall below 1 up to `low_batch`, the largest batch. `below_grid`: never above 1, and below it from
    `high_batch`, the smallest losing batch. `unclear`: the intervals do not separate the series from 1. `no_data`.
    `estimate` interpolates log speedup over log batch inside the bracket. `interval` is where the bounds cross; a None
    side is beyond the grid. `recrosses`: the series passes 1 more than once, and the first fall below it is reported.
    `skipped`: batches without a value.
    """

    kind: Kind
    low_batch: int | None = None
    high_batch: int | None = None
    estimate: float | None = None
    interval: tuple[float | None, float | None] | None = None
    recrosses: bool = False
    skipped: tuple[int, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def describe(self) -> str:
        """One phrase for a table: "(8, 16] ≈ 10.2", "none up to 64", "below 1", "unclear", "no data"."""
        if self.kind == "bracket":
            text = f"({self.low_batch}, {self.high_batch}]"
            return text if self.estimate is None else f"{text} ≈ {self.estimate:.3g}"
        if self.kind == "none_in_grid":
            return f"none up to {self.low_batch}"
        if self.kind == "below_grid":
            return f"below 1 from {self.high_batch}"
        return "unclear" if self.kind == "unclear" else "no data"


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _between(low: tuple[int, float], high: tuple[int, float]) -> float:
    """Batch at which log speedup, linear in log batch between two points, is 0."""
    (batch_a, value_a), (batch_b, value_b) = low, high
    share = math.log(value_a) / (math.log(value_a) - math.log(value_b))
    return math.exp(math.log(batch_a) + share * (math.log(batch_b) - math.log(batch_a)))


def _first_fall(points: Points) -> tuple[int, int] | None:
    """Indices of the last win before the first loss that follows a win."""
    win: int | None = None
    for index, (_, value) in enumerate(points):
        if value > 1:
            win = index
        elif value < 1 and win is not None:
            return win, index
    return None


def _estimate(points: Points, win: int, loss: int) -> float:
    """The crossing between a win and the next loss; points between them are ties at exactly 1."""
    return float(points[win + 1][0]) if loss > win + 1 else _between(points[win], points[loss])


def _walk_left(points: Points, start: int) -> float | None:
    """Where the lower bound was last above 1, going left from `start`; None = not inside the grid."""
    for index in range(start, -1, -1):
        if points[index][1] > 1:
            return float(points[index][0]) if index == len(points) - 1 else _between(*points[index : index + 2])
    return None


def _walk_right(points: Points, start: int) -> float | None:
    """Where the upper bound first falls below 1, going right from `start`; None = not inside the grid."""
    for index in range(start, len(points)):
        if points[index][1] < 1:
            return float(points[index][0]) if index == 0 else _between(*points[index - 1 : index + 1])
    return None


def find_crossing(
    batch_sizes: Sequence[int],
    speedup: Sequence[float | None],
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
) -> Crossing:
    """The first fall of `speedup` below 1 over batch size, in any order of input; `low` and `high` are its bounds.

    Cells that are None (or not finite and positive) are left out and listed in `skipped`. Raises InputError for
    lengths that differ or a batch given twice.
    """
    bounded = low is not None and high is not None
    lows = list(low) if low is not None else [None] * len(speedup)
    highs = list(high) if high is not None else [None] * len(speedup)
    if not len(batch_sizes) == len(speedup) == len(lows) == len(highs):
        raise InputError("batch sizes, speedups and bounds differ in length")
    if len(set(batch_sizes)) != len(batch_sizes) or any(batch < 1 for batch in batch_sizes):
        raise InputError("batch sizes must be positive and given once each", key="batch_size")
    cells = sorted(zip(batch_sizes, speedup, lows, highs, strict=True))
    kept = [cell for cell in cells if _usable(cell[1])]
    skipped = tuple(batch for batch, value, _, _ in cells if not _usable(value))
    notes = [f"no value at batch {', '.join(map(str, skipped))}"] if skipped else []
    if not kept:
        return Crossing("no_data", skipped=skipped, note="; ".join(notes))
    points: Points = [(batch, float(value or 0)) for batch, value, _, _ in kept]
    signs = [value > 1 for _, value in points if value != 1]
    recrosses = sum(a != b for a, b in pairwise(signs)) > 1 or (signs[:1] == [False] and any(signs))
    if recrosses:
        notes.append("passes 1 more than once; the first fall below 1 is reported")

    fall = _first_fall(points)
    first_loss = next((index for index, (_, value) in enumerate(points) if value < 1), None)
    kind: Kind
    if fall is not None:
        kind, left, right = "bracket", fall[0], fall[1]
    elif first_loss is not None and not any(signs):
        kind, left, right = "below_grid", first_loss, first_loss
    else:
        kind, left, right = "none_in_grid", len(points) - 1, len(points)

    interval: tuple[float | None, float | None] | None = None
    undecided = not signs
    if bounded and all(_usable(lo) and _usable(hi) for _, _, lo, hi in kept):
        # a percentile interval may miss the point estimate: widened to hold it, so that bounds never cross the series
        lower: Points = [(batch, min(float(lo or 0), float(value or 0))) for batch, value, lo, _ in kept]
        upper: Points = [(batch, max(float(hi or 0), float(value or 0))) for batch, value, _, hi in kept]
        side_low = None if kind == "below_grid" else _walk_left(lower, left)
        side_high = None if kind == "none_in_grid" else _walk_right(upper, right)
        undecided = side_low is None and side_high is None
        certain = (kind == "none_in_grid" and lower[-1][1] > 1) or (kind == "below_grid" and upper[0][1] < 1)
        if not certain and not undecided:
            interval = (side_low, side_high)
            notes.extend(
                text
                for side, text in ((side_low, "may begin below the grid"), (side_high, "may end beyond the grid"))
                if side is None
            )
    elif bounded:
        notes.append("bounds are missing in some cells, so there is no interval")
    if undecided:
        grid = (points[0][0], points[-1][0])
        notes.append("the intervals include 1 on both sides")
        return Crossing("unclear", *grid, recrosses=recrosses, skipped=skipped, note="; ".join(notes))
    return Crossing(
        kind,
        low_batch=None if kind == "below_grid" else points[left][0],
        high_batch=None if kind == "none_in_grid" else points[right][0],
        estimate=_estimate(points, left, right) if kind == "bracket" else None,
        interval=interval,
        recrosses=recrosses,
        skipped=skipped,
        note="; ".join(notes),
    )


def best_depth(tokens_per_s: Mapping[int, Mapping[int, float | None]]) -> dict[int, int | None]:
    """Batch size -> the depth with most tokens/s (never the highest acceptance rate, which falls with depth).

    A tie goes to the smaller depth; None where no depth has a value.
    """
    best: dict[int, int | None] = {}
    for batch, by_depth in tokens_per_s.items():
        rates = {depth: rate for depth, rate in by_depth.items() if rate is not None and math.isfinite(rate)}
        best[batch] = min(rates, key=lambda depth: (-rates[depth], depth)) if rates else None
    return best


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per step for i.i.d. acceptance, bonus included: (1 - α^(γ+1)) / (1 - α) (Leviathan, arXiv 2211.17192)."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise InputError(f"acceptance {alpha} must be in [0, 1] and depth {gamma} not negative")
    return sum(alpha**accepted for accepted in range(gamma + 1))


def expected_tokens_curve(conditional_rates: Sequence[float]) -> float:
    """Tokens per step from conditional acceptance by position: 1 + Σ_j Π_{i≤j} a_i, bonus included."""
    if any(not 0 <= rate <= 1 for rate in conditional_rates):
        raise InputError("conditional acceptance rates must be in [0, 1]")
    total, joint = 1.0, 1.0
    for rate in conditional_rates:
        joint *= rate
        total += joint
    return total


def break_even_tokens(ar_s: float, verify_s: float, draft_s: float = 0.0, other_s: float = 0.0) -> float:
    """Tokens per step at which speculation costs nothing, from measured times of a whole step: R = step / AR step.

    `draft_s` is all drafting of the step (γ passes), `other_s` sampling, commit and host time.
    """
    if not ar_s > 0 or min(verify_s, draft_s, other_s) < 0:
        raise InputError("the AR step must take time, and no part may be negative")
    return (draft_s + verify_s + other_s) / ar_s


def predicted_speedup(
    tokens_per_step: float, ar_s: float, verify_s: float, draft_s: float = 0.0, other_s: float = 0.0
) -> float:
    """A / R: tokens per step over the break-even tokens."""
    return tokens_per_step / break_even_tokens(ar_s, verify_s, draft_s, other_s)


def break_even_alpha(tokens: float, gamma: int) -> float | None:
    """i.i.d. acceptance α* with expected_tokens(α*, γ) = `tokens`; None where even α = 1 is too little.

    0.0 where any acceptance pays (`tokens` <= 1).
    """
    if tokens > gamma + 1:
        return None
    low, high = 0.0, 1.0
    if tokens <= 1:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return (low + high) / 2


def closed_form_batch(critical_tokens: float, tokens_per_step: float, gamma: int, draft_ratio: float) -> float | None:
    """Break-even batch where linear layers rule: T*·(A - γc) / (γ+1), with c = one draft pass / one AR step.

    It holds for T*/(γ+1) < B < T*; outside, None: at smaller B drafting alone decides, at larger there is no gain.
    """
    batch = critical_tokens * (tokens_per_step - gamma * draft_ratio) / (gamma + 1)
    return batch if critical_tokens / (gamma + 1) < batch < critical_tokens else None


def implied_overhead(tokens_per_step: float, speedup: float) -> float:
    """tokens_per_step / speedup - 1: what a step costs beyond an AR step, in AR steps."""
    if not speedup > 0:
        raise InputError("a speedup must be positive", key="speedup")
    return tokens_per_step / speedup - 1
