"""The typed configuration: every key, its default, its bounds and a sentence that says what it does.

One module per section. Batch sizes of the algorithm (`data.train_batch_size`, `actor.mini_batch_size`) are global and
count prompts; token limits of micro-batches are per worker.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from megaverl.config.schema.actor import ActorConfig, RolloutCorrectionConfig
from megaverl.config.schema.algorithm import AlgorithmConfig
from megaverl.config.schema.base import Aggregation, KlEstimator, Positive, Recompute, Section
from megaverl.config.schema.cluster import ClusterConfig
from megaverl.config.schema.critic import CriticConfig, CriticOptimizerConfig, ReferenceConfig
from megaverl.config.schema.data import DataConfig
from megaverl.config.schema.model import LayoutConfig, ModelConfig, OptimizerConfig
from megaverl.config.schema.observe import ObserveConfig
from megaverl.config.schema.preference import PreferenceConfig
from megaverl.config.schema.presets import with_presets
from megaverl.config.schema.reward import RewardConfig, RewardFunctionConfig
from megaverl.config.schema.rollout import ReshardingConfig, RolloutConfig, SamplingConfig, ValidationSamplingConfig
from megaverl.config.schema.trainer import TrainerConfig

__all__ = [
    "ActorConfig",
    "Aggregation",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "KlEstimator",
    "LayoutConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "Positive",
    "PreferenceConfig",
    "Recompute",
    "ReferenceConfig",
    "ReshardingConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "Section",
    "TrainerConfig",
    "ValidationSamplingConfig",
]


class Config(Section):
    """The whole configuration of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="The checkpoint to train.")
    data: DataConfig = Field(default_factory=DataConfig, description="Training and validation rows.")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The trained policy.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The value model of PPO.")
    reference: ReferenceConfig = Field(
        default_factory=ReferenceConfig, description="The frozen copy of the start weights."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Scoring of responses.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    resharding: ReshardingConfig = Field(
        default_factory=ReshardingConfig, description="Turning training weights into rollout weights."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="What is learnt from the scores.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The run.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="How the run is watched.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Where the workers run.")

    @model_validator(mode="before")
    @classmethod
    def _presets(cls, values: Any) -> Any:
        """The algorithm's own values for keys that are not given."""
        return with_presets(values) if isinstance(values, dict) else values
