"""Log-probabilities and entropy of target tokens under a vocabulary-parallel output layer, in chunks of tokens.

The logits of one chunk, ``[chunk, padded_vocab / tp]``, are the largest tensor ever alive: the forward pass
keeps one number per token and rank, the backward pass computes each chunk's logits again. Each TP rank
reduces its own rows to four numbers a token; one all-gather of these
per call joins the ranks, so every rank returns bit-equal numbers.

Logits are float32 (float64 for float64 input) also where hidden states and weights have 16 bits: the matrix product's
sums are not rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaverl.parallel.kernels import add_product, wide_product


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    temperature: float,
    chunk: int | None,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    fused: bool = False,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if asked, the entropy in nats of the whole distribution, for every token.

    p = softmax(hidden @ weight.T / temperature) over the first ``vocab`` rows of the weight joined over TP;
    padding rows never enter it. The gradient for ``hidden`` is already summed over ``tp_group``: a caller
    with sequence parallelism gathers the tokens with a backward that splits and does not reduce.

    Args:
        hidden: ``[tokens, hidden]``, equal on all TP ranks.
        weight: ``[padded_vocab / tp, hidden]``, this rank's rows of the output layer.
        targets: ``[tokens]`` whole numbers in ``range(vocab)``, equal on all TP ranks.
        vocab: rows that are real, over all TP ranks.
        temperature: divides the logits; above 0.
        chunk: tokens whose logits are alive at a time; None takes as many as a small part of the memory holds.
        tp_group: ranks that hold the other rows; None is one rank.
        with_entropy: also return the entropy.
        entropy_grad: let gradients flow through the entropy; otherwise it is a constant.
        fused: reduce logits in Triton kernels (GPU only), one pass each way instead of one per operation.
        main_grad: ``[padded_vocab / tp, hidden]``, where the weight's gradient is added at once, in its precision; the
            weight gets none from autograd then.

    Returns:
        log_probs ``[tokens]`` and entropy ``[tokens]`` or None, float32 (float64 for float64 input).

    Raises:
        ValueError: shapes or types that do not fit together, or a target outside the vocabulary.
    """
    plan = _plan(hidden, weight, targets, vocab, temperature, chunk, tp_group, with_entropy, entropy_grad, fused)
    log_probs, entropy = _LogProbs.apply(hidden, weight, targets, plan, main_grad)
    return log_probs, entropy


