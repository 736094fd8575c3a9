"""Predicted beside measured: every cell, and the crossing and the best depth of every series, with the gap named.

The data is `roofline.gaps.Comparison`, which `specbench predict --fit DIR` keeps in its manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import (
    LINE_IN,
    Axis,
    Frame,
    Ground,
    Key,
    amount_axis,
    batch_axis,
    draw_grid,
    speedup_axis,
)
from specbench.report.rows import Row
from specbench.report.series import PANEL_LINES
from specbench.report.style import Drawn, Marks
from specbench.roofline.breakeven import Crossing
from specbench.roofline.gaps import PARTS, CellGap, Comparison, DepthGap, SeriesGap, compare_rows

CELLS, SERIES = "predicted_cells", "predicted_crossing"
MAX_KINDS, MAX_SERIES = 6, 24
BAND = 0.1
_CELLS_TITLE = "Predicted against measured: each cell, and where each series stops paying off"
_SERIES_TITLE = "Speedup by batch size, measured and predicted"
_CELLS_HEADER = (
    "cell", "drafter", "depth", "batch_size", "step_error", "speedup_predicted", "speedup_measured", "speedup_low",
    "speedup_high", "gap", "named", *(f"ln_{part}" for part in ("acceptance", *PARTS)), "ate_most",
)  # fmt: skip
_SERIES_HEADER = (
    "series", "drafter", "depth", "context", "batch_size", "speedup_predicted", "speedup_measured",
    "predicted_crossing", "measured_crossing", "within_one_step", "named",
)  # fmt: skip
_PREDICTED: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2}


def comparison_in(manifest: Mapping[str, Any]) -> Comparison | None:
    """The comparison that a prediction's manifest holds; None where it was fitted on nothing."""
    told = manifest.get("predicted")
    kept = told.get("comparison") if isinstance(told, Mapping) else None
    return Comparison.from_dict(kept) if isinstance(kept, Mapping) else None


def comparison_of_rows(measured: Sequence[Row], predicted: Sequence[Row]) -> Comparison:
    """The comparison of two runs' rows; rows without a case, a depth or a batch size have no counterpart."""
    return compare_rows([row for row in measured if _readable(row)], [row for row in predicted if _readable(row)])


def _readable(row: Row) -> bool:
    known = read.batch_size(row) is not None and read.number(read.axis(row, "depth")) is not None
    return known and bool(row.get("case_hash")) and row.get("case_name") is not None


# ---- every cell


def draw_cells(comparison: Comparison) -> Drawn:
    """Left: each cell's speedup, predicted across, measured up, and its step time's error. Right: the crossings."""
    data = tuple(
        (one.case_name, one.drafter, one.depth, one.batch_size, one.step_error, one.predicted, one.measured, one.low,
         one.high, one.gap, one.name, *(one.terms[part] for part in ("acceptance", *PARTS)), one.ate_most)
        for one in comparison.cells
    )  # fmt: skip
    if not comparison.cells:
        return style.left(_CELLS_TITLE, "no cell is on both sides", _CELLS_HEADER)
    names = list(dict.fromkeys(_kind(one.drafter) for one in comparison.cells))
    shown = _told(comparison.series)
    right_in = max(1.0, (LINE_IN + 0.03) * len(shown))
    entries = _cells_legend(names)
    top = style.HEAD_IN + 0.28
    ground = Ground(top + max(4.75, right_in) + 0.55 + style.legend_height(entries))
    marks = Marks()
    _draw_scatter(ground, (0.6, top, 2.75, 2.75), comparison.cells, names, marks)
    _draw_errors(ground, (0.6, top + 3.45, 2.75, 1.3), comparison.cells, names, marks)
    if shown:
        _draw_crossings(ground, (6.1, top, 1.45, right_in), shown, marks)
    style.legend_below(ground.figure, entries)
    errors, steps = ([abs(value) for value in values] for values in zip(
        *((cell.gap, cell.step_error) for cell in comparison.cells), strict=True))  # fmt: skip
    caption = (
        f"The cost model against the measurement: the median error is {100 * median(errors):.1f} % of the speedup and"
        f" {100 * median(steps):.1f} % of the step's time, over {read.counted(len(errors), 'cell')}."
    )
    known = [one.within_one_step for one in comparison.series if one.within_one_step is not None]
    near = f"{sum(known)} of {len(known)} crossings lie within one step of the batch grid." if known else ""
    note = (
        f"Above the line: faster than predicted. {near} Beside each series, what most of its gap is made of."
        + style.left_out(len(shown), len(comparison.series), "series")
        + (f" {comparison.unmatched} predicted cells were not measured." if comparison.unmatched else "")
    )
    alt = f"Scatter chart and crossings. {caption} {near}".strip()
    return Drawn(ground.figure, _CELLS_TITLE, caption, alt, _CELLS_HEADER, data, note, marks=marks)


