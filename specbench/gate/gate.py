"""The gate: candidate and baseline -> verdicts -> exit code. It never passes on nothing.

    from specbench.gate.gate import run_gate
    result = run_gate(Path("runs/pr"), Path("results/baselines/ci"), load_policy("policy.yaml"))

Exit codes, the first that applies: 4 where the machine or scenario is another, there is no baseline or it can't be
read, or nothing was compared; 1 for a regression or a cell that the candidate got wrong; 4 for invalid cells of the
baseline and cells that failed; 3 where something is inconclusive or missing; else 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.gate.evidence import Run, load_run
from specbench.gate.identity import differences
from specbench.gate.policy import DEFAULT, Policy
from specbench.gate.types import WORST_FIRST, CaseVerdict, GateResult
from specbench.gate.verdicts import CASE, compare, refused, unmatched


def run_gate(
    candidate: Path,
    baseline: Path,
    policy: Policy = DEFAULT,
    *,
    armed: bool | None = None,
) -> GateResult:
    """Hold the run in `candidate` against the one in `baseline`. `armed` is what a self-test said; where it is False no
    ratio is called a regression. Raises InputError where the candidate's folder holds no run."""
    candidate, baseline = Path(candidate), Path(baseline)
    try:
        run = load_run(candidate)
    except InvalidEnvironmentError as error:
        return _closed([], f"the candidate can't be read: {error}", None, None, policy, (candidate, baseline), armed)
    try:
        base = load_run(baseline)
    except (InputError, InvalidEnvironmentError) as error:
        missing = isinstance(error, InputError)
        verdicts = unmatched(run) if missing else refused(run, "the baseline can't be read")
        reason = f"there is no baseline: {error}" if missing else f"the baseline can't be read: {error}"
        return _closed(verdicts, reason, run, None, policy, (candidate, baseline), armed)
    return _gated(run, base, policy, armed)


def _gated(run: Run, base: Run, policy: Policy, armed: bool | None) -> GateResult:
    places = (run.directory, base.directory)
    apart = differences(base.manifest, run.manifest)
    if apart:
        reason = f"the baseline is of another machine or scenario ({'; '.join(apart)})"
        return _closed(refused(run, reason), reason, run, base, policy, places, armed)
    notes = [*base.notes, *run.notes]
    if run.revision and run.revision == base.revision:
        notes.append(f"both runs are of the same code, {run.revision}")
    verdicts = compare(run, base, policy, armed=armed is not False)
    code, reasons = _outcome(verdicts, policy, armed)
    notes += _notes(run, base, verdicts, policy)
    return _result(verdicts, code, reasons, notes, run, base, policy, places, armed)


def is_comparison(one: CaseVerdict) -> bool:
    """Whether a verdict rests on two values, or two sets of blocks, held against each other."""
    return one.metric != CASE and one.verdict in ("PASS", "REGRESSION", "IMPROVEMENT", "INCONCLUSIVE")


def _outcome(verdicts: Sequence[CaseVerdict], policy: Policy, armed: bool | None) -> tuple[ExitCode, list[str]]:
    """The exit code, and a sentence for each kind of verdict that bears on it, the gravest first."""
    if not any(is_comparison(one) for one in verdicts):
        listed = _named([one for one in verdicts if one.verdict in ("MISSING", "NEW", "INVALID")])
        return ExitCode.BAD_ENVIRONMENT, [f"nothing was compared ({listed or 'no cases'}), and nothing passes on that"]
    worse = [one for one in verdicts if one.verdict == "REGRESSION"]
    invalid = [one for one in verdicts if one.verdict == "INVALID"]
    wrong = [one for one in invalid if "candidate" in one.flags]
    unfit = [one for one in invalid if "candidate" not in one.flags]
    missing = [one for one in verdicts if one.verdict == "MISSING"]
    unclear = [one for one in verdicts if one.verdict == "INCONCLUSIVE"]
    told: list[tuple[ExitCode, str]] = []
    if worse:
        told.append((ExitCode.FAILED, f"regressions: {_named(worse)}"))
    if wrong:
        told.append((ExitCode.FAILED, f"invalid in the candidate: {_named(wrong)}"))
    if missing and policy.missing == "regression":
        told.append(
            (ExitCode.FAILED, f"missing in the candidate, which the policy calls a regression: {_named(missing)}")
        )
    if unfit:
        told.append((ExitCode.BAD_ENVIRONMENT, f"can't be compared: {_named(unfit)}"))
    if armed is False:
        told.append((ExitCode.BAD_ENVIRONMENT, "the gate is not armed: its self-test gave too many false alarms"))
    if missing and policy.missing == "inconclusive":
        told.append((ExitCode.INCONCLUSIVE, f"missing in the candidate: {_named(missing)}"))
    if unclear:
        told.append((ExitCode.INCONCLUSIVE, f"inconclusive: {_named(unclear)}"))
    if told:
        return told[0][0], [text for _, text in told]
    compared = sum(is_comparison(one) for one in verdicts)
    return ExitCode.DONE, [f"no regression in {compared:,} comparisons"]


