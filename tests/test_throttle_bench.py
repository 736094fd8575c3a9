"""`depth: auto` in a measured case: step times from its own warm-up, what the row says, nothing kept for later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench_tools import STEP_S, blocks, measured, one_case, one_thread, tiny_target, wide, with_clock

from specbench.bench import throttled
from specbench.bench.measure import Outcome
from specbench.bench.sweep import run_sweep
from specbench.definitions import DEFINITIONS
from specbench.engine.decode import Engine
from specbench.errors import InputError
from specbench.roofline.throttle import FixedDepth, MeasuredSteps
from specbench.scenario.cases import Case

FORCED = {"kind": "forced", "rates": [0.7, 0.5, 0.4, 0.2], "max_depth": 4}
SLOPED = (1.0, 1.25, 1.5, 1.8, 2.2)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wide(monkeypatch)
    with one_thread():
        yield


def auto_case(batch_size: int = 2, drafter: dict[str, Any] | None = None, **workload: Any) -> Case:
    given = {"num_prompts": 6, "output_len": 40} | workload
    return one_case(drafter or FORCED, "auto", batch_size, workload=given)  # type: ignore[arg-type]


def set_times(monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...] = SLOPED) -> None:
    monkeypatch.setattr(throttled, "measure_steps", lambda engine, _: MeasuredSteps(seconds, engine.batch_size))


def chosen(outcome: Outcome) -> tuple[Any, ...]:
    names = ("step_depth_share", "num_draft_tokens", "num_accepted_tokens", "num_steps", "step_depth_mean")
    return tuple(outcome.metrics[name] for name in names)


def test_a_row_tells_which_depths_were_chosen_and_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch)
    outcome = measured(auto_case(), blocks(3))
    assert outcome.status == "ok", outcome.reason
    assert outcome.conditions["depth_model"] == "step times measured in warm-up at batch 2"
    assert outcome.conditions["output_check"] == "identical"
    share = outcome.metrics["step_depth_share"]
    assert len(share) == 5
    assert sum(share) == pytest.approx(1.0)
    assert sum(one > 0 for one in share) >= 2, "it never moved"
    assert outcome.metrics["step_depth_mean"] == pytest.approx(sum(i * one for i, one in enumerate(share)))
    assert outcome.metrics["depth_step_seconds"] == list(SLOPED)
    assert {"step_depth_mean", "step_depth_share", "depth_step_seconds"} <= set(DEFINITIONS)


def test_a_fixed_case_has_none_of_it() -> None:
    outcome = measured(one_case(FORCED | {"max_depth": None}, 3, workload={"num_prompts": 2, "output_len": 8}))
    assert "step_depth_share" not in outcome.metrics
    assert "depth_model" not in outcome.conditions


def test_a_cell_chooses_the_same_depths_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 56: cells A, B and B alone: same draft counts."""
    set_times(monkeypatch)
    first, second = auto_case(3, {"kind": "forced", "rates": [0.05] * 4, "max_depth": 4}), auto_case(2)
    target = tiny_target(first)
    before = measured(first, blocks(3), target)
    after = measured(second, blocks(3), target)
    assert chosen(before) != chosen(after)
    assert chosen(after) == chosen(measured(second, blocks(3)))


def test_where_drafting_costs_too_much_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, (1.0, 9.0, 9.0, 9.0, 9.0))
    outcome = measured(auto_case(), blocks(2))
    assert outcome.metrics["step_depth_share"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert outcome.metrics["num_draft_tokens"] == 0
    assert outcome.status == "ok"


def test_step_times_are_measured_for_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock whose every reading is a tick later all depths cost the same, so the deepest is best."""
    with_clock(monkeypatch)
    outcome = measured(auto_case(drafter={"kind": "oracle", "max_depth": 3}), blocks(2))
    assert outcome.metrics["depth_step_seconds"] == pytest.approx([STEP_S] * 4)
    assert outcome.metrics["step_depth_share"][3] == 1.0


def test_measuring_plays_each_depth_twice_and_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    run = Engine.run

    def watched(self: Engine, *args: Any) -> Any:
        if isinstance(self.policy, FixedDepth):
            played.append(self.policy.levels)
        return run(self, *args)

    monkeypatch.setattr(Engine, "run", watched)
    outcome = measured(auto_case(drafter={"kind": "oracle", "max_depth": 2}), blocks(2))
    assert played == [0, 0, 1, 2, 2, 1, 0]
    assert all(seconds > 0 for seconds in outcome.metrics["depth_step_seconds"])
    assert outcome.status == "ok", outcome.reason


def test_outputs_of_one_token_leave_nothing_to_choose() -> None:
    with pytest.raises(InputError, match="no step is left"):
        measured(auto_case(output_len=1), blocks(2))


def test_the_rows_of_a_sweep_hold_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_tools import constant_device, make_scenario

    from specbench.report.tables_throttle import regrets
    from specbench.scenario.cases import expand

    constant_device(monkeypatch)
    set_times(monkeypatch, (1.0, 1.1, 1.2))
    scenario = make_scenario(
        drafters=[{"kind": "forced", "rates": [0.7, 0.5]}],
        sweep={"batch_size": 2, "depth": [1, 2, "auto"]},
        workload={"num_prompts": 4, "output_len": 16},
    )
    result = run_sweep(scenario, expand(scenario), tmp_path)
    assert [row.status for row in result.rows] == ["ok"] * 3
    assert [row.axes["depth_policy"] for row in result.rows] == ["fixed", "fixed", "auto"]
    (one,) = regrets([row.model_dump() for row in result.rows])
    assert one.depths == (0, 1, 2)
    assert one.mean_depth is not None
