"""Sequences that stay together: micro-batches, pipelines and plans of units."""

from __future__ import annotations

import random

import pytest

from megaverl.data.packing import plan_units, plan_update, unit_micro_batches
from megaverl.errors import UserError
from megaverl.parallel.micro_batches import fill_pipeline_with_units

LENGTHS = [random.Random(1).randint(1, 40) for _ in range(24)]
UNITS = [i // 2 for i in range(24)]


def is_cut_of_pairs(groups):
    assert sorted(i for group in groups for i in group) == list(range(24))
    for group in groups:
        assert [i % 2 for i in group] == [0, 1] * (len(group) // 2)
        assert all(group[k] + 1 == group[k + 1] for k in range(0, len(group), 2))
    return True


def test_micro_batches_hold_whole_pairs_within_the_limit():
    groups = unit_micro_batches(LENGTHS, UNITS, 90)
    assert is_cut_of_pairs(groups)
    assert len(groups) > 1
    assert all(sum(LENGTHS[i] for i in group) <= 90 for group in groups)
    with pytest.raises(UserError):
        unit_micro_batches(LENGTHS, UNITS, max(LENGTHS))


@pytest.mark.parametrize("multiple", [2, 4, 7])
def test_a_pipeline_is_filled_without_parting_a_pair(multiple):
    groups = fill_pipeline_with_units(unit_micro_batches(LENGTHS, UNITS, 200), LENGTHS, UNITS, multiple)
    assert len(groups) % multiple == 0
    assert is_cut_of_pairs([group for group in groups if group])


def test_a_plan_of_units_holds_more_than_it_trains_on():
    held = [(i, i + 12) for i in range(12)]
    plan = plan_units(plan_update([5] * 12, range(12), dp=3), held, [(i,) for i in range(12)])
    assert sorted(i for home in plan.home for i in home) == list(range(24))
    (update,) = plan.mini_batches
    assert update.sequences == 12
    for rank, home in enumerate(plan.home):
        assert set(update.ranks[rank]) == {i for i in home if i < 12}
