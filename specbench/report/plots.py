"""Make every figure of a run: name.svg, name.png and name.csv in one folder, the same bytes for the same rows.

`make_figures` draws only what has data; the rest is named in `left_out` with the reason.

How a finished SVG is made for a page (`figures_svg.py` does it):
- `class="sb-mark"` with `data-tip="..."`: an element that stands for one value (a marker, a bar, a cell of a map) and
  one line of text about it, with units. `class="sb-series"`, `data-name="..."`: the group that holds one series.
- `class="sb-text"`: every text. `sb-page`: the figure's white background. `sb-key`: the legend under all panels.
- Every colour that follows the theme is one of `figures_svg.PALETTE` (role -> light, dark) and stands in a `style`
  attribute: `html_svg.py` makes variables of them. All other colours (cells of heat maps and the text on them) are the
  same in both themes.
- Ids are unique within a file; `clip-path`, `fill` and `href` refer to them.
- `Plot.caption` is one sentence on what the figure shows, `Plot.note` (may be "") how to read it and what isn't shown,
  `Plot.alt` the content in words. The viewBox is in points; text is 8 to 11 points.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.compare import comparison_of, pairs_of
from specbench.report.figures import draw_speedup, draw_speedup_by_kind
from specbench.report.figures_acceptance import draw_categories, draw_positions
from specbench.report.figures_compare import CATEGORIES, POSITIONS, draw_category_ratios, draw_conditional
from specbench.report.figures_maps import draw_best_depth, draw_context_map, draw_depth_map
from specbench.report.figures_pareto import draw_energy, draw_pareto
from specbench.report.figures_predicted import (
    CELLS,
    SERIES,
    comparison_in,
    comparison_of_rows,
    draw_cells,
    draw_series,
)
from specbench.report.figures_rollback import draw_rollback, policies
from specbench.report.figures_roofline import draw_roofline
from specbench.report.figures_time import draw_split
from specbench.report.rows import Row
from specbench.report.series import series_of
from specbench.report.style import Drawn


@dataclass(frozen=True)
class Plot:
    """A saved figure: its words, and the paths of the picture (twice) and of the data behind it."""

    name: str
    title: str
    caption: str
    alt: str
    svg_path: Path
    png_path: Path | None
    csv_path: Path
    note: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A figure that this run has no data for: `why` is the end of a sentence ("no cell has ...")."""

    name: str
    title: str
    why: str


@dataclass(frozen=True)
class Figures:
    """What was drawn, in the order of a page, and what wasn't."""

    plots: tuple[Plot, ...]
    left_out: tuple[LeftOut, ...]


def make_figures(
    rows: Iterable[Row],
    manifest: Mapping[str, Any],
    out_dir: Path | str,
    *,
    predicted: Iterable[Row] = (),
    png: bool = True,
) -> Figures:
    """Draw and save the figures of one run.

    `predicted` are rows of the same cases from the cost model (rows whose conditions say `predicted` may also stand
    among `rows`): they are drawn beside the measured ones, or alone, named so, where nothing was measured. A prediction
    that was fitted on a run has the comparison with it in its manifest. A run with one rollback policy, one whose
    scenario compares no drafters, one without a second context length and one without a prediction lack those figures
    without a word. `out_dir` is made if it isn't there; files of the same names in it are replaced. `png=False` saves
    the time of the second picture.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    given = list(rows)
    measured = read.latest(row for row in given if not read.is_predicted(row))
    forecast = read.latest([*(row for row in given if read.is_predicted(row)), *predicted])
    cells = measured or forecast
    plots: list[Plot] = []
    left_out: list[LeftOut] = []
    with style.drawing():
        for name, drawn in _all(cells, forecast if measured else [], manifest):
            if drawn.figure is None:
                left_out.append(LeftOut(name, drawn.title, drawn.why))
                continue
            alone = not measured and name not in (CELLS, SERIES)
            shown = replace(drawn, title=f"{drawn.title} (predicted)") if alone else drawn
            style.heading(shown.figure, shown.title)
            plots.append(_save(shown, name, folder, png))
    return Figures(tuple(plots), tuple(left_out))


def make_plots(rows: Iterable[Row], manifest: Mapping[str, Any], out_dir: Path | str) -> list[Plot]:
    """The plots of `make_figures`."""
    return list(make_figures(rows, manifest, out_dir).plots)


def _all(cells: Sequence[Row], forecast: Sequence[Row], manifest: Mapping[str, Any]) -> Iterable[tuple[str, Drawn]]:
    series = series_of(cells)
    at_a_glance = draw_speedup(series)
    yield "speedup", at_a_glance
    by_kind = draw_speedup_by_kind(series, at_a_glance.data)
    if by_kind is not None:
        yield "speedup_by_kind", by_kind
    yield "best_depth", draw_best_depth(series)
    yield "depth_map", draw_depth_map(series)
    context = draw_context_map(cells)
    if context is not None:
        yield "context_map", context
    yield "roofline", draw_roofline(series, manifest)
    yield "acceptance_by_position", draw_positions(series)
    yield "acceptance_by_category", draw_categories(series)
    yield "step_time", draw_split(series)
    if len(policies(cells)) > 1:
        yield "rollback", draw_rollback(cells)
    held = comparison_of_rows(cells, forecast) if forecast else comparison_in(manifest)
    if held is not None:
        yield CELLS, draw_cells(held)
        yield SERIES, draw_series(held)
    yield "pareto", draw_pareto(series)
    yield "energy", draw_energy(series)
    asked = comparison_of(manifest)
    if asked is not None:
        pairs = pairs_of(cells, asked)
        yield CATEGORIES, draw_category_ratios(asked, pairs)
        yield POSITIONS, draw_conditional(asked, pairs)


def _save(drawn: Drawn, name: str, folder: Path, png: bool) -> Plot:
    svg, picture = style.save(drawn, folder / name, png)
    table = folder / f"{name}.csv"
    with table.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(drawn.header)
        writer.writerows([["" if cell is None else cell for cell in row] for row in drawn.data])
    return Plot(name, drawn.title, drawn.caption, drawn.alt, svg, picture, table, drawn.note.strip())
