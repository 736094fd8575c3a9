"""What `specbench gate`, `specbench baseline` and `specbench history` do between parsing and exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from specbench.errors import ExitCode, InputError, SpecbenchError
from specbench.gate import baseline as store
from specbench.gate import history as trends
from specbench.gate.gate import run_gate, undecided
from specbench.gate.policy import DEFAULT, Policy, load_policy
from specbench.gate.render_gab import write_gab
from specbench.gate.render_json import render_json
from specbench.gate.render_junit import render_junit
from specbench.gate.render_markdown import render_markdown
from specbench.gate.render_terminal import render_terminal
from specbench.gate.selftest import self_test
from specbench.gate.text import clean, counted
from specbench.gate.types import CaseVerdict, GateResult
from specbench.gate.words import ordered
from specbench.store import ROWS_FILE, read_manifest

Measure = Callable[[Path, int, Collection[str]], Path]
"""Measure so many more blocks of a run's cases of these hashes; the folder they are in."""
LOG_WIDTH = 180
DRIFT = "drift"


@dataclass(frozen=True)
class Outputs:
    """Files to write, None for those that nobody asked for."""

    junit: Path | None = None
    markdown: Path | None = None
    comment: Path | None = None
    json: Path | None = None
    github_benchmark: Path | None = None

    def write(self, result: GateResult) -> None:
        """Write each. Raises InputError where one can't be written."""
        texts = (
            (self.junit, render_junit),
            (self.markdown, render_markdown),
            (self.comment, lambda one: render_markdown(one, "comment")),
            (self.json, render_json),
        )
        try:
            for file, render in texts:
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(render(result), encoding="utf-8")
            if self.github_benchmark is not None:
                write_gab(result, self.github_benchmark)
        except OSError as error:
            message = f"can't be written: {error.strerror or error}"
            raise InputError(message, file=error.filename, remedy="give another file") from None


def gate(
    candidate: Path,
    *,
    baseline: Path | None,
    policy_file: Path | None,
    outputs: Outputs,
    with_self_test: bool = False,
    extend: int | None = None,
    measure: Measure | None = None,
) -> ExitCode:
    """`specbench gate CANDIDATE --baseline BASELINE`. An error reaches the files too, so that CI never shows a green
    page of an earlier run, and is raised on. `measure` adds blocks for `extend`."""
    try:
        policy = load_policy(policy_file) if policy_file is not None else DEFAULT
        result = judge(candidate, baseline, policy, with_self_test, extend, measure)
    except SpecbenchError as error:
        outputs.write(failed(candidate, baseline, error))
        raise
    outputs.write(result)
    show(render_terminal(result))
    return result.exit_code


def judge(
    candidate: Path,
    baseline: Path | None,
    policy: Policy,
    with_self_test: bool,
    extend: int | None,
    measure: Measure | None,
) -> GateResult:
    """Self-test alone, or comparison, armed by the self-test where both are asked for; once more where blocks were
    added for what was undecided."""
    tested = self_test(candidate, policy) if with_self_test else None
    if baseline is None:
        if tested is None:
            raise InputError("is missing", remedy="give a folder of baselines or of a run", key="--baseline")
        return tested
    armed = None if tested is None else tested.armed
    result = compare(candidate, baseline, policy, armed)
    if extend is not None and measure is not None and (cases := undecided(result)):
        measure(candidate, extend, cases)
        result = compare(candidate, baseline, policy, armed)
    elif extend is not None:
        result = replace(result, notes=(*result.notes, "nothing was undecided, so no blocks were added"))
    if tested is not None:
        result = replace(result, notes=(*result.notes, f"self-test: {tested.reasons[0]}"))
    return result


def compare(candidate: Path, baseline: Path, policy: Policy = DEFAULT, armed: bool | None = None) -> GateResult:
    """The gate of a run against another run's folder, or against a folder of baselines: there against the latest entry
    for the run's scenario and machine, and for drift against the pinned one."""
    if (baseline / ROWS_FILE).is_file():
        return run_gate(candidate, baseline, policy, armed=armed)
    found = store.find_baseline(baseline, read_manifest(candidate), candidate)
    latest, pinned = found.latest, found.pinned
    with tempfile.TemporaryDirectory() as scratch:
        result = run_gate(candidate, store.as_run(latest, Path(scratch) / "latest"), policy, armed=armed)
        note = f"baseline: {latest.label} by {latest.who}: {latest.why}"
        result = replace(result, baseline_dir=f"{found.path}, {latest.label}", notes=(note, *result.notes))
        if pinned.number == latest.number:
            return result
        drift = run_gate(candidate, store.as_run(pinned, Path(scratch) / "pinned"), policy, armed=armed)
    return with_drift(result, drift, pinned.label)


