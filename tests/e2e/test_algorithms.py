"""Every algorithm for two steps on the tiny task, in real worker processes."""

from __future__ import annotations

import math

import pytest

from megaverl.observe.metrics import repeatable
from megaverl.trainer.trainer import Trainer

SHORT = ["trainer.total_steps=2", "trainer.val_before_train=false", "data.val_files=[]", "data.train_batch_size=8"]

CASES = {
    "rloo_tiny.yaml": ['rollout.stop=["7"]', "rollout.stop_token_ids=[30]"],
    "reinforce_pp_tiny.yaml": [
        "rollout.n=2", "algorithm.kl_controller=adaptive", "algorithm.kl_horizon=100", "algorithm.kl_coef=0.1",
    ],
    "remax_tiny.yaml": ["actor.layout.tp=1"],
    # What the engine reports and the trainer computes agree at any temperature, whatever cuts the distribution.
    "gspo_tiny.yaml": [
        "actor.mini_batch_size=4", "rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.min_p=0.01",
    ],
    "cispo_tiny.yaml": [
        "actor.mini_batch_size=4", "actor.rollout_correction.importance=sequence",
        "actor.rollout_correction.mask=geometric",
    ],
}  # fmt: skip


@pytest.mark.parametrize("recipe", CASES)
def test_every_algorithm_runs(recipe, task, tmp_path, read_metrics):
    with Trainer(task.config(recipe, tmp_path, *SHORT, *CASES[recipe])) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0
        assert row["rollout_corr/log_ppl_abs_diff"] < 1e-4
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.9999
    row = rows[-1]
    if recipe.startswith("reinforce"):
        assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)
        assert row["actor/reward_kl_penalty_coeff"] < 0.1  # the KL is below its target of 0.1
    if recipe.startswith("remax"):
        assert row["critic/returns/mean"] != row["critic/advantages/mean"]
    if recipe.startswith("cispo"):
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0


def test_dapo_resumes_bit_for_bit_across_epochs(task, tmp_path, read_metrics):
    """Dynamic sampling takes batches of rows (an epoch has two), the KL's weight moves: a checkpoint has both."""
    options = [
        "data.train_batch_size=32", "actor.mini_batch_size=16", "actor.layout.tp=1", "rollout.n=2", "data.val_files=[]",
        "reward.overlong_buffer=12", "trainer.val_before_train=false", "trainer.total_steps=4", "algorithm.kl_coef=0.1",
        "algorithm.kl_in_reward=true", "algorithm.kl_controller=adaptive", "algorithm.kl_horizon=100",
    ]  # fmt: skip
    with Trainer(task.config("dapo_tiny.yaml", tmp_path / "whole", *options, "trainer.save_every=2")) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path / "whole")
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert 1 <= row["train/num_gen_batches"] <= 4
        assert row["reward/overlong_penalty/mean"] < 0
        assert row["critic/rewards/mean"] < row["critic/score/mean"]
    assert rows[-1]["training/epoch"] > rows[1]["training/epoch"]
    assert rows[-1]["actor/reward_kl_penalty_coeff"] < rows[2]["actor/reward_kl_penalty_coeff"] < 0.1
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_2"
    with Trainer(
        task.config("dapo_tiny.yaml", tmp_path / "again", *options, f"trainer.resume={checkpoint}")
    ) as trainer:
        trainer.train()
    assert list(map(repeatable, read_metrics(tmp_path / "again"))) == list(map(repeatable, rows[2:]))
