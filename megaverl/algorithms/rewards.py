"""Rewards of whole sequences, and the metrics of a batch that the driver computes from per-sequence columns."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.kl import kl_penalty
from megaverl.data.batch import segment_sum


def sequence_kl(
    log_probs: Tensor, reference: Tensor, response_mask: Tensor, cu_seqlens: Tensor, kind: str = "k1"
) -> Tensor:
    """KL estimate of every sequence: the sum of `kl_penalty` over its response tokens.

    Args:
        log_probs: [tokens], of the policy that sampled.
        reference: [tokens], of the reference model.
        response_mask: bool [tokens]; values outside it do not count, whatever they are.
        cu_seqlens: [sequences + 1].
        kind: the estimator, see `megaverl.algorithms.kl`.

    Returns:
        float64 [sequences]; 0 for an empty response.
    """
    values = kl_penalty(log_probs.double(), reference.double(), kind)
    return segment_sum(torch.where(response_mask, values, 0.0), cu_seqlens)


def penalised_rewards(scores: Tensor, kl: Tensor, coef: float) -> Tensor:
    """Rewards with the KL penalty in them: ``score - coef * kl`` (arXiv 1909.08593, equation 2); all [sequences]."""
    return (scores.double() - coef * kl.double()).to(scores.dtype)


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft penalty of length (arXiv 2503.14476, equation 13), to be added to the score.

    0 up to ``max_length - buffer`` response tokens, then falling linearly to ``-factor`` at ``max_length``.

    Args:
        response_lengths: [sequences], tokens.
        max_length: longest response.
        buffer: tokens over which the penalty grows; 0 gives none.
        factor: penalty at the limit.

    Returns:
        float64 [sequences], at most 0.
    """
    lengths = response_lengths.double()
    if buffer == 0:
        return torch.zeros_like(lengths)
    return -factor * ((lengths - (max_length - buffer)) / buffer).clamp(min=0.0)


def penalty_metrics(kl: Tensor, response_lengths: Tensor, coef: float) -> dict[str, float]:
    """verl's metrics of the penalty: the mean over sequences of the mean KL per response token, and its weight."""
    per_token = kl.double() / response_lengths.double().clamp(min=1)
    return {"actor/reward_kl_penalty": per_token.mean().item(), "actor/reward_kl_penalty_coeff": coef}


def batch_metrics(
    *,
    scores: Tensor,
    rewards: Tensor,
    advantages: Tensor | None,
    response_lengths: Tensor,
    prompt_lengths: Tensor,
    max_response_length: int,
    max_prompt_length: int,
) -> dict[str, float]:
    """Metrics of a batch under verl's names; every tensor is [sequences].

    Scores and rewards are those of sequences with at least one response token; advantages are over response tokens,
    as verl has them, so a sequence weighs as much as its response is long (None where advantages are per token:
    `value_loss.finish_value_metrics` reports those). ``clip_ratio`` is the share of sequences at the length limit;
    ``response/aborted_ratio`` that of empty responses.

    Raises:
        ValueError: there is no response token at all.
    """
    answered = response_lengths > 0
    if not answered.any():
        raise ValueError("no sequence has a response token")
    by_sequence: dict[str, float] = {}
    if advantages is not None:
        weights = response_lengths.double()
        mean_advantage = (advantages.double() * weights).sum() / weights.sum()
        by_sequence = _summary("critic/advantages", advantages[answered], mean=mean_advantage.item())
    return {
        **_summary("critic/score", scores[answered]),
        **_summary("critic/rewards", rewards[answered]),
        **by_sequence,
        **_summary("response_length", response_lengths),
        "response_length/clip_ratio": (response_lengths >= max_response_length).double().mean().item(),
        "response/aborted_ratio": (~answered).double().mean().item(),
        **_summary("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": (prompt_lengths >= max_prompt_length).double().mean().item(),
    }


def _summary(name: str, values: Tensor, mean: float | None = None) -> dict[str, float]:
    values = values.double()
    return {
        f"{name}/mean": values.mean().item() if mean is None else mean,
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
