"""Rows of a data set in a file instead of memory: 8 bytes a row stay in the process, and each row is one read."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from megaverl.files import write_error


class Spool(Sequence[Any]):
    """Items in a temporary file that has no name: it is gone with the process, however that ends.

    Args:
        folder: where the file lies; it is made if missing.

    Raises:
        WriteError: the file cannot be written; says why.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # It lives as long as this does.
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise write_error(self.folder, error) from error
        self._ends = array("q")

    def extend(self, items: Iterable[Any]) -> None:
        """Appends items, pickled."""
        try:
            for item in items:
                self._file.write(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL))
                self._ends.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise write_error(self.folder, error) from error

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, position: int) -> Any: ...
    @overload
    def __getitem__(self, position: slice) -> list[Any]: ...
    def __getitem__(self, position: int | slice) -> Any:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(position)
        position %= len(self)
        start = self._ends[position - 1] if position else 0
        return pickle.loads(os.pread(self._file.fileno(), self._ends[position] - start, start))
