"""The clock that a device really runs at under load: a datasheet's peak assumes one, and parts differ from it."""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from specbench.bench.telemetry import GpuSampler, open_device

CYCLES_A_LINK = 4
"""A 64-bit multiplication (3 cycles) and the addition behind it (1), on Intel since Nehalem and AMD since Zen."""
LIMITS_HZ = (5e8, 8e9)
LINKS, REPETITIONS = 1_000_000, 24


@functools.cache
def _chain() -> Callable[[int, int, int, int], int]:
    from numba import njit

    @njit("int64(int64, int64, int64, int64)", nogil=True)
    def chain(x, factor, addend, links):  # type: ignore[no-untyped-def]
        for _ in range(links):
            x = x * factor + addend
        return x

    return chain  # type: ignore[no-any-return]


def cpu_clock_hz(threads: int, machine: str | None = None) -> tuple[float | None, str]:
    """(clock of `threads` busy cores in Hz, how it was found), from a chain of dependent instructions of known latency.

    Wide vector code may run below it. None with the reason where the latency isn't known, or the reading is absurd.
    """
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return None, f"the latency of a multiplication on {machine} isn't known"
    chain = _chain()

    def run(seed: int) -> float:
        """The shortest of many runs of a millisecond: a longer one would count other processes' turns."""
        times = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            chain(seed, 6364136223846793005, 1442695040888963407, LINKS)
            times.append(time.perf_counter() - begin)
        return min(times)

    with ThreadPoolExecutor(threads) as pool:
        shortest = statistics.median(pool.map(run, range(1, threads + 1)))
    return judged(CYCLES_A_LINK * LINKS / shortest, "a chain of dependent multiplications")


def gpu_clock_hz(device: torch.device, uuid: str | None, span_s: float = 1.2) -> tuple[float | None, str]:
    """(median SM clock in Hz under a large bf16 matmul, how it was found); None with NVML's reason."""
    a = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
    sampler = GpuSampler(uuid)
    sampler.start()
    begin = time.monotonic()
    while time.monotonic() - begin < span_s + 1.0:  # the sampling process takes up to a second to start
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)
    telemetry = sampler.stop()
    return gpu_clock_of([sample.values for sample in telemetry.window(begin, time.monotonic())], telemetry.reason)


def clock_settings(uuid: str | None, load: Callable[[], Any] | None = None) -> dict[str, Any]:
    """The SM clock a device is set to and the highest it may take, in MHz; None where NVML does not tell."""
    device = open_device(uuid, load)
    found: dict[str, Any] = {}
    for name, call in (
        ("application_clock_mhz", "nvmlDeviceGetApplicationsClock"),
        ("max_clock_mhz", "nvmlDeviceGetMaxClockInfo"),
    ):
        found[name] = None
        if device.nvml is not None:
            with contextlib.suppress(device.nvml.NVMLError, AttributeError):
                found[name] = int(getattr(device.nvml, call)(device.handle, device.nvml.NVML_CLOCK_SM))
    return found


def clock_policy(environment: Mapping[str, Any], root: Path = Path("/sys/devices/system/cpu")) -> dict[str, Any]:
    """Settings that hold the clocks: power limit and application clock of a GPU; governor, ceiling, boost of a CPU.

    A value that the system doesn't tell is None.
    """
    gpu = environment.get("gpu")
    if isinstance(gpu, Mapping):
        return {"power_limit_w": gpu.get("power_limit_w"), **clock_settings(gpu.get("uuid"))}
    files = {
        "governor": root / "cpu0/cpufreq/scaling_governor",
        "max_khz": root / "cpu0/cpufreq/scaling_max_freq",
        "boost": root / "cpufreq/boost",
    }
    return {name: file.read_text().strip() if file.exists() else None for name, file in files.items()}


def gpu_clock_of(samples: list[dict[str, Any]], reason: str | None) -> tuple[float | None, str]:
    """The median of the busy samples' SM clocks."""
    clocks = [
        float(values["sm_clock_mhz"]) * 1e6
        for values in samples
        if values.get("sm_clock_mhz") and (values.get("utilization") is None or values["utilization"] > 0.5)
    ]
    if not clocks:
        return None, reason or "NVML told no clock while the device was busy"
    return judged(statistics.median(clocks), f"NVML, {len(clocks)} samples under a bf16 matmul")


def judged(clock_hz: float, how: str) -> tuple[float | None, str]:
    """The reading, unless it is absurd."""
    if not LIMITS_HZ[0] <= clock_hz <= LIMITS_HZ[1]:
        return None, f"{how} gave {clock_hz / 1e9:.3g} GHz"
    return clock_hz, how
