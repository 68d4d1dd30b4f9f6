"""What follows from several keys: the train layout, which models a run needs, sizes that default to another role's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megaverl.config.schema import Config, Recompute
from megaverl.parallel.layout import Layout, divide_world


def train_layout(config: Config) -> Layout:
    """The layout of the actor over all workers.

    Raises:
        ValueError: the number of workers does not fit.
    """
    layout = config.actor.layout
    world = config.cluster.nodes * config.cluster.workers_per_node
    return divide_world(world, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, vpp=layout.vpp)


PREFERENCE = ("rm", "dpo", "kto")


def learns_preferences(config: Config) -> bool:
    """Whether the run learns from answers that are preferred to others."""
    return config.algorithm.name in PREFERENCE


def uses_rollout(config: Config) -> bool:
    """Whether the run generates; otherwise its rows bring their answers."""
    return config.algorithm.name != "sft" and not learns_preferences(config)


def row_kind(config: Config) -> Literal["rl", "sft", "pair", "kto"]:
    """What the training rows hold; validation rows of preference training are always pairs."""
    if learns_preferences(config):
        return "kto" if config.algorithm.name == "kto" else "pair"
    return "sft" if config.algorithm.name == "sft" else "rl"


def needs_reference(config: Config) -> bool:
    """Whether the run uses the frozen reference model."""
    if not uses_rollout(config):
        return config.algorithm.name in ("dpo", "kto")
    return config.actor.use_kl_loss or config.algorithm.kl_in_reward


def needs_reward_model(config: Config) -> bool:
    """Whether responses are scored by a reward model, in place of scorers."""
    return uses_rollout(config) and config.reward.model.path is not None


def needs_critic(config: Config) -> bool:
    """Whether the run trains a value model."""
    return config.algorithm.name == "ppo"


def compares_samples(config: Config) -> bool:
    """Whether a response's advantage comes from the other samples of its prompt."""
    return config.algorithm.name not in ("ppo", "reinforce++", "remax", "sft")


def critic_warmup(config: Config) -> int:
    """First steps of the run in which the actor is not updated."""
    return config.trainer.critic_warmup if needs_critic(config) else 0


def mini_batches(config: Config, role: Literal["actor", "critic"]) -> int:
    """Mini-batches that each batch is cut into for the role's updates."""
    own = config.critic.mini_batch_size if role == "critic" else None
    size = own or config.actor.mini_batch_size or config.data.train_batch_size
    return -(-config.data.train_batch_size // size) if uses_rollout(config) else 1


def epochs(config: Config, role: Literal["actor", "critic"]) -> int:
    """Passes over each batch in the role's updates."""
    own = config.critic.epochs if role == "critic" else None
    return own or config.actor.epochs if uses_rollout(config) else 1


def micro_batch_tokens(config: Config, role: Literal["actor", "critic", "reference"]) -> int:
    """Tokens that a worker puts through the role's model at once."""
    own = {"actor": None, "critic": config.critic, "reference": config.reference}[role]
    return (own and own.max_tokens_per_micro_batch) or config.actor.max_tokens_per_micro_batch


def recompute(config: Config, role: Literal["actor", "critic"]) -> Recompute:
    """Activations that the backward pass of the role's model computes again."""
    own = config.critic.recompute if role == "critic" else None
    return own or config.actor.recompute


def offload(config: Config, role: Literal["actor", "critic"]) -> dict[str, bool]:
    """What of the role's model leaves the GPU while responses are generated, by the names of `release_for_rollout`."""
    optimizer, gradients = config.actor.offload_optimizer, config.actor.offload_gradients
    if role == "actor":  # its weights serve the rollout
        return {"optimizer": optimizer, "gradients": gradients, "parameters": False}
    own = config.critic
    return {
        "optimizer": optimizer if own.offload_optimizer is None else own.offload_optimizer,
        "gradients": gradients if own.offload_gradients is None else own.offload_gradients,
        "parameters": own.offload_parameters,
    }


def export_shard_bytes(config: Config) -> int:
    """Largest weights file of an export, bytes."""
    return max(1, round(config.trainer.export_shard_gb * 10**9))


def spool_folder(config: Config) -> Path | None:
    """Folder for the file of tokenized rows (``data.streaming``); None keeps them in memory."""
    return Path(config.trainer.run_dir) if config.data.streaming else None
