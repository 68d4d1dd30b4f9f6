"""Command lines with the keys of verl's example scripts, as a shell hands them over."""

from __future__ import annotations

GRPO_MEGATRON = """
--config-path=config --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo
data.train_files=['/d/gsm8k/train.parquet','/d/math/train.parquet'] data.val_files=['/d/gsm8k/test.parquet']
data.return_raw_chat= data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=sync
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.logger=['console','wandb'] trainer.project_name=verl_grpo_example trainer.experiment_name=qwen2_7b_megatron
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""

GRPO_OFFLOAD = """
algorithm.adv_estimator=grpo data.train_files=/d/train.parquet data.val_files=/d/test.parquet
data.train_batch_size=1024 actor_rollout_ref.model.path=/m/Qwen2-7B-Instruct
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12000
actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.grad_offload=True actor_rollout_ref.ref.megatron.param_offload=True
actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.save_freq=-1
trainer.test_freq=-1
"""

PPO_MEGATRON = """
--config-path=./config --config-name=ppo_megatron_trainer algorithm.adv_estimator=gae
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=1024
data.max_prompt_length=1024 data.max_response_length=512 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=/m/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 critic.optim.lr=1e-5 critic.model.path=/m/Qwen2-7B-Instruct
critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=4
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=100
"""

PPO_FSDP = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=4096 data.val_batch_size=1312
data.max_prompt_length=4096 data.max_response_length=4096 actor_rollout_ref.model.path=/m/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.ppo_mini_batch_size=512
actor_rollout_ref.actor.ppo_micro_batch_size=128 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.grad_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size=256 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5
actor_rollout_ref.ref.log_prob_micro_batch_size=256 actor_rollout_ref.ref.fsdp_config.param_offload=True
critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=/m/Qwen2.5-Math-PRM-7B
critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size=256
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.grad_offload=False
critic.model.fsdp_config.optimizer_offload=False algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0
trainer.logger=["console","wandb"] +trainer.val_before_train=False trainer.nnodes=2 trainer.save_freq=-1
trainer.test_freq=5
"""

DAPO_STYLE = """
data.train_files=/d/dapo.parquet data.val_files=/d/aime.parquet data.prompt_key=prompt data.truncation=left
data.max_prompt_length=2048 data.max_response_length=8192 data.train_batch_size=512 actor_rollout_ref.rollout.n=16
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=30720
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=30720 actor_rollout_ref.model.path=/m/Qwen2.5-Math-7B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10
actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.grad_clip=1.0
actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=10240
actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1
actor_rollout_ref.actor.fsdp_config.fsdp_size=32 reward_model.reward_manager=dapo
+reward_model.reward_kwargs.overlong_buffer_cfg.enable=False +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
trainer.n_gpus_per_node=8 trainer.nnodes=8 trainer.val_before_train=True trainer.total_training_steps=200
trainer.default_local_dir=/c/dapo trainer.resume_mode=auto trainer.log_val_generations=10
trainer.max_actor_ckpt_to_keep=2
"""

PPO_REWARD_MODEL = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=1024 data.val_batch_size=6312
data.max_prompt_length=1024 data.max_response_length=512 data.return_raw_chat=True
actor_rollout_ref.model.path=/m/Qwen2-7B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_rmpad=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size=16 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.ref.fsdp_config.param_offload=True critic.optim.lr=1e-5 critic.model.use_rmpad=True
critic.model.path=/m/Qwen2-7B critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size=16
reward_model.enable=True reward_model.model.path=/m/rm reward_model.model.use_rmpad=True
reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size=16 algorithm.kl_ctrl.kl_coef=0.001
trainer.critic_warmup=0 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5
"""

SCRIPTS = {
    "ppo_reward_model": PPO_REWARD_MODEL,
    "grpo_megatron": GRPO_MEGATRON,
    "grpo_offload": GRPO_OFFLOAD,
    "ppo_megatron": PPO_MEGATRON,
    "ppo_fsdp": PPO_FSDP,
    "dapo_style": DAPO_STYLE,
}


def words(name: str) -> list[str]:
    """The ``key=value`` words of a script."""
    return [word for word in SCRIPTS[name].split() if not word.startswith("--")]
