"""Policy losses per token: PPO's clipped surrogate, GSPO's sequence ratio, CISPO's clipped weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megaverl.config.schema import ActorConfig

RATIO_EXPONENT_BOUND = 20.0  # exp(20) = 5e8; beyond it float32 squares would overflow


class PolicyLoss(NamedTuple):
    """Per-token policy loss and what its clipping did; each [tokens]."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    log_ratio: Tensor


def policy_loss(
    config: ActorConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
) -> PolicyLoss:
    """The loss that ``config.policy_loss`` names, with the clip ranges of the configuration.

    Args:
        log_probs: [tokens], with gradient.
        old_log_probs: [tokens], of the policy before the first update on the batch.
        advantages: [tokens].
        response_mask: bool [tokens]; what is outside must be finite in all columns.
        cu_seqlens: [sequences + 1].
    """
    clip = {"clip_ratio_low": config.clip_ratio_low, "clip_ratio_high": config.clip_ratio_high}
    match config.policy_loss:
        case "gspo":
            return gspo_loss(log_probs, old_log_probs, advantages, response_mask, cu_seqlens, **clip)
        case "cispo":
            return cispo_loss(log_probs, old_log_probs, advantages, **clip)
    return ppo_loss(log_probs, old_log_probs, advantages, **clip, clip_ratio_c=config.clip_ratio_c)


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate loss (arXiv 1707.06347, equation 7) with DAPO's two clip ranges and dual clipping.

    With ``r = exp(log_probs - old_log_probs)`` (exponent bounded to [-20, 20]) the loss of a token is
    ``max(-A r, -A clip(r, 1 - low, 1 + high))`` (two ranges: arXiv 2503.14476, section 3.1), and for ``A < 0`` at most
    ``-A c`` (arXiv 1912.09729).

    Args:
        log_probs: [tokens], with gradient.
        old_log_probs: [tokens], of the policy that sampled the tokens.
        advantages: [tokens].
        clip_ratio_low: lower clip range.
        clip_ratio_high: upper clip range.
        clip_ratio_c: dual-clip bound, above 1; None switches it off.
    """
    log_ratio = _bounded(log_probs - old_log_probs)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    clipped_lower = torch.zeros_like(clipped)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_lower, ceiling, loss)
    return PolicyLoss(loss, clipped, clipped_lower, log_ratio)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """GSPO (arXiv 2507.18071, equations 5 to 7): one ratio for the whole response, the geometric mean of its tokens'.

    With ``s = exp(mean over the response of (log_probs - old_log_probs))`` every token of the response has the loss
    ``max(-A s, -A clip(s, 1 - low, 1 + high))``. The gradient is written token by token (the paper's GSPO-token,
    equation 13): a token's ratio has the value s and the gradient ``s * grad log_probs``. Averaged within responses
    (``seq-mean-token-mean``) value and gradient are those of the sequence form.
    """
    mask = response_mask
    raw = torch.where(mask, (log_probs - old_log_probs).detach(), 0.0)
    lengths = cu_seqlens.diff().long()
    ids = torch.repeat_interleave(torch.arange(lengths.numel(), device=raw.device), lengths, output_size=raw.numel())
    sums = raw.new_zeros(lengths.numel()).index_add(0, ids, raw)
    counts = raw.new_zeros(lengths.numel()).index_add(0, ids, mask.to(raw.dtype)).clamp(min=1)
    mean = (sums / counts)[ids]  # [tokens], the sequence's
    log_ratio = _bounded(mean)
    ratio = log_ratio.exp() * (1.0 + log_probs - log_probs.detach())  # value s, gradient s * grad log_probs
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    clipped = bounded > plain
    return PolicyLoss(
        torch.maximum(plain, bounded), clipped, torch.zeros_like(clipped), _bounded(log_probs - old_log_probs)
    )


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """CISPO (arXiv 2506.13585, equations 4 and 5): REINFORCE weighted by a clipped ratio that has no gradient.

    The loss of a token is ``-sg(clip(r, 1 - low, 1 + high)) A log_probs``: a clipped token keeps its gradient. The
    paper has no lower bound, ``clip_ratio_low=1``.
    """
    log_ratio = _bounded(log_probs - old_log_probs)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return PolicyLoss(-weight * advantages * log_probs, weight != ratio, torch.zeros_like(ratio).bool(), log_ratio)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-RATIO_EXPONENT_BOUND, RATIO_EXPONENT_BOUND)
