"""The skinny-matmul staircase: measured times of x [m, k] · w [n, k]^T, the shape that a verify step is made of.

A kernel works in tiles of rows, so the time over m is a staircase, not a line: the cost of verifying
rests on it. The measured grid holds both sides of each usual edge (m = 16 and 17, 64 and 65), so that linear
interpolation between neighbours follows a step where there is one and a slope where there is none.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

MEASURE_AGAIN = "measure again with `specbench roofline --measure`"


@dataclass(frozen=True)
class StairPoint:
    """One measured matmul x [m, k] · w [n, k]^T and its time in seconds."""

    m: int
    n: int
    k: int
    time_s: float

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise InputError(f"a matmul of {self.m}x{self.k}x{self.n} has no rows or columns", remedy=MEASURE_AGAIN)
        if not (math.isfinite(self.time_s) and self.time_s > 0):
            raise InputError(
                f"the matmul {self.m}x{self.k}x{self.n} is stored with a time of {self.time_s} s", remedy=MEASURE_AGAIN
            )


@dataclass(frozen=True)
class Staircase:
    """Measured times of skinny matmuls in one `dtype` on one device; without points nothing is known."""

    dtype: str
    points: tuple[StairPoint, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], dtype: str | None = None) -> Staircase:
        """Read what a run stores as `roofs.measured.skinny`: mappings with m, n, k, dtype and time_s.

        Rows without a time (they did not fit the budget) are left out. Raises InputError where several dtypes are
        there and none is chosen, where a key is missing, and for a time that is not a positive, finite number.
        """
        try:
            told = [(str(row["dtype"]), int(row["m"]), int(row["n"]), int(row["k"]), row["time_s"]) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a stored skinny matmul can't be read: {error!r}", remedy=MEASURE_AGAIN) from None
        known = sorted({row[0] for row in told})
        if dtype is None and len(known) > 1:
            raise InputError(f"skinny matmuls of several dtypes: {', '.join(known)}", remedy="choose one", key="dtype")
        chosen = dtype or (known[0] if known else "unknown")
        points = (StairPoint(m, n, k, _seconds(time)) for d, m, n, k, time in told if d == chosen and time is not None)
        return cls(chosen, tuple(points))

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The measured weight shapes (n, k), by size."""
        return tuple(sorted(self._series, key=lambda shape: (shape[0] * shape[1], shape)))

    @cached_property
    def _series(self) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
        """(n, k) -> its rows m, rising, and the time of each; of a point measured twice the faster counts."""
        by_shape: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for point in self.points:
            times = by_shape[point.n, point.k]
            times[point.m] = min(point.time_s, times.get(point.m, math.inf))
        return {shape: (sorted(times), [times[m] for m in sorted(times)]) for shape, times in by_shape.items()}

    @cached_property
    def _sizes(self) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """Weight elements n·k, rising, and the shapes of each size."""
        by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, k in self._series:
            by_size[n * k].append((n, k))
        return sorted(by_size), [by_size[size] for size in sorted(by_size)]

    def time_s(self, m: int, n: int, k: int) -> float | None:
        """Seconds of x [m, k] · w [n, k]^T, or None where m or the weight's size lies outside what was measured.

        A measured shape answers for itself, linearly between the neighbouring measured m; any other is interpolated
        linearly in weight bytes between the next smaller and the next larger shape. Nothing is extrapolated.
        """
        if (n, k) in self._series:
            return self._at(m, (n, k))
        sizes, shapes = self._sizes
        size = n * k
        place = bisect.bisect_left(sizes, size)
        if place == len(sizes):
            return None
        above = self._mean(m, shapes[place])
        if sizes[place] == size or above is None:
            return above
        below = self._mean(m, shapes[place - 1]) if place else None
        if below is None:
            return None
        share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return below + share * (above - below)

    def _mean(self, m: int, shapes: Sequence[tuple[int, int]]) -> float | None:
        times = [time for shape in shapes if (time := self._at(m, shape)) is not None]
        return sum(times) / len(times) if times else None

    def _at(self, m: int, shape: tuple[int, int]) -> float | None:
        rows, times = self._series[shape]
        place = bisect.bisect_left(rows, m)
        if place == len(rows) or (place == 0 and m < rows[0]):
            return None
        if rows[place] == m:
            return times[place]
        share = (m - rows[place - 1]) / (rows[place] - rows[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"a stored time is {value!r}, not seconds", remedy=MEASURE_AGAIN)
    return float(value)


@dataclass(frozen=True)
class LinearShape:
    """A linear map of a model, fused as the engine runs it: weight [n, k], `count` of them in one pass."""

    name: str
    n: int
    k: int
    count: int


def model_linears(spec: ModelSpec) -> tuple[LinearShape, ...]:
    """Every linear map of a dense decoder's pass, lm_head last; q/k/v are one matmul, so are gate/up, as it runs.

    Raises InputError for shapes whose pass is not made of these (experts, latent attention).
    """
    for field, what in (("moe", "experts"), ("mla", "latent attention")):
        if getattr(spec, field, None) is not None:
            raise InputError(
                f"{spec.name} has {what}: its linear layers can't be measured one by one",
                remedy="use a dense shape such as llama-3.1-8b",
                key="model",
            )
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        LinearShape("qkv", q_dim + 2 * kv_dim, hidden, layers),
        LinearShape("o", hidden, q_dim, layers),
        LinearShape("gate_up", 2 * inner, hidden, layers),
        LinearShape("down", hidden, inner, layers),
        LinearShape("lm_head", spec.vocab_size, hidden, 1),
    )


def linears_s(stairs: Staircase, spec: ModelSpec, rows: int, head_rows: int | None = None) -> float | None:
    """Seconds of all linear maps of one pass over `rows` tokens, `head_rows` of which (default: all) get logits.

    None where the staircase doesn't reach one of them.
    """
    total = 0.0
    for linear in model_linears(spec):
        m = rows if linear.name != "lm_head" or head_rows is None else head_rows
        time = stairs.time_s(m, linear.n, linear.k) if m else 0.0
        if time is None:
            return None
        total += linear.count * time
    return total
