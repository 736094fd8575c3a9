"""What else happened while a block ran: the GPU's power, clocks and slowdowns, and other processes on the CPU.

NVML is sampled in a process of its own (`python telemetry.py --uuid GPU-... --interval 0.1`), never in the timed loop,
from the device that torch uses, found by UUID. What a device does not tell is None with a reason. This module imports
neither torch nor the rest of specbench, so that the sampling process starts fast.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

FOREIGN_LOAD_SHARE = 0.10
STEAL_SHARE = 0.05
MAJOR_FAULTS = 16
"""Page faults read from disk that disturb a second, or a shorter block: at 0.1 ms each they are over 0.1 % of it."""
MIN_SPAN_CPU_S = 0.1
SAMPLE_INTERVAL_S = 0.1

EVENT_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clock",
}
INVALID_EVENTS = ("hardware slowdown", "software thermal", "hardware thermal", "power brake")


# ---- NVML: one device, read field by field ----


@dataclass(frozen=True)
class GpuSample:
    """One reading. `time_s` is time.monotonic(); a value is None only with an entry in `reasons`."""

    time_s: float
    values: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)


def _reader(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    """Field -> how to read it. NVML tells milliwatts and millijoules; fields here are in W and J."""
    return {
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "power_limit_default_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3,
        "sm_clock_mhz": lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "temperature_c": lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory_used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "event_reasons": lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "process_ids": lambda: sorted(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }


def read_sample(nvml: Any, handle: Any, time_s: float) -> GpuSample:
    """Every field of one device; a call that fails costs that field only."""
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, read in _reader(nvml, handle).items():
        try:
            values[name] = read()
        except (nvml.NVMLError, AttributeError) as error:
            values[name] = None
            reasons[name] = f"NVML: {error}"
    return GpuSample(time_s, values, reasons)


@dataclass(frozen=True)
class NvmlDevice:
    """An opened device, or the reason why there is none."""

    nvml: Any = None
    handle: Any = None
    reason: str | None = None


def open_device(uuid: str | None, load: Callable[[], Any] | None = None) -> NvmlDevice:
    """The NVML device with this UUID (with or without "GPU-"); never a guess by index."""
    if not uuid:
        return NvmlDevice(reason="the device has no UUID to find it by")
    try:
        nvml = (load or _load_nvml)()
    except ImportError as error:
        return NvmlDevice(reason=f"the NVML module is missing: {error}")
    try:
        nvml.nvmlInit()
        known = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return NvmlDevice(nvml, nvml.nvmlDeviceGetHandleByUUID(known))
    except nvml.NVMLError as error:
        return NvmlDevice(reason=f"NVML: {error}")


def _load_nvml() -> Any:
    import pynvml

    return pynvml


def describe_gpu(uuid: str | None, load: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Driver and power limits of a device for the environment; None values come with `nvml_reason`."""
    device = open_device(uuid, load)
    if device.nvml is None:
        return {"driver": None, "power_limit_w": None, "power_limit_default_w": None, "nvml_reason": device.reason}
    nvml = device.nvml
    sample = read_sample(nvml, device.handle, 0.0)
    reason = "; ".join(f"{key}: {why}" for key, why in sample.reasons.items() if key.startswith("power_limit"))
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        driver, reason = None, f"driver: NVML: {error}; {reason}"
    limits = {key: sample.values[key] for key in ("power_limit_w", "power_limit_default_w")}
    return {"driver": driver, **limits, "nvml_reason": reason or None}


# ---- what the samples of a window say ----


@dataclass(frozen=True)
class Energy:
    """Joules of a window and where they come from ("counter" or "sampled power"), or None with a reason."""

    joules: float | None
    source: str | None = None
    reason: str | None = None


