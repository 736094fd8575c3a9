"""Several runs side by side: what each answers, how their conditions differ, and the cells that they have in common.

Cells are matched by the hash of their case (by name, where two runs share no hash). A change from one run to another is
only judged between runs of one machine (equal fingerprints) whose cells are both valid and both lossless or both not:
rates of two machines stand side by side and are left at that. The gate (`specbench gate`) decides; this shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.report import rows as read
from specbench.report.answer import Answer, answer_of
from specbench.report.html_provenance import flat
from specbench.report.rows import Row
from specbench.report.summary import condition_pairs

FASTER, SLOWER, UNCLEAR = "faster", "slower", "no clear difference"


@dataclass(frozen=True)
class Side:
    """One run, under a name that is its own on the page."""

    name: str
    cells: Sequence[Row]
    manifest: Mapping[str, Any]
    answer: Answer

    @property
    def fingerprint(self) -> str:
        """The machine's, from the manifest or from the rows; "" where it isn't known."""
        found = {
            str(value)
            for value in (self.manifest.get("fingerprint"), *(r.get("environment") for r in self.cells))
            if value
        }
        return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class Change:
    """Second over first, in tokens/s, with its interval; `word` is faster, slower, or no clear difference, and where
    nothing may be said `reason` says why."""

    ratio: float | None
    low: float | None
    high: float | None
    word: str
    reason: str = ""


@dataclass(frozen=True)
class MatchedCell:
    """One case in every run: its row there, or None. `change` is None where there are not exactly two runs."""

    name: str
    rows: tuple[Row | None, ...]
    change: Change | None


@dataclass(frozen=True)
class Versus:
    """The runs, what differs between them (name, then one value a run), the cells they share and those they don't."""

    sides: tuple[Side, ...]
    differences: tuple[tuple[str, ...], ...]
    cells: tuple[MatchedCell, ...]
    only: tuple[tuple[str, ...], ...] = field(default=())
    by_name: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return _sentence(self)


def sides_of(runs: Sequence[tuple[Sequence[Row], Mapping[str, Any]]]) -> tuple[Side, ...]:
    """One side a run; equal names get the code revision, then a number, behind them."""
    names = [read.plain(manifest.get("name") or "unnamed run", 60) for _, manifest in runs]
    for extra in ("device", "code_revision"):
        if len(set(names)) < len(names):
            more = [read.plain(manifest.get(extra) or "?", 40) for _, manifest in runs]
            if len(set(more)) > 1:
                names = [f"{name} · {one}" for name, one in zip(names, more, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, start=1)]
    found = []
    for name, (rows, manifest) in zip(names, runs, strict=True):
        cells = read.latest(rows)
        known: Mapping[str, Any] = read.finite(manifest)
        found.append(Side(name, cells, known, answer_of(cells, known)))
    return tuple(found)


def versus(sides: Sequence[Side]) -> Versus:
    """Match and compare; needs at least two sides."""
    hashes = [{_key(row, "case_hash") for row in side.cells} for side in sides]
    by_name = not set.intersection(*hashes)
    key = "case_name" if by_name else "case_hash"
    tables = [{_key(row, key): row for row in side.cells} for side in sides]
    order = list(dict.fromkeys(name for table in tables for name in table))
    matched, only = [], []
    for name in order:
        rows = tuple(table.get(name) for table in tables)
        there = [row for row in rows if row is not None]
        if len(there) > 1:
            change = _change(sides, rows) if len(sides) == 2 else None
            matched.append(MatchedCell(read.plain(there[0].get("case_name") or "unnamed cell"), rows, change))
        else:
            where = next(side.name for side, row in zip(sides, rows, strict=True) if row is not None)
            only.append((read.plain(there[0].get("case_name") or "unnamed cell"), where))
    matched.sort(key=_worst_first)
    notes = []
    if by_name and matched:
        notes.append("No case has the same hash in all runs: cells are matched by name, so their settings may differ.")
    if len(sides) == 2 and matched:
        notes.append(
            "Change: tokens/s of the second run over the first; its interval joins both runs' own as independent ones."
        )
        if not _same_machine(sides):
            notes.append("The runs are of different machines: their rates stand side by side, no change is judged.")
    return Versus(tuple(sides), _differences(sides), tuple(matched), tuple(only), by_name, tuple(notes))


def _key(row: Row, name: str) -> str:
    return str(row.get(name) or row.get("key") or id(row))


def _worst_first(cell: MatchedCell) -> tuple[int, float]:
    if cell.change is None or cell.change.ratio is None:
        return (1, 0.0)
    return (0, cell.change.ratio)


def _same_machine(sides: Sequence[Side]) -> bool:
    prints = {side.fingerprint for side in sides}
    return len(prints) == 1 and "" not in prints


