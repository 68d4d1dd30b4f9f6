"""Preference training, whole runs in real worker processes: a reward model that then scores GRPO, and KTO."""

from __future__ import annotations

import math

import pytest

from megaverl.trainer.trainer import Trainer

SHORT = ["trainer.total_steps=3", "trainer.val_every=0", "data.train_batch_size=16"]


@pytest.fixture(scope="module")
def reward_model(task, tmp_path_factory, read_metrics):
    """A reward model after three steps in TP 2; (folder of the export, rows)."""
    folder = tmp_path_factory.mktemp("rm")
    files = [f"data.train_files=[{task.rows['pairs']}]", f"data.val_files=[{task.rows['val_pairs']}]"]
    with Trainer(task.config("rm_tiny.yaml", folder / "run", *files, *SHORT)) as trainer:
        trainer.train()
        trainer.export_hf(folder / "export")
    return folder / "export", read_metrics(folder / "run")


def test_a_reward_model_is_trained_and_loads_in_transformers(reward_model):
    from transformers import AutoModelForSequenceClassification

    folder, rows = reward_model
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["train/loss"] == pytest.approx(math.log(2))  # a head at zero prefers nothing
    assert rows[-1]["train/loss"] < math.log(2)
    assert {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"} <= rows[-1].keys()
    assert 0 <= rows[-1]["val/rewards/accuracies"] <= 1
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.score.weight.abs().max() > 0


def test_it_scores_the_responses_of_grpo(task, tmp_path, reward_model, read_metrics):
    options = [f"reward.model.path={reward_model[0]}", "reward.function.path=null", "trainer.total_steps=2"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path / "run", *options, "trainer.val_every=0")) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[-1]["critic/score/max"] > rows[-1]["critic/score/min"]
    assert rows[-1]["actor/grad_norm"] > 0
    assert any(name.startswith("val-core/") for name in rows[0])


def test_kto_trains_in_two_replicas(task, tmp_path, read_metrics):
    files = [f"data.train_files=[{task.rows['judged']}]", f"data.val_files=[{task.rows['val_pairs']}]"]
    config = task.config("kto_tiny.yaml", tmp_path / "run", *files, *SHORT, "actor.layout.tp=1")
    with Trainer(config) as trainer:
        summary = trainer.train()
    rows = read_metrics(tmp_path / "run")
    assert summary["layout"] == "tp1-pp1-dp2"
    assert rows[1]["train/loss"] == pytest.approx(0.5)  # policy and reference are equal
    assert rows[1]["kto/baseline"] == 0
    assert rows[-1]["train/loss"] < 0.5
