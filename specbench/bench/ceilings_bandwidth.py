"""Bandwidth over working-set sizes, so that each cache level shows as a plateau (as in Berkeley's ERT).

On a CPU each thread walks its own part of the set again and again with a compiled loop, because a call of a library
takes longer than a cache level. On a GPU library kernels are replayed from a graph; sets below a few MiB tell what a
launch costs.
"""

from __future__ import annotations

import functools
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench.bench.clock import Clock, time_call

STREAMS = {"read": 1, "copy": 2, "triad": 3}
"""Bytes a kernel asks for per byte of one array: read a; a -> b; a + 3 b -> c."""
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MIN_SPAN_S = 0.01
"""A timed span of a CPU point is at least this long: waking the threads takes tens of microseconds."""
GPU_CALLS = 20


@dataclass(frozen=True)
class CacheLevel:
    """One level of memory: its name, bytes that all threads together have of it (None: memory itself)."""

    name: str
    capacity_bytes: int | None


@dataclass(frozen=True)
class BandwidthPoint:
    """Rates in byte/s over a working set of `working_set_bytes`: all arrays of a kernel, of all threads."""

    kernel: str
    working_set_bytes: int
    bytes_per_s: float
    repetitions: int


@dataclass(frozen=True)
class LevelBandwidth:
    """Best rate of each kernel among the working sets that live in one level; None where none does."""

    level: str
    capacity_bytes: int | None
    bytes_per_s: Mapping[str, float | None]


