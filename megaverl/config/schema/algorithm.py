"""Keys of `algorithm`: what is learnt from the scores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import KlEstimator, Section
from megaverl.config.schema.preference import PreferenceConfig


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "ppo", "sft"] = Field(
        "grpo",
        description="Training algorithm: GRPO (arXiv 2402.03300), Dr.GRPO (arXiv 2503.20783), PPO with a critic (arXiv 1707.06347) or supervised training.",
    )
    norm_adv_by_std: bool = Field(
        True,
        description="Divide group advantages by the group's standard deviation (GRPO); false gives Dr.GRPO's form.",
    )
    kl_in_reward: bool = Field(False, description="Subtract the KL to the reference model from the reward.")
    kl_coef: float = Field(0.001, ge=0, description="Weight of the KL in the reward.")
    kl_estimator: KlEstimator = Field("k1", description="Estimator of the KL in the reward.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token (PPO).")
    lam: float = Field(
        1.0, ge=0, le=1, description="Lambda of generalised advantage estimation (PPO, arXiv 1506.02438)."
    )
    whiten_advantages: bool = Field(
        True, description="Shift and scale the advantages of a step to mean 0 and variance 1 over its tokens (PPO)."
    )
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig, description="Training on preferred answers (rm, dpo, kto)."
    )
