"""A plot's files as a figure of the page: the picture as an element, its words, its data as a table."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from specbench.report import rows as read
from specbench.report.html_svg import Sheet, inline_svg
from specbench.report.plots import Plot

DATA_ROWS = 1500
"""Rows of data that a page holds for one figure, less where there are many figures."""
PAGE_DATA_ROWS = 4000
LEAST_DATA_ROWS = 100


@dataclass(frozen=True)
class Figure:
    """One figure: `data` are the first rows of `total`, as text; the file `csv` beside the picture has all of them."""

    name: str
    id: str
    title: str
    caption: str
    note: str
    svg: Markup
    header: tuple[str, ...]
    data: tuple[tuple[str, ...], ...]
    total: int
    csv: str
    is_empty: bool


def figure_of(plot: Plot, prefix: str, sheet: Sheet, most_rows: int = DATA_ROWS) -> Figure:
    """Raises OSError where a file is missing."""
    with plot.csv_path.open(encoding="utf-8", newline="") as stream:
        header, *data = list(csv.reader(stream)) or [[]]
    source = plot.svg_path.read_text(encoding="utf-8")
    return Figure(
        plot.name,
        prefix,
        read.plain(plot.title),
        read.plain(plot.caption),
        read.plain(note) if (note := getattr(plot, "note", "")) else "",
        inline_svg(source, prefix, plot.title, plot.alt, sheet),
        tuple(name.replace("_", " ") for name in header),
        tuple(tuple(short(value) for value in row) for row in data[:most_rows]),
        len(data),
        plot.csv_path.name,
        plot.caption.startswith("No data"),
    )


def rows_per_figure(totals: Sequence[int]) -> int:
    """The most rows that each figure may show, so that all of a page stay under PAGE_DATA_ROWS."""
    for most in range(DATA_ROWS, LEAST_DATA_ROWS, -50):
        if sum(min(total, most) for total in totals) <= PAGE_DATA_ROWS:
            return most
    return LEAST_DATA_ROWS


def data_rows(plot: Plot) -> int:
    with plot.csv_path.open(encoding="utf-8", newline="") as stream:
        return max(sum(1 for _ in csv.reader(stream)) - 1, 0)


def short(text: str) -> str:
    """A CSV value for a narrow table: four significant digits, everything else as it stands."""
    try:
        value = float(text)
    except ValueError:
        return read.plain(text) if text else ""
    if not math.isfinite(value):
        return read.DASH
    return text if value == int(value) and "." not in text else f"{value:.4g}"
