"""Policy and supervised losses on packed sequences.

A batch is cut into micro-batches and over data parallel ranks, and no number here may depend on the cut. Therefore
every reduction divides by `Denominators`, counts of the whole mini-batch that the driver knows beforehand: what a
micro-batch returns is its *share* of the mini-batch's loss, and the shares (and gradients) add up to the whole.

Values outside the response mask have no meaning (they may be NaN) and never reach a result or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaverl.algorithms.kl import kl_penalty
from megaverl.algorithms.policy_loss import policy_loss
from megaverl.algorithms.rollout_correction import correction_weights
from megaverl.config.schema import ActorConfig
from megaverl.data.batch import SequenceBatch
from megaverl.errors import RunError

LossFn = Callable[[SequenceBatch, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, log_probs [tokens] with gradient, entropy [tokens] or None) -> (share of the loss, sums)."""

TOKENS = "tokens"
SHARES = ("actor/pg_loss", "actor/kl_loss", "train/loss", "critic/vf_loss")
SHARE_PREFIXES = ("rewards/", "logps/")
"""Names (and beginnings of names) of what is divided already; all other sums are over tokens."""


@dataclass(frozen=True)
class Denominators:
    """What the losses of one mini-batch are divided by: counts over all its micro-batches and data parallel ranks.

    Attributes:
        tokens: response tokens.
        sequences: sequences, those with an empty response included.
        norm_length: constant response length of Dr.GRPO's normalisation (data.max_response_length).
    """

    tokens: int
    sequences: int
    norm_length: int

    @classmethod
    def of(cls, response_lengths: Sequence[int], norm_length: int) -> Denominators:
        """From the response length of every sequence of the mini-batch."""
        return cls(tokens=int(sum(response_lengths)), sequences=len(response_lengths), norm_length=norm_length)


def aggregate(values: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This batch's share of the mini-batch's aggregated loss; the shares of all batches add up to it.

    With S sequences, T response tokens in all, T_s those of sequence s, L the constant norm length:

    - ``token-mean``: sum over all tokens / T (arXiv 2503.14476, section 3.3);
    - ``seq-mean-token-mean``: sum over s of (sum over its tokens / T_s) / S (arXiv 2402.03300);
    - ``seq-mean-token-sum``: sum over all tokens / S;
    - ``seq-mean-token-sum-norm``: sum over all tokens / (S L) (Dr.GRPO, arXiv 2503.20783).

    A sequence with an empty response adds 0 and counts in S. A mini-batch without any response token gives 0.

    Args:
        values: [tokens].
        mask: bool [tokens].
        cu_seqlens: [sequences + 1].
        mode: one of the above.
        denominators: counts of the whole mini-batch.

    Returns:
        Scalar of the dtype of ``values``, differentiable.

    Raises:
        ValueError: an unknown mode.
    """
    values = torch.where(mask, values, 0.0)
    match mode:
        case "token-mean":
            return values.sum() / max(1, denominators.tokens)
        case "seq-mean-token-mean":
            per_token = 1.0 / _response_lengths(mask, cu_seqlens).clamp(min=1).to(values.dtype)
            weights = torch.repeat_interleave(per_token, cu_seqlens.diff().long(), output_size=values.numel())
            return (values * weights).sum() / max(1, denominators.sequences)
        case "seq-mean-token-sum":
            return values.sum() / max(1, denominators.sequences)
        case "seq-mean-token-sum-norm":
            return values.sum() / (max(1, denominators.sequences) * denominators.norm_length)
    raise ValueError(f"unknown loss aggregation {mode!r}")


def actor_loss(
    config: ActorConfig,
    micro: SequenceBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    denominators: Denominators,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the actor's loss: policy loss + KL loss - entropy bonus.

    Reads the columns ``advantages``, ``old_log_probs`` (when absent the current ones, without gradient, stand for
    them: right exactly when the batch is used for one update), with ``config.use_kl_loss`` ``ref_log_probs`` and with
    ``config.rollout_correction`` ``rollout_log_probs``.

    Args:
        config: clip ranges, aggregation mode, coefficients.
        micro: the micro-batch, on the device of ``log_probs``.
        log_probs: [tokens], with gradient.
        entropy: [tokens] or None; needed when ``config.entropy_coef`` is not 0.
        denominators: counts of the whole mini-batch.

    Returns:
        The share of the loss (scalar) and detached float64 scalars for `finish_metrics`; both add up over
        micro-batches and data parallel ranks.

    Raises:
        ValueError: a column or the entropy that the configuration needs is missing.
    """
    mask = micro.response_mask
    columns = {name: torch.where(mask, micro.columns[name], 0.0) for name in _columns_of(config, micro)}
    log_probs = torch.where(
        mask, log_probs, 0.0
    )  # with advantages 0 there, a token outside the mask adds 0 to all sums
    old = columns.get("old_log_probs", log_probs.detach())
    aggregated = partial(
        aggregate, mask=mask, cu_seqlens=micro.cu_seqlens, mode=config.loss_aggregation, denominators=denominators
    )

    policy = policy_loss(config, log_probs, old, columns["advantages"], mask, micro.cu_seqlens)
    weighted = policy.loss
    if config.rollout_correction.active:
        weighted = weighted * correction_weights(
            config.rollout_correction, old, columns["rollout_log_probs"], mask, micro.cu_seqlens
        )
    loss = pg_loss = aggregated(weighted)
    sums = {
        TOKENS: _total(mask),
        "actor/pg_loss": _total(pg_loss),
        "actor/pg_clipfrac": _total(policy.clipped),
        "actor/pg_clipfrac_lower": _total(policy.clipped_lower),
        "actor/ppo_kl": _total(-policy.log_ratio),
    }
    if config.use_kl_loss:
        kl_loss = aggregated(kl_penalty(log_probs, columns["ref_log_probs"], config.kl_loss_type))
        loss = loss + config.kl_loss_coef * kl_loss
        sums["actor/kl_loss"] = _total(kl_loss)
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0)
        sums["actor/entropy"] = _total(entropy)
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * aggregated(entropy)
    elif config.entropy_coef != 0:
        raise ValueError("actor.entropy_coef is not 0 and no entropy was given")
    return loss, sums


