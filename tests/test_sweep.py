"""A sweep: a row for every case whatever happens, resume, and what a run leaves on disk; fault rows E 56, I
78, I 80."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import (
    NoTarget,
    ScriptedMonitor,
    constant_device,
    make_scenario,
    one_thread,
    some_outcome,
    wide,
)

import specbench
from specbench.bench import plan as plan_module
from specbench.bench import sweep as sweep_module
from specbench.bench.ceilings import MeasuredRoofs, Reading
from specbench.bench.exhausted import is_larger
from specbench.bench.measure import Outcome, measure_case
from specbench.bench.plan import Planner
from specbench.bench.sweep import SweepResult, roofs_in_use, run_sweep
from specbench.errors import CapacityError, InputError, InvalidEnvironmentError
from specbench.metrics import Roof
from specbench.result_row import ResultRow
from specbench.scenario.cases import Case, TargetSpec, expand
from specbench.scenario.schema import Scenario
from specbench.store import MANIFEST_FILE, ROWS_FILE, RowStore, read_manifest, read_rows

THREE = {"sweep": {"batch_size": [1, 2, 4], "depth": 2}}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    constant_device(monkeypatch)


class Measured:
    """Stands for measure_case: keeps the batch sizes it was called with, and raises what it is told to."""

    def __init__(self, errors: dict[int, BaseException] | None = None) -> None:
        self.calls: list[int] = []
        self.errors = errors or {}

    def __call__(self, target: Any, case: Case, *args: Any, **options: Any) -> Outcome:
        batch = case.workload.batch_size
        self.calls.append(batch)
        if batch in self.errors:
            raise self.errors[batch]
        return some_outcome()


class Watched:
    """A watcher that keeps what it is told, and looks at the folder whenever a case begins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reused: int | None = None
        self.on_disk: list[int] = []

    def begin(self, total: int, reused: int) -> None:
        self.total, self.reused = total, reused

    def case(self, case: Case) -> None:
        file = self.directory / ROWS_FILE
        self.on_disk.append(len(file.read_bytes().splitlines()) if file.exists() else 0)

    def tell(self, text: str) -> None: ...

    def done(self, row: ResultRow) -> None:
        assert read_rows(self.directory)[-1] == row, "the row is on disk when it is reported"


def sweep(
    directory: Path,
    scenario: Scenario | None = None,
    measure: Callable[..., Outcome] | None = None,
    cases: list[Case] | None = None,
    **options: Any,
) -> SweepResult:
    scenario = scenario or make_scenario(**THREE)
    options = {"open_target": NoTarget.open} | options
    return run_sweep(scenario, cases or expand(scenario), directory, measure=measure or Measured(), **options)


def statuses(result: SweepResult) -> list[str]:
    return [row.status for row in result.rows]


# ---- A row for every case


def test_a_failing_case_is_a_row_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """I 78: three cells, the second raises."""
    measure = Measured({2: RuntimeError("CUDA error: device-side assert")})
    result = sweep(tmp_path, measure=measure)
    assert statuses(result) == ["ok", "failed", "ok"]
    assert measure.calls == [1, 2, 4]
    assert not result.none_succeeded
    failed = result.rows[1]
    assert failed.metrics is None
    assert failed.samples == {"blocks": [], "prompts": []}
    assert failed.reason is not None
    assert failed.reason.startswith("RuntimeError: CUDA error: device-side assert (test_sweep.py:")
    assert read_rows(tmp_path) == result.rows


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("cache and output differ"), "AssertionError: cache and output differ"),
        (ZeroDivisionError(), "ZeroDivisionError: "),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_whatever_a_case_raises_becomes_its_reason(error: Exception, reason: str, tmp_path: Path) -> None:
    result = sweep(tmp_path, measure=Measured({1: error, 2: error, 4: error}))
    assert statuses(result) == ["failed"] * 3
    assert result.none_succeeded
    assert all((row.reason or "").startswith(reason) for row in result.rows)


MEMORY_ERRORS = [
    MemoryError("12 GiB"),
    torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 12 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=lambda error: type(error).__name__)
