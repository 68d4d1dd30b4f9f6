"""Keys of `rollout` and `resharding`: generation and the weights it runs on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.schema.base import Positive, Section


class SamplingConfig(Section):
    n: Positive = Field(1, description="Samples per prompt.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(-1, ge=-1, description="Tokens to sample from; -1 is all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Leave out tokens less likely than this share of the likeliest one's probability."
    )
    stop: list[str] = Field(
        [],
        description="Texts that end a response; the tokens that complete the text belong to it. A response is generated to its end or limit first, so this saves no time.",
    )
    stop_token_ids: list[int] = Field(
        [], description="Token ids that end a response, beside the tokenizer's end tokens; they belong to the response."
    )


class ValidationSamplingConfig(SamplingConfig):
    # A class of its own: a default_factory of the section would lose its temperature once another key of it is set.
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")


class RolloutConfig(SamplingConfig):
    n: Positive = Field(8, description="Samples per prompt (the group size of GRPO).")
    engine: Literal["auto", "vllm", "hf"] = Field(
        "auto",
        description="Generation engine; auto takes vLLM where it imports and supports the model, else transformers.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Number format of generation; auto is training's. Another one cannot share training's weights: each handoff copies them.",
    )
    free_cache: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the KV cache and the weights that generation has for itself give up their memory while training: auto does on a GPU, and on a CPU keeps the cache alone.",
    )
    self_test: bool = Field(
        True,
        description="At the start, fill the weights that handoffs write with NaN, hand over, and refuse to run if any is left or the text changes after a sleep; always done with a vLLM version that is not listed.",
    )
    tp: int | None = Field(None, ge=1, description="Tensor parallel size of the rollout; the actor's when not set.")
    gpu_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="Share of a GPU's memory that vLLM may use in all."
    )
    cpu_cache_gb: float = Field(0.5, gt=0, description="KV cache per worker on a CPU, in GiB.")
    max_num_seqs: Positive = Field(256, description="Sequences that vLLM runs at the same time.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Tokens per vLLM scheduler step; vLLM's own default when not set."
    )
    enforce_eager: bool = Field(
        False, description="Run vLLM without CUDA graphs and torch.compile (always so on a CPU)."
    )
    val: ValidationSamplingConfig = Field(
        default_factory=ValidationSamplingConfig, description="Sampling during validation."
    )


class ReshardingConfig(Section):
    bucket_mb: Positive = Field(
        64,
        description="Staging memory of a handoff between layouts that differ, MiB per worker; tensors may be larger.",
    )
    verify: Literal["off", "checksum", "full"] = Field(
        "off",
        description="After every handoff, compare the weights that were copied or received with their source: by checksums, or bit for bit (sends everything twice).",
    )
