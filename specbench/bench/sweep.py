"""All cases of a scenario: order, resume, memory, progress, failures; one row on disk as soon as a case ends.

Interrupt it at any moment and run it again: rows of the same case, code and machine are reused, the running case is
lost at most. Cases run grouped by target, so that each model is loaded once.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from specbench.bench.ceilings import MeasuredRoofs, measure_roofs
from specbench.bench.environment import code_revision, environment, fingerprint
from specbench.bench.measure import Outcome, RoofsInUse, measure_case
from specbench.bench.plan import Planner
from specbench.bench.target import Target
from specbench.errors import CapacityError, InputError, InvalidEnvironmentError
from specbench.metrics import Roof
from specbench.roofline.hardware import hardware, identify
from specbench.scenario.cases import Case, TargetSpec
from specbench.scenario.schema import Scenario
from specbench.store import SCHEMA_VERSION, ResultRow, RowStore, diagnostics_only, read_manifest, resume_key

ROOF_DTYPES = ("fp32", "bf16")
COMPUTE_DTYPE = {"fp64": "fp32", "fp32": "fp32", "fp16": "fp32", "bf16": "bf16"}
"""Whose matmul roof a dtype is judged by: the CPU kernels compute fp16 storage in fp32."""


class Watcher(Protocol):
    """Who watches a sweep (a progress bar, a test)."""

    def begin(self, total: int, reused: int) -> None: ...
    def case(self, case: Case) -> None: ...
    def tell(self, text: str) -> None: ...
    def done(self, row: ResultRow) -> None: ...


class Silent:
    """Nobody watches."""

    def begin(self, total: int, reused: int) -> None: ...
    def case(self, case: Case) -> None: ...
    def tell(self, text: str) -> None: ...
    def done(self, row: ResultRow) -> None: ...


@dataclass
class SweepResult:
    """Rows of the scenario's cases, in their order, and where the time went (seconds by name)."""

    directory: Path
    rows: list[ResultRow]
    manifest: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def all_failed(self) -> bool:
        return not any(row.status in ("ok", "skipped") for row in self.rows)


def run_sweep(
    scenario: Scenario,
    cases: Sequence[Case],
    directory: Path,
    *,
    scenario_file: str | None = None,
    watcher: Watcher | None = None,
    measure: Callable[..., Outcome] = measure_case,
    open_target: Callable[[TargetSpec, Callable[[str], None]], Target] = Target,
) -> SweepResult:
    """Run or resume `cases` into `directory`.

    Raises InputError where a target can't be had at all, InvalidEnvironmentError where the folder holds rows that
    can't be read. A case that fails becomes a row with its reason, and the sweep goes on.
    """
    watcher = watcher or Silent()
    begun = time.perf_counter()
    sweep = _Sweep(scenario, cases, directory, scenario_file, watcher, measure, open_target)
    with RowStore(directory) as store:
        return sweep.run(store, begun)


