"""A train state goes on in any other layout: the next steps are those of the run that was never stopped."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaverl.checkpoint.train_state import begin_state, commit_state
from megaverl.config.schema import OptimizerConfig
from megaverl.parallel.layout import Layout
from megaverl.workers.checkpoint_phases import CheckpointPhases
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import RAGGED, join, make_batch, make_hf, make_policy, share_of, weighted_loss

CONFIG = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 2}


class Rank(CheckpointPhases):
    """The phases under test around a real policy; no rollout, no Ray."""

    def __init__(self, rank, policy, layout):
        self.rank, self.grid = rank, policy.grid
        self.actor = SimpleNamespace(policy=policy)
        config = SimpleNamespace(algorithm=SimpleNamespace(name="grpo"))
        self.spec = SimpleNamespace(
            layout=layout, shape=policy.shape, roles=frozenset(["actor"]), critic=None, config=config
        )


def step(policy, seed):
    batch = share_of(make_batch(RAGGED, seed), policy)
    groups = [list(range(0, len(batch), 2)), list(range(1, len(batch), 2))]
    result = policy.update(batch, groups, weighted_loss(0.0, 100.0), temperature=1.0)
    loss = result.sums["loss"].double().clone()
    dist.all_reduce(loss, group=policy.grid.dp)
    return loss.item(), result.grad_norm, result.lr


def _save(rank, world, hf, run, layout, distributed):
    join(rank, world, layout)
    policy = make_policy(hf, layout, optimizer=OptimizerConfig(**CONFIG, distributed=distributed))
    for seed in (0, 1):
        step(policy, seed)
    phases = Rank(rank, policy, layout)
    phases.save_state(str(run), 2, {"step": 2}, background=True)
    every = [None] * world
    dist.all_gather_object(every, phases.saved_files())
    if rank == 0:
        commit_state(run, 2, layout, [f for part in every for f in part])
    dist.barrier()
    return [step(policy, seed) for seed in (2, 3)]


def _resume(rank, world, hf, run, layout, distributed):
    join(rank, world, layout)
    policy = make_policy(hf, layout, optimizer=OptimizerConfig(**CONFIG, distributed=distributed))
    Rank(rank, policy, layout).load_state(str(run / "checkpoints" / "step_2"))
    return [step(policy, seed) for seed in (2, 3)]


def saved_and_resumed(folder, saved, resumed, tied, distributed=(True, True)):
    make_hf(folder / "hf", tied=tied)
    begin_state(folder / "run", 2)
    straight = run_ranks(_save, saved.world, str(folder / "hf"), folder / "run", saved, distributed[0])
    again = run_ranks(_resume, resumed.world, str(folder / "hf"), folder / "run", resumed, distributed[1])
    return straight, again


@pytest.mark.parametrize(
    ("saved", "resumed", "tied"),
    [
        (Layout(pp=2), Layout(tp=2), True),
        (Layout(pp=2), Layout(dp=2), False),
        (Layout(tp=2), Layout(pp=2), False),
        (Layout(tp=2, dp=2), Layout(), True),
        (Layout(), Layout(tp=4), False),  # KV heads on two ranks each
        (Layout(tp=4), Layout(), True),
    ],
    ids=str,
)
def test_case_30_a_run_goes_on_in_another_layout(tmp_path, saved, resumed, tied):
    straight, again = saved_and_resumed(tmp_path, saved, resumed, tied)
    for found in again:
        np.testing.assert_allclose(found, straight[0], rtol=1e-6, atol=1e-6)


def test_case_30_the_same_pipeline_goes_on_bit_for_bit(tmp_path):
    straight, again = saved_and_resumed(tmp_path, Layout(pp=2), Layout(pp=2), True)
    assert again == straight


def test_an_optimizer_that_is_no_longer_distributed_takes_the_state_up(tmp_path):
    straight, again = saved_and_resumed(tmp_path, Layout(dp=2), Layout(dp=2), True, (True, False))
    for found in again:
        np.testing.assert_allclose(found, straight[0], rtol=1e-6, atol=1e-6)


def test_moments_matter(tmp_path):
    """The comparison would see a lost optimizer state: without it the second step differs."""
    make_hf(tmp_path / "hf", tied=True)
    begin_state(tmp_path / "run", 2)
    straight = run_ranks(_save, 1, str(tmp_path / "hf"), tmp_path / "run", Layout(), True)
    (lost,) = run_ranks(_without_moments, 1, str(tmp_path / "hf"), tmp_path / "run")
    assert abs(lost[1][0] - straight[0][1][0]) > 1e-5


def _without_moments(rank, world, hf, run):
    join(rank, world, Layout())
    policy = make_policy(hf, Layout(), optimizer=OptimizerConfig(**CONFIG))
    state = torch.load(run / "checkpoints" / "step_2" / "rank_00000.pt", weights_only=True)["actor"]
    with torch.no_grad():
        for name, param in policy.parameters_by_name().items():
            param.copy_(state["weights"][name])
    policy.weights_written()
    policy.optimizer.updates = state["training"]["updates"]
    return [step(policy, seed) for seed in (2, 3)]
