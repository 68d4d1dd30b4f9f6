"""A run that learns nothing stays where it is."""

from __future__ import annotations

import pytest

from megaverl.trainer.trainer import Trainer


def test_case_25_with_learning_rate_0_nothing_moves_and_the_rollout_gap_does_not_grow(task, tmp_path, read_metrics):
    """verl#2953 and others: log-probabilities of rollout and trainer drifted apart, in some even at a rate of 0."""
    options = [
        "actor.optimizer.lr=0", "trainer.total_steps=30", "trainer.val_every=10", "data.train_batch_size=8",
        "rollout.n=2", "data.max_response_length=10", "rollout.val.n=2", "actor.mini_batch_size=4",
    ]  # fmt: skip
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path)
    validations = [{n: v for n, v in row.items() if n.startswith("val-")} for row in rows]
    validations = [found for found in validations if found]
    assert len(validations) == 4
    assert validations[0]["val-core/megaverl/arithmetic/reward/best@2/mean"] > 0
    assert all(found == validations[0] for found in validations[1:])
    steps = rows[1:]
    assert len(steps) == 30
    for row in steps:
        assert row["actor/lr"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["actor/pg_clipfrac"] == 0
        assert row["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert row["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
        assert row["rollout_corr/chi2_token"] == pytest.approx(0, abs=1e-4)
        assert row["training/rollout_log_probs_diff_max"] < 2e-5
    mean_gap = lambda part: sum(row["training/rollout_log_probs_diff_mean"] for row in part) / len(part)  # noqa: E731
    assert mean_gap(steps[20:]) < 2 * mean_gap(steps[:10]) + 1e-8
