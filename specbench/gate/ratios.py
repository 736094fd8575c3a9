"""Ratio metrics of all cases of two runs: blocks -> arrays -> decisions -> verdicts with their reasons."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.gate.decide import CODES, INCONCLUSIVE, Decisions, Evidence, Rule, decide, evidence, outlying
from specbench.gate.evidence import LEAST, CaseRun, block_value
from specbench.gate.pair import FloatArray
from specbench.gate.policy import MetricPolicy, Policy
from specbench.gate.power import detectable, more_blocks
from specbench.gate.types import CaseVerdict

Value = tuple[int, float]
"""One block: its number, and the log of the metric."""
Groups = dict[str, tuple[list[Value], list[Value]]]
"""Blocks of baseline and candidate, by their prompts."""


@dataclass(frozen=True)
class Test:
    """One metric of one case that can be compared."""

    baseline: CaseRun
    candidate: CaseRun
    metric: str
    policy: MetricPolicy
    groups: Groups


def applies(metric: str, baseline: CaseRun, candidate: CaseRun) -> bool:
    """Whether a case has this ratio metric: a case that never drafts has no speedup; tokens a step are a matter of
    chance only where they need not repeat exactly; latencies are in rows that tell them."""
    drafts = baseline.has_drafts or candidate.has_drafts
    if metric in ("speedup", "ar_output_tokens_per_s"):
        return drafts
    if metric == "tokens_per_step":
        return drafts and not (baseline.is_repeatable and candidate.is_repeatable)
    if metric in ("tpot_s", "itl_p50_s", "itl_p99_s"):
        return all(any(pair.group is not None for pair in one.pairs) for one in (baseline, candidate))
    return True


def block_values(case: CaseRun, metric: str) -> list[float | None]:
    """The metric of each pair of blocks, in the order in which they were measured."""
    return [block_value(pair, metric) for pair in case.pairs]


def unusable(case: CaseRun, metric: str, values: Sequence[float | None]) -> str | None:
    """Why a side has no value that a ratio could be made of, or None; `values` are those of its blocks."""
    metrics = case.row.metrics or {}
    if metric in metrics:
        value = case.scalar(metric)
        if value is None:
            reasons = metrics.get("null_reasons")
            why = reasons.get(metric) if isinstance(reasons, dict) else None
            return f"is null ({why or metrics.get(f'{metric}_reason') or 'no reason was recorded'})"
        if value < LEAST:
            return f"is {value:g}"
    if 0.0 in values:
        return "is 0 in a block"
    return None


def grouped(sides: Sequence[tuple[CaseRun, Sequence[float | None]]]) -> Groups:
    """Blocks of baseline and candidate by their prompts: by the digest of the prompts where both runs tell, else by the
    block's number."""
    by_digest = all(pair.group is not None for case, _ in sides for pair in case.pairs)
    groups: Groups = {}
    log = math.log
    for side, (case, values) in enumerate(sides):
        for pair, value in zip(case.pairs, values, strict=True):
            if value:
                key = pair.group if by_digest and pair.group is not None else str(pair.index)
                both = groups.get(key)
                if both is None:
                    both = groups[key] = ([], [])
                both[side].append((pair.index, log(value)))
    return {key: both for key, both in groups.items() if both[0] and both[1]}


