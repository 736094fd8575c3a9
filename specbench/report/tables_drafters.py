"""The drafter table: what each drafter weighs, moves and costs, what is accepted of it, and where it stops paying off.

One line a drafter, depth (or tree) and whatever else varies in the run, read at its smallest batch; the verdict holds
there, and the crossing is where the speedup falls through 1.0, from a batch that gains (left out) to one that loses (in
it). It is too wide for a terminal, which has the verdict table: summary.md and the page show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench.definitions import DEFINITIONS
from specbench.metrics import derived_metrics
from specbench.report import rows as read
from specbench.report.rows import DASH, Row
from specbench.report.series import Point, Series, series_of
from specbench.report.tables import speedup_cell, speedup_text

MAX_POSITIONS = 8
HEADER = (
    *("drafter", "depth", "batch", "own weights", "bytes a draft step", "acceptance at 1, 2, …", "tokens/step"),
    *("draft cost c", "c by roof", "implied overhead", "speedup", "verdict", "crossing batch"),
)
_COLUMNS = {
    "own weights": "drafter_params",
    "bytes a draft step": "drafter_step_bytes",
    "acceptance at 1, 2, …": "acceptance_at",
    "tokens/step": "tokens_per_step",
    "draft cost c": "draft_cost_ratio",
    "c by roof": "draft_cost_ratio_roof",
    "implied overhead": "implied_overhead",
    "speedup": "speedup",
    "by category": "depth_acceptance_rate",
}
_VERDICTS = {"gain": "pays off", "loss": "slower", "unclear": "unclear"}


@dataclass(frozen=True)
class DrafterTable:
    """Lines of text under `header`, and acceptance by category under `category_header`; both empty below two drafters.

    `columns` tells heading, unit, formula and meaning of each column that is a metric.
    """

    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    category_header: tuple[str, ...]
    category_lines: tuple[tuple[str, ...], ...]
    columns: tuple[tuple[str, str, str, str], ...]
    caption: str = (
        "Each drafter and depth at its smallest batch, where its verdict holds. Rates are shares of 1, costs and"
        " overhead are in AR steps. Crossing (4, 8]: faster than AR at batch 4, no longer at 8; ≈ is interpolated."
    )


def drafter_table(rows: Iterable[Row]) -> DrafterTable:
    """The table of a run that has several drafters."""
    chosen = [(one, point) for one in series_of(rows) if not one.control and (point := _smallest(one)) is not None]
    if len({one.drafter for one, _ in chosen}) < 2:
        chosen = []
    names = sorted({name for _, point in chosen for name in _by_category(point)})
    by_category = [(one, point) for one, point in chosen if _by_category(point)]
    return DrafterTable(
        HEADER,
        tuple(_line(one, point) for one, point in chosen),
        ("drafter", "depth", "batch", *(read.plain(name) for name in names)),
        tuple((*_place(one, point), *_categories(point, names)) for one, point in by_category),
        tuple(
            (heading, d.unit, d.formula, d.meaning) for heading, name in _COLUMNS.items() for d in [DEFINITIONS[name]]
        ),
    )


def _smallest(one: Series) -> Point | None:
    """The cell of the smallest batch that was measured; a cell without a speedup only where there is no other."""
    ranked = sorted(one.points, key=lambda point: (not point.ok, not point.has_diagnostics, point.batch_size))
    return ranked[0] if ranked else None


def _place(one: Series, point: Point) -> tuple[str, str, str]:
    return one.drafter_label, str(one.depth), str(point.batch_size)


def _line(one: Series, point: Point) -> tuple[str, ...]:
    meaning = speedup_cell(point).meaning
    return (
        *_place(one, point),
        read.compact(point.metric("drafter_params")),
        read.significant(point.metric("drafter_step_bytes"), "B"),
        positions_text(read.metric_list(point.row, "acceptance_at")),
        read.fixed(point.metric("tokens_per_step")),
        read.fixed(_draft_cost(point)),
        read.fixed(point.metric("draft_cost_ratio_roof")),
        read.fixed(point.metric("implied_overhead")),
        speedup_text(point.row),
        _VERDICTS.get(meaning, "no speedup" if point.ok else point.status),
        one.crossing.describe(),
    )


def _draft_cost(point: Point) -> float | None:
    """draft_cost_ratio; rows that are older than the metric have the times that it is made of."""
    if "draft_cost_ratio" in read.section(point.row, "metrics"):
        return point.metric("draft_cost_ratio")
    known = {name: point.metric(name) for name in ("num_drafts", "draft_s", "ar_step_s")}
    return read.number(derived_metrics(known)["draft_cost_ratio"])


def positions_text(rates: Sequence[float | None]) -> str:
    """ ".62 .41 .27", an ellipsis after the first MAX_POSITIONS."""
    shown = [read.share(rate) for rate in rates[:MAX_POSITIONS]]
    return " ".join([*shown, "…"] if len(rates) > MAX_POSITIONS else shown) or DASH


def _by_category(point: Point) -> dict[str, float]:
    """Accepted tokens over drafted depth; older rows of chains have it under the name of acceptance_rate alone."""
    found = read.section(read.section(point.row, "metrics"), "by_category")
    rates = {}
    for name in found:
        values = read.section(found, name)
        rate = read.number(values.get("depth_acceptance_rate", values.get("acceptance_rate")))
        if rate is not None:
            rates[str(name)] = rate
    return rates


def _categories(point: Point, names: Sequence[str]) -> tuple[str, ...]:
    rates = _by_category(point)
    return tuple(read.share(rates.get(name)) for name in names)
