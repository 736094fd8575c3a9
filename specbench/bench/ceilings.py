"""Measured roofs of this device: read, copy and triad bandwidth, matmul rates by dtype, the skinny-matmul staircase.

    python -m specbench.bench.ceilings

Buffers are at least four times the last-level cache and 256 MB (unless memory is short, which is noted). Every figure
is a median of repetitions with the best beside it. Operands are random normals: constant ones can run faster.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import psutil
import torch

from specbench.bench.ceilings_bandwidth import BandwidthPoint, LevelBandwidth
from specbench.bench.ceilings_skinny import SKINNY_M, TOO_LONG, TORCH_DTYPES, Linear, SkinnyPoint, make_point
from specbench.bench.ceilings_skinny import random_tensor as _random
from specbench.bench.clock import Clock, clock_for, time_call
from specbench.bench.environment import last_level_cache_bytes
from specbench.bench.telemetry import LoadMonitor

MIN_BUFFER_BYTES = 256 << 20
GPU_BUFFER_BYTES = 1 << 30
Progress = Callable[[str], None]
MakeLinear = Callable[[torch.Tensor], Linear]


def torch_linear(weight: torch.Tensor) -> Linear:
    """torch's own linear layer over `weight` [n, k]."""
    return lambda x: torch.nn.functional.linear(x, weight)


@dataclass(frozen=True)
class Reading:
    """A rate per second: the median over `repetitions`, the best of them, and which kernel made it."""

    median: float
    best: float
    repetitions: int
    how: str


