"""The two plots that answer the question: speedup over batch size, and the best depth by drafter and batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.rows import Row
from specbench.report.series import BestDepth, Series, batch_sizes, best_depth_table, crossing_text
from specbench.report.style import Drawn

ONE_PANEL_SERIES = 6
MAX_MAP_ROWS = 24
_SPEEDUP_TITLE = "Speedup over plain decoding (AR), by batch size"
_SPEEDUP_HEADER = (
    "drafter", "depth", "context", "synthetic", "batch_size", "status", "reason", "speedup", "speedup_low",
    "speedup_high", "output_tokens_per_s", "ar_output_tokens_per_s", "stops_paying_off",
)  # fmt: skip
_MAP_TITLE = "Best depth by tokens/s, for each drafter and batch size"
_MAP_HEADER = (
    "drafter", "batch_size", "best_depth", "best_speculative_depth", "speedup", "speedup_low",
    "speedup_high", "output_tokens_per_s", "ar_output_tokens_per_s", "tied_depths", "note",
)  # fmt: skip


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


def draw_speedup(series: Sequence[Series]) -> Drawn:
    """Speedup over batch with intervals, the 1.0 line, and under each panel the bracket where a series crosses it."""
    series = [one for one in series if not one.control]
    data = speedup_data(series)
    if not any(one.measured for one in series):
        return style.void(style.empty(_SPEEDUP_TITLE, "no cell has a valid speedup"), _SPEEDUP_HEADER, data)
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.drafter_label, []).append(one)
    panels: list[tuple[str, list[Series]]] = list(groups.items())
    faceted = len(series) > ONE_PANEL_SERIES and len(panels) > 1
    if not faceted:
        panels = [("", list(series))]
    shown = panels[: style.MAX_PANELS]
    depths = sorted({one.depth for one in series})
    looks = {id(one): depths.index(one.depth) if faceted else i for i, one in enumerate(series)}
    entries = _speedup_legend(series, depths, looks, faceted)

    rows, columns = style.grid_shape(len(shown))
    strip_in = 0.13 * max(len(group) for _, group in shown) + 0.12
    panel_in = 3.1 if not faceted else 2.0
    height = rows * (panel_in + strip_in + 0.55) + style.legend_height(entries) + 0.5
    figure = style.new_figure(height)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[panel_in, strip_in] * rows, hspace=0.02)
    batches = batch_sizes(series)
    limits = _speedup_limits(series)
    for place, (name, group) in enumerate(shown):
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[2 * row, column])
        strip = figure.add_subplot(grid[2 * row + 1, column])
        axes.set_ylim(*limits)
        axes.set_title(style.label(name) if name else "")
        for one in group:
            _draw_series(axes, one, looks[id(one)])
        axes.axhline(1.0, color=style.AR_COLOUR, linewidth=1.1, zorder=1.5)
        _draw_strip(strip, group, [looks[id(one)] for one in group])
        for each in (axes, strip):
            style.batch_axis(each, batches)
        axes.tick_params(axis="x", labelbottom=False)
        if column == 0:
            axes.set_ylabel("speedup (ratio of tokens/s)")
            strip.set_ylabel("stops", rotation=0, ha="right", va="center", fontsize=8)
        if place + columns >= len(shown):
            strip.set_xlabel("batch size (requests)")
    style.heading(figure, _SPEEDUP_TITLE)
    style.legend_below(figure, entries)
    caption = (
        "Each point is one cell with its interval; a series stops paying off where it falls through 1.0. In the strip"
        " under the panel a bar spans the batch sizes between which it does (tick: interpolated; line: its interval)."
        + style.left_out(len(shown), len(panels), "drafters")
    )
    alt = "Line chart of speedup over batch size. " + "; ".join(
        f"{x.label}: stops {crossing_text(x)}" for x in series[:12]
    )
    return Drawn(figure, _SPEEDUP_TITLE, caption, alt + ".", _SPEEDUP_HEADER, data)


def _speedup_limits(series: Sequence[Series]) -> tuple[float, float]:
    ends = [end for one in series for point in one.measured for end in point.speedup or () if end is not None]
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    pad = 0.06 * (high - low) + 0.02
    return low - pad, high + pad


def _draw_series(axes: Any, one: Series, index: int) -> None:
    looks = style.look(index, one.synthetic)
    triples = [(point.batch_size, *(point.speedup or (math.nan, None, None))) for point in one.points]
    # A gap in the line marks a cell without a speedup.
    axes.plot([t[0] for t in triples], [t[1] for t in triples], **looks, zorder=3)
    spans = [(batch, mean, low, high) for batch, mean, low, high in triples if low is not None and high is not None]
    if spans:
        below, above = ([max(m - low, 0) for _, m, low, _ in spans], [max(high - m, 0) for _, m, _, high in spans])
        axes.errorbar([s[0] for s in spans], [s[1] for s in spans], yerr=[below, above], fmt="none",
                      ecolor=looks["color"], elinewidth=1.1, capsize=2.5, zorder=2.5)  # fmt: skip


def _draw_strip(strip: Any, group: Sequence[Series], looks: Sequence[int]) -> None:
    strip.set_ylim(-0.7, len(group) - 0.3)
    strip.set_yticks([])
    strip.grid(False)
    strip.spines["left"].set_visible(False)
    for place, (one, index) in enumerate(zip(group, looks, strict=True)):
        y, colour = len(group) - 1 - place, style.look(index)["color"]
        cross, measured = one.crossing, one.measured
        for point in one.points:
            if point.speedup is None:
                strip.plot([point.batch_size], [y], marker="x", color=style.GREY, markersize=5, clip_on=False)
        if not measured:
            continue
        first, last = measured[0].batch_size, measured[-1].batch_size
        if cross.interval is not None:
            ends = (cross.interval[0] or first, cross.interval[1] or last)
            strip.plot(ends, [y, y], color=colour, linewidth=1.0)
        if cross.kind == "bracket" and cross.low_batch and cross.high_batch:
            strip.plot([cross.low_batch, cross.high_batch], [y, y], color=colour, linewidth=3.2, solid_capstyle="butt")
            if cross.estimate:
                strip.plot([cross.estimate], [y], marker="|", color="black", markersize=6)
        elif cross.kind == "none_in_grid":
            strip.plot([last], [y], marker=">", color=colour, markersize=5, clip_on=False)
        elif cross.kind == "below_grid":
            strip.plot([first], [y], marker="<", color=colour, markersize=5, clip_on=False)
        elif cross.kind == "unclear":
            ends = (cross.low_batch or first, cross.high_batch or last)
            strip.plot(ends, [y, y], color=colour, linewidth=1.6, linestyle=(0, (1, 1.2)))


def _speedup_legend(
    series: Sequence[Series], depths: Sequence[int], looks: dict[int, int], faceted: bool
) -> list[tuple[Any, str]]:
    if faceted:
        entries = [(style.handle(**style.look(i)), f"depth {depth}") for i, depth in enumerate(depths)]
        if any(one.synthetic for one in series):
            entries.append((style.handle(color=style.GREY, linestyle=(0, (4, 2))), "dashed: synthetic acceptance"))
    else:
        entries = [(style.handle(**style.look(looks[id(x)], x.synthetic)), style.label(x.label)) for x in series]
    entries.append((style.handle(color=style.AR_COLOUR, linewidth=1.1), "1.0: as fast as AR"))
    kinds = {one.crossing.kind for one in series}
    grey = {"color": style.GREY, "linestyle": "none"}
    marks = {
        "bracket": (style.handle(color=style.GREY, linewidth=3.2), "crosses 1.0 between these batches"),
        "none_in_grid": (style.handle(marker=">", **grey), "never in this grid"),
        "below_grid": (style.handle(marker="<", **grey), "already at the first batch"),
        "unclear": (style.handle(color=style.GREY, linewidth=1.6, linestyle=(0, (1, 1.2))), "unclear between these"),
    }
    entries += [mark for kind, mark in marks.items() if kind in kinds]
    if any(point.speedup is None for one in series for point in one.points):
        entries.append((style.handle(marker="x", **grey), "no speedup: invalid, failed, skipped"))
    return entries


def draw_best_depth(rows: Sequence[Row]) -> Drawn:
    """A grid of drafter by batch: the depth with the most tokens/s ("AR" where plain decoding has more)."""
    table = best_depth_table(rows)
    data = tuple(
        (b.drafter_label, b.batch_size, "AR" if b.depth == 0 else b.depth, b.speculative_depth, b.speedup,
         b.speedup_low, b.speedup_high, b.tokens_per_s, b.ar_tokens_per_s, " ".join(map(str, b.ties)), b.note)
        for b in table
    )  # fmt: skip
    if not any(best.depth is not None for best in table):
        return style.void(style.empty(_MAP_TITLE, "no cell has valid tokens/s"), _MAP_HEADER, data)
    names = list(dict.fromkeys(best.drafter_label for best in table))
    shown = names[:MAX_MAP_ROWS]
    batches = sorted({best.batch_size for best in table})
    figure = style.new_figure(0.5 * len(shown) + 1.5)
    axes = figure.subplots()
    image = _draw_map(axes, [b for b in table if b.drafter_label in shown], shown, batches)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(shown)), [style.label(name, 34) for name in shown])
    axes.set_xlabel("batch size (requests)")
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    _ratio_ticks(bar, image.norm.vmax)
    style.heading(figure, _MAP_TITLE)
    caption = (
        "The depth with the highest tokens/s and its speedup over AR. “AR”: plain decoding has more tokens/s; “?”: the"
        " interval holds 1.0; “*”: some depths have no valid cell there."
        + style.left_out(len(shown), len(names), "drafters")
    )
    wins = sum(1 for best in table if best.depth)
    size = f"{len(names)} drafters by {len(batches)} batch sizes"
    alt = f"Grid of {size}; speculation is the faster in {wins} of {len(table)} cells."
    return Drawn(figure, _MAP_TITLE, caption, alt, _MAP_HEADER, data)


def _draw_map(axes: Any, table: Sequence[BestDepth], names: Sequence[str], batches: Sequence[int]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    shades = ["#B35806", "#F1A340", "#F7F7F7", "#67A9CF", "#2166AC"]
    colours = LinearSegmentedColormap.from_list("gain", shades).with_extremes(bad="#ECECEC")
    span = max([1.5, *(max(b.speedup, 1 / b.speedup) for b in table if b.speedup and b.speedup > 0)])
    values = [[math.nan] * len(batches) for _ in names]
    size = 8.5 if len(batches) <= 10 else 6.5
    for best in table:
        row, column = names.index(best.drafter_label), batches.index(best.batch_size)
        text, colour = _map_text(best), style.GREY
        if best.speedup and best.speedup > 0:
            values[row][column] = best.speedup
            strength = abs(math.log(best.speedup)) / math.log(span)
            colour = "white" if strength > 0.72 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    edges = [i - 0.5 for i in range(len(batches) + 1)], [i - 0.5 for i in range(len(names) + 1)]
    image = axes.pcolormesh(*edges, values, cmap=colours, norm=LogNorm(1 / span, span), edgecolors="white", linewidth=2)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return image


def _map_text(best: BestDepth) -> str:
    star = "*" if best.note else ""
    if best.depth is None:
        return best.note.replace(", ", "\n") if best.note.count(",") < 2 else "no valid\ncell"
    name = "AR" if best.depth == 0 else f"depth {best.depth}"
    if best.speedup is None:
        return f"{name}{star}"
    return f"{name}{star}\n{best.speedup:.2f}×{'' if best.clear else ' ?'}"


def _ratio_ticks(bar: Any, span: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    steps = [1.0, *(step for step in (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0) if step <= span)]
    steps = steps if len(steps) <= 5 else [s for s in steps if s not in (1.25, 3.0, 6.0)]
    ticks = sorted({*steps, *(1 / step for step in steps)})
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.set_yticklabels([f"{tick:.2f}" for tick in ticks])
    bar.set_label("speedup (ratio of tokens/s)")
    bar.outline.set_visible(False)
