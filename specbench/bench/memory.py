"""The most memory in use while a case ran: of the GPU, or of this process on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from specbench.engine.ops.heap import release_freed_memory
from specbench.metrics import Metrics

PROCESS = Path("/proc/self")
RESET_PEAK = "5"
"""Written to clear_refs, it sets the high-water mark back to what is resident now (man 5 proc)."""


class PeakMemory:
    """Begins when it is made, so that a case does not report the peak of another."""

    def __init__(self, device: torch.device, process: Path = PROCESS) -> None:
        self._device, self._process = device, process
        self._reason: str | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        # The heap keeps what an earlier case freed; left resident, it would be in this case's peak.
        release_freed_memory()
        try:
            (process / "clear_refs").write_text(RESET_PEAK)
        except OSError as error:
            self._reason = f"the process's peak can't be reset here: {error.strerror}"

    def metrics(self) -> Metrics:
        """`peak_memory_bytes`, or None with a reason."""
        value: int | None = None
        if self._device.type == "cuda":
            value = int(torch.cuda.max_memory_allocated(self._device))
        elif self._reason is None:
            found = re.search(r"^VmHWM:\s*(\d+) kB$", (self._process / "status").read_text(), re.MULTILINE)
            value = int(found[1]) * 1024 if found else None
        reasons = {} if value is not None else {"peak_memory_bytes": self._reason or "the system does not tell it"}
        return {"peak_memory_bytes": value, "null_reasons": reasons}
