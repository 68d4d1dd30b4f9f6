"""Metric dictionaries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megaverl.observe.metrics import flatten, non_finite, reduce_metrics, repeatable, spread


def test_flatten_joins_names_and_unpacks_scalars():
    nested = {"actor": {"lr": np.float64(1e-6), "steps": {"n": torch.tensor(3)}}, "ok": True}
    flat = flatten(nested)
    assert flat == {"actor/lr": 1e-6, "actor/steps/n": 3, "ok": 1}
    assert [type(value) for value in flat.values()] == [float, int, int]


def test_flatten_refuses_what_is_no_number_and_what_collides():
    with pytest.raises(TypeError, match="a metric must be a number"):
        flatten({"a": "text"})
    with pytest.raises(ValueError, match="two metrics are named a/b"):
        flatten({"a": {"b": 1}, "a/b": 2})
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        flatten({"a": torch.zeros(2)})


def test_reduction_goes_by_the_name():
    parts = [
        {"a/max": 1.0, "a/min": 1.0, "a/sum": 1.0, "a/mean": 1.0},
        {"a/max": 3, "a/min": 3, "a/sum": 3, "a/mean": 3},
    ]
    assert reduce_metrics(parts) == {"a/max": 3, "a/min": 1, "a/sum": 4, "a/mean": 2}


def test_reduction_by_weight_equals_the_mean_over_all_items():
    rng = np.random.default_rng(0)
    groups = [rng.normal(size=n) for n in (1, 5, 17)]
    parts = [{"loss": float(group.mean())} for group in groups]
    merged = reduce_metrics(parts, weights=[len(group) for group in groups])
    assert merged["loss"] == pytest.approx(np.concatenate(groups).mean(), rel=1e-12)


def test_a_name_that_some_parts_lack_is_reduced_over_the_others():
    assert reduce_metrics([{"a": 1.0}, {"a": 3.0, "b": 5.0}], weights=[1, 3]) == {"a": 2.5, "b": 5.0}
    assert reduce_metrics([]) == {}


def test_a_name_that_only_contains_max_is_a_mean():
    assert reduce_metrics([{"softmax": 1.0}, {"softmax": 2.0}]) == {"softmax": 1.5}
    assert reduce_metrics([{"length_max": 1.0}, {"length_max": 2.0}]) == {"length_max": 2.0}


def test_reduction_refuses_bad_weights():
    with pytest.raises(ValueError, match="2 weights for 1"):
        reduce_metrics([{"a": 1}], weights=[1, 2])
    with pytest.raises(ValueError, match="weights of a sum to 0"):
        reduce_metrics([{"a": 1}], weights=[0])


def test_spread_and_non_finite():
    assert spread("score", [1, 2, 6]) == {"score/mean": 3.0, "score/max": 6.0, "score/min": 1.0}
    assert spread("score", []) == {}
    assert non_finite({"a": 1.0, "b": math.nan, "c": -math.inf}) == ["b", "c"]


def test_what_repeats_is_told_from_what_the_machine_decides():
    row = {"actor/lr": 1.0, "memory/train_peak": 2.0, "handoff/seconds": 3.0, "handoff/bytes_moved": 4.0, "perf/x": 5.0}
    assert repeatable(row) == {"actor/lr": 1.0, "handoff/bytes_moved": 4.0}
