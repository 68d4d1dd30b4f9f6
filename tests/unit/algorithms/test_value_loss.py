"""The value loss against PPO2's formula written out, and its metrics under every cut."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms.losses import Denominators, add_sums, finish_metrics
from megaverl.algorithms.moments import merge_moments
from megaverl.algorithms.value_loss import (
    critic_loss,
    finish_value_metrics,
    value_loss,
    value_moments,
)
from megaverl.config.schema import CriticConfig
from megaverl.data.batch import SequenceBatch

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
NORM = 16


def draw(lengths, seed=0):
    """A batch with old values and returns, NaN over the prompts, and new values with gradient."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda n: torch.randn(n, generator=g, dtype=torch.float64).tolist()  # noqa: E731
    columns = {name: [normal(r) for _, r in lengths] for name in ("values", "returns")}
    batch = SequenceBatch.from_lists(
        [[0] * p for p, _ in lengths], [[0] * r for _, r in lengths], response_columns=columns
    )
    for name, column in batch.columns.items():
        batch.columns[name] = torch.where(batch.response_mask, column.double(), math.nan)
    values = torch.randn(batch.tokens.numel(), generator=g, dtype=torch.float64)
    return batch, torch.where(batch.response_mask, values, math.nan).requires_grad_()


def test_by_hand():
    #        inside the range | moved too far, away from the target | too far, towards it | past the target
    values = torch.tensor([1.2, 2.0, 2.0, -2.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([3.0, 0.0, 3.0, 0.8])
    found = value_loss(values, old, returns, cliprange=0.5)
    #        max of plain and clipped squares
    plain, clipped = [1.8**2, 4.0, 1.0, 2.8**2], [1.8**2, 1.5**2, 1.5**2, 0.3**2]
    assert found.loss.tolist() == pytest.approx([0.5 * max(p, c) for p, c in zip(plain, clipped)])
    assert found.clipped.tolist() == [False, False, True, False]
    found.loss.sum().backward()
    # A value that moved too far towards its target has no gradient any more; one that moved away has all of it.
    assert values.grad.tolist() == pytest.approx([-1.8, 2.0, 0.0, -2.8])
    unclipped = value_loss(values, old, returns, cliprange=None)
    assert unclipped.loss.tolist() == pytest.approx([0.5 * p for p in plain])
    assert not unclipped.clipped.any()


def reference(batch, values, mode, c):
    """Loss and clip fraction by numpy, sequence by sequence."""
    per_sequence, clips = [], 0
    borders = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(borders):
        keep = batch.response_mask[start:end].numpy()
        v = values.detach()[start:end].numpy()[keep]
        old, target = (batch.columns[name][start:end].numpy()[keep] for name in ("values", "returns"))
        first, second = (v - target) ** 2, (np.clip(v, old - c, old + c) - target) ** 2
        per_sequence.append(0.5 * np.maximum(first, second))
        clips += int((second > first).sum())
    tokens = sum(len(x) for x in per_sequence)
    total = sum(x.sum() for x in per_sequence)
    loss = {
        "token-mean": total / tokens,
        "seq-mean-token-mean": np.mean([x.mean() if len(x) else 0.0 for x in per_sequence]),
        "seq-mean-token-sum": total / len(per_sequence),
        "seq-mean-token-sum-norm": total / len(per_sequence) / NORM,
    }[mode]
    return loss, clips / tokens


LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), min_size=2, max_size=6).filter(
    lambda lengths: sum(r for _, r in lengths) > 1
)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from(MODES), st.integers(0, 99), st.integers(1, 5))
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(lengths, mode, seed, parts):
    batch, values = draw(lengths, seed)
    config = CriticConfig(loss_aggregation=mode, cliprange_value=0.4)
    counts = Denominators.of(batch.response_lengths.tolist(), NORM)
    whole, whole_sums = critic_loss(config, batch, values, counts)
    (gradient,) = torch.autograd.grad(whole, values)
    expected, clipfrac = reference(batch, values, mode, 0.4)
    metrics = finish_metrics(whole_sums, counts)
    assert whole.item() == pytest.approx(expected) == metrics["critic/vf_loss"]
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipfrac)
    assert metrics["critic/vpred_mean"] == pytest.approx(values[batch.response_mask].mean().item())
    assert torch.isfinite(gradient).all()
    assert not gradient[~batch.response_mask].any()

    cut = [list(range(i, len(batch), parts)) for i in range(min(parts, len(batch)))]
    total, sums = torch.zeros_like(values), []
    for share in cut:
        part = batch.select(share)
        at = torch.cat([torch.arange(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]) for s in share])
        loss, found = critic_loss(config, part, values[at], counts)
        total += torch.autograd.grad(loss, values)[0]
        sums.append(found)
    assert torch.allclose(total, gradient, rtol=1e-12, atol=1e-14)
    assert finish_metrics(add_sums(sums), counts) == pytest.approx(metrics)


def test_a_missing_column_is_named():
    batch, values = draw([(1, 2)])
    del batch.columns["returns"]
    with pytest.raises(ValueError, match="no column returns"):
        critic_loss(CriticConfig(), batch, values, Denominators(2, 1, NORM))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.booleans())
def test_value_metrics_are_those_of_all_ranks_together(lengths, seed, whitened):
    batch, advantages = draw(lengths, seed)
    mask, advantages = batch.response_mask, advantages.detach()
    returns, old = batch.columns["returns"], batch.columns["values"]
    first = torch.arange(mask.numel()) % 2 == 0
    parts = [value_moments(advantages, returns, old, mask & half) for half in (first, ~first)]
    metrics = finish_value_metrics(merge_moments(parts), whitened=whitened)
    a, r, v = (x[mask].numpy() for x in (advantages, returns, old))
    explained = 1 - (r - v).var(ddof=1) / (r.var(ddof=1) + 1e-5)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained)
    if whitened:
        a = (a - a.mean()) / np.sqrt(a.var(ddof=1) + 1e-8)
    for name, column in (("advantages", a), ("returns", r), ("values", v)):
        for kind in ("mean", "max", "min"):
            expected = getattr(column, kind)()
            assert metrics[f"critic/{name}/{kind}"] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_perfect_values_explain_everything_and_constant_ones_nothing():
    mask, returns = torch.ones(50, dtype=torch.bool), torch.randn(50, dtype=torch.float64) * 10
    explained = lambda v: finish_value_metrics(value_moments(returns, returns, v, mask), whitened=False)[  # noqa: E731
        "critic/vf_explained_var"
    ]
    assert explained(returns) == pytest.approx(1)
    assert explained(torch.full_like(returns, 3.0)) == pytest.approx(0, abs=1e-6)
