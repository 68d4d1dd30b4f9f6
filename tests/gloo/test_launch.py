import os

import pytest
import torch
import torch.distributed as dist

from tests.gloo.launch import RankError, run_ranks


def _sum(rank, world, base):
    value = torch.tensor([float(rank + base)])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads(), os.environ["LOCAL_RANK"]


def _fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def _die_on_one(rank, world):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_ranks_share_a_world_and_return_values():
    assert run_ranks(_sum, 2, 10) == [(21.0, 1, "0"), (21.0, 1, "1")]


def test_the_variables_of_ranks_stay_with_them(monkeypatch):
    """What later tests start from this process is bound to no interface of ours."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    run_ranks(_sum, 1, 0)
    assert dict(os.environ) == before


def test_the_traceback_of_a_rank_comes_back():
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(_fail_on_one, 2)


def test_a_dead_rank_is_named():
    with pytest.raises(RankError, match=r"rank (0 failed|1 died with exit code 7)"):
        run_ranks(_die_on_one, 2)
