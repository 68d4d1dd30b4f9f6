"""Lengths of rows as statistics and bins."""

from hypothesis import given
from hypothesis import strategies as st

from megaverl.data.report import Lengths, lengths


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_every_row_is_in_the_bin_of_its_length(counts):
    found = lengths(counts)
    assert (found.min, found.max) == (min(counts), max(counts))
    ends = [end for end, _ in found.histogram]
    assert ends == sorted(set(ends))
    assert ends[-1] == max(counts)
    assert all(end & (end - 1) == 0 for end in ends[:-1])
    below = [min(counts) - 1, *ends[:-1]]
    for low, (end, rows) in zip(below, found.histogram, strict=True):
        assert rows == sum(low < count <= end for count in counts)


def test_no_rows_have_no_lengths_and_one_length_is_one_bin():
    assert lengths([]) is None
    assert lengths([5, 5]) == Lengths(5, 5.0, 5, ((5, 2),))
