"""What the gate's answer says, in words: one home for all renderings, so that terminal, page and file agree."""

from __future__ import annotations

from collections.abc import Iterable

from specbench.errors import ExitCode
from specbench.gate.text import clean, counted
from specbench.gate.types import WORST_FIRST, CaseVerdict, GateResult, Verdict

UNEXPLAINED = "unexplained"
SIDES = ("candidate", "baseline")
"""Flags that say whose fault it is, as the reason does."""
HEADLINES = {
    ExitCode.DONE: "PASSED",
    ExitCode.FAILED: "REGRESSION",
    ExitCode.BAD_INPUT: "WRONG INPUT",
    ExitCode.INCONCLUSIVE: "INCONCLUSIVE",
    ExitCode.BAD_ENVIRONMENT: "INVALID",
}
MEANINGS: dict[Verdict, str] = {
    "REGRESSION": "worse than the baseline by more than the policy allows",
    "INVALID": "one side can't be compared: an invalid or failed cell, a zero or null value",
    "MISSING": "in the baseline, not in the candidate",
    "INCONCLUSIVE": "the samples can't tell",
    "IMPROVEMENT": "better than the baseline by more than the smallest effect that counts",
    "NEW": "in the candidate, not in the baseline",
    "PASS": "no change that counts",
}


def ordered(verdicts: Iterable[CaseVerdict]) -> list[CaseVerdict]:
    """Worst first: by kind of verdict, unexplained improvements before others, then by severity, name and metric."""
    rank = {verdict: place for place, verdict in enumerate(WORST_FIRST)}
    return sorted(
        verdicts,
        key=lambda one: (rank[one.verdict], UNEXPLAINED not in one.flags, -one.severity, one.case_name, one.metric),
    )


def deserves_a_look(one: CaseVerdict) -> bool:
    """True for everything but a plain pass or a plain improvement."""
    return one.verdict not in ("PASS", "IMPROVEMENT") or UNEXPLAINED in one.flags


def headline(result: GateResult) -> str:
    """ "REGRESSION (exit code 1): quickstart, 2 of 48 comparisons"."""
    name = clean(result.scenario or "unnamed scenario", 120)
    return f"{HEADLINES[result.exit_code]} (exit code {int(result.exit_code)}): {name}"


def counts(result: GateResult) -> str:
    """ "2 REGRESSION, 1 NEW, 45 PASS": verdicts that there are, worst first."""
    found = [f"{count:,} {verdict}" for verdict in WORST_FIRST if (count := result.count(verdict))]
    return ", ".join(found) or "no verdicts"


def summary(result: GateResult) -> list[str]:
    """Sentences under the headline: counts, reasons, whether the gate is armed, notes. Not yet escaped for any place,
    but cleaned."""
    lines = [f"{counts(result)}; {counted(result.compared, 'comparison')} of two values."]
    lines += [clean(reason) for reason in result.reasons]
    if result.armed is not None:
        lines.append(
            "Self-test: the gate keeps its promise on false alarms, it is armed."
            if result.armed
            else "Self-test: NOT ARMED, this gate's false alarms are more than it promises."
        )
    return lines + [clean(note) for note in result.notes]


def title(one: CaseVerdict) -> str:
    """ "ngram(3) · depth 2 · batch 1 · T 0 · speedup": one for each verdict of a result, for lists of tests."""
    pinned = " (against the pinned baseline)" if "drift" in one.flags else ""
    return f"{clean(one.case_name)} · {clean(one.metric)}{pinned}"


def reason(one: CaseVerdict) -> str:
    """The reason, with what would settle it and the flags."""
    more = []
    if one.blocks_needed:
        more.append(f"about {counted(one.blocks_needed, 'more block')} would settle it (--extend {one.blocks_needed})")
    more += [clean(flag) for flag in one.flags if flag not in SIDES]
    return clean(one.reason) + (f" [{'; '.join(more)}]" if more else "")


def sides(result: GateResult) -> list[tuple[str, str]]:
    """What was compared: name and value, for a small table."""
    return [
        ("candidate", clean(result.candidate_dir or "unknown")),
        ("baseline", clean(result.baseline_dir or "unknown")),
        ("machine of the candidate", clean(result.fingerprint_candidate or "unknown")),
        ("machine of the baseline", clean(result.fingerprint_baseline or "unknown")),
    ]
