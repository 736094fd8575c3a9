"""Clocks: wall time that waits for the device, CUDA events, and a fake clock that makes timing code exact in tests.

A clock that does not wait measures how fast work is *issued*; every reading here is taken after it has finished.
`EventMarks` are for code that must not wait at all: points in the stream, read after the run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.errors import InputError


class Clock(Protocol):
    """Where measuring code gets its time from."""

    def now(self) -> float:
        """Seconds since some fixed point, read after all work issued before has finished."""

    def mark(self) -> Any:
        """A point in the device's stream; on a device with events it does not wait."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two marks, after waiting for `end`."""


def _synchronizer(device: torch.device | str | None) -> Callable[[], None] | None:
    if device is None or torch.device(device).type == "cpu":
        return None
    if torch.device(device).type != "cuda":
        raise InputError(f"no clock for device {device}", remedy="use cpu or cuda", key="device")
    return lambda: torch.cuda.synchronize(device)


class WallClock:
    """perf_counter after `synchronize` (by default: the CUDA device's, when one is given)."""

    def __init__(self, device: torch.device | str | None = None, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or _synchronizer(device)

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def mark(self) -> float:
        return self.now()

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class CudaEventClock:
    """Marks are CUDA events on the current stream, about 0.5 µs fine: device time without the host's gaps."""

    def __init__(self, device: torch.device | str) -> None:
        self._wall = WallClock(device)
        self._device = torch.device(device)

    def now(self) -> float:
        return self._wall.now()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class EventMarks:
    """Marks in the device's stream for the engine's steps (its `Marks`): none waits, all are read after the run.

    A mark's time is when the device reaches it, so the spans between marks hold the device's work and its idle time.
    Events are used again once they have been read.
    """

    def __init__(self, device: torch.device | str, make: Callable[[], Any] | None = None) -> None:
        self._device = torch.device(device)
        self._make = make or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._idle: list[Any] = []

    def mark(self) -> Any:
        event = self._idle.pop() if self._idle else self._make()
        event.record(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> NDArray[np.float64]:
        """Seconds of each mark since the first; waits for the last. The marks can't be read again.

        Events tell milliseconds in fp32, so neighbours are compared and summed: a long run loses no resolution.
        """
        if not marks:
            return np.zeros(0)
        marks[-1].synchronize()
        spans = [float(a.elapsed_time(b)) / 1e3 for a, b in itertools.pairwise(marks)]
        self._idle += marks
        return np.concatenate([np.zeros(1), np.cumsum(spans)])


class FakeClock:
    """Time that passes only by `advance`, by `issue` (async work, done at the next reading), or by a script.

    With `ticks`, each reading first advances by the next tick; a reading beyond the script is an error.
    """

    def __init__(self, ticks: Iterable[float] | None = None) -> None:
        self._time = 0.0
        self._pending = 0.0
        self._ticks = None if ticks is None else iter(ticks)

    def advance(self, seconds: float) -> None:
        """The host is busy for `seconds`; issued work runs meanwhile."""
        self._time += seconds
        self._pending = max(0.0, self._pending - seconds)

    def issue(self, seconds: float) -> None:
        """Start work of `seconds` on the device and return at once."""
        self._pending += seconds

    def now(self) -> float:
        if self._ticks is not None:
            tick = next(self._ticks, None)
            if tick is None:
                raise AssertionError("the clock was read more often than its script says")
            self._time += tick
        self._time += self._pending
        self._pending = 0.0
        return self._time

    def mark(self) -> float:
        return self.now()

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def clock_for(device: torch.device | str) -> Clock:
    """CUDA events for a CUDA device, wall time for a CPU."""
    return CudaEventClock(device) if torch.device(device).type == "cuda" else WallClock(device)


def time_call(clock: Clock, call: Callable[[], object]) -> float:
    """Seconds of one call, with the work it left on the device."""
    start = clock.mark()
    call()
    return clock.elapsed_s(start, clock.mark())
