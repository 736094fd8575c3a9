"""Panels drawn in inches on one ground, and small multiples of them with a key under each.

A panel is a few lines and texts and a map from values to places. Matplotlib's own axes take a hundred times as long to
make and to draw, and a page of figures has few seconds; places are known beforehand, so nothing is measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specbench.report import style
from specbench.report.series import Panel, Series

LEFT_IN, GAP_IN, TITLE_IN, TICKS_IN, LINE_IN = 0.62, 0.5, 0.24, 0.46, 0.155
_CHARS_AN_INCH = 15.0
_KEY_POINTS, _TICK_POINTS = 8, 8.5


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along a panel's side, and the ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False
    label: str = ""

    def share(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`; NaN where a log axis can't show it."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else math.nan


def batch_axis(batches: Sequence[int]) -> Axis:
    """A log axis whose ticks are the batch sizes measured, or the powers of two where those would touch."""
    ticks = style.batch_ticks(batches)
    text = "batch size (requests)"
    return Axis(min(batches) / 1.25, max(batches) * 1.25, tuple((tick, str(tick)) for tick in ticks), True, text)


def amount_axis(low: float, high: float, label: str, most: int = 6) -> Axis:
    """A linear axis with ticks at round values."""
    size = 10 ** math.floor(math.log10((high - low) / most))
    step = next(size * f for f in (1, 2, 2.5, 5, 10, 20) if (high - low) / (size * f) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    places = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}".startswith("2.5") and step < 10 else 0)
    ticks = tuple((i * step, f"{i * step:,.{places}f}") for i in range(first, last + 1))
    return Axis(low, high, ticks, False, label)


def speedup_axis(values: Sequence[float], label: str) -> Axis:
    """A log axis that holds 1.0 and all values, with ticks at round ratios, none closer than a label is high."""
    low, high = min([1.0, *values]), max([1.0, *values])
    low, high = low / 1.06, high * 1.06
    ticks: list[float] = []
    for tick in (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 3.0, 1.5, 0.75, 6.0, 0.35, 1.25, 0.9, 1.1):
        apart = min((abs(math.log(tick / other)) for other in ticks), default=math.inf)
        if low <= tick <= high and apart >= 0.1 * math.log(high / low):
            ticks.append(tick)
    return Axis(low, high, tuple((tick, f"{tick:g}") for tick in sorted(ticks)), True, label)


class Ground:
    """One pair of axes over the whole figure, in inches from its upper left corner."""

    def __init__(self, height_in: float, width_in: float = style.WIDTH_IN) -> None:
        self.figure = style.new_figure(height_in, width_in, arrange=False)
        self.axes = ground_axes(self.figure)

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        self.axes.text(x, y, text, **({"fontsize": _TICK_POINTS, "va": "center"} | look))

    def lines(self, segments: Sequence[Any], **look: Any) -> None:
        from matplotlib.collections import LineCollection

        if segments:
            self.axes.add_collection(LineCollection(segments, **look), autolim=False)


def ground_axes(figure: Any) -> Any:
    """Axes over a whole figure in inches from its upper left corner, behind everything else."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1), zorder=-1)
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_autoscale_on(False)
    return axes


class Frame:
    """A panel at a place in inches: spines, grid, tick labels and names, then whatever is put into it."""

    def __init__(
        self, ground: Ground, box: tuple[float, float, float, float], x: Axis, y: Axis, *, title: str = "",
        x_grid: bool = True, names: tuple[bool, bool] = (True, True),
    ) -> None:  # fmt: skip
        """`box` is left, top, width, height; `names` tells whether the x axis and the y axis are named."""
        self.ground, self.x, self.y = ground, x, y
        self.left, self.top, self.width, self.height = box
        right, bottom = self.left + self.width, self.top + self.height
        grid = [[(self.left, self.y_at(value)), (right, self.y_at(value))] for value, _ in y.ticks]
        if x_grid:
            grid += [[(self.x_at(value), self.top), (self.x_at(value), bottom)] for value, _ in x.ticks]
        ground.lines(grid, colors=style.GRID, linewidths=0.7, zorder=0.5)
        ground.lines([[(self.left, self.top), (self.left, bottom), (right, bottom)]], colors=style.INK, linewidths=0.8,
                     zorder=2)  # fmt: skip
        small = len(x.ticks) > 7
        for value, text in x.ticks:
            ground.text(self.x_at(value), bottom + 0.06, text, ha="center", va="top",
                        fontsize=7.5 if small else _TICK_POINTS)  # fmt: skip
        for value, text in y.ticks:
            ground.text(self.left - 0.06, self.y_at(value), text, ha="right")
        if title:
            text = style.label(title, int((self.width + 0.35) * 11))
            ground.text(self.left, self.top - 0.11, text, fontsize=9.5, fontweight="bold")
        lines = max((text.count("\n") for _, text in x.ticks), default=0)
        if names[0]:
            ground.text(self.left + self.width / 2, bottom + 0.22 + 0.13 * lines, x.label, ha="center", va="top",
                        fontsize=9)  # fmt: skip
        if names[1]:
            ground.text(self.left - 0.51, self.top + self.height / 2, y.label, ha="center", rotation=90, fontsize=9)

    def x_at(self, value: float) -> float:
        return self.left + self.width * self.x.share(value)

    def y_at(self, value: float) -> float:
        return self.top + self.height * (1 - self.y.share(value))

    def plot(self, xs: Sequence[float], ys: Sequence[float], **look: Any) -> Any:
        """A line in values; a NaN is a gap."""
        places = [self.x_at(x) for x in xs], [self.y_at(y) for y in ys]
        return self.ground.axes.plot(*places, **look)[0]

    def intervals(self, spans: Sequence[tuple[float, float, float]], **look: Any) -> None:
        """Upright bars of x, low, high, cut at the panel's edges."""
        self.ground.lines(
            [[(self.x_at(x), self.y_inside(end)) for end in (low, high)] for x, low, high in spans], **look
        )

    def level(self, value: float, **look: Any) -> None:
        """A line across the panel."""
        y = self.y_at(value)
        self.ground.lines([[(self.left, y), (self.left + self.width, y)]], **look)

    def bars(self, bars: Sequence[tuple[float, float, float, float]], **look: Any) -> Any:
        """Boxes of x, width (in values), low and high, as one artist."""
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        boxes = [
            Rectangle((self.x_at(x - width / 2), self.y_at(low)), self.x_at(x + width / 2) - self.x_at(x - width / 2),
                      self.y_at(high) - self.y_at(low))
            for x, width, low, high in bars
        ]  # fmt: skip
        return self.ground.axes.add_collection(PatchCollection(boxes, **look), autolim=False)

    def y_inside(self, value: float) -> float:
        """The place of a value, at the panel's nearer edge where it lies outside."""
        y = self.y_at(value)
        return min(max(y, self.top), self.top + self.height) if math.isfinite(y) else self.top + self.height


