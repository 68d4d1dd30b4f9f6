"""SwiGLU on the joined output of Megatron's first MLP layer, in Triton. Imported by the backend ``flash`` only.

Liger's kernels take gate and up as two contiguous tensors; here both are halves of one row, and copying them apart
would cost as much as the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _forward(joined, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    joined += row * 2 * width + column
    gate = tl.load(joined, mask=inside).to(tl.float32)
    up = tl.load(joined + width, mask=inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(joined, grad, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(joined + at, mask=inside).to(tl.float32)
    up = tl.load(joined + at + width, mask=inside).to(tl.float32)
    dy = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    grad_gate = dy * up * (share + silu * (1.0 - share))
    grad_up = dy * silu
    tl.store(out + at, grad_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + width, grad_up.to(out.dtype.element_ty), mask=inside)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        joined = joined.contiguous()
        ctx.save_for_backward(joined)
        width = joined.shape[-1] // 2
        out = joined.new_empty(*joined.shape[:-1], width)
        rows = out.numel() // width
        if rows:
            _forward[(rows, triton.cdiv(width, BLOCK))](joined, out, width, BLOCK=BLOCK, num_warps=8)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (joined,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(joined)
        width = grad.shape[-1]
        rows = grad.numel() // width
        if rows:
            _backward[(rows, triton.cdiv(width, BLOCK))](joined, grad, out, width, BLOCK=BLOCK, num_warps=8)
        return out


def swiglu(joined: Tensor) -> Tensor:
    """[..., 2 * width], gate then up -> silu(gate) * up, [..., width] (arXiv 2002.05202); computed in float32."""
    return _Swiglu.apply(joined)