def _kind(drafter: str) -> str:
    return read.plain(drafter).partition("(")[0]


def _cells_legend(names: Sequence[str]) -> list[tuple[Any, str]]:
    entries = [(style.handle(**_look(names, kind)), style.label(kind, 24)) for kind in names[:MAX_KINDS]]
    if len(names) > MAX_KINDS:
        entries.append((style.handle(**_look(names, names[-1])), "other kinds"))
    return [
        *entries,
        (style.handle(color=style.INK, linewidth=1.1), "as predicted"),
        (style.patch(facecolor=style.GRID), f"within {100 * BAND:.0f} %"),
        (style.handle(color=style.COLOURS[0], linewidth=5), "measured: between these batches"),
        (style.handle(color=style.COLOURS[1], marker="D", markersize=6, linestyle="none"), "predicted"),
        (style.handle(color=style.GREY, marker=">", markersize=6, linestyle="none"), "not within these batches"),
    ]


def _told(series: Sequence[SeriesGap]) -> list[SeriesGap]:
    """Series whose crossings are known on both sides; all where there are none."""
    known = [one for one in series if one.within_one_step is not None]
    return (known or list(series))[:MAX_SERIES]


def _look(names: Sequence[str], kind: str) -> dict[str, Any]:
    index = names.index(kind)
    if index >= MAX_KINDS:
        return {"color": style.GREY, "marker": "o", "linestyle": "none", "markersize": 4.5}
    return style.look(index) | {"linestyle": "none", "markersize": 5}


def _tip(cell: CellGap) -> str:
    return (
        f"{cell.case_name}: {cell.measured:.2f}× measured, {cell.predicted:.2f}× predicted ({100 * cell.gap:+.0f} %:"
        f" {cell.name}); step time {100 * cell.step_error:+.0f} %"
    )


def _draw_scatter(
    ground: Ground, box: tuple[float, float, float, float], cells: Sequence[CellGap], names: Sequence[str], marks: Marks
) -> None:
    values = [value for cell in cells for value in (cell.predicted, cell.measured) if 1e-6 < value < 1e6]
    x, y = speedup_axis(values, "predicted speedup"), speedup_axis(values, "measured speedup")
    low, high = x.low, x.high
    frame = Frame(ground, box, x, y, title="each cell")
    upper, lower = low * (1 + BAND), high * (1 - BAND)
    corners = [
        (low, low),
        (low, upper),
        (high / (1 + BAND), high),
        (high, high),
        (high, lower),
        (low / (1 - BAND), low),
    ]
    ground.axes.fill([frame.x_at(a) for a, _ in corners], [frame.y_at(b) for _, b in corners], color=style.GRID,
                     linewidth=0, zorder=0.6)  # fmt: skip
    frame.plot([low, high], [low, high], color=style.INK, linewidth=1.1, zorder=1.5)
    look = {"colors": style.GREY, "linewidths": 0.8, "linestyles": [(0, (2, 2))], "zorder": 1.4}
    frame.level(1.0, **look)
    frame.intervals([(1.0, low, high)], **look)
    for kind in names:
        own = [cell for cell in cells if _kind(cell.drafter) == kind]
        dots = frame.plot([c.predicted for c in own], [c.measured for c in own], **_look(names, kind), zorder=3)
        marks.add(dots, [_tip(cell) for cell in own], kind)


