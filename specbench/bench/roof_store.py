"""Measured roofs kept between runs, by device, driver, dtype and clock policy; a change of any makes them expire.

A stored roof is used only where everything it rests on is still the same and its figures can be true; what was reused,
and when it was measured, is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.engine.ops.revision import kernel_revision
from specbench.roofline.hardware import Hardware
from specbench.roofline.roofs import measured_faults

METHOD = 1
"""Of measuring; a roof that an older method measured expires."""


@dataclass(frozen=True)
class Found:
    """A stored roof that holds (`roofs`, measured `measured_at`), or the reason why there is none."""

    roofs: dict[str, Any] | None
    reason: str | None
    measured_at: str | None = None

    @property
    def told(self) -> str:
        """One line for people."""
        return f"measured {self.measured_at}, stored, reused" if self.roofs is not None else str(self.reason)


def default_folder() -> Path:
    """`roofs` in SPECBENCH_CACHE, or in `specbench` of the user's cache folder."""
    own, base = os.environ.get("SPECBENCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own) / "roofs"
    return (Path(base) if base else Path.home() / ".cache") / "specbench" / "roofs"


def conditions(environment: Mapping[str, Any], clock_policy: Mapping[str, Any]) -> dict[str, Any]:
    """What a measured roof of this machine rests on, from the bench's environment record: device, driver, clocks,
    and on a CPU our own kernels, whose linear layers are among the candidates."""
    gpu = environment.get("gpu")
    if isinstance(gpu, Mapping):
        device = {key: gpu.get(key) for key in ("name", "uuid", "memory_gib", "sm_count")}
        driver = {key: gpu.get(key) for key in ("driver", "cuda")} | {"torch": environment.get("torch")}
    else:
        keys = ("cpu_model", "cpu_isa", "cpu_cores_usable", "llc_bytes", "torch_threads")
        device = {key: environment.get(key) for key in keys}
        driver = {key: environment.get(key) for key in ("torch", "numba")} | {"kernels": kernel_revision()}
    return {
        "device": {"type": environment.get("device"), **device},
        "driver": driver,
        "clock_policy": dict(clock_policy),
        "method": METHOD,
    }


class RoofFolder:
    """One file a device; newer roofs replace older ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, known: Mapping[str, Any]) -> Path:
        """Where the roofs of a device lie."""
        device = known["device"]
        text = json.dumps(device, sort_keys=True, default=str)
        name = str(device.get("name") or device.get("cpu_model") or "device")
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
        return self.folder / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def save(self, known: Mapping[str, Any], roofs: Mapping[str, Any], sheet: Hardware | None = None) -> str | None:
        """Store roofs; returns why they were not, if so: a busy machine, figures that can't be true, no folder.

        `roofs` holds `measured_at` and `gemm_flops_per_s` by dtype, as `MeasuredRoofs.to_dict` gives them.
        """
        marks = roofs.get("marks") or ()
        faults = measured_faults(roofs, sheet)
        if marks or faults:
            return f"not stored: {'; '.join((*marks, *faults))}"
        file = self.file(known)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as part:
                json.dump({"conditions": known, "roofs": roofs}, part, allow_nan=False)
            os.replace(part.name, file)
        except OSError as error:
            return f"not stored: {file}: {error.strerror or error}"
        return None

    def load(
        self,
        known: Mapping[str, Any],
        dtypes: Sequence[str],
        *,
        shapes: Sequence[tuple[int, int]] = (),
        skinny_dtype: str | None = None,
        kernel: str | None = None,
        sheet: Hardware | None = None,
    ) -> Found:
        """Roofs for all of `dtypes` (and a staircase of each of `shapes` in `skinny_dtype`), or why there are none.

        `kernel` (cpu or torch) says whose matmuls the staircase must hold; None: anyone's.
        """
        file = self.file(known)
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            then, roofs = stored["conditions"], stored["roofs"]
            when, points = str(roofs["measured_at"]), roofs.get("skinny", [])
            held = {
                (point["n"], point["k"])
                for point in points
                if skinny_dtype in (None, point["dtype"]) and kernel in (None, point["kernel"])
            }
        except FileNotFoundError:
            return Found(None, "no measured roof of this device is stored")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return Found(None, f"the stored roof can't be read ({file.name}: {error})")
        changed = [
            text for key in ("driver", "clock_policy", "method") for text in _changes(key, then.get(key), known[key])
        ]
        if changed:
            return Found(None, f"the roof measured {when} has expired: {'; '.join(changed)}")
        faults = measured_faults(roofs, sheet)
        if faults:
            return Found(None, f"the roof measured {when} can't be true: {'; '.join(faults)}")
        absent = [dtype for dtype in dtypes if dtype not in roofs["gemm_flops_per_s"]]
        if absent:
            return Found(None, f"the roof measured {when} has no {', '.join(absent)}")
        if missing := [shape for shape in shapes if shape not in held]:
            return Found(None, f"the roof measured {when} has no matmul of n, k = {missing[0][0]}, {missing[0][1]}")
        return Found(roofs, None, when)


def _changes(key: str, then: Any, now: Any) -> list[str]:
    """What differs, field by field."""
    if then == now:
        return []
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return [f"{name}: {then.get(name)} -> {now.get(name)}" for name in names]
    return [f"{key}: {then} -> {now}"]
