"""From the ranks' parameters back to a Hugging Face checkpoint folder.

Parameters are gathered over the TP group one at a time and written at once; the folder appears, complete,
under its name or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.checkpoint.hf_files import FLOAT_TYPES, header_dtype, read_headers, torch_dtype
from megaverl.checkpoint.hf_import import BAND_BYTES, match_params
from megaverl.checkpoint.shard_writer import ShardedWriter, TensorSpec
from megaverl.errors import MegaverlError, Problems, RunError
from megaverl.models.weight_map import Row, WeightMap

MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def check_export_dir(out: Path | str, problems: Problems) -> None:
    """An export goes to a new or an empty folder: nothing of a user's is overwritten, not even a former export."""
    out = Path(out)
    taken = any(out.iterdir()) if out.is_dir() else out.exists() or out.is_symlink()
    if taken:
        problems.add(
            "exists and is not an empty folder", where=str(out), fix="name a new folder for the export, or remove it"
        )


def export_hf(
    params: Mapping[str, Tensor],
    rows: WeightMap,
    out: Path | str,
    *,
    tp: int,
    tp_rank: int,
    tp_group: dist.ProcessGroup | None,
    writer: bool,
    source: Path | str,
    tokenizer: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the model as a Hugging Face checkpoint. Every rank of one TP group calls it, all alike.

    An untrained import comes out bit-equal: names, shapes, types, config. A head that a tied checkpoint brought
    along is not written, as transformers does not either.

    Args:
        params: the whole model of this rank by Megatron name.
        out: the folder to make; new or empty.
        writer: this rank writes; only the rank with ``tp_rank`` 0 can.
        source: folder of the imported checkpoint: config, generation config and, per tensor, the type.
        tokenizer: folder of the tokenizer files when it is not ``source``.
        max_shard_bytes: a second file is begun when the first would grow beyond it.
        dtype: type of all tensors; None is each tensor's type in ``source``.

    Raises:
        UserError: ``out`` is taken, ``source`` is not complete, or a parameter does not fit the weight map.
        RunError: a parameter is not finite, a file could not be written; on the other ranks: the writer failed.
    """
    if writer and tp_rank != 0:
        raise ValueError("only the rank with tp_rank 0 can write an export")
    problems = Problems()
    targets = match_params(rows, params, tp, problems, whole_model=True)
    problems.raise_if_any()
    export = _Export(rows, Path(out), Path(source), Path(tokenizer or source), max_shard_bytes, dtype)
    # A writer that fails still takes part in every gather and says so at the end: its peers must not wait for ever.
    failure = _attempt(export.begin) if writer else None
    _agree(failure, params, tp_group, tp)
    for row, param in targets:
        shares = _gather(row, param.detach(), tp, tp_group, receive=tp_rank == 0)
        if writer and failure is None:
            failure = _attempt(export.write_row, row, shares)
    if writer and failure is None:
        failure = _attempt(export.finish)
    if failure is not None:
        export.remove()
    _agree(failure, params, tp_group, tp)


def _attempt(step, *args) -> Exception | None:
    try:
        step(*args)
    except (OSError, MegaverlError) as error:
        return error
    return None


def _agree(failure: Exception | None, params: Mapping[str, Tensor], group: dist.ProcessGroup | None, tp: int) -> None:
    """Raises on every rank of the group if the writer failed."""
    failed = failure is not None
    if tp > 1:
        flag = torch.tensor([int(failed)], device=next(iter(params.values())).device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        failed = bool(flag.item())
    if isinstance(failure, MegaverlError):
        raise failure
    if failure is not None:
        raise RunError(f"the export could not be written: {failure}") from failure
    if failed:
        raise RunError("the export was given up because the writing rank failed; its message says why")


def _gather(row: Row, param: Tensor, tp: int, group: dist.ProcessGroup | None, *, receive: bool) -> list[Tensor]:
    """The parameter of every rank on TP rank 0; of a replicated one only the own. Empty on the others."""
    if tp == 1 or row.split == "replicated":
        return [param] if receive else []
    param = param.contiguous()
    shares = [torch.empty_like(param) for _ in range(tp)] if receive else None
    dist.gather(param, shares, group=group, group_dst=0)
    return shares or []


class _Export:
    """The writing side: a temporary folder beside ``out`` that takes its name at the end."""

    def __init__(
        self, rows: WeightMap, out: Path, source: Path, tokenizer: Path, max_bytes: int, dtype: torch.dtype | None
    ) -> None:
        self.rows, self.out, self.source, self.tokenizer = rows, out, source, tokenizer
        self.max_bytes, self.dtype = max_bytes, dtype
        self.temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
        self.writer: ShardedWriter | None = None

    def begin(self) -> None:
        problems = Problems()
        check_export_dir(self.out, problems)
        found = read_headers(self.source, problems)
        missing = [name for name in self.rows.hf_names() if name not in found]
        if missing and not problems.found:
            problems.add(f"tensor {missing[0]} is no longer there", where=str(self.source))
        if not (self.source / "config.json").is_file():
            problems.add("there is no config.json", where=str(self.source))
        problems.raise_if_any()
        asked = header_dtype(self.dtype) if self.dtype is not None else None
        specs = [TensorSpec(n, asked or found[n].dtype, self.rows.hf_shape(n)) for n in self.rows.hf_names()]
        self.temporary.mkdir(parents=True)
        self.writer = ShardedWriter(self.temporary, specs, self.max_bytes)

    def write_row(self, row: Row, shares: list[Tensor]) -> None:
        """Puts the HF tensors of one row together from the ranks' shares and writes them."""
        if self.writer is None:
            raise RuntimeError("write_row before begin")
        for name in row.hf:
            self.writer.write(name, self._blocks(row, name, shares, torch_dtype(self.writer.place[name][1].dtype)))

    def _blocks(self, row: Row, name: str, shares: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
        """HF tensor ``name`` in bands of rows, put together from the ranks' shares and converted."""
        # A replicated row comes as one share, whole: its single piece is the same for tp 1.
        pieces = [
            (piece, share)
            for rank, share in enumerate(shares)
            for piece in self.rows.pieces(row, len(shares), rank)
            if piece.hf == name
        ]
        shape = self.rows.hf_shape(name)
        step = max(1, BAND_BYTES // (math.prod(shape[1:]) * 8))
        for start in range(0, shape[0], step):
            band = shares[0].new_empty(min(step, shape[0] - start), *shape[1:])
            for piece, share in pieces:
                rows = piece.source[0]
                low, high = max(rows.start, start), min(rows.stop, start + len(band))
                if low < high:
                    at = piece.target[0].start - rows.start
                    band[(slice(low - start, high - start), *piece.source[1:])] = share[
                        (slice(low + at, high + at), *piece.target[1:])
                    ]
            band = band.to(dtype)
            if not bool(torch.isfinite(band).all()):
                raise RunError(f"tensor {name} holds NaN or infinite values in {dtype}; nothing was exported")
            yield band

    def finish(self) -> None:
        if self.writer is None:
            raise RuntimeError("finish before begin")
        self.writer.finish()
        (self.temporary / "config.json").write_bytes(self._config())
        for folder, name in [
            (self.source, "generation_config.json"),
            *((self.tokenizer, name) for name in TOKENIZER_FILES),
        ]:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, self.temporary / name)
        self.temporary.rename(self.out)  # takes the place of an empty folder, never of one with something in it

    def remove(self) -> None:
        """Removes the temporary folder of a failed export."""
        if self.writer is not None:  # else the folder, if there is one, is not ours
            self.writer.abort()
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _config(self) -> bytes:
        """The source's config.json, byte for byte unless the type of the weights is another one now."""
        content = (self.source / "config.json").read_bytes()
        if self.dtype is None:
            return content
        config, name = json.loads(content), FLOAT_TYPES[header_dtype(self.dtype)]
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        if all(config.get(key) == name for key in keys):
            return content
        config.update(dict.fromkeys(keys, name))
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
