"""Figures with their targets, as JSON, as a table for a terminal, and as the tables of README.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.blocks import Spread
from specbench.errors import InputError

UNITS: Mapping[str, Callable[[float], str]] = {
    "x": lambda v: f"{v:.2f} ×",
    "share": lambda v: f"{100 * v:.1f} %",
    "s": lambda v: f"{v:.3g} s" if v < 100 else f"{v:.0f} s",
    "ms": lambda v: f"{1e3 * v:.2f} ms",
    "tok/s": lambda v: f"{v:.1f} tok/s",
    "GB/s": lambda v: f"{v / 1e9:.1f} GB/s",
    "MB": lambda v: f"{v / 1e6:.0f} MB",
    "tokens": lambda v: f"{v:.2f}",
}
"""Unit -> how a value is written. Values are kept in SI (seconds, bytes, bytes/s) and shares as 0 to 1."""


@dataclass(frozen=True)
class Bound:
    """A target: the median must be at least (">=") or at most ("<=") `value`."""

    sense: str
    value: float

    def met(self, value: float) -> bool:
        return value >= self.value if self.sense == ">=" else value <= self.value

    def text(self, unit: str) -> str:
        return f"{'≥' if self.sense == '>=' else '≤'} {UNITS[unit](self.value)}"


def at_least(value: float) -> Bound:
    return Bound(">=", value)


def at_most(value: float) -> Bound:
    return Bound("<=", value)


@dataclass(frozen=True)
class Figure:
    """One measured figure. `spread` is None only with a `reason`; `disturbed`: the machine was busy throughout."""

    key: str
    what: str
    unit: str
    spread: Spread | None
    bound: Bound | None = None
    reason: str | None = None
    disturbed: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is no target or no value."""
        return None if self.spread is None or self.bound is None else self.bound.met(self.spread.median)

    def to_dict(self) -> dict[str, Any]:
        target = {"sense": self.bound.sense, "value": self.bound.value} if self.bound else None
        return {
            "key": self.key,
            "what": self.what,
            "unit": self.unit,
            **(asdict(self.spread) if self.spread else {"median": None, "reason": self.reason}),
            "target": target,
            "met": self.met,
            "disturbed": self.disturbed,
        }

    def cells(self) -> tuple[str, str, str, str]:
        """Target, median, least to greatest, verdict."""
        target = self.bound.text(self.unit) if self.bound else ""
        if self.spread is None:
            return target, "not measured", self.reason or "", ""
        write = UNITS[self.unit]
        spread = f"{write(self.spread.low)} to {write(self.spread.high)}" if self.spread.count > 1 else ""
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        return target, write(self.spread.median), spread, f"{verdict} (busy machine)" if self.disturbed else verdict


@dataclass(frozen=True)
class Report:
    """What one benchmark found: figures, the raw rounds behind them, and notes on what was compared."""

    name: str
    figures: tuple[Figure, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "figures": [figure.to_dict() for figure in self.figures],
            "notes": list(self.notes),
            "raw": dict(self.raw),
        }


def text_table(figures: Sequence[Figure]) -> str:
    """A table for a terminal: key, median, least to greatest, target, verdict."""
    rows = [("figure", "median", "least to greatest", "target", "")]
    for figure in figures:
        target, median, spread, verdict = figure.cells()
        rows.append((figure.key, median, spread, target, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 8), *lines[1:]])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def merge_table(
    text: str, name: str, head: Sequence[str], rows: Mapping[str, Sequence[str]], keep: set[str] | None = None
) -> str:
    """`text` with the table between `<!-- name -->` and `<!-- /name -->` holding `rows`, keyed by their first cell.

    Rows that are there already keep their places; those of the same key are replaced, new ones come last. With `keep`,
    rows of other keys (without backticks) leave the table.
    Raises InputError if the markers are missing.
    """
    match = _section(name).search(text)
    if match is None:
        raise InputError(
            f"no section between <!-- {name} --> and <!-- /{name} -->",
            file="benchmarks/README.md",
            remedy="put the two markers back, each on a line of its own",
        )
    kept: dict[str, str] = {}
    for line in match.group(2).splitlines():
        key = line.removeprefix("|").split("|")[0].strip()
        if line.startswith("| `"):
            kept[key] = line
    kept |= {key: _row((key, *cells)) for key, cells in rows.items()}
    if keep is not None:
        kept = {key: line for key, line in kept.items() if key.strip("`") in keep}
    table = [_row(head), _row(["---"] * len(head)), *kept.values()]
    return text[: match.start(2)] + "\n".join(["", *table, "", ""]) + text[match.end(2) :]


def fill_readme(text: str, figures: Sequence[Figure], run: str, conditions: str) -> str:
    """README.md with the figures in: those with a target in the table `targets`, the others in `figures`.

    `run` marks the rows, and the table `runs` tells its `conditions`; runs that no row names any more leave it.
    """
    targets: dict[str, Sequence[str]] = {}
    others: dict[str, Sequence[str]] = {}
    for figure in figures:
        target, median, spread, verdict = figure.cells()
        if figure.bound is not None:
            targets[f"`{figure.key}`"] = (figure.what, target, median, spread, verdict, run)
        else:
            others[f"`{figure.key}`"] = (figure.what, median, spread, run)
    text = merge_table(text, "targets", ("figure", "what", "target", "median", "least to greatest", "", "run"), targets)
    text = merge_table(text, "figures", ("figure", "what", "median", "least to greatest", "run"), others)
    used = {line.rsplit("|", 2)[1].strip() for line in text.splitlines() if line.startswith("| `")}
    return merge_table(text, "runs", ("run", "conditions"), {f"`{run}`": (conditions,)}, keep=used)
