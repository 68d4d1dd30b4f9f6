"""``algorithm.name`` -> the functions of that algorithm, so that the training loop has no switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaverl.algorithms.advantages import batch_normed_advantages, group_advantages, leave_one_out_advantages
from megaverl.algorithms.losses import Denominators, LossFn, actor_loss_fn, sft_loss_fn
from megaverl.algorithms.preference import ScoreLossFn, dpo_loss_fn, kto_loss_fn, score_loss_fn
from megaverl.algorithms.value_loss import ValueLossFn, critic_loss_fn
from megaverl.config.derived import needs_critic, needs_reference
from megaverl.config.schema import Config

PREFERENCE_LOSSES = {"rm": score_loss_fn, "dpo": dpo_loss_fn, "kto": kto_loss_fn}


@dataclass(frozen=True)
class Algorithm:
    """What the training loop asks of an algorithm.

    Attributes:
        name: ``algorithm.name``.
        advantages: (rewards [sequences], groups [sequences], response lengths [sequences]) -> [sequences]; None where
            advantages are made token by token (from a critic's values, or from the rewards to come) and in supervised
            training.
        whitens: token advantages are whitened over the step.
        greedy_baseline: the score of the prompt's greedy response is taken off (ReMax).
        loss_fn: counts of a mini-batch -> the loss of its micro-batches; a reward model's takes scores.
        critic_loss_fn: the same for the critic; None without one.
        supervised: rows with answers, nothing is generated.
        needs_reference: the reference model's log-probabilities are needed.
        needs_policy_log_probs: the policy's log-probabilities are needed before the update in any case.
    """

    name: str
    advantages: Callable[[Tensor, Tensor | Sequence[int], Tensor], Tensor] | None
    loss_fn: Callable[[Any], LossFn | ScoreLossFn]
    critic_loss_fn: Callable[[Denominators], ValueLossFn] | None = None
    whitens: bool = False
    greedy_baseline: bool = False
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

    ``gspo``, ``dapo`` and ``cispo`` compare samples as GRPO does; what sets them apart lies in other keys, which
    `megaverl.config.schema.presets` sets. ``dr_grpo`` never divides by the standard deviation, whatever
    ``algorithm.norm_adv_by_std`` says. ``reinforce++`` always whitens, as its paper does.

    Raises:
        ValueError: a name without an algorithm.
    """
    name = config.algorithm.name
    if name == "sft":
        return Algorithm(name, None, sft_loss_fn, supervised=True)
    if name in PREFERENCE_LOSSES:
        make, settings = PREFERENCE_LOSSES[name], config.algorithm.preference
        return Algorithm(
            name, None, lambda counts: make(settings, counts), supervised=True, needs_reference=needs_reference(config)
        )
    return Algorithm(
        name,
        advantages=_estimator(config),
        loss_fn=lambda denominators: actor_loss_fn(config.actor, denominators),
        critic_loss_fn=(lambda counts: critic_loss_fn(config.critic, counts)) if needs_critic(config) else None,
        whitens=name == "reinforce++" or (name == "ppo" and config.algorithm.whiten_advantages),
        greedy_baseline=name == "remax",
        needs_reference=needs_reference(config),
        needs_policy_log_probs=config.algorithm.kl_in_reward or config.actor.recompute_old_log_probs == "always",
    )


def _estimator(config: Config) -> Callable[[Tensor, Tensor | Sequence[int], Tensor], Tensor] | None:
    """How a prompt's samples are compared; None where advantages are made token by token."""
    by_std = config.algorithm.norm_adv_by_std
    match config.algorithm.name:
        case "grpo" | "gspo" | "dapo" | "cispo":
            return lambda rewards, groups, _: group_advantages(rewards, groups, norm_by_std=by_std)
        case "dr_grpo":
            return lambda rewards, groups, _: group_advantages(rewards, groups, norm_by_std=False)
        case "rloo":
            return lambda rewards, groups, _: leave_one_out_advantages(rewards, groups)
        case "reinforce++_baseline":
            return batch_normed_advantages
        case "ppo" | "reinforce++" | "remax":
            return None
    raise ValueError(f"unknown algorithm {config.algorithm.name!r}")
