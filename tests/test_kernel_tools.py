"""The tools around the kernels: ops by name, comparison, timing with a cold cache, the command and its exit codes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_tool_op as ops
import pytest
import torch
from specbench_kernels import aot, registry
from specbench_kernels.op import Case, Cost

from specbench.bench import kernels as tool
from specbench.bench.clock import FakeClock
from specbench.bench.kernel_check import KernelRow, check, compare, measure, summary, time_cold
from specbench.bench.kernel_tables import KERNEL_COLUMNS, kernel_cells, kernel_json, markdown_table
from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.roofline.model import Roof

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="a GPU is here: the kernels are compiled")


# Ops by name


def test_table_of_names_is_what_the_modules_hold() -> None:
    held: dict[str, str] = {}
    for module in dict.fromkeys(registry.MODULES.values()):
        for name in registry.ops_of(importlib.import_module(f"specbench_kernels.{module}")):
            assert name not in held, f"{name} stands in {held.get(name)} and {module}"
            held[name] = module
    assert held == registry.MODULES


def test_no_module_with_ops_is_left_out() -> None:
    folder = ROOT / "kernels" / "specbench_kernels"
    ours = {path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "aot", "registry", "op")}
    offering = {name for name in ours if registry.ops_of(importlib.import_module(f"specbench_kernels.{name}"))}
    assert offering == set(registry.MODULES.values())


@pytest.mark.parametrize("name", registry.names())
def test_every_op_is_described(name: str) -> None:
    op = registry.find(name)
    small, bench, compiled = op.small(), op.bench(), op.compilations()
    for what, made in (("small", small), ("bench", bench)):
        labels = [case.name for case in made]
        assert labels, f"no {what} cases"
        assert len(set(labels)) == len(labels), f"two {what} cases of one name"
    assert len({one.label for one in compiled}) == len(compiled) > 0
    for case in bench:
        cost = op.cost(case)
        assert cost.bytes > 0
        assert cost.flops >= 0
    for one in compiled:
        assert not set(one.divisible) - set(one.signature) - set(one.constants)


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(KeyError, match="did you mean rmsnorm"):
        registry.find("rms_norm")
    with pytest.raises(KeyError, match="is no Op"):
        registry.find("kernel_tool_op:BLOCK")


def test_op_from_elsewhere() -> None:
    assert registry.find("kernel_tool_op:COPY") is ops.COPY


def test_without_triton_the_remedy_is_told(tmp_path: Path) -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else real(name, package)
sys.argv = ["specbench", "kernels", "--op", "rmsnorm"]
from specbench import cli
cli.main()
"""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert "triton is not installed" in done.stderr
    assert "remedy: pip install 'triton" in done.stderr


# Comparison


def one(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"y": torch.tensor(values, dtype=dtype)}


def test_floats_may_differ_by_the_tolerance_and_no_more() -> None:
    wanted = one(1.0, -10.0, dtype=torch.float64)
    assert compare(one(1.1, -11.0, dtype=torch.float64), wanted, (0.11, 0.0)).wrong is None
    found = compare(one(1.1, -11.2, dtype=torch.float64), wanted, (0.11, 0.0))
    assert found.wrong == "y[1] is -11.2 instead of -10 (1 of 2 are wrong)"
    assert found.max_abs == pytest.approx(1.2)
    assert found.share == pytest.approx(1.2 / 1.1)
    assert found.rms == pytest.approx(math.sqrt((0.01 + 1.44) / 2))


def test_integers_and_booleans_must_be_equal_whatever_the_tolerance() -> None:
    for dtype in (torch.int32, torch.int64, torch.bool):
        ours, theirs = ({"y": torch.tensor(v).to(dtype)} for v in ([1, 0], [1, 1]))
        assert compare(theirs, theirs, (0.0, 0.0)).wrong is None
        assert compare(ours, theirs, (10.0, 10.0)).wrong == "y[1] is 0 instead of 1 (1 of 2 are wrong)"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_stand_where_the_reference_has_it(value: float) -> None:
    for tolerance in ((0.0, 0.0), (10.0, 10.0)):
        assert compare(one(value, 1.0), one(value, 1.0), tolerance).wrong is None
        found = compare(one(value, 1.0), one(1.0, 1.0), tolerance)
        assert found.wrong is not None
        assert found.max_abs == math.inf
        assert compare(one(1.0), one(value), tolerance).wrong is not None


