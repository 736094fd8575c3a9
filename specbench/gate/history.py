"""`specbench history DIR`: the trend of each case over stored runs, with its steps marked.

    specbench history runs --metric output_tokens_per_s

Every folder with rows.jsonl under DIR is a run, and every update of a baseline file is one. Only what one machine
measured for one scenario stands in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbench.definitions import DEFINITIONS
from specbench.errors import InputError, SpecbenchError
from specbench.gate.baseline import baselines_in, machine_of
from specbench.gate.evidence import EXTENSIONS
from specbench.gate.policy import DEFAULT, MetricPolicy, Policy
from specbench.gate.render_json import finite
from specbench.gate.steps import Step, could_confirm, find_steps, ratio
from specbench.gate.text import clean, counted, number, percent, unit_of
from specbench.result_row import ResultRow
from specbench.store import MANIFEST_FILE, ROWS_FILE, latest_rows, read_manifest

SCHEMA_VERSION = 1
METRICS = ("output_tokens_per_s", "speedup", "acceptance_rate")
LINES = 60
WIDTH = 48
_BARS = "▁▂▃▄▅▆▇█"
_COUNT_EFFECT = 0.01


@dataclass(frozen=True)
class StoredRun:
    """One run as it is stored; `when`: the start of its first row, ISO 8601; `code_revision`: that of its rows, of all
    where a resumed run has several."""

    label: str
    when: str
    scenario: str
    machine: str
    device: str
    code_revision: str
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True)
class Trend:
    """One metric of one case: a value for each run of its line, None where the cell was not ok or had none. `steps`
    count runs as `values` does. `change` = last / first."""

    case_hash: str
    case_name: str
    metric: str
    direction: str
    min_effect: float
    values: tuple[float | None, ...]
    steps: tuple[Step, ...]
    change: float | None

    @property
    def known(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass(frozen=True)
class Line:
    """All runs of one scenario on one machine, oldest first, and the trends of their cases."""

    scenario: str
    machine: str
    device: str
    runs: tuple[StoredRun, ...]
    trends: tuple[Trend, ...]


@dataclass(frozen=True)
class History:
    """All lines; `unread` says what could not be read, and why."""

    lines: tuple[Line, ...]
    unread: tuple[str, ...]


def read_history(folder: Path, metrics: Sequence[str] = METRICS, policy: Policy = DEFAULT) -> History:
    """The history of every run under `folder`. Raises InputError for an unknown metric, and where there is no run that
    can be read."""
    for name in metrics:
        if name not in DEFINITIONS:
            near = get_close_matches(name, DEFINITIONS, 1)
            remedy = f"did you mean {near[0]}?" if near else "definitions.py and every report list the metrics"
            raise InputError(f"no metric {clean(name, 60)!r}", remedy=remedy, key="--metric")
    runs, unread = stored_runs(folder)
    if not runs:
        why = f"; not read: {unread[0]}" if unread else ""
        raise InputError(f"no runs here{why}", remedy="give a folder that holds folders of runs", file=folder)
    by_place: dict[tuple[str, str], list[StoredRun]] = {}
    for run in sorted(runs, key=lambda run: (_moment(run.when), run.label)):
        by_place.setdefault((run.scenario, run.machine), []).append(run)
    lines = [
        Line(scenario, machine, members[-1].device, tuple(members), tuple(_trends(members, metrics, policy)))
        for (scenario, machine), members in sorted(by_place.items())
    ]
    return History(tuple(lines), tuple(unread))


def stored_runs(folder: Path) -> tuple[list[StoredRun], list[str]]:
    """Every run and baseline entry under `folder`, in no order, and what could not be read."""
    if not folder.exists():
        raise InputError("no such folder", remedy="give a folder that holds folders of runs", file=folder)
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl"))
    files = [file for file in files if not file.parent.match(EXTENSIONS)]
    runs: list[StoredRun] = []
    unread: list[str] = []
    for file in files:
        try:
            runs += _runs_of_folder(file.parent) if file.name == ROWS_FILE else _runs_of_baseline(file)
        except SpecbenchError as error:
            unread.append(clean(str(error).splitlines()[0]))
    return runs, unread


def _runs_of_folder(folder: Path) -> list[StoredRun]:
    manifest = read_manifest(folder)
    rows = {row.case_hash: row for row in latest_rows(folder)}
    return [_stored(str(folder), manifest, list(rows.values()), folder / MANIFEST_FILE)] if rows else []


def _runs_of_baseline(file: Path) -> list[StoredRun]:
    (baseline,) = baselines_in(file)
    return [_stored(f"{file}#{entry.number}", entry.manifest, entry.rows, file) for entry in baseline.entries]


def _stored(label: str, manifest: Any, rows: Sequence[ResultRow], file: Path) -> StoredRun:
    scenario, machine = machine_of(manifest, file)
    of_machine = tuple(row for row in rows if row.environment == manifest["fingerprint"])
    when = min((row.started_at for row in of_machine), key=_moment, default="")
    revisions = dict.fromkeys(row.code_revision for row in of_machine)
    device = str(manifest.get("device") or "unknown")
    return StoredRun(label, when, scenario, machine, device, ", ".join(revisions) or "unknown", of_machine)


def _moment(text: str) -> datetime:
    """The time that a row says; the beginning of all time where it says none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _trends(runs: Sequence[StoredRun], metrics: Sequence[str], policy: Policy) -> Iterable[Trend]:
    cells = [{row.case_hash: row for row in run.rows} for run in runs]
    names = {case: row.case_name for cell in cells for case, row in cell.items()}
    for case, name in names.items():
        rows = [cell.get(case) for cell in cells]
        for metric in metrics:
            values = tuple(None if row is None else _value(row, metric) for row in rows)
            known = [place for place, value in enumerate(values) if value is not None]
            if known:
                rule = policy.metrics.get(metric, MetricPolicy("single", _direction(metric), 0.05))
                yield _trend(case, name, metric, rule, values, known, [row for row in rows if row is not None])


