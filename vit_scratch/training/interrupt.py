"""Ctrl-C and SIGTERM as a request to stop after the update under way."""

import signal
from types import FrameType
from typing import Any


class Interrupt:
    """Inside a `with` block, notes the first SIGINT or SIGTERM; a SIGINT after it interrupts at once.

    Attributes:
        signal: the number of the signal that came, None where none did.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
