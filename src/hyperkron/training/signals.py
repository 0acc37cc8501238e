"""Handles SIGTERM and SIGINT: finish the step, save, and exit with the code that the system expects."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """The run received a signal, has saved, and exits with code 128 + the signal's number.

    Attributes:
        code: 143 for SIGTERM, 130 for SIGINT.
        signal: the signal.

    Example:
        >>> Interrupted(signal.SIGTERM).code
        143
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Signals:
    """While active, SIGTERM and SIGINT only set ``received``; a second SIGINT calls the previous handler.

    Handlers can be set only in the main thread; in other threads, and if ``active`` is false, this does nothing.
    """

    def __init__(self, active: bool = True) -> None:
        self.received: int | None = None
        self._active = active and threading.current_thread() is threading.main_thread()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if self._active:
            for number in (signal.SIGTERM, signal.SIGINT):
                previous = signal.getsignal(number)
                if previous is not None:  # set by something other than Python: it could not be put back
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        elif number == signal.SIGINT:  # the user does not want to wait
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)

    def __exit__(self, *reason: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
