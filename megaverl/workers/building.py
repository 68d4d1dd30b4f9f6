"""Builds the roles of a worker process. Order matters to the caller: training storage before the rollout engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megaverl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from megaverl.models.policy import PolicyModel
    from megaverl.models.reward_model import RewardModel
    from megaverl.models.shape import ModelShape
    from megaverl.parallel.device import Device
    from megaverl.parallel.setup import Grid
    from megaverl.resharding.hybrid_engine import HybridEngine
    from megaverl.rollout.factory import EngineChoice
    from megaverl.workers.actor_role import ActorRole
    from megaverl.workers.critic_role import CriticRole
    from megaverl.workers.preference_role import PreferenceRole
    from megaverl.workers.reference_role import ReferenceRole
    from megaverl.workers.reward_role import RewardModelRole
    from megaverl.workers.rollout_role import RolloutRole


def seed(number: int) -> None:
    """Seeds all generators of this process."""
    import numpy
    import torch

    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def _policy(spec: WorkerSpec, grid: Grid, device: Device, trainable: bool) -> PolicyModel:
    from megaverl.checkpoint.hf_import import load_hf
    from megaverl.config.derived import recompute
    from megaverl.models.family import weight_map
    from megaverl.models.policy import PolicyModel

    actor = spec.config.actor
    policy = PolicyModel(
        spec.shape,
        spec.layout,
        device,
        trainable=trainable,
        sequence_parallel=actor.layout.sequence_parallel,
        logprob_chunk=actor.logprob_chunk,
        recompute=recompute(spec.config, "actor"),
    )
    load_hf(
        spec.config.model.path,
        weight_map(spec.shape),
        policy.parameters_by_name(),
        tp=spec.layout.tp,
        tp_rank=grid.at.tp,
        whole_model=spec.layout.pp == 1,
    )
    return policy


def build_actor(spec: WorkerSpec, grid: Grid, device: Device) -> ActorRole | PreferenceRole:
    """The trained model with its optimizer, loaded from `model.path`; the reward model when one is trained."""
    from megaverl.config.derived import learns_preferences
    from megaverl.workers.actor_role import ActorRole
    from megaverl.workers.preference_role import PreferenceRole

    if spec.config.algorithm.name == "rm":
        model = _reward_model(spec, grid, device, spec.shape, spec.config.model.path, trainable=True)
    else:
        model = _policy(spec, grid, device, trainable=True)
    model.prepare_training(spec.config.actor.optimizer, spec.total_updates)
    return PreferenceRole(spec.config, model) if learns_preferences(spec.config) else ActorRole(spec.config, model)


def _reward_model(
    spec: WorkerSpec, grid: Grid, device: Device, shape: ModelShape, path: str, *, trainable: bool
) -> RewardModel:
    from megaverl.checkpoint.sequence_classification import load_reward_model
    from megaverl.config.derived import recompute
    from megaverl.models.reward_model import RewardModel

    model = RewardModel(
        shape,
        spec.layout,
        device,
        trainable=trainable,
        sequence_parallel=spec.config.actor.layout.sequence_parallel,
        recompute=recompute(spec.config, "actor"),
    )
    load_reward_model(
        path, model.parameters_by_name(), tp=spec.layout.tp, tp_rank=grid.at.tp, whole_model=spec.layout.pp == 1
    )
    return model


def build_reward_model(spec: WorkerSpec, grid: Grid, device: Device) -> RewardModelRole:
    """The frozen reward model that scores responses."""
    from megaverl.workers.reward_role import RewardModelRole

    path = spec.config.reward.model.path
    if spec.reward_shape is None or path is None:
        raise RuntimeError("the pool hosts a reward model and its plan does not say which")
    return RewardModelRole(spec.config, _reward_model(spec, grid, device, spec.reward_shape, path, trainable=False))


def build_reference(spec: WorkerSpec, grid: Grid, device: Device) -> ReferenceRole:
    """The frozen copy of the start weights."""
    from megaverl.workers.reference_role import ReferenceRole

    return ReferenceRole(spec.config, _policy(spec, grid, device, trainable=False))


def build_critic(spec: WorkerSpec, grid: Grid, device: Device) -> CriticRole:
    """The critic with its optimizer."""
    from megaverl.checkpoint.critic import load_critic
    from megaverl.config.derived import recompute
    from megaverl.models.critic import CriticModel
    from megaverl.workers.critic_role import CriticRole

    config = spec.config
    if spec.critic is None:
        raise RuntimeError("the pool hosts a critic and its plan does not say which")
    critic = CriticModel(
        spec.critic.shape,
        spec.layout,
        device,
        trainable=True,
        sequence_parallel=config.actor.layout.sequence_parallel,
        recompute=recompute(config, "critic"),
    )
    load_critic(
        spec.critic.path,
        critic.parameters_by_name(),
        tp=spec.layout.tp,
        tp_rank=grid.at.tp,
        whole_model=spec.layout.pp == 1,
    )
    critic.prepare_training(config.critic.optimizer, spec.critic.total_updates)
    return CriticRole(config, critic)


def build_rollout(
    spec: WorkerSpec,
    rank: int,
    device: Device,
    params: Mapping[str, Tensor],
    release_training: Callable[[], None],
) -> tuple[RolloutRole, HybridEngine, EngineChoice]:
    """The generation engine on the training parameters ``params``, and the hybrid engine that switches between them.

    ``release_training`` frees what training alone needs. The self-test has been passed on return.
    """
    from megaverl.config.derived import needs_reward_model
    from megaverl.data.tokenizer import load_tokenizer
    from megaverl.models.family import weight_map
    from megaverl.observe.phase_memory import PhaseMemory
    from megaverl.parallel.device import rollout_dtype
    from megaverl.resharding.hybrid_engine import HybridEngine
    from megaverl.resharding.planner import make_plan
    from megaverl.resharding.self_test import self_test
    from megaverl.resharding.transfer import Transfer
    from megaverl.rewards.scorer import Scorer
    from megaverl.rollout.factory import make_engine
    from megaverl.rollout.requests import probe_texts
    from megaverl.workers.rollout_role import RolloutRole

    config = spec.config
    dtype = rollout_dtype(config.rollout.precision, device)
    plan = make_plan(
        weight_map(spec.shape),
        spec.layout,
        spec.rollout_tp,
        element_bytes=device.dtype.itemsize,
        rollout_element_bytes=dtype.itemsize,
    )
    longest = config.data.max_prompt_length + config.data.max_response_length
    engine, choice = make_engine(
        config.model.path,
        spec.shape,
        plan,
        params,
        spec.layout,
        config.rollout,
        max_model_len=longest,
        device=device.torch_device,
        seed=config.trainer.seed,
        dtype=dtype,
    )
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.path)
    scorer = None if needs_reward_model(config) else Scorer.of(config.reward)
    rollout = RolloutRole(engine, tokenizer, scorer, spec.places[rank].tp_rank, spec.rollout_tp)
    transfer = Transfer(plan, rank, params, engine.weights, config.resharding.bucket_mb << 20, config.resharding.verify)
    hybrid = HybridEngine(
        engine,
        plan.ranks[rank],
        transfer,
        release_training=release_training,
        memory=PhaseMemory(device.kind),
    )
    if config.rollout.self_test or not choice.listed:
        self_test(hybrid, lambda: probe_texts(engine, spec.shape.vocab, longest))
    return rollout, hybrid, choice
