"""Fit what an engine reaches (η and its launch and host terms) from a handful of measured cells.

The parts of a step are measured apart, so each is fitted by itself: least squares on log times, so that a short step
weighs as much as a long one. The cells are chosen by their axes alone, and those that were fitted on are never counted
as predicted. The leave-one-out error refits without each cell in turn and predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError
from specbench.roofline.draft_cost import NO_PASS_KINDS, DraftShape
from specbench.roofline.step_model import IDEAL, Efficiency, StepModel, StepTimes, chosen_rows, draws

MOST_CELLS = 8
FEWEST_CELLS = 2
SHARE_BOUNDS = (0.02, 1.05)
"""Of η: 105 % of a measured roof is the project's own limit of what can be true."""
OVERLAP_BOUNDS = (1.0, 16.0)
TIME_BOUNDS_S = (1e-9, 10.0)
PRIOR_WEIGHT = 0.1
"""Residual weight of a parameter's distance from its start, in log units: it decides only what no cell tells."""
ORDINARY_ERROR = 0.1
"""Log residuals up to about this count as squares, larger ones by their size (soft L1): one disturbed cell of eight
must not bend the fit."""
FloatArray = NDArray[np.float64]
Build = Callable[[Efficiency, FloatArray], Efficiency]


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell as the model needs it. `nodes`: mean nodes verified a step of a request, `tokens`: what a step
    yielded it, `catch_up`: mean rows beside the pending one that the first draft pass fed; `ar`, `step`: what was
    measured of both arms."""

    name: str
    batch: int
    context_len: float
    depth: int
    draft: DraftShape | None
    nodes: float
    catch_up: float
    sampled: bool
    ar: StepTimes
    step: StepTimes
    tokens: float = 1.0

    @property
    def rows(self) -> float:
        return self.batch * (1 + self.nodes)


@dataclass(frozen=True)
class CellError:
    """A cell and its predicted step time over the measured one, less 1."""

    name: str
    error: float


@dataclass(frozen=True)
class Fit:
    """What was fitted, on which cells, and how well: `errors` of the fitted cells themselves, `left_out` each
    predicted by a fit without it."""

    efficiency: Efficiency
    cells: tuple[MeasuredCell, ...]
    errors: tuple[CellError, ...]
    left_out: tuple[CellError, ...]

    @property
    def left_out_error(self) -> float | None:
        """Median absolute leave-one-out error of the step time; None where too few cells were fitted on."""
        return median(abs(one.error) for one in self.left_out) if self.left_out else None

    @property
    def worst_left_out(self) -> CellError | None:
        return max(self.left_out, key=lambda one: abs(one.error), default=None)


def pick_cells(cells: Sequence[MeasuredCell], most: int = MOST_CELLS) -> list[int]:
    """Indices of at most `most` cells that lie far apart in what the model depends on, from their axes alone.

    Farthest-point choice over log rows, log batch, log nodes, the kind of drafting and greedy or sampled, beginning
    with the cell of fewest rows; ties go to the earlier cell.
    """
    if most < FEWEST_CELLS:
        raise InputError(f"a fit on {most} cells", key="--fit-cells", remedy=f"give {FEWEST_CELLS} to {MOST_CELLS}")
    if not cells:
        return []
    points = _features(cells)
    first = int(np.lexsort((np.arange(len(cells)), points[:, 1], points[:, 0]))[0])
    chosen = [first]
    distance = np.linalg.norm(points - points[first], axis=1)
    while len(chosen) < min(most, len(cells)):
        following = int(np.argmax(distance))
        if distance[following] <= 0:
            break
        chosen.append(following)
        distance = np.minimum(distance, np.linalg.norm(points - points[following], axis=1))
    return chosen


def _features(cells: Sequence[MeasuredCell]) -> FloatArray:
    """[cells, features]: logs scaled to 0 .. 1 over these cells, and the groups of drafting as corners."""
    logs = np.log([[cell.rows, cell.batch, 1 + cell.nodes] for cell in cells])
    span = np.maximum(logs.max(axis=0) - logs.min(axis=0), 1e-12)
    scaled = (logs - logs.min(axis=0)) / span
    groups = np.array([[group == _group(cell) for group in _GROUPS] for cell in cells], dtype=float)
    sampled = np.array([[float(cell.sampled)] for cell in cells])
    return np.hstack([scaled, 0.75 * groups, 0.75 * sampled])


_GROUPS = ("replay", "lookup", "model", "head")


def _group(cell: MeasuredCell) -> str:
    kind = cell.draft.kind if cell.draft is not None else "none"
    if kind in ("ngram", "suffix"):
        return "lookup"
    if kind in NO_PASS_KINDS:
        return "replay"
    return "model" if kind in ("draft_model", "early_exit") else "head"


def predicted_times(model: StepModel, cell: MeasuredCell) -> tuple[StepTimes, StepTimes]:
    """(AR, speculative) step times of a cell's shape under `model`."""
    own = replace(model, sampled=cell.sampled)
    ar = own.ar_step(cell.batch, cell.context_len)
    return ar, own.step(cell.batch, cell.context_len, cell.depth, cell.draft, cell.nodes, cell.catch_up, cell.tokens)


