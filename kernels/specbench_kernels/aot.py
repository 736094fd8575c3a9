"""Kernels compiled ahead of time, for GPUs that this machine need not have, and what the compiler says they use.

    python -m specbench_kernels.aot sm_90 rmsnorm    # arch, then ops (default: all); with tables: specbench kernels

Registers, stack and spills are ptxas' own report (-v) on the very compilation that a launch would make; tensor-core
instructions are counted in the PTX. Results are kept by the hash of kernel source, constants, options and compiler, so
that a second run takes seconds. TRITON_INTERPRET must be unset: the interpreter's functions have nothing to compile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbench_kernels import registry
from specbench_kernels.op import Compilation

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes of shared memory that one block may have: CUDA C programming guide, "technical specifications"."""
TENSOR_CORE = {
    "mma": re.compile(r"\b(?:mma|wmma\.mma)\.sync\."),
    "wgmma": re.compile(r"\bwgmma\.mma_async\."),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
}
FORMAT = 1


@dataclass(frozen=True)
class Resources:
    """What one kernel uses on one architecture, `arch` such as 90. With `error`, it did not compile."""

    op: str
    case: str
    kernel: str
    arch: int
    num_warps: int
    uses_dot: bool
    no_spills: bool
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    tensor_core: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tensor_core(self) -> int:
        return sum(self.tensor_core.values())

    @property
    def faults(self) -> tuple[str, ...]:
        """What breaks the kernel's promises; empty where nothing does."""
        if self.error is not None:
            return ("does not compile",)
        limit = SHARED_LIMIT.get(self.arch)
        found = (
            (self.no_spills and self.spill_store_bytes + self.spill_load_bytes > 0, "spills"),
            (self.uses_dot and self.num_tensor_core == 0, "no tensor cores"),
            (limit is not None and self.shared_bytes > limit, "too much shared memory"),
        )
        return tuple(text for broken, text in found if broken)

    @property
    def verdict(self) -> str:
        return ", ".join(self.faults) or "ok"


@dataclass(frozen=True)
class Job:
    """One compilation by its place: the op's name, its index there, and the architecture."""

    op: str
    index: int
    arch: int


def parse_arch(text: str) -> int:
    """90 for "sm_90"; raises ValueError for what is no architecture with a known limit of shared memory."""
    match = re.fullmatch(r"sm_?(\d+)a?", text)
    if match is None or int(match[1]) not in SHARED_LIMIT:
        known = ", ".join(f"sm_{arch}" for arch in SHARED_LIMIT)
        raise ValueError(f"{text!r} is not a known architecture: use one of {known}")
    return int(match[1])


def require_compiler(kernel: Any = None) -> None:
    """Raise RuntimeError, with the remedy, where kernels were made for the interpreter instead of the compiler."""
    from triton.runtime.jit import JITFunction

    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1" if kernel is None else False
    if interpreted or (kernel is not None and not isinstance(kernel, JITFunction)):
        raise RuntimeError("the interpreter compiles nothing: start again with TRITON_INTERPRET unset")


def jobs_of(ops: Sequence[str], archs: Sequence[int], labels: Callable[[str], bool] = lambda _: True) -> list[Job]:
    """All compilations of `ops`, each on every architecture that can run it; `labels` chooses by the label."""
    jobs = []
    for name in ops:
        for index, compilation in enumerate(registry.find(name).compilations()):
            if labels(compilation.label):
                jobs += [Job(name, index, arch) for arch in archs if arch >= compilation.minimum_arch]
    return jobs


def source_of(compilation: Compilation) -> Any:
    """The ASTSource that triton compiles. Raises ValueError where arguments are missing, unknown or given twice."""
    from triton.backends.compiler import BaseBackend
    from triton.compiler import ASTSource

    names = list(compilation.kernel.arg_names)
    given = [*compilation.signature, *compilation.constants]
    wrong = {
        "missing": [name for name in names if name not in given],
        "unknown": [name for name in [*given, *compilation.divisible] if name not in names],
        "given twice": [name for name in compilation.signature if name in compilation.constants],
    }
    if any(wrong.values()):
        said = "; ".join(f"{what}: {', '.join(some)}" for what, some in wrong.items() if some)
        raise ValueError(f"{compilation.label}: arguments of {compilation.kernel.__name__} {said}")
    signature = {name: compilation.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): BaseBackend.parse_attr("D") for name in compilation.divisible}
    return ASTSource(compilation.kernel, signature, dict(compilation.constants), attributes)


