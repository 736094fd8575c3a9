"""`specbench report`: rows on disk -> plots and one page. Runs without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import InputError
from specbench.report.html import Run, write_report
from specbench.report.plots import make_plots
from specbench.report.tables import summary_markdown
from specbench.store import latest_rows, read_manifest


def write_page(directories: Sequence[Path], out: Path | None = None) -> Path:
    """One page over the latest rows of each folder; raises InputError for a folder that holds no run."""
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for index, directory in enumerate(directories):
            if not directory.is_dir():
                raise InputError("no such folder", file=directory, remedy="give a folder that `specbench run` wrote")
            rows = [row.model_dump() for row in latest_rows(directory)]
            manifest = read_manifest(directory)
            runs.append(Run(rows, manifest, make_plots(rows, manifest, Path(scratch) / str(index))))
        return write_report(runs, out or directories[0] / "report.html")


def write_outputs(directory: Path, rows: Sequence[dict[str, object]], manifest: dict[str, object]) -> Path:
    """summary.md, plots/ and report.html of a run into its own folder; returns the page."""
    plots = make_plots(rows, manifest, directory / "plots")
    (directory / "summary.md").write_text(summary_markdown(rows, manifest), encoding="utf-8")
    return write_report([Run(rows, manifest, plots)], directory / "report.html")
