"""Generalised advantage estimation against the recursion of the paper, one token at a time in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms.gae import gae, rewards_to_go, token_rewards, whiten, whitening_factor
from megaverl.algorithms.moments import Moments
from megaverl.algorithms.value_loss import value_moments
from megaverl.data.batch import SequenceBatch, cumulative

LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=6)
UNIT = st.floats(0, 1)


def draw(lengths, seed, holes=False):
    """(values, rewards, mask, cu_seqlens) with NaN wherever nothing may be read."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.tensor([False] * p + [True] * r) for p, r in lengths])
    if holes:  # tool output between turns: inside the response, not under the mask
        mask &= torch.rand(mask.shape, generator=g) < 0.7
    values, rewards = torch.randn(2, mask.numel(), generator=g, dtype=torch.float64)
    nan = torch.tensor(math.nan, dtype=torch.float64)
    cu_seqlens = cumulative([p + r for p, r in lengths])
    return torch.where(mask, values, nan), torch.where(mask, rewards, nan), mask, cu_seqlens


def recursion(values, rewards, mask, cu_seqlens, gamma, lam):
    """A_t = delta_t + gamma lam A_{t+1}, backwards through each response."""
    advantages = np.zeros(mask.numel())
    borders = cu_seqlens.tolist()
    for start, end in itertools.pairwise(borders):
        following, carried = 0.0, 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                carried = rewards[t].item() + gamma * following - values[t].item() + gamma * lam * carried
                advantages[t], following = carried, values[t].item()
    return torch.from_numpy(advantages)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 1000), UNIT, UNIT, st.booleans())
def test_equals_the_recursion(lengths, seed, gamma, lam, holes):
    values, rewards, mask, cu_seqlens = draw(lengths, seed, holes)
    advantages, returns = gae(values, rewards, mask, cu_seqlens, gamma=gamma, lam=lam)
    expected = recursion(values, rewards, mask, cu_seqlens, gamma, lam)
    assert torch.allclose(advantages, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(returns[mask], (expected + values)[mask], rtol=1e-12, atol=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 1000))
def test_lambda_1_gamma_1_is_monte_carlo(lengths, seed):
    """The advantage is what was still to come, less the value; the return does not know the values at all."""
    values, rewards, mask, cu_seqlens = draw(lengths, seed)
    advantages, returns = gae(values, rewards, mask, cu_seqlens, gamma=1.0, lam=1.0)
    borders = cu_seqlens.tolist()
    for start, end in itertools.pairwise(borders):
        inside = [t for t in range(start, end) if mask[t]]
        for t in inside:
            to_come = math.fsum(rewards[k].item() for k in inside if k >= t)
            assert returns[t].item() == pytest.approx(to_come, abs=1e-9)
            assert advantages[t].item() == pytest.approx(to_come - values[t].item(), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 1000), UNIT)
def test_lambda_0_is_one_step_temporal_difference(lengths, seed, gamma):
    values, rewards, mask, cu_seqlens = draw(lengths, seed)
    advantages, _ = gae(values, rewards, mask, cu_seqlens, gamma=gamma, lam=0.0)
    borders = cu_seqlens.tolist()
    for start, end in itertools.pairwise(borders):
        inside = [t for t in range(start, end) if mask[t]]
        for t in inside:
            following = values[t + 1].item() if t != inside[-1] else 0.0
            assert advantages[t].item() == pytest.approx(rewards[t].item() + gamma * following - values[t].item())


def test_a_long_response_in_float32_stays_exact():
    values, rewards, mask, cu_seqlens = draw([(1, 3000)], 3)
    expected = recursion(values.float(), rewards.float(), mask, cu_seqlens, 0.999, 0.97)
    advantages, _ = gae(values.float(), rewards.float(), mask, cu_seqlens, gamma=0.999, lam=0.97)
    assert advantages.dtype == torch.float64
    assert torch.allclose(advantages, expected, rtol=1e-11, atol=1e-11)


def test_no_response_token_at_all():
    values, rewards, mask, cu_seqlens = draw([(3, 0), (2, 0)], 0)
    advantages, returns = gae(values, rewards, mask, cu_seqlens, gamma=1.0, lam=0.9)
    assert not advantages.any()
    assert not returns.any()
    assert not token_rewards(torch.ones(2), mask, cu_seqlens).any()


def test_the_score_stands_at_the_last_response_token():
    batch = SequenceBatch.from_lists([[0, 0], [0], [0, 0]], [[0, 0], [], [0, 0, 0]])
    rewards = token_rewards(torch.tensor([3.0, 5.0, 7.0]), batch.response_mask, batch.cu_seqlens)
    assert rewards.dtype == torch.float64
    assert rewards.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 7]


def test_the_penalty_is_taken_token_by_token():
    batch = SequenceBatch.from_lists([[0], [0]], [[0, 0], [0]])
    kl = torch.tensor([math.nan, 1.0, 2.0, math.nan, -4.0])
    rewards = token_rewards(torch.tensor([1.0, 0.0]), batch.response_mask, batch.cu_seqlens, kl=kl, kl_coef=0.5)
    assert rewards.tolist() == [0, -0.5, 1 - 1.0, 0, 2.0]


@settings(max_examples=30, deadline=None)
@given(LENGTHS.filter(lambda lengths: sum(r for _, r in lengths) > 1), st.integers(0, 1000), st.integers(1, 4))
def test_whitening_does_not_depend_on_the_division_over_ranks(lengths, seed, parts):
    values, rewards, mask, cu_seqlens = draw(lengths, seed)
    advantages, returns = gae(values, rewards, mask, cu_seqlens, gamma=0.99, lam=0.95)
    owner = torch.randint(0, parts, mask.shape, generator=torch.Generator().manual_seed(seed))
    shares = [value_moments(advantages, returns, values, mask & (owner == part)) for part in range(parts)]
    moments = sum((share["critic/advantages"] for share in shares), Moments())
    white = whiten(advantages, mask, moments)
    inside = advantages[mask].numpy()
    expected = (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    assert np.allclose(white[mask].numpy(), expected, rtol=1e-9, atol=1e-9)
    assert not white[~mask].any()


def test_equal_advantages_become_zero_and_one_token_alone_too():
    mask = torch.ones(4, dtype=torch.bool)
    for mask in (torch.ones(4, dtype=torch.bool), torch.tensor([True, False, False, False])):
        advantages = torch.full((4,), 0.3)
        moments = Moments.of(advantages[mask])
        assert whiten(advantages, mask, moments).abs().max() < 1e-6
        assert math.isfinite(whitening_factor(moments))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 1000), UNIT, st.booleans())
def test_rewards_to_go_are_the_discounted_sum_of_what_comes(lengths, seed, gamma, holes):
    _, rewards, mask, cu_seqlens = draw(lengths, seed, holes)
    ours = rewards_to_go(rewards, mask, cu_seqlens, gamma=gamma)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        inside = [t for t in range(start, end) if mask[t]]
        for i, t in enumerate(inside):
            to_come = math.fsum(gamma**j * rewards[k].item() for j, k in enumerate(inside[i:]))
            assert ours[t].item() == pytest.approx(to_come, abs=1e-9)
    assert not ours[~mask].any()
