"""PPO with a critic, whole runs: Ray, Megatron and vLLM in real worker processes, on the tiny task."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megaverl.cli import main
from megaverl.errors import RunError, UserError
from megaverl.observe.metrics import repeatable
from megaverl.trainer.trainer import Trainer

OPTIONS = ["trainer.total_steps=4", "trainer.critic_warmup=1", "trainer.export_critic_dir=null"]


@pytest.fixture(scope="module")
def tp2(task, tmp_path_factory, read_metrics):
    """Four steps in TP 2, the first for the critic alone, with checkpoints and exports; (folder, rows)."""
    folder = tmp_path_factory.mktemp("ppo")
    config = task.config("ppo_tiny.yaml", folder / "run", *OPTIONS, "trainer.save_every=2")
    with Trainer(config) as trainer:
        trainer.train()
        trainer.export_critic_hf(folder / "critic")
        trainer.export_hf(folder / "actor")
    return folder, read_metrics(folder / "run")


def test_metrics_are_finite_and_complete(tp2):
    wanted = {
        "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/vf_explained_var", "critic/grad_norm",
        "critic/lr", "critic/values/mean", "critic/values/max", "critic/values/min", "critic/returns/mean",
        "critic/returns/max", "critic/returns/min", "critic/advantages/mean", "critic/score/mean",
        "timing_s/values", "timing_s/adv", "timing_s/update_critic",
    }  # fmt: skip
    _, rows = tp2
    for row in rows[1:]:
        assert wanted <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-9)


def test_a_critic_from_a_language_model_starts_with_no_opinion_and_learns_one(tp2):
    _, rows = tp2
    first, last = rows[1], rows[-1]
    assert first["critic/values/max"] == first["critic/values/min"] == 0
    assert first["critic/vf_explained_var"] == pytest.approx(0, abs=1e-3)
    assert last["critic/values/max"] > last["critic/values/min"]
    # The mean return is what the best constant would say; the critic has come closer to it than 0 is.
    assert abs(last["critic/values/mean"] - last["critic/returns/mean"]) < abs(last["critic/returns/mean"])


def test_the_warm_up_trains_the_critic_alone(tp2):
    _, rows = tp2
    assert rows[1]["critic/grad_norm"] > 0
    assert not any(name.startswith("actor/pg") for name in rows[1])
    assert "timing_s/update_actor" not in rows[1]
    assert all(row["actor/grad_norm"] > 0 for row in rows[2:])
    assert all(row["handoff/bytes_moved"] == 0 for row in rows[1:])


def test_the_critic_is_exported_as_a_token_classification(tp2):
    from transformers import AutoModelForTokenClassification

    folder, _ = tp2
    model, report = AutoModelForTokenClassification.from_pretrained(folder / "critic", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == 1
    assert model.score.weight.abs().max() > 0
    assert json.loads((folder / "critic" / "config.json").read_text())["architectures"] == [
        "Qwen2ForTokenClassification"
    ]
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.arange(9)[None]).logits).all()
    assert (folder / "critic" / "tokenizer.json").is_file()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_convert_makes_the_exports_from_the_checkpoint(tp2, tmp_path, role):
    """Byte for byte, the critic as the same token classification."""
    folder, _ = tp2
    checkpoint = folder / "run" / "checkpoints" / "step_4"
    assert main(["convert", "to-hf", str(checkpoint), str(tmp_path / "out"), "--role", role]) == 0
    for file in sorted(p.name for p in (folder / role).iterdir()):
        assert (tmp_path / "out" / file).read_bytes() == (folder / role / file).read_bytes(), file


def test_resumed_run_goes_on_where_it_was_saved(task, tp2, tmp_path, read_metrics):
    """Steps 3 and 4 from the checkpoint of step 2, critic and its optimizer included, bit for bit."""
    folder, rows = tp2
    checkpoint = folder / "run" / "checkpoints" / "step_2"
    config = task.config("ppo_tiny.yaml", tmp_path, *OPTIONS, f"trainer.resume={checkpoint}")
    with Trainer(config) as trainer:
        trainer.train()
    again = read_metrics(tmp_path)
    assert [row["step"] for row in again] == [3, 4]
    assert list(map(repeatable, again)) == list(map(repeatable, rows[3:]))


def test_dp2_learns_what_tp2_learns(task, tp2, tmp_path, read_metrics):
    """Whitening, returns and both models' first updates do not depend on the layout, up to float32 rounding."""
    config = task.config("ppo_tiny.yaml", tmp_path, *OPTIONS, "actor.layout.tp=1")
    with Trainer(config) as trainer:
        assert trainer.train()["layout"] == "tp1-pp1-dp2"
    mine, theirs = read_metrics(tmp_path)[1], tp2[1][1]
    for name in repeatable(theirs):
        if name.startswith(("critic/", "response_length/")):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_several_updates_with_kl_in_the_reward_from_an_exported_critic(task, tp2, tmp_path, read_metrics):
    options = [
        "trainer.total_steps=2", "trainer.export_critic_dir=null", "trainer.critic_warmup=0",
        f"critic.path={tp2[0] / 'critic'}", "critic.mini_batch_size=4", "critic.epochs=2", "actor.mini_batch_size=8",
        "actor.use_kl_loss=false", "algorithm.kl_in_reward=true", "algorithm.kl_coef=0.1", "rollout.n=2",
        "algorithm.whiten_advantages=false", "actor.layout.tp=1",
    ]  # fmt: skip
    with Trainer(task.config("ppo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    first, last = read_metrics(tmp_path)[-2:]
    assert first["critic/values/max"] > first["critic/values/min"]  # it has an opinion from the start
    assert last["critic/rewards/mean"] != last["critic/score/mean"]
    assert "actor/reward_kl_penalty" in last
    assert last["critic/advantages/mean"] != pytest.approx(0, abs=1e-9)


def test_what_a_run_needs_of_the_critic_is_checked_before_the_start(task, tp2, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config\.json"):
        Trainer(task.config("ppo_tiny.yaml", tmp_path / "a", *OPTIONS, f"critic.path={tmp_path / 'empty'}"))
    options = [*OPTIONS[:2], f"trainer.export_critic_dir={tp2[0] / 'critic'}"]
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        Trainer(task.config("ppo_tiny.yaml", tmp_path / "b", *options))


def test_a_checkpoint_without_a_critic_is_not_resumed(task, tmp_path):
    options = ["trainer.total_steps=1", "trainer.save_every=1", "trainer.val_before_train=false"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path / "grpo", *options)) as trainer:
        trainer.train()
        with pytest.raises(RunError, match="trains no critic"):
            trainer.export_critic_hf(tmp_path / "critic")
    checkpoint = tmp_path / "grpo" / "checkpoints" / "step_1"
    with pytest.raises(UserError, match="holds no critic, and ppo trains one"):
        Trainer(task.config("ppo_tiny.yaml", tmp_path / "ppo", *OPTIONS, f"trainer.resume={checkpoint}"))
