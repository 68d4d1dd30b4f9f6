"""Reading rows from parquet, JSON lines and Arrow files, each with the place it came from."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.errors import Problem, Problems, UserError, merged

JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (".parquet", ".arrow", *JSON_LINES)
FIX_SUFFIX = f"Readable are {', '.join(SUFFIXES)} and folders of them (also what datasets.save_to_disk writes)."


@dataclass(frozen=True)
class Record:
    """One row as read, with its place.

    Attributes:
        file: the file it is in.
        row: its number in that file, from 0.
        values: column -> value.
    """

    file: Path
    row: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        line = f" (line {self.row + 1})" if self.file.suffix in JSON_LINES else ""
        return f"{self.file}, row {self.row}{line}"


def resolve_files(paths: Sequence[str | Path], problems: Problems, *, key: str = "") -> list[Path]:
    """The data files that the paths mean, in the given order; those of a folder or a glob sorted by name.

    Args:
        paths: files, folders or globs. A folder written by ``datasets.save_to_disk`` gives its own list of files.
        problems: gets a named problem for every path that leads nowhere.
        key: the configuration key or argument that holds the paths, for the messages.
    """
    files: list[Path] = []
    for text in map(str, paths):
        path = Path(text).expanduser()
        where = f"{text}, key {key}" if key else text
        if path.is_file():
            if path.suffix not in SUFFIXES:
                problems.add(f"cannot read files of type {path.suffix or 'none'!r}", where=where, fix=FIX_SUFFIX)
            else:
                files.append(path)
        elif path.is_dir():
            files += _files_of_folder(path, where, problems)
        elif glob.has_magic(text):
            matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.suffix in SUFFIXES)
            if not matches:
                problems.add("no readable file matches the pattern", where=where, fix=FIX_SUFFIX)
            files += matches
        else:
            problems.add("no such file or folder", where=where, fix=_fix_missing(path))
    return files


def read_records(file: Path, problems: Problems) -> Iterator[Record]:
    """All rows of one file in order. A file that cannot be read, and a broken line, becomes a named problem."""
    read = {".parquet": _read_parquet, ".arrow": _read_arrow}.get(file.suffix, _read_json_lines)
    try:
        yield from read(file, problems)
    except OSError as error:
        problems.add(f"cannot read the file: {error}", where=str(file), fix="Check that it is whole and readable.")


def each_record(paths: Sequence[str | Path], problems: Problems, *, key: str = "") -> Iterator[Record]:
    """`resolve_files` and `read_records` together, row by row; a file without rows is a problem as well."""
    for file in resolve_files(paths, problems, key=key):
        found, rows = len(problems.found), 0
        for record in read_records(file, problems):
            rows += 1
            yield record
        if not rows and len(problems.found) == found:
            problems.add("the file has no rows", where=str(file), fix="Give a file with rows or leave it out.")


def read_all(paths: Sequence[str | Path], problems: Problems, *, key: str = "") -> list[Record]:
    """All of `each_record`."""
    return list(each_record(paths, problems, key=key))


def _files_of_folder(folder: Path, where: str, problems: Problems) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        fix = f"Name one of its splits: {', '.join(str(folder / s) for s in splits)}."
        problems.add("the folder holds several splits", where=where, fix=fix)
        return []
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / entry["filename"] for entry in json.loads(state.read_text("utf-8"))["_data_files"]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            problems.add(f"cannot read the list of data files: {error!r}", where=str(state), fix="Save it again.")
            return []
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in SUFFIXES and not p.name.startswith("."))
    if not files:
        problems.add("the folder holds no readable file", where=where, fix=FIX_SUFFIX)
    return files


def _fix_missing(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    present = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))[:8] if parent.is_dir() else []
    return f"{parent} exists and holds {', '.join(present) or 'nothing'}."


def _read_parquet(file: Path, problems: Problems) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield from _rows(file, parquet.iter_batches(batch_size=4096))
    except pyarrow.ArrowInvalid as error:
        problems.add(f"not a readable parquet file: {error}", where=str(file), fix="Write or download it again.")


def _read_arrow(file: Path, problems: Problems) -> Iterator[Record]:
    """Arrow IPC in the stream format, which `datasets` writes, or in the file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            is_file_format = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file_format:
                reader = pyarrow.ipc.open_file(source)
                yield from _rows(file, (reader.get_batch(i) for i in range(reader.num_record_batches)))
            else:
                yield from _rows(file, pyarrow.ipc.open_stream(source))
    except pyarrow.ArrowInvalid as error:
        problems.add(f"not a readable Arrow file: {error}", where=str(file), fix="Save the data set again.")


def _rows(file: Path, batches: Any) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            yield Record(file, number, values)
            number += 1


def _read_json_lines(file: Path, problems: Problems) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            where = f"{file}, row {number} (line {number + 1})"
            try:
                values = json.loads(line.decode("utf-8"))
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both ValueErrors
                what = "the line is empty" if not line.strip() else f"the line is not JSON: {error}"
                problems.add(what, where=where, fix="One JSON object a line, in UTF-8.")
                continue
            if not isinstance(values, dict):
                problems.add("the line is not a JSON object", where=where, fix="One JSON object a line, in UTF-8.")
                continue
            yield Record(file, number, values)


def shorten(problems: list[Problem], *, limit: int, what: str) -> list[Problem]:
    """The first ``limit`` problems, and one that counts the others, so that a bad file stays readable.

    Those that differ in the row alone are one.
    """
    problems = merged(problems)
    if len(problems) <= limit:
        return problems
    rest = len(problems) - limit
    return [
        *problems[:limit],
        Problem(
            f"and {rest} more of the {len(problems)} problems found in the rows",
            what,
            fix="mend these first; the next check shows the rest",
        ),
    ]


def require_rows(records: Sequence[Record], paths: Sequence[str | Path], *, key: str) -> None:
    """Raises `UserError` when no file gave a row."""
    if not records:
        raise UserError(Problem("no rows", f"{', '.join(map(str, paths)) or 'no files'}, key {key}", FIX_SUFFIX))
