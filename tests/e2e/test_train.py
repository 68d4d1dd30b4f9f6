"""Whole runs: Ray, Megatron and vLLM in real worker processes, on the tiny task."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from megaverl.cli import main
from megaverl.observe.metrics import repeatable
from megaverl.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def tp2(task, tmp_path_factory, read_metrics):
    """Five GRPO steps in TP 2 with checkpoints and an export; (run dir, export dir, summary, rows, check in vLLM)."""
    folder = tmp_path_factory.mktemp("tp2")
    options = ["trainer.total_steps=5", "trainer.save_every=2", "actor.recompute_old_log_probs=always"]
    with Trainer(task.config("grpo_tiny.yaml", folder / "run", *options)) as trainer:
        summary = trainer.train()
        check = trainer.export_vllm(folder / "hf")
    return folder / "run", folder / "hf", summary, read_metrics(folder / "run"), check


def test_metrics_are_finite_and_complete(tp2):
    _, _, summary, rows, _ = tp2
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    wanted = {
        "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm",
        "actor/lr", "critic/score/mean", "critic/rewards/mean", "response_length/mean", "timing_s/step", "timing_s/gen",
        "perf/throughput", "handoff/bytes_moved", "handoff/seconds", "reward/characters/mean",
    }  # fmt: skip
    for row in rows[1:]:
        assert wanted <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
    assert rows[1]["critic/score/max"] > rows[1]["critic/score/min"]
    assert rows[0].keys() > {"val-core/megaverl/arithmetic/reward/mean@1"}
    assert summary["steps"] == 5
    assert {"gen", "update_actor", "update_weights"} <= summary["seconds"].keys()


def test_generations_of_the_same_prompts_are_kept_at_every_validation(tp2):
    folder = tp2[0] / "generations"
    assert sorted(file.name for file in folder.iterdir()) == ["step_0.jsonl", "step_5.jsonl"]
    read = lambda n: [json.loads(line) for line in (folder / f"step_{n}.jsonl").read_text().splitlines()]  # noqa: E731
    before, after = read(0), read(5)
    assert len(before) == 8
    assert [row["row"] for row in before] == [row["row"] for row in after]
    assert all(row["prompt"] and row["score"] == len(row["response"]) % 7 / 6 for row in [*before, *after])
    assert all(row["reward/characters"] == len(row["response"]) for row in before)


def test_nothing_moves_at_a_handoff_of_equal_layouts(tp2):
    _, _, summary, rows, _ = tp2
    assert summary["handoff_bytes"] == 0
    assert all(row["handoff/bytes_moved"] == 0 for row in rows[1:])
    assert all(worker["bytes_aliased"] > 0 for worker in summary["workers"])


def test_first_update_on_fresh_samples(tp2):
    """One epoch and one mini-batch: the policy that samples, the old one and the current one are the same."""
    first = tp2[3][1]
    assert abs(first["actor/ppo_kl"]) <= 1e-6
    assert first["actor/pg_clipfrac"] == 0
    assert first["training/rollout_log_probs_diff_max"] <= 1e-5


def test_same_seed_gives_the_same_metrics_bit_for_bit(task, tp2, tmp_path, read_metrics):
    options = ["trainer.total_steps=5", "actor.recompute_old_log_probs=always"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    assert list(map(repeatable, read_metrics(tmp_path))) == list(map(repeatable, tp2[3]))


def test_resumed_run_goes_on_where_it_was_saved(task, tp2, tmp_path, read_metrics):
    """Steps 3 to 5 from the checkpoint of step 2 are those of the undisturbed run, bit for bit."""
    checkpoint = tp2[0] / "checkpoints" / "step_2"
    options = ["trainer.total_steps=5", "actor.recompute_old_log_probs=always", f"trainer.resume={checkpoint}"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert list(map(repeatable, rows)) == list(map(repeatable, tp2[3][3:]))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_resumed(task, tp2, tmp_path, read_metrics):
    """Newer ones are cut and lost files; the whole one of step 2 goes on, here in DP 2, and the new ones are kept."""
    shutil.copytree(tp2[0] / "checkpoints", tmp_path / "checkpoints")
    checkpoints = tmp_path / "checkpoints"
    file = checkpoints / "step_5" / "rank_00001.pt"
    file.write_bytes(file.read_bytes()[:-100])
    (checkpoints / "step_4" / "shared.pt").unlink()
    options = ["trainer.total_steps=4", "trainer.save_every=2", "trainer.keep_last=1", "actor.layout.tp=1"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [3, 4]
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm"):
        assert rows[0][name] == pytest.approx(tp2[3][3][name], rel=1e-3, abs=1e-5), name
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_4", "step_4.damaged", "step_5.damaged"]


def test_export_is_the_trained_model(task, tp2):
    """The export loads in plain transformers, has the start's names and shapes, and other values."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (load_file(folder / "model.safetensors") for folder in (task.model, tp2[1]))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((task.model / "config.json").read_text()) == json.loads((tp2[1] / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tp2[1])
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert AutoModelForCausalLM.from_pretrained(tp2[1]).generate(**ids, max_new_tokens=4).shape[0] == 1


