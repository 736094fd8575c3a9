"""Skinny matmuls x [m, k] · w [n, k]^T: what a verify step is made of, measured over m at a model's own n and k."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from specbench.bench.clock import Clock, time_call

SKINNY_M = (1, 2, 4, 8, 16, 32, 64, 128)
STAIRCASE_M = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512),
)  # fmt: skip
"""Both sides of the usual edges of a tile (16, 32, 64, 128, 256 rows), and enough between them to see a slope."""
STACK_BYTES, STACK_LAYERS = 8 << 20, 256
"""Weights that one timed call streams, so that launching it is a small part of its time; and layers at most."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOO_LONG = "it would take more than its time budget"
Linear = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class SkinnyPoint:
    """[m, k] x [k, n]: time and rates of one verify-like matmul; None with a reason where the budget was too small.

    `kernel` is cpu (this project's own) or torch.
    """

    m: int
    n: int
    k: int
    dtype: str
    time_s: float | None
    flops_per_s: float | None
    bytes_per_s: float | None
    reason: str | None = None
    kernel: str = "torch"


@dataclass(frozen=True)
class Kernel:
    """Who multiplies: `stack` turns weights [c, n, k] into a call that runs all c layers on one x [m, k]."""

    name: str
    stack: Callable[[torch.Tensor], Linear]
    activations: torch.dtype | None = None
    """Of x; None: that of the weights."""


def torch_stack(weights: torch.Tensor) -> Linear:
    """torch's own linear layer over each weight of [c, n, k]."""
    layers = list(weights)

    def run(x: torch.Tensor) -> None:
        for weight in layers:
            torch.nn.functional.linear(x, weight)

    return run


TORCH = Kernel("torch", torch_stack)


def own_cpu_kernel(threads: int) -> Kernel:
    """The engine's CPU kernels, on which backend cpu verifies; they take fp32 activations."""
    from specbench.engine.ops.cpu import PackedLinear

    return Kernel("cpu", lambda weights: PackedLinear(weights, threads), torch.float32)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random normals; 1 Mi of them, tiled, since a generator is slower than the memory."""
    count = 1
    for length in shape:
        count *= length
    tile = torch.randn(min(count, 1 << 20), device=device).to(dtype)
    return tile.repeat(-(-count // len(tile)))[:count].view(shape)


def make_point(m: int, n: int, k: int, dtype: str, time_s: float, kernel: str) -> SkinnyPoint:
    """Rates from a time; bytes are the weight once and the activations in and out, all in `dtype`."""
    moved = TORCH_DTYPES[dtype].itemsize * (n * k + m * (n + k))
    return SkinnyPoint(m, n, k, dtype, time_s, 2.0 * m * n * k / time_s, moved / time_s, None, kernel)


def _ring(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], cache_bytes: int, kernel: Kernel
) -> tuple[Iterator[Linear], int]:
    """Stacks of weights by turns, more than the cache holds, so that each streams from memory as a model's do.

    Returns them and the layers of each.
    """
    n, k = shape
    size = n * k * dtype.itemsize
    layers = min(max(1 if device.type == "cpu" else 10, STACK_BYTES // size), STACK_LAYERS)
    if device.type != "cpu" and layers * size > 1 << 30:
        layers = max(1, (1 << 30) // size)
    stacks = max(2, 2 * cache_bytes // (layers * size) + 1)
    made = [kernel.stack(random_tensor((layers, n, k), dtype, device)) for _ in range(stacks)]
    return itertools.cycle(made), layers


def measure_staircase(
    clock: Clock,
    device: torch.device,
    dtype: str,
    shapes: Sequence[tuple[int, int]],
    *,
    rows: Sequence[int] = STAIRCASE_M,
    budget_s: float,
    cache_bytes: int,
    kernel: Kernel = TORCH,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[SkinnyPoint, ...]:
    """Time of one layer of each (n, k) in `shapes` over `rows`, in about `budget_s` seconds.

    Each point is a median of at least two calls behind a warm-up. An m whose time, judged from the one before, would
    not fit, and what is left when one and a half budgets are spent, have no time but a reason.
    """
    begin = now()
    share = budget_s / max(1, len(shapes) * len(rows))
    points: list[SkinnyPoint] = []
    for n, k in dict.fromkeys(shapes):
        turn, layers = _ring(device, TORCH_DTYPES[dtype], (n, k), cache_bytes, kernel)
        last: tuple[int, float] | None = None
        for m in rows:
            late = now() - begin > 1.5 * budget_s
            if late or (last is not None and last[1] * m / last[0] > 4 * share):
                points.append(SkinnyPoint(m, n, k, dtype, None, None, None, TOO_LONG, kernel.name))
                continue
            x = random_tensor((m, k), kernel.activations or TORCH_DTYPES[dtype], device)
            time_s = _median(clock, turn, x, share)
            last = (m, time_s)
            points.append(make_point(m, n, k, dtype, time_s / layers, kernel.name))
    return tuple(points)


def _median(clock: Clock, turn: Iterator[Linear], x: torch.Tensor, share: float) -> float:
    """Seconds of one call: the median of 2 to 9, until `share` seconds are spent, behind one warm-up call."""
    time_call(clock, lambda: next(turn)(x))
    durations: list[float] = []
    while len(durations) < 2 or (len(durations) < 9 and sum(durations) < share):
        durations.append(time_call(clock, lambda: next(turn)(x)))
    return statistics.median(durations)
