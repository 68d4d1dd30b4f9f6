"""Gradients of the Megatron model: against transformers, and independent of how the batch was cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.config.schema import OptimizerConfig
from megaverl.parallel.layout import Layout
from tests.gloo.launch import RankError, run_ranks
from tests.gloo.policy_support import (
    RAGGED,
    hf_scores,
    join,
    make_batch,
    make_hf,
    make_policy,
    read_weights,
    share_of,
    weighted_loss,
)

TOKENS = 100.0  # any constant that all ranks share
REPLICATED = OptimizerConfig(lr=0.0, clip_grad=0.0, distributed=False)  # whole gradients stay on every rank


def cuts(sequences: int, parts: int) -> list[list[int]]:
    """The sequences divided into ``parts`` uneven pieces."""
    return [list(range(i, sequences, parts)) for i in range(parts)]


def _gradients(rank, world, folder, layout, sequence_parallel, parts, expected=None):
    """Gradient of every parameter of the rank after one update, and the share of the expected one."""
    join(rank, world, layout)
    policy = make_policy(folder, layout, optimizer=REPLICATED, sequence_parallel=sequence_parallel)
    share = share_of(make_batch(RAGGED), policy)
    result = policy.update(
        share,
        cuts(len(share), parts[policy.grid.at.dp % len(parts)]),
        weighted_loss(0.3, TOKENS),
        temperature=0.7,
        entropy_grad=True,
    )
    assert result.applied
    params = policy.parameters_by_name()
    found = {name: p.main_grad.numpy().copy() for name, p in params.items()}
    if expected is None:
        return found, result.grad_norm
    reference = {name: torch.zeros_like(p) for name, p in params.items()}
    read_weights(policy, expected, reference)
    return found, {name: value.numpy() for name, value in reference.items()}, result.grad_norm


def save_hf_gradients(model, folder: Path) -> float:
    """Saves a checkpoint whose tensors are the gradients of the test's loss; returns the gradient's norm."""
    batch = make_batch(RAGGED)
    log_probs, entropy = hf_scores(model, batch, 0.7)
    weighted_loss(0.3, TOKENS)(batch, log_probs, entropy)[0].backward()
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(folder)
    return norm


def relative(found, reference) -> float:
    """Largest difference, as a share of the largest reference value."""
    return float(abs(found - reference).max() / abs(reference).max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [(Layout(), False), (Layout(tp=2), False), (Layout(tp=2), True), (Layout(pp=2), False), (Layout(tp=2, dp=2), True)],
    ids=str,
)
def test_gradients_of_all_parameters_equal_transformers(tmp_path, tied, layout, sequence_parallel):
    model = make_hf(tmp_path / "model", tied=tied)
    norm = save_hf_gradients(model, tmp_path / "gradients")
    args = (str(tmp_path / "model"), layout, sequence_parallel, [2], str(tmp_path / "gradients"))
    for found, reference, found_norm in run_ranks(_gradients, layout.world, *args):
        assert found_norm == pytest.approx(norm, rel=1e-5)
        for name in reference:
            assert relative(found[name], reference[name]) < 1e-5, name


def test_case_22_gradient_does_not_depend_on_micro_batches_or_data_parallel_size(tmp_path):
    make_hf(tmp_path, tied=True)
    runs = {
        (dp, str(parts)): run_ranks(_gradients, dp, str(tmp_path), Layout(dp=dp), False, parts)
        for dp in (1, 2)
        for parts in ([1], [2], [4], [8] if dp == 1 else [3, 1])  # the last: ranks differ in their number
    }
    base, base_norm = runs[1, "[1]"][0]
    for key, ranks in runs.items():
        for gradient, norm in ranks:
            assert norm == pytest.approx(base_norm, rel=1e-6), key
            for name, value in gradient.items():
                assert relative(value, base[name]) < 1e-6, (key, name)


def _no_response(rank, world, folder):
    join(rank, world, Layout())
    policy = make_policy(folder, Layout(), optimizer=REPLICATED)
    batch = make_batch([(5, 0), (4, 6)])
    policy.update(batch, [[0], [1]], weighted_loss(0.3, TOKENS), temperature=1.0, entropy_grad=True)
    cut = {n: p.main_grad.clone() for n, p in policy.parameters_by_name().items()}
    policy.update(batch.select([1]), [[0]], weighted_loss(0.3, TOKENS), temperature=1.0, entropy_grad=True)
    return max(relative(cut[n].numpy(), p.main_grad.numpy()) for n, p in policy.parameters_by_name().items())


def test_a_micro_batch_without_response_tokens_adds_nothing(tmp_path):
    make_hf(tmp_path, tied=False)
    assert run_ranks(_no_response, 1, str(tmp_path))[0] < 1e-6


def _nothing(rank, world, folder):
    join(rank, world, Layout())
    make_policy(folder, Layout(), optimizer=REPLICATED).update(
        make_batch(RAGGED), [], weighted_loss(0, TOKENS), temperature=1.0
    )


def test_a_rank_without_micro_batches_says_so(tmp_path):
    make_hf(tmp_path, tied=True)
    with pytest.raises(RankError, match="no micro-batch"):
        run_ranks(_nothing, 1, str(tmp_path))
