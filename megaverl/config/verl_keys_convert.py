"""How single keys of verl are converted. A conversion sees the value and all other keys of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Given = Mapping[str, Any]
"""The command line's values under verl's names."""
Result = dict[str, Any] | str
"""Native keys and their values, or the reason why there is none."""
Convert = Callable[[Any, Given], Result]


class RefusedValue(Exception):
    """The value asks for something that megaverl does not do; the message says what it does."""


@dataclass(frozen=True)
class Row:
    """One key of verl's.

    Attributes:
        key: verl's name; ends with ``.*`` for all keys below.
        kind: ``same`` name and meaning; ``renamed``; ``convert`` (the value, too); ``nothing`` (no effect);
            ``only`` some values, which are what megaverl does anyway.
        to: the native key or keys.
        text: a remark; for ``nothing`` and ``only`` the reason.
        convert: for ``convert``.
        values: for ``only``; empty when every value is refused.
    """

    key: str
    kind: Literal["same", "renamed", "convert", "nothing", "only"]
    to: str = ""
    text: str = ""
    convert: Convert | None = None
    values: tuple[Any, ...] = ()

    def apply(self, value: Any, given: Given) -> Result:
        """What ``value`` becomes.

        Raises:
            RefusedValue: megaverl does not do that.
        """
        if self.kind in ("same", "renamed"):
            return {self.to: value}
        if self.convert is not None:
            return self.convert(value, given)
        # False is 0 to Python, but not here
        if self.kind == "only" and not any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values
        ):
            raise RefusedValue(self.text)
        return self.text


def same(key: str) -> Row:
    """A key with the same name and meaning here."""
    return Row(key, "same", key)


def renamed(key: str, to: str, text: str = "") -> Row:
    """A key with another name here."""
    return Row(key, "renamed", to, text)


def by(key: str, convert: Convert, to: str, text: str = "") -> Row:
    """A key whose value is converted."""
    return Row(key, "convert", to, text, convert)


def nothing(key: str, why: str) -> Row:
    """A key without effect here."""
    return Row(key, "nothing", text=why)


def only(key: str, values: tuple[Any, ...], why: str) -> Row:
    """A key of which only these values can be had, which need no key here."""
    return Row(key, "only", text=why, values=values)


ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "remax": "remax",
}
LOSS_MODES = ("gspo", "cispo")


def algorithm_name(value: Any, given: Given) -> Result:
    mode = given.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if mode in LOSS_MODES and value == "grpo":
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} names the algorithm"
    if value not in ESTIMATORS:
        raise RefusedValue(f"known are {', '.join(ESTIMATORS)}")
    return {"algorithm.name": ESTIMATORS[value]}


def loss_mode(value: Any, given: Given) -> Result:
    if value == "vanilla":
        return "the clipped loss is the algorithms' own"
    if value not in LOSS_MODES:
        raise RefusedValue(f"known are vanilla, {', '.join(LOSS_MODES)}")
    if given.get("algorithm.adv_estimator", "gae") != "grpo":
        raise RefusedValue(f"{value} compares the samples of a prompt: algorithm.adv_estimator=grpo")
    return {"algorithm.name": value}


def estimator(to: str) -> Convert:
    """KL estimators by verl's names."""
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "k3"}

    def convert(value: Any, given: Given) -> Result:
        if value not in names:
            raise RefusedValue(f"known are {', '.join(names)}")
        return {to: names[value]}

    return convert


def both_clips(value: Any, given: Given) -> Result:
    names = [name for name in ("clip_ratio_low", "clip_ratio_high") if f"actor_rollout_ref.actor.{name}" not in given]
    return {f"actor.{name}": value for name in names} or "clip_ratio_low and clip_ratio_high are given"


def clipping(to: str) -> Convert:
    return lambda value, given: {to: value} if value is not None else "clip_ratio says it"


def steps_or_never(to: str) -> Convert:
    """-1 is never in verl, 0 here."""
    return lambda value, given: {to: max(0, int(value))}


def if_given(to: str) -> Convert:
    """null leaves the key as it is."""
    return lambda value, given: {to: value} if value is not None else "null keeps the default"


