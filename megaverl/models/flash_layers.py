"""Layers of the backend ``flash``: torch's flash attention for packs, Liger's norm, a fused SwiGLU."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from megaverl.models.attention import PackedSequences
from megaverl.models.norm import RMSNorm
from megaverl.models.triton_swiglu import swiglu
from megaverl.parallel.compat_megatron import TransformerConfig


class FlashRMSNorm(RMSNorm):
    """`RMSNorm` in one kernel each way, with the same roundings."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        return LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "llama", False)


class FlashSwiglu(nn.Module):
    """The activation of Megatron's MLP: [..., 2 * width], gate then up -> [..., width]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, joined: Tensor) -> Tensor:
        return swiglu(joined)


class FlashAttention(nn.Module):
    """Causal attention inside each sequence of a pack, by torch's flash attention."""

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
            raise ValueError("FlashAttention needs the layout of the pack (PackedSequences)")
        layout = packed_seq_params.layout
        out = varlen_attn(
            *(x.squeeze(1) for x in (query, key, value)),
            layout.cu_seqlens,
            layout.cu_seqlens,
            layout.longest,
            layout.longest,
            scale=self.scale,
            **_varlen_options(),
        )
        return out.flatten(1).unsqueeze(1)


@functools.cache
def _varlen_options() -> dict[str, Any]:
    """How this torch wants to be told that attention is causal and that heads share keys."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return options
