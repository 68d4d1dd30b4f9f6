"""Correction of the difference between the rollout engine's and the training model's probabilities of a sample.

With ``rho = exp(log_probs - rollout_log_probs)`` of a token, both with the same weights, a mean over rollout samples
becomes one over the training model's by weighting with rho; truncating the weight bounds its variance (truncated
importance sampling, Ionides 2008). Metrics carry verl's names, ``rollout_corr/*``; each is exact for every cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.moments import Moments
from megaverl.config.schema import RolloutCorrectionConfig

BOUND = 20.0  # of the exponents, as verl's
PREFIX = "rollout_corr/"
CORRELATED = "rollout", "actor", "both"


def correction_weights(
    config: RolloutCorrectionConfig, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """What the policy loss of each token is multiplied by: the truncated importance weight, 0 where masked.

    - ``importance=token``: ``min(rho_t, threshold)``; ``sequence``: of the product of rho over the
      response instead.
    - ``mask=token`` leaves out tokens with rho outside [mask_lower, mask_upper]; ``sequence`` responses by the product
      of their rho, ``geometric`` by the product's 1/T-th power.
    - ``veto`` leaves out responses in which any rho is below it.

    A token left out still counts in the loss's denominators: masking never makes the others weigh more.

    Args:
        log_probs: [tokens], of the training model before the update.
        rollout_log_probs: [tokens], reported by the engine.
        mask: bool [tokens], the response tokens.
        cu_seqlens: [sequences + 1].

    Returns:
        [tokens], without gradient; 1 outside the mask.
    """
    log_rho = torch.where(mask, (log_probs - rollout_log_probs).detach(), 0.0)
    weights = torch.ones_like(log_rho)
    if config.importance != "none":
        weights = _importance(config, log_rho, mask, cu_seqlens).clamp(max=config.threshold)
    weights = torch.where(_kept(config, log_rho, mask, cu_seqlens), weights, 0.0)
    return torch.where(mask, weights, 1.0)


def mismatch_moments(
    config: RolloutCorrectionConfig, rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Moments]:
    """Mergeable moments of a part of the batch, for `finish_mismatch`. Arguments as `correction_weights`.

    Token quantities are over response tokens, sequence quantities over sequences with at least one. Tokens whose
    log-probability the engine could not give (NaN) are left out.
    """
    # On the CPU: one copy instead of a wait for the GPU at every number.
    rollout_log_probs, log_probs, mask, cu_seqlens = (
        column.detach().cpu() for column in (rollout_log_probs, log_probs, mask, cu_seqlens)
    )
    mask = mask & ~torch.isnan(rollout_log_probs)
    rollout = torch.where(mask, rollout_log_probs, 0.0).double()
    training = torch.where(mask, log_probs, 0.0).double()
    log_rho = training - rollout
    counts = _per_sequence(mask.double(), cu_seqlens)
    answered = counts > 0
    mean_of = lambda x: (_per_sequence(x, cu_seqlens) / counts.clamp(min=1))[answered]  # noqa: E731
    log_ppl, rollout_log_ppl = -mean_of(training), -mean_of(rollout)
    total = _per_sequence(log_rho, cu_seqlens)[answered].clamp(-BOUND, BOUND)
    tokens = {
        "training/rollout_probs_diff": (rollout.exp() - training.exp()).abs(),
        "training/rollout_log_probs_diff": log_rho.abs(),
        "pearson/rollout": rollout.exp(),
        "pearson/actor": training.exp(),
        "pearson/both": rollout.exp() + training.exp(),
        f"{PREFIX}kl": -log_rho,
        f"{PREFIX}k3_kl": torch.expm1(log_rho.clamp(max=BOUND)) - log_rho,
        f"{PREFIX}chi2_token": torch.expm1(2 * log_rho.clamp(-BOUND, BOUND)),
    }
    sequences = {
        f"{PREFIX}training_ppl": log_ppl.exp(),
        f"{PREFIX}training_log_ppl": log_ppl,
        f"{PREFIX}rollout_ppl": rollout_log_ppl.exp(),
        f"{PREFIX}rollout_log_ppl": rollout_log_ppl,
        f"{PREFIX}log_ppl_diff": log_ppl - rollout_log_ppl,
        f"{PREFIX}log_ppl_abs_diff": (log_ppl - rollout_log_ppl).abs(),
        f"{PREFIX}ppl_ratio": (log_ppl - rollout_log_ppl).exp(),
        f"{PREFIX}chi2_seq": torch.expm1(2 * total),
    }
    if config.importance != "none":
        weights, lower = _importance(config, log_rho, mask, cu_seqlens), 1.0 / config.threshold
        tokens[f"{PREFIX}rollout_is"] = weights.clamp(max=config.threshold)
        tokens[f"{PREFIX}rollout_is_untruncated"] = weights
        bounded = weights.clamp(lower, config.threshold)
        tokens |= {"is/bounded": bounded, "is/bounded_square": bounded.square()}
        tokens[f"{PREFIX}rollout_is_ratio_fraction_high"] = (weights > config.threshold).double()
        tokens[f"{PREFIX}rollout_is_ratio_fraction_low"] = (weights < lower).double()
    if config.masks:
        left_out = (~_kept(config, log_rho, mask, cu_seqlens)).double()
        tokens[f"{PREFIX}rollout_rs_masked_fraction"] = left_out
        whole = _per_sequence(left_out * mask, cu_seqlens) >= counts
        sequences[f"{PREFIX}rollout_rs_seq_masked_fraction"] = whole[answered].double()
    found = {name: Moments.of(values[mask]) for name, values in tokens.items()}
    return found | {name: Moments.of(values) for name, values in sequences.items()}


def finish_mismatch(total: dict[str, Moments]) -> dict[str, float]:
    """verl's metrics from the moments of the whole batch; nothing without a response token.

    ``training/rollout_actor_probs_pearson_corr`` correlates the probabilities over tokens; it is left out where either
    does not vary. ``rollout_is_eff_sample_size`` is ``mean(w)^2 / mean(w^2)`` of weights bounded on both sides.
    """
    if not total or not total[f"{PREFIX}kl"].count:
        return {}
    metrics: dict[str, float] = {}
    for name in ("training/rollout_probs_diff", "training/rollout_log_probs_diff"):
        found = total[name]
        metrics |= {f"{name}_mean": found.mean, f"{name}_max": found.largest, f"{name}_std": found.std}
    rollout, actor, both = (total[f"pearson/{name}"] for name in CORRELATED)
    if rollout.std and actor.std:
        covariance = (both.std**2 - rollout.std**2 - actor.std**2) / 2
        metrics["training/rollout_actor_probs_pearson_corr"] = covariance / (rollout.std * actor.std)
    weights = f"{PREFIX}rollout_is"
    for name, found in total.items():
        if (name.startswith(PREFIX) and not name.startswith(weights)) or name.startswith(f"{weights}_ratio"):
            metrics[name] = found.mean
    spread = total[f"{PREFIX}log_ppl_diff"]
    metrics |= {f"{PREFIX}log_ppl_diff_max": spread.largest, f"{PREFIX}log_ppl_diff_min": spread.smallest}
    if weights in total:
        untruncated = total[f"{weights}_untruncated"]
        metrics[f"{weights}_mean"] = total[weights].mean
        metrics[f"{weights}_std"] = total["is/bounded"].std
        metrics[f"{weights}_max"], metrics[f"{weights}_min"] = untruncated.largest, untruncated.smallest
        metrics[f"{weights}_eff_sample_size"] = total["is/bounded"].mean ** 2 / total["is/bounded_square"].mean
    return metrics


def _importance(config: RolloutCorrectionConfig, log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The weight of each token before truncation, [tokens]."""
    if config.importance == "sequence":
        log_rho = _spread(_per_sequence(log_rho, cu_seqlens), cu_seqlens, mask)
    return log_rho.clamp(-BOUND, BOUND).exp()


