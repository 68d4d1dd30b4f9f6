"""A run in progress: the workers, the clock, the trackers and where it stands. The loops in this package use it."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.algorithms.kl_control import KlController
from megaverl.config.derived import needs_reference
from megaverl.config.load import save_config
from megaverl.config.schema import Config
from megaverl.errors import Problem, RunError, UserError
from megaverl.files import write_json
from megaverl.observe.console import Console
from megaverl.observe.health_server import HealthServer
from megaverl.observe.heartbeat import Heartbeat
from megaverl.observe.metrics import non_finite
from megaverl.observe.provenance import FILE as PROVENANCE
from megaverl.observe.provenance import write_provenance
from megaverl.observe.status import LOCK, StatusBoard
from megaverl.observe.timing import PhaseTimer
from megaverl.observe.trackers import Trackers, open_trackers
from megaverl.trainer.mirroring import Mirroring
from megaverl.trainer.preflight import Prepared
from megaverl.trainer.signals import StopSignals
from megaverl.workers import cluster
from megaverl.workers.group import Asked, WorkerGroup
from megaverl.workers.placement import check_resources
from megaverl.workers.spec import CriticPlan, WorkerSpec

if TYPE_CHECKING:
    from megaverl.trainer.resume import Saving

MEMORY = ("perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb")


class Run:
    """Owns what a run needs beside its inputs. Use as a context; leaving it ends the workers.

    Attributes:
        step: steps done.
        version: version of the weights: the number of handoffs to rollout so far, less one.
        handoff_bytes: bytes moved at handoffs, over all ranks and the whole run.
        kl: the weight of the KL in the reward.
        validations: (step, mean score) of each validation of this process.
        signals: whether the run was asked to stop.
        mirroring: copies finished checkpoints elsewhere, with ``trainer.mirror``.
        saving: the checkpoint that the workers are writing while training goes on.
    """

    def __init__(self, prepared: Prepared, console: Console) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.console = console
        self.directory = Path(self.config.trainer.run_dir)
        self.board = StatusBoard(self.directory)
        self.heartbeat = Heartbeat(console, board=self.board)
        self.timer = PhaseTimer(self.heartbeat.phase)
        self._watch = ExitStack()
        self.step = 0
        self.version = -1
        self.handoff_bytes = 0
        self.kl = KlController.of(self.config.algorithm)
        self.validations: list[tuple[int, float]] = []
        self._skipping = 0
        self._earlier: list[tuple[str, Asked]] = []
        self.signals = StopSignals(console)
        self.saving: Saving | None = None
        self.mirroring = Mirroring(self.config.trainer.mirror) if self.config.trainer.mirror else None
        self.workers: WorkerGroup
        self.trackers: Trackers
        self.worker_info: list[dict[str, Any]] = []

    @property
    def total_steps(self) -> int:
        return self.prepared.total_steps

    @property
    def goes_on(self) -> bool:
        """Steps are left, and nobody has asked the run to stop."""
        return self.step < self.total_steps and self.signals.received is None

    def start(self) -> None:
        """Starts Ray, the workers and their roles; resumes from a checkpoint where the configuration says so."""
        from megaverl.trainer.resume import resume

        self._claim_directory()
        keep_aside(self.directory, ("config.yaml", "summary.json", PROVENANCE))
        save_config(self.config, self.directory / "config.yaml")
        self._record_provenance()
        self._open_watch()
        with self.heartbeat, self.timer.phase("start"):
            self.heartbeat.phase("starting Ray")
            cluster.attach(self.config.cluster)
            device = cluster.choose_device(self.config.cluster)
            check_resources(self.config.cluster, device)
            self.heartbeat.phase("starting the workers")
            self.workers = WorkerGroup(self._spec(device))
            self.worker_info = self.workers.call("info")
            resume(self)
        first = self.step + 1 if self.step else 0  # a fresh run may log a validation as step 0
        self.trackers = open_trackers(self.config, self.console, first_step=first, total_steps=self.total_steps)
        self.announce()

    def _record_provenance(self) -> None:
        from megaverl.trainer.dry_run import reshard_totals
        from megaverl.trainer.resume import checkpoint_to_resume

        prepared, resumed = self.prepared, checkpoint_to_resume(self.config.trainer)
        write_provenance(
            self.directory,
            self.config,
            layout=str(prepared.layout),
            plan=reshard_totals(self.config, prepared.layout, prepared.shape),
            resumed_from=str(resumed) if resumed else None,
        )

    def _open_watch(self) -> None:
        """Opens what the run is watched by: a bar on a terminal, ``status.json``, with a port the endpoint."""
        observe = self.config.observe
        self._watch.enter_context(self.board)
        if observe.progress:
            self._watch.enter_context(self.console.progress_bar())
        if observe.health_port is not None:
            limit = self.config.cluster.phase_timeout
            server = HealthServer(self.board.now, observe.health_host, observe.health_port, limit)
            self._watch.enter_context(server)
            self.console.note(
                f"http://{observe.health_host}:{server.port}/healthz and /metrics say where the run stands"
            )

    def _claim_directory(self) -> None:
        """Holds a lock on the run directory while this process lives.

        Raises:
            UserError: another run writes there now.
        """
        self._lock = (self.directory / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                Problem(
                    "another run writes there now",
                    where=f"trainer.run_dir={self.directory}",
                    fix="name another run_dir, or wait until it has ended",
                )
            ) from None

    def _spec(self, device: str) -> WorkerSpec:
        prepared, config = self.prepared, self.config
        roles, critic = {"actor"}, None
        if not prepared.supervised:
            roles |= {"rollout", "reward"}
        if needs_reference(config):
            roles.add("reference")
        if prepared.critic is not None:
            roles.add("critic")
            path = str(Path(config.critic.path or config.model.path).resolve())
            critic = CriticPlan(path, prepared.critic, prepared.critic_updates)
        if prepared.reward_shape is not None:
            roles.add("reward_model")
        return WorkerSpec(
            config=with_absolute_paths(config),
            shape=prepared.shape,
            layout=prepared.layout,
            device=device,
            stop_ids=prepared.tokenizer.stop_ids,
            total_updates=prepared.actor_updates,
            roles=frozenset(roles),
            log_dir=str((self.directory / "logs").resolve()),
            critic=critic,
            reward_shape=prepared.reward_shape,
        )

    def announce(self) -> None:
        """Says what was chosen, and why."""
        first, layout = self.worker_info[0], self.prepared.layout
        self.console.line(f"{layout.world} workers · layout {layout} · {first['device']}")
        if "engine" in first:
            self.console.line(f"rollout by {first['engine']}: {first['engine_reason']}")

    def log_step(self, metrics: dict[str, float]) -> None:
        """Logs one step's metrics (those of a validation after it included), with its time, memory and throughput."""
        metrics = metrics | self.timer.metrics()
        seconds, tokens = metrics["timing_s/step"], metrics["perf/total_num_tokens"]
        metrics["perf/throughput"] = tokens / seconds / self.prepared.layout.world
        metrics["perf/time_per_step"] = seconds
        if MEMORY[0] not in metrics:
            metrics |= worst_memory(self.workers.call("memory"))
        metrics |= {"training/global_step": self.step, "training/epoch": self.prepared.sampler.epoch}
        self.trackers.log(metrics, self.step)
        self.board.log(metrics)
        bad = non_finite(metrics)
        if bad:
            self.console.warn(f"step {self.step}: not finite: {', '.join(bad)}")
        self._stop_when_stuck(metrics)

    def _stop_when_stuck(self, metrics: dict[str, float]) -> None:
        """Ends a run whose gradients are not finite step after step: the weights do not change any more.

        Raises:
            RunError: ``trainer.max_bad_steps`` steps in a row skipped an update.
        """
        limit = self.config.trainer.max_bad_steps
        skipped = any(name.endswith("/skipped_updates") for name in metrics)
        self._skipping = self._skipping + 1 if skipped else 0
        if self._skipping >= limit:
            raise RunError(
                f"step {self.step}: the gradient was not finite in {limit} steps in a row (trainer.max_bad_steps)\n"
                "    -> look at actor/grad_norm and the rewards in metrics.jsonl; lower actor.optimizer.lr"
            )

    def wait_later(self, phase: str, asked: Asked) -> None:
        """Leaves a call without a result that matters to be waited for by `wait_for_earlier`, timed as ``phase``."""
        self._earlier.append((phase, asked))

    def wait_for_earlier(self) -> None:
        """Waits for all that was left to `wait_later`, in order; raises what a rank raised in it."""
        earlier, self._earlier = self._earlier, []
        for phase, asked in earlier:
            with self.timer.phase(phase):
                self.workers.answers(asked)

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Writes ``summary.json`` into the run directory, whole."""
        path = self.directory / "summary.json"
        write_json(path, summary)
        return path

    def close(self) -> None:
        """Ends the workers and the trackers; the Ray that this process started stays for a next run in it."""
        with ExitStack() as stack:  # the others too when one fails
            if hasattr(self, "_lock"):  # last: a reader takes a run without it for one that died
                stack.callback(self._lock.close)
            stack.enter_context(self._watch)
            if hasattr(self, "workers"):
                stack.callback(self.workers.close)
            if hasattr(self, "trackers"):
                stack.callback(self.trackers.close)


def with_absolute_paths(config: Config) -> Config:
    """A copy for the workers, whose processes run in other folders and on other nodes than the driver."""
    made = config.model_copy(deep=True)
    sections: list[tuple[Any, str]] = [
        (made.model, "path"), (made.model, "tokenizer_path"), (made.critic, "path"), (made.reward.function, "path"),
        (made.reward.model, "path"), (made.trainer, "run_dir"),
    ]  # fmt: skip
    for section, key in sections:
        if getattr(section, key):
            setattr(section, key, str(Path(getattr(section, key)).resolve()))
    return made


def keep_aside(folder: Path, names: Sequence[str]) -> None:
    """Renames files that an earlier run left in ``folder``, ``config.yaml`` to ``config.1.yaml`` and so on."""
    for name in names:
        path, number = folder / name, 1
        while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        if path.exists():
            path.rename(aside)


def worst_memory(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The most of any worker, from reports that hold `MEMORY` among others."""
    return {name: max(report[name] for report in reports) for name in MEMORY if name in reports[0]}
