"""Predicted against measured, cell by cell and series by series, and what ate the gain.

Works on rows as plain mappings (the store's own shape), so that the report charts it without knowing who predicted.
The speedup is A / R: tokens a step over a step's cost in AR steps, R = (draft + verify + sample + host) / T(1, B). So

    ln(measured / predicted) = ln(A_m / A_p) - Σ_i (r_i,m - r_i,p) / L(R_m, R_p)

with L the logarithmic mean: the parts add up to the gap exactly, and the largest one of its sign names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench.roofline.breakeven import Crossing, best_depth, find_crossing

Row = Mapping[str, Any]
PARTS = ("draft", "verify", "sample", "host")
NAMES = {
    "acceptance": "acceptance",
    "draft": "draft cost",
    "verify": "verifying (kernel)",
    "sample": "sampling (host)",
    "host": "host",
}
SMALL_GAP = 0.02
"""Gaps of less than this share have no name: a measurement is hardly surer."""


@dataclass(frozen=True)
class CellGap:
    """One cell predicted and measured. `gap` is measured / predicted - 1; `terms` are log shares by what made them,
    which sum to ln(1 + gap); `name` is the largest of the gap's own sign, or "small".

    `eaten` is where the gain over one token a step went in the measurement itself, in AR steps: what drafting,
    verifying more rows than one, sampling and the host cost beyond the AR step.
    """

    case_hash: str
    case_name: str
    drafter: str
    depth: int
    batch_size: int
    predicted: float
    measured: float
    low: float | None
    high: float | None
    step_error: float
    terms: Mapping[str, float]
    name: str
    eaten: Mapping[str, float]

    @property
    def gap(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def ate_most(self) -> str:
        """The part of the measured step that cost most beyond an AR step."""
        return NAMES[max(self.eaten, key=lambda part: self.eaten[part])]


@dataclass(frozen=True)
class SeriesGap:
    """One drafter at one depth over batch sizes, in one context of other axes. `within_one_step`: whether the predicted
    crossing lies at most one step of the batch grid from the measured one; None where either is not known."""

    label: str
    drafter: str
    depth: int
    context: str
    batches: tuple[int, ...]
    predicted_speedup: tuple[float, ...]
    measured_speedup: tuple[float, ...]
    predicted: Crossing
    measured: Crossing
    within_one_step: bool | None
    name: str


@dataclass(frozen=True)
class DepthGap:
    """Best depth of one drafter at one batch by tokens/s (0: no speculation), predicted and measured; `lost` is what
    the predicted depth gave up against the measured best, a share of its tokens/s; None where it was not measured."""

    drafter: str
    context: str
    batch_size: int
    predicted: int | None
    measured: int | None
    lost: float | None


@dataclass(frozen=True)
class Comparison:
    """All of it; `unmatched` counts predicted cells that no measured one answers."""

    cells: tuple[CellGap, ...]
    series: tuple[SeriesGap, ...]
    depths: tuple[DepthGap, ...]
    unmatched: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Comparison:
        """What `to_dict` wrote, perhaps through JSON."""
        series = []
        for one in kept["series"]:
            crossings = {side: _crossing(one[side]) for side in ("predicted", "measured")}
            lists = {name: tuple(one[name]) for name in ("batches", "predicted_speedup", "measured_speedup")}
            series.append(SeriesGap(**(dict(one) | crossings | lists)))
        cells = tuple(CellGap(**one) for one in kept["cells"])
        return cls(cells, tuple(series), tuple(DepthGap(**one) for one in kept["depths"]), int(kept["unmatched"]))


def _crossing(kept: Mapping[str, Any]) -> Crossing:
    interval = kept["interval"]
    ends = None if interval is None else (interval[0], interval[1])
    return Crossing(**(dict(kept) | {"interval": ends, "skipped": tuple(kept["skipped"])}))


def compare_rows(measured: Iterable[Row], predicted: Iterable[Row]) -> Comparison:
    """Cells that are ok on both sides and draft, paired by case hash; series and best depths made of them."""
    measured_by, predicted_by = _ok_by_case(measured), _ok_by_case(predicted)
    pairs = [(measured_by[case], row) for case, row in predicted_by.items() if case in measured_by]
    drafting = [pair for pair in pairs if _speedup(pair[0]) is not None and _speedup(pair[1]) is not None]
    cells = tuple(_cell(one, other) for one, other in drafting)
    varying = _varying([one for one, _ in pairs])
    return Comparison(cells, tuple(_series(drafting, cells, varying)), tuple(_depths(pairs, varying)),
                      len(predicted_by) - len(pairs))  # fmt: skip


def _ok_by_case(rows: Iterable[Row]) -> dict[str, Row]:
    """The last ok row of each case."""
    return {str(row["case_hash"]): row for row in rows if row.get("status") == "ok" and row.get("metrics")}


def _metric(row: Row, name: str) -> float | None:
    value = (row.get("metrics") or {}).get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _speedup(row: Row) -> float | None:
    value = _metric(row, "speedup")
    return value if value is not None and value > 0 and _ratios(row) is not None else None


def _ratios(row: Row) -> dict[str, float] | None:
    """A step's parts in AR steps; commit counts as host. None where the row does not tell."""
    ar, step = _metric(row, "ar_step_s"), _metric(row, "step_s")
    parts = {part: _metric(row, f"{part}_s") for part in ("draft", "verify", "sample")}
    known = {part: value for part, value in parts.items() if value is not None}
    if not ar or not step or len(known) < len(parts):
        return None
    known["host"] = max(0.0, step - sum(known.values()))
    return {part: value / ar for part, value in known.items()}


