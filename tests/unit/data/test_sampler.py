import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.data.mixture import Mixture
from megaverl.data.sampler import EpochSampler
from megaverl.errors import UserError

SIZES = st.tuples(st.integers(1, 60), st.integers(1, 60)).filter(lambda pair: pair[1] <= pair[0])


@given(SIZES, st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_row_at_most_once_and_leaves_out_what_it_says(sizes, seed, shuffle):
    size, batch = sizes
    sampler = EpochSampler(size, batch, seed, shuffle=shuffle)
    for epoch in range(3):
        rows = [row for _ in range(sampler.batches_per_epoch) for row in sampler.next_batch()]
        assert sampler.epoch == epoch
        assert len(set(rows)) == len(rows) == size - sampler.left_out
        assert set(rows) <= set(range(size))


@given(SIZES, st.integers(0, 5), st.integers(0, 25), st.booleans())
def test_resume_goes_on_exactly_where_the_state_was_taken(sizes, seed, done, shuffle):
    size, batch = sizes
    first = EpochSampler(size, batch, seed, shuffle=shuffle)
    for _ in range(done):
        first.next_batch()
    second = EpochSampler(size, batch, seed, shuffle=shuffle)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [first.next_batch() for _ in range(12)] == [second.next_batch() for _ in range(12)]


@given(st.integers(2, 60), st.integers(0, 5))
def test_the_order_does_not_depend_on_the_batch_size(size, seed):
    whole = EpochSampler(size, size, seed).next_batch()
    single = EpochSampler(size, 1, seed)
    assert [row for _ in range(size) for row in single.next_batch()] == whole


def test_shuffles_differ_by_epoch_and_by_seed():
    sampler = EpochSampler(50, 50, seed=0)
    orders = [sampler.next_batch(), sampler.next_batch(), EpochSampler(50, 50, seed=1).next_batch()]
    assert len({tuple(order) for order in orders}) == 3
    assert EpochSampler(50, 50, seed=0, shuffle=False).next_batch() == list(range(50))


def test_the_order_is_the_same_on_every_machine():
    assert EpochSampler(8, 8, seed=0).next_batch() == [3, 1, 7, 2, 0, 4, 6, 5]


def test_too_few_rows_for_a_batch_are_refused():
    with pytest.raises(UserError, match=r"data\.train_batch_size.*256 rows.*has 100"):
        EpochSampler(100, 256, seed=0)


def test_a_state_of_other_data_is_refused_with_everything_that_differs():
    sampler = EpochSampler(10, 2, seed=0)
    with pytest.raises(UserError) as caught:
        EpochSampler(12, 2, seed=1).load_state(sampler.state())
    assert {problem.where for problem in caught.value.problems} == {"key data.train_files", "key trainer.seed"}


PARTS = st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 10)), min_size=1, max_size=4)


@given(PARTS, st.integers(0, 5), st.booleans())
def test_a_mixture_gives_each_source_its_share_and_goes_through_its_rows_in_passes(sources, seed, shuffle):
    parts, weights = [p for p, _ in sources], [w for _, w in sources]
    size, mixture = sum(parts), Mixture(parts, weights)
    shares = mixture.shares(size)
    assert sum(shares) == size
    assert all(abs(s - size * w / sum(weights)) < 1 for s, w in zip(shares, weights, strict=True))
    epochs = [mixture.rows(size, epoch, seed, shuffle=shuffle) for epoch in range(5)]
    start = 0
    for rows, share in zip(parts, shares, strict=True):
        own = [[row - start for row in epoch if start <= row < start + rows] for epoch in epochs]
        assert [len(epoch) for epoch in own] == [share] * 5
        flat = [row for epoch in own for row in epoch]
        for first in range(0, len(flat) - rows + 1, rows):  # each pass has every row once
            assert sorted(flat[first : first + rows]) == list(range(rows))
        start += rows


@given(st.integers(0, 5), st.integers(0, 25))
def test_a_mixed_run_resumes_exactly(seed, done):
    first, second = (EpochSampler(12, 5, seed, mixture=Mixture([9, 3], [1, 1])) for _ in range(2))
    for _ in range(done):
        first.next_batch()
    second.load_state(json.loads(json.dumps(first.state())))
    assert [first.next_batch() for _ in range(9)] == [second.next_batch() for _ in range(9)]
    assert {row >= 9 for row in first.order(0)} == {True, False}


def test_weights_that_do_not_fit_are_refused_and_other_weights_are_no_continuation():
    with pytest.raises(UserError) as caught:
        Mixture([3, 0], [1, 1, -1])
    assert len(caught.value.problems) == 3
    sampler = EpochSampler(12, 5, 0, mixture=Mixture([9, 3], [1, 1]))
    with pytest.raises(UserError, match=r"data\.train_weights"):
        EpochSampler(12, 5, 0).load_state(sampler.state())
