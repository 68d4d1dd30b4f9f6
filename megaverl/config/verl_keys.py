"""What verl's keys become: one row per key. `verl_keys_convert` has the conversions, `verl_keys_translate` applies them.

`docs/from-verl.md` is made from this table: ``python -m megaverl.config.verl_keys_doc``.
"""

from __future__ import annotations

from megaverl.config.verl_keys_convert import (
    Row,
    algorithm_name,
    arguments,
    betas,
    both_clips,
    by,
    clipping,
    device,
    engine,
    estimator,
    filter_rows,
    generation_batches,
    granularity,
    if_given,
    loggers,
    loss_mode,
    manager,
    nothing,
    only,
    or_none,
    overlong,
    precision,
    recompute,
    renamed,
    resume,
    resume_path,
    reward_model,
    reward_tokenizer,
    same,
    schedule,
    sequence_parallel,
    steps_or_never,
    token_limit,
    tokens_of_rows,
    top_k,
    truncation,
    validation_sampling,
    validation_temperature,
    vpp,
    warmup,
    warmup_ratio,
)

PACKED = "sequences are always packed without padding"
TOKENS = "micro-batches are made by tokens; the loss does not depend on them"
KERNELS = "kernels are chosen by the hardware (actor.kernels)"
LAYOUT = "every model has the actor's layout"
MEGATRON = (
    "training is Megatron's, there is no FSDP; the optimizer state is divided over DP (actor.optimizer.distributed)"
)
WEIGHTS = "the weights serve the rollout and stay on the GPU"
CHECKPOINT = "a checkpoint always holds model, optimizer and data position (docs/checkpoints.md)"
PROFILER = "there is no such profiler; timing_s/* has seconds by phase"
VLLM = "set by megaverl's binding of vLLM"
SCRIPT = "the model is built from its config.json"
REWARD_MODEL = "reward.model.path names a reward model, a function scores otherwise"
TEXT_ONLY = "only text is trained on"
C, OURS = "algorithm.rollout_correction", "actor.rollout_correction"


_OTHER_DECAYS = ("lr_wsd_decay_style", "lr_wsd_decay_steps", "use_checkpoint_opt_param_scheduler", "num_cycles")
_MEGATRON_FILES = ("use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix", "use_mbridge")
_POOL_KEYS = ("enable_resource_pool", "n_gpus_per_node", "nnodes")
_LAYOUT_KEYS = tuple(
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)


def _optimizer(verl: str, ours: str) -> tuple[Row, ...]:
    return (
        renamed(f"{verl}.lr", f"{ours}.lr"),
        renamed(f"{verl}.weight_decay", f"{ours}.weight_decay"),
        renamed(f"{verl}.clip_grad", f"{ours}.clip_grad"),
        renamed(f"{verl}.min_lr_ratio", f"{ours}.min_lr_ratio"),
        by(f"{verl}.betas", betas(ours), f"{ours}.beta1, {ours}.beta2"),
        by(f"{verl}.warmup_style", schedule(ours), f"{ours}.schedule"),
        by(f"{verl}.lr_scheduler_type", schedule(ours), f"{ours}.schedule"),
        by(f"{verl}.lr_decay_style", schedule(ours), f"{ours}.schedule"),
        by(f"{verl}.lr_warmup_steps", warmup(ours), f"{ours}.warmup_steps", "counts updates here, steps in verl"),
        by(f"{verl}.lr_warmup_steps_ratio", warmup_ratio(ours), f"{ours}.warmup_steps", "needs total_training_steps"),
        nothing(f"{verl}.total_training_steps", "follows from trainer.total_steps"),
        only(f"{verl}.optimizer", ("adam", "AdamW", "adamw"), "the optimizer is AdamW"),
        only(f"{verl}.lr_warmup_init", (0, 0.0), "the warm-up starts at 0"),
        only(f"{verl}.min_lr", (0, 0.0), "give the end of a decay as a share of the peak: min_lr_ratio"),
        only(f"{verl}.lr_decay_steps", (None,), "a decay ends with the run"),
        only(f"{verl}.weight_decay_incr_style", ("constant",), "the weight decay is constant"),
        *(nothing(f"{verl}.{name}", "the decay is constant, linear or cosine") for name in _OTHER_DECAYS),
        only(f"{verl}.override_optimizer_config.*", (), "the optimizer is AdamW in fp32"),
    )


