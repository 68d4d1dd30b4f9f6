"""The critic's loss and metrics on packed sequences; exact for every cut, as `megaverl.algorithms.losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.gae import whitening_factor
from megaverl.algorithms.losses import TOKENS, Denominators, aggregate
from megaverl.algorithms.moments import Moments
from megaverl.config.schema import CriticConfig
from megaverl.data.batch import SequenceBatch

ValueLossFn = Callable[[SequenceBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, values [tokens] with gradient) -> (share of the loss, sums)."""

ADVANTAGES, RETURNS, VALUES, RESIDUALS = "critic/advantages", "critic/returns", "critic/values", "residuals"
EXPLAINED_EPS = 1e-5  # verl's, against returns that are all equal


class ValueLoss(NamedTuple):
    """Per-token value loss and where its clipping took part; each [tokens]."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float | None) -> ValueLoss:
    """``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, PPO's clipped value loss.

    It is the form of the implementation that came with arXiv 1707.06347 (arXiv 2005.12729, section 3, item 1, describes
    it): a value that moved more than c from its old one earns nothing by moving on.

    Args:
        values: [tokens], with gradient.
        old_values: [tokens], before the first update on the batch.
        returns: [tokens], the targets.
        cliprange: c; None switches clipping off.
    """
    plain = (values - returns).square()
    if cliprange is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    bounded_loss = (bounded - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded_loss), bounded_loss > plain)


def critic_loss(
    config: CriticConfig, micro: SequenceBatch, values: Tensor, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the critic's loss; reads the columns ``values`` (old) and ``returns``.

    Args:
        values: [tokens], with gradient.
        denominators: counts of the whole mini-batch.

    Returns:
        The share of the loss (scalar) and detached float64 scalars for `losses.finish_metrics`; both add up over
        micro-batches and data parallel ranks.

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in ("values", "returns") if name not in micro.columns]
    if missing:
        raise ValueError(f"the batch has no column {', '.join(missing)}; it has {sorted(micro.columns)}")
    mask = micro.response_mask
    values = torch.where(mask, values, 0.0)
    old, returns = (torch.where(mask, micro.columns[name], 0.0) for name in ("values", "returns"))
    found = value_loss(values, old, returns, cliprange=config.cliprange_value)
    loss = aggregate(found.loss, mask, micro.cu_seqlens, config.loss_aggregation, denominators)
    sums = {
        TOKENS: mask,
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": found.clipped & mask,
        "critic/vpred_mean": values,
    }
    return loss, {name: part.detach().double().sum() for name, part in sums.items()}


def critic_loss_fn(config: CriticConfig, denominators: Denominators) -> ValueLossFn:
    """`critic_loss` of one mini-batch in the form that the model's update takes."""
    return lambda micro, values: critic_loss(config, micro, values, denominators)


def value_moments(advantages: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor) -> dict[str, Moments]:
    """Mergeable moments over the response tokens of one rank's share, for `finish_value_metrics`."""
    found = {ADVANTAGES: advantages, RETURNS: returns, VALUES: values, RESIDUALS: returns - values}
    return {name: Moments.of(column[response_mask]) for name, column in found.items()}


def finish_value_metrics(moments: Mapping[str, Moments], *, whitened: bool) -> dict[str, float]:
    """verl's metrics of advantages, returns and values over all response tokens, and the explained variance.

    ``critic/vf_explained_var`` is ``1 - Var(R - V) / (Var(R) + 1e-5)``: 1 for values that foresee every return, 0 for
    a constant, below 0 for worse than that.

    Without a critic (REINFORCE++, ReMax) there are no values and no explained variance to report.

    Args:
        moments: of the whole step, of raw advantages.
        whitened: the advantages in use are the whitened ones, so report those.
    """
    metrics: dict[str, float] = {}
    for name in (ADVANTAGES, RETURNS, VALUES):
        if name not in moments:
            continue
        found = moments[name]
        shift, factor = (found.mean, whitening_factor(found)) if whitened and name == ADVANTAGES else (0.0, 1.0)
        for kind, value in (("mean", found.mean), ("max", found.largest), ("min", found.smallest)):
            metrics[f"{name}/{kind}"] = (value - shift) * factor
    if RESIDUALS not in moments:
        return metrics
    residual, returns = moments[RESIDUALS].std ** 2, moments[RETURNS].std ** 2
    return metrics | {"critic/vf_explained_var": 1.0 - residual / (returns + EXPLAINED_EPS)}
