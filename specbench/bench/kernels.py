"""`specbench kernels`: every kernel against its reference and its roof, or compiled ahead of time for another GPU.

specbench kernels                                    # on a GPU: errors, times, GB/s, TFLOP/s, share of the roof
TRITON_INTERPRET=1 specbench kernels --op rmsnorm    # without one: the small cases in Triton's interpreter
specbench kernels --compile-only --arch sm_90        # registers, shared memory, spills, tensor-core instructions
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specbench.bench.kernel_check import ColdCache, KernelRow, check, dtype_name, measure
from specbench.bench.kernel_tables import (
    KERNEL_COLUMNS,
    RESOURCE_COLUMNS,
    kernel_cells,
    kernel_json,
    markdown_table,
    resource_cells,
    resource_json,
    terminal_table,
)
from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.roofline.model import Roof

if TYPE_CHECKING:
    from specbench_kernels.aot import Resources
    from specbench_kernels.op import Case, Op

    from specbench.bench.ceilings import MeasuredRoofs

console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
BUDGET_S = 0.4
"""Device time of the timed calls of one case."""


@dataclass(frozen=True)
class Outputs:
    """Where results go beside the terminal."""

    json: Path | None = None
    markdown: Path | None = None

    def write(self, data: dict[str, Any], text: str) -> None:
        for file, content in ((self.json, json.dumps(data, indent=1, allow_nan=False) + "\n"), (self.markdown, text)):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")


class _Bar:
    """A bar on a terminal, else one line as each thing ends."""

    def __init__(self, what: str, total: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self._progress = Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._progress.add_task(what, total=total)
        self._done, self._total = 0, total

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def now(self, text: str) -> None:
        self._progress.update(self._task, description=text[:60].ljust(60))

    def done(self, text: str) -> None:
        self._done += 1
        self._progress.advance(self._task)
        if not console.is_terminal:
            console.print(f"[{self._done}/{self._total}] {text}", markup=False, soft_wrap=True)


def kernels(
    ops: Sequence[str],
    *,
    compile_only: bool,
    archs: Sequence[str],
    check_only: bool,
    jobs: int | None,
    seed: int,
    outputs: Outputs,
    command: str = "specbench kernels",
) -> ExitCode:
    """The command. Exit 1 where a kernel is wrong, fails, or breaks what it promises of its compiled form."""
    chosen = tuple(ops) or _registry().names()
    for name in chosen:
        _find(name)
    if compile_only:
        return _compile(chosen, archs, jobs or os.cpu_count() or 1, outputs, command)
    if archs or jobs:
        raise InputError("--arch and --jobs belong to --compile-only", remedy="add --compile-only, or drop them")
    device = _device()
    if check_only or device.type == "cpu":
        rows = check_small(chosen, device, seed)
        return _finish(rows, None, device, seed, outputs, command)
    roofs = _measured_roofs(device)
    rows = measure_bench(chosen, device, seed, by_dtype(roofs))
    return _finish(rows, roofs, device, seed, outputs, command)


def _registry() -> Any:
    from specbench_kernels import registry

    try:
        registry.require_triton()
    except registry.KernelsUnavailableError:
        raise InvalidEnvironmentError("triton is not installed", remedy=registry.REMEDY) from None
    return registry


def _find(name: str) -> Op:
    try:
        op: Op = _registry().find(name)
    except (KeyError, ImportError) as error:
        message = error.args[0] if isinstance(error, KeyError) else f"{name}: {error}"
        known = f"one of {', '.join(_registry().names())}, or package.module:ATTRIBUTE"
        raise InputError(str(message), key="--op", remedy=known) from None
    return op


def _device() -> torch.device:
    """The GPU; the CPU where the interpreter was asked for. Raises InvalidEnvironmentError where nothing can run."""
    from specbench_kernels.checks import interpreted

    if interpreted():
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise InvalidEnvironmentError(
        "there is no GPU that could run the kernels",
        remedy="run it on a machine with a CUDA GPU; without one, set TRITON_INTERPRET=1 to check the small cases "
        "against their references, or use --compile-only",
    )


def _each(
    ops: Sequence[str], cases: Callable[[Op], list[Case]], what: str, run: Callable[[Op, Case], KernelRow]
) -> list[KernelRow]:
    work = [(op, case) for op in map(_find, ops) for case in cases(op)]
    rows = []
    with _Bar(what, len(work)) as bar:
        for op, case in work:
            bar.now(f"{op.name} · {case.name}")
            rows.append(run(op, case))
            said = rows[-1].status if rows[-1].reason is None else f"{rows[-1].status}: {rows[-1].reason}"
            bar.done(f"{op.name} · {case.name}: {said}")
    return rows


def check_small(ops: Sequence[str], device: torch.device, seed: int) -> list[KernelRow]:
    """The small cases of `ops` against their references, without times."""
    return _each(ops, lambda op: op.small(), "checking", lambda op, case: check(op, case, device, seed))


def check_bench(ops: Sequence[str], device: torch.device, seed: int) -> list[KernelRow]:
    """The bench cases of `ops` against their references, without times; that they are compiled afterwards is the use
    of it before they are measured."""
    return _each(ops, lambda op: op.bench(), "checking", lambda op, case: check(op, case, device, seed))


def measure_bench(ops: Sequence[str], device: torch.device, seed: int, roofs: Mapping[str, Roof]) -> list[KernelRow]:
    """The bench cases of `ops`: checked, timed with a cold L2 cache, and held against `roofs`, by dtype."""
    from specbench.bench.clock import clock_for

    clock, flush = clock_for(device), ColdCache(device)

    def run(op: Op, case: Case) -> KernelRow:
        return measure(
            *(op, case, device),
            seed=seed,
            clock=clock,
            flush=flush,
            roof=roofs.get(dtype_name(case.dtype)),
            budget_s=BUDGET_S,
        )

    return _each(ops, lambda op: op.bench(), "measuring", run)


def by_dtype(roofs: MeasuredRoofs) -> dict[str, Roof]:
    """The measured roof of each dtype whose matmul was measured."""
    return {name: Roof(reading.median, roofs.bandwidth_bytes_per_s) for name, reading in roofs.gemm.items()}


def _measured_roofs(device: torch.device) -> MeasuredRoofs:
    from specbench.bench.ceilings import measure_roofs

    with _Bar("measuring the roofs of this device", 1) as bar:
        roofs = measure_roofs(
            device, dtypes=("fp32", "fp16", "bf16"), skinny_shape=(4096, 4096), budget_s=5.0, progress=bar.now
        )
        bar.done(f"roofs: {roofs.bandwidth_bytes_per_s / 1e9:,.0f} GB/s")
    return roofs


def _finish(
    rows: list[KernelRow], roofs: MeasuredRoofs | None, device: torch.device, seed: int, outputs: Outputs, command: str
) -> ExitCode:
    from specbench.bench.environment import environment

    described = environment(device)
    where = described["device_name"] if device.type == "cuda" else "Triton's interpreter on the CPU"
    lines = [kernel_cells(row) for row in rows]
    bad = [row for row in rows if row.status != "ok"]
    title = f"{len(rows)} cases on {where}, inputs of seed {seed}"
    console.print(terminal_table(title, KERNEL_COLUMNS, lines))
    told = f"{len(rows) - len(bad)} of {len(rows)} cases are right"
    if roofs is not None:
        peaks = ", ".join(f"{reading.median / 1e12:.1f} TFLOP/s {dtype}" for dtype, reading in roofs.gemm.items())
        told += f"; measured roofs: {roofs.bandwidth_bytes_per_s / 1e9:,.0f} GB/s, {peaks}"
        told += "; times with a cold L2 cache"
    console.print(told, markup=False)
    data = {
        "command": command,
        "seed": seed,
        "environment": described,
        "roofs": roofs.to_dict() if roofs is not None else None,
        "rows": [kernel_json(row) for row in rows],
    }
    outputs.write(data, f"# Kernels\n\n{title}. {told}.\n\n{markdown_table(KERNEL_COLUMNS, lines)}")
    return ExitCode.FAILED if bad else ExitCode.DONE


def _compile(ops: Sequence[str], archs: Sequence[str], jobs: int, outputs: Outputs, command: str) -> ExitCode:
    import triton
    from specbench_kernels import aot

    try:
        numbers = list(dict.fromkeys(aot.parse_arch(arch) for arch in archs or ("sm_90",)))
    except ValueError as error:
        raise InputError(str(error), key="--arch", remedy="such as: --arch sm_90") from None
    try:
        work = aot.jobs_of(ops, numbers)
        with _Bar("compiling", len(work)) as bar:

            def done(result: Resources) -> None:
                bar.done(f"{result.op} · {result.case} · sm_{result.arch}: {result.verdict}")

            results = aot.compile_all(work, processes=jobs, cache=aot.default_cache(), done=done)
    except RuntimeError as error:
        raise InvalidEnvironmentError(str(error), remedy=f"env -u TRITON_INTERPRET {command}") from None
    lines = [resource_cells(result) for result in results]
    bad = [result for result in results if result.faults]
    with_triton = f"triton {triton.__version__}"
    console.print(terminal_table(f"{len(results)} compilations by {with_triton}", RESOURCE_COLUMNS, lines))
    for result in bad:
        if result.error is not None:
            console.print(f"{result.op} · {result.case} · sm_{result.arch}: {result.error}", markup=False)
    console.print(f"{len(results) - len(bad)} of {len(results)} compilations keep what they promise", markup=False)
    data = {
        "command": command,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "rows": [resource_json(result) for result in results],
    }
    outputs.write(data, _resource_page(lines, results, with_triton, command))
    return ExitCode.FAILED if bad else ExitCode.DONE


def _resource_page(lines: Sequence[Sequence[str]], results: Sequence[Resources], with_triton: str, command: str) -> str:
    """The page docs/kernels.md."""
    spilling = sum(result.spill_store_bytes + result.spill_load_bytes > 0 for result in results)
    dots = [result for result in results if result.uses_dot]
    seen = sum(result.num_tensor_core > 0 for result in dots)
    return f"""# What the kernels use

Every kernel, compiled ahead of time for each architecture, with what the compiler reports. Made by

    {command}

with {with_triton}, and not by hand. {len(results)} compilations; {spilling} of them spill; tensor-core instructions
are present in {seen} of the {len(dots)} whose `tl.dot` must use them.

- `registers` are a thread's; `shared B` are bytes of shared memory a block; `stack B` and `spill st/ld B` are bytes of
  stack, spill stores and spill loads a thread, as `ptxas -v` tells them.
- `tensor cores` counts instructions in the PTX: `mma` (mma.sync), `wgmma` (Hopper), `tcgen05` (Blackwell).
- `verdict` is `ok` where nothing spills that must not, tensor-core instructions stand where they were promised, and
  shared memory fits the architecture. What an architecture can't run at all (fp8 before sm_89) has no line for it.

{markdown_table(RESOURCE_COLUMNS, lines)}"""


def shown_command(arguments: Sequence[str]) -> str:
    """The command line as a person would type it, for the files it makes."""
    return shlex.join(["specbench", *arguments])
