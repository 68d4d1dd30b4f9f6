"""The public trainer: check, train, export."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megaverl.config.derived import learns_preferences
from megaverl.config.schema import Config
from megaverl.errors import Problem, RunError, UserError
from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat
from megaverl.observe.status import how_it_ended
from megaverl.trainer.preflight import Prepared, prepare
from megaverl.trainer.restarts import with_restarts
from megaverl.trainer.resume import finish_save, stopped
from megaverl.trainer.run import Run

if TYPE_CHECKING:
    from megaverl.trainer.export_check import VllmExport


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
            RunError: a worker failed or died (more than ``trainer.max_restarts`` times).
            Stopped: SIGTERM or SIGINT came; a checkpoint was written where the run writes any.
        """
        for dataset in (self.prepared.train, self.prepared.val):
            for line in dataset.report.lines() if dataset is not None else ():
                self.console.line(line)
        for note in self.prepared.notes:
            self.console.note(note)
        try:
            summary = self._trained()
        except BaseException as error:
            if self._run is not None:
                self._run.board.finish(*how_it_ended(error))
            raise
        self._running("train").board.finish()
        return summary

    def _trained(self) -> dict[str, Any]:
        run = with_restarts(self.prepared, self.console, self._attempt, self.close)
        if self.config.trainer.export_dir:
            checked = self.config.trainer.export_check == "vllm"
            (self.export_vllm if checked else self.export_hf)(self.config.trainer.export_dir)
        if self.config.trainer.export_critic_dir and self.prepared.critic is not None:
            self.export_critic_hf(self.config.trainer.export_critic_dir)
        summary = self._summary(run)
        run.write_summary(summary)
        return summary

    def _attempt(self, prepared: Prepared) -> Run:
        """All steps that are left, with workers of their own or those that are up already."""
        try:
            return self._steps(prepared)
        except BaseException as error:  # said before a restart takes the run down
            if self._run is not None:
                self._run.board.finish(*how_it_ended(error))
            raise

    def _steps(self, prepared: Prepared) -> Run:
        """The loop of the algorithm, to its end or to a signal."""
        self.prepared = prepared
        run = self._started()
        if learns_preferences(self.config):
            from megaverl.trainer.preference import train_preference as loop
        elif prepared.supervised:
            from megaverl.trainer.sft import train_sft as loop
        else:
            from megaverl.trainer.rl import train_rl as loop
        with run.signals, run.heartbeat:
            loop(run)
            finish_save(run)
            if run.mirroring is not None:
                run.mirroring.finish()
        if run.signals.received is not None and run.step < run.total_steps:
            raise stopped(run)
        return run

    def export_hf(self, directory: str | Path) -> Path:
        """Writes the actor's weights as a Hugging Face checkpoint: a causal language model, or the sequence
        classification with one label that a trained reward model is.

        Raises:
            UserError: the folder exists and is not empty.
            RunError: nothing was trained yet.
        """
        return self._export("export_hf", directory)

    def export_vllm(self, directory: str | Path, prompts: int = 4, max_tokens: int = 32) -> VllmExport:
        """Writes the actor like `export_hf`, and proves that it can be served.

        A plain vLLM in fresh processes loads the folder and answers the first ``prompts`` rows of the validation data
        (or the training data) greedily with ``max_tokens`` tokens each. The texts must not be empty, and every token's
        log-probability must be the running policy's: to 1e-3 in float32, to 0.25 where 16-bit formats take part.

        Returns:
            What was checked, with the texts and the largest difference found.

        Raises:
            UserError: the folder exists and is not empty, or vLLM is missing or cannot run the model; nothing is
                written then.
            RunError: nothing was trained yet, or the exported folder fails the check; it stays there to be looked at.
        """
        from megaverl.rollout.compat_vllm import vllm_refusal
        from megaverl.trainer.export_check import check_in_vllm

        if self.config.algorithm.name == "rm":
            what = "a reward model generates nothing that vLLM could be asked for"
            raise UserError(Problem(what, "export_vllm", "export with export_hf; transformers loads it"))
        run = self._running("export_vllm")
        spec = run.workers.spec
        refusal = vllm_refusal(spec.shape, spec.device, 1 if self.prepared.supervised else spec.rollout_tp)
        if refusal:
            raise UserError(Problem(refusal, "export_vllm", "install it, or export with export_hf, which needs none"))
        rows = self.prepared.val or self.prepared.train
        chosen = [rows[i].prompt_ids for i in range(min(prompts, len(rows)))]
        max_tokens = min(max_tokens, spec.shape.max_positions - max(map(len, chosen)))
        out = self._export("export_hf", directory)
        with run.heartbeat, run.timer.phase("export"):
            found = check_in_vllm(run, out, chosen, max_tokens)
        self.console.line(str(found))
        return found

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
        run = self._running(method)
        out = Path(directory).resolve()
        with run.heartbeat, run.timer.phase("export"):
            run.workers.call(method, str(out))
        return out

    def _running(self, method: str) -> Run:
        if self._run is None:
            raise RunError(f"{method} needs a running trainer: call train() first, and export before close()")
        return self._run

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
