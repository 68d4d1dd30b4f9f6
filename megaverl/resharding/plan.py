"""The reshard plan: which rollout parameter is which bytes of the training model, for every rank. Pure.

A plan is a list per rank of entries. ``alias``: the rollout parameter *is* the training parameter, nothing moves.
``copy``: the rank's own bytes in another place. ``receive``: bytes that another rank holds. Together they write every
element of every rollout parameter exactly once. Equal layouts need aliases only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megaverl.errors import Problems
from megaverl.models.weight_map import WeightMap
from megaverl.parallel.layout import Layout

Kind = Literal["alias", "copy", "receive"]
VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, whatever its tp is."""


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a rank's own tensor.

    Attributes:
        start: first index in each dimension.
        size: length in each dimension.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The piece that is all of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        """Number of elements inside."""
        return math.prod(self.size)


@dataclass(frozen=True)
class Entry:
    """How one piece of one rollout parameter comes about on one rank.

    Attributes:
        kind: ``alias``, ``copy`` or ``receive``.
        megatron: name of the training parameter it comes from (global layer number).
        alternatives: other names the training model may use for it.
        vllm: name of the rollout parameter it fills.
        shape: the rollout parameter's shape on this rank.
        source: the piece of the training parameter, on the rank that holds it.
        target: the piece of the rollout parameter that it fills.
        bytes: size of the piece.
        source_rank: global rank that holds the source; None is the rank itself.
    """

    kind: Kind
    megatron: str
    alternatives: tuple[str, ...]
    vllm: str
    shape: tuple[int, ...]
    source: Box
    target: Box
    bytes: int
    source_rank: int | None = None


@dataclass(frozen=True)
class RankPlan:
    """What one rank does at a handoff to rollout.

    Attributes:
        rank: its global rank.
        entries: one or more per rollout parameter that the rank holds.
    """

    rank: int
    entries: tuple[Entry, ...]

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all entries of one kind."""
        return sum(e.bytes for e in self.entries if e.kind == kind)

    @property
    def bytes_aliased(self) -> int:
        """Bytes of rollout weights that are the training weights."""
        return self.bytes_of("alias")

    @property
    def bytes_copied(self) -> int:
        """Bytes written from the rank's own training weights."""
        return self.bytes_of("copy")

    @property
    def bytes_received(self) -> int:
        """Bytes that come from other ranks."""
        return self.bytes_of("receive")

    @property
    def bytes_moved(self) -> int:
        """Bytes written at each handoff."""
        return self.bytes_copied + self.bytes_received

    @property
    def peak_extra_bytes(self) -> int:
        """Memory that the rollout weights need on top of the training weights: whatever is not aliased."""
        return self.bytes_moved


@dataclass(frozen=True)
class ReshardPlan:
    """The plans of all ranks, with totals over ranks (`peak_extra_bytes`: of the worst rank)."""

    train: Layout
    rollout_tp: int
    ranks: tuple[RankPlan, ...]

    @property
    def bytes_aliased(self) -> int:
        return sum(r.bytes_aliased for r in self.ranks)

    @property
    def bytes_copied(self) -> int:
        return sum(r.bytes_copied for r in self.ranks)

    @property
    def bytes_received(self) -> int:
        return sum(r.bytes_received for r in self.ranks)

    @property
    def bytes_moved(self) -> int:
        return self.bytes_copied + self.bytes_received

    @property
    def peak_extra_bytes(self) -> int:
        return max(r.peak_extra_bytes for r in self.ranks)

    def totals(self) -> dict[str, int]:
        """The totals by name, for tables and ``--json``."""
        names = ("bytes_aliased", "bytes_copied", "bytes_received", "peak_extra_bytes")
        return {name: getattr(self, name) for name in names}


def make_plan(weight_map: WeightMap, train: Layout, rollout_tp: int, *, element_bytes: int = 4) -> ReshardPlan:
    """The plan that turns the training weights into rollout weights.

    Args:
        weight_map: the model's table of names.
        train: the training layout.
        rollout_tp: tensor parallel size of the rollout; replicas fill the world.
        element_bytes: bytes per parameter element (4 in fp32).

    Raises:
        UserError: this pair of layouts cannot be served yet; names the pair and the keys to change.
    """
    refuse_unequal(weight_map, train, rollout_tp)
    entries = tuple(_aliases(weight_map, train.tp, element_bytes))  # the same on every rank: all splits are even
    return ReshardPlan(train, rollout_tp, tuple(RankPlan(rank, entries) for rank in range(train.world)))


def refuse_unequal(weight_map: WeightMap, train: Layout, rollout_tp: int) -> None:
    """Raises UserError, with all reasons, unless training and rollout weights are the same shards on the same ranks."""
    problems = Problems()
    pair = f"training {train} to rollout tp{rollout_tp}"
    if rollout_tp != train.tp:
        problems.add(
            f"{pair}: moving weights between different tensor parallel sizes is not built yet",
            where="rollout.tp",
            fix=f"set rollout.tp={train.tp} (or leave it out), or actor.layout.tp={rollout_tp}",
        )
    for name, what in (
        ("pp", "gathering the pipeline stages' layers for the rollout"),
        ("vpp", "gathering the layers of virtual pipeline chunks for the rollout"),
        ("cp", "a rollout beside context parallel training"),
        ("ep", "moving experts between expert parallel ranks and the rollout"),
    ):
        if getattr(train, name) > 1:
            problems.add(
                f"{pair}: {what} is not built yet",
                where=f"actor.layout.{name}",
                fix=f"set actor.layout.{name}=1 and use tp or dp instead",
            )
    if rollout_tp == train.tp:
        _refuse_shape(weight_map, train.tp, problems)
    problems.raise_if_any()


def _refuse_shape(weight_map: WeightMap, tp: int, problems: Problems) -> None:
    shape = weight_map.shape
    weight_map.check_tp(tp, problems)
    vllm_rows = -(-shape.vocab // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    if shape.padded_vocab(tp) != vllm_rows:
        problems.add(
            f"with tp {tp} training pads the vocabulary to {shape.padded_vocab(tp)} rows, vLLM to {vllm_rows}: "
            "they cannot share storage",
            where="actor.layout.tp",
            fix=f"choose a tp that divides {VLLM_VOCAB_MULTIPLE}",
        )


def _aliases(weight_map: WeightMap, tp: int, element_bytes: int) -> Iterator[Entry]:
    for row in weight_map.expand():
        shape = weight_map.local_shape(row, tp)
        box = Box.whole(shape)
        yield Entry("alias", row.megatron, row.alternatives, row.vllm, shape, box, box, box.elements * element_bytes)
