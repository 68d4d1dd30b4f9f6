#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-32B-Instruct: 4 nodes of 8 GPUs of 80 GB, TP 8 inside a node, DP over the nodes.
#   HOSTS="node1 node2 node3 node4" launch/ray_cluster.sh start      # then on node1:
#   RAY_ADDRESS=auto MODEL=/shared/Qwen2.5-32B-Instruct launch/run_qwen_32b.sh
# A GPU of TP 8 on 32 GPUs holds 7.6 GiB of weights, 15.3 GiB of gradients (freed while responses are generated) and 11.5 GiB of optimizer
# state (in host memory meanwhile). Fewer nodes: NODES=2 doubles the optimizer's share. No byte moves at a handoff.
set -euo pipefail

MODEL=${MODEL:-models/Qwen2.5-32B-Instruct}
TRAIN=${TRAIN:-data/gsm8k/train.parquet}
VAL=${VAL:-data/gsm8k/test.parquet}
RUN=${RUN:-runs/qwen_32b}
NODES=${NODES:-4}
GPUS=${GPUS:-8}               # per node
TP=${TP:-8}                   # 1, 2, 4 or 8: the model has 40 heads and 8 KV heads
PP=${PP:-1}                   # more than 1 also halves the weights of a GPU; then weights move at handoffs
BATCH=${BATCH:-1024}          # prompts of a step
MINI_BATCH=${MINI_BATCH:-256} # prompts of an update
SAMPLES=${SAMPLES:-8}         # responses to each prompt
MICRO_TOKENS=${MICRO_TOKENS:-8192}
VLLM_MEMORY=${VLLM_MEMORY:-0.6}
LR=${LR:-1e-6}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train grpo_gsm8k \
    model.path="$MODEL" \
    data.train_files="[$TRAIN]" \
    data.val_files="[$VAL]" \
    data.train_batch_size="$BATCH" \
    actor.layout.tp="$TP" \
    actor.layout.pp="$PP" \
    actor.layout.sequence_parallel=true \
    actor.mini_batch_size="$MINI_BATCH" \
    actor.max_tokens_per_micro_batch="$MICRO_TOKENS" \
    actor.optimizer.lr="$LR" \
    actor.recompute=full \
    actor.offload_optimizer=true \
    rollout.n="$SAMPLES" \
    rollout.gpu_memory_utilization="$VLLM_MEMORY" \
    trainer.experiment=qwen_32b \
    trainer.run_dir="$RUN" \
    trainer.export_dir="$RUN/hf" \
    trainer.keep_last=2 \
    cluster.nodes="$NODES" \
    cluster.workers_per_node="$GPUS" \
    "$@"
