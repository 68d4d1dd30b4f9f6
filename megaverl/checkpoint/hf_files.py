"""The files of a Hugging Face checkpoint folder: which tensors they hold, and blocks of those tensors.

Two formats: safetensors, and ``.bin`` (a zip archive of tensors that torch.save wrote). A ``.bin`` is a pickle, so it
is only ever read with torch's weights-only loader, which runs nothing from the file, and memory-mapped.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaverl.errors import Problem, Problems, UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
MAPPED_BYTES = 16 * 1024**2
"""A file is mapped anew after this many bytes were read: the pages of a mapping count as the process's memory."""

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of the float types in a safetensors header, and in torch."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it: its file, its type as a safetensors header writes it, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a header's float type. Raises KeyError for any other type."""
    return getattr(torch, FLOAT_TYPES[name])


def header_dtype(dtype: torch.dtype) -> str:
    """The header's name of a torch float type. Raises KeyError for any other type."""
    return {getattr(torch, name): header for header, name in FLOAT_TYPES.items()}[dtype]


def read_headers(folder: Path, problems: Problems) -> dict[str, TensorInfo]:
    """All tensors of the checkpoint in ``folder``; unreadable, missing or contradictory files go to ``problems``.

    Where a folder holds both formats, safetensors are read, as transformers does.
    """
    for single, index, read in (
        (folder / SINGLE_FILE, folder / INDEX_FILE, _read_header),
        (folder / BIN_FILE, folder / BIN_INDEX_FILE, _read_bin_header),
    ):
        if single.exists() and index.exists():
            problems.add(
                f"holds both {single.name} and {index.name}",
                where=str(folder),
                fix="remove the one that is out of date",
            )
            return {}
        if single.exists():
            return read(single, problems)
        if index.exists():
            return _read_index(index, read, problems)
    other = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    problems.add(
        f"holds neither {SINGLE_FILE} nor {BIN_FILE}, nor the index of either"
        + (f", but {', '.join(other[:3])}{' and more' if len(other) > 3 else ''}" if other else ""),
        where=str(folder),
        fix="a folder of convert to-megatron is for other programs: give the Hugging Face folder that it was made from"
        if (folder / "megatron.json").is_file()
        else "take the folder of a Hugging Face checkpoint, as save_pretrained of transformers writes it",
    )
    return {}


class TensorReader:
    """Reads blocks of the tensors that `read_headers` found; close it, or use it in a ``with`` statement.

    One file is open at a time, and only `MAPPED_BYTES` of it: the memory of this process stays small however large
    the files are.
    """

    def __init__(self, found: Mapping[str, TensorInfo]) -> None:
        self.found = found
        self.file: Path | None = None
        self.block: Callable[[str, tuple[slice, ...]], Tensor] | None = None
        self.left = 0

    def read(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """The block ``at`` of tensor ``name``, in the file's type. Whoever keeps it keeps the file mapped.

        Raises:
            UserError: the file cannot be read (any more).
        """
        file = self.found[name].file
        try:
            if self.file != file or self.left <= 0 or self.block is None:
                self.block = None  # drops the old mapping before the new one is made
                self.block = _open_bin(file) if file.suffix == ".bin" else _open_safetensors(file)
                self.file, self.left = file, MAPPED_BYTES
            values = self.block(name, at)
        except READ_ERRORS as error:
            raise UserError(
                Problem(
                    f"cannot be read: {error}",
                    where=str(file),
                    fix="check that you may read the file, and fetch it again if it is damaged",
                )
            ) from error
        self.left -= values.numel() * values.element_size()
        return values

    def close(self) -> None:
        """Closes the open file."""
        self.file = self.block = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


READ_ERRORS = (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError)
"""What the two libraries raise for files that are damaged, gone or not what their name says."""


def _open_safetensors(file: Path) -> Callable[[str, tuple[slice, ...]], Tensor]:
    opened = safe_open(str(file), framework="pt")
    return lambda name, at: opened.get_slice(name)[at]


def _open_bin(file: Path) -> Callable[[str, tuple[slice, ...]], Tensor]:
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return lambda name, at: tensors[name].detach()[at]


def _read_bin_header(file: Path, problems: Problems) -> dict[str, TensorInfo]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        problems.add(
            f"holds other things than tensors, and running code from a checkpoint is refused: {_first_line(error)}",
            where=str(file),
            fix="take the safetensors files of this model",
        )
        return {}
    except READ_ERRORS as error:
        problems.add(
            f"cannot be read: {_first_line(error)}",
            where=str(file),
            fix="copy or download it again; a file of torch before 1.6 must be saved anew with a current torch",
        )
        return {}
    if not isinstance(tensors, dict):
        problems.add(
            f"holds a {type(tensors).__name__} instead of tensors by name",
            where=str(file),
            fix="save it with torch.save(model.state_dict(), file), or take the safetensors files",
        )
        return {}
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            problems.add(
                f"entry {name} is no plain tensor",
                where=str(file),
                fix="save it with torch.save(model.state_dict(), file), or take the safetensors files",
            )
            continue
        kind = str(tensor.dtype).removeprefix("torch.")
        dtype = header_dtype(tensor.dtype) if kind in FLOAT_TYPES.values() else kind
        found[str(name)] = TensorInfo(file, dtype, tuple(tensor.shape))
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _read_header(file: Path, problems: Problems) -> dict[str, TensorInfo]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118  (safe_open is no dict)
                view = opened.get_slice(name)
                found[name] = TensorInfo(file, view.get_dtype(), tuple(view.get_shape()))
            return found
    except (SafetensorError, OSError) as error:
        problems.add(f"cannot be read: {error}", where=str(file), fix="copy or download the file again")
        return {}


def _read_index(
    index: Path, read: Callable[[Path, Problems], dict[str, TensorInfo]], problems: Problems
) -> dict[str, TensorInfo]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(f, str) and f == Path(f).name for f in placed.values()):
            raise ValueError("weight_map must map tensor names to names of files beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.add(f"cannot be read: {error!r}", where=str(index), fix="copy or download the file again")
        return {}
    found: dict[str, TensorInfo] = {}
    for name in sorted(set(placed.values())):
        file = index.parent / name
        listed = {tensor for tensor, f in placed.items() if f == name}
        if not file.exists():
            problems.add(f"missing, with {len(listed)} tensors of the index", where=str(file), fix="download it again")
            continue
        held = read(file, problems)
        if not held:
            continue
        for tensor in sorted(listed - set(held)):
            problems.add(
                f"tensor {tensor} is not in it, although the index says so",
                where=str(file),
                fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
            )
        for tensor in sorted(set(held) - listed):
            problems.add(
                f"tensor {tensor} is in it, but the index does not say so",
                where=str(file),
                fix="compare the folder with the one it was downloaded or saved from, and fetch it again",
            )
        found.update({tensor: held[tensor] for tensor in listed & set(held)})
    return found
