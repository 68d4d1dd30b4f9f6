"""Advice when one of the four health metrics leaves its range."""

from __future__ import annotations

import re

import pytest

from megaverl.config.fields import all_fields
from megaverl.observe.health import HEALTH, HealthMonitor

WELL = {
    "critic/score/mean": 0.5,
    "critic/score/max": 1,
    "critic/score/min": 0,
    "actor/kl_loss": 0.01,
    "actor/ppo_kl": 0.0,
    "actor/entropy": 0.8,
    "actor/pg_clipfrac": 0.0,
}


def test_a_run_that_is_well_hears_nothing():
    monitor = HealthMonitor()
    assert [monitor.check(WELL, step) for step in range(100)] == [[]] * 100
    assert monitor.check({"train/loss": 0.01, "actor/entropy": 0.001}, 0) == [], "supervised steps may be sure"


@pytest.mark.parametrize(
    ("name", "value", "label", "key"),
    [
        ("critic/score/mean", 0.0, "reward", "reward.function.path"),
        ("critic/score/mean", 1.0, "reward", "data.train_files"),
        ("actor/kl_loss", 2.0, "KL to the reference", "actor.kl_loss_coef"),
        ("actor/ppo_kl", 0.5, "KL of one update", "actor.optimizer.lr"),
        ("actor/ppo_kl", -0.5, "KL of one update", "actor.optimizer.lr"),
        ("actor/entropy", 0.001, "entropy", "actor.entropy_coef"),
        ("actor/entropy", 9.0, "entropy", "rollout.temperature"),
        ("actor/pg_clipfrac", 0.6, "clip fraction", "actor.mini_batch_size"),
        ("actor/entropy", float("nan"), "entropy", "actor.optimizer.lr"),
    ],
)
def test_each_metric_out_of_its_range_gives_one_line_with_a_key(name, value, label, key):
    (line,) = HealthMonitor().check(WELL | {name: value}, 1)
    assert line.startswith(f"{label} ")
    assert key in line
    assert "\n" not in line


def test_all_four_metrics_are_watched_and_every_named_key_exists():
    text = " ".join(f"{health.label} {health.advice_low} {health.advice_high}" for health in HEALTH)
    for metric in ("reward", "KL", "entropy", "clip fraction"):
        assert metric in text
    keys = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", text))
    assert keys
    assert keys <= set(all_fields())


def test_the_advice_is_not_repeated_every_step():
    monitor = HealthMonitor(every=20)
    said = [step for step in range(60) if monitor.check(WELL | {"actor/entropy": 0.0}, step)]
    assert said == [0, 20, 40]


def test_each_metric_has_its_own_turn():
    monitor = HealthMonitor(every=20)
    assert len(monitor.check(WELL | {"actor/entropy": 0.0}, 0)) == 1
    (line,) = monitor.check(WELL | {"actor/entropy": 0.0, "actor/pg_clipfrac": 0.9}, 1)
    assert line.startswith("clip fraction")


def test_scores_on_another_scale_are_not_judged():
    scores = {"critic/score/mean": -3.0, "critic/score/max": 4.0, "critic/score/min": -9.0}
    assert HealthMonitor().check(WELL | scores, 0) == []
