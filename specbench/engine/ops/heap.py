"""Freed memory that the allocator keeps, given back: loading frees many buffers, and a process is billed for them."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Return the C heap's free pages to the system (`malloc_trim(3)`). Where libc has no such call, nothing is kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
