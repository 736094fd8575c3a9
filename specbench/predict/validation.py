"""docs/validation.md, remade by one command: the model against a measured run, published curves and closed forms.

    python -m specbench.predict.validation

Figures come from results/drafters-smollm2 (`--results`); pages and plots go to docs (`--out`).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specbench.errors import SpecbenchError
from specbench.predict.cells import Predictor
from specbench.predict.closed_forms import Check, checks, worst
from specbench.predict.fitting import MeasuredRun, RunFit, device_of_run, fit_run, read_run, row_book
from specbench.predict.published import NOT_PREDICTED, Curve, curves
from specbench.predict.rows import as_dicts, checked_rows
from specbench.predict.text import comparison_markdown, efficiency_text, markdown_table
from specbench.predict.validation_plots import draw_all
from specbench.roofline.gaps import CellGap, Comparison, compare_rows

RESULTS = Path("results/drafters-smollm2")
DOCS = Path("docs")
FEWEST_BATCHES = 3
STEP_TARGET, SPEEDUP_TARGET, CROSSING_TARGET = 0.10, 0.08, 0.80


@dataclass(frozen=True)
class Held:
    """A run and the model that was fitted on a few of its cells, held against all others."""

    run: MeasuredRun
    fit: RunFit
    comparison: Comparison
    pooled: Comparison
    """With acceptance of the same drafter at the other batch sizes, instead of each cell's own."""


def held_against(directory: Path) -> Held:
    """Fit on at most 8 cells of the run and predict all others, twice: with each cell's own acceptance curve (what the
    system costs) and with its drafter's curve from the other batch sizes (what one would have known before)."""
    run = read_run(directory)
    fit = fit_run(run)
    device = device_of_run(run, fit)
    fitted = {run.rows[index].case_hash for index in fit.fitted}
    seen = [row.model_dump() for row in run.rows if row.case_hash not in fitted]
    return Held(run, fit, *(_compared(run, device, seen, own) for own in (True, False)))


def _compared(run: MeasuredRun, device: Any, seen: Sequence[dict[str, Any]], own: bool) -> Comparison:
    cells = []
    for index, case in enumerate(run.cases):
        predictor = Predictor(device, row_book(run, index, own=own))
        cells.append(predictor.predict(case, context_len=run.cells[index].context_len))
    return compare_rows(seen, as_dicts(list(checked_rows(cells, device))))


def step_errors(cells: Sequence[CellGap]) -> list[float]:
    return [abs(cell.step_error) for cell in cells]


def speedup_errors(cells: Sequence[CellGap]) -> list[float]:
    return [abs(cell.predicted / cell.measured - 1) for cell in cells]


def near_crossings(comparison: Comparison) -> list[bool]:
    """Whether each series' predicted crossing is within one step; series of fewer than FEWEST_BATCHES don't count."""
    return [
        one.within_one_step
        for one in comparison.series
        if one.within_one_step is not None and len(one.batches) >= FEWEST_BATCHES
    ]


def page(held: Held, published: Sequence[Curve], closed: Sequence[Check], plots: Sequence[tuple[str, str]]) -> str:
    """The whole of docs/validation.md."""
    pictures = dict(plots)
    lines = [
        "# Validation of the step model",
        "",
        "Remade by `python -m specbench.predict.validation`; every figure below is computed by that command.",
        "",
        *_measured(held, pictures),
        "",
        *_published(published, pictures),
        "",
        *_closed(closed),
    ]
    return "\n".join(lines) + "\n"


