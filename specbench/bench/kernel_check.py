"""One op on one case: its error against the float64 reference, and on a GPU its time with a cold L2 cache.

A time is given only where the outputs were right, before the timed runs and after them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.bench.clock import Clock
from specbench.roofline.cost import Cost
from specbench.roofline.model import Roof, roof_fraction

if TYPE_CHECKING:
    from specbench_kernels.op import Case, Op

CHUNK = 1 << 24
FLUSH_BYTES = 1 << 30
BATCH = 10
"""Timed calls that are queued before the host waits."""
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Deviation:
    """How far outputs are from the reference. `share` is the worst error over what the tolerance allows there (None
    where nothing is allowed); `wrong` says what breaks the tolerance, None where nothing does."""

    max_abs: float
    rms: float
    share: float | None
    wrong: str | None


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls: median, and the 10th and 90th percentile; `how` they were launched."""

    median_s: float
    low_s: float
    high_s: float
    repetitions: int
    how: str


@dataclass(frozen=True)
class KernelRow:
    """One op on one case. `status`: ok, wrong (with the reason), or failed (with the error)."""

    op: str
    case: str
    dtype: str
    device: str
    status: str
    reason: str | None = None
    deviation: Deviation | None = None
    timing: Timing | None = None
    flops: float | None = None
    bytes: float | None = None
    roof_share: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.timing.median_s if self.timing and self.bytes is not None else None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.timing.median_s if self.timing and self.flops is not None else None


def dtype_name(dtype: torch.dtype) -> str:
    """Short: bf16; other dtypes by torch's name."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _pieces(found: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(index of its first element, found, wanted) in float64, piece by piece: caches do not fit as a whole."""
    flat = found.reshape(-1), wanted.reshape(-1)
    for start in range(0, len(flat[0]), CHUNK):
        ours, theirs = (tensor[start : start + CHUNK].to(wanted.device) for tensor in flat)
        if ours.itemsize == 1 and ours.is_floating_point():
            ours = ours.float()
        if theirs.itemsize == 1 and theirs.is_floating_point():
            theirs = theirs.float()
        yield start, ours.double(), theirs.double()


def compare(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: tuple[float, float]
) -> Deviation:
    """`found` against `wanted`, by name. Floats may differ by abs + rel * |wanted|; integers and booleans not at all.

    A NaN or an infinity must stand where the reference has the same. Shapes and names must be equal.
    """
    if found.keys() != wanted.keys():
        return Deviation(0.0, 0.0, None, f"outputs {sorted(found)} instead of {sorted(wanted)}")
    max_abs = squares = 0.0
    count, share, wrong = 0, 0.0, []
    relative, absolute = tolerance
    for name, theirs in wanted.items():
        ours = found[name]
        if ours.shape != theirs.shape:
            wrong.append(f"{name} has shape {list(ours.shape)} instead of {list(theirs.shape)}")
            continue
        exact = not ours.is_floating_point()
        num_bad, first = 0, None
        for start, a, b in _pieces(ours, theirs):
            same = (a == b) | (a.isnan() & b.isnan())
            error = torch.where(same, 0.0, (a - b).abs())
            allowed = torch.zeros_like(b) if exact else absolute + relative * b.abs()
            bad = ~same & ~(error.isfinite() & (error <= allowed))
            finite = error[error.isfinite()]
            max_abs = max(
                max_abs, float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if len(error) else 0.0
            )
            squares, count = squares + float(finite.square().sum()), count + len(error)
            if not exact and absolute + relative > 0:
                ratio = error / allowed.clamp(min=torch.finfo(torch.float64).tiny)
                share = max(share, float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))
            if bool(bad.any()) and first is None:
                at = int(bad.nonzero()[0])
                first = (start + at, float(a[at]), float(b[at]))
            num_bad += int(bad.sum())
        if first is not None:
            place = [int(index) for index in torch.unravel_index(torch.tensor(first[0]), theirs.shape)]
            text = f"{name}{place} is {first[1]:.6g} instead of {first[2]:.6g}"
            wrong.append(f"{text} ({num_bad} of {theirs.numel()} are wrong)")
    within = share if tolerance != (0.0, 0.0) else None
    return Deviation(max_abs, (squares / count) ** 0.5 if count else 0.0, within, "; ".join(wrong) or None)


