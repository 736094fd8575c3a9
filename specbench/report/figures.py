"""The plots that answer the question: speedup over batch size, at a glance and kind by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import (
    Frame,
    Ground,
    Key,
    batch_axis,
    cut_note,
    draw_grid,
    line_name,
    speedup_axis,
    spread,
)
from specbench.report.series import (
    PANEL_LINES,
    Panel,
    Point,
    Series,
    batch_sizes,
    best_series,
    crossing_brief,
    crossing_text,
    panels_of,
)
from specbench.report.style import Drawn, Marks

MAX_LINES, MAX_CONTEXTS = 10, 4
_TITLE = "Speedup over plain decoding (AR), by batch size"
_KIND_TITLE = "Speedup by batch size, kind by kind"
_HEADER = (
    "drafter", "depth", "context", "synthetic", "batch_size", "status", "reason", "speedup", "speedup_low",
    "speedup_high", "output_tokens_per_s", "ar_output_tokens_per_s", "stops_paying_off",
)  # fmt: skip
_Y_LABEL = "speedup (ratio of tokens/s)"
_LABEL_IN, _LABEL_CHARS, _LINE_IN = 1.95, 26, 0.145


def speedup_data(series: Sequence[Series]) -> tuple[tuple[object, ...], ...]:
    rows = []
    for one in series:
        stops = crossing_text(one)
        for point in one.points:
            mean, low, high = point.speedup or (None, None, None)
            speeds = point.metric("output_tokens_per_s"), point.metric("ar_output_tokens_per_s")
            why = "" if point.ok else read.reason(point.row)
            rows.append((one.drafter, one.depth, one.context, one.synthetic, point.batch_size, point.status, why,
                         mean, low, high, *speeds, stops))  # fmt: skip
    return tuple(rows)


# ---- at a glance


def draw_speedup(series: Sequence[Series]) -> Drawn:
    """Speedup over batch: every series where there are few, else the best of each kind; named at the lines' ends."""
    series = [one for one in series if not one.control]
    data = speedup_data(series)
    if not any(one.measured for one in series):
        return style.left(_TITLE, "no cell has a valid speedup", _HEADER, data)
    panels = _contexts(series)
    shown = panels[:MAX_CONTEXTS]
    rows, columns = math.ceil(len(shown) / 2), min(len(shown), 2)
    label_in = _LABEL_IN if columns == 2 else _LABEL_IN + 0.75
    width = (style.WIDTH_IN - 0.58 - columns * label_in - 0.3 * (columns - 1)) / columns
    height = max(2.9, 2.2 * _LINE_IN * max(len(panel.lines) for panel in shown) + 0.2)
    lines = [line for panel in shown for line in panel.lines]
    entries = _marks_legend(lines)
    row_in = 0.3 + height + 0.5
    ground, marks = Ground(style.HEAD_IN + rows * row_in + style.legend_height(entries)), Marks()
    x, y = batch_axis(batch_sizes(series)), speedup_axis(_ends(lines), _Y_LABEL)
    for place, panel in enumerate(shown):
        row, column = divmod(place, columns)
        box = (0.58 + column * (width + label_in + 0.3), style.HEAD_IN + row * row_in + 0.3, width, height)
        frame = Frame(ground, box, x, y, title=panel.name, names=(True, column == 0))
        _draw_panel(frame, panel.lines, marks)
        _name_lines(frame, panel.lines, label_in)
    style.legend_below(ground.figure, entries)
    best = any(len(panel.lines) < panel.total for panel in shown)
    what = "the best drafter and depth of each kind" if best else "each drafter and depth"
    caption = f"How many times faster than plain decoding {what} is at each batch size; it pays off above 1.0."
    note = (
        "Bars are intervals. “stops in (4, 8]”: still faster at batch 4, no longer at 8; ≈ is interpolated."
        + (" The best has the most tokens/s at its smallest batch; forced acceptance is left out." if best else "")
        + style.left_out(len(shown), len(panels), "panels")
    )
    words = "; ".join(f"{line.label}: stops {crossing_text(line)}" for panel in shown for line in panel.lines)
    alt = f"Line chart of speedup over batch size. {words}."
    return Drawn(ground.figure, _TITLE, caption, alt, _HEADER, data, note, marks=marks)


