"""known-faults L, each as the smallest run that shows its kind; and what a sample could not have shown."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from gate_runs import make_row, manifest, rates, slower, write_run

from specbench.errors import ExitCode
from specbench.gate.command import with_drift
from specbench.gate.gate import run_gate, undecided
from specbench.gate.identity import differences, fingerprint
from specbench.gate.policy import DEFAULT, parse_policy
from specbench.gate.types import CaseVerdict, GateResult

NAME = "ngram(3) · depth 4 · batch 1 · T 0"


def gated(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], policy: str = "{}") -> GateResult:
    baseline, candidate = write_run(tmp_path / "base", [before]), write_run(tmp_path / "cand", [after])
    return run_gate(candidate, baseline, parse_policy(policy) if policy != "{}" else DEFAULT)


def told(result: GateResult, metric: str) -> CaseVerdict:
    (found,) = [one for one in result.verdicts if one.metric == metric]
    return found


@pytest.mark.parametrize("baseline", [0.0, 1e-12, None])
def test_l88_a_baseline_of_zero_or_null_is_invalid_and_never_passes(tmp_path: Path, baseline: float | None) -> None:
    reasons = {} if baseline is not None else {"null_reasons": {"output_tokens_per_s": "no window"}}
    result = gated(tmp_path, make_row(metrics={"output_tokens_per_s": baseline, **reasons}), make_row())
    one = told(result, "output_tokens_per_s")
    assert one.verdict == "INVALID"
    assert "baseline" in one.reason
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT


def test_l89_disjoint_names_compare_nothing_and_say_which(tmp_path: Path) -> None:
    result = gated(tmp_path, make_row("a"), make_row("b"))
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert {(one.case_name, one.verdict) for one in result.verdicts} == {("a", "MISSING"), ("b", "NEW")}
    assert "a" in result.reasons[0]
    assert "b" in result.reasons[0]


def test_l89_a_case_that_could_not_be_set_up_is_no_regression(tmp_path: Path) -> None:
    failed = make_row(status="failed", reason="the target can't be loaded")
    result = gated(tmp_path, make_row(), failed)
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert not result.count("REGRESSION")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"cpu_mhz": 10678, "bogomips": 10681}, True),
        ({"kernel": "6.9.9"}, True),
        ({"memory_bytes": 25_276_063_744 - 40_000_000, "memory_gib": 23}, True),
        ({"python": "3.11.9"}, True),
        ({"cpu_model": "Example CPU @ 2.31GHz family/model/stepping 25/1/1"}, True),
        ({"cpu_model": "Example CPU family/model/stepping 25/1/2"}, False),
        ({"memory_bytes": 12_000_000_000, "memory_gib": 12}, False),
        ({"torch": "2.13.1"}, False),
        ({"torch_threads": 1}, False),
    ],
)
def test_l90_jitter_is_the_same_machine_and_a_change_is_not(change: dict[str, Any], same: bool) -> None:
    base = manifest(cpu_mhz=10681, cpu_model="Example CPU @ 2.30GHz family/model/stepping 25/1/1")
    if "cpu_model" not in change:
        change = change | {"cpu_model": base["environment"]["cpu_model"]}
    other = manifest(**change)
    assert (fingerprint(base) == fingerprint(other)) is same
    assert (not differences(base, other)) is same


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"power_limit_w": 699.6}, True),
        ({"power_limit_w": 500.0}, False),
        ({"clock_policy": "locked 1980 MHz"}, False),
        ({"driver": "560.1"}, False),
        ({"memory_bytes": 85_000_000_001}, True),
        ({"uuid": "another card of the same kind"}, True),
    ],
)
def test_l90_the_gpus_policy_is_part_of_the_machine(change: dict[str, Any], same: bool) -> None:
    gpu = {"name": "H100", "memory_bytes": 85_000_000_000, "driver": "550", "power_limit_w": 700.0, "uuid": "GPU-1"}
    base, other = manifest(gpu=gpu), manifest(gpu=gpu | change)
    assert (not differences(base, other)) is same
    assert (fingerprint(base) == fingerprint(other)) is same


def test_l92_each_metric_has_its_own_direction(tmp_path: Path) -> None:
    """More tokens/s is a gain; a longer wait is a loss; 100 -> 230 is either."""
    policy = "metrics: {step_s: on, itl_p50_s: on}"
    up = gated(tmp_path / "up", make_row(spec=rates(1)), make_row(spec=slower(rates(3), 2.3)), policy)
    assert told(up, "output_tokens_per_s").verdict == "IMPROVEMENT"
    assert told(up, "step_s").verdict == "IMPROVEMENT"
    assert up.exit_code == ExitCode.DONE
    down = gated(tmp_path / "down", make_row(spec=rates(1)), make_row(spec=slower(rates(3), 1 / 2.3)), policy)
    assert told(down, "output_tokens_per_s").verdict == "REGRESSION"
    assert told(down, "step_s").verdict == "REGRESSION"
    assert told(down, "itl_p50_s").verdict == "REGRESSION"
    ratio = told(down, "itl_p50_s").ratio
    assert ratio == pytest.approx(2.3, rel=0.02)
    assert down.exit_code == ExitCode.FAILED


def test_l92_five_small_steps_are_seen_against_the_pinned_baseline(tmp_path: Path) -> None:
    runs = []
    for step in range(6):
        factor = 0.96**step
        row = make_row(spec=slower(rates(10 + step, middle=140), factor), ar=slower(rates(20 + step), factor))
        runs.append(write_run(tmp_path / str(step), [row]))
    for before, after in itertools.pairwise(runs):
        assert not run_gate(after, before).count("REGRESSION")
    latest, pinned = run_gate(runs[5], runs[4]), run_gate(runs[5], runs[0])
    both = with_drift(latest, pinned, "the first")
    assert both.exit_code == ExitCode.FAILED
    assert {one.metric for one in both.verdicts if one.verdict == "REGRESSION" and "drift" in one.flags} == {
        "output_tokens_per_s",
        "ar_output_tokens_per_s",
    }


# ---- What the blocks can and can't show


def test_a_true_loss_of_the_smallest_effect_never_passes(tmp_path: Path) -> None:
    for seed in range(8):
        row = make_row(spec=slower(rates(100 + seed, middle=140), 0.95), ar=rates(200 + seed))
        result = gated(tmp_path / str(seed), make_row(), row)
        assert told(result, "speedup").verdict in ("REGRESSION", "INCONCLUSIVE")
        assert result.exit_code != ExitCode.DONE


def test_too_few_blocks_say_how_many_more(tmp_path: Path) -> None:
    short = make_row(spec=rates(1, 3, 140), ar=rates(2, 3))
    result = gated(tmp_path, short, make_row(spec=slower(rates(3, 3, 140), 0.5), ar=rates(4, 3)))
    one = told(result, "speedup")
    assert one.verdict == "INCONCLUSIVE"
    assert one.blocks_needed == 5
    assert "underpowered" in one.flags
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert undecided(result) == (f"hash of {NAME}",)


def test_a_noisy_sample_says_what_it_could_have_shown(tmp_path: Path) -> None:
    noisy = make_row(spec=rates(1, 8, 140, 0.06), ar=rates(2, 8, noise=0.06), facts=False)
    again = make_row(spec=rates(3, 8, 140, 0.06), ar=rates(4, 8, noise=0.06), facts=False)
    one = told(gated(tmp_path, noisy, again), "speedup")
    assert one.verdict == "INCONCLUSIVE"
    assert "underpowered" in one.flags
    assert "could not have shown" in one.reason


def test_more_blocks_are_asked_for_where_they_would_settle_it(tmp_path: Path) -> None:
    spread = 0.02
    base = make_row(spec=rates(1, 12, 140, spread), ar=rates(2, 12, noise=spread))
    cand = make_row(spec=slower(rates(3, 12, 140, spread), 0.98), ar=rates(4, 12, noise=spread))
    result = gated(tmp_path, base, cand)
    needed = [one.blocks_needed for one in result.verdicts if one.verdict == "INCONCLUSIVE"]
    assert needed
    assert all(one is None or one > 0 for one in needed)
    if any(needed):
        assert any("--extend" in note for note in result.notes)


def test_what_came_and_went_does_not_persist(tmp_path: Path) -> None:
    spec = rates(3, middle=140)
    half = slower(spec[:12], 0.78) + spec[12:]
    one = told(gated(tmp_path, make_row(facts=False), make_row(spec=half, facts=False)), "speedup")
    assert one.verdict == "INCONCLUSIVE"


def test_a_pile_of_slow_blocks_is_no_pass(tmp_path: Path) -> None:
    """One block in five is 30 % slower: the estimate leaves them out, the verdict may not."""
    spec = [rate * (0.7 if index % 5 == 2 else 1.0) for index, rate in enumerate(rates(3, middle=140))]
    one = told(gated(tmp_path / "a", make_row(facts=False), make_row(spec=spec, facts=False)), "speedup")
    assert one.verdict != "PASS"
    assert "outliers" in one.flags
    once = [rate * (0.7 if index == 2 else 1.0) for index, rate in enumerate(rates(3, middle=140))]
    one = told(gated(tmp_path / "b", make_row(facts=False), make_row(spec=once, facts=False)), "speedup")
    assert one.verdict == "PASS"
    assert "far out" in one.reason


def test_an_improvement_nobody_expected_is_reported(tmp_path: Path) -> None:
    """Beyond 3 x the effect: a stale baseline, or work that is no longer done."""
    fast = make_row(spec=slower(rates(3, middle=140), 1.3))
    result = gated(tmp_path / "a", make_row(), fast)
    assert "unexplained" in told(result, "speedup").flags
    assert any("nobody expected" in note for note in result.notes)
    known = gated(tmp_path / "b", make_row(), fast, 'expected: [{case: "ngram*"}]')
    assert told(known, "speedup").flags == ()
    small = gated(tmp_path / "c", make_row(), make_row(spec=slower(rates(3, middle=140), 1.1)))
    assert told(small, "speedup").verdict == "IMPROVEMENT"
    assert told(small, "speedup").flags == ()


def test_a_gate_that_is_not_armed_calls_nothing_a_regression(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "base", [make_row()])
    candidate = write_run(tmp_path / "cand", [make_row(spec=slower(rates(3, middle=140), 0.5))])
    result = run_gate(candidate, baseline, armed=False)
    assert not result.count("REGRESSION")
    assert "not armed" in told(result, "speedup").flags
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert run_gate(candidate, baseline, armed=True).exit_code == ExitCode.FAILED


def test_disturbed_blocks_are_left_out(tmp_path: Path) -> None:
    def disturb(block: dict[str, Any]) -> None:
        if block["block"] % 2 == 0:
            block.update(valid=False, marks=["foreign process"], wall_s=block["wall_s"] * 3)

    result = gated(tmp_path, make_row(), make_row(spec=rates(3, middle=140), ar=rates(4), change=disturb))
    assert told(result, "speedup").verdict == "PASS"
    assert "12 blocks" in told(result, "speedup").reason


def test_blocks_of_an_extension_count(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "base", [make_row(spec=rates(1, 12, 140), ar=rates(2, 12))])
    candidate = write_run(tmp_path / "cand", [make_row(spec=rates(3, 5, 140), ar=rates(4, 5))])
    before = run_gate(candidate, baseline)
    assert before.exit_code == ExitCode.INCONCLUSIVE
    more = make_row(spec=rates(5, 12, 140), ar=rates(6, 12))
    write_run(candidate / "extend-1", [more])
    after = run_gate(candidate, baseline)
    assert "12 blocks" in told(after, "speedup").reason
    assert after.exit_code == ExitCode.DONE
    write_run(candidate / "extend-2", [more | {"code_revision": "other"}])
    refused = run_gate(candidate, baseline)
    assert refused.exit_code == ExitCode.BAD_ENVIRONMENT
    assert "other code" in refused.reasons[0]
