"""A line from time to time while nothing else is printed, so that a long phase does not look like a hang."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from megaverl.observe.console import Console
from megaverl.observe.status import StatusBoard


class Heartbeat:
    """While the context is open, prints the current phase whenever ``console`` was silent for ``every`` seconds.

    The longest silence is ``every`` plus the scheduling delay of a thread. One line looks like
    ``... step 3/60 · generating · 24 s``.

    Args:
        board: is told of phases and steps too.
    """

    def __init__(self, console: Console, every: float = 10.0, board: StatusBoard | None = None) -> None:
        if every <= 0:
            raise ValueError(f"every must be above 0 seconds, got {every}")
        self._console = console
        self._board = board
        self._every = every
        self._lock = threading.Lock()
        self._phase, self._since = "working", time.monotonic()
        self._prefix = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def phase(self, name: str) -> None:
        """Says what goes on now; the seconds count from here. Cheap, prints nothing."""
        with self._lock:
            self._phase, self._since = name, time.monotonic()
        self._console.show(phase=name)
        if self._board is not None:
            self._board.phase(name)

    def step(self, step: int, total: int | None = None) -> None:
        """Says which step goes on; shown before the phase."""
        with self._lock:
            self._prefix = f"step {step}/{total} · " if total else f"step {step} · "
        self._console.show(step=step, total=total)
        if self._board is not None:
            self._board.step(step, total)

    def __enter__(self) -> Heartbeat:
        if self._thread is not None:
            raise RuntimeError("this heartbeat runs already")
        self._stop.clear()
        self._console.last_output = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="megaverl-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        # Waits exactly until the silence is due: no polling. A line printed meanwhile moves the due time on.
        while not self._stop.wait(max(0.0, self._console.last_output + self._every - time.monotonic())):
            if time.monotonic() - self._console.last_output < self._every:
                continue
            if self._console.has_bar:  # it moves by itself
                self._console.last_output = time.monotonic()
                continue
            try:
                self._console.line(self._text(), "dim")
            except (OSError, ValueError):  # the stream is closed: the main thread learns of it at its own next line
                return

    def _text(self) -> str:
        with self._lock:
            return f"... {self._prefix}{self._phase} · {time.monotonic() - self._since:.0f} s"