def test_names_shapes_and_empty_outputs() -> None:
    assert compare({}, one(1.0), (0, 0)).wrong == "outputs [] instead of ['y']"
    assert compare(one(1.0, 2.0), one(1.0), (0, 0)).wrong == "y has shape [2] instead of [1]"
    assert compare(one(), one(), (0, 0)).wrong is None


def test_large_outputs_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.bench.kernel_check.CHUNK", 7)
    wanted = {"y": torch.arange(60, dtype=torch.float32).reshape(4, 15)}
    ours = {"y": wanted["y"].clone()}
    ours["y"][3, 2] += 1
    assert compare(wanted, wanted, (0, 0)).wrong is None
    assert compare(ours, wanted, (0.0, 0.5)).wrong == "y[3, 2] is 48 instead of 47 (1 of 60 are wrong)"
    assert compare(ours, wanted, (0.0, 0.5)).max_abs == 1.0


def test_fp8_is_compared_by_value() -> None:
    ours = {"y": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn)}
    assert compare(ours, one(0.5, 448.0), (0, 0)).wrong is None
    assert compare(ours, one(0.5, 416.0), (0, 0)).wrong is not None


# Timing


def test_flush_is_no_part_of_the_time_and_runs_before_every_call() -> None:
    clock, order = FakeClock(), []

    def flush() -> None:
        order.append("flush")
        clock.issue(5.0)

    def call() -> None:
        order.append("call")
        clock.issue(0.25)

    durations = time_cold(clock, call, flush, budget_s=6.0, least=10, most=100)
    assert durations == [0.25] * 30  # 20 spend 5 s, so a third batch of 10 reaches the budget
    assert order == ["flush", "call"] * 31


def test_timing_stops_at_the_most_and_goes_to_the_least() -> None:
    clock = FakeClock()
    assert len(time_cold(clock, lambda: clock.issue(1e-9), lambda: None, budget_s=1.0, least=20, most=50)) == 50
    assert len(time_cold(clock, lambda: clock.issue(9.0), lambda: None, budget_s=1.0, least=20, most=50)) == 20


def test_summary_has_the_spread() -> None:
    timing = summary([float(value) for value in range(1, 12)], "CUDA graph")
    assert (timing.median_s, timing.low_s, timing.high_s, timing.repetitions) == (6.0, 2.0, 10.0, 11)


def fake_op(clock: FakeClock, wrong_after: int | None = None) -> Any:
    """An op of 2 s a call whose outputs turn wrong after `wrong_after` runs."""
    runs = []

    def run_once(given: Any) -> Any:
        runs.append(1)
        clock.issue(2.0)
        bad = wrong_after is not None and len(runs) > wrong_after
        return {"y": given["x"] + (1.0 if bad else 0.0)}

    return dataclasses.replace(
        *(ops.COPY,),
        run=run_once,
        inputs=lambda case, device, seed: {"x": torch.ones(3)},
        reference=lambda given: {"y": given["x"].double()},
        cost=lambda case: Cost(40.0, 10.0),
    )


def measured(op: Any, clock: FakeClock, roof: Roof | None = None) -> KernelRow:
    case = Case("three", torch.float32, {"n": 3})
    plain = lambda call, device: (call, "launched one by one")  # noqa: E731
    settings: dict[str, Any] = {"seed": 0, "clock": clock, "flush": lambda: None, "budget_s": 1.0}
    return measure(op, case, CPU, roof=roof, launch=plain, **settings)


def test_share_of_the_roof_is_the_least_time_over_the_time() -> None:
    clock = FakeClock()
    row = measured(fake_op(clock), clock, Roof(flops_per_s=40.0, bandwidth_bytes_per_s=20.0))
    assert row.status == "ok"
    assert row.timing is not None
    assert row.timing.median_s == 2.0
    assert (row.bytes_per_s, row.flops_per_s) == (5.0, 20.0)
    assert row.roof_share == pytest.approx(0.5)  # 40 FLOP take 1 s at least, 10 bytes 0.5 s
    assert measured(fake_op(FakeClock()), clock).roof_share is None


