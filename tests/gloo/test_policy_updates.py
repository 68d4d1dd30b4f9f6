"""Optimizer updates: against torch's AdamW, in place, skipped when not finite, resumable."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megaverl.config.schema import OptimizerConfig
from megaverl.parallel.layout import Layout
from megaverl.parallel.lr_schedule import learning_rate
from tests.gloo.launch import RankError, run_ranks
from tests.gloo.policy_support import (
    RAGGED,
    hf_scores,
    join,
    make_batch,
    make_hf,
    make_policy,
    read_weights,
    share_of,
    weighted_loss,
)

STEPS = 3
TOTAL = 10


def settings(**changes) -> OptimizerConfig:
    # A large epsilon: without it the first AdamW steps are the gradient's sign, which rounding decides near 0.
    base = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "schedule": "linear", "warmup_steps": 2}
    return OptimizerConfig(**(base | changes))


def _step(policy, seed):
    batch = share_of(make_batch(RAGGED, seed), policy)
    halves = [list(range(0, len(batch), 2)), list(range(1, len(batch), 2))]
    return policy.update(batch, halves, weighted_loss(0.0, 100.0), temperature=1.0)


def _weights(policy):
    return {name: p.detach().numpy().copy() for name, p in policy.parameters_by_name().items()}


def _trained(rank, world, folder, layout, config, sequence_parallel, expected):
    join(rank, world, layout)
    policy = make_policy(folder, layout, optimizer=config, sequence_parallel=sequence_parallel, total_updates=TOTAL)
    addresses = {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
    results = [_step(policy, seed) for seed in range(STEPS)]
    assert addresses == {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
    reference = {name: torch.zeros_like(p) for name, p in policy.parameters_by_name().items()}
    read_weights(policy, expected, reference)
    difference = max((p - reference[name]).abs().max().item() for name, p in policy.parameters_by_name().items())
    return difference, [(r.grad_norm, r.lr, r.sums["tokens"].item()) for r in results]


def torch_reference(model, config: OptimizerConfig) -> list[tuple[float, float]]:
    """Trains ``model`` with torch.optim.AdamW; norms and learning rates of the steps."""
    plain = [p for p in model.parameters() if p.dim() == 1]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    adam = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
    done = []
    for step in range(STEPS):
        batch = make_batch(RAGGED, step)
        adam.zero_grad()
        log_probs, _ = hf_scores(model, batch, 1.0)
        weighted_loss(0.0, 100.0)(batch, log_probs, None)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad or math.inf).item()
        for group in adam.param_groups:
            group["lr"] = learning_rate(config, step, TOTAL)
        adam.step()
        done.append((norm, group["lr"]))
    return done


@pytest.mark.parametrize(
    ("layout", "distributed", "sequence_parallel"),
    [
        (Layout(), True, False),
        (Layout(dp=2), True, False),
        (Layout(dp=2), False, False),
        (Layout(tp=2), True, True),
        (Layout(tp=2, dp=2), True, False),
        (Layout(pp=2), True, False),
    ],
    ids=str,
)
def test_updates_equal_torch_adamw(tmp_path, layout, distributed, sequence_parallel):
    config = settings(distributed=distributed)
    model = make_hf(tmp_path / "start", tied=True)
    done = torch_reference(model, config)
    assert done[0][0] > config.clip_grad  # clipping takes part
    model.save_pretrained(tmp_path / "end")
    args = (str(tmp_path / "start"), layout, config, sequence_parallel, str(tmp_path / "end"))
    ranks = run_ranks(_trained, layout.world, *args)
    for difference, results in ranks:
        assert difference < 2e-6
        for (norm, lr, _), (norm_reference, lr_reference) in zip(results, done, strict=True):
            assert norm == pytest.approx(norm_reference, rel=1e-5)
            assert lr == lr_reference


def _sums(rank, world, folder):
    join(rank, world, Layout(dp=2))
    policy = make_policy(folder, Layout(dp=2), optimizer=settings())
    return _step(policy, 0).sums["tokens"].item()


def test_sums_are_added_over_micro_batches_of_the_rank(tmp_path):
    make_hf(tmp_path, tied=True)
    lengths = [r for _, r in RAGGED]
    assert run_ranks(_sums, 2, str(tmp_path)) == [sum(lengths[0::2]), sum(lengths[1::2])]


def _poisoned(rank, world, folder, layout):
    join(rank, world, layout)
    policy = make_policy(folder, layout, optimizer=settings())
    _step(policy, 0)
    before = _weights(policy)
    batch = share_of(make_batch(RAGGED, 5), policy)

    def loss(micro, log_probs, entropy):
        return log_probs.sum() * (float("nan") if rank == 0 else 1.0), {}

    bad = policy.update(batch, [list(range(len(batch)))], loss, temperature=1.0)
    untouched = all(np.array_equal(before[n], w) for n, w in _weights(policy).items())
    good = _step(policy, 1)
    finite = all(np.isfinite(w).all() for w in _weights(policy).values())
    return bad.applied, untouched, good.applied, finite


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2)], ids=str)
def test_a_gradient_that_is_not_finite_is_not_applied_on_any_rank(tmp_path, layout):
    make_hf(tmp_path, tied=True)
    for found in run_ranks(_poisoned, layout.world, str(tmp_path), layout):
        assert found == (False, True, True, True)


def _resumed(rank, world, folder, layout, distributed, state_folder):
    join(rank, world, layout)
    config = settings(distributed=distributed)
    policy = make_policy(folder, layout, optimizer=config, total_updates=TOTAL)
    for seed in (0, 1):
        _step(policy, seed)
    weights = {n: torch.from_numpy(w) for n, w in _weights(policy).items()}
    torch.save({"weights": weights, "optimizer": policy.state_dict()}, f"{state_folder}/{rank}.pt")
    straight_result = _step(policy, 2)
    straight = _weights(policy)

    again = make_policy(folder, layout, optimizer=config, total_updates=TOTAL)
    state = torch.load(f"{state_folder}/{rank}.pt")
    with torch.no_grad():
        for name, param in again.parameters_by_name().items():
            param.copy_(state["weights"][name])
    again.load_state_dict(state["optimizer"])
    result = _step(again, 2)
    assert (result.lr, result.grad_norm) == (straight_result.lr, straight_result.grad_norm)
    return all(np.array_equal(straight[n], w) for n, w in _weights(again).items())


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [
        (Layout(dp=2), True),
        (Layout(dp=2), False),
        (Layout(tp=2), True),
        (Layout(pp=2), True),
        (Layout(pp=2, vpp=2), True),
    ],
    ids=str,
)
def test_resumed_optimizer_goes_on_bit_for_bit(tmp_path, layout, distributed):
    make_hf(tmp_path, tied=layout.pp > 1, layers=2 * layout.vpp)
    assert all(run_ranks(_resumed, layout.world, str(tmp_path), layout, distributed, str(tmp_path)))


def _other_layout(rank, world, folder):
    join(rank, world, Layout(tp=2))
    policy = make_policy(folder, Layout(tp=2), optimizer=settings())
    _step(policy, 0)
    state = policy.state_dict()
    for entry in state["slices"].values():
        entry["exp_avg"] = entry["exp_avg"].flatten()[:-1]
    policy.load_state_dict(state)


def test_state_of_another_layout_is_refused(tmp_path):
    make_hf(tmp_path, tied=True)
    with pytest.raises(RankError, match="does not fit this model and layout"):
        run_ranks(_other_layout, 2, str(tmp_path))


def _frozen(rank, world, folder):
    join(rank, world, Layout())
    make_policy(folder, Layout()).prepare_training(settings(), 1)


def test_a_frozen_model_is_not_trained(tmp_path):
    make_hf(tmp_path, tied=True)
    with pytest.raises(RankError, match="frozen model"):
        run_ranks(_frozen, 1, str(tmp_path))