def _at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    """Linear between readings, constant beyond the first and last."""
    if when <= times[0]:
        return values[0]
    for index in range(1, len(times)):
        if when <= times[index]:
            span = times[index] - times[index - 1]
            share = (when - times[index - 1]) / span if span > 0 else 1.0
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def energy(samples: Sequence[GpuSample], start_s: float, end_s: float) -> Energy:
    """Energy used from `start_s` to `end_s`: the counter's difference, or else sampled power over time."""
    if end_s <= start_s:
        return Energy(None, reason="the window is empty")
    counted = [(s.time_s, s.values["energy_j"]) for s in samples if s.values.get("energy_j") is not None]
    if counted and counted[0][0] <= start_s and counted[-1][0] >= end_s:
        times, values = zip(*counted, strict=True)
        return Energy(_at(times, values, end_s) - _at(times, values, start_s), "counter")
    powered = [(s.time_s, s.values["power_w"]) for s in samples if s.values.get("power_w") is not None]
    margin = 2 * SAMPLE_INTERVAL_S
    near = [(when, watts) for when, watts in powered if start_s - margin <= when <= end_s + margin]
    if not near:
        reason = next((s.reasons["power_w"] for s in samples if "power_w" in s.reasons), "no power readings")
        return Energy(None, reason=reason)
    times, watts = zip(*near, strict=True)
    points = sorted({start_s, end_s, *(when for when in times if start_s < when < end_s)})
    power = [_at(times, watts, when) for when in points]
    joules = sum((points[i + 1] - points[i]) * (power[i] + power[i + 1]) / 2 for i in range(len(points) - 1))
    return Energy(joules, "sampled power")