def arrays(batch: Sequence[Groups], shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Values and block numbers, float64[tests, groups, 2, repetitions], NaN where there is none."""
    values = np.full((len(batch), shape[0], 2, shape[1]), np.nan)
    index = np.full_like(values, np.nan)
    for test, groups in enumerate(batch):
        for place, both in enumerate(groups.values()):
            for side, blocks in enumerate(both):
                values[test, place, side, : len(blocks)] = [log for _, log in blocks]
                index[test, place, side, : len(blocks)] = [number for number, _ in blocks]
    return values, index


def gather(tests: Sequence[Groups]) -> Evidence:
    """Evidence of all tests, worked out together for those of one shape, in the order of `tests`."""
    shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, groups in enumerate(tests):
        deepest = max((len(side) for both in groups.values() for side in both), default=0)
        shapes[(len(groups), deepest)].append(place)
    parts, places = [], []
    for shape, members in shapes.items():
        if 0 in shape:
            parts.append(Evidence.empty(len(members)))
        else:
            parts.append(evidence(*arrays([tests[place] for place in members], shape)))
        places += members
    if not parts:
        return Evidence.empty(0)
    return Evidence.join(parts).take(np.argsort(places, kind="stable"))


def ratio_verdicts(
    pairs: Iterable[tuple[CaseRun, CaseRun]], policy: Policy, *, armed: bool = True
) -> list[CaseVerdict]:
    """Verdicts of all ratio metrics that are on, for cases whose rows are ok on both sides."""
    verdicts: list[CaseVerdict] = []
    tests: list[Test] = []
    for baseline, candidate in pairs:
        for metric, one in policy.gated("ratio").items():
            if not applies(metric, baseline, candidate):
                continue
            sides = [(case, block_values(case, metric)) for case in (baseline, candidate)]
            for side, (case, values) in zip(("baseline", "candidate"), sides, strict=True):
                why = unusable(case, metric, values)
                if why is not None:
                    verdicts.append(_invalid(baseline, candidate, metric, one, side, why))
                    break
            else:
                tests.append(Test(baseline, candidate, metric, one, grouped(sides)))
    if not tests:
        return verdicts
    found = gather([test.groups for test in tests])
    rule = Rule.join([Rule.of(t.policy.direction, t.policy.min_effect, t.policy.run_sd, 1) for t in tests])
    names = {name: number for number, name in enumerate(policy.metrics)}
    noise = np.array([names[test.metric] for test in tests], dtype=np.int64)
    decided = decide(found, rule, policy, np.zeros(len(tests), dtype=np.int64), noise)
    counted = int(np.isfinite(decided.p).sum())
    least = detectable(decided, policy, counted)
    more = more_blocks(found, decided, rule, policy, counted)
    for place, test in enumerate(tests):
        verdicts.append(
            _verdict(test, found, decided, rule, place, (float(least[place]), float(more[place])), policy, armed)
        )
    return verdicts


def _invalid(
    baseline: CaseRun, candidate: CaseRun, metric: str, policy: MetricPolicy, side: str, why: str
) -> CaseVerdict:
    return CaseVerdict(
        candidate.row.case_hash,
        candidate.row.case_name,
        metric,
        policy.direction,
        "INVALID",
        f"the {side}'s {metric} {why}, so no ratio can be made",
        baseline=baseline.scalar(metric),
        candidate=candidate.scalar(metric),
        min_effect=policy.min_effect,
        flags=(side,),
    )


def _verdict(
    test: Test,
    found: Evidence,
    decided: Decisions,
    rule: Rule,
    place: int,
    power: tuple[float, float],
    policy: Policy,
    armed: bool,
) -> CaseVerdict:
    code = int(decided.code[place])
    delta, low, high = (_finite(array[place]) for array in (found.delta, decided.low, decided.high))
    z = (delta or 0.0) * float(rule.sign[place])
    worse = float(rule.worse[place])
    blocks = int(found.blocks[place])
    flags: list[str] = []
    needed: int | None = None
    verdict = CODES[code]
    span = f"{_percent(delta)} [{_percent(low)}, {_percent(high)}] in {blocks} blocks"
    limit = f"{100 * test.policy.min_effect:g} %"
    early, late = (_percent(_finite(half)) for half in found.halves[place])
    halves = f"earlier half {early}, later half {late}"
    if verdict == "REGRESSION" and not armed:
        verdict, flags = "INCONCLUSIVE", ["not armed"]
        reason = f"{span}: a loss, but the gate's false alarms are above its promise here, so it is not armed"
    elif verdict == "REGRESSION":
        reason = f"{span}: worse by {limit} or more, q {_q(decided.q[place])}; {halves}"
    elif verdict == "IMPROVEMENT":
        reason = f"{span}: better by {limit} or more; {halves}"
        if abs(delta or 0.0) > policy.unexplained * worse and not policy.is_expected(
            test.candidate.row.case_name, test.metric
        ):
            flags.append("unexplained")
            reason += f"; beyond {policy.unexplained:g} x the effect: a stale baseline, or work that is no longer done?"
    elif verdict == "PASS":
        reason = f"{span}: no loss of {limit}" if test.policy.direction != "both" else f"{span}: no change of {limit}"
    elif blocks < policy.min_blocks or delta is None:
        needed = policy.min_blocks - blocks
        flags.append("underpowered")
        reason = f"{blocks} blocks in common, and nothing can be shown with fewer than {policy.min_blocks}"
    else:
        needed = None if math.isnan(power[1]) else int(power[1])
        piled = bool(outlying(found, rule)[place])
        reason, flags = _undecided(span, limit, z, worse, power[0], needed, decided, place, halves, policy, piled)
    out = int(found.below[place] + found.above[place])
    if out:
        reason += f"; {out} blocks stood far out and hardly count"
    return CaseVerdict(
        test.candidate.row.case_hash,
        test.candidate.row.case_name,
        test.metric,
        test.policy.direction,
        verdict,
        reason,
        baseline=_middle(test.groups, 0),
        candidate=_middle(test.groups, 1),
        ratio=None if delta is None else math.exp(delta),
        low=None if low is None else math.exp(max(low, -50.0)),
        high=None if high is None else math.exp(min(high, 50.0)),
        min_effect=test.policy.min_effect,
        p_value=_finite(decided.p[place]),
        q_value=_finite(decided.q[place]),
        blocks_needed=needed if code == INCONCLUSIVE else None,
        severity=abs(delta or 0.0) / worse,
        flags=tuple(flags),
    )


def _undecided(
    span: str,
    limit: str,
    z: float,
    worse: float,
    least: float,
    needed: int | None,
    decided: Decisions,
    place: int,
    halves: str,
    policy: Policy,
    piled: bool,
) -> tuple[str, list[str]]:
    flags = []
    significant = decided.q[place] <= policy.false_discovery
    if z <= -worse and significant and not decided.persistent[place]:
        return f"{span}: a loss that does not persist: {halves}", ["not persistent"]
    if piled:
        return f"{span}: some blocks are far slower than the rest, which the estimate leaves out: look at them", [
            "outliers"
        ]
    text = f"{span}: can't tell whether it lost {limit}"
    if least > worse:
        flags.append("underpowered")
        text += f"; this sample could not have shown less than {100 * -math.expm1(-least):.1f} %"
    if needed is None:
        return f"{text}; no number of further candidate blocks would: measure the baseline with more blocks too", flags
    return f"{text}; about {needed} more blocks would", flags


def _middle(groups: Groups, side: int) -> float | None:
    """Geometric mean over the groups of a side's mean log."""
    logs = [sum(log for _, log in both[side]) / len(both[side]) for both in groups.values()]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _percent(log: float | None) -> str:
    return "?" if log is None else f"{100 * math.expm1(min(log, 50.0)):+.1f} %"


def _q(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-6 else "below 1e-6"