# ---- small multiples


@dataclass(frozen=True)
class Key:
    """One line of a panel's key: its look, its name, and a remark in a softer colour."""

    look: Mapping[str, Any]
    text: str
    more: str = ""


def draw_grid(
    titles: Sequence[str],
    keys: Sequence[Sequence[Key]],
    axes: Callable[[int], tuple[Axis, Axis]],
    *,
    panel_in: float,
    foot: Sequence[tuple[Any, str]] = (),
    under_in: float = 0.0,
    x_grid: bool = True,
) -> tuple[Ground, list[Frame]]:
    """A figure with a panel for each title, at most three in a row, each above its own key, and `foot` under all.

    `axes` gives the axes of panel number i; `under_in` is room for a second line of tick labels.
    """
    rows, columns = style.grid_shape(len(titles))
    width = (style.WIDTH_IN - LEFT_IN - 0.12 - GAP_IN * (columns - 1)) / columns
    room = int((width - 0.3) * _CHARS_AN_INCH)
    lines = [[_lines(key, room) for key in group] for group in keys]
    tallest = [
        max(sum(map(len, group), 0) for group in lines[row * columns : (row + 1) * columns]) * LINE_IN
        for row in range(rows)
    ]
    heights = [TITLE_IN + panel_in + TICKS_IN + under_in + key_in + 0.14 for key_in in tallest]
    foot_in = style.legend_height(foot) if foot else 0.0
    ground = Ground(style.HEAD_IN + sum(heights) + foot_in)
    frames = []
    for place, title in enumerate(titles):
        row, column = divmod(place, columns)
        left, top = LEFT_IN + column * (width + GAP_IN), style.HEAD_IN + sum(heights[:row]) + TITLE_IN
        box = (left, top, width, panel_in)
        frames.append(Frame(ground, box, *axes(place), title=title, x_grid=x_grid, names=(True, column == 0)))
        _draw_key(ground, left, top + panel_in + TICKS_IN + under_in, keys[place], lines[place])
    style.legend_below(ground.figure, foot)
    return ground, frames


def _lines(key: Key, room: int) -> list[tuple[str, bool]]:
    """The key's text in one line where it fits, else in two: pieces, and whether each is the remark."""
    text = style.label(key.text, room)
    if not key.more:
        return [(text, False)]
    if len(text) + len(key.more) + 2 <= room:
        return [(f"{text}: {key.more}", False)]
    return [(text, False), (style.label(key.more, room), True)]


def _draw_key(ground: Ground, left: float, top: float, keys: Sequence[Key], lines: Sequence[Any]) -> None:
    y = top + LINE_IN / 2
    for key, pieces in zip(keys, lines, strict=True):
        look = dict(key.look) | {"markevery": [1]}
        ground.axes.plot([left - 0.02, left + 0.12, left + 0.26], [y] * 3, **look)
        for text, is_remark in pieces:
            ground.text(left + 0.33, y, text, fontsize=_KEY_POINTS, color=style.GREY if is_remark else style.INK)
            y += LINE_IN


def line_name(panel: Panel, one: Series) -> str:
    """What tells a line from the others of its panel: less than its label, since the panel's title says the rest."""
    drafters = {line.drafter for line in panel.lines}
    depth = f"depth {one.depth}"
    if len(drafters) == 1 and panel.name.startswith(one.drafter):
        parts = [depth]
    else:
        kind = panel.name.split(" ")[0]
        own = one.drafter.removeprefix(kind) if one.drafter.startswith(f"{kind}(") else one.drafter
        parts = [own, depth]
    return " · ".join([*parts, *([one.context] if one.context else [])])


def cut_note(panels: Sequence[Panel], shown: int, what: str = "panels") -> str:
    """What was left out of the panels, in words."""
    lost = sum(panel.total - len(panel.lines) for panel in panels[:shown])
    text = style.left_out(shown, len(panels), what)
    return text + (f" {lost} more lines are in the data alone." if lost else "")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places moved as little as needed to stand `gap` apart within low..high (closer where they can't)."""
    if not places:
        return []
    gap = min(gap, (high - low) / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, low, moved[-1] + gap if moved else low))
    limit = high
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    assert all(after >= before for before, after in pairwise(moved))
    return moved
