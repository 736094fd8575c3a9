"""Fitting: known engines are found again, held-out cells are predicted, and a cell is never both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specbench.errors import InputError
from specbench.roofline.draft_cost import DraftShape, drafter_shape
from specbench.roofline.fit import (
    MOST_CELLS,
    MeasuredCell,
    fit_efficiency,
    pick_cells,
    predicted_times,
    step_error,
)
from specbench.roofline.model import Roof
from specbench.roofline.shapes import named_shape
from specbench.roofline.step_model import IDEAL, Efficiency, StepModel, StepTimes

TARGET = named_shape("smollm2-135m")
TRUTH = Efficiency(
    compute=0.62, memory=0.8, pass_s=2e-4, step_s=1.5e-4, token_s=3e-4, draft_pass_s=4e-4, draft_token_s=2e-4,
    lookup_s=9e-5, request_s=2e-5, sampled_token_s=2e-3, overlap=3.0, sampled_draft_token_s=5e-4,
)  # fmt: skip
ENGINE = StepModel(TARGET, Roof(140e9, 20e9), TRUTH)
DRAFTERS: dict[str, DraftShape | None] = {
    "ngram": DraftShape("ngram"),
    "oracle": DraftShape("oracle"),
    "early_exit": DraftShape("early_exit", num_layers=8),
    "eagle": drafter_shape("eagle", TARGET),
}


def cell(name: str, batch: int, depth: int, sampled: bool = False, noise: float = 0.0, seed: int = 0) -> MeasuredCell:
    draft = DRAFTERS[name]
    stub = StepTimes(1.0, 1.0, 1.0, 1.0)
    bare = MeasuredCell(
        f"{name} {depth} {batch} {sampled}", batch, 140.0, depth, draft, depth * 0.9, 0.0, sampled, stub, stub
    )
    ar, step = predicted_times(ENGINE, bare)
    shake = np.exp(np.random.default_rng([seed, batch, depth, len(name)]).normal(0, noise, 8))

    def shaken(times: StepTimes, by: np.ndarray) -> StepTimes:
        return StepTimes(
            *(
                value * float(k)
                for value, k in zip((times.draft_s, times.verify_s, times.sample_s, times.host_s), by, strict=True)
            )
        )

    return replace(bare, ar=shaken(ar, shake[:4]), step=shaken(step, shake[4:]))


def sweep(noise: float = 0.0) -> list[MeasuredCell]:
    return [
        cell(name, batch, depth, sampled, noise)
        for sampled in (False, True)
        for batch in (1, 2, 4, 8, 16)
        for name, depths in (("ngram", (2, 4, 8)), ("oracle", (1, 3, 5)), ("early_exit", (2,)), ("eagle", (1, 3, 5)))
        for depth in depths
    ]


def test_cells_are_chosen_by_their_axes_alone() -> None:
    cells = sweep()
    chosen = pick_cells(cells)
    assert len(chosen) == len(set(chosen)) == MOST_CELLS
    slower = [replace(one, step=StepTimes(9.0, 9.0, 9.0, 9.0)) for one in cells]
    assert pick_cells(slower) == chosen
    picked = [cells[index] for index in chosen]
    assert {one.batch for one in picked} >= {1, 16}
    assert {one.sampled for one in picked} == {False, True}
    assert {one.draft.kind for one in picked if one.draft} >= {"ngram", "eagle", "early_exit"}


def test_equal_cells_are_chosen_once() -> None:
    same = [cell("ngram", 1, 2)] * 5
    assert len(pick_cells(same)) == 1
    assert pick_cells([]) == []
    with pytest.raises(InputError):
        pick_cells(sweep(), 1)


def test_a_known_engine_is_found_again_and_predicts_the_rest() -> None:
    cells = sweep()
    chosen = pick_cells(cells)
    fit = fit_efficiency(StepModel(TARGET, ENGINE.roof, IDEAL), [cells[index] for index in chosen])
    model = StepModel(TARGET, ENGINE.roof, fit.efficiency)
    unseen = [abs(step_error(model, one)) for index, one in enumerate(cells) if index not in chosen]
    assert len(unseen) == len(cells) - MOST_CELLS
    assert max(unseen) < 0.06
    assert fit.efficiency.memory == pytest.approx(TRUTH.memory, rel=0.1)
    assert fit.efficiency.compute == pytest.approx(TRUTH.compute, rel=0.15)
    assert fit.efficiency.token_s == pytest.approx(TRUTH.token_s, rel=0.1)
    assert fit.efficiency.sampled_token_s == pytest.approx(TRUTH.sampled_token_s, rel=0.1)
    assert fit.efficiency.lookup_s == pytest.approx(TRUTH.lookup_s, rel=0.05)


def test_noise_shows_in_the_leave_one_out_error() -> None:
    def error(noise: float) -> float:
        cells = sweep(noise)
        model = StepModel(TARGET, ENGINE.roof, IDEAL)
        found = fit_efficiency(model, [cells[index] for index in pick_cells(cells)])
        assert len(found.left_out) == MOST_CELLS
        assert found.left_out_error is not None
        assert found.worst_left_out is not None
        assert abs(found.worst_left_out.error) >= found.left_out_error
        return found.left_out_error

    assert error(0.0) < 0.1 < error(0.5)


def test_a_left_out_cell_takes_no_part_in_its_own_prediction() -> None:
    cells = [one for index, one in enumerate(sweep(0.3)) if index in pick_cells(sweep(0.3))]
    model = StepModel(TARGET, ENGINE.roof, IDEAL)
    found = fit_efficiency(model, cells)
    without = fit_efficiency(model, cells[1:]).efficiency
    assert found.left_out[0].error == pytest.approx(step_error(model.with_efficiency(without), cells[0]))
    assert found.left_out[0].error != pytest.approx(found.errors[0].error)


def test_too_few_or_too_many_cells_are_refused() -> None:
    model = StepModel(TARGET, ENGINE.roof, IDEAL)
    for count in (1, 9):
        with pytest.raises(InputError, match=f"{count} cells"):
            fit_efficiency(model, sweep()[:count])
    dead = replace(cell("ngram", 1, 2), ar=StepTimes(0.0, 0.0, 0.0, 0.0))
    with pytest.raises(InputError, match="takes time"):
        fit_efficiency(model, [dead, cell("ngram", 2, 2)])


def test_two_cells_make_a_fit_without_leave_one_out() -> None:
    model = StepModel(TARGET, ENGINE.roof, IDEAL)
    found = fit_efficiency(model, [cell("ngram", 1, 2), cell("ngram", 16, 8)], overlap=False)
    assert found.left_out == ()
    assert found.left_out_error is None
    assert found.efficiency.to_dict()["overlap"] is None
