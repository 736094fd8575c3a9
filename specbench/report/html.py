"""One self-contained HTML file from rows, manifests and plots: it opens offline, under a content policy that lets it
load nothing and run nothing but its own script.

Everything from outside is escaped by jinja2's autoescape; SVG files are parsed and rebuilt (`html_svg.py`); JSON inside
the page can't end its element (`html_cells.json_for_html`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specbench.definitions import DEFINITIONS
from specbench.report import rows as read
from specbench.report import tables
from specbench.report import versus as together
from specbench.report.badges import BADGES, legend, target_interval
from specbench.report.compare import comparison_text
from specbench.report.figures_answer import AnswerPlot, data_text, draw_answers
from specbench.report.figures_compare import CATEGORIES, POSITIONS
from specbench.report.figures_rollback import rollback_table
from specbench.report.html_cells import (
    HEADER,
    block_quantiles,
    cell_lines,
    fault,
    nulls,
    raw_cells,
    warnings_of,
)
from specbench.report.html_figures import Figure, data_rows, figure_of, rows_per_figure
from specbench.report.html_provenance import flat, provenance, roof_line, scenario_text
from specbench.report.html_svg import Sheet, inline_svg, palette_css
from specbench.report.plots import Plot
from specbench.report.roofs import missing_roofs, roofs_of
from specbench.report.rows import Row
from specbench.report.summary import condition_pairs
from specbench.report.tables_drafters import drafter_table
from specbench.report.tables_throttle import regret_table

__all__ = ["Run", "block_quantiles", "inline_svg", "write_report"]

COMPARISON_PLOTS = (CATEGORIES, POSITIONS)
_DARK_PAGE = (
    "--page:#15171a;--card:#1e2226;--ink:#e8e8e8;--soft:#aeb3b8;--line:#3a3f45;--link:#7cb8f5;--gain:#62d6a8;"
    "--gain-bg:#143327;--loss:#ffa566;--unsure:#e4c95c;--warn:#ffc98a;--warn-bg:#3a2a12;--bad:#ff9d9d;--bad-bg:#421b1b;"
    "--note-bg:#2a3138;--tip:#f2f2f2;--tip-ink:#15171a;"
)


@dataclass(frozen=True)
class Run:
    """What one run brings to the page; `left_out` names the figures that weren't drawn, with the reason."""

    rows: Sequence[Row]
    manifest: Mapping[str, Any]
    plots: Sequence[Plot] = field(default=())
    left_out: Sequence[tuple[str, str]] = field(default=())


def write_report(runs: Sequence[Run], out_file: Path | str) -> Path:
    """Write the page for one run or several and return its path. Several stand side by side first, then each by itself.

    Samples don't enter the page: each cell shows quantiles of its blocks. Raises OSError where the file can't be
    written.
    """
    path = Path(out_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs), encoding="utf-8")
    return path


def render(runs: Sequence[Run]) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("specbench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sheet = Sheet()
    sides = together.sides_of([(run.rows, run.manifest) for run in runs])
    most = rows_per_figure([data_rows(plot) for run in runs for plot in run.plots])
    sections = [
        _section(run, side, f"r{place}", sheet, most)
        for place, (run, side) in enumerate(zip(runs, sides, strict=True), start=1)
    ]
    beside = _versus(sides) if len(sides) > 1 else None
    css, theme_js, js = _style(sheet), _asset("theme.js"), _asset("report.js")
    return environment.get_template("report.html.j2").render(
        title=sections[0]["title"]
        if len(sections) == 1
        else f"{len(sections)} speculative decoding runs, side by side",
        runs=sections,
        versus=beside,
        badges=BADGES,
        definitions=[(d.name, d.unit, d.formula, d.meaning) for d in DEFINITIONS.values()],
        css=Markup(css),
        theme_js=Markup(theme_js),
        js=Markup(js),
        policy=policy(css, (theme_js, js)),
    )


# ---- the parts that a strict policy lets run


def policy(css: str, scripts: Iterable[str]) -> str:
    """A Content-Security-Policy under which the page loads nothing, sends nothing and runs these scripts alone."""
    hashes = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(css)}; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    """A file of templates/ without the comments and the indentation that a page needn't carry."""
    text = files("specbench.report").joinpath("templates", name).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _style(sheet: Sheet) -> str:
    text = _asset("report.css").replace("{{DARK_PAGE}}", _DARK_PAGE)
    return f"{text.replace('{{LIGHT}}', palette_css(False)).replace('{{DARK}}', palette_css(True))}\n{sheet.css()}"


