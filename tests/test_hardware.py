"""The hardware table is dense, consistent and sourced; the matcher refuses to guess."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from specbench.errors import InputError
from specbench.roofline.hardware import Hardware, catalogue, hardware, identify, identify_environment, match_device
from specbench.roofline.hardware_rules import rated_dtype, table_faults

ALL = list(catalogue().values())
IDS = [device.name for device in ALL]


GPUS = [device for device in ALL if device.kind == "gpu"]
CPUS = [device for device in ALL if device.kind == "cpu"]
TENSOR_DTYPES = ("fp4", "fp8", "bf16", "fp16", "int8", "tf32")


def _rated(device: Hardware) -> float:
    return device.peaks_flops_per_s[rated_dtype(device)]


@pytest.mark.parametrize("device", ALL, ids=IDS)
def test_every_cell_has_a_source(device: Hardware) -> None:
    assert {cell.tag for cell in device.sources.values()} <= {"V", "D", "S", "M"}
    assert all(cell.source for cell in device.sources.values())
    assert set(device.sources) >= {f"peak_{dtype}" for dtype in device.peaks_flops_per_s}
    assert set(device.sources) >= {"bandwidth_gb_per_s", "memory_gb", "l2_mib", "tdp_w"}
    assert (device.clock_hz is None) == ("clock_mhz" not in device.sources)
    assert device.device_names or device.shared_names
    assert device.to_dict()["name"] == device.name


@pytest.mark.parametrize("device", [d for d in ALL if d.clock_hz], ids=lambda d: d.name)
def test_peak_is_units_times_clock(device: Hardware) -> None:
    """Worked out here again, so that a wrong rule does not hide a wrong cell."""
    assert device.sm_count is not None
    assert device.clock_hz is not None
    assert device.flops_per_clock_per_sm is not None
    identity = device.sm_count * device.flops_per_clock_per_sm * device.clock_hz
    assert _rated(device) == pytest.approx(identity, rel=0.03)
    assert not 0.97 < _rated(device) / (2 * identity) < 1.03


def test_only_devices_with_a_disputed_or_capped_peak_lack_the_identity() -> None:
    assert {d.name for d in ALL if d.clock_hz is None} == {"h20-96gb", "h20-141gb", "b300", "gb300"}


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("v100-sxm2-16gb", 1024), ("t4", 1024), ("a100-sxm4-80gb", 2048), ("a10", 1024), ("l4", 1024)),
        *(("rtx-3090", 512), ("rtx-4090", 512), ("rtx-5090", 512), ("h100-sxm", 4096), ("b200", 8192)),
        *(("mi300x", 2048), ("mi355x", 4096), ("epyc-7763", 32), ("xeon-8480plus", 64)),
    ],
)
def test_rate_of_each_generation(name: str, rate: int) -> None:
    assert hardware(name).flops_per_clock_per_sm == rate


def _with_peak(device: Hardware, dtype: str, factor: float) -> Hardware:
    peaks = device.peaks_flops_per_s | {dtype: device.peaks_flops_per_s[dtype] * factor}
    return dataclasses.replace(device, peaks_flops_per_s=peaks)


@pytest.mark.parametrize("device", ALL, ids=IDS)
@pytest.mark.parametrize("factor", [2.0, 0.5], ids=["sparse", "halved twice"])
def test_fault_72_one_sparse_or_twice_halved_cell_is_caught(device: Hardware, factor: float) -> None:
    """Every tensor cell of the table but B300's and GB300's int8, whose cut follows no rule."""
    assert table_faults(device) == ()
    for dtype in [d for d in TENSOR_DTYPES if d in device.peaks_flops_per_s and device.kind == "gpu"]:
        if device.capability != "10.3" or dtype != "int8":
            assert table_faults(_with_peak(device, dtype, factor)), dtype


@pytest.mark.parametrize("device", [d for d in GPUS if d.clock_hz], ids=lambda d: d.name)
def test_fault_72_a_row_that_is_sparse_throughout_is_caught(device: Hardware) -> None:
    """Even where the clock was made to fit the sparse peak: no such part runs at 3 GHz."""
    peaks = {d: p * (2.0 if d in TENSOR_DTYPES else 1.0) for d, p in device.peaks_flops_per_s.items()}
    assert device.clock_hz is not None
    assert table_faults(dataclasses.replace(device, peaks_flops_per_s=peaks))
    assert table_faults(dataclasses.replace(device, peaks_flops_per_s=peaks, clock_hz=2 * device.clock_hz))


@pytest.mark.parametrize("device", GPUS, ids=[d.name for d in GPUS])
def test_fault_72_ratios_between_precisions(device: Hardware) -> None:
    peaks, half = device.peaks_flops_per_s, _rated(device)
    if "fp8" in peaks:
        assert peaks["fp8"] / half == pytest.approx(2.0, rel=0.03)
    if "tf32" in peaks:
        assert peaks["tf32"] / half == pytest.approx(0.5, rel=0.03)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert peaks["fp32"] < half
    assert peaks.get("fp4", math.inf) > peaks.get("fp8", 0.0) > half or "fp8" not in peaks
    assert "fp64" not in peaks
    if device.fp16_accumulation_flops_per_s is not None:
        assert device.fp16_accumulation_flops_per_s / half == pytest.approx(2.0, rel=0.03)


def test_a_precision_that_the_generation_lacks_is_caught() -> None:
    a100 = hardware("a100-sxm4-80gb")
    assert table_faults(dataclasses.replace(a100, peaks_flops_per_s=a100.peaks_flops_per_s | {"fp8": 624e12}))
    h100 = hardware("h100-sxm")
    assert table_faults(
        dataclasses.replace(h100, peaks_flops_per_s={d: p for d, p in h100.peaks_flops_per_s.items() if d != "fp8"})
    )


@pytest.mark.parametrize(
    "names",
    [
        ("v100-pcie-16gb", "v100-sxm2-16gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm", "h200-sxm", "b200"),
        ("a100-pcie-40gb", "a100-pcie-80gb", "h100-pcie", "h100-nvl", "h200-nvl"),
        ("h20-96gb", "h20-141gb", "h200-sxm"),
        ("gh200-96gb", "gh200-144gb", "gb200", "gb300"),
        ("t4", "l4", "l40s"),
        ("a10g", "a10"),
        ("rtx-3090", "rtx-4090", "rtx-5090"),
        ("mi300x", "mi325x", "mi350x", "mi355x"),
        ("epyc-7763", "epyc-9654"),
    ],
    ids=lambda names: names[0],
)
def test_later_and_larger_parts_are_not_slower(names: tuple[str, ...]) -> None:
    """The 16-bit peak (fp32 on a CPU) and memory never fall along a line of parts."""
    line = [hardware(name) for name in names]
    for older, newer in itertools.pairwise(line):
        assert _rated(newer) >= _rated(older), newer.name
        if {older.name, newer.name} != {"t4", "l4"}:  # the L4 has less bandwidth than the T4
            assert newer.bandwidth_bytes_per_s >= older.bandwidth_bytes_per_s, newer.name
    assert line[-1].memory_bytes >= line[0].memory_bytes


def test_named_values() -> None:
    h100 = hardware("H100-SXM ")
    assert h100.peak_flops_per_s("bf16") == pytest.approx(989.4e12)
    assert h100.bandwidth_bytes_per_s == 3350e9
    roof = h100.roof("bf16")
    assert roof is not None
    assert roof.knee == pytest.approx(295, abs=1)
    assert h100.roof("fp4") is None
    assert hardware("a100-sxm4-80gb").peak_flops_per_s("bf16") == 312e12
    assert hardware("v100-sxm2-16gb").roof("bf16") is None
    assert hardware("l4").bandwidth_bytes_per_s == 300e9
    assert hardware("b200").peak_flops_per_s("fp4") == 9e15
    assert hardware("mi355x").peak_flops_per_s("fp4") == pytest.approx(10.1e15, rel=0.01)
    assert hardware("rtx-5090").peak_flops_per_s("fp4") == pytest.approx(1.68e15, rel=0.01)
    assert hardware("h20-96gb").peak_flops_per_s("bf16") == 148e12
    assert hardware("h200-sxm").l2_bytes == 62_914_560


def test_a_dtype_that_the_device_lacks_is_refused_with_those_it_has() -> None:
    assert hardware("h100-sxm").known_roof("fp8").flops_per_s == pytest.approx(1978.9e12)
    with pytest.raises(InputError, match=r"no fp8 units") as caught:
        hardware("a100-sxm4-80gb").known_roof("fp8")
    assert "bf16" in str(caught.value)


# The knee column of the table of facts that this data comes from: bf16 (fp16) peak / bandwidth.
KNEES = {
    "v100-sxm2-16gb": 139, "v100-pcie-32gb": 124, "t4": 203, "a100-sxm4-40gb": 201, "a100-sxm4-80gb": 153,
    "a100-pcie-40gb": 201, "a100-pcie-80gb": 161, "a10": 208, "a10g": 117, "rtx-3090": 76, "l4": 403, "l40s": 419,
    "rtx-4090": 164, "h100-sxm": 295, "h100-pcie": 371, "h100-nvl": 212, "h200-sxm": 206, "h200-nvl": 174,
    "h20-96gb": 37, "h20-141gb": 31, "gh200-96gb": 247, "gh200-144gb": 202, "b200": 281, "gb200": 312, "b300": 281,
    "gb300": 312, "rtx-5090": 117, "mi300x": 247, "mi325x": 218, "mi355x": 315,
}  # fmt: skip


@pytest.mark.parametrize(("name", "knee"), KNEES.items())
def test_knees(name: str, knee: float) -> None:
    device = hardware(name)
    assert device.known_roof(rated_dtype(device)).knee == pytest.approx(knee, abs=0.6)


def test_unknown_slug_lists_the_known() -> None:
    with pytest.raises(InputError, match="h100-sxm"):
        hardware("h100")
    assert hardware("NVIDIA H100 NVL") is hardware("h100-nvl")
    with pytest.raises(InputError, match="MIG slice: its SM count"):
        hardware("NVIDIA H100 80GB HBM3 MIG 1g.10gb")


@pytest.mark.parametrize(
    ("name", "tflops", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3350),
        ("H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2039),
        ("NVIDIA H100 NVL", 835.5, 3938),
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA_H200", 989.4, 4800),
        ("NVIDIA H200 141GB HBM3e", 989.4, 4800),
        ("NVIDIA H200 NVL", 835.5, 4800),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A10", 125, 600),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA H20-3e", 148, 4800),
        ("NVIDIA B300 SXM6 AC", 2250, 8000),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA GH200 144G HBM3e", 989.4, 4900),
        ("AMD Instinct MI355 OAM", 2516.6, 8000),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA B200", 2250, 8000),
        ("AMD Instinct MI300X VF", 1307.4, 5300),
    ],
)
def test_fault_73_names(name: str, tflops: float, gb_per_s: float) -> None:
    device = match_device(name)
    assert device is not None
    assert device.peak_flops_per_s("bf16") == pytest.approx(tflops * 1e12)
    assert device.bandwidth_bytes_per_s == gb_per_s * 1e9


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",
        "NVIDIA H100 80GB",
        "NVIDIA H1000 Ultra",
        "NVIDIA A100",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
        "NVIDIA H200 80GB",
        "NVIDIA H200 Quantum",
        "NVIDIA H100 80GB HBM3 X",
        "NVIDIA H20",
        "NVIDIA GH200 480GB",
        "AMD EPYC",
        "AMD EPYC family/model/stepping 25/1/1",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "AMD Radeon Graphics",
        "",
        "cpu",
    ],
)
def test_refuses_to_guess(name: str) -> None:
    match = identify(name)
    assert match.hardware is None
    assert match.reason


@pytest.mark.parametrize(
    ("name", "sm_count", "memory_bytes", "bf16", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 10.2e9, 989.4 * 16 / 132, 3350 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 16, None, 989.4 * 16 / 132, 3350 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 16, None, 989.4 * 16 / 132, 3350 / 4),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 42e9, 989.4 * 60 / 132, 3350 / 2),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132, 85e9, 989.4, 3350),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, 5.1e9, 312 * 14 / 108, 1555 / 8),
        ("NVIDIA H200 MIG 2g.35gb", 32, 35e9, 989.4 * 32 / 132, 4800 / 4),
    ],
)
def test_a_mig_slice_has_its_share(
    name: str, sm_count: int, memory_bytes: float | None, bf16: float, gb_per_s: float
) -> None:
    device = match_device(name, memory_bytes=memory_bytes, sm_count=sm_count)
    assert device is not None
    assert device.peak_flops_per_s("bf16") == pytest.approx(bf16 * 1e12)
    assert device.bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert device.sm_count == sm_count
    assert device.tdp_w is None
    cell = device.sources["peak_bf16"]
    assert (cell.value, cell.tag) == (pytest.approx(bf16), "D")
    assert f"{sm_count} of" in cell.source


@pytest.mark.parametrize(
    ("name", "sm_count", "memory_bytes", "reason"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None, "SM count must be read"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 132, None, "132 SM of 132"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 10e9, "not those of its MIG profile"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.25gb", 16, None, "no number of h100-sxm's memory slices"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 16, None, "shares its memory"),
        ("NVIDIA H100 MIG 1g.10gb", 16, None, "not in the hardware table"),
        ("MIG", 16, None, "not known"),
    ],
)
def test_a_mig_slice_that_can_not_be_scaled_is_refused(
    name: str, sm_count: int | None, memory_bytes: float | None, reason: str
) -> None:
    match = identify(name, memory_bytes=memory_bytes, sm_count=sm_count)
    assert match.hardware is None
    assert "MIG" in (match.reason or "")
    assert reason in (match.reason or "")


def test_memory_tells_devices_of_one_name_apart() -> None:
    assert "memory size is needed" in (identify("NVIDIA H20").reason or "")
    for name, memory, found in [
        ("NVIDIA H20", 102e9, "h20-96gb"),
        ("NVIDIA H20", 150e9, "h20-141gb"),
        ("NVIDIA GH200 480GB", 102e9, "gh200-96gb"),
        ("NVIDIA GH200 480GB", 150e9, "gh200-144gb"),
    ]:
        device = match_device(name, memory_bytes=memory)
        assert device is not None
        assert device.name == found
    assert match_device("NVIDIA H20", memory_bytes=40e9) is None


def test_a_cpu_has_the_roof_of_whole_sockets_alone() -> None:
    name = "AMD EPYC 7763 64-Core Processor family/model/stepping 25/1/1"
    whole = match_device(name, sm_count=64)
    assert whole is not None
    assert whole.peak_flops_per_s("fp32") == pytest.approx(64 * 32 * 2.45e9, rel=0.01)
    assert whole.roof("bf16") is None
    both = match_device(name, sm_count=128)
    assert both is not None
    assert both.bandwidth_bytes_per_s == 2 * whole.bandwidth_bytes_per_s
    assert both.peak_flops_per_s("fp32") == 2 * (whole.peak_flops_per_s("fp32") or 0)
    assert both.sm_count == 128
    assert "2 sockets" in both.sources["peak_fp32"].source
    assert "2 cores are in use" in (identify(name, sm_count=2).reason or "")


def test_an_environment_is_matched_by_all_its_readings() -> None:
    gpu: dict[str, Any] = {"memory_bytes": 150_109_880_320, "sm_count": 132, "capability": "9.0", "gfx": None}
    env = {"device_name": "NVIDIA H200", "gpu": gpu}
    assert getattr(identify_environment(env).hardware, "name", None) == "h200-sxm"
    assert identify_environment(env | {"gpu": gpu | {"sm_count": 78}}).hardware is None
    amd = {"memory_bytes": 274e9, "sm_count": 304, "capability": "9.4", "gfx": "gfx942:sramecc+:xnack-"}
    env = {"device_name": "AMD Radeon Graphics", "gpu": amd}
    assert getattr(identify_environment(env).hardware, "name", None) == "mi325x"
    assert identify_environment(env | {"gpu": amd | {"gfx": "gfx950"}}).hardware is None
    cpu = {"device_name": "AMD EPYC 7763 64-Core Processor", "gpu": None, "cpu_cores_physical": 64}
    cpu |= {"cpu_cores_usable": 128, "cpu_cores_logical": 128}
    assert getattr(identify_environment(cpu).hardware, "name", None) == "epyc-7763"
    assert identify_environment(cpu | {"cpu_cores_usable": 8}).hardware is None


def test_readings_must_agree() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert match_device(name, memory_bytes=85_017_755_648, sm_count=132, capability=(9, 0)) is not None
    assert match_device("NVIDIA H200", memory_bytes=150_109_880_320, sm_count=132, capability="9.0") is not None
    assert "GB" in (identify(name, memory_bytes=42e9).reason or "")
    assert "SM" in (identify(name, sm_count=16).reason or "")
    assert "capability" in (identify(name, capability=(8, 0)).reason or "")


def test_generic_amd_name_needs_readings_that_fit_one_device() -> None:
    device = match_device("AMD Radeon Graphics", memory_bytes=206e9, sm_count=304)
    assert device is not None
    assert device.name == "mi300x"
    assert match_device("AMD Radeon Graphics", memory_bytes=24e9, sm_count=96) is None


def test_device_names_are_unique() -> None:
    names = [name.lower() for device in ALL for name in device.device_names]
    assert len(names) == len(set(names))
    shared = {name.lower() for device in ALL for name in device.shared_names}
    assert not shared & set(names)
    assert all(sum(name in d.shared_names for d in ALL) > 1 for d in ALL for name in d.shared_names)
