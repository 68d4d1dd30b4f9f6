"""Parity with transformers over NCCL, two GPUs: tensor parallel ranks, pipelines and chunks of them."""

import pytest
import torch

from megaverl.parallel.device import choose_device
from megaverl.parallel.setup import init_distributed, init_model_parallel, teardown_model_parallel
from tests.gloo.launch import free_port, run_ranks
from tests.gloo.layout_support import case, check, compare, references

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CASES = [
    case("qwen3-0.6b", tp=2, sp=True),
    case("qwen2.5-0.5b", pp=2, layers=5),
    case("qwen2.5-0.5b", pp=2, vpp=2),
    case("llama-3.1-8b", pp=2, vpp=3, layers=8),
    case("qwen2.5-1.5b", dp=2),
]


def _compare(rank, world, port, cases, expected, cuts):
    device = choose_device("fp32", "eager")
    init_distributed(rank, world, "127.0.0.1", port, device, local_rank=rank, timeout_s=60)
    found = []
    for one in cases:
        init_model_parallel(one.layout, seed=0)
        found.append([compare(one, expected[one.model], n, device) for n in cuts])
        teardown_model_parallel()
    return found


def test_logits_and_all_gradients_equal_transformers(tmp_path):
    args = (free_port(), CASES, references(CASES, tmp_path), [3, 8])
    check(CASES, run_ranks(_compare, 2, *args, join_world=False, fork=False, timeout=200))
