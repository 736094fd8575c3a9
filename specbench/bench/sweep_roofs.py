"""The roofs of a sweep: those of its folder, else those stored for this machine, else measured now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench.bench.ceilings import MeasuredRoofs, cache_bytes, measure_roofs
from specbench.bench.ceilings_clock import clock_policy
from specbench.bench.ceilings_skinny import TORCH, TORCH_DTYPES, SkinnyPoint, measure_staircase, own_cpu_kernel
from specbench.bench.clock import Clock
from specbench.bench.devices import device_of, resolve_backend
from specbench.bench.roof_measure import LLC_UNKNOWN, linear_shapes
from specbench.bench.roof_store import RoofFolder, conditions
from specbench.errors import InputError
from specbench.roofline.hardware import hardware, identify_environment
from specbench.roofline.roofs import clock_adjusted, measured_faults
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import TargetSpec

ROOF_DTYPES = ("fp32", "bf16")
GPU_ROOF_DTYPES = ("fp32", "fp16", "bf16")
GPU_SKINNY_SHAPE = (14336, 4096)
"""A linear layer of an 8B model."""
ROOFS_S, STAIRCASE_S = 5.0, 10.0


@dataclass(frozen=True)
class Linears:
    """The linear layers that a sweep's target verifies with: kernel (cpu or torch), dtype, and every (n, k)."""

    kernel: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]


def target_linears(target: TargetSpec, spec: ModelSpec) -> Linears | None:
    """Those of a target; None where no staircase of it can be measured (fp64, experts)."""
    if target.dtype not in TORCH_DTYPES:
        return None
    try:
        shapes = linear_shapes(spec)
    except InputError:
        return None
    return Linears("cpu" if resolve_backend(target) == "cpu" else "torch", target.dtype, shapes)


def measure_device(tell: Callable[[str], None], device: str = "cpu", linears: Linears | None = None) -> MeasuredRoofs:
    """The device's roofs, with the target's own linear layers among the candidates: a roof is what anything reached."""
    threads = torch.get_num_threads()
    on = torch.device(device)

    def stairs(clock: Clock) -> tuple[SkinnyPoint, ...]:
        assert linears is not None
        tell("linear layers of the target")
        kernel = own_cpu_kernel(threads) if linears.kernel == "cpu" else TORCH
        cache = cache_bytes(on) or LLC_UNKNOWN
        return measure_staircase(
            clock, on, linears.dtype, linears.shapes, budget_s=STAIRCASE_S, cache_bytes=cache, kernel=kernel
        )

    skinny = stairs if linears is not None else None
    if on.type == "cuda":
        return measure_roofs(
            device,
            dtypes=GPU_ROOF_DTYPES,
            skinny_shape=GPU_SKINNY_SHAPE,
            budget_s=ROOFS_S,
            progress=tell,
            skinny=skinny,
        )
    from specbench.engine.ops.cpu import PackedLinear

    return measure_roofs(
        *("cpu",),
        dtypes=ROOF_DTYPES,
        make_linear=lambda weight: PackedLinear(weight, threads),
        budget_s=ROOFS_S,
        progress=tell,
        skinny=skinny,
    )


def roofs_of_sweep(
    kept: Mapping[str, Any] | None,
    environment: Mapping[str, Any],
    measure: Callable[[Linears | None], MeasuredRoofs] | None,
    *,
    linears: Linears | None = None,
    store: RoofFolder | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The manifest's `roofs`: measured, datasheet, clock-adjusted, H100, and where the measured one is from.

    `kept` are the roofs of the folder's own manifest, if this is the same machine; `measure` None means that nothing
    will be measured here. A roof whose figures can't be true is measured again.
    """
    match = identify_environment(environment)
    if kept and kept.get("measured"):
        faults = measured_faults(kept["measured"], match.hardware)
        if not faults:
            return dict(kept)
        tell(f"the folder's roof can't be true: {'; '.join(faults)}")
    measured, told = None, "nothing was measured"
    if measure is not None:
        measured, told = _stored_or_measured(environment, measure, linears, store, tell)
    clock = (measured or {}).get("clock_hz")
    adjusted = clock_adjusted(match.hardware, clock) if match.hardware is not None and clock else None
    return {
        "measured": measured,
        "measured_told": told,
        "datasheet": match.hardware.to_dict() if match.hardware is not None else None,
        "datasheet_reason": match.reason,
        "clock_adjusted": adjusted.to_dict() if adjusted is not None else None,
        "h100": hardware("h100-sxm").to_dict(),
    }


def raised(kept: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any] | None:
    """`kept` with the figures that a second measurement put higher, and a note; None where no limit rose.

    Memory that other guests share gives more in one hour than in another. A cell above the roof says either that work
    was skipped or that the roof was taken in a slow hour; only a roof taken beside the cell can tell.
    """
    rates = ("bandwidth_bytes_per_s", "bandwidth_limit_bytes_per_s")
    tables = ("gemm_flops_per_s", "flops_limit_per_s")
    higher: dict[str, Any] = {name: max(kept[name], again[name]) for name in rates}
    for name in tables:
        higher[name] = {
            dtype: max((rate for rate in (value, again[name].get(dtype)) if rate is not None), default=None)
            for dtype, value in kept[name].items()
        }
    limits = ("bandwidth_limit_bytes_per_s", "flops_limit_per_s")
    if all(higher[name] == kept[name] for name in limits):
        return None
    note = f"raised by a second measurement of {again['measured_at']}, taken when a cell was above the first"
    return {**kept, **higher, "notes": [*kept.get("notes", ()), note]}


def _stored_or_measured(
    environment: Mapping[str, Any],
    measure: Callable[[Linears | None], MeasuredRoofs],
    linears: Linears | None,
    store: RoofFolder | None,
    tell: Callable[[str], None],
) -> tuple[dict[str, Any], str]:
    sheet = identify_environment(environment).hardware
    known = conditions(environment, clock_policy(environment)) if store is not None else {}
    if store is not None:
        dtypes = GPU_ROOF_DTYPES if environment.get("device") == "cuda" else ROOF_DTYPES
        wanted: dict[str, Any] = {}
        if linears is not None:
            wanted = {"shapes": linears.shapes, "skinny_dtype": linears.dtype, "kernel": linears.kernel}
        found = store.load(known, dtypes, sheet=sheet, **wanted)
        if found.roofs is not None:
            tell(f"roofs of this device: {found.told}")
            return {**found.roofs, "notes": [*found.roofs.get("notes", ()), found.told]}, found.told
        tell(f"measuring the roofs of this device: {found.told}")
    else:
        tell("measuring the roofs of this device")
    measured = measure(linears).to_dict()
    refused = store.save(known, measured, sheet) if store is not None else None
    return measured, f"measured {measured['measured_at']} by this run{f'; {refused}' if refused else ''}"


def sweep_linears(targets: Sequence[TargetSpec], read: Callable[[TargetSpec], ModelSpec]) -> Linears | None:
    """Those of a sweep's one target; None where it has several, or runs Triton's interpreter."""
    distinct = list(dict.fromkeys(targets))
    if len(distinct) != 1 or (resolve_backend(distinct[0]) == "triton" and device_of("triton") == "cpu"):
        return None
    return target_linears(distinct[0], read(distinct[0]))
