"""Metrics of a whole update through the roles of real ranks: equal to one process of transformers for every cut."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from megaverl.algorithms.losses import Denominators
from megaverl.config.schema import Config
from megaverl.data.batch import SequenceBatch
from megaverl.parallel.layout import Layout
from megaverl.parallel.setup import teardown_model_parallel
from megaverl.trainer.updates import report_metrics
from megaverl.workers.actor_role import ActorRole
from megaverl.workers.update import Update
from tests.gloo.launch import run_ranks
from tests.gloo.policy_support import RAGGED, hf_scores, join, make_batch, make_hf, make_policy

TEMPERATURE = 0.7
SETTINGS = {
    "actor": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.02,
        "loss_aggregation": "seq-mean-token-mean",
        "clip_ratio_low": 0.05,
        "clip_ratio_high": 0.1,
        "rollout_correction": {"importance": "token", "threshold": 1.1},
        "optimizer": {"lr": 0.0, "clip_grad": 0.0},
    },
    "rollout": {"temperature": TEMPERATURE},
    "data": {"max_response_length": 64},
}
CASES = [
    (Layout(), 10_000, False),
    (Layout(), 48, True),  # many micro-batches, the sequences in another order
    (Layout(dp=2), 60, False),
    (Layout(dp=2), 10_000, True),
    (Layout(tp=2), 60, False),
]


def whole_batch(columns: dict[str, torch.Tensor] | None = None) -> SequenceBatch:
    batch = make_batch(RAGGED)
    if columns:
        batch.columns = {name: values.float() for name, values in columns.items()}
    return batch


def reference(model) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Columns around the model's own log-probabilities, and all metrics, in float64, one sequence after the other."""
    batch = whole_batch()
    log_probs, entropy = hf_scores(model, batch, TEMPERATURE)
    g = torch.Generator().manual_seed(5)
    noise = lambda scale: torch.randn(log_probs.shape, generator=g) * scale  # noqa: E731
    fixed = log_probs.detach()
    columns = {
        "old_log_probs": fixed + noise(0.1),
        "ref_log_probs": fixed + noise(0.3),
        "rollout_log_probs": fixed + noise(0.2),
        "advantages": noise(1.0),
    }
    old, ref, rollout, advantages = (columns[name].double() for name in columns)
    actor, new = SETTINGS["actor"], log_probs.double()
    terms: dict[str, list[torch.Tensor]] = {"pg": [], "kl": [], "entropy": []}
    tokens: dict[str, list[float]] = {"entropy": [], "clip": [], "ppo_kl": []}
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        inside = [t for t in range(start, end) if batch.response_mask[t]]
        pg, kl = [], []
        for t in inside:
            ratio = (new[t] - old[t]).exp()
            plain = -advantages[t] * ratio
            bounded = -advantages[t] * ratio.clamp(1 - actor["clip_ratio_low"], 1 + actor["clip_ratio_high"])
            loss = torch.maximum(plain, bounded)
            if advantages[t] < 0 and loss > -3.0 * advantages[t]:
                loss = -3.0 * advantages[t]
            pg.append(loss * min(math.exp(old[t] - rollout[t]), 1.1))
            kl.append((ref[t] - new[t]).exp() - (ref[t] - new[t]) - 1)
            tokens["clip"].append(float(bounded > plain))
            tokens["ppo_kl"].append((old[t] - new[t]).item())
            tokens["entropy"].append(entropy[t].item())
        terms["pg"].append(sum(pg) / len(inside))
        terms["kl"].append(sum(kl) / len(inside))
        terms["entropy"].append(sum(entropy[t].double() for t in inside) / len(inside))
    share = {name: sum(values) / len(values) for name, values in terms.items()}
    (share["pg"] + 0.1 * share["kl"] - 0.02 * share["entropy"]).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    metrics = {
        "actor/pg_loss": share["pg"].item(),
        "actor/kl_loss": share["kl"].item(),
        "actor/entropy": statistics.fmean(tokens["entropy"]),
        "actor/pg_clipfrac": statistics.fmean(tokens["clip"]),
        "actor/ppo_kl": statistics.fmean(tokens["ppo_kl"]),
        "actor/grad_norm": norm,
    }
    assert metrics["actor/pg_clipfrac"] > 0
    return columns, metrics


def _reports(rank, world, folder, cases, columns):
    found = []
    for layout, max_tokens, reverse in cases:
        join(rank, world, layout)
        actor = {**SETTINGS["actor"], "max_tokens_per_micro_batch": max_tokens}
        config = Config.model_validate({**SETTINGS, "actor": actor})
        policy = make_policy(folder, layout, optimizer=config.actor.optimizer)
        batch = whole_batch(columns)
        own = list(range(policy.grid.at.dp, len(batch), layout.dp))
        share = batch.select(own[::-1] if reverse else own)
        role = ActorRole(config, policy)
        counts = Denominators.of(batch.response_lengths.tolist(), 64)
        found.append(role.update(share, [Update(list(range(len(share))), counts)]))
        teardown_model_parallel()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_case_23_metrics_equal_one_process_of_transformers(tmp_path, world):
    """Trinity-RFT#471 reported a KL loss that was off by the number of micro-batches."""
    columns, expected = reference(make_hf(tmp_path, tied=True))
    cases = [one for one in CASES if one[0].world == world]
    ranks = run_ranks(_reports, world, str(tmp_path), cases, columns)
    counts = Denominators.of(whole_batch().response_lengths.tolist(), 64)
    for number, (layout, *_) in enumerate(cases):
        reports = [reports[number] for rank, reports in enumerate(ranks) if rank % layout.tp == 0]
        metrics = report_metrics("actor", reports, [counts])
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-7), (str(layout), name)
