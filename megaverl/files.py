"""Writing of files so that a reader sees the old content or the new one, never a part; and what a failed write means.

Everything is written under a temporary name in the same folder, reaches the disk, and is renamed then. A process that
dies in between leaves the old file, and a hidden ``.NAME.*.tmp`` beside it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megaverl.errors import RunError

CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or name a folder on another disk"),
    errno.EDQUOT: ("the quota of this disk is used up", "free some space, or name a folder on another disk"),
    errno.EFBIG: ("the file system takes no file of that size", "name a folder on another disk"),
    errno.EROFS: ("the file system is read-only", "name a folder that you may write to"),
    errno.EACCES: ("you may not write there", "name a folder that you may write to"),
    errno.EPERM: ("you may not write there", "name a folder that you may write to"),
    errno.ENOENT: ("there is no such folder (any more)", "make the folder, or name another one"),
    errno.ENOTDIR: ("a file is where a folder should be", "name another folder"),
    errno.EIO: ("the disk failed", "look at the system's log, and name a folder on another disk"),
}


class WriteError(RunError):
    """A file could not be written; the message names it, the cause and what to do."""


def cause_of(error: OSError) -> tuple[str, str]:
    """Why a write failed, and what can be done about it."""
    what, fix = CAUSES.get(error.errno or 0, (error.strerror or str(error), "name another folder"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename:
        with suppress(OSError):
            free = shutil.disk_usage(Path(os.fsdecode(error.filename)).parent).free
            what += f" ({free / 1e6:,.0f} MB free)"
    return what, fix


def write_error(path: Path | str, error: OSError) -> WriteError:
    """The error to raise for ``path``."""
    named = error if error.filename else OSError(error.errno, error.strerror, str(path))
    what, fix = cause_of(named)
    return WriteError(f"{path} could not be written: {what}\n    -> {fix}")


@contextmanager
def replacing(path: Path | str, *, text: bool = False) -> Iterator[IO[Any]]:
    """A new file that takes the place of ``path`` when the block ends without an error; the folder is made if missing.

    An existing file's rights are kept, a new one has the usual ones.

    Raises:
        WriteError: it could not be written. ``path`` is then what it was.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(handle, "w" if text else "wb", encoding="utf-8" if text else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(target, error) from error
        raise


def write_bytes(path: Path | str, content: bytes | Iterable[bytes]) -> None:
    """Writes a file whole. Raises WriteError."""
    with replacing(path) as file:
        file.writelines((content,) if isinstance(content, bytes) else content)


def write_text(path: Path | str, content: str) -> None:
    """Writes a text file whole, in UTF-8. Raises WriteError."""
    write_bytes(path, content.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Writes a JSON document whole, for people to read too. Raises WriteError."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