class _Sweep:
    def __init__(
        self,
        scenario: Scenario,
        cases: Sequence[Case],
        directory: Path,
        scenario_file: str | None,
        watcher: Watcher,
        measure: Callable[..., Outcome],
        open_target: Callable[[TargetSpec, Callable[[str], None]], Target],
    ) -> None:
        self.scenario, self.cases, self.directory = scenario, cases, directory
        self.scenario_file, self.watcher = scenario_file, watcher
        self.measure, self.open_target = measure, open_target
        self.environment = environment()
        self.fingerprint = fingerprint(self.environment)
        self.revision = code_revision()
        self.seconds: dict[str, float] = {"measured": 0.0, "prefill": 0.0, "warm-up": 0.0, "loading": 0.0, "roofs": 0.0}

    def key(self, case: Case) -> str:
        return resume_key(case.hash, self.revision, self.fingerprint, SCHEMA_VERSION)

    def run(self, store: RowStore, begun: float) -> SweepResult:
        latest = {row.key: row for row in store.rows()}
        reused = {k for k, row in latest.items() if row.status in ("ok", "skipped")}
        waiting = [case for case in self.cases if self.key(case) not in reused]
        self.watcher.begin(len(self.cases), len(self.cases) - len(waiting))
        roofs = self._roofs(needed=bool(waiting))
        manifest = self._manifest(roofs)
        store.write_manifest(manifest)
        planner = Planner(self.scenario.measure, None)
        target: Target | None = None
        for case in waiting:
            self.watcher.case(case)
            started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
            skip = planner.plan(case).skip
            if skip is not None:
                row = self._row(case, "skipped", skip, started, clock)
            else:
                if target is None or target.target != case.target:
                    target = None
                    gc.collect()
                    target = self._load(case.target)
                row = self._measured(target, case, roofs, started, clock)
            store.append(row)
            self.watcher.done(row)
        rows = {row.key: row for row in store.rows()}
        self.seconds["total"] = time.perf_counter() - begun
        if waiting:
            manifest["sweep_seconds"] = {name: round(value, 3) for name, value in self.seconds.items()}
            store.write_manifest(manifest)
        return SweepResult(self.directory, [rows[self.key(case)] for case in self.cases], manifest, self.seconds)

    def _load(self, spec: TargetSpec) -> Target:
        begin = time.perf_counter()
        target = self.open_target(spec, self.watcher.tell)
        self.seconds["loading"] += time.perf_counter() - begin
        return target

    def _measured(self, target: Target, case: Case, roofs: dict[str, Any], started: str, clock: float) -> ResultRow:
        try:
            outcome = self.measure(
                target, case, self.scenario.measure, roofs_in_use(roofs, case.target.dtype), tell=self.watcher.tell
            )
        except (CapacityError, InputError) as error:
            return self._row(case, "skipped", error.message, started, clock)
        except MemoryError as error:
            return self._row(case, "failed", f"out of memory: {error}", started, clock)
        except Exception as error:  # a sweep outlives any case; the row says what happened
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            return self._row(case, "failed", f"{type(error).__name__}: {error} ({place})", started, clock)
        for name, value in outcome.seconds.items():
            if name != "total":
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        return self._row(case, outcome.status, outcome.reason, started, clock, outcome, target.backend)

    def _row(
        self,
        case: Case,
        status: str,
        reason: str | None,
        started: str,
        clock: float,
        outcome: Outcome | None = None,
        backend: str | None = None,
    ) -> ResultRow:
        axes = dict(case.axes)
        if backend is not None:
            axes["backend"] = backend
        measured = outcome is not None and status in ("ok", "invalid")
        conditions = {
            "lossless": True,
            "synthetic": case.drafter.kind in ("oracle", "forced"),
            "output_check": None,
            "device": "cpu",
            "weights": case.target.name,
            "prompt_categories": list(case.workload.prompts.categories or ()),
        }
        metrics = outcome.metrics if outcome is not None and measured else None
        if metrics is not None and status == "invalid":
            metrics = diagnostics_only(metrics)
        return ResultRow.model_validate(
            {
                "key": self.key(case),
                "case_hash": case.hash,
                "case_name": case.name,
                "status": status,
                "reason": reason,
                "axes": axes,
                "conditions": outcome.conditions if outcome is not None else conditions,
                "metrics": metrics,
                "samples": outcome.samples if outcome is not None and measured else {"blocks": [], "prompts": []},
                "warnings": outcome.warnings if outcome is not None else [],
                "environment": self.fingerprint,
                "code_revision": self.revision,
                "started_at": started,
                "duration_s": time.perf_counter() - clock,
            }
        )

    def _roofs(self, needed: bool) -> dict[str, Any]:
        """Roofs of this device: those of the folder's manifest if it is the same machine, else measured now."""
        stored = _stored_manifest(self.directory)
        if stored is not None and stored.get("fingerprint") == self.fingerprint and stored["roofs"].get("measured"):
            return dict(stored["roofs"])
        self.watcher.tell("measuring the roofs of this device")
        begin = time.perf_counter()
        measured = measure_device(self.watcher.tell) if needed else None
        self.seconds["roofs"] += time.perf_counter() - begin
        match = identify(str(self.environment["device_name"]))
        return {
            "measured": measured.to_dict() if measured is not None else None,
            "datasheet": match.hardware.to_dict() if match.hardware is not None else None,
            "datasheet_reason": match.reason,
            "h100": hardware("h100-sxm").to_dict(),
        }

    def _manifest(self, roofs: dict[str, Any]) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.scenario.name,
            "question": self.scenario.question,
            "scenario": self.scenario.to_dict(),
            "scenario_file": self.scenario_file,
            "environment": self.environment,
            "fingerprint": self.fingerprint,
            "code_revision": self.revision,
            "device": self.environment["device_name"],
            "roofs": roofs,
        }


def _stored_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(directory)
    except (InputError, InvalidEnvironmentError):
        return None


def measure_device(tell: Callable[[str], None]) -> MeasuredRoofs:
    """The device's roofs, with the engine's own linear layer among the candidates: a roof is what anything reached."""
    import torch

    from specbench.engine.ops.cpu import PackedLinear

    threads = torch.get_num_threads()
    return measure_roofs(
        "cpu", dtypes=ROOF_DTYPES, make_linear=lambda w: PackedLinear(w, threads), budget_s=5.0, progress=tell
    )


def roofs_in_use(roofs: dict[str, Any], dtype: str) -> RoofsInUse:
    """The roofs that a case of `dtype` is held against."""
    chosen = COMPUTE_DTYPE[dtype]
    measured, sheet = roofs.get("measured"), roofs.get("datasheet")
    usual = limit = datasheet = None
    if measured is not None:
        usual = Roof(measured["gemm_flops_per_s"][chosen], measured["bandwidth_bytes_per_s"])
        limit = Roof(measured["flops_limit_per_s"][chosen], measured["bandwidth_limit_bytes_per_s"])
    if sheet is not None:
        datasheet = Roof(sheet["peaks_flops_per_s"].get(dtype), sheet["bandwidth_bytes_per_s"])
    return RoofsInUse(usual, datasheet, limit)