@dataclass(frozen=True)
class MeasuredRoofs:
    """What this device reached. Bandwidths count the bytes a program asks for: 1 x (read), 2 x (copy), 3 x (triad).

    `skinny` are matmuls by the kernels that verify runs on, at the shapes of `model`; `skinny_torch` is torch beside
    them. `bandwidth` is over working-set sizes, `levels` its plateaus. `marks` (foreign load, stolen time) say that the
    roofs were taken on a busy machine and are too low.
    """

    device: str
    buffer_bytes: int
    read: Reading
    copy: Reading
    triad: Reading
    gemm: dict[str, Reading]
    skinny: tuple[SkinnyPoint, ...]
    duration_s: float
    notes: tuple[str, ...] = field(default=())
    marks: tuple[str, ...] = field(default=())
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    model: str | None = None
    skinny_torch: tuple[SkinnyPoint, ...] = ()
    bandwidth: tuple[BandwidthPoint, ...] = ()
    levels: tuple[LevelBandwidth, ...] = ()
    clock_hz: float | None = None
    clock_how: str | None = None

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The memory roof: the best median of the three, since which one is fastest differs from device to device."""
        return max(self.read.median, self.copy.median, self.triad.median)

    @property
    def bandwidth_limit_bytes_per_s(self) -> float:
        """The most that any repetition reached; a claim far above it can't be true."""
        return max(self.read.best, self.copy.best, self.triad.best)

    def flops_limit_per_s(self, dtype: str) -> float | None:
        """The most that any matmul of `dtype` reached, skinny ones included."""
        rates = [point.flops_per_s for point in self.skinny if point.dtype == dtype and point.flops_per_s]
        return max([*rates, *([self.gemm[dtype].best] if dtype in self.gemm else [])], default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; flat medians first, then the full readings."""
        return {
            "device": self.device,
            "read_bytes_per_s": self.read.median,
            "copy_bytes_per_s": self.copy.median,
            "triad_bytes_per_s": self.triad.median,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "bandwidth_limit_bytes_per_s": self.bandwidth_limit_bytes_per_s,
            "gemm_flops_per_s": {dtype: reading.median for dtype, reading in self.gemm.items()},
            "flops_limit_per_s": {dtype: self.flops_limit_per_s(dtype) for dtype in self.gemm},
            "skinny": [asdict(point) for point in self.skinny],
            "skinny_torch": [asdict(point) for point in self.skinny_torch],
            "bandwidth": [asdict(point) for point in self.bandwidth],
            "levels": [asdict(level) for level in self.levels],
            "clock_hz": self.clock_hz,
            "clock_how": self.clock_how,
            "measured_at": self.measured_at,
            "model": self.model,
            "readings": {
                **{name: asdict(getattr(self, name)) for name in ("read", "copy", "triad")},
                "gemm": {dtype: asdict(reading) for dtype, reading in self.gemm.items()},
            },
            "buffer_bytes": self.buffer_bytes,
            "duration_s": self.duration_s,
            "notes": list(self.notes),
            "marks": list(self.marks),
        }


def buffer_bytes(llc_bytes: int | None, free_bytes: int, least: int = MIN_BUFFER_BYTES) -> tuple[int, str | None]:
    """Size of one of the three streaming buffers and a note if memory was too short for it."""
    wanted = max(4 * (llc_bytes or 0), least)
    allowed = free_bytes // 8
    if wanted <= allowed:
        return wanted, None
    size = max(allowed // 4096 * 4096, 4096)
    return size, f"memory is short: buffers of {size >> 20} MiB instead of {wanted >> 20} MiB may partly stay in cache"


def repeat(clock: Clock, call: Callable[[], object], budget_s: float, least: int = 3, most: int = 50) -> list[float]:
    """Durations in seconds after one warm-up call; at least `least` of them, then until the budget is spent."""
    time_call(clock, call)
    durations: list[float] = []
    while len(durations) < least or (len(durations) < most and sum(durations) < budget_s):
        durations.append(time_call(clock, call))
    return durations


def rate(durations: Sequence[float], work: float, how: str) -> Reading:
    """Work per second from repeated durations of the same work."""
    return Reading(work / statistics.median(durations), work / min(durations), len(durations), how)


def measure_bandwidth(
    clock: Clock, device: torch.device, size: int, budget_s: float
) -> tuple[Reading, Reading, Reading]:
    """(read, copy, triad) over fp32 buffers of `size` bytes with all of torch's threads."""
    width = 1024
    a = _random((size // (4 * width), width), torch.float32, device)
    b, c = torch.empty_like(a), torch.empty_like(a)
    ones = torch.ones(width, device=device)
    num_bytes = a.numel() * 4
    share = budget_s / 4
    reads = [
        rate(repeat(clock, lambda: torch.sum(a), share), num_bytes, "torch.sum"),
        rate(repeat(clock, lambda: torch.mv(a, ones), share), num_bytes, "torch.mv"),
    ]
    copy = rate(repeat(clock, lambda: b.copy_(a), share), 2 * num_bytes, "Tensor.copy_")
    triad = rate(repeat(clock, lambda: torch.add(a, b, alpha=3.0, out=c), share), 3 * num_bytes, "torch.add(alpha)")
    return max(reads, key=lambda reading: reading.median), copy, triad


def measure_gemm(clock: Clock, device: torch.device, dtype: str, size: int, budget_s: float) -> Reading:
    """Square matmul of `size`; a small one goes first, and the size shrinks until one call fits the budget."""
    torch_dtype = TORCH_DTYPES[dtype]
    probe = min(256, size)
    x = torch.randn(probe, probe, device=device).to(torch_dtype)
    cost_s = min(repeat(clock, lambda: x @ x, 0.0, least=2))
    while size > probe and cost_s * (size / probe) ** 3 * 4 > budget_s:
        size //= 2
    size = max(size, probe)
    a = torch.randn(size, size, device=device).to(torch_dtype)
    b = torch.randn(size, size, device=device).to(torch_dtype)
    return rate(repeat(clock, lambda: a @ b, budget_s), 2.0 * size**3, f"torch.matmul {size}x{size}x{size}")


def measure_skinny(
    clock: Clock,
    device: torch.device,
    dtype: str,
    shape: tuple[int, int],
    rows: Sequence[int],
    budget_s: float,
    make_linear: MakeLinear = torch_linear,
) -> tuple[SkinnyPoint, ...]:
    """Time of x[m, k] · w[n, k]^T over `rows`, `shape` = (n, k); `make_linear` may be the engine's own op.

    The weight is another copy each time, more than the last-level cache holds, so that it streams from memory as a
    model's weights do; on a GPU ten calls share a timing, which hides their launch. An m whose time, judged from the
    one before, would not fit its share of the budget is left out with a reason.
    """
    n, k = shape
    kernel = "torch" if make_linear is torch_linear else "cpu"
    torch_dtype = TORCH_DTYPES[dtype]
    element = torch_dtype.itemsize
    copies = 2 * (cache_bytes(device) or 0) // (n * k * element) + 2
    weights = _random((copies * n, k), torch_dtype, device).view(copies, n, k)
    calls = 10 if device.type == "cuda" else 1
    turn = itertools.cycle([make_linear(weight) for weight in weights])

    def run(x: torch.Tensor) -> None:
        for _ in range(calls):
            next(turn)(x)

    share = budget_s / len(rows)
    points: list[SkinnyPoint] = []
    last: tuple[int, float] | None = None
    for m in rows:
        if last is not None and last[1] * m / last[0] > 4 * share:
            points.append(SkinnyPoint(m, n, k, dtype, None, None, None, TOO_LONG, kernel))
            continue
        call = functools.partial(run, _random((m, k), torch_dtype, device))
        median = statistics.median(repeat(clock, call, share)) / calls
        last = (m, median)
        points.append(make_point(m, n, k, dtype, median, kernel))
    return tuple(points)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def cache_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return last_level_cache_bytes()
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or None


def _with_skinny(
    read: Reading, gemm: dict[str, Reading], skinny: Sequence[SkinnyPoint]
) -> tuple[Reading, dict[str, Reading]]:
    """The roofs, raised where a skinny matmul (which may be the engine's own) went above them: a roof is a maximum."""
    gemm = dict(gemm)
    for point in skinny:
        how = f"linear layer {point.m}x{point.k}x{point.n} {point.dtype}"
        if point.bytes_per_s is not None and point.bytes_per_s > read.median:
            read = Reading(point.bytes_per_s, max(read.best, point.bytes_per_s), 1, how)
        if point.flops_per_s is not None and point.dtype in gemm and point.flops_per_s > gemm[point.dtype].median:
            best = max(gemm[point.dtype].best, point.flops_per_s)
            gemm[point.dtype] = Reading(point.flops_per_s, best, 1, how)
    return read, gemm


def measure_roofs(
    device: torch.device | str = "cpu",
    *,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    skinny_shape: tuple[int, int] = (1536, 576),
    skinny_dtype: str | None = None,
    rows: Sequence[int] = SKINNY_M,
    make_linear: MakeLinear = torch_linear,
    budget_s: float = 6.0,
    clock: Clock | None = None,
    progress: Progress | None = None,
    skinny: Callable[[Clock], Sequence[SkinnyPoint]] | None = None,
) -> MeasuredRoofs:
    """Measure all roofs of `device` in about `budget_s` seconds.

    `skinny_shape` is (n, k) of the target's own linear layers; `skinny`, where given, measures skinny matmuls in its
    place, on top of the budget. On a CPU whose bf16 (fp16) matmul is slower than fp32,
    that dtype's roof is the fp32 one, because an engine may load 16-bit weights and compute in fp32; it says so.
    """
    began = time.perf_counter()
    device = torch.device(device)
    clock = clock or clock_for(device)
    monitor = LoadMonitor()
    monitor.start()
    tell = progress or (lambda _: None)
    notes: list[str] = []
    least = GPU_BUFFER_BYTES if device.type == "cuda" else MIN_BUFFER_BYTES
    llc = cache_bytes(device)
    if llc is None:
        notes.append("the last-level cache's size is not known")
    size, note = buffer_bytes(llc, free_bytes(device), least)
    notes += [note] if note else []
    tell(f"bandwidth over {size >> 20} MiB")
    read, copy, triad = measure_bandwidth(clock, device, size, budget_s * 0.35)
    gemm: dict[str, Reading] = {}
    for dtype in dtypes:
        tell(f"matmul {dtype}")
        largest = 8192 if device.type == "cuda" else 1024
        gemm[dtype] = measure_gemm(clock, device, dtype, largest, budget_s * 0.35 / len(dtypes))
    if device.type == "cpu" and "fp32" in gemm:
        for dtype, reading in list(gemm.items()):
            if reading.median < gemm["fp32"].median and dtype != "fp32":
                notes.append(f"{dtype} matmul reaches {reading.median / 1e9:.2f} GFLOP/s; its roof is fp32 arithmetic")
                base = gemm["fp32"]
                gemm[dtype] = Reading(base.median, base.best, base.repetitions, f"fp32 arithmetic ({base.how})")
    chosen = skinny_dtype or dtypes[-1]
    tell(f"skinny matmul {chosen}")
    if skinny is not None:
        points = tuple(skinny(clock))
    else:
        points = measure_skinny(clock, device, chosen, skinny_shape, rows, budget_s * 0.3, make_linear)
    read, gemm = _with_skinny(read, gemm, points)
    marks = monitor.stop().marks
    return MeasuredRoofs(
        *(str(device), size, read, copy, triad, gemm, points, time.perf_counter() - began, tuple(notes), marks)
    )


if __name__ == "__main__":
    print(json.dumps(measure_roofs("cuda" if torch.cuda.is_available() else "cpu", progress=print).to_dict(), indent=2))
