"""Gates that need no quiet machine: what the same code must do again, compared exactly, so that they never flake.

Greedy decoding of seeded prompts gives the same tokens, drafts, FLOPs and bytes block for block on the same machine; a
predicted row is arithmetic; a kernel's spills are the compiler's. Blocks are compared by number, as far as both runs
went. Rows without the counts of each block are compared by what they have: tokens and steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from specbench.errors import InvalidEnvironmentError
from specbench.gate.evidence import CaseRun, Pair
from specbench.gate.policy import MetricPolicy, Policy
from specbench.gate.types import CaseVerdict, Verdict
from specbench.report.rows import number

KERNELS_FILE = "kernels.json"
"""What `specbench kernels --compile-only --json` wrote, beside a run's rows."""
CLOSE = 1e-9
"""Relative difference of sums of floats that is rounding: FLOPs and bytes are whole numbers summed as float64."""
MAY_BE_ZERO = ("acceptance_rate", "kv_allocator_calls", "spill_bytes", "tokens", "kernel_launches")

Common = list[tuple[Pair, Pair]]


def exact_verdicts(baseline: CaseRun, candidate: CaseRun, policy: Policy) -> list[CaseVerdict]:
    """Verdicts of all exact metrics that are on and that both rows tell."""
    on = policy.gated("exact")
    out = []
    if baseline.is_predicted and candidate.is_predicted:
        return [_predicted(baseline, candidate, on["predicted"])] if "predicted" in on else []
    common = _common(baseline, candidate)
    told = bool(common) and all(pair.group is not None for both in common for pair in both)
    same_work = not told or all(a.group == b.group for a, b in common)
    if not same_work:
        reason = "the blocks did not decode the same prompts, so nothing can be compared exactly"
        return (
            [_made(candidate, "tokens", on["tokens"], "INVALID", reason, flags=("baseline",))] if "tokens" in on else []
        )
    if baseline.is_greedy and candidate.is_greedy and common and "tokens" in on:
        out.append(_tokens(common, told, candidate, on["tokens"]))
    repeatable = baseline.is_repeatable and candidate.is_repeatable
    if repeatable and common and baseline.has_drafts and candidate.has_drafts and "acceptance_rate" in on:
        out.append(_acceptance(common, told, candidate, on["acceptance_rate"]))
    if repeatable and told:
        for metric in ("flops", "bytes", "kv_allocator_calls"):
            if metric in on:
                out.append(_per_step(common, metric, candidate, on[metric]))
    if repeatable and "kernel_launches" in on:
        sides = baseline.scalar("kernel_launches"), candidate.scalar("kernel_launches")
        if sides[0] is not None and sides[1] is not None:
            out.append(counted(candidate, "kernel_launches", on["kernel_launches"], sides[0], sides[1], "a step"))
    return out


def _common(baseline: CaseRun, candidate: CaseRun) -> Common:
    """Pairs of the same number, of the first measuring alone: an extension begins from the first number again."""
    first = {pair.index: pair for pair in baseline.pairs if pair.segment == 0}
    return [(first[pair.index], pair) for pair in candidate.pairs if pair.segment == 0 and pair.index in first]


def _tokens(common: Common, told: bool, candidate: CaseRun, policy: MetricPolicy) -> CaseVerdict:
    """Digests of the output tokens, arm by arm; without them, how many tokens each arm's block committed."""
    parted = 0
    for a, b in common:
        arms = ((a.ar, b.ar), (a.spec, b.spec))
        keys: Callable[[Mapping[str, Any]], Any] = (
            (lambda block: block["facts"]["outputs"]) if told else (lambda block: block["tokens"])
        )
        parted += any(x is not None and y is not None and keys(x) != keys(y) for x, y in arms)
    what = "output tokens" if told else "numbers of tokens"
    if not parted:
        return _made(candidate, "tokens", policy, "PASS", f"the same {what} in all {len(common)} blocks in common")
    reason = f"{parted} of {len(common)} blocks in common have other {what}: the same prompts were answered differently"
    return _made(candidate, "tokens", policy, "REGRESSION", reason, severity=parted / len(common))


def _acceptance(common: Common, told: bool, candidate: CaseRun, policy: MetricPolicy) -> CaseVerdict:
    """Accepted over drafted where rows tell, else tokens a step; every block must agree, not only the sums."""
    if told:
        counts = [
            [
                (p.spec["facts"]["num_accepted_tokens"], p.spec["facts"]["num_draft_tokens"]) if p.spec else (0, 0)
                for p in both
            ]
            for both in common
        ]
    else:
        counts = [[(p.spec["tokens"], p.spec["steps"]) if p.spec else (0, 0) for p in both] for both in common]
    sums = [[sum(pair[side][part] for pair in counts) for part in (0, 1)] for side in (0, 1)]
    values = [top / bottom if bottom else 0.0 for top, bottom in sums]
    metric = "acceptance_rate" if told else "tokens_per_step"
    parted = sum(a != b for a, b in counts)
    if not parted:
        reason = f"the same in all {len(common)} blocks in common"
        return _made(candidate, metric, policy, "PASS", reason, values[0], values[1])
    verdict = _direction(policy, values[1] - values[0])
    reason = f"{parted} of {len(common)} blocks in common accepted other drafts: {values[0]:.4g} became {values[1]:.4g}"
    return _made(candidate, metric, policy, verdict, reason, values[0], values[1])