def _measured(held: Held, pictures: dict[str, str]) -> list[str]:
    cells, pooled, fit = held.comparison.cells, held.pooled.cells, held.fit.fit
    near, near_pooled = near_crossings(held.comparison), near_crossings(held.pooled)
    step, speedup = median(step_errors(cells)), median(speedup_errors(cells))
    staircase = "with" if held.fit.used_staircase else "without"
    figures = [
        (
            "median absolute error of step time",
            f"≤ {STEP_TARGET:.0%}",
            f"{step:.1%}",
            f"{median(step_errors(pooled)):.1%}",
            _met(step <= STEP_TARGET),
        ),
        (
            "median absolute error of speedup",
            f"≤ {SPEEDUP_TARGET:.0%}",
            f"{speedup:.1%}",
            f"{median(speedup_errors(pooled)):.1%}",
            _met(speedup <= SPEEDUP_TARGET),
        ),
        (
            "series whose crossing is within one grid step",
            f"≥ {CROSSING_TARGET:.0%}",
            _counted(near),
            _counted(near_pooled),
            _met(sum(near) >= CROSSING_TARGET * len(near)),
        ),
    ]
    told = (
        f"{held.run.manifest.get('device')}, {len(held.run.cells)} cells of batch × depth × drafter × temperature. The "
        f"model was fitted on {len(fit.cells)} of them, chosen by their axes alone, and predicts the {len(cells)} "
        "others; the fitted cells count in no figure. Which terms a step has was settled on an earlier sweep, of "
        "another CPU with other kernels (a Zen 3, docs/log.md); their values come from the fitted cells alone."
    )
    columns = (
        "The first column of figures gives the model each cell's measured acceptance curve: its error is that of the "
        "times alone. The second gives it what one knows before measuring the cell, the same drafter's curve at the "
        f"other batch sizes. Of crossings only series of {FEWEST_BATCHES} batch sizes or more count: with two, nothing "
        "is further than one step."
    )
    lines = [f"## 1. Against a measured sweep: `results/{held.run.directory.name}`", "", told, ""]
    lines += markdown_table(("what", "target", "own acceptance", "acceptance of the other batch sizes", ""), figures)
    lines += ["", columns, "", f"Fitted ({staircase} the measured staircase): {efficiency_text(fit.efficiency)}.", ""]
    worst_left = fit.worst_left_out
    if fit.left_out_error is not None and worst_left is not None:
        left_out = (
            f"Leave-one-out over the fitted cells: median absolute error of step time {fit.left_out_error:.1%}, "
            f"{worst_left.error:+.1%} at worst ({worst_left.name})."
        )
        lines += [left_out, ""]
    lines += ["Fitted on:", ""]
    lines += [f"- {one.name}: {one.error:+.1%} in the fit" for one in fit.errors]
    for key in ("cells", "series"):
        lines += ["", f"![{pictures[key]}](validation/{key}.svg)"]
    lines += ["", "### Error by kind of drafter, batch and temperature", ""]
    for head, of in _GROUPS:
        lines += [*_grouped(head, held, of), ""]
    lines += [*_measured_spread(held), ""]
    lines += comparison_markdown(held.comparison)
    return lines


_GROUPS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("drafter", lambda axes: str(axes["drafter_kind"])),
    ("batch", lambda axes: str(axes["batch_size"])),
    ("temperature", lambda axes: f"{axes['temperature']:g}"),
)


def _grouped(head: str, held: Held, of: Callable[[dict[str, Any]], str]) -> list[str]:
    axes = {row.case_hash: dict(row.axes) for row in held.run.rows}
    groups: dict[str, list[CellGap]] = defaultdict(list)
    for cell in held.comparison.cells:
        groups[of(axes[cell.case_hash])].append(cell)
    rows = [
        (
            name,
            str(len(cells)),
            f"{median(step_errors(cells)):.1%}",
            f"{median(cell.step_error for cell in cells):+.1%}",
            f"{median(speedup_errors(cells)):.1%}",
            f"{max(speedup_errors(cells)):.1%}",
        )
        for name, cells in sorted(groups.items(), key=lambda item: (len(item[0]), item[0]))
    ]
    return markdown_table(
        (head, "cells", "step time, median absolute", "step time, median", "speedup, median absolute", "at worst"), rows
    )


