"""Coloured cells with text on them: what every map of the report is drawn with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbench.report import style
from specbench.report.figures_panels import Ground
from specbench.report.style import Marks

_GAIN = ("#8c4504", "#d98a35", "#f6f6f6", "#67a9cf", "#1f5a9d")
_AMOUNT = ("#f4f7fb", "#9cc3e3", "#1f5a9d")
_MISSING = "#ececec"


@dataclass(frozen=True)
class Tile:
    """One cell of a map; `clear` is False where the value's interval holds 1.0 or it rests on too little."""

    value: float | None
    clear: bool
    text: str
    tip: str


@dataclass(frozen=True)
class Scale:
    """Colours for low..high: of a ratio (log, with an edge where it passes 1.0) or of an amount."""

    low: float
    high: float
    ratio: bool

    @property
    def shades(self) -> tuple[str, ...]:
        return _GAIN if self.ratio else _AMOUNT

    def norm(self) -> Any:
        from matplotlib.colors import LogNorm, Normalize

        return LogNorm(self.low, self.high) if self.ratio else Normalize(self.low, self.high)

    def is_dark(self, value: float | None) -> bool:
        if value is None:
            return False
        if self.ratio:
            return abs(math.log(value)) > 0.62 * math.log(self.high)
        return value - self.low > 0.62 * (self.high - self.low)


def ratio_scale(values: Sequence[float | None]) -> Scale:
    """As far below 1.0 as above, at least 1.5 and at most 8 times."""
    known = [max(value, 1 / value) for value in values if value and value > 0]
    span = min(max([1.5, *known]), 8.0)
    return Scale(1 / span, span, True)


def draw_tiles(
    ground: Ground,
    corner: tuple[float, float],
    tile: tuple[float, float],
    rows: Sequence[Sequence[Tile | None]],
    marks: Marks,
    scale: Scale,
    *,
    size: float,
    edges: tuple[bool, bool] = (True, True),
) -> None:
    """Cells from an upper left `corner`, each a `tile` wide and high (inches); row 0 is at the top.

    Of ratios, `edges` tells whether the edge of 1.0 is drawn between neighbours of a row and of a column.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    colours = LinearSegmentedColormap.from_list("shades", list(scale.shades)).with_extremes(bad=_MISSING)
    values = [[math.nan if cell is None or cell.value is None else cell.value for cell in row] for row in rows]
    xs = [corner[0] + i * tile[0] for i in range(len(rows[0]) + 1)]
    ys = [corner[1] + i * tile[1] for i in range(len(rows) + 1)]
    mesh = ground.axes.pcolormesh(xs, ys, values, cmap=colours, norm=scale.norm(), edgecolors=style.PAGE, linewidth=1.2)
    marks.add(mesh, [cell.tip if cell else "not measured" for row in rows for cell in row])
    unclear = [
        Rectangle((xs[x], ys[y]), *tile)
        for y, row in enumerate(rows)
        for x, cell in enumerate(row)
        if cell and cell.value is not None and not cell.clear
    ]
    if unclear:
        hatched = PatchCollection(unclear, facecolor="none", edgecolor="#8a8a8a", hatch="////", linewidth=0)
        ground.axes.add_collection(hatched, autolim=False)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            if cell:
                colour = style.ON_DARK if scale.is_dark(cell.value) else style.ON_LIGHT
                ground.text(xs[x] + tile[0] / 2, ys[y] + tile[1] / 2, cell.text, ha="center", fontsize=size,
                            linespacing=1.0, color=colour)  # fmt: skip
    if scale.ratio:
        ground.lines(_contour(values, xs, ys, edges), colors=style.ON_LIGHT, linewidths=2.0)


def tile_ticks(
    ground: Ground, corner: tuple[float, float], tile: tuple[float, float], x: Sequence[str], y: Sequence[str],
    x_label: str = "", names_size: float = 8.5,
) -> None:  # fmt: skip
    """Names under the columns and left of the rows, and the name of the x axis."""
    bottom = corner[1] + tile[1] * len(y)
    for place, text in enumerate(x):
        ground.text(corner[0] + (place + 0.5) * tile[0], bottom + 0.05, text, ha="center", va="top")
    for place, text in enumerate(y):
        ground.text(corner[0] - 0.06, corner[1] + (place + 0.5) * tile[1], text, ha="right", fontsize=names_size)
    if x_label:
        ground.text(corner[0] + len(x) * tile[0] / 2, bottom + 0.21, x_label, ha="center", va="top", fontsize=9)


def _contour(
    values: Sequence[Sequence[float]], xs: Sequence[float], ys: Sequence[float], edges: tuple[bool, bool]
) -> list[list[tuple[float, float]]]:
    """Edges between neighbours of which one is above 1.0 and the other is not."""
    lines = []
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if edges[0] and x + 1 < len(row) and _parted(value, row[x + 1]):
                lines.append([(xs[x + 1], ys[y]), (xs[x + 1], ys[y + 1])])
            if edges[1] and y + 1 < len(values) and _parted(value, values[y + 1][x]):
                lines.append([(xs[x], ys[y + 1]), (xs[x + 1], ys[y + 1])])
    return lines


def _parted(one: float, other: float) -> bool:
    return not math.isnan(one) and not math.isnan(other) and (one > 1) != (other > 1)


def ratio_bar(ground: Ground, scale: Scale, top: float, height: float) -> None:
    """The colour scale of speedups at the figure's right edge; places in inches."""
    from matplotlib.colors import LinearSegmentedColormap

    left, steps = style.WIDTH_IN - 0.75, 24
    shades = LinearSegmentedColormap.from_list("shades", list(scale.shades))
    factor = (scale.high / scale.low) ** (1 / steps)
    values = [[scale.high / factor ** (i + 0.5)] for i in range(steps)]
    ys = [top + height * i / steps for i in range(steps + 1)]
    ground.axes.pcolormesh([left, left + 0.14], ys, values, cmap=shades, norm=scale.norm())
    ticks: list[float] = []
    for tick in (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 1.5, 0.67, 3.0, 0.33, 1.25, 0.8):
        apart = min((abs(math.log(tick / other)) for other in ticks), default=math.inf)
        if scale.low <= tick <= scale.high and apart * height >= 0.17 * 2 * math.log(scale.high):
            ticks.append(tick)
    for tick in ticks:
        y = top + height * math.log(scale.high / tick) / (2 * math.log(scale.high))
        ground.text(left + 0.2, y, f"{tick:.2f}", fontsize=8)
    ground.text(left - 0.05, top - 0.19, "speedup", fontsize=8)
