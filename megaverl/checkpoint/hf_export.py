"""From the ranks' parameters back to a Hugging Face checkpoint folder, while the model is being trained.

One HF tensor at a time: the TP ranks of the pipeline stage that owns it send their shares to the stage's first rank,
and that one to the writing rank, which writes it at once. The most that the writer keeps is one tensor and one band.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.checkpoint.hf_import import match_params
from megaverl.checkpoint.hf_writer import MAX_SHARD_BYTES, HfWriter, check_export_dir, share_of, stage_owners
from megaverl.errors import MegaverlError, Problems, RunError
from megaverl.files import write_error
from megaverl.models.weight_map import Row, WeightMap

__all__ = ["ModelRanks", "check_export_dir", "export_hf"]


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that hold one copy of the model, and this rank's place among them.

    Attributes:
        tp, tp_rank: tensor parallel size, and this rank's number.
        tp_group: the ranks of this pipeline stage; may be None when tp is 1.
        pp, pp_rank: pipeline parallel size, and this rank's stage.
        pp_group: the ranks with this ``tp_rank`` in all stages; may be None when pp is 1.
    """

    tp: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp: int = 1
    pp_rank: int = 0
    pp_group: dist.ProcessGroup | None = None

    @property
    def writer(self) -> bool:
        """This rank writes."""
        return self.tp_rank == 0 and self.pp_rank == 0


