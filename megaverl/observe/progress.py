"""The bar below the lines on a terminal: steps done, what goes on, time left. Drawn by rich."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TextIO


class ProgressBar:
    """Use as a context; lines go through `print` meanwhile, above the bar. Leaving takes the bar away.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, force_terminal=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[phase]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=None, phase="")

    def show(self, **news: Any) -> None:
        """Any of ``step`` (in progress), ``total`` and ``phase``."""
        if "step" in news:  # steps before it are done
            self._progress.update(self._task, completed=max(0, news["step"] - 1), total=news.get("total"))
        if "phase" in news:
            self._progress.update(self._task, phase=news["phase"])

    def print(self, text: str, style: str) -> None:
        """A line above the bar."""
        self._console.print(text, style=style or None, soft_wrap=True)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
