"""Keys of `critic` and `reference`: the models beside the policy."""

from __future__ import annotations

from pydantic import Field

from megaverl.config.schema.base import Aggregation, Recompute, Section
from megaverl.config.schema.model import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-5, ge=0, description="Peak learning rate of AdamW.")


class CriticConfig(Section):
    path: str | None = Field(
        None,
        description="Folder of the checkpoint that the critic starts from: a causal language model (the value head then starts at zero) or a sequence or token classification with one label; model.path when not set.",
    )
    optimizer: CriticOptimizerConfig = Field(
        default_factory=CriticOptimizerConfig, description="The critic's optimizer; its layout is the actor's."
    )
    recompute: Recompute | None = Field(
        None, description="Activations that the backward pass computes again; the actor's choice when not set."
    )
    offload_optimizer: bool | None = Field(
        None,
        description="Keep the optimizer's state in host memory while responses are generated; the actor's choice when not set.",
    )
    offload_gradients: bool | None = Field(
        None, description="Free the gradient buffers while responses are generated; the actor's choice when not set."
    )
    offload_parameters: bool = Field(
        False, description="Keep the critic's weights in host memory while responses are generated; nothing on a CPU."
    )
    mini_batch_size: int | None = Field(
        None, ge=1, description="Prompts per optimizer update, over all workers; the actor's when not set."
    )
    epochs: int | None = Field(None, ge=1, description="Passes over each batch; the actor's when not set.")
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="Tokens a worker puts through the critic at once; the actor's when not set."
    )
    cliprange_value: float | None = Field(
        0.5, gt=0, description="Furthest that a value may usefully move on one batch; null switches clipping off."
    )
    loss_aggregation: Aggregation = Field("token-mean", description="How token losses become one number.")


class ReferenceConfig(Section):
    offload: bool = Field(
        True, description="Keep the reference model in host memory between its uses on a GPU; nothing to do on a CPU."
    )
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="Tokens a worker puts through the reference model at once; the actor's when not set."
    )
