"""Ctrl-C that is not lost: raised inside a callback whose exceptions are ignored, an interrupt would go unheard."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt as ever and is remembered too, for `check` to raise again.

    A handler of the caller's own, or a thread that is not the main one, is left as it is.
    """

    def __init__(self) -> None:
        self._asked = self._mine = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        self._mine = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was asked for."""
        if self._asked:
            raise KeyboardInterrupt
