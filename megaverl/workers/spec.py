"""What a worker process is told at its start. Pure data, so it crosses the process border."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megaverl.config.schema import Config
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.resharding.placement import Place, rollout_places


@dataclass(frozen=True)
class CriticPlan:
    """The critic of a pool.

    Attributes:
        path: folder of the checkpoint that it starts from.
        shape: of its body.
        total_updates: its optimizer updates in the whole run, for its learning-rate schedule.
    """

    path: str
    shape: ModelShape
    total_updates: int


@dataclass(frozen=True)
class WorkerSpec:
    """The plan of a pool, the same for all its workers.

    Attributes:
        layout: the train layout.
        device: ``cpu`` or ``cuda``.
        stop_ids: token ids that end a response.
        total_updates: the actor's optimizer updates in the whole run, for its learning-rate schedule.
        roles: which roles the pool's workers host, of ``actor``, ``critic``, ``reference``, ``rollout``, ``reward``
            and ``reward_model``.
        log_dir: folder where each worker writes ``rank_N.log``.
        critic: the critic to host with the role ``critic``.
        reward_shape: of the body of the reward model to host with the role ``reward_model``.
    """

    config: Config
    shape: ModelShape
    layout: Layout
    device: str
    stop_ids: tuple[int, ...]
    total_updates: int
    roles: frozenset[str]
    log_dir: str
    critic: CriticPlan | None = None
    reward_shape: ModelShape | None = None

    @property
    def rollout_tp(self) -> int:
        """Tensor parallel size of the rollout."""
        return self.config.rollout.tp or self.layout.tp

    @property
    def replicas(self) -> int:
        """Rollout replicas: each generates for its own prompts."""
        return self.layout.world // self.rollout_tp

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Each rank's replica and tensor parallel rank in the rollout."""
        return rollout_places(self.layout, self.rollout_tp)
