"""The worker process: one rank, hosting the roles of its pool. Each public method is a phase called on all ranks."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.observe.timing import PhaseTimer
from megaverl.rollout.engine import Sampling
from megaverl.workers.beats import Pulse
from megaverl.workers.building import (
    build_actor,
    build_critic,
    build_reference,
    build_reward_model,
    build_rollout,
    seed,
)
from megaverl.workers.checkpoint_phases import CheckpointPhases
from megaverl.workers.liveness import Whereabouts
from megaverl.workers.preference_phases import PreferencePhases
from megaverl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from megaverl.data.batch import SequenceBatch


class Worker(CheckpointPhases, PreferencePhases):
    """Becomes a Ray actor; holds everything that lives on one GPU (or one CPU slot)."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.spec = spec
        self._work = PhaseTimer()
        self.take_rank(rank)
        faulthandler.enable(2)  # a crash in C code leaves its signal and its Python stack in the log
        self._pulse = Pulse(_node_address())
        if spec.device == "cpu":
            import torch

            torch.set_num_threads(spec.config.cluster.threads_per_worker)

    # -- start ---------------------------------------------------------------------------------------------

    def take_rank(self, rank: int) -> None:
        """This process is ``rank`` from now on, and its output goes into that rank's log."""
        self.rank = rank
        _log_to(Path(self.spec.log_dir) / f"rank_{rank}.log")

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this worker's node, where all ranks meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return _node_address(), probe.getsockname()[1]

    def whereabouts(self) -> Whereabouts:
        """Where this process runs and answers."""
        import ray

        gpus = tuple(int(number) for number in ray.get_gpu_ids() if str(number).isdigit())
        return Whereabouts(_node_address(), os.getpid(), self._pulse.port, gpus)

    def join(self, address: str, port: int) -> None:
        """Joins torch.distributed and builds the roles. The order matters: training storage before vLLM."""
        from megaverl.parallel.device import choose_device
        from megaverl.parallel.network import bind_to
        from megaverl.parallel.setup import init_distributed, init_model_parallel

        spec, config = self.spec, self.spec.config
        bind_to(_node_address())
        seed(config.trainer.seed)
        self.device = choose_device(config.actor.precision, config.actor.kernels, spec.device)
        init_distributed(self.rank, spec.layout.world, address, port, self.device)
        self.grid = init_model_parallel(spec.layout, config.trainer.seed)
        self.version = -1
        self._batch: SequenceBatch | None = None
        self.actor = build_actor(spec, self.grid, self.device)
        if "critic" in spec.roles:
            self.critic = build_critic(spec, self.grid, self.device)
        if "reference" in spec.roles:
            self.reference = build_reference(spec, self.grid, self.device)
        if "reward_model" in spec.roles:
            self.reward_model = build_reward_model(spec, self.grid, self.device)
        if "rollout" in spec.roles:
            self.rollout, self.hybrid, self.engine_choice = build_rollout(
                spec, self.rank, self.device, self.actor.policy.parameters_by_name(), self._release_training_memory
            )

    def perform(self, posted: Sequence[tuple[str, Sequence[Any]]], method: str, args: Sequence[Any]) -> Any:
        """Does the posted (method, arguments) in order, then ``method``; returns what that returns."""
        try:
            for name, values in posted:
                self._pulse.phase(name)
                getattr(self, name)(*values)
            self._pulse.phase(method)
            return getattr(self, method)(*args)
        finally:
            self._pulse.phase("")

    # -- rollout ---------------------------------------------------------------------------------------------

    def to_rollout(self, version: int) -> dict[str, float]:
        """Handoff train -> rollout: the engine serves the weights as version ``version`` from now on.

        Returns the engine's report with this rank's `memory` in it.
        """
        self._batch = None
        self.version = version
        with self._work.phase("update_weights"):
            report = self.hybrid.to_rollout(version)
        return report | self.memory()

    def _release_training_memory(self) -> None:
        """What only training needs leaves the GPU; the first update of the next train phase brings it back."""
        from megaverl.config.derived import offload
        from megaverl.observe.memory import return_free_memory

        self.actor.policy.release_for_rollout(**offload(self.spec.config, "actor"))
        if "critic" in self.spec.roles:
            self.critic.critic.release_for_rollout(**offload(self.spec.config, "critic"))
        if self.spec.device == "cpu":
            return_free_memory()

    def to_train(self) -> None:
        """Handoff rollout -> train: the engine gives up its memory."""
        with self._work.phase("update_weights"):
            self.hybrid.to_train()

    def generate(self, tasks: Sequence[Any], sampling: Sampling) -> Any:
        """Answers the replica's tasks; its first rank returns a GeneratedShard, the others None."""
        import ray

        with self._work.phase("gen"):
            self.rollout.generate(tasks, sampling)
        if self.rollout.tp_rank:
            return None
        return self.rollout.describe(ray.put(self.rollout.batch()))

    def score(self, keep_texts: bool = False) -> Any:
        """Scores this rank's share of the last responses."""
        with self._work.phase("reward"):
            return self.rollout.score(keep_texts)

    def reward_model_scores(self, pieces_by_dp: Sequence[Sequence[tuple[Any, list[int]]]]) -> list[float] | None:
        """The reward model's scores of this data parallel rank's share of the responses."""
        pieces = pieces_by_dp[self.grid.at.dp]
        with self._work.phase("reward"):
            return self._from_first_rank(self.reward_model.scores(_assembled(pieces)) if pieces else [])

    # -- training --------------------------------------------------------------------------------------------

    def load(self, pieces_by_dp: Sequence[Sequence[tuple[Any, list[int]]]]) -> None:
        """Assembles this data parallel rank's batch from (reference, sequences) pieces of the object store."""
        self._batch = _assembled(pieces_by_dp[self.grid.at.dp])

    @property
    def batch(self) -> SequenceBatch:
        """This rank's share of the step's batch, with the columns that the phases have added."""
        if self._batch is None:
            raise RuntimeError("no batch was loaded in this step")
        return self._batch

    def old_log_probs(self) -> dict[str, float] | None:
        with self._work.phase("old_log_prob"):
            gaps = self.actor.old_log_probs(self.batch)
        return self._from_first_rank(gaps)

    def reference_log_probs(self) -> list[float] | None:
        with self._work.phase("ref"):
            penalty = self.reference.log_probs(self.batch)
        return self._from_first_rank(None if penalty is None else penalty.tolist())

    def values(self) -> None:
        with self._work.phase("values"):
            self.critic.values(self.batch)

    def estimate_advantages(
        self, scores_by_dp: Sequence[Sequence[float]], baselines_by_dp: Sequence[Sequence[float]] | None, kl_coef: float
    ) -> Any:
        """Advantages of tokens, from the critic's values or from the rewards to come less a baseline of the response;
        the first rank of each model copy returns their moments."""
        scores = scores_by_dp[self.grid.at.dp]
        with self._work.phase("adv"):
            if "critic" in self.spec.roles:
                moments = self.critic.estimate_advantages(self.batch, scores, kl_coef)
            else:
                baselines = None if baselines_by_dp is None else baselines_by_dp[self.grid.at.dp]
                moments = self.actor.estimate_returns(self.batch, scores, baselines, kl_coef)
        return self._from_first_rank(moments)

    def whiten_advantages(self, moments: Any) -> None:
        with self._work.phase("adv"):
            self.actor.whiten_advantages(self.batch, moments)

    def set_advantages(self, advantages_by_dp: Sequence[Sequence[float]]) -> None:
        """One advantage per sequence, computed by the driver."""
        with self._work.phase("adv"):
            self.actor.set_advantages(self.batch, advantages_by_dp[self.grid.at.dp])

    def update_critic(self, updates_by_dp: Sequence[Sequence[Any]]) -> Any:
        """Runs the critic's updates; the first rank of each model copy returns the reports."""
        with self._work.phase("update_critic"):
            return self._from_first_rank(self.critic.update(self.batch, updates_by_dp[self.grid.at.dp]))

    def update_actor(self, updates_by_dp: Sequence[Sequence[Any]]) -> Any:
        """Runs the actor's updates; the first rank of each model copy returns the reports."""
        with self._work.phase("update_actor"):
            return self._from_first_rank(self.actor.update(self.batch, updates_by_dp[self.grid.at.dp]))

    def _from_first_rank(self, value: Any) -> Any:
        """Results are equal on all ranks of a model copy (or complete on its last stage): one of them speaks."""
        at, layout = self.grid.at, self.spec.layout
        return value if at.tp == 0 and at.cp == 0 and at.pp == layout.pp - 1 else None

    def close(self) -> None:
        """Ends the processes of a custom scorer, and the rollout engine, whose shared memory would outlive it."""
        if "rollout" in self.spec.roles and hasattr(self, "rollout"):
            if self.rollout.scorer is not None:
                self.rollout.scorer.close()
            self.rollout.engine.close()

    # -- observation -----------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What was chosen in this worker, for the start message and the run's record."""
        device = self.device
        number_format = str(device.dtype).removeprefix("torch.")
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "dtype": number_format,
            "device": f"{device.kind}, {number_format}, {device.backend} kernels: {device.reason}",
        }
        if "rollout" in self.spec.roles:
            found["engine"] = self.engine_choice.name
            found["engine_reason"] = self.engine_choice.reason
            found["bytes_aliased"] = self.hybrid.plan.bytes_aliased
        return found

    def work_seconds(self) -> dict[str, float]:
        """``timing_s/<phase>`` that this rank's roles have worked since the last call; what is missing to the driver's
        seconds went into calls, moving batches and bookkeeping."""
        return self._work.metrics()

    def memory(self) -> dict[str, float]:
        """Resident memory of this process in GiB, and the peak of the GPU's where there is one."""
        import psutil
        import torch

        found = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30}
        if self.spec.device == "cuda":
            before = self.hybrid.memory.most_allocated if "rollout" in self.spec.roles else 0
            found["perf/max_memory_allocated_gb"] = max(before, torch.cuda.max_memory_allocated()) / 2**30
        return found


def _assembled(pieces: Sequence[tuple[Any, list[int]]]) -> SequenceBatch:
    import ray

    from megaverl.data.batch import SequenceBatch

    batches = ray.get([reference for reference, _ in pieces])
    return SequenceBatch.concat([b.select(sequences) for b, (_, sequences) in zip(batches, pieces, strict=True)])


def _node_address() -> str:
    """This node's address as Ray knows it."""
    import ray

    return ray.util.get_node_ip_address()


def _log_to(path: Path) -> None:
    """Sends this process's output, that of its C libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
