"""Writes a Hugging Face checkpoint folder, tensor by tensor: it appears, complete, under its name or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaverl.checkpoint.hf_files import FLOAT_TYPES, header_dtype, read_headers, torch_dtype
from megaverl.checkpoint.hf_import import BAND_BYTES
from megaverl.checkpoint.shard_writer import ShardedWriter, TensorSpec
from megaverl.errors import Problems, RunError
from megaverl.files import write_bytes
from megaverl.models.weight_map import Piece, Row, WeightMap

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
        return
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problems.add(
            f"cannot be made: {parent} is not a folder that can be written to", where=str(out), fix="name another"
        )


def copy_companions(source: Path, tokenizer: Path, out: Path) -> None:
    """Copies the generation configuration of ``source`` and the tokenizer files of ``tokenizer``, where they exist."""
    for folder, names in ((source, ("generation_config.json",)), (tokenizer, TOKENIZER_FILES)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)


class HfWriter:
    """`begin`, then `write` once for every HF tensor in any order, then `finish`; `remove` after a failure.

    It writes into a temporary folder beside ``out`` that takes its name at the end. Beside what `write` is given it
    keeps one band of rows.
    """

    def __init__(
        self,
        rows: WeightMap,
        out: Path | str,
        source: Path | str,
        *,
        tokenizer: Path | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: torch.dtype | None = None,
        types: Mapping[str, str] | None = None,
        added: Mapping[str, str] | None = None,
        edit_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            out: the folder to make; new or empty.
            source: folder of the imported checkpoint: config, generation config and, per tensor, the type.
            tokenizer: folder of the tokenizer files when it is not ``source``.
            max_shard_bytes: a second file is begun when the first would grow beyond it.
            dtype: type of all tensors; None is each tensor's type in ``source``.
            types: type of each tensor as a header writes it, for a ``source`` without weights; None reads its headers.
            added: tensors that ``source`` need not have -> the type that a header writes for them then (``F32``).
            edit_config: makes the config.json of the export from that of ``source``.
        """
        self.rows, self.out, self.source = rows, Path(out), Path(source)
        self.tokenizer, self.max_bytes, self.dtype = Path(tokenizer or source), max_shard_bytes, dtype
        self.types, self.added, self.edit_config = types, added or {}, edit_config
        self.temporary = self.out.parent / f".{self.out.name}.{os.getpid()}.tmp"
        self.writer: ShardedWriter | None = None

    def begin(self) -> None:
        """Makes the temporary folder. Raises UserError: ``out`` is taken, or ``source`` is not complete."""
        problems = Problems()
        check_export_dir(self.out, problems)
        if self.types is None:
            found = {name: info.dtype for name, info in read_headers(self.source, problems).items()}
        else:
            found = dict(self.types)
        missing = [name for name in self.rows.hf_names() if name not in found and name not in self.added]
        if missing and not problems.found:
            problems.add(
                f"tensor {missing[0]} is no longer there",
                where=str(self.source),
                fix="put the folder that the run started from back in place",
            )
        if not (self.source / "config.json").is_file():
            problems.add(
                "there is no config.json",
                where=str(self.source),
                fix="put the folder that the run started from back in place",
            )
        problems.raise_if_any()
        asked = header_dtype(self.dtype) if self.dtype is not None else None
        types = {**self.added, **found}
        specs = [TensorSpec(n, asked or types[n], self.rows.hf_shape(n)) for n in self.rows.hf_names()]
        self.temporary.mkdir(parents=True)
        self.writer = ShardedWriter(self.temporary, specs, self.max_bytes)

    def write(self, row: Row, name: str, shares: Sequence[Tensor]) -> None:
        """Puts HF tensor ``name`` of ``row`` together and writes it.

        Args:
            shares: of each TP rank (a replicated row: of one), what `share_of` says.

        Raises:
            RunError: it holds NaN or infinite values.
        """
        writer = self._started()
        writer.write(name, self._bands(row, name, shares, torch_dtype(writer.place[name][1].dtype)))

    def _bands(self, row: Row, name: str, shares: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
        """HF tensor ``name`` in bands of rows, put together from the ranks' shares and converted."""
        blocks = []
        for rank, share in enumerate(shares):
            piece = piece_of(self.rows, row, name, len(shares), rank)
            if piece is not None and piece.copy == 0:
                blocks.append((piece, share))
        shape = self.rows.hf_shape(name)
        step = max(1, BAND_BYTES // (math.prod(shape[1:]) * 8))
        for start in range(0, shape[0], step):
            band = shares[0].new_empty(min(step, shape[0] - start), *shape[1:])
            for piece, share in blocks:
                rows = piece.source[0]
                low, high = max(rows.start, start), min(rows.stop, start + len(band))
                if low < high:
                    inside = (slice(low - start, high - start), *piece.source[1:])
                    band[inside] = share[low - rows.start : high - rows.start]
            band = band.to(dtype)
            if not bool(torch.isfinite(band).all()):
                raise RunError(f"tensor {name} holds NaN or infinite values in {dtype}; nothing was exported")
            yield band

    def finish(self) -> None:
        """Completes the folder and gives it its name."""
        self._started().finish()
        write_bytes(self.temporary / "config.json", self._config())
        copy_companions(self.source, self.tokenizer, self.temporary)
        self.temporary.rename(self.out)  # takes the place of an empty folder, never of one with something in it

    def remove(self) -> None:
        """Removes the temporary folder of a failed export."""
        if self.writer is not None:  # else the folder, if there is one, is not ours
            self.writer.abort()
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _started(self) -> ShardedWriter:
        if self.writer is None:
            raise RuntimeError("begin comes first")
        return self.writer

    def _config(self) -> bytes:
        """The source's config.json, byte for byte where the export is no other model and of no other type."""
        content = (self.source / "config.json").read_bytes()
        original = json.loads(content)
        config = self.edit_config(original) if self.edit_config else dict(original)
        if self.dtype is not None:
            keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
            config.update(dict.fromkeys(keys, FLOAT_TYPES[header_dtype(self.dtype)]))
        if config == original:
            return content
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def piece_of(rows: WeightMap, row: Row, name: str, tp: int, tp_rank: int) -> Piece | None:
    """The block of HF tensor ``name`` that a rank holds; None where it has only padding of a vocabulary."""
    return next((piece for piece in rows.pieces(row, tp, tp_rank) if piece.hf == name), None)


def share_of(rows: WeightMap, row: Row, name: str, param: Tensor, tp: int, tp_rank: int) -> Tensor:
    """The part of a rank's parameter that belongs to HF tensor ``name``, as a view; of a vocabulary with its padding.

    Its shape is the same on every rank of the TP group, so that it can be gathered.
    """
    if row.split == "vocab":
        return param
    piece = piece_of(rows, row, name, tp, tp_rank)
    if piece is None:
        raise ValueError(f"{name} is no part of {row.megatron}")
    return param[piece.target]


def stage_owners(rows: WeightMap, held: Sequence[Iterable[str]], problems: Problems) -> dict[str, int]:
    """The pipeline stage that gives each parameter, by the row's Megatron name.

    The last stage of a tied model has a copy of the embedding; the first stage gives it.

    Args:
        held: of each stage, the rows' Megatron names of its parameters.
        problems: takes parameters of two stages or of none.
    """
    copied = {row.megatron for row in rows.expand() if rows.shape.tied and row.where == "first"}
    owners: dict[str, int] = {}
    for stage, names in enumerate(held):
        for name in names:
            if name in owners and name not in copied:
                problems.add(
                    f"stages {owners[name]} and {stage} both hold it",
                    where=f"parameter {name}",
                    fix="resume from another checkpoint of the run, or save it again",
                )
            owners.setdefault(name, stage)
    for row in rows.expand():
        if row.megatron not in owners:
            problems.add(
                f"no stage has a parameter for {', '.join(row.hf)}",
                where=f"parameter {row.megatron}",
                fix="resume from another checkpoint of the run, or save it again",
            )
    return owners
