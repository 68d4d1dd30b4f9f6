"""Notes on combinations of keys that work and may surprise; each names the key to change."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config.derived import critic_warmup, epochs, mini_batches, needs_critic, needs_reference
from megaverl.config.fields import all_fields
from megaverl.config.schema import Config


def common_notes(config: Config) -> Iterator[str]:
    trainer, optimizer = config.trainer, config.actor.optimizer
    if trainer.total_steps is not None and trainer.total_epochs > 1:
        yield (
            f"trainer.total_steps={trainer.total_steps} ends the run; trainer.total_epochs={trainer.total_epochs} "
            "is not used (trainer.total_steps=null lets the epochs decide)"
        )
    if not trainer.save_every and not trainer.export_dir:
        yield "the trained weights are not kept: set trainer.export_dir or trainer.save_every"
    if optimizer.lr == 0:
        yield "nothing is learnt: actor.optimizer.lr is 0"
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio > 0:
        yield "actor.optimizer.min_lr_ratio is not used: actor.optimizer.schedule is constant"
    updates = _updates(config)
    if updates is not None and optimizer.warmup_steps >= updates:
        yield (
            f"the learning rate never reaches its peak: actor.optimizer.warmup_steps={optimizer.warmup_steps}, "
            f"and the run makes {updates} updates"
        )


def _updates(config: Config) -> int | None:
    """The actor's optimizer updates in the whole run; None when the number of rows decides."""
    if config.trainer.total_steps is None:
        return None
    steps = config.trainer.total_steps - critic_warmup(config)
    return steps * epochs(config, "actor") * mini_batches(config, "actor")


def rl_notes(config: Config) -> Iterator[str]:
    actor, algorithm, rollout = config.actor, config.algorithm, config.rollout
    if config.trainer.val_every and not config.data.val_files:
        yield "no validation takes place: data.val_files is empty"
    if algorithm.name == "dr_grpo" and actor.loss_aggregation != "seq-mean-token-sum-norm":
        yield "Dr.GRPO also wants actor.loss_aggregation=seq-mean-token-sum-norm (arXiv 2503.20783)"
    yield from _critic_notes(config)
    if not needs_reference(config):
        yield "no KL to the reference model is taken, so it is not loaded (actor.use_kl_loss=true adds it)"
    if actor.use_kl_loss and algorithm.kl_in_reward:
        yield "the KL counts twice, in loss and reward: set algorithm.kl_in_reward or actor.use_kl_loss to false"
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "the KL is only measured, at the cost of a reference model: actor.kl_loss_coef is 0"
    if algorithm.kl_in_reward and algorithm.kl_coef == 0:
        yield "the KL is only measured, at the cost of a reference model: algorithm.kl_coef is 0"
    if not algorithm.kl_in_reward and _is_set(config, "algorithm.kl_coef"):
        yield "algorithm.kl_coef is not used: algorithm.kl_in_reward is false"
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        yield "the gradient of k1 as a loss is 0 on average: actor.kl_loss_type=low_var_kl pulls to the reference"
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            "samples come from a cut distribution, log-probabilities from the whole one: "
            "rollout.top_p=1 and rollout.top_k=-1 make them agree"
        )
    if rollout.val.temperature == 0 and rollout.val.n > 1:
        yield f"validation samples a prompt {rollout.val.n} times alike: set rollout.val.temperature or rollout.val.n=1"


def _critic_notes(config: Config) -> Iterator[str]:
    """Keys that only PPO reads are named when they are set for another algorithm, and the reverse."""
    algorithm = config.algorithm
    if needs_critic(config):
        if _is_set(config, "algorithm.norm_adv_by_std"):
            yield "algorithm.norm_adv_by_std is not used: PPO compares with the critic, not within a prompt's samples"
        if config.critic.optimizer.lr == 0:
            yield "the critic learns nothing: critic.optimizer.lr is 0"
        return
    unused = [key for key in all_fields() if _only_for_critic(key) and _is_set(config, key)]
    if unused:
        yield f"{algorithm.name} has no critic and does not use {', '.join(unused)}"


def _only_for_critic(key: str) -> bool:
    in_algorithm = key in ("algorithm.gamma", "algorithm.lam", "algorithm.whiten_advantages")
    return key.startswith("critic.") or in_algorithm or key in ("trainer.critic_warmup", "trainer.export_critic_dir")


def sft_notes(config: Config) -> Iterator[str]:
    """Supervised training neither generates nor validates: keys set for that are named, not dropped in silence."""
    unused = [key for key in all_fields() if _only_for_rl(key) and _is_set(config, key)]
    if unused:
        yield f"supervised training does not use {', '.join(unused)}"


_ACTOR_RL = (
    "clip_ratio",
    "use_kl",
    "kl_",
    "recompute_old",
    "offload_",
    "mini_batch_size",
    "epochs",
    "entropy_coef",
    "loss_aggregation",
)


def _only_for_rl(key: str) -> bool:
    in_section = key.startswith(("rollout.", "reward.", "reference.", "algorithm.")) or _only_for_critic(key)
    in_actor = key.startswith(tuple(f"actor.{name}" for name in _ACTOR_RL))
    validation = key in ("data.val_files", "trainer.val_every")
    return (in_section or in_actor or validation) and key != "algorithm.name"


def _is_set(config: Config, key: str) -> bool:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value != all_fields()[key].default
