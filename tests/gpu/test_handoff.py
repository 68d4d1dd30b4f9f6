"""vLLM with CUDA graphs and sleep mode on the training weights: nothing moves or is held twice, updates are seen."""

import pytest
import torch

from megaverl.config.schema import OptimizerConfig, RolloutConfig
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.planner import make_plan
from megaverl.resharding.transfer import Transfer
from megaverl.rollout.compat_vllm import vllm_refusal
from megaverl.rollout.engine import Sampling
from tests.gpu.support import QWEN2, VOCAB, device_with, make_policy, make_small

GREEDY = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=16, seed=0)
PROMPTS = torch.randint(0, VOCAB, (16, 4), generator=torch.Generator().manual_seed(1)).tolist()
"""Short ones: prompt and decode both run from captured graphs, which hold addresses."""


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    """The hybrid engine over a policy as training has it, and the policy's parameters."""
    from megaverl.rollout.vllm_engine import VllmEngine

    folder, device = tmp_path_factory.mktemp("model"), device_with("eager")
    make_small(folder, QWEN2)
    policy = make_policy(folder, device, OptimizerConfig())
    refusal = vllm_refusal(policy.shape, "cuda")
    if refusal:
        pytest.skip(refusal)
    plan = make_plan(weight_map(policy.shape), Layout(), 1, element_bytes=device.dtype.itemsize)
    params = policy.parameters_by_name()
    config = RolloutConfig(gpu_memory_utilization=0.3, max_num_seqs=16)
    engine = VllmEngine(folder, policy.shape, plan, params, Layout(), config, 64, device.torch_device)
    yield HybridEngine(engine, plan.ranks[0], Transfer(plan, 0, params, engine.weights)), params
    engine.close()


def serve(hybrid, version):
    report = hybrid.to_rollout(version)
    tokens = [c.token_ids for c in hybrid.engine.generate(PROMPTS, range(len(PROMPTS)), GREEDY)]
    hybrid.to_train()
    return report, tokens


def test_an_equal_layout_moves_nothing_and_vllm_adds_no_parameter_storage(served):
    hybrid, params = served
    report, _ = serve(hybrid, 1)
    binding = hybrid.engine.check_binding()
    assert report["handoff/bytes_moved"] == 0
    assert report["handoff/bytes_aliased"] == sum(p.numel() * p.element_size() for p in params.values())
    assert binding.bytes_added == 0
    assert {t.data_ptr() for t in hybrid.engine.weights.values()} == {p.data_ptr() for p in params.values()}


def test_captured_graphs_see_weights_changed_in_place_and_sleep_keeps_them(served):
    hybrid, params = served
    _, before = serve(hybrid, 2)
    kept = {name: p.detach().clone() for name, p in params.items()}
    with torch.no_grad():
        for p in params.values():
            p.add_(torch.randn_like(p) * 0.05)
    _, changed = serve(hybrid, 3)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(kept[name])
    _, again = serve(hybrid, 4)
    assert sum(a != b for a, b in zip(before, changed, strict=True)) > len(PROMPTS) // 2
    assert again == before
    assert all(torch.equal(kept[name], p) for name, p in params.items())


def test_sleep_drops_the_prefixes_that_a_later_version_could_find(served):
    """The engine counts on it: a commit after a sleep drops nothing again."""
    hybrid, _ = served
    pool = hybrid.engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    hybrid.to_rollout(5)
    hybrid.engine.generate([list(range(40))], [0], GREEDY)
    assert len(pool.cached_block_hash_to_block)
    hybrid.to_train()
    assert not len(pool.cached_block_hash_to_block)