def step_error(model: StepModel, cell: MeasuredCell) -> float:
    """Predicted over measured time of the cell's speculative step (of its AR step where it drafts nothing), less 1."""
    ar, step = predicted_times(model, cell)
    if cell.depth == 0:
        return ar.total_s / cell.ar.total_s - 1
    return step.total_s / cell.step.total_s - 1


def fit_efficiency(model: StepModel, cells: Sequence[MeasuredCell], *, overlap: bool = True) -> Fit:
    """η and the launch and host terms of `model`'s engine from measured cells (2 to 8).

    `overlap` False keeps the roofline's max between compute and memory time instead of fitting how they join.
    Raises InputError for too few or too many cells and for times that are not positive.
    """
    if not FEWEST_CELLS <= len(cells) <= MOST_CELLS:
        raise InputError(
            f"a fit on {len(cells)} cells", key="--fit", remedy=f"{FEWEST_CELLS} to {MOST_CELLS} cells make a fit"
        )
    for cell in cells:
        if not (cell.ar.verify_s > 0 and cell.ar.total_s > 0 and cell.step.total_s > 0):
            raise InputError(f"{cell.name}: a measured step takes time", key="--fit", remedy="leave the cell out")
    found = _fitted(model, cells, overlap)
    errors = tuple(CellError(cell.name, step_error(model.with_efficiency(found), cell)) for cell in cells)
    left_out = []
    if len(cells) > FEWEST_CELLS:
        for index, cell in enumerate(cells):
            others = [other for place, other in enumerate(cells) if place != index]
            without = model.with_efficiency(_fitted(model, others, overlap))
            left_out.append(CellError(cell.name, step_error(without, cell)))
    return Fit(found, tuple(cells), errors, tuple(left_out))


def _fitted(model: StepModel, cells: Sequence[MeasuredCell], overlap: bool) -> Efficiency:
    start = replace(IDEAL, compute=0.7, memory=0.85, overlap=4.0 if overlap else math.inf, source="")
    found = _fit_passes(model, cells, start, overlap)
    found = _fit_sampling(model, cells, found)
    found = _fit_host(cells, found)
    found = _fit_drafting(model, cells, found)
    return replace(
        found, source=f"fitted on {len(cells)} measured cells, robust least squares on log times by part of a step"
    )


def _fit_passes(model: StepModel, cells: Sequence[MeasuredCell], start: Efficiency, overlap: bool) -> Efficiency:
    """η_c, η_m, launch (and the overlap, and the scale of a staircase) from the target's passes of both arms."""
    observed = [
        (cell, query, seconds)
        for cell in cells
        for query, seconds in ((1.0, cell.ar.verify_s), (1.0 + cell.nodes, cell.step.verify_s))
        if seconds > 0
    ]
    shortest = min(seconds for _, _, seconds in observed)

    def build(base: Efficiency, x: FloatArray) -> Efficiency:
        joined = float(x[4]) if overlap else math.inf
        return replace(
            base, compute=float(x[0]), memory=float(x[1]), pass_s=float(x[2]), stairs=float(x[3]), overlap=joined
        )

    def times(found: Efficiency) -> list[float]:
        own = model.with_efficiency(found)
        return [own.target_pass_s(cell.batch, query, cell.context_len) for cell, query, _ in observed]

    initial = [start.compute, start.memory, 0.02 * shortest, 1.0, start.overlap if overlap else 4.0]
    bounds = [SHARE_BOUNDS, SHARE_BOUNDS, (1e-9, shortest), (0.1, 10.0), OVERLAP_BOUNDS]
    return _solve(start, build, times, [seconds for _, _, seconds in observed], initial, bounds)