def test_out_of_memory_skips_the_larger_cases_of_the_series_and_the_sweep_goes_on(
    error: Exception, tmp_path: Path
) -> None:
    """Two drafters, batches 1, 2, 4, 8: memory ends for one of them at batch 2."""

    class Full(Measured):
        def __call__(self, target: Any, case: Case, *args: Any, **options: Any) -> Outcome:
            super().__call__(target, case)
            if case.drafter.kind == "oracle" and case.workload.batch_size == 2:
                raise error
            return some_outcome()

    drafters = [{"kind": "oracle"}, {"kind": "forced", "length": 2}]
    scenario = make_scenario(drafters=drafters, sweep={"batch_size": [1, 2, 4, 8], "depth": 2})
    result = sweep(tmp_path, scenario, Full())
    found = {(row.axes["drafter"], row.axes["batch_size"]): row for row in result.rows}
    oracle = {batch: row for (drafter, batch), row in found.items() if str(drafter).startswith("oracle")}
    assert [oracle[batch].status for batch in (1, 2, 4, 8)] == ["ok", "failed", "skipped", "skipped"]
    assert {row.status for (drafter, _), row in found.items() if str(drafter).startswith("forced")} == {"ok"}
    assert str(oracle[2].reason).startswith("out of memory: ")
    assert "\n" not in str(oracle[2].reason)
    assert oracle[4].reason == oracle[8].reason == "a smaller case of this series ran out of memory: batch 2"


def test_out_of_memory_frees_the_target_before_the_next_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may hold the case's tensors: not the target, and not the frames of the error."""
    alive: list[weakref.ref[torch.Tensor]] = []
    released: list[bool] = []
    release = sweep_module.release_memory

    def released_memory() -> None:
        release()
        released.append(all(tensor() is None for tensor in alive))

    monkeypatch.setattr(sweep_module, "release_memory", released_memory)

    class Holding(NoTarget):
        @classmethod
        def open(cls, spec: TargetSpec, tell: object) -> NoTarget:
            target = cls(spec)
            target.weights = torch.zeros(8)  # type: ignore[attr-defined]
            alive.append(weakref.ref(target.weights))  # type: ignore[attr-defined]
            opened.append(spec)
            return target

    opened: list[TargetSpec] = []

    class Full(Measured):
        def __call__(self, target: Any, case: Case, *args: Any, **options: Any) -> Outcome:
            local = torch.zeros(8)
            alive.append(weakref.ref(local))
            if case.workload.batch_size == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return some_outcome()

    scenario = make_scenario(sweep={"batch_size": [4, 1], "depth": [2, 3]})
    order = sorted(expand(scenario), key=lambda case: -case.workload.batch_size)
    result = sweep(tmp_path, scenario, Full(), order, open_target=Holding.open)
    assert statuses(result) == ["failed", "failed", "ok", "ok"], "smaller cases and other series are measured"
    assert len(opened) == 3, "the target is loaded again after each"
    assert released == [True] * 5


def test_what_memory_skipped_is_decided_anew_by_the_next_run(tmp_path: Path) -> None:
    """The larger cases are rows like any other, but they depend on one that failed and is tried again."""
    first = sweep(tmp_path, measure=Measured({2: MemoryError("full")}))
    assert statuses(first) == ["ok", "failed", "skipped"]
    again = Measured({2: MemoryError("still full")})
    assert statuses(sweep(tmp_path, measure=again)) == ["ok", "failed", "skipped"]
    assert again.calls == [2]
    once_more = Measured()
    assert statuses(sweep(tmp_path, measure=once_more)) == ["ok", "ok", "ok"]
    assert once_more.calls == [2, 4]


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [(4, 64, True), (2, 128, True), (4, 128, True), (2, 64, False), (1, 128, False), (4, 32, False), (4, None, False)],
)
def test_larger_means_no_smaller_in_batch_and_context(batch: int, context: int | None, expected: bool) -> None:
    def case(batch_size: int, length: int | None, depth: int = 2) -> Case:
        grid = {"batch_size": batch_size, "depth": depth, "context_len": length}
        (found,) = expand(make_scenario(sweep=grid))
        return found

    assert is_larger(case(batch, context), case(2, 64)) is expected
    assert not is_larger(case(batch, context, depth=3), case(2, 64)), "another depth is another series"


@pytest.mark.parametrize("error", [CapacityError("too long"), InputError("stop strings need a tokenizer")])
def test_a_case_that_cant_be_had_is_skipped_with_its_reason(error: Exception, tmp_path: Path) -> None:
    result = sweep(tmp_path, measure=Measured({2: error}))
    assert statuses(result) == ["ok", "skipped", "ok"]
    assert result.rows[1].reason == str(error)


