"""``algorithm.name`` -> the functions of that algorithm, so that the training loop has no switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaverl.algorithms.advantages import group_advantages
from megaverl.algorithms.losses import Denominators, LossFn, actor_loss_fn, sft_loss_fn
from megaverl.algorithms.value_loss import ValueLossFn, critic_loss_fn
from megaverl.config.derived import needs_critic, needs_reference
from megaverl.config.schema import Config


@dataclass(frozen=True)
class Algorithm:
    """What the training loop asks of an algorithm.

    Attributes:
        name: ``algorithm.name``.
        advantages: (rewards [sequences], groups [sequences]) -> [sequences]; None where a prompt's samples are not
            compared: with a critic (its values make them, token by token) and in supervised training.
        loss_fn: counts of a mini-batch -> the loss of its micro-batches.
        critic_loss_fn: the same for the critic; None without one.
        supervised: rows with answers, no rewards.
        needs_reference: the reference model's log-probabilities are needed.
        needs_policy_log_probs: the policy's log-probabilities are needed before the update in any case.
    """

    name: str
    advantages: Callable[[Tensor, Tensor | Sequence[int]], Tensor] | None
    loss_fn: Callable[[Denominators], LossFn]
    critic_loss_fn: Callable[[Denominators], ValueLossFn] | None = None
    supervised: bool = False
    needs_reference: bool = False
    needs_policy_log_probs: bool = False

    @property
    def needs_critic(self) -> bool:
        """Advantages come from the values of a critic, which is trained too."""
        return self.critic_loss_fn is not None

    def needs_old_log_probs(self, single_update: bool) -> bool:
        """Whether a pass for old log-probabilities is due, given `UpdatePlan.single_update`."""
        return not self.supervised and (self.needs_policy_log_probs or not single_update)


def algorithm_for(config: Config) -> Algorithm:
    """The functions for ``config.algorithm.name``.

    ``dr_grpo`` never divides by the standard deviation, whatever ``algorithm.norm_adv_by_std`` says; the other half of
    the paper is ``actor.loss_aggregation=seq-mean-token-sum-norm``.

    Raises:
        ValueError: a name without an algorithm.
    """
    name = config.algorithm.name
    if name == "sft":
        return Algorithm(name, None, sft_loss_fn, supervised=True)
    by_std = config.algorithm.norm_adv_by_std
    estimators = {
        "grpo": lambda rewards, groups: group_advantages(rewards, groups, norm_by_std=by_std),
        "dr_grpo": lambda rewards, groups: group_advantages(rewards, groups, norm_by_std=False),
        "ppo": None,
    }
    if name not in estimators:
        raise ValueError(f"unknown algorithm {name!r}")
    return Algorithm(
        name,
        advantages=estimators[name],
        loss_fn=lambda denominators: actor_loss_fn(config.actor, denominators),
        critic_loss_fn=(lambda counts: critic_loss_fn(config.critic, counts)) if needs_critic(config) else None,
        needs_reference=needs_reference(config),
        needs_policy_log_probs=config.algorithm.kl_in_reward or config.actor.recompute_old_log_probs == "always",
    )
