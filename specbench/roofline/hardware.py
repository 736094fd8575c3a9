"""Datasheet roofs of known devices, each with its source, and a matcher that refuses to guess.

    python -c "from specbench.roofline.hardware import hardware; print(hardware('h100-sxm').roof('bf16'))"

A name that does not say which variant it is ("NVIDIA H100"), a MIG slice, or an unknown device has no roof.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from specbench.errors import InputError
from specbench.roofline.model import Roof

MEMORY_TOLERANCE = 0.15
GENERIC_AMD_NAME = "amd radeon graphics"


@dataclass(frozen=True)
class Cell:
    """One datasheet value: `tag` is V (read in the source), D (derived), S (secondary source), M (from memory)."""

    value: float
    source: str
    tag: str


@dataclass(frozen=True)
class Hardware:
    """Dense datasheet roofs of one device. Rates in FLOP/s (int8: op/s) and byte/s; None = not known.

    `clock_hz` is the clock that the peak assumes and `flops_per_clock_per_sm` the dense 16-bit rate.
    """

    name: str
    device_names: tuple[str, ...]
    arch: str
    peaks_flops_per_s: dict[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: float
    sm_count: int | None
    capability: str | None
    tdp_w: float | None
    clock_hz: float | None
    flops_per_clock_per_sm: int | None
    sources: dict[str, Cell]

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Dense peak for `dtype`, or None where the device has none."""
        return self.peaks_flops_per_s.get(dtype)

    def roof(self, dtype: str) -> Roof | None:
        """The roof for `dtype`, or None where the device has no such units."""
        peak = self.peak_flops_per_s(dtype)
        return None if peak is None else Roof(peak, self.bandwidth_bytes_per_s)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: name, rates and the source of each."""
        return {
            "name": self.name,
            "arch": self.arch,
            "peaks_flops_per_s": dict(self.peaks_flops_per_s),
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "memory_bytes": self.memory_bytes,
            "sm_count": self.sm_count,
            "tdp_w": self.tdp_w,
            "sources": {key: f"{cell.source} [{cell.tag}]" for key, cell in self.sources.items()},
        }


@dataclass(frozen=True)
class Match:
    """A device's datasheet, or the reason why there is none."""

    hardware: Hardware | None
    reason: str | None


def _parse(name: str, entry: dict[str, Any]) -> Hardware:
    scalars = ("sm_count", "clock_mhz", "bandwidth_gb_per_s", "memory_gb", "tdp_w")
    cells = {key: Cell(**entry[key]) for key in scalars if key in entry}
    peaks = {dtype: Cell(**cell) for dtype, cell in entry["peaks_tflops_per_s"].items()}
    sm_count, clock, tdp = (cells.get(key) for key in ("sm_count", "clock_mhz", "tdp_w"))
    return Hardware(
        name=name,
        device_names=tuple(entry["device_names"]),
        arch=entry["arch"],
        peaks_flops_per_s={dtype: cell.value * 1e12 for dtype, cell in peaks.items()},
        bandwidth_bytes_per_s=cells["bandwidth_gb_per_s"].value * 1e9,
        memory_bytes=cells["memory_gb"].value * 1e9,
        sm_count=int(sm_count.value) if sm_count else None,
        capability=entry.get("capability"),
        tdp_w=tdp.value if tdp else None,
        clock_hz=clock.value * 1e6 if clock else None,
        flops_per_clock_per_sm=entry.get("flops_per_clock_per_sm"),
        sources={**cells, **{f"peak_{dtype}": cell for dtype, cell in peaks.items()}},
    )


@cache
def catalogue() -> dict[str, Hardware]:
    """Every known device by its short name; do not change the returned dict."""
    text = files("specbench.roofline").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return {name: _parse(name, entry) for name, entry in yaml.safe_load(text).items()}


def hardware(name: str) -> Hardware:
    """The device with this short name (such as h100-sxm); raises InputError listing the known ones."""
    found = catalogue().get(name.strip().lower())
    if found is None:
        raise InputError(
            f"unknown hardware {name!r}", remedy="use one of: " + ", ".join(sorted(catalogue())), key="hardware"
        )
    return found


def _normalise(name: str) -> str:
    words = re.sub(r"[\s_]+", " ", name.strip().lower())
    return re.sub(r"^(nvidia|tesla) ", "", words)


def _fits(device: Hardware, memory_bytes: float | None, sm_count: int | None, capability: str | None) -> str | None:
    """Why the device's own readings contradict the datasheet, or None."""
    if memory_bytes is not None and abs(memory_bytes / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        return f"it has {memory_bytes / 1e9:.0f} GB where {device.name} has {device.memory_bytes / 1e9:.0f} GB"
    if sm_count is not None and device.sm_count is not None and sm_count != device.sm_count:
        return f"it has {sm_count} SM where {device.name} has {device.sm_count}"
    if capability is not None and device.capability is not None and capability != device.capability:
        return f"it has compute capability {capability} where {device.name} has {device.capability}"
    return None


def identify(
    name: str,
    memory_bytes: float | None = None,
    sm_count: int | None = None,
    capability: str | tuple[int, int] | None = None,
) -> Match:
    """The datasheet for a device name as torch or NVML report it, or the reason why none can be named.

    The longest known name wins, and what follows it may only repeat the memory ("80GB", "HBM3e"): "H200 NVL" is not an
    H200, "RTX 4090 D" not an RTX 4090. Memory, SM count and capability, where given, must agree.
    """
    plain = _normalise(name)
    if re.search(r"\bmig\b", plain):
        return Match(None, f"{name!r} is a MIG slice: the roofs of the whole device do not hold for it")
    capability_text = ".".join(map(str, capability)) if isinstance(capability, tuple) else capability
    if plain == GENERIC_AMD_NAME:
        return _identify_generic_amd(name, memory_bytes, sm_count)
    best: tuple[str, Hardware] | None = None
    for device in catalogue().values():
        for known in map(_normalise, device.device_names):
            if plain.startswith(known) and (best is None or len(known) > len(best[0])):
                best = (known, device)
    if best is None:
        return Match(None, f"{name!r} is not in the hardware table, or does not say which variant it is")
    known, device = best
    rest = plain.removeprefix(known)
    if not re.fullmatch(r"( \d+gb| hbm\d?e?)*", rest):
        return Match(None, f"{name!r} is not known; {device.device_names[0]!r} is another device")
    sizes = [float(size) for size in re.findall(r" (\d+)gb", rest)]
    for stated in [memory_bytes, *(size * 1e9 for size in sizes)]:
        clash = _fits(device, stated, sm_count, capability_text)
        if clash:
            return Match(None, f"{name!r} looks like {device.name}, but {clash}")
    return Match(device, None)


def _identify_generic_amd(name: str, memory_bytes: float | None, sm_count: int | None) -> Match:
    """AMD's generic name says nothing: only a compute-unit count and a memory size that fit one device do."""
    if memory_bytes is None or sm_count is None:
        return Match(None, f"{name!r} names no device; its memory and compute units are needed")
    fitting = [
        device
        for device in catalogue().values()
        if device.arch.startswith("cdna") and _fits(device, memory_bytes, sm_count, None) is None
    ]
    if len(fitting) != 1:
        return Match(None, f"{name!r} names no device, and {len(fitting)} known ones fit its readings")
    return Match(fitting[0], None)


def match_device(
    name: str,
    memory_bytes: float | None = None,
    sm_count: int | None = None,
    capability: str | tuple[int, int] | None = None,
) -> Hardware | None:
    """`identify` without the reason."""
    return identify(name, memory_bytes, sm_count, capability).hardware
