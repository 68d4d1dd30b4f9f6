"""The public trainer: check, train, export."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from megaverl.config.schema import Config
from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat
from megaverl.trainer.preflight import prepare
from megaverl.trainer.run import Run


class Trainer:
    """Trains by a configuration.

        with Trainer(load_config("configs/yaml/grpo_gsm8k.yaml", ["model.path=Qwen2.5-0.5B-Instruct"])) as trainer:
            trainer.train()
            trainer.export_hf("trained")

    Making one checks everything that can be checked without a worker. The workers start with `train` and live until
    `close` (or the end of the context), so that exports need no second start.

    Raises:
        UserError: with all problems of configuration, checkpoint, versions, data and run directory.
    """

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console()
        with Heartbeat(self.console) as heartbeat:
            heartbeat.phase("checking configuration, checkpoint and data")
            self.prepared = prepare(config)
        self._run: Run | None = None

    def train(self) -> dict[str, Any]:
        """Runs the whole training (from the newest checkpoint on, when ``trainer.resume`` says so).

        Returns:
            The summary that also lies in ``summary.json`` of the run directory: steps, seconds by phase, bytes
            moved at handoffs, layout.

        Raises:
            RunError: a worker failed or died.
        """
        for dataset in (self.prepared.train, self.prepared.val):
            for line in dataset.report.lines() if dataset is not None else ():
                self.console.line(line)
        for note in self.prepared.notes:
            self.console.note(note)
        run = self._started()
        if self.prepared.supervised:
            from megaverl.trainer.sft import train_sft as loop
        else:
            from megaverl.trainer.rl import train_rl as loop
        with run.heartbeat:
            loop(run)
        if self.config.trainer.export_dir:
            self.export_hf(self.config.trainer.export_dir)
        if self.config.trainer.export_critic_dir and self.prepared.critic is not None:
            self.export_critic_hf(self.config.trainer.export_critic_dir)
        summary = self._summary(run)
        run.write_summary(summary)
        return summary

    def export_hf(self, directory: str | Path) -> Path:
        """Writes the actor's weights as a Hugging Face checkpoint.

        Raises:
            UserError: the folder exists and is not empty.
            RunError: nothing was trained yet.
        """
        return self._export("export_hf", directory)

    def export_critic_hf(self, directory: str | Path) -> Path:
        """Writes the critic as a Hugging Face token classification with one label, whose logits are the values.

        Raises:
            UserError: the folder exists and is not empty.
            RunError: nothing was trained yet, or the algorithm has no critic.
        """
        if self.prepared.critic is None:
            raise RunError(f"algorithm {self.config.algorithm.name} trains no critic to export")
        return self._export("export_critic_hf", directory)

    def _export(self, method: str, directory: str | Path) -> Path:
        if self._run is None:
            raise RunError(f"{method} needs a running trainer: call train() first, and export before close()")
        out = Path(directory).resolve()
        with self._run.heartbeat, self._run.timer.phase("export"):
            self._run.workers.call(method, str(out))
        return out

    def _started(self) -> Run:
        if self._run is None:
            run = Run(self.prepared, self.console)
            self._run = run
            run.start()
        return self._run

    def _summary(self, run: Run) -> dict[str, Any]:
        return {
            "run_dir": str(run.directory),
            "steps": run.step,
            "layout": str(self.prepared.layout),
            "handoff_bytes": run.handoff_bytes,
            "validations": run.validations,
            "seconds": {name: round(seconds, 3) for name, seconds in run.timer.total.items()},
            "workers": run.worker_info,
        }

    def close(self) -> None:
        """Ends the workers."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
