"""Rows -> series over batch size, each with the batch at which it stops paying off, and the best depth by tokens/s.

A series is one drafter at one depth with every other axis fixed. Axes that vary inside the run (temperature, output
length, ...) become its `context`; axes that never vary belong to the run's conditions and aren't repeated in a label.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specbench.report import rows as read
from specbench.report.rows import DAGGER, Row
from specbench.roofline.breakeven import Crossing, find_crossing

_OWN_AXES = ("drafter", "drafter_kind", "depth", "batch_size")


@dataclass(frozen=True)
class Point:
    """One cell of a series."""

    batch_size: int
    row: Row

    @property
    def ok(self) -> bool:
        return read.is_ok(self.row)

    @property
    def status(self) -> str:
        return read.status(self.row)

    @property
    def has_diagnostics(self) -> bool:
        """True where acceptance may be read: an invalid cell keeps it, a failed or skipped one never had it."""
        return self.status in ("ok", "invalid")

    @property
    def speedup(self) -> tuple[float, float | None, float | None] | None:
        return read.speedup(self.row)

    def metric(self, name: str) -> float | None:
        return read.metric(self.row, name)


@dataclass(frozen=True)
class Series:
    """One drafter, one depth, everything else fixed; points in order of batch size."""

    drafter: str
    depth: int
    context: str
    synthetic: bool
    control: bool
    points: tuple[Point, ...]

    @property
    def drafter_label(self) -> str:
        """The drafter and its context, with a dagger where acceptance was forced: "oracle †synthetic"."""
        name = f"{self.drafter} {DAGGER}synthetic" if self.synthetic else self.drafter
        return f"{name} · {self.context}" if self.context else name

    @property
    def label(self) -> str:
        name = f"{self.drafter} · depth {self.depth}" + (f" {DAGGER}" if self.synthetic else "")
        return f"{name} · {self.context}" if self.context else name

    @property
    def measured(self) -> tuple[Point, ...]:
        """The points that have a speedup."""
        return tuple(point for point in self.points if point.speedup is not None)

    @cached_property
    def crossing(self) -> Crossing:
        """Where the speedup falls through 1.0, from the points that have an interval; never extrapolated."""
        known = [
            (point.batch_size, mean, low, high)
            for point in self.points
            if point.speedup is not None
            for mean, low, high in [point.speedup]
            if low is not None and high is not None
        ]
        batches, means, lows, highs = ([item[i] for item in known] for i in range(4))
        return find_crossing([int(b) for b in batches], means, lows, highs)

    def at(self, batch: int) -> Point | None:
        return next((point for point in self.points if point.batch_size == batch), None)


@dataclass(frozen=True)
class BestDepth:
    """The depth with the highest tokens/s for one drafter and batch; AR competes as depth 0.

    `depth` is None where no depth has a valid measurement, and `note` then says why. `speculative_depth` is the best
    depth above 0, and the speedup is its own. `ties` are other depths whose tokens/s interval overlaps the best one's.
    """

    drafter_label: str
    synthetic: bool
    batch_size: int
    depth: int | None
    speculative_depth: int | None
    tokens_per_s: float | None
    ar_tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    ties: tuple[int, ...]
    note: str

    @property
    def clear(self) -> bool:
        """True where the interval of the speedup leaves out 1.0."""
        low, high = self.speedup_low, self.speedup_high
        return low is not None and high is not None and not low <= 1.0 <= high


def series_of(rows: Iterable[Row]) -> list[Series]:
    """All series of a run: measured drafters in their first order, then synthetic ones, then controls.

    Two cells that differ in nothing a label can show (two drafters under one display name) become numbered variants.
    """
    cells = [row for row in read.latest(rows) if read.batch_size(row) is not None]
    varying = _varying_axes(cells)
    seen: dict[tuple[str, str], int] = {}
    groups: dict[tuple[bool, bool, int, int], list[dict[int, Row]]] = {}
    for row in cells:
        place = seen.setdefault((read.drafter(row), _context(row, varying)), len(seen))
        variants = groups.setdefault((read.is_control(row), read.is_synthetic(row), place, read.depth(row)), [])
        batch = read.batch_size(row) or 0
        free = next((variant for variant in variants if batch not in variant), None)
        if free is None:
            variants.append({batch: row})
        else:
            free[batch] = row
    names = list(seen)
    found = []
    for (control, synthetic, place, depth), variants in sorted(groups.items(), key=lambda item: item[0]):
        drafter, context = names[place]
        for number, variant in enumerate(variants, start=1):
            extra = f"variant {number}" if len(variants) > 1 else ""
            points = tuple(Point(batch, variant[batch]) for batch in sorted(variant))
            full_context = " · ".join(part for part in (context, extra) if part)
            found.append(Series(drafter, depth, full_context, synthetic, control, points))
    return found


def _varying_axes(cells: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in cells for name in read.section(row, "axes") if name not in _OWN_AXES)
    return [name for name in names if len({_frozen(read.axis(row, name)) for row in cells}) > 1]


def _frozen(value: Any) -> str:
    return json.dumps(read.finite(value), sort_keys=True, default=str)


def _context(row: Row, varying: Sequence[str]) -> str:
    parts = [read.axis_text(name, read.axis(row, name)) for name in varying]
    if read.section(row, "conditions").get("lossless") is False:
        parts.append("lossy")
    return " · ".join(parts)


def batch_sizes(series: Iterable[Series]) -> list[int]:
    return sorted({point.batch_size for one in series for point in one.points})


def crossing_text(one: Series) -> str:
    """The crossing in words: "between batch 2 and 4", "never in this grid (≤16)", "already at batch 1", ..."""
    cross, measured = one.crossing, one.measured
    if cross.kind == "no_data" or not measured:
        return f"no data: {missing_text(one.points) or 'no cell has a speedup with an interval'}"
    if cross.kind == "bracket":
        text = f"between batch {cross.low_batch} and {cross.high_batch}"
    elif cross.kind == "none_in_grid":
        text = f"never in this grid (≤{cross.low_batch})"
        unsure = cross.interval[0] if cross.interval else None
        text += "" if unsure is None else f", unclear above batch {math.floor(unsure)}"
    elif cross.kind == "below_grid":
        text = f"already at batch {cross.high_batch}"
        unsure = cross.interval[1] if cross.interval else None
        text += "" if unsure is None else f", unclear up to batch {math.ceil(unsure)}"
    else:
        text = f"unclear: {unclear_reason(one)}"
    return f"{text}; passes 1.0 more than once" if cross.recrosses else text


def unclear_reason(one: Series) -> str:
    """Which batches can't be told from 1.0."""
    spans = [
        point.batch_size
        for point in one.measured
        for _, low, high in [point.speedup or (0.0, None, None)]
        if low is not None and high is not None and low <= 1.0 <= high
    ]
    return f"interval holds 1.0 at batch {read.listed(spans)}" if spans else "the intervals don't decide"


