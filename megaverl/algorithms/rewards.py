"""Rewards of whole sequences, and the metrics of a batch that the driver computes from per-sequence columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations, largest and smallest of some values; parts merge exactly with ``+``.

    Merging is Chan, Golub and LeVeque's (1979), so it does not cancel where the mean is large against the spread.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of all elements of a tensor, in float64."""
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        mean = values.mean()
        squares = (values - mean).square().sum().item()
        return cls(values.numel(), mean.item(), squares, values.max().item(), values.min().item())

    def __add__(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squares + other.squares + step * step * self.count * other.count / count,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def rollout_difference(rollout_log_probs: Tensor, log_probs: Tensor, response_mask: Tensor) -> dict[str, Moments]:
    """How far the rollout engine's probabilities of the response tokens are from the training model's.

    Args:
        rollout_log_probs: [tokens], reported by the engine.
        log_probs: [tokens], recomputed by the training model with the same weights.
        response_mask: bool [tokens].

    Returns:
        Mergeable moments of ``|p - q|`` (verl's ``training/rollout_probs_diff``) and of ``|log p - log q|``.
    """
    rollout, training = rollout_log_probs[response_mask].double(), log_probs[response_mask].double()
    return {
        "training/rollout_probs_diff": Moments.of((rollout.exp() - training.exp()).abs()),
        "training/rollout_log_probs_diff": Moments.of((rollout - training).abs()),
    }


def finish_rollout_difference(parts: Sequence[dict[str, Moments]]) -> dict[str, float]:
    """Merges the parts of all micro-batches and ranks into ``.._mean``, ``.._max`` and ``.._std``.

    Without any response token there is nothing to report and the result is empty.
    """
    metrics: dict[str, float] = {}
    for name in parts[0] if parts else ():
        total = sum((part[name] for part in parts), Moments())
        if total.count:
            metrics |= {f"{name}_mean": total.mean, f"{name}_max": total.largest, f"{name}_std": total.std}
    return metrics
