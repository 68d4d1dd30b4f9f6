"""Rules between keys: what one key alone cannot tell. Pure: looks at no file and no device."""

from __future__ import annotations

from megaverl.config.derived import (
    compares_samples,
    learns_preferences,
    mini_batches,
    needs_critic,
    needs_reference,
    needs_reward_model,
    train_layout,
    uses_rollout,
)
from megaverl.config.notes import common_notes, preference_notes, rl_notes, sft_notes
from megaverl.config.schema import Config
from megaverl.errors import Problems


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
        return [*common_notes(config), *sft_notes(config)]
    if learns_preferences(config):
        _check_preference(config, problems)
        return [*common_notes(config), *preference_notes(config)]
    _check_reward(config, problems)
    _check_batch(config, problems)
    _check_rollout(config, problems)
    return [*common_notes(config), *rl_notes(config)]


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
    sequences = config.data.train_batch_size * (config.rollout.n if uses_rollout(config) else 1)
    if sequences < dp:
        problems.add(
            f"a batch of {sequences} sequences leaves some of the {dp} data parallel ranks without any",
            where="data.train_batch_size",
            fix=f"at least {dp} sequences, or fewer workers",
        )


def _check_tokens(config: Config, problems: Problems) -> None:
    one = config.data.max_prompt_length + config.data.max_response_length
    limits = {"actor.max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch}
    if needs_reference(config) and config.reference.max_tokens_per_micro_batch is not None:
        limits["reference.max_tokens_per_micro_batch"] = config.reference.max_tokens_per_micro_batch
    if needs_critic(config) and config.critic.max_tokens_per_micro_batch is not None:
        limits["critic.max_tokens_per_micro_batch"] = config.critic.max_tokens_per_micro_batch
    if needs_reward_model(config) and config.reward.model.max_tokens_per_micro_batch is not None:
        limits["reward.model.max_tokens_per_micro_batch"] = config.reward.model.max_tokens_per_micro_batch
    pairs = config.algorithm.name in ("rm", "dpo")
    for key, limit in limits.items():
        longest, what = one, "sequence: "
        if pairs and key.startswith("actor"):
            longest, what = 2 * one, "pair, whose answers stay together: 2 x "
        if limit < longest:
            problems.add(
                f"{limit} tokens cannot hold the longest {what}(data.max_prompt_length + "
                f"data.max_response_length) = {longest}",
                where=key,
                fix=f"{key}={longest} or more, or shorter lengths",
            )


def _check_reward(config: Config, problems: Problems) -> None:
    if config.reward.model.path is not None and config.reward.function.path is not None:
        problems.add(
            "a reward model and a scorer of your own are named, and one of them gives the score",
            where="reward.model.path",
            fix="leave out reward.model.path or reward.function.path",
        )
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer > longest:
        problems.add(
            f"a penalised end of {buffer} tokens is longer than the longest response, {longest} tokens",
            where="reward.overlong_buffer",
            fix=f"at most {longest}; a fifth of it is usual",
        )
    correction = config.actor.rollout_correction
    if (
        correction.mask != "none"
        and correction.mask_lower is not None
        and correction.mask_lower > correction.mask_upper
    ):
        problems.add(
            "nothing lies between the bounds: every token would be left out of the loss",
            where="actor.rollout_correction.mask_lower",
            fix=f"below actor.rollout_correction.mask_upper={correction.mask_upper:g}",
        )


def _check_preference(config: Config, problems: Problems) -> None:
    if config.algorithm.name == "kto" and config.data.train_batch_size == 1:
        problems.add(
            "kto compares an answer with those to the batch's other prompts, and there is one prompt",
            where="data.train_batch_size",
            fix="data.train_batch_size=2 or more; 16 is usual",
        )
    settings = config.algorithm.preference
    if config.algorithm.name == "dpo" and settings.loss == "ipo" and settings.label_smoothing:
        problems.add(
            "ipo has no form for labels that may be wrong",
            where="algorithm.preference.label_smoothing",
            fix="algorithm.preference.label_smoothing=0, or algorithm.preference.loss=sigmoid",
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
    if config.rollout.n == 1 and compares_samples(config):
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
            + ("every advantage would be 0" if compares_samples(config) else "nothing would be explored"),
            where="rollout.temperature",
            fix="rollout.temperature=1.0",
        )
    for key, sampling in (("rollout.stop", rollout), ("rollout.val.stop", rollout.val)):
        if "" in sampling.stop:
            problems.add("an empty text ends every response at once", where=key, fix="name texts, or [] for none")
    if config.actor.rollout_correction.active and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        problems.add(
            "samples of a cut distribution have no importance ratio to the whole one",
            where="actor.rollout_correction",
            fix="rollout.top_p=1, rollout.top_k=-1 and rollout.min_p=0, or importance=none, mask=none and veto=null",
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
