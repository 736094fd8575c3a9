"""Where a step's time goes, beside the AR step of the same cell: what speculation costs against what it yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.report import style
from specbench.report.series import Point, Series, best_series_by_drafter
from specbench.report.style import Drawn

_SPLIT_TITLE = "Where a step's time goes, in AR steps of the same cell"
_SPLIT_HEADER = (
    "drafter", "depth", "batch_size", "arm", "step_s", *(f"{name}_s" for name, _, _ in style.PARTS), "tokens_per_step",
)  # fmt: skip


def draw_split(series: Sequence[Series]) -> Drawn:
    """Stacked parts of the AR step and the speculative step by batch, in AR steps, with the tokens a step yields."""
    data = tuple(
        (one.drafter_label, one.depth, point.batch_size, arm, point.metric(f"{prefix}step_s"),
         *(point.metric(f"{prefix}{name}_s") for name, _, _ in style.PARTS),
         1.0 if prefix else point.metric("tokens_per_step"))
        for one in series for point in one.points for prefix, arm in (("ar_", "AR"), ("", "speculative"))
        if point.ok and point.metric(f"{prefix}step_s")
    )  # fmt: skip
    chosen = [one for one in best_series_by_drafter(series) if any(_split(p) for p in one.points)]
    if not chosen:
        return style.void(style.empty(_SPLIT_TITLE, "no cell has the time of a step"), _SPLIT_HEADER, data)
    shown = chosen[: style.MAX_PANELS]
    rows, columns = style.grid_shape(len(shown))
    entries = [
        (style.patch(facecolor=c, hatch=h, edgecolor="white", linewidth=0.4), name) for name, c, h in style.PARTS
    ]
    entries.append(
        (style.handle(marker="D", color="black", linestyle="none", markersize=5), "tokens a step yields per request")
    )
    entries.append((style.handle(color=style.AR_COLOUR, linewidth=0.9, linestyle=(0, (2, 2))), "one AR step"))
    figure = style.new_figure(rows * 2.9 + style.legend_height(entries) + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for place, axes in enumerate(panels.flat):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        _draw_split_panel(axes, shown[place])
        axes.tick_params(axis="y", labelleft=True)
        if place % columns == 0:
            axes.set_ylabel("time of a step (AR steps)")
        if place + columns >= len(shown):
            axes.set_xlabel("batch size; under it, AR step (ms)")
    style.heading(figure, _SPLIT_TITLE)
    style.legend_below(figure, entries)
    caption = (
        "Left bar: the AR step of the cell (always 1; its ms are under the batch size); right bar: a speculative step."
        " Where the diamond (tokens the step yields) is above the right bar, speculation is the faster."
        + style.left_out(len(shown), len(chosen), "drafters")
    )
    alt = "Stacked bars of step time. " + "; ".join(_split_words(one) for one in shown) + "."
    return Drawn(figure, _SPLIT_TITLE, caption, alt, _SPLIT_HEADER, data)


def _split(point: Point) -> tuple[float, float] | None:
    ar, spec = point.metric("ar_step_s"), point.metric("step_s")
    return (ar, spec) if point.ok and ar and spec else None


def _split_words(one: Series) -> str:
    point = [p for p in one.points if _split(p)][-1]
    ar, spec = _split(point) or (1.0, 1.0)
    return f"{one.label}: a step at batch {point.batch_size} costs {spec / ar:.2f} AR steps"


def _draw_split_panel(axes: Any, one: Series) -> None:
    ticks = []
    for place, point in enumerate(one.points):
        times = _split(point)
        if times is None:
            why = point.status if not point.ok else "no step time"
            axes.text(place, 0.05, why, rotation=90, ha="center", va="bottom",
                      fontsize=8, color=style.GREY)  # fmt: skip
            ticks.append(str(point.batch_size))
            continue
        for prefix, offset in (("ar_", -0.2), ("", 0.2)):
            bottom = 0.0
            for name, colour, hatch in style.PARTS:
                part = (point.metric(f"{prefix}{name}_s") or 0.0) / times[0]
                if part > 0:
                    axes.bar(place + offset, part, bottom=bottom, width=0.36, facecolor=colour, hatch=hatch,
                             edgecolor="white", linewidth=0.4, zorder=3)  # fmt: skip
                bottom += part
        earned = point.metric("tokens_per_step")
        if earned is not None:
            axes.plot(
                [place + 0.2], [earned], marker="D", color="black", markersize=4.5, markeredgecolor="white", zorder=4
            )
        ticks.append(f"{point.batch_size}\n{1e3 * times[0]:.{1 if times[0] < 0.01 else 0}f}")
    axes.axhline(1.0, color=style.AR_COLOUR, linewidth=0.9, linestyle=(0, (2, 2)), zorder=3.5)
    axes.set_xticks(range(len(ticks)), ticks, fontsize=8 if len(ticks) <= 6 else 7)
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.set_title(style.label(one.label, 36))
    axes.grid(axis="x", visible=False)
