"""Rules between keys."""

from __future__ import annotations

import pytest

from megaverl.config.derived import (
    epochs,
    micro_batch_tokens,
    mini_batches,
    needs_reference,
    offload,
    recompute,
    train_layout,
)
from megaverl.config.load import load_config
from megaverl.config.rules import check_rules
from megaverl.errors import Problems
from megaverl.parallel.layout import Layout

GIVEN = ("model.path=m", "data.train_files=t", "trainer.export_dir=out", "actor.use_kl_loss=true")


PPO = ("algorithm.name=ppo",)


def check(*overrides: str) -> tuple[list[str], list[str]]:
    problems = Problems()
    notes = check_rules(load_config(None, [*GIVEN, *overrides]), problems)
    return [str(problem) for problem in problems.found], notes


def test_a_plain_run_has_neither_problems_nor_notes():
    assert check() == ([], [])
    assert check("algorithm.name=sft", "actor.use_kl_loss=false") == ([], [])
    assert check(*PPO, "rollout.n=1", "critic.optimizer.lr=1e-4", "algorithm.lam=0.9") == ([], [])


def test_keys_of_the_critic_are_named_where_there_is_none():
    _, notes = check("critic.epochs=2", "trainer.critic_warmup=3", "algorithm.lam=0.9")
    assert notes == ["grpo has no critic and does not use critic.epochs, algorithm.lam, trainer.critic_warmup"]
    _, notes = check(*PPO, "algorithm.norm_adv_by_std=false")
    assert notes == [
        "algorithm.norm_adv_by_std is not used: PPO compares with the critic, not within a prompt's samples"
    ]


def test_the_critic_takes_the_actors_numbers_where_it_has_none_of_its_own():
    shared = load_config(None, ["data.train_batch_size=8", "actor.mini_batch_size=4", "actor.epochs=3"])
    own = load_config(
        None,
        [
            "data.train_batch_size=8",
            "critic.mini_batch_size=2",
            "critic.epochs=5",
            "critic.max_tokens_per_micro_batch=7",
        ],
    )
    for role in ("actor", "critic"):
        assert (mini_batches(shared, role), epochs(shared, role), micro_batch_tokens(shared, role)) == (2, 3, 16384)
    assert (mini_batches(own, "critic"), epochs(own, "critic"), micro_batch_tokens(own, "critic")) == (4, 5, 7)
    assert (mini_batches(own, "actor"), epochs(own, "actor"), micro_batch_tokens(own, "actor")) == (1, 1, 16384)


@pytest.mark.parametrize(
    ("overrides", "where", "what"),
    [
        (["model.path="], "model.path", "no model is named"),
        (["data.train_files=[]"], "data.train_files", "no training rows are named"),
        (["actor.layout.sequence_parallel=true"], "actor.layout.sequence_parallel", "there is one"),
        (["actor.layout.vpp=2"], "actor.layout.vpp", "need a pipeline"),
        (["actor.layout.tp=2"], "actor.layout", "1 workers cannot hold"),
        (["actor.layout.tp=2", "cluster.workers_per_node=3", "rollout.tp=1"], "actor.layout", "3 workers cannot hold"),
        (["actor.layout.ep=2"], "actor.layout.ep", "does not divide"),
        (["data.train_batch_size=1", "rollout.n=2", "cluster.workers_per_node=4"], "data.train_batch_size", "2 seq"),
        (["actor.max_tokens_per_micro_batch=1023"], "actor.max_tokens_per_micro_batch", "1024"),
        (["reference.max_tokens_per_micro_batch=9"], "reference.max_tokens_per_micro_batch", "1024"),
        (["actor.mini_batch_size=100"], "actor.mini_batch_size", "does not divide"),
        (["actor.mini_batch_size=512"], "actor.mini_batch_size", "is larger than"),
        (["rollout.n=1"], "rollout.n", "every advantage would be 0"),
        (["rollout.temperature=0"], "rollout.temperature", "every advantage would be 0"),
        (["algorithm.name=rloo", "rollout.n=1"], "rollout.n", "every advantage would be 0"),
        (["algorithm.name=remax", "rollout.temperature=0"], "rollout.temperature", "nothing would be explored"),
        (["reward.overlong_buffer=513"], "reward.overlong_buffer", "longer than the longest response"),
        (["actor.rollout_correction.importance=token", "rollout.top_p=0.9"], "actor.rollout_correction", "cut"),
        (
            ["actor.rollout_correction.mask=token", "actor.rollout_correction.mask_lower=3"],
            "actor.rollout_correction.mask_lower",
            "nothing lies between",
        ),
        (["rollout.tp=3", "cluster.workers_per_node=2"], "rollout.tp", "2 workers cannot be divided"),
        (["rollout.engine=hf", "rollout.tp=2", "cluster.workers_per_node=2"], "rollout.engine", "whole models only"),
        (
            ["actor.mini_batch_size=1", "rollout.n=2", "cluster.workers_per_node=8"],
            "actor.mini_batch_size",
            "fewer than the 8 DP ranks",
        ),
        (["rollout.val.top_k=0"], "rollout.val.top_k", "no token to sample"),
        (["rollout.max_num_batched_tokens=8"], "rollout.max_num_batched_tokens", "at least one token"),
        (["trainer.loggers=[file,console,file]"], "trainer.loggers", "file named twice"),
        (["trainer.export_dir=m"], "trainer.export_dir", "overwrite"),
        ([*PPO, "critic.max_tokens_per_micro_batch=9"], "critic.max_tokens_per_micro_batch", "1024"),
        ([*PPO, "critic.mini_batch_size=100"], "critic.mini_batch_size", "does not divide"),
        ([*PPO, "trainer.critic_warmup=5", "trainer.total_steps=5"], "trainer.critic_warmup", "leave none"),
        ([*PPO, "trainer.export_critic_dir=m"], "trainer.export_critic_dir", "overwrite"),
        ([*PPO, "critic.path=c", "trainer.export_critic_dir=c"], "trainer.export_critic_dir", "critic.path"),
        ([*PPO, "trainer.export_critic_dir=out"], "trainer.export_critic_dir", "one folder"),
        ([*PPO, "rollout.temperature=0"], "rollout.temperature", "nothing would be explored"),
    ],
)
def test_what_cannot_work_is_a_problem(overrides, where, what):
    problems, _ = check(*overrides)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{where}: ")
    assert what in problems[0]
    assert "-> " in problems[0], "says what to do"


