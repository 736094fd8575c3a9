"""NVML fails field by field and never the run; energy from milliwatts; foreign load marks a block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from specbench.bench import telemetry
from specbench.bench.telemetry import (
    BlockConditions,
    CpuReading,
    Energy,
    GpuSample,
    GpuSampler,
    LoadMonitor,
    block_conditions,
    describe_gpu,
    energy,
    gpu_marks,
    open_device,
    parse_samples,
    read_cpu,
    read_sample,
)


class NVMLError(Exception):
    pass


class FakeNvml:
    """A device at 200 W; the calls named in `broken` raise Not Supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    ANSWERS: dict[str, Any] = {  # noqa: RUF012
        "nvmlInit": None,
        "nvmlSystemGetDriverVersion": "570.1",
        "nvmlDeviceGetPowerUsage": 200_000,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
        "nvmlDeviceGetEnforcedPowerLimit": 230_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 370_000,
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1 << 30),
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7)],
    }

    def __init__(self, *broken: str, uuids: tuple[str, ...] = ("GPU-abc",)) -> None:
        self.broken = broken
        self.uuids = uuids

    def __getattr__(self, name: str) -> Any:
        if name not in self.ANSWERS:
            raise AttributeError(name)

        def call(*_: object) -> Any:
            if name in self.broken:
                raise NVMLError("Not Supported")
            return self.ANSWERS[name]

        return call

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return uuid


FIELDS = {
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetPowerManagementDefaultLimit": {"power_limit_default_w"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetUtilizationRates": {"utilization"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"event_reasons"},
    "nvmlDeviceGetComputeRunningProcesses": {"process_ids"},
}


def test_all_fields_with_their_units() -> None:
    sample = read_sample(FakeNvml(), "GPU-abc", 1.5)
    assert sample.reasons == {}
    assert sample.values == {
        "power_w": 200.0,
        "energy_j": 5000.0,
        "power_limit_w": 230.0,
        "power_limit_default_w": 370.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 1980,
        "temperature_c": 61,
        "utilization": 0.87,
        "memory_used_bytes": 1 << 30,
        "event_reasons": 4,
        "process_ids": [7],
    }


@pytest.mark.parametrize("call", FIELDS)
def test_fault_75_one_call_fails_alone(call: str) -> None:
    sample = read_sample(FakeNvml(call), "GPU-abc", 0.0)
    assert {name for name, value in sample.values.items() if value is None} == FIELDS[call]
    assert set(sample.reasons) == FIELDS[call]
    assert all("Not Supported" in reason for reason in sample.reasons.values())


def test_fault_75_all_calls_fail() -> None:
    sample = read_sample(FakeNvml(*FIELDS), "GPU-abc", 0.0)
    assert set(sample.values.values()) == {None}
    assert set(sample.reasons) == set(sample.values) == set().union(*FIELDS.values())
    assert gpu_marks([sample], [1]) == ((), ())


def test_an_old_module_without_a_call_costs_that_field() -> None:
    nvml = FakeNvml()
    nvml.ANSWERS = {k: v for k, v in nvml.ANSWERS.items() if k != "nvmlDeviceGetCurrentClocksEventReasons"}
    sample = read_sample(nvml, "GPU-abc", 0.0)
    assert set(sample.reasons) == {"event_reasons"}


def test_fault_76_module_or_driver_missing() -> None:
    def missing() -> Any:
        raise ImportError("No module named 'pynvml'")

    assert "module is missing" in (open_device("abc", missing).reason or "")
    assert "Not Supported" in (open_device("abc", lambda: FakeNvml("nvmlInit")).reason or "")
    assert "no UUID" in (open_device(None).reason or "")
    assert describe_gpu("abc", missing)["driver"] is None


def test_device_is_found_by_uuid_only() -> None:
    assert open_device("abc", FakeNvml).handle == "GPU-abc"
    assert open_device("GPU-abc", FakeNvml).handle == "GPU-abc"
    other = open_device("xyz", FakeNvml)
    assert other.nvml is None
    assert "Not Found" in (other.reason or "")