def _overlong(verl: str) -> tuple[Row, ...]:
    return (
        by(f"{verl}.enable", overlong(f"{verl}.len"), "reward.overlong_buffer", "with len; false is 0"),
        nothing(f"{verl}.len", "overlong_buffer.enable takes it"),
        by(f"{verl}.penalty_factor", if_given("reward.overlong_penalty"), "reward.overlong_penalty"),
        nothing(f"{verl}.log", "reward/overlong_penalty/mean is always logged"),
    )


def _micro(verl: str, ours: str, name: str, dynamic: str) -> tuple[Row, ...]:
    key = f"{ours}.max_tokens_per_micro_batch"
    length = name.replace("micro_batch_size", "max_token_len_per_gpu")
    return (
        by(f"{verl}.{name}_per_gpu", tokens_of_rows(key, f"{verl}.{dynamic}"), key, "rows x longest sequence"),
        by(f"{verl}.{length}", token_limit(key, f"{verl}.{dynamic}"), key, f"with {dynamic}"),
        nothing(f"{verl}.{name}", TOKENS),
        nothing(f"{verl}.{dynamic}", TOKENS),
    )


def _engine(verl: str, offload: str) -> tuple[Row, ...]:
    return (
        renamed(f"{verl}.megatron.optimizer_offload", f"{offload}.offload_optimizer"),
        renamed(f"{verl}.megatron.grad_offload", f"{offload}.offload_gradients"),
        renamed(f"{verl}.megatron.use_distributed_optimizer", f"{offload}.optimizer.distributed"),
        by(
            f"{verl}.megatron.override_transformer_config.recompute_granularity",
            granularity(f"{offload}.recompute"),
            f"{offload}.recompute",
        ),
        nothing(f"{verl}.megatron.override_transformer_config.*", SCRIPT),
        nothing(f"{verl}.megatron.override_ddp_config.*", MEGATRON),
        nothing(f"{verl}.megatron.override_mcore_model_config.*", SCRIPT),
        only(f"{verl}.megatron.expert_model_parallel_size", (1,), "there is no mixture-of-experts model"),
        only(f"{verl}.megatron.expert_tensor_parallel_size", (None, 1), "there is no mixture-of-experts model"),
        *(nothing(f"{verl}.megatron.{name}", "megaverl reads and writes the files") for name in _MEGATRON_FILES),
        nothing(f"{verl}.megatron.forward_only", "a role is trained or not by the algorithm"),
        nothing(f"{verl}.megatron.seed", "trainer.seed is the seed of everything"),
        nothing(f"{verl}.strategy", "training is always Megatron's"),
        nothing(f"{verl}.use_torch_compile", KERNELS),
        nothing(
            f"{verl}.ulysses_sequence_parallel_size", "activations are divided over TP (actor.layout.sequence_parallel)"
        ),
        nothing(f"{verl}.checkpoint.*", CHECKPOINT),
        nothing(f"{verl}.profiler.*", PROFILER),
        nothing(f"{verl}.profile.*", PROFILER),
        nothing(f"{verl}.load_weight", "weights are always loaded"),
        nothing(f"{verl}.data_loader_seed", "trainer.seed is the seed of everything"),
        nothing(f"{verl}.shuffle", "mini-batches are always drawn anew, from trainer.seed"),
        nothing(f"{verl}.nccl_timeout", "cluster.phase_timeout limits each phase"),
    )


