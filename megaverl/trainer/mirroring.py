"""Copies finished checkpoints to ``trainer.mirror`` while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

from megaverl.checkpoint.mirror import Mirror
from megaverl.errors import RunError


class Mirroring:
    """One copy at a time, in a thread. A copy that fails costs nothing but itself: the next checkpoint is tried again.

    Args:
        url: of `Mirror`.
    """

    def __init__(self, url: str) -> None:
        self._mirror = Mirror(url)
        self._thread: threading.Thread | None = None
        self._missing: Path | None = None
        self._error: RunError | None = None

    def copy(self, folder: Path, removed: list[int]) -> None:
        """Copies ``folder`` and removes the steps ``removed`` there, once the copy before it has ended."""
        if self._thread is not None:
            self._thread.join()
        self._thread = threading.Thread(target=self._run, args=(folder, removed), name="mirror", daemon=True)
        self._thread.start()

    def _run(self, folder: Path, removed: list[int]) -> None:
        try:
            self._mirror.upload(folder)
            self._missing = None
            for step in removed:
                self._mirror.remove(step)
        except RunError as error:
            self._missing, self._error = folder, error
        except FileNotFoundError:  # removed here by keep_last, for a newer one
            pass

    def news(self) -> str | None:
        """What went wrong since the last call."""
        error, self._error = self._error, None
        return None if error is None else f"{error}\n    -> it lies in {self._missing}; the next one is copied again"

    def finish(self) -> None:
        """Waits for the last copy.

        Raises:
            RunError: the newest checkpoint is not there, and could not be copied now either.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._missing is not None:
            self._mirror.upload(self._missing)
            self._missing = self._error = None
