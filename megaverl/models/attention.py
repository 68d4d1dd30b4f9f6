"""Attention of the training model: vLLM's storage order for QKV, and packed causal attention in plain torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaverl.models.packed import PackLayout, from_slots, to_slots
from megaverl.parallel.compat_megatron import PackedSeqParams, SelfAttention, TransformerConfig

PLAIN_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention kernels that run on every GPU."""


@dataclass
class PackedSequences(PackedSeqParams):
    """What Megatron hands through its layers to the core attention.

    `qkv_format` is "thd" for Transformer Engine alone: Megatron would then build a rotary table sequence by sequence,
    with a host synchronisation each, so it is given none. Elsewhere the table comes ready for every token.

    Attributes:
        rotation: cosines and sines, float32 [tokens, head_dim / 2] each, where `RotatingSelfAttention` rotates.
    """

    layout: PackLayout | None = None
    rotation: tuple[Tensor, Tensor] | None = None


class QkvOrderedSelfAttention(SelfAttention):
    """Megatron's self-attention with this rank's QKV rows stored as [all q | all k | all v], as vLLM stores them.

    Megatron's own order is [q.. k v] per group of KV heads. With vLLM's order one piece of memory serves both.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, 1, hidden] -> q [tokens, 1, heads, head_dim], k and v [tokens, 1, kv_heads, head_dim]."""
        mixed, _bias = self.linear_qkv(hidden_states)
        d = self.hidden_size_per_attention_head
        heads, kv_heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        query, key, value = mixed.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
        query, key, value = (x.unflatten(-1, (-1, d)) for x in (query, key, value))
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a pack, by torch's scaled_dot_product_attention, bucket by bucket.

    Memory is linear in the padded tokens of a bucket, by torch's own kernels for the CPU and for every GPU since
    Maxwell; kernels that need a newer GPU are never taken.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """q [tokens, 1, heads, d], k and v [tokens, 1, kv_heads, d] -> [tokens, 1, heads * d]."""
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise ValueError("PackedAttention needs the layout of the pack (PackedSequences)")
        layout = packed_seq_params.layout
        q, k, v = (to_slots(x.squeeze(1), layout) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.is_cuda:  # without flash attention only torch's kernel for equal heads needs no score matrix
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        outputs = []
        with sdpa_kernel(PLAIN_KERNELS) if q.is_cuda else contextlib.nullcontext():
            for bucket in layout.buckets:
                part = slice(bucket.start, bucket.start + bucket.sequences * bucket.length)
                shape = (bucket.sequences, bucket.length)
                out = F.scaled_dot_product_attention(
                    *(x[part].unflatten(0, shape).transpose(1, 2) for x in (q, k, v)),
                    is_causal=True,
                    scale=self.scale,
                    enable_gqa=grouped and not q.is_cuda,
                )
                outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return from_slots(joined, layout).unsqueeze(1)