def _fit_sampling(model: StepModel, cells: Sequence[MeasuredCell], base: Efficiency) -> Efficiency:
    """sample_step_s, verdict_s, and what a row costs: token_s from greedy cells, sampled_* from the others."""
    observed = [
        (cell, accepting, seconds)
        for cell in cells
        for accepting, seconds in ((False, cell.ar.sample_s), (cell.depth > 0, cell.step.sample_s))
        if seconds > 0
    ]
    if not observed:
        return base
    shortest = min(seconds for _, _, seconds in observed)
    heats = {cell.sampled for cell, _, _ in observed}

    def build(start: Efficiency, x: FloatArray) -> Efficiency:
        hot = float(x[3]) if True in heats else None
        row = float(x[4]) if True in heats else 0.0
        greedy = float(x[2]) if False in heats else float(x[3])
        return replace(
            start,
            sample_step_s=float(x[0]),
            verdict_s=float(x[1]),
            token_s=greedy,
            sampled_token_s=hot,
            sampled_row_s=row,
        )

    def times(trial: Efficiency) -> list[float]:
        own = {sampled: replace(model, efficiency=trial, sampled=sampled) for sampled in heats}
        return [
            own[cell.sampled].sample_s(cell.rows, cell.batch * cell.tokens, True)
            if accepting
            else own[cell.sampled].sample_s(cell.batch)
            for cell, accepting, _ in observed
        ]

    each = median(seconds / cell.rows for cell, _, seconds in observed)
    initial = [0.5 * shortest, 0.3 * shortest, 0.3 * each, each, 0.3 * each]
    return _solve(base, build, times, [seconds for _, _, seconds in observed], initial, [TIME_BOUNDS_S] * 5)


def _fit_host(cells: Sequence[MeasuredCell], base: Efficiency) -> Efficiency:
    """step_s and request_s from the host's part (commit with it) of both arms."""
    observed = [
        (cell.batch, seconds) for cell in cells for seconds in (cell.ar.host_s, cell.step.host_s) if seconds > 0
    ]
    if not observed:
        return base

    def build(start: Efficiency, x: FloatArray) -> Efficiency:
        return replace(start, step_s=float(x[0]), request_s=float(x[1]))

    def times(trial: Efficiency) -> list[float]:
        return [trial.step_s + batch * trial.request_s for batch, _ in observed]

    least = min(seconds for _, seconds in observed)
    initial = [0.5 * least, 0.5 * min(seconds / batch for batch, seconds in observed)]
    return _solve(base, build, times, [seconds for _, seconds in observed], initial, [TIME_BOUNDS_S] * 2)


def _fit_drafting(model: StepModel, cells: Sequence[MeasuredCell], base: Efficiency) -> Efficiency:
    """Launches of draft passes and the choice of nodes from drafters with a model; lookups from those without."""
    lookups = [cell.step.draft_s / cell.batch for cell in cells if _group(cell) == "lookup" and cell.step.draft_s > 0]
    if lookups:
        base = replace(base, lookup_s=float(math.exp(np.mean(np.log(lookups)))))
    drafting = [cell for cell in cells if _group(cell) in ("model", "head") and cell.step.draft_s > 0]
    if not drafting:
        return replace(base, draft_pass_s=base.pass_s)
    heats = {cell.sampled for cell in drafting}

    def build(start: Efficiency, x: FloatArray) -> Efficiency:
        drawn = float(x[2]) if True in heats else 0.0
        return replace(start, draft_pass_s=float(x[0]), draft_token_s=float(x[1]), sampled_draft_token_s=drawn)

    def times(trial: Efficiency) -> list[float]:
        own = {sampled: replace(model, efficiency=trial, sampled=sampled) for sampled in heats}
        return [
            own[cell.sampled].draft_s(cell.batch, cell.context_len, cell.depth, cell.draft, cell.catch_up)
            for cell in drafting
        ]

    # one share of the shortest launch and of the cheapest node, so that the cells move them apart
    launch = min(cell.step.draft_s / max(1, cell.depth) for cell in drafting)
    each = min(
        cell.step.draft_s / (cell.batch * chosen_rows(cell.draft, cell.depth))
        for cell in drafting
        if cell.draft is not None
    )
    drawing = [
        cell.step.draft_s / (cell.batch * chosen_rows(cell.draft, cell.depth))
        for cell in drafting
        if cell.sampled and cell.draft is not None and draws(cell.draft)
    ]
    observed = [cell.step.draft_s for cell in drafting]
    return _solve(
        base, build, times, observed, [0.1 * launch, 0.1 * each, 0.5 * min(drawing, default=each)], [TIME_BOUNDS_S] * 3
    )


def _solve(
    base: Efficiency,
    build: Build,
    times: Callable[[Efficiency], Sequence[float]],
    observed: Sequence[float],
    initial: Sequence[float],
    bounds: Sequence[tuple[float, float]],
) -> Efficiency:
    """Least squares of log(predicted / observed) over the logs of the parameters, softly held to their start."""
    from scipy.optimize import least_squares

    low, high = (np.log([pair[side] for pair in bounds]) for side in (0, 1))
    start = np.clip(np.log(np.maximum(initial, 1e-12)), low + 1e-9, high - 1e-9)
    seen = np.log(np.asarray(observed, dtype=float))

    def residuals(x: FloatArray) -> FloatArray:
        predicted = np.maximum(np.asarray(times(build(base, np.exp(x))), dtype=float), 1e-15)
        return np.concatenate([np.log(predicted) - seen, PRIOR_WEIGHT * (x - start)])

    solved = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=ORDINARY_ERROR)
    return build(base, np.asarray([float(value) for value in np.exp(solved.x)]))
