"""Everything that can be known to be wrong is found here, before Ray starts and before a GPU is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megaverl.config.derived import (
    critic_warmup,
    epochs,
    learns_preferences,
    mini_batches,
    needs_critic,
    needs_reward_model,
    spool_folder,
    train_layout,
    uses_rollout,
)
from megaverl.config.rules import check_rules
from megaverl.config.schema import Config
from megaverl.data.dataset import PromptDataset, load_prompts
from megaverl.data.mixture import Mixture
from megaverl.data.preference_dataset import PreferenceDataset
from megaverl.data.sampler import EpochSampler
from megaverl.data.tokenizer import Tokenizer, load_tokenizer
from megaverl.errors import Problems, RunError, UserError
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.rewards.registry import Registry
from megaverl.trainer.preflight_preference import check_reward_model, check_reward_start, load_preference_rows


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs have been checked.

    Attributes:
        critic: the shape of the critic's body; None without a critic.
        notes: things that work and may surprise; each names the key to change.
        total_steps: steps of the whole run.
        reward_shape: the shape of the reward model's body; None where scorers score.
    """

    config: Config
    shape: ModelShape
    critic: ModelShape | None
    layout: Layout
    tokenizer: Tokenizer
    train: PromptDataset | PreferenceDataset
    val: PromptDataset | PreferenceDataset | None
    sampler: EpochSampler
    notes: list[str]
    total_steps: int
    reward_shape: ModelShape | None = None

    @property
    def supervised(self) -> bool:
        """The rows bring their answers: nothing is generated."""
        return not uses_rollout(self.config)

    @property
    def actor_updates(self) -> int:
        """The actor's optimizer updates in the whole run."""
        steps = self.total_steps - critic_warmup(self.config)
        return steps * epochs(self.config, "actor") * mini_batches(self.config, "actor")

    @property
    def critic_updates(self) -> int:
        """The critic's optimizer updates in the whole run."""
        return self.total_steps * epochs(self.config, "critic") * mini_batches(self.config, "critic")


def prepare(config: Config) -> Prepared:
    """Checks configuration, versions, run directory, checkpoint, layout, scorer and every row.

    Raises:
        UserError: with all problems found.
    """
    problems = Problems()
    notes = check_rules(config, problems)
    _check_versions(problems)
    _check_run_dir(Path(config.trainer.run_dir), problems)
    _check_trackers(config, problems)
    _check_checkpoints(config, problems)
    registry = _check_scorer(config, problems)
    _check_kernels(config, problems)
    shape = _check_model(config, problems)
    critic = _check_critic(config, shape, problems) if needs_critic(config) else None
    reward = check_reward_model(config, shape, problems) if needs_reward_model(config) else None
    tokenizer = _load_tokenizer(config, problems)
    if shape is None or tokenizer is None:
        _check_files(config, problems)
        problems.raise_if_any()
        raise RuntimeError("a part is missing and no check has said why")
    train, val = _load_rows(config, tokenizer, shape, registry, problems)
    problems.raise_if_any()
    data = config.data
    mixture = Mixture(train.parts, data.train_weights) if data.train_weights else None
    sampler = EpochSampler(
        len(train), data.train_batch_size, config.trainer.seed, shuffle=data.shuffle, mixture=mixture
    )
    if mixture is not None:
        notes.append(_mixture_note(mixture, config, len(train)))
    if sampler.left_out:
        notes.append(
            f"{sampler.left_out} of {len(train)} rows do not fill a batch of {config.data.train_batch_size} "
            "and are left out of each epoch, others each time (data.train_batch_size)"
        )
    total = config.trainer.total_steps or config.trainer.total_epochs * sampler.batches_per_epoch
    return Prepared(config, shape, critic, train_layout(config), tokenizer, train, val, sampler, notes, total, reward)


def _mixture_note(mixture: Mixture, config: Config, size: int) -> str:
    shares = zip(config.data.train_files, mixture.shares(size), mixture.parts, strict=True)
    text = ", ".join(f"{share} from {name} ({share / max(rows, 1):.2g} of its rows)" for name, share, rows in shares)
    return f"an epoch has {size} rows: {text} (data.train_weights)"


def _check_versions(problems: Problems) -> None:
    from megaverl.parallel.megatron_version import version_problem

    found = version_problem()
    if found is not None:
        problems.found.append(found)