def test_describe_gpu() -> None:
    told = describe_gpu("abc", FakeNvml)
    assert told == {"driver": "570.1", "power_limit_w": 230.0, "power_limit_default_w": 370.0, "nvml_reason": None}
    partly = describe_gpu("abc", lambda: FakeNvml("nvmlDeviceGetEnforcedPowerLimit", "nvmlSystemGetDriverVersion"))
    assert (partly["driver"], partly["power_limit_w"], partly["power_limit_default_w"]) == (None, None, 370.0)
    assert "driver" in partly["nvml_reason"]
    assert "power_limit_w" in partly["nvml_reason"]


def _sample(when: float, **values: Any) -> GpuSample:
    return GpuSample(when, values)


def test_fault_77_energy() -> None:
    milliwatts = 200_000
    samples = [_sample(when / 10, power_w=milliwatts / 1e3, energy_j=None) for when in range(11)]
    assert energy(samples, 0.0, 1.0) == Energy(pytest.approx(200.0), "sampled power")
    assert energy(samples[:1], 0.0, 1.0).joules == pytest.approx(200.0)
    none = GpuSample(0.5, {"power_w": None, "energy_j": None}, {"power_w": "NVML: Not Supported"})
    assert energy([none], 0.0, 1.0) == Energy(None, reason="NVML: Not Supported")
    assert energy([], 0.0, 1.0) == Energy(None, reason="no power readings")
    assert energy(samples, 1.0, 1.0).joules is None
    assert energy(samples, 50.0, 51.0).joules is None, "readings far from the window say nothing about it"


def test_energy_follows_the_power_and_prefers_the_counter() -> None:
    ramp = [_sample(when / 10, power_w=100.0 + 10 * when, energy_j=None) for when in range(11)]
    assert energy(ramp, 0.0, 1.0).joules == pytest.approx(150.0)
    assert energy(ramp, 0.25, 0.75).joules == pytest.approx(75.0)
    counted = [_sample(float(when), power_w=1.0, energy_j=300.0 * when) for when in range(4)]
    assert energy(counted, 0.5, 2.5) == Energy(pytest.approx(600.0), "counter")
    assert energy(counted, 0.5, 3.5).source == "sampled power", "the counter does not reach the end of the window"


def test_marks() -> None:
    slow = _sample(0.0, event_reasons=0x40 | 0x4, process_ids=[1, 9])
    assert gpu_marks([slow], [1]) == (("hardware thermal", "foreign process"), ("power cap",))
    assert gpu_marks([_sample(0.0, event_reasons=0x1, process_ids=[1])], [1]) == ((), ())
    hidden = _sample(0.0, event_reasons=0, process_ids=[4242])
    assert gpu_marks([hidden], [1]) == ((), ("process ids cannot be told",))
    for bit in (0x8, 0x20, 0x80):
        assert len(gpu_marks([_sample(0.0, event_reasons=bit)], [1])[0]) == 1


def test_samples_from_the_other_process() -> None:
    record = {"time_s": 1.0, "values": {"power_w": 5.0}, "reasons": {}}
    told = parse_samples([json.dumps(record), json.dumps({**record, "time_s": 2.0}), '{"time_s": 3'])
    assert [sample.time_s for sample in told.samples] == [1.0, 2.0]
    assert [sample.time_s for sample in told.window(1.5, 9.0)] == [2.0]
    assert parse_samples([]).reason == "the sampling process told nothing"
    assert parse_samples(['{"reason": "NVML: no"}']).reason == "NVML: no"


def test_sampler_without_the_device_says_why() -> None:
    sampler = GpuSampler("GPU-00000000-0000-0000-0000-000000000000")
    sampler.start()
    told = sampler.stop()
    assert told.samples == ()
    assert told.reason
    assert "NVML" in told.reason
    nothing = GpuSampler(None)
    nothing.start()
    assert "UUID" in (nothing.stop().reason or "")


