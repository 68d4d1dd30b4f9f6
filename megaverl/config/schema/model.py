"""The model to train, how it is split over ranks and how it is optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class ModelConfig(Section):
    path: str = Field("", description="Folder of the Hugging Face checkpoint to start from (config.json, safetensors).")
    tokenizer_path: str | None = Field(None, description="Folder of the tokenizer; the checkpoint's own when not set.")


class LayoutConfig(Section):
    tp: Positive = Field(1, description="Tensor parallel size.")
    pp: Positive = Field(1, description="Pipeline parallel size.")
    vpp: Positive = Field(1, description="Model chunks per pipeline rank (virtual pipeline).")
    cp: Positive = Field(1, description="Context parallel size.")
    ep: Positive = Field(1, description="Expert parallel size.")
    sequence_parallel: bool = Field(
        False, description="Split activations along the sequence between the TP ranks; needs tp > 1."
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-6, ge=0, description="Peak learning rate of AdamW.")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of a decay, as a share of the peak."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay rate of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay rate of the second moment.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay (norms and biases are exempt).")
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off.")
    distributed: bool = Field(
        True, description="Divide the optimizer state over the data parallel ranks (Megatron's distributed optimizer)."
    )