@pytest.mark.parametrize("runs", [0, 21])
def test_no_time_where_the_outputs_are_wrong_before_or_after(runs: int) -> None:
    clock = FakeClock()
    row = measured(fake_op(clock, wrong_after=runs), clock, Roof(1.0, 1.0))
    assert row.status == "wrong"
    assert row.reason == "y[0] is 2 instead of 1 (3 of 3 are wrong)"
    assert (row.timing, row.roof_share, row.bytes_per_s) == (None, None, None)


def test_error_of_an_op_is_its_row() -> None:
    row = check(ops.FAILS, ops.small()[0], CPU, 0)
    assert (row.status, row.reason) == ("failed", "ValueError: wrong shape [1]")


# Tables


def test_cells_and_json_of_a_row() -> None:
    clock = FakeClock()
    row = measured(fake_op(clock), clock, Roof(40.0, 20.0))
    cells = dict(zip(KERNEL_COLUMNS, kernel_cells(row), strict=True))
    assert (cells["time"], cells["of roof"], cells["verdict"]) == ("2000.00 ms", "50.0%", "ok")
    lost = check(ops.COPY, ops.small()[0], CPU, 0) if INTERPRETED else row
    assert dict(zip(KERNEL_COLUMNS, kernel_cells(lost), strict=True))["verdict"] == "ok"
    assert json.loads(json.dumps(kernel_json(row), allow_nan=False))["bytes_per_s"] == 5.0
    table = markdown_table(("op", "time"), [("a|b", "1")])
    assert table == "| op | time |\n| --- | ---: |\n| a\\|b | 1 |\n"


# The command


def call(*names: str, **options: Any) -> ExitCode:
    """`specbench kernels --op NAME ...` in this process."""
    settings: dict[str, Any] = {
        "compile_only": False,
        "archs": (),
        "check_only": False,
        "jobs": None,
        "seed": 0,
        "outputs": tool.Outputs(),
    }
    return tool.kernels([f"kernel_tool_op:{name}" if name.isupper() else name for name in names], **settings | options)


@needs_interpreter
def test_interpreter_checks_the_small_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tool.Outputs(tmp_path / "all.json", tmp_path / "new" / "all.md")
    assert call("COPY", outputs=files) == ExitCode.DONE
    assert "4 of 4 cases are right" in capsys.readouterr().out
    data = json.loads((tmp_path / "all.json").read_text())
    assert [row["status"] for row in data["rows"]] == ["ok"] * 4
    assert all(row["timing"] is None for row in data["rows"])
    assert "| scaled_copy | 100 bfloat16 |" in (tmp_path / "new" / "all.md").read_text()


@needs_interpreter
def test_wrong_kernels_end_with_exit_code_1(tmp_path: Path) -> None:
    assert call("WRONG", "LOST", "FAILS", "COPY", outputs=tool.Outputs(tmp_path / "all.json")) == ExitCode.FAILED
    rows = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["status"] for row in rows] == ["wrong"] * 8 + ["failed"] * 4 + ["ok"] * 4
    assert rows[7]["reason"].startswith("y[99] is nan instead of")


@needs_interpreter
def test_a_real_op_is_checked() -> None:
    assert call("philox_uniforms") == ExitCode.DONE


