"""Self-attention of the fast backends: rotates queries and keys where it splits them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaverl.models.attention import PackedSequences, QkvOrderedSelfAttention
from megaverl.models.triton_rotation import rotated, split_rotated


class RotatingSelfAttention(QkvOrderedSelfAttention):
    """Takes cosines and sines from the pack instead of a rotary table from Megatron."""

    _rotation: tuple[Tensor, Tensor] | None = None  # of the pack that is in `forward`

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, 1, hidden] -> [tokens, 1, hidden] and no bias, as Megatron's."""
        pack: PackedSequences = options["packed_seq_params"]
        self._rotation = pack.rotation
        try:
            return super().forward(hidden_states, attention_mask, *args, **options)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, 1, hidden] -> q [tokens, 1, heads, head_dim], k and v [tokens, 1, kv_heads, head_dim]."""
        if self._rotation is None:
            raise RuntimeError("the pack brought no rotation")
        if self.q_layernorm is None and self.k_layernorm is None:
            mixed, _bias = self.linear_qkv(hidden_states)
            heads, kv_heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
            return split_rotated(mixed, self._rotation, heads, kv_heads)
        query, key, value = super().get_query_key_value_tensors(hidden_states)
        return *rotated(query, key, self._rotation), value