def export_hf(
    params: Mapping[str, Tensor],
    rows: WeightMap,
    out: Path | str,
    ranks: ModelRanks,
    *,
    source: Path | str,
    tokenizer: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    types: Mapping[str, str] | None = None,
    added: Mapping[str, str] | None = None,
    edit_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Writes the model as a Hugging Face checkpoint. Every rank of one copy of the model calls it, all alike.

    An untrained import comes out bit-equal: names, shapes, types, config. A head that a tied checkpoint brought
    along is not written, as transformers does not either; nor is the last stage's copy of a tied embedding.

    Args:
        params: this stage's parameters by Megatron name with global layer numbers (all virtual stages together).
        out: the folder to make; new or empty.
        source: folder of the imported checkpoint: config, generation config and, per tensor, the type.
        tokenizer: folder of the tokenizer files when it is not ``source``.
        max_shard_bytes: a second file is begun when the first would grow beyond it.
        dtype: type of all tensors; None is each tensor's type in ``source``.
        types, added, edit_config: what the export has and ``source`` has not, see `HfWriter`.

    Raises:
        UserError: ``out`` is taken, ``source`` is not complete, a parameter does not fit the weight map, or a row has
            no parameter in any stage.
        RunError: a parameter is not finite, a file could not be written; on the other ranks: the writer failed.
    """
    device = next(iter(params.values())).device
    held, owners = _owners(params, rows, ranks)
    folder = HfWriter(
        rows,
        out,
        source,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        types=types,
        added=added,
        edit_config=edit_config,
    )
    # A writer that fails still takes part in every gather and says so at the end: its peers must not wait for ever.
    failure = _attempt(folder.begin) if ranks.writer else None
    _agree(failure, ranks, device)
    for row in rows.expand():
        for name in row.hf:
            shares = _collect(rows, row, name, held.get(row.megatron), owners[row.megatron], ranks, device)
            if ranks.writer and failure is None:
                failure = _attempt(folder.write, row, name, shares)
            del shares  # before the next tensor is received
    if ranks.writer and failure is None:
        failure = _attempt(folder.finish)
    if failure is not None:
        folder.remove()
    _agree(failure, ranks, device)


@dataclass(frozen=True)
class _Owner:
    """The stage that gives a parameter, and the parameter's type there."""

    stage: int
    dtype: torch.dtype


def _owners(
    params: Mapping[str, Tensor], rows: WeightMap, ranks: ModelRanks
) -> tuple[dict[str, Tensor], dict[str, _Owner]]:
    """This rank's parameters and every parameter's owner, by the row's Megatron name; agreed over the stages.

    Raises:
        UserError: on all stages alike, what is wrong on any of them.
    """
    problems = Problems()
    matched = match_params(rows, params, ranks.tp, problems, whole_model=ranks.pp == 1)
    held = {row.megatron: param.detach() for row, param in matched}
    mine = ({name: param.dtype for name, param in held.items()}, problems.found)
    every: list[Any] = [mine]
    if ranks.pp > 1:
        every = [None] * ranks.pp
        dist.all_gather_object(every, mine, group=ranks.pp_group)
    found = Problems()
    for _, stage_problems in every:
        found.found += stage_problems
    stages = stage_owners(rows, [types for types, _ in every], found) if ranks.pp > 1 else dict.fromkeys(held, 0)
    found.raise_if_any()
    return held, {name: _Owner(stage, every[stage][0][name]) for name, stage in stages.items()}


def _collect(
    rows: WeightMap,
    row: Row,
    name: str,
    param: Tensor | None,
    owner: _Owner,
    ranks: ModelRanks,
    device: torch.device,
) -> list[Tensor]:
    """The shares of HF tensor ``name`` on the writer; empty on the others."""
    parts = 1 if row.split == "replicated" else ranks.tp
    shares: list[Tensor] = []
    if ranks.pp_rank == owner.stage:
        if param is None:
            raise RuntimeError(f"this stage was taken for the owner of {row.megatron}")
        shares = _gather(share_of(rows, row, name, param, ranks.tp, ranks.tp_rank), parts, ranks)
    if owner.stage == 0 or ranks.tp_rank > 0:
        return shares if ranks.writer else []
    if ranks.pp_rank == owner.stage:
        _exchange(dist.isend, [(share.contiguous(), 0) for share in shares], ranks.pp_group)
        return []
    if not ranks.writer:
        return []
    shape = _share_shape(rows, row, name, ranks.tp)
    shares = [torch.empty(shape, dtype=owner.dtype, device=device) for _ in range(parts)]
    _exchange(dist.irecv, [(share, owner.stage) for share in shares], ranks.pp_group)
    return shares


def _share_shape(rows: WeightMap, row: Row, name: str, tp: int) -> torch.Size:
    """The shape of what `share_of` gives on any rank."""
    return share_of(rows, row, name, torch.empty(rows.local_shape(row, tp), device="meta"), tp, 0).shape


def _gather(share: Tensor, parts: int, ranks: ModelRanks) -> list[Tensor]:
    """The share of every TP rank on the first one; of a replicated parameter only the own. Empty on the others."""
    if ranks.tp_rank == 0:
        shares = [share, *(torch.empty_like(share, memory_format=torch.contiguous_format) for _ in range(parts - 1))]
        _exchange(dist.irecv, list(zip(shares[1:], range(1, parts))), ranks.tp_group)
        return shares
    if parts > 1:
        _exchange(dist.isend, [(share.contiguous(), 0)], ranks.tp_group)
    return []


def _exchange(operation: Callable[..., Any], moved: list[tuple[Tensor, int]], group: dist.ProcessGroup | None) -> None:
    """Sends or receives tensors straight out of or into their memory (a collective gather would copy all of them).

    As a batch, because NCCL then takes the group's communicator instead of making one for each pair of ranks.
    """
    if moved:
        batch = [dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor, peer in moved]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def _attempt(step: Callable[..., None], *args: Any) -> MegaverlError | OSError | None:
    try:
        step(*args)
    except (OSError, MegaverlError) as error:
        return error
    return None


def _agree(failure: MegaverlError | OSError | None, ranks: ModelRanks, device: torch.device) -> None:
    """Raises on every rank if the writer failed."""
    flag = torch.tensor([int(failure is not None)], device=device)
    # Along the stages first: that tells the first TP rank of each stage, and those tell their groups.
    for size, group in ((ranks.pp, ranks.pp_group), (ranks.tp, ranks.tp_group)):
        if size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if isinstance(failure, MegaverlError):
        raise failure
    if failure is not None:
        raise write_error(failure.filename or "the export", failure) from failure
    if bool(flag.item()):
        raise RunError("the export was given up because the writing rank failed; its message says why")
