"""What `specbench roofline --measure` measures: bandwidth by cache level, matmuls by dtype, the staircase, the clock.

specbench roofline --measure --model smollm2-135m
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specbench.bench.ceilings import (
    GPU_BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    MeasuredRoofs,
    Reading,
    buffer_bytes,
    cache_bytes,
    free_bytes,
    measure_roofs,
)
from specbench.bench.ceilings_bandwidth import (
    BandwidthPoint,
    CacheLevel,
    by_level,
    cpu_cache_levels,
    gpu_cache_levels,
    measure_cpu_levels,
    measure_gpu_levels,
    working_sets,
)
from specbench.bench.ceilings_clock import cpu_clock_hz, gpu_clock_hz
from specbench.bench.ceilings_skinny import (
    STAIRCASE_M,
    TORCH,
    Kernel,
    SkinnyPoint,
    measure_staircase,
    own_cpu_kernel,
)
from specbench.bench.clock import Clock, clock_for
from specbench.roofline.shapes import ModelSpec
from specbench.roofline.staircase import model_linears

TORCH_ROWS = (1, 4, 16, 64, 256)
LLC_UNKNOWN = 64 << 20


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Seconds for each part; together they keep `--measure` under a minute."""

    roofs_s: float = 5.0
    levels_s: float = 5.0
    staircase_s: float = 16.0
    torch_s: float = 4.0


def linear_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(n, k) of every linear map of the model, each once."""
    return tuple(dict.fromkeys((one.n, one.k) for one in model_linears(spec)))


def own_kernel(device: torch.device) -> Kernel:
    """Whose matmuls verify runs on: the engine's own on a CPU, the library's on a GPU."""
    return own_cpu_kernel(torch.get_num_threads()) if device.type == "cpu" else TORCH


def measure_everything(
    device: torch.device | str,
    spec: ModelSpec,
    *,
    dtypes: Sequence[str],
    skinny_dtype: str = "bf16",
    budgets: Budgets | None = None,
    rows: Sequence[int] = STAIRCASE_M,
    uuid: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> MeasuredRoofs:
    """All roofs of `device`, with the staircase at the shapes of `spec`. Raises InputError for a shape with experts."""
    device = torch.device(device)
    budgets = budgets or Budgets()
    shapes, cache = linear_shapes(spec), cache_bytes(device) or LLC_UNKNOWN
    clock = clock_for(device)

    def stairs(clock: Clock) -> tuple[SkinnyPoint, ...]:
        tell(f"linear layers of {spec.name}, M = 1 to {max(rows)}")
        return measure_staircase(
            *(clock, device, skinny_dtype, shapes),
            rows=rows,
            budget_s=budgets.staircase_s,
            cache_bytes=cache,
            kernel=own_kernel(device),
        )

    roofs = measure_roofs(
        device, dtypes=dtypes, budget_s=budgets.roofs_s / 0.7, clock=clock, progress=tell, skinny=stairs
    )
    tell("bandwidth over working-set sizes")
    levels, points = _bandwidth(clock, device, budgets.levels_s)
    beside: tuple[SkinnyPoint, ...] = ()
    if device.type == "cpu":
        tell("the same linear layers by torch")
        few = [m for m in rows if m in TORCH_ROWS]
        beside = measure_staircase(
            clock, device, skinny_dtype, shapes, rows=few, budget_s=budgets.torch_s, cache_bytes=cache
        )
    tell("clock under load")
    found, how = cpu_clock_hz(torch.get_num_threads()) if device.type == "cpu" else gpu_clock_hz(device, uuid)
    return dataclasses.replace(
        raised(roofs, points, cache),
        model=spec.name,
        skinny_torch=beside,
        bandwidth=points,
        levels=by_level(points, levels),
        clock_hz=found,
        clock_how=how,
    )


def _bandwidth(
    clock: Clock, device: torch.device, budget_s: float
) -> tuple[tuple[CacheLevel, ...], tuple[BandwidthPoint, ...]]:
    threads = torch.get_num_threads()
    if device.type == "cpu":
        levels = cpu_cache_levels(threads)
        largest, _ = buffer_bytes(cache_bytes(device), free_bytes(device), MIN_BUFFER_BYTES)
        return levels, measure_cpu_levels(working_sets(levels, largest), threads, budget_s)
    levels = gpu_cache_levels(cache_bytes(device))
    largest, _ = buffer_bytes(cache_bytes(device), free_bytes(device), GPU_BUFFER_BYTES)
    return levels, measure_gpu_levels(clock, device, working_sets(levels, largest, 1 << 21), budget_s)


def raised(roofs: MeasuredRoofs, points: Sequence[BandwidthPoint], cache: int) -> MeasuredRoofs:
    """The roofs, raised where a working set of at least four times the last-level cache streamed faster."""
    changes: dict[str, Any] = {}
    for kernel in ("read", "copy", "triad"):
        far = [point for point in points if point.kernel == kernel and point.working_set_bytes >= 4 * cache]
        best = max(far, key=lambda point: point.bytes_per_s, default=None)
        known: Reading = getattr(roofs, kernel)
        if best is not None and best.bytes_per_s > known.median:
            how = f"working set of {best.working_set_bytes >> 20} MiB"
            changes[kernel] = Reading(best.bytes_per_s, max(known.best, best.bytes_per_s), best.repetitions, how)
    return dataclasses.replace(roofs, **changes)
