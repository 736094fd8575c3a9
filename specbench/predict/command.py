"""`specbench predict`: the whole sweep from the cost model, without running it. Runs without torch.

specbench predict scenarios/quickstart.yaml --hardware h100-sxm
specbench predict scenarios/predict/llama-3.1-8b-h100.yaml --hardware h100-sxm --acceptance 0.8,0.75,0.7
specbench predict scenarios/drafters-smollm2.yaml --fit results/drafters-smollm2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.errors import ExitCode, InputError
from specbench.predict.acceptance import measured_book, read_acceptance
from specbench.predict.cells import Device, PredictedCell, Predictor, device_of
from specbench.predict.fitting import MeasuredRun, RunFit, device_of_run, fit_run, read_run
from specbench.predict.manifest import manifest_of
from specbench.predict.rows import as_dicts, contents_of, holds_measured_rows, write_rows
from specbench.predict.text import comparison_markdown, fit_markdown, prediction_lines
from specbench.result_row import ResultRow
from specbench.roofline.breakeven import Crossing, find_crossing
from specbench.roofline.fit import MOST_CELLS
from specbench.roofline.gaps import Comparison, compare_rows
from specbench.roofline.hardware import hardware
from specbench.scenario.cases import Case, expand
from specbench.scenario.filters import filter_cases
from specbench.scenario.schema import Scenario, load_scenario
from specbench.store import RowStore, latest_rows


@dataclass(frozen=True)
class Prediction:
    """A predicted sweep: its device, rows and manifest; with a measured run to fit on, the fit and the comparison."""

    directory: Path
    device: Device
    rows: list[ResultRow]
    manifest: dict[str, Any]
    fit: RunFit | None
    comparison: Comparison | None

    @property
    def none_feasible(self) -> bool:
        return not any(row.status == "ok" for row in self.rows)


def predict(
    path: Path,
    *,
    hardware_name: str | None,
    acceptance: str | None = None,
    fit: Path | None = None,
    fit_cells: int = MOST_CELLS,
    only: Sequence[str] = (),
    out: Path | None = None,
) -> ExitCode:
    """The command: predicts, writes the same folder as `run`, prints what was found."""
    from rich.console import Console

    from specbench.report.tables import LOG_WIDTH, verdict_sentences, verdict_table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
    try:
        done = predict_scenario(
            path, hardware_name=hardware_name, acceptance=acceptance, fit=fit, fit_cells=fit_cells, only=only, out=out
        )
    except InputError as error:
        error.file = error.file or path
        raise
    rows = as_dicts(done.rows)
    for line in prediction_lines(done.device, done.manifest, rows):
        console.print(line, markup=False)
    if done.fit is not None and done.comparison is not None:
        for line in fit_markdown(done.fit, done.comparison):
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"report: {done.directory / 'report.html'}", markup=False, soft_wrap=True)
    console.print()
    for sentence in verdict_sentences(rows, done.manifest):
        console.print(f"- {sentence}", markup=False)
    console.print()
    console.print(verdict_table(rows, done.manifest, console.width))
    return ExitCode.FAILED if done.none_feasible else ExitCode.DONE


def predict_scenario(
    path: Path,
    *,
    hardware_name: str | None,
    acceptance: str | None = None,
    fit: Path | None = None,
    fit_cells: int = MOST_CELLS,
    only: Sequence[str] = (),
    out: Path | None = None,
) -> Prediction:
    """Predict a scenario and write DIR/{rows.jsonl, manifest.json, summary.md, report.html, plots/}.

    Raises InputError for a scenario, device, shape, dtype or acceptance that can't be had, and where DIR holds
    measured rows, which a prediction never replaces.
    """
    from specbench.report.command import write_outputs

    scenario = load_scenario(path)
    directory = out or Path("runs") / f"{scenario.name}-predicted"
    if holds_measured_rows(directory):
        raise InputError("holds measured rows", file=directory, key="--out", remedy="give another folder to --out")
    run = None if fit is None else read_run(fit)
    found = None if run is None else fit_run(run, fit_cells)
    device = device_for(hardware_name, run, found)
    book = measured_book(run.directory) if run is not None and acceptance is None else read_acceptance(acceptance)
    cases = filter_cases(expand(scenario), only)
    cells = predict_cases(scenario, cases, Predictor(device, book))
    contents = list(contents_of(cells, device))
    comparison = None
    if run is not None and found is not None:
        fitted = {run.rows[index].case_hash for index in found.fitted}
        seen = [row.model_dump() for row in run.rows if row.case_hash not in fitted]
        comparison = compare_rows(seen, contents)
    manifest = manifest_of(scenario, path, device, book, found, comparison)
    write_rows(directory, contents)
    rows = latest_rows(directory)
    with RowStore(directory) as store:
        store.write_manifest(manifest)
    write_outputs(directory, as_dicts(rows), manifest)
    _extend_summary(directory, device, manifest, rows, found, comparison)
    return Prediction(directory, device, rows, manifest, found, comparison)


def device_for(name: str | None, run: MeasuredRun | None, found: RunFit | None) -> Device:
    """The named device, with the fit's efficiency where there is one; or the measured run's own."""
    if name is None:
        if run is None or found is None:
            raise InputError(
                "no device to predict for", key="--hardware", remedy="give --hardware h100-sxm, or --fit DIR"
            )
        return device_of_run(run, found)
    if run is None or found is None:
        return device_of(hardware(name))
    where = run.manifest.get("device")
    efficiency = replace(found.fit.efficiency, source=f"{found.fit.efficiency.source} of {where}, taken over")
    return device_of(hardware(name), efficiency)


def predict_cases(scenario: Scenario, cases: Sequence[Case], predictor: Predictor) -> list[PredictedCell]:
    """All cells. Where batch sizes are searched, each series gets the powers of two of its range and then both sides
    of its crossing: a prediction costs nothing."""
    search = getattr(scenario.sweep, "crossing", None)
    if search is None:
        return [predictor.predict(case) for case in cases]
    cells = []
    for case in cases:
        grid = sorted({search.min, search.max, *(1 << i for i in range(13) if search.min < 1 << i < search.max)})
        found = {batch: predictor.predict(case.at_batch(batch)) for batch in grid}
        while (middle := _between(found)) is not None:
            found[middle] = predictor.predict(case.at_batch(middle))
        cells += [found[batch] for batch in sorted(found)]
    return cells


def _between(found: dict[int, PredictedCell]) -> int | None:
    """The batch in the middle of the bracket of the crossing; None where it can't be narrowed."""
    known = {batch: cell.result.value for batch, cell in found.items() if cell.result is not None}
    crossing: Crossing = find_crossing(list(known), list(known.values()))
    if crossing.kind != "bracket" or crossing.low_batch is None or crossing.high_batch is None:
        return None
    middle = (crossing.low_batch + crossing.high_batch) // 2
    return middle if middle not in found else None


def _extend_summary(
    directory: Path,
    device: Device,
    manifest: dict[str, Any],
    rows: Sequence[ResultRow],
    found: RunFit | None,
    comparison: Comparison | None,
) -> None:
    """What a prediction has to say beside a run's summary: what it rests on, and how it compares."""
    file = directory / "summary.md"
    lines = ["", "## Predicted, not measured", ""]
    lines += [f"- {line}" for line in prediction_lines(device, manifest, as_dicts(rows))]
    if found is not None and comparison is not None:
        lines += ["", *fit_markdown(found, comparison), "", *comparison_markdown(comparison)]
    file.write_text(file.read_text(encoding="utf-8") + "\n".join(lines) + "\n", encoding="utf-8")


__all__ = ["Prediction", "predict", "predict_cases", "predict_scenario"]