def _draw_errors(
    ground: Ground, box: tuple[float, float, float, float], cells: Sequence[CellGap], names: Sequence[str], marks: Marks
) -> None:
    """The error of the step time in percent, by batch size; kinds stand side by side."""
    batches = sorted({cell.batch_size for cell in cells})
    worst = min(max([abs(100 * cell.step_error) for cell in cells] + [15.0]), 1e6)
    frame = Frame(ground, box, batch_axis(batches), amount_axis(-1.1 * worst, 1.1 * worst, "%", 5),
                  title="error of the step's time")  # fmt: skip
    band = [frame.y_at(100 * BAND), frame.y_at(-100 * BAND)]
    ground.axes.fill([box[0], box[0] + box[2], box[0] + box[2], box[0]], [band[0], band[0], band[1], band[1]],
                     color=style.GRID, linewidth=0, zorder=0.6)  # fmt: skip
    frame.level(0.0, colors=style.INK, linewidths=1.1, zorder=1.5)
    for place, kind in enumerate(names):
        own = [cell for cell in cells if _kind(cell.drafter) == kind]
        shift = 1 + 0.03 * (place - len(names) / 2)
        dots = frame.plot([c.batch_size * shift for c in own], [100 * c.step_error for c in own],
                          **(_look(names, kind) | {"markersize": 4}), zorder=3)  # fmt: skip
        marks.add(dots, [_tip(cell) for cell in own], kind)


def _draw_crossings(
    ground: Ground, box: tuple[float, float, float, float], shown: Sequence[SeriesGap], marks: Marks
) -> None:
    left, _, width, _ = box
    batches = sorted({batch for one in shown for batch in one.batches})
    rows = Axis(len(shown) - 0.4, -0.6, ())
    frame = Frame(ground, box, batch_axis(batches), rows, title="crossings of 1.0", names=(True, False))
    for place, one in enumerate(shown):
        y = frame.y_at(place)
        ground.text(left - 0.1, y, style.label(one.label, 38), fontsize=8, ha="right")
        ground.text(left + width + 0.15, y, one.name, fontsize=7.5, color=style.GREY)
        ground.lines([[(left, y), (left + width, y)]], colors=style.GRID, linewidths=0.7, zorder=1)
        for found, higher, colour in ((one.measured, -0.14, style.COLOURS[0]), (one.predicted, 0.14, style.COLOURS[1])):
            is_measured = higher < 0
            ends = _ends(found, batches)
            if ends is None:
                continue
            look: dict[str, Any] = {"color": colour, "zorder": 3}
            if found.kind != "bracket":
                look |= {"marker": ">" if found.kind == "none_in_grid" else "<", "markersize": 6, "linestyle": "none"}
                xs = [ends[1] if found.kind == "none_in_grid" else ends[0]]
            elif is_measured:
                look |= {"linewidth": 5, "solid_capstyle": "butt"}
                xs = list(ends)
            else:
                look |= {"marker": "D", "markersize": 5.5, "linestyle": "none"}
                xs = [found.estimate or math.sqrt(ends[0] * ends[1])]
            mark = frame.plot(xs, [place + higher] * len(xs), **look)
            marks.add(mark, [f"{one.label}: {'measured' if is_measured else 'predicted'} {found.describe()}"])


def _ends(crossing: Crossing, batches: Sequence[int]) -> tuple[float, float] | None:
    """A crossing's place on the axis: its bracket, or the edge of the grid that it lies beyond."""
    if crossing.kind == "bracket" and crossing.low_batch and crossing.high_batch:
        return float(crossing.low_batch), float(crossing.high_batch)
    if crossing.kind == "none_in_grid":
        return float(batches[-1]), batches[-1] * 1.2
    if crossing.kind == "below_grid":
        return batches[0] / 1.2, float(batches[0])
    return None


# ---- every series


