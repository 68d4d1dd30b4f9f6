"""Real input: GSM8K as published, the Qwen2.5 tokenizer with its chat template, the real vocabulary."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from megaverl import load_config
from megaverl.data.prepare import prepare_gsm8k
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.rewards.registry import Registry
from megaverl.trainer.trainer import Trainer

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
RECIPE = Path(__file__).parents[2] / "configs" / "yaml" / "grpo_gsm8k.yaml"

pytestmark = pytest.mark.skipif(not ASSETS.is_dir(), reason="GSM8K and the Qwen2.5 tokenizer are not here")


def test_grpo_on_gsm8k_with_the_real_vocabulary(tmp_path, read_metrics):
    model = build_tiny_checkpoint(tmp_path / "model", vocab=151_936, initializer_range=0.02)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "qwen2.5-tokenizer" / file, model / file)
    rows = prepare_gsm8k(ASSETS / "gsm8k", tmp_path / "data").paths
    config = load_config(
        RECIPE,
        [
            f"model.path={model}", f"data.train_files={rows['train']}", "data.val_files=[]", "actor.layout.tp=2",
            "cluster.workers_per_node=2", "cluster.device=cpu", "data.train_batch_size=4", "actor.mini_batch_size=2",
            "rollout.n=4", "data.max_response_length=8", "trainer.total_steps=3", "trainer.save_every=0",
            f"trainer.run_dir={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    with Trainer(config) as trainer:
        assert len(trainer.prepared.train) == 7473
        trainer.train()
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert metrics[0]["training/rollout_log_probs_diff_max"] <= 1e-5
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_every_worked_answer_scores_one_and_a_wrong_one_zero(tmp_path):
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(prepare_gsm8k(ASSETS / "gsm8k", tmp_path).paths["test"]).to_pylist()
    assert len(rows) == 1319
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert Registry().compute_score(row["data_source"], row["response"], truth) == 1.0
        assert Registry().compute_score(row["data_source"], f"#### {int(truth) + 1}", truth) == 0.0
