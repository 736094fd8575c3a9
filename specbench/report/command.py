"""`specbench report` and `specbench compare`: rows on disk -> plots and one page, or two runs in the terminal. Both run
without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.errors import ExitCode, InputError
from specbench.report import versus as together
from specbench.report.html import Run, write_report
from specbench.report.html_cells import tenths
from specbench.report.plots import Figures, make_figures
from specbench.report.summary import summary_markdown
from specbench.result_row import ResultRow
from specbench.store import iter_rows, read_manifest

_WORD_STYLES = {together.FASTER: "green", together.SLOWER: "red", together.UNCLEAR: "yellow"}


def read_run(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The latest rows and the manifest of a run; raises InputError for a folder that holds none."""
    if not directory.is_dir():
        raise InputError("no such folder", file=directory, remedy="give a folder that `specbench run` wrote")
    kept: dict[str, dict[str, Any]] = {}
    for row in iter_rows(directory):
        kept[row.key] = _thin(row)
    return list(kept.values()), read_manifest(directory)


def _thin(row: ResultRow) -> dict[str, Any]:
    """The row as a dict without the samples that no page needs: of its blocks the quantiles, and the disturbed ones'
    marks."""
    values = {name: getattr(row, name) for name in ResultRow.model_fields}
    blocks = row.samples["blocks"]
    rates: dict[str, list[float]] = {"ar": [], "spec": []}
    for block in blocks:
        if block["valid"] and block["wall_s"]:
            rates[block["arm"]].append(block["tokens"] / block["wall_s"])
    disturbed = [block for block in blocks if block["marks"] or not block["valid"]]
    told = {"block_rates": {arm: tenths(found) for arm, found in rates.items()}}
    return values | told | {"samples": {"blocks": disturbed, "prompts": row.samples["prompts"]}}


def write_page(directories: Sequence[Path], out: Path | None = None, plots: Path | None = None) -> Path:
    """One page over the latest rows of each folder; raises InputError for a folder that holds no run.

    With `plots` the figures are also kept there as SVG, PNG and CSV (in a folder each, where there are several runs).
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = [read_run(directory) for directory in directories]
        base = plots or Path(scratch)
        folders = [base if len(found) == 1 else base / f"{place}" for place in range(1, len(found) + 1)]
        runs = [
            _run(rows, manifest, make_figures(rows, manifest, folder, png=plots is not None))
            for (rows, manifest), folder in zip(found, folders, strict=True)
        ]
        return write_report(runs, out or directories[0] / "report.html")


def write_outputs(directory: Path, rows: Sequence[dict[str, object]], manifest: dict[str, object]) -> Path:
    """summary.md, plots/ and report.html of a run into its own folder; returns the page."""
    figures = make_figures(rows, manifest, directory / "plots")
    (directory / "summary.md").write_text(summary_markdown(rows, manifest), encoding="utf-8")
    return write_report([_run(rows, manifest, figures)], directory / "report.html")


def _run(rows: Sequence[dict[str, Any]], manifest: dict[str, Any], figures: Figures) -> Run:
    return Run(rows, manifest, figures.plots, [(one.title, one.why) for one in figures.left_out])


def compare(first: Path, second: Path, out: Path | None = None, console: Console | None = None) -> ExitCode:
    """Two runs beside each other in the terminal, and on a page where `out` names one.

    Returns INCONCLUSIVE where they have no cell in common, else DONE: whether a change is a regression is the gate's
    to say.
    """
    console = console or Console()
    sides = together.sides_of([read_run(directory) for directory in (first, second)])
    found = together.versus(sides)
    console.print(found.sentence, markup=False)
    for side in sides:
        console.print(f"- {side.name}: {side.answer.sentence}", markup=False)
        for text in side.answer.advice:
            console.print(f"    {text}", markup=False)
    if found.cells:
        console.print()
        console.print(cells_table(found))
    for note in found.notes:
        console.print(note, markup=False)
    if found.differences:
        console.print()
        console.print(differences_table(found))
    for name, where in found.only:
        console.print(f"only in {where}: {name}", markup=False)
    if out is not None:
        console.print(f"wrote {write_page([first, second], out)}", markup=False, soft_wrap=True)
    return ExitCode.DONE if found.cells else ExitCode.INCONCLUSIVE


def cells_table(found: together.Versus) -> Table:
    """The cells in common, the largest loss first; text from outside is never taken as markup."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    longest = max((len(cell.name) for cell in found.cells), default=4)
    table.add_column(Text("cell"), overflow="fold", min_width=min(longest, 36))
    for head in together.cell_header(found.sides)[1:]:
        table.add_column(Text(head.replace(", ", "\n")), justify="right", overflow="fold")
    for cell in found.cells:
        *values, word = together.cell_line(cell)
        table.add_row(*map(Text, values), Text(word, style=_WORD_STYLES.get(word, "dim")))
    return table


def differences_table(found: together.Versus) -> Table:
    """What isn't the same in both runs."""
    table = Table(title=Text("What differs"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in ("what", *(side.name for side in found.sides)):
        table.add_column(Text(head), overflow="fold")
    for line in found.differences:
        table.add_row(*map(Text, line))
    return table
