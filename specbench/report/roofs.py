"""The roofs that a run's manifest carries, in one shape: bandwidth, peak for a dtype, knee and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.report import rows as read

_BANDWIDTHS = ("bandwidth_bytes_per_s", "read_bytes_per_s", "bytes_per_s")
_PEAKS = ("gemm_flops_per_s", "peaks_flops_per_s", "flops_per_s")


@dataclass(frozen=True)
class Roof:
    """min(bytes_per_s · intensity, flops_per_s); `kind` is measured, datasheet or h100."""

    kind: str
    name: str
    bytes_per_s: float
    flops_per_s: float
    dtype: str
    source: str

    @property
    def knee(self) -> float:
        """The intensity in FLOP/B at which bandwidth stops being the limit."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        return min(self.bytes_per_s * intensity, self.flops_per_s)


def roofs_of(manifest: Mapping[str, Any], dtype: str) -> list[Roof]:
    """The roofs that are known for `dtype`: this device measured, this device by its datasheet, an H100 beside it."""
    known = read.section(manifest, "roofs")
    device = read.plain(manifest.get("device") or "this device", 60)
    names = {"measured": f"{device}, measured", "datasheet": f"{device}, datasheet", "h100": "H100, datasheet"}
    found = []
    for kind, name in names.items():
        values = read.section(known, kind)
        bandwidth = next((b for key in _BANDWIDTHS if (b := read.number(values.get(key)))), None)
        peak = next((p for key in _PEAKS if (p := _for_dtype(values.get(key), dtype))), None)
        if bandwidth and peak and bandwidth > 0 and peak > 0:
            source = _measured(values) if kind == "measured" else _source(values, dtype)
            shown = read.plain(values["name"], 60) + ", datasheet" if kind == "h100" and values.get("name") else name
            found.append(Roof(kind, shown, bandwidth, peak, dtype, source))
    return found


def _measured(values: Mapping[str, Any]) -> str:
    """That it was measured, and every mark or note that says the reading may be too low."""
    remarks = [text for key in ("marks", "notes") for text in values.get(key) or []]
    return "; ".join(["measured on this device", *(read.plain(text) for text in remarks)])


def _source(values: Mapping[str, Any], dtype: str) -> str:
    sources = read.section(values, "sources")
    texts = [values.get("source"), sources.get(f"peak_{dtype}"), sources.get("bandwidth_gb_per_s")]
    known = dict.fromkeys(read.plain(text) for text in texts if text)
    return "; ".join(known) or "source not recorded"


def _for_dtype(value: object, dtype: str) -> float | None:
    if isinstance(value, Mapping):
        return read.number(value.get(dtype))
    return read.number(value)


def missing_roofs(manifest: Mapping[str, Any], dtype: str) -> list[str]:
    """A sentence for each of the three roofs that isn't known."""
    have = {roof.kind for roof in roofs_of(manifest, dtype)}
    shown = read.plain(dtype)
    texts = {
        "measured": f"no measured roof for {shown} in the manifest",
        "datasheet": "no datasheet roof is known for this device",
        "h100": f"no H100 roof for {shown} in the manifest",
    }
    return [text for kind, text in texts.items() if kind not in have]


@dataclass(frozen=True)
class Stair:
    """One measured matrix product of `tokens` rows."""

    tokens: int
    intensity: float
    flops_per_s: float
    text: str


def ceilings_of(manifest: Mapping[str, Any], dtype: str) -> list[Roof]:
    """Lower limits that were measured beside the roof: copying memory, and the matrix peaks of other dtypes."""
    roof = next((one for one in roofs_of(manifest, dtype) if one.kind == "measured"), None)
    values = _measured_values(manifest)
    if roof is None:
        return []
    found = []
    copy = read.number(values.get("copy_bytes_per_s"))
    if copy and 0 < copy < 0.95 * roof.bytes_per_s:
        found.append(Roof("ceiling", "copy bandwidth", copy, roof.flops_per_s, dtype, roof.source))
    peaks = read.section(values, "gemm_flops_per_s")
    for name, value in peaks.items():
        peak = read.number(value)
        if name != dtype and peak and 0 < peak < 0.95 * roof.flops_per_s:
            found.append(Roof("ceiling", f"{read.plain(name)} peak", roof.bytes_per_s, peak, str(name), roof.source))
    return found


def staircases_of(manifest: Mapping[str, Any], dtype: str, most: int = 4) -> list[list[Stair]]:
    """The measured products of few rows, one list for each (n, k): what verifying a few tokens rests on."""
    groups: dict[tuple[object, object], list[Stair]] = {}
    skinny = _measured_values(manifest).get("skinny")
    for item in skinny if isinstance(skinny, list) else []:
        if not isinstance(item, Mapping) or str(item.get("dtype", dtype)) != dtype:
            continue
        tokens, rate, traffic = (read.number(item.get(key)) for key in ("m", "flops_per_s", "bytes_per_s"))
        if tokens and rate and traffic and rate > 0 and traffic > 0:
            text = f"{tokens:.0f} × {item.get('k')} × {item.get('n')} {dtype}: {read.significant(rate, 'FLOP/s')}"
            stair = Stair(int(tokens), rate / traffic, rate, text)
            groups.setdefault((item.get("n"), item.get("k")), []).append(stair)
    found = [sorted(stairs, key=lambda stair: stair.tokens) for stairs in groups.values() if len(stairs) > 1]
    return found[:most]


def _measured_values(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was measured of this device's roofs."""
    return read.section(read.section(manifest, "roofs"), "measured")
