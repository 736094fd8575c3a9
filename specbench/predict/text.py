"""What a prediction and its comparison say in words and Markdown tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from specbench.predict.cells import Device
from specbench.predict.fitting import RunFit
from specbench.roofline.gaps import NAMES, PARTS, CellGap, Comparison
from specbench.roofline.step_model import Efficiency

MOST_GAPS = 40


def prediction_lines(device: Device, manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the predicted numbers rest on."""
    told = manifest["predicted"]
    counts = Counter(str(row["status"]) for row in rows)
    statuses = Counter(
        warning.partition(":")[0] for row in rows for warning in row["warnings"] if warning.startswith("acceptance ")
    )
    lines = [
        f"predicted for {device.name} from its {device.roof_source} roofs; nothing was run",
        f"efficiency: {efficiency_text(device.efficiency)}",
        f"acceptance from {told['acceptance']}: "
        + (", ".join(f"{count} cells {kind}" for kind, count in statuses.items()) or "no cell drafts"),
        "cells: " + ", ".join(f"{count} {status}" for status, count in counts.items()),
    ]
    taken = sorted({text for row in rows for text in row["warnings"] if not text.startswith("acceptance ")})
    lines += [f"taken for granted: {text}" for text in taken]
    by_reason = Counter(_without_numbers(str(row["reason"])) for row in rows if row["status"] == "skipped")
    lines += [f"skipped, {count} cells: {reason}" for reason, count in by_reason.most_common(6)]
    return lines


def _without_numbers(reason: str) -> str:
    return "memory" if reason.startswith("needs ") and "to use of" in reason else reason


def efficiency_text(efficiency: Efficiency) -> str:
    """The parameters in one line, with their source."""
    hot = ""
    if efficiency.sampled_token_s is not None:
        hot = (
            f" (above temperature 0 {_ms(efficiency.sampled_row_s)}, a judged one {_ms(efficiency.sampled_token_s)}, a"
            f" drawn node {_ms(efficiency.sampled_draft_token_s)})"
        )
    join = "max" if math.isinf(efficiency.overlap) else f"{efficiency.overlap:.2f}-norm"
    parts = [
        f"{efficiency.compute:.1%} of the peak, {efficiency.memory:.1%} of the bandwidth (joined by {join})",
        f"a step {_ms(efficiency.step_s)}, a request {_ms(efficiency.request_s)}, a pass {_ms(efficiency.pass_s)}",
        (
            f"sampling {_ms(efficiency.sample_step_s)} a step, accepting {_ms(efficiency.verdict_s)}, a row"
            f" {_ms(efficiency.token_s)}{hot}"
        ),
        (
            f"a draft pass {_ms(efficiency.draft_pass_s)}, a drafted node {_ms(efficiency.draft_token_s)}, a lookup"
            f" {_ms(efficiency.lookup_s)}"
        ),
    ]
    return "; ".join(parts) + f" [{efficiency.source}]"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def errors_of(cells: Iterable[CellGap]) -> tuple[float, float] | None:
    """Median absolute errors (step time, speedup) of cells that were predicted."""
    found = list(cells)
    if not found:
        return None
    return median(abs(one.step_error) for one in found), median(abs(one.predicted / one.measured - 1) for one in found)


def fit_markdown(found: RunFit, comparison: Comparison) -> list[str]:
    """The fit, its leave-one-out error, and the errors of the cells that it did not see."""
    fit = found.fit
    worst = fit.worst_left_out
    lines = [
        (
            f"Fitted on {len(fit.cells)} cells ({'with' if found.used_staircase else 'without'} the measured staircase)"
            f": {efficiency_text(fit.efficiency)}"
        ),
    ]
    if fit.left_out_error is not None and worst is not None:
        lines.append(
            f"Leave-one-out: step time {fit.left_out_error:.1%} median absolute error, "
            f"{worst.error:+.1%} at worst ({worst.name})"
        )
    errors = errors_of(comparison.cells)
    if errors is not None:
        known = [one.within_one_step for one in comparison.series if one.within_one_step is not None]
        lines.append(
            f"Predicted {len(comparison.cells)} cells that were not fitted on: median absolute error of step time "
            f"{errors[0]:.1%}, of speedup {errors[1]:.1%}; crossing within one step of the grid in {sum(known)} of "
            f"{len(known)} series"
        )
    return lines


def comparison_markdown(comparison: Comparison) -> list[str]:
    """Tables: crossings and best depths side by side, and the cells with the largest gaps, each named."""
    lines = ["### Crossing, predicted and measured", ""]
    lines += markdown_table(
        ("series", "predicted", "measured", "within one step", "the gap is"),
        [
            (
                one.label,
                one.predicted.describe(),
                one.measured.describe(),
                "–" if one.within_one_step is None else "yes" if one.within_one_step else "no",
                one.name,
            )
            for one in comparison.series
        ],
    )
    lines += ["", "### Best depth by tokens/s (0: no speculation), predicted and measured", ""]
    lines += markdown_table(
        ("drafter", "batch", "predicted", "measured", "lost by following the prediction"),
        [
            (
                " · ".join(part for part in (one.drafter, one.context) if part),
                str(one.batch_size),
                _depth(one.predicted),
                _depth(one.measured),
                "–" if one.lost is None else f"{one.lost:.1%}",
            )
            for one in comparison.depths
        ],
    )
    ranked = sorted(comparison.cells, key=lambda one: -abs(math.log1p(one.gap)))
    lines += ["", "### Speedup of each cell, predicted and measured, the largest gaps first", ""]
    head = ("cell", "predicted", "measured", "gap", "named", *(NAMES[part] for part in ("acceptance", *PARTS)), "ate")
    lines += markdown_table(
        head,
        [
            (
                one.case_name,
                f"{one.predicted:.2f}",
                f"{one.measured:.2f}",
                f"{one.gap:+.1%}",
                one.name,
                *(f"{math.expm1(one.terms[part]):+.1%}" for part in ("acceptance", *PARTS)),
                one.ate_most,
            )
            for one in ranked[:MOST_GAPS]
        ],
    )
    if len(ranked) > MOST_GAPS:
        lines += ["", f"{len(ranked) - MOST_GAPS} more cells have smaller gaps."]
    note = (
        "The columns behind the name are its parts, which multiply to the gap; *ate* is the part of the measured step"
    )
    lines += ["", f"{note} that cost most beyond an AR step."]
    return lines


def _depth(depth: int | None) -> str:
    return "–" if depth is None else str(depth)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A GitHub-flavoured table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
