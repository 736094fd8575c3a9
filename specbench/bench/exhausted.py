"""Out of memory: what counts as that, how a device is emptied, and which cases are then not worth a try."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch

from specbench.scenario.cases import Case

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""What torch says in a RuntimeError where the system gives no more memory to a tensor on the CPU."""
CUDA_LIBRARY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory", "CUDA error: out of memory")
SKIPPED_PREFIX = "a smaller case of this series ran out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_ALLOCATOR + CUDA_LIBRARY)


def release_memory() -> None:
    """Give back what nothing refers to any more, on the host and on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _context(case: Case) -> int | None:
    return case.workload.context_len


def is_larger(case: Case, beaten: Case) -> bool:
    """Whether `case` needs what `beaten` needed and more: same target, drafter and depth, batch and context no smaller.

    Contexts compare only where both are given, or neither.
    """
    if (case.target, case.drafter, case.depth) != (beaten.target, beaten.drafter, beaten.depth):
        return False
    own, other = _context(case), _context(beaten)
    if (own is None) != (other is None):
        return False
    batch, beaten_batch = case.workload.batch_size, beaten.workload.batch_size
    length, beaten_length = (own or 0), (other or 0)
    return batch >= beaten_batch and length >= beaten_length and (batch, length) != (beaten_batch, beaten_length)


@dataclass
class Exhausted:
    """The cases that ran out of memory so far in a sweep."""

    cases: list[Case] = field(default_factory=list)

    def why_skipped(self, case: Case) -> str | None:
        """Why `case` is not tried, or None."""
        beaten = next((one for one in self.cases if is_larger(case, one)), None)
        if beaten is None:
            return None
        context = f", context {_context(beaten)}" if _context(beaten) is not None else ""
        return f"{SKIPPED_PREFIX}: batch {beaten.workload.batch_size}{context}"


def skipped_for_memory(reason: str | None) -> bool:
    """Whether a stored row was skipped for that: it is decided anew by the next run, as failed rows are."""
    return reason is not None and reason.startswith(SKIPPED_PREFIX)
