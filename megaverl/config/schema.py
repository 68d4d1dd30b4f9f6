"""The typed configuration: every key, its default, its bounds and a sentence that says what it does.

Batch sizes of the algorithm (`data.train_batch_size`, `actor.mini_batch_size`) are global and count prompts;
token limits of micro-batches are per worker.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Recompute = Literal["none", "selective", "full"]
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs", "mse"]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are checked on assignment, nan and inf are no numbers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    path: str = Field("", description="Folder of the Hugging Face checkpoint to start from (config.json, safetensors).")
    tokenizer_path: str | None = Field(None, description="Folder of the tokenizer; the checkpoint's own when not set.")


class DataConfig(Section):
    train_files: list[str] = Field([], description="Training rows: parquet or jsonl files.")
    val_files: list[str] = Field([], description="Validation rows: parquet or jsonl files; may be empty.")
    prompt_key: str = Field("prompt", description="Column that holds the prompt: chat messages or a string.")
    response_key: str = Field(
        "response", description="Column that holds the answer to learn (supervised training only)."
    )
    train_batch_size: Positive = Field(256, description="Prompts (supervised: rows) per step, over all workers.")
    max_prompt_length: Positive = Field(512, description="Longest prompt in tokens, chat template included.")
    max_response_length: Positive = Field(512, description="Longest response in tokens.")
    truncation: Literal["error", "left", "right", "filter"] = Field(
        "error",
        description="What to do with a prompt over the limit: refuse it, cut its left or right end, or leave the row out (counted and reported).",
    )
    shuffle: bool = Field(True, description="Shuffle the training rows anew in every epoch, from trainer.seed.")
    check_workers: int = Field(1, ge=1, description="Processes that check and tokenize rows before the start.")


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


class RewardFunctionConfig(Section):
    path: str | None = Field(
        None, description="Python file with a custom scorer; the registry by data_source when not set."
    )
    name: str = Field("compute_score", description="Name of the scorer in that file.")


class RewardConfig(Section):
    function: RewardFunctionConfig = Field(default_factory=RewardFunctionConfig, description="Custom scorer.")


class SamplingConfig(Section):
    n: Positive = Field(1, description="Samples per prompt.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(-1, ge=-1, description="Tokens to sample from; -1 is all.")


class ValidationSamplingConfig(SamplingConfig):
    # A class of its own: a default_factory of the section would lose its temperature once another key of it is set.
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")


class RolloutConfig(SamplingConfig):
    n: Positive = Field(8, description="Samples per prompt (the group size of GRPO).")
    engine: Literal["auto", "vllm", "hf"] = Field(
        "auto",
        description="Generation engine; auto takes vLLM where it imports and supports the model, else transformers.",
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


class TrainerConfig(Section):
    project: str = Field("megaverl", description="Project name for trackers.")
    experiment: str = Field("run", description="Name of this run for trackers.")
    run_dir: str = Field(
        "runs/run", min_length=1, description="Folder of this run: config.yaml, metrics.jsonl, checkpoints."
    )
    total_steps: int | None = Field(None, ge=1, description="Steps in all; total_epochs decides when not set.")
    total_epochs: Positive = Field(1, description="Passes over the training rows.")
    val_before_train: bool = Field(True, description="Validate once before the first step.")
    val_every: int = Field(
        0, ge=0, description="Validate every so many steps and at the end; 0 is only before and at the end."
    )
    critic_warmup: int = Field(
        0, ge=0, description="First steps that train the critic alone and leave the actor as it is (PPO)."
    )
    save_every: int = Field(0, ge=0, description="Save a checkpoint every so many steps and at the end; 0 is never.")
    resume: str = Field(
        "auto",
        description="auto goes on from the newest checkpoint in run_dir if there is one; never starts anew; a path resumes from that checkpoint.",
    )
    seed: int = Field(0, ge=0, description="Seed of shuffling, sampling and initialisation.")
    loggers: list[Literal["console", "file", "wandb", "tensorboard"]] = Field(
        ["console", "file"], description="Where metrics go."
    )
    export_dir: str | None = Field(
        None, description="Folder for a Hugging Face checkpoint of the final weights; none when not set."
    )
    export_critic_dir: str | None = Field(
        None, description="Folder for the final critic as a Hugging Face token classification; none when not set."
    )


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to attach to; RAY_ADDRESS or a local one when not set.")
    nodes: Positive = Field(1, description="Nodes to use.")
    workers_per_node: Positive = Field(1, description="Workers (GPUs, or CPU processes) per node.")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Where the workers run; auto takes GPUs when Ray has enough of them."
    )
    threads_per_worker: Positive = Field(1, description="Torch threads of a CPU worker.")
    object_store_gb: float = Field(1.0, gt=0, description="Object store of a local Ray, in GiB.")
    start_timeout: float = Field(300.0, gt=0, description="Seconds until all workers must be up.")


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
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Where the workers run.")
