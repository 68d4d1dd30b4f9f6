from hypothesis import given
from hypothesis import strategies as st

from megaverl.parallel.micro_batches import fill_pipeline


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=12), parts=st.integers(1, 12), multiple=st.integers(1, 5)
)
def test_every_sequence_stays_once_and_the_number_fits(lengths, parts, multiple):
    groups = [g for g in (list(range(i, len(lengths), parts)) for i in range(parts)) if g]
    found = fill_pipeline(groups, lengths, multiple)
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))
    assert len(found) % multiple == 0
    assert len(found) < len(groups) + multiple  # no more than needed
    if [] in found:  # empty ones only when nothing is left to cut
        assert all(len(group) <= 1 for group in found)


def test_the_largest_is_cut_where_it_balances():
    assert fill_pipeline([[0, 1, 2, 3], [4]], [5, 3, 2, 4, 99], 3) == [[0, 2], [1, 3], [4]]


def test_single_sequences_are_filled_up_with_nothing():
    assert fill_pipeline([[0], [1], [2]], [7, 7, 7], 2) == [[0], [1], [2], []]


def test_a_number_that_fits_is_left_alone():
    groups = [[2, 0], [1, 3]]
    assert fill_pipeline(groups, [1, 1, 1, 1], 2) == groups
    assert fill_pipeline([], [], 4) == []
