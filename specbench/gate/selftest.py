"""A/A: a run's own blocks, split in two at random, must not look like a regression more often than the gate promises.

    specbench gate --self-test RUN

Blocks are dealt out in stretches of neighbours, so that what lasts longer than a block stays together as it would
between two runs. What differs from run to run is not in one run: `run_sd` is taken as 0 here, which is stricter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from specbench.errors import ExitCode
from specbench.gate.decide import REGRESSION, Evidence, Rule, decide, evidence
from specbench.gate.evidence import CaseRun, block_value, load_run
from specbench.gate.pair import FloatArray
from specbench.gate.persist import MIN_IN_HALF
from specbench.gate.policy import DEFAULT, Policy
from specbench.gate.ratios import applies
from specbench.gate.types import CaseVerdict, GateResult

SPLITS = 400
MIN_BLOCKS = 4 * MIN_IN_HALF
"""Two sides, each with two halves."""
CHUNK = 20_000
"""Tests that are worked out at once."""


def self_test(directory: Path, policy: Policy = DEFAULT, *, splits: int = SPLITS, seed: int = 0) -> GateResult:
    """Split every case's blocks `splits` times. `armed` if at most the policy's share of splits, of all cases together,
    would have been called a regression. Exit code 0 if armed, 4 if not, 3 where no case has the 8 blocks it takes."""
    run = load_run(Path(directory))
    fit_cases: list[CaseRun] = []
    short: list[CaseRun] = []
    for case in run.cases.values():
        if case.row.status == "ok" and not case.is_predicted:
            (fit_cases if len(case.pairs) >= MIN_BLOCKS else short).append(case)
    tests = [
        (case, metric)
        for case in fit_cases
        for metric in policy.gated("ratio")
        if applies(metric, case, case) and _series(case, metric) is not None
    ]
    alarms = _alarms(tests, policy, splits, seed)
    notes = [f"{len(short)} cases have fewer than {MIN_BLOCKS} blocks and were left out"] if short else []
    notes.append(
        "a run can't show how much runs differ by themselves; repeat the run to see that (run_sd in the policy)"
    )
    verdicts = [_verdict(case, metric, alarms[place], policy) for place, (case, metric) in enumerate(tests)]
    if not tests:
        code, armed = ExitCode.INCONCLUSIVE, False
        reason = f"no case has the {MIN_BLOCKS} blocks that a self-test takes: the gate is not armed"
    else:
        rate = float(alarms.any(axis=0).mean())
        armed = rate <= policy.false_alarms
        code = ExitCode.DONE if armed else ExitCode.BAD_ENVIRONMENT
        promise = f"{100 * policy.false_alarms:g} %"
        reason = f"{100 * rate:.1f} % of {splits} splits of this run would have been called a regression; " + (
            f"the promise is {promise}: the gate is armed"
            if armed
            else f"that is over the promise of {promise}: the gate is not armed"
        )
    verdicts.sort(key=lambda one: (one.verdict == "PASS", -one.severity, one.case_name, one.metric))
    return GateResult(
        verdicts=tuple(verdicts),
        fingerprint_baseline=run.fingerprint,
        fingerprint_candidate=run.fingerprint,
        policy=policy.to_dict(),
        exit_code=code,
        reasons=(reason,),
        armed=armed,
        compared=len(tests),
        notes=tuple(notes),
        scenario=run.name,
        candidate_dir=str(directory),
        baseline_dir=str(directory),
    )


def _verdict(case: CaseRun, metric: str, alarms: np.ndarray, policy: Policy) -> CaseVerdict:
    rate = float(alarms.mean())
    one = policy.metrics[metric]
    return CaseVerdict(
        case.row.case_hash,
        case.row.case_name,
        metric,
        one.direction,
        "PASS" if rate <= policy.false_alarms else "INCONCLUSIVE",
        f"{int(alarms.sum())} of {len(alarms)} splits of its own blocks look like a regression",
        min_effect=one.min_effect,
        severity=rate,
    )


def _series(case: CaseRun, metric: str) -> list[tuple[str, float]] | None:
    """(prompts, log value) of each block in time; None where a block has no value. Where prompts never repeat, all
    blocks are one group: their differences then count as noise."""
    found = []
    for pair in case.pairs:
        value = block_value(pair, metric)
        if not value:
            return None
        found.append((pair.group or str(pair.index), math.log(value)))
    counts: Mapping[str, int] = _counted([group for group, _ in found])
    repeats = all(count >= 2 for count in counts.values())
    return [(group if repeats else "", value) for group, value in found]


def _counted(groups: list[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for group in groups:
        counts[group] += 1
    return counts


def _alarms(tests: list[tuple[CaseRun, str]], policy: Policy, splits: int, seed: int) -> np.ndarray:
    """bool[tests, splits]: which would have been called a regression, decided with all tests of the same split."""
    if not tests:
        return np.zeros((0, splits), dtype=bool)
    strict = replace(policy, min_blocks=2 * MIN_IN_HALF)
    sides = {case.row.case_hash: _dealt(len(case.pairs), splits, seed, place) for place, (case, _) in enumerate(tests)}
    per_chunk = max(1, CHUNK // len(tests))
    out = np.zeros((len(tests), splits), dtype=bool)
    for start in range(0, splits, per_chunk):
        stop = min(splits, start + per_chunk)
        size = stop - start
        found, rules, noise = [], [], []
        metrics = list(policy.metrics)
        for case, metric in tests:
            series = _series(case, metric)
            assert series is not None
            found.append(evidence(*_laid_out(series, sides[case.row.case_hash][start:stop])))
            one = policy.metrics[metric]
            rules.append(Rule.of(one.direction, one.min_effect, 0.0, size))
            noise.append(np.arange(size) * len(metrics) + metrics.index(metric))
        family = np.tile(np.arange(size), len(tests))
        decided = decide(Evidence.join(found), Rule.join(rules), strict, family, np.concatenate(noise))
        out[:, start:stop] = (decided.code == REGRESSION).reshape(len(tests), size)
    return out


def _dealt(blocks: int, splits: int, seed: int, place: int) -> np.ndarray:
    """int64[splits, blocks]: the side of each block. Stretches of about sqrt(blocks) / 2 neighbours are dealt out
    evenly, beginning at a random block."""
    rng = np.random.default_rng([seed, place])
    length = max(1, round(math.sqrt(blocks) / 2))
    stretches = math.ceil(blocks / length)
    stretches += stretches % 2
    halves = np.arange(stretches) % 2
    dealt = np.stack([rng.permutation(halves) for _ in range(splits)])
    sides = np.repeat(dealt, length, axis=1)[:, :blocks]
    shifts = rng.integers(blocks, size=splits)
    at = (np.arange(blocks)[None, :] + shifts[:, None]) % blocks
    return np.asarray(np.take_along_axis(sides, at, axis=1), dtype=np.int64)


def _laid_out(series: list[tuple[str, float]], sides: np.ndarray) -> tuple[FloatArray, FloatArray]:
    """float64[splits, groups, 2, blocks]: each block in its group and on its side. Its number counts within its side,
    so that both sides have earlier and later blocks."""
    names = list(dict.fromkeys(group for group, _ in series))
    values = np.full((len(sides), len(names), 2, len(series)), np.nan)
    index = np.full_like(values, np.nan)
    rows = np.arange(len(sides))
    counts = np.zeros((len(sides), 2))
    for block, (group, value) in enumerate(series):
        side = sides[:, block]
        values[rows, names.index(group), side, block] = value
        index[rows, names.index(group), side, block] = counts[rows, side]
        counts[rows, side] += 1
    return values, index
