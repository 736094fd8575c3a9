"""Tables of kernels, for a terminal and as Markdown: what they use once compiled, and what they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from specbench.bench.kernel_check import KernelRow

if TYPE_CHECKING:
    from specbench_kernels.aot import Resources

RESOURCE_COLUMNS = (
    *("op", "case", "kernel", "arch", "registers", "shared B", "stack B", "spill st/ld B"),
    *("tensor cores", "verdict"),
)
KERNEL_COLUMNS = ("op", "case", "max error", "of tolerance", "time", "10-90 %", "GB/s", "TFLOP/s", "of roof", "verdict")
LEFT = ("op", "case", "kernel", "tensor cores", "verdict")


def resource_cells(result: Resources) -> tuple[str, ...]:
    """One line of the table of resources; what did not compile has no figures."""
    name = (result.op, result.case, result.kernel, f"sm_{result.arch}")
    if result.error is not None:
        return (*name, *[""] * 5, result.verdict)
    counts = " + ".join(f"{count} {kind}" for kind, count in result.tensor_core.items())
    return (
        *name,
        *(str(result.registers), str(result.shared_bytes), str(result.stack_bytes)),
        *(f"{result.spill_store_bytes}/{result.spill_load_bytes}", counts or "-", result.verdict),
    )


def kernel_cells(row: KernelRow) -> tuple[str, ...]:
    """One line of the table of kernels; a figure that is not known stays empty."""
    deviation, timing = row.deviation, row.timing
    error = f"{deviation.max_abs:.2g}" if deviation else ""
    share = f"{deviation.share:.2f}" if deviation and deviation.share is not None else ("exact" if deviation else "")
    time = _duration(timing.median_s) if timing else ""
    spread = f"{_duration(timing.low_s)}-{_duration(timing.high_s)}" if timing else ""
    bandwidth = f"{row.bytes_per_s / 1e9:,.0f}" if row.bytes_per_s is not None else ""
    rate = f"{row.flops_per_s / 1e12:.2f}" if row.flops_per_s is not None else ""
    roof = f"{row.roof_share:.1%}" if row.roof_share is not None else ""
    verdict = row.status if row.reason is None else f"{row.status}: {row.reason}"
    return (row.op, row.case, error, share, time, spread, bandwidth, rate, roof, verdict)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def terminal_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table for rich; columns without any cell are left out."""
    table = Table(title=title, title_justify="left", box=None)
    used = [index for index in range(len(columns)) if any(line[index] for line in lines)]
    for index in used:
        folded = columns[index] in ("op", "case", "verdict")
        table.add_column(
            columns[index],
            justify="left" if columns[index] in LEFT else "right",
            overflow="fold" if folded else "ellipsis",
            no_wrap=not folded,
        )
    for line in lines:
        table.add_row(*(escape(line[index]) for index in used))
    return table


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The same as Markdown, all columns."""
    rule = ["---" if column in LEFT else "---:" for column in columns]
    body = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [list(columns), rule, *body])


def resource_json(result: Resources) -> dict[str, Any]:
    """A result with its verdict."""
    return asdict(result) | {"verdict": result.verdict}


def kernel_json(row: KernelRow) -> dict[str, Any]:
    """A row with its rates. JSON knows no infinity: such an error is null, and the reason says what is wrong."""
    data = asdict(row) | {"bytes_per_s": row.bytes_per_s, "flops_per_s": row.flops_per_s}
    if data["deviation"] is not None:
        data["deviation"] = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in data["deviation"].items()
        }
    return data
