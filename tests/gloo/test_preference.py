"""Preference training on Megatron: scores, gradients and exports against transformers, equal in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megaverl.algorithms.preference import PREFERRED, PreferenceCounts, dpo_loss_fn, score_loss_fn
from megaverl.checkpoint.hf_export import ModelRanks
from megaverl.checkpoint.sequence_classification import export_reward_model, load_reward_model, reward_source
from megaverl.config.schema import OptimizerConfig, PreferenceConfig
from megaverl.data.batch import UNIT, SequenceBatch
from megaverl.data.packing import unit_micro_batches
from megaverl.models.critic_map import critic_map
from megaverl.models.reward_model import RewardModel
from megaverl.parallel.device import choose_device
from megaverl.parallel.layout import Layout
from tests.gloo.critic_support import make_reward_hf
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import RAGGED, hf_scores, join, make_batch, make_hf, make_policy, read_weights

LAYOUTS = [
    (Layout(tp=2), True),
    (Layout(dp=2), False),
    (Layout(pp=2, vpp=2), False),
]
REPLICATED = OptimizerConfig(lr=0.0, clip_grad=0.0, distributed=False)  # whole gradients stay on every rank
CONFIG = PreferenceConfig(beta=0.3)
PAIRS = len(RAGGED) // 2
COUNTS = PreferenceCounts(sum(r for _, r in RAGGED), len(RAGGED), 64, PAIRS, PAIRS, PAIRS)


def pairs() -> SequenceBatch:
    """`make_batch` as pairs side by side, with log-probabilities of a reference."""
    batch = make_batch(RAGGED)
    units = len(batch) // 2
    batch.per_sequence = {
        UNIT: torch.arange(units).repeat_interleave(2),
        PREFERRED: torch.tensor([1, 0]).repeat(units),
    }
    batch.columns["ref_log_probs"] = -4.0 + batch.columns["weight"]
    return batch


def share_of_pairs(batch: SequenceBatch, at: int, dp: int) -> SequenceBatch:
    return batch.select([i for i in range(len(batch)) if i // 2 % dp == at])


def make_reward_model(folder: str, layout: Layout, sequence_parallel: bool, *, train: bool) -> RewardModel:
    model = RewardModel(
        reward_source(folder, trained=False).shape,
        layout,
        choose_device(device="cpu"),
        trainable=train,
        sequence_parallel=sequence_parallel,
    )
    read_reward(model, folder, model.parameters_by_name())
    if train:
        model.prepare_training(REPLICATED, 10)
    return model


def read_reward(model: RewardModel, folder: str, into: dict[str, torch.Tensor]) -> None:
    load_reward_model(folder, into, tp=model.layout.tp, tp_rank=model.grid.at.tp, whole_model=model.layout.pp == 1)


def hf_rewards(model, batch: SequenceBatch) -> torch.Tensor:
    """[sequences], by transformers, one at a time."""
    return torch.cat([model(input_ids=batch.select([i]).tokens[None]).logits[0] for i in range(len(batch))])


def _work(rank, world, folder, gradients, layout, sequence_parallel, algorithm):
    join(rank, world, layout)
    batch = pairs()
    if algorithm == "rm":
        model = make_reward_model(folder, layout, sequence_parallel, train=True)
        scores = model.scores(batch, max_tokens=60).numpy()
    else:
        model, scores = make_policy(folder, layout, optimizer=REPLICATED, sequence_parallel=sequence_parallel), None
    share = share_of_pairs(batch, model.grid.at.dp, layout.dp)
    cut = unit_micro_batches(share.lengths.tolist(), share.per_sequence[UNIT].tolist(), 75)
    assert len(cut) > 1
    if algorithm == "rm":
        result = model.update(share, cut, score_loss_fn(CONFIG, COUNTS))
    else:
        result = model.update(share, cut, dpo_loss_fn(CONFIG, COUNTS), temperature=1.0, with_entropy=False)
    params = model.parameters_by_name()
    reference = {name: torch.zeros_like(p) for name, p in params.items()}
    if algorithm == "rm":
        read_reward(model, gradients, reference)
    else:
        read_weights(model, gradients, reference)
    found = {name: p.main_grad.numpy().copy() for name, p in params.items()}
    sums = {name: value.item() for name, value in result.sums.items()}
    return scores, found, {n: v.numpy() for n, v in reference.items()}, sums, result.grad_norm


@pytest.mark.parametrize("algorithm", ["rm", "dpo"])
@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS, ids=str)
def test_gradients_and_metrics_equal_transformers_in_every_layout(tmp_path, layout, sequence_parallel, algorithm):
    make = make_reward_hf if algorithm == "rm" else make_hf
    model = make(tmp_path / "model", tied=True, layers=4)
    batch = pairs()
    if algorithm == "rm":
        values = hf_rewards(model, batch).squeeze(-1)
        loss, sums = score_loss_fn(CONFIG, COUNTS)(batch, values)
    else:
        loss, sums = dpo_loss_fn(CONFIG, COUNTS)(batch, hf_scores(model, batch, 1.0)[0], None)
    loss.backward()
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(tmp_path / "gradients")
    args = (str(tmp_path / "model"), str(tmp_path / "gradients"), layout, sequence_parallel, algorithm)
    results = run_ranks(_work, layout.world, *args)
    for scores, found, reference, _, found_norm in results:
        if scores is not None:
            assert abs(scores - values.detach().numpy()).max() < 1e-5
        assert found_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in found.items():
            assert abs(gradient - reference[name]).max() < 1e-5 * max(1e-3, np.abs(reference[name]).max()) + 1e-7, name
    by_dp = [results[rank][3] for rank in range(0, layout.world, layout.tp * layout.pp)]  # tp innermost
    if layout.pp == 1:
        for name, value in sums.items():
            assert sum(part[name] for part in by_dp) == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name


def _export(rank, world, folder, out, layout):
    join(rank, world, layout)
    model = make_reward_model(folder, layout, False, train=False)
    at, grid = model.grid.at, model.grid
    ranks = ModelRanks(layout.tp, at.tp, grid.tp, layout.pp, at.pp, grid.pp)
    params = {n: p.detach() for n, p in model.parameters_by_name().items()}
    export_reward_model(params, model.shape, out, ranks, source=folder)
    return model.scores(make_batch(RAGGED), max_tokens=1000).numpy()


@pytest.mark.parametrize("start", ["reward model", "language model"])
def test_the_export_scores_in_transformers_as_here(tmp_path, start):
    make = make_reward_hf if start == "reward model" else make_hf
    make(tmp_path / "start", tied=True)
    layout = Layout(tp=2)
    scores = run_ranks(_export, 2, str(tmp_path / "start"), str(tmp_path / "out"), layout)[0]
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == 1
    with torch.no_grad():
        expected = hf_rewards(model, make_batch(RAGGED)).squeeze(-1).numpy()
    assert abs(scores - expected).max() < 1e-5
    if start == "language model":
        assert not scores.any()
    else:
        assert abs(scores).max() > 0.1
        assert critic_map(reward_source(tmp_path / "out", trained=True).shape, bias=False).hf_names()