def draw_series(comparison: Comparison) -> Drawn:
    """Speedup by batch for each drafter, measured and predicted; under each panel both crossings, the gap's name and
    the best depth of each batch."""
    data = tuple(
        (one.label, one.drafter, one.depth, one.context, batch, told, seen, one.predicted.describe(),
         one.measured.describe(), one.within_one_step, one.name)
        for one in comparison.series
        for batch, told, seen in zip(one.batches, one.predicted_speedup, one.measured_speedup, strict=True)
    )  # fmt: skip
    groups: dict[tuple[str, str], list[SeriesGap]] = {}
    for one in comparison.series:
        groups.setdefault((one.drafter, one.context), []).append(one)
    shown = [(where, members[:PANEL_LINES]) for where, members in list(groups.items())[: style.MAX_PANELS]]
    if not shown:
        return style.left(_SERIES_TITLE, "no series is on both sides", _SERIES_HEADER)
    keys = [
        [*(_series_key(place, one) for place, one in enumerate(members)), *_depth_keys(comparison, *where)]
        for where, members in shown
    ]
    lines = [one for _, members in shown for one in members]
    values = [value for one in lines for value in (*one.measured_speedup, *one.predicted_speedup) if 1e-6 < value < 1e6]
    axes = batch_axis(sorted({batch for one in lines for batch in one.batches})), speedup_axis(values, "speedup")
    foot = [
        (style.handle(color=style.GREY, marker="o", markersize=5), "measured"),
        (style.handle(color=style.GREY, **_PREDICTED), "predicted"),
        (style.handle(color=style.AR_COLOUR, linewidth=1.1), "1.0: as fast as AR"),
    ]
    titles = [" · ".join(part for part in where if part) for where, _ in shown]
    ground, frames = draw_grid(titles, keys, lambda _: axes, panel_in=1.75, foot=foot)
    marks = Marks()
    for frame, (_, members) in zip(frames, shown, strict=True):
        frame.level(1.0, colors=style.AR_COLOUR, linewidths=1.1, zorder=1.5)
        for place, one in enumerate(members):
            look = style.look(place)
            frame.plot(one.batches, one.predicted_speedup, **_PREDICTED, color=look["color"], zorder=2.8)
            line = frame.plot(one.batches, one.measured_speedup, **look, zorder=3)
            values_by_batch = zip(one.batches, one.predicted_speedup, one.measured_speedup, strict=True)
            marks.add(line, [f"{one.label}, batch {batch}: {seen:.2f}× measured, {told:.2f}× predicted"
                             for batch, told, seen in values_by_batch], one.label)  # fmt: skip
    near = [one.within_one_step for one in comparison.series if one.within_one_step is not None]
    caption = (
        "Where each series stops paying off, measured and predicted: within one step of the batch grid in"
        f" {sum(near)} of {len(near)} series."
    )
    note = (
        "Under each panel: the crossing measured → predicted and what made the gap, then the best depth at each batch,"
        " measured→predicted." + style.left_out(len(lines), len(comparison.series), "series")
    )
    alt = f"Small line charts of measured and predicted speedup over batch size. {caption}"
    return Drawn(ground.figure, _SERIES_TITLE, caption, alt, _SERIES_HEADER, data, note, marks=marks)


def _series_key(place: int, one: SeriesGap) -> Key:
    crossings = f"{one.measured.describe()} → {one.predicted.describe()}"
    return Key(style.look(place), f"depth {one.depth}: {one.name}", crossings)


def _depth_keys(comparison: Comparison, drafter: str, context: str) -> list[Key]:
    """The best depth of each batch; nothing where there's one depth."""
    found: list[DepthGap] = [one for one in comparison.depths if (one.drafter, one.context) == (drafter, context)]
    if len({depth for one in found for depth in (one.predicted, one.measured)}) < 2:
        return []
    text = ", ".join(f"{one.batch_size}: {one.measured}→{one.predicted}" for one in found)
    return [Key({"linestyle": "none"}, "best depth by batch", text)]