def _model(verl: str) -> tuple[Row, ...]:
    return (
        nothing(f"{verl}.use_remove_padding", PACKED),
        nothing(f"{verl}.use_rmpad", PACKED),
        nothing(f"{verl}.use_liger", KERNELS),
        nothing(f"{verl}.use_fused_kernels", KERNELS),
        nothing(f"{verl}.fused_kernel_options.*", KERNELS),
        nothing(f"{verl}.gradient_checkpointing_kwargs.*", "recompute is none, selective or full"),
        nothing(f"{verl}.enable_activation_offload", "activations are computed again instead (recompute)"),
        nothing(f"{verl}.trust_remote_code", "no code of a checkpoint is ever run"),
        nothing(f"{verl}.use_shm", "weights are read from their folder"),
        only(f"{verl}.lora_rank", (0,), "there is no LoRA"),
        nothing(f"{verl}.lora_alpha", "there is no LoRA"),
        nothing(f"{verl}.target_modules", "there is no LoRA"),
        only(f"{verl}.external_lib", (None,), "no module is imported"),
        only(f"{verl}.override_config.*", (), "change the checkpoint's config.json"),
    )


DATA = (
    *(same(f"data.{name}") for name in ("train_files", "val_files", "prompt_key", "train_batch_size")),
    *(same(f"data.{name}") for name in ("max_prompt_length", "max_response_length", "truncation", "shuffle")),
    by("data.filter_overlong_prompts", filter_rows, "data.truncation=filter"),
    renamed("data.filter_overlong_prompts_workers", "data.check_workers"),
    renamed("data.tokenizer", "model.tokenizer_path"),
    renamed("data.seed", "trainer.seed"),
    only("data.reward_fn_key", ("data_source",), "the column data_source picks the scorer"),
    only("data.custom_cls.path", (None,), "rows are those of docs/data.md; `megaverl data rows` makes them"),
    nothing("data.custom_cls.name", "data.custom_cls.path is not set"),
    only("data.sampler.class_path", (None,), "rows come in shuffled order"),
    nothing("data.sampler.*", "data.sampler.class_path is not set"),
    only("data.datagen.path", (None,), "rows come from files"),
    nothing("data.datagen.name", "data.datagen.path is not set"),
    only("data.train_max_samples", (-1, None), "name files with fewer rows"),
    only("data.val_max_samples", (-1, None), "name files with fewer rows"),
    only("data.apply_chat_template_kwargs.*", (), "put the setting into the tokenizer's chat template"),
    only("data.tool_config_path", (None,), "there are no tools"),
    nothing(
        "data.gen_batch_size", "dynamic sampling generates for data.train_batch_size prompts until a batch is full"
    ),
    nothing("data.val_batch_size", "validation rows are one batch"),
    nothing("data.return_raw_input_ids", "prompts are kept as token ids"),
    nothing("data.return_raw_chat", "prompts are kept as token ids"),
    nothing("data.return_full_prompt", "prompts are kept as token ids"),
    nothing("data.return_multi_modal_inputs", TEXT_ONLY),
    nothing("data.image_key", TEXT_ONLY),
    nothing("data.video_key", TEXT_ONLY),
    nothing("data.image_patch_size", TEXT_ONLY),
    nothing("data.validation_shuffle", "the score does not depend on the order"),
    nothing("data.dataloader_num_workers", "rows are tokenized before the start"),
    nothing("data.trust_remote_code", "no code of a checkpoint is ever run"),
    nothing("data.use_shm", "files are read where they are"),
)
MODEL = (
    renamed("actor_rollout_ref.model.path", "model.path", "a folder; no hub is asked"),
    by("actor_rollout_ref.model.enable_gradient_checkpointing", recompute("actor.recompute"), "actor.recompute"),
    only("actor_rollout_ref.model.custom_chat_template", (None,), "put it into the tokenizer's folder"),
    *_model("actor_rollout_ref.model"),
    nothing("actor_rollout_ref.hybrid_engine", "training and rollout always share the GPUs"),
    nothing("actor_rollout_ref.nccl_timeout", "cluster.phase_timeout limits each phase"),
)
A = "actor_rollout_ref.actor"
ACTOR = (
    *_optimizer(f"{A}.optim", "actor.optimizer"),
    *_micro(A, "actor", "ppo_micro_batch_size", "use_dynamic_bsz"),
    renamed(f"{A}.ppo_mini_batch_size", "actor.mini_batch_size"),
    renamed(f"{A}.ppo_epochs", "actor.epochs"),
    renamed(f"{A}.grad_clip", "actor.optimizer.clip_grad"),
    by(f"{A}.clip_ratio", both_clips, "actor.clip_ratio_low, actor.clip_ratio_high", "unless these are given"),
    by(f"{A}.clip_ratio_low", clipping("actor.clip_ratio_low"), "actor.clip_ratio_low"),
    by(f"{A}.clip_ratio_high", clipping("actor.clip_ratio_high"), "actor.clip_ratio_high"),
    renamed(f"{A}.clip_ratio_c", "actor.clip_ratio_c"),
    renamed(f"{A}.loss_agg_mode", "actor.loss_aggregation"),
    renamed(f"{A}.entropy_coeff", "actor.entropy_coef"),
    renamed(f"{A}.use_kl_loss", "actor.use_kl_loss"),
    renamed(f"{A}.kl_loss_coef", "actor.kl_loss_coef"),
    by(f"{A}.kl_loss_type", estimator("actor.kl_loss_type"), "actor.kl_loss_type"),
    by(f"{A}.policy_loss.loss_mode", loss_mode, "algorithm.name", "gspo and cispo are algorithms here"),
    nothing(f"{A}.policy_loss.*", "settings of losses that are not taken"),
    by(f"{A}.tis_imp_ratio_cap", truncation, f"{OURS}.importance, {OURS}.threshold", "above 0"),
    only(f"{A}.loss_scale_factor", (None,), "seq-mean-token-sum-norm divides by data.max_response_length"),
    nothing(f"{A}.entropy_from_logits_with_chunking", "logits are always made in chunks (actor.logprob_chunk)"),
    nothing(f"{A}.entropy_checkpointing", "logits are always made in chunks (actor.logprob_chunk)"),
    nothing(f"{A}.use_fused_kernels", KERNELS),
    nothing(f"{A}.freeze_vision_tower", TEXT_ONLY),
    renamed(f"{A}.megatron.tensor_model_parallel_size", "actor.layout.tp"),
    renamed(f"{A}.megatron.pipeline_model_parallel_size", "actor.layout.pp"),
    by(f"{A}.megatron.virtual_pipeline_model_parallel_size", vpp, "actor.layout.vpp"),
    renamed(f"{A}.megatron.context_parallel_size", "actor.layout.cp"),
    by(f"{A}.megatron.sequence_parallel", sequence_parallel, "actor.layout.sequence_parallel", "with TP"),
    by(f"{A}.megatron.dtype", precision, "actor.precision"),
    nothing(f"{A}.megatron.param_offload", WEIGHTS),
    *_engine(A, "actor"),
    renamed(f"{A}.fsdp_config.optimizer_offload", "actor.offload_optimizer"),
    renamed(f"{A}.fsdp_config.grad_offload", "actor.offload_gradients"),
    nothing(f"{A}.fsdp_config.param_offload", WEIGHTS),
    nothing(f"{A}.fsdp_config.*", MEGATRON),
)
F = "actor_rollout_ref.ref"
REFERENCE = (
    *_micro(F, "reference", "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz"),
    renamed(f"{F}.megatron.param_offload", "reference.offload"),
    renamed(f"{F}.fsdp_config.param_offload", "reference.offload"),
    nothing(f"{F}.megatron.*", LAYOUT),
    nothing(f"{F}.fsdp_config.*", MEGATRON),
    only(f"{F}.model.path", (None,), "the reference is the start of the actor"),
    only(f"{F}.sync_actor", (False,), "the reference does not move"),
    nothing(f"{F}.strategy", "every model is Megatron's"),
    nothing(f"{F}.use_torch_compile", KERNELS),
    nothing(f"{F}.ulysses_sequence_parallel_size", LAYOUT),
    nothing(f"{F}.load_weight", "weights are always loaded"),
    nothing(f"{F}.profiler.*", PROFILER),
    nothing(f"{F}.profile.*", PROFILER),
    nothing(f"{F}.sync_steps", "the reference does not move"),
    nothing(f"{F}.sync_actor_alpha", "the reference does not move"),
)
R = "actor_rollout_ref.rollout"
ROLLOUT = (
    by(f"{R}.name", engine, "rollout.engine"),
    *(renamed(f"{R}.{name}", f"rollout.{name}") for name in ("n", "temperature", "top_p", "gpu_memory_utilization")),
    *(
        renamed(f"{R}.{name}", f"rollout.{name}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "enforce_eager")
    ),
    by(f"{R}.top_k", top_k("rollout.top_k"), "rollout.top_k", "0 is -1"),
    renamed(f"{R}.tensor_model_parallel_size", "rollout.tp"),
    renamed(f"{R}.update_weights_bucket_megabytes", "resharding.bucket_mb"),
    renamed(f"{R}.val_kwargs.n", "rollout.val.n"),
    renamed(f"{R}.val_kwargs.top_p", "rollout.val.top_p"),
    by(f"{R}.val_kwargs.top_k", top_k("rollout.val.top_k"), "rollout.val.top_k", "0 is -1"),
    by(f"{R}.val_kwargs.temperature", validation_temperature, "rollout.val.temperature", "with do_sample"),
    by(f"{R}.val_kwargs.do_sample", validation_sampling, "rollout.val.temperature", "false is temperature 0"),
    only(f"{R}.do_sample", (True,), "greedy samples of a prompt would be all alike"),
    only(f"{R}.ignore_eos", (False,), "a response ends with its end token"),
    only(f"{R}.multi_turn.enable", (False,), "a response is one turn"),
    nothing(f"{R}.multi_turn.*", "rollout.multi_turn.enable is false"),
    only(f"{R}.over_sample_rate", (0, 0.0), "every prompt gets rollout.n samples"),
    only(f"{R}.use_fire_sampling", (False,), "there is no FIRE sampling"),
    only(f"{R}.pipeline_model_parallel_size", (1,), "a rollout replica has TP alone"),
    only(f"{R}.expert_parallel_size", (1,), "there is no mixture-of-experts model"),
    only(f"{R}.quantization", (None, False), "the rollout runs on the training weights"),
    nothing(f"{R}.data_parallel_size", "workers / rollout.tp replicas generate"),
    nothing(f"{R}.mode", "a step generates, then trains"),
    nothing(f"{R}.calculate_log_probs", "the difference is always measured when old log-probabilities are computed"),
    nothing(f"{R}.dtype", "the rollout runs on the training weights (actor.precision)"),
    nothing(f"{R}.prompt_length", "data.max_prompt_length says it"),
    nothing(f"{R}.response_length", "data.max_response_length says it"),
    nothing(f"{R}.max_model_len", "data.max_prompt_length + data.max_response_length"),
    nothing(f"{R}.log_prob_micro_batch_size", TOKENS),
    nothing(f"{R}.log_prob_micro_batch_size_per_gpu", "actor.max_tokens_per_micro_batch holds for it"),
    nothing(f"{R}.log_prob_max_token_len_per_gpu", "actor.max_tokens_per_micro_batch holds for it"),
    nothing(f"{R}.log_prob_use_dynamic_bsz", TOKENS),
    *(nothing(f"{R}.{name}", VLLM) for name in ("free_cache_engine", "load_format", "enable_chunked_prefill")),
    *(nothing(f"{R}.{name}", VLLM) for name in ("enable_prefix_caching", "disable_log_stats", "swap_space")),
    *(nothing(f"{R}.{name}", VLLM) for name in ("engine_kwargs.*", "cudagraph_capture_sizes", "layer_name_map.*")),
    *(nothing(f"{R}.{name}", VLLM) for name in ("multi_stage_wake_up", "micro_batch_size", "limit_images")),
    *(nothing(f"{R}.{name}", "there are no agents") for name in ("agent.*", "chat_scheduler", "trace.*")),
    nothing(f"{R}.profiler.*", PROFILER),
    nothing(f"{R}.prometheus.*", "observe.health_port serves metrics to Prometheus"),
)
CRITIC = (
    *_optimizer("critic.optim", "critic.optimizer"),
    *_micro("critic", "critic", "ppo_micro_batch_size", "use_dynamic_bsz"),
    renamed("critic.model.path", "critic.path"),
    by("critic.model.enable_gradient_checkpointing", recompute("critic.recompute"), "critic.recompute"),
    nothing("critic.model.tokenizer_path", "the critic reads the actor's tokens"),
    renamed("critic.model.fsdp_config.param_offload", "critic.offload_parameters"),
    renamed("critic.model.fsdp_config.optimizer_offload", "critic.offload_optimizer"),
    renamed("critic.model.fsdp_config.grad_offload", "critic.offload_gradients"),
    nothing("critic.model.fsdp_config.*", MEGATRON),
    *_model("critic.model"),
    renamed("critic.ppo_mini_batch_size", "critic.mini_batch_size"),
    renamed("critic.ppo_epochs", "critic.epochs"),
    renamed("critic.grad_clip", "critic.optimizer.clip_grad"),
    same("critic.cliprange_value"),
    renamed("critic.loss_agg_mode", "critic.loss_aggregation"),
    renamed("critic.megatron.param_offload", "critic.offload_parameters"),
    *_engine("critic", "critic"),
    *(nothing(f"critic.megatron.{name}", LAYOUT) for name in (*_LAYOUT_KEYS, "sequence_parallel")),
    nothing("critic.megatron.dtype", "the critic has the actor's number format (actor.precision)"),
    nothing("critic.forward_micro_batch_size", TOKENS),
    nothing("critic.forward_micro_batch_size_per_gpu", "critic.max_tokens_per_micro_batch holds for it"),
    nothing("critic.forward_max_token_len_per_gpu", "critic.max_tokens_per_micro_batch holds for it"),
    nothing("critic.rollout_n", "rollout.n says it"),
    nothing("critic.enable", "PPO has a critic, other algorithms none"),
    nothing("critic.kl_ctrl.*", "the KL is the algorithm's (algorithm.kl_coef)"),
)
REWARD = (
    renamed("custom_reward_function.path", "reward.function.path"),
    renamed("custom_reward_function.name", "reward.function.name"),
    by("custom_reward_function.reward_kwargs.*", arguments, "reward.function.arguments"),
    renamed("reward.custom_reward_function.path", "reward.function.path"),
    renamed("reward.custom_reward_function.name", "reward.function.name"),
    only("reward.reward_model.enable", (False,), REWARD_MODEL),
    nothing("reward.reward_model.*", REWARD_MODEL),
    by("reward_model.enable", reward_model, "reward.model.path", "with reward_model.model.path"),
    nothing("reward_model.model.path", "reward_model.enable takes it"),
    by("reward_model.model.input_tokenizer", reward_tokenizer, "", "the reward model reads the actor's tokens"),
    *_micro("reward_model", "reward.model", "micro_batch_size", "use_dynamic_bsz"),
    by(
        "reward_model.forward_max_token_len_per_gpu",
        token_limit("reward.model.max_tokens_per_micro_batch", "reward_model.use_dynamic_bsz"),
        "reward.model.max_tokens_per_micro_batch",
        "with use_dynamic_bsz",
    ),
    renamed("reward_model.megatron.param_offload", "reward.model.offload"),
    renamed("reward_model.model.fsdp_config.param_offload", "reward.model.offload"),
    nothing("reward_model.megatron.*", LAYOUT),
    nothing("reward_model.model.fsdp_config.*", MEGATRON),
    *_model("reward_model.model"),
    *(nothing(f"reward_model.{name}", "the reward model shares the actor's GPUs") for name in _POOL_KEYS),
    nothing("reward_model.strategy", "every model is Megatron's"),
    nothing("reward_model.max_length", "data.max_prompt_length + data.max_response_length"),
    nothing("reward_model.ulysses_sequence_parallel_size", LAYOUT),
    nothing("reward_model.launch_reward_fn_async", "scorers run in processes of their own (reward.workers)"),
    nothing("reward_model.load_weight", "weights are always loaded"),
    nothing("reward_model.nccl_timeout", "cluster.phase_timeout limits each phase"),
    nothing("reward_model.profiler.*", PROFILER),
    by("reward_model.reward_manager", manager, "reward.function.batch", "for batch"),
    nothing("reward_model.reward_kwargs.max_resp_len", "data.max_response_length says it"),
    *_overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    *_overlong("reward_model.overlong_buffer"),
    only("reward_model.sandbox_fusion.url", (None,), "there is no sandbox; a scorer runs in processes of its own"),
)
ALGORITHM = (
    by("algorithm.adv_estimator", algorithm_name, "algorithm.name"),
    same("algorithm.gamma"),
    same("algorithm.lam"),
    renamed("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std"),
    renamed("algorithm.use_kl_in_reward", "algorithm.kl_in_reward"),
    by("algorithm.kl_penalty", estimator("algorithm.kl_estimator"), "algorithm.kl_estimator", "kl is k1"),
    renamed("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef"),
    renamed("algorithm.kl_ctrl.type", "algorithm.kl_controller"),
    renamed("algorithm.kl_ctrl.horizon", "algorithm.kl_horizon"),
    renamed("algorithm.kl_ctrl.target_kl", "algorithm.kl_target"),
    renamed("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
    by(
        "algorithm.filter_groups.max_num_gen_batches",
        generation_batches,
        "algorithm.max_generation_batches",
        "then the batch is filled up; verl ends with an error",
    ),
    nothing("algorithm.filter_groups.metric", "the scores of a prompt's samples are compared"),
    only("algorithm.use_pf_ppo", (False,), "there is no PF-PPO"),
    nothing("algorithm.pf_ppo.*", "algorithm.use_pf_ppo is false"),
    by(f"{C}.rollout_is", or_none(f"{OURS}.importance"), f"{OURS}.importance", "null is none"),
    by(f"{C}.rollout_is_threshold", if_given(f"{OURS}.threshold"), f"{OURS}.threshold"),
    by(f"{C}.rollout_rs", or_none(f"{OURS}.mask"), f"{OURS}.mask", "null is none"),
    by(f"{C}.rollout_rs_threshold", if_given(f"{OURS}.mask_upper"), f"{OURS}.mask_upper"),
    renamed(f"{C}.rollout_rs_threshold_lower", f"{OURS}.mask_lower"),
    renamed(f"{C}.rollout_token_veto_threshold", f"{OURS}.veto"),
    only(f"{C}.rollout_is_batch_normalize", (False,), "weights are truncated, not normalised"),
    only(f"{C}.bypass_mode", (False,), "old log-probabilities are the training model's"),
    nothing(f"{C}.loss_type", "bypass_mode is false"),
)
TRAINER = (
    renamed("trainer.nnodes", "cluster.nodes"),
    renamed("trainer.n_gpus_per_node", "cluster.workers_per_node"),
    by("trainer.device", device, "cluster.device"),
    renamed("trainer.ray_wait_register_center_timeout", "cluster.start_timeout"),
    renamed("trainer.project_name", "trainer.project"),
    renamed("trainer.experiment_name", "trainer.experiment"),
    renamed("trainer.default_local_dir", "trainer.run_dir"),
    same("trainer.total_epochs"),
    renamed("trainer.total_training_steps", "trainer.total_steps"),
    same("trainer.critic_warmup"),
    same("trainer.val_before_train"),
    by("trainer.test_freq", steps_or_never("trainer.val_every"), "trainer.val_every", "-1 is 0"),
    by("trainer.save_freq", steps_or_never("trainer.save_every"), "trainer.save_every", "-1 is 0"),
    by("trainer.logger", loggers, "trainer.loggers", "file is added"),
    by("trainer.resume_mode", resume, "trainer.resume"),
    by("trainer.resume_from_path", resume_path, "trainer.resume", "with resume_mode=resume_path"),
    renamed("trainer.max_actor_ckpt_to_keep", "trainer.keep_last", "counts checkpoints of the whole run"),
    nothing("trainer.max_critic_ckpt_to_keep", "trainer.keep_last counts checkpoints of the whole run"),
    nothing("trainer.max_ref_ckpt_to_keep", "the reference is not saved"),
    nothing("trainer.del_local_ckpt_after_load", "checkpoints are removed by trainer.keep_last alone"),
    only("trainer.default_hdfs_dir", (None,), "checkpoints go to trainer.run_dir"),
    only("trainer.val_only", (False,), "a run trains"),
    nothing("trainer.balance_batch", "tokens are always balanced over DP"),
    by("trainer.log_val_generations", steps_or_never("trainer.val_generations"), "trainer.val_generations", "-1 is 0"),
    nothing("trainer.rollout_data_dir", "no responses are written"),
    nothing(
        "trainer.validation_data_dir", "trainer.val_generations responses are in generations/ of the run directory"
    ),
    nothing("trainer.esi_redundant_time", "SIGTERM ends a run"),
    nothing("trainer.use_legacy_worker_impl", "there is one kind of worker"),
    nothing("trainer.profile_steps", PROFILER),
    nothing("trainer.npu_profile.*", PROFILER),
    nothing("global_profiler.*", PROFILER),
    nothing("ray_kwargs.*", "cluster.* says how Ray is started"),
    nothing("ray_init.*", "cluster.* says how Ray is started"),
    only("transfer_queue.enable", (False,), "batches go through Ray's object store"),
    nothing("hydra.*", "trainer.run_dir is the folder of the run"),
)
SECTIONS: dict[str, tuple[Row, ...]] = {
    "Data": DATA,
    "Model": MODEL,
    "Actor": ACTOR,
    "Reference": REFERENCE,
    "Rollout": ROLLOUT,
    "Critic": CRITIC,
    "Reward": REWARD,
    "Algorithm": ALGORITHM,
    "Trainer and cluster": TRAINER,
}
ROWS: tuple[Row, ...] = tuple(row for rows in SECTIONS.values() for row in rows)

DEFAULTS = {
    "algorithm.name": "ppo",
    "data.train_batch_size": "1024",
    "actor.mini_batch_size": "256",
    "rollout.n": "1",
    "rollout.max_num_seqs": "1024",
    "cluster.workers_per_node": "8",
    "trainer.total_epochs": "30",
    "trainer.project": "verl_examples",
    "trainer.experiment": "gsm8k",
    "trainer.run_dir": "checkpoints/${trainer.project}/${trainer.experiment}",
}
"""verl's defaults where ours differ. They hold for a command line of verl's own: one that names no configuration file."""