def test_a_row_that_cant_be_stored_is_a_failure_of_its_case_alone(tmp_path: Path) -> None:
    """A NaN among the metrics, or a null without a reason, is refused by the row, not by the sweep."""

    def measure(target: Any, case: Case, *args: Any, **options: Any) -> Outcome:
        wrong = {1: {"tpot_s": float("nan")}, 2: {"tpot_s": None}}
        return some_outcome(**wrong.get(case.workload.batch_size, {}))

    result = sweep(tmp_path, measure=measure)
    assert statuses(result) == ["failed", "failed", "ok"]
    assert "not a finite number" in (result.rows[0].reason or "")
    assert "null without a reason" in (result.rows[1].reason or "")


@pytest.mark.parametrize("status", ["invalid", "failed", "skipped"])
def test_a_sweep_without_one_ok_row_did_not_succeed(status: str, tmp_path: Path) -> None:
    def measure(*args: Any, **options: Any) -> Outcome:
        return some_outcome(status, "because")

    result = sweep(tmp_path, measure=measure)
    assert statuses(result) == [status] * 3
    assert result.none_succeeded
    assert all("speedup" not in (row.metrics or {}) for row in result.rows)


def test_an_interrupt_ends_the_sweep_and_loses_the_running_case_only(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, measure=Measured({2: KeyboardInterrupt()}))
    assert len(read_rows(tmp_path)) == 1
    measure = Measured()
    assert statuses(sweep(tmp_path, measure=measure)) == ["ok"] * 3
    assert measure.calls == [2, 4]


def test_an_interrupt_that_a_callback_swallowed_ends_the_sweep_after_its_case(tmp_path: Path) -> None:
    """Raised where exceptions are ignored (a finalizer), Ctrl-C would be lost, and the sweep would run to its end."""

    class Deaf(Measured):
        def __call__(self, *args: Any, **options: Any) -> Outcome:
            outcome = super().__call__(*args, **options)
            if len(self.calls) == 2:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            return outcome

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path, measure=Deaf())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert len(read_rows(tmp_path)) == 2
    assert statuses(sweep(tmp_path, measure=Measured())) == ["ok"] * 3


def test_rows_appear_one_by_one(tmp_path: Path) -> None:
    watcher = Watched(tmp_path)
    sweep(tmp_path, watcher=watcher)
    assert watcher.on_disk == [0, 1, 2]


# ---- Skipped before anything is measured


def skipped(folder: Path, scenario: Scenario) -> dict[str, str | None]:
    measure = Measured()
    result = sweep(folder, scenario, measure)
    assert len(measure.calls) == sum(row.status == "ok" for row in result.rows), "a skipped case is not measured"
    assert all(row.metrics is None for row in result.rows if row.status == "skipped")
    return {row.case_name.split(" · batch")[0]: row.reason for row in result.rows}


def test_a_context_beyond_the_models_is_skipped(tmp_path: Path) -> None:
    scenario = make_scenario(sweep={"batch_size": 1, "depth": 2, "context_len": [100, 503, 504]})
    result = sweep(tmp_path, scenario)
    assert [row.reason for row in result.rows] == [
        None,
        None,
        "needs 513 tokens of context, and the model has 512",
    ]


def test_a_case_that_does_not_fit_the_memory_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = make_scenario(**THREE)
    needs = [Planner(scenario.measure, None).plan(case).memory_bytes or 0 for case in expand(scenario)]
    assert needs == sorted(needs)
    assert needs[0] < needs[2]
    monkeypatch.setattr(plan_module, "device_bytes", lambda: needs[1])
    result = sweep(tmp_path, scenario)
    assert statuses(result) == ["ok", "ok", "skipped"]
    assert result.rows[2].reason == f"needs {needs[2] / 2**20:.1f} MiB, and {needs[1] / 2**20:.1f} MiB are free"


def test_an_early_exit_that_is_no_exit_is_skipped(tmp_path: Path) -> None:
    scenario = make_scenario(drafters=[{"kind": "early_exit", "layers": [1, 2, 30]}], sweep={"depth": 2})
    reasons = skipped(tmp_path, scenario)
    assert reasons["early_exit(2) · depth 2"] == "early exit after 2 of 2 layers"
    assert reasons["early_exit(30) · depth 2"] == "early exit after 30 of 2 layers"
    assert reasons["early_exit(1) · depth 2"] == (
        "acceptance on dummy weights means nothing: use forced, oracle or none"
    )