@dataclass(frozen=True)
class _Plan:
    offset: int  # first vocabulary id of this rank
    real: int  # rows of this rank that are not padding
    temperature: float
    chunk: int
    group: dist.ProcessGroup | None
    ranks: int
    with_entropy: bool
    entropy_grad: bool
    fused: bool
    dtype: torch.dtype  # of logits and results

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``[tokens of the chunk, real]``: scaled logits of this rank's real rows, a fresh tensor."""
        return wide_product(hidden, weight[: self.real].t(), self.dtype).div_(self.temperature)

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``[tokens, 1]`` row of each target on this rank (0 for targets of other ranks), and whether it is here."""
        local = (targets - self.offset).unsqueeze(1)
        here = (local >= 0) & (local < self.real)
        return local.masked_fill(~here, 0), here


def _plan(hidden, weight, targets, vocab, temperature, chunk, group, with_entropy, entropy_grad, fused) -> _Plan:
    ranks = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    rows = weight.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit together")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} do not match the {hidden.shape[0]} tokens of hidden")
    if vocab < 1 or vocab > rows * ranks:
        raise ValueError(f"a vocabulary of {vocab} does not fit into {ranks} ranks of {rows} rows")
    if not temperature > 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"temperature must be above 0 and chunk at least 1, got {temperature} and {chunk}")
    inside = ((targets >= 0) & (targets < vocab)).all()
    if targets.is_cuda:  # checked when the GPU gets there; asking now would make the host wait for it
        torch._assert_async(inside, f"a target token id is outside the vocabulary of {vocab}")
    elif not bool(inside):
        raise ValueError(f"a target token id is outside the vocabulary of {vocab}")
    return _Plan(
        offset=rank * rows,
        real=min(max(vocab - rank * rows, 0), rows),
        temperature=float(temperature),
        chunk=chunk or _chunk_by_memory(hidden, rows),
        group=group if ranks > 1 else None,
        ranks=ranks,
        with_entropy=with_entropy,
        entropy_grad=with_entropy and entropy_grad,
        fused=fused,
        dtype=torch.promote_types(hidden.dtype, torch.float32),
    )


def _chunk_by_memory(hidden: Tensor, rows: int) -> int:
    """Tokens per chunk: on a GPU as many as 4 GiB or a twentieth of its memory hold, cut evenly; 1024 on a CPU."""
    if not hidden.is_cuda:
        return 1024
    budget = min(4 * 2**30, torch.cuda.get_device_properties(hidden.device).total_memory // 20)
    most = max(budget // (rows * (4 + hidden.element_size())), 128)  # float32 logits and their gradient
    pieces = max(-(-hidden.shape[0] // most), 1)
    even = -(-hidden.shape[0] // pieces)
    return max(-(-even // 128) * 128, 128)


def _statistics(hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan) -> Tensor:
    """``[4, tokens]`` of this rank's rows: largest logit, sum of exp(z - largest), entropy, target logit.

    The target logit is 0 where another rank holds it. Kept relative to the largest logit: subtracting numbers of
    the size of the logits would cost digits.
    """
    stats = torch.zeros(4, hidden.shape[0], dtype=plan.dtype, device=hidden.device)
    if plan.real == 0:  # all rows of this rank are padding: it weighs nothing
        stats[0] = torch.finfo(plan.dtype).min
        return stats
    for start in range(0, hidden.shape[0], plan.chunk):
        part = slice(start, start + plan.chunk)
        _chunk_statistics(hidden[part], weight, targets[part], stats[:, part], plan)
    return stats


def _chunk_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, stats: Tensor, plan: _Plan) -> None:
    """One chunk of `_statistics`, written into ``stats`` ``[4, chunk]``; its logits die with the call."""
    if plan.fused:
        from megaverl.models.triton_log_probs import row_statistics

        logits = wide_product(hidden, weight.t(), plan.dtype)
        row_statistics(logits, targets - plan.offset, stats, real=plan.real, temperature=plan.temperature)
        return
    z = plan.logits(hidden, weight)
    row, here = plan.own(targets)
    stats[3] = z.gather(1, row).masked_fill_(~here, 0).squeeze(1)
    top = z.amax(dim=1, keepdim=True)
    stats[0] = top.squeeze(1)
    z.sub_(top)
    weights = z.exp() if plan.with_entropy else z.exp_()
    stats[1] = total = weights.sum(dim=1)
    if plan.with_entropy:
        stats[2] = total.log() - weights.mul_(z).sum(dim=1) / total


def _join(stats: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole-vocabulary largest logit, log of sum of exp(z - largest), entropy, target logit; each ``[tokens]``.

    Ranks are joined by the chain rule of entropy: H = sum over ranks of share (H_rank - log share).
    """
    if plan.group is None:
        top, total, entropy, target = stats
        return top, total.log(), entropy, target
    every = stats.new_empty(plan.ranks, *stats.shape)
    dist.all_gather(list(every), stats, group=plan.group)
    tops, totals, entropies, target = every.unbind(1)
    top = tops.amax(dim=0)
    parts = totals * (tops - top).exp()
    total = parts.sum(dim=0)
    share = parts / total
    entropy = (share * entropies - torch.xlogy(share, share)).sum(dim=0)
    return top, total.log(), entropy, target.sum(dim=0)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan, main_grad: Tensor | None):
        top, log_total, entropy, target = _join(_statistics(hidden, weight, targets, plan), plan)
        entropy = entropy.clone() if plan.with_entropy else None  # not a view of the statistics
        ctx.plan, ctx.main_grad = plan, main_grad
        ctx.save_for_backward(hidden, weight, targets, top, log_total, entropy if plan.entropy_grad else None)
        ctx.set_materialize_grads(False)
        if entropy is not None and not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return (target - top) - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, targets, top, log_total, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed over chunks in at least float32, so that the gradient does not depend on the chunk size.
        grad_weight = ctx.main_grad if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[1] and grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=plan.dtype)
        for start in range(0, hidden.shape[0] if plan.real else 0, plan.chunk):
            part = slice(start, start + plan.chunk)
            take = lambda t, part=part: None if t is None else t[part]  # noqa: E731
            saved = (take(t) for t in (targets, top, log_total, entropy, grad_log_probs, grad_entropy))
            d = (_fused_chunk_gradient if plan.fused else _chunk_gradient)(hidden[part], weight, *saved, plan)
            if grad_hidden is not None:
                torch.mm(d, weight[: d.shape[1]], out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight[: d.shape[1]], d, hidden[part])
        if grad_hidden is not None and plan.group is not None:
            dist.all_reduce(grad_hidden, group=plan.group)
        if grad_weight is ctx.main_grad:
            grad_weight = None
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _chunk_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    plan: _Plan,
) -> Tensor:
    """Gradient for one chunk's unscaled logits, ``[chunk, real]`` in the type of ``hidden``.

    All per-token arguments are ``[chunk]``; the logits die with the call.
    """
    log_p = plan.logits(hidden, weight).sub_(top.unsqueeze(1)).sub_(log_total.unsqueeze(1))
    d = _grad_logits(log_p, entropy, grad_log_probs, grad_entropy)
    if grad_log_probs is not None:
        row, here = plan.own(targets)
        d.scatter_add_(1, row, grad_log_probs.unsqueeze(1) * here)
    return d.div_(plan.temperature).to(hidden.dtype)


def _fused_chunk_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, *saved: Any) -> Tensor:
    """`_chunk_gradient`, ``[chunk, padded_vocab / tp]``: 0 in the columns of padding."""
    from megaverl.models.triton_log_probs import logit_gradient

    *per_token, plan = saved
    logits = wide_product(hidden, weight.t(), plan.dtype)
    return logit_gradient(
        logits,
        targets - plan.offset,
        *per_token,
        real=plan.real,
        temperature=plan.temperature,
        dtype=hidden.dtype,
    )


def _grad_logits(
    log_p: Tensor, entropy: Tensor | None, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient for the scaled logits z, without the one-hot of the target; overwrites ``log_p`` ``[chunk, real]``.

    With p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H).
    """
    if grad_entropy is None or entropy is None:
        p = log_p.exp_()
        return p.mul_(-grad_log_probs.unsqueeze(1)) if grad_log_probs is not None else p.zero_()
    p = log_p.exp()
    factor = log_p.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
    if grad_log_probs is not None:
        factor.add_(grad_log_probs.unsqueeze(1))
    return factor.mul_(p).neg_()