def _measured_spread(held: Held) -> list[str]:
    """How far measurements of one and the same thing lie apart: the floor of any model's error."""
    by_batch: dict[int, list[float]] = defaultdict(list)
    for cell in held.run.cells:
        by_batch[cell.batch].append(cell.ar.total_s)
    rows = []
    for batch, times in sorted(by_batch.items()):
        middle = median(times)
        spread = median(abs(time / middle - 1) for time in times)
        rows.append((str(batch), str(len(times)), f"{middle * 1e3:.2f} ms", f"{spread:.1%}",
                     f"{min(times) / middle - 1:+.1%} to {max(times) / middle - 1:+.1%}"))  # fmt: skip
    table = markdown_table(("batch", "AR arms", "median AR step", "median absolute deviation", "range"), rows)
    inside = [
        c for c in held.comparison.cells if c.low is not None and c.high is not None and c.low <= c.predicted <= c.high
    ]
    told = [cell for cell in held.comparison.cells if cell.low is not None]
    floor = "The AR step does not depend on the drafter, so its spread over cells is that of the machine and its hour."
    return [
        floor,
        "",
        *table,
        "",
        f"The predicted speedup lies inside the measured 95 % interval in {len(inside)} of {len(told)} cells.",
    ]


def _published(published: Sequence[Curve], pictures: dict[str, str]) -> list[str]:
    told = (
        "One set of efficiencies an engine and device. Acceptance was not published with these speedups, so it is "
        "assumed, as told with each; an error below is that of the assumptions and the model together."
    )
    picture = f"![{pictures['published']}](validation/published.svg)"
    lines = ["## 2. Against published curves", "", told, "", picture]
    for curve in published:
        lines += ["", f"### {curve.name}", "", f"Source: {curve.source}. Assumed: {curve.assumed}.", ""]
        lines += [f"Efficiency of {curve.engine}: {efficiency_text(curve.efficiency)}.", ""]
        lines += markdown_table(
            ("figure", "batch", "published", "predicted", "error", ""),
            [
                (p.what, str(p.batch), f"{p.published:.2f}", f"{p.predicted:.2f}", f"{p.error:+.1%}",
                 "fitted on" if p.fitted else "")
                for p in curve.points
            ],
        )  # fmt: skip
        errors = [abs(point.error) for point in curve.tested]
        lines += ["", f"Median absolute error of the {len(errors)} figures not fitted on: {median(errors):.1%}."]
        if curve.remark:
            lines += ["", f"What remains: {curve.remark}."]
    lines += ["", "Not predicted:", ""]
    lines += [f"- {what}: {why}" for what, why in NOT_PREDICTED]
    return lines


def _closed(closed: Sequence[Check]) -> list[str]:
    rows = [
        (
            limit,
            str(sum(one.limit == limit for one in closed)),
            check.case,
            f"{check.closed:.4g}",
            f"{check.model:.4g}",
            f"{check.error:+.2%}",
        )
        for limit, check in worst(closed).items()
    ]
    note = (
        "The break-even batches are those of a model of wide MLPs alone, which is what the two-regime form assumes. In "
        "the memory-bound limit the model's verify pass also reads the block's own KV and writes more logits, and its "
        "first draft pass feeds the tokens accepted last."
    )
    table = markdown_table(("limit", "checks", "worst", "closed form", "model", "error"), rows)
    return ["## 3. Closed forms against the full model in their limits", "", *table, "", note]


def _counted(near: Sequence[bool]) -> str:
    return f"{sum(near) / len(near):.0%} ({sum(near)} of {len(near)})" if near else "no series"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def write(results: Path, out: Path) -> Path:
    """docs/validation.md and docs/validation/*.svg; returns the page."""
    held, published, closed = held_against(results), curves(), checks()
    plots = draw_all(held.comparison, published, out / "validation")
    file = out / "validation.md"
    file.write_text(page(held, published, closed, plots), encoding="utf-8")
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m specbench.predict.validation", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a measured run")
    parser.add_argument("--out", type=Path, default=DOCS, help="where validation.md goes")
    given = parser.parse_args(arguments)
    try:
        print(f"wrote {write(given.results, given.out)}")
    except SpecbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
