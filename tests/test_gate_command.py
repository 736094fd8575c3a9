"""`specbench gate`, `baseline` and `history` as a person or a CI job calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import gate_results as made
import pytest
from gate_folders import OTHER, at, some_rows, write_run

from specbench import cli
from specbench.errors import ExitCode
from specbench.gate import command
from specbench.gate.baseline import read_baseline

ROOT = Path(__file__).resolve().parent.parent
ROWS = some_rows(blocks=24)


class Said(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Runs `specbench ARGS` in an empty folder, as the entry point does."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str | Path) -> Said:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["specbench", *map(str, args)])
            with pytest.raises(SystemExit) as end:
                cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Said(int(end.value.code or 0), out, err)

    return run


def night(folder: Path, day: int, factor: float = 1.0) -> Path:
    return write_run(folder, at(ROWS, day, factor=factor))


WHO = ("--who", "A. Name", "--why", "because")
FILES = ("--junit", "o/j.xml", "--markdown", "o/m.md", "--comment", "o/c.md", "--json", "o/r.json",
         "--github-benchmark", "o/b.json")  # fmt: skip


# ---- gate


def test_a_run_against_itself_passes_and_writes_every_file(call: Call, tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    said = call("gate", "a", "--baseline", "a", *FILES)
    assert said.code == 0, said.out
    assert said.out.splitlines()[-1].rstrip() == "PASSED (exit code 0): quickstart"
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert names >= {"j.xml", "m.md", "c.md", "r.json", "b.bigger.json"}
    assert json.loads((tmp_path / "o/r.json").read_text())["exit_code"] == 0
    assert ElementTree.parse(tmp_path / "o/j.xml").getroot().get("failures") == "0"


def test_a_slower_run_is_a_regression_in_every_file(call: Call, tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    night(tmp_path / "b", 2, factor=0.8)
    said = call("gate", "b", "--baseline", "a", *FILES)
    assert said.code == 1, said.out
    first = next(line for line in said.out.splitlines() if "depth" in line)
    assert first.split()[0] == "REGRESSION"
    assert "−20.0 %" in said.out
    assert json.loads((tmp_path / "o/r.json").read_text())["counts"]["REGRESSION"] >= 3
    assert int(ElementTree.parse(tmp_path / "o/j.xml").getroot().get("failures", "0")) >= 4
    for name in ("m.md", "c.md"):
        assert "🔴 REGRESSION" in (tmp_path / "o" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["a", "--baseline", "nowhere"], 4, "no baseline for scenario quickstart"),
        (["nowhere", "--baseline", "a"], 2, "nowhere"),
        (["a"], 2, "--baseline: is missing"),
        (["a", "--baseline", "a", "--policy", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["a", "--baseline", "broken"], 4, "broken"),
    ],
)
def test_an_error_reaches_the_files_too(args: list[str], code: int, message: str, call: Call, tmp_path: Path) -> None:
    """So that a page of an earlier run does not stay green."""
    night(tmp_path / "a", 1)
    (night(tmp_path / "broken", 1) / "rows.jsonl").write_text("{\n{}\n")
    assert call("gate", "a", "--baseline", "a", *FILES).code == 0
    said = call("gate", *args, *FILES)
    assert said.code == code
    assert message in said.err + said.out
    assert json.loads((tmp_path / "o/r.json").read_text())["exit_code"] == code
    assert ElementTree.parse(tmp_path / "o/j.xml").getroot().get("errors") != "0"
    for name in ("m.md", "c.md"):
        assert f"(exit code {code})" in (tmp_path / "o" / name).read_text(encoding="utf-8")


def test_a_file_that_can_not_be_written_is_wrong_input(call: Call, tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    (tmp_path / "file").write_text("")
    for option in ("--junit", "--markdown", "--comment", "--json", "--github-benchmark"):
        said = call("gate", "a", "--baseline", "a", option, "file/x")
        assert said.code == 2
        assert "remedy: give another file" in said.err


def test_a_self_test_alone_needs_no_baseline(call: Call, tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    said = call("gate", "--self-test", "a", "--json", "o.json")
    assert said.code in (0, 4)
    armed = json.loads((tmp_path / "o.json").read_text())["armed"]
    assert armed is (said.code == 0)
    assert "Self-test: " in said.out


def test_extend_measures_what_is_undecided_once(tmp_path: Path) -> None:
    few = some_rows(blocks=3)
    baseline, run = write_run(tmp_path / "a", at(few, 1)), write_run(tmp_path / "b", at(few, 2))
    asked: list[tuple[Path, int, Any]] = []

    def measure(folder: Path, blocks: int, cases: Any) -> Path:
        asked.append((folder, blocks, cases))
        return write_run(folder / "extend-1", at(ROWS, 2))

    outputs = command.Outputs(json=tmp_path / "r.json")
    command.gate(run, baseline=baseline, policy_file=None, outputs=outputs, extend=12, measure=measure)
    ((folder, blocks, cases),) = asked
    assert (folder, blocks, len(cases)) == (run, 12, 3)
    assert any("extend-1" in note for note in json.loads((tmp_path / "r.json").read_text())["notes"])
    whole = write_run(tmp_path / "c", at(ROWS, 1))
    command.gate(whole, baseline=whole, policy_file=None, outputs=outputs, extend=12, measure=measure)
    assert len(asked) == 1
    assert "nothing was undecided" in (tmp_path / "r.json").read_text()


# ---- gate against a folder of baselines


def test_the_latest_entry_of_the_machine_is_the_baseline(call: Call, tmp_path: Path) -> None:
    call("baseline", "update", night(tmp_path / "a", 1), "--baseline", "base", *WHO)
    call("baseline", "update", night(tmp_path / "b", 2, factor=1.5), "--baseline", "base", *WHO)
    said = call("gate", night(tmp_path / "c", 3, factor=1.5), "--baseline", "base", "--json", "r.json")
    assert said.code == 0, said.out
    assert "entry 2 of " in json.loads((tmp_path / "r.json").read_text())["baseline"]["path"]
    assert "by A. Name: because" in said.out
    said = call("gate", night(tmp_path / "d", 4, factor=1.2), "--baseline", "base")
    assert said.code == 1


def test_another_machine_has_no_baseline(call: Call, tmp_path: Path) -> None:
    call("baseline", "update", night(tmp_path / "a", 1), "--baseline", "base", *WHO)
    other = write_run(tmp_path / "other", at(ROWS, 2), environment=OTHER)
    said = call("gate", other, "--baseline", "base")
    assert said.code == 4
    assert "specbench baseline update other" in said.err.replace(str(tmp_path) + "/", "")


def test_five_steps_of_four_percent_are_seen_against_the_pin(call: Call, tmp_path: Path) -> None:
    """Each step passes against the one before; together they are a regression, and not a pass."""
    call("baseline", "update", night(tmp_path / "0", 1), "--baseline", "base", *WHO)
    codes = []
    for step in range(1, 6):
        run = night(tmp_path / str(step), step + 1, factor=0.96**step)
        codes.append(call("gate", run, "--baseline", tmp_path / str(step - 1)).code)
        said = call("gate", run, "--baseline", "base", "--json", "r.json")
        call("baseline", "update", run, "--baseline", "base", *WHO)
    assert 1 not in codes
    assert said.code == 1
    document = json.loads((tmp_path / "r.json").read_text())
    drifted = [one for one in document["verdicts"] if "drift" in one["flags"]]
    assert {one["verdict"] for one in drifted} == {"REGRESSION"}
    assert all(one["reason"].startswith("against the pinned baseline, entry 1 of ") for one in drifted)
    assert drifted[0]["ratio"] == pytest.approx(0.96**5, rel=0.02)
    (file,) = (tmp_path / "base").iterdir()
    assert call("baseline", "pin", file, *WHO).code == 0
    assert call("gate", tmp_path / "5", "--baseline", "base").code == 0


def test_drift_is_added_to_a_result_and_never_softens_it() -> None:
    slow = made.result(made.verdict(verdict="REGRESSION", ratio=0.8), compared=1)
    for code, compared, expected in (
        (ExitCode.DONE, 1, ExitCode.FAILED),
        (ExitCode.INCONCLUSIVE, 1, ExitCode.FAILED),
        (ExitCode.BAD_ENVIRONMENT, 0, ExitCode.BAD_ENVIRONMENT),
    ):
        result = made.result(made.verdict(), exit_code=code, compared=compared, reasons=("as it was",))
        both = command.with_drift(result, slow, "entry 1")
        assert both.exit_code is expected
        assert [(one.verdict, one.flags) for one in both.verdicts] == [("REGRESSION", ("drift",)), ("PASS", ())]
        assert any("by drift against the pinned baseline, entry 1" in reason for reason in both.reasons)
        assert ("as it was" in both.reasons) is (code is not ExitCode.DONE)
    known = command.with_drift(replace(slow, exit_code=ExitCode.FAILED), slow, "entry 1")
    assert len(known.verdicts) == 1
    nothing = made.result(exit_code=ExitCode.BAD_ENVIRONMENT, compared=0, reasons=("another schema",))
    told = command.with_drift(made.passed(), nothing, "entry 1")
    assert told.exit_code is ExitCode.DONE
    assert "nothing could be compared: another schema" in told.notes[-1]


# ---- baseline and history


def test_baseline_commands_tell_what_they_did(call: Call, tmp_path: Path) -> None:
    said = call("baseline", "update", night(tmp_path / "a", 1), "--baseline", "base", *WHO)
    assert said.code == 0
    assert "entry 1 of " in said.out
    (file,) = (tmp_path / "base").iterdir()
    call("baseline", "update", night(tmp_path / "b", 2), "--baseline", "base", "--who", "B", "--why", "x\u202ey")
    call("baseline", "pin", file, "--entry", "2", "--who", "C", "--why", "agreed")
    shown = call("baseline", "show", "base").out
    for text in (
        "entry 1 of ",
        "by A. Name: because (3 cases, from ",
        "<- latest, pinned",
        "pin of entry 2 on ",
        "by C: agreed",
    ):
        assert text in shown
    assert "\u202e" not in shown
    assert [entry.who for entry in read_baseline(file).entries] == ["A. Name", "B"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["baseline", "update", "a"], "--who"),
        (["baseline", "update", "a", "--who", "", "--why", "x"], "--who: is empty"),
        (["baseline", "update", "nowhere", *WHO], "nowhere"),
        (["baseline", "show", "nowhere"], "no such folder or file"),
        (["baseline", "show", "a"], "no baselines here"),
        (["baseline", "pin", "nowhere.jsonl", *WHO], "no baseline file here"),
        (["history", "nowhere"], "no such folder"),
        (["history", "a", "--metric", "sped"], "no metric 'sped'"),
    ],
)
def test_wrong_input_is_exit_2(args: list[str], message: str, call: Call, tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    said = call(*args)
    assert said.code == 2
    assert message in said.err
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_history_prints_and_writes(call: Call, tmp_path: Path) -> None:
    for day in range(1, 10):
        night(tmp_path / "runs" / str(day), day, factor=1.0 if day < 5 else 0.8)
    said = call("history", "runs", "--metric", "speedup", "--json", "o/h.json")
    assert said.code == 0
    assert "quickstart on Example CPU" in said.out
    assert said.out.count("−20.0 % at 2026-01-05 (rev0005), worse") == 3
    assert json.loads((tmp_path / "o/h.json").read_text())["lines"][0]["trends"][0]["steps"][0]["run"] == 4


def test_gate_baseline_and_history_run_without_torch(tmp_path: Path) -> None:
    night(tmp_path / "a", 1)
    code = (
        "import sys\nfor name in ('torch', 'triton', 'numba', 'transformers'): sys.modules[name] = None\n"
        "from specbench.cli import main\n"
        "for args in (['gate', 'a', '--baseline', 'a'], ['gate', '--self-test', 'a'], ['history', 'a'],\n"
        "             ['baseline', 'update', 'a', '--who', 'x', '--why', 'y'], ['baseline', 'show']):\n"
        "    sys.argv = ['specbench', *args]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('CODE', int(end.code))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env, check=False
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("CODE")]
    assert [codes[place] for place in (0, 2, 3, 4)] == ["CODE 0"] * 4, done.stdout + done.stderr
    assert done.stderr == ""
