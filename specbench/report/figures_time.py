"""Where a step's time goes, beside the AR step of the same cell: what speculation costs against what it yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import Axis, Frame, amount_axis, draw_grid
from specbench.report.series import Point, Series, best_series, best_series_by_drafter
from specbench.report.style import Drawn, Marks

_MOST_STEPS = 1e6
_LEAST_PART = 0.003
"""A part of a step that would be no wider than a hair (in AR steps) isn't drawn; the data has it."""
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
        return style.left(_SPLIT_TITLE, "no cell has the time of a step", _SPLIT_HEADER, data)
    shown, of_kind = chosen, False
    if len(chosen) > style.MAX_PANELS:
        of_kind = len({one.kind for one in chosen}) > 1
        shown = best_series(chosen, lambda one: one.kind) if of_kind else chosen
        shown = shown[: style.MAX_PANELS]
    foot = [
        (style.patch(facecolor=c, hatch=h, edgecolor=style.PAGE, linewidth=0.4), name) for name, c, h in style.PARTS
    ]
    foot.append((style.handle(**_DIAMOND, linestyle="none"), "tokens a step yields per request"))
    foot.append((style.handle(color=style.AR_COLOUR, linewidth=0.9, linestyle=(0, (2, 2))), "one AR step"))
    titles = [one.label for one in shown]
    axes = [(_batch_axis(one), amount_axis(0.0, max(_tops(one)) * 1.06, "step (AR steps)", 5)) for one in shown]
    ground, frames = draw_grid(titles, [[] for _ in shown], lambda place: axes[place], panel_in=1.6, foot=foot,
                               under_in=0.14, x_grid=False)  # fmt: skip
    marks = Marks()
    for frame, one in zip(frames, shown, strict=True):
        _draw_split_panel(frame, one, marks)
    caption = "What a speculative step costs, part by part, beside an AR step of the same cell."
    what = "each kind's best drafter and depth" if of_kind else "each drafter at its best depth"
    note = (
        f"Shown: {what}. Left bar: the AR step (always 1; its ms are under the batch size); right bar: a speculative"
        " step. Where the diamond (tokens the step yields) is above the right bar, speculation is the faster."
        " Each panel has its own scale." + ("" if of_kind else style.left_out(len(shown), len(chosen), "drafters"))
    )
    alt = "Stacked bars of step time. " + "; ".join(_split_words(one) for one in shown) + "."
    return Drawn(ground.figure, _SPLIT_TITLE, caption, alt, _SPLIT_HEADER, data, note, marks=marks)


_DIAMOND: dict[str, Any] = {"marker": "D", "color": style.INK, "markersize": 5, "markeredgecolor": style.PAGE}


def _split(point: Point) -> tuple[float, float] | None:
    ar, spec = point.metric("ar_step_s"), point.metric("step_s")
    return (ar, spec) if point.ok and ar and spec and 1 / _MOST_STEPS < spec / ar < _MOST_STEPS else None


def _gain(point: Point) -> float | None:
    gain = point.metric("tokens_per_step")
    return gain if gain is not None and 0 <= gain < _MOST_STEPS else None


def _tops(one: Series) -> list[float]:
    found = [1.5]
    for point in one.points:
        times = _split(point)
        if times:
            found += [times[1] / times[0], _gain(point) or 0.0]
    return found


def _batch_axis(one: Series) -> Axis:
    """Batch sizes at even distances, under each the AR step in ms."""
    ticks = []
    for place, point in enumerate(one.points):
        times = _split(point)
        milliseconds = "" if times is None else f"\n{1e3 * times[0]:.{1 if times[0] < 0.01 else 0}f}"
        ticks.append((float(place), f"{point.batch_size}{milliseconds}"))
    return Axis(-0.6, len(ticks) - 0.4, tuple(ticks), False, "batch size; under it, AR step (ms)")


def _split_words(one: Series) -> str:
    point = [p for p in one.points if _split(p)][-1]
    ar, spec = _split(point) or (1.0, 1.0)
    return f"{one.label}: a step at batch {point.batch_size} costs {spec / ar:.2f} AR steps"


def _draw_split_panel(frame: Frame, one: Series, marks: Marks) -> None:
    kept = [(place, point, times) for place, point in enumerate(one.points) if (times := _split(point))]
    for place, point in enumerate(one.points):
        if _split(point) is None:
            why = point.status if not point.ok else "no step time"
            frame.ground.text(frame.x_at(place), frame.y_at(0) - 0.05, why, rotation=90, ha="center", va="bottom",
                              fontsize=8, color=style.GREY)  # fmt: skip
    for prefix, arm, offset in (("ar_", "AR step", -0.2), ("", "speculative step", 0.2)):
        bottoms = [0.0] * len(kept)
        for name, colour, hatch in style.PARTS:
            bars, tips = [], []
            for index, (place, point, times) in enumerate(kept):
                part = max(point.metric(f"{prefix}{name}_s") or 0.0, 0.0) / times[0]
                if part > _MOST_STEPS:
                    continue
                if part > _LEAST_PART:
                    bars.append((place + offset, 0.36, bottoms[index], bottoms[index] + part))
                    seconds = read.significant(part * times[0], "s")
                    tips.append(f"batch {point.batch_size}, {arm}: {name} {part:.2f} AR steps ({seconds})")
                bottoms[index] += part
            if bars:
                shape = frame.bars(bars, facecolor=colour, hatch=hatch, edgecolor=style.PAGE, linewidth=0.4, zorder=3)
                marks.add(shape, tips, f"{one.label}: {arm}, {name}")
    earned = [(place, point, gain) for place, point, _ in kept if (gain := _gain(point)) is not None]
    line = frame.plot([place + 0.2 for place, _, _ in earned], [gain for _, _, gain in earned], **_DIAMOND,
                      linestyle="none", zorder=4)  # fmt: skip
    marks.add(line, [f"{one.label}, batch {p.batch_size}: a step yields {gain:.2f} tokens" for _, p, gain in earned])
    frame.level(1.0, colors=style.AR_COLOUR, linewidths=0.9, linestyles=[(0, (2, 2))], zorder=3.5)
