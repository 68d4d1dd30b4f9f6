"""``metrics.jsonl``: one JSON object a step, which a resumed run goes on with and never repeats a step in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from megaverl.errors import Problem, UserError
from megaverl.files import write_bytes
from megaverl.observe.metrics import number


class MetricsFile:
    """Appends rows to a file, each on the disk's side of the process before `log` returns.

    A row is ``{"step": 3, "actor/lr": 1e-06, ...}``. A number that JSON does not have is written as the text ``nan``,
    ``inf`` or ``-inf`` (which Python's ``float()`` reads).

    Args:
        path: the file; its folder is made.
        first_step: first step that this run will log. Rows of earlier runs from this step on, and a last line that was
            cut off by a crash, move to ``metrics.superseded-N.jsonl`` beside it.

    Raises:
        UserError: the file holds something else than rows of metrics.
    """

    def __init__(self, path: str | os.PathLike[str], first_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.superseded: Path | None = None
        self.superseded_rows = 0
        self._last_step = first_step - 1
        self._set_aside(first_step)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends the row of ``step``.

        Raises:
            ValueError: the step does not come after the last one: a step has one row.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} cannot be logged after step {self._last_step}: a step has one row")
        row = {"step": step, **{name: _json_number(number(value)) for name, value in metrics.items() if name != "step"}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Ends the file; calling it again does nothing."""
        self._file.close()

    def _set_aside(self, first_step: int) -> None:
        if not self.path.exists():
            return
        kept, aside = [], []
        lines = self.path.read_bytes().splitlines(keepends=True)
        for index, line in enumerate(lines, 1):
            torn = index == len(lines) and not line.endswith(b"\n")
            step = None if torn else _step_of(line, self.path, index)
            (kept if step is not None and step < first_step else aside).append(line)
        if not aside:
            return
        # First the copy, then the cut: a crash in between leaves a row in both files, never in none.
        self.superseded = _free_name(self.path)
        self.superseded_rows = len(aside)
        write_bytes(self.superseded, aside)
        write_bytes(self.path, kept)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """All rows of a ``metrics.jsonl``, with the texts ``nan`` and ``inf`` as numbers again."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        rows.append({name: float(v) if isinstance(v, str) else v for name, v in json.loads(line).items()})
    return rows


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _step_of(line: bytes, path: Path, index: int) -> int:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise UserError(
            Problem(
                "not a row of metrics (a JSON object with a step)",
                where=f"{path}, line {index}",
                fix="move the file away, or choose another trainer.run_dir",
            )
        )
    return row["step"]


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.stem}.superseded-{number}{path.suffix}")).exists():
        number += 1
    return name
