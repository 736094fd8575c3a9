"""The staircase answers for what was measured, follows its steps, and never guesses beyond them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline.shapes import named_shape
from specbench.roofline.staircase import Staircase, StairPoint, linears_s, model_linears


def row(m: int, n: int, k: int, time_s: Any, dtype: str = "bf16") -> dict[str, Any]:
    return {"m": m, "n": n, "k": k, "dtype": dtype, "time_s": time_s, "reason": None}


STEP = Staircase.from_rows([row(1, 8, 4, 1.0), row(16, 8, 4, 1.0), row(17, 8, 4, 2.0), row(32, 8, 4, 2.0)])


@pytest.mark.parametrize(("m", "seconds"), [(1, 1.0), (9, 1.0), (16, 1.0), (17, 2.0), (20, 2.0), (32, 2.0)])
def test_a_step_stays_a_step(m: int, seconds: float) -> None:
    assert STEP.time_s(m, 8, 4) == seconds


def test_a_slope_between_two_rows() -> None:
    line = Staircase("fp32", (StairPoint(64, 8, 4, 1.0), StairPoint(128, 8, 4, 3.0)))
    assert line.time_s(96, 8, 4) == 2.0


@pytest.mark.parametrize(("m", "n", "k"), [(33, 8, 4), (0, 8, 4), (16, 8, 5), (16, 8, 3), (16, 1, 1)])
def test_nothing_is_extrapolated(m: int, n: int, k: int) -> None:
    assert STEP.time_s(m, n, k) is None


def test_other_shapes_are_interpolated_in_weight_bytes() -> None:
    stairs = Staircase(
        "bf16", tuple(StairPoint(m, n, k, n * k * 1e-3) for n, k in ((10, 10), (30, 10)) for m in (1, 4))
    )
    assert stairs.time_s(2, 20, 10) == pytest.approx(0.2)
    assert stairs.time_s(2, 10, 20) == pytest.approx(0.2)
    assert stairs.shapes == ((10, 10), (30, 10))
    twins = Staircase("bf16", (StairPoint(1, 2, 6, 1.0), StairPoint(1, 6, 2, 3.0)))
    assert twins.time_s(1, 3, 4) == 2.0, "two shapes of one size are averaged for a third"
    assert twins.time_s(1, 2, 6) == 1.0, "a measured shape answers for itself"


def test_a_shape_that_lacks_the_row_is_not_replaced_by_its_neighbour() -> None:
    stairs = Staircase("bf16", (StairPoint(1, 10, 10, 1.0), StairPoint(1, 30, 10, 3.0), StairPoint(8, 10, 10, 1.0)))
    assert stairs.time_s(4, 10, 10) == 1.0
    assert stairs.time_s(4, 20, 10) is None


def test_rows_without_a_time_are_left_out_and_dtypes_are_chosen() -> None:
    rows = [row(1, 8, 4, 1.0), row(2, 8, 4, None), row(1, 8, 4, 7.0, "fp32")]
    with pytest.raises(InputError, match="several dtypes: bf16, fp32"):
        Staircase.from_rows(rows)
    assert Staircase.from_rows(rows, "fp32").time_s(1, 8, 4) == 7.0
    assert len(Staircase.from_rows(rows, "bf16").points) == 1
    assert Staircase.from_rows([]).time_s(1, 8, 4) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "fast", True])
def test_an_absurd_time_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="roofline --measure"):
        Staircase.from_rows([row(1, 8, 4, bad)])


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match="'k'"):
        Staircase.from_rows([{"m": 1, "n": 2, "dtype": "bf16", "time_s": 1.0}])
    with pytest.raises(InputError, match="no rows"):
        StairPoint(0, 1, 1, 1.0)


@given(st.dictionaries(st.integers(1, 512), st.floats(1e-6, 1.0), min_size=1, max_size=12), st.integers(1, 512))
def test_a_time_lies_between_its_measured_neighbours(times: dict[int, float], m: int) -> None:
    stairs = Staircase("bf16", tuple(StairPoint(row, 8, 4, time) for row, time in times.items()))
    found = stairs.time_s(m, 8, 4)
    if m < min(times) or m > max(times):
        assert found is None
    else:
        low, high = max(r for r in times if r <= m), min(r for r in times if r >= m)
        slack = 1e-12
        assert found is not None
        assert min(times[low], times[high]) - slack <= found <= max(times[low], times[high]) + slack


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "qwen3-8b"])
def test_the_linear_maps_of_a_model_are_all_of_its_weights(name: str) -> None:
    spec = named_shape(name)
    linears = model_linears(spec)
    assert (linears[-1].name, linears[-1].n, linears[-1].k) == ("lm_head", spec.vocab_size, spec.hidden_size)
    assert sum(one.n * one.k * one.count for one in linears[:-1]) == spec.num_linear_params
    assert linears[-1].n * linears[-1].k == spec.num_head_params


def test_a_pass_is_the_sum_of_its_linear_maps() -> None:
    spec = named_shape("smollm2-135m")
    ten = tuple(StairPoint(m, one.n, one.k, 1e-3 * m) for one in model_linears(spec) for m in (1, 8))
    stairs = Staircase("bf16", ten)
    assert linears_s(stairs, spec, 4) == pytest.approx(4e-3 * (4 * 30 + 1))
    assert linears_s(stairs, spec, 4, head_rows=1) == pytest.approx(4e-3 * 4 * 30 + 1e-3)
    assert linears_s(stairs, spec, 4, head_rows=0) == pytest.approx(4e-3 * 4 * 30)
    assert linears_s(stairs, spec, 9) is None
    assert linears_s(stairs, spec, 4, head_rows=9) is None
