"""Packing: properties that must always hold, and quality against brute force on small inputs."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.packing import (
    _best_exchange,
    _split_heaviest_until,
    balance,
    micro_batches,
    plan_at_home,
    plan_update,
    split_mini_batches,
)
from megaverl.errors import UserError

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)
SMALL = st.lists(st.integers(1, 20), min_size=1, max_size=7)


def sums(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def everything_once(parts, count):
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert all(part == sorted(part) for part in parts)


def all_assignments(count, parts):
    """Every way to give ``count`` sequences to ``parts`` parts."""
    for choice in itertools.product(range(parts), repeat=count):
        yield [[i for i in range(count) if choice[i] == p] for p in range(parts)]


def fewest_bins(lengths, capacity):
    for count in range(1, len(lengths) + 1):
        if any(max(sums(lengths, a)) <= capacity for a in all_assignments(len(lengths), count)):
            return count
    raise AssertionError("no packing")


@settings(deadline=None)
@given(LENGTHS, st.integers(60, 300), st.integers(1, 5))
def test_micro_batches_hold_every_sequence_once_within_the_limit(lengths, limit, at_least):
    if at_least > max(1, len(lengths)):
        with pytest.raises(ValueError, match="cannot fill"):
            micro_batches(lengths, limit, at_least=at_least)
        return
    parts = micro_batches(lengths, limit, at_least=at_least)
    everything_once(parts, len(lengths))
    assert all(parts), "no micro-batch is empty"
    assert all(s <= limit for s in sums(lengths, parts))
    assert len(parts) >= at_least or not lengths
    assert sums(lengths, parts) == sorted(sums(lengths, parts), reverse=True)
    assert parts == micro_batches(list(lengths), limit, at_least=at_least)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(60, 300))
def test_micro_batches_are_few(lengths, limit):
    # best fit decreasing needs at most 11/9 of the optimum + 1, and the optimum is at least sum / limit and the count
    # of sequences of more than half the limit; the volume bound of any-fit packings is twice the sum
    count = len(micro_batches(lengths, limit))
    assert count <= max(1, -(-2 * sum(lengths) // limit))


@settings(max_examples=60, deadline=None)
@given(SMALL.filter(lambda x: len(x) <= 6), st.integers(20, 45))
def test_micro_batches_against_brute_force(lengths, limit):
    best = fewest_bins(lengths, limit)
    assert len(micro_batches(lengths, limit)) <= (11 * best + 6) / 9


def test_micro_batches_are_balanced():
    rng = random.Random(1)
    lengths = [rng.randint(20, 400) for _ in range(200)]
    parts = micro_batches(lengths, 4096)
    loads = sums(lengths, parts)
    assert len(parts) == -(-sum(lengths) // 4096)
    assert max(loads) - min(loads) <= 2


@pytest.mark.parametrize(
    ("lengths", "limit", "count"),
    [
        ([6, 6, 4, 4], 10, 2),
        ([15, 6, 9, 4, 7, 6], 24, 2),  # 15+9 and 7+6+6+4: only the best fit finds it
        ([11, 21, 14, 10, 10, 5], 25, 3),
        ([2, 5, 9, 15, 14, 15], 30, 2),
    ],
)
def test_a_tight_packing_is_found_where_equal_division_does_not_fit(lengths, limit, count):
    assert len(micro_batches(lengths, limit)) == count


def test_more_micro_batches_than_needed_are_made_by_splitting_the_heaviest():
    lengths, bins = [20, 5, 4, 3, 3], [[0, 1], [2, 3, 4]]
    _split_heaviest_until(bins, lengths, 4)
    assert sorted(bins) == [[0], [1], [2], [3, 4]]


def test_sequences_that_are_too_long_are_named_all_at_once():
    with pytest.raises(UserError) as error:
        micro_batches([5, 11, 3, 14], 10)
    text = str(error.value)
    assert "sequence 1 (11 tokens)" in text
    assert "sequence 3 (14 tokens)" in text
    assert "at least 14" in text
    with pytest.raises(UserError, match="and 3 more"):
        micro_batches([9] * 8, 8)


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        micro_batches([3, 0], 10)
    with pytest.raises(ValueError, match="sequence 0 has -1 tokens"):
        balance([-1], 1)
    with pytest.raises(ValueError, match="0 parts"):
        balance([1], 0)


def test_no_sequences_give_no_micro_batches():
    assert micro_batches([], 8) == []


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_balance_holds_every_sequence_once_and_leaves_no_part_empty(lengths, parts, equal):
    result = balance(lengths, parts, equal_counts=equal)
    assert len(result) == parts
    everything_once(result, len(lengths))
    assert sum(1 for part in result if not part) == max(0, parts - len(lengths))
    if equal:
        counts = [len(part) for part in result]
        assert max(counts) - min(counts) <= 1
    assert result == balance(list(lengths), parts, equal_counts=equal)


@settings(max_examples=80, deadline=None)
@given(SMALL, st.integers(2, 3))
def test_balance_against_brute_force(lengths, parts):
    best = min(max(sums(lengths, a)) for a in all_assignments(len(lengths), parts))
    worst = max(sums(lengths, balance(lengths, parts)))
    assert best <= worst <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9  # Graham's bound of LPT


@settings(max_examples=60, deadline=None)
@given(SMALL.filter(lambda x: len(x) % 2 == 0))
def test_balance_with_equal_counts_against_brute_force(lengths):
    half = len(lengths) // 2
    equal = [a for a in all_assignments(len(lengths), 2) if len(a[0]) == half]
    best = min(max(sums(lengths, a)) for a in equal)
    assert best <= max(sums(lengths, balance(lengths, 2, equal_counts=True))) <= best + max(lengths) / 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.lists(st.integers(1, 30), max_size=8), st.booleans())
def test_the_best_exchange_is_the_best_of_all(heavy, light, keep_counts):
    gap = sum(heavy) - sum(light)
    if gap <= 0:
        return
    moved = [] if keep_counts else heavy
    swapped = [h - x for h in heavy for x in light]
    possible = min([gap, *(abs(gap - 2 * d) for d in [*moved, *swapped])])
    numbered = [sorted((length, i) for i, length in enumerate(side)) for side in (heavy, light)]
    exchange = _best_exchange(*numbered, gap, keep_counts)
    if exchange is None:
        assert possible == gap
    else:
        (given_tokens, _), taken = exchange
        assert abs(gap - 2 * (given_tokens - (taken[0] if taken else 0))) == possible < gap


def test_swaps_improve_on_longest_first():
    lengths = [8, 7, 6, 5, 4]  # longest first alone ends at 17 against 13
    assert sorted(sums(lengths, balance(lengths, 2))) == [15, 15]


def test_balance_of_8192_sequences_is_close_and_fast():
    rng = random.Random(0)
    lengths = [min(4096, int(rng.lognormvariate(5.5, 1.0)) + 1) for _ in range(8192)]
    for equal in (False, True):
        seconds = []
        for _ in range(3):  # other processes share the machine: the best of three counts
            start = time.perf_counter()
            parts = balance(lengths, 64, equal_counts=equal)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.2
        loads = sums(lengths, parts)
        assert max(loads) - min(loads) <= 0.001 * max(loads)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 4))
def test_mini_batches_keep_groups_whole(groups, per_batch):
    parts = split_mini_batches(groups, per_batch)
    everything_once(parts, len(groups))
    owners = [{groups[i] for i in part} for part in parts]
    assert sum(map(len, owners)) == len(set(groups)), "no group is in two mini-batches"
    assert all(len(o) == per_batch for o in owners[:-1])
    assert all(1 <= len(o) <= per_batch for o in owners[-1:])


def test_mini_batches_follow_the_order_of_first_appearance():
    assert split_mini_batches([9, 9, 4, 9, 4, 1], 2) == [[0, 1, 2, 3, 4], [5]]
    with pytest.raises(ValueError, match="0 prompts"):
        split_mini_batches([1], 0)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.data())
def test_plan_uses_every_sequence_once_per_epoch(prompts, n, per_batch, epochs, seed, data):
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=prompts * n, max_size=prompts * n))
    groups = [i // n for i in range(prompts * n)]
    dp = data.draw(st.integers(1, min(n, 3)))  # every mini-batch has at least n sequences
    plan = plan_update(lengths, groups, dp=dp, mini_batch_size=per_batch, epochs=epochs, seed=seed)
    per_epoch = -(-prompts // per_batch)
    assert len(plan.mini_batches) == epochs * per_epoch
    assert plan.single_update == (epochs * per_epoch == 1)
    for epoch in range(epochs):
        updates = [m for m in plan.mini_batches if m.epoch == epoch]
        assert sorted(m.number for m in updates) == list(range(per_epoch))
        used = [i for m in updates for rank in m.ranks for i in rank]
        assert sorted(used) == list(range(len(lengths)))
    for m in plan.mini_batches:
        assert all(m.ranks)
        assert len(m.ranks) == dp
        assert m.sequences == sum(map(len, m.ranks))
        for rank in range(dp):
            assert set(m.ranks[rank]) <= set(plan.home[rank])
    assert sorted(i for home in plan.home for i in home) == list(range(len(lengths)))
    assert plan.for_rank(0) == [list(m.ranks[0]) for m in plan.mini_batches]
    assert plan == plan_update(lengths, groups, dp=dp, mini_batch_size=per_batch, epochs=epochs, seed=seed)


def test_plan_balances_each_update_and_the_whole_step():
    rng = random.Random(3)
    lengths = [rng.randint(10, 500) for _ in range(512)]
    plan = plan_update(lengths, [i // 8 for i in range(512)], dp=4, mini_batch_size=16, epochs=2, seed=5)
    for m in plan.mini_batches:
        loads = sums(lengths, m.ranks)
        assert max(loads) - min(loads) <= 2
    loads = sums(lengths, plan.home)
    assert max(loads) - min(loads) <= 4
    assert [m.number for m in plan.mini_batches[:4]] == [0, 1, 2, 3]


def test_plan_evens_out_over_mini_batches_what_one_cannot():
    # each mini-batch is one long and one short sequence: the ranks must take turns
    plan = plan_update([10, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], dp=2, mini_batch_size=1)
    assert sums([10, 1] * 4, plan.home) == [22, 22]


def test_later_epochs_visit_the_mini_batches_in_another_order():
    plan = plan_update([4] * 64, list(range(64)), dp=2, mini_batch_size=4, epochs=3, seed=0)
    orders = [[m.number for m in plan.mini_batches if m.epoch == e] for e in range(3)]
    assert orders[0] == list(range(16))
    assert orders[0] != orders[1] != orders[2]


def test_plan_depends_on_the_seed_and_on_nothing_else():
    lengths, groups = [4] * 64, [i // 2 for i in range(64)]
    plans = [plan_update(lengths, groups, dp=2, mini_batch_size=8, seed=s) for s in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_plan_refuses_a_mini_batch_that_leaves_a_rank_idle():
    with pytest.raises(UserError, match="1 sequences cannot be shared by 2"):
        plan_update([3, 3, 3], [0, 1, 2], dp=2, mini_batch_size=2)
    with pytest.raises(ValueError, match="0 groups"):
        plan_update([], [], dp=1)


def test_plan_at_home_keeps_homes_and_covers_every_epoch_once():
    lengths = [5, 9, 2, 7, 7, 3, 8, 4, 6, 1, 11, 2]
    home = ((0, 3, 4, 7, 9, 10), (1, 2, 5, 6, 8, 11))
    plan = plan_at_home(home, lengths, mini_batches=3, epochs=2, seed=4)
    assert plan.home == home
    assert [m.epoch for m in plan.mini_batches] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        visits = [m for m in plan.mini_batches if m.epoch == epoch]
        assert sorted(m.number for m in visits) == [0, 1, 2]
        for rank in (0, 1):
            assert sorted(i for m in visits for i in m.ranks[rank]) == list(home[rank])
            assert all(len(m.ranks[rank]) == 2 for m in visits)
    assert plan == plan_at_home(home, lengths, mini_batches=3, epochs=2, seed=4)
    whole = plan_at_home(home, lengths, mini_batches=1)
    assert whole.single_update
    assert whole.mini_batches[0].ranks == home


def test_plan_at_home_refuses_a_rank_with_too_few_sequences():
    with pytest.raises(UserError, match="1 sequences, too few for 2 mini-batches"):
        plan_at_home(((0, 1), (2,)), [1, 1, 1], mini_batches=2)
