"""vLLM and Megatron on the same weights in layouts of their own: same log-probabilities after updates in place.

`MEGAVERL_ALL_LAYOUTS=1` runs every pair of layouts of up to 8 ranks, tied and untied (half an hour on 2 cores).
"""

import gc
import os
import zlib

import pytest
import torch
import torch.distributed as dist

from megaverl.config.schema import OptimizerConfig, RolloutConfig
from megaverl.data.batch import SequenceBatch
from megaverl.models.family import weight_map
from megaverl.parallel.layout import Layout
from megaverl.parallel.setup import teardown_model_parallel
from megaverl.resharding.hybrid_engine import HybridEngine
from megaverl.resharding.planner import make_plan
from megaverl.resharding.self_test import self_test
from megaverl.resharding.transfer import Transfer
from megaverl.rollout.compat_vllm import vllm_refusal
from megaverl.rollout.engine import Sampling
from megaverl.rollout.requests import probe_texts
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import VOCAB, join, make_hf, make_policy
from tests.unit.resharding.test_plan import TINY

pytestmark = pytest.mark.skipif(vllm_refusal(TINY, "cpu") is not None, reason="needs the supported vLLM for CPUs")

ALL = os.environ.get("MEGAVERL_ALL_LAYOUTS") == "1"
UPDATES = 3
BUCKET = 20_000
SAMPLED = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
PROMPTS = torch.randint(0, VOCAB, (6, 5), generator=torch.Generator().manual_seed(1)).tolist()
FEW = {
    2: [(Layout(tp=2), 1), (Layout(dp=2), 2), (Layout(pp=2), 2), (Layout(pp=2), 1)],
    4: [(Layout(tp=4), 2), (Layout(tp=2, pp=2), 4)],
}


def pairs():
    """World size -> (train layout, rollout tp)."""
    if not ALL:
        return FEW
    found = {}
    for tp in (1, 2, 4):
        for pp in (1, 2):
            for dp in (1, 2):
                train = Layout(tp=tp, pp=pp, dp=dp)
                if train.world <= 8:
                    found.setdefault(train.world, []).extend((train, t) for t in (1, 2, 4) if train.world % t == 0)
    return found


@torch.no_grad()
def change(policy, update):
    """A random change of every weight in place, the same in every layout."""
    table, params = weight_map(policy.shape), policy.parameters_by_name()
    for row in table.expand():
        if row.megatron not in params:
            continue
        for piece in table.pieces(row, policy.layout.tp, policy.grid.at.tp):
            g = torch.Generator().manual_seed(zlib.crc32(f"{update}/{piece.hf}".encode()))
            params[row.megatron][piece.target] += (
                0.02 * torch.randn(table.hf_shape(piece.hf), generator=g)[piece.source]
            )


def hand_off(rank, folder, train, rollout_tp):
    """What disagrees between vLLM, Megatron and the plan in one pair of layouts."""
    from megaverl.rollout.vllm_engine import VllmEngine

    policy = make_policy(folder, train, optimizer=OptimizerConfig())
    params = policy.parameters_by_name()
    plan = make_plan(weight_map(policy.shape), train, rollout_tp)
    config = RolloutConfig(cpu_cache_gb=0.05, max_num_seqs=16)
    engine = VllmEngine(folder, policy.shape, plan, params, train, config, max_model_len=32)
    own = plan.ranks[rank]
    transfer = Transfer(plan, rank, params, engine.weights, bucket_bytes=BUCKET, verify="full")
    hybrid = HybridEngine(engine, own, transfer)
    self_test(hybrid, lambda: probe_texts(engine, VOCAB, 32))
    wrong, seen, held = [], set(), []
    for update in range(UPDATES + 1):
        if update:
            change(policy, update)
        report = hybrid.to_rollout(update)
        moved = report["handoff/bytes_copied"], report["handoff/bytes_received"]
        if moved != (own.bytes_copied, own.bytes_received) or report["handoff/staging_peak"] > BUCKET:
            wrong.append(f"update {update}: {report}")
        held.append(engine._own.bytes_held)
        completions = engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLED)
        binding = engine.check_binding()
        hybrid.to_train()
        held.append(engine._own.bytes_held)
        seen.add(str([c.token_ids for c in completions]))
        wrong += compare(policy, completions, update)
    if held != [own.peak_extra_bytes, 0] * (UPDATES + 1):
        wrong.append(f"the rollout's own weights take {held}, the plan says {own.peak_extra_bytes}")
    if binding.bytes_added:
        wrong.append(f"vLLM added {binding.bytes_added} bytes")
    if len(seen) <= UPDATES:
        wrong.append("updates do not change the text")
    engine.close()
    return wrong


