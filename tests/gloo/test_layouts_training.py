"""Training in layouts: cuts, updates, KV heads that ranks share, recomputed activations, memory between phases."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaverl.models.norm import RMSNorm
from megaverl.parallel.setup import teardown_model_parallel
from tests.gloo.launch import run_ranks
from tests.gloo.layout_support import (
    TEMPERATURE,
    Case,
    case,
    check,
    compare_cases,
    policy_of,
    references,
)
from tests.gloo.policy_support import RAGGED, hf_scores, join, make_batch, read_weights, share_of, weighted_loss
from tests.gloo.test_policy_updates import STEPS, settings, torch_reference


@pytest.mark.parametrize("world", [2, 3])
def test_case_4_tied_embeddings_in_pipelines_of_three_stages_and_of_chunks(tmp_path, world):
    """Megatron-Bridge#954: tied with PP 3 failed on the middle stage; #4694: tied with chunks lost the output layer."""
    layouts = {2: [{"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 3}], 3: [{"pp": 3}, {"pp": 3, "vpp": 2}]}[world]
    cases = [case("qwen2.5-0.5b", layers=6, tied=True, **layout) for layout in layouts]
    check(cases, run_ranks(compare_cases, world, cases, references(cases, tmp_path), [3]))


def test_case_23_norm_loss_and_gradients_of_qwen3_equal_one_process_of_transformers(tmp_path):
    """verl#4710: the gradient norm of a Qwen3 was three times too large in Megatron, with many micro-batches."""
    cases = [case("qwen3-0.6b", tp=2, dp=2, sp=sp) for sp in (False, True)] + [case("qwen3-0.6b", tp=2, pp=2)]
    check(cases, run_ranks(compare_cases, 4, cases, references(cases, tmp_path), [1, 4]))


def test_case_22_cuts_into_micro_batches_change_nothing_in_pipelines(tmp_path):
    """Every cut has the same loss and gradients; with chunks 1, 3 and 5 do not fill a round and are cut further."""
    cases = [case("qwen2.5-1.5b", pp=2), case("qwen2.5-1.5b", pp=2, vpp=2)]
    check(cases, run_ranks(compare_cases, 2, cases, references(cases, tmp_path), [1, 2, 3, 5, 8]))


def _scores(rank, world, cases, expected):
    found = []
    for one in cases:
        join(rank, world, one.layout)
        policy = policy_of(one, expected[one.model], optimizer=None)
        runs = [
            policy.log_probs(make_batch(RAGGED), temperature=TEMPERATURE, max_tokens=most, with_entropy=True)
            for most in (10_000, 60)
        ]
        found.append([{name: value.numpy() for name, value in run.items()} for run in runs])
        teardown_model_parallel()
    return found


def test_log_probs_and_entropy_reach_every_rank_of_a_pipeline(tmp_path):
    cases = [case("qwen2.5-0.5b", layers=4, **layout) for layout in ({"pp": 2, "vpp": 2}, {"pp": 2}, {"tp": 2})]
    expected = references(cases, tmp_path)
    with torch.no_grad():
        scores = hf_scores(cases[0].model.make(tmp_path / "again"), make_batch(RAGGED), TEMPERATURE)
    for rank in run_ranks(_scores, 2, cases, expected):
        for runs in rank:
            for run in runs:
                for found, wanted in zip((run["log_probs"], run["entropy"]), scores, strict=True):
                    assert abs(found - wanted.numpy()).max() < 1e-5


# -- updates ---------------------------------------------------------------------------------------------------


def _update(policy, seed):
    batch = share_of(make_batch(RAGGED, seed), policy)
    halves = [list(range(0, len(batch), 2)), list(range(1, len(batch), 2))]
    return policy.update(batch, halves, weighted_loss(0.0, 100.0), temperature=1.0)


def _weights(policy):
    return {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}


def _trained(rank, world, cases, expected, config, ends):
    found = []
    for one in cases:
        join(rank, world, one.layout)
        policy = policy_of(one, expected[one.model], config)
        norms = [_update(policy, seed).grad_norm for seed in range(STEPS)]
        wanted = {name: torch.zeros_like(p) for name, p in policy.parameters_by_name().items()}
        read_weights(policy, ends[one.model], wanted)
        off = max((p - wanted[name]).abs().max().item() for name, p in policy.parameters_by_name().items())
        found.append((off, norms, _copies_differ(policy)))
        teardown_model_parallel()
    return found


def _copies_differ(policy) -> list[str]:
    """Parameters whose rows that TP ranks share, or that are whole on all of them, are not equal bit for bit."""
    different = []
    for name, p in policy.parameters_by_name().items():
        rows = getattr(p, "shared_rows", None)
        if rows is None and getattr(p, "tensor_model_parallel", False):
            continue
        own = p.detach()[rows.first if rows else 0 :].contiguous()
        every = [torch.empty_like(own) for _ in range(policy.layout.tp)]
        dist.all_gather(every, own, group=policy.grid.tp)
        holders = policy.layout.tp // rows.units if rows else policy.layout.tp
        first = policy.grid.at.tp // holders * holders
        different += [name] * (not all(torch.equal(every[first], every[first + i]) for i in range(holders)))
    return different


UPDATES = {
    3: [case("qwen2.5-1.5b", pp=3, layers=4)],
    4: [
        case("qwen2.5-1.5b", tp=4),
        case("qwen2.5-1.5b", tp=4, sp=True),
        case("qwen3-0.6b", tp=2, dp=2, sp=True),
        case("qwen2.5-7b", tp=2, pp=2, vpp=2, sp=True),
        case("qwen2.5-1.5b", pp=2, vpp=2, dp=2),
    ],
    8: [case("qwen2.5-1.5b", tp=4, dp=2), case("qwen2.5-1.5b", tp=4, pp=2, sp=True)],
}


@pytest.mark.parametrize("world", UPDATES)
@pytest.mark.parametrize("distributed", [True, False])
def test_updates_equal_torch_adamw_and_copies_stay_equal(tmp_path, world, distributed):
    cases, config = UPDATES[world], settings(distributed=distributed)
    expected, ends, norms = references(cases, tmp_path), {}, {}
    for model in expected:
        hf = model.make(tmp_path / "start")
        norms[model] = [norm for norm, _ in torch_reference(hf, config)]
        assert norms[model][0] > config.clip_grad  # clipping takes part
        ends[model] = str(tmp_path / f"{model}-end")
        hf.save_pretrained(ends[model])
    for rank in run_ranks(_trained, world, cases, expected, config, ends):
        for one, (off, found, different) in zip(cases, rank, strict=True):
            assert off < 5e-6, one
            assert found == pytest.approx(norms[one.model], rel=1e-5), one
            assert different == [], one


# -- recomputed activations --------------------------------------------------------------------------------------


class SavedBytes:
    """Counts the memory that a forward pass keeps for its backward pass, besides the parameters."""

    def __init__(self, policy) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in policy.parameters_by_name().values()}
        self._kept: list[torch.Tensor] = []
        self.total = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        forward = torch._C._current_graph_task_id() < 0  # else it is a part that the backward pass computes again
        if forward and storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._kept.append(tensor)  # so that no other tensor gets its address
            self.total += storage.nbytes()
        return tensor


def _recomputed(rank, world, cases, expected):
    found = []
    for one in cases:
        join(rank, world, one.layout)
        policy = policy_of(one, expected[one.model])
        saved = SavedBytes(policy)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            batch = share_of(make_batch(RAGGED), policy)
            policy.update(batch, [list(range(len(batch)))], weighted_loss(0.3, 100.0), temperature=1.0)
        gradients = {name: p.main_grad.numpy().copy() for name, p in policy.parameters_by_name().items()}
        found.append((saved.total, gradients))
        teardown_model_parallel()
    return found


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}, {"pp": 2, "vpp": 2}], ids=str)
def test_recomputed_activations_give_the_same_gradients_from_less_memory(tmp_path, layout):
    base = case("qwen3-0.6b", layers=4, **layout)
    cases = [dataclasses.replace(base, recompute=r) for r in ("none", "selective", "full")]
    for rank in run_ranks(_recomputed, base.layout.world, cases, references(cases, tmp_path)):
        (none, gradients), (selective, other), (full, another) = rank
        assert selective < 0.9 * none
        assert full < 0.5 * selective
        for name, value in gradients.items():
            assert np.array_equal(value, other[name]), name
            assert np.array_equal(value, another[name]), name


