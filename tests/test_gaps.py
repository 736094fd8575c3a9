"""Predicted against measured: the parts of a gap add up to it, and the one that made it names it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.roofline.breakeven import find_crossing
from specbench.roofline.gaps import NAMES, Comparison, compare_rows, within_one_step

Parts = tuple[float, float, float, float]


def row(
    batch: int = 1,
    *,
    drafter: str = "eagle",
    depth: int = 3,
    tokens: float = 2.0,
    parts: Parts = (1e-3, 11e-3, 1e-3, 1e-3),
    ar: float = 10e-3,
    spread: float | None = 0.0,
    **axes: Any,
) -> dict[str, Any]:
    draft, verify, sample, _ = parts
    step = sum(parts)
    speedup = tokens * ar / step
    rate = batch * tokens / step
    axes = {"drafter": drafter, "drafter_kind": drafter, "depth": depth, "batch_size": batch, "temperature": 0.0} | axes
    bounds = {"speedup_low": None, "speedup_high": None}
    if spread is not None:
        bounds = {"speedup_low": speedup * (1 - spread), "speedup_high": speedup * (1 + spread)}
    return {
        "case_hash": "/".join(str(value) for value in axes.values()),
        "case_name": f"{drafter} {depth} {batch}",
        "status": "ok",
        "axes": axes,
        "metrics": {
            "speedup": speedup, **bounds, "tokens_per_step": tokens, "output_tokens_per_s": rate,
            "step_s": step, "draft_s": draft, "verify_s": verify, "sample_s": sample,
            "ar_step_s": ar, "ar_draft_s": 0.0, "ar_verify_s": 0.9 * ar, "ar_sample_s": 0.1 * ar,
        },
    }  # fmt: skip


TIMES = st.floats(1e-4, 1e-1)
CELLS = st.tuples(st.floats(1, 8), st.tuples(TIMES, TIMES, TIMES, TIMES), TIMES)


@given(CELLS, CELLS)
def test_the_parts_add_up_to_the_gap(measured: Any, predicted: Any) -> None:
    (tokens_m, parts_m, ar_m), (tokens_p, parts_p, ar_p) = measured, predicted
    found = compare_rows(
        [row(tokens=tokens_m, parts=parts_m, ar=ar_m)], [row(tokens=tokens_p, parts=parts_p, ar=ar_p)]
    ).cells[0]
    assert sum(found.terms.values()) == pytest.approx(math.log1p(found.gap), abs=1e-9)
    assert found.terms["acceptance"] == pytest.approx(math.log(tokens_m / tokens_p), abs=1e-9)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"parts": (3e-3, 11e-3, 1e-3, 1e-3)}, "draft"),
        ({"parts": (1e-3, 15e-3, 1e-3, 1e-3)}, "verify"),
        ({"parts": (1e-3, 11e-3, 4e-3, 1e-3)}, "sample"),
        ({"parts": (1e-3, 11e-3, 1e-3, 4e-3)}, "host"),
        ({"tokens": 1.4}, "acceptance"),
    ],
)
def test_the_term_that_ate_the_gain_is_named(change: dict[str, Any], name: str) -> None:
    found = compare_rows([row(**change)], [row()]).cells[0]
    assert found.gap < 0
    assert found.name == NAMES[name]
    better = compare_rows([row()], [row(**change)]).cells[0]
    assert better.gap > 0
    assert better.name == NAMES[name]


def test_small_gaps_have_no_name() -> None:
    assert compare_rows([row(tokens=2.01)], [row()]).cells[0].name == "small"


def test_what_a_measured_step_spent_beyond_an_ar_step() -> None:
    found = compare_rows([row(parts=(6e-3, 11e-3, 1e-3, 1e-3))], [row()]).cells[0]
    assert found.ate_most == NAMES["draft"]
    assert found.eaten["draft"] == pytest.approx(0.6)
    assert found.eaten["verify"] == pytest.approx(1.1 - 0.9)


def test_only_cells_that_both_sides_have_are_compared() -> None:
    skipped = row(2) | {"status": "skipped", "metrics": None}
    found = compare_rows([row(1), skipped], [row(1), row(2), row(4)])
    assert [one.batch_size for one in found.cells] == [1]
    assert found.unmatched == 2
    assert compare_rows([], []).cells == ()


def test_an_ar_cell_has_no_gap() -> None:
    ar = row(drafter="none", depth=0)
    ar["metrics"] |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    found = compare_rows([ar], [ar])
    assert (found.cells, found.series, found.depths) == ((), (), ())


def cost(verify_ms: float) -> Parts:
    return (1e-3, verify_ms * 1e-3, 1e-3, 1e-3)


def test_a_series_tells_both_crossings_and_whether_they_are_near() -> None:
    seen = [row(batch, parts=cost(ms)) for batch, ms in ((1, 11), (2, 12), (4, 18), (8, 25))]
    told = [row(batch, parts=cost(ms), spread=None) for batch, ms in ((1, 11), (2, 12), (4, 14), (8, 25))]
    found = compare_rows(seen, told)
    (one,) = found.series
    assert (one.measured.low_batch, one.measured.high_batch) == (2, 4)
    assert (one.predicted.low_batch, one.predicted.high_batch) == (4, 8)
    assert one.within_one_step is True
    assert one.name == NAMES["verify"]
    assert one.label == "eagle · depth 3"
    hot = [row(batch, temperature=1.0) for batch in (1, 2)]
    both = compare_rows([*seen, *hot], [*told, *hot])
    assert [one.context for one in both.series] == ["T 0", "T 1"]


@pytest.mark.parametrize(
    ("told", "seen", "near"),
    [
        ([1.5, 1.2, 0.9, 0.8], [1.5, 0.9, 0.8, 0.7], True),
        ([1.5, 1.2, 1.1, 0.9], [1.5, 0.9, 0.8, 0.7], False),
        ([1.5, 1.2, 1.1, 1.05], [1.5, 1.2, 1.1, 0.9], True),
        ([1.5, 1.2, 1.1, 1.05], [0.9, 0.8, 0.7, 0.6], False),
        ([0.9, 0.8, 0.7, 0.6], [1.2, 0.9, 0.8, 0.7], True),
        ([0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6], True),
    ],
)
def test_within_one_step_of_the_grid(told: list[float], seen: list[float], near: bool) -> None:
    grid = [1, 2, 4, 8]
    assert within_one_step(grid, find_crossing(grid, told), find_crossing(grid, seen)) is near
    assert within_one_step(grid, find_crossing(grid, [None] * 4), find_crossing(grid, seen)) is None


def test_fault_10_the_best_depth_is_ranked_by_speed() -> None:
    """Always 2 accepted: deeper drafts only cost, whatever their acceptance."""
    seen = [row(depth=depth, tokens=3.0, parts=cost(10 + depth)) for depth in (2, 4, 8)]
    told = [row(depth=depth, tokens=3.0 + depth / 10, parts=cost(10.5), spread=None) for depth in (2, 4, 8)]
    (one,) = compare_rows(seen, told).depths
    assert (one.predicted, one.measured) == (8, 2)
    assert one.lost == pytest.approx(1 - (3 / 21) / (3 / 15))


def test_no_speculation_is_a_depth_too() -> None:
    seen = [row(depth=3, tokens=1.1)]
    (one,) = compare_rows(seen, [row(depth=3, tokens=2.0, spread=None)]).depths
    assert (one.predicted, one.measured) == (3, 0)
    assert one.lost == pytest.approx(1 - 1.1 * 10 / 14)


def test_a_comparison_survives_json() -> None:
    seen = [row(batch, parts=cost(ms)) for batch, ms in ((1, 11), (2, 12), (4, 18), (8, 25))]
    found = compare_rows(seen, [row(batch, spread=None) for batch in (1, 2, 4, 8)])
    again = Comparison.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again == found
    assert again.cells[0].gap == found.cells[0].gap
