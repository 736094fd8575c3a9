"""The GPU check without a GPU: limits, failures that stop nothing, targets; and the whole script on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from specbench_kernels import registry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_check_stages as bodies  # noqa: E402

SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def stage(code: str, **options: Any) -> gpu_check.Stage:
    settings: dict[str, Any] = {"name": "try", "what": "a trial", "limit_s": 60.0, "needs": ()}
    return gpu_check.Stage(command=(sys.executable, "-c", code), **(settings | options))


def run(one: gpu_check.Stage, out: Path) -> gpu_check.Result:
    (out / "logs").mkdir(exist_ok=True)
    return gpu_check.run_stage(one, out, dict(os.environ))


@pytest.mark.parametrize("cpu", [False, True])
def test_limits_add_up_to_eight_minutes(cpu: bool, tmp_path: Path) -> None:
    every = gpu_check.stages(tmp_path, cpu=cpu)
    assert sum(one.limit_s for one in every) <= gpu_check.BUDGET_S == 8 * 60
    assert [one.name for one in every] == [
        *("identity", "roofs", "references", "sanitizer", "kernels", "equality", "sweep", "report", "targets")
    ]


def test_stage_that_ends_well(tmp_path: Path) -> None:
    done = run(stage("print('first'); print('all is well')"), tmp_path)
    assert (done.status, done.reason) == ("ok", "all is well")
    assert (tmp_path / "logs" / "try.log").read_text() == "first\nall is well\n"


def test_stage_that_fails_says_why(tmp_path: Path) -> None:
    done = run(stage("raise SystemExit('no luck')"), tmp_path)
    assert (done.status, done.reason) == ("failed", "exit code 1: no luck; see logs/try.log")


def test_stage_out_of_time_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    popen = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; p = {popen}; print(p.pid, flush=True); p.wait()"
    begin = time.monotonic()
    done = run(stage(code, limit_s=5.0), tmp_path)
    assert done.status == "failed"
    assert done.reason.startswith("not done within 5 s")
    assert time.monotonic() - begin < 60
    pid = int((tmp_path / "logs" / "try.log").read_text())
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"the child {pid} lives on")


def test_stage_without_its_modules_names_them(tmp_path: Path) -> None:
    done = run(stage("print('never')", needs=("json", "no_such_module", "other.none"[:5])), tmp_path)
    assert done.status == "failed"
    assert done.reason == "not installed: no_such_module, other; pip install no_such_module other"
    assert not (tmp_path / "logs" / "try.log").exists()


def test_skipped_stage_fails_nothing(tmp_path: Path) -> None:
    assert run(stage("", skip="no tool"), tmp_path).status == "skipped"


def test_every_needed_module_is_a_dependency_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").lower()
    assert [name for name in gpu_check.NEEDED.values() if f'"{name}' not in text] == []


def test_failed_stages_stop_nothing_and_decide_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [
        stage("raise SystemExit(3)", name="first"),
        stage("print('fine')", name="second"),
        stage("", name="third", skip="no tool"),
    ]
    monkeypatch.setattr(gpu_check, "stages", lambda out, cpu: every)
    assert gpu_check.main(["--cpu", str(tmp_path)]) == 1
    told = json.loads((tmp_path / "summary.json").read_text())
    assert [(one["stage"], one["status"]) for one in told] == [
        ("first", "failed"),
        ("second", "ok"),
        ("third", "skipped"),
    ]
    assert "| second | a trial | ok |" in capsys.readouterr().out
    every[0] = stage("print('mended')", name="first")
    assert gpu_check.main(["--cpu", str(tmp_path)]) == 0


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    assert gpu_check.main([str(tmp_path / "out")]) == 4
    assert "remedy: run on one, or use --cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_output_folder_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--cpu"])
    assert caught.value.code == 2


def test_interpreter_is_set_on_a_cpu_and_unset_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in gpu_check.environment(cpu=False)
    assert gpu_check.environment(cpu=True)["TRITON_INTERPRET"] == "1"
    assert gpu_check.environment(cpu=True)["PYTHONPATH"].split(os.pathsep)[:2] == [str(ROOT), str(ROOT / "kernels")]


# Targets


def test_cases_that_targets_are_read_from_exist() -> None:
    attention = {case.name for case in registry.find("tree_attention").bench()}
    assert {*bodies.ATTENTION.values(), bodies.ATTENTION_LONG} <= attention
    assert bodies.SAMPLING in {case.name for case in registry.find("row_stats").bench()}
    assert set(bodies.FIRST) | set(bodies.CPU_OPS) <= set(registry.names())


def kernel(op: str, case: str, time_s: float, rate: float) -> dict[str, Any]:
    return {"op": op, "case": case, "timing": {"median_s": time_s}, "bytes_per_s": rate}


def swept(kind: str, depth: int, name: str, batch: int = 1, **metrics: float) -> dict[str, Any]:
    axes = {"drafter_kind": kind, "depth": depth, "batch_size": batch, "drafter": name}
    return {"axes": axes, "metrics": metrics or None}


def test_targets_are_shares_of_what_was_measured() -> None:
    kernels = [
        kernel("tree_attention", bodies.ATTENTION[8], 2.1, 900.0),
        kernel("tree_attention", bodies.ATTENTION[1], 2.0, 800.0),
        kernel("tree_attention", bodies.ATTENTION_LONG, 1.0, 700.0),
        kernel("row_stats", bodies.SAMPLING, 1.0, 650.0),
    ]
    rows = [
        swept("none", 0, "none", batch=4, ar_step_s=1.0),
        swept("none", 0, "none", ar_achieved_bytes_per_s=900.0, ar_host_s=0.001, ar_step_s=0.05),
        swept("forced", 7, "forced(0.8, tree 15)", verify_s=9.0, ar_verify_s=1.0),
        swept("forced", 7, "forced(0.8)", verify_s=1.05, ar_verify_s=1.0),
    ]
    found = bodies.all_targets(kernels, 1000.0, rows)
    assert [round(one.measured, 3) for one in found] == [0.9, 0.7, 1.05, 0.65, 0.9, 0.02, 1.05]
    assert [one.line.rpartition("|")[0].split("|")[-1].strip() for one in found] == [
        *("met", "MISSED", "met", "MISSED", "met", "met", "met")
    ]


def test_targets_that_were_not_measured_say_so(tmp_path: Path) -> None:
    assert bodies.targets(tmp_path, True) == 0
    lines = (tmp_path / "targets.md").read_text().splitlines()[4:]
    assert len(lines) == 7
    assert all("not measured" in line for line in lines)
    empty = [swept("none", 0, "none")]
    untimed = [{"op": "row_stats", "case": bodies.SAMPLING, "timing": None, "bytes_per_s": None}]
    assert all(one.measured is None for one in bodies.all_targets(untimed, None, empty))


def test_row_that_ran_beside_other_programs_has_run_on_a_cpu_only() -> None:
    row = {"status": "failed", "reason": "none of 2 blocks was undisturbed: foreign load"}
    assert bodies._became(row, True) == "disturbed"
    assert bodies._became(row, False) == "failed"
    assert bodies._became(row | {"reason": "ValueError"}, True) == "failed"


def test_sweep_of_the_cpu_is_a_valid_scenario(tmp_path: Path) -> None:
    from specbench.scenario.cases import expand
    from specbench.scenario.schema import load_scenario

    cases = expand(load_scenario(bodies.cpu_scenario(tmp_path)))
    assert len(cases) == 6
    assert {case.target.shape for case in cases} == {"tiny-llama-test"}
    assert {case.target.backend for case in cases} == {"triton"}


def test_the_whole_script_on_tiny_shapes(tmp_path: Path) -> None:
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([SCRIPT, "--cpu", tmp_path], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "summary.json").read_text())
    assert {one["status"] for one in told if one["stage"] != "sanitizer"} == {"ok"}
    assert (tmp_path / "sweep" / "report.html").exists()
