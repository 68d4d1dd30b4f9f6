"""Process groups: coordinates as `Layout` says, and set-up that can be taken down and made again."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch.distributed as dist

from megaverl.parallel.device import choose_device
from megaverl.parallel.layout import Layout
from megaverl.parallel.setup import (
    current_grid,
    init_distributed,
    init_model_parallel,
    teardown,
    teardown_model_parallel,
)
from tests.gloo.launch import RankError, free_port, run_ranks


def _grids(rank, world, layouts):
    init_distributed(rank, world, "127.0.0.1", 1, choose_device(device="cpu"))
    found = []
    for layout in layouts:
        grid = init_model_parallel(layout, seed=0)
        members = {name: sorted(dist.get_process_group_ranks(getattr(grid, name))) for name in ("tp", "dp", "pp")}
        found.append((grid.at, members, grid.first_stage, grid.last_stage))
        teardown_model_parallel()
    return found


def test_groups_are_the_ranks_that_differ_in_one_coordinate():
    layouts = [Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(tp=4)]
    for rank, found in enumerate(run_ranks(_grids, 4, layouts)):
        for layout, (at, members, first, last) in zip(layouts, found, strict=True):
            assert at == layout.coordinates(rank)
            for name in ("tp", "dp", "pp"):
                line = [layout.rank_of(dataclasses.replace(at, **{name: i})) for i in range(getattr(layout, name))]
                assert members[name] == line
            assert (first, last) == (at.pp == 0, at.pp == layout.pp - 1)


def _threads(rank, world, layout):
    init_distributed(rank, world, "127.0.0.1", 1, choose_device(device="cpu"))
    counts = []
    for _ in range(3):
        init_model_parallel(layout, seed=0)
        teardown_model_parallel()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_taking_groups_down_leaves_no_threads_behind():
    for counts in run_ranks(_threads, 2, Layout(tp=2)):
        assert max(counts) - min(counts) <= 2


def _from_scratch(rank, world, port):
    device = choose_device(device="cpu")
    init_distributed(rank, world, "127.0.0.1", port, device, timeout_s=60)
    init_distributed(rank, world, "127.0.0.1", port, device)  # a second call finds the world
    init_model_parallel(Layout(dp=2), seed=0)
    rank_in_world = current_grid(Layout(dp=2)).dp.rank()
    teardown()
    return rank_in_world, dist.is_initialized()


def test_a_world_is_made_and_left():
    assert run_ranks(_from_scratch, 2, free_port(), join_world=False) == [(0, False), (1, False)]


def _wrong_layout(rank, world, layout):
    init_distributed(rank, world, "127.0.0.1", 1, choose_device(device="cpu"))
    init_model_parallel(layout, seed=0)


def test_a_layout_that_does_not_fill_the_world_is_refused():
    with pytest.raises(RankError, match="has 4 ranks, the world 2"):
        run_ranks(_wrong_layout, 2, Layout(tp=4))


def _wrong_rank(rank, world):
    init_distributed(1 - rank, world, "127.0.0.1", 1, choose_device(device="cpu"))


def test_another_place_in_the_world_is_refused():
    with pytest.raises(RankError, match="of 2 already"):
        run_ranks(_wrong_rank, 2)


def _threads_by_round(rank: int, world: int) -> list[int]:
    init_distributed(rank, world, "127.0.0.1", 1, choose_device(device="cpu"))
    counts = []
    for _ in range(4):
        init_model_parallel(Layout(tp=2), 0)
        teardown_model_parallel()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_layouts_that_are_taken_down_leave_no_threads():
    """Megatron forgets its groups without destroying them; each would keep its connection threads."""
    for counts in run_ranks(_threads_by_round, 2):
        assert counts[-1] == counts[0]