def _notes(run: Run, base: Run, verdicts: Sequence[CaseVerdict], policy: Policy) -> list[str]:
    notes = []
    odd = [one for one in verdicts if "unexplained" in one.flags]
    if odd:
        notes.append(
            f"improvements beyond {policy.unexplained:g} x the effect, which nobody expected: {_named(odd)}; "
            "look for a stale baseline or for work that is no longer done"
        )
    new = [one for one in verdicts if one.verdict == "NEW"]
    if new:
        notes.append(f"new, not in the baseline: {_named(new)}")
    if policy.gated("single") and any(case.row.conditions.get("device") == "cpu" for case in run.cases.values()):
        notes.append("peak memory is not gated on a CPU: it is the whole process's")
    needs = [one.blocks_needed for one in verdicts if one.blocks_needed is not None]
    if needs:
        notes.append(f"--extend {max(needs)} would probably settle {len(needs)} inconclusive verdicts")
    return notes


def undecided(result: GateResult) -> tuple[str, ...]:
    """Hashes of the cases that further blocks may settle, in the order of the verdicts, each once."""
    return tuple(dict.fromkeys(one.case_hash for one in result.verdicts if one.verdict == "INCONCLUSIVE"))


def worst_first(verdicts: Sequence[CaseVerdict]) -> tuple[CaseVerdict, ...]:
    rank = {verdict: place for place, verdict in enumerate(WORST_FIRST)}
    return tuple(
        sorted(
            verdicts,
            key=lambda one: (
                rank[one.verdict],
                "unexplained" not in one.flags,
                -one.severity,
                one.case_name,
                one.metric,
            ),
        )
    )


def _closed(
    verdicts: Sequence[CaseVerdict],
    reason: str,
    run: Run | None,
    base: Run | None,
    policy: Policy,
    places: tuple[Path, Path],
    armed: bool | None,
) -> GateResult:
    """A result in which nothing was compared."""
    return _result(verdicts, ExitCode.BAD_ENVIRONMENT, [" ".join(reason.split())], [], run, base, policy, places, armed)


def _result(
    verdicts: Sequence[CaseVerdict],
    code: ExitCode,
    reasons: Sequence[str],
    notes: Sequence[str],
    run: Run | None,
    base: Run | None,
    policy: Policy,
    places: tuple[Path, Path],
    armed: bool | None,
) -> GateResult:
    assert all(math.isfinite(one.severity) and one.reason for one in verdicts)
    return GateResult(
        verdicts=worst_first(verdicts),
        fingerprint_baseline=base.fingerprint if base is not None else "",
        fingerprint_candidate=run.fingerprint if run is not None else "",
        policy=policy.to_dict(),
        exit_code=code,
        reasons=tuple(reasons),
        armed=armed,
        compared=sum(is_comparison(one) for one in verdicts),
        notes=tuple(notes),
        scenario=run.name if run is not None else "",
        candidate_dir=str(places[0]),
        baseline_dir=str(places[1]),
    )


def _named(verdicts: Sequence[CaseVerdict], most: int = 5) -> str:
    """ "ngram(3) · depth 4 (speedup, tokens), suffix · depth 8 and 3 more cases": cases with their metrics."""
    by_case: dict[str, list[str]] = {}
    for one in worst_first(verdicts):
        by_case.setdefault(one.case_name, []).extend([one.metric] if one.metric != CASE else [])
    names = [f"{name} ({', '.join(dict.fromkeys(m))})" if m else name for name, m in by_case.items()]
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more cases" if left > 0 else "")