def _trend(
    case: str,
    name: str,
    metric: str,
    rule: MetricPolicy,
    values: tuple[float | None, ...],
    known: list[int],
    rows: Sequence[ResultRow],
) -> Trend:
    """A count is exact only among runs that measured equally much of the same, greedily."""
    series = [value for value in values if value is not None]
    sizes = {
        str([(row.metrics or {}).get(key) for key in ("num_blocks", "num_requests")]) for row in rows if row.metrics
    }
    exact = rule.kind == "exact" and len(sizes) == 1 and all(row.axes.get("temperature") == 0 for row in rows)
    effect = rule.min_effect or _COUNT_EFFECT
    steps = [Step(known[step.at], step.ratio, step.confirmed) for step in find_steps(series, effect, exact=exact)]
    change = ratio(series[-1], series[0]) if len(series) > 1 else None
    return Trend(case, name, metric, rule.direction, 0.0 if exact else effect, values, tuple(steps), change)


def _value(row: ResultRow, metric: str) -> float | None:
    value = (row.metrics or {}).get(metric) if row.status == "ok" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _direction(metric: str) -> Any:
    """Seconds, bytes and joules are better low, all else high."""
    return "down" if unit_of(metric) in ("s", "B", "J/token", "FLOP") else "up"


# ---- what it looks like


def sparkline(trend: Trend, width: int = WIDTH) -> str:
    """One sign a run, the last `width` of them; "|" before a step, "¦" before a possible one, "·" for no value. The
    scale is at least four minimum effects high, so that noise looks like noise."""
    known = [value for value in trend.values if value is not None]
    low, high = min(known), max(known)
    middle = (low + high) / 2
    half = max((high - low) / 2, 2 * trend.min_effect * abs(middle), 1e-300)
    marks = {step.at: "|" if step.confirmed else "¦" for step in trend.steps}
    signs = []
    for place, value in enumerate(trend.values):
        level = None if value is None else min(7, int(8 * ((value - middle) / half / 2 + 0.5)))
        signs.append(marks.get(place, "") + ("·" if level is None else _BARS[level]))
    return ("…" if len(signs) > width else "") + "".join(signs[-width:])


