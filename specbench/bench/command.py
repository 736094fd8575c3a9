"""What the commands do between parsing and exit code: progress, tables, files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from specbench.errors import ExitCode, InputError, SpecbenchError
from specbench.report.tables import LOG_WIDTH
from specbench.result_row import ResultRow
from specbench.scenario.cases import Case, expand
from specbench.scenario.filters import filter_cases
from specbench.scenario.schema import Scenario, load_scenario

if TYPE_CHECKING:
    from specbench.bench.sweep import SweepResult

console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


def run(path: Path, *, out: Path | None, fresh: bool, only: Sequence[str], dry_run: bool) -> ExitCode:
    """`specbench run`."""
    scenario = load_scenario(path)
    cases = filter_cases(expand(scenario), only)
    directory = results_folder(scenario, out, fresh)
    try:
        if dry_run:
            return show_plan(scenario, cases)
        result = sweep(scenario, cases, directory, path)
    except InputError as error:
        error.file = error.file or path
        raise
    except KeyboardInterrupt:
        narrowed = [word for text in only for word in ("--only", text)]
        again = shlex.join(["specbench", "run", str(path), "--out", str(directory), *narrowed])
        raise SpecbenchError("interrupted; at most the running case is lost", remedy=f"resume with: {again}") from None
    from specbench.report.compare import comparison_text
    from specbench.report.tables import verdict_sentences, verdict_table

    rows = [row.model_dump() for row in result.rows]
    for row in result.rows:
        if row.status != "ok":
            console.print(f"{row.status}: {row.case_name}: {row.reason}", markup=False)
    console.print(f"report: {result.directory / 'report.html'}", markup=False, soft_wrap=True)
    console.print()
    compared = comparison_text(rows, result.manifest)
    for sentence in (*(compared.sentences if compared is not None else ()), *verdict_sentences(rows, result.manifest)):
        console.print(f"- {sentence}", markup=False)
    console.print()
    console.print(verdict_table(rows, result.manifest, console.width))
    return ExitCode.FAILED if result.none_succeeded else ExitCode.DONE


def run_scenario(path: Path, *, out: Path | None = None, fresh: bool = False, only: Sequence[str] = ()) -> SweepResult:
    """Run or resume a scenario and write its outputs; returns the SweepResult."""
    scenario = load_scenario(path)
    cases = filter_cases(expand(scenario), only)
    return sweep(scenario, cases, results_folder(scenario, out, fresh), path)


def sweep(scenario: Scenario, cases: Sequence[Case], directory: Path, path: Path) -> SweepResult:
    """Run or resume the cases into `directory`, then write its plots, summary and page."""
    from specbench.bench.roof_store import RoofFolder, default_folder
    from specbench.bench.sweep import run_sweep
    from specbench.report.command import write_outputs

    store = RoofFolder(default_folder())
    with ProgressWatcher() as watcher:
        result = run_sweep(scenario, cases, directory, scenario_file=str(path), watcher=watcher, roof_store=store)
        watcher.tell("plots and report")
        write_outputs(directory, [row.model_dump() for row in result.rows], result.manifest)
    return result


def results_folder(scenario: Scenario, out: Path | None, fresh: bool) -> Path:
    """`out`, or runs/NAME; with `fresh` the first of NAME, NAME-2, NAME-3 ... that does not exist."""
    folder = out or Path("runs") / scenario.name
    if not fresh:
        return folder
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


class ProgressWatcher:
    """A bar with what is running and the time left, judged by the cases that are done."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._case = ""
        self._durations: list[float] = []

    def __enter__(self) -> ProgressWatcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, total: int, reused: int) -> None:
        if reused:
            self._progress.console.print(f"resuming: {reused} of {total} cases are done already")
        self._total, self._done = total, reused
        self._progress.update(self._task, total=total, completed=reused)

    def case(self, case: Case) -> None:
        self._case = case.name
        self.tell("")

    def tell(self, text: str) -> None:
        words = " · ".join(part for part in (self._case, text) if part)
        self._progress.update(self._task, description=words[:60].ljust(60))

    def done(self, row: ResultRow) -> None:
        self._durations.append(row.duration_s)
        self._done += 1
        left = sum(self._durations) / len(self._durations) * (self._total - self._done)
        text = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
        self._progress.update(self._task, completed=self._done, left=text if self._total > self._done else "")
        if not self._progress.console.is_terminal:
            speedup = (row.metrics or {}).get("speedup")
            shown = f"{speedup:.2f} x AR" if isinstance(speedup, float) else row.reason or "AR arm"
            self._progress.console.print(
                f"[{self._done}/{self._total}] {row.case_name}: {row.status}, {shown} ({row.duration_s:.0f} s)",
                markup=False,
            )


def show_plan(scenario: Scenario, cases: Sequence[Case]) -> ExitCode:
    """`--dry-run`: every case, its memory need, an estimate of its time, and why any is skipped."""
    from specbench.bench.crossings import most_cells
    from specbench.bench.plan import Planner, quick_roof

    planner = Planner(scenario.measure, quick_roof())
    table = Table(title=f"{scenario.name}: {len(cases)} cases, nothing is measured", title_justify="left", box=None)
    table.add_column("case", overflow="fold")
    table.add_column("memory", justify="right")
    table.add_column("time, at least", justify="right")
    table.add_column("skipped because", overflow="fold")
    total = 0.0
    for case in cases:
        plan = planner.plan(case)
        memory = "" if plan.memory_bytes is None else f"{plan.memory_bytes / 2**20:,.0f} MiB"
        estimate = plan.estimate_s if plan.skip is None and plan.estimate_s is not None else 0.0
        total += estimate
        table.add_row(case.name, memory, f"{estimate:.1f} s" if plan.skip is None else "-", plan.skip or "")
    console.print(table)
    search = scenario.sweep.crossing
    if search is not None:
        console.print(
            f"each case begins a search of its crossing between batch {search.min} and {search.max}: about "
            f"{most_cells(search)} cells a series at most, of which the first is shown"
        )
    console.print(
        f"about {total / 60:.1f} min in measured blocks at least, if no draft is accepted, by a rough roof of this "
        "machine; loading, prefill and warm-up come on top"
    )
    return ExitCode.DONE


def doctor() -> ExitCode:
    """`specbench doctor`: what runs here, and the remedy for what does not. Exit 4 where no case can run at all."""
    from specbench.bench.doctor import checks

    failed = False
    table = Table(box=None, show_header=False)
    for check in checks():
        failed |= check.needed and not check.ok
        mark = "ok" if check.ok else ("MISSING" if check.needed else "absent")
        table.add_row(mark, check.name, check.text)
    console.print(table)
    return ExitCode.BAD_ENVIRONMENT if failed else ExitCode.DONE
