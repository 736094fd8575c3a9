"""Make every plot of a run: name.svg, name.png and name.csv in one folder, the same bytes for the same rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures import draw_best_depth, draw_speedup
from specbench.report.figures_acceptance import draw_categories, draw_positions
from specbench.report.figures_roofline import draw_roofline
from specbench.report.figures_time import draw_split
from specbench.report.rows import Row
from specbench.report.series import series_of


@dataclass(frozen=True)
class Plot:
    """A saved plot: its words, and the paths of the picture (twice) and of the data behind it."""

    name: str
    title: str
    caption: str
    alt: str
    svg_path: Path
    png_path: Path
    csv_path: Path


def make_plots(rows: Iterable[Row], manifest: Mapping[str, Any], out_dir: Path | str) -> list[Plot]:
    """Draw and save all plots of one run; a plot without data is a panel that says why.

    `out_dir` is made if it isn't there; files of the same names in it are replaced.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    cells = read.latest(rows)
    series = series_of(cells)
    with style.drawing():
        drawn = {
            "speedup": draw_speedup(series),
            "best_depth": draw_best_depth(cells),
            "roofline": draw_roofline(series, manifest),
            "acceptance_by_position": draw_positions(series),
            "acceptance_by_category": draw_categories(series),
            "step_time": draw_split(series),
        }
        plots = []
        for name, one in drawn.items():
            svg, png = style.save(one.figure, folder / name)
            table = folder / f"{name}.csv"
            with table.open("w", encoding="utf-8", newline="") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(one.header)
                writer.writerows([["" if cell is None else cell for cell in row] for row in one.data])
            plots.append(Plot(name, one.title, one.caption, one.alt, svg, png, table))
    return plots