def _check_run_dir(run_dir: Path, problems: Problems) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        problems.add(
            f"cannot write there: {error.strerror or error}",
            where=f"trainer.run_dir={run_dir}",
            fix="name a folder that you may write to",
        )


def _check_trackers(config: Config, problems: Problems) -> None:
    from megaverl.observe.trackers import check_loggers

    check_loggers(config.trainer.loggers, problems)


def _check_checkpoints(config: Config, problems: Problems) -> None:
    """The checkpoint to resume from fits, and nothing that the run writes is in the way of what is there."""
    from megaverl.checkpoint.hf_export import check_export_dir
    from megaverl.checkpoint.train_state import check_state, complete_steps
    from megaverl.trainer.resume import check_models, checkpoint_to_resume

    trainer = config.trainer
    for folder in (trainer.export_dir, trainer.export_critic_dir if needs_critic(config) else None):
        if folder:
            check_export_dir(folder, problems)
    try:
        folder = checkpoint_to_resume(trainer)
    except UserError as error:
        problems.extend(error)
        return
    except RunError as error:  # the mirror does not answer
        problems.add(str(error), where="trainer.mirror", fix="see that it can be reached, or leave trainer.mirror out")
        return
    if folder is not None:
        manifest = check_state(folder, None, problems)  # any layout can be read in any other
        if manifest and config.model.path:
            check_models(manifest["details"].get("models", {}), config, folder, problems)
        if manifest and needs_critic(config) and "critic" not in manifest["details"].get("trained", ()):
            problems.add(
                f"holds no critic, and {config.algorithm.name} trains one",
                where=str(folder),
                fix="resume with the algorithm that saved it, or export its weights and start from them",
            )
    elif trainer.save_every and complete_steps(trainer.run_dir):
        steps = ", ".join(map(str, complete_steps(trainer.run_dir)))
        problems.add(
            f"holds checkpoints of an earlier run (steps {steps}), and this one starts anew",
            where=f"trainer.run_dir={trainer.run_dir}",
            fix="name another run_dir, remove its checkpoints, or go on with trainer.resume=auto",
        )


def _check_scorer(config: Config, problems: Problems) -> Registry | None:
    """The scorers by data source; None where their rules cannot be read."""
    from megaverl.rewards.registry import Registry
    from megaverl.rewards.scorer import Scorer

    if not uses_rollout(config):
        return Registry()
    try:
        scorer = Scorer.of(config.reward)
    except UserError as error:
        problems.extend(error)
        return None
    try:
        scorer.load()
    except UserError as error:
        problems.extend(error)
    return scorer.registry


def _check_model(config: Config, problems: Problems) -> ModelShape | None:
    """The model's shape, with its checkpoint and its layout checked; None when it cannot be read."""
    if not config.model.path:
        return None
    from megaverl.checkpoint.hf_import import check_checkpoint
    from megaverl.models.family import load_shape, weight_map
    from megaverl.parallel.checks import check_layout
    from megaverl.resharding.planner import make_plan

    if config.algorithm.name == "rm":
        shape = check_reward_start(config.model.path, problems)
        if shape is None:
            return None
    else:
        try:
            shape = load_shape(config.model.path)
        except UserError as error:
            problems.extend(error)
            return None
        check_checkpoint(config.model.path, problems)
    try:
        layout = train_layout(config)
    except ValueError:  # check_rules has reported it
        return shape
    rollout_tp = (config.rollout.tp or layout.tp) if uses_rollout(config) else None
    _check_length(config, shape, problems)
    before = len(problems.found)
    check_layout(shape, layout, rollout_tp, problems, sequence_parallel=config.actor.layout.sequence_parallel)
    if rollout_tp is not None and len(problems.found) == before:
        try:
            make_plan(weight_map(shape), layout, rollout_tp)
        except UserError as error:
            problems.extend(error)
        _check_engine(config, shape, rollout_tp, problems)
    _check_export_check(config, shape, rollout_tp or 1, problems)
    return shape


def _check_critic(config: Config, actor: ModelShape | None, problems: Problems) -> ModelShape | None:
    """The shape of the critic's body, with its checkpoint and the pool's layout checked."""
    path = config.critic.path or config.model.path
    if not path:
        return None
    from megaverl.checkpoint.critic import check_critic_checkpoint
    from megaverl.parallel.checks import check_layout

    if path == config.model.path:  # it must be the actor's causal language model, which is checked already
        return actor
    shape = check_critic_checkpoint(path, problems)
    if shape is None or actor is None:
        return None
    if shape.vocab < actor.vocab:
        problems.add(
            f"the critic's embedding has {shape.vocab} rows, and the actor may emit any of {actor.vocab} tokens",
            where=f"critic.path={path}",
            fix="start the critic from a model with the actor's vocabulary",
        )
    try:
        layout = train_layout(config)
    except ValueError:  # check_rules has reported it
        return shape
    check_layout(shape, layout, None, problems, sequence_parallel=config.actor.layout.sequence_parallel)
    _check_length(config, shape, problems)
    return shape


