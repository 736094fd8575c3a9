"""Datasheet roofs of known devices, each with its source, and a matcher that refuses to guess.

    specbench roofline --hardware h100-sxm

A name that does not say which variant it is ("NVIDIA H100"), or an unknown device, has no roof. A MIG slice has that of
its share, if the device tells its SM count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from specbench.errors import InputError
from specbench.roofline.hardware_rules import table_faults
from specbench.roofline.model import Roof

MEMORY_TOLERANCE = 0.15
GENERIC_AMD_NAME = "amd radeon graphics"
MEMORY_SLICES = 8
"""Memory slices of a whole GPU under MIG."""
COMPUTE_SLICES = 7
"""Compute slices of a whole GPU under MIG; its largest instance may leave some SM unused."""
_MIG = re.compile(r"(?P<whole>.*?)\s*\bmig (?P<profile>\S+)$")
_PROFILE = re.compile(r"(?P<compute>\d+)g\.(?P<memory>\d+)gb(\+\S+)?$")


@dataclass(frozen=True)
class Cell:
    """One datasheet value: `tag` is V (read in the source), D (derived), S (secondary source), M (from memory)."""

    value: float
    source: str
    tag: str


@dataclass(frozen=True)
class Hardware:
    """Dense datasheet roofs of one device. Rates in FLOP/s (int8: op/s) and byte/s; None = not known.

    `clock_hz` is the clock that the peak assumes and `flops_per_clock_per_sm` the dense 16-bit rate (fp32 on a CPU,
    whose `sm_count` is its cores). `shared_names` are also those of other devices: memory tells which it is.
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
    kind: str = "gpu"
    shared_names: tuple[str, ...] = ()
    gfx: str | None = None
    l2_bytes: float | None = None
    max_clock_hz: float | None = None
    fp16_accumulation_flops_per_s: float | None = None

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Dense peak for `dtype`, or None where the device has none."""
        return self.peaks_flops_per_s.get(dtype)

    def roof(self, dtype: str) -> Roof | None:
        """The roof for `dtype`, or None where the device has no such units."""
        peak = self.peak_flops_per_s(dtype)
        return None if peak is None else Roof(peak, self.bandwidth_bytes_per_s)

    def known_roof(self, dtype: str) -> Roof:
        """The roof for `dtype`; raises InputError naming the dtypes that the device has."""
        roof = self.roof(dtype)
        if roof is None:
            raise InputError(
                f"{self.name} has no {dtype} units",
                remedy="use one of: " + ", ".join(self.peaks_flops_per_s),
                key="dtype",
            )
        return roof

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: name, rates and the source of each."""
        return {
            "name": self.name,
            "kind": self.kind,
            "arch": self.arch,
            "peaks_flops_per_s": dict(self.peaks_flops_per_s),
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "memory_bytes": self.memory_bytes,
            "l2_bytes": self.l2_bytes,
            "sm_count": self.sm_count,
            "clock_hz": self.clock_hz,
            "max_clock_hz": self.max_clock_hz,
            "tdp_w": self.tdp_w,
            "sources": {key: f"{cell.source} [{cell.tag}]" for key, cell in self.sources.items()},
        }


@dataclass(frozen=True)
class Match:
    """A device's datasheet, or the reason why there is none."""

    hardware: Hardware | None
    reason: str | None


_SCALARS = (
    "sm_count",
    "clock_mhz",
    "max_clock_mhz",
    "bandwidth_gb_per_s",
    "memory_gb",
    "l2_mib",
    "tdp_w",
    "fp16_accumulation_tflops_per_s",
)


def _parse(name: str, entry: dict[str, Any]) -> Hardware:
    cells = {key: Cell(**entry[key]) for key in _SCALARS if key in entry}
    peaks = {dtype: Cell(**cell) for dtype, cell in entry["peaks_tflops_per_s"].items()}

    def scaled(key: str, scale: float) -> float | None:
        return cells[key].value * scale if key in cells else None

    device = Hardware(
        name=name,
        device_names=tuple(entry["device_names"]),
        arch=entry["arch"],
        peaks_flops_per_s={dtype: cell.value * 1e12 for dtype, cell in peaks.items()},
        bandwidth_bytes_per_s=cells["bandwidth_gb_per_s"].value * 1e9,
        memory_bytes=cells["memory_gb"].value * 1e9,
        sm_count=int(cells["sm_count"].value) if "sm_count" in cells else None,
        capability=entry.get("capability"),
        tdp_w=scaled("tdp_w", 1.0),
        clock_hz=scaled("clock_mhz", 1e6),
        flops_per_clock_per_sm=entry.get("flops_per_clock_per_sm"),
        sources={**cells, **{f"peak_{dtype}": cell for dtype, cell in peaks.items()}},
        kind=entry.get("kind", "gpu"),
        shared_names=tuple(entry.get("shared_names", ())),
        gfx=entry.get("gfx"),
        l2_bytes=scaled("l2_mib", 2.0**20),
        max_clock_hz=scaled("max_clock_mhz", 1e6),
        fp16_accumulation_flops_per_s=scaled("fp16_accumulation_tflops_per_s", 1e12),
    )
    faults = table_faults(device)
    assert not faults, f"hardware.yaml: {name}: {'; '.join(faults)}"
    return device


