"""The table of all cells, its raw values for export, and what the page says of cells that have no number."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from markupsafe import Markup

from specbench.report import rows as read
from specbench.report import tables
from specbench.report.badges import badges_of
from specbench.report.rows import Row
from specbench.report.series import varying_axes

HEADER = (
    "cell", "badges", "speedup", "tokens/s", "AR tokens/s", "acceptance rate", "tokens/step", "step (ms)",
    "AR step (ms)", "intensity (FLOP/B)", "of measured roof", "blocks, tokens/s", "AR blocks, tokens/s", "peak memory",
    "output check", "reproduce",
)  # fmt: skip
RAW_METRICS = (
    "speedup", "speedup_low", "speedup_high", "output_tokens_per_s", "output_tokens_per_s_low",
    "output_tokens_per_s_high", "ar_output_tokens_per_s", "ar_output_tokens_per_s_low", "ar_output_tokens_per_s_high",
    "acceptance_rate", "depth_acceptance_rate", "tokens_per_step", "step_s", "draft_s", "verify_s", "sample_s",
    "commit_s", "host_s", "ar_step_s", "ttft_s", "tpot_s", "itl_p99_s", "intensity", "achieved_flops_per_s",
    "roof_fraction_measured", "peak_memory_bytes", "joules_per_token", "num_blocks",
)  # fmt: skip
_COMMAND_AXES = ("drafter", "depth", "batch_size")
_DIGITS = 6
WARNED_CELLS = 6


@dataclass(frozen=True)
class CellLine:
    """One line of the table: the anchor of its permalink, its name, its badges, the other columns, its command."""

    anchor: str
    name: str
    badges: tuple[str, ...]
    values: tuple[str, ...]
    command: str


def cell_lines(cells: Sequence[Row], manifest: Mapping[str, Any], prefix: str, target: float) -> list[CellLine]:
    """A line for each cell, in the order of the run; anchors are unique within a page for each `prefix`."""
    varying = varying_axes(cells)
    anchors = _anchors(cells, prefix)
    return [
        CellLine(
            anchor,
            read.plain(row.get("case_name") or "unnamed cell"),
            badges_of(row, target),
            _values(row),
            command_of(row, manifest, varying),
        )
        for row, anchor in zip(cells, anchors, strict=True)
    ]


def _anchors(cells: Sequence[Row], prefix: str) -> list[str]:
    """`PREFIX-` and the first digits of the case's hash: a permalink that outlives a new page of the same run."""
    seen: Counter[str] = Counter()
    found = []
    for row in cells:
        digest = "".join(c for c in str(row.get("case_hash") or row.get("key") or "") if c.isalnum() and c.isascii())
        name = f"{prefix}-{digest[:10] or 'cell'}"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found


def command_of(row: Row, manifest: Mapping[str, Any], varying: Sequence[str]) -> str:
    """The command that measures this one cell again, in a folder of its own."""
    scenario = read.plain(manifest.get("scenario_file") or "SCENARIO.yaml")
    words = ["specbench", "run", scenario, "--fresh"]
    axes = read.section(row, "axes")
    for name in (*_COMMAND_AXES, *varying):
        if name in axes:
            words += ["--only", f"{name}={_filter_value(axes[name])}"]
    return shlex.join(read.plain(word) for word in words)


def _filter_value(value: object) -> str:
    return "null" if value is None else f"{value:g}" if read.number(value) is not None else read.plain(value)


def _values(row: Row) -> tuple[str, ...]:
    percent, check = read.metric(row, "roof_fraction_measured"), read.section(row, "conditions").get("output_check")
    return (
        tables.speedup_text(row),
        _rate(row, ""),
        _rate(row, "ar_"),
        _acceptance(row),
        read.fixed(read.metric(row, "tokens_per_step")),
        _milliseconds(read.metric(row, "step_s")),
        _milliseconds(read.metric(row, "ar_step_s")),
        read.significant(read.metric(row, "intensity")),
        read.DASH if percent is None else f"{100 * percent:.0f} %",
        block_quantiles(row, "spec"),
        block_quantiles(row, "ar"),
        read.significant(read.metric(row, "peak_memory_bytes"), "B"),
        read.DASH if check is None else read.plain(check).replace("_", " "),
    )


def _acceptance(row: Row) -> str:
    rate, by_depth = (read.metric(row, name) for name in ("acceptance_rate", "depth_acceptance_rate"))
    return f"{by_depth:.2f} of depth" if rate is None and by_depth is not None else read.fixed(rate)


