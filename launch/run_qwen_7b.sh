#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-7B-Instruct: 8 GPUs of 80 GB on each node, TP 2 inside a node, DP over the rest.
#   launch/ray_cluster.sh start     # more than one node; then on the first of them:
#   NODES=2 RAY_ADDRESS=auto MODEL=/shared/Qwen2.5-7B-Instruct launch/run_qwen_7b.sh
# A GPU of TP 2 on 8 GPUs holds 7.1 GiB of weights, 14.2 GiB of gradients and 10.6 GiB of optimizer state (10^9 parameters: 7.6).
set -euo pipefail

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
TRAIN=${TRAIN:-data/gsm8k/train.parquet}
VAL=${VAL:-data/gsm8k/test.parquet}
RUN=${RUN:-runs/qwen_7b}
NODES=${NODES:-1}
GPUS=${GPUS:-8}               # per node
TP=${TP:-2}                   # 1, 2 or 4: the model has 28 heads and 4 KV heads
BATCH=${BATCH:-1024}          # prompts of a step
MINI_BATCH=${MINI_BATCH:-256} # prompts of an update
SAMPLES=${SAMPLES:-8}         # responses to each prompt
MICRO_TOKENS=${MICRO_TOKENS:-16384}
VLLM_MEMORY=${VLLM_MEMORY:-0.6}
LR=${LR:-1e-6}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train grpo_gsm8k \
    model.path="$MODEL" \
    data.train_files="[$TRAIN]" \
    data.val_files="[$VAL]" \
    data.train_batch_size="$BATCH" \
    actor.layout.tp="$TP" \
    actor.mini_batch_size="$MINI_BATCH" \
    actor.max_tokens_per_micro_batch="$MICRO_TOKENS" \
    actor.optimizer.lr="$LR" \
    actor.recompute=selective \
    rollout.n="$SAMPLES" \
    rollout.gpu_memory_utilization="$VLLM_MEMORY" \
    trainer.experiment=qwen_7b \
    trainer.run_dir="$RUN" \
    trainer.export_dir="$RUN/hf" \
    trainer.keep_last=3 \
    cluster.nodes="$NODES" \
    cluster.workers_per_node="$GPUS" \
    "$@"
