"""Reads a train state in another layout than it was saved in: weights, moments, float32 copies, schedule position.

Every parameter of a rank is cut into the blocks that it shares with the Hugging Face tensors (`weight_map.Piece`), on
both sides; where a saved block and a wanted one overlap, the overlap is copied. Optimizer state is saved as ranges of a
parameter's elements, one per data parallel rank: the ranges make up the parameter's shape first. One parameter is held
at a time; files are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megaverl.checkpoint.train_state import check_contents, check_state, rank_file
from megaverl.errors import Problem, Problems, UserError
from megaverl.models.weight_map import Piece, Row, WeightMap
from megaverl.parallel.layout import Layout

STATE_TENSORS = ("exp_avg", "exp_avg_sq", "main")
STATE_NUMBERS = ("step", "group_step")


class Trained(Protocol):
    """What is needed of a model: see `models.packed_model.PackedModel`."""

    def parameters_by_name(self) -> dict[str, Any]: ...

    def owned_elements(self) -> dict[str, tuple[int, int]]: ...


class SavedRanks:
    """The files of all ranks of a train state.

    Raises:
        UserError: the state is incomplete or of another format; all problems.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder, problems = Path(folder), Problems()
        self._manifest = check_state(self.folder, None, problems)
        problems.raise_if_any()
        self.layout = Layout(**self._manifest["layout"])
        self._open: dict[int, dict[str, Any]] = {}

    def share(self, role: str, model: Trained, rows: WeightMap, tp: int, tp_rank: int) -> dict[str, Any]:
        """``{"weights", "training"}`` of ``role`` for the rank that holds ``model``; tensors on the CPU.

        Raises:
            UserError: a file is damaged, or a parameter is not in the state.
        """
        table, params, owned = rows.by_megatron_name(), model.parameters_by_name(), model.owned_elements()
        weights: dict[str, Tensor] = {}
        slices: dict[str, dict[str, Any]] = {}
        for name, param in params.items():
            row = table[name]
            weights[name] = self._assemble(role, rows, row, "weights", tp, tp_rank, tuple(param.shape), param.dtype)
            if name not in owned:
                continue
            start, end = owned[name]
            part = self._numbers(role, row)
            for key in STATE_TENSORS:
                if self._has(role, row, key):
                    shape = tuple(param.shape)
                    whole = self._assemble(role, rows, row, key, tp, tp_rank, shape, torch.float32)
                    part[key] = whole.view(-1)[start:end].clone()
            slices[name] = {"start": start, "end": end, **part}
        updates = self._rank(0)[role]["training"]["updates"]
        self._open.clear()
        return {"weights": weights, "training": {"updates": updates, "slices": slices}}

    def _assemble(
        self,
        role: str,
        rows: WeightMap,
        row: Row,
        key: str,
        tp: int,
        tp_rank: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """A rank's tensor ``key`` of parameter ``row``; zeros where no Hugging Face tensor has a part (padding)."""
        target = torch.zeros(shape, dtype=dtype)
        wanted = rows.pieces(row, tp, tp_rank)
        missing = sum(_size(piece.source) for piece in wanted)
        for saved_rank in range(self.layout.tp):
            blocks = [p for p in rows.pieces(row, self.layout.tp, saved_rank) if p.copy == 0]
            pairs = [(w, s) for w in wanted for s in blocks if w.hf == s.hf and _overlap(w.source, s.source)]
            if not pairs:
                continue
            source = self._whole(role, row, key, saved_rank, rows.local_shape(row, self.layout.tp))
            for want, have in pairs:
                common = _overlap(want.source, have.source)
                target[_within(want, common)] = source[_within(have, common)].to(dtype)
                missing -= _size(common)
        if missing:
            raise UserError(
                Problem(
                    f"{missing} elements of {row.megatron} ({key}) are not in it",
                    str(self.folder),
                    fix="resume from another checkpoint of the run, or save it again",
                )
            )
        return target

    def _whole(self, role: str, row: Row, key: str, tp_rank: int, shape: tuple[int, ...]) -> Tensor:
        """``key`` of one saved TP rank's parameter, put together from the ranges of its data parallel ranks."""
        holders = list(self._holders(role, row, tp_rank))
        if key == "weights":
            return holders[0][role]["weights"][_name_in(holders[0][role]["weights"], row)]
        flat = torch.zeros(torch.Size(shape).numel())
        done = torch.zeros_like(flat, dtype=torch.bool)
        for holder in holders:
            part = _slice_of(holder, role, row)
            if part is not None and key in part:
                flat[part["start"] : part["end"]] = part[key].reshape(-1)
                done[part["start"] : part["end"]] = True
        if not bool(done.all()):
            raise UserError(
                Problem(
                    f"{key} of {row.megatron} is not complete in it",
                    str(self.folder),
                    fix="resume from another checkpoint of the run, or save it again",
                )
            )
        return flat.view(shape)

    def _holders(self, role: str, row: Row, tp_rank: int) -> Iterator[dict[str, Any]]:
        """The files of the ranks that hold the parameter: one pipeline stage, all of its data parallel ranks."""
        stage = None
        for rank in range(self.layout.world):
            at = self.layout.coordinates(rank)
            if at.tp != tp_rank or (stage is not None and at.pp != stage):
                continue
            state = self._rank(rank)
            if _name_in(state[role]["weights"], row) is not None:
                stage = at.pp
                yield state
        if stage is None:
            raise UserError(
                Problem(
                    f"holds no parameter {row.megatron} of the {role}",
                    str(self.folder),
                    fix="resume from another checkpoint of the run, or save it again",
                )
            )

    def _has(self, role: str, row: Row, key: str) -> bool:
        parts = (_slice_of(state, role, row) for state in self._holders(role, row, 0))
        return any(part is not None and key in part for part in parts)

    def _numbers(self, role: str, row: Row) -> dict[str, Any]:
        for state in self._holders(role, row, 0):
            part = _slice_of(state, role, row)
            if part is not None:
                # A tensor of its own: torch counts in place.
                found = {key: part[key] for key in STATE_NUMBERS if key in part}
                return {k: value.clone() if isinstance(value, Tensor) else value for k, value in found.items()}
        raise UserError(
            Problem(
                f"holds no optimizer state of {row.megatron}",
                str(self.folder),
                fix="resume from another checkpoint of the run, or save it again",
            )
        )

    def _rank(self, rank: int) -> dict[str, Any]:
        if rank not in self._open:
            name, problems = rank_file(rank), Problems()
            check_contents(self.folder, self._manifest, [name], problems)
            problems.raise_if_any()
            self._open[rank] = torch.load(self.folder / name, map_location="cpu", weights_only=True, mmap=True)
        return self._open[rank]


def _name_in(weights: dict[str, Tensor], row: Row) -> str | None:
    return next((name for name in (row.megatron, *row.alternatives) if name in weights), None)


def _slice_of(state: dict[str, Any], role: str, row: Row) -> dict[str, Any] | None:
    slices = state[role]["training"]["slices"]
    name = _name_in(slices, row)
    return None if name is None else slices[name]


def _overlap(one: tuple[slice, ...], other: tuple[slice, ...]) -> tuple[slice, ...]:
    """The block that two blocks share; empty when there is none."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return common if all(s.start < s.stop for s in common) else ()


def _within(piece: Piece, block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Where a block of the Hugging Face tensor lies in the parameter that ``piece`` is of."""
    return tuple(
        slice(t.start + b.start - s.start, t.start + b.stop - s.start)
        for t, s, b in zip(piece.target, piece.source, block, strict=True)
    )


def _size(block: tuple[slice, ...]) -> int:
    size = 1
    for s in block:
        size *= s.stop - s.start
    return size
