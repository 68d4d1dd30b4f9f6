"""REINFORCE++'s and ReMax's advantages against plain float64 Python."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms.gae import whiten
from megaverl.algorithms.moments import Moments
from megaverl.algorithms.returns import return_advantages
from megaverl.data.batch import SequenceBatch

LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 8)), min_size=1, max_size=6)


def make(lengths):
    return SequenceBatch.from_lists([[0] * p for p, _ in lengths], [[0] * r for _, r in lengths])


def reference(batch, scores, kl, coef, gamma, baselines):
    """{position: (advantage, return)} token by token, from the end of each response."""
    found = {}
    for i, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        inside = [t for t in range(start, end) if batch.response_mask[t]]
        to_come = 0.0
        for t in reversed(inside):
            reward = -coef * kl[t] + (scores[i] if t == inside[-1] else 0.0)
            to_come = reward + gamma * to_come
            found[t] = (to_come - baselines[i], to_come)
    return found


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.floats(0, 1), st.booleans())
def test_against_the_definition(lengths, seed, gamma, with_baseline):
    batch, g = make(lengths), torch.Generator().manual_seed(seed)
    scores, baselines = torch.randn(2, len(batch), generator=g, dtype=torch.float64)
    kl = torch.where(batch.response_mask, torch.rand(batch.tokens.numel(), generator=g, dtype=torch.float64), math.nan)
    if not with_baseline:
        baselines = torch.zeros_like(scores)
    advantages, returns = return_advantages(
        scores, batch.response_mask, batch.cu_seqlens, gamma=gamma, kl=kl, kl_coef=0.3,
        baselines=baselines if with_baseline else None,
    )  # fmt: skip
    expected = reference(batch, scores.tolist(), kl.tolist(), 0.3, gamma, baselines.tolist())
    for t in range(batch.tokens.numel()):
        wanted = expected.get(t, (0.0, 0.0))
        assert (advantages[t].item(), returns[t].item()) == pytest.approx(wanted, abs=1e-12)


def whitened(scores, lengths):
    batch = make(lengths)
    advantages, _ = return_advantages(
        torch.tensor(scores, dtype=torch.float64), batch.response_mask, batch.cu_seqlens, gamma=1.0
    )
    return batch, whiten(advantages, batch.response_mask, Moments.of(advantages[batch.response_mask]))


@pytest.mark.parametrize(
    ("scores", "lengths"),
    [
        ([0.1, 0.1, 0.1], [(1, 2), (2, 5), (1, 1)]),  # equal rewards
        ([1.0, 1.00001], [(1, 3), (1, 3)]),  # near-equal
        ([0.0, 0.0, 0.0, 1e6], [(1, 4), (2, 2), (1, 3), (1, 1)]),  # one outlier
        ([1.0, 7.0, 0.0], [(1, 2), (3, 0), (1, 2)]),  # a fully masked response
        ([5.0], [(1, 1)]),  # a single token of a single sample
    ],
)
def test_whitened_returns_are_finite_and_those_of_the_tokens(scores, lengths):
    batch, ours = whitened(scores, lengths)
    tokens = [s for s, (_, r) in zip(scores, lengths, strict=True) for _ in range(r)]
    mean = math.fsum(tokens) / len(tokens)
    variance = statistics.variance(tokens) if len(tokens) > 1 else 0.0
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in tokens]
    assert ours[batch.response_mask].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert torch.isfinite(ours).all()
    assert not ours[~batch.response_mask].any()


def test_remax_gives_a_response_like_the_greedy_one_nothing():
    batch = make([(1, 3), (2, 0), (1, 2)])
    advantages, _ = return_advantages(
        torch.tensor([0.5, 1.0, 1.0]), batch.response_mask, batch.cu_seqlens, gamma=1.0,
        baselines=torch.tensor([0.5, 0.0, 0.25]),
    )  # fmt: skip
    assert advantages[batch.response_mask].tolist() == [0.0] * 3 + [0.75] * 2
