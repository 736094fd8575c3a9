"""Roofs from a scripted clock are exact; a real, tiny run has every field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch

from specbench.bench import ceilings
from specbench.bench.ceilings import (
    MeasuredRoofs,
    Reading,
    SkinnyPoint,
    buffer_bytes,
    measure_bandwidth,
    measure_gemm,
    measure_roofs,
    measure_skinny,
    rate,
)
from specbench.bench.clock import FakeClock
from specbench.bench.telemetry import CpuReading, LoadMonitor

CPU = torch.device("cpu")
MIB = 1 << 20


def every_call_takes(seconds: float) -> FakeClock:
    """Readings come in pairs: no time before a call, `seconds` within it."""
    ticks: Iterator[float] = chain.from_iterable(repeat((0.0, seconds)))
    return FakeClock(ticks)


def test_rate_is_a_median_with_the_best_beside_it() -> None:
    assert rate([0.1, 0.4, 0.2], 10.0, "x") == Reading(50.0, 100.0, 3, "x")


def test_repeat_warms_up_and_stops_at_the_budget() -> None:
    calls: list[int] = []
    clock = FakeClock(chain((0.0, 9.0), *repeat((0.0, 1.0), 20)))
    assert ceilings.repeat(clock, lambda: calls.append(1), budget_s=4.5) == [1.0] * 5
    assert len(calls) == 6
    assert len(ceilings.repeat(every_call_takes(1.0), lambda: None, 0.0)) == 3
    assert len(ceilings.repeat(every_call_takes(0.0), lambda: None, 1.0, most=7)) == 7


def test_bandwidth_counts_each_stream() -> None:
    read, copy, triad = measure_bandwidth(every_call_takes(0.5), CPU, 4 * MIB, 0.0)
    assert read.median == 4 * MIB / 0.5
    assert copy.median == 2 * read.median
    assert triad.median == 3 * read.median
    assert read.how in {"torch.sum", "torch.mv"}


def test_gemm_shrinks_to_its_budget() -> None:
    assert measure_gemm(every_call_takes(0.001), CPU, "fp32", 512, 1.0).how == "torch.matmul 512x512x512"
    small = measure_gemm(every_call_takes(1.0), CPU, "fp32", 512, 1.0)
    assert small.how == "torch.matmul 256x256x256"
    assert small.median == 2 * 256**3


def test_skinny_points_and_what_does_not_fit() -> None:
    seen: list[tuple[int, int]] = []
    pointers: set[int] = set()

    def make_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
        def linear(x: torch.Tensor) -> torch.Tensor:
            seen.append((x.shape[0], weight.shape[0]))
            pointers.add(weight.data_ptr())
            assert x.dtype == weight.dtype == torch.bfloat16
            return torch.nn.functional.linear(x, weight)

        return linear

    points = measure_skinny(every_call_takes(1.0), CPU, "bf16", (24, 16), (1, 2, 64), 2.0, make_linear)
    assert [point.m for point in points] == [1, 2, 64]
    assert points[0].flops_per_s == 2 * 24 * 16
    assert points[0].bytes_per_s == 2 * (24 * 16 + 24 + 16)
    assert points[2].time_s is None
    assert points[2].reason
    assert {m for m, _ in seen} == {1, 2}
    assert len(pointers) > 2, "each call must stream another copy of the weight"


def test_buffer_size() -> None:
    assert buffer_bytes(32 * MIB, 100 << 30) == (256 * MIB, None)
    assert buffer_bytes(100 * MIB, 100 << 30) == (400 * MIB, None)
    assert buffer_bytes(None, 100 << 30) == (256 * MIB, None)
    size, note = buffer_bytes(32 * MIB, 1 << 30)
    assert size == 128 * MIB
    assert "memory is short" in (note or "")


def _roofs(**changes: object) -> MeasuredRoofs:
    fields: dict[str, object] = {
        "device": "cpu",
        "buffer_bytes": 1,
        "read": Reading(5.0, 6.0, 3, "r"),
        "copy": Reading(4.0, 9.0, 3, "c"),
        "triad": Reading(7.0, 8.0, 3, "t"),
        "gemm": {"fp32": Reading(50.0, 60.0, 3, "g")},
        "skinny": (SkinnyPoint(8, 4, 4, "fp32", 1.0, 70.0, 1.0), SkinnyPoint(16, 4, 4, "fp32", None, None, None, "no")),
        "duration_s": 1.0,
    }
    return MeasuredRoofs(**{**fields, **changes})  # type: ignore[arg-type]


def test_limits_are_the_best_ever_seen() -> None:
    roofs = _roofs()
    assert roofs.bandwidth_bytes_per_s == 7.0
    assert roofs.bandwidth_limit_bytes_per_s == 9.0
    assert roofs.flops_limit_per_s("fp32") == 70.0
    assert roofs.flops_limit_per_s("fp16") is None


def test_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MIN_BUFFER_BYTES", MIB)
    monkeypatch.setattr(ceilings, "last_level_cache_bytes", lambda: MIB)
    readings = iter([CpuReading(0.0, 0.0, 0.0, 0.0), CpuReading(2.0, 0.0, 2.0, 1.0)])
    monkeypatch.setattr(ceilings, "LoadMonitor", lambda: LoadMonitor(lambda: next(readings)))
    told: list[str] = []
    roofs = measure_roofs(rows=(1, 4), skinny_shape=(64, 32), budget_s=0.05, progress=told.append)
    as_json = json.loads(json.dumps(roofs.to_dict(), allow_nan=False))
    assert as_json["buffer_bytes"] == 4 * MIB
    assert as_json["read_bytes_per_s"] > 0
    assert as_json["marks"] == ["foreign load 50%"]
    assert set(as_json["gemm_flops_per_s"]) == {"fp32", "bf16"}
    assert [point["m"] for point in as_json["skinny"]] == [1, 4]
    assert any("matmul bf16" in line for line in told)
    assert roofs.gemm["bf16"].median >= roofs.gemm["fp32"].median, "bf16 may be computed in fp32"
