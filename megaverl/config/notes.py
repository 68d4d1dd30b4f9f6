"""Notes on combinations of keys that work and may surprise; each names the key to change."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config.derived import compares_samples, critic_warmup, epochs, mini_batches, needs_critic, needs_reference
from megaverl.config.fields import all_fields
from megaverl.config.schema import Config
from megaverl.config.schema.presets import PRESETS


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
    yield from _algorithm_notes(config)
    yield from _critic_notes(config)
    unused = [key for key in all_fields() if key.startswith("algorithm.preference.") and _is_set(config, key)]
    if unused:
        yield f"{algorithm.name} does not use {', '.join(unused)}"
    if not needs_reference(config) and algorithm.name != "dapo":  # it has none by design
        yield (
            "no KL to the reference model is taken, so it is not loaded "
            "(actor.use_kl_loss=true or algorithm.kl_in_reward=true adds it)"
        )
    if actor.use_kl_loss and algorithm.kl_in_reward:
        yield "the KL counts twice, in loss and reward: set algorithm.kl_in_reward or actor.use_kl_loss to false"
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "the KL is only measured, at the cost of a reference model: actor.kl_loss_coef is 0"
    if algorithm.kl_in_reward and algorithm.kl_coef == 0:
        yield "the KL is only measured, at the cost of a reference model: algorithm.kl_coef is 0"
    if not algorithm.kl_in_reward:
        unused = [f"algorithm.kl_{name}" for name in ("coef", "estimator", "controller", "target", "horizon")]
        unused = [key for key in unused if _is_set(config, key)]
        if unused:
            yield f"algorithm.kl_in_reward is false, and {', '.join(unused)} not used"
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        yield "the gradient of k1 as a loss is 0 on average: actor.kl_loss_type=low_var_kl pulls to the reference"
    if actor.clip_ratio_high < actor.clip_ratio_low and actor.policy_loss != "cispo":
        yield "likely tokens are clipped before unlikely ones: actor.clip_ratio_high is below actor.clip_ratio_low"
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        yield (
            "samples come from a cut distribution, log-probabilities from the whole one: "
            "rollout.top_p=1, rollout.top_k=-1 and rollout.min_p=0 make them agree"
        )
    if rollout.val.temperature == 0 and rollout.val.n > 1:
        yield f"validation samples a prompt {rollout.val.n} times alike: set rollout.val.temperature or rollout.val.n=1"


def _algorithm_notes(config: Config) -> Iterator[str]:
    """What the algorithm's paper has and these settings have not, and what of the settings it does not use."""
    actor, algorithm = config.actor, config.algorithm
    for key, value in PRESETS.get(algorithm.name, {}).items():
        found = _value(config, key)
        if found != value:
            yield f"{algorithm.name} as published has {key}={_word(value)}, and it is {_word(found)} here"
    if algorithm.name == "dapo":
        if not config.reward.overlong_buffer:
            share = max(1, config.data.max_response_length // 5)
            yield f"DAPO also penalises overlong responses: reward.overlong_buffer={share} would be its share"
        if needs_reference(config):
            yield "DAPO takes no KL: actor.use_kl_loss=false and algorithm.kl_in_reward=false"
    if actor.policy_loss == "gspo" and algorithm.name != "gspo" and actor.clip_ratio_high > 0.1:
        yield (
            f"a response's mean ratio moves little and actor.clip_ratio_high={actor.clip_ratio_high:g} hardly ever "
            "clips it: GSPO has actor.clip_ratio_low=3e-4 and actor.clip_ratio_high=4e-4"
        )
    if algorithm.name in ("reinforce++", "remax") and config.rollout.n == _default("rollout.n"):
        yield f"{algorithm.name} needs no more than one sample of a prompt: rollout.n=1 with a larger batch is usual"
    if algorithm.dynamic_sampling and not compares_samples(config):
        yield f"{algorithm.name} does not compare a prompt's samples: algorithm.dynamic_sampling=false saves time"
    if not compares_samples(config) and needs_critic(config) is False and _is_set(config, "algorithm.norm_adv_by_std"):
        yield f"algorithm.norm_adv_by_std is not used: {algorithm.name} does not compare within a prompt's samples"
    if not algorithm.dynamic_sampling and _is_set(config, "algorithm.max_generation_batches"):
        yield "algorithm.max_generation_batches is not used: algorithm.dynamic_sampling is false"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


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
    if algorithm.name in ("reinforce++", "remax"):
        unused = [key for key in unused if key != "algorithm.gamma"]
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


_PREFERENCE_KEYS = {
    "loss": ("dpo",),
    "beta": ("dpo", "kto"),
    "label_smoothing": ("rm", "dpo"),
    "center_rewards": ("rm",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def preference_notes(config: Config) -> Iterator[str]:
    """Keys that preference training, or this kind of it, does not read are named when they are set."""
    name, section = config.algorithm.name, "algorithm.preference."

    def read(key: str) -> bool:
        if key.startswith(section):
            return name in _PREFERENCE_KEYS[key.removeprefix(section)]
        if key.startswith("reference."):
            return needs_reference(config)
        return key in ("data.val_files", "trainer.val_every", "algorithm.name") or not _only_for_rl(key)

    unused = [key for key in all_fields() if not read(key) and _is_set(config, key)]
    if unused:
        yield f"{name} does not use {', '.join(unused)}"
    if config.trainer.val_every and not config.data.val_files:
        yield "no validation takes place: data.val_files is empty"


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
    "policy_loss",
    "rollout_correction",
)


def _only_for_rl(key: str) -> bool:
    in_section = key.startswith(("rollout.", "reward.", "reference.", "algorithm.")) or _only_for_critic(key)
    in_actor = key.startswith(tuple(f"actor.{name}" for name in _ACTOR_RL))
    validation = key in ("data.val_files", "trainer.val_every")
    return (in_section or in_actor or validation) and key != "algorithm.name"


def _is_set(config: Config, key: str) -> bool:
    return _value(config, key) != _default(key)


def _default(key: str) -> object:
    return all_fields()[key].default


def _value(config: Config, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
