"""Exact gates: what must repeat to the last count, and what can't be asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_runs import make_row, rates, write_run

from specbench.errors import ExitCode
from specbench.gate.gate import run_gate
from specbench.gate.policy import DEFAULT, Policy, parse_policy
from specbench.gate.types import CaseVerdict, GateResult

EXACT = ("tokens", "acceptance_rate", "flops", "bytes", "kv_allocator_calls")


def gated(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], policy: Policy = DEFAULT) -> GateResult:
    return run_gate(write_run(tmp_path / "cand", [after]), write_run(tmp_path / "base", [before]), policy)


def by_metric(result: GateResult) -> dict[str, CaseVerdict]:
    return {one.metric: one for one in result.verdicts}


def altered(index: int, arm: str, **changes: Any) -> Any:
    """Changes one block's counts."""

    def change(block: dict[str, Any]) -> None:
        if block["block"] == index and block["arm"] == arm:
            for name, value in changes.items():
                place = block["facts"] if name in block.get("facts", {}) else block
                place[name] = place[name] + value if isinstance(value, int | float) else value

    return change


def test_the_same_work_passes_whatever_the_clock_says(tmp_path: Path) -> None:
    found = by_metric(gated(tmp_path, make_row(), make_row(spec=rates(9, 20, 500.0), ar=rates(8, 20, 90.0))))
    assert {name: found[name].verdict for name in EXACT} == dict.fromkeys(EXACT, "PASS")
    assert all(found[name].q_value is None for name in EXACT)


@pytest.mark.parametrize(
    ("change", "metric", "verdict"),
    [
        (altered(3, "spec", outputs="other"), "tokens", "REGRESSION"),
        (altered(3, "ar", outputs="other"), "tokens", "REGRESSION"),
        (altered(3, "spec", num_accepted_tokens=1), "acceptance_rate", "REGRESSION"),
        (altered(3, "spec", num_accepted_tokens=-1), "acceptance_rate", "REGRESSION"),
        (altered(3, "spec", num_draft_tokens=1), "acceptance_rate", "REGRESSION"),
        (altered(3, "spec", flops=1e6), "flops", "REGRESSION"),
        (altered(3, "spec", flops=-1e6), "flops", "IMPROVEMENT"),
        (altered(3, "spec", bytes=1e6), "bytes", "REGRESSION"),
        (altered(3, "spec", kv_allocator_calls=1), "kv_allocator_calls", "REGRESSION"),
        (altered(3, "spec", kv_allocator_calls=-1), "kv_allocator_calls", "IMPROVEMENT"),
    ],
)
def test_one_count_in_one_block_is_seen(tmp_path: Path, change: Any, metric: str, verdict: str) -> None:
    result = gated(tmp_path, make_row(), make_row(change=change))
    found = by_metric(result)
    assert found[metric].verdict == verdict
    assert {name: found[name].verdict for name in EXACT if name != metric} == dict.fromkeys(
        set(EXACT) - {metric}, "PASS"
    )
    assert result.exit_code == (ExitCode.FAILED if verdict == "REGRESSION" else ExitCode.DONE)


def test_equal_sums_of_other_blocks_are_no_pass(tmp_path: Path) -> None:
    """Acceptance that moved from one block to another is another acceptance."""

    def change(block: dict[str, Any]) -> None:
        altered(3, "spec", num_accepted_tokens=1)(block)
        altered(4, "spec", num_accepted_tokens=-1)(block)

    assert by_metric(gated(tmp_path, make_row(), make_row(change=change)))["acceptance_rate"].verdict == "REGRESSION"


def test_rows_without_counts_are_held_by_tokens_and_steps(tmp_path: Path) -> None:
    old = make_row(facts=False)
    found = by_metric(gated(tmp_path / "a", old, make_row(facts=False)))
    assert found["tokens"].verdict == found["tokens_per_step"].verdict == "PASS"
    assert "flops" not in found
    found = by_metric(gated(tmp_path / "b", old, make_row(facts=False, change=altered(2, "spec", steps=1))))
    assert found["tokens_per_step"].verdict == "REGRESSION"
    found = by_metric(gated(tmp_path / "c", old, make_row(facts=False, change=altered(2, "ar", tokens=-1))))
    assert found["tokens"].verdict == "REGRESSION"
    mixed = by_metric(gated(tmp_path / "d", old, make_row()))
    assert mixed["tokens"].verdict == "PASS"


