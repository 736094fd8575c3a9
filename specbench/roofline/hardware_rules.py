"""What must hold for every row of the hardware table: dense figures only, consistent with units x clock.

peak = SM x FLOP per clock and SM x clock, which reproduces the datasheets, with each precision a known multiple of
the 16-bit rate. A figure with 2:4 sparsity is twice that, so it can't pass, nor can one that was halved twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.roofline.hardware import Hardware

TOLERANCE = 0.03
MAX_CLOCK_HZ = 2.7e9
MIN_CLOCK_HZ = 1.0e9
FP8_CAPABILITIES = frozenset({"8.9", "9.0", "10.0", "10.3", "12.0"})
FP4_CAPABILITIES = frozenset({"10.0", "10.3", "12.0"})
CUT_INT8 = "10.3"
"""Blackwell Ultra: its int8 units were cut, and its fp4 is more than twice its fp8."""


def rated_dtype(device: Hardware) -> str:
    """The dtype of `flops_per_clock_per_sm`: 16 bits on a GPU, fp32 on a CPU."""
    if device.kind == "cpu":
        return "fp32"
    return "bf16" if "bf16" in device.peaks_flops_per_s else "fp16"


def expected_ratios(device: Hardware) -> dict[str, float]:
    """Dense peak of each precision / the 16-bit peak; one that follows no rule is left out.

    GeForce cards accumulate 16-bit products in fp32 at half rate, so their int8 and fp4 stand at twice the usual ratio.
    """
    if device.kind == "cpu":
        return {}
    half_rate = any("GeForce" in name for name in device.device_names)
    ratios = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0, "tf32": 0.5}
    if device.capability != CUT_INT8:
        ratios |= {"int8": 4.0 if half_rate else 2.0, "fp4": 8.0 if half_rate else 4.0}
    return ratios


def table_faults(device: Hardware) -> tuple[str, ...]:
    """Everything about a row that can't be true of dense figures; empty for a sound row."""
    peaks = device.peaks_flops_per_s
    faults = []
    base = peaks[rated_dtype(device)]
    if device.clock_hz is not None and device.sm_count is not None and device.flops_per_clock_per_sm is not None:
        identity = device.sm_count * device.flops_per_clock_per_sm * device.clock_hz
        if abs(base / identity - 1) > TOLERANCE:
            faults.append(f"{rated_dtype(device)} peak is {base / identity:.2f} x its units x clock")
        if not MIN_CLOCK_HZ <= device.clock_hz <= MAX_CLOCK_HZ:
            faults.append(f"a clock of {device.clock_hz / 1e9:.2f} GHz")
    for dtype, ratio in expected_ratios(device).items():
        if dtype in peaks and abs(peaks[dtype] / base / ratio - 1) > TOLERANCE:
            faults.append(f"{dtype} is {peaks[dtype] / base:.2f} x the 16-bit peak, not {ratio:g} x")
    if device.capability == CUT_INT8 and "fp4" in peaks and not 2.5 <= peaks["fp4"] / peaks["fp8"] <= 3.1:
        faults.append("fp4 of Blackwell Ultra is 2.5 to 3.1 x fp8")
    if device.kind == "gpu":
        faults += _wrong_precisions(device)
        if peaks["fp32"] > min(peaks.get("tf32", base), base) * (1 + TOLERANCE):
            faults.append("fp32 vector peak above the tensor peaks")
    return tuple(faults)


def _wrong_precisions(device: Hardware) -> list[str]:
    """Precisions that the device's generation lacks, or must have."""
    has_fp8 = device.capability in FP8_CAPABILITIES or device.arch.startswith("cdna")
    has_fp4 = device.capability in FP4_CAPABILITIES or device.arch == "cdna4"
    wanted = {"fp8": has_fp8, "fp4": has_fp4}
    return [
        f"{dtype} {'is missing' if has else 'does not exist on this generation'}"
        for dtype, has in wanted.items()
        if (dtype in device.peaks_flops_per_s) != has
    ]
