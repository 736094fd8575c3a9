"""The three roofs of a device, and the guard that keeps an absurd stored roof from ever being used.

Datasheet: what the vendor states, dense. Clock-adjusted: the same at the clock that was measured, since a datasheet's
peak assumes one (NVIDIA's 989 TFLOP/s are 1830 MHz where the part runs up to 1980: 103 % of the datasheet is possible).
Measured: what this device reached.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import InputError
from specbench.roofline.hardware import Cell, Hardware
from specbench.roofline.model import Roof

REMEDY = "measure again with `specbench roofline --measure`"
BANDWIDTH_LIMITS = (1e6, 1e15)
PEAK_LIMITS = (1e6, 1e19)
"""Beyond these a rate is no device's: between 1 MB/s and 1 PB/s, and between 1 MFLOP/s and 10 EFLOP/s."""
MAX_OF_DATASHEET_BANDWIDTH = 1.1
MAX_OF_DATASHEET_PEAK = 1.3
"""A measured roof may pass its datasheet by the memory clock's rounding, or by the boost clock, but no further."""


@dataclass(frozen=True)
class DeviceRoof:
    """One of a device's roofs for one dtype; `kind` is datasheet, clock-adjusted or measured."""

    kind: str
    dtype: str
    roof: Roof
    source: str


def clock_adjusted(device: Hardware, clock_hz: float) -> Hardware | None:
    """Datasheet peaks x measured clock / datasheet clock; None where the datasheet's clock isn't known (H20, B300).

    Bandwidth stays: it follows the memory's clock. Raises InputError for a clock that no device has.
    """
    if not (math.isfinite(clock_hz) and 1e8 <= clock_hz <= 1e10):
        raise InputError(f"a measured clock of {clock_hz} Hz", remedy=REMEDY, key="clock_hz")
    if device.clock_hz is None:
        return None
    ratio = clock_hz / device.clock_hz
    told = f"at {clock_hz / 1e6:.0f} instead of {device.clock_hz / 1e6:.0f} MHz"
    sources = {
        key: Cell(cell.value * ratio, f"{cell.source}; {told}", "D") if key.startswith("peak_") else cell
        for key, cell in device.sources.items()
    }
    return dataclasses.replace(
        device,
        name=f"{device.name} {told}",
        peaks_flops_per_s={dtype: peak * ratio for dtype, peak in device.peaks_flops_per_s.items()},
        clock_hz=clock_hz,
        sources=sources | {"clock_mhz": Cell(clock_hz / 1e6, "measured", "D")},
    )


def measured_faults(measured: Mapping[str, Any], sheet: Hardware | None = None) -> tuple[str, ...]:
    """Why a stored measured roof can't be true; empty for a sound one.

    `measured` is what a manifest or the store holds: bandwidths in byte/s and `gemm_flops_per_s` by dtype. `sheet`
    bounds them, where the device has one.
    """
    faults = []
    peaks = measured.get("gemm_flops_per_s")
    for key in ("bandwidth_bytes_per_s", "bandwidth_limit_bytes_per_s"):
        faults += _rate_faults(key, measured.get(key), BANDWIDTH_LIMITS)
    if not isinstance(peaks, Mapping) or not peaks:
        return (*faults, "gemm_flops_per_s holds no dtype")
    limits = measured.get("flops_limit_per_s")
    for dtype, peak in peaks.items():
        faults += _rate_faults(f"gemm_flops_per_s of {dtype}", peak, PEAK_LIMITS)
        limit = limits.get(dtype) if isinstance(limits, Mapping) else None
        faults += _rate_faults(f"flops_limit_per_s of {dtype}", limit, PEAK_LIMITS)
    if faults or sheet is None:
        return tuple(faults)
    bandwidth = measured["bandwidth_bytes_per_s"]
    if bandwidth > sheet.bandwidth_bytes_per_s * MAX_OF_DATASHEET_BANDWIDTH:
        share = bandwidth / sheet.bandwidth_bytes_per_s
        faults.append(f"the bandwidth is {share:.0%} of {sheet.name}'s datasheet")
    for dtype, peak in peaks.items():
        known = sheet.peak_flops_per_s("tf32" if dtype == "fp32" else dtype) or sheet.peak_flops_per_s(dtype)
        if known is not None and peak > known * MAX_OF_DATASHEET_PEAK:
            faults.append(f"the {dtype} peak is {peak / known:.0%} of {sheet.name}'s datasheet")
    return tuple(faults)


def _rate_faults(name: str, value: object, limits: tuple[float, float]) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [f"{name} is {value!r}, not a number"]
    if not (math.isfinite(value) and limits[0] <= value <= limits[1]):
        return [f"{name} is {value:g} per second"]
    return []


def measured_roof(measured: Mapping[str, Any], dtype: str, sheet: Hardware | None = None) -> Roof:
    """The measured roof for `dtype`; raises InputError for an absurd one, and for a dtype that wasn't measured."""
    faults = measured_faults(measured, sheet)
    if faults:
        raise InputError(f"the measured roof can't be true: {'; '.join(faults)}", remedy=REMEDY, key="roofs.measured")
    peaks = measured["gemm_flops_per_s"]
    if dtype not in peaks:
        raise InputError(f"no {dtype} roof was measured", remedy=f"measured: {', '.join(peaks)}", key="dtype")
    return Roof(float(peaks[dtype]), float(measured["bandwidth_bytes_per_s"]))


def three_roofs(dtype: str, sheet: Hardware | None, measured: Mapping[str, Any] | None) -> tuple[DeviceRoof, ...]:
    """What is known of the three roofs for `dtype`, in the order datasheet, clock-adjusted, measured.

    The clock is the one in `measured` (`clock_hz`). Raises InputError where the measured roof can't be true.
    """
    found = []
    if sheet is not None:
        clock = (measured or {}).get("clock_hz")
        adjusted = clock_adjusted(sheet, float(clock)) if clock is not None else None
        for kind, device in (("datasheet", sheet), ("clock-adjusted", adjusted)):
            roof = device.roof(dtype) if device is not None else None
            if device is not None and roof is not None:
                found.append(DeviceRoof(kind, dtype, roof, device.sources[f"peak_{dtype}"].source))
    if measured is not None and dtype in (measured.get("gemm_flops_per_s") or {}):
        when = measured.get("measured_at")
        source = f"measured on this device{f' at {when}' if when else ''}"
        found.append(DeviceRoof("measured", dtype, measured_roof(measured, dtype, sheet), source))
    return tuple(found)
