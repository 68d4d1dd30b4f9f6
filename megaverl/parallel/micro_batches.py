"""How many micro-batches a pipeline needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def fill_pipeline(groups: Sequence[Sequence[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Micro-batches cut further until their number is a multiple of ``multiple``.

    The interleaved schedule of a virtual pipeline takes micro-batches in rounds of pp. The largest micro-batch of
    several sequences is cut in two as long as there is one; empty micro-batches fill up what is still missing. Each
    data parallel rank does so for itself: replicas need not run the same number.

    Args:
        groups: sequence numbers of each micro-batch.
        lengths: tokens of each sequence.

    Returns:
        The sequence numbers of each micro-batch; all of ``groups``, each once.
    """
    done = [list(group) for group in groups]
    while len(done) % multiple:
        size = [sum(lengths[i] for i in group) if len(group) > 1 else -1 for group in done]
        largest = max(range(len(done)), key=size.__getitem__)
        if size[largest] < 0:
            return done + [[] for _ in range(-len(done) % multiple)]
        done[largest : largest + 1] = _halves(done[largest], lengths)
    return done


def fill_pipeline_with_units(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], units: Sequence[int], multiple: int
) -> list[list[int]]:
    """`fill_pipeline` for sequences of which those with the same number in ``units`` stay together.

    Args:
        units: [sequences]; sequences of a unit stand side by side in their group.
    """
    members: dict[int, list[int]] = {}
    for sequence in (i for group in groups for i in group):
        members.setdefault(units[sequence], []).append(sequence)
    by_unit = [list(dict.fromkeys(units[i] for i in group)) for group in groups]
    size = {unit: sum(lengths[i] for i in own) for unit, own in members.items()}
    place = {unit: n for n, unit in enumerate(members)}
    named = list(members)
    filled = fill_pipeline([[place[u] for u in group] for group in by_unit], [size[u] for u in named], multiple)
    return [[i for n in group for i in members[named[n]]] for group in filled]


def _halves(group: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    for i in sorted(group, key=lambda i: -lengths[i]):
        halves[sum(lengths[j] for j in halves[0]) > sum(lengths[j] for j in halves[1])].append(i)
    if not halves[1]:  # sequences without tokens
        halves[1].append(halves[0].pop())
    return [sorted(half) for half in halves]
