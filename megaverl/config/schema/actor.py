"""Keys of `actor`: the trained policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Aggregation, KlEstimator, Positive, Recompute, Section
from megaverl.config.schema.model import LayoutConfig, OptimizerConfig


class RolloutCorrectionConfig(Section):
    importance: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Weight the policy loss by how much likelier the training model holds a sample than the rollout engine did: token by token, or by the product over the response.",
    )
    threshold: float = Field(2.0, gt=0, description="Largest weight; larger ones are cut to it (truncation).")
    mask: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="Leave out of the policy loss what the two models disagree on: tokens by their ratio, responses by the product of their tokens' ratios or by its geometric mean.",
    )
    mask_upper: float = Field(2.0, gt=0, description="Largest ratio that is not left out.")
    mask_lower: float | None = Field(
        None, ge=0, description="Smallest ratio that is not left out; 1 / mask_upper when not set."
    )
    veto: float | None = Field(
        None, gt=0, description="Leave out responses in which any token's ratio is below this, e.g. 1e-4; null never."
    )

    @property
    def active(self) -> bool:
        """Whether the loss is changed at all."""
        return self.importance != "none" or self.masks

    @property
    def masks(self) -> bool:
        """Whether tokens may be left out."""
        return self.mask != "none" or self.veto is not None


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
    policy_loss: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo",
        description="Policy loss: clipped surrogate (arXiv 1707.06347), one ratio for a response (GSPO, arXiv 2507.18071) or clipped weights (CISPO, arXiv 2506.13585); algorithm.name gspo and cispo set it.",
    )
    clip_ratio_low: float = Field(
        0.2, ge=0, le=1, description="Lower clip range of the policy ratio; gspo sets 0.0003, cispo 1 (no bound)."
    )
    clip_ratio_high: float = Field(
        0.2, ge=0, description="Upper clip range of the policy ratio; dapo sets 0.28, gspo 0.0004."
    )
    clip_ratio_c: float | None = Field(
        3.0, gt=1, description="Dual-clip bound for negative advantages (arXiv 1912.09729); none switches it off."
    )
    loss_aggregation: Aggregation = Field(
        "token-mean",
        description="How token losses become one number; dr_grpo sets seq-mean-token-sum-norm, gspo seq-mean-token-mean.",
    )
    use_kl_loss: bool = Field(False, description="Add the KL to the reference model to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of the KL loss.")
    kl_loss_type: KlEstimator = Field("low_var_kl", description="Estimator of the KL loss (low_var_kl is k3).")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus; 0 leaves the entropy as a metric only.")
    recompute_old_log_probs: Literal["auto", "always"] = Field(
        "auto",
        description="auto skips the extra pass when a batch is used for exactly one update, where old and new log-probabilities are the same numbers.",
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig,
        description="Correction of the difference between rollout and training log-probabilities.",
    )
