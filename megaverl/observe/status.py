"""Where a run stands: kept by the driver, written to ``status.json``, read by `megaverl status`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from megaverl.errors import MegaverlError, Problem, UserError
from megaverl.files import WriteError, write_json

State = Literal["starting", "running", "finished", "failed", "stopped", "died"]
FILE = "status.json"
SIGNALS = 128
"""Exit codes above this are a signal's, as a shell gives them."""
LOCK = ".lock"
"""Held by a run while its driver lives."""


@dataclass
class Status:
    """One look at a run. Times are seconds since 1970.

    Attributes:
        state: ``died`` is said by readers alone: the driver is gone and has not said how it ended.
        step: the step in progress, or the last one done.
        phase: what goes on, in words.
        phase_since: when that began.
        progress: when a phase or a step last began or ended.
        error: what a failed run said.
        metrics: of the last step that was logged.
    """

    state: State = "starting"
    step: int = 0
    total_steps: int | None = None
    phase: str = "starting"
    started: float = field(default_factory=time.time)
    phase_since: float = field(default_factory=time.time)
    progress: float = field(default_factory=time.time)
    run_dir: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON has it, with the seconds since progress; nan and inf as texts."""
        finite = {k: v if abs(v) < float("inf") else str(v) for k, v in self.metrics.items()}
        return {**asdict(self), "metrics": finite, "seconds_since_progress": round(time.time() - self.progress, 3)}


class StatusBoard:
    """Takes news from the driver, cheaply, and writes the file at most once a second. Use as a context.

    A disk that is full or gone does not end a run here: the checkpoint is what says so.

    Args:
        every: shortest time between two writes, seconds.
    """

    def __init__(self, run_dir: Path | str, every: float = 1.0) -> None:
        self.path = Path(run_dir) / FILE
        self._every = every
        self._lock = threading.Lock()
        self._status = Status(run_dir=str(Path(run_dir).resolve()))
        self._news, self._end = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def now(self) -> Status:
        """A copy of what is known now."""
        with self._lock:
            return Status(**{**self._status.__dict__, "metrics": dict(self._status.metrics)})

    def phase(self, name: str) -> None:
        """A phase began."""
        now = time.time()
        self._update(phase=name, phase_since=now, progress=now)

    def step(self, step: int, total: int | None = None) -> None:
        """A step began."""
        self._update(state="running", step=step, total_steps=total, progress=time.time())

    def log(self, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self._update(metrics=dict(metrics), progress=time.time())

    def finish(self, state: State = "finished", error: str = "") -> None:
        """The run is over. The first word holds: what fails while a failed run is taken down is not its end."""
        if self._status.state in ("starting", "running"):
            self._update(state=state, error=error, phase="", progress=time.time())

    def _update(self, **values: Any) -> None:
        with self._lock:
            for name, value in values.items():
                setattr(self._status, name, value)
        self._news.set()

    def _write(self) -> None:
        with contextlib.suppress(WriteError):
            write_json(self.path, self.now().document())

    def _run(self) -> None:
        while not self._end.is_set():
            self._news.wait()
            self._news.clear()
            self._write()
            self._end.wait(self._every)

    def __enter__(self) -> StatusBoard:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megaverl-status", daemon=True)
            self._thread.start()
            self._news.set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._end.set()
            self._news.set()
            self._thread.join()
            self._thread = None
            self._write()


def how_it_ended(error: BaseException) -> tuple[State, str]:
    """(state, text) for a run that an exception ended; what leaves as a signal does was asked for."""
    if isinstance(error, MegaverlError) and error.exit_code > SIGNALS:
        return "stopped", str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped", type(error).__name__
    if getattr(error, "exit_code", 1) > 128:  # a signal that the run obeyed
        return "stopped", str(error)
    return "failed", str(error) or type(error).__name__


def read_status(run_dir: Path | str) -> Status:
    """Where the run in a folder stands.

    Raises:
        UserError: there is no run.
    """
    folder = Path(run_dir)
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found.pop("seconds_since_progress", None)
        status = Status(**found)
    except (OSError, ValueError, TypeError) as error:
        what = "no run was started there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            Problem(what, where=str(folder / FILE), fix="name the folder of a run: trainer.run_dir")
        ) from error
    status.metrics = {name: float(value) for name, value in status.metrics.items()}
    if status.state in ("starting", "running") and not _is_held(folder / LOCK):
        status.state = "died"
    return status


def _is_held(lock: Path) -> bool:
    """Whether a driver holds the lock of a run directory."""
    try:
        with lock.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