def _kept(config: RolloutCorrectionConfig, log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool [tokens]: what masking leaves in."""
    kept = torch.ones_like(mask)
    if config.mask != "none":
        log_ratio = log_rho
        if config.mask != "token":
            total = _per_sequence(log_rho, cu_seqlens)
            if config.mask == "geometric":
                total = total / _per_sequence(mask.to(log_rho.dtype), cu_seqlens).clamp(min=1)
            log_ratio = _spread(total, cu_seqlens, mask)
        ratio = log_ratio.clamp(-BOUND, BOUND).exp()
        lower = 1.0 / config.mask_upper if config.mask_lower is None else config.mask_lower
        kept &= (ratio >= lower) & (ratio <= config.mask_upper)
    if config.veto is not None:
        bad = (mask & (log_rho.exp() < config.veto)).to(log_rho.dtype)
        kept &= _spread(_per_sequence(bad, cu_seqlens), cu_seqlens, mask) == 0
    return kept


def _per_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[tokens] -> [sequences], sums."""
    lengths = cu_seqlens.diff().long()
    ids = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=values.device), lengths.to(values.device), output_size=values.numel()
    )
    return values.new_zeros(lengths.numel()).index_add(0, ids, values)


def _spread(values: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """[sequences] -> [tokens]."""
    return torch.repeat_interleave(values, cu_seqlens.diff().long().to(values.device), output_size=mask.numel())
