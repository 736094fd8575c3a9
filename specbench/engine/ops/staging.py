"""Fixed places on the device for what changes from step to step, filled by one copy that does not wait.

A captured graph reads addresses, so every input of a step has its place for good: numpy views of pinned host memory
are written, one copy moves them, and tensors of the device view the other end. Host memory is a small ring, so that the
next step's inputs never overwrite a copy still under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
RING = 4

NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


@dataclass(frozen=True)
class Field:
    """One input or output: its dtype and its largest shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout(fields: Mapping[str, Field]) -> tuple[dict[str, int], int]:
    """The offset in bytes of each field, one after the other on multiples of 16, and the length of all."""
    offsets, end = {}, 0
    for name, field in fields.items():
        offsets[name] = end
        end += -(-field.bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def span(fields: Mapping[str, Field], last: str | None, count: int | None) -> int:
    """Bytes from the first field up to `last` (default: all), of which the first `count` of its leading dimension."""
    offsets, length = layout(fields)
    if last is None:
        return length
    field = fields[last]
    rows = field.shape[0] if count is None else count
    return offsets[last] + math.prod((rows, *field.shape[1:])) * field.dtype.itemsize


class _Arena:
    """Bytes with a typed view for each field."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device | str, *, pinned: bool = False) -> None:
        offsets, length = layout(fields)
        self.bytes = torch.zeros(length, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.views = {
            name: self.bytes[offsets[name] : offsets[name] + field.bytes].view(field.dtype).view(field.shape)
            for name, field in fields.items()
        }


class Inputs:
    """Host to device. `host(name)` is the numpy array to fill for the coming step, `device[name]` its fixed place.

    A step is `begin()`, the filling, `send(...)`.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self.fields = dict(fields)
        cuda = device.type == "cuda"
        self._arenas = [_Arena(fields, "cpu", pinned=cuda) for _ in range(RING if cuda else 1)]
        self._arrays: list[dict[str, NDArray[np.generic]]] = [
            {name: view.numpy() for name, view in arena.views.items()} for arena in self._arenas
        ]
        self._done: list[torch.cuda.Event | None] = [None] * len(self._arenas)
        self._at = 0
        self._there = _Arena(fields, device)
        self.device: dict[str, torch.Tensor] = self._there.views

    def begin(self) -> None:
        """Turn to the next host buffer; its last copy, a few steps ago, has long ended."""
        self._at = (self._at + 1) % len(self._arenas)
        done = self._done[self._at]
        if done is not None:
            done.synchronize()

    def host(self, name: str) -> NDArray[np.generic]:
        return self._arrays[self._at][name]

    def send(self, last: str | None = None, count: int | None = None) -> None:
        """Copy all fields, or those up to `last` with only the first `count` of its leading dimension."""
        end = span(self.fields, last, count)
        self._there.bytes[:end].copy_(self._arenas[self._at].bytes[:end], non_blocking=True)
        if self._there.bytes.is_cuda:
            event = self._done[self._at] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._done[self._at] = event


class Outputs:
    """Device to host. `device[name]` is written by kernels; `read` waits once and gives numpy views of the fields.

    `num_reads` counts those waits: they are the only ones of a step.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._fields = dict(fields)
        self._there = _Arena(fields, device)
        self._here = _Arena(fields, "cpu", pinned=cuda) if cuda else self._there
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._arrays = {name: view.numpy() for name, view in self._here.views.items()}
        self.device: dict[str, torch.Tensor] = self._there.views
        self.num_reads = 0

    def read(self, last: str | None = None, count: int | None = None) -> Mapping[str, NDArray[np.generic]]:
        """The fields up to `last` (see `span`) as they stand once all work issued before has ended; valid until the
        next step writes them."""
        self.num_reads += 1
        if self._event is not None:
            end = span(self._fields, last, count)
            self._here.bytes[:end].copy_(self._there.bytes[:end], non_blocking=True)
            self._event.record()
            self._event.synchronize()
        return self._arrays
