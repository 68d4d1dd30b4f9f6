"""Writes safetensors shards block by block, so that neither a shard nor a tensor need be held in memory.

The format: 8 bytes little-endian header length, a JSON header (name -> type, shape, offsets into the data),
then the data without gaps. All sizes are known beforehand, so the header is written first and each tensor goes to
its offset when it comes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megaverl.checkpoint.hf_files import INDEX_FILE, SINGLE_FILE, torch_dtype
from megaverl.files import write_json


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: HF name, type as the header writes it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * torch_dtype(self.dtype).itemsize


def plan_shards(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors of at most ``max_bytes`` together; a larger tensor has a shard of its own."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.bytes
    return shards


def shard_names(count: int) -> list[str]:
    """The file names that transformers expects for ``count`` shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


class ShardedWriter:
    """Writes tensors into the shards of ``folder`` and, when there is more than one, the index.

    Tensors may come in any order; a shard is open from its first tensor to its last.
    """

    def __init__(self, folder: Path, specs: Iterable[TensorSpec], max_bytes: int) -> None:
        self.folder = folder
        self.shards = plan_shards(specs, max_bytes)
        self.names = shard_names(len(self.shards))
        self.place = {spec.name: (i, spec) for i, shard in enumerate(self.shards) for spec in shard}
        self.missing = [{spec.name for spec in shard} for shard in self.shards]
        self.open: dict[int, tuple[BinaryIO, dict[str, int]]] = {}

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Writes one tensor, given as consecutive blocks of dimension 0 of the announced type.

        Raises:
            ValueError: another type, blocks that do not make up the announced shape, or the tensor was
                written before.
            KeyError: a name that was not announced.
        """
        shard, spec = self.place[name]
        if name not in self.missing[shard]:
            raise ValueError(f"{name} is written twice")
        if shard not in self.open:
            self.open[shard] = self._start(shard)
        file, offsets = self.open[shard]
        file.seek(offsets[name])
        rows = 0
        for block in blocks:
            rows += block.shape[0]
            fits = block.shape[1:] == spec.shape[1:] and rows <= spec.shape[0]
            if block.dtype != torch_dtype(spec.dtype) or not fits:
                raise ValueError(f"{name}: {block.dtype} {list(block.shape)} is no part of the announced {spec}")
            file.write(block.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if rows != spec.shape[0]:
            raise ValueError(f"{name}: {rows} rows are not all of the announced {spec}")
        self.missing[shard].discard(name)
        if not self.missing[shard]:
            _close(self.open.pop(shard)[0])

    def finish(self) -> None:
        """Writes the index. Raises ValueError naming tensors that never came."""
        absent = sorted(set().union(*self.missing))
        if absent:
            raise ValueError(f"never written: {', '.join(absent)}")
        if len(self.shards) == 1:
            return
        specs = [spec for shard in self.shards for spec in shard]
        index = {
            "metadata": {
                "total_parameters": sum(s.elements for s in specs),
                "total_size": sum(s.bytes for s in specs),
            },
            "weight_map": {name: self.names[shard] for name, (shard, _) in sorted(self.place.items())},
        }
        write_json(self.folder / INDEX_FILE, index)

    def abort(self) -> None:
        """Closes whatever is open; the files are not complete."""
        for file, _ in self.open.values():
            # What is still buffered cannot be written on a full disk either; the first failure has been reported.
            with contextlib.suppress(OSError):
                file.close()
        self.open.clear()

    def _start(self, shard: int) -> tuple[BinaryIO, dict[str, int]]:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        inside: dict[str, int] = {}
        at = 0
        # Wider types first: every tensor then starts at a multiple of its element size.
        for spec in sorted(self.shards[shard], key=lambda s: -torch_dtype(s.dtype).itemsize):
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.bytes]}
            inside[spec.name] = at
            at += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = (self.folder / self.names[shard]).open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        return file, {name: 8 + len(text) + offset for name, offset in inside.items()}


def _close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
