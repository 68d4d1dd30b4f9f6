"""Which sequence goes where: micro-batches by token count, equal token sums over data parallel ranks.

All functions are pure and deterministic: the same lengths give the same answer on every rank. Sequences are named
by their position in the input. Only lengths matter here, so a caller may pass any positive integer cost instead.

Balancing is longest-first greedy assignment (LPT, Graham 1969) followed by moves and swaps from the heaviest to a
lighter part; packing is best-fit decreasing (at most 11/9 of the fewest bins, Johnson 1974) followed by the same.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from megaverl.errors import Problem, UserError


@dataclass(frozen=True)
class MiniBatch:
    """The sequences of one optimizer update.

    Attributes:
        epoch: pass over the batch that it belongs to, from 0.
        number: which mini-batch of the batch it is, from 0; the same number is the same sequences in every epoch.
        ranks: for each data parallel rank, the sequences that it trains on; none is empty.
        sequences: number of sequences over all ranks.
    """

    epoch: int
    number: int
    ranks: tuple[tuple[int, ...], ...]
    sequences: int


@dataclass(frozen=True)
class UpdatePlan:
    """All updates on one batch.

    Attributes:
        mini_batches: the updates in their order, all epochs.
        home: for each data parallel rank, all sequences that it ever trains on, ascending. A sequence has one home for
            the whole step, so log-probabilities computed there need not move.
    """

    mini_batches: tuple[MiniBatch, ...]
    home: tuple[tuple[int, ...], ...]

    @property
    def single_update(self) -> bool:
        """True when the batch is used for exactly one update (old and new log-probabilities are then the same)."""
        return len(self.mini_batches) == 1

    def for_rank(self, rank: int) -> list[list[int]]:
        """The sequences of each update on this data parallel rank."""
        return [list(m.ranks[rank]) for m in self.mini_batches]


def micro_batches(lengths: Sequence[int], max_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Cuts sequences into few, balanced micro-batches of at most ``max_tokens`` tokens each.

    Args:
        lengths: tokens of each sequence, all >= 1.
        max_tokens: limit of a micro-batch.
        at_least: smallest number of micro-batches (ranks that must do the same number agree on their largest).

    Returns:
        Positions of the sequences of each micro-batch (ascending), every sequence exactly once. The heaviest
        micro-batch comes first, so that a lack of memory shows at once. No sequences give no micro-batches.

    Raises:
        UserError: a sequence alone is longer than ``max_tokens``.
        ValueError: a length below 1, or ``at_least`` above the number of sequences.
    """
    _check_lengths(lengths)
    _refuse_too_long(lengths, max_tokens)
    at_least = max(1, at_least)
    if at_least > max(1, len(lengths)):
        raise ValueError(f"{len(lengths)} sequences cannot fill {at_least} micro-batches")
    if not lengths:
        return []

    bins = _best_fit_decreasing(lengths, max_tokens)
    found = None
    for count in range(max(len(bins), at_least), at_least - 1, -1):
        attempt = balance(lengths, count)
        if max(_loads(lengths, attempt)) > max_tokens:
            break
        found = attempt
    if found is None:
        _split_heaviest_until(bins, lengths, at_least)
        found = _level(bins, lengths, keep_counts=False)
    return sorted((sorted(part) for part in found), key=lambda part: (-sum(lengths[i] for i in part), part))


