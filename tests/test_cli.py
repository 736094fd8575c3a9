"""The command line: exit codes, messages with place and remedy, nothing written where the input is wrong."""

from __future__ import annotations

import errno
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bench_tools import (
    NoTarget,
    ScriptedMonitor,
    constant_device,
    one_thread,
    some_outcome,
    wide,
    write_scenario,
)
from rich.console import Console

import specbench
from specbench import cli
from specbench.bench import command, doctor, plan
from specbench.bench import sweep as sweep_module
from specbench.bench.measure import Outcome, measure_case
from specbench.errors import InputError, InvalidEnvironmentError
from specbench.roofline.model import Roof
from specbench.store import ROWS_FILE, RowStore, read_manifest, read_rows

ROOT = Path(__file__).parent.parent


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Runs `specbench ARGS` in an empty folder, as the entry point does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "console", Console(highlight=False, width=160))
    constant_device(monkeypatch)

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


def measuring(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Outcome]) -> None:
    """`run` sweeps with this in place of measure_case, and makes no pages."""
    run_sweep = functools.partial(sweep_module.run_sweep, measure=measure, open_target=NoTarget.open)
    monkeypatch.setattr(sweep_module, "run_sweep", run_sweep)
    monkeypatch.setattr("specbench.report.command.write_outputs", lambda *args: None)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- Input that is wrong: exit 2, where and what to do, nothing written

SCENARIO = """\
name: tiny
question: Does it run?
target: {shape: tiny-llama-test, weights: dummy}
drafters: [{kind: oracle}]
sweep:
  batch_size: [1, 2]
  depth: 2
"""


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("  depth: 2", "  depht: 2", "bad.yaml:7: sweep.depht: ", "is not a known key"),
        ("  depth: 2", "  depth: two", "bad.yaml:7: sweep.depth: ", "two"),
        ("  depth: 2", "  depth: -1", "bad.yaml:7: sweep.depth: ", "-1"),
        ("  depth: 2", "  depth: 2\n  depth: 3", "bad.yaml:8: ", "depth"),
        ("  depth: 2", "  depth: []", "bad.yaml:7: sweep.depth: ", "empty"),
        ("  depth: 2", "\tdepth: 2", "bad.yaml:7: ", "tab"),
        ("  depth: 2", "  depth: 2\nsampling: {temperature: 1e-3x}", "bad.yaml:8: sampling.temperature: ", "1e-3x"),
        ("  depth: 2", "  depth: 2\nmeasure: {budget_s: .nan}", "bad.yaml:8: measure.budget_s: ", "nan"),
        ("kind: oracle", "kind: oracel", "bad.yaml:4: drafters[0].kind: ", "oracel"),
        ("name: tiny\n", "", "bad.yaml:1: name: ", "is missing"),
        ("name: tiny", "name: ../tiny", "bad.yaml:1: name: ", "can't name a folder"),
        ("shape: tiny-llama-test", "shape: tiny-lama", "bad.yaml: shape: ", "'tiny-lama'"),
        ("shape: tiny-llama-test, weights: dummy", "model: ./nowhere", "bad.yaml: ", "nowhere"),
        ("weights: dummy", "weights: dummy, graphs: on", "bad.yaml: target.graphs: ", "no graphs"),
        ("  depth: 2", "  depth: 2\nworkload: {prompts: ./no.jsonl}", "", "no.jsonl"),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_a_wrong_scenario(old: str, new: str, where: str, message: str, dry: bool, call: Call, tmp_path: Path) -> None:
    assert old in SCENARIO
    (tmp_path / "bad.yaml").write_text(SCENARIO.replace(old, new))
    if "no.jsonl" in new:  # prompts of dummy weights are random ids
        (tmp_path / "bad.yaml").write_text(
            SCENARIO.replace(old, new).replace("shape: tiny-llama-test, weights: dummy", "model: smollm2-135m-instruct")
        )
    said = call("run", "bad.yaml", *(["--dry-run"] if dry else []))
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert where in said.err
    assert message in said.err
    assert "remedy: " in said.err
    assert files(tmp_path) == {"bad.yaml"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "."], "."),
        (["run", "empty.yaml"], "empty.yaml"),
        (["run", "binary.yaml"], "binary.yaml"),
        (["run", "good.yaml", "--only", "batch"], "'batch' is not KEY=VALUE"),
        (["run", "good.yaml", "--only", "bach_size=1"], "did you mean batch_size?"),
        (["run", "good.yaml", "--only", "batch_size=3"], "there is: 1, 2"),
        (["run", "good.yaml", "--only", "batch_size=1", "--only", "batch_size=2"], "given twice"),
        (["run", "good.yaml", "--out", "good.yaml"], "good.yaml: can't make this folder"),
        (["run", "good.yaml", "--out", "good.yaml/x"], "good.yaml/x: can't make this folder"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["report", "empty"], "empty/rows.jsonl: no rows here"),
        (["report", "good.yaml"], "good.yaml: no such folder"),
        (["roofline", "--hardware", "h100"], "h100-sxm"),
        (["roofline", "--hardware", "gtx-9000"], "gtx-9000"),
        (["roofline", "--hardware", "h100-sxm", "--measure"], "this machine is no h100-sxm"),
        (["roofline", "--model", "llama-9"], "llama-9"),
    ],
)
def test_wrong_arguments(args: list[str], message: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(SCENARIO)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    (tmp_path / "empty").mkdir()
    before = files(tmp_path)
    said = call(*args)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert message in said.err
    assert "remedy: " in said.err
    assert files(tmp_path) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "a.yaml", "b.yaml"],
        ["run", "a.yaml", "--nope"],
        ["nope"],
        ["report"],
        ["roofline", "--measured"],
    ],
)
def test_a_command_line_that_cant_be_read(args: list[str], call: Call, tmp_path: Path) -> None:
    said = call(*args)
    assert said.code == 2
    assert "Usage: " in said.err
    assert files(tmp_path) == set()


