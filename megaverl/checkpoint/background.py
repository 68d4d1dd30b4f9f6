"""Writing a rank's state while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megaverl.checkpoint.train_state import SavedFile


class Writing:
    """Calls ``write(state)``; in the background with a copy in host memory, which training does not touch.

    The copy is given up as soon as it is written.

    Args:
        write: raises what it cannot do; `result` raises it again.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], list[SavedFile]], state: dict[str, Any], *, background: bool
    ) -> None:
        self._write = write
        self._files: list[SavedFile] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, args=(host_copy(state),), name="save", daemon=True)
            self._thread.start()
        else:
            self._run(state)

    def _run(self, state: dict[str, Any]) -> None:
        try:
            self._files = self._write(state)
        except Exception as error:  # it is the driver's to judge, in `result`
            self._error = error

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> list[SavedFile]:
        """The files written; waits for them."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._files


def host_copy(value: Any) -> Any:
    """``value`` with every tensor copied to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(inner) for inner in value)
    return value
