"""Run a compiled kernel on torch's own OpenMP threads.

A second thread pool beside torch's would spin on the same cores (two spinning pools cost up to 20 x). So kernels are
launched through `GOMP_parallel` of the OpenMP runtime that torch has already loaded: one pool, whoever uses it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from specbench.errors import InvalidEnvironmentError


@functools.cache
def _gomp_parallel() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    torch.get_num_threads()
    maps = Path("/proc/self/maps")
    loaded: dict[str, None] = {}
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.split()[-1]
            if path.startswith("/") and any(part in Path(path).name for part in ("gomp", "iomp5", "libomp")):
                loaded[path] = None
    bundled = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda p: not p.startswith(bundled)):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            return function
    raise InvalidEnvironmentError(
        "backend cpu needs the OpenMP runtime of torch (GOMP_parallel), and none is loaded",
        remedy="install torch's CPU or CUDA wheel for Linux, or set `backend: torch` in the scenario",
    )


def parallel(kernel: int, argument: int, num_threads: int) -> None:
    """Call `kernel(argument)` (addresses of a C function and of its argument) once on each of `num_threads` threads."""
    _gomp_parallel()(kernel, argument, num_threads, 0)
