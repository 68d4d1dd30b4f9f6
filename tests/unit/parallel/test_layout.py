import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.parallel.layout import Layout, divide_world

layouts = st.builds(Layout, tp=st.integers(1, 4), pp=st.integers(1, 3), dp=st.integers(1, 4), cp=st.integers(1, 2))


@given(layouts)
def test_coordinates_and_ranks_are_each_other_s_inverse(layout):
    seen = {layout.coordinates(rank) for rank in range(layout.world)}
    assert len(seen) == layout.world
    assert all(layout.rank_of(layout.coordinates(rank)) == rank for rank in range(layout.world))


@given(layouts)
def test_tensor_parallel_neighbours_are_adjacent_ranks(layout):
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert at.tp == rank % layout.tp
        assert at.pp == rank // (layout.world // layout.pp)


def test_a_rank_outside_is_refused():
    with pytest.raises(IndexError, match="outside a layout of 4 ranks"):
        Layout(tp=2, dp=2).coordinates(4)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_sizes_are_whole_numbers_of_at_least_one(size):
    with pytest.raises(ValueError, match="layout size tp"):
        Layout(tp=size)


def test_dp_takes_what_the_model_leaves():
    assert divide_world(8, tp=2, pp=2) == Layout(tp=2, pp=2, dp=2)
    with pytest.raises(ValueError, match="multiple of 4"):
        divide_world(6, tp=2, pp=2)
