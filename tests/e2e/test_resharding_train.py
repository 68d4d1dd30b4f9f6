"""Whole runs whose training layout differs from the rollout's."""

from __future__ import annotations

import pytest

from megaverl.trainer.trainer import Trainer

LAYOUTS = {
    "tp2 to two replicas": ["actor.layout.tp=2", "rollout.tp=1"],
    "pp2 to tp2": ["actor.layout.tp=1", "actor.layout.pp=2", "rollout.tp=2"],
}
SAME = ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm")


def train(task, folder, read_metrics, *options):
    steps = ["trainer.total_steps=2", "actor.recompute_old_log_probs=always", "resharding.verify=full"]
    with Trainer(task.config("grpo_tiny.yaml", folder, *steps, *options)) as trainer:
        summary = trainer.train()
    return summary, read_metrics(folder)


@pytest.fixture(scope="module")
def equal(task, tmp_path_factory, read_metrics):
    return train(task, tmp_path_factory.mktemp("equal"), read_metrics, "actor.layout.tp=2")


@pytest.mark.parametrize("pair", LAYOUTS)
def test_a_rollout_of_another_layout_trains_alike(pair, task, tmp_path, read_metrics, equal):
    summary, rows = train(task, tmp_path, read_metrics, *LAYOUTS[pair])
    assert summary["handoff_bytes"] > 0
    assert all(row["handoff/bytes_moved"] > 0 for row in rows[1:])
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows[1:])
    for step in (1, 2):
        for name in SAME:
            assert rows[step][name] == pytest.approx(equal[1][step][name], rel=1e-3, abs=1e-5), (step, name)


def test_the_transformers_engine_gets_the_whole_model_from_two_ranks(task, tmp_path, read_metrics):
    summary, rows = train(task, tmp_path, read_metrics, "actor.layout.tp=2", "rollout.tp=1", "rollout.engine=hf")
    assert {worker["engine"] for worker in summary["workers"]} == {"hf"}
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows[1:])
    assert all(row["handoff/bytes_received"] > 0 for row in rows[1:])
