"""The weights of a divided model on disk, one file per rank: of a train state, or of `convert to-megatron`.

Both are read alike: memory-mapped, tensor by tensor, a bounded part of each file at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megaverl.checkpoint.hf_files import READ_ERRORS, SINGLE_FILE, torch_dtype
from megaverl.checkpoint.train_state import MANIFEST, check_contents, check_state, rank_file, read_manifest
from megaverl.errors import Problem, Problems, UserError
from megaverl.parallel.layout import Coordinates, Layout

MEGATRON_MANIFEST = "megatron.json"
FORMAT = 1
MAPPED_BYTES = 64 * 1024**2
"""A file is mapped anew after this many bytes were read: the pages of a mapping count as the process's memory."""


@dataclass
class _Opened:
    """A file that is mapped: its parameters (without data), how to get one, and the bytes that may still be read."""

    parameters: dict[str, Tensor]
    get: Callable[[str], Tensor]
    left: int = MAPPED_BYTES


@dataclass
class RankFiles:
    """The parameters of one role on every rank of one copy of the model.

    Attributes:
        layout: how the model is divided; only its tp and pp count here.
        manifest: what the folder says of itself.
        files: the file of each (stage, TP rank).
        keys: where a file holds the parameters: keys of nested dictionaries; empty for safetensors.
    """

    layout: Layout
    manifest: dict[str, Any]
    files: dict[tuple[int, int], Path]
    keys: tuple[str, ...] = ()
    _opened: dict[tuple[int, int], _Opened] = field(default_factory=dict)

    def parameters(self, stage: int, tp_rank: int) -> dict[str, Tensor]:
        """Name -> tensor without data, with the shape and type of the parameter.

        Raises:
            UserError: the file cannot be read, or does not hold parameters.
        """
        return self._open(stage, tp_rank).parameters

    def read(self, stage: int, tp_rank: int, name: str) -> Tensor:
        """The parameter, where the format allows as mapped memory; do not write to it."""
        opened = self._open(stage, tp_rank)
        tensor = opened.get(name)
        opened.left -= tensor.numel() * tensor.element_size()
        return tensor

    def _open(self, stage: int, tp_rank: int) -> _Opened:
        at = (stage, tp_rank)
        if at in self._opened and self._opened[at].left > 0:
            return self._opened[at]
        for other in [other for other in self._opened if other[0] != stage or other == at]:
            del self._opened[other]  # other stages are done, or not yet begun
        file = self.files[at]
        try:
            self._opened[at] = self._map_state(file) if self.keys else _map_safetensors(file)
        except READ_ERRORS as error:
            raise UserError(
                Problem(
                    f"cannot be read: {error}",
                    where=str(file),
                    fix="name another checkpoint of the run, or make the folder again",
                )
            ) from error
        return self._opened[at]

    def _map_state(self, file: Path) -> _Opened:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        for key in self.keys:
            if not isinstance(found, Mapping) or key not in found:
                raise UserError(
                    Problem(
                        f"holds no {' of '.join(reversed(self.keys))}",
                        where=str(file),
                        fix="name another checkpoint of the run",
                    )
                )
            found = found[key]
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in found.items()}
        return _Opened(empty, found.__getitem__)


def _map_safetensors(file: Path) -> _Opened:
    opened = safe_open(str(file), framework="pt")
    empty = {}
    for name in opened.keys():  # noqa: SIM118  (safe_open is no dict)
        view = opened.get_slice(name)
        empty[name] = torch.empty(view.get_shape(), dtype=torch_dtype(view.get_dtype()), device="meta")
    return _Opened(empty, opened.get_tensor)


def open_rank_files(folder: Path | str, role: str) -> RankFiles:
    """Finds out what ``folder`` is and checks that it is whole; contents are compared with their recorded hashes.

    Args:
        role: ``actor`` or ``critic``, for a train state.

    Raises:
        UserError: it is neither a train state nor a folder of `convert to-megatron`, or it is damaged; all problems.
    """
    folder, problems = Path(folder), Problems()
    if (folder / MEGATRON_MANIFEST).is_file():
        found = _open_converted(folder, problems)
    elif (folder / MANIFEST).is_file():
        found = _open_train_state(folder, role, problems)
    else:
        raise UserError(
            Problem(
                f"holds neither {MANIFEST} nor {MEGATRON_MANIFEST}" if folder.is_dir() else "there is no such folder",
                where=str(folder),
                fix="name a checkpoint of a run (runs/mine/checkpoints/step_100) or a folder of convert to-megatron",
            )
        )
    problems.raise_if_any()
    if found is None:
        raise RuntimeError("a folder could not be read and no check has said why")
    return found


def _open_train_state(folder: Path, role: str, problems: Problems) -> RankFiles | None:
    manifest = read_manifest(folder, problems)
    if not manifest:
        return None
    layout = Layout(**manifest["layout"])
    check_state(folder, layout, problems)
    trained = manifest["details"].get("trained", ("actor",))
    if role not in trained:
        problems.add(
            f"the run trained no {role}, only {', '.join(trained)}",
            where=str(folder / MANIFEST),
            fix="name a checkpoint of a run with a critic (algorithm.name=ppo), or leave --role out",
        )
    # The ranks of the first data and context parallel replica hold everything.
    at = {(pp, tp): Coordinates(tp=tp, cp=0, dp=0, pp=pp) for pp in range(layout.pp) for tp in range(layout.tp)}
    names = {place: rank_file(layout.rank_of(where)) for place, where in at.items()}
    if not problems.found:
        check_contents(folder, manifest, names.values(), problems)
    return RankFiles(layout, manifest, {at: folder / name for at, name in names.items()}, (role, "weights"))


def _open_converted(folder: Path, problems: Problems) -> RankFiles | None:
    file = folder / MEGATRON_MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        layout = Layout(tp=manifest["tp"], pp=manifest["pp"])
        types, known = manifest["hf_types"], manifest["format"] == FORMAT
        if not isinstance(types, dict):
            raise ValueError("hf_types must map names to types")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.add(
            f"cannot be read: {error!r}", where=str(file), fix="make the folder again with megaverl convert to-megatron"
        )
        return None
    if not known:
        problems.add(
            f"format {manifest['format']} is not known, this megaverl reads {FORMAT}",
            where=str(file),
            fix="convert it with the version of megaverl that wrote it",
        )
    places = [(pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]
    files = {place: folder / rank_folder(*place) / SINGLE_FILE for place in places}
    for missing in (path for path in files.values() if not path.is_file()):
        problems.add("missing", where=str(missing), fix="make the folder again with megaverl convert to-megatron")
    return RankFiles(layout, manifest, files)


def rank_folder(stage: int, tp_rank: int) -> str:
    """Name of the folder of one rank in a folder of `convert to-megatron`."""
    return f"tp_{tp_rank:02d}_pp_{stage:03d}"
