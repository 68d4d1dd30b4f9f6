"""Where metrics go: the console, ``metrics.jsonl``, Weights & Biases, TensorBoard; one interface for all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megaverl.config.schema import Config
from megaverl.errors import Problem, Problems, UserError
from megaverl.files import write_text
from megaverl.observe.console import LOSS, REWARD, Console, step_line, validation_line
from megaverl.observe.health import HealthMonitor
from megaverl.observe.metrics import first_of
from megaverl.observe.metrics_file import MetricsFile

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


class Tracker(Protocol):
    """Takes the metrics of one step. Steps only grow; a step is logged once."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsTables(Protocol):
    """A tracker that shows tables of texts."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...


class Trackers:
    """All trackers of a run as one. Closes them on leaving the context, also after an error."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Gives the metrics of a step to every tracker."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Gives a table to the trackers that can show one."""
        for tracker in self.trackers:
            if isinstance(tracker, ShowsTables):
                tracker.table(name, columns, rows, step)

    def close(self) -> None:
        """Closes every tracker, the others too when one fails."""
        with ExitStack() as stack:
            for tracker in self.trackers:
                stack.callback(tracker.close)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_loggers(loggers: Sequence[str], problems: Problems) -> None:
    """Adds a problem for each logger whose package is not installed. Imports none of them."""
    for logger in loggers:
        package = _PACKAGES.get(logger)
        if package and importlib.util.find_spec(package) is None:
            problems.add(
                f"the logger {logger} needs the package {package}, which is not installed",
                where="trainer.loggers",
                fix='pip install "megaverl[track]", or leave it out of trainer.loggers',
            )


def open_trackers(config: Config, console: Console, *, first_step: int = 0, total_steps: int | None = None) -> Trackers:
    """The trackers that ``trainer.loggers`` names.

    Args:
        config: the resolved configuration; Weights & Biases stores it with the run.
        console: where lines go.
        first_step: first step that this run will log: 0, or that after the checkpoint it resumes from.
        total_steps: steps in all, for ``step 3/60``.

    Raises:
        UserError: a package is missing, ``metrics.jsonl`` is no metrics file, or Weights & Biases refuses.
    """
    problems = Problems()
    check_loggers(config.trainer.loggers, problems)
    problems.raise_if_any()
    opened: list[Tracker] = []
    try:
        for name in config.trainer.loggers:
            opened.append(_open(name, config, console, first_step, total_steps))
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened)


def _open(name: str, config: Config, console: Console, first_step: int, total_steps: int | None) -> Tracker:
    run_dir = Path(config.trainer.run_dir)
    if name == "console":
        return ConsoleTracker(console, total_steps)
    if name == "file":
        file = MetricsFile(run_dir / "metrics.jsonl", first_step)
        if file.superseded:
            rows = f"{file.superseded_rows} row{'s' if file.superseded_rows > 1 else ''}"
            console.note(f"{rows} of an earlier run from step {first_step} on moved to {file.superseded}")
        return file
    if name == "wandb":
        return WandbTracker(config)
    return TensorboardTracker(run_dir / "tensorboard", first_step)


class ConsoleTracker:
    """One line a step, one line a validation, and advice when a health metric leaves its range."""

    def __init__(self, console: Console, total_steps: int | None = None, health: HealthMonitor | None = None) -> None:
        self._console = console
        self._total = total_steps
        self._health = health or HealthMonitor()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if first_of(metrics, (*REWARD, *LOSS)) is not None:
            self._console.line(step_line(metrics, step, self._total))
        if any(name.startswith(("val-core/", "val/")) for name in metrics):
            self._console.line(validation_line(metrics, step, metrics.get("timing_s/testing")), "bold")
        for advice in self._health.check(metrics, step):
            self._console.warn(advice)

    def close(self) -> None:
        pass


class WandbTracker:
    """Weights & Biases. ``WANDB_MODE=offline`` needs no network; its own variables hold otherwise as well.

    A run directory keeps the id of its run, so that a resumed run goes on in the same one.
    """

    def __init__(self, config: Config) -> None:
        import wandb

        run_dir = Path(config.trainer.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=config.trainer.project,
                name=config.trainer.experiment,
                id=_wandb_id(run_dir / "wandb_run_id.txt"),
                dir=run_dir,
                config=config.model_dump(),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(
                Problem(
                    f"Weights & Biases does not start: {error}",
                    where="trainer.loggers",
                    fix="set WANDB_API_KEY, or WANDB_MODE=offline for no network, or leave wandb out",
                )
            ) from error
        # wandb drops rows below its newest own step; with a step metric of ours a resumed run may log a step again.
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({"trainer/step": step, **metrics})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import wandb

        data = [[str(value) for value in row] for row in rows]
        self._run.log({"trainer/step": step, name: wandb.Table(columns=list(columns), data=data)})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path) -> str:
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    name = os.urandom(6).hex()
    write_text(path, name)
    return name


class TensorboardTracker:
    """TensorBoard event files under ``run_dir/tensorboard``; a resumed run purges the steps that it repeats."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [_markdown_row(columns), _markdown_row(["---"] * len(columns)), *map(_markdown_row, rows)]
        self._writer.add_text(name, "\n".join(lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _markdown_row(cells: Sequence[Any]) -> str:
    escaped = [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells]
    return f"| {' | '.join(escaped)} |"