def or_none(to: str) -> Convert:
    return lambda value, given: {to: value or "none"}


def truncation(value: Any, given: Given) -> Result:
    """verl's older key of truncated importance weights of tokens."""
    if value is None or value <= 0:
        return "there is no correction between rollout and training"
    return {"actor.rollout_correction.importance": "token", "actor.rollout_correction.threshold": value}


def overlong(length: str) -> Convert:
    def convert(value: Any, given: Given) -> Result:
        if not value:
            return {"reward.overlong_buffer": 0}
        if length not in given:
            raise RefusedValue(f"give {length}=TOKENS as well")
        return {"reward.overlong_buffer": given[length]}

    return convert


def generation_batches(value: Any, given: Given) -> Result:
    if value <= 0:
        raise RefusedValue("a step needs a bound: algorithm.max_generation_batches=10")
    return {"algorithm.max_generation_batches": value}


def filter_rows(value: Any, given: Given) -> Result:
    return {"data.truncation": "filter"} if value else "data.truncation says what becomes of long prompts"


def longest(given: Given) -> int:
    """Tokens of the longest sequence, with verl's defaults."""
    return int(given.get("data.max_prompt_length", 512)) + int(given.get("data.max_response_length", 512))


def _dynamic(key: str, given: Given) -> bool:
    # verl's switches for the reference and the critic default to the actor's
    return bool(given.get(key, given.get("actor_rollout_ref.actor.use_dynamic_bsz", False)))


def tokens_of_rows(to: str, dynamic: str) -> Convert:
    """So many rows are at most so many tokens."""

    def convert(value: Any, given: Given) -> Result:
        if value is None or _dynamic(dynamic, given):
            return "the limit of tokens holds"
        return {to: int(value) * longest(given)}

    return convert


def token_limit(to: str, dynamic: str) -> Convert:
    """A limit of tokens counts only with dynamic batch sizes."""

    def convert(value: Any, given: Given) -> Result:
        return {to: value} if _dynamic(dynamic, given) else "the number of rows holds, without use_dynamic_bsz"

    return convert


def recompute(to: str) -> Convert:
    return lambda value, given: {to: "full" if value else "none"}


def granularity(to: str) -> Convert:
    return lambda value, given: {to: value or "none"}


def vpp(value: Any, given: Given) -> Result:
    return {"actor.layout.vpp": value or 1}