@cache
def catalogue() -> dict[str, Hardware]:
    """Every known device by its short name; do not change the returned dict."""
    text = files("specbench.roofline").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return {name: _parse(name, entry) for name, entry in yaml.safe_load(text).items()}


def hardware(name: str) -> Hardware:
    """The device with this short name (such as h100-sxm), or with this name as the driver gives it.

    Raises InputError listing the short names.
    """
    found = catalogue().get(name.strip().lower())
    if found is not None:
        return found
    match = identify(name)
    if match.hardware is None:
        raise InputError(
            f"unknown hardware {name!r}: {match.reason}",
            remedy="use one of: " + ", ".join(sorted(catalogue())),
            key="hardware",
        )
    return match.hardware


def _normalise(name: str) -> str:
    words = re.sub(r"[\s_]+", " ", name.strip().lower())
    words = re.sub(r" family/model/stepping \S+$", "", words)
    return re.sub(r"^(nvidia|tesla) ", "", words)


def _fits(device: Hardware, memory_bytes: float | None, sm_count: int | None, capability: str | None) -> str | None:
    """Why the device's own readings contradict the datasheet, or None."""
    if device.kind == "cpu":
        return _fits_cpu(device, sm_count)
    if memory_bytes is not None and abs(memory_bytes / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        return f"it has {memory_bytes / 1e9:.0f} GB where {device.name} has {device.memory_bytes / 1e9:.0f} GB"
    if sm_count is not None and device.sm_count is not None and sm_count != device.sm_count:
        return f"it has {sm_count} SM where {device.name} has {device.sm_count}"
    if capability is not None and device.capability is not None and capability != device.capability:
        return f"it has compute capability {capability} where {device.name} has {device.capability}"
    return None


def _fits_cpu(device: Hardware, cores: int | None) -> str | None:
    if cores is None or device.sm_count is None or cores % device.sm_count == 0:
        return None
    return (
        f"{cores} cores are in use where a socket has {device.sm_count}: the share of its bandwidth that they get isn't"
        " known"
    )


def identify(
    name: str,
    memory_bytes: float | None = None,
    sm_count: int | None = None,
    capability: str | tuple[int, int] | None = None,
    gfx: str | None = None,
) -> Match:
    """The datasheet for a device name as torch or NVML report it, or the reason why none can be named.

    The longest known name wins, and what follows it may only repeat the memory ("80GB", "HBM3e"): "H200 NVL" is not an
    H200, "RTX 4090 D" not an RTX 4090. Memory, SM count (a CPU's cores) and capability, where given, must agree; where
    several devices share a name, they decide. A MIG slice needs its SM count.
    """
    plain = _normalise(name)
    capability_text = ".".join(map(str, capability)) if isinstance(capability, tuple) else capability
    if re.search(r"\bmig\b", plain):
        return _identify_slice(name, plain, memory_bytes, sm_count, capability_text)
    if plain == GENERIC_AMD_NAME:
        return _identify_generic_amd(name, memory_bytes, sm_count, gfx)
    known, candidates = _candidates(plain)
    if not candidates:
        return Match(None, f"{name!r} is not in the hardware table, or does not say which variant it is")
    rest = plain.removeprefix(known)
    if not re.fullmatch(r"( \d+gb| hbm\d?e?)*", rest):
        return Match(None, f"{name!r} is not known; {known!r} is another device")
    sizes = [float(size) * 1e9 for size in re.findall(r" (\d+)gb", rest)]
    clashes = {
        device.name: next(
            (why for size in [memory_bytes, *sizes] if (why := _fits(device, size, sm_count, capability_text))), None
        )
        for device in candidates
    }
    fitting = [device for device in candidates if clashes[device.name] is None]
    if len(fitting) > 1:
        names = " and ".join(device.name for device in fitting)
        return Match(None, f"{name!r} is the name of {names}: the memory size is needed to tell them apart")
    if not fitting:
        why = "; ".join(f"{device}, but {clash}" for device, clash in clashes.items())
        return Match(None, f"{name!r} looks like {why}")
    found = fitting[0]
    if found.kind == "cpu" and sm_count and found.sm_count and sm_count > found.sm_count:
        count = sm_count // found.sm_count
        found = _scaled(found, f"{count} x {found.name}", count, count, f"{count} sockets")
    return Match(found, None)


def _candidates(plain: str) -> tuple[str, list[Hardware]]:
    """The longest known name that `plain` starts with, and the devices that bear it."""
    known = ""
    candidates: list[Hardware] = []
    for device in catalogue().values():
        for other in map(_normalise, (*device.device_names, *device.shared_names)):
            if plain.startswith(other) and len(other) >= len(known):
                candidates = [*candidates, device] if other == known else [device]
                known = other
    return known, candidates


def _identify_slice(
    name: str, plain: str, memory_bytes: float | None, sm_count: int | None, capability: str | None
) -> Match:
    """A MIG slice: peaks by its share of the SM, bandwidth by its memory slices, of which the whole GPU has eight."""
    parts = _MIG.fullmatch(plain)
    profile = _PROFILE.fullmatch(parts["profile"]) if parts else None
    if parts is None or profile is None:
        return Match(None, f"{name!r} is a MIG slice whose profile is not known (a compute instance shares its memory)")
    whole = identify(parts["whole"], None, None, capability).hardware
    if whole is None:
        return Match(None, f"{name!r} is a MIG slice of a GPU that is not in the hardware table")
    size = float(profile["memory"]) * 1e9
    slices = size / whole.memory_bytes * MEMORY_SLICES
    count = round(slices)
    if count not in (1, 2, 4, MEMORY_SLICES) or abs(slices / count - 1) > MEMORY_TOLERANCE:
        return Match(None, f"{name!r} is a MIG slice that is no number of {whole.name}'s memory slices")
    if memory_bytes is not None and abs(memory_bytes / size - 1) > MEMORY_TOLERANCE:
        return Match(None, f"{name!r} has {memory_bytes / 1e9:.0f} GB, not those of its MIG profile")
    if sm_count is None or whole.sm_count is None:
        return Match(None, f"{name!r} is a MIG slice: its SM count must be read from the device to scale the roofs")
    share = sm_count / whole.sm_count
    if not 0.75 <= share / (int(profile["compute"]) / COMPUTE_SLICES) <= 1.15:
        return Match(None, f"{name!r} has {sm_count} SM of {whole.sm_count}, which is not its MIG profile")
    told = f"{sm_count} of {whole.sm_count} SM, {count} of {MEMORY_SLICES} memory slices"
    return Match(_scaled(whole, f"{whole.name} MIG {parts['profile']}", share, count / MEMORY_SLICES, told), None)


def _scaled(whole: Hardware, name: str, compute: float, memory: float, told: str) -> Hardware:
    """A part or a multiple of a device: peaks and units times `compute`; bandwidth, memory and L2 times `memory`."""
    shares = dict.fromkeys(("bandwidth_gb_per_s", "memory_gb", "l2_mib"), memory)
    shares |= dict.fromkeys(("sm_count", *(key for key in whole.sources if key.startswith("peak_"))), compute)
    cells = {
        key: Cell(cell.value * shares[key], f"{cell.source}; {told}", "D") if key in shares else cell
        for key, cell in whole.sources.items()
        if key not in ("tdp_w", "fp16_accumulation_tflops_per_s")
    }
    return dataclasses.replace(
        whole,
        name=name,
        peaks_flops_per_s={dtype: peak * compute for dtype, peak in whole.peaks_flops_per_s.items()},
        bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s * memory,
        memory_bytes=whole.memory_bytes * memory,
        sm_count=round(whole.sm_count * compute) if whole.sm_count is not None else None,
        tdp_w=None,
        l2_bytes=whole.l2_bytes * memory if whole.l2_bytes is not None else None,
        fp16_accumulation_flops_per_s=None,
        sources=cells,
    )


def _identify_generic_amd(name: str, memory_bytes: float | None, sm_count: int | None, gfx: str | None) -> Match:
    """AMD's generic name says nothing: only compute units, memory (and gfx target) that fit one device do."""
    if memory_bytes is None or sm_count is None:
        return Match(None, f"{name!r} names no device; its memory and compute units are needed")
    fitting = [
        device
        for device in catalogue().values()
        if device.arch.startswith("cdna")
        and _fits(device, memory_bytes, sm_count, None) is None
        and (gfx is None or gfx.split(":")[0] == device.gfx)
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


def identify_environment(environment: Mapping[str, Any]) -> Match:
    """`identify` with every reading that an environment record of the bench holds."""
    name, gpu = str(environment.get("device_name")), environment.get("gpu")
    if not isinstance(gpu, Mapping):
        usable, logical = environment.get("cpu_cores_usable"), environment.get("cpu_cores_logical")
        return identify(name, None, environment.get("cpu_cores_physical") if usable == logical else usable)
    amd = gpu.get("gfx") is not None  # its capability is not NVIDIA's
    return identify(
        *(name, gpu.get("memory_bytes"), gpu.get("sm_count"), None if amd else gpu.get("capability")),
        gfx=gpu.get("gfx"),
    )