# ---- one run


def _section(run: Run, side: together.Side, prefix: str, sheet: Sheet, most: int) -> dict[str, Any]:
    manifest, cells, answer = side.manifest, side.cells, side.answer
    target = target_interval(manifest)
    figures = [figure_of(plot, f"{prefix}-{plot.name}", sheet, most) for plot in run.plots]
    drawn = draw_answers(answer.plotted)
    wide, narrow = (None, None) if drawn is None else (_answer_figure(plot, prefix, sheet) for plot in drawn)
    dtypes = list(dict.fromkeys(str(read.axis(row, "dtype")) for row in cells))
    name = read.plain(manifest.get("name") or "unnamed run")
    return {
        "prefix": prefix,
        "name": side.name if name in side.name else name,
        "file": file_name(side.name),
        "title": read.plain(manifest.get("question") or name),
        "device": read.plain(manifest.get("device") or "an unrecorded device"),
        "answer": answer,
        "answer_lines": answer.lines[: answer.shown],
        "answer_left": max(len(answer.lines) - answer.shown, 0),
        "has_choice": any(line.chosen for line in answer.lines),
        "answer_figure": wide,
        "narrow_figure": narrow,
        "sentences": tables.verdict_sentences(cells, manifest),
        "verdict": tables.verdict(cells),
        "figures": [figure for figure in figures if figure.name not in COMPARISON_PLOTS],
        "left_out": [(read.plain(name), read.plain(why)) for name, why in run.left_out],
        "drafters": drafter_table(cells),
        "comparison": comparison_text(cells, manifest),
        "comparison_figures": [figure for figure in figures if figure.name in COMPARISON_PLOTS],
        "faults": [fault(row) for row in cells if not read.is_ok(row)],
        "warnings": warnings_of(cells),
        "rollback": rollback_table(cells),
        "regret": regret_table(cells),
        "cell_header": HEADER,
        "cells": cell_lines(cells, manifest, prefix, target),
        "raw": raw_cells(cells, target),
        "legend": legend(cells, target),
        "conditions": condition_pairs(cells, manifest),
        "provenance": provenance(cells, manifest),
        "roofs": [roof_line(roof) for dtype in dtypes for roof in roofs_of(manifest, dtype)],
        "no_roofs": [read.plain(text) for dtype in dtypes for text in missing_roofs(manifest, dtype)],
        "environment": flat(manifest.get("environment")),
        "scenario": scenario_text(manifest.get("scenario")),
        "scenario_file": read.plain(manifest.get("scenario_file") or ""),
        "nulls": nulls(cells),
    }


def _answer_figure(plot: AnswerPlot, prefix: str, sheet: Sheet) -> Figure:
    own, data = f"{prefix}-{plot.name}", data_text(plot)
    svg = inline_svg(plot.svg, own, plot.title, plot.alt, sheet)
    heads = tuple(name.replace("_", " ") for name in plot.header)
    return Figure(plot.name, own, plot.title, plot.caption, "", svg, heads, data, len(data), "", False)


def file_name(name: str) -> str:
    """What an exported file is called: letters, digits and dashes of the run's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"


# ---- several runs


def _versus(sides: Sequence[together.Side]) -> dict[str, Any]:
    found = together.versus(sides)
    return {
        "sentence": found.sentence,
        "overview": together.overview(sides),
        "header": together.cell_header(sides),
        "cells": [together.cell_line(cell) for cell in found.cells],
        "only": found.only,
        "notes": found.notes,
        "difference_header": ("what", *(side.name for side in sides)),
        "differences": found.differences,
    }