def test_replays_at_a_temperature_are_skipped(tmp_path: Path) -> None:
    drafters = [{"kind": "none"}, {"kind": "oracle"}, {"kind": "forced", "length": 2}]
    scenario = make_scenario(drafters=drafters, sweep={"depth": 2}, sampling={"temperature": 0.8})
    assert list(skipped(tmp_path, scenario).values()) == [
        None,
        "oracle replays the AR output, which is fixed at temperature 0 only",
        "forced replays the AR output, which is fixed at temperature 0 only",
    ]


def test_lookup_on_dummy_weights_is_skipped(tmp_path: Path) -> None:
    """Random weights repeat themselves: their acceptance says nothing."""
    reasons = skipped(tmp_path, make_scenario(drafters=[{"kind": "ngram"}], sweep={"depth": 2}))
    assert list(reasons.values()) == ["acceptance on dummy weights means nothing: use forced, oracle or none"]


def test_a_skipped_row_says_what_the_case_would_have_been(tmp_path: Path) -> None:
    """Its backend is never "auto", and dummy weights are synthetic there too."""
    drafters = [{"kind": "none"}, {"kind": "oracle"}]
    scenario = make_scenario(drafters=drafters, sweep={"depth": 2, "context_len": 600})
    for row in sweep(tmp_path, scenario).rows:
        assert row.status == "skipped"
        assert row.axes["backend"] == "cpu"
        assert row.conditions["synthetic"] is True
        assert row.conditions["output_check"] is None


# ---- Targets


def two_targets(**changes: Any) -> Scenario:
    shape = {"shape": ["smollm2-135m", "tiny-llama-test"], "weights": "dummy", "dtype": "fp32"}
    return make_scenario(target=shape, **(THREE | changes))


def test_each_target_is_loaded_once(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_target(spec: TargetSpec, tell: object) -> Any:
        opened.append(spec.name)
        return NoTarget(spec)

    sweep(tmp_path, two_targets(), open_target=open_target)
    assert opened == ["smollm2-135m", "tiny-llama-test"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            InputError("tensor missing", key="lm_head.weight", remedy="download it again"),
            "lm_head.weight: tensor missing",
        ),
        (RuntimeError("no kernel"), "RuntimeError: no kernel"),
        (MemoryError("40 GiB"), "out of memory: 40 GiB"),
    ],
)
def test_a_target_that_cant_be_loaded_does_not_end_the_sweep(error: Exception, reason: str, tmp_path: Path) -> None:
    tries = 0

    def open_target(spec: TargetSpec, tell: object) -> Any:
        nonlocal tries
        if spec.name == "smollm2-135m":
            tries += 1
            raise error
        return NoTarget(spec)

    result = sweep(tmp_path, two_targets(), open_target=open_target)
    assert statuses(result) == ["failed"] * 3 + ["ok"] * 3
    assert tries == 1, "what can't be loaded is not tried for every case"
    assert (result.rows[0].reason or "").startswith(f"the target can't be loaded: {reason}")


