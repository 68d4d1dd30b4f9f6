"""The one table of names: HF checkpoint, Megatron parameter and vLLM parameter, and how each is split over TP.

HF import, HF export, the reshard plan and checkpoints all read these rows. The training model stores every
tensor in vLLM's order (QKV as all q, all k, all v of the rank; MLP as all gate, all up of the rank), so
a row has one meaning on both sides. Pure: no torch.distributed, Megatron or vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megaverl.errors import Problems
from megaverl.models.shape import ModelShape

Split = Literal["replicated", "rows", "columns", "vocab"]
"""How a tensor is divided over TP.

replicated: every rank holds all of it. rows: dimension 0 of *each* HF part is divided into whole units (heads), then
the parts are concatenated (q, k, v or gate, up); a part with fewer units than ranks is held by several ranks, one unit
each. columns: dimension 1 is divided. vocab: dimension 0, padded first.
"""


@dataclass(frozen=True)
class Row:
    """One parameter of the model.

    Attributes:
        megatron: its name in the Megatron model; ``{i}`` stands for the global layer number.
        hf: names of the HF tensors that make it up, in storage order, with the same ``{i}``.
        vllm: its name in vLLM's model.
        split: how it is divided over TP.
        where: ``layer`` (once per layer), ``first`` (first pipeline stage), ``last`` (last stage).
        alternatives: other Megatron names of the same parameter (Transformer Engine fuses norms).
        shapes: the shape of each HF tensor.
        units: for ``rows``, how many indivisible units (attention heads) dimension 0 of each HF tensor has; empty
            when single rows may be parted.
    """

    megatron: str
    hf: tuple[str, ...]
    vllm: str
    split: Split
    where: Literal["layer", "first", "last"] = "layer"
    alternatives: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    units: tuple[int, ...] = ()

    def at_layer(self, i: int) -> Row:
        """The row with ``{i}`` replaced by layer ``i``."""
        put = lambda name: name.replace("{i}", str(i))  # noqa: E731
        return replace(
            self,
            megatron=put(self.megatron),
            hf=tuple(map(put, self.hf)),
            vllm=put(self.vllm),
            alternatives=tuple(map(put, self.alternatives)),
        )


@dataclass(frozen=True)
class Piece:
    """A block that one HF tensor and one rank's parameter share, unchanged.

    Attributes:
        hf: name of the HF tensor.
        source: the block inside the HF tensor, one slice with start and stop per dimension.
        target: the same block inside the rank's parameter.
        copy: which copy of the block this is; several ranks hold blocks of replicated parameters and of KV heads that
            are fewer than ranks. Copy 0 of all blocks makes up every HF tensor exactly once.
    """

    hf: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    copy: int = 0


@dataclass(frozen=True)
class WeightMap:
    """All rows of one family for one model shape."""

    shape: ModelShape
    rows: tuple[Row, ...]

    def expand(self) -> Iterator[Row]:
        """Every parameter of the whole model: first-stage rows, each layer's rows, last-stage rows."""
        yield from (r for r in self.rows if r.where == "first")
        for i in range(self.shape.layers):
            yield from (r.at_layer(i) for r in self.rows if r.where == "layer")
        yield from (r for r in self.rows if r.where == "last")

    def by_megatron_name(self) -> dict[str, Row]:
        """Every Megatron name of every parameter of the whole model, alternatives included, to its row."""
        return {name: row for row in self.expand() for name in (row.megatron, *row.alternatives)}

    def hf_names(self) -> tuple[str, ...]:
        """Every HF tensor that a checkpoint of this model holds, in storage order."""
        return tuple(name for row in self.expand() for name in row.hf)

    def check_tp(self, tp: int, problems: Problems) -> None:
        """Adds a problem for each size of the model that cannot be divided over ``tp`` ranks."""
        s = self.shape
        for what, size, replicable in (
            ("attention heads", s.heads, False),
            ("key-value heads", s.kv_heads, True),
            ("MLP columns (intermediate_size)", s.intermediate, False),
        ):
            if size % tp and not (replicable and tp % size == 0):
                problems.add(
                    f"{size} {what} cannot be divided over tensor parallel size {tp}",
                    where=f"a {s.family} model of {s.heads} heads and {s.kv_heads} key-value heads",
                    fix="choose a tensor parallel size that divides it"
                    + (" or is a multiple of it" if replicable else ""),
                )

    def local_shape(self, row: Row, tp: int) -> tuple[int, ...]:
        """Shape of the parameter of ``row`` on one rank; the same on every rank.

        Raises:
            UserError: tp does not divide the model, as `check_tp` says.
        """
        problems = Problems()
        self.check_tp(tp, problems)
        problems.raise_if_any()
        first = row.shapes[0]
        if row.split == "vocab":
            return (self.shape.padded_vocab(tp) // tp, *first[1:])
        if row.split == "columns":
            return (first[0], first[1] // tp)
        if row.split == "rows":
            return (sum(stop - start for start, stop, _ in _row_shares(row, tp, 0)), *first[1:])
        return first

    def pieces(self, row: Row, tp: int, tp_rank: int) -> tuple[Piece, ...]:
        """The blocks that fill the parameter of ``row`` on one rank, in storage order.

        Over all ranks, blocks with ``copy`` 0 cover every HF tensor exactly once. What the blocks leave
        of the parameter are the rows of `padding`.
        """
        local = self.local_shape(row, tp)
        if row.split == "vocab":
            start = min(tp_rank * local[0], self.shape.vocab)
            stop = min(start + local[0], self.shape.vocab)
            if start == stop:
                return ()
            return (_piece(row.hf[0], local, rows=(start, stop), at=0),)
        if row.split == "columns":
            return (_piece(row.hf[0], local, columns=(tp_rank * local[1], (tp_rank + 1) * local[1])),)
        if row.split == "replicated":
            return (_piece(row.hf[0], local, copy=tp_rank),)
        pieces, at = [], 0
        for name, (start, stop, copy) in zip(row.hf, _row_shares(row, tp, tp_rank), strict=True):
            pieces.append(_piece(name, local, rows=(start, stop), at=at, copy=copy))
            at += stop - start
        return tuple(pieces)

    def padding(self, row: Row, tp: int, tp_rank: int) -> slice:
        """Rows of the rank's parameter that no HF tensor fills; they hold zeros. Empty unless it is a vocabulary."""
        rows = self.local_shape(row, tp)[0]
        if row.split != "vocab":
            return slice(rows, rows)
        return slice(min(max(self.shape.vocab - tp_rank * rows, 0), rows), rows)

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """The shape that HF tensor ``name`` must have for this model shape. Raises KeyError if unknown."""
        return self._hf_shapes[name]

    @cached_property
    def _hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for row in self.expand() for name, shape in zip(row.hf, row.shapes, strict=True)}


def _row_shares(row: Row, tp: int, tp_rank: int) -> list[tuple[int, int, int]]:
    """(start, stop, copy) of the rank's rows of each HF part of a row that is divided by rows.

    With fewer units than ranks, rank r holds unit ``r * units // tp``, as vLLM's QKV layer does.
    """
    shares = []
    for shape, units in zip(row.shapes, row.units or [s[0] for s in row.shapes], strict=True):
        size = shape[0] // units
        if units >= tp:
            mine = shape[0] // tp
            shares.append((tp_rank * mine, (tp_rank + 1) * mine, 0))
        else:
            unit, copy = divmod(tp_rank, tp // units)
            shares.append((unit * size, (unit + 1) * size, copy))
    return shares


def _piece(
    hf: str,
    local: tuple[int, ...],
    *,
    rows: tuple[int, int] | None = None,
    at: int = 0,
    columns: tuple[int, int] | None = None,
    copy: int = 0,
) -> Piece:
    """The block of HF ``rows`` and ``columns`` (all where None) that sits at local row ``at`` and local column 0."""
    source = [slice(0, size) for size in local]
    target = list(source)
    if rows is not None:
        source[0] = slice(*rows)
        target[0] = slice(at, at + rows[1] - rows[0])
    if columns is not None:
        source[1] = slice(*columns)
    return Piece(hf, tuple(source), tuple(target), copy)
