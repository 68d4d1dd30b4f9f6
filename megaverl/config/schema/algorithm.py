"""Keys of `algorithm`: what is learnt from the scores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import KlEstimator, Positive, Section
from megaverl.config.schema.preference import PreferenceConfig


class AlgorithmConfig(Section):
    name: Literal[
        "grpo",
        "dr_grpo",
        "ppo",
        "rloo",
        "reinforce++",
        "reinforce++_baseline",
        "remax",
        "gspo",
        "dapo",
        "cispo",
        "sft",
        "rm",
        "dpo",
        "kto",
    ] = Field(
        "grpo",
        description="Training algorithm; docs/algorithms.md says what each is and which other keys it sets (dr_grpo, gspo, dapo, cispo) unless they are given.",
    )
    norm_adv_by_std: bool = Field(
        True,
        description="Divide group advantages by the group's standard deviation (GRPO); false gives Dr.GRPO's form.",
    )
    kl_in_reward: bool = Field(False, description="Subtract the KL to the reference model from the reward.")
    kl_coef: float = Field(0.001, ge=0, description="Weight of the KL in the reward; the first one when adaptive.")
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="Keep the weight of the KL in the reward, or steer it towards kl_target (arXiv 1909.08593).",
    )
    kl_target: float = Field(0.1, gt=0, description="KL per token that the adaptive controller holds.")
    kl_horizon: Positive = Field(10_000, description="Sequences over which the adaptive controller follows.")
    kl_estimator: KlEstimator = Field("k1", description="Estimator of the KL in the reward.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token (ppo, reinforce++, remax).")
    lam: float = Field(
        1.0, ge=0, le=1, description="Lambda of generalised advantage estimation (PPO, arXiv 1506.02438)."
    )
    whiten_advantages: bool = Field(
        True, description="Shift and scale the advantages of a step to mean 0 and variance 1 over its tokens (PPO)."
    )
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig, description="Training on preferred answers (rm, dpo, kto)."
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace prompts whose samples all have the same score by others until the batch is full (DAPO, arXiv 2503.14476, section 3.2); dapo sets it.",
    )
    max_generation_batches: Positive = Field(
        10,
        description="Batches of prompts that dynamic sampling may generate in a step; then the batch is filled up with prompts that it had left out.",
    )