def unit_micro_batches(lengths: Sequence[int], units: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`micro_batches` for sequences of which those with the same number in ``units`` stay together, in their order.

    Raises:
        UserError: a unit alone has more than ``max_tokens`` tokens.
    """
    members: dict[int, list[int]] = {}
    for i, unit in enumerate(units):
        members.setdefault(unit, []).append(i)
    own = list(members.values())
    cut = micro_batches([sum(lengths[i] for i in sequences) for sequences in own], max_tokens)
    return [[i for number in part for i in own[number]] for part in cut]


def balance(lengths: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Divides sequences into ``parts`` parts with close token sums.

    Args:
        lengths: tokens of each sequence, all >= 1.
        parts: number of parts.
        equal_counts: also give every part the same number of sequences (to within one when it does not divide).

    Returns:
        Positions of the sequences of each part (ascending), every sequence exactly once; parts ordered by their first
        sequence. No part is empty when there are at least ``parts`` sequences; else the last ones are.

    Raises:
        ValueError: ``parts`` or a length below 1.
    """
    _check_lengths(lengths)
    if parts < 1:
        raise ValueError(f"cannot divide sequences into {parts} parts")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assigned: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    if equal_counts:
        # one sequence for each part per round: the longest of the round goes to the lightest part
        for start in range(0, len(lengths), parts):
            taken = [heapq.heappop(heap) for _ in longest_first[start : start + parts]]
            for (load, part), i in zip(taken, longest_first[start : start + parts], strict=True):
                assigned[part].append(i)
                heapq.heappush(heap, (load + lengths[i], part))
    else:
        for i in longest_first:
            load, part = heap[0]
            assigned[part].append(i)
            heapq.heapreplace(heap, (load + lengths[i], part))
    levelled = [sorted(part) for part in _level(assigned, lengths, keep_counts=equal_counts)]
    return sorted(levelled, key=lambda part: (not part, part))


def split_mini_batches(groups: Sequence[int], prompts_per_mini_batch: int) -> list[list[int]]:
    """Cuts a batch into mini-batches of whole groups, in the order in which the groups first appear.

    Args:
        groups: number of the prompt of each sequence, any integers.
        prompts_per_mini_batch: groups per mini-batch; the last mini-batch holds what remains.

    Returns:
        Positions of the sequences of each mini-batch, ascending.
    """
    if prompts_per_mini_batch < 1:
        raise ValueError(f"a mini-batch of {prompts_per_mini_batch} prompts")
    order = {group: rank for rank, group in enumerate(dict.fromkeys(groups))}
    result: list[list[int]] = [[] for _ in range(-(-len(order) // prompts_per_mini_batch))]
    for i, group in enumerate(groups):
        result[order[group] // prompts_per_mini_batch].append(i)
    return result


def plan_update(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    dp: int,
    mini_batch_size: int | None = None,
    epochs: int = 1,
    seed: int = 0,
) -> UpdatePlan:
    """Plans all optimizer updates on one batch.

    The prompts are shuffled and cut into mini-batches once; every epoch visits the same mini-batches, the first in
    their order, later ones in an order of their own. So each sequence stays on one data parallel rank for the step.

    Args:
        lengths: tokens of each sequence.
        groups: number of the prompt of each sequence.
        dp: data parallel ranks.
        mini_batch_size: prompts per update over all ranks; None is the whole batch.
        epochs: passes over the batch.
        seed: of the shuffling; derive it from the run's seed and the step.

    Raises:
        UserError: a mini-batch has fewer sequences than there are data parallel ranks.
        ValueError: ``lengths`` and ``groups`` of different size, no sequences, or a count below 1.
    """
    if len(lengths) != len(groups) or not groups or dp < 1 or epochs < 1:
        raise ValueError(f"{len(lengths)} lengths, {len(groups)} groups, dp {dp}, epochs {epochs}")
    rng = random.Random(seed)
    names = list(dict.fromkeys(groups))
    rng.shuffle(names)
    place = {group: n for n, group in enumerate(names)}
    order = sorted(range(len(groups)), key=lambda i: (place[groups[i]], i))
    cut = split_mini_batches([groups[i] for i in order], mini_batch_size or len(names))
    shares = _spread([sorted(order[i] for i in members) for members in cut], lengths, dp)
    home = tuple(tuple(sorted(i for share in shares for i in share[rank])) for rank in range(dp))
    return UpdatePlan(_epochs(shares, epochs, rng), home)


def plan_units(plan: UpdatePlan, held: Sequence[Sequence[int]], trained: Sequence[Sequence[int]]) -> UpdatePlan:
    """A plan of sequences from a plan of units.

    Args:
        plan: its numbers name units.
        held: unit -> the sequences that its rank holds.
        trained: unit -> those of them that an update trains on.
    """

    def expand(units: Sequence[int], members: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(i for unit in units for i in members[unit])

    updates = []
    for m in plan.mini_batches:
        ranks = tuple(expand(units, trained) for units in m.ranks)
        updates.append(MiniBatch(m.epoch, m.number, ranks, sum(map(len, ranks))))
    return UpdatePlan(tuple(updates), tuple(expand(units, held) for units in plan.home))


def plan_at_home(
    home: Sequence[Sequence[int]], lengths: Sequence[int], *, mini_batches: int, epochs: int = 1, seed: int = 0
) -> UpdatePlan:
    """Plans updates on a batch whose sequences have their homes already (those that another model trains on).

    Each data parallel rank's sequences are shuffled and cut into ``mini_batches`` parts of equal count and close token
    sums; part n of all ranks is mini-batch n. A prompt's sequences may fall into different mini-batches, so this is for
    losses that do not compare them. Epochs are those of `plan_update`.

    Args:
        home: for each data parallel rank, its sequences.
        lengths: tokens of each sequence.
        mini_batches: updates in an epoch.
        epochs: passes over the batch.
        seed: of the shuffling.

    Raises:
        UserError: a rank has fewer sequences than there are mini-batches.
        ValueError: a count below 1.
    """
    if mini_batches < 1 or epochs < 1 or not home:
        raise ValueError(f"{mini_batches} mini-batches, {epochs} epochs, {len(home)} data parallel ranks")
    fewest = min(map(len, home))
    if fewest < mini_batches:
        raise UserError(
            Problem(
                f"a data parallel rank has {fewest} sequences, too few for {mini_batches} mini-batches",
                where="critic.mini_batch_size",
                fix="raise it, or data.train_batch_size, or take fewer workers",
            )
        )
    rng = random.Random(seed)
    by_rank = []
    for own in home:
        order = rng.sample(list(own), len(own))
        parts = balance([lengths[i] for i in order], mini_batches, equal_counts=True)
        by_rank.append([tuple(sorted(order[i] for i in part)) for part in parts])
    shares = [tuple(parts[n] for parts in by_rank) for n in range(mini_batches)]
    return UpdatePlan(_epochs(shares, epochs, rng), tuple(tuple(own) for own in home))


def _epochs(shares: Sequence[tuple[tuple[int, ...], ...]], epochs: int, rng: random.Random) -> tuple[MiniBatch, ...]:
    """The mini-batches in their order, then again in other orders."""
    numbers = list(range(len(shares)))
    updates = []
    for epoch in range(epochs):
        if epoch:
            rng.shuffle(numbers)
        updates += [MiniBatch(epoch, n, shares[n], sum(map(len, shares[n]))) for n in numbers]
    return tuple(updates)


def _check_lengths(lengths: Sequence[int]) -> None:
    for i, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {i} has {length} tokens; a sequence has at least one")


def _refuse_too_long(lengths: Sequence[int], max_tokens: int) -> None:
    long = [i for i, length in enumerate(lengths) if length > max_tokens]
    if not long:
        return
    shown = ", ".join(f"sequence {i} ({lengths[i]} tokens)" for i in long[:5])
    more = f" and {len(long) - 5} more" if len(long) > 5 else ""
    raise UserError(
        Problem(
            what=f"longer than a micro-batch of {max_tokens} tokens: {shown}{more}",
            where="max_tokens_per_micro_batch",
            fix=f"raise it to at least {max(lengths[i] for i in long)}, or shorten prompts and responses",
        )
    )


def _loads(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sequence, longest first, into the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted (tokens free, bin)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = capacity, len(bins)
            bins.append([])
        bins[number].append(i)
        insort(room, (free - lengths[i], number))
    return bins


def _split_heaviest_until(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Halves the heaviest bin that has two sequences or more until there are ``count`` bins."""
    while len(bins) < count:
        heaviest = max(
            (b for b in range(len(bins)) if len(bins[b]) > 1), key=lambda b: sum(lengths[i] for i in bins[b])
        )
        members = bins[heaviest]
        halves = balance([lengths[i] for i in members], 2)
        bins[heaviest] = [members[i] for i in halves[0]]
        bins.append([members[i] for i in halves[1]])


def _level(parts: Sequence[Sequence[int]], lengths: Sequence[int], *, keep_counts: bool) -> list[list[int]]:
    """Moves and swaps sequences from the heaviest part to lighter ones while that lowers the heaviest.

    Neither part of a pair ends up as heavy as the heavier one was, so no limit that held before is broken, and a part
    never loses its last sequence (that would only swap the two loads). The number of steps is bounded, a few per
    part: the result is good, not optimal.
    """
    members = [sorted((lengths[i], i) for i in part) for part in parts]
    loads = [sum(length for length, _ in part) for part in members]
    for _ in range(4 * len(parts)):
        heavy = max(range(len(loads)), key=lambda p: (loads[p], -p))
        for light in sorted(range(len(loads)), key=lambda p: (loads[p], p))[:8]:
            exchange = _best_exchange(members[heavy], members[light], loads[heavy] - loads[light], keep_counts)
            if exchange is not None:
                break
        else:
            break
        given, taken = exchange
        for item, source, target in ((given, heavy, light), (taken, light, heavy)):
            if item is not None:
                members[source].remove(item)
                insort(members[target], item)
                loads[source] -= item[0]
                loads[target] += item[0]
    return [[i for _, i in part] for part in members]


_Item = tuple[int, int]  # (tokens, sequence)


def _best_exchange(
    heavy: list[_Item], light: list[_Item], gap: int, keep_counts: bool
) -> tuple[_Item, _Item | None] | None:
    """What to give from ``heavy`` to ``light``, and to take back, so that the gap shrinks most; None if it cannot."""
    best, best_gap = None, gap
    for given in heavy:
        if not keep_counts and abs(gap - 2 * given[0]) < best_gap:
            best, best_gap = (given, None), abs(gap - 2 * given[0])
        # the ideal partner is shorter by half the gap; its two neighbours in the sorted list are the best there are
        at = bisect_left(light, (given[0] - gap // 2, -1))
        for taken in light[max(0, at - 1) : at + 1]:
            left = abs(gap - 2 * (given[0] - taken[0]))
            if left < best_gap:
                best, best_gap = (given, taken), left
    return best


def _spread(cut: Sequence[Sequence[int]], lengths: Sequence[int], dp: int) -> list[tuple[tuple[int, ...], ...]]:
    """Shares every mini-batch out to the ranks; the heavier shares go to the ranks with the fewest tokens so far."""
    smallest = min(map(len, cut))
    if smallest < dp:
        raise UserError(
            Problem(
                what=f"a mini-batch of {smallest} sequences cannot be shared by {dp} data parallel ranks",
                where="actor.mini_batch_size",
                fix="raise it, rollout.n or data.train_batch_size (which it should divide), or use fewer workers",
            )
        )
    totals = [0] * dp
    shares = []
    for members in cut:
        parts = [[members[i] for i in part] for part in balance([lengths[i] for i in members], dp)]
        loads = _loads(lengths, parts)
        ranks: list[tuple[int, ...]] = [()] * dp
        by_load = sorted(range(dp), key=lambda p: (-loads[p], p))
        by_total = sorted(range(dp), key=lambda r: (totals[r], r))
        for part, rank in zip(by_load, by_total, strict=True):
            ranks[rank] = tuple(parts[part])
            totals[rank] += loads[part]
        shares.append(tuple(ranks))
    return shares
