"""Rewards with a KL penalty, batch metrics and rollout differences against plain Python."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms import rewards as R
from megaverl.algorithms.moments import Moments
from megaverl.data.batch import SequenceBatch


def ragged_batch(seed=0):
    rng = random.Random(seed)
    prompts = [[1] * rng.randint(1, 4) for _ in range(9)]
    responses = [[2] * n for n in (3, 0, 1, 7, 2, 0, 5, 1, 4)]
    return SequenceBatch.from_lists(prompts, responses)


@pytest.mark.parametrize("kind", ["k1", "k3", "abs", "mse"])
def test_sequence_kl_sums_over_response_tokens_only(kind):
    batch = ragged_batch()
    torch.manual_seed(0)
    p, q = -torch.rand(batch.tokens.numel()).double() * 3, -torch.rand(batch.tokens.numel()).double() * 3
    ours = R.sequence_kl(
        torch.where(batch.response_mask, p, float("nan")), q, batch.response_mask, batch.cu_seqlens, kind
    )
    define = {
        "k1": lambda d: d,
        "k3": lambda d: min(10.0, math.exp(-d) - 1 + d),
        "abs": abs,
        "mse": lambda d: d * d / 2,
    }[kind]
    starts = batch.cu_seqlens.tolist()
    for s in range(len(batch)):
        inside = [t for t in range(starts[s], starts[s + 1]) if batch.response_mask[t]]
        assert ours[s].item() == pytest.approx(math.fsum(define((p[t] - q[t]).item()) for t in inside), abs=1e-12)


def test_penalised_rewards():
    scores, kl = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    ours = R.penalised_rewards(scores, kl, 0.1)
    torch.testing.assert_close(ours, torch.tensor([0.8, 0.1, 0.5]))
    assert torch.equal(R.penalised_rewards(scores, kl, 0.0), scores)


def test_penalty_metrics_are_means_of_token_means():
    ours = R.penalty_metrics(torch.tensor([6.0, 0.0, 1.0]), torch.tensor([3, 0, 4]), 0.01)
    assert ours == {"actor/reward_kl_penalty": pytest.approx((2 + 0 + 0.25) / 3), "actor/reward_kl_penalty_coeff": 0.01}


def test_batch_metrics():
    scores, rewards = [1.0, 0.0, 9.0, 0.5], [0.9, -0.1, 8.0, 0.4]
    advantages, lengths, prompts = [1.0, -2.0, 50.0, 0.5], [4, 8, 0, 2], [3, 5, 6, 2]
    ours = R.batch_metrics(
        scores=torch.tensor(scores),
        rewards=torch.tensor(rewards),
        advantages=torch.tensor(advantages),
        response_lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompts),
        max_response_length=8,
        max_prompt_length=6,
    )
    over_tokens = [a for a, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    expected = {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.4,
        "critic/rewards/max": 0.9,
        "critic/rewards/min": -0.1,
        "critic/advantages/mean": statistics.mean(over_tokens),
        "critic/advantages/max": 1.0,
        "critic/advantages/min": -2.0,
        "response_length/mean": 3.5,
        "response_length/max": 8.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.25,
        "prompt_length/mean": 4.0,
        "prompt_length/max": 6.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.25,
    }
    assert ours == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_responses_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="no sequence has a response token"):
        R.batch_metrics(
            scores=one,
            rewards=one,
            advantages=one,
            response_lengths=torch.zeros(1),
            prompt_lengths=one,
            max_response_length=1,
            max_prompt_length=1,
        )


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-100, 100), max_size=8), min_size=1, max_size=6))
def test_moments_merge_exactly(parts):
    values = [v for part in parts for v in part]
    total = sum((Moments.of(torch.tensor(part, dtype=torch.float64)) for part in parts), Moments())
    assert total.count == len(values)
    if values:
        assert total.mean == pytest.approx(statistics.fmean(values), abs=1e-10)
        assert total.largest == max(values)
    if len(values) > 1:
        assert total.std == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-9)


def test_moments_do_not_cancel():
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2, 1e9 + 5], dtype=torch.float64)
    total = Moments.of(values[:2]) + Moments.of(values[2:])
    assert total.std == pytest.approx(statistics.stdev([0, 1, 2, 5]), rel=1e-7)


def test_overlong_penalty_at_hand_made_points():
    lengths = torch.tensor([0, 5, 6, 8, 9, 10])
    ours = R.overlong_penalty(lengths, 10, 4, 0.5)
    assert ours.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.25, -0.375, -0.5])
    assert R.overlong_penalty(lengths, 10, 0, 1.0).tolist() == [0.0] * 6