def test_sampled_tokens_and_depths_chosen_by_time_need_not_repeat(tmp_path: Path) -> None:
    moved = altered(3, "spec", num_accepted_tokens=1, outputs="other")
    warm = {"axes": {"temperature": 0.8}}
    found = by_metric(gated(tmp_path / "a", make_row(**warm), make_row(**warm, change=moved)))
    assert not {"tokens", "acceptance_rate", "flops"} & set(found)
    assert found["tokens_per_step"].verdict == "PASS"
    assert found["tokens_per_step"].min_effect == 0.05
    auto = {"axes": {"depth_policy": "auto"}}
    found = by_metric(gated(tmp_path / "b", make_row(**auto), make_row(**auto, change=moved)))
    assert found["tokens"].verdict == "REGRESSION"
    assert "acceptance_rate" not in found
    assert found["tokens_per_step"].verdict == "PASS"


def test_sampled_acceptance_that_fell_is_a_regression_both_ways(tmp_path: Path) -> None:
    warm = {"axes": {"temperature": 0.8}}

    def fewer(block: dict[str, Any]) -> None:
        if block["arm"] == "spec":
            block["steps"] = int(block["steps"] * 1.2)

    found = by_metric(gated(tmp_path / "a", make_row(**warm), make_row(**warm, change=fewer)))
    assert found["tokens_per_step"].verdict == "REGRESSION"
    found = by_metric(gated(tmp_path / "b", make_row(**warm, change=fewer), make_row(**warm)))
    assert found["tokens_per_step"].verdict == "REGRESSION"


def test_other_prompts_are_not_compared(tmp_path: Path) -> None:
    result = gated(tmp_path, make_row(), make_row(change=altered(3, "spec", inputs="in99")))
    assert by_metric(result)["tokens"].verdict == "INVALID"
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT


def test_kernel_launches_are_exact_where_rows_tell_them(tmp_path: Path) -> None:
    a, b = make_row(metrics={"kernel_launches": 210}), make_row(metrics={"kernel_launches": 211})
    assert by_metric(gated(tmp_path / "a", a, a))["kernel_launches"].verdict == "PASS"
    assert by_metric(gated(tmp_path / "b", a, b))["kernel_launches"].verdict == "REGRESSION"
    assert "kernel_launches" not in by_metric(gated(tmp_path / "c", make_row(), b))


def test_work_of_zero_is_an_invalid_baseline(tmp_path: Path) -> None:
    def nothing(block: dict[str, Any]) -> None:
        block["facts"]["flops"] = 0.0

    result = gated(tmp_path, make_row(change=nothing), make_row())
    assert by_metric(result)["flops"].verdict == "INVALID"
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT


# ---- Memory, predictions, compiled kernels


@pytest.mark.parametrize(
    ("device", "after", "verdict"),
    [
        ("cuda", 7.0e8, "PASS"),
        ("cuda", 7.06e8, "PASS"),
        ("cuda", 7.08e8, "REGRESSION"),
        ("cuda", 6.9e8, "IMPROVEMENT"),
        ("cuda", 0.0, "INVALID"),
        ("cpu", 9.0e8, None),
    ],
)
def test_memory_counts_from_one_percent_on(tmp_path: Path, device: str, after: float, verdict: str | None) -> None:
    where = {"conditions": {"device": device}}
    result = gated(tmp_path, make_row(**where), make_row(**where, metrics={"peak_memory_bytes": after}))
    found = by_metric(result).get("peak_memory_bytes")
    assert (found.verdict if found else None) == verdict
    if device == "cpu":
        assert any("peak memory is not gated on a CPU" in note for note in result.notes)


def predicted(**metrics: Any) -> dict[str, Any]:
    row = make_row(conditions={"predicted": True}, metrics=metrics)
    return row | {"samples": {"blocks": [], "prompts": []}}


def test_predictions_are_exact(tmp_path: Path) -> None:
    same = gated(tmp_path / "a", predicted(flops=2.0), predicted(flops=2.0))
    assert by_metric(same)["predicted"].verdict == "PASS"
    assert same.exit_code == ExitCode.DONE
    other = gated(tmp_path / "b", predicted(flops=2.0), predicted(flops=2.0001))
    assert by_metric(other)["predicted"].verdict == "REGRESSION"
    assert "flops" in by_metric(other)["predicted"].reason


