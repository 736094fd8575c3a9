"""Runs with a known truth, to hold the gate's promises: how often it cries wolf, and how often it sees one.

Blocks of a run are made of what disturbs real ones: log-normal noise that follows itself (AR(1)), a machine that drifts
under both arms, blocks that something else slowed, prompts that differ from block to block, and a run that is faster or
slower than the last for no reason at all. What is found goes through the gate's own functions, many runs at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specbench.gate.decide import INCONCLUSIVE, PASS, REGRESSION, Evidence, Rule, decide, evidence
from specbench.gate.pair import FloatArray
from specbench.gate.policy import DEFAULT, Policy

METRICS = ("speedup", "output_tokens_per_s", "ar_output_tokens_per_s")
"""The ratio metrics of the default policy; all three are decided in each run."""


@dataclass(frozen=True)
class World:
    """The noise of a machine. All are sd of logs but where said.

    `noise`: of one arm's block, times a factor of its own for each case (log-normal, `noise_spread`); `correlation`: of
    blocks that follow each other; `drift`: of the change of the machine over a run, half of it a line and half a random
    walk, the same in both arms; `outliers`: share of an arm's blocks that are slowed, by `outlier_low` to
    `outlier_high`; `prompts`: of the prompts of a block, the same in both runs; `between_runs`: of a case's arm from
    run to run.
    """

    cases: int = 20
    blocks: int = 24
    noise: float = 0.008
    noise_spread: float = 0.3
    correlation: float = 0.3
    drift: float = 0.01
    outliers: float = 0.02
    outlier_low: float = 0.05
    outlier_high: float = 0.3
    prompts: float = 0.15
    between_runs: float = 0.002


@dataclass(frozen=True)
class Found:
    """Of `runs` simulated gate runs: `alarms` had a regression in an unchanged case; `caught`: the changed case was
    called a regression; `passed`: the changed case was called PASS in speedup or in tokens/s; `clean`: every verdict
    of the run was PASS or IMPROVEMENT (exit code 0); `inconclusive`: share of all verdicts."""

    runs: int
    alarms: int
    caught: int
    passed: int
    clean: int
    inconclusive: float

    @property
    def false_alarm_rate(self) -> float:
        return self.alarms / self.runs

    @property
    def power(self) -> float:
        return self.caught / self.runs


def simulate(
    runs: int,
    effect: float = 0.0,
    world: World | None = None,
    policy: Policy = DEFAULT,
    seed: int = 0,
    chunk: int = 100,
) -> Found:
    """`runs` candidates against a baseline each; the speculative arm of case 0 is `effect` (-0.08: 8 % slower) off."""
    world = world or World()
    totals = Found(0, 0, 0, 0, 0, 0.0)
    for number, start in enumerate(range(0, runs, chunk)):
        size = min(chunk, runs - start)
        codes = _codes(size, effect, world, policy, np.random.default_rng([seed, number]))
        totals = _added(totals, codes, changed=effect != 0)
    return replace(totals, inconclusive=totals.inconclusive / (runs * world.cases * len(METRICS)))


def _added(totals: Found, codes: NDArray[np.int64], *, changed: bool) -> Found:
    """int64[runs, cases, metrics]"""
    is_worse = codes == REGRESSION
    still = is_worse[:, 1:] if changed else is_worse
    target = codes[:, 0, :2]
    return Found(
        totals.runs + len(codes),
        totals.alarms + int(still.any(axis=(1, 2)).sum()),
        totals.caught + int((target == REGRESSION).any(axis=1).sum()),
        totals.passed + int((target == PASS).any(axis=1).sum()),
        totals.clean + int(((codes != REGRESSION) & (codes != INCONCLUSIVE)).all(axis=(1, 2)).sum()),
        totals.inconclusive + float((codes == INCONCLUSIVE).sum()),
    )


def rates(runs: int, effect: float, world: World, rng: np.random.Generator) -> FloatArray:
    """Logs of tokens/s: float64[runs, cases, 2 runs, 2 arms (AR, speculative), blocks]."""
    shape = (runs, world.cases, 2, 2, world.blocks)
    noise = rng.normal(size=shape)
    for block in range(1, world.blocks):
        fresh = np.sqrt(1 - world.correlation**2) * noise[..., block]
        noise[..., block] = world.correlation * noise[..., block - 1] + fresh
    scale = world.noise * np.exp(world.noise_spread * rng.normal(size=(runs, world.cases, 1, 1, 1)))
    line = rng.normal(size=(runs, world.cases, 2, 1, 1)) * np.linspace(-0.5, 0.5, world.blocks) * world.drift
    walk = np.cumsum(rng.normal(size=(runs, world.cases, 2, 1, world.blocks)), axis=4)
    walk *= world.drift / 2 / np.sqrt(world.blocks)
    slowed = rng.random(shape) < world.outliers
    slower = np.log1p(-rng.uniform(world.outlier_low, world.outlier_high, shape))
    prompts = world.prompts * rng.normal(size=(runs, world.cases, 1, 2, world.blocks))
    offset = world.between_runs * rng.normal(size=(runs, world.cases, 2, 2, 1))
    out = noise * scale + line + walk + np.where(slowed, slower, 0.0) + prompts + offset
    out[:, 0, 1, 1] += np.log1p(effect)
    return np.asarray(out, dtype=np.float64)


def _codes(runs: int, effect: float, world: World, policy: Policy, rng: np.random.Generator) -> NDArray[np.int64]:
    made = rates(runs, effect, world, rng)
    ar, spec = made[:, :, :, 0], made[:, :, :, 1]
    found, rules, noise = [], [], []
    cells = runs * world.cases
    for number, (name, values) in enumerate(zip(METRICS, (spec - ar, spec, ar), strict=True)):
        one = policy.metrics[name]
        blocks = np.moveaxis(values.reshape(cells, 2, world.blocks), 1, 2)[..., None]
        index = np.broadcast_to(np.arange(world.blocks, dtype=np.float64)[None, :, None, None], blocks.shape)
        found.append(evidence(blocks, index))
        rules.append(Rule.of(one.direction, one.min_effect, one.run_sd, cells))
        noise.append(np.repeat(np.arange(runs), world.cases) * len(METRICS) + number)
    family = np.tile(np.repeat(np.arange(runs), world.cases), len(METRICS))
    made_of = Evidence.join(found)
    decisions = decide(made_of, Rule.join(rules), policy, family, np.concatenate(noise))
    return np.moveaxis(decisions.code.reshape(len(METRICS), runs, world.cases), 0, 2)
