import dataclasses

import pytest

from megaverl.errors import Problems
from megaverl.models.shape import ModelShape
from megaverl.parallel.checks import check_layout, working_tp
from megaverl.parallel.layout import Layout

# Qwen2.5-0.5B
SHAPE = ModelShape(
    family="qwen2",
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=4864,
    vocab=151936,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied=True,
    qkv_bias=True,
)


def problems_of(layout, rollout_tp=None, **options):
    problems = Problems()
    check_layout(SHAPE, layout, rollout_tp, problems, **options)
    return problems.found


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2), Layout(tp=2, pp=4, dp=8), Layout(dp=3), Layout(pp=5), Layout(pp=7, vpp=3), Layout(pp=24)],
    ids=str,
)
def test_possible_layouts_pass(layout):
    assert problems_of(layout, layout.tp, sequence_parallel=layout.tp > 1, world=layout.world) == []


def test_tp_that_does_not_divide_names_every_count_and_the_sizes_that_work():
    assert working_tp(SHAPE) == [1, 2]
    found = problems_of(Layout(tp=3))
    assert [p.what for p in found] == [
        "14 attention heads cannot be divided over 3 ranks",
        "4864 MLP columns cannot be divided over 3 ranks",
        "2 KV heads cannot be divided over 3 ranks",
    ]
    assert all("one of 1, 2" in p.fix and p.where == "actor.layout.tp=3" for p in found)


def test_a_tp_that_is_a_multiple_of_the_kv_heads_works():
    shape = dataclasses.replace(SHAPE, heads=12, kv_heads=4)  # 12 divides 12 heads and 4 divides 12, but not 4864
    assert working_tp(shape, limit=12) == [1, 2, 4]
    assert working_tp(dataclasses.replace(shape, kv_heads=2, intermediate=4800), limit=12) == [1, 2, 4, 6, 12]
    assert working_tp(dataclasses.replace(shape, kv_heads=12, intermediate=4800), limit=12) == [1, 2, 3, 4, 6, 12]
    assert working_tp(dataclasses.replace(shape, kv_heads=4, intermediate=4800), limit=12) == [1, 2, 4, 12]


def test_rollout_tp_is_checked_for_itself():
    assert [p.where for p in problems_of(Layout(dp=3), rollout_tp=2)] == ["rollout.tp"]
    assert {p.where for p in problems_of(Layout(dp=7), rollout_tp=7)} == {"rollout.tp=7"}


def test_all_problems_come_at_once():
    found = problems_of(Layout(pp=1, cp=2, ep=2, vpp=25), sequence_parallel=True, world=3)
    places = [p.where for p in found]
    for part in ("layout.pp", "layout.cp", "layout.ep", "sequence_parallel", "workers_per_node"):
        assert any(part in where for where in places), part
    assert all(p.fix for p in found)


def test_more_stages_than_layers():
    (found,) = problems_of(Layout(pp=48))
    assert found.what == "24 layers cannot fill 48 pipeline stages"
    assert found.fix == "use at most 24"
    (found,) = problems_of(Layout(pp=7, vpp=4))
    assert found.what == "24 layers cannot fill 28 pipeline stages (pp x vpp 4)"
    assert "at most 6" in found.fix