def with_drift(result: GateResult, drift: GateResult, label: str) -> GateResult:
    """`result` and what the comparison with the pinned baseline adds: its regressions, flagged "drift", which many
    small steps add up to; cases that only one side has are no news there."""
    where = f"against the pinned baseline, {label}"
    found = {(one.case_hash, one.metric) for one in result.verdicts if one.verdict == "REGRESSION"}
    slow: list[CaseVerdict] = [
        replace(one, reason=f"{where}: {one.reason}", flags=(DRIFT, *one.flags))
        for one in drift.verdicts
        if one.verdict == "REGRESSION" and (one.case_hash, one.metric) not in found
    ]
    total = counted(drift.compared, "comparison")
    if drift.compared:
        note = f"{where}: {total}, {counted(len(slow), 'regression')} that the latest baseline does not show"
    else:
        note = f"{where}: nothing could be compared: {drift.reasons[0]}"
    reasons, code = result.reasons, result.exit_code
    if slow:
        reason = f"{counted(len(slow), 'regression')} by drift {where}"
        if result.compared:
            reasons, code = (reason, *(reasons if code is not ExitCode.DONE else ())), ExitCode.FAILED
        else:
            reasons = (*reasons, reason)
    verdicts = tuple(ordered([*result.verdicts, *slow]))
    return replace(result, verdicts=verdicts, reasons=reasons, exit_code=code, notes=(*result.notes, note))


def failed(candidate: Path, baseline: Path | None, error: SpecbenchError) -> GateResult:
    """An error as a result, for the files."""
    return GateResult(
        verdicts=(),
        fingerprint_baseline="",
        fingerprint_candidate="",
        policy={},
        exit_code=error.exit_code,
        reasons=(" ".join(str(error).split()),),
        armed=None,
        compared=0,
        notes=(),
        scenario="",
        candidate_dir=str(candidate),
        baseline_dir="" if baseline is None else str(baseline),
    )


def baseline_update(run: Path, folder: Path, *, who: str, why: str, drop_missing: bool) -> ExitCode:
    """`specbench baseline update`."""
    found, entry = store.update(run, folder, who=who, why=why, when=now(), drop_missing=drop_missing)
    for text in entry.left_out:
        tell(f"left out: {clean(text)}")
    tell(f"{found.path}: {entry.label}, {counted(len(entry.rows), 'case')}")
    pinned = found.pinned
    tell(f"pinned, for drift: {pinned.label}" + ("" if pinned.number != entry.number else " (this one)"))
    return ExitCode.DONE


def baseline_pin(file: Path, *, entry: int | None, who: str, why: str) -> ExitCode:
    """`specbench baseline pin`."""
    found = store.pin(file, entry=entry, who=who, why=why, when=now())
    tell(f"{found.path}: drift is now seen against {found.pinned.label}")
    return ExitCode.DONE


def baseline_show(folder: Path) -> ExitCode:
    """`specbench baseline show`: every file, its entries and pins."""
    if not folder.exists():
        raise InputError("no such folder or file", remedy="give a folder of baselines", file=folder)
    found = store.baselines_in(folder)
    if not found:
        raise InputError("no baselines here", remedy="specbench baseline update RUN ...", file=folder)
    for one in found:
        device = clean(one.latest.manifest.get("device") or "an unknown device", 80)
        tell(f"{one.path}: {clean(one.scenario, 80)} on {device}, machine {one.fingerprint}")
        for entry in one.entries:
            marks = [word for word, other in (("latest", one.latest), ("pinned", one.pinned)) if other is entry]
            more = f", left out {counted(len(entry.left_out), 'case')}" if entry.left_out else ""
            shown = f"{counted(len(entry.rows), 'case')}{more}, from {clean(entry.source, 120)}"
            end = f" <- {', '.join(marks)}" if marks else ""
            tell(f"  {entry.label} by {clean(entry.who)}: {clean(entry.why)} ({shown}){end}")
        for pin in one.pins:
            tell(f"  pin of entry {pin.entry} on {clean(pin.when[:10])} by {clean(pin.who)}: {clean(pin.why)}")
    return ExitCode.DONE


def history(folder: Path, *, metrics: Sequence[str], policy_file: Path | None, json_file: Path | None) -> ExitCode:
    """`specbench history`."""
    policy = load_policy(policy_file) if policy_file is not None else DEFAULT
    found = trends.read_history(folder, metrics or trends.METRICS, policy)
    if json_file is not None:
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(trends.history_json(found), encoding="utf-8")
        except OSError as error:
            raise InputError(f"can't be written: {error.strerror or error}", file=json_file) from None
    show(trends.render_history(found))
    return ExitCode.DONE


def now() -> str:
    """The time to the second, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def show(content: RenderableType) -> None:
    """Print for people; in a log, where there is no terminal, lines are long enough for the table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    console.print(content)


def tell(text: str) -> None:
    Console(highlight=False).print(Text(text), soft_wrap=True)