def check(op: Op, case: Case, device: torch.device, seed: int) -> KernelRow:
    """Run `op` once and compare. What the op raises becomes a row that failed."""
    return _guarded(op, case, device, lambda: _checked(op, case, device, seed))


def _checked(op: Op, case: Case, device: torch.device, seed: int) -> KernelRow:
    given = op.inputs(case, device, seed)
    deviation = compare(op.run(given), op.reference(given), op.tolerance(case))
    return _row(op, case, device, deviation)


def _row(op: Op, case: Case, device: torch.device, deviation: Deviation) -> KernelRow:
    status = "ok" if deviation.wrong is None else "wrong"
    return KernelRow(op.name, case.name, dtype_name(case.dtype), device.type, status, deviation.wrong, deviation)


def _guarded(op: Op, case: Case, device: torch.device, call: Callable[[], KernelRow]) -> KernelRow:
    try:
        return call()
    except Exception as error:  # one op's failure is its row; the other ops go on
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return KernelRow(op.name, case.name, dtype_name(case.dtype), device.type, "failed", text)


def time_cold(
    clock: Clock,
    call: Callable[[], object],
    flush: Callable[[], object],
    *,
    budget_s: float,
    least: int = 20,
    most: int = 500,
) -> list[float]:
    """Seconds of each call. `flush` runs before every one, outside the timed span; on a device with events it also
    keeps the device busy while the host queues the call, so that the launch is not part of the time."""
    flush()
    call()
    durations: list[float] = []
    while len(durations) < least or (len(durations) < most and sum(durations) < budget_s):
        marks = []
        for _ in range(BATCH):
            flush()
            start = clock.mark()
            call()
            marks.append((start, clock.mark()))
        durations += [clock.elapsed_s(start, end) for start, end in marks]
    return durations


def summary(durations: list[float], how: str) -> Timing:
    """Median and spread of at least two durations."""
    tenths = statistics.quantiles(durations, n=10, method="inclusive")
    return Timing(statistics.median(durations), tenths[0], tenths[-1], len(durations), how)


class ColdCache:
    """Reads a buffer far larger than the L2 cache, so that nothing of an op's inputs stays there. It reads rather than
    writes: lines left dirty would be written back during the next call, at its cost."""

    def __init__(self, device: torch.device) -> None:
        free = int(torch.cuda.mem_get_info(device)[0])
        self._buffer = torch.zeros(min(FLUSH_BYTES, free // 8) // 4, device=device)
        self._sum = torch.zeros((), device=device)

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)


def graphed(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], str]:
    """`call` as a CUDA graph, which a host replays in one launch; `call` itself, saying why, where it has none."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return call, "launched one by one; no CUDA graph: " + str(error).strip().partition("\n")[0][:120]
    return graph.replay, "CUDA graph"


def measure(
    op: Op,
    case: Case,
    device: torch.device,
    *,
    seed: int,
    clock: Clock,
    flush: Callable[[], object],
    roof: Roof | None,
    budget_s: float,
    launch: Callable[[Callable[[], object], torch.device], tuple[Callable[[], object], str]] = graphed,
) -> KernelRow:
    """Check `op` on `case`, time it, check it again. `roof` None (no measured peak of the dtype) leaves no share."""

    def call() -> KernelRow:
        given = op.inputs(case, device, seed)
        wanted, tolerance = op.reference(given), op.tolerance(case)
        before = compare(op.run(given), wanted, tolerance)
        if before.wrong is not None:
            return _row(op, case, device, before)
        replay, how = launch(lambda: op.run(given), device)
        timing = summary(time_cold(clock, replay, flush, budget_s=budget_s), how)
        after = compare(op.run(given), wanted, tolerance)
        if after.wrong is not None:
            return _row(op, case, device, after)
        told = op.cost(case)
        cost = Cost(told.flops, told.bytes)
        share = roof_fraction(cost, timing.median_s, roof) if roof is not None else None
        names = (op.name, case.name, dtype_name(case.dtype), device.type)
        return KernelRow(*names, "ok", None, before, timing, cost.flops, cost.bytes, share)

    row = _guarded(op, case, device, call)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row
