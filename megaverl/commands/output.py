"""What commands print: text, tables, one JSON document, errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from megaverl.errors import MegaverlError, Problem, UserError


class OutputClosed(Exception):
    """Whoever read standard output has closed it."""


def print_text(text: str) -> None:
    """Prints to standard output at once."""
    print_text_as_it_is(text if text.endswith("\n") else f"{text}\n")


def print_text_as_it_is(text: str) -> None:
    """Prints to standard output at once, with no line end of its own."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed from None


def print_json(document: Any) -> None:
    """Prints the one JSON document of a command with ``--json``."""
    print_text(json.dumps(document, indent=2, ensure_ascii=False))


def print_notes(notes: Sequence[str]) -> None:
    """Notes go to standard error, so that standard output can be used by scripts."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """A table fitted to the terminal; in a pipe one line a row, as wide as it needs.

    Args:
        right: columns aligned to the right (numbers).
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(markup=False, highlight=False, emoji=False, width=None if terminal else 1000)
    with console.capture() as captured:
        console.print(table)
    body = "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())
    print_text(f"{title}\n{body}" if title else body)


def report_error(error: MegaverlError, *, as_json: bool) -> None:
    """The error for people on standard error and, with ``as_json``, for scripts on standard output."""
    print(f"error: {error}", file=sys.stderr)
    if not as_json:
        return
    what, _, fix = str(error).partition("\n    -> ")  # as the messages of failed runs have it
    problems = error.problems if isinstance(error, UserError) else (Problem(what, fix=fix),)
    found = [{"what": problem.what, "where": problem.where, "fix": problem.fix} for problem in problems]
    print_json({"error": {"exit_code": error.exit_code, "problems": found}})


@contextmanager
def stdout_to_stderr(active: bool = True) -> Iterator[None]:
    """Sends all that is written to standard output meanwhile to standard error, child processes and C code included."""
    if not active:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 1)
        os.close(saved)
