"""The reshard plan: which rollout parameter is which bytes of the training model, for every rank. Pure.

A plan is a list per rank of entries. ``alias``: the rollout parameter *is* the training parameter, nothing moves.
``copy``: the rank's own bytes in another place. ``receive``: bytes that another rank holds. Together they write every
element of every rollout parameter exactly once. Equal layouts need aliases only.

The layers of a pipeline stage are alike, so a rank's plan is kept per class of parameter (a row of the weight map and
the layers that it stands for) and spelled out as entries on demand: a thousand ranks are planned in a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megaverl.models.weight_map import Row
from megaverl.parallel.layout import Layout
from megaverl.resharding.geometry import Box

Kind = Literal["alias", "copy", "receive"]


@dataclass(frozen=True)
class Entry:
    """How one piece of one rollout parameter comes about on one rank.

    Attributes:
        kind: ``alias``, ``copy`` or ``receive``.
        megatron: name of the training parameter it comes from (global layer number).
        alternatives: other names the training model may use for it.
        vllm: name of the rollout parameter it fills.
        shape: the rollout parameter's shape on this rank.
        source_shape: the training parameter's shape on the rank that holds it.
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
    source_shape: tuple[int, ...]
    source: Box
    target: Box
    bytes: int
    source_rank: int | None = None


@dataclass(frozen=True)
class Part:
    """An `Entry` without its names: the same for all layers of a class."""

    kind: Kind
    source: Box
    target: Box
    bytes: int
    source_rank: int | None = None


@dataclass(frozen=True)
class ParameterClass:
    """Parameters that come about alike on one rank.

    Attributes:
        number: position of the row in the weight map.
        row: the row; ``{i}`` stands for the layer.
        layers: the layers it stands for; (0,) for a row that is no layer's.
        shape, source_shape: as in `Entry`.
        parts: what makes up each parameter.
        bytes_lacking: bytes of each parameter that the rank's own training weights do not hold.
    """

    number: int
    row: Row
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    source_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    bytes_lacking: int

    def entry(self, part: Part, layer: int) -> Entry:
        """``part`` of one layer's parameter, with its names."""
        row = self.row.at_layer(layer)
        return Entry(
            part.kind,
            row.megatron,
            row.alternatives,
            row.vllm,
            self.shape,
            self.source_shape,
            part.source,
            part.target,
            part.bytes,
            part.source_rank,
        )

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all parts of one kind, over all layers."""
        return sum(p.bytes for p in self.parts if p.kind == kind) * len(self.layers)


class _Bytes:
    """Totals that ranks and whole plans share."""

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all entries of one kind."""
        raise NotImplementedError

    @property
    def bytes_aliased(self) -> int:
        """Bytes of rollout weights that are the training weights."""
        return self.bytes_of("alias")

    @property
    def bytes_copied(self) -> int:
        """Bytes written from a rank's own training weights."""
        return self.bytes_of("copy")

    @property
    def bytes_received(self) -> int:
        """Bytes that come from other ranks."""
        return self.bytes_of("receive")

    @property
    def bytes_moved(self) -> int:
        """Bytes written at each handoff."""
        return self.bytes_copied + self.bytes_received


@dataclass(frozen=True)
class RankPlan(_Bytes):
    """What one rank does at a handoff to rollout.

    Attributes:
        rank: its global rank.
        classes: all rollout parameters that the rank holds.
        element_bytes: size of an element of a training parameter.
        rollout_element_bytes: size of an element of a rollout parameter. Where they differ nothing is aliased, and the
            smaller one travels.
    """

    rank: int
    classes: tuple[ParameterClass, ...]
    element_bytes: int
    rollout_element_bytes: int

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """One or more entries per rollout parameter."""
        return tuple(c.entry(part, layer) for c in self.classes for layer in c.layers for part in c.parts)

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all entries of one kind."""
        return sum(c.bytes_of(kind) for c in self.classes)

    @property
    def bytes_received_bound(self) -> int:
        """Bytes of the rollout weights that are not among the rank's training weights: no plan can receive less."""
        return sum(c.bytes_lacking * len(c.layers) for c in self.classes)

    @property
    def peak_extra_bytes(self) -> int:
        """Memory that the rollout weights need on top of the training weights: whatever is not aliased."""
        elements = sum(
            part.target.elements * len(c.layers) for c in self.classes for part in c.parts if part.kind != "alias"
        )
        return elements * self.rollout_element_bytes


@dataclass(frozen=True)
class ReshardPlan(_Bytes):
    """The plans of all ranks, with totals over ranks.

    Attributes:
        train: the training layout.
        rollout_tp: tensor parallel size of the rollout.
        ranks: the plan of each rank.
        model_bytes: size of the whole model's weights, without padding.
    """

    train: Layout
    rollout_tp: int
    ranks: tuple[RankPlan, ...]
    model_bytes: int

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all entries of one kind, over all ranks."""
        return sum(r.bytes_of(kind) for r in self.ranks)

    @property
    def bytes_received_bound(self) -> int:
        """What the ranks lack, summed."""
        return sum(r.bytes_received_bound for r in self.ranks)

    @property
    def peak_extra_bytes(self) -> int:
        """Memory on top of the training weights, on the worst rank."""
        return max(r.peak_extra_bytes for r in self.ranks)

    def totals(self) -> dict[str, int]:
        """The totals by name, for tables and ``--json``."""
        names = ("bytes_aliased", "bytes_copied", "bytes_received", "bytes_received_bound", "peak_extra_bytes")
        return {name: getattr(self, name) for name in names}

    def by_class(self) -> dict[str, dict[Kind, int]]:
        """Bytes over all ranks per row of the weight map: Megatron name, ``{i}`` for the layer, to bytes by kind."""
        kinds: tuple[Kind, ...] = ("alias", "copy", "receive")
        found: dict[str, dict[Kind, int]] = {}
        for c in sorted((c for rank in self.ranks for c in rank.classes), key=lambda c: c.number):
            sums = found.setdefault(c.row.megatron, dict.fromkeys(kinds, 0))
            for kind in kinds:
                sums[kind] += c.bytes_of(kind)
        return found

    def sent_by(self, rank: int) -> Iterator[tuple[int, ParameterClass, int, Part]]:
        """(receiving rank, class, position of the part, part) of what ``rank`` sends, for each layer of the class."""
        for receiver in self.ranks:
            for c in receiver.classes:
                for position, part in enumerate(c.parts):
                    if part.source_rank == rank:
                        yield receiver.rank, c, position, part


def hybridflow_bytes_received(plan: ReshardPlan) -> int:
    """What each rank receives by HybridFlow's formula (arXiv 2409.19256, table 2), in bytes.

    A rank holds M / (t p) of a model of M bytes for training and M / t_g for rollout (p_g = 1 here), and gathers the
    difference, (t p - t_g) / (t_g t p) M, when every training shard lies inside the rank's rollout shard. It counts
    neither replicated parameters nor padding. 0 where the rollout shard is the smaller one.
    """
    ranks = plan.train.tp * plan.train.pp
    return max(0, (ranks - plan.rollout_tp) * plan.model_bytes // (plan.rollout_tp * ranks))
