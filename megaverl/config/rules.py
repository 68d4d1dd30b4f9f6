"""Rules between keys: what one key alone cannot tell. Pure: looks at no file and no device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megaverl.config.fields import all_fields
from megaverl.config.schema import Config, Recompute
from megaverl.errors import Problems
from megaverl.parallel.layout import Layout, divide_world


def check_rules(config: Config, problems: Problems) -> list[str]:
    """Adds a problem for each combination of keys that cannot work.

    Returns:
        Notes: combinations that do work and may surprise; each names the key to change. To be printed at the start.
    """
    _check_inputs(config, problems)
    _check_layout(config, problems)
    _check_tokens(config, problems)
    _check_trainer(config, problems)
    if config.algorithm.name == "sft":
        return [*_common_notes(config), *_sft_notes(config)]
    _check_batch(config, problems)
    _check_rollout(config, problems)
    return [*_common_notes(config), *_rl_notes(config)]


def train_layout(config: Config) -> Layout:
    """The layout of the actor over all workers.

    Raises:
        ValueError: the number of workers does not fit.
    """
    layout = config.actor.layout
    world = config.cluster.nodes * config.cluster.workers_per_node
    return divide_world(world, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, vpp=layout.vpp)


def needs_reference(config: Config) -> bool:
    """Whether the run uses the frozen reference model."""
    return config.algorithm.name != "sft" and (config.actor.use_kl_loss or config.algorithm.kl_in_reward)


def needs_critic(config: Config) -> bool:
    """Whether the run trains a value model."""
    return config.algorithm.name == "ppo"


def critic_warmup(config: Config) -> int:
    """First steps of the run in which the actor is not updated."""
    return config.trainer.critic_warmup if needs_critic(config) else 0


def mini_batches(config: Config, role: Literal["actor", "critic"]) -> int:
    """Mini-batches that each batch is cut into for the role's updates."""
    own = config.critic.mini_batch_size if role == "critic" else None
    size = own or config.actor.mini_batch_size or config.data.train_batch_size
    return 1 if config.algorithm.name == "sft" else -(-config.data.train_batch_size // size)


def epochs(config: Config, role: Literal["actor", "critic"]) -> int:
    """Passes over each batch in the role's updates."""
    own = config.critic.epochs if role == "critic" else None
    return 1 if config.algorithm.name == "sft" else own or config.actor.epochs


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


def _check_inputs(config: Config, problems: Problems) -> None:
    if not config.model.path:
        problems.add("no model is named", where="model.path", fix="model.path=FOLDER of a Hugging Face checkpoint")
    if not config.data.train_files:
        problems.add("no training rows are named", where="data.train_files", fix="data.train_files=FILE.parquet")


def _check_layout(config: Config, problems: Problems) -> None:
    layout = config.actor.layout
    if layout.sequence_parallel and layout.tp == 1:
        problems.add(
            "sequence parallelism divides activations between TP ranks, and there is one",
            where="actor.layout.sequence_parallel",
            fix="set actor.layout.tp to 2 or more, or actor.layout.sequence_parallel=false",
        )
    if layout.vpp > 1 and layout.pp == 1:
        problems.add(
            f"{layout.vpp} model chunks per pipeline rank need a pipeline, and actor.layout.pp is 1",
            where="actor.layout.vpp",
            fix="set actor.layout.pp to 2 or more, or actor.layout.vpp=1",
        )
    try:
        dp = train_layout(config).dp
    except ValueError as error:
        problems.add(
            str(error),
            where="actor.layout",
            fix="change actor.layout.tp, pp or cp, or cluster.nodes and cluster.workers_per_node",
        )
        return
    if dp * layout.cp % layout.ep:
        problems.add(
            f"expert parallel size {layout.ep} does not divide dp x cp = {dp * layout.cp}",
            where="actor.layout.ep",
            fix="set actor.layout.ep to a divisor",
        )
    sequences = config.data.train_batch_size * (1 if config.algorithm.name == "sft" else config.rollout.n)
    if sequences < dp:
        problems.add(
            f"a batch of {sequences} sequences leaves some of the {dp} data parallel ranks without any",
            where="data.train_batch_size",
            fix=f"at least {dp} sequences, or fewer workers",
        )


def _check_tokens(config: Config, problems: Problems) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    limits = {"actor.max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch}
    if needs_reference(config) and config.reference.max_tokens_per_micro_batch is not None:
        limits["reference.max_tokens_per_micro_batch"] = config.reference.max_tokens_per_micro_batch
    if needs_critic(config) and config.critic.max_tokens_per_micro_batch is not None:
        limits["critic.max_tokens_per_micro_batch"] = config.critic.max_tokens_per_micro_batch
    for key, limit in limits.items():
        if limit < longest:
            problems.add(
                f"{limit} tokens cannot hold the longest sequence: data.max_prompt_length + "
                f"data.max_response_length = {longest}",
                where=key,
                fix=f"{key}={longest} or more, or shorter lengths",
            )


def _check_batch(config: Config, problems: Problems) -> None:
    batch = config.data.train_batch_size
    sizes = {"actor.mini_batch_size": config.actor.mini_batch_size}
    if needs_critic(config):
        sizes["critic.mini_batch_size"] = config.critic.mini_batch_size
    for key, mini in sizes.items():
        if mini is not None and (mini > batch or batch % mini):
            reason = "is larger than" if mini > batch else "does not divide"
            otherwise = "the whole batch" if key.startswith("actor") else "the actor's"
            problems.add(
                f"{mini} prompts per update {reason} data.train_batch_size = {batch}",
                where=key,
                fix=f"a divisor of {batch}, or null for {otherwise}",
            )
    _check_shares(config, problems)
    if config.rollout.n == 1 and not needs_critic(config):
        problems.add(
            f"{config.algorithm.name} compares the samples of one prompt, and there is one: every advantage would be 0",
            where="rollout.n",
            fix="rollout.n=2 or more; 8 is usual",
        )


def _check_shares(config: Config, problems: Problems) -> None:
    """Every update needs a sequence on every data parallel rank."""
    try:
        dp = train_layout(config).dp
    except ValueError:  # _check_layout has reported it
        return
    for role in ("actor", "critic") if needs_critic(config) else ("actor",):
        updates = mini_batches(config, role)
        batch = config.data.train_batch_size * config.rollout.n
        sequences = batch // updates
        if sequences < dp <= batch:  # a batch that is too small itself is _check_layout's
            problems.add(
                f"{updates} updates a batch leave {sequences} sequences to each, fewer than the {dp} DP ranks",
                where=f"{role}.mini_batch_size",
                fix="a larger mini-batch, more samples (rollout.n), or fewer data parallel ranks",
            )


def _check_rollout(config: Config, problems: Problems) -> None:
    rollout = config.rollout
    for key, top_k in (("rollout.top_k", rollout.top_k), ("rollout.val.top_k", rollout.val.top_k)):
        if top_k == 0:
            problems.add("there would be no token to sample from", where=key, fix=f"{key}=-1 for all tokens")
    tp = rollout.tp or config.actor.layout.tp
    world = config.cluster.nodes * config.cluster.workers_per_node
    if rollout.tp and world % rollout.tp:  # the actor's own tp is _check_layout's
        problems.add(
            f"{world} workers cannot be divided into rollout replicas of tp {tp}",
            where="rollout.tp",
            fix=f"a divisor of {world}",
        )
    if rollout.engine == "hf" and tp > 1:
        problems.add(
            f"the transformers engine runs whole models only, and the rollout's tp is {tp}",
            where="rollout.engine",
            fix="rollout.engine=vllm, or actor.layout.tp=1",
        )
    if rollout.temperature == 0:
        problems.add(
            "greedy sampling gives a prompt's samples all alike: "
            + ("nothing would be explored" if needs_critic(config) else "every advantage would be 0"),
            where="rollout.temperature",
            fix="rollout.temperature=1.0",
        )
    tokens = rollout.max_num_batched_tokens
    if tokens is not None and tokens < rollout.max_num_seqs:
        problems.add(
            f"vLLM needs at least one token per running sequence, and rollout.max_num_seqs is {rollout.max_num_seqs}",
            where="rollout.max_num_batched_tokens",
            fix=f"{rollout.max_num_seqs} or more, or fewer sequences",
        )


def _check_trainer(config: Config, problems: Problems) -> None:
    trainer = config.trainer
    twice = sorted({name for name in trainer.loggers if trainer.loggers.count(name) > 1})
    if twice:
        problems.add(f"{', '.join(twice)} named twice", where="trainer.loggers", fix="name each logger once")
    exports = {"trainer.export_dir": trainer.export_dir}
    if needs_critic(config):
        exports["trainer.export_critic_dir"] = trainer.export_critic_dir
        _check_warmup(config, problems)
    sources = {"model.path": config.model.path, "critic.path": config.critic.path}
    for key, folder in exports.items():
        for source, path in sources.items():
            if folder and folder == path:
                problems.add(
                    "the export would overwrite the checkpoint that the run starts from",
                    where=key,
                    fix=f"name another folder than {source}",
                )
    if needs_critic(config) and trainer.export_dir and trainer.export_dir == trainer.export_critic_dir:
        problems.add(
            "actor and critic would be exported into one folder",
            where="trainer.export_critic_dir",
            fix="name another folder than trainer.export_dir",
        )


def _check_warmup(config: Config, problems: Problems) -> None:
    trainer = config.trainer
    if trainer.total_steps is not None and trainer.critic_warmup >= trainer.total_steps:
        problems.add(
            f"{trainer.critic_warmup} steps of critic warm-up leave none of the {trainer.total_steps} to the actor",
            where="trainer.critic_warmup",
            fix=f"at most {trainer.total_steps - 1}, or more trainer.total_steps",
        )


def _common_notes(config: Config) -> Iterator[str]:
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


def _rl_notes(config: Config) -> Iterator[str]:
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


def _sft_notes(config: Config) -> Iterator[str]:
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