def kernels(place: Path, **spills: int) -> None:
    rows = [
        {"op": "attention", "case": "b1", "kernel": name, "arch": 90, "error": None, "spill_store_bytes": value}
        | {"spill_load_bytes": value}
        for name, value in spills.items()
    ]
    (place / "kernels.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def test_spills_of_compiled_kernels_are_exact(tmp_path: Path) -> None:
    base, cand = write_run(tmp_path / "base", [make_row()]), write_run(tmp_path / "cand", [make_row()])
    kernels(base, fine=0, worse=0, better=8, gone=0)
    kernels(cand, fine=0, worse=4, better=0, fresh=0)
    result = run_gate(cand, base)
    found = {one.case_name.split(" ")[0]: one for one in result.verdicts if one.metric == "spill_bytes"}
    assert {name: one.verdict for name, one in found.items()} == {
        "fine": "PASS",
        "worse": "REGRESSION",
        "better": "IMPROVEMENT",
        "gone": "MISSING",
        "fresh": "NEW",
    }
    assert found["worse"].candidate == 8
    assert found["worse"].ratio is None


# ---- The policy


@pytest.mark.parametrize(
    ("text", "line", "key", "remedy"),
    [
        ("metrics:\n  sped: off", 2, "metrics.sped", "did you mean speedup"),
        ("metrics:\n  speedup:\n    min_efect: 0.1", 3, "metrics.speedup.min_efect", "min_effect"),
        ("metrics:\n  tokens: {min_effect: 0.1}", 2, "metrics.tokens.min_effect", "direction"),
        ("metrics:\n  peak_memory_bytes: {run_sd: 0.1}", 2, "metrics.peak_memory_bytes.run_sd", "min_effect"),
        ("metrics:\n  speedup: 5", 2, "metrics.speedup", "on, off"),
        ("name: a\nfalse_alarm: 0.1", 2, "false_alarm", "false_alarms"),
        ("false_alarms: lots", 1, "false_alarms", "number"),
        ("confidence: 1", 1, "confidence", "(0.5, 1)"),
        ("missing: maybe", 1, "missing", "inconclusive"),
        ("min_blocks: 1", 1, "min_blocks", "2..10000"),
        ("expected: {case: a}", 1, "expected", "list"),
        ("expected:\n  - {metric: speedup}", 2, "expected", "case"),
        ("expected:\n  - {case: a, metric: sped}", 2, "expected.sped", "speedup"),
    ],
)
def test_a_wrong_policy_names_its_line_and_the_remedy(text: str, line: int, key: str, remedy: str) -> None:
    from specbench.errors import InputError

    with pytest.raises(InputError) as caught:
        parse_policy(text, file="policy.yaml")
    assert (caught.value.line, caught.value.key) == (line, key)
    assert remedy in (caught.value.remedy or "")


def test_a_policy_changes_what_it_names_and_nothing_else() -> None:
    text = "name: loose\nmetrics:\n  speedup: {min_effect: 1e-1, run_sd: 0}\n  tokens: off\n  itl_p99_s: on\n"
    policy = parse_policy(text + 'expected:\n  - {case: "ngram*", metric: speedup}')
    assert policy.metrics["speedup"].min_effect == 0.1
    assert policy.metrics["speedup"].run_sd == 0
    assert policy.metrics["speedup"].direction == "up"
    assert "tokens" not in policy.gated("exact")
    assert "itl_p99_s" in policy.gated("ratio")
    assert policy.metrics["output_tokens_per_s"] == DEFAULT.metrics["output_tokens_per_s"]
    assert policy.is_expected("ngram(3) · depth 4", "speedup")
    assert not policy.is_expected("suffix", "speedup")
    assert policy.to_dict()["name"] == "loose"
    assert "tokens" not in policy.to_dict()["metrics"]


def test_the_defaults_are_those_that_are_told() -> None:
    assert {DEFAULT.metrics[name].min_effect for name in ("speedup", "output_tokens_per_s")} == {0.05}
    assert DEFAULT.metrics["peak_memory_bytes"].min_effect == 0.01
    assert all(one.min_effect == 0 for one in DEFAULT.gated("exact").values())
    assert DEFAULT.false_alarms == 0.02


def test_a_metric_that_is_off_is_not_compared(tmp_path: Path) -> None:
    policy = parse_policy("metrics: {tokens: off, speedup: off, flops: off}")
    result = gated(tmp_path, make_row(), make_row(change=altered(3, "spec", outputs="other")), policy)
    assert not {"tokens", "speedup", "flops"} & set(by_metric(result))
    assert result.exit_code == ExitCode.DONE
