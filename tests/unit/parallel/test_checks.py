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


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=4, dp=8), Layout(dp=3)], ids=str)
def test_possible_layouts_pass(layout):
    assert problems_of(layout, layout.tp, sequence_parallel=layout.tp > 1, world=layout.world) == []


def test_tp_that_does_not_divide_names_every_count_and_the_sizes_that_work():
    assert working_tp(SHAPE) == [1, 2]
    found = problems_of(Layout(tp=4))
    assert [p.what for p in found] == [
        "14 attention heads cannot be divided over 4 ranks",
        "2 KV heads cannot be divided over 4 ranks",
    ]
    assert all("one of 1, 2" in p.fix and p.where == "actor.layout.tp=4" for p in found)


def test_rollout_tp_is_checked_for_itself():
    assert [p.where for p in problems_of(Layout(dp=3), rollout_tp=2)] == ["rollout.tp"]
    assert {p.where for p in problems_of(Layout(dp=7), rollout_tp=7)} == {"rollout.tp=7"}


def test_all_problems_come_at_once():
    found = problems_of(Layout(pp=5, cp=2, ep=2, vpp=2), sequence_parallel=True, world=3)
    places = [p.where for p in found]
    for part in ("layout.pp", "layout.cp", "layout.ep", "layout.vpp", "sequence_parallel", "workers_per_node"):
        assert any(part in where for where in places), part
    assert all(p.fix for p in found)


def test_more_stages_than_layers():
    (found,) = problems_of(Layout(pp=48))
    assert "24 layers" in found.what
    assert "1, 2, 3, 4, 6, 8, 12, 24" in found.fix
