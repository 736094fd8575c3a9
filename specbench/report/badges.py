"""Badges: one word on a cell that says what its number may not be taken for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specbench.report import rows as read
from specbench.report.rows import Row

BADGES: dict[str, str] = {
    "invalid": "the outputs differ from plain decoding, a request failed or a rate is impossible: there is no speedup",
    "failed": "the cell ended in an error: there is no number",
    "skipped": "the cell was not run, for the reason given",
    "near tie": "an output parts from plain decoding where the two best tokens are closer than rounding can tell",
    "synthetic": "acceptance was forced: it shows what the system costs, not what a drafter earns",
    "predicted": "computed from the cost model, never measured",
    "lossy": "the drafter or the verification may change the output: it isn't the target's own law",
    "noisy": "a single block, no interval, or an interval over twice as wide as the scenario asked for",
    "throttled": "the device slowed itself down (heat, power, clocks) in at least one block; such blocks are left out",
}
"""Every badge and what it means, the gravest first."""

DEFAULT_TARGET_INTERVAL = 0.05
_THROTTLE_WORDS = ("slowdown", "thermal", "power brake", "power cap", "clock")


def target_interval(manifest: Mapping[str, Any]) -> float:
    """The relative half-width of a speedup's interval that the scenario asked for."""
    asked = read.section(read.section(manifest, "scenario"), "measure").get("target_interval")
    return read.number(asked) or DEFAULT_TARGET_INTERVAL


def badges_of(row: Row, target: float = DEFAULT_TARGET_INTERVAL) -> tuple[str, ...]:
    """The badges of a cell, the gravest first; `target` is the half-width that was asked for, relative."""
    conditions = read.section(row, "conditions")
    found = {
        read.status(row): not read.is_ok(row),
        "near tie": conditions.get("output_check") == "near_tie",
        "synthetic": read.is_synthetic(row),
        "predicted": bool(conditions.get("predicted")),
        "lossy": conditions.get("lossless") is False,
        "noisy": is_noisy(row, target),
        "throttled": is_throttled(row),
    }
    return tuple(name for name in BADGES if found.get(name))


def half_width(row: Row) -> float | None:
    """Half the interval of the speedup over the speedup itself."""
    mean, low, high = read.speedup(row) or (None, None, None)
    return None if not mean or low is None or high is None else (high - low) / (2 * mean)


def is_noisy(row: Row, target: float) -> bool:
    """True for a measured speedup of one block, without an interval, or with one over twice as wide as `target`."""
    if read.speedup(row) is None or read.section(row, "conditions").get("predicted"):
        return False
    width, blocks = half_width(row), read.metric(row, "num_blocks")
    return width is None or width > 2 * target or (blocks is not None and blocks < 2)


def is_throttled(row: Row) -> bool:
    blocks = read.section(row, "samples").get("blocks")
    marks = [
        str(mark)
        for block in (blocks if isinstance(blocks, list | tuple) else [])
        if isinstance(block, Mapping)
        for mark in block.get("marks") or []
    ]
    marks += [str(warning) for warning in row.get("warnings") or [] if "disturbed" in str(warning)]
    return any(word in mark for mark in marks for word in _THROTTLE_WORDS)


def legend(rows: Iterable[Row], target: float) -> list[tuple[str, str]]:
    """The badges that occur among the rows, each with its meaning."""
    there = {name for row in rows for name in badges_of(row, target)}
    return [(name, meaning) for name, meaning in BADGES.items() if name in there]