def test_problems_come_together():
    problems, _ = check("rollout.n=1", "rollout.temperature=0", "actor.mini_batch_size=7", "model.path=")
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.use_kl_loss=false"], ["not loaded", "actor.use_kl_loss=true"]),
        (["algorithm.kl_in_reward=true"], ["counts twice", "algorithm.kl_in_reward"]),
        (["actor.kl_loss_coef=0"], ["only measured", "actor.kl_loss_coef"]),
        (["actor.use_kl_loss=false", "algorithm.kl_in_reward=true", "algorithm.kl_coef=0"], ["algorithm.kl_coef"]),
        (["actor.kl_loss_type=k1"], ["actor.kl_loss_type=low_var_kl"]),
        (["rollout.top_p=0.9"], ["rollout.top_p=1"]),
        (["rollout.val.n=4"], ["rollout.val.temperature"]),
        (["trainer.val_every=5"], ["data.val_files"]),
        (["trainer.total_steps=5", "trainer.total_epochs=2"], ["trainer.total_epochs=2", "is not used"]),
        (["trainer.export_dir=null"], ["not kept", "trainer.save_every"]),
        (["actor.optimizer.lr=0"], ["nothing is learnt"]),
        (["actor.optimizer.min_lr_ratio=0.1"], ["actor.optimizer.schedule"]),
        (
            ["trainer.total_steps=5", "actor.mini_batch_size=128", "actor.optimizer.warmup_steps=10"],
            ["10 updates", "actor.optimizer.warmup_steps"],
        ),
        (
            ["algorithm.name=dr_grpo", "actor.loss_aggregation=token-mean"],
            ["actor.loss_aggregation=seq-mean-token-sum-norm", "token-mean here"],
        ),
        (["algorithm.name=dapo", "actor.use_kl_loss=false"], ["reward.overlong_buffer=102"]),
        (
            ["algorithm.name=gspo", "actor.clip_ratio_high=0.2"],
            ["actor.clip_ratio_high=0.0004", "0.2 here"],
        ),
        (["algorithm.name=reinforce++"], ["rollout.n=1"]),
        (["algorithm.name=remax", "rollout.n=2", "algorithm.norm_adv_by_std=false"], ["algorithm.norm_adv_by_std"]),
        (["actor.clip_ratio_high=0.1"], ["actor.clip_ratio_high", "actor.clip_ratio_low"]),
        (["algorithm.kl_target=0.2"], ["algorithm.kl_in_reward", "algorithm.kl_target"]),
        (["algorithm.max_generation_batches=3"], ["algorithm.dynamic_sampling"]),
    ],
)
def test_what_may_surprise_is_a_note_with_its_key(overrides, words):
    problems, notes = check(*overrides)
    assert problems == []
    assert len(notes) == 1, notes
    for word in words:
        assert word in notes[0]


def test_supervised_training_names_the_keys_it_does_not_use():
    problems, notes = check("algorithm.name=sft", "rollout.n=4", "algorithm.kl_coef=1", "data.val_files=v")
    assert problems == []
    (note,) = notes
    for key in ("rollout.n", "algorithm.kl_coef", "data.val_files", "actor.use_kl_loss"):
        assert key in note


def test_supervised_training_is_not_held_to_the_rules_of_a_rollout():
    assert check("algorithm.name=sft", "rollout.n=1", "rollout.temperature=0")[0] == []
    problems, _ = check("algorithm.name=sft", "data.train_batch_size=3", "cluster.workers_per_node=4")
    assert len(problems) == 1, "rows count, not samples"


def test_layout_and_reference():
    config = load_config(None, ["actor.layout.tp=2", "cluster.nodes=2", "cluster.workers_per_node=4"])
    assert train_layout(config) == Layout(tp=2, dp=4)
    assert not needs_reference(config)
    assert needs_reference(load_config(None, ["algorithm.kl_in_reward=true"]))
    assert not needs_reference(load_config(None, ["actor.use_kl_loss=true", "algorithm.name=sft"]))


def test_the_critic_follows_the_actor_in_memory_unless_told_otherwise():
    config = load_config(None, ["actor.recompute=full", "actor.offload_optimizer=true"])
    assert recompute(config, "actor") == recompute(config, "critic") == "full"
    assert offload(config, "actor") == offload(config, "critic")
    assert offload(config, "actor") == {"optimizer": True, "gradients": True, "parameters": False}
    own = ["critic.recompute=none", "critic.offload_optimizer=false", "critic.offload_parameters=true"]
    config = load_config(None, ["actor.recompute=full", "actor.offload_optimizer=true", *own])
    assert (recompute(config, "actor"), recompute(config, "critic")) == ("full", "none")
    assert offload(config, "critic") == {"optimizer": False, "gradients": True, "parameters": True}
    assert offload(config, "actor")["parameters"] is False  # the rollout serves from them


def test_supervised_training_has_no_phase_to_leave_the_gpu_in():
    _, notes = check("algorithm.name=sft", "actor.use_kl_loss=false", "actor.offload_optimizer=true")
    assert notes == ["supervised training does not use actor.offload_optimizer"]
