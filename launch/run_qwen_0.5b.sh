#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct: one node, every GPU holds the whole model.
#   megaverl data gsm8k FOLDER_OF_GSM8K --out data/gsm8k
#   MODEL=models/Qwen2.5-0.5B-Instruct launch/run_qwen_0.5b.sh
# Words after the script's name are keys to change: launch/run_qwen_0.5b.sh rollout.n=16 trainer.total_steps=100
set -euo pipefail

MODEL=${MODEL:-models/Qwen2.5-0.5B-Instruct}
TRAIN=${TRAIN:-data/gsm8k/train.parquet}
VAL=${VAL:-data/gsm8k/test.parquet}
RUN=${RUN:-runs/qwen_0.5b}
NODES=${NODES:-1}
GPUS=${GPUS:-8}               # per node
TP=${TP:-1}                   # 1 or 2: the model has 14 heads and 2 KV heads
BATCH=${BATCH:-1024}          # prompts of a step
MINI_BATCH=${MINI_BATCH:-256} # prompts of an update
SAMPLES=${SAMPLES:-5}         # responses to each prompt
MICRO_TOKENS=${MICRO_TOKENS:-32768}
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
    rollout.n="$SAMPLES" \
    trainer.experiment=qwen_0.5b \
    trainer.run_dir="$RUN" \
    trainer.export_dir="$RUN/hf" \
    cluster.nodes="$NODES" \
    cluster.workers_per_node="$GPUS" \
    "$@"
