"""Writing of data files and folders: whole, under a temporary name, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaverl.data.schema import Row
from megaverl.errors import Problem, UserError
from megaverl.files import WriteError, cause_of, replacing


def new_folder(out_dir: str | Path, names: Sequence[str], *, overwrite: bool) -> Path:
    """The folder, made if it is missing, after a check that none of ``names`` would be overwritten.

    Raises:
        UserError: files exist and ``overwrite`` is False, or the folder cannot be made or written.
    """
    folder = Path(out_dir)
    present = [] if overwrite else [folder / name for name in names if (folder / name).exists()]
    if present:
        fix = "Choose another folder, or allow it with --overwrite."
        raise UserError([Problem("the file exists already", str(path), fix) for path in present])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            Problem(f"cannot make the folder: {error.strerror}", str(folder), fix="Choose another folder.")
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(Problem("the folder cannot be written", str(folder), "Choose another folder."))
    return folder


def write_rows(path: str | Path, rows: Sequence[Row]) -> Path:
    """Writes the rows as one parquet file in the row schema.

    Raises:
        UserError: the file cannot be written (no space, no right), or a column mixes types.
    """
    return write_table(path, [row.columns() for row in rows])


def write_table(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows with the same columns as one parquet file.

    Raises:
        UserError: as `write_rows`.
    """
    import pyarrow
    import pyarrow.parquet

    target = Path(path)
    try:
        table = pyarrow.Table.from_pylist(list(rows))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        fix = "Give every row the same kind of value in each column, or prepare the files one by one."
        raise UserError(Problem(f"a column mixes types: {error}", str(target), fix)) from error
    try:
        with replacing(target) as file:
            pyarrow.parquet.write_table(table, file)
    except WriteError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        what, fix = cause_of(error.__cause__)
        raise UserError(Problem(f"cannot write the file: {what}", str(target), fix)) from error
    return target


@contextmanager
def replacing_folder(out_dir: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``out_dir`` when the block ends without an error.

    Raises:
        UserError: ``out_dir`` exists, is not empty and ``overwrite`` is False, or it cannot be written.
    """
    target = Path(out_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise UserError(
            Problem("the folder exists already", str(target), "Choose another, or allow it with --overwrite.")
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UserError(
            Problem(f"cannot make the folder: {error.strerror}", str(target), fix="Choose another folder.")
        ) from error
    try:
        temporary.chmod(0o755)
        yield temporary
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
