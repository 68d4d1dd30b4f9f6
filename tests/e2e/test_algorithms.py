"""Every algorithm for two steps on the tiny task, in real worker processes."""

from __future__ import annotations

import math

import pytest

from megaverl.trainer.trainer import Trainer

SHORT = ["trainer.total_steps=2", "trainer.val_before_train=false", "data.val_files=[]", "data.train_batch_size=8"]

CASES = {
    "rloo_tiny.yaml": ['rollout.stop=["7"]', "rollout.stop_token_ids=[30]"],
    "reinforce_pp_tiny.yaml": [
        "rollout.n=2", "algorithm.kl_controller=adaptive", "algorithm.kl_horizon=100", "algorithm.kl_coef=0.1",
    ],
    "remax_tiny.yaml": ["actor.layout.tp=1"],
    "dapo_tiny.yaml": ["actor.mini_batch_size=4", "actor.layout.tp=1", "rollout.n=2", "reward.overlong_buffer=12"],
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
    if recipe.startswith("dapo"):
        assert 1 <= row["train/num_gen_batches"] <= 4
        assert row["reward/overlong_penalty/mean"] < 0
        assert row["critic/rewards/mean"] < row["critic/score/mean"]
    if recipe.startswith("cispo"):
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0