def test_the_only_target_that_cant_be_loaded_is_an_error_of_the_input(tmp_path: Path) -> None:
    def open_target(spec: TargetSpec, tell: object) -> Any:
        raise InputError("tensor missing", key="lm_head.weight")

    with pytest.raises(InputError, match="tensor missing"):
        sweep(tmp_path, open_target=open_target)
    assert not (tmp_path / ROWS_FILE).exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"target": {"shape": "llama-9000b", "weights": "dummy"}},
        {"target": {"shape": ["tiny-llama-test", "nope"], "weights": "dummy"}},
        {"target": {"model": "./no/such/folder"}},
        {"target": {"shape": "tiny-llama-test", "weights": "dummy", "graphs": "on"}},
        {"target": {"shape": "tiny-llama-test", "weights": "dummy", "backend": "torch", "dtype": "fp16"}},
    ],
)
def test_input_that_is_wrong_is_found_before_anything_is_written(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        sweep(tmp_path / "runs" / "x", make_scenario(**changes))
    assert list(tmp_path.iterdir()) == []


# ---- Resume


def test_a_second_run_measures_nothing(tmp_path: Path) -> None:
    first = sweep(tmp_path)
    before = (tmp_path / ROWS_FILE).read_bytes()
    measure, watcher = Measured(), Watched(tmp_path)
    second = sweep(tmp_path, measure=measure, watcher=watcher, open_target=lambda spec, tell: pytest.fail("loaded"))
    assert measure.calls == []
    assert (watcher.total, watcher.reused) == (3, 3)
    assert second.rows == first.rows
    assert (tmp_path / ROWS_FILE).read_bytes() == before
    assert read_manifest(tmp_path)["sweep_seconds"] == first.manifest["sweep_seconds"], "where the time went is kept"


@pytest.mark.parametrize("status", ["failed", "invalid"])
def test_failed_and_invalid_cases_are_tried_again(status: str, tmp_path: Path) -> None:
    def broken(target: Any, case: Case, *args: Any, **options: Any) -> Outcome:
        return some_outcome(status, "because") if case.workload.batch_size == 2 else some_outcome()

    sweep(tmp_path, measure=broken)
    measure = Measured()
    result = sweep(tmp_path, measure=measure)
    assert measure.calls == [2]
    assert statuses(result) == ["ok"] * 3
    assert [row.status for row in read_rows(tmp_path)] == ["ok", status, "ok", "ok"], "nothing is overwritten"


def test_skipped_cases_are_not_tried_again(tmp_path: Path) -> None:
    sweep(tmp_path, measure=Measured({2: CapacityError("too long")}))
    measure = Measured()
    assert statuses(sweep(tmp_path, measure=measure)) == ["ok", "skipped", "ok"]
    assert measure.calls == []


def test_a_scenario_that_grew_runs_its_new_cases_only(tmp_path: Path) -> None:
    sweep(tmp_path, make_scenario(sweep={"batch_size": [1, 4], "depth": 2}))
    measure, watcher = Measured(), Watched(tmp_path)
    result = sweep(tmp_path, measure=measure, watcher=watcher)
    assert measure.calls == [2]
    assert watcher.reused == 2
    assert [row.axes["batch_size"] for row in result.rows] == [1, 2, 4], "rows come in the scenario's order"


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": {"num_prompts": 4, "output_len": 9}},
        {"workload": {"num_prompts": 5, "output_len": 8}},
        {"workload": {"num_prompts": 4, "output_len": 8, "seed": 1}},
        {"drafters": [{"kind": "forced", "length": 2}]},
        {"sweep": {"batch_size": [1, 2, 4], "depth": 3}},
        {"target": {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "bf16"}},
        {"target": {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "fp32", "backend": "torch"}},
        {"workload": {"num_prompts": 4, "output_len": 8, "ignore_eos": True}},
    ],
)
def test_what_changes_the_case_makes_another_case(changes: dict[str, Any], tmp_path: Path) -> None:
    sweep(tmp_path)
    measure = Measured()
    sweep(tmp_path, make_scenario(**(THREE | changes)), measure)
    assert measure.calls == [1, 2, 4]


def test_how_well_it_is_measured_does_not(tmp_path: Path) -> None:
    sweep(tmp_path)
    measure = Measured()
    settings = {"blocks": {"min": 9, "max": 20}, "budget_s": 7, "seed": 3}
    sweep(tmp_path, make_scenario(**THREE, measure=settings, question="Another?"), measure)
    assert measure.calls == []


def test_other_code_or_another_machine_reuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(tmp_path)
    constant_device(monkeypatch, revision="r1")
    measure = Measured()
    result = sweep(tmp_path, measure=measure)
    assert measure.calls == [1, 2, 4]
    assert {row.code_revision for row in result.rows} == {"r1"}
    monkeypatch.setattr(sweep_module, "fingerprint", lambda env: "elsewhere")
    measure = Measured()
    result = sweep(tmp_path, measure=measure)
    assert measure.calls == [1, 2, 4]
    assert {row.environment for row in result.rows} == {"elsewhere"}
    assert len(read_rows(tmp_path)) == 9


