"""Errors a user can act on: what is wrong, where, and what to do.

`UserError` carries every problem that a check found, so that one run of a command shows them all.
The command line turns it into exit code 2; any other `MegaverlError` is a failed run, exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        fix: what the user can do about it.
    """

    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n    -> {self.fix}" if self.fix else head


class UserError(MegaverlError):
    """The input or the configuration is wrong (exit code 2). Holds all problems found."""

    exit_code = 2

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
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
