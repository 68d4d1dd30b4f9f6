#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct on Pascal cards of 24 GB (Tesla P40, compute capability 6.1): no 16-bit formats, no flash
# attention, no Triton, no vLLM. So fp32, plain torch, and transformers generates.
#   MODEL=models/Qwen2.5-0.5B-Instruct launch/run_p40_0.5b.sh
# A card holds 1.8 GiB of weights, 1.8 GiB of gradients, 3.7 GiB of optimizer state (1 card; less with more), 0.6 GiB of logits for each
# 1024 tokens of a chunk, and 24 KiB of KV cache for each token of a running response. The reference waits in host memory.
# torch must know the card: `megaverl doctor` says which wheel does.
set -euo pipefail

MODEL=${MODEL:-models/Qwen2.5-0.5B-Instruct}
TRAIN=${TRAIN:-data/gsm8k/train.parquet}
VAL=${VAL:-data/gsm8k/test.parquet}
RUN=${RUN:-runs/p40_0.5b}
GPUS=${GPUS:-1}
BATCH=${BATCH:-64}           # prompts of a step
MINI_BATCH=${MINI_BATCH:-16} # prompts of an update
SAMPLES=${SAMPLES:-8}        # responses to each prompt
RESPONSE=${RESPONSE:-384}    # longest response in tokens
MICRO_TOKENS=${MICRO_TOKENS:-2048}
SEQUENCES=${SEQUENCES:-128}  # responses generated at the same time
LR=${LR:-1e-6}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train grpo_gsm8k \
    model.path="$MODEL" \
    data.train_files="[$TRAIN]" \
    data.val_files="[$VAL]" \
    data.train_batch_size="$BATCH" \
    data.max_prompt_length=384 \
    data.max_response_length="$RESPONSE" \
    data.truncation=filter \
    actor.precision=fp32 \
    actor.kernels=eager \
    actor.layout.tp=1 \
    actor.mini_batch_size="$MINI_BATCH" \
    actor.max_tokens_per_micro_batch="$MICRO_TOKENS" \
    actor.logprob_chunk=512 \
    actor.recompute=selective \
    actor.offload_gradients=true \
    actor.optimizer.lr="$LR" \
    reference.offload=true \
    rollout.engine=hf \
    rollout.max_num_seqs="$SEQUENCES" \
    rollout.n="$SAMPLES" \
    trainer.experiment=p40_0.5b \
    trainer.run_dir="$RUN" \
    trainer.export_dir="$RUN/hf" \
    cluster.nodes=1 \
    cluster.workers_per_node="$GPUS" \
    "$@"
