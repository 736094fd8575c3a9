"""The gate's promises, by simulation with a known truth (scripts/simulate_gate.py: 2,000 runs each); its self-test."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_runs import make_row, rates, write_run

from specbench.errors import ExitCode
from specbench.gate.policy import DEFAULT
from specbench.gate.selftest import self_test
from specbench.gate.simulate import World, simulate

ROOT = Path(__file__).resolve().parent.parent
RUNS = 120


def test_false_alarms_keep_the_promise() -> None:
    found = simulate(RUNS, seed=1)
    assert found.false_alarm_rate <= 0.02
    assert found.inconclusive < 0.03


def test_a_loss_of_8_percent_is_found_and_one_of_5_never_passes() -> None:
    assert simulate(RUNS, -0.08, seed=2).power >= 0.9
    small = simulate(RUNS, -0.05, seed=3)
    assert small.passed == 0
    assert small.false_alarm_rate <= 0.02


def test_noise_makes_it_undecided_not_wrong() -> None:
    """On a machine four times as noisy the gate says that it can't tell."""
    noisy = World(noise=0.032)
    still, slow = simulate(60, world=noisy, seed=4), simulate(60, -0.05, noisy, seed=5)
    assert still.alarms <= 2
    assert still.inconclusive > 0.3
    assert slow.passed == 0


def test_a_gate_without_care_breaks_the_promise() -> None:
    """The simulation can fail: without a correction for many cases, or for runs that differ, alarms are too many."""
    metrics = {
        name: replace(one, min_effect=0.004, run_sd=0.0) for name, one in DEFAULT.metrics.items() if one.kind == "ratio"
    }
    careless = replace(DEFAULT, false_discovery=0.4, metrics=dict(DEFAULT.metrics) | metrics)
    assert simulate(60, policy=careless, seed=6).false_alarm_rate > 0.3


def test_the_script_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "scripts/simulate_gate.py", "--runs", "10", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["runs"] == 10
    assert "false alarms" in done.stdout


# ---- A/A on a run's own blocks


def rows_of(noise: Any, count: int = 6) -> list[dict[str, Any]]:
    return [make_row(f"case {n}", spec=noise(2 * n), ar=noise(2 * n + 1)) for n in range(count)]


def test_a_calm_run_arms_the_gate(tmp_path: Path) -> None:
    result = self_test(write_run(tmp_path, rows_of(lambda seed: rates(seed))), splits=100)
    assert result.armed is True
    assert result.exit_code == ExitCode.DONE
    assert result.compared == 18
    assert "armed" in result.reasons[0]


def test_a_run_of_two_moods_does_not(tmp_path: Path) -> None:
    """The machine halves its speed for stretches of a few blocks: any split may look like a regression."""

    def moody(seed: int) -> list[float]:
        calm = rates(seed, 24, noise=0.001)
        mood = np.repeat(np.random.default_rng([7, seed]).permutation([0, 0, 1, 1, 0, 1, 0, 1]), 3)
        return [rate * (0.6 if low else 1.0) for rate, low in zip(calm, mood, strict=True)]

    loose = replace(DEFAULT, false_discovery=0.3, false_alarms=0.01)
    result = self_test(write_run(tmp_path, rows_of(moody, 8)), loose, splits=100)
    assert result.armed is False
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert "not armed" in result.reasons[0]


def test_too_few_blocks_can_arm_nothing(tmp_path: Path) -> None:
    result = self_test(write_run(tmp_path, rows_of(lambda seed: rates(seed, 5))))
    assert result.armed is False
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert "8 blocks" in result.reasons[0]


@pytest.mark.parametrize("splits", [40, 100])
def test_a_self_test_repeats_itself(tmp_path: Path, splits: int) -> None:
    run = write_run(tmp_path, rows_of(lambda seed: rates(seed), 2))
    assert self_test(run, splits=splits) == self_test(run, splits=splits)


def test_the_gate_needs_no_torch(tmp_path: Path) -> None:
    """Neither the gate nor its self-test nor the simulation imports torch, even where it is installed."""
    run = write_run(tmp_path / "run", [make_row()])
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numba", "llvmlite", "triton", "transformers"):
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
from pathlib import Path
from specbench.gate.gate import run_gate
from specbench.gate.selftest import self_test
from specbench.gate.simulate import simulate
run = Path({str(run)!r})
assert run_gate(run, run).exit_code == 0
self_test(run, splits=10)
simulate(2)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