def _contexts(series: Sequence[Series]) -> list[Panel]:
    """One panel for each context that has a speedup, its lines the leading ones."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.panel_context, []).append(one)
    found = []
    for context, group in groups.items():
        measured = [one for one in group if one.measured]
        real = [one for one in measured if not one.synthetic]
        if len(measured) > PANEL_LINES and real:
            measured = real
        lines = measured
        if len(lines) > PANEL_LINES:
            several = len({one.kind for one in measured}) > 1
            lines = best_series(measured, (lambda one: one.kind) if several else (lambda one: one.drafter_label))
            lines = lines if len(lines) > 1 else measured
        if lines:
            kept = {id(one) for one in sorted(lines, key=lambda one: -_peak(one))[:MAX_LINES]}
            total = sum(1 for one in group if one.measured)
            found.append(Panel(context, tuple(one for one in lines if id(one) in kept), total))
    return found


def _peak(one: Series) -> float:
    return max((point.speedup[0] for point in one.measured if point.speedup), default=0.0)


def _name_lines(frame: Frame, lines: Sequence[Series], label_in: float) -> None:
    """Each line's name and crossing beside its last point, moved apart where they would touch."""
    ends = []
    for index, one in enumerate(lines):
        last = one.measured[-1]
        ends.append((frame.y_inside(last.speedup[0] if last.speedup else 1.0), frame.x_at(last.batch_size), index))
    ends.sort()
    gap = 2.2 * _LINE_IN
    bottom = frame.top + frame.height
    places = spread([y for y, _, _ in ends], gap, frame.top + gap / 2 - 0.1, bottom + 0.05)
    start, ground = frame.left + frame.width + 0.2, frame.ground
    room = _LABEL_CHARS if label_in <= _LABEL_IN else 42
    for (y, x, index), place in zip(ends, places, strict=True):
        one, look = lines[index], style.look(index, lines[index].synthetic)
        ground.lines([[(x + 0.07, y), (start - 0.09, place)]], colors=look["color"], linewidths=0.6)
        ground.axes.plot([start], [place], **(look | {"linestyle": "none", "markersize": 5}))
        ground.text(start + 0.1, place - _LINE_IN / 2, style.label(one.name, room), fontsize=8)
        ground.text(start + 0.1, place + _LINE_IN / 2, style.label(crossing_brief(one), room), fontsize=7.5,
                    color=style.GREY)  # fmt: skip


# ---- kind by kind


def draw_speedup_by_kind(series: Sequence[Series], data: tuple[tuple[object, ...], ...]) -> Drawn | None:
    """A panel for each kind of drafter, its lines' names and crossings in words under it; None where one plot has all.

    All depths of a drafter where every panel has room for them, else its best. `data` is `draw_speedup`'s.
    """
    series = [one for one in series if not one.control]
    if all(len(panel.lines) == panel.total for panel in _contexts(series)):
        return None
    panels = panels_of(series, lambda group: [one for one in group if one.measured])
    whole = all(panel.total == len(panel.lines) for panel in panels)
    if not whole:
        panels = panels_of(series)
    shown = panels[: style.MAX_PANELS]
    lines = [line for panel in shown for line in panel.lines]
    keys = [
        [Key(style.look(i, one.synthetic), line_name(panel, one), crossing_brief(one))
         for i, one in enumerate(panel.lines)]
        for panel in shown
    ]  # fmt: skip
    x = batch_axis(batch_sizes(series))
    scales = {
        forced: speedup_axis(_ends([one for one in lines if one.synthetic == forced]), _Y_LABEL)
        for forced in (True, False)
    }
    ground, frames = draw_grid([panel.name for panel in shown], keys,
                               lambda place: (x, scales[shown[place].lines[0].synthetic]),
                               panel_in=1.75, foot=_marks_legend(lines))  # fmt: skip
    marks = Marks()
    for frame, panel in zip(frames, shown, strict=True):
        _draw_panel(frame, panel.lines, marks)
    what = "every depth of every drafter" if whole else "each drafter at its best depth"
    caption = f"The speedup of {what} over batch size, a panel for each kind, with where it stops paying off."
    note = (
        "Bars are intervals. “stops in (4, 8]”: still faster than AR at batch 4, no longer at 8; ≈ is interpolated."
        + cut_note(panels, len(shown))
    )
    words = "; ".join(f"{line.label}: {crossing_brief(line)}" for line in lines)
    alt = f"Small line charts of speedup over batch size. {words}."
    return Drawn(ground.figure, _KIND_TITLE, caption, alt, _HEADER, data, note, marks=marks)


