"""SIGTERM and SIGINT: the step in progress is finished, a checkpoint written, then the run ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from megaverl.errors import MegaverlError
from megaverl.observe.console import Console

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Stopped(MegaverlError):
    """The run was asked to stop and did; exit code 128 + signal, as a shell gives it."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.exit_code = 128 + number
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.number, str(self)))


class StopSignals:
    """A context in which the first signal only sets `received`; the second ends the run at once.

    Outside the main thread, where no handler can be set, it does nothing.
    """

    def __init__(self, console: Console) -> None:
        self.received: signal.Signals | None = None
        self._console = console
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._console.warn(f"{self.received.name}: the run stops after this step; once more, and it stops at once")