def actor_loss_fn(config: ActorConfig, denominators: Denominators) -> LossFn:
    """`actor_loss` of one mini-batch in the form that the model's update takes."""
    return lambda micro, log_probs, entropy: actor_loss(config, micro, log_probs, entropy, denominators)


def sft_loss(
    micro: SequenceBatch, log_probs: Tensor, entropy: Tensor | None, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the mean negative log-likelihood of the mini-batch's response tokens.

    Arguments and returns as for `actor_loss`; the entropy, when given, is only reported.
    """
    mask = micro.response_mask
    loss = aggregate(-torch.where(mask, log_probs, 0.0), mask, micro.cu_seqlens, "token-mean", denominators)
    sums = {TOKENS: _total(mask), "train/loss": _total(loss)}
    if entropy is not None:
        sums["actor/entropy"] = _total(torch.where(mask, entropy, 0.0))
    return loss, sums


def sft_loss_fn(denominators: Denominators) -> LossFn:
    """`sft_loss` of one mini-batch in the form that the model's update takes."""
    return lambda micro, log_probs, entropy: sft_loss(micro, log_probs, entropy, denominators)


def add_sums(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Adds the sums of micro-batches (or of ranks), which must have the same keys."""
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"sums with different keys: {[sorted(part) for part in parts]}")
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]} if parts else {}


def finish_metrics(sums: Mapping[str, Tensor | float], denominators: Denominators) -> dict[str, float]:
    """Metrics of a mini-batch under verl's names, from sums over all its micro-batches and data parallel ranks.

    ``actor/pg_loss``, ``actor/kl_loss`` and ``critic/vf_loss`` follow the aggregation mode, ``rewards/`` and ``logps/``
    are means over answers, the others are means over response tokens.

    Raises:
        RunError: the sums were not taken over exactly the mini-batch's tokens, e.g. a micro-batch is missing or
            ranks that hold the same sequences were counted twice.
    """
    counted = float(sums[TOKENS])
    if counted != denominators.tokens:
        raise RunError(
            f"metrics were summed over {counted:.0f} response tokens, but the mini-batch has {denominators.tokens}"
        )
    tokens = max(1, denominators.tokens)
    divided = {name: name in SHARES or name.startswith(SHARE_PREFIXES) for name in sums}
    return {n: float(v) if divided[n] else float(v) / tokens for n, v in sums.items() if n != TOKENS}


def _columns_of(config: ActorConfig, micro: SequenceBatch) -> list[str]:
    needed = ["advantages"] + (["ref_log_probs"] if config.use_kl_loss else [])
    needed += ["rollout_log_probs"] if config.rollout_correction.active else []
    missing = [name for name in needed if name not in micro.columns]
    if missing:
        raise ValueError(f"the batch has no column {', '.join(missing)}; it has {sorted(micro.columns)}")
    return needed + (["old_log_probs"] if "old_log_probs" in micro.columns else [])


def _response_lengths(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [sequences], exact and without atomics: differences of the running count at the borders."""
    running = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    return running[cu_seqlens.long()].diff()


def _total(values: Tensor) -> Tensor:
    return values.detach().double().sum()