def test_sampling_loop_ends_when_its_input_closes() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_telemetry as t\nfrom specbench.bench import telemetry as m\n"
        "m._load_nvml = t.FakeNvml; m._sample_until_closed('abc', 0.01, sys.stdin, sys.stdout)"
    )
    folders = [str(folder) for folder in (__file__.rpartition("/")[0], __file__.rpartition("/tests/")[0])]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *folders], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 0
    assert parse_samples([first, *out.splitlines()]).samples[0].values["power_w"] == 200.0


IDLE = CpuReading(busy=100.0, steal=5.0, total=1000.0, own=10.0)


def _after(busy: float, own: float, steal: float = 0.0, total: float = 2.0, faults: int = 0) -> CpuReading:
    return CpuReading(100.0 + busy, 5.0 + steal, 1000.0 + total, 10.0 + own, faults)


def test_block_beside_another_busy_process_is_marked() -> None:
    """One second on two CPUs: one is ours, the other is busy for somebody else."""
    conditions = block_conditions(IDLE, _after(busy=2.0, own=1.0))
    assert conditions.foreign_cpu_share == pytest.approx(0.5)
    assert conditions.marks == ("foreign load 50%",)
    assert not conditions.valid


def test_own_work_on_all_cpus_is_not_foreign() -> None:
    conditions = block_conditions(IDLE, _after(busy=2.0, own=2.0))
    assert conditions == BlockConditions(0.0, 0.0, 0, ())
    assert conditions.valid
    assert block_conditions(IDLE, _after(busy=1.9, own=2.0)).foreign_cpu_share == 0.0


def test_stolen_time_faults_and_limits() -> None:
    assert block_conditions(IDLE, _after(busy=1.0, own=1.0, steal=0.2)).marks == ("stolen time 10%",)
    assert block_conditions(IDLE, _after(busy=1.0, own=1.0, faults=40)).marks == ("page faults 40",)
    assert block_conditions(IDLE, _after(busy=1.5, own=1.0), foreign_limit=0.3).valid


def test_faults_are_counted_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """First touches of a library's pages do not disturb half a minute; the same number in a second does."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    own = {"busy": 40.0, "own": 40.0, "total": 60.0}
    assert block_conditions(IDLE, _after(**own, faults=69)).marks == ()
    assert block_conditions(IDLE, _after(**own, faults=480)).marks == ("page faults 480",)
    assert block_conditions(IDLE, _after(busy=0.5, own=0.5, total=1.0, faults=15)).marks == ()
    assert block_conditions(IDLE, _after(busy=0.5, own=0.5, total=1.0, faults=16)).marks == ("page faults 16",)


def test_short_block_tells_nothing() -> None:
    conditions = block_conditions(IDLE, _after(busy=0.04, own=0.02, total=0.04))
    assert (conditions.foreign_cpu_share, conditions.steal_share) == (None, None)
    assert "too short" in (conditions.reason or "")


def test_monitor_brackets_a_block() -> None:
    readings = iter([IDLE, _after(busy=2.0, own=1.0), IDLE, _after(busy=1.0, own=1.0)])
    monitor = LoadMonitor(lambda: next(readings))
    monitor.start()
    assert not monitor.stop().valid
    monitor.start()
    assert monitor.stop().valid


def test_own_cpu_time_of_a_child_is_not_foreign() -> None:
    before = read_cpu()
    child = subprocess.Popen([sys.executable, "-c", "import time; e = time.time() + .4\nwhile time.time() < e: pass"])
    time.sleep(0.3)
    during = read_cpu()
    child.wait()
    after = read_cpu()
    assert during.own - before.own > 0.02
    assert after.own >= during.own
    assert after.busy >= before.busy
    assert after.total - before.total > 0.2


def test_module_stands_alone() -> None:
    program = f"import runpy, sys; runpy.run_path({telemetry.__file__!r})\n"
    program += "print('torch' in sys.modules, 'specbench' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