def sequence_parallel(value: Any, given: Given) -> Result:
    if given.get("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 1) == 1:
        return "there is one TP rank"
    return {"actor.layout.sequence_parallel": value}


def precision(value: Any, given: Given) -> Result:
    names = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
    if value not in names:
        raise RefusedValue("weights are bfloat16 or float32")
    return {"actor.precision": names[value]}


def betas(ours: str) -> Convert:
    def convert(value: Any, given: Given) -> Result:
        if not isinstance(value, list) or len(value) != 2:
            raise RefusedValue("two numbers, such as [0.9,0.999]")
        return {f"{ours}.beta1": value[0], f"{ours}.beta2": value[1]}

    return convert


def schedule(ours: str) -> Convert:
    def convert(value: Any, given: Given) -> Result:
        if value not in ("constant", "linear", "cosine"):
            raise RefusedValue("known are constant, linear, cosine")
        return {f"{ours}.schedule": value}

    return convert


def updates_per_step(ours: str, given: Given) -> int:
    """Optimizer updates of a step; verl's schedules advance once a step, ours with every update."""
    role = "actor_rollout_ref.actor" if ours.startswith("actor") else "critic"
    batch = int(given.get("data.train_batch_size", 1024))
    actor = "actor_rollout_ref.actor"
    mini = int(given.get(f"{role}.ppo_mini_batch_size", given.get(f"{actor}.ppo_mini_batch_size", 256)))
    epochs = int(given.get(f"{role}.ppo_epochs", given.get(f"{actor}.ppo_epochs", 1)))
    return -(-batch // mini) * epochs


def warmup(ours: str) -> Convert:
    def convert(value: Any, given: Given) -> Result:
        if value is None or value < 0:
            return "lr_warmup_steps_ratio says it"
        return {f"{ours}.warmup_steps": int(value) * updates_per_step(ours, given)}

    return convert


def warmup_ratio(ours: str) -> Convert:
    def convert(value: Any, given: Given) -> Result:
        role = "actor_rollout_ref.actor" if ours.startswith("actor") else "critic"
        steps = given.get(f"{role}.optim.lr_warmup_steps")
        if not value or (steps is not None and steps >= 0):
            return "lr_warmup_steps says it" if value else "there is no warm-up"
        total = given.get("trainer.total_training_steps")
        if total is None:
            raise RefusedValue(f"without trainer.total_training_steps, give {ours}.warmup_steps=UPDATES")
        return {f"{ours}.warmup_steps": int(value * int(total)) * updates_per_step(ours, given)}

    return convert


def engine(value: Any, given: Given) -> Result:
    if value not in ("vllm", "hf"):
        raise RefusedValue("vllm and hf generate")
    return {"rollout.engine": value}


def top_k(to: str) -> Convert:
    return lambda value, given: {to: value or -1}


_VAL = "actor_rollout_ref.rollout.val_kwargs"


def validation_temperature(value: Any, given: Given) -> Result:
    if not given.get(f"{_VAL}.do_sample", False):
        return {"rollout.val.temperature": 0}  # verl is greedy then, whatever the temperature says
    return {"rollout.val.temperature": value}


def validation_sampling(value: Any, given: Given) -> Result:
    if not value:
        return {"rollout.val.temperature": 0}
    return "val_kwargs.temperature says it" if f"{_VAL}.temperature" in given else "verl's temperature is 0"


def device(value: Any, given: Given) -> Result:
    if value not in ("cuda", "cpu"):
        raise RefusedValue("workers run on cuda or cpu")
    return {"cluster.device": value}


def loggers(value: Any, given: Given) -> Result:
    names = value if isinstance(value, list) else [value]
    unknown = [name for name in names if name not in ("console", "file", "wandb", "tensorboard")]
    if unknown:
        raise RefusedValue("known are console, file, wandb, tensorboard")
    return {"trainer.loggers": list(dict.fromkeys([*names, "file"]))}


def resume(value: Any, given: Given) -> Result:
    if value == "resume_path":
        if not given.get("trainer.resume_from_path"):
            raise RefusedValue("name the checkpoint: trainer.resume_from_path=RUN/checkpoints/step_N")
        return "trainer.resume_from_path says it"
    names = {"auto": "auto", "disable": "never"}
    if value not in names:
        raise RefusedValue("known are auto, disable, resume_path")
    return {"trainer.resume": names[value]}


def resume_path(value: Any, given: Given) -> Result:
    if not value or given.get("trainer.resume_mode", "auto") != "resume_path":
        return "trainer.resume_mode says where to go on from"
    return {"trainer.resume": value}


def arguments(value: Any, given: Given) -> Result:
    """All further arguments of the scorer; one key here holds them."""
    prefix = "custom_reward_function.reward_kwargs."
    named = {key.removeprefix(prefix): item for key, item in given.items() if key.startswith(prefix)}
    return {"reward.function.arguments": [f"{name}={item}" for name, item in named.items()]}


def manager(value: Any, given: Given) -> Result:
    if value == "batch":
        return {"reward.function.batch": True}
    if value not in ("naive", "prime", "dapo"):
        raise RefusedValue("known are naive, prime, dapo, batch")
    return "each response is scored by itself"


def reward_model(value: Any, given: Given) -> Result:
    if not value:
        return "responses are scored by a function"
    path = given.get("reward_model.model.path")
    if not path:
        raise RefusedValue("name the reward model: reward_model.model.path=FOLDER")
    return {"reward.model.path": path}


def reward_tokenizer(value: Any, given: Given) -> Result:
    if value in (None, given.get("actor_rollout_ref.model.path"), "${actor_rollout_ref.model.path}"):
        return "the reward model reads the actor's tokens"
    raise RefusedValue("the reward model reads the actor's tokens: take one with the actor's tokenizer")
