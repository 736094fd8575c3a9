"""Cases of two runs, matched by hash: which can be compared, and what those that can't amount to."""

from __future__ import annotations

from specbench.gate.evidence import CaseRun, Run
from specbench.gate.exact import exact_verdicts, kernel_verdicts
from specbench.gate.policy import Policy
from specbench.gate.ratios import ratio_verdicts
from specbench.gate.single import single_verdicts
from specbench.gate.types import CaseVerdict, Verdict

CASE = "case"
"""The metric of a verdict on the case as a whole."""


def compare(candidate: Run, baseline: Run, policy: Policy, *, armed: bool = True) -> list[CaseVerdict]:
    """All verdicts of two runs of the same machine and scenario, in the order of the baseline's cases."""
    out: list[CaseVerdict] = []
    comparable: list[tuple[CaseRun, CaseRun]] = []
    for case_hash, before in baseline.cases.items():
        after = candidate.cases.get(case_hash)
        found = _unfit(before, after, case_hash in baseline.foreign, case_hash in candidate.foreign)
        if found is not None:
            out.append(found)
        elif after is not None and before.row.status == after.row.status == "ok":
            comparable.append((before, after))
    for case_hash, case in candidate.cases.items():
        if case_hash not in baseline.cases:
            found = _new(case, case_hash in candidate.foreign)
            out += [found] if found is not None else []
    for before, after in comparable:
        out += exact_verdicts(before, after, policy)
        out += single_verdicts(before, after, policy)
    measured = [both for both in comparable if not both[0].is_predicted]
    out += ratio_verdicts(measured, policy, armed=armed)
    return out + kernel_verdicts(baseline.directory, candidate.directory, policy)


def _unfit(before: CaseRun, after: CaseRun | None, foreign_before: bool, foreign_after: bool) -> CaseVerdict | None:
    """The verdict on a case that can't be compared, or None. What the baseline lacks is told before what the candidate
    does."""
    status = before.row.status
    if status == "skipped":  # there is nothing to hold the candidate against, nor to miss
        return _new(after, foreign_after) if after is not None else None
    if foreign_before:
        return _case(
            before, "INVALID", "the baseline's row was measured on another machine than its manifest's", "baseline"
        )
    if status != "ok":
        return _case(before, "INVALID", _why("baseline", before), "baseline")
    if after is None:
        return _case(before, "MISSING", "the baseline has this case, the candidate does not")
    if after.row.status == "skipped":
        return _case(after, "MISSING", f"the candidate skipped it: {after.row.reason}")
    return _broken(after, foreign_after) or _other_work(before, after)


def _other_work(before: CaseRun, after: CaseRun) -> CaseVerdict | None:
    """Two ok rows of one case must be of the same work: backend, weights and prompts, real or made up."""
    for name, a, b in (
        ("backend", before.row.axes.get("backend"), after.row.axes.get("backend")),
        ("weights and prompts", before.row.conditions["weights"], after.row.conditions["weights"]),
        ("synthetic", before.row.conditions["synthetic"], after.row.conditions["synthetic"]),
        ("predicted", before.is_predicted, after.is_predicted),
    ):
        if a != b:
            return _case(after, "INVALID", f"not the same work: {name} was {a}, is {b}", "environment")
    return None


def refused(candidate: Run, reason: str) -> list[CaseVerdict]:
    """Every case of a candidate that has no baseline it may be held against."""
    return [_case(case, "INVALID", reason, "environment") for case in candidate.cases.values()]


def unmatched(run: Run) -> list[CaseVerdict]:
    """Every case of a candidate without any baseline."""
    found = [_new(case, case_hash in run.foreign) for case_hash, case in run.cases.items()]
    return [one for one in found if one is not None]


def _broken(case: CaseRun, foreign: bool) -> CaseVerdict | None:
    """The verdict on a candidate's row that can't be used, whatever the baseline holds."""
    if foreign:
        reason = "the candidate's row was measured on another machine than its manifest's"
        return _case(case, "INVALID", reason, "environment")
    if case.row.status == "failed":
        return _case(case, "INVALID", _why("candidate", case), "environment")
    if case.row.status == "invalid":
        return _case(case, "INVALID", _why("candidate", case), "candidate")
    return None


def _new(case: CaseRun, foreign: bool) -> CaseVerdict | None:
    """The verdict on a case that the baseline lacks; a skipped one is lacking on both sides."""
    if case.row.status == "skipped":
        return None
    return _broken(case, foreign) or _case(case, "NEW", "the candidate has this case, the baseline does not")


def _why(side: str, case: CaseRun) -> str:
    return f"the {side}'s row is {case.row.status}: {case.row.reason or 'no reason was recorded'}"


def _case(case: CaseRun, verdict: Verdict, reason: str, *flags: str) -> CaseVerdict:
    return CaseVerdict(case.row.case_hash, case.row.case_name, CASE, "both", verdict, reason, flags=flags)
