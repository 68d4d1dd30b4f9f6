"""Triton kernels for log-probabilities: one pass over a chunk's logits each way. Imported by the fast backends only.

Logits come as float32, statistics are float32, the gradient leaves in the type of the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_BLOCK, GRADIENT_BLOCK = 4096, 2048


@triton.jit
def _row_statistics(logits, row_stride, targets, stats, stats_stride, real, scale, BLOCK: tl.constexpr):
    """One row: running maximum, sum of exp(z - maximum) and sum of exp(z - maximum) (z - maximum) over its columns.

    When the maximum grows by delta, both sums shrink by exp(-delta), and the second one's factors grow by -delta.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top = -3.0e38
    total = 0.0
    moment = 0.0
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < real
        z = tl.load(logits + column, mask=inside, other=-float("inf")) * scale
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = top - new_top
        keep = tl.exp(shift)
        below = z - new_top
        weight = tl.exp(below)
        moment = keep * (moment + total * shift) + tl.sum(tl.where(inside, weight * below, 0.0), 0)
        total = keep * total + tl.sum(weight, 0)
        top = new_top
    target = tl.load(targets + row)
    here = (target >= 0) & (target < real)
    picked = tl.load(logits + tl.where(here, target, 0), mask=here, other=0.0) * scale
    stats += row
    tl.store(stats, top)
    tl.store(stats + stats_stride, total)
    tl.store(stats + 2 * stats_stride, tl.log(total) - moment / total)
    tl.store(stats + 3 * stats_stride, picked)


@triton.jit
def _logit_gradient(
    logits,
    row_stride,
    out,
    out_stride,
    targets,
    top,
    log_total,
    entropy,
    grad_log_prob,
    grad_entropy,
    real,
    columns,
    scale,
    HAS_LOG_PROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one row: gradient for the unscaled logits; 0 in the columns of padding."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < real
    z = tl.load(logits + row * row_stride + column, mask=inside, other=-float("inf")) * scale
    log_p = (z - tl.load(top + row)) - tl.load(log_total + row)
    p = tl.exp(log_p)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if HAS_ENTROPY:
        slope = tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
        gradient -= tl.where(inside, p * slope, 0.0)
    if HAS_LOG_PROB:
        hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
        gradient += tl.load(grad_log_prob + row) * tl.where(inside, hit - p, 0.0)
    gradient *= scale
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=column < columns)


def row_statistics(logits: Tensor, targets: Tensor, stats: Tensor, *, real: int, temperature: float) -> None:
    """Writes ``stats`` ``[4, rows]``: largest scaled logit, sum of exp(z - largest), entropy, target's scaled logit.

    Args:
        logits: float32 ``[rows, columns]``; only the first ``real`` columns count.
        targets: int64 ``[rows]``, columns; the logit of one outside ``range(real)`` counts as 0.
    """
    rows = logits.shape[0]
    if rows:
        _row_statistics[(rows,)](
            logits,
            logits.stride(0),
            targets,
            stats,
            stats.stride(0),
            real,
            1.0 / temperature,
            BLOCK=ROW_BLOCK,
            num_warps=8,
        )


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    real: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient for the unscaled logits, ``[rows, columns]`` in ``dtype``; all per-row arguments are ``[rows]``.

    With p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H).
    """
    rows, columns = logits.shape
    out = torch.empty(rows, columns, dtype=dtype, device=logits.device)
    if rows:
        per_row = [x if x is None else x.contiguous() for x in (entropy, grad_log_probs, grad_entropy)]
        _logit_gradient[(rows, triton.cdiv(columns, GRADIENT_BLOCK))](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            targets,
            top.contiguous(),
            log_total.contiguous(),
            *(log_total if x is None else x for x in per_row),  # something to point at, never read
            real,
            columns,
            1.0 / temperature,
            HAS_LOG_PROB=grad_log_probs is not None,
            HAS_ENTROPY=grad_entropy is not None and entropy is not None,
            BLOCK=GRADIENT_BLOCK,
            num_warps=8,
        )
    return out
