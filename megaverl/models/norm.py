"""RMSNorm for Megatron layers, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaverl.parallel.compat_megatron import TransformerConfig


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    The statistics are float32 and the result is rounded to the input's type before the weight multiplies it, as
    the Hugging Face models of the families do. Megatron's own wrapper of torch's norm refuses sequence
    parallelism: there each TP rank sees other tokens, so the weight is marked for Megatron to sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
