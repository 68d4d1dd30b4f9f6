"""Logits, log-probabilities and entropy of the Megatron model against transformers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megaverl.models.packed import PackLayout
from megaverl.parallel.compat_megatron import gather_from_sequence_parallel_region
from megaverl.parallel.layout import Layout
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import RAGGED, VOCAB, hf_scores, join, make_batch, make_hf, make_policy


def _logits(rank, world, folder, tp, sequence_parallel):
    layout = Layout(tp=tp)
    join(rank, world, layout)
    policy = make_policy(folder, layout, sequence_parallel=sequence_parallel)
    pack = policy._pack(make_batch(RAGGED))
    with torch.no_grad():
        hidden = policy.model(pack.tokens, pack.layout)
        if sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        own = hidden[: pack.batch.tokens.numel(), 0] @ policy.model.output_weight.t()
    parts = [torch.empty_like(own) for _ in range(tp)]
    dist.all_gather(parts, own, group=policy.grid.tp)
    return torch.cat(parts, dim=1)[:, :VOCAB].numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_logits_of_packed_sequences_equal_transformers(tmp_path, tied, tp, sequence_parallel):
    model = make_hf(tmp_path, tied=tied)
    batch = make_batch(RAGGED)
    with torch.no_grad():
        expected = torch.cat(
            [model(input_ids=batch.select([i]).tokens.unsqueeze(0)).logits[0] for i in range(len(batch))]
        )
    for found in run_ranks(_logits, tp, str(tmp_path), tp, sequence_parallel):
        difference = (torch.from_numpy(found) - expected).abs().max().item()
        assert difference < 1e-5, f"logits differ by {difference}"
    assert expected.abs().max() > 1  # the comparison would be empty with logits near 0


def _scores(rank, world, folder, tp, sequence_parallel, temperature, max_tokens):
    layout = Layout(tp=tp)
    join(rank, world, layout)
    policy = make_policy(folder, layout, sequence_parallel=sequence_parallel)
    batch = make_batch(RAGGED)
    runs = [policy.log_probs(batch, temperature=temperature, max_tokens=m, with_entropy=True) for m in max_tokens]
    return [{name: value.numpy() for name, value in run.items()} for run in runs]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_log_probs_and_entropy_equal_transformers_however_cut(tmp_path, tp, sequence_parallel):
    model = make_hf(tmp_path, tied=True)
    batch = make_batch(RAGGED)
    with torch.no_grad():
        log_probs, entropy = hf_scores(model, batch, 0.7)
    for rank in run_ranks(_scores, tp, str(tmp_path), tp, sequence_parallel, 0.7, [10_000, 60, 45]):
        for run in rank:
            assert run["log_probs"].dtype == "float32"
            assert (torch.from_numpy(run["log_probs"]) - log_probs).abs().max() < 1e-5
            assert (torch.from_numpy(run["entropy"]) - entropy).abs().max() < 1e-5


def _alone_or_packed(rank, world, folder):
    join(rank, world, Layout())
    policy = make_policy(folder, Layout())
    batch = make_batch(RAGGED)
    with torch.no_grad():
        packed = policy.model(batch.tokens[None], PackLayout.of(batch.lengths.tolist()))
        alone = []
        for i in range(len(batch)):
            one = batch.select([i])
            alone.append(policy.model(one.tokens[None], PackLayout.of(one.lengths.tolist())))
    return (packed - torch.cat(alone)).abs().max().item()


def test_a_sequence_does_not_see_its_neighbours_in_the_pack(tmp_path):
    make_hf(tmp_path, tied=True)
    assert run_ranks(_alone_or_packed, 1, str(tmp_path))[0] < 1e-5