def cpu_cache_levels(threads: int, root: Path = CPU_CACHES) -> tuple[CacheLevel, ...]:
    """Data caches of CPU 0 by level, what `threads` threads on cores of their own have of each, then memory.

    A cache that several CPUs share counts once; where the system tells no cache, memory stands alone.
    """
    found: dict[int, int] = {}
    for folder in sorted(root.glob("index*")):
        told = {key: _text(folder / key) for key in ("level", "type", "size", "shared_cpu_list")}
        if told["type"] == "Instruction" or not told["level"] or not (size := _size(told["size"])):
            continue
        sharers = _count_cpus(told["shared_cpu_list"])
        found[int(told["level"])] = size * max(1, -(-threads // sharers))
    levels = [CacheLevel(f"L{level}", found[level]) for level in sorted(found)]
    return (*levels, CacheLevel("memory", None))


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _size(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]] if match else None


def _count_cpus(text: str) -> int:
    """CPUs in a list such as 0-3,8."""
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(count, 1)


def working_sets(levels: Sequence[CacheLevel], largest: int, smallest: int = 1 << 13) -> tuple[int, ...]:
    """Sizes by powers of two with the steps between them, up to `largest` bytes.

    Every known level gets a size at half its capacity, well inside it.
    """
    sizes: set[int] = set()
    size = smallest
    while size <= largest:
        sizes.update((size, size * 3 // 2))
        size *= 2
    sizes.update(level.capacity_bytes // 2 for level in levels if level.capacity_bytes is not None)
    return tuple(sorted(one for one in sizes if smallest <= one <= largest))


def level_of(working_set: int, levels: Sequence[CacheLevel]) -> str | None:
    """The level a set lives in: it fits into 3/4 of it, and is at least twice the level above. None in between."""
    above = 0
    for level in levels:
        fits = level.capacity_bytes is None or working_set <= level.capacity_bytes * 3 // 4
        if fits:
            return level.name if working_set >= 2 * above else None
        above = level.capacity_bytes or 0
    return None


def by_level(points: Sequence[BandwidthPoint], levels: Sequence[CacheLevel]) -> tuple[LevelBandwidth, ...]:
    """The plateau of each level and kernel."""
    found = []
    for level in levels:
        rates: dict[str, float | None] = {}
        for kernel in STREAMS:
            inside = [
                point.bytes_per_s
                for point in points
                if point.kernel == kernel and level_of(point.working_set_bytes, levels) == level.name
            ]
            rates[kernel] = max(inside, default=None)
        found.append(LevelBandwidth(level.name, level.capacity_bytes, rates))
    return tuple(found)


@functools.cache
def _cpu_kernels() -> dict[str, Callable[..., float]]:
    """Compiled loops f(a, b, c, passes); `read` gives back its sum so that no pass can be left out."""
    from numba import njit

    signature = "float32(float32[::1], float32[::1], float32[::1], int64)"
    compiled = functools.partial(njit, signature, nogil=True, fastmath=True, boundscheck=False)

    @compiled()
    def read(a, b, c, passes):  # type: ignore[no-untyped-def]
        total = np.float32(0)
        for index in range(passes):
            part = np.float32(0)
            for i in range(len(a)):
                part += a[i]
            b[index % len(b)] = part
            total += part
        return total

    @compiled()
    def copy(a, b, c, passes):  # type: ignore[no-untyped-def]
        for index in range(passes):
            a[index % len(a)] = index
            for i in range(len(a)):
                b[i] = a[i]
        return b[0]

    @compiled()
    def triad(a, b, c, passes):  # type: ignore[no-untyped-def]
        for index in range(passes):
            a[index % len(a)] = index
            for i in range(len(a)):
                c[i] = a[i] + np.float32(3) * b[i]
        return c[0]

    return {"read": read, "copy": copy, "triad": triad}


class CpuStreams:
    """Runs one kernel on `threads` threads at once, each over arrays of its own."""

    def __init__(self, threads: int, kernels: Mapping[str, Callable[..., float]] | None = None) -> None:
        self.threads = threads
        self._kernels = kernels or _cpu_kernels()
        self._pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        self._pool.shutdown()

    def seconds(self, kernel: str, length: int, passes: int) -> tuple[float, int]:
        """(seconds, repetitions) of `passes` walks over arrays of `length` floats a thread: the median of three."""
        run = self._kernels[kernel]
        used = STREAMS[kernel]
        rng = np.random.default_rng(length)
        sets = []
        for _ in range(self.threads):
            arrays = [rng.random(length, dtype=np.float32) for _ in range(used)]
            sets.append([*arrays, *(np.zeros(16, dtype=np.float32) for _ in range(3 - used))])
        barrier = threading.Barrier(self.threads + 1)

        def work(arrays: Sequence[Any]) -> tuple[float, float]:
            barrier.wait()
            begin = time.perf_counter()
            run(*arrays, passes)
            return begin, time.perf_counter()

        durations = []
        for attempt in range(4):
            waiting = [self._pool.submit(work, arrays) for arrays in sets]
            barrier.wait()
            spans = [one.result() for one in waiting]
            if attempt:
                durations.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        return statistics.median(durations), len(durations)


def measure_cpu_levels(
    sizes: Sequence[int], threads: int, budget_s: float, streams: CpuStreams | None = None
) -> tuple[BandwidthPoint, ...]:
    """Read, copy and triad over each working set, smallest first, until the budget is spent."""
    used = streams or CpuStreams(threads)
    begin = time.perf_counter()
    points = []
    rate = 1e10
    try:
        for size in sizes:
            if time.perf_counter() - begin > budget_s:
                break
            for kernel, arrays in STREAMS.items():
                length = max(16, size // threads // arrays // 4)
                per_pass = 4 * length * arrays * threads
                passes = max(2, int(rate * MIN_SPAN_S / per_pass))
                seconds, repetitions = used.seconds(kernel, length, passes)
                rate = per_pass * passes / seconds
                points.append(BandwidthPoint(kernel, per_pass, rate, repetitions))
    finally:
        used.close()
    return tuple(points)


def gpu_cache_levels(l2_bytes: int | None) -> tuple[CacheLevel, ...]:
    """L2 and memory: a stream of launches can't show what is inside an SM."""
    return (*((CacheLevel("L2", l2_bytes),) if l2_bytes else ()), CacheLevel("memory", None))


def measure_gpu_levels(
    clock: Clock, device: torch.device, sizes: Sequence[int], budget_s: float, replayed: bool = True
) -> tuple[BandwidthPoint, ...]:
    """The same on a GPU with torch's kernels, `GPU_CALLS` of them in a graph (plain calls where `replayed` is off)."""
    begin = time.perf_counter()
    points = []
    for size in sizes:
        if time.perf_counter() - begin > budget_s:
            break
        for kernel, arrays in STREAMS.items():
            length = max(256, size // arrays // 4)
            call = _gpu_call(kernel, length, device)
            run = _replay(call, device) if replayed else functools.partial(_repeat, call)
            run()
            durations = [time_call(clock, run) for _ in range(5)]
            moved = 4 * length * arrays
            points.append(
                BandwidthPoint(kernel, moved, moved * GPU_CALLS / statistics.median(durations), len(durations))
            )
    return tuple(points)


def _gpu_call(kernel: str, length: int, device: torch.device) -> Callable[[], object]:
    a = torch.randn(length, device=device)
    if kernel == "read":
        out = torch.zeros((), device=device)
        return lambda: torch.sum(a, dim=0, out=out)
    b = torch.zeros_like(a)
    if kernel == "copy":
        return lambda: b.copy_(a)
    c = torch.empty_like(a)
    return lambda: torch.add(a, b, alpha=3.0, out=c)


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(GPU_CALLS):
        call()


def _replay(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(call)
    return graph.replay
