"""Splitting the joined QKV rows and rotating queries and keys, in one Triton kernel each way.

Rotary embedding: arXiv 2104.09864, in the form that pairs dimension j with j + d / 2. Liger's kernel rotates in place
what was split and copied before, and gradients are then joined by another copy; here rows are read and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    mixed,
    mixed_stride,
    q,
    k,
    v,
    cos,
    sin,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    values: tl.constexpr,
    half: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """One token: heads rows of q, then kv_heads of k, then ``values`` of v, each of 2 * half numbers.

    Forward reads ``mixed`` and writes q, k, v; backward reads those (gradients), turns the other way and writes mixed.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    is_q = (head < heads) & inside
    is_k = (head >= heads) & (head < heads + kv_heads) & inside
    is_v = (head >= heads + kv_heads) & (head < heads + kv_heads + values) & inside
    c = tl.load(cos + token * half + column, mask=inside, other=1.0)
    s = tl.load(sin + token * half + column, mask=inside, other=0.0)
    turned = head < heads + kv_heads
    c = tl.where(turned, c, 1.0)
    s = tl.where(turned, s, 0.0)
    joined = mixed + token * mixed_stride + head * 2 * half + column
    at_q = q + (token * heads + head) * 2 * half + column
    at_k = k + (token * kv_heads + head - heads) * 2 * half + column
    at_v = v + (token * values + head - heads - kv_heads) * 2 * half + column
    if BACKWARD:
        x = tl.load(at_q, mask=is_q, other=0.0).to(tl.float32) + tl.load(at_k, mask=is_k, other=0.0).to(tl.float32)
        y = tl.load(at_q + half, mask=is_q, other=0.0).to(tl.float32)
        y += tl.load(at_k + half, mask=is_k, other=0.0).to(tl.float32)
        if values > 0:
            x += tl.load(at_v, mask=is_v, other=0.0).to(tl.float32)
            y += tl.load(at_v + half, mask=is_v, other=0.0).to(tl.float32)
        kind = mixed.dtype.element_ty
        any_head = is_q | is_k | is_v
        tl.store(joined, (x * c + y * s).to(kind), mask=any_head)
        tl.store(joined + half, (y * c - x * s).to(kind), mask=any_head)
    else:
        any_head = is_q | is_k | is_v
        x = tl.load(joined, mask=any_head, other=0.0).to(tl.float32)
        y = tl.load(joined + half, mask=any_head, other=0.0).to(tl.float32)
        kind = q.dtype.element_ty
        low, high = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
        tl.store(at_q, low, mask=is_q)
        tl.store(at_q + half, high, mask=is_q)
        tl.store(at_k, low, mask=is_k)
        tl.store(at_k + half, high, mask=is_k)
        if values > 0:
            tl.store(at_v, low, mask=is_v)
            tl.store(at_v + half, high, mask=is_v)


def _launch(
    mixed: Tensor, parts: tuple[Tensor, ...], rotation: tuple[Tensor, Tensor], counts: tuple[int, ...], back: bool
) -> None:
    tokens, (cos, sin) = mixed.shape[0], rotation
    half, heads = cos.shape[-1], sum(counts)
    if tokens:
        _rotate[(tokens,)](
            mixed,
            mixed.stride(0),
            *parts,
            cos,
            sin,
            *counts,
            half,
            HEADS=triton.next_power_of_2(heads),
            HALF=triton.next_power_of_2(half),
            BACKWARD=back,
            num_warps=4 if heads * half <= 2048 else 8,
        )


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, values: int):
        head_dim = 2 * cos.shape[-1]
        parts = tuple(mixed.new_empty(mixed.shape[0], 1, n, head_dim) for n in (heads, kv_heads, values))
        ctx.save_for_backward(cos, sin)
        ctx.counts = heads, kv_heads, values
        _launch(_rows(mixed), parts, (cos, sin), ctx.counts, False)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        cos, sin = ctx.saved_tensors
        gradients = tuple(g.contiguous() for g in gradients)
        width = sum(ctx.counts) * 2 * cos.shape[-1]
        mixed = gradients[0].new_empty(gradients[0].shape[0], 1, width)
        _launch(_rows(mixed), gradients, (cos, sin), ctx.counts, True)
        return mixed, None, None, None, None, None


def _rows(mixed: Tensor) -> Tensor:
    """[tokens, 1, width] -> [tokens, width], whose rows are contiguous."""
    rows = mixed.squeeze(1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def split_rotated(mixed: Tensor, rotation: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """[tokens, 1, (heads + 2 kv_heads) * d] as [all q | all k | all v] -> q, k, v, with q and k rotated.

    Args:
        rotation: cosines and sines, float32 [tokens, d / 2] each.

    Returns:
        q [tokens, 1, heads, d], k and v [tokens, 1, kv_heads, d], contiguous.
    """
    return _SplitRotated.apply(mixed, *rotation, heads, kv_heads, kv_heads)


def rotated(query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """q [tokens, 1, heads, d], k [tokens, 1, kv_heads, d], rotated; for models that normalise both first."""
    return tuple(_SplitRotated.apply(x.flatten(2), *rotation, x.shape[2], 0, 0)[0] for x in (query, key))
