"""Bandwidth by working set, the staircase, the clock: exact under scripted time, and one small real run of all."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench.bench import ceilings_bandwidth as cb
from specbench.bench import ceilings_clock as cc
from specbench.bench import ceilings_skinny as cs
from specbench.bench import roof_measure
from specbench.bench.ceilings import MeasuredRoofs, Reading
from specbench.bench.ceilings_bandwidth import BandwidthPoint, CacheLevel, CpuStreams
from specbench.bench.clock import FakeClock
from specbench.bench.roof_charts import write_charts
from specbench.bench.roof_measure import Budgets, linear_shapes, measure_everything
from specbench.roofline.shapes import named_shape
from specbench.roofline.staircase import Staircase, linears_s

CPU = torch.device("cpu")
KIB = 1 << 10
LEVELS = (CacheLevel("L1", 64 * KIB), CacheLevel("L2", 1024 * KIB), CacheLevel("memory", None))


def every_call_takes(seconds: float) -> FakeClock:
    return FakeClock(itertools.chain.from_iterable(itertools.repeat((0.0, seconds))))


# ---- Cache levels


def cache_folder(root: Path, caches: list[tuple[str, str, str, str]]) -> Path:
    for index, values in enumerate(caches):
        folder = root / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (folder / name).write_text(value + "\n")
    return root


def test_cache_levels_count_what_all_threads_have(tmp_path: Path) -> None:
    root = cache_folder(
        tmp_path,
        [
            ("1", "Data", "32K", "0"),
            ("1", "Instruction", "64K", "0"),
            ("2", "Unified", "512K", "0,4"),
            ("3", "Unified", "32M", "0-3,8-11"),
        ],
    )
    assert cb.cpu_cache_levels(4, root) == (
        CacheLevel("L1", 4 * 32 * KIB),
        CacheLevel("L2", 2 * 512 * KIB),
        CacheLevel("L3", 32 << 20),
        CacheLevel("memory", None),
    )
    assert cb.cpu_cache_levels(4, tmp_path / "none") == (CacheLevel("memory", None),)


def test_a_working_set_belongs_to_the_level_it_fits_into() -> None:
    told = {size: cb.level_of(size * KIB, LEVELS) for size in (1, 48, 49, 128, 768, 769, 2047, 2048, 1 << 20)}
    assert told == {
        1: "L1", 48: "L1", 49: None, 128: "L2", 768: "L2", 769: None, 2047: None, 2048: "memory", 1 << 20: "memory",
    }  # fmt: skip
    sizes = cb.working_sets(LEVELS, 8192 * KIB)
    assert list(sizes) == sorted(set(sizes))
    assert {"L1", "L2", "memory"} <= {cb.level_of(size, LEVELS) for size in sizes}
    assert max(sizes) <= 8192 * KIB


def test_plateaus_are_the_best_inside_a_level() -> None:
    points = [
        BandwidthPoint("read", 32 * KIB, 90.0, 3),
        BandwidthPoint("read", 40 * KIB, 100.0, 3),
        BandwidthPoint("read", 60 * KIB, 500.0, 3),
        BandwidthPoint("read", 4096 * KIB, 10.0, 3),
        BandwidthPoint("copy", 40 * KIB, 80.0, 3),
    ]
    l1, l2, memory = cb.by_level(points, LEVELS)
    assert l1.bytes_per_s == {"read": 100.0, "copy": 80.0, "triad": None}
    assert set(l2.bytes_per_s.values()) == {None}
    assert memory.bytes_per_s["read"] == 10.0


def test_the_compiled_loops_do_all_their_work() -> None:
    """A compiler that left out passes would show as a bandwidth no core has."""
    kernels = cb._cpu_kernels()
    a, b, c = (np.full(40, value, dtype=np.float32) for value in (2.0, 5.0, 0.0))
    assert kernels["read"](a, c, c, 3) == pytest.approx(3 * 80)
    kernels["triad"](a, b, c, 2)
    assert a[1] == 1.0
    assert c.tolist() == pytest.approx([15.0, 16.0, *[17.0] * 38])
    kernels["copy"](a, b, c, 1)
    assert np.array_equal(a, b)


def test_bytes_are_those_of_all_arrays_and_threads() -> None:
    calls: list[tuple[int, ...]] = []

    def kernel(a: Any, b: Any, c: Any, passes: int) -> float:
        calls.append((len(a), len(b), len(c), passes))
        return 0.0

    streams = CpuStreams(2, dict.fromkeys(cb.STREAMS, kernel))
    points = cb.measure_cpu_levels([96 * KIB], 2, 60.0, streams)
    assert [point.kernel for point in points] == ["read", "copy", "triad"]
    assert {point.working_set_bytes for point in points} == {96 * KIB}
    assert {call[:3] for call in calls} == {(12 * KIB, 16, 16), (6 * KIB, 6 * KIB, 16), (4 * KIB, 4 * KIB, 4 * KIB)}
    assert all(point.bytes_per_s > 0 for point in points)
    assert cb.measure_cpu_levels([96 * KIB], 2, -1.0, CpuStreams(2, dict.fromkeys(cb.STREAMS, kernel))) == ()


def test_the_gpu_sweep_counts_the_calls_of_its_graph() -> None:
    """The same code without graphs, on a CPU: 20 calls in 1 s move 20 x the working set."""
    points = cb.measure_gpu_levels(every_call_takes(1.0), CPU, [12 * KIB], 60.0, replayed=False)
    assert [(point.kernel, point.bytes_per_s) for point in points] == [(k, 20 * 12 * KIB) for k in cb.STREAMS]
    assert [level.name for level in cb.gpu_cache_levels(50 << 20)] == ["L2", "memory"]
    assert [level.name for level in cb.gpu_cache_levels(None)] == ["memory"]


# ---- The staircase


def test_one_layer_of_a_stack_is_timed_from_memory() -> None:
    pointers: list[int] = []
    rows: list[tuple[int, torch.dtype]] = []

    def stack(weights: torch.Tensor) -> Callable[[torch.Tensor], object]:
        assert weights.dtype == torch.bfloat16
        assert weights.shape[1:] == (24, 16)

        def run(x: torch.Tensor) -> None:
            pointers.append(weights.data_ptr())
            rows.append((len(x), x.dtype))

        return run

    kernel = cs.Kernel("cpu", stack, torch.float32)
    layers = cs.STACK_LAYERS
    points = cs.measure_staircase(
        *(every_call_takes(1.0), CPU, "bf16", [(24, 16)]),
        rows=(1, 2, 64),
        budget_s=12.0,
        cache_bytes=3 * layers * 24 * 16 * 2,
        kernel=kernel,
    )
    assert [point.time_s for point in points] == [1.0 / layers, 1.0 / layers, None]
    assert points[2].reason == cs.TOO_LONG
    assert points[1].flops_per_s == pytest.approx(2 * 2 * 24 * 16 * layers)
    assert {point.kernel for point in points} == {"cpu"}
    assert {dtype for _, dtype in rows} == {torch.float32}
    assert len(set(pointers)) >= 6, "stacks by turns hold twice the cache"


def test_a_spent_budget_leaves_the_rest_out() -> None:
    ticks = iter([0.0, 0.0, *[100.0] * 20])
    points = cs.measure_staircase(
        *(every_call_takes(0.01), CPU, "bf16", [(8, 8), (16, 8)]),
        rows=(1, 2),
        budget_s=4.0,
        cache_bytes=0,
        kernel=cs.Kernel("cpu", lambda weights: lambda x: None),
        now=lambda: next(ticks),
    )
    assert [point.time_s is None for point in points] == [False, True, True, True]


# ---- The clock


def test_the_clock_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "_chain", lambda: lambda *args: 0)
    clocks = itertools.count(0.0, cc.CYCLES_A_LINK * cc.LINKS / 2.5e9)
    monkeypatch.setattr(cc.time, "perf_counter", lambda: next(clocks))
    clock, how = cc.cpu_clock_hz(1, "x86_64")
    assert clock == pytest.approx(2.5e9)
    assert "chain" in how
    assert cc.cpu_clock_hz(1, "aarch64") == (None, "the latency of a multiplication on aarch64 isn't known")
    assert cc.judged(5e12, "x")[0] is None


def test_the_clock_of_a_gpu_is_that_of_its_busy_samples() -> None:
    samples = [
        {"sm_clock_mhz": 345, "utilization": 0.0},
        {"sm_clock_mhz": 345, "utilization": 0.1},
        {"sm_clock_mhz": 1755, "utilization": 1.0},
        {"sm_clock_mhz": 1785, "utilization": 0.9},
        {"sm_clock_mhz": 1980, "utilization": 1.0},
        {"sm_clock_mhz": None, "utilization": 1.0},
    ]
    assert cc.gpu_clock_of(samples, None) == (1.785e9, "NVML, 3 samples under a bf16 matmul")
    assert cc.gpu_clock_of([], "NVML: no library") == (None, "NVML: no library")
    assert cc.gpu_clock_of(samples[:2], None)[0] is None


def test_the_clock_policy_of_a_cpu_and_of_a_gpu_without_nvml(tmp_path: Path) -> None:
    (tmp_path / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0/cpufreq/scaling_governor").write_text("performance\n")
    assert cc.clock_policy({"gpu": None}, tmp_path) == {"governor": "performance", "max_khz": None, "boost": None}
    told = cc.clock_policy({"gpu": {"power_limit_w": 700.0, "uuid": None}})
    assert told == {"power_limit_w": 700.0, "application_clock_mhz": None, "max_clock_mhz": None}


# ---- All of it


def small(monkeypatch: pytest.MonkeyPatch) -> MeasuredRoofs:
    monkeypatch.setattr(roof_measure, "MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr("specbench.bench.ceilings.MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr("specbench.bench.ceilings.last_level_cache_bytes", lambda: 1 << 18)
    monkeypatch.setattr(cs, "STACK_BYTES", 1 << 16)
    monkeypatch.setattr(cb, "MIN_SPAN_S", 1e-4)
    monkeypatch.setattr(cc, "LINKS", 100_000)
    monkeypatch.setattr(roof_measure, "working_sets", lambda *args: (1 << 14, 1 << 18, 1 << 21))
    spec = named_shape("tiny-llama-test")
    return measure_everything(
        "cpu", spec, dtypes=("fp32", "bf16"), budgets=Budgets(0.05, 5.0, 3.0, 1.0), rows=(1, 4, 8)
    )


def test_a_real_run_of_everything_and_its_charts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = named_shape("tiny-llama-test")
    roofs = small(monkeypatch)
    stored = json.loads(json.dumps(roofs.to_dict(), allow_nan=False))
    assert stored["model"] == spec.name
    assert {(p["n"], p["k"]) for p in stored["skinny"]} == set(linear_shapes(spec))
    assert {p["kernel"] for p in stored["skinny"]} == {"cpu"}
    assert {(p["kernel"], p["m"]) for p in stored["skinny_torch"]} == {("torch", 1), ("torch", 4)}
    assert {p["kernel"] for p in stored["bandwidth"]} == {"read", "copy", "triad"}
    assert stored["levels"][-1]["level"] == "memory"
    assert stored["clock_how"]
    stairs = Staircase.from_rows(stored["skinny"])
    assert (linears_s(stairs, spec, 3) or 0) > 0
    assert linears_s(stairs, spec, 9) is None

    written = write_charts(roofs, spec, "a device", tmp_path)
    assert sorted(path.name for path in written) == [
        f"{name}.{ending}" for name in ("bandwidth", "staircase") for ending in ("csv", "png", "svg")
    ]
    with (tmp_path / "staircase.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 5
    assert {row["layer"] for row in rows} == {"qkv", "o", "gate_up", "down", "lm_head"}
    svg = (tmp_path / "bandwidth.svg").read_text()
    assert "a device" in svg
    assert "triad (3 streams)" in svg


def test_charts_of_nothing_are_left_out(tmp_path: Path) -> None:
    reading = Reading(1e9, 1e9, 3, "x")
    roofs = MeasuredRoofs("cpu", 1, reading, reading, reading, {"fp32": reading}, (), 0.0)
    written = write_charts(roofs, named_shape("tiny-llama-test"), "a device", tmp_path)
    assert [path.name for path in written] == ["bandwidth.csv", "staircase.csv"]
    assert (tmp_path / "bandwidth.csv").read_text().split() == ["kernel,working_set_bytes,bytes_per_s,repetitions"]


def test_a_far_working_set_raises_the_roof() -> None:
    reading = Reading(1e9, 1.1e9, 3, "torch")
    roofs = MeasuredRoofs("cpu", 1, reading, reading, reading, {"fp32": reading}, (), 0.0)
    points = [BandwidthPoint("read", 1 << 20, 9e9, 3), BandwidthPoint("read", 4 << 20, 2e9, 3)]
    higher = roof_measure.raised(roofs, points, cache=1 << 20)
    assert higher.read == Reading(2e9, 2e9, 3, "working set of 4 MiB")
    assert higher.copy == reading
    assert higher.bandwidth_bytes_per_s == 2e9
