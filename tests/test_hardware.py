"""The hardware table is dense, consistent and sourced; the matcher refuses to guess."""

from __future__ import annotations

import pytest

from specbench.errors import InputError
from specbench.roofline.hardware import Hardware, catalogue, hardware, identify, match_device

ALL = list(catalogue().values())
IDS = [device.name for device in ALL]


def _half_peak(device: Hardware) -> float:
    return device.peaks_flops_per_s.get("bf16", device.peaks_flops_per_s["fp16"])


@pytest.mark.parametrize("device", ALL, ids=IDS)
def test_every_cell_has_a_source(device: Hardware) -> None:
    assert {cell.tag for cell in device.sources.values()} <= {"V", "D", "S", "M"}
    assert all(cell.source for cell in device.sources.values())
    assert set(device.sources) >= {f"peak_{dtype}" for dtype in device.peaks_flops_per_s}
    assert device.to_dict()["name"] == device.name


@pytest.mark.parametrize("device", [d for d in ALL if d.clock_hz], ids=lambda d: d.name)
def test_peak_is_units_times_clock_and_not_sparse(device: Hardware) -> None:
    assert device.sm_count is not None
    assert device.clock_hz is not None
    assert device.flops_per_clock_per_sm is not None
    identity = device.sm_count * device.flops_per_clock_per_sm * device.clock_hz
    assert _half_peak(device) == pytest.approx(identity, rel=0.03)
    assert _half_peak(device) < 1.9 * identity


def test_only_devices_with_a_disputed_or_capped_peak_lack_the_identity() -> None:
    assert {d.name for d in ALL if d.clock_hz is None} == {"h20-96gb", "h20-141gb", "b300", "gb300"}


@pytest.mark.parametrize("device", ALL, ids=IDS)
def test_ratios_between_precisions(device: Hardware) -> None:
    peaks = device.peaks_flops_per_s
    half = _half_peak(device)
    if "fp8" in peaks:
        assert peaks["fp8"] / half == pytest.approx(2.0, rel=0.03)
    if "tf32" in peaks:
        assert peaks["tf32"] / half == pytest.approx(0.5, rel=0.03)
    assert peaks["fp32"] < half
    assert ("fp8" in peaks) == (
        device.capability in {"8.9", "9.0", "10.0", "10.3", "12.0"} or device.capability is None
    )
    assert "fp64" not in peaks


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


def test_unknown_slug_lists_the_known() -> None:
    with pytest.raises(InputError, match="h100-sxm"):
        hardware("h100")


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


def test_mig_reason() -> None:
    assert "MIG" in (identify("NVIDIA H100 80GB HBM3 MIG 1g.10gb").reason or "")


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
