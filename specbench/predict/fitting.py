"""A measured run as the fit and the comparison need it: its cells with shapes and times, its device, its cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import InputError
from specbench.predict.acceptance import AcceptanceBook, Entry, pooled_entries
from specbench.predict.cells import Device
from specbench.predict.shapes import drafting, target_spec
from specbench.result_row import ResultRow
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.cost import uniform_cost
from specbench.roofline.draft_cost import catch_up_rows
from specbench.roofline.fit import MOST_CELLS, Fit, MeasuredCell, fit_efficiency, pick_cells
from specbench.roofline.model import Roof
from specbench.roofline.roofs import measured_roof
from specbench.roofline.shapes import ModelSpec
from specbench.roofline.staircase import Staircase
from specbench.roofline.step_model import IDEAL, StepModel, StepTimes
from specbench.scenario.cases import Case, expand
from specbench.scenario.schema import Scenario
from specbench.store import latest_rows, read_manifest

_PARTS = ("step_s", "draft_s", "verify_s", "sample_s")


@dataclass(frozen=True)
class MeasuredRun:
    """A run's ok rows that a model can be held against, each with its case and cell, and its device's roofs."""

    directory: Path
    manifest: Mapping[str, Any]
    cases: tuple[Case, ...]
    rows: tuple[ResultRow, ...]
    cells: tuple[MeasuredCell, ...]
    left_out: int


@dataclass(frozen=True)
class RunFit:
    """A fit on a run: the model, which rows were fitted on (indices into the run's), and how well."""

    model: StepModel
    fit: Fit
    fitted: tuple[int, ...]
    used_staircase: bool


def read_run(directory: Path) -> MeasuredRun:
    """Raises InputError for a folder that is no run, holds predictions, or has no cell that drafts."""
    manifest = read_manifest(directory)
    if manifest.get("predicted"):
        raise InputError("these rows are predictions", file=directory, key="--fit", remedy="give a measured run")
    scenario = Scenario.from_dict(dict(manifest["scenario"]))
    by_hash = {case.hash: case for case in expand(scenario)}
    by_name = {case.name: case for case in by_hash.values()}
    cases, rows, cells = [], [], []
    total = 0
    for row in {row.case_hash: row for row in latest_rows(directory)}.values():
        if row.status != "ok" or row.conditions.get("predicted"):
            continue
        total += 1
        case = by_hash.get(row.case_hash) or by_name.get(row.case_name)
        if case is None or not _is_complete(row.metrics or {}):
            continue
        cases.append(case)
        rows.append(row)
        cells.append(measured_cell(case, row.metrics or {}))
    if not cells:
        raise InputError("no ok row here has the times of a step", file=directory, key="--fit")
    return MeasuredRun(directory, manifest, tuple(cases), tuple(rows), tuple(cells), total - len(cells))


def _is_complete(metrics: Mapping[str, Any]) -> bool:
    return all(metrics.get(prefix + part) is not None for part in _PARTS for prefix in ("", "ar_"))


def measured_cell(case: Case, metrics: Mapping[str, Any]) -> MeasuredCell:
    """The row's numbers as the model counts them: nodes of the mean step, its context, the times of both arms."""
    spec = target_spec(case.target)
    batch = case.workload.batch_size
    drafts = drafting(case)
    nodes = 0.0
    catch_up = 0.0
    if case.depth > 0 and metrics.get("num_steps"):
        nodes = float(metrics["num_draft_tokens"]) / float(metrics["num_steps"])
        if drafts.shape is not None:
            curve = row_curve(case, metrics)
            catch_up = catch_up_rows(drafts.shape, curve.rates(case.depth), case.depth)
    return MeasuredCell(
        name=case.name,
        batch=batch,
        context_len=context_from_flops(spec, float(metrics["ar_flops"]), batch),
        depth=case.depth,
        draft=drafts.shape,
        nodes=nodes,
        catch_up=catch_up,
        sampled=case.sampling.temperature > 0,
        ar=_times(metrics, "ar_"),
        step=_times(metrics, ""),
        tokens=float(metrics.get("tokens_per_step") or 1.0),
    )


def row_curve(case: Case, metrics: Mapping[str, Any]) -> AcceptanceCurve:
    """The row's own acceptance; a cell in which nothing was drafted accepts nothing."""
    histogram = metrics.get("accepted_histogram")
    if not isinstance(histogram, list) or len(histogram) < 2:
        return AcceptanceCurve((0.0,), drafted=0.0, source="nothing was drafted", status="measured")
    return AcceptanceCurve.from_row(metrics, max(1, case.num_nodes), source="this cell's own drafts")


def row_book(run: MeasuredRun, index: int, *, own: bool) -> AcceptanceBook:
    """The acceptance that cell `index` is predicted with: its own row's, or, with `own` False, that of the same
    drafter, depth and temperature at all other batch sizes together (its own again where there is no other)."""
    case, row = run.cases[index], run.rows[index]
    entry: Entry | None = None
    if not own:
        others = [
            other
            for place, other in enumerate(run.rows)
            if place != index and _series_key(run.cases[place]) == _series_key(case) and case.depth > 0
        ]
        pooled = pooled_entries(others, run.directory.name)
        entry = pooled[0] if pooled else None
    if entry is None:
        entry = Entry(case.drafter.name, row_curve(case, row.metrics or {}))
    return AcceptanceBook((entry,), f"the rows of {run.directory.name}")


def _series_key(case: Case) -> tuple[object, ...]:
    return (case.drafter, case.depth, case.sampling, case.workload.output_len, case.workload.context_len)


def context_from_flops(spec: ModelSpec, ar_flops: float, batch: int) -> float:
    """Mean cached tokens of an AR step, from its FLOPs: each cached token adds 4 · L · n_h · d_h (cost.py)."""
    empty = uniform_cost(spec, batch, 1, 0, weight_dtype="bf16").flops
    each = uniform_cost(spec, batch, 1, 1, weight_dtype="bf16").flops - empty
    return max(0.0, (ar_flops - empty) / each)


def _times(metrics: Mapping[str, Any], prefix: str) -> StepTimes:
    """The host's part holds the commit, so that the four parts sum to the step."""
    draft, verify, sample = (float(metrics[f"{prefix}{part}"]) for part in ("draft_s", "verify_s", "sample_s"))
    return StepTimes(draft, verify, sample, max(0.0, float(metrics[f"{prefix}step_s"]) - draft - verify - sample))


def measured_device(run: MeasuredRun) -> tuple[dict[str, Roof], dict[str, Staircase]]:
    """The measured roofs and staircases of a run's device, by dtype. Raises InputError where it has none."""
    measured = (run.manifest.get("roofs") or {}).get("measured")
    if not measured:
        remedy = "run it again, or name the device with --hardware"
        raise InputError("the manifest has no measured roofs", file=run.directory, key="roofs.measured", remedy=remedy)
    roofs = {dtype: measured_roof(measured, dtype) for dtype in measured["gemm_flops_per_s"]}
    stairs = {}
    for dtype in {str(row.get("dtype")) for row in measured.get("skinny") or ()}:
        found = Staircase.from_rows(measured["skinny"], dtype)
        if found.points:
            stairs[dtype] = found
    return roofs, stairs


def fit_run(run: MeasuredRun, most: int = MOST_CELLS, roofs: Mapping[str, Roof] | None = None) -> RunFit:
    """Fit on at most `most` cells of the run, chosen by their axes alone.

    Where the device's staircase covers the target's matrices, both models are fitted, with it and without, and the one
    with the smaller leave-one-out error is kept: no cell that is predicted later takes part in that choice.
    """
    own_roofs, stairs = measured_device(run) if roofs is None else (dict(roofs), {})
    targets = {case.target for case in run.cases}
    if len(targets) != 1:
        raise InputError(
            f"the run has {len(targets)} targets", file=run.directory, key="--fit", remedy="fit on a run of one target"
        )
    target = next(iter(targets))
    roof = own_roofs.get(target.dtype)
    if roof is None:
        raise InputError(f"no {target.dtype} roof", file=run.directory, key="target.dtype")
    chosen = pick_cells(run.cells, most)
    cells = [run.cells[index] for index in chosen]
    plain = StepModel(target_spec(target), roof, IDEAL, target.dtype)
    best = _one(plain, cells, chosen, False)
    staircase = stairs.get(target.dtype)
    if staircase is not None:
        with_stairs = StepModel(plain.target, roof, IDEAL, target.dtype, staircase=staircase)
        if all(with_stairs.stairs_s(rows) is not None for cell in cells for rows in (cell.batch, cell.rows)):
            other = _one(with_stairs, cells, chosen, True)
            if (other.fit.left_out_error or 1.0) < (best.fit.left_out_error or 1.0):
                best = other
    return best


def _one(model: StepModel, cells: Sequence[MeasuredCell], chosen: Sequence[int], used: bool) -> RunFit:
    fit = fit_efficiency(model, cells)
    return RunFit(model.with_efficiency(fit.efficiency), fit, tuple(chosen), used)


def device_of_run(run: MeasuredRun, fitted: RunFit) -> Device:
    """The run's own device with what its engine was found to reach."""
    roofs, stairs = measured_device(run)
    memory = (run.manifest.get("environment") or {}).get("memory_bytes")
    name = str(run.manifest.get("device") or "this device")
    used = stairs if fitted.used_staircase else {}
    return Device(name, roofs, None if memory is None else float(memory), fitted.fit.efficiency, "measured", used)