def compare(policy, completions, update):
    """The largest gap between the log-probabilities of all replicas' engines and of Megatron, if it is too large."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(PROMPTS[c.prompt], c.token_ids, c.log_probs) for c in completions])
    rows = [row for replica in found for row in replica]
    batch = SequenceBatch.from_lists([p for p, _, _ in rows], [t for _, t, _ in rows])
    ours = policy.log_probs(batch, temperature=1.0, max_tokens=10_000, with_entropy=False)["log_probs"]
    theirs = torch.tensor([value for _, _, values in rows for value in values])
    gap = (ours[batch.response_mask.bool()] - theirs).abs().max().item()
    return [] if gap <= 1e-5 else [f"update {update}: log-probabilities differ by {gap:.2g}"]


def matrix(rank, world, folder, chosen):
    found = {}
    for train, rollout_tp in chosen:
        join(rank, world, train)
        found[f"{train} -> tp{rollout_tp}"] = hand_off(rank, folder, train, rollout_tp)
        teardown_model_parallel()
        gc.collect()
    return found


@pytest.mark.parametrize("tied", [False, True] if ALL else [True], ids=lambda tied: "tied" if tied else "untied")
@pytest.mark.parametrize("world", sorted(pairs()))
def test_case_10_vllms_log_probs_are_megatrons_in_any_two_layouts(world, tied, tmp_path):
    make_hf(tmp_path, tied=tied)
    chosen = pairs()[world]
    for rank, found in enumerate(run_ranks(matrix, world, tmp_path, chosen, timeout=240 if not ALL else 3600)):
        assert len(found) == len(chosen)
        assert {pair: wrong for pair, wrong in found.items() if wrong} == {}, f"rank {rank}"


def live():
    """Bytes behind all tensors of this process, and process groups."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), len(dist.distributed_c10d._world.pg_map)


def many_handoffs(rank, world, folder):
    """`live` while training, after each of 20 handoffs whose weights and cache are freed in between."""
    from megaverl.rollout.vllm_engine import VllmEngine

    join(rank, world, Layout())
    policy = make_policy(folder, Layout(), optimizer=OptimizerConfig())
    params = policy.parameters_by_name()
    narrower = torch.bfloat16  # so that the rollout has weights of its own
    plan = make_plan(weight_map(policy.shape), Layout(), 1, rollout_element_bytes=narrower.itemsize)
    config = RolloutConfig(cpu_cache_gb=0.05, max_num_seqs=16, free_cache="always")
    engine = VllmEngine(folder, policy.shape, plan, params, Layout(), config, max_model_len=32, dtype=narrower)
    hybrid = HybridEngine(engine, plan.ranks[0], Transfer(plan, 0, params, engine.weights, BUCKET))
    found = []
    for version in range(20):
        hybrid.to_rollout(version)
        engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLED)
        hybrid.to_train()
        held = engine._own.bytes_held, engine._cache.bytes_held
        found.append((*live(), *held))
    engine.close()
    return found


def test_case_12_13_17_nothing_is_left_of_a_rollout_while_training(tmp_path):
    """Neither device memory that a sleep keeps, nor host copies of weights, nor process groups."""
    make_hf(tmp_path, tied=False)
    found = run_ranks(many_handoffs, 1, tmp_path)[0]
    assert len(set(found[5:])) == 1
    assert found[-1][2:] == (0, 0)
