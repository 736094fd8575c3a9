"""What the gate says, as plain frozen data: one verdict for each case and metric, and one result for the whole.

Everything that renders (terminal, Markdown, JUnit, JSON) reads these and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specbench.errors import ExitCode

Verdict = Literal["PASS", "REGRESSION", "IMPROVEMENT", "INCONCLUSIVE", "MISSING", "NEW", "INVALID"]
Direction = Literal["up", "down", "both"]
"""Which way is better: "up" more is, "down" less is, "both" any change is a regression."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
WORST_FIRST: tuple[Verdict, ...] = (
    *("REGRESSION", "INVALID", "MISSING", "INCONCLUSIVE", "IMPROVEMENT", "NEW", "PASS"),
)
"""The order in which verdicts are shown."""


@dataclass(frozen=True)
class CaseVerdict:
    """One metric of one case.

    `metric` is a name of definitions.py, or "case" where the verdict is on the case as a whole (MISSING, NEW, INVALID).
    `baseline` and `candidate` are the values compared, in the metric's unit. `ratio` = candidate / baseline with its
    interval [`low`, `high`] (confidence in the policy), None where nothing was to be had; an exact metric has no
    interval. `min_effect` is relative (0.05 is 5 %), 0 for exact. `p_value` is one-sided, against "no change", towards
    the worse side; `q_value` is it after Benjamini-Hochberg over the cases. `reason` is one sentence for people, never
    empty. `blocks_needed`: how many more blocks of the candidate would probably settle it, None where none would
    or none are needed. `severity` sorts within a verdict, larger is worse: |log ratio| / min_effect, always finite.
    `flags` are words such as "unexplained" (an improvement beyond 3 x the effect), "underpowered" (this sample could
    not have shown a regression), "not persistent" (one half of the blocks says otherwise).
    """

    case_hash: str
    case_name: str
    metric: str
    direction: Direction
    verdict: Verdict
    reason: str
    baseline: float | None = None
    candidate: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    min_effect: float = 0.0
    p_value: float | None = None
    q_value: float | None = None
    blocks_needed: int | None = None
    severity: float = 0.0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateResult:
    """The gate's answer. `exit_code`: 0 passed, 1 regression, 3 inconclusive, 4 the environment or the baseline is
    invalid (2, wrong input, is an InputError and never a result).

    `verdicts` are worst first. `compared` counts those that rest on a comparison of two values. `armed` is None where
    no self-test was made, else whether the gate's false alarms kept its promise. `reasons` say why the exit code is
    what it is, the gravest first, never empty; `notes` are what a reader should also know. Fingerprints are those of
    gate/identity.py; "" where a side has none. `policy` is the policy as JSON would hold it.
    """

    verdicts: tuple[CaseVerdict, ...]
    fingerprint_baseline: str
    fingerprint_candidate: str
    policy: Mapping[str, Any]
    exit_code: ExitCode
    reasons: tuple[str, ...]
    armed: bool | None
    compared: int
    notes: tuple[str, ...]
    scenario: str
    candidate_dir: str
    baseline_dir: str

    def count(self, verdict: Verdict) -> int:
        """How many verdicts of this kind there are."""
        return sum(one.verdict == verdict for one in self.verdicts)

    @property
    def passed(self) -> bool:
        return self.exit_code == ExitCode.DONE
