"""`depth: auto` against the best fixed depth of every batch: how much the choice of each step loses (regret), and the
best depths by batch as a table that a serving engine reads.

    specbench throttle runs/quickstart --engine vllm
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.errors import InputError
from specbench.report import rows as read
from specbench.report.rows import DASH, Row
from specbench.report.series import BestDepth, best_depth_table

HEADER = ("drafter", "batch", "speedup, auto", "best fixed depth", "its speedup", "regret", "mean depth", "verdict")
CAPTION = (
    "Regret: what depth auto loses to the best of the depths measured at this batch (0: no drafting), as a share of its"
    " tokens/s; each speedup is over its own AR arm. The best of several noisy cells is a lucky one, so the regret"
    " is an upper bound in the mean."
)


@dataclass(frozen=True)
class Regret:
    """One cell of `depth: auto` and the best fixed depth beside it.

    `regret` = 1 - speedup / best_speedup, with its interval from the two intervals, which are independent (None where
    one is missing). `depths` were measured; 0 is the AR arm.
    """

    drafter: str
    batch_size: int
    speedup: float
    best_depth: int
    best_speedup: float
    depths: tuple[int, ...]
    regret: float
    low: float | None
    high: float | None
    mean_depth: float | None

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "unclear"
        if self.low > 0:
            return "loses"
        return "gains" if self.high < 0 else "as good"


def _axes_but_depth(row: Row) -> str:
    left_out = ("depth", "depth_policy")
    axes = {name: value for name, value in read.section(row, "axes").items() if name not in left_out}
    return json.dumps(read.finite(axes), sort_keys=True, default=str)


def is_adaptive(row: Row) -> bool:
    """Whether each step of the cell chose its depth."""
    return bool(read.axis(row, "depth_policy") == "auto")


def regrets(rows: Iterable[Row]) -> list[Regret]:
    """One entry for each measured cell of `depth: auto` that has a fixed depth beside it, all other axes equal."""
    cells = [row for row in read.latest(rows) if read.speedup(row) is not None]
    fixed: dict[str, list[Row]] = {}
    for row in cells:
        if not is_adaptive(row):
            fixed.setdefault(_axes_but_depth(row), []).append(row)
    found = []
    for row in cells:
        beside = fixed.get(_axes_but_depth(row), []) if is_adaptive(row) else []
        if beside:
            found.append(_regret(row, beside))
    return found


def _regret(row: Row, beside: Sequence[Row]) -> Regret:
    mine = read.speedup(row)
    assert mine is not None
    # The AR arm needs no interval: a speedup is over it already.
    ranked = [(1.0, 0, 0.0)]
    for other in beside:
        theirs = read.speedup(other)
        if theirs is not None and read.depth(other) > 0:
            ranked.append((theirs[0], read.depth(other), _log_halfwidth(*theirs)))
    best, depth, noise = max(ranked, key=lambda item: (item[0], -item[1]))
    ratio, own = mine[0] / best, _log_halfwidth(*mine)
    wide = math.hypot(own, noise)
    known = math.isfinite(wide)
    return Regret(
        drafter=read.drafter(row),
        batch_size=read.batch_size(row) or 0,
        speedup=mine[0],
        best_depth=depth,
        best_speedup=best,
        depths=tuple(sorted({item[1] for item in ranked})),
        regret=1 - ratio,
        low=1 - ratio * math.exp(wide) if known else None,
        high=1 - ratio * math.exp(-wide) if known else None,
        mean_depth=read.metric(row, "step_depth_mean"),
    )


def _log_halfwidth(value: float, low: float | None, high: float | None) -> float:
    """Half the width of an interval of log(value); infinite where it has none."""
    if low is None or high is None or low <= 0:
        return math.inf
    return math.log(high / low) / 2


@dataclass(frozen=True)
class RegretTable:
    """Lines of text under `header`; empty where no cell chose its depths."""

    lines: tuple[tuple[str, ...], ...]
    header: tuple[str, ...] = HEADER
    caption: str = CAPTION


def regret_table(rows: Iterable[Row]) -> RegretTable:
    """`regrets` as text."""
    return RegretTable(tuple(_line(one) for one in regrets(rows)))


def _line(one: Regret) -> tuple[str, ...]:
    percent = f"{100 * one.regret:+.1f} %"
    if one.low is not None and one.high is not None:
        percent += f" ({100 * one.low:+.1f} to {100 * one.high:+.1f})"
    return (
        one.drafter,
        str(one.batch_size),
        read.fixed(one.speedup),
        str(one.best_depth),
        read.fixed(one.best_speedup),
        percent,
        DASH if one.mean_depth is None else f"{one.mean_depth:.2f}",
        one.verdict,
    )


@dataclass(frozen=True)
class Schedule:
    """The best depth by batch of one drafter (and context), from measured or predicted cells; a depth above 0 stands
    only where its gain is clear. `unclear` batches were given 0."""

    drafter: str
    table: Mapping[int, int]
    unclear: tuple[int, ...]
    synthetic: bool


def schedules(rows: Iterable[Row]) -> list[Schedule]:
    """A schedule for each drafter with fixed depths. Predicted cells have no interval, and count by their value."""
    fixed = [row for row in rows if not is_adaptive(row)]
    predicted = bool(fixed) and all(read.is_predicted(row) for row in fixed)
    grouped: dict[str, list[BestDepth]] = {}
    for one in best_depth_table(fixed):
        if one.depth is not None:
            grouped.setdefault(one.drafter_label, []).append(one)
    found = []
    for label, cells in grouped.items():
        table = {one.batch_size: one.depth or 0 if one.clear or predicted else 0 for one in cells}
        unclear = tuple(one.batch_size for one in cells if one.depth and not one.clear and not predicted)
        found.append(Schedule(label, table, unclear, cells[0].synthetic))
    return found


def chosen_schedule(rows: Iterable[Row], drafter: str | None) -> Schedule:
    """The schedule of `drafter` (a name as the tables show it, or how it begins); of the only one where None.

    Raises InputError, naming what there is, for none or several.
    """
    known = schedules(rows)
    named = [one for one in known if drafter is None or one.drafter == drafter]
    named = named or [one for one in known if drafter is not None and one.drafter.startswith(drafter)]
    if len(named) != 1:
        there = ", ".join(one.drafter for one in known) or "none with a valid speedup"
        message = (
            "several drafters were measured" if drafter is None and known else f"no drafter is {drafter or 'there'}"
        )
        raise InputError(message, key="--drafter", remedy=f"name one of: {there}")
    return named[0]


def schedule_notes(schedule: Schedule) -> list[str]:
    """What whoever uses the table should know."""
    notes: list[str] = [f"{schedule.drafter}: depth by batch size {dict(sorted(schedule.table.items()))}"]
    if schedule.unclear:
        notes.append(f"at batch {read.listed(schedule.unclear)} no gain is clear, so nothing is drafted there")
    if schedule.synthetic:
        notes.append("acceptance was forced: this table is of the system, not of a drafter")
    return notes


def as_json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=2)