def _check_length(config: Config, shape: ModelShape, problems: Problems) -> None:
    from megaverl.models.rope import check_length

    longest = config.data.max_prompt_length + config.data.max_response_length
    check_length(shape, longest, "data.max_prompt_length + data.max_response_length", problems)


def _check_engine(config: Config, shape: ModelShape, rollout_tp: int, problems: Problems) -> None:
    """Refuses an engine that cannot run; not where only the workers can tell."""
    from megaverl.rollout.compat_vllm import ALLOCATOR_FIX, allocator_refusal
    from megaverl.rollout.factory import choose_engine

    device = _device_of_workers(config)
    if device is None:
        return
    try:
        choice = choose_engine(config.rollout.engine, shape, device, rollout_tp)
    except UserError as error:
        problems.extend(error)
        return
    refusal = allocator_refusal(config.rollout.free_cache) if device == "cuda" and choice.name == "vllm" else None
    if refusal:
        problems.add(refusal, where="environment", fix=ALLOCATOR_FIX)


def _check_export_check(config: Config, shape: ModelShape, tp: int, problems: Problems) -> None:
    """Refuses a check of the export that could not be done at the end of the run."""
    from megaverl.rollout.compat_vllm import vllm_refusal

    device = _device_of_workers(config)
    if config.trainer.export_check != "vllm" or not config.trainer.export_dir or device is None:
        return
    refusal = vllm_refusal(shape, device, tp)
    if refusal:
        problems.add(refusal, where="trainer.export_check=vllm", fix="set trainer.export_check=none, or install vLLM")


def _check_kernels(config: Config, problems: Problems) -> None:
    """Refuses a number format or kernels that a CPU cannot give the workers.

    A GPU is left to them: asking it what it can do would make this process take a part of its memory for the whole run.
    """
    from megaverl.parallel.device import choose_device

    if _device_of_workers(config) != "cpu":
        return
    try:
        choose_device(config.actor.precision, config.actor.kernels, "cpu")
    except UserError as error:
        problems.extend(error)


def _device_of_workers(config: Config) -> str | None:
    """``cpu`` or ``cuda``; None where ``cluster.device=auto`` leaves it to a cluster that is yet to be joined."""
    if config.cluster.device != "auto":
        return config.cluster.device
    if not _on_this_machine(config):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _on_this_machine(config: Config) -> bool:
    """The run starts a Ray of its own, here."""
    return not (config.cluster.address or os.environ.get("RAY_ADDRESS"))


def _load_tokenizer(config: Config, problems: Problems) -> Tokenizer | None:
    path = config.model.tokenizer_path or config.model.path
    if not path:
        return None
    try:
        return load_tokenizer(path, config.model.path)
    except UserError as error:
        problems.extend(error)
        return None


def _check_files(config: Config, problems: Problems) -> None:
    """Names the data files that are not there, when their rows cannot be read for lack of a model."""
    from megaverl.data.files import resolve_files

    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        resolve_files(files, problems, key=key)


def _load_rows(
    config: Config, tokenizer: Tokenizer, shape: ModelShape, registry: Registry | None, problems: Problems
) -> tuple[PromptDataset | PreferenceDataset, PromptDataset | PreferenceDataset | None]:
    if learns_preferences(config):
        return load_preference_rows(config, tokenizer, shape, problems)
    kind = "sft" if config.algorithm.name == "sft" else "rl"
    any_source = config.reward.function.path is not None or registry is None
    options = {
        "vocab": shape.vocab,
        "custom_reward": any_source,
        "registry": registry,
        "reward_model": needs_reward_model(config),
        "spool": spool_folder(config),
    }
    train = load_prompts(config.data.train_files, config.data, tokenizer, problems, kind=kind, **options)
    if not config.data.val_files or kind == "sft":
        return train, None
    val = load_prompts(
        config.data.val_files, config.data, tokenizer, problems, kind=kind, key="data.val_files", **options
    )
    return train, val
