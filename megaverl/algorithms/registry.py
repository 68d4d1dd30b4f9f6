"""``algorithm.name`` -> the functions of that algorithm, so that the training loop has no switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaverl.algorithms.advantages import group_advantages
from megaverl.algorithms.losses import Denominators, LossFn, actor_loss_fn, sft_loss_fn
from megaverl.config.schema import Config


@dataclass(frozen=True)
class Algorithm:
    """What the training loop asks of an algorithm.

    Attributes:
        name: ``algorithm.name``.
        advantages: (rewards [sequences], groups [sequences]) -> [sequences]; None for supervised training.
        loss_fn: counts of a mini-batch -> the loss of its micro-batches.
        needs_reference: the reference model's log-probabilities are needed.
        needs_policy_log_probs: the policy's log-probabilities are needed before the update in any case.
    """

    name: str
    advantages: Callable[[Tensor, Tensor | Sequence[int]], Tensor] | None
    loss_fn: Callable[[Denominators], LossFn]
    needs_reference: bool
    needs_policy_log_probs: bool

    def needs_old_log_probs(self, single_update: bool) -> bool:
        """Whether a pass for old log-probabilities is due, given `UpdatePlan.single_update`."""
        return self.advantages is not None and (self.needs_policy_log_probs or not single_update)


def algorithm_for(config: Config) -> Algorithm:
    """The functions for ``config.algorithm.name``.

    ``dr_grpo`` never divides by the standard deviation, whatever ``algorithm.norm_adv_by_std`` says; the other half of
    the paper is ``actor.loss_aggregation=seq-mean-token-sum-norm``.

    Raises:
        ValueError: a name without an algorithm.
    """
    name = config.algorithm.name
    if name == "sft":
        return Algorithm(name, None, sft_loss_fn, needs_reference=False, needs_policy_log_probs=False)
    if name not in ("grpo", "dr_grpo"):
        raise ValueError(f"unknown algorithm {name!r}")
    by_std = name == "grpo" and config.algorithm.norm_adv_by_std
    return Algorithm(
        name,
        advantages=lambda rewards, groups: group_advantages(rewards, groups, norm_by_std=by_std),
        loss_fn=lambda denominators: actor_loss_fn(config.actor, denominators),
        needs_reference=config.actor.use_kl_loss or config.algorithm.kl_in_reward,
        needs_policy_log_probs=config.algorithm.kl_in_reward or config.actor.recompute_old_log_probs == "always",
    )
