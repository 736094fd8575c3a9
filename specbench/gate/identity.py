"""Whose numbers these are: what two runs must share before one may judge the other.

Device, memory, driver, torch, clock policy, power limit and scenario; a case is matched by its own hash. Readings that
move from boot to boot (clock speeds, free memory) are no part of it; sizes that jitter are compared with a tolerance.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from specbench.report.rows import number

MACHINE_KEYS = (
    *("device", "device_name", "cpu_model", "cpu_isa", "cpu_cores_usable", "machine", "os"),
    *("python", "torch", "numba", "torch_threads", "numba_threads"),
)
GPU_KEYS = ("name", "capability", "sm_count", "driver", "cuda", "clock_policy")
MEMORY_TOLERANCE = 0.03
"""Share by which the memory of one machine may differ: the kernel keeps more or less of it for itself."""
POWER_TOLERANCE_W = 1.0
_SPEED = re.compile(r"\s*@?\s*[0-9.]+\s*[GM]Hz", re.IGNORECASE)


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run's numbers comparable, from its manifest; what the manifest does not say is None."""
    env = _mapping(manifest.get("environment"))
    gpu = _mapping(env.get("gpu"))
    out = {key: _stable(key, env.get(key)) for key in MACHINE_KEYS}
    out["memory_bytes"] = _bytes(env)
    out |= {f"gpu.{key}": _stable(key, gpu.get(key)) for key in GPU_KEYS}
    out["gpu.memory_bytes"] = _bytes(gpu)
    out["gpu.power_limit_w"] = number(gpu.get("power_limit_w"))
    out["scenario"] = manifest.get("name")
    return out


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """16 hex digits over `identity`, its sizes in steps (memory: of 19 %; watts: of 5) so that jitter leaves it alone.

    Two runs of the same fingerprint are comparable; those near a step's edge may differ here and yet be comparable, so
    the gate itself asks `differences`.
    """
    kept = identity(manifest)
    for key in ("memory_bytes", "gpu.memory_bytes"):
        kept[key] = round(4 * math.log2(kept[key])) if kept[key] else None
    watts = kept["gpu.power_limit_w"]
    kept["gpu.power_limit_w"] = round(watts / 5) if watts is not None else None
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """One phrase for each thing in which two manifests' identities differ; empty where the runs are comparable."""
    a, b = identity(baseline), identity(candidate)
    return [f"{key}: {_shown(a[key])} there, {_shown(b[key])} here" for key in a if not _same(key, a[key], b[key])]


def _same(key: str, a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is None and b is None
    if key.endswith("memory_bytes"):
        return bool(abs(a - b) <= MEMORY_TOLERANCE * max(a, b))
    if key.endswith("power_limit_w"):
        return bool(abs(a - b) <= POWER_TOLERANCE_W)
    return bool(a == b)


def _stable(key: str, value: Any) -> Any:
    if key in ("cpu_model", "device_name") and isinstance(value, str):
        return _SPEED.sub("", value).strip()
    if key == "python" and isinstance(value, str):
        return ".".join(value.split(".")[:2])
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def _bytes(place: Mapping[str, Any]) -> float | None:
    size, gib = number(place.get("memory_bytes")), number(place.get("memory_gib"))
    found = size if size is not None else gib * 2**30 if gib is not None else None
    return found if found is not None and found > 0 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shown(value: object) -> str:
    return "unknown" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
