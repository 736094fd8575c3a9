"""All cases of a scenario: order, resume, memory, progress, failures; one row on disk as soon as a case ends.

Interrupt it at any moment and run it again: rows of the same case, code and machine are reused, the running case is
lost at most. Cases run grouped by target, so that each model is loaded once.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from specbench.bench.crossings import most_cells, search_all
from specbench.bench.devices import resolve_backend, sweep_device
from specbench.bench.environment import code_revision, environment, fingerprint
from specbench.bench.exhausted import Exhausted, is_out_of_memory, release_memory, skipped_for_memory
from specbench.bench.interrupts import Interrupts
from specbench.bench.measure import Outcome, RoofsInUse, measure_case
from specbench.bench.plan import Planner
from specbench.bench.roof_store import RoofFolder
from specbench.bench.sweep_roofs import measure_device, raised, roofs_of_sweep, sweep_linears
from specbench.bench.target import Target, source_of
from specbench.engine.models.config import read_model_spec
from specbench.errors import CapacityError, InputError, SpecbenchError
from specbench.metrics import Roof
from specbench.result_row import SCHEMA_VERSION, ResultRow, diagnostics_only, resume_key
from specbench.scenario.cases import Case, TargetSpec
from specbench.scenario.schema import MeasureConfig, Scenario
from specbench.store import RowStore, read_manifest

COMPUTE_DTYPE = {"fp64": "fp32", "fp32": "fp32", "fp16": "fp32", "bf16": "bf16"}
"""Whose matmul roof a dtype is judged by: the CPU kernels compute fp16 storage in fp32."""
ABOVE_ROOF = "roof_fraction_measured"
"""What the reason of a cell names that was faster than the roof measured here."""


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
    def none_succeeded(self) -> bool:
        return not any(row.status == "ok" for row in self.rows)


def run_sweep(
    scenario: Scenario,
    cases: Sequence[Case],
    directory: Path,
    *,
    scenario_file: str | None = None,
    watcher: Watcher | None = None,
    measure: Callable[..., Outcome] = measure_case,
    open_target: Callable[[TargetSpec, Callable[[str], None]], Target] = Target,
    roof_store: RoofFolder | None = None,
) -> SweepResult:
    """Run or resume `cases` into `directory`.

    All cases are planned before anything is written. Raises InputError where a target or its prompts can't be had,
    InvalidEnvironmentError where the folder is in use or holds rows that can't be read. A case that fails becomes a
    row with its reason, and the sweep goes on; so does a target that can't be loaded, unless it is the only one. Where
    the scenario searches batch sizes, each of `cases` begins a series, and the result holds the cases it visited.
    """
    watcher = watcher or Silent()
    begun = time.perf_counter()
    sweep = _Sweep(scenario, cases, directory, scenario_file, watcher, measure, open_target, roof_store)
    sweep.plan()
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
        roof_store: RoofFolder | None,
    ) -> None:
        self.roof_store = roof_store
        self.scenario, self.cases, self.directory = scenario, cases, directory
        self.scenario_file, self.watcher = scenario_file, watcher
        self.measure, self.open_target = measure, open_target
        self.device = sweep_device(case.target for case in cases)
        self.environment = environment(self.device)
        self.fingerprint = fingerprint(self.environment)
        self.revision = code_revision()
        self.seconds: dict[str, float] = {"measured": 0.0, "prefill": 0.0, "warm-up": 0.0, "loading": 0.0, "roofs": 0.0}
        self._target: Target | None = None
        self._unusable: dict[TargetSpec, str] = {}
        self._skips: dict[str, str | None] = {}
        self._planner: Planner | None = None
        self._exhausted = Exhausted()

    def key(self, case: Case) -> str:
        return resume_key(case.hash, self.revision, self.fingerprint, SCHEMA_VERSION)

    def plan(self) -> None:
        """Find out which cases will be skipped, and whether the input is right, from shapes and prompts alone."""
        self.watcher.tell("planning")
        for case in self.cases:
            self._why_skipped(case)

    def _why_skipped(self, case: Case) -> str | None:
        if self._planner is None:
            self._planner = Planner(self.scenario.measure, None)
        if case.hash not in self._skips:
            self._skips[case.hash] = self._planner.plan(case).skip
        return self._skips[case.hash]

    def run(self, store: RowStore, begun: float) -> SweepResult:
        search = self.scenario.sweep.crossing
        waiting = [case for case in self.cases if search is not None or not self._reusable(store, case)]
        total = len(self.cases) * (1 if search is None else most_cells(search))
        self.watcher.begin(total, len(self.cases) - len(waiting))
        stored = _stored_manifest(self.directory)
        roofs = self._roofs(stored, needed=bool(waiting))
        manifest = self._manifest(roofs, stored)
        store.write_manifest(manifest)
        with Interrupts() as interrupts:

            def measured(case: Case, settings: MeasureConfig) -> ResultRow:
                self.watcher.case(case)
                row = self._run_case(case, settings, roofs)
                if row.status == "invalid" and ABOVE_ROOF in (row.reason or "") and self._raise_roofs(roofs):
                    row = self._run_case(case, settings, roofs)
                store.append(row)
                self.watcher.done(row)
                interrupts.check()
                return row

            if search is not None:

                def known(case: Case) -> ResultRow | None:
                    return store.reusable(self.key(case)) if self._reusable(store, case) else None

                self.cases = search_all(self.cases, search, self.scenario.measure, measured, known)
            else:
                for case in waiting:
                    measured(case, self.scenario.measure)
        rows = {row.key: row for row in store.rows()}
        self.seconds["total"] = time.perf_counter() - begun
        if waiting:
            manifest["sweep_seconds"] = {name: round(value, 3) for name, value in self.seconds.items()}
            store.write_manifest(manifest)
        return SweepResult(self.directory, [rows[self.key(case)] for case in self.cases], manifest, self.seconds)

    def _reusable(self, store: RowStore, case: Case) -> bool:
        """Whether the case's row on disk stands; one skipped for want of memory is decided anew."""
        row = store.reusable(self.key(case))
        return row is not None and not skipped_for_memory(row.reason)

    def _run_case(self, case: Case, settings: MeasureConfig, roofs: dict[str, Any]) -> ResultRow:
        started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        row = functools.partial(self._row, case, started, clock)
        skip = self._why_skipped(case) or self._exhausted.why_skipped(case)
        if skip is not None:
            return row("skipped", skip)
        target = self._loaded(case.target)
        if target is None:
            return row("failed", self._unusable[case.target])
        try:
            in_use = roofs_in_use(roofs, case.target.dtype)
            outcome = self.measure(target, case, settings, in_use, tell=self.watcher.tell)
            measured = row(outcome.status, outcome.reason, outcome)
        except (CapacityError, InputError) as error:
            return row("skipped", error.message)
        except Exception as error:  # a sweep outlives any case; the row says what happened
            failed = row("failed", _described(error))
            full = is_out_of_memory(error)
        else:
            self._count(outcome)
            return measured
        if full:
            # The error is gone by now, and with it the frames that held the case's tensors.
            del target
            self._exhausted.cases.append(case)
            self._target = None
            release_memory()
        return failed

    def _count(self, outcome: Outcome) -> None:
        for name, value in outcome.seconds.items():
            if name != "total":
                self.seconds[name] = self.seconds.get(name, 0.0) + value

    def _loaded(self, spec: TargetSpec) -> Target | None:
        """The target, or None with the reason in `_unusable`. Raises InputError where it is the only one."""
        if spec in self._unusable or (self._target is not None and self._target.target == spec):
            return None if spec in self._unusable else self._target
        self._target = None
        release_memory()
        begin = time.perf_counter()
        try:
            self._target = self.open_target(spec, self.watcher.tell)
        except Exception as error:
            if isinstance(error, InputError) and all(case.target == spec for case in self.cases):
                raise
            self._unusable[spec] = f"the target can't be loaded: {_described(error)}"
        if self._target is None:
            release_memory()
        self.seconds["loading"] += time.perf_counter() - begin
        return self._target

    def _row(
        self,
        case: Case,
        started: str,
        clock: float,
        status: str,
        reason: str | None,
        outcome: Outcome | None = None,
    ) -> ResultRow:
        axes = {**case.axes, "backend": resolve_backend(case.target)}
        measured = outcome is not None and status in ("ok", "invalid")
        conditions = {
            "lossless": True,
            "synthetic": case.drafter.kind in ("oracle", "forced") or case.target.weights == "dummy",
            "output_check": None,
            "device": self.device,
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

    def _roofs(self, stored: dict[str, Any], needed: bool) -> dict[str, Any]:
        """Roofs of this device: the folder's own or the user's stored ones if nothing changed, else measured now."""
        roofs = stored.get("roofs")
        same = stored.get("fingerprint") == self.fingerprint and isinstance(roofs, dict)
        targets = [case.target for case in self.cases]
        tell = self.watcher.tell
        begin = time.perf_counter()
        found = roofs_of_sweep(
            roofs if same else None,
            self.environment,
            (lambda linears: measure_device(tell, self.device, linears)) if needed else None,
            linears=sweep_linears(targets, lambda target: read_model_spec(source_of(target))) if needed else None,
            store=self.roof_store,
            tell=tell,
        )
        self.seconds["roofs"] += time.perf_counter() - begin
        return found

    def _raise_roofs(self, roofs: dict[str, Any]) -> bool:
        """Measure the roofs once more, beside a cell that was above them; whether they rose."""
        self.watcher.tell("a cell was above the measured roof: measuring the roof again")
        begin = time.perf_counter()
        higher = raised(roofs["measured"], measure_device(self.watcher.tell, self.device).to_dict())
        self.seconds["roofs"] += time.perf_counter() - begin
        if higher is not None:
            roofs["measured"] = higher
        return higher is not None

    def _manifest(self, roofs: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
        kept = {name: stored[name] for name in ("sweep_seconds",) if name in stored}
        return kept | {
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


def _stored_manifest(directory: Path) -> dict[str, Any]:
    """The folder's manifest, empty where there is none yet. Raises InvalidEnvironmentError if it is broken."""
    try:
        return read_manifest(directory)
    except InputError:
        return {}


def _described(error: Exception) -> str:
    """One line: what went wrong, and for what is no message to the user, where."""
    if isinstance(error, SpecbenchError):
        return " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"out of memory: {' '.join(str(error).split())}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def roofs_in_use(roofs: dict[str, Any], dtype: str) -> RoofsInUse:
    """The roofs that a case of `dtype` is held against."""
    measured, sheet = roofs.get("measured"), roofs.get("datasheet")
    # A GPU multiplies fp16 as it is; where it was not measured, it is computed in another dtype.
    has_own = measured is not None and dtype in measured["gemm_flops_per_s"]
    chosen = dtype if has_own else COMPUTE_DTYPE[dtype]
    usual = limit = datasheet = None
    if measured is not None:
        usual = Roof(measured["gemm_flops_per_s"][chosen], measured["bandwidth_bytes_per_s"])
        limit = Roof(measured["flops_limit_per_s"][chosen], measured["bandwidth_limit_bytes_per_s"])
    if sheet is not None:
        datasheet = Roof(sheet["peaks_flops_per_s"].get(dtype), sheet["bandwidth_bytes_per_s"])
    return RoofsInUse(usual, datasheet, limit)
