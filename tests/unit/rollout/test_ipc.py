"""Whether GPUs can map each other's memory: the probe with made-up handles, in a world of one rank."""

import logging

import pytest
import torch.distributed as dist

from megaverl.rollout.compat_vllm import ALLOCATOR_VARIABLES, allocator_refusal
from megaverl.rollout.ipc import BYTE, custom_all_reduce_off


@pytest.fixture
def pair(monkeypatch):
    """This process as rank 0 of two that do the same."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def both(into, mine):
        into[:] = [mine, mine]

    monkeypatch.setattr(dist, "all_gather_object", both)


def refused():
    raise RuntimeError("CUDA error: operation not permitted")


@pytest.mark.parametrize(
    ("export", "read", "why"),
    [
        (refused, lambda handle: BYTE, "rank 1: CUDA error: operation not permitted"),
        (lambda: "handle", lambda handle: refused(), "rank 0: CUDA error: operation not permitted"),
        (lambda: "handle", lambda handle: 3, "rank 0 read 3 from rank 1 instead of 77"),
    ],
    ids=["export", "map", "other memory"],
)
def test_case_19_without_ipc_vllm_reduces_through_nccl_and_the_log_says_so(pair, caplog, export, read, why):
    with caplog.at_level(logging.WARNING):
        assert custom_all_reduce_off([0, 1], "cuda", export=export, map_first_byte=read)
    (line,) = caplog.messages
    assert f"CUDA IPC does not work here ({why})" in line


def test_case_19_with_ipc_one_gpu_or_a_cpu_nothing_is_switched_off(pair, caplog):
    assert not custom_all_reduce_off([0, 1], "cuda", export=lambda: "handle", map_first_byte=lambda handle: BYTE)
    assert not custom_all_reduce_off([0], "cuda", export=refused)
    assert not custom_all_reduce_off([0, 1], "cpu", export=refused)
    assert caplog.messages == []


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_expandable_segments_are_refused_unless_the_cache_is_never_freed(monkeypatch, variable):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert allocator_refusal("auto") is None
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    assert f"{variable}=max_split_size_mb:64,expandable_segments:True does not work" in allocator_refusal("auto")
    assert allocator_refusal("never") is None
