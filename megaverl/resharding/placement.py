"""Which rank generates as which tensor parallel rank of which replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megaverl.parallel.layout import Layout


@dataclass(frozen=True)
class Place:
    """A rank's place in the rollout."""

    replica: int
    tp_rank: int


def rollout_places(train: Layout, rollout_tp: int) -> tuple[Place, ...]:
    """The place of every rank of the training world.

    Where the rollout's tp is smaller than training's and divides it, neighbours of a training TP group generate with
    the same slice: then each rank's training shard lies inside its rollout shard (HybridFlow's grouping, arXiv
    2409.19256, section 5), and a replica is made of every (train tp / rollout tp)-th rank. Else replicas are made of
    neighbouring ranks.
    """
    if rollout_tp >= train.tp or train.tp % rollout_tp:
        return tuple(Place(rank // rollout_tp, rank % rollout_tp) for rank in range(train.world))
    alike = train.tp // rollout_tp
    found = []
    for rank in range(train.world):
        group, at = divmod(rank, train.tp)
        found.append(Place(group * alike + at % alike, at // alike))
    return tuple(found)


def rollout_order(train: Layout, rollout_tp: int) -> tuple[int, ...]:
    """The ranks replica by replica, each by tensor parallel rank; ascending within a replica."""
    places = rollout_places(train, rollout_tp)
    return tuple(sorted(range(train.world), key=lambda rank: (places[rank].replica, places[rank].tp_rank)))