def _rate(row: Row, arm: str) -> str:
    low, mean, high = (read.metric(row, f"{arm}output_tokens_per_s{end}") for end in ("_low", "", "_high"))
    if mean is None or not read.is_ok(row):
        return read.DASH
    half = "?" if low is None or high is None else read.rate((high - low) / 2, 2)
    return f"{read.rate(mean, 4)} ±{half}"


def _milliseconds(seconds: float | None) -> str:
    return read.DASH if seconds is None else f"{1e3 * seconds:.4g}"


def block_rates(row: Row, arm: str) -> list[float]:
    """The 10th, 50th and 90th percentile of tokens/s over an arm's valid blocks; empty below two blocks. A row that was
    thinned out (`command.read_run`) has them instead of its blocks."""
    if "block_rates" in row:
        return list(row["block_rates"].get(arm) or [])
    blocks = read.section(row, "samples").get("blocks")
    rates = [
        tokens / wall
        for block in (blocks if isinstance(blocks, list) else [])
        if isinstance(block, Mapping) and block.get("arm") == arm and block.get("valid", True)
        if (tokens := read.number(block.get("tokens"))) is not None and (wall := read.number(block.get("wall_s")))
    ]
    return tenths(rates)


def tenths(rates: Sequence[float]) -> list[float]:
    """The 10th, 50th and 90th percentile; empty below two values."""
    if len(rates) < 2:
        return []
    found = quantiles(rates, n=10, method="inclusive")
    return [found[place] for place in (0, 4, 8)]


def block_quantiles(row: Row, arm: str) -> str:
    """`block_rates` as "62.8 / 68.9 / 75.1"; "–" where there are none, or the row is not ok."""
    rates = block_rates(row, arm) if read.is_ok(row) else []
    return " / ".join(read.rate(rate) for rate in rates) or read.DASH


# ---- raw values, for export


def raw_cells(cells: Sequence[Row], target: float) -> Markup:
    """{"columns": [...], "rows": [[...], ...]}: numbers with six digits, in base units, null where there's none; text
    that may stand inside a script element."""
    axes = [*_COMMAND_AXES, *(name for name in varying_axes(cells) if name not in _COMMAND_AXES)]
    columns = ["cell", "case_hash", "status", "reason", "badges", *axes, *RAW_METRICS, "output_check"]
    return json_for_html({"columns": columns, "rows": [_raw(row, axes, target) for row in cells]})


def _raw(row: Row, axes: Sequence[str], target: float) -> list[Any]:
    values: list[Any] = [
        row.get("case_name"),
        row.get("case_hash"),
        read.status(row),
        row.get("reason"),
        " ".join(name.replace(" ", "-") for name in badges_of(row, target)),
    ]
    values += [read.axis(row, name) for name in axes]
    measured = read.status(row) in ("ok", "invalid")
    values += [_rounded(read.metric(row, name)) if measured else None for name in RAW_METRICS]
    return [*values, read.section(row, "conditions").get("output_check")]


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def json_for_html(value: object) -> Markup:
    """Strict JSON that can stand inside a script element: no `<`, `>` or `&`, no control or direction characters, no
    line separators; numbers that aren't finite are null."""
    text = json.dumps(_cleaned(read.finite(value)), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return read.plain(value) if value else ""
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {read.plain(key): _cleaned(item) for key, item in value.items()}
    return value


# ---- cells without a number


def fault(row: Row) -> tuple[str, str, str]:
    return read.plain(row.get("case_name") or "unnamed cell"), read.status(row), read.reason(row)


def warnings_of(cells: Iterable[Row]) -> list[tuple[str, str]]:
    """Each distinct warning with the cells that gave it."""
    found: dict[str, list[str]] = {}
    for row in cells:
        for text in row.get("warnings") or []:
            found.setdefault(read.plain(text), []).append(read.plain(row.get("case_name") or "unnamed cell"))
    return [(text, _names(names)) for text, names in found.items()]


def _names(names: Sequence[str]) -> str:
    more = len(names) - WARNED_CELLS
    return "; ".join(names[:WARNED_CELLS]) + (f"; and {more} more, {len(names)} in all" if more > 0 else "")


def nulls(cells: Iterable[Row]) -> list[tuple[str, str, int]]:
    """Metrics without a value: name, reason, number of cells."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in cells:
        for name, why in read.section(read.section(row, "metrics"), "null_reasons").items():
            counts[read.plain(name), read.plain(why)] += 1
    return [(name, why, count) for (name, why), count in counts.items()]