def test_export_was_loaded_by_a_fresh_vllm_that_says_what_the_policy_says(tp2):
    """TP 2, float32: greedy answers of four prompts; the export folder is the one that the test above reads."""
    found = tp2[4]
    assert found.folder == tp2[1].resolve()
    assert (found.prompts, found.tokens) == (4, 128)
    assert all(found.texts)
    assert 0 < found.largest_difference <= found.tolerance == 1e-3


def test_convert_makes_the_export_from_the_checkpoint(tp2, tmp_path):
    """Byte for byte, from the last checkpoint of the run."""
    assert main(["convert", "to-hf", str(tp2[0] / "checkpoints" / "step_5"), str(tmp_path / "out")]) == 0
    for file in sorted(p.name for p in tp2[1].iterdir()):
        assert (tmp_path / "out" / file).read_bytes() == (tp2[1] / file).read_bytes(), file


def test_dp2_learns_what_tp2_learns(task, tp2, tmp_path, read_metrics):
    """Two replicas of TP 1: the same prompts, seeds and losses, up to float32 rounding."""
    options = ["trainer.total_steps=4", "actor.layout.tp=1", "actor.recompute_old_log_probs=always"]
    options += [f"trainer.export_dir={tmp_path / 'hf'}", "trainer.save_every=4"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path / "run", *options)) as trainer:
        summary = trainer.train()
    assert summary["layout"] == "tp1-pp1-dp2"
    assert summary["handoff_bytes"] == 0
    assert main(["convert", "to-hf", str(tmp_path / "run" / "checkpoints" / "step_4"), str(tmp_path / "out")]) == 0
    exported, converted = (tmp_path / place / "model.safetensors" for place in ("hf", "out"))
    assert converted.read_bytes() == exported.read_bytes()
    rows = read_metrics(tmp_path / "run")
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm"):
        assert rows[1][name] == pytest.approx(tp2[3][1][name], rel=1e-4, abs=1e-6), name


def test_several_updates_on_one_batch_with_kl_in_the_reward(task, tmp_path, read_metrics):
    options = [
        "trainer.total_steps=2", "actor.mini_batch_size=4", "actor.epochs=2", "actor.use_kl_loss=false",
        "algorithm.kl_in_reward=true", "algorithm.kl_coef=0.1", "actor.entropy_coef=0.01",
        "actor.loss_aggregation=seq-mean-token-mean", "actor.layout.tp=1",
    ]  # fmt: skip
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    last = read_metrics(tmp_path)[-1]
    assert last["actor/ppo_kl"] != 0
    assert "timing_s/old_log_prob" in last
    assert last["critic/rewards/mean"] != last["critic/score/mean"]
    assert all(math.isfinite(value) for value in last.values())


def test_transformers_engine_in_one_worker(task, tmp_path, read_metrics):
    options = ["trainer.total_steps=2", "actor.layout.tp=1", "cluster.workers_per_node=1", "rollout.engine=hf"]
    with Trainer(task.config("grpo_tiny.yaml", tmp_path, *options)) as trainer:
        summary = trainer.train()
    assert summary["workers"][0]["engine"] == "hf"
    assert read_metrics(tmp_path)[1]["training/rollout_log_probs_diff_max"] <= 1e-5


def test_supervised_training_lowers_the_loss(task, tmp_path, read_metrics):
    options = ["trainer.total_steps=12", "data.train_batch_size=32", "actor.optimizer.warmup_steps=2"]
    with Trainer(task.config("sft_tiny.yaml", tmp_path, *options)) as trainer:
        trainer.train()
    losses = [row["train/loss"] for row in read_metrics(tmp_path)]
    assert losses[0] == pytest.approx(math.log(1024), rel=0.25)
    assert losses[-1] < 0.8 * losses[0]


def test_responses_that_a_custom_scorer_fails_on_score_zero_and_are_counted(task, tmp_path, read_metrics, capsys):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if len(solution_str) % 2:\n"
        "        raise ZeroDivisionError('by zero')\n"
        "    return 1.0\n"
    )
    options = ["trainer.total_steps=1", f"reward.function.path={scorer}", "trainer.val_before_train=false"]
    config = task.config(
        "grpo_tiny.yaml",
        tmp_path / "run",
        *options,
        "data.val_files=[]",
        "cluster.workers_per_node=1",
        "actor.layout.tp=1",
    )
    with Trainer(config) as trainer:
        trainer.train()
    (row,) = read_metrics(tmp_path / "run")
    total = config.data.train_batch_size * config.rollout.n
    assert 0 < row["reward/errors"] < total
    assert row["reward/timeouts"] == 0
    assert row["critic/score/mean"] == pytest.approx(1 - row["reward/errors"] / total)
    assert "by zero" in capsys.readouterr().out