def test_a_page_that_cant_be_written(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, lambda *args, **options: some_outcome())
    write_scenario(tmp_path / "s.yaml")
    assert call("run", "s.yaml").code == 0
    (tmp_path / "folder").mkdir()
    said = call("report", "runs/tiny", "--out", "folder")
    assert said.code == 2
    assert said.err == "error: folder: can't be written: Is a directory\n  remedy: give another file to --out\n"


# ---- Exit codes of a run


def test_exit_0_where_a_case_succeeded(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(target: Any, case: Any, *args: Any, **options: Any) -> Outcome:
        if case.workload.batch_size == 2:
            raise RuntimeError("device lost")
        return some_outcome()

    measuring(monkeypatch, measure)
    write_scenario(tmp_path / "s.yaml", sweep={"batch_size": [1, 2], "depth": 2})
    said = call("run", "s.yaml")
    assert said.code == 0
    assert "failed: oracle · depth 2 · batch 2 · T 0: RuntimeError: device lost" in said.out
    assert "report: runs/tiny/report.html" in said.out
    assert "[1/2] oracle · depth 2 · batch 1 · T 0: ok, 1.25 x AR" in said.out


@pytest.mark.parametrize("status", ["failed", "invalid", "skipped"])
def test_exit_1_where_none_did(status: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, lambda *args, **options: some_outcome(status, "because"))
    write_scenario(tmp_path / "s.yaml")
    said = call("run", "s.yaml")
    assert said.code == 1
    assert f"{status}: oracle · depth 2 · batch 2 · T 0: because" in said.out


def test_exit_4_where_the_folder_is_in_use_or_broken(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, lambda *args, **options: some_outcome())
    write_scenario(tmp_path / "s.yaml", sweep={"batch_size": [1, 2], "depth": 2})
    with RowStore(tmp_path / "runs" / "tiny"):
        said = call("run", "s.yaml")
    assert said.code == 4
    assert f"process {os.getpid()} is already writing to this folder" in said.err
    assert "remedy: wait for it to end" in said.err
    assert call("run", "s.yaml").code == 0
    rows = tmp_path / "runs" / "tiny" / ROWS_FILE
    rows.write_text("{broken\n" + rows.read_text())
    for args in (["run", "s.yaml"], ["report", "runs/tiny"]):
        said = call(*args)
        assert said.code == 4
        assert "rows.jsonl:1: a broken row" in said.err


def test_exit_4_where_the_disk_is_full(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RowStore, row: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows.jsonl")

    measuring(monkeypatch, lambda *args, **options: some_outcome())
    monkeypatch.setattr(RowStore, "append", full)
    write_scenario(tmp_path / "s.yaml")
    said = call("run", "s.yaml")
    assert said.code == 4
    assert said.err == "error: rows.jsonl: No space left on device\n"


# ---- Interrupt, resume, --fresh


@pytest.mark.parametrize("options", [[], ["--fresh"], ["--only", "batch_size=1,2"], ["--out", "my results"]])
def test_an_interrupt_says_how_to_resume(
    options: list[str], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the command it gives does resume, into the folder that was begun."""
    measured: list[int] = []

    def measure(target: Any, case: Any, *args: Any, **kwargs: Any) -> Outcome:
        if case.workload.batch_size == 2 and interrupt:
            raise KeyboardInterrupt
        measured.append(case.workload.batch_size)
        return some_outcome()

    measuring(monkeypatch, measure)
    write_scenario(tmp_path / "s.yaml", sweep={"batch_size": [1, 2], "depth": 2})
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    interrupt = True
    said = call("run", "s.yaml", *options)
    assert said.code == 1
    first, second = said.err.splitlines()[-2:]
    assert first == "error: interrupted; at most the running case is lost"
    assert second.startswith("  remedy: resume with: specbench run s.yaml --out ")
    interrupt = False
    words = shlex.split(second.partition("specbench ")[2])
    assert call(*words).code == 0
    assert measured == [1, 2]
    folder = {"--fresh": "runs/tiny-2", "--out": "my results"}.get(options[0] if options else "", "runs/tiny")
    assert len(read_rows(tmp_path / folder)) == 2


def test_fresh_starts_a_new_folder_and_touches_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, lambda *args, **options: some_outcome())
    write_scenario(tmp_path / "s.yaml")
    for number, args in enumerate([[], ["--fresh"], ["--fresh"]], start=1):
        before = {path: (tmp_path / path).read_bytes() for path in files(tmp_path)}
        assert call("run", "s.yaml", *args).code == 0
        folder = "tiny" if number == 1 else f"tiny-{number}"
        assert len(read_rows(tmp_path / "runs" / folder)) == 1
        assert all((tmp_path / path).read_bytes() == content for path, content in before.items())
    assert call("run", "s.yaml", "--out", "else/where", "--fresh").code == 0
    assert call("run", "s.yaml", "--out", "else/where", "--fresh").code == 0
    assert {path.name for path in (tmp_path / "else").iterdir()} == {"where", "where-2"}


def test_a_second_run_says_what_it_reuses(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, lambda *args, **options: some_outcome())
    write_scenario(tmp_path / "s.yaml", sweep={"batch_size": [1, 2], "depth": 2})
    assert "resuming" not in call("run", "s.yaml", "--only", "batch_size=1").out
    assert "resuming: 1 of 2 cases are done already" in call("run", "s.yaml").out
    assert "resuming: 2 of 2 cases are done already" in call("run", "s.yaml").out
    assert len(read_rows(tmp_path / "runs" / "tiny")) == 2


# ---- Dry run


def test_a_dry_run_lists_memory_time_and_skips_and_writes_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "quick_roof", lambda: Roof(1e9, 1e8))
    measuring(monkeypatch, lambda *args, **options: pytest.fail("measured"))
    write_scenario(
        tmp_path / "s.yaml",
        drafters=[{"kind": "oracle"}, {"kind": "early_exit", "layers": 2}],
        sweep={"batch_size": [1, 64], "depth": 2, "context_len": [100, 600]},
    )
    said = call("run", "s.yaml", "--dry-run", "--fresh", "--out", "results")
    assert said.code == 0
    assert "tiny: 8 cases, nothing is measured" in said.out
    (shown,) = (line for line in said.out.splitlines() if "oracle · depth 2 · batch 64 · T 0 · context 100" in line)
    assert shown.split()[-4] == "MiB" or "MiB" in shown
    assert " s " in shown
    assert said.out.count("needs 609 tokens of context, and the model has 512") == 4
    assert said.out.count("early exit after 2 of 2 layers") == 2
    assert "min in measured blocks at least" in said.out
    assert files(tmp_path) == {"s.yaml"}
    assert not (tmp_path / "results").exists()
    narrowed = call("run", "s.yaml", "--dry-run", "--only", "drafter=oracle", "--only", "batch_size=1")
    assert "tiny: 2 cases" in narrowed.out


def test_the_estimate_grows_with_the_work(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "quick_roof", lambda: Roof(1e6, 1e6))
    seconds = []
    for length in (8, 80):
        write_scenario(tmp_path / "s.yaml", workload={"num_prompts": 4, "output_len": length})
        out = call("run", "s.yaml", "--dry-run").out
        (line,) = (line for line in out.splitlines() if "oracle · depth 2" in line)
        seconds.append(float(line.split()[-2]))
    assert 5 * seconds[0] < seconds[1] < 20 * seconds[0]


# ---- A real run, its page, and its frame


def run_once(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """A real sweep of two tiny cases on an idle machine."""
    wide(monkeypatch)
    measure = functools.partial(measure_case, monitor=ScriptedMonitor())
    monkeypatch.setattr(sweep_module, "run_sweep", functools.partial(sweep_module.run_sweep, measure=measure))
    write_scenario(folder / "s.yaml", drafters=[{"kind": "none"}, {"kind": "oracle"}])
    with one_thread():
        return call("run", "s.yaml")


def test_run_ends_with_the_verdict_and_leaves_all_files(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run_once(call, tmp_path, monkeypatch)
    assert said.code == 0
    assert said.err == ""
    folder = tmp_path / "runs" / "tiny"
    names = files(folder)
    assert {"manifest.json", "rows.jsonl", "summary.md", "report.html"} <= names
    assert [name for name in names if name.startswith("plots/") and name.endswith(".svg")]
    assert read_manifest(folder)["scenario_file"] == "s.yaml"
    assert said.out.index("report: runs/tiny/report.html") < said.out.index("Does it run?")
    frame = specbench.load(folder)
    assert list(frame["status"]) == ["ok", "ok"]
    assert list(frame["drafter"]) == ["none", "oracle"]
    rows = (folder / ROWS_FILE).read_bytes()
    with one_thread():
        assert "resuming: 2 of 2" in call("run", "s.yaml").out
    assert (folder / ROWS_FILE).read_bytes() == rows
    report_without_torch(folder, tmp_path / "page.html")


def report_without_torch(folder: Path, page: Path) -> None:
    """`report` and `roofline NAME` where torch, triton and numba can't be imported."""
    blocked = "import sys\nfor name in ('torch', 'triton', 'numba'): sys.modules[name] = None\n"
    start = blocked + "from specbench.cli import main\nsys.argv[0] = 'specbench'\nmain()"
    done = python("-c", start, "report", str(folder), "--out", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {page}\n"
    assert "Does it run?" in page.read_text(encoding="utf-8")
    done = python("-c", start, "roofline", "--hardware", "h100-sxm", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bandwidth_bytes_per_s"] == pytest.approx(3.35e12)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, check=False)


def test_the_python_api_runs_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    constant_device(monkeypatch)
    measuring(monkeypatch, lambda *args, **options: some_outcome())
    file = write_scenario(tmp_path / "s.yaml")
    assert specbench.run(file) == Path("runs/tiny")
    assert specbench.run(str(file), out="elsewhere") == Path("elsewhere")
    assert len(specbench.load("elsewhere")) == 1
    with pytest.raises(InputError):
        specbench.run("nowhere.yaml")

    def interrupted(*args: Any, **options: Any) -> Outcome:
        raise KeyboardInterrupt

    measuring(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        specbench.run(file, fresh=True)


# ---- Other commands


def test_the_module_runs_as_a_command_and_help_imports_nothing_heavy(tmp_path: Path) -> None:
    done = python("-m", "specbench.cli", "run", str(tmp_path / "nowhere.yaml"))
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    heavy = "torch numba numpy pandas scipy matplotlib pydantic transformers triton yaml"
    code = (
        "import sys, specbench.cli\nsys.argv = ['specbench', '--help']\n"
        "try: specbench.cli.main()\n"
        f"except SystemExit: print('LOADED', [name for name in {heavy.split()} if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.endswith("LOADED []\n")
    for name in ("run", "report", "roofline", "doctor"):
        assert f"  {name} " in done.stdout


def test_roofline_of_a_named_device(call: Call) -> None:
    said = call("roofline", "--hardware", "h100-sxm", "--json")
    assert said.code == 0
    assert json.loads(said.out)["bandwidth_bytes_per_s"] == pytest.approx(3.35e12)
    assert "deviceQuery" in call("roofline", "--hardware", "h100-sxm", "--model", "llama-3.1-8b").out


def test_roofline_of_this_device(call: Call) -> None:
    said = call("roofline")
    assert said.code == 0
    assert said.out.startswith("device: ")
    assert "datasheet roof: " in said.out
    assert "run with --measure" in said.out


def test_doctor_tells_what_runs_here(call: Call) -> None:
    said = call("doctor")
    assert said.code == 0
    for name in ("machine", "torch", "backend cpu", "smollm2-135m-instruct", "GPU"):
        assert name in said.out
    assert "MISSING" not in said.out


def test_doctor_tells_the_remedy_for_what_does_not(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no case can do without is exit 4; an absent model is not."""

    def missing() -> str:
        raise InputError("no model", remedy="pip install it")

    def broken() -> str:
        raise InvalidEnvironmentError("no OpenMP runtime", remedy="install torch's wheel")

    monkeypatch.setattr(doctor, "_quickstart_model", missing)
    said = call("doctor")
    assert said.code == 0
    assert "no model; pip install it" in said.out
    monkeypatch.setattr(doctor, "_cpu_backend", broken)
    said = call("doctor")
    assert said.code == 4
    assert "MISSING" in said.out
    assert "no OpenMP runtime; install torch's wheel" in said.out