def _log_mean(a: float, b: float) -> float:
    """(a - b) / ln(a / b), a where they are equal."""
    if abs(a - b) <= 1e-12 * max(a, b):
        return a
    return (a - b) / (math.log(a) - math.log(b))


def _cell(measured: Row, predicted: Row) -> CellGap:
    seen, told = _speedup(measured), _speedup(predicted)
    ratios_m, ratios_p = _ratios(measured), _ratios(predicted)
    assert seen is not None
    assert told is not None
    assert ratios_m is not None
    assert ratios_p is not None
    cost_m, cost_p = sum(ratios_m.values()), sum(ratios_p.values())
    mean = _log_mean(cost_m, cost_p)
    terms = {part: -(ratios_m[part] - ratios_p[part]) / mean for part in PARTS}
    # what is left is tokens a step, as the speedups themselves count them
    terms["acceptance"] = math.log(seen * cost_m) - math.log(told * cost_p)
    ar = {part: _metric(measured, f"ar_{part}_s") or 0.0 for part in ("draft", "verify", "sample")}
    ar_step = _metric(measured, "ar_step_s") or 1.0
    ar["host"] = max(0.0, ar_step - sum(ar.values()))
    axes = measured["axes"]
    step_m, step_p = _metric(measured, "step_s"), _metric(predicted, "step_s")
    assert step_m is not None
    assert step_p is not None
    return CellGap(
        case_hash=str(measured["case_hash"]),
        case_name=str(measured["case_name"]),
        drafter=str(axes["drafter"]),
        depth=int(axes["depth"]),
        batch_size=int(axes["batch_size"]),
        predicted=told,
        measured=seen,
        low=_metric(measured, "speedup_low"),
        high=_metric(measured, "speedup_high"),
        step_error=step_p / step_m - 1,
        terms=terms,
        name=_name(terms),
        eaten={part: ratios_m[part] - ar[part] / ar_step for part in PARTS},
    )


def _name(terms: Mapping[str, float]) -> str:
    gap = sum(terms.values())
    if abs(gap) < SMALL_GAP:
        return "small"
    return NAMES[max(terms, key=lambda part: terms[part] * math.copysign(1.0, gap))]


_OWN = ("drafter", "drafter_kind", "depth", "batch_size")


def _varying(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row["axes"] if name not in _OWN)
    return [name for name in names if len({str(row["axes"].get(name)) for row in rows}) > 1]