def digest(compilation: Compilation, arch: int) -> str:
    """Hash of all that decides on the machine code: source with what it calls, arguments, options, compiler."""
    import triton

    parts = (
        *(FORMAT, triton.__version__, source_of(compilation).hash(), arch),
        *(compilation.num_warps, compilation.num_stages, sorted(compilation.divisible)),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def parse_report(text: str) -> dict[str, int]:
    """Registers, static shared memory, stack and spills in bytes, from `ptxas -v` on one kernel.

    Raises ValueError where the text holds no such report.
    """
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    used = re.findall(r"Used (\d+) registers(.*)", text)
    if len(spills) != 1 or len(used) != 1:
        raise ValueError(f"ptxas -v reported {len(used)} kernels instead of one: {text[:400]!r}")
    static = re.search(r"(\d+) bytes smem", used[0][1])
    stack, stores, loads = map(int, spills[0])
    return {
        "registers": int(used[0][0]),
        "static_bytes": int(static[1]) if static else 0,
        "stack_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
    }


def count_tensor_core(ptx: str) -> dict[str, int]:
    """Tensor-core instructions in PTX, by kind; kinds that do not occur are left out."""
    counts = {kind: len(pattern.findall(ptx)) for kind, pattern in TENSOR_CORE.items()}
    return {kind: count for kind, count in counts.items() if count}


@contextlib.contextmanager
def _compiler_log() -> Iterator[io.StringIO]:
    """Everything is compiled anew and ptxas' report is caught; triton prints it, and on an error the PTX too."""
    from triton import knobs

    caught = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(caught), knobs.compilation.scope():
        with knobs.cache.scope(), knobs.nvidia.scope():
            knobs.compilation.always_compile = True
            knobs.cache.dir = folder
            knobs.nvidia.dump_ptxas_log = True
            yield caught


def compile_one(op: str, compilation: Compilation, arch: int) -> Resources:
    """Compile and measure; a compiler's error is in the result."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget

    require_compiler(compilation.kernel)
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    result = functools.partial(
        Resources,
        *(op, compilation.label, str(compilation.kernel.__name__), arch, compilation.num_warps),
        *(compilation.uses_dot, compilation.no_spills),
    )
    try:
        with _compiler_log() as log:
            compiled = triton_compile(source_of(compilation), target=GPUTarget("cuda", arch, 32), options=options)
        report = parse_report(log.getvalue())
    except Exception as error:  # whatever stops a compiler is that kernel's result, and the others go on
        return result(error=f"{type(error).__name__}: {error}".strip()[:2000])
    shared = int(compiled.metadata.shared) + report.pop("static_bytes")
    measured: dict[str, Any] = {**report, "tensor_core": count_tensor_core(compiled.asm["ptx"])}
    return result(**measured, shared_bytes=shared)


def run_job(job: Job, cache: Path | None = None) -> Resources:
    """Compile one job in this process, and keep the result in `cache` under the hash of what was compiled here."""
    compilation = registry.find(job.op).compilations()[job.index]
    result = compile_one(job.op, compilation, job.arch)
    if cache is not None and result.error is None:
        _keep(cache / f"{digest(compilation, job.arch)}.json", result)
    return result


def default_cache() -> Path:
    """The user's folder for compilation results."""
    return Path(os.path.expanduser("~")) / ".cache" / "specbench" / "kernel-resources"


def compile_all(
    jobs: Sequence[Job],
    *,
    processes: int = 1,
    cache: Path | None = None,
    done: Callable[[Resources], None] = lambda _: None,
) -> list[Resources]:
    """Results in the order of `jobs`; `done` hears of each as soon as it is there, results from `cache` first.

    A result with an error is not kept. Raises RuntimeError where TRITON_INTERPRET is set.
    """
    registry.require_triton()
    require_compiler()
    files = [_cache_file(job, cache) for job in jobs]
    results: dict[int, Resources] = {}
    for place, (job, file) in enumerate(zip(jobs, files, strict=True)):
        kept = _read(file, job)
        if kept is not None:
            results[place] = kept
            done(kept)
    waiting = [place for place in range(len(jobs)) if place not in results]
    for place, result in _run_jobs(jobs, waiting, processes, cache):
        results[place] = result
        done(result)
    return [results[place] for place in range(len(jobs))]


def _run_jobs(
    jobs: Sequence[Job], waiting: Sequence[int], processes: int, cache: Path | None
) -> Iterator[tuple[int, Resources]]:
    if processes <= 1 or len(waiting) <= 1:
        for place in waiting:
            yield place, run_job(jobs[place], cache)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of torch and LLVM
    with concurrent.futures.ProcessPoolExecutor(min(processes, len(waiting)), mp_context=context) as pool:
        futures = {pool.submit(run_job, jobs[place], cache): place for place in waiting}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()


def _cache_file(job: Job, cache: Path | None) -> Path | None:
    if cache is None:
        return None
    compilation = registry.find(job.op).compilations()[job.index]
    require_compiler(compilation.kernel)
    try:
        return cache / f"{digest(compilation, job.arch)}.json"
    except ValueError:  # compile_one says what is wrong with the arguments
        return None


def _read(file: Path | None, job: Job) -> Resources | None:
    """The kept result under the names that the job has now; None where there is none that can be read."""
    if file is None or not file.is_file():
        return None
    compilation = registry.find(job.op).compilations()[job.index]
    promised = {"case": compilation.label, "uses_dot": compilation.uses_dot, "no_spills": compilation.no_spills}
    try:
        return Resources(**(json.loads(file.read_text(encoding="utf-8")) | {"op": job.op} | promised))
    except (json.JSONDecodeError, TypeError):
        return None


def _keep(file: Path, result: Resources) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        json.dump(asdict(result), part)
    os.replace(part.name, file)


def main(arguments: Sequence[str]) -> int:
    """Print one line a kernel; 1 where any breaks its promises."""
    archs = [parse_arch(text) for text in arguments[:1]] or [90]
    jobs = jobs_of(arguments[1:] or registry.names(), archs)
    broken = False
    for result in compile_all(jobs, processes=os.cpu_count() or 1, cache=default_cache()):
        broken |= bool(result.faults)
        spills = f"{result.spill_store_bytes}/{result.spill_load_bytes} B spilled"
        print(
            f"{result.op} · {result.case} · sm_{result.arch}: {result.registers} registers, {spills}: {result.verdict}"
        )
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
