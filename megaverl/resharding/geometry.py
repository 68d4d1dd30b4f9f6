"""Where the elements of a rank's rollout parameter lie in the training model's shards. Pure.

Every parameter is divided along one dimension. What a rank holds of it is a list of spans, each a run of rows (or
columns) of one HF tensor. Laying a rollout rank's spans over those of all train TP ranks gives cuts: runs that the same
train TP ranks hold whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megaverl.errors import Problems
from megaverl.models.weight_map import Row, WeightMap

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

    @classmethod
    def along(cls, dim: int, start: int, size: int, shape: tuple[int, ...]) -> Box:
        """The piece from ``start`` on, ``size`` long, of dimension ``dim``; all of the other dimensions."""
        return cls(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(size if d == dim else n for d, n in enumerate(shape)),
        )

    @property
    def elements(self) -> int:
        """Number of elements inside."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the piece out of its tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class Span:
    """Rows (or columns) ``start`` to ``stop`` of part ``part`` of a parameter, at ``at`` in the rank's tensor."""

    part: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Cut:
    """A run of a rollout parameter that some train TP ranks hold whole.

    Attributes:
        target: its place in the rollout parameter.
        sources: train TP rank -> its place in that rank's training parameter.
    """

    target: Box
    sources: dict[int, Box]

    @cached_property
    def tp_ranks(self) -> tuple[int, ...]:
        """The train TP ranks that hold it."""
        return tuple(self.sources)


class Geometry:
    """Shapes, spans and cuts of a model's parameters for one pair of tensor parallel sizes; all are cached.

    Rows may be templates (``{i}`` for the layer): all layers are alike.
    """

    def __init__(self, weight_map: WeightMap, train_tp: int, rollout_tp: int) -> None:
        self.table = weight_map
        self.train_tp = train_tp
        self.rollout_tp = rollout_tp
        self.train_shape = _cached(lambda row: weight_map.local_shape(row, train_tp))
        self.rollout_shape = _cached(self._rollout_shape)
        self.train_spans = _cached(self._train_spans)
        self.rollout_spans = _cached(self._rollout_spans)
        self.cuts = _cached(self._cuts)
        self.same = _cached(self._same)
        self.overlap = _cached(self._overlap)

    def _same(self, row: Row, train_rank: int, rollout_rank: int) -> bool:
        """The rollout parameter is, element for element, the training parameter."""
        return self.rollout_shape(row) == self.train_shape(row) and (
            self.rollout_spans(row, rollout_rank) == self.train_spans(row, train_rank)
        )

    def _rollout_shape(self, row: Row) -> tuple[int, ...]:
        if row.split == "vocab":
            return (vllm_vocabulary(self.table.shape.vocab) // self.rollout_tp, *row.shapes[0][1:])
        return self.table.local_shape(row, self.rollout_tp)

    def _train_spans(self, row: Row, rank: int) -> tuple[Span, ...]:
        return _spans(self.table, row, self.train_tp, rank, self.train_shape(row))

    def _rollout_spans(self, row: Row, rank: int) -> tuple[Span, ...]:
        return _spans(self.table, row, self.rollout_tp, rank, self.rollout_shape(row))

    def _cuts(self, row: Row, rollout_rank: int) -> tuple[Cut, ...]:
        """The cuts of the rollout parameter of ``rollout_rank``; together they are all of it, each element once."""
        dim, shape, source_shape = split_dimension(row), self.rollout_shape(row), self.train_shape(row)
        theirs = [(t, span) for t in range(self.train_tp) for span in self.train_spans(row, t)]
        found = []
        for span in self.rollout_spans(row, rollout_rank):
            holding = [(t, s) for t, s in theirs if s.part == span.part and s.start < span.stop and s.stop > span.start]
            ends = {span.start, span.stop} | {e for _, s in holding for e in (s.start, s.stop)}
            inside = sorted(e for e in ends if span.start <= e <= span.stop)
            for start, stop in itertools.pairwise(inside):
                sources = {
                    t: Box.along(dim, s.at + start - s.start, stop - start, source_shape)
                    for t, s in holding
                    if s.start <= start and stop <= s.stop
                }
                target = Box.along(dim, span.at + start - span.start, stop - start, shape)
                found.append(Cut(target, sources))
        return tuple(found)

    def _overlap(self, row: Row, train_rank: int, rollout_rank: int) -> int:
        """Elements of the rollout parameter that the train TP rank holds."""
        shared = sum(
            max(0, min(a.stop, b.stop) - max(a.start, b.start))
            for a in self.rollout_spans(row, rollout_rank)
            for b in self.train_spans(row, train_rank)
            if a.part == b.part
        )
        shape = self.rollout_shape(row)
        return shared * math.prod(shape) // shape[split_dimension(row)]


def _cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(row, *numbers)``, computed once each. A row is known by its name: hashing all of it is slow."""
    known: dict[tuple[Any, ...], Any] = {}

    def call(row: Row, *numbers: int) -> Any:
        key = row.megatron, *numbers
        if key not in known:
            known[key] = function(row, *numbers)
        return known[key]

    return call


def vllm_vocabulary(vocab: int) -> int:
    """Embedding rows of vLLM's model over all of its TP ranks."""
    return -(-vocab // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE


def split_dimension(row: Row) -> int:
    """The dimension along which the parameter is divided (0 when it is not)."""
    return 1 if row.split == "columns" else 0


def check_sizes(weight_map: WeightMap, train_tp: int, rollout_tp: int, problems: Problems) -> None:
    """Adds a problem for each size that one of the tensor parallel sizes cannot divide."""
    for tp in sorted({train_tp, rollout_tp}):
        weight_map.check_tp(tp, problems)
    rows = vllm_vocabulary(weight_map.shape.vocab)
    if rows % rollout_tp:
        problems.add(
            f"vLLM pads the vocabulary to {rows} rows and cannot divide them over {rollout_tp} ranks",
            where="rollout.tp",
            fix=f"choose a rollout.tp that divides {rows}",
        )


def _spans(table: WeightMap, row: Row, tp: int, rank: int, shape: tuple[int, ...]) -> tuple[Span, ...]:
    if row.split == "vocab":  # padding included: the training model pads at least as far as vLLM does
        return (Span(0, rank * shape[0], (rank + 1) * shape[0], 0),)
    dim = split_dimension(row)
    return tuple(
        Span(part, piece.source[dim].start, piece.source[dim].stop, piece.target[dim].start)
        for part, piece in enumerate(table.pieces(row, tp, rank))
    )
