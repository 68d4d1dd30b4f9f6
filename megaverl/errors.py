"""Errors a user can act on: what is wrong, where, and what to do.

`UserError` carries every problem that a check found, so that one run of a command shows them all.
The command line turns it into exit code 2; any other `MegaverlError` is a failed run, exit code 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ROW = re.compile(r"\brow (\d+)( \(line \d+\))?")
"""How a place names one row of a file."""
ROWS_NAMED = 5


class MegaverlError(Exception):
    """Base of all errors raised by megaverl on purpose: the run failed (exit code 1)."""

    exit_code = 1


class RunError(MegaverlError):
    """The run could not go on: a worker died, a step produced non-finite numbers, a save failed."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: what is wrong, in one sentence.
        where: the file, row, key or tensor it concerns, e.g. ``train.parquet, row 12, key prompt``.
        fix: what the user can do about it; every problem that megaverl reports has one.
    """

    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n    -> {self.fix}" if self.fix else head


class UserError(MegaverlError):
    """The input or the configuration is wrong (exit code 2). Holds all problems found, those of many rows as one."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(merged(problems))
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.problems)
        if count == 1:
            return str(self.problems[0])
        lines = [f"{count} problems found:"]
        lines += [f"  {i}. {p}".replace("\n", "\n  ") for i, p in enumerate(self.problems, 1)]
        return "\n".join(lines)

    def __reduce__(self):  # exceptions cross process borders (Ray pickles them)
        return (type(self), (self.problems,))


class Problems:
    """Collects problems during a check; `raise_if_any` reports them together."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.found.append(Problem(what, where, fix))

    def extend(self, error: UserError) -> None:
        self.found.extend(error.problems)

    def raise_if_any(self) -> None:
        """Raises `UserError` with everything collected; returns if nothing was."""
        if self.found:
            raise UserError(self.found)


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, those that differ in nothing but the row as one that names the rows; in order of the first."""
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        place = ROW.sub("row", problem.where, count=1)
        alike.setdefault((problem.what, place, problem.fix), []).append(problem)
    return [_one_of(group) for group in alike.values()]


def _one_of(group: Sequence[Problem]) -> Problem:
    first = group[0]
    rows = sorted({int(found[1]) for problem in group if (found := ROW.search(problem.where))})
    if len(rows) < 2:
        return first
    return replace(first, where=ROW.sub(_named(rows), first.where, count=1))


def _named(rows: Sequence[int]) -> str:
    if rows[-1] - rows[0] == len(rows) - 1:
        return f"rows {rows[0]} to {rows[-1]}"
    if len(rows) <= ROWS_NAMED:
        return f"rows {', '.join(map(str, rows[:-1]))} and {rows[-1]}"
    return f"rows {', '.join(map(str, rows[:ROWS_NAMED]))} and {len(rows) - ROWS_NAMED} more"
