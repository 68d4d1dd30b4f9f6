"""Generalised advantage estimation on packed sequences (arXiv 1506.02438), per token.

The value of the state before token t stands at index t, aligned with the log-probability of token t. A response is
one episode: its tokens under the response mask follow each other as steps, and the value after its last one is 0.
Values outside the mask have no meaning (they may be NaN) and never reach a result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.moments import Moments

WHITENING_EPS = 1e-8


def token_rewards(
    scores: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """The score of each sequence at its last response token, less the KL penalty of each token.

    Args:
        scores: [sequences].
        response_mask: bool [tokens].
        cu_seqlens: [sequences + 1].
        kl: [tokens], KL estimate of each token, or None without a penalty.
        kl_coef: weight of the penalty (arXiv 1909.08593, equation 2, token by token).

    Returns:
        float64 [tokens], 0 outside the mask. A sequence with an empty response has no place for its score.
    """
    rewards = torch.zeros(response_mask.shape, dtype=torch.float64, device=response_mask.device)
    if kl is not None:
        rewards -= kl_coef * torch.where(response_mask, kl.double(), 0.0)
    rows, lengths = _episodes(response_mask, cu_seqlens)
    last = lengths.cumsum(0)[lengths > 0] - 1
    rewards[rows[last]] += scores.double()[lengths > 0]
    return rewards


def gae(
    values: Tensor, rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages (equation 16 of the paper) and returns, the targets of the value function.

    With ``delta_t = r_t + gamma V_{t+1} - V_t`` the advantage is ``sum over j of (gamma lam)^j delta_{t+j}`` to the end
    of the response, and the return ``advantage_t + V_t``. The sum is taken in float64 by doubling: after pass k every
    token holds the first 2^k terms of its sum, so a response of T tokens takes log2(T) passes over all tokens.

    Args:
        values: [tokens].
        rewards: [tokens].
        response_mask: bool [tokens].
        cu_seqlens: [sequences + 1].
        gamma: discount of a step.
        lam: 1 sums the rewards that came (Monte Carlo), 0 trusts the next value (one-step TD).

    Returns:
        (advantages, returns), float64 [tokens], 0 outside the mask.
    """
    rows, lengths = _episodes(response_mask, cu_seqlens)
    ends = torch.repeat_interleave(lengths.cumsum(0), lengths)
    left = ends - 1 - torch.arange(rows.numel(), device=rows.device)  # steps that follow in the same response
    value = values[rows].double()
    following = torch.where(left > 0, value.roll(-1), 0.0)
    total = rewards[rows].double() + gamma * following - value
    reach, longest = 1, int(left.max()) if left.numel() else 0
    while reach <= longest:
        shifted = torch.where(left[:-reach] >= reach, total[reach:], 0.0)
        total[:-reach] += (gamma * lam) ** reach * shifted
        reach *= 2
    place = lambda x: torch.zeros_like(values, dtype=torch.float64).index_copy(0, rows, x)  # noqa: E731
    return place(total), place(total + value)


def rewards_to_go(rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """``sum over j >= 0 of gamma^j r_{t+j}`` to the end of the response: the return of REINFORCE (no value function).

    It is `gae` with values of 0 and lambda 1. Arguments as there.

    Returns:
        float64 [tokens], 0 outside the mask.
    """
    return gae(torch.zeros_like(rewards), rewards, response_mask, cu_seqlens, gamma=gamma, lam=1.0)[0]


def whiten(advantages: Tensor, response_mask: Tensor, moments: Moments) -> Tensor:
    """``(A - mean) / sqrt(variance + 1e-8)`` with the unbiased variance, as verl does.

    Args:
        advantages: [tokens].
        response_mask: bool [tokens].
        moments: of all response tokens of the step, over all data parallel ranks.

    Returns:
        [tokens], dtype of ``advantages``, 0 outside the mask.
    """
    scaled = (advantages.double() - moments.mean) * whitening_factor(moments)
    return torch.where(response_mask, scaled, 0.0).to(advantages.dtype)


def whitening_factor(moments: Moments) -> float:
    """What `whiten` multiplies by."""
    return 1.0 / math.sqrt(moments.std**2 + WHITENING_EPS)


def _episodes(response_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of all response tokens, and int64 [sequences], how many each sequence has."""
    running = torch.cat([response_mask.new_zeros(1, dtype=torch.int64), response_mask.cumsum(0)])
    return response_mask.nonzero().squeeze(1), running[cu_seqlens.long()].diff()