def is_worse(direction: str, change: float) -> bool:
    return change != 1 if direction == "both" else (change < 1) == (direction == "up") and change != 1


def step_text(line: Line, trend: Trend, step: Step) -> str:
    """ "−12.0 % at 2026-02-03 (1a2b3c4), worse"."""
    run = line.runs[step.at]
    word = "worse" if is_worse(trend.direction, step.ratio) else "better"
    sure = "" if step.confirmed else ", possible: too few runs to tell"
    return f"{percent(step.ratio)} at {clean(run.when[:10])} ({clean(run.code_revision, 24)}), {word}{sure}"


def ordered(trends: Iterable[Trend]) -> list[Trend]:
    """Those with steps for the worse first, then other steps, then by name."""

    def key(trend: Trend) -> tuple[bool, bool, str, str]:
        worse = any(is_worse(trend.direction, step.ratio) for step in trend.steps)
        return not worse, not trend.steps, trend.case_name, trend.metric

    return sorted(trends, key=key)


def render_history(history: History, lines: int = LINES) -> RenderableType:
    """A table for each line of runs, steps for the worse first; at most `lines` trends each, the rest counted."""
    parts: list[RenderableType] = []
    for line in history.lines:
        first, last = clean(line.runs[0].when[:10]), clean(line.runs[-1].when[:10])
        title = f"{clean(line.scenario, 80)} on {clean(line.device, 80)} ({line.machine}): "
        parts.append(Text(title + f"{counted(len(line.runs), 'run')}, {first} to {last}", style="bold"))
        shown = ordered(line.trends)
        parts.append(_table(line, shown[:lines]))
        if len(shown) > lines:
            parts.append(Text(f"... {counted(len(shown) - lines, 'more trend')}; all are in --json"))
        if len(line.runs) > 1 and not could_confirm(len(line.runs)):
            parts.append(Text("So few runs can't tell a step from chance; a possible one is marked ¦.", style="dim"))
    parts += [Text(f"not read: {text}", style="yellow") for text in history.unread]
    return Group(*parts)


def _table(line: Line, trends: Sequence[Trend]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "metric", "trend"):
        table.add_column(name, overflow="fold", no_wrap=name == "trend")
    for name in ("first", "last", "change"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("steps", overflow="fold")
    for trend in trends:
        known = [value for value in trend.values if value is not None]
        unit = unit_of(trend.metric)
        steps = "; ".join(step_text(line, trend, step) for step in trend.steps)
        worse = any(is_worse(trend.direction, step.ratio) for step in trend.steps)
        cells = (clean(trend.case_name, 90), clean(trend.metric, 40), sparkline(trend))
        ends = (number(known[0], unit), number(known[-1], unit), percent(trend.change))
        table.add_row(*(Text(cell) for cell in (*cells, *ends)), Text(steps, style="red" if worse else "green"))
    return table


def history_json(history: History) -> str:
    """The history as strict JSON. An infinite ratio (a step from zero) is null."""
    lines = [
        {
            "scenario": line.scenario, "machine": line.machine, "device": line.device,
            "runs": [{"path": r.label, "when": r.when, "code_revision": r.code_revision} for r in line.runs],
            "trends": [
                {
                    "case_hash": trend.case_hash, "case_name": trend.case_name, "metric": trend.metric,
                    "unit": unit_of(trend.metric) or "1", "direction": trend.direction, "values": trend.values,
                    "change": trend.change,
                    "steps": [{"run": s.at, "ratio": s.ratio, "confirmed": s.confirmed} for s in trend.steps],
                }
                for trend in ordered(line.trends)
            ],
        }
        for line in history.lines
    ]  # fmt: skip
    document = {"kind": "specbench-history", "schema_version": SCHEMA_VERSION, "lines": lines, "unread": history.unread}
    return json.dumps(finite(document), allow_nan=False, indent=2) + "\n"
