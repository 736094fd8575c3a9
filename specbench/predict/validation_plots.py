"""The plots of docs/validation.md: predicted over measured, series by batch, and published curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench.predict.published import Curve
from specbench.report import style
from specbench.report.figures_predicted import draw_cells, draw_series
from specbench.report.style import Drawn
from specbench.roofline.gaps import Comparison


def draw_all(comparison: Comparison, published: Sequence[Curve], folder: Path) -> list[tuple[str, str]]:
    """Saves cells, series and published; (name, words) of each."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with style.drawing():
        cells, series = draw_cells(comparison), draw_series(comparison)
        for name, one in {"cells": cells, "series": series, "published": _published(published)}.items():
            style.heading(one.figure, one.title)
            style.save(one, folder / name)
            drawn.append((name, one.caption))
    return drawn


def _published(published: Sequence[Curve]) -> Drawn:
    """The published curve by batch, and all single figures as pairs."""
    figure = style.new_figure(3.8)
    left, right = figure.subplots(1, 2)
    curve = published[0]
    for place, what in enumerate(dict.fromkeys(point.what for point in curve.points)):
        points = [point for point in curve.points if point.what == what]
        colour, marker = style.COLOURS[place], style.MARKERS[place]
        batches = [point.batch for point in points]
        left.plot(
            batches, [point.published for point in points], color=colour, marker=marker, label=f"{what}, published"
        )
        left.plot(
            batches, [point.predicted for point in points], color=colour, linestyle=(0, (4, 2)), label="predicted"
        )
        fitted = [point for point in points if point.fitted]
        left.plot([point.batch for point in fitted], [point.published for point in fitted], color=colour, marker=marker,
                  markerfacecolor="white", linestyle="none")  # fmt: skip
    left.axhline(1, color=style.AR_COLOUR, linewidth=0.8)
    style.batch_axis(left, sorted({point.batch for point in curve.points}))
    left.set_xlabel("batch (hollow: fitted on)")
    left.set_ylabel("speedup over AR")
    left.set_title(style.label(curve.name, 50))
    left.legend(loc="lower left", fontsize=7.5)
    singles = [(one, point) for one in published[1:] for point in one.points]
    names = [style.label(f"{point.what}, batch {point.batch}", 30) for _, point in singles]
    places = range(len(singles))
    right.plot([point.published for _, point in singles], places, color=style.COLOURS[0], marker="o", linestyle="none",
               label="published")  # fmt: skip
    right.plot([point.predicted for _, point in singles], places, color=style.COLOURS[1], marker="x", linestyle="none",
               label="predicted")  # fmt: skip
    right.axvline(1, color=style.AR_COLOUR, linewidth=0.8)
    right.set_yticks(list(places), names)
    right.invert_yaxis()
    right.set_xlabel("speedup over AR")
    right.set_title("Single figures")
    right.legend()
    words = "published speedups by batch and single figures, with the predictions beside them"
    return Drawn(figure, "Published speedups and predictions", words, words, (), ())
