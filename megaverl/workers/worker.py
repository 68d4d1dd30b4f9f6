"""The worker process: one rank, hosting the roles of its pool. Each public method is a phase called on all ranks."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.observe.timing import PhaseTimer
from megaverl.rollout.engine import Sampling
from megaverl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from megaverl.data.batch import SequenceBatch
    from megaverl.models.packed_model import PackedModel


class Worker:
    """Becomes a Ray actor; holds everything that lives on one GPU (or one CPU slot)."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self._work = PhaseTimer()
        _log_to(Path(spec.log_dir) / f"rank_{rank}.log")
        if spec.device == "cpu":
            import torch

            torch.set_num_threads(spec.config.cluster.threads_per_worker)

    # -- start ---------------------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this worker's node, where all ranks meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        """Joins torch.distributed and builds the roles. The order matters: training storage before vLLM."""
        from megaverl.parallel.device import choose_device
        from megaverl.parallel.setup import init_distributed, init_model_parallel

        spec, config = self.spec, self.spec.config
        self._seed()
        self.device = choose_device(config.actor.precision, config.actor.kernels, spec.device)
        init_distributed(self.rank, spec.layout.world, address, port, self.device)
        self.grid = init_model_parallel(spec.layout, config.trainer.seed)
        self.version = -1
        self._batch: SequenceBatch | None = None
        self._build_actor()
        if "critic" in spec.roles:
            self._build_critic()
        if "reference" in spec.roles:
            self._build_reference()
        if "rollout" in spec.roles:
            self._build_rollout()

    def _seed(self) -> None:
        import numpy
        import torch

        seed = self.spec.config.trainer.seed
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _policy(self, trainable: bool) -> Any:
        from megaverl.checkpoint.hf_import import load_hf
        from megaverl.config.rules import recompute
        from megaverl.models.family import weight_map
        from megaverl.models.policy import PolicyModel

        spec, actor = self.spec, self.spec.config.actor
        policy = PolicyModel(
            spec.shape,
            spec.layout,
            self.device,
            trainable=trainable,
            sequence_parallel=actor.layout.sequence_parallel,
            logprob_chunk=actor.logprob_chunk,
            recompute=recompute(spec.config, "actor"),
        )
        load_hf(
            spec.config.model.path,
            weight_map(spec.shape),
            policy.parameters_by_name(),
            tp=spec.layout.tp,
            tp_rank=self.grid.at.tp,
            whole_model=spec.layout.pp == 1,
        )
        return policy

    def _build_actor(self) -> None:
        from megaverl.workers.actor_role import ActorRole

        policy = self._policy(trainable=True)
        policy.prepare_training(self.spec.config.actor.optimizer, self.spec.total_updates)
        self.actor = ActorRole(self.spec.config, policy)

    def _build_reference(self) -> None:
        from megaverl.workers.reference_role import ReferenceRole

        self.reference = ReferenceRole(self.spec.config, self._policy(trainable=False))

    def _build_critic(self) -> None:
        from megaverl.checkpoint.critic import load_critic
        from megaverl.config.rules import recompute
        from megaverl.models.critic import CriticModel
        from megaverl.workers.critic_role import CriticRole

        spec, config = self.spec, self.spec.config
        if spec.critic is None:
            raise RuntimeError("the pool hosts a critic and its plan does not say which")
        critic = CriticModel(
            spec.critic.shape,
            spec.layout,
            self.device,
            trainable=True,
            sequence_parallel=config.actor.layout.sequence_parallel,
            recompute=recompute(config, "critic"),
        )
        load_critic(
            spec.critic.path,
            critic.parameters_by_name(),
            tp=spec.layout.tp,
            tp_rank=self.grid.at.tp,
            whole_model=spec.layout.pp == 1,
        )
        critic.prepare_training(config.critic.optimizer, spec.critic.total_updates)
        self.critic = CriticRole(config, critic)

    def _build_rollout(self) -> None:
        from megaverl.data.tokenizer import load_tokenizer
        from megaverl.models.family import weight_map
        from megaverl.resharding.hybrid_engine import HybridEngine
        from megaverl.resharding.planner import make_plan
        from megaverl.resharding.transfer import Transfer
        from megaverl.rewards.scorer import Scorer
        from megaverl.rollout.factory import make_engine
        from megaverl.workers.rollout_role import RolloutRole

        spec, config = self.spec, self.spec.config
        plan = make_plan(weight_map(spec.shape), spec.layout, spec.rollout_tp, element_bytes=self.device.dtype.itemsize)
        params = self.actor.policy.parameters_by_name()
        engine, self.engine_choice = make_engine(
            config.model.path,
            spec.shape,
            plan,
            params,
            spec.layout,
            config.rollout,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            device=self.device.torch_device,
            seed=config.trainer.seed,
        )
        tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.path)
        scorer = Scorer(config.reward.function.path, config.reward.function.name)
        self.rollout = RolloutRole(engine, tokenizer, scorer, self.rank % spec.rollout_tp, spec.rollout_tp)
        transfer = Transfer(
            plan, self.rank, params, engine.weights, config.resharding.bucket_mb << 20, config.resharding.verify
        )
        self.hybrid = HybridEngine(engine, plan.ranks[self.rank], transfer)

    def perform(self, posted: Sequence[tuple[str, Sequence[Any]]], method: str, args: Sequence[Any]) -> Any:
        """Does the posted (method, arguments) in order, then ``method``; returns what that returns."""
        for name, values in posted:
            getattr(self, name)(*values)
        return getattr(self, method)(*args)

    # -- rollout ---------------------------------------------------------------------------------------------

    def to_rollout(self, version: int) -> dict[str, float]:
        """Handoff train -> rollout: the engine serves the weights as version ``version`` from now on.

        Returns the engine's report with this rank's `memory` in it.
        """
        self._batch = None
        self.version = version
        with self._work.phase("update_weights"):
            self._release_training_memory()
            report = self.hybrid.to_rollout(version)
        return report | self.memory()

    def _release_training_memory(self) -> None:
        """What only training needs leaves the GPU; the first update of the next train phase brings it back."""
        from megaverl.config.rules import offload
        from megaverl.observe.memory import return_free_memory

        self.actor.policy.release_for_rollout(**offload(self.spec.config, "actor"))
        if "critic" in self.spec.roles:
            self.critic.critic.release_for_rollout(**offload(self.spec.config, "critic"))
        if self.spec.device == "cpu":
            return_free_memory()

    def to_train(self) -> dict[str, float]:
        """Handoff rollout -> train: the engine gives up its cache."""
        with self._work.phase("update_weights"):
            return self.hybrid.to_train()

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

    # -- training --------------------------------------------------------------------------------------------

    def load(self, pieces_by_dp: Sequence[Sequence[tuple[Any, list[int]]]]) -> None:
        """Assembles this data parallel rank's batch from (reference, sequences) pieces of the object store."""
        import ray

        from megaverl.data.batch import SequenceBatch

        pieces = pieces_by_dp[self.grid.at.dp]
        batches = ray.get([reference for reference, _ in pieces])
        chosen = [b.select(sequences) for b, (_, sequences) in zip(batches, pieces, strict=True)]
        self._batch = SequenceBatch.concat(chosen)

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

    def estimate_advantages(self, scores_by_dp: Sequence[Sequence[float]]) -> Any:
        """Advantages and returns from the critic's values; the first rank of each model copy returns their moments."""
        with self._work.phase("adv"):
            moments = self.critic.estimate_advantages(self.batch, scores_by_dp[self.grid.at.dp])
        return self._from_first_rank(moments)

    def whiten_advantages(self, moments: Any) -> None:
        with self._work.phase("adv"):
            self.critic.whiten_advantages(self.batch, moments)

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

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save_state(self, run_dir: str, step: int, shared: dict[str, Any]) -> Any:
        """Writes this rank's part of the train state; returns the files written, for the manifest."""
        import torch

        from megaverl.checkpoint.train_state import save_state

        state = {name: _state_of(model) for name, model in self._trained().items()}
        state["torch_rng"] = torch.get_rng_state()
        return save_state(run_dir, step, self.rank, self.spec.layout.world, state, shared if self.rank == 0 else None)

    def load_state(self, folder: str) -> None:
        """Takes up this rank's part of a saved train state; weights are copied into the storage that is aliased."""
        import torch

        from megaverl.checkpoint.train_state import load_state

        state, _ = load_state(folder, self.rank, self.spec.layout.world, self.spec.layout)
        for name, model in self._trained().items():
            with torch.no_grad():
                for parameter_name, parameter in model.parameters_by_name().items():
                    parameter.copy_(state[name]["weights"][parameter_name])
            model.weights_written()
            model.load_state_dict(state[name]["training"])
        torch.set_rng_state(state["torch_rng"])

    def _trained(self) -> dict[str, PackedModel]:
        """The models that this pool trains."""
        trained: dict[str, PackedModel] = {"actor": self.actor.policy}
        if "critic" in self.spec.roles:
            trained["critic"] = self.critic.critic
        return trained

    def export_hf(self, out: str) -> None:
        """Writes the actor as a Hugging Face checkpoint; collective over the first data parallel replica."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.hf_export import ModelRanks, export_hf
        from megaverl.models.family import weight_map

        at, layout = self.grid.at, self.spec.layout
        export_hf(
            {n: p.detach() for n, p in self.actor.policy.parameters_by_name().items()},
            weight_map(self.spec.shape),
            out,
            ModelRanks(layout.tp, at.tp, self.grid.tp, layout.pp, at.pp, self.grid.pp),
            source=self.spec.config.model.path,
            tokenizer=self.spec.config.model.tokenizer_path,
        )

    def export_critic_hf(self, out: str) -> None:
        """Writes the critic as a Hugging Face token classification; collective like `export_hf`."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.critic import export_critic

        critic, plan = self.critic.critic, self.spec.critic
        if plan is None:
            raise RuntimeError("the pool hosts a critic and its plan does not say which")
        export_critic(
            {n: p.detach() for n, p in critic.parameters_by_name().items()},
            plan.shape,
            out,
            self._model_ranks(),
            source=plan.path,
            tokenizer=self.spec.config.model.tokenizer_path or self.spec.config.model.path,
        )

    def _model_ranks(self) -> Any:
        from megaverl.checkpoint.hf_export import ModelRanks

        at, layout = self.grid.at, self.spec.layout
        return ModelRanks(layout.tp, at.tp, self.grid.tp, layout.pp, at.pp, self.grid.pp)

    def close(self) -> None:
        """Ends the rollout engine, which holds shared memory that would outlive the process."""
        if "rollout" in self.spec.roles and hasattr(self, "rollout"):
            self.rollout.engine.close()

    # -- observation -----------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What was chosen in this worker, for the start message and the run's record."""
        device = self.device
        number_format = str(device.dtype).removeprefix("torch.")
        found: dict[str, Any] = {
            "pid": os.getpid(),
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
            found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        return found


def _state_of(model: PackedModel) -> dict[str, Any]:
    weights = {name: parameter.detach() for name, parameter in model.parameters_by_name().items()}
    return {"weights": weights, "training": model.state_dict()}


def _log_to(path: Path) -> None:
    """Sends this process's output, that of its C libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
