"""The plot of the first screen: each drafter at its advised (else its furthest-reaching) depth, over batch size.

Drawn twice, for a screen and for a phone, as the same text is not legible on both. Where there are few batch sizes and
many drafters, a line a drafter with its interval says more than lines over two points.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.advice import pays
from specbench.report.figures_svg import PALETTE, finish
from specbench.report.series import Point, Series, batch_sizes, crossing_text

MAX_SERIES = 6
MAX_ROWS = 16
TITLE = "Speedup over plain decoding, by batch size"
HEADER = ("drafter", "depth", "context", "batch_size", "status", "speedup", "speedup_low", "speedup_high", "stops")
WIDTHS_IN = {"answer": 6.2, "answer-narrow": 3.7}
INK, SOFT, RULE, GRID = (PALETTE[role][0] for role in ("ink", "soft", "rule", "grid"))
_RC = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": RULE, "xtick.color": INK, "ytick.color": INK,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID,
}  # fmt: skip


_NONE = (None, None, None)


@dataclass(frozen=True)
class AnswerPlot:
    """A drawn plot: its SVG (finished, see plots.py), its words and the data behind it."""

    name: str
    svg: str
    title: str
    caption: str
    alt: str
    header: tuple[str, ...]
    data: tuple[tuple[object, ...], ...]


def draw_answers(series: Sequence[Series]) -> tuple[AnswerPlot, AnswerPlot] | None:
    """The plot for a screen and for a phone; None where no series has a speedup."""
    measured = [one for one in series if one.measured]
    if not measured:
        return None
    batches = batch_sizes(measured)
    as_rows = len(batches) == 1 or (len(batches) <= 3 and len(measured) > MAX_SERIES)
    shown = measured[: MAX_ROWS if as_rows else MAX_SERIES]
    draw: Callable[[Sequence[Series], float], tuple[Any, dict[str, list[str]], dict[str, str]]]
    draw = _draw_rows if as_rows else _draw_lines
    data = tuple(
        (one.drafter, one.depth, one.context, point.batch_size, point.status, *(point.speedup or _NONE), stops)
        for one in measured
        for stops in [crossing_text(one)]
        for point in one.points
    )
    caption = "Above 1.0 a drafter makes decoding faster, below it slower; bars are 95 % intervals."
    if any(_span(point)[1] > _limits(shown)[1] for one in shown for point in one.measured):
        caption += " Some intervals reach beyond the frame; the data below has their ends."
    caption += style.left_out(len(shown), len(measured), "measured lines").replace(
        "its data has all", "the data below has all"
    )
    alt = "Speedup over batch size. " + "; ".join(
        f"{one.label}: {_best_words(one)}, stops {crossing_text(one)}" for one in shown
    )
    plots = []
    with style.drawing():
        import matplotlib

        with matplotlib.rc_context(_RC):
            for name, width_in in WIDTHS_IN.items():
                figure, tips, names = draw(shown, width_in)
                source = finish(_svg_of(figure), tips, names).decode("utf-8")
                plots.append(AnswerPlot(name, source, TITLE, caption, f"{alt}.", HEADER, data))
    return plots[0], plots[1]


def _svg_of(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _best_words(one: Series) -> str:
    point = max(one.measured, key=lambda p: (p.speedup or (0.0,))[0])
    return f"at most {(point.speedup or (0.0,))[0]:.2f} at batch {point.batch_size}"


def tip(one: Series, point: Point) -> str:
    """ "eagle · depth 3, batch 4: 1.42× (1.37 to 1.47)"."""
    mean, low, high = point.speedup or (math.nan, None, None)
    span = "no interval" if low is None or high is None else f"{low:.2f} to {high:.2f}"
    return f"{one.label}, batch {point.batch_size}: {mean:.2f}× ({span})"


def _span(point: Point) -> tuple[float, float]:
    mean, low, high = point.speedup or (math.nan, None, None)
    return (mean if low is None else min(low, mean), mean if high is None else max(high, mean))


def _draw_lines(shown: Sequence[Series], width_in: float) -> tuple[Any, dict[str, list[str]], dict[str, str]]:
    narrow = width_in < 5
    entries = [
        (style.handle(**style.look(i, one.synthetic)), style.label(one.label, 40 if narrow else 60))
        for i, one in enumerate(shown)
    ]
    columns = 1 if narrow or max(len(text) for _, text in entries) > 34 else 2
    legend_in = 0.2 * math.ceil(len(entries) / columns) + 0.15
    figure = style.new_figure((2.5 if narrow else 2.75) + legend_in, width_in)
    axes = figure.subplots()
    tips: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    low, high = _limits(shown)
    axes.set_ylim(low, high)
    axes.axhspan(low, 1.0, color=GRID, alpha=0.45, linewidth=0, zorder=0.5)
    axes.axhline(1.0, color=INK, linewidth=1.2, zorder=1.5)
    for index, one in enumerate(shown):
        # Moved aside a little, so that intervals at one batch size don't hide each other.
        aside = 2 ** (0.045 * (index - (len(shown) - 1) / 2))
        gid, points = f"series-{index}", list(one.measured)
        tips[gid], names[gid] = [tip(one, point) for point in points], one.label
        look = style.look(index, one.synthetic)
        places, means = [p.batch_size * aside for p in points], [(p.speedup or (0.0,))[0] for p in points]
        axes.plot(places, means, **look, zorder=3, gid=gid, clip_on=False)
        for point in points:
            axes.plot([point.batch_size * aside] * 2, _span(point), color=look["color"], linewidth=1.1, zorder=2.5)
    style.batch_axis(axes, batch_sizes(shown))
    axes.set_xlabel("batch size (requests at once)")
    axes.set_ylabel("speedup (ratio of tokens/s)")
    axes.text(0.99, 0.98, "faster", transform=axes.transAxes, ha="right", va="top", color=SOFT, style="italic")
    axes.text(0.01, 0.02, "slower", transform=axes.transAxes, ha="left", va="bottom", color=SOFT, style="italic")
    figure.legend([mark for mark, _ in entries], [text for _, text in entries], loc="outside lower left", ncols=columns,
                  columnspacing=1.4, handlelength=2.4)  # fmt: skip
    return figure, tips, names


def _limits(shown: Iterable[Series]) -> tuple[float, float]:
    """The speedups with room around them; a very wide interval may run out of the plot, but no value does."""
    points = [point for one in shown for point in one.measured]
    means = [(point.speedup or (1.0,))[0] for point in points]
    low, high = min([*means, 1.0]), max([*means, 1.0])
    reach = 0.6 * (high - low) + 0.1
    low = max(min(min(_span(point)[0] for point in points), low), low - reach)
    high = min(max(max(_span(point)[1] for point in points), high), high + reach)
    pad = 0.05 * (high - low) + 0.02
    return max(low - pad, 0.0), high + pad


def _draw_rows(shown: Sequence[Series], width_in: float) -> tuple[Any, dict[str, list[str]], dict[str, str]]:
    narrow = width_in < 5
    batches = batch_sizes(shown)
    step = 0.27 if len(batches) == 1 else 0.2 + 0.13 * len(batches)
    figure = style.new_figure(0.75 + step * len(shown) + (0.3 if len(batches) > 1 else 0), width_in)
    axes = figure.subplots()
    ordered = sorted(shown, key=lambda one: -max((p.speedup or (0.0,))[0] for p in one.measured))
    low, high = _limits(shown)
    axes.set_xlim(low, high)
    axes.set_ylim(len(ordered) - 0.5, -0.5)
    axes.axvspan(low, 1.0, color=GRID, alpha=0.45, linewidth=0, zorder=0.5)
    axes.axvline(1.0, color=INK, linewidth=1.2, zorder=1.5)
    tips: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for index, batch in enumerate(batches):
        look = style.look(index) | {"linestyle": "none"}
        shift = (index - (len(batches) - 1) / 2) * 0.26
        found = [
            (place + shift, one, point)
            for place, one in enumerate(ordered)
            if (point := one.at(batch)) and point.speedup
        ]
        gid = f"series-{index}"
        tips[gid], names[gid] = [tip(one, point) for _, one, point in found], f"batch {batch}"
        for y, _, point in found:
            begin, end = _span(point)
            axes.plot([max(begin, low), min(end, high)], [y, y], color=look["color"], linewidth=1.3, zorder=2.5)
            for beyond, at, mark in ((begin < low, low, "<"), (end > high, high, ">")):
                if beyond:
                    axes.plot([at], [y], marker=mark, color=look["color"], markersize=4, clip_on=False)
        axes.plot([(point.speedup or (0.0,))[0] for _, _, point in found], [y for y, _, _ in found], **look, zorder=3,
                  gid=gid, clip_on=False)  # fmt: skip
    limit = 26 if narrow else 40
    axes.set_yticks(
        range(len(ordered)), [style.label(one.label, limit) for one in ordered], fontsize=8 if narrow else 9
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    batch_text = f" at batch {batches[0]}" if len(batches) == 1 else ""
    axes.set_xlabel(f"speedup{batch_text} (1.0: plain decoding)")
    for label, one in zip(axes.get_yticklabels(), ordered, strict=True):
        label.set_fontweight("bold" if any(pays(point) for point in one.points) else "normal")
    if len(batches) > 1:
        marks = [style.handle(**(style.look(i) | {"linestyle": "none"})) for i in range(len(batches))]
        figure.legend(marks, [f"batch {batch}" for batch in batches], loc="outside lower center", ncols=len(batches))
    return figure, tips, names


def data_text(plot: AnswerPlot) -> tuple[tuple[str, ...], ...]:
    """The data as text: three digits after the point, nothing for what is missing."""
    return tuple(
        tuple(
            "" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else read.plain(cell) if cell != "" else ""
            for cell in row
        )
        for row in plot.data
    )
