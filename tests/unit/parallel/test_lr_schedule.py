import math

import pytest

from megaverl.config.schema import OptimizerConfig
from megaverl.parallel.lr_schedule import learning_rate


def rates(total, **settings):
    config = OptimizerConfig(lr=2.0, **settings)
    return [learning_rate(config, update, total) for update in range(total)]


def test_constant_without_warm_up():
    assert rates(3) == [2.0, 2.0, 2.0]


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_by_equal_amounts_to_its_floor_after_the_last_update():
    found = rates(12, warmup_steps=2, schedule="linear", min_lr_ratio=0.1)
    assert found[:2] == [1.0, 2.0]
    expected = [2.0 - 1.8 * i / 10 for i in range(10)]
    assert found[2:] == pytest.approx(expected)


def test_cosine_is_half_way_in_the_middle_and_stays_at_its_floor():
    config = OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.5)
    assert learning_rate(config, 0, 10) == 2.0
    assert learning_rate(config, 5, 10) == pytest.approx(1.5)
    assert learning_rate(config, 2, 10) == pytest.approx(1.0 + 0.5 * (1 + math.cos(math.pi * 0.2)))
    assert learning_rate(config, 10, 10) == learning_rate(config, 99, 10) == pytest.approx(1.0)


def test_a_run_shorter_than_its_warm_up_never_reaches_the_peak():
    assert rates(2, warmup_steps=8, schedule="cosine") == [0.25, 0.5]
