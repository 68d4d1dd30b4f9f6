"""vLLM with weights from a training layout that differs from its own, through handoffs after in-place updates."""

import json

import pytest
import torch
import torch.distributed as dist

from megaverl.config.schema import RolloutConfig
from megaverl.models.family import load_shape, weight_map
from megaverl.parallel.layout import Layout
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.planner import make_plan
from megaverl.resharding.transfer import Transfer
from megaverl.rollout.compat_vllm import vllm_refusal
from tests.e2e.test_rollout_vllm import GREEDY, KEYS, PROMPTS, UPDATES, assert_agrees, bare_copy, tokens
from tests.gloo.launch import run_ranks
from tests.unit.resharding.test_plan import TINY
from tests.unit.resharding.weights import held_rows
from tests.unit.rollout.tiny import reference, save_checkpoint, state_of

pytestmark = pytest.mark.skipif(vllm_refusal(TINY, "cpu") is not None, reason="needs the supported vLLM for CPUs")

PAIRS = {
    "tp2 to two replicas": (Layout(tp=2), 1),
    "dp2 to tp2": (Layout(dp=2), 2),
    "pp2 to tp2": (Layout(pp=2), 2),
    "pp2 to two replicas": (Layout(pp=2), 1),
}


@torch.no_grad()
def write(params, folder, layout, rank, update):
    """The state after ``update`` updates, into what the rank holds, in place."""
    shape, at, state = load_shape(folder), layout.coordinates(rank), state_of(folder, update)
    for row in held_rows(shape, layout, at.pp):
        for piece in weight_map(shape).pieces(row, layout.tp, at.tp):
            params[row.megatron][piece.target] = state[piece.hf][piece.source]


def hand_off(rank, world, folder, layout, rollout_tp):
    from megaverl.rollout.vllm_engine import VllmEngine

    shape = load_shape(folder)
    table = weight_map(shape)
    rows = held_rows(shape, layout, layout.coordinates(rank).pp)
    params = {row.megatron: torch.nn.Parameter(torch.zeros(table.local_shape(row, layout.tp))) for row in rows}
    plan = make_plan(table, layout, rollout_tp)
    config = RolloutConfig(cpu_cache_gb=0.1, max_num_seqs=64)
    engine = VllmEngine(folder / "bare", shape, plan, params, layout, config, max_model_len=64)
    hybrid = HybridEngine(engine, plan.ranks[rank], Transfer(plan, rank, params, engine.weights, bucket_bytes=20_000))
    results, reports = [], []
    for update in range(UPDATES + 1):
        write(params, folder, layout, rank, update)
        reports.append(hybrid.to_rollout(update))
        results.append(engine.generate(PROMPTS, KEYS, GREEDY))
        hybrid.to_train()
    binding = engine.check_binding()
    dist.barrier()
    planned = plan.ranks[rank].bytes_copied, plan.ranks[rank].bytes_received
    return results, reports, binding, planned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return bare_copy(save_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("pair", PAIRS)
def test_vllm_generates_with_the_training_weights_of_another_layout(pair, folder):
    layout, rollout_tp = PAIRS[pair]
    models = [reference(folder, update) for update in range(UPDATES + 1)]
    for results, reports, binding, planned in run_ranks(hand_off, 2, folder, layout, rollout_tp):
        for model, completions in zip(models, results, strict=True):
            assert_agrees(completions, model, greedy=True)
        assert len({json.dumps(tokens(c)) for c in results}) == UPDATES + 1
        for report in reports:
            assert (report["handoff/bytes_copied"], report["handoff/bytes_received"]) == planned
            assert report["handoff/staging_peak"] <= 20_000
        assert (binding.parameters, binding.bytes_added) == (31, 0)
