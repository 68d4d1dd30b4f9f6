"""Making the reshard plan: for every rank, where each piece of its rollout parameters comes from. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megaverl.errors import Problems
from megaverl.models.weight_map import Row, WeightMap
from megaverl.parallel.layout import Coordinates, Layout, stage_layers
from megaverl.resharding.geometry import Box, Cut, Geometry, check_sizes
from megaverl.resharding.placement import rollout_places
from megaverl.resharding.plan import ParameterClass, Part, RankPlan, ReshardPlan

NODE_RANKS = 8
"""Ranks taken to sit in one machine, when sources are chosen: a guess that costs speed at worst."""


def make_plan(
    weight_map: WeightMap,
    train: Layout,
    rollout_tp: int,
    *,
    element_bytes: int = 4,
    rollout_element_bytes: int | None = None,
) -> ReshardPlan:
    """The plan that turns the training weights into rollout weights.

    `megaverl.resharding.placement` says which slice of the rollout a rank of the training world generates with. A piece
    comes from the rank itself when it holds it. Else from the rank of its machine that holds it and sends least so far;
    else, so that all DP ranks send alike, from a rank with the same DP and CP coordinates.

    Args:
        weight_map: the model's table of names.
        train: the training layout.
        rollout_tp: tensor parallel size of the rollout; replicas fill the world.
        element_bytes: bytes per parameter element (4 in fp32).
        rollout_element_bytes: bytes per element of the rollout's parameters, if it generates in another number format.

    Raises:
        UserError: the model or the world cannot be divided as asked; names every size.
    """
    _check(weight_map, train, rollout_tp)
    geometry = Geometry(weight_map, train.tp, rollout_tp)
    rollout_bytes = rollout_element_bytes or element_bytes
    planner = _Planner(geometry, train, _stages(weight_map, train), element_bytes, rollout_bytes)
    ranks = tuple(planner.rank_plan(rank) for rank in range(train.world))
    elements = sum(math.prod(weight_map.hf_shape(name)) for name in weight_map.hf_names())
    return ReshardPlan(train, rollout_tp, ranks, elements * element_bytes)


@dataclass(frozen=True)
class _Held:
    """A row of the weight map, the layers it stands for, and the pipeline ranks that hold all of them."""

    number: int
    row: Row
    layers: tuple[int, ...]
    stages: tuple[int, ...]


def _stages(weight_map: WeightMap, train: Layout) -> list[_Held]:
    layers = [
        sorted(i for chunk in chunks for i in chunk)
        for chunks in stage_layers(weight_map.shape.layers, train.pp, train.vpp)
    ]
    last = train.pp - 1
    held = []
    for number, row in enumerate(weight_map.rows):
        if row.where == "layer":
            held += [_Held(number, row, tuple(own), (stage,)) for stage, own in enumerate(layers)]
        elif row.where == "last":
            held.append(_Held(number, row, (0,), (last,)))
        else:  # the last stage of a tied model has the embedding too
            both = weight_map.shape.tied and row.split == "vocab" and last > 0
            held.append(_Held(number, row, (0,), (0, last) if both else (0,)))
    return held


class _Planner:
    """Plans rank by rank, and remembers how much each rank sends already."""

    def __init__(
        self, geometry: Geometry, train: Layout, held: list[_Held], element_bytes: int, rollout_bytes: int
    ) -> None:
        self.geometry = geometry
        self.train = train
        self.held = held
        self.element_bytes = element_bytes
        self.rollout_bytes = rollout_bytes
        self.sent_bytes = min(element_bytes, rollout_bytes)
        self.coordinates = [train.coordinates(rank) for rank in range(train.world)]
        self.places = rollout_places(train, geometry.rollout_tp)
        self._sent = [0] * train.world
        self._chosen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        self._far: dict[tuple[Any, ...], ParameterClass] = {}

    def rank_plan(self, rank: int) -> RankPlan:
        """The plan of one rank."""
        first = rank - rank % NODE_RANKS
        near = {at.pp for at in self.coordinates[first : first + NODE_RANKS]}
        classes = tuple(self._class(number, held, rank, near) for number, held in enumerate(self.held))
        return RankPlan(rank, classes, self.element_bytes, self.rollout_bytes)

    def _class(self, number: int, held: _Held, rank: int, near: set[int]) -> ParameterClass:
        if len(held.stages) > 1 or held.stages[0] in near:
            return self._make_class(held, rank)
        # Ranks that differ in their stage only, and whose machine does not hold the row, receive it alike.
        at = self.coordinates[rank]
        key = number, self.places[rank].tp_rank, at.tp, at.cp, at.dp
        if key not in self._far:
            self._far[key] = self._make_class(held, rank)
        return self._far[key]

    def _make_class(self, held: _Held, rank: int) -> ParameterClass:
        geometry, row, at = self.geometry, held.row, self.coordinates[rank]
        rollout_rank, here = self.places[rank].tp_rank, at.pp in held.stages
        shape = geometry.rollout_shape(row)
        whole = Box.whole(shape)
        if here and self.element_bytes == self.rollout_bytes and geometry.same(row, at.tp, rollout_rank):
            parts = [Part("alias", whole, whole, whole.elements * self.element_bytes)]
        else:
            parts = [self._part(cut, held, rank, here) for cut in geometry.cuts(row, rollout_rank)]
        lacking = whole.elements - (geometry.overlap(row, at.tp, rollout_rank) if here else 0)
        return ParameterClass(
            held.number,
            row,
            held.layers,
            shape,
            geometry.train_shape(row),
            tuple(parts),
            lacking * self.sent_bytes,
        )

    def _part(self, cut: Cut, held: _Held, rank: int, here: bool) -> Part:
        at = self.coordinates[rank]
        if here and at.tp in cut.sources:
            return Part("copy", cut.sources[at.tp], cut.target, cut.target.elements * self.rollout_bytes)
        size = cut.target.elements * self.sent_bytes
        source = self._choose(rank, held.stages, cut)
        self._sent[source] += size * len(held.layers)
        return Part("receive", cut.sources[self.coordinates[source].tp], cut.target, size, source)

    def _choose(self, rank: int, stages: tuple[int, ...], cut: Cut) -> int:
        """The rank that sends ``cut`` to ``rank``, and with it all that the same ranks hold."""
        key = rank, stages, cut.tp_ranks
        if key not in self._chosen:
            self._chosen[key] = self._find(*key)
        return self._chosen[key]

    def _find(self, rank: int, stages: tuple[int, ...], tp_ranks: tuple[int, ...]) -> int:
        first = rank - rank % NODE_RANKS
        machine = range(first, min(first + NODE_RANKS, self.train.world))
        near = [r for r in machine if self.coordinates[r].pp in stages and self.coordinates[r].tp in tp_ranks]
        if near:
            return min(near, key=lambda r: (self._sent[r], abs(r - rank), r))
        at = self.coordinates[rank]
        far = [self.train.rank_of(Coordinates(tp=tp, cp=at.cp, dp=at.dp, pp=pp)) for pp in stages for tp in tp_ranks]
        return min(far, key=lambda r: (abs(r - rank), r))


def _check(weight_map: WeightMap, train: Layout, rollout_tp: int) -> None:
    problems = Problems()
    check_sizes(weight_map, train.tp, rollout_tp, problems)
    if train.world % rollout_tp:
        problems.add(
            f"training {train} has {train.world} ranks: they cannot be divided into rollout replicas of {rollout_tp}",
            where="rollout.tp",
            fix=f"use a divisor of {train.world}",
        )
    if weight_map.shape.layers < train.pp * train.vpp:
        problems.add(
            f"{weight_map.shape.layers} layers cannot fill {train.pp * train.vpp} pipeline stages",
            where="actor.layout.pp",
            fix="use fewer stages",
        )
    problems.raise_if_any()
