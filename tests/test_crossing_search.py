"""The search for the crossing: few cells, a bracket that holds the truth, noise that decides nothing, and resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_tools import NoTarget, constant_device, make_scenario, some_outcome

from specbench.bench.crossings import thorough
from specbench.bench.measure import Outcome
from specbench.bench.sweep import SweepResult, run_sweep
from specbench.errors import InputError
from specbench.report.series import crossing_text, series_of
from specbench.roofline.crossing_search import MAX_CELLS, Side, next_batch, side_of
from specbench.scenario.cases import Case, expand
from specbench.scenario.schema import MeasureConfig
from specbench.store import read_rows

Curve = Callable[[int], Side]


def searched(curve: Curve, low: int = 1, high: int = 256, within: float = 0.25) -> dict[int, Side]:
    sides: dict[int, Side] = {}
    while (batch := next_batch(sides, low, high, within)) is not None:
        assert low <= batch <= high
        assert batch not in sides, "nothing is measured twice"
        sides[batch] = curve(batch)
        assert len(sides) <= MAX_CELLS
    return sides


def falls_at(crossing: float) -> Curve:
    return lambda batch: "win" if batch < crossing else "loss"


def bracket(sides: dict[int, Side]) -> tuple[int, int]:
    win = max(batch for batch in sides if sides[batch] == "win")
    return win, min(batch for batch in sides if sides[batch] == "loss" and batch > win)


def test_every_crossing_is_bracketed_in_a_few_cells() -> None:
    for crossing in range(2, 257):
        sides = searched(falls_at(crossing))
        win, loss = bracket(sides)
        assert win < crossing <= loss
        assert loss <= 1.25 * win or loss == win + 1
        assert len(sides) <= 2 + math.ceil(math.log2(math.log2(256))) + 4, (crossing, sorted(sides))


def test_powers_of_two_come_first() -> None:
    order = list(searched(falls_at(10)))
    assert order == [1, 256, 16, 4, 8, 11, 9]


@pytest.mark.parametrize(("low", "high", "within"), [(1, 2, 0.25), (3, 100, 0.25), (1, 4096, 0.05), (5, 6, 1.0)])
def test_other_ranges(low: int, high: int, within: float) -> None:
    for crossing in range(low + 1, high + 1, max(1, high // 97)):
        win, loss = bracket(searched(falls_at(crossing), low, high, within))
        assert win < crossing <= loss
        assert loss <= (1 + within) * win or loss == win + 1


def test_nothing_falls_or_all_has_fallen() -> None:
    assert searched(lambda batch: "win") == {1: "win", 256: "win"}
    assert searched(lambda batch: "loss") == {1: "loss", 256: "loss", 16: "loss"}


def test_a_curve_that_rises_first_is_not_taken_for_one_that_never_gains() -> None:
    """A mixture of experts: bad at batch 1, best in the middle, bad again."""
    sides = searched(lambda batch: "win" if 6 <= batch < 90 else "loss")
    win, loss = bracket(sides)
    assert win < 90 <= loss
    assert loss <= 1.25 * win


def test_open_batches_decide_nothing() -> None:
    """Between 12 and 20 nothing can be told: the search goes on towards the nearest win and the nearest loss."""
    sides = searched(lambda batch: "unclear" if 12 <= batch <= 20 else falls_at(16)(batch))
    win, loss = bracket(sides)
    opened = [batch for batch in sides if sides[batch] == "unclear"]
    assert opened
    assert win < 12
    assert min(opened) <= 1.25 * win or min(opened) == win + 1
    assert loss > 20
    assert loss <= 1.25 * max(opened) or loss == max(opened) + 1


def test_what_can_not_be_measured_bounds_the_search() -> None:
    sides = searched(lambda batch: "blocked" if batch > 100 else "win")
    assert max(b for b in sides if sides[b] == "win") >= 64
    sides = searched(lambda batch: "blocked" if batch > 100 else falls_at(40)(batch))
    win, loss = bracket(sides)
    assert win < 40 <= loss <= 100
    assert searched(lambda batch: "blocked") == {1: "blocked", 256: "blocked"}


def test_an_open_start_and_an_open_end() -> None:
    sides = searched(lambda batch: "unclear" if batch < 5 else "loss")
    assert min(b for b in sides if sides[b] == "loss") == 5
    sides = searched(lambda batch: "win" if batch < 100 else "unclear")
    assert max(b for b in sides if sides[b] == "win") >= 100 / 1.25
    assert len(searched(lambda batch: "unclear")) <= 3


@pytest.mark.parametrize(
    ("cell", "side"),
    [
        ((None, None, None), "blocked"),
        ((1.2, 1.1, 1.3), "win"),
        ((0.8, 0.7, 0.9), "loss"),
        ((1.2, 1.0, 1.3), "unclear"),
        ((0.8, 0.7, 1.0), "unclear"),
        ((1.2, None, None), "unclear"),
    ],
)
def test_a_side_is_a_whole_interval(cell: tuple[float | None, float | None, float | None], side: Side) -> None:
    assert side_of(*cell) == side


@pytest.mark.parametrize("limits", [(0, 4, 0.25), (4, 4, 0.25), (1, 4, 0.0)])
def test_ranges_that_can_not_be_are_refused(limits: tuple[int, int, float]) -> None:
    with pytest.raises(InputError):
        next_batch({}, *limits)


# ---- in a sweep

SEARCH = {"sweep": {"batch_size": {"search": "crossing", "max": 64}, "depth": [1, 2]}}


class KnownCurve:
    """Stands for measure_case: the speedup is 1.5 · B^(-1/depth-dependent slope), its interval narrows with blocks."""

    def __init__(self, crossings: dict[int, float], noise: float = 0.02) -> None:
        self.crossings, self.noise = crossings, noise
        self.calls: list[tuple[int, int, int]] = []
        self.errors: dict[int, Exception] = {}

    def __call__(self, target: Any, case: Case, settings: MeasureConfig, *_: Any, **__: Any) -> Outcome:
        batch, blocks = case.workload.batch_size, settings.blocks.min
        self.calls.append((case.depth, batch, blocks))
        if batch in self.errors:
            raise self.errors[batch]
        speedup = (self.crossings[case.depth] / batch) ** 0.5
        half = self.noise / blocks**0.5
        bounds = {"speedup_low": speedup - half, "speedup_high": speedup + half, "num_blocks": blocks}
        return some_outcome(speedup=speedup, **bounds)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    constant_device(monkeypatch)


def sweep(directory: Path, measure: KnownCurve, **changes: Any) -> SweepResult:
    scenario = make_scenario(**(SEARCH | changes))
    return run_sweep(scenario, expand(scenario), directory, measure=measure, open_target=NoTarget.open)


def test_each_series_is_searched_and_its_bracket_is_in_the_verdict(tmp_path: Path) -> None:
    measure = KnownCurve({1: 21.5, 2: 5.5})
    result = sweep(tmp_path, measure)
    assert len(expand(make_scenario(**SEARCH))) == 2, "one case begins each series"
    by_depth = {depth: [b for d, b, _ in measure.calls if d == depth] for depth in (1, 2)}
    assert all(len(batches) <= 9 for batches in by_depth.values())
    assert by_depth[1] != by_depth[2]
    texts = {one.depth: crossing_text(one) for one in series_of([row.model_dump() for row in result.rows])}
    assert texts[1].startswith("between batch 19 and 23")
    assert texts[2].startswith("between batch 5 and 6")
    assert [row.axes["batch_size"] for row in result.rows[: len(by_depth[1])]] == sorted(by_depth[1])
    assert all(row.status == "ok" for row in result.rows)


def test_an_interrupted_search_goes_on_where_it_stood(tmp_path: Path) -> None:
    class Stops(KnownCurve):
        def __call__(self, *args: Any, **options: Any) -> Outcome:
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().__call__(*args, **options)

    first = Stops({1: 21.5, 2: 5.5})
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, first)
    assert len(read_rows(tmp_path)) == 3
    rest, whole = KnownCurve({1: 21.5, 2: 5.5}), KnownCurve({1: 21.5, 2: 5.5})
    resumed = sweep(tmp_path, rest)
    straight = sweep(tmp_path / "again", whole)
    assert first.calls + rest.calls == whole.calls
    assert [row.key for row in resumed.rows] == [row.key for row in straight.rows]
    silent = KnownCurve({1: 21.5, 2: 5.5})
    assert [row.key for row in sweep(tmp_path, silent).rows] == [row.key for row in straight.rows]
    assert silent.calls == []


def test_an_open_cell_is_measured_again_with_more_blocks(tmp_path: Path) -> None:
    """At batch 16 the speedup is 1.01 ± 0.0141 with 2 blocks, ± 0.0115 with 3: open, then still open; at noise 0.016
    three blocks decide."""
    changes = {"sweep": {"batch_size": {"search": "crossing", "max": 64}, "depth": 1}}
    measure = KnownCurve({1: 16.33}, noise=0.016)
    result = sweep(tmp_path, measure, **changes)
    at_16 = [blocks for _, batch, blocks in measure.calls if batch == 16]
    assert at_16 == [2, 3]
    row = next(row for row in result.rows if row.axes["batch_size"] == 16)
    assert row.metrics is not None
    assert row.metrics["num_blocks"] == 3
    assert sum(one.axes["batch_size"] == 16 for one in read_rows(tmp_path)) == 2
    again = KnownCurve({1: 16.33}, noise=0.016)
    sweep(tmp_path, again, **changes)
    assert again.calls == [], "the second row counts"


def test_a_cell_that_stays_open_is_reported_as_open(tmp_path: Path) -> None:
    changes = {"sweep": {"batch_size": {"search": "crossing", "max": 64}, "depth": 1}}
    measure = KnownCurve({1: 16.0}, noise=0.3)
    result = sweep(tmp_path, measure, **changes)
    asked = [batch for _, batch, _ in measure.calls]
    assert max(asked.count(batch) for batch in asked) == 2, "at most twice"
    (series,) = series_of([row.model_dump() for row in result.rows])
    low, high = series.crossing.interval or (None, None)
    assert low is not None
    assert high is not None
    assert low < 16 < high


def test_a_failed_cell_is_a_row_and_the_search_goes_round_it(tmp_path: Path) -> None:
    measure = KnownCurve({1: 10.5})
    measure.errors = {64: RuntimeError("broken"), 8: RuntimeError("broken")}
    result = sweep(tmp_path, measure, sweep={"batch_size": {"search": "crossing", "max": 64}, "depth": 1})
    failed = [row.axes["batch_size"] for row in result.rows if row.status == "failed"]
    assert 64 in failed
    (series,) = series_of([row.model_dump() for row in result.rows])
    assert series.crossing.kind == "bracket"
    assert (series.crossing.low_batch or 0) < 10.5 < (series.crossing.high_batch or 0)


def test_a_second_measurement_asks_for_more_of_everything() -> None:
    settings = make_scenario(measure={"blocks": {"min": 2, "max": 6}, "budget_s": 10}).measure
    row = some_outcome(speedup=1.01)
    more = thorough(settings, row)  # type: ignore[arg-type]
    assert (more.blocks.min, more.blocks.max, more.budget_s) == (7, 24, 40)
    assert more.target_interval == pytest.approx(0.007)