def missing_text(points: Sequence[Point]) -> str:
    """Cells without a speedup, by status: "batch 16 failed", "invalid at every batch"."""
    lost = [
        (point.status if not point.ok else "without speedup", point.batch_size) for point in points if not point.speedup
    ]
    if len(lost) == len(points) and len({what for what, _ in lost}) == 1 and lost:
        return f"{lost[0][0]} at every batch"
    kinds: dict[str, list[int]] = {}
    for what, batch in lost:
        kinds.setdefault(what, []).append(batch)
    return ", ".join(f"batch {read.listed(batches)} {what}" for what, batches in kinds.items())


def best_depth_table(rows: Iterable[Row]) -> list[BestDepth]:
    """For each drafter (and context) and batch, the depth with the highest tokens/s, AR included as depth 0.

    Depths are ranked by tokens/s and never by acceptance, which falls with depth. The winner is then held against the
    AR arm of its own cell, the only one that was measured beside it.
    """
    grouped: dict[tuple[str, bool], list[Series]] = {}
    for one in series_of(rows):
        if not one.control:
            grouped.setdefault((one.drafter_label, one.synthetic), []).append(one)
    return [
        _best(label, synthetic, batch, group)
        for (label, synthetic), group in grouped.items()
        for batch in batch_sizes(group)
    ]


def _best(label: str, synthetic: bool, batch: int, group: Sequence[Series]) -> BestDepth:
    here = [(one.depth, point) for one in group if (point := one.at(batch)) is not None]
    ranked = sorted(
        ((rate, depth, point) for depth, point in here if point.ok and (rate := point.metric("output_tokens_per_s"))),
        key=lambda item: (-item[0], item[1]),
    )
    if not ranked:
        return BestDepth(label, synthetic, batch, None, None, None, None, None, None, None, (), _lost_depths(here))
    rate, depth, point = ranked[0]
    ar_rate = point.metric("ar_output_tokens_per_s")
    mean, low, high = point.speedup or (None, None, None)
    floor = point.metric("output_tokens_per_s_low")
    ties = tuple(
        other
        for _, other, rival in ranked[1:]
        if floor is not None and (ceiling := rival.metric("output_tokens_per_s_high")) is not None and ceiling >= floor
    )
    ar_wins = mean <= 1.0 if mean is not None else ar_rate is not None and ar_rate >= rate
    winner = 0 if ar_wins else depth
    tied, lost = tuple(sorted(ties)), _lost_depths(here)
    return BestDepth(label, synthetic, batch, winner, depth, rate, ar_rate, mean, low, high, tied, lost)


def _lost_depths(here: Sequence[tuple[int, Point]]) -> str:
    return ", ".join(f"depth {depth} {point.status}" for depth, point in here if not point.ok)


def best_series_by_drafter(series: Iterable[Series]) -> list[Series]:
    """For each drafter (and context) the depth with the highest tokens/s at its smallest measured batch."""
    chosen: dict[str, tuple[tuple[float, float, int], Series]] = {}
    for one in series:
        first = next((p for p in one.points if p.ok and p.metric("output_tokens_per_s")), None)
        if first is None or one.control:
            continue
        rank = (-first.batch_size, first.metric("output_tokens_per_s") or 0.0, -one.depth)
        if one.drafter_label not in chosen or rank > chosen[one.drafter_label][0]:
            chosen[one.drafter_label] = (rank, one)
    return [one for _, one in chosen.values()]
