"""From the engine to the gate: what blocks tell of themselves, and blocks that are measured on top."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from bench_tools import (
    ScriptedMonitor,
    constant_device,
    make_scenario,
    measured,
    one_case,
    one_thread,
    tiny_target,
    wide,
)
from bench_tools import blocks as settings

from specbench.bench import extend as extend_module
from specbench.bench import measure as measure_module
from specbench.bench.extend import extend_run
from specbench.bench.measure import Outcome
from specbench.bench.sweep import Silent, run_sweep
from specbench.engine.decode import Engine
from specbench.engine.models.decoder import Decoder
from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.gate.evidence import load_run
from specbench.gate.gate import run_gate
from specbench.gate.policy import parse_policy
from specbench.scenario.cases import expand

ROOT = Path(__file__).resolve().parent.parent
NGRAM = {"kind": "ngram", "max_ngram": 2}


def facts(outcome: Outcome, arm: str) -> list[dict[str, Any]]:
    """Counts of each block of one arm, without its times."""
    found = sorted((b for b in outcome.samples["blocks"] if b["arm"] == arm), key=lambda block: block["block"])
    return [{name: value for name, value in block["facts"].items() if not name.endswith("_s")} for block in found]


def test_blocks_tell_the_same_of_themselves_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wide(monkeypatch)
    case = one_case(NGRAM, depth=3)
    first, again = measured(case, settings(4)), measured(case, settings(4))
    assert facts(first, "spec") == facts(again, "spec")
    assert facts(first, "ar") == facts(again, "ar")
    for ar, spec in zip(facts(first, "ar"), facts(first, "spec"), strict=True):
        assert ar["inputs"] == spec["inputs"]
        assert ar["outputs"] == spec["outputs"], "greedy output is that of the AR arm"
        assert ar["num_draft_tokens"] == 0
        assert spec["num_accepted_tokens"] <= spec["num_draft_tokens"]
        assert min(ar["flops"], ar["bytes"], spec["flops"]) > 0
    kept = first.metrics
    assert sum(one["num_draft_tokens"] for one in facts(first, "spec")) == kept["num_draft_tokens"]
    assert sum(one["num_accepted_tokens"] for one in facts(first, "spec")) == kept["num_accepted_tokens"]
    assert facts(first, "spec")[0]["inputs"] != facts(first, "spec")[1]["inputs"]
    assert facts(first, "spec")[0]["inputs"] == facts(first, "spec")[2]["inputs"], "4 prompts are 2 blocks of 2"


def test_other_weights_give_other_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_case(NGRAM, depth=3)
    wide(monkeypatch, 0)
    first = facts(measured(case, settings(2)), "ar")
    wide(monkeypatch, 1)
    other = facts(measured(case, settings(2), tiny_target(case)), "ar")
    assert [one["inputs"] for one in first] == [one["inputs"] for one in other]
    assert [one["outputs"] for one in first] != [one["outputs"] for one in other]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constant_device(monkeypatch)
    monkeypatch.setattr(extend_module, "code_revision", lambda: "r0")
    monkeypatch.setattr(measure_module, "LoadMonitor", ScriptedMonitor)
    scenario = make_scenario(measure={"blocks": {"min": 4, "max": 4}, "warmup": {"max": 1}})
    with one_thread():
        (row,) = run_sweep(scenario, expand(scenario), tmp_path / "run").rows
    assert row.status == "ok", row.reason
    return tmp_path / "run"


def test_extending_adds_blocks_and_touches_nothing(run: Path) -> None:
    before = (run / "rows.jsonl").read_bytes(), (run / "manifest.json").read_bytes()
    (case_hash,) = load_run(run).cases
    with one_thread():
        place = extend_run(run, 3, [case_hash], watcher=Silent())
        second = extend_run(run, 2, [case_hash], watcher=Silent())
    assert (place, second) == (run / "extend-1", run / "extend-2")
    assert before == ((run / "rows.jsonl").read_bytes(), (run / "manifest.json").read_bytes())
    (case,) = load_run(run).cases.values()
    assert [(pair.segment, pair.index) for pair in case.pairs] == [
        *((0, index) for index in range(4)),
        *((1, index) for index in range(3)),
        *((2, index) for index in range(2)),
    ]
    assert case.pairs[0].group == case.pairs[4].group == case.pairs[7].group
    # On a busy test machine times may say anything; counts may not.
    policy = parse_policy("metrics: {speedup: off, output_tokens_per_s: off, ar_output_tokens_per_s: off}")
    assert run_gate(run, run, policy).exit_code == ExitCode.DONE


def test_extending_refuses_other_code_and_other_cases(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case_hash,) = load_run(run).cases
    with pytest.raises(InputError, match="none of these cases"):
        extend_run(run, 3, ["another"], watcher=Silent())
    with pytest.raises(InputError, match="0 blocks"):
        extend_run(run, 0, [case_hash], watcher=Silent())
    monkeypatch.setattr(extend_module, "code_revision", lambda: "r1")
    with pytest.raises(InvalidEnvironmentError, match="was measured by r0, this is r1"):
        extend_run(run, 3, [case_hash], watcher=Silent())
    assert not (run / "extend-1").exists()


# ---- The proof's slower verify step


def test_the_proof_slows_the_verify_step_alone_and_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gate_proof", ROOT / "scripts" / "gate_proof.py")
    assert spec is not None
    assert spec.loader is not None
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    wide(monkeypatch)
    before = Engine._step, Decoder.forward
    undo = proof.slow_verify(20.0)
    try:
        with one_thread():
            slow = measured(one_case(depth=2), settings(4)).metrics
    finally:
        undo()
    assert before == (Engine._step, Decoder.forward)
    assert slow["verify_s"] > 8 * slow["ar_verify_s"], "a pass lasts 21 times as long, the AR arm's does not"
    parse_policy(proof.POLICY)
    assert proof.stage_folder(Path("x"), proof.SLOWED).name == "slowed"
