"""The safetensors files of a Hugging Face checkpoint folder: which tensors there are, read from headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megaverl.errors import Problems

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of the float types in a safetensors header, and in torch."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: its file, its type as the header writes it (``BF16``) and its shape."""

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
    """All tensors of the checkpoint in ``folder``; unreadable, missing or contradictory files go to ``problems``."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        problems.add(
            f"holds both {SINGLE_FILE} and {INDEX_FILE}", where=str(folder), fix="remove the one that is out of date"
        )
        return {}
    if single.exists():
        return _read_header(single, problems)
    if index.exists():
        return _read_index(index, problems)
    other = sorted(p.name for p in folder.glob("*.bin"))
    problems.add(
        f"neither {SINGLE_FILE} nor {INDEX_FILE}" + (f", but {other[0]}" if other else ""),
        where=str(folder),
        fix="megaverl reads safetensors: load the model with transformers and call save_pretrained to convert it",
    )
    return {}


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


def _read_index(index: Path, problems: Problems) -> dict[str, TensorInfo]:
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
        held = _read_header(file, problems)
        if not held:
            continue
        for tensor in sorted(listed - set(held)):
            problems.add(f"tensor {tensor} is not in it, although the index says so", where=str(file))
        for tensor in sorted(set(held) - listed):
            problems.add(f"tensor {tensor} is in it, but the index does not say so", where=str(file))
        found.update({tensor: held[tensor] for tensor in listed & set(held)})
    return found
