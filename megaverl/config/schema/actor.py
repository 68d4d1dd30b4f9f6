"""Keys of `actor`: the trained policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Aggregation, KlEstimator, Positive, Recompute, Section
from megaverl.config.schema.model import LayoutConfig, OptimizerConfig


class ActorConfig(Section):
    layout: LayoutConfig = Field(
        default_factory=LayoutConfig,
        description="How the model is split for training; dp is what remains of the workers.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The actor's optimizer.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Number format of the weights; auto takes bf16 where the hardware has it, else fp32."
    )
    kernels: Literal["auto", "te", "flash", "eager"] = Field(
        "auto", description="Kernel backend; auto takes the fastest that the hardware and the installed packages allow."
    )
    recompute: Recompute = Field(
        "none",
        description="Activations that the backward pass computes again to save memory: none, those inside attention (selective), or all but each layer's input (full).",
    )
    offload_optimizer: bool = Field(
        False,
        description="Keep the optimizer's state in host memory while responses are generated; nothing to do on a CPU.",
    )
    offload_gradients: bool = Field(
        True, description="Free the gradient buffers while responses are generated; nothing is copied."
    )
    mini_batch_size: int | None = Field(
        None, ge=1, description="Prompts per optimizer update, over all workers; the whole batch when not set."
    )
    epochs: Positive = Field(1, description="Passes over each batch (PPO epochs).")
    max_tokens_per_micro_batch: Positive = Field(16384, description="Tokens a worker puts through the model at once.")
    logprob_chunk: int | None = Field(
        None,
        ge=1,
        description="Tokens whose logits exist at the same time while log-probabilities are computed; by the GPU's memory (1024 on a CPU) when not set.",
    )
    clip_ratio_low: float = Field(0.2, ge=0, le=1, description="Lower clip range of the policy ratio.")
    clip_ratio_high: float = Field(0.2, ge=0, description="Upper clip range of the policy ratio.")
    clip_ratio_c: float | None = Field(
        3.0, gt=1, description="Dual-clip bound for negative advantages (arXiv 1912.09729); none switches it off."
    )
    loss_aggregation: Aggregation = Field("token-mean", description="How token losses become one number.")
    use_kl_loss: bool = Field(False, description="Add the KL to the reference model to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of the KL loss.")
    kl_loss_type: KlEstimator = Field("low_var_kl", description="Estimator of the KL loss (low_var_kl is k3).")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus; 0 leaves the entropy as a metric only.")
    recompute_old_log_probs: Literal["auto", "always"] = Field(
        "auto",
        description="auto skips the extra pass when a batch is used for exactly one update, where old and new log-probabilities are the same numbers.",
    )
