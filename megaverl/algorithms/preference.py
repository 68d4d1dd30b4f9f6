"""Losses of preference training on packed sequences: reward models (Bradley-Terry), DPO with its variants, KTO.

As in `megaverl.algorithms.losses`, what a micro-batch returns is its share of the mini-batch's loss: every mean is
divided by `PreferenceCounts`, which the driver knows beforehand. So neither loss, gradient nor metric depends on the
cut, as long as the two sequences of a pair stay in one micro-batch.

The log-probabilities of a response are added up in float64. Where the terms come in float32 each is off by at most
half a unit in its last place, so a sum over T tokens by at most ``2**-24 * sum |log p_t|``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megaverl.algorithms.losses import TOKENS, Denominators, LossFn
from megaverl.config.schema import PreferenceConfig
from megaverl.data.batch import UNIT, SequenceBatch, segment_sum

ScoreLossFn = Callable[[SequenceBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, scores [sequences] with gradient) -> (share of the loss, sums)."""

PREFERRED = "preferred"
"""Per-sequence column, int64: 1 chosen or wanted, 0 rejected or unwanted, `BASELINE` under another prompt (KTO)."""
BASELINE = -1


@dataclass(frozen=True)
class PreferenceCounts(Denominators):
    """What the means of one mini-batch are divided by, over all its micro-batches and data parallel ranks.

    Attributes:
        units: pairs, or judged answers (KTO).
        chosen, rejected: sequences of either kind.
        baseline: KTO's z0, see `kto_baseline`.
    """

    units: int = 0
    chosen: int = 0
    rejected: int = 0
    baseline: float = 0.0


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, label_smoothing: float = 0.0, center: float = 0.0
) -> Tensor:
    """``-(1 - e) log sigmoid(d) - e log sigmoid(-d) + c (r_w + r_l)^2`` with ``d = r_w - r_l``, for each pair.

    The first term with e = 0 is the negative log-likelihood of Bradley and Terry's model of comparisons (arXiv
    2203.02155, equation 1); e is the share of wrong labels (arXiv 2401.06080); the last term holds the
    rewards near 0, which differences leave free (arXiv 2312.09244).

    Args:
        chosen, rejected: [pairs], rewards of the two answers.

    Returns:
        [pairs].
    """
    return _smoothed(chosen - rejected, label_smoothing) + center * (chosen + rejected).square()


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    kind: Literal["sigmoid", "ipo", "robust"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation and two relatives, for each pair.

    With ``h = log pi(y_w)/ref(y_w) - log pi(y_l)/ref(y_l)``, e the label smoothing:

    - ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` (arXiv 2305.18290, equation 7; e > 0 is
      the conservative form of its authors' note of 2023);
    - ``robust``: ``(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)``, unbiased under labels that
      are wrong with probability e (arXiv 2403.00409);
    - ``ipo``: ``(h - 1 / (2 beta))^2`` (arXiv 2310.12036, equation 17).

    Args:
        chosen, rejected: [pairs], log-ratios of policy and reference: summed over the answer's tokens, for ``ipo``
            their means, so that the target does not depend on length.

    Returns:
        [pairs].

    Raises:
        ValueError: an unknown kind.
    """
    difference = chosen - rejected
    match kind:
        case "sigmoid":
            return _smoothed(beta * difference, label_smoothing)
        case "robust":
            wrong = label_smoothing
            own, other = F.logsigmoid(beta * difference), F.logsigmoid(-beta * difference)
            return (-(1 - wrong) * own + wrong * other) / (1 - 2 * wrong)
        case "ipo":
            return (difference - 1 / (2 * beta)).square()
    raise ValueError(f"unknown preference loss {kind!r}")


def kto_loss(
    log_ratios: Tensor,
    wanted: Tensor,
    *,
    baseline: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation, for each answer (arXiv 2402.01306, its loss with constants dropped).

    With r the log-ratio of policy and reference, z0 the baseline: ``w_D (1 - sigmoid(beta (r - z0)))`` for wanted
    answers and ``w_U (1 - sigmoid(beta (z0 - r)))`` for unwanted ones.

    Args:
        log_ratios: [answers], summed over each answer's tokens.
        wanted: bool [answers].
        baseline: z0, see `kto_baseline`; no gradient goes through it.

    Returns:
        [answers].
    """
    gain = beta * (log_ratios - baseline)
    return torch.where(
        wanted, desirable_weight * (1 - torch.sigmoid(gain)), undesirable_weight * (1 - torch.sigmoid(-gain))
    )


def kto_baseline(log_ratios: Tensor) -> float:
    """z0 of KTO: the KL between policy and reference, estimated on prompts with the answer to another prompt.

    The mean of their log-ratios, at least 0 (arXiv 2402.01306): over the whole mini-batch, so that it
    does not depend on the cut.

    Args:
        log_ratios: [answers of the mini-batch], summed over tokens.
    """
    return max(0.0, float(log_ratios.double().mean()))


def score_loss_fn(config: PreferenceConfig, counts: PreferenceCounts) -> ScoreLossFn:
    """The reward model's loss of one mini-batch in the form that the model's update takes."""

    def loss_fn(micro: SequenceBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = of_pairs(micro, scores.double())
        losses = bradley_terry_loss(
            chosen, rejected, label_smoothing=config.label_smoothing, center=config.center_rewards
        )
        loss = losses.sum() / max(1, counts.units)
        return loss, _sums(micro, loss) | pair_metrics(chosen, rejected, counts)

    return loss_fn


def dpo_loss_fn(config: PreferenceConfig, counts: PreferenceCounts) -> LossFn:
    """`dpo_loss` of one mini-batch; reads the column ``ref_log_probs``."""

    def loss_fn(micro: SequenceBatch, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratios(micro, log_probs)
        compared = ratios
        if config.loss == "ipo":
            compared = ratios / _answer_lengths(micro).clamp(min=1)
        losses = dpo_loss(
            *of_pairs(micro, compared), beta=config.beta, kind=config.loss, label_smoothing=config.label_smoothing
        )
        loss = losses.sum() / max(1, counts.units)
        rewards = of_pairs(micro, config.beta * ratios)
        return loss, _sums(micro, loss) | pair_metrics(*rewards, counts) | _log_prob_metrics(micro, log_probs, counts)

    return loss_fn


def kto_loss_fn(config: PreferenceConfig, counts: PreferenceCounts) -> LossFn:
    """`kto_loss` of one mini-batch; reads the column ``ref_log_probs``."""

    def loss_fn(micro: SequenceBatch, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        ratios, wanted = log_ratios(micro, log_probs), micro.per_sequence[PREFERRED] == 1
        losses = kto_loss(
            ratios,
            wanted,
            baseline=counts.baseline,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        loss = losses.sum() / max(1, counts.units)
        right = (ratios > counts.baseline) == wanted
        sums = _sums(micro, loss) | {"rewards/accuracies": _share(right, counts.units)}
        rewards = _by_kind("rewards", config.beta * ratios, wanted, counts)
        if len(rewards) == 2:
            rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
        return loss, sums | rewards | _log_prob_metrics(micro, log_probs, counts)

    return loss_fn


def pair_metrics(chosen: Tensor, rejected: Tensor, counts: PreferenceCounts) -> dict[str, Tensor]:
    """This micro-batch's share of the metrics of a mini-batch of pairs, from their rewards [pairs].

    ``rewards/accuracies`` is the share of pairs whose chosen answer has the higher reward; a tie is no success.
    """
    return {
        "rewards/chosen": _share(chosen, counts.units),
        "rewards/rejected": _share(rejected, counts.units),
        "rewards/margins": _share(chosen - rejected, counts.units),
        "rewards/accuracies": _share(chosen > rejected, counts.units),
    }


def log_ratios(micro: SequenceBatch, log_probs: Tensor) -> Tensor:
    """float64 [sequences]: log-probabilities of policy less those of the reference, summed over each answer.

    Raises:
        ValueError: the batch has no column ``ref_log_probs``.
    """
    if "ref_log_probs" not in micro.columns:
        raise ValueError(f"the batch has no column ref_log_probs; it has {sorted(micro.columns)}")
    return answer_sums(micro, log_probs) - answer_sums(micro, micro.columns["ref_log_probs"])


def answer_sums(micro: SequenceBatch, values: Tensor) -> Tensor:
    """float64 [sequences]: per-token values [tokens] added up over each answer; others may be anything."""
    return segment_sum(torch.where(micro.response_mask, values.double(), 0.0), micro.cu_seqlens)


def _smoothed(difference: Tensor, wrong: float) -> Tensor:
    return -(1 - wrong) * F.logsigmoid(difference) - wrong * F.logsigmoid(-difference)


def of_pairs(micro: SequenceBatch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Per-sequence values of chosen and rejected, [pairs] each.

    Raises:
        ValueError: the sequences are not pairs, the chosen answer directly before the rejected one.
    """
    unit, preferred = micro.per_sequence[UNIT].reshape(-1), micro.per_sequence[PREFERRED].reshape(-1)
    paired = len(micro) % 2 == 0 and bool((unit[::2] == unit[1::2]).all())
    if not paired or not bool((preferred[::2] == 1).all()) or not bool((preferred[1::2] == 0).all()):
        raise ValueError("a micro-batch of pairs must hold each chosen answer directly before its rejected one")
    return values[::2], values[1::2]


def _sums(micro: SequenceBatch, loss: Tensor) -> dict[str, Tensor]:
    return {TOKENS: micro.response_mask.double().sum(), "train/loss": loss.detach().double()}


def _log_prob_metrics(micro: SequenceBatch, log_probs: Tensor, counts: PreferenceCounts) -> dict[str, Tensor]:
    return _by_kind("logps", answer_sums(micro, log_probs), micro.per_sequence[PREFERRED] == 1, counts)


def _by_kind(name: str, values: Tensor, wanted: Tensor, counts: PreferenceCounts) -> dict[str, Tensor]:
    """Shares of the means over chosen and over rejected sequences; without a kind that the mini-batch has not."""
    kinds = (("chosen", wanted, counts.chosen), ("rejected", ~wanted, counts.rejected))
    return {f"{name}/{kind}": _share(values[mask], count) for kind, mask, count in kinds if count}


def _share(values: Tensor, count: int) -> Tensor:
    return values.detach().double().sum() / max(1, count)


def _answer_lengths(micro: SequenceBatch) -> Tensor:
    return segment_sum(micro.response_mask.double(), micro.cu_seqlens)
