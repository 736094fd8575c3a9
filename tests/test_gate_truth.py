"""The truth table: what each side holds -> verdict and exit code. Every combination of what a row can be, and of what a
run can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_runs import make_row, manifest, rates, slower, write_run

from specbench.errors import ExitCode, InputError
from specbench.gate.gate import run_gate
from specbench.gate.types import GateResult

NAME = "ngram(3) · depth 4 · batch 1 · T 0"
OTHER = "oracle · depth 4 · batch 1 · T 0"
BASE_SPEC, BASE_AR = rates(1, middle=140), rates(2)
NEW_SPEC, NEW_AR = rates(3, middle=140), rates(4)

SIDES: dict[str, dict[str, Any] | None] = {
    "ok": {},
    "null": {"metrics": {"output_tokens_per_s": None, "null_reasons": {"output_tokens_per_s": "no window"}}},
    "zero": {"metrics": {"output_tokens_per_s": 0.0}},
    "tiny": {"metrics": {"output_tokens_per_s": 1e-12}},
    "invalid": {"status": "invalid"},
    "failed": {"status": "failed"},
    "skipped": {"status": "skipped"},
    "foreign": {"environment": "another machine"},
    "missing": None,
}
# baseline, candidate -> verdict of the case (or of tokens/s where both rows are ok), exit code. A second case is fine.
TABLE: dict[tuple[str, str], tuple[str | None, int]] = {
    ("ok", "ok"): ("PASS", 0),
    ("ok", "null"): ("INVALID", 1),
    ("ok", "zero"): ("INVALID", 1),
    ("ok", "tiny"): ("INVALID", 1),
    ("ok", "invalid"): ("INVALID", 1),
    ("ok", "failed"): ("INVALID", 4),
    ("ok", "skipped"): ("MISSING", 3),
    ("ok", "foreign"): ("INVALID", 4),
    ("ok", "missing"): ("MISSING", 3),
    ("skipped", "ok"): ("NEW", 0),
    ("skipped", "null"): ("NEW", 0),
    ("skipped", "zero"): ("NEW", 0),
    ("skipped", "tiny"): ("NEW", 0),
    ("skipped", "invalid"): ("INVALID", 1),
    ("skipped", "failed"): ("INVALID", 4),
    ("skipped", "skipped"): (None, 0),
    ("skipped", "foreign"): ("INVALID", 4),
    ("skipped", "missing"): (None, 0),
    ("missing", "ok"): ("NEW", 0),
    ("missing", "null"): ("NEW", 0),
    ("missing", "zero"): ("NEW", 0),
    ("missing", "tiny"): ("NEW", 0),
    ("missing", "invalid"): ("INVALID", 1),
    ("missing", "failed"): ("INVALID", 4),
    ("missing", "skipped"): (None, 0),
    ("missing", "foreign"): ("INVALID", 4),
    ("missing", "missing"): (None, 0),
}
for _before in ("null", "zero", "tiny", "invalid", "failed", "foreign"):
    for _after in SIDES:
        # A broken baseline is told as that, whatever the candidate did.
        TABLE[(_before, _after)] = ("INVALID", 4)
for _before in ("null", "zero", "tiny"):
    TABLE[(_before, "missing")] = TABLE[(_before, "skipped")] = ("MISSING", 3)
    TABLE[(_before, "invalid")] = ("INVALID", 1)


def side(name: str, kind: str, spec: list[float], ar: list[float]) -> list[dict[str, Any]]:
    given = SIDES[kind]
    return [] if given is None else [make_row(name, spec, ar, **given)]


def gated(tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]], **more: Any) -> GateResult:
    baseline = write_run(tmp_path / "base", before, more.get("base_manifest"))
    candidate = write_run(tmp_path / "cand", after, more.get("cand_manifest"))
    return run_gate(candidate, baseline)


def test_the_table_is_whole() -> None:
    assert set(TABLE) == {(before, after) for before in SIDES for after in SIDES}


@pytest.mark.parametrize(("before", "after"), TABLE)
def test_a_case_beside_a_good_one(tmp_path: Path, before: str, after: str) -> None:
    good = [make_row(OTHER, BASE_SPEC, BASE_AR)], [make_row(OTHER, NEW_SPEC, NEW_AR)]
    result = gated(
        tmp_path, side(NAME, before, BASE_SPEC, BASE_AR) + good[0], side(NAME, after, NEW_SPEC, NEW_AR) + good[1]
    )
    verdict, code = TABLE[(before, after)]
    mine = {one.metric: one for one in result.verdicts if one.case_name == NAME}
    told = mine.get("case") or mine.get("output_tokens_per_s")
    assert (told.verdict if told is not None else None) == verdict
    assert int(result.exit_code) == code
    assert result.reasons
    assert result.compared > 0
    if told is not None:
        assert told.reason


@pytest.mark.parametrize(("before", "after"), TABLE)
def test_a_case_alone_never_passes_on_nothing(tmp_path: Path, before: str, after: str) -> None:
    result = gated(tmp_path, side(NAME, before, BASE_SPEC, BASE_AR), side(NAME, after, NEW_SPEC, NEW_AR))
    passes = (before, after) == ("ok", "ok")
    assert (result.exit_code == ExitCode.DONE) == passes
    if result.compared == 0:
        assert result.exit_code == ExitCode.BAD_ENVIRONMENT
        assert "nothing was compared" in result.reasons[0]


# ---- What a whole run can be

MACHINES: dict[str, dict[str, Any]] = {
    "other cpu": {"cpu_model": "Another CPU", "device_name": "Another CPU"},
    "other torch": {"torch": "2.14.0"},
    "other memory": {"memory_bytes": 50_000_000_000},
    "other gpu": {"gpu": {"name": "NVIDIA H100", "driver": "550"}},
    "other threads": {"torch_threads": 4},
    "other scenario": {"top": {"name": "drafters"}},
}


@pytest.mark.parametrize("apart", MACHINES)
@pytest.mark.parametrize("rows", ["ok", "none"])
def test_another_fingerprint_is_refused(tmp_path: Path, apart: str, rows: str) -> None:
    after = [make_row(NAME, NEW_SPEC, NEW_AR)] if rows == "ok" else []
    base = manifest(**MACHINES[apart])
    result = gated(tmp_path, [make_row(NAME, BASE_SPEC, BASE_AR)], after, base_manifest=base)
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert "another machine or scenario" in result.reasons[0]
    assert result.compared == 0
    assert [one.verdict for one in result.verdicts] == ["INVALID"] * len(after)
    assert result.fingerprint_baseline != result.fingerprint_candidate or apart == "none"


@pytest.mark.parametrize("which", ["base", "cand"])
def test_another_schema_is_the_environments_fault(tmp_path: Path, which: str) -> None:
    rows = {"base": [make_row(NAME, BASE_SPEC, BASE_AR)], "cand": [make_row(NAME, NEW_SPEC, NEW_AR)]}
    rows[which][0]["schema_version"] = 2
    result = gated(tmp_path, rows["base"], rows["cand"])
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert "schema version 2" in result.reasons[0]
    assert all(one.verdict == "INVALID" for one in result.verdicts)


def test_no_baseline_yet_lists_what_is_new(tmp_path: Path) -> None:
    """L 89: a first run is neither a pass nor a regression."""
    candidate = write_run(tmp_path / "cand", [make_row(NAME), make_row(OTHER)])
    result = run_gate(candidate, tmp_path / "nowhere")
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert [one.verdict for one in result.verdicts] == ["NEW", "NEW"]
    assert "there is no baseline" in result.reasons[0]


def test_no_candidate_is_wrong_input(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "base", [make_row(NAME)])
    with pytest.raises(InputError) as caught:
        run_gate(tmp_path / "nowhere", baseline)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_a_broken_middle_row_of_the_baseline_is_its_fault(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "base", [make_row(NAME), make_row(OTHER)])
    text = (baseline / "rows.jsonl").read_text(encoding="utf-8")
    (baseline / "rows.jsonl").write_text("{broken\n" + text, encoding="utf-8")
    result = run_gate(write_run(tmp_path / "cand", [make_row(NAME)]), baseline)
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert "a broken row" in result.reasons[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"axes": {"backend": "torch"}}, "backend"),
        ({"conditions": {"weights": "another model"}}, "weights"),
        ({"conditions": {"synthetic": True}}, "synthetic"),
        ({"conditions": {"predicted": True}}, "predicted"),
    ],
)
def test_rows_of_other_work_are_not_compared(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    result = gated(tmp_path, [make_row(NAME, BASE_SPEC, BASE_AR)], [make_row(NAME, NEW_SPEC, NEW_AR, **change)])
    assert result.exit_code == ExitCode.BAD_ENVIRONMENT
    assert word in result.verdicts[0].reason


@pytest.mark.parametrize(("missing", "code"), [("inconclusive", 3), ("regression", 1), ("ignore", 0)])
def test_the_policy_says_what_a_missing_case_is(tmp_path: Path, missing: str, code: int) -> None:
    from specbench.gate.policy import parse_policy

    baseline = write_run(tmp_path / "base", [make_row(NAME, BASE_SPEC, BASE_AR), make_row(OTHER, BASE_SPEC, BASE_AR)])
    candidate = write_run(tmp_path / "cand", [make_row(NAME, NEW_SPEC, NEW_AR)])
    assert int(run_gate(candidate, baseline, parse_policy(f"missing: {missing}")).exit_code) == code


def test_results_are_plain_data(tmp_path: Path) -> None:
    """What renderers rely on: worst first, a reason everywhere, finite numbers, a policy that JSON takes."""
    before = [make_row(NAME, BASE_SPEC, BASE_AR), make_row(OTHER, BASE_SPEC, BASE_AR)]
    after = [make_row(NAME, NEW_SPEC, NEW_AR), make_row(OTHER, slower(NEW_SPEC, 0.8), NEW_AR)]
    result = gated(tmp_path, before, after)
    assert result.exit_code == ExitCode.FAILED
    assert result.verdicts[0].verdict == "REGRESSION"
    assert all(one.reason for one in result.verdicts)
    json.dumps(dict(result.policy), allow_nan=False)
    worst = [one for one in result.verdicts if one.verdict == "REGRESSION"]
    assert {one.metric for one in worst} == {"speedup", "output_tokens_per_s"}
    for one in worst:
        assert one.low is not None
        assert one.high is not None
        assert one.ratio is not None
        assert one.low < one.ratio < one.high < 0.95
        assert one.q_value is not None
        assert one.q_value <= 0.01
        assert one.severity > 1