def test_without_gpu_and_interpreter_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidEnvironmentError, match="there is no GPU") as caught:
        call("COPY")
    assert "TRITON_INTERPRET=1" in str(caught.value)
    assert "--compile-only" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("rms_norm", {}, "did you mean rmsnorm?"),
        ("nowhere:OP", {}, "nowhere"),
        ("COPY", {"archs": ("sm_90",)}, "belong to --compile-only"),
        ("COPY", {"jobs": 2}, "belong to --compile-only"),
        ("COPY", {"compile_only": True, "archs": ("sm_12",)}, "'sm_12' is not a known architecture"),
    ],
)
def test_wrong_input(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        call(name, **options)
    assert told in str(caught.value)


@needs_interpreter
def test_the_interpreter_compiles_nothing() -> None:
    with pytest.raises(InvalidEnvironmentError, match="TRITON_INTERPRET unset") as caught:
        call("COPY", compile_only=True, command="specbench kernels --compile-only")
    assert "env -u TRITON_INTERPRET specbench kernels --compile-only" in str(caught.value)


def compile_only(cwd: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """`specbench kernels --compile-only ARGUMENTS` in a process whose kernels are compiled, and its rows."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
    env.pop("TRITON_INTERPRET", None)
    words = [word for name in arguments for word in (("--op", f"kernel_tool_op:{name}") if name.isupper() else (name,))]
    command = [sys.executable, "-m", "specbench.cli", "kernels", "--compile-only", "--json", "all.json", *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400, check=False)
    file = cwd / "all.json"
    return done, json.loads(file.read_text())["rows"] if file.exists() else []


def test_compile_only_prints_keeps_and_judges(tmp_path: Path) -> None:
    one_process = ("--jobs", "1", "--arch", "sm_90", "--arch", "sm_80")
    done, rows = compile_only(tmp_path, "COPY", "TILE", *one_process)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [(row["op"].partition(":")[2], row["case"], row["arch"]) for row in rows]
    cases = [("COPY", "bf16"), ("COPY", "fp32"), ("TILE", "bf16"), ("TILE", "fp16")]
    assert names == [(op, case, arch) for op, case in cases for arch in (90, 80)]
    assert [set(row["tensor_core"]) for row in rows[4:]] == [{"wgmma"}, {"mma"}] * 2
    assert all(row["registers"] > 0 and row["verdict"] == "ok" for row in rows)
    kept = list((tmp_path / ".cache" / "specbench" / "kernel-resources").glob("*.json"))
    assert len(kept) == 8
    for file in kept:  # told apart from what a compiler would say
        data = json.loads(file.read_text())
        file.write_text(json.dumps(data | {"registers": 1000 + data["arch"]}))
    # SCALAR promises tensor cores for COPY's kernel: the figures are kept ones, the promise is its own.
    done, rows = compile_only(tmp_path, "COPY", "SCALAR", "INCOMPLETE", "SPILLS")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row["registers"] for row in rows[:4]] == [1090, 1090, 1090, 0]
    assert [row["verdict"] for row in rows] == ["ok", "ok", "no tensor cores", "does not compile", "spills"]
    assert "arguments of scaled_copy missing: n, scale" in done.stdout
    assert min(rows[4]["spill_store_bytes"], rows[4]["spill_load_bytes"], rows[4]["stack_bytes"]) > 0


# Reading the compiler's report

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    24 bytes stack frame, 100 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem, 8 bytes cmem[0]
"""


def test_report_is_read() -> None:
    assert aot.parse_report(REPORT) == {
        "registers": 255,
        "static_bytes": 1024,
        "stack_bytes": 24,
        "spill_store_bytes": 100,
        "spill_load_bytes": 104,
    }


@pytest.mark.parametrize("text", ["", REPORT.replace("Used", "Took"), REPORT + REPORT])
def test_report_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="ptxas -v reported"):
        aot.parse_report(text)


def test_tensor_core_instructions_are_told_apart() -> None:
    ptx = """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1;
    wgmma.fence.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1];
    """
    assert aot.count_tensor_core(ptx) == {"mma": 1, "wgmma": 1, "tcgen05": 1}
    assert aot.count_tensor_core("fma.rn.f32 %f1, %f2, %f3, %f4;") == {}


def test_verdict_names_every_broken_promise() -> None:
    fine = aot.Resources("op", "case", "k", 90, 4, uses_dot=True, no_spills=True, tensor_core={"wgmma": 1})
    assert fine.verdict == "ok"
    spilling = dataclasses.replace(fine, spill_load_bytes=4, tensor_core={}, shared_bytes=232449)
    assert spilling.verdict == "spills, no tensor cores, too much shared memory"
    assert dataclasses.replace(fine, spill_load_bytes=4, no_spills=False).verdict == "ok"
    assert dataclasses.replace(fine, arch=80, shared_bytes=166913).faults == ("too much shared memory",)
    assert dataclasses.replace(fine, error="no").verdict == "does not compile"


def test_commands_as_a_person_types_them() -> None:
    assert tool.shown_command(["kernels", "--op", "a b"]) == "specbench kernels --op 'a b'"
