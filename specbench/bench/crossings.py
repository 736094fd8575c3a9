"""`batch_size: {search: crossing}`: each series' next batch is bound when the ones before it are known.

Every cell is an ordinary row, reused like any other. A cell whose interval holds 1.0 is measured once more with more
blocks, and the later row counts; if 1.0 is still inside, the row stands as unclear and the search goes on beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench.result_row import ResultRow
from specbench.roofline.crossing_search import MAX_CELLS, Side, next_batch, side_of
from specbench.scenario.cases import Case
from specbench.scenario.schema import MeasureConfig
from specbench.scenario.sweep_schema import CrossingSearch

MORE = 4
"""How many times the blocks and the seconds a second measurement may take."""
LEAST_INTERVAL = 0.002

MeasureCell = Callable[[Case, MeasureConfig], ResultRow]
KnownCell = Callable[[Case], ResultRow | None]


def side_of_row(row: ResultRow) -> Side:
    """What a cell's row says of 1.0."""
    metrics = row.metrics or {}

    def number(name: str) -> float | None:
        value = metrics.get(name)
        return float(value) if isinstance(value, int | float) else None

    return (
        side_of(number("speedup"), number("speedup_low"), number("speedup_high")) if row.status == "ok" else "blocked"
    )


def thorough(settings: MeasureConfig, row: ResultRow) -> MeasureConfig:
    """Settings of a second measurement: more blocks than the first had in any case, and an interval narrow enough to
    tell this speedup from 1.0, if that can be had."""
    blocks = settings.blocks.model_copy(update={"min": settings.blocks.max + 1, "max": MORE * settings.blocks.max})
    speedup = (row.metrics or {}).get("speedup")
    distance = abs(float(speedup) - 1.0) if isinstance(speedup, int | float) else 0.0
    target = min(settings.target_interval, max(LEAST_INTERVAL, 0.7 * distance))
    budget = None if settings.budget_s is None else MORE * settings.budget_s
    return settings.model_copy(update={"blocks": blocks, "target_interval": target, "budget_s": budget})


def was_thorough(settings: MeasureConfig, row: ResultRow) -> bool:
    """Whether a row has more blocks than a first measurement can have."""
    blocks = (row.metrics or {}).get("num_blocks")
    return isinstance(blocks, int | float) and blocks > settings.blocks.max


def most_cells(search: CrossingSearch) -> int:
    """A guess of the cells of one series, for a progress bar."""
    return min(MAX_CELLS, 4 + (search.max // search.min).bit_length())


def search_series(
    first: Case, search: CrossingSearch, settings: MeasureConfig, measure: MeasureCell, known: KnownCell
) -> list[Case]:
    """Search the crossing of the series that `first` belongs to; returns the cases it visited, in order of batch size.

    `known` gives the row of an earlier run; `measure` runs a case and stores its row.
    """
    sides: dict[int, Side] = {}
    while (batch := next_batch(sides, search.min, search.max, search.within_percent / 100)) is not None:
        case = first.at_batch(batch)
        row = known(case) or measure(case, settings)
        if side_of_row(row) == "unclear" and not was_thorough(settings, row):
            row = measure(case, thorough(settings, row))
        sides[batch] = side_of_row(row)
    return [first.at_batch(batch) for batch in sorted(sides)]


def search_all(
    firsts: Sequence[Case], search: CrossingSearch, settings: MeasureConfig, measure: MeasureCell, known: KnownCell
) -> list[Case]:
    """`search_series` for every series."""
    return [case for first in firsts for case in search_series(first, search, settings, measure, known)]