def test_roofs_are_measured_once_for_a_folder_and_again_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    measure_device = sweep_module.measure_device

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return measure_device(*args)

    monkeypatch.setattr(sweep_module, "measure_device", counted)
    sweep(tmp_path, measure=Measured({4: RuntimeError("no")}))
    sweep(tmp_path, measure=Measured())
    assert count == 1
    monkeypatch.setattr(sweep_module, "fingerprint", lambda env: "elsewhere")
    sweep(tmp_path, measure=Measured())
    assert count == 2
    sweep(tmp_path, measure=Measured())
    assert count == 2


@pytest.mark.parametrize("rises", [True, False])
def test_a_cell_above_the_roof_asks_for_the_roof_once_more(
    rises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory is faster in some hours: a roof taken beside the cell decides, and the cell is measured again."""
    bandwidths = iter([1.0, 1.3 if rises else 0.9])

    def scaled(*_: Any) -> MeasuredRoofs:
        factor = next(bandwidths)
        reading = Reading(1e11 * factor, 1.1e11 * factor, 3, "scripted")
        return MeasuredRoofs("cpu", 1 << 27, reading, reading, reading, {"fp32": reading, "bf16": reading}, (), 0.0)

    monkeypatch.setattr(sweep_module, "measure_device", scaled)
    limits: list[float] = []

    def measure(target: Any, case: Case, settings: Any, roofs: Any, **_: Any) -> Outcome:
        limits.append(roofs.limit.bytes_per_s)
        above = case.workload.batch_size == 2 and limits[-1] < 1.2e11
        return some_outcome("invalid", "ar_roof_fraction_measured is 107.0%, over 105%") if above else some_outcome()

    result = sweep(tmp_path, measure=measure)
    assert statuses(result) == ["ok", "ok" if rises else "invalid", "ok"]
    assert limits == pytest.approx([1.1e11, 1.1e11, 1.43e11, 1.43e11] if rises else [1.1e11] * 3)
    stored = read_manifest(tmp_path)["roofs"]["measured"]
    assert stored["bandwidth_bytes_per_s"] == pytest.approx(1.3e11 if rises else 1e11)
    assert any("raised by a second measurement" in note for note in stored["notes"]) == rises
    assert len(read_rows(tmp_path)) == 3


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_costs_that_case_alone(cut: int, tmp_path: Path) -> None:
    """I 80: three lines, the last cut."""
    sweep(tmp_path)
    file = tmp_path / ROWS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    measure = Measured()
    assert statuses(sweep(tmp_path, measure=measure)) == ["ok"] * 3
    assert measure.calls == [4]
    assert file.read_bytes().startswith(b"\n".join(whole.split(b"\n")[:2]) + b"\n")
    assert len(file.read_bytes().splitlines()) == 3


def test_a_broken_middle_is_an_error_and_nothing_is_run(tmp_path: Path) -> None:
    sweep(tmp_path)
    file = tmp_path / ROWS_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    before, measure = file.read_bytes(), Measured()
    with pytest.raises(InvalidEnvironmentError, match=r"rows.jsonl:2: a broken row"):
        sweep(tmp_path, measure=measure)
    assert measure.calls == []
    assert file.read_bytes() == before


def test_a_broken_manifest_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    sweep(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text('{"roofs"')
    with pytest.raises(InvalidEnvironmentError, match=r"manifest\.json"):
        sweep(tmp_path)
    assert (tmp_path / MANIFEST_FILE).read_text() == '{"roofs"'


def test_a_lost_manifest_is_made_anew(tmp_path: Path) -> None:
    first = sweep(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    measure = Measured()
    assert sweep(tmp_path, measure=measure).rows == first.rows
    assert measure.calls == []
    assert read_manifest(tmp_path)["scenario"] == first.manifest["scenario"]


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    with RowStore(tmp_path), pytest.raises(InvalidEnvironmentError, match="already writing to this folder"):
        sweep(tmp_path)
    inside: list[BaseException] = []

    def measure(*args: Any, **options: Any) -> Outcome:
        def second() -> None:
            try:
                sweep(tmp_path)
            except InvalidEnvironmentError as error:
                inside.append(error)

        other = threading.Thread(target=second)
        other.start()
        other.join()
        return some_outcome()

    assert statuses(sweep(tmp_path, measure=measure)) == ["ok"] * 3
    assert len(inside) == 3
    assert all(error.exit_code == 4 for error in inside)  # type: ignore[attr-defined]
    assert "remedy: wait for it to end, or give another --out" in str(inside[0])
    assert len(read_rows(tmp_path)) == 3


# ---- What is left on disk


def test_the_manifest_tells_roofs_machine_and_scenario(tmp_path: Path) -> None:
    scenario = make_scenario(**THREE)
    result = sweep(tmp_path, scenario, scenario_file="tiny.yaml")
    manifest = read_manifest(tmp_path)
    assert manifest == json.loads(json.dumps(result.manifest))
    assert Scenario.from_dict(manifest["scenario"]) == scenario
    assert manifest["scenario_file"] == "tiny.yaml"
    assert (manifest["name"], manifest["question"]) == ("tiny", "Does it run?")
    assert manifest["code_revision"] == "r0"
    assert manifest["environment"]["torch"]
    assert manifest["device"] == manifest["environment"]["device_name"]
    assert manifest["roofs"]["measured"]["gemm_flops_per_s"] == {"fp32": 1e11, "bf16": 1e11}
    assert manifest["roofs"]["h100"]["bandwidth_bytes_per_s"] > 3e12
    assert (manifest["roofs"]["datasheet"] is None) == bool(manifest["roofs"]["datasheet_reason"])
    assert manifest["sweep_seconds"]["total"] > 0
    assert {row.environment for row in result.rows} == {manifest["fingerprint"]}


def test_the_manifest_is_there_before_the_first_row(tmp_path: Path) -> None:
    def measure(*args: Any, **options: Any) -> Outcome:
        assert read_manifest(tmp_path)["roofs"]["measured"]
        return some_outcome()

    assert statuses(sweep(tmp_path, measure=measure)) == ["ok"] * 3


def test_results_load_as_a_frame(tmp_path: Path) -> None:
    sweep(tmp_path, measure=Measured({2: RuntimeError("no")}))
    frame = specbench.load(tmp_path)
    assert list(frame["status"]) == ["ok", "failed", "ok"]
    assert list(frame["batch_size"]) == [1, 2, 4]
    assert frame["speedup"].tolist()[0] == 1.25
    assert frame["speedup"].isna().tolist() == [False, True, False]


def test_each_dtype_is_held_against_its_own_arithmetic() -> None:
    measured = {
        "gemm_flops_per_s": {"fp32": 2.0, "bf16": 3.0},
        "flops_limit_per_s": {"fp32": 4.0, "bf16": 5.0},
        "bandwidth_bytes_per_s": 6.0,
        "bandwidth_limit_bytes_per_s": 7.0,
    }
    sheet = {"peaks_flops_per_s": {"bf16": 8.0}, "bandwidth_bytes_per_s": 9.0}
    roofs = {"measured": measured, "datasheet": sheet}
    for dtype, usual, limit in (("fp32", 2.0, 4.0), ("fp16", 2.0, 4.0), ("fp64", 2.0, 4.0), ("bf16", 3.0, 5.0)):
        found = roofs_in_use(roofs, dtype)
        assert (found.measured, found.limit) == (Roof(usual, 6.0), Roof(limit, 7.0))
        assert found.datasheet == Roof(8.0 if dtype == "bf16" else None, 9.0)
    unknown = roofs_in_use({"measured": None, "datasheet": None}, "bf16")
    assert (unknown.measured, unknown.limit, unknown.datasheet) == (None, None, None)


# ---- Real cases, from scenario to rows


def test_a_real_sweep_counts_the_same_whatever_ran_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E 56: cells A, B against B alone; the target, its prefills and its references live on between cells."""
    drafters = [{"kind": "none"}, {"kind": "oracle"}, {"kind": "forced", "rates": [0.7, 0.4]}]
    scenario = make_scenario(drafters=drafters, sweep={"batch_size": [1, 3], "depth": 2})
    wide(monkeypatch)
    measure = functools.partial(measure_case, monitor=ScriptedMonitor())
    with one_thread():
        together = run_sweep(scenario, expand(scenario), tmp_path / "all", measure=measure)
        assert statuses(together) == ["ok"] * 6
        for case, row in zip(expand(scenario), together.rows, strict=True):
            (alone,) = run_sweep(scenario, [case], tmp_path / case.hash, measure=measure).rows
            assert alone.key == row.key
            assert alone.metrics is not None
            assert row.metrics is not None
            for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "accepted_histogram", "flops"):
                assert alone.metrics[name] == row.metrics[name], f"{case.name}: {name}"