# -- memory between phases -----------------------------------------------------------------------------------------


def _released(rank, world, one, expected, config):
    join(rank, world, one.layout)
    ends = []
    for release in (False, True):
        policy = policy_of(one, expected, config)
        addresses = {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
        for seed in range(STEPS):
            _update(policy, seed)
            if release:
                size = sum(b.numel() * 4 for run in policy._runs for b in (x.grad_data for x in run.buffers))
                freed = policy.release_for_rollout(optimizer=True, gradients=True)
                assert freed == size > 0
                assert all(p.main_grad.untyped_storage().nbytes() == 0 for p in policy.parameters_by_name().values())
                assert policy.release_for_rollout(optimizer=True, gradients=True) == 0  # nothing is left to free
                policy.log_probs(make_batch(RAGGED), temperature=1.0, max_tokens=99, with_entropy=False)
                policy.state_dict()
        assert addresses == {name: p.data_ptr() for name, p in policy.parameters_by_name().items()}
        policy.claim_for_training()
        assert all(p.main_grad.untyped_storage().nbytes() for p in policy.parameters_by_name().values())
        ends.append(_weights(policy))
    return all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("distributed", [True, False])
def test_memory_freed_between_phases_changes_nothing(tmp_path, distributed):
    one = case("qwen2.5-0.5b", dp=2)
    (expected,) = references([one], tmp_path).values()
    assert all(run_ranks(_released, 2, one, expected, settings(distributed=distributed)))


# -- norms ----------------------------------------------------------------------------------------------------------


def _plain_norms(rank, world, one: Case, expected):
    join(rank, world, one.layout)
    policy = policy_of(one, expected)
    _update(policy, 0)
    norms = [m for name, m in policy.model.named_modules() if name.endswith("norm") and list(m.parameters())]
    return {type(m) for m in norms} == {RMSNorm}, len(norms), policy.model.config.persist_layer_norm


def test_case_44_norms_need_neither_transformer_engine_nor_apex(tmp_path):
    """Megatron-LM#1658: RMSNorm asserted without them, and so did persist_layer_norm, which is on by default."""
    one = case("qwen3-0.6b", tp=2, sp=True)
    (expected,) = references([one], tmp_path).values()
    assert run_ranks(_plain_norms, 2, one, expected) == [(True, 2 * 4 + 1, False)] * 2
