"""Points in time that a step leaves behind. On the host a mark is a reading of a clock; on a device it may be an event
in the stream, which costs no wait and is read when the run is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Now = Callable[[], float]


class Marks(Protocol):
    """Makes marks during a run and tells their times after it."""

    def mark(self) -> Any:
        """A point in time; never waits for the device."""
        ...

    def seconds(self, marks: Sequence[Any]) -> NDArray[np.float64]:
        """float64 seconds of each mark, in their order, since some point common to them. May wait for the last."""
        ...


class HostMarks:
    """Readings of `now`: right where work is done when a call returns, as on a CPU."""

    def __init__(self, now: Now) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def seconds(self, marks: Sequence[float]) -> NDArray[np.float64]:
        return np.array(marks, dtype=np.float64)