def _change(sides: Sequence[Side], rows: Sequence[Row | None]) -> Change:
    """The ratio of two rates, log-normal: half-widths of the logs add in squares (independent estimates)."""
    before, after = rows
    if before is None or after is None:
        return Change(None, None, None, "", "only in one run")
    for side, row in zip(sides, (before, after), strict=True):
        if not read.is_ok(row):
            return Change(None, None, None, "", f"{read.status(row)} in {side.name}")
    if not _same_machine(sides):
        return Change(None, None, None, "", "different machines")
    if read.is_predicted(before) != read.is_predicted(after):
        return Change(None, None, None, "", "one is measured, the other predicted")
    losses = {bool(read.section(row, "conditions").get("lossless", True)) for row in (before, after)}
    if len(losses) > 1:
        return Change(None, None, None, "", "one is lossy, the other not")
    first, second = (read.metric(row, "output_tokens_per_s") for row in (before, after))
    if not first or not second:
        return Change(None, None, None, "", "no rate")
    ratio, widths = second / first, [_log_half_width(row) for row in (before, after)]
    if None in widths:
        return Change(ratio, None, None, "", "no interval in one of the runs")
    half = math.sqrt(sum(width**2 for width in widths if width is not None))
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    return Change(ratio, low, high, FASTER if low > 1 else SLOWER if high < 1 else UNCLEAR)


def _log_half_width(row: Row) -> float | None:
    low, high = (read.metric(row, f"output_tokens_per_s_{end}") for end in ("low", "high"))
    return None if not low or not high or low <= 0 or high < low else (math.log(high) - math.log(low)) / 2


def _differences(sides: Sequence[Side]) -> tuple[tuple[str, ...], ...]:
    """Conditions, machine and scenario settings that aren't the same in all runs."""
    tables = []
    for side in sides:
        values = dict(condition_pairs(side.cells, side.manifest))
        values |= {f"machine: {name}": value for name, value in flat(side.manifest.get("environment"))}
        values |= {f"scenario: {name}": value for name, value in flat(side.manifest.get("scenario"))}
        tables.append(values)
    names = dict.fromkeys(name for table in tables for name in table)
    found = []
    for name in names:
        told = [table.get(name, "not there") for table in tables]
        if len(set(told)) > 1:
            found.append((name, *told))
    return tuple(found)


def _sentence(found: Versus) -> str:
    names = read.listed([side.name for side in found.sides])
    if not found.cells:
        return f"{names} have no cell in common: each stands by itself below."
    count = read.counted(len(found.cells), "cell")
    changes = [cell.change for cell in found.cells if cell.change is not None]
    judged = [change for change in changes if change.word]
    if not judged:
        why = next((change.reason for change in changes if change.reason), "")
        return f"{names} have {count} in common{f'; no change is judged: {why}' if why else ''}."
    words = {word: sum(change.word == word for change in judged) for word in (FASTER, SLOWER, UNCLEAR)}
    told = f"faster in {words[FASTER]}, slower in {words[SLOWER]}, no clear difference in {words[UNCLEAR]}"
    left = len(changes) - len(judged)
    more = f"; {left} can't be judged" if left else ""
    return f"Of {count} in common, {found.sides[1].name} is {told} than {found.sides[0].name}{more}."


# ---- lines of text


def overview(sides: Sequence[Side]) -> list[tuple[str, ...]]:
    """One line a run: name, device, target, code, valid cells, answer."""
    lines: list[tuple[str, ...]] = []
    for side in sides:
        pairs = dict(condition_pairs(side.cells, side.manifest))
        ok = sum(read.is_ok(row) for row in side.cells)
        said = " ".join((side.answer.said, *side.answer.advice))
        place = (side.name, pairs["device"], pairs["target"], pairs["code revision"])
        lines.append((*place, f"{ok} of {len(side.cells)}", said))
    return lines


def cell_header(sides: Sequence[Side]) -> tuple[str, ...]:
    names = [side.name for side in sides]
    rates = tuple(f"{what}, {name}" for what in ("speedup", "tokens/s") for name in names)
    return ("cell", *rates, *(("change in tokens/s", "reading") if len(sides) == 2 else ()))


def cell_line(cell: MatchedCell) -> tuple[str, ...]:
    """A matched cell under `cell_header`."""
    speedups = [_speedup(row) for row in cell.rows]
    rates = [_rate(row) for row in cell.rows]
    tail = () if cell.change is None else change_words(cell.change)
    return (cell.name, *speedups, *rates, *tail)


def _speedup(row: Row | None) -> str:
    if row is None:
        return "not there"
    found = read.speedup(row)
    return read.status(row) if not read.is_ok(row) else read.DASH if found is None else read.with_interval(*found)


def _rate(row: Row | None) -> str:
    if row is None or not read.is_ok(row):
        return read.DASH
    value, low, high = (read.metric(row, f"output_tokens_per_s{end}") for end in ("", "_low", "_high"))
    half = "" if low is None or high is None else f" ±{read.rate((high - low) / 2, 2)}"
    return f"{read.rate(value, 4)}{half}"


def change_words(change: Change) -> tuple[str, str]:
    """("+4.1 % (−1.0 to +9.5)", "no clear difference")."""
    if change.ratio is None:
        return read.DASH, change.reason
    text = _percent(change.ratio)
    if change.low is not None and change.high is not None:
        text += f" ({_percent(change.low)} to {_percent(change.high)})"
    return text, change.word or change.reason


def _percent(ratio: float) -> str:
    value = 100 * (ratio - 1)
    return f"{'+' if value >= 0 else '−'}{abs(value):.1f} %"