def gpu_marks(samples: Iterable[GpuSample], own_pids: Iterable[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(invalidating marks, notes) of a window. A power cap is normal for large matmuls: noted, not invalid.

    Another process counts as foreign only if NVML lists ours too: in a container it may list ids of the host.
    """
    marks: dict[str, None] = {}
    notes: dict[str, None] = {}
    own = set(own_pids)
    for sample in samples:
        reasons = sample.values.get("event_reasons") or 0
        for bit, name in EVENT_REASONS.items():
            if reasons & bit and name in INVALID_EVENTS:
                marks[name] = None
            elif reasons & bit and name == "power cap":
                notes[name] = None
        pids = set(sample.values.get("process_ids") or ())
        if pids - own:
            (marks if pids & own else notes)["foreign process" if pids & own else "process ids cannot be told"] = None
    return tuple(marks), tuple(notes)


# ---- the sampling process ----


@dataclass(frozen=True)
class GpuTelemetry:
    """All samples of a run, or the reason why there are none."""

    samples: tuple[GpuSample, ...] = ()
    reason: str | None = None

    def window(self, start_s: float, end_s: float) -> tuple[GpuSample, ...]:
        """Samples taken within [start_s, end_s] of time.monotonic()."""
        return tuple(sample for sample in self.samples if start_s <= sample.time_s <= end_s)


class GpuSampler:
    """Samples a device at 10 Hz from another process, between `start` and `stop`. Without NVML `stop` says why."""

    def __init__(self, uuid: str | None, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._uuid = uuid
        self._interval_s = interval_s
        self._process: subprocess.Popen[str] | None = None
        self._out: IO[str] | None = None

    def start(self) -> None:
        if not self._uuid:
            return
        self._out = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in stop()
        command = [sys.executable, "-P", __file__, "--uuid", self._uuid, "--interval", str(self._interval_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._out, text=True)

    def stop(self) -> GpuTelemetry:
        if self._process is None or self._out is None:
            return GpuTelemetry(reason="telemetry was not started, or the device has no UUID")
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        with self._out as out:
            out.seek(0)
            lines = out.read().splitlines()
        self._process = self._out = None
        return parse_samples(lines)


def parse_samples(lines: Iterable[str]) -> GpuTelemetry:
    """What the sampling process printed: one JSON object a line; a torn last line is left out."""
    samples: list[GpuSample] = []
    reason: str | None = None
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        reason = record.get("reason", reason)
        if "values" in record:
            samples.append(GpuSample(record["time_s"], record["values"], record["reasons"]))
    if not samples and reason is None:
        reason = "the sampling process told nothing"
    return GpuTelemetry(tuple(samples), reason)


def _sample_until_closed(uuid: str, interval_s: float, stdin: IO[str], out: IO[str]) -> None:
    """Print samples until the parent closes our stdin, or dies."""
    device = open_device(uuid)
    if device.nvml is None:
        print(json.dumps({"reason": device.reason}), file=out, flush=True)
        return
    closed = False
    while not closed:
        sample = read_sample(device.nvml, device.handle, time.monotonic())
        record = {"time_s": sample.time_s, "values": sample.values, "reasons": sample.reasons}
        print(json.dumps(record), file=out, flush=True)
        ready, _, _ = select.select([stdin], [], [], interval_s)
        closed = bool(ready) and stdin.read(1) == ""


# ---- the CPU: time that other processes took during a block ----


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds since boot: of all usable CPUs (`busy`, `steal`, `total`) and of our own processes (`own`)."""

    busy: float
    steal: float
    total: float
    own: float
    major_faults: int = 0


@dataclass(frozen=True)
class BlockConditions:
    """Conditions of one timed block. Shares are of the usable CPUs' time; None where the block was too short to tell.

    `marks` say why the block must be repeated; an empty tuple means it is valid.
    """

    foreign_cpu_share: float | None
    steal_share: float | None
    major_faults: int
    marks: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def valid(self) -> bool:
        return not self.marks


def block_conditions(
    before: CpuReading,
    after: CpuReading,
    *,
    foreign_limit: float = FOREIGN_LOAD_SHARE,
    steal_limit: float = STEAL_SHARE,
) -> BlockConditions:
    """What happened between two readings. CPU time is counted in ticks of 10 ms, so a short block tells nothing."""
    faults = after.major_faults - before.major_faults
    total = after.total - before.total
    seconds = total / (os.cpu_count() or 1)
    marks = [f"page faults {faults}"] if faults >= MAJOR_FAULTS * max(1.0, seconds) else []
    if total < MIN_SPAN_CPU_S:
        return BlockConditions(None, None, faults, tuple(marks), "the block is too short to count CPU time")
    own = after.own - before.own
    foreign = max(0.0, after.busy - before.busy - own) / total
    steal = max(0.0, after.steal - before.steal) / total
    if foreign > foreign_limit:
        marks.append(f"foreign load {foreign:.0%}")
    if steal > steal_limit:
        marks.append(f"stolen time {steal:.0%}")
    return BlockConditions(foreign, steal, faults, tuple(marks))


def read_cpu() -> CpuReading:
    """The system's CPU times over the CPUs we may use, and those of this process and its children."""
    import resource

    import psutil

    per_cpu = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(per_cpu))
    busy = steal = total = 0.0
    for index in usable:
        fields: Mapping[str, float] = per_cpu[index]._asdict() if index < len(per_cpu) else {}
        working = sum(fields.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        stolen = fields.get("steal", 0.0)
        busy += working
        steal += stolen
        total += working + stolen + fields.get("idle", 0.0) + fields.get("iowait", 0.0)
    own_times = os.times()
    own = own_times.user + own_times.system + own_times.children_user + own_times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system
    return CpuReading(busy, steal, total, own, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


class LoadMonitor:
    """Brackets a block: `start()` before it, `stop()` after it, both outside the timed span."""

    def __init__(
        self,
        read: Callable[[], CpuReading] = read_cpu,
        *,
        foreign_limit: float = FOREIGN_LOAD_SHARE,
        steal_limit: float = STEAL_SHARE,
    ) -> None:
        self._read = read
        self._limits = {"foreign_limit": foreign_limit, "steal_limit": steal_limit}
        self._before: CpuReading | None = None

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> BlockConditions:
        assert self._before is not None, "stop() without start()"
        return block_conditions(self._before, self._read(), **self._limits)


def foreign_load(span_s: float = 0.5) -> float | None:
    """Share of the usable CPUs' time that other processes take right now, watched for `span_s` seconds."""
    monitor = LoadMonitor()
    monitor.start()
    time.sleep(span_s)
    return monitor.stop().foreign_cpu_share


def main() -> None:
    parser = argparse.ArgumentParser(description="Print NVML samples as JSON lines until stdin is closed.")
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--interval", type=float, default=SAMPLE_INTERVAL_S)
    options = parser.parse_args()
    _sample_until_closed(options.uuid, options.interval, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
