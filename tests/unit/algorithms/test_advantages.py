"""Group advantages against a reference in plain Python floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms.advantages import (
    batch_normed_advantages,
    group_advantages,
    leave_one_out_advantages,
    to_tokens,
)
from megaverl.data.batch import cumulative

SCORES = st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=30)


def reference(scores, groups, by_std, eps=1e-6):
    result = []
    for score, group in zip(scores, groups, strict=True):
        own = [s for s, g in zip(scores, groups, strict=True) if g == group]
        advantage = score - math.fsum(own) / len(own)
        if len(own) == 1:
            advantage = 0.0
        elif by_std:
            advantage /= statistics.stdev(own) + eps
        result.append(advantage)
    return result


@settings(deadline=None)
@given(SCORES, st.booleans())
def test_against_the_definition(pairs, by_std):
    groups, scores = [g for g, _ in pairs], [s for _, s in pairs]
    ours = group_advantages(torch.tensor(scores, dtype=torch.float64), groups, norm_by_std=by_std)
    torch.testing.assert_close(
        ours, torch.tensor(reference(scores, groups, by_std), dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_a_known_group():
    # scores 1, 0, 0, 1: mean 0.5, unbiased std sqrt(1/3)
    ours = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), [7, 7, 7, 7], norm_by_std=True)
    torch.testing.assert_close(ours, torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.5 / (math.sqrt(1 / 3) + 1e-6))
    plain = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), [7, 7, 7, 7], norm_by_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, -2.7, 1e-40])
def test_equal_scores_give_exactly_zero(value, by_std):
    for size in (2, 3, 7, 8):
        for dtype in (torch.float32, torch.float64):
            ours = group_advantages(torch.full((size,), value, dtype=dtype), [0] * size, norm_by_std=by_std)
            assert ours.tolist() == [0.0] * size


def test_nearly_equal_scores_keep_their_digits():
    scores = torch.tensor([1.0, 1.00001], dtype=torch.float64)
    ours = group_advantages(scores, [0, 0], norm_by_std=True)
    expected = 5e-6 / (5e-6 * math.sqrt(2) + 1e-6)
    torch.testing.assert_close(ours, torch.tensor([-expected, expected], dtype=torch.float64), rtol=1e-9, atol=0)
    # in float32 the two scores are 84 ulp apart: the advantages are symmetric and of that size still
    single = group_advantages(scores.float(), [0, 0], norm_by_std=True)
    assert single[0] == -single[1]
    assert abs(single[1].item() - expected) < 1e-2


def test_a_group_of_one_has_no_advantage():
    for by_std in (True, False):
        assert group_advantages(torch.tensor([5.0, 1.0, 3.0]), [0, 1, 1], norm_by_std=by_std)[0] == 0.0


@pytest.mark.parametrize("by_std", [True, False])
def test_finite_for_the_largest_float32_scores(by_std):
    big = torch.finfo(torch.float32).max
    for scores in ([big, -big, big, 0.0], [1e-45, 0.0, 0.0, 1e-45], [big, big, big, -big]):
        ours = group_advantages(torch.tensor(scores), [0] * 4, norm_by_std=by_std)
        assert torch.isfinite(ours).all()


@settings(deadline=None)
@given(SCORES, st.randoms(use_true_random=False))
def test_order_of_sequences_does_not_matter(pairs, rng):
    order = list(range(len(pairs)))
    rng.shuffle(order)
    scores = torch.tensor([s for _, s in pairs], dtype=torch.float64)
    groups = torch.tensor([g for g, _ in pairs])
    straight = group_advantages(scores, groups, norm_by_std=True)
    shuffled = group_advantages(scores[order], groups[order], norm_by_std=True)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-10, atol=1e-10)


def test_a_whole_batch_equals_its_groups_one_by_one():
    torch.manual_seed(0)
    scores, groups = torch.randn(24), torch.arange(24) % 5
    whole = group_advantages(scores, groups, norm_by_std=True)
    for g in range(5):
        alone = group_advantages(scores[groups == g], [0] * int((groups == g).sum()), norm_by_std=True)
        assert torch.equal(whole[groups == g], alone)


def test_dtype_follows_the_scores():
    assert group_advantages(torch.tensor([1, 0]), [0, 0], norm_by_std=False).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0]).double(), [0, 0], norm_by_std=False).dtype == torch.float64


def test_bad_scores_are_named():
    with pytest.raises(ValueError, match=r"not finite at sequences \[1, 2\]"):
        group_advantages(torch.tensor([1.0, float("nan"), float("inf")]), [0, 0, 0], norm_by_std=True)
    with pytest.raises(ValueError, match=r"scores \[2\] and groups \[3\]"):
        group_advantages(torch.tensor([1.0, 2.0]), [0, 0, 0], norm_by_std=True)


def test_to_tokens_gives_response_tokens_their_sequences_value():
    mask = torch.tensor([False, True, True, False, False, False, True])
    out = to_tokens(torch.tensor([2.0, float("nan"), -3.0]), cumulative([3, 2, 2]), mask)
    assert out.tolist() == [0.0, 2.0, 2.0, 0.0, 0.0, 0.0, -3.0]


def rloo_reference(scores, groups):
    result = []
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        others = [s for j, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and j != i]
        result.append(score - math.fsum(others) / len(others) if others else 0.0)
    return result


def batch_normed_reference(scores, groups, lengths, eps=1e-8):
    """Written over tokens: every token has its response's score less the group's mean."""
    members = lambda group: [s for s, g in zip(scores, groups, strict=True) if g == group]  # noqa: E731
    centred = [s - math.fsum(members(g)) / len(members(g)) for s, g in zip(scores, groups, strict=True)]
    tokens = [c for c, length in zip(centred, lengths, strict=True) for _ in range(length)]
    mean, variance = math.fsum(tokens) / len(tokens), statistics.variance(tokens) if len(tokens) > 1 else 0.0
    return [(c - mean) / math.sqrt(variance + eps) for c in centred]


@settings(deadline=None)
@given(SCORES)
def test_leave_one_out_against_the_definition(pairs):
    groups, scores = [g for g, _ in pairs], [s for _, s in pairs]
    ours = leave_one_out_advantages(torch.tensor(scores, dtype=torch.float64), groups)
    expected = torch.tensor(rloo_reference(scores, groups), dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(SCORES, st.data())
def test_batch_normed_against_the_definition(pairs, data):
    groups, scores = [g for g, _ in pairs], [s for _, s in pairs]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    ours = batch_normed_advantages(torch.tensor(scores, dtype=torch.float64), groups, torch.tensor(lengths))
    expected = torch.tensor(batch_normed_reference(scores, groups, lengths), dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)


ESTIMATORS = {
    "grpo": lambda scores, groups: group_advantages(scores, groups, norm_by_std=True),
    "dr_grpo": lambda scores, groups: group_advantages(scores, groups, norm_by_std=False),
    "rloo": leave_one_out_advantages,
    "reinforce++_baseline": lambda scores, groups: batch_normed_advantages(scores, groups, torch.ones(len(scores))),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_that_have_made_others_divide_by_nothing(name):
    estimate = ESTIMATORS[name]
    for value in (0.1, 1 / 3, -2.7):
        assert estimate(torch.full((7,), value), [0, 0, 0, 0, 1, 1, 2]).tolist() == [0.0] * 7
    near = estimate(torch.tensor([1.0, 1.00001], dtype=torch.float64), [0, 0])
    assert near[1].item() == pytest.approx(-near[0].item(), rel=1e-9)
    assert 0 < near[1] < 1
    outlier = estimate(torch.tensor([0.0] * 7 + [1e6]), [0] * 8)
    assert torch.isfinite(outlier).all()
    assert (outlier[:7] == outlier[0]).all()
    assert outlier[0] < 0 < outlier[7]
    assert estimate(torch.tensor([5.0]), [0]).tolist() == [0.0]


def test_values_of_an_outlier_and_of_near_equal_scores_are_the_documented_ones():
    scores = torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    assert ESTIMATORS["rloo"](scores, [0] * 4).tolist() == pytest.approx([-4 / 3] * 3 + [4.0])
    assert ESTIMATORS["dr_grpo"](scores, [0] * 4).tolist() == [-1.0] * 3 + [3.0]
    assert ESTIMATORS["grpo"](scores, [0] * 4).tolist() == pytest.approx([-0.5] * 3 + [1.5], rel=1e-5)
    assert ESTIMATORS["reinforce++_baseline"](scores, [0] * 4).tolist() == pytest.approx([-0.5] * 3 + [1.5], rel=1e-5)
    near = torch.tensor([1.0, 1.00001], dtype=torch.float64)
    assert ESTIMATORS["rloo"](near, [0, 0])[1].item() == pytest.approx(1e-5, rel=1e-6)
    # their unbiased variance, 5e-11, is little beside eps = 1e-8 under the root
    expected = 5e-6 / math.sqrt(5e-11 + 1e-8)
    assert ESTIMATORS["reinforce++_baseline"](near, [0, 0])[1].item() == pytest.approx(expected, rel=1e-6)


def test_a_fully_masked_response_weighs_nothing_in_the_batch():
    scores, groups = torch.tensor([1.0, 0.0, 7.0, -7.0], dtype=torch.float64), [0, 0, 1, 1]
    with_empty = batch_normed_advantages(scores, groups, torch.tensor([3, 3, 0, 0]))
    alone = batch_normed_advantages(scores[:2], groups[:2], torch.tensor([3, 3]))
    torch.testing.assert_close(with_empty[:2], alone)
    assert torch.isfinite(with_empty).all()
    assert batch_normed_advantages(scores, groups, torch.zeros(4)).tolist() == [0.0] * 4