def _per_step(common: Common, metric: str, candidate: CaseRun, policy: MetricPolicy) -> CaseVerdict:
    """A count per step of the main arm, over the blocks in common."""
    sides = []
    for side in (0, 1):
        blocks: list[Mapping[str, Any]] = [both[side].main for both in common]
        steps = sum(block["steps"] for block in blocks)
        sides.append(math.fsum(block["facts"][metric] for block in blocks) / steps if steps else 0.0)
    return counted(candidate, metric, policy, sides[0], sides[1], "a step")


def counted(
    candidate: CaseRun | tuple[str, str], metric: str, policy: MetricPolicy, baseline: float, value: float, unit: str
) -> CaseVerdict:
    """Two counts that must be equal; `candidate` is the case or (hash, name)."""
    if baseline <= 0 and metric not in MAY_BE_ZERO:
        reason = f"the baseline's {metric} is {baseline:g}, which is no measurement"
        return _made(candidate, metric, policy, "INVALID", reason, baseline, value, flags=("baseline",))
    if abs(value - baseline) <= CLOSE * max(abs(value), abs(baseline)):
        return _made(candidate, metric, policy, "PASS", f"exactly {_count(value)} {unit} in both", baseline, value)
    reason = f"{_count(baseline)} {unit} became {_count(value)}"
    return _made(candidate, metric, policy, _direction(policy, value - baseline), reason, baseline, value)


def _predicted(baseline: CaseRun, candidate: CaseRun, policy: MetricPolicy) -> CaseVerdict:
    """Every number of a row that the cost model computed."""
    a, b = (_numbers(case.row.metrics or {}) for case in (baseline, candidate))
    if not a:
        reason = "the baseline's prediction holds no numbers"
        return _made(candidate, "predicted", policy, "INVALID", reason, flags=("baseline",))
    parted = [name for name in a if name not in b or abs(a[name] - b[name]) > CLOSE * max(abs(a[name]), abs(b[name]))]
    parted += [name for name in b if name not in a]
    if not parted:
        return _made(candidate, "predicted", policy, "PASS", f"all {len(a)} predicted numbers are the same")
    first = parted[0]
    reason = f"{len(parted)} of {len(a)} predicted numbers changed, {first} among them"
    return _made(candidate, "predicted", policy, "REGRESSION", reason, a.get(first), b.get(first))


def _numbers(value: object, path: str = "") -> dict[str, float]:
    """Every number inside, by its path."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        found = number(value)
        return {} if found is None else {path: found}
    out: dict[str, float] = {}
    for key, item in items:
        out |= _numbers(item, f"{path}.{key}" if path else str(key))
    return out


def kernel_verdicts(baseline: Path, candidate: Path, policy: Policy) -> list[CaseVerdict]:
    """Spills of each compiled kernel, where the candidate's folder or the baseline's has a kernels.json."""
    on = policy.gated("exact").get("spill_bytes")
    before, after = _spills(baseline / KERNELS_FILE), _spills(candidate / KERNELS_FILE)
    if on is None:
        return []
    out = []
    for name, spilled in (before or {}).items():
        if after is None or name not in after:
            out.append(_made((name, name), "spill_bytes", on, "MISSING", "the candidate did not compile it", spilled))
        else:
            out.append(counted((name, name), "spill_bytes", on, spilled, after[name], "bytes spilled"))
    for name in after or {}:
        if name not in (before or {}):
            out.append(_made((name, name), "spill_bytes", on, "NEW", "the baseline has no such kernel"))
    return out


def _spills(file: Path) -> dict[str, float] | None:
    """Bytes stored and loaded for spills, by kernel, case and architecture; None where there is no file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidEnvironmentError(f"can't be read: {error}", file=file) from None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise InvalidEnvironmentError("holds no rows of compiled kernels", file=file)
    out: dict[str, float] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("error") is not None:
            continue
        stored, loaded = number(row.get("spill_store_bytes")), number(row.get("spill_load_bytes"))
        if stored is not None and loaded is not None:
            name = f"{row.get('kernel')} · {row.get('op')} · {row.get('case')} · sm_{row.get('arch')}"
            out[name] = stored + loaded
    return out


def _direction(policy: MetricPolicy, change: float) -> Verdict:
    good = {"up": change > 0, "down": change < 0, "both": False}[policy.direction]
    return "IMPROVEMENT" if good else "REGRESSION"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.6g}"


def _made(
    case: CaseRun | tuple[str, str],
    metric: str,
    policy: MetricPolicy,
    verdict: Verdict,
    reason: str,
    baseline: float | None = None,
    candidate: float | None = None,
    severity: float | None = None,
    flags: tuple[str, ...] = (),
) -> CaseVerdict:
    case_hash, name = case if isinstance(case, tuple) else (case.row.case_hash, case.row.case_name)
    ratio = candidate / baseline if baseline and candidate is not None and baseline > 0 else None
    change = abs(math.log(ratio)) if ratio is not None and ratio > 0 else float(verdict == "REGRESSION")
    return CaseVerdict(
        case_hash,
        name,
        metric,
        policy.direction,
        verdict,
        reason,
        baseline=baseline,
        candidate=candidate,
        ratio=ratio,
        severity=change if severity is None else severity,
        flags=flags,
    )