# ---- one panel


def _ends(series: Sequence[Series]) -> list[float]:
    """What an axis has to hold: all speedups, and their intervals as far as half or twice as much."""
    found = []
    for one in series:
        for point in one.measured:
            mean, low, high = point.speedup or (1.0, None, None)
            ends = (mean, mean if low is None else max(low, mean / 2), mean if high is None else min(high, 2 * mean))
            found += [end for end in ends if 1e-6 < end < 1e6]
    return found


def _draw_panel(frame: Frame, lines: Sequence[Series], marks: Marks) -> None:
    frame.level(1.0, colors=style.AR_COLOUR, linewidths=1.1, zorder=1.5)
    for index, one in enumerate(lines):
        look = style.look(index, one.synthetic)
        _draw_series(frame, one, look, marks)
        cross = one.crossing
        if cross.kind == "bracket" and cross.estimate:
            frame.plot([cross.estimate], [1.0], marker="|", color=look["color"], markersize=9, markeredgewidth=1.6,
                       zorder=4)  # fmt: skip


def _draw_series(frame: Frame, one: Series, look: dict[str, Any], marks: Marks) -> None:
    # A gap in the line marks a cell without a speedup.
    means = [point.speedup[0] if point.speedup else math.nan for point in one.points]
    line = frame.plot([point.batch_size for point in one.points], means, **look, zorder=3)
    marks.add(line, [_tip(one, point) for point in one.measured], one.label)
    spans = [
        (point.batch_size, low, high)
        for point in one.measured
        for _, low, high in [point.speedup or (0.0, None, None)]
        if low is not None and high is not None
    ]
    frame.intervals(spans, colors=look["color"], linewidths=1.0, zorder=2.5)
    lost = [point for point in one.points if point.speedup is None]
    if lost:
        crosses = frame.plot([p.batch_size for p in lost], [frame.y.low * 1.04] * len(lost), marker="x",
                             linestyle="none", color=look["color"], markersize=5, zorder=3)  # fmt: skip
        marks.add(crosses, [_tip(one, point) for point in lost])


def _tip(one: Series, point: Point) -> str:
    where = f"{one.label}, batch {point.batch_size}"
    if point.speedup is None:
        return f"{where}: {'no speedup' if point.ok else f'{point.status}: {read.reason(point.row)[:120]}'}"
    mean, low, high = point.speedup
    ends = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    rates = [read.rate(point.metric(name)) for name in ("output_tokens_per_s", "ar_output_tokens_per_s")]
    return f"{where}: {mean:.2f}×{ends}, {rates[0]} tokens/s against {rates[1]}"


def _marks_legend(lines: Sequence[Series]) -> list[tuple[Any, str]]:
    grey = {"color": style.GREY, "linestyle": "none"}
    entries = [(style.handle(color=style.AR_COLOUR, linewidth=1.1), "1.0: as fast as AR")]
    if any(one.crossing.kind == "bracket" for one in lines):
        entries.append((style.handle(marker="|", markersize=9, markeredgewidth=1.6, **grey), "crosses 1.0 about here"))
    if any(one.synthetic for one in lines):
        entries.append((style.handle(color=style.GREY, linestyle=(0, (4, 2))), "dashed: synthetic acceptance"))
    if any(point.speedup is None for one in lines for point in one.points):
        entries.append((style.handle(marker="x", **grey), "no speedup: invalid, failed, skipped"))
    return entries
