"""Metrics of which a run has one figure: held to the minimum effect, without an interval."""

from __future__ import annotations

from specbench.gate.evidence import LEAST, CaseRun
from specbench.gate.policy import Policy
from specbench.gate.types import CaseVerdict, Verdict

DEVICES = ("cuda",)
"""Where a peak is the allocator's own count. On a CPU it is the process's, which holds whatever ran before."""


def single_verdicts(baseline: CaseRun, candidate: CaseRun, policy: Policy) -> list[CaseVerdict]:
    """Peak memory on a GPU."""
    out = []
    for metric, one in policy.gated("single").items():
        if candidate.row.conditions.get("device") not in DEVICES:
            continue
        before, after = baseline.scalar(metric), candidate.scalar(metric)
        verdict: Verdict
        flags: tuple[str, ...] = ()
        ratio = after / before if before is not None and after is not None and before >= LEAST else None
        if ratio is None or after is None or after < LEAST:
            side = "candidate" if before is not None and before >= LEAST else "baseline"
            verdict, flags, reason = "INVALID", (side,), f"the {side}'s {metric} is null or 0, so no ratio can be made"
        else:
            change = f"{100 * (ratio - 1):+.2f} %, one figure a run"
            if one.direction == "down":
                worse, better = ratio >= 1 + one.min_effect, ratio <= 1 - one.min_effect
            else:
                worse, better = ratio <= 1 - one.min_effect, ratio >= 1 + one.min_effect
            if one.direction == "both":
                worse, better = worse or better, False
            verdict = "REGRESSION" if worse else "IMPROVEMENT" if better else "PASS"
            reason = f"{change}; counts from {100 * one.min_effect:g} % on"
            odd = better and abs(ratio - 1) > policy.unexplained * one.min_effect
            if odd and not policy.is_expected(candidate.row.case_name, metric):
                flags = ("unexplained",)
        severity = abs(ratio - 1) / one.min_effect if ratio is not None else 0.0
        out.append(
            CaseVerdict(
                candidate.row.case_hash,
                candidate.row.case_name,
                metric,
                one.direction,
                verdict,
                reason,
                baseline=before,
                candidate=after,
                ratio=ratio,
                min_effect=one.min_effect,
                severity=severity,
                flags=flags,
            )
        )
    return out
