"""Rows -> series over batch size, each with the batch at which it stops paying off, and the best depth by tokens/s.

A series is one drafter at one depth with every other axis fixed. Axes that vary inside the run (temperature, output
length, ...) become its `context`; axes that never vary belong to the run's conditions and aren't repeated in a label.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specbench.report import rows as read
from specbench.report.rows import DAGGER, Row
from specbench.roofline.breakeven import Crossing, find_crossing

PANEL_LINES = 6
ADAPTIVE = "adaptive"
"""The context of a series whose depth a policy picks in each step."""
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

    @cached_property
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
    def name(self) -> str:
        """The drafter and its depth, without the context but for an adaptive depth."""
        name = f"{self.drafter} · depth {self.depth}" + (f" {DAGGER}" if self.synthetic else "")
        return f"{name} · {ADAPTIVE}" if ADAPTIVE in self.context.split(" · ") else name

    @property
    def label(self) -> str:
        name = f"{self.drafter} · depth {self.depth}" + (f" {DAGGER}" if self.synthetic else "")
        return f"{name} · {self.context}" if self.context else name

    @property
    def panel_context(self) -> str:
        """The context without what tells an adaptive depth from a fixed one: both stand in one panel."""
        return " · ".join(part for part in self.context.split(" · ") if part != ADAPTIVE)

    @property
    def kind(self) -> str:
        """The drafter's kind, with a dagger where acceptance was forced: "eagle", "oracle †synthetic"."""
        kind = read.plain(read.axis(self.points[0].row, "drafter_kind") or self.drafter)
        return f"{kind} {DAGGER}synthetic" if self.synthetic else kind

    @cached_property
    def measured(self) -> tuple[Point, ...]:
        """The points that have a speedup."""
        return tuple(point for point in self.points if point.speedup is not None)

    @cached_property
    def crossing(self) -> Crossing:
        """Where the speedup falls through 1.0, from the points that have an interval (predicted ones have none, and
        count by their values); never extrapolated."""
        if self.points and all(read.is_predicted(point.row) for point in self.points):
            told = [(point.batch_size, point.speedup[0]) for point in self.points if point.speedup is not None]
            return find_crossing([batch for batch, _ in told], [mean for _, mean in told])
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
    varying = varying_axes(cells)
    seen: dict[tuple[str, str], int] = {}
    groups: dict[tuple[bool, bool, int, int], list[dict[int, Row]]] = {}
    for row in cells:
        place = seen.setdefault((read.drafter(row), context_of(row, varying)), len(seen))
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


def varying_axes(cells: Sequence[Row]) -> list[str]:
    """Axes that have several values among `cells`; drafter, depth and batch size have places of their own."""
    names = dict.fromkeys(name for row in cells for name in read.section(row, "axes") if name not in _OWN_AXES)
    return [name for name in names if len({_frozen(read.axis(row, name)) for row in cells}) > 1]


def _frozen(value: Any) -> object:
    if value is None or isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else "null"
    return json.dumps(read.finite(value), sort_keys=True, default=str)


def context_of(row: Row, varying: Sequence[str]) -> str:
    """The axes that vary, as this row has them, and whether it is lossy: "T 0.8 · context 512"."""
    parts = [text for name in varying if (text := read.axis_text(name, read.axis(row, name)))]
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
    return best_depth_of(series_of(rows))


def best_depth_of(series: Iterable[Series]) -> list[BestDepth]:
    """`best_depth_table` where the series are known."""
    grouped: dict[tuple[str, bool], list[Series]] = {}
    for one in series:
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
    """For each drafter (and context) its best depth, as `best_series` has it."""
    return best_series(series, lambda one: one.drafter_label)


def best_series(series: Iterable[Series], key: Callable[[Series], str]) -> list[Series]:
    """For each `key`, of the series that were run at the most batch sizes, the one with the highest tokens/s at its
    smallest measured batch; controls never win."""
    chosen: dict[str, tuple[tuple[int, float, float, int], Series]] = {}
    for one in series:
        first = next((p for p in one.points if p.ok and p.metric("output_tokens_per_s")), None)
        if first is None or one.control:
            continue
        rank = (len(one.points), -first.batch_size, first.metric("output_tokens_per_s") or 0.0, -one.depth)
        if key(one) not in chosen or rank > chosen[key(one)][0]:
            chosen[key(one)] = (rank, one)
    return [one for _, one in chosen.values()]


@dataclass(frozen=True)
class Panel:
    """Series that stand in one panel; `total` counts those that wanted to."""

    name: str
    lines: tuple[Series, ...]
    total: int


def panels_of(
    series: Iterable[Series], choose: Callable[[list[Series]], list[Series]] = best_series_by_drafter
) -> list[Panel]:
    """One panel for each kind of drafter that has a line; where there's one kind, for each drafter.

    `choose` picks the lines of a panel from its series; at most PANEL_LINES of them are kept.
    """
    drafting = [one for one in series if not one.control]
    several = len({one.kind for one in drafting}) > 1
    groups: dict[str, list[Series]] = {}
    for one in drafting:
        name = one.kind if several else one.drafter + (f" {DAGGER}synthetic" if one.synthetic else "")
        groups.setdefault(name, []).append(one)
    chosen = {name: choose(group) for name, group in groups.items()}
    return [Panel(name, tuple(lines[:PANEL_LINES]), len(lines)) for name, lines in chosen.items() if lines]


def crossing_brief(one: Series) -> str:
    """The crossing for a key: "stops in (4, 8] ≈ 5.3", "no stop up to 16", "below 1 from batch 1", "unclear"."""
    cross = one.crossing
    if cross.kind == "bracket":
        return f"stops in {cross.describe()}"
    if cross.kind == "none_in_grid":
        return f"no stop up to {cross.low_batch}"
    return f"below 1 from batch {cross.high_batch}" if cross.kind == "below_grid" else cross.describe()