def _context(row: Row, varying: Sequence[str]) -> str:
    words = {"temperature": "T", "context_len": "context"}
    return " · ".join(f"{words.get(name, name)} {_plain(row['axes'].get(name))}" for name in varying)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _series(pairs: Sequence[tuple[Row, Row]], cells: Sequence[CellGap], varying: Sequence[str]) -> Iterable[SeriesGap]:
    groups: dict[tuple[str, int, str], list[tuple[Row, CellGap]]] = {}
    for (measured, _), cell in zip(pairs, cells, strict=True):
        groups.setdefault((cell.drafter, cell.depth, _context(measured, varying)), []).append((measured, cell))
    places = {key: place for place, key in enumerate(dict.fromkeys((drafter, told) for drafter, _, told in groups))}
    for drafter, depth, context in sorted(groups, key=lambda key: (places[key[0], key[2]], key[1])):
        members = groups[drafter, depth, context]
        ordered = sorted({cell.batch_size: cell for _, cell in members}.items())
        batches = tuple(batch for batch, _ in ordered)
        told, seen = (tuple(getattr(cell, side) for _, cell in ordered) for side in ("predicted", "measured"))
        bounded = all(cell.low is not None and cell.high is not None for _, cell in ordered)
        lows, highs = ([getattr(cell, end) for _, cell in ordered] for end in ("low", "high"))
        measured_crossing = find_crossing(batches, seen, lows if bounded else None, highs if bounded else None)
        predicted_crossing = find_crossing(batches, told)
        near = within_one_step(batches, predicted_crossing, find_crossing(batches, seen))
        label = " · ".join(part for part in (f"{drafter} · depth {depth}", context) if part)
        at = _decisive(measured_crossing, batches)
        name = next(cell.name for batch, cell in ordered if batch == at)
        yield SeriesGap(
            *(label, drafter, depth, context, batches, told, seen, predicted_crossing, measured_crossing, near, name)
        )


def _decisive(crossing: Crossing, batches: Sequence[int]) -> int:
    """The batch at which a series is decided: where it stops paying off, else the largest."""
    high = crossing.high_batch
    return high if high is not None and high in batches else batches[-1]


def within_one_step(batches: Sequence[int], predicted: Crossing, measured: Crossing) -> bool | None:
    """Whether two crossings of one grid lie at most one step apart.

    A crossing's place is its first losing batch, counted on the grid; one step beyond the last where there is none.
    None where either has no data.
    """
    places = [_place(crossing, batches) for crossing in (predicted, measured)]
    if places[0] is None or places[1] is None:
        return None
    return abs(places[0] - places[1]) <= 1


def _place(crossing: Crossing, batches: Sequence[int]) -> int | None:
    if crossing.kind in ("no_data", "unclear"):
        return None
    if crossing.kind == "none_in_grid":
        return len(batches)
    assert crossing.high_batch is not None
    return list(batches).index(crossing.high_batch)


def _depths(pairs: Sequence[tuple[Row, Row]], varying: Sequence[str]) -> Iterable[DepthGap]:
    """Depth 0 competes with the AR arm of the same cells."""
    groups: dict[tuple[str, str, int], list[tuple[Row, Row]]] = {}
    for measured, predicted in pairs:
        axes = measured["axes"]
        if axes["depth"] and _metric(measured, "output_tokens_per_s") and _metric(predicted, "output_tokens_per_s"):
            key = (str(axes["drafter"]), _context(measured, varying), int(axes["batch_size"]))
            groups.setdefault(key, []).append((measured, predicted))
    places = {key: place for place, key in enumerate(dict.fromkeys((drafter, told) for drafter, told, _ in groups))}
    for drafter, context, batch in sorted(groups, key=lambda key: (places[key[0], key[1]], key[2])):
        members = groups[drafter, context, batch]
        seen, told = (_gains([pair[side] for pair in members]) for side in (0, 1))
        best_seen, best_told = best_depth({batch: seen})[batch], best_depth({batch: told})[batch]
        lost = None
        if best_seen is not None and best_told is not None:
            top, got = seen[best_seen], seen.get(best_told)
            lost = None if got is None or not top else 1 - got / top
        yield DepthGap(drafter, context, batch, best_told, best_seen, lost)


def _gains(rows: Sequence[Row]) -> dict[int, float | None]:
    """Depth -> speedup over the AR arm of its own cell, and 1 for depth 0: what tokens/s ranks, free of drift."""
    return {0: 1.0} | {int(row["axes"]["depth"]): _metric(row, "speedup") for row in rows}
