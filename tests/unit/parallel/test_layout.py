import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.parallel.layout import Layout, divide_world, stage_layers

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


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "sizes"),
    [
        (24, 4, 1, [[6], [6], [6], [6]]),
        (5, 2, 1, [[3], [2]]),  # the output layer is on the last rank
        (5, 3, 1, [[2], [2], [1]]),
        (4, 3, 1, [[1], [2], [1]]),  # the middle rank holds neither embedding nor output layer
        (7, 4, 1, [[2], [2], [2], [1]]),
        (5, 2, 2, [[2, 1], [1, 1]]),
        (6, 3, 2, [[1, 1]] * 3),
        (28, 3, 2, [[5, 4], [5, 5], [5, 4]]),
        (3, 1, 1, [[3]]),
    ],
)
def test_what_remains_of_the_layers_goes_to_the_ranks_with_the_least_work(layers, pp, vpp, sizes):
    assert [[len(chunk) for chunk in rank] for rank in stage_layers(layers, pp, vpp)] == sizes


@given(pp=st.integers(1, 9), vpp=st.integers(1, 4), extra=st.integers(0, 100))
def test_stages_hold_every_layer_once_in_order_and_differ_by_one_at_most(pp, vpp, extra):
    layers = pp * vpp + extra
    held = stage_layers(layers, pp, vpp)
    in_order = [held[r][c] for c in range(vpp) for r in range(pp)]
    assert [i for stage in in_order for i in stage] == list(range(layers))
    sizes = [len(stage) for stage in in_order]
    assert max(sizes) - min(sizes) <= 1
    assert len(held[-1][-1]) == min(sizes)
    per_rank = [sum(map(len, rank)) for rank in held]
    assert max(per_rank) - min(per_rank) <= 1 + (vpp > 1)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match=r"3 layers cannot fill 4 pipeline stages \(pp 2 x vpp 2\)"):
        stage_layers(3, 2, 2)
