"""A second home of a run's checkpoints: S3-compatible storage, or whatever else fsspec reaches.

    URL/step_N/     the files of run_dir/checkpoints/step_N, manifest.json last: complete

Such storage has no rename; a folder with a manifest is therefore whole, and one without is not read. A checkpoint that
comes back is checked like any other, by the hashes in its manifest.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megaverl.checkpoint.train_state import MANIFEST, step_dir
from megaverl.errors import Problem, RunError, UserError

ATTEMPTS = 4
PAUSE_SECONDS = 1.0
T = TypeVar("T")


class Mirror:
    """Copies checkpoints to ``url`` and back. Every request is tried `ATTEMPTS` times with growing pauses.

    Args:
        url: such as ``s3://bucket/folder``. Credentials and endpoint are those of the environment (AWS_ENDPOINT_URL).

    Raises:
        UserError: fsspec does not know the kind of storage, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            fix = "pip install s3fs (gcsfs, adlfs, ...), or name another kind of storage"
            raise UserError(Problem(f"cannot be used: {error}", f"trainer.mirror={url}", fix)) from error

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint there, in order."""
        found = self._tried("list", lambda: self._files.glob(f"{self._root}/step_*/{MANIFEST}"))
        names = (re.search(r"step_(\d+)/[^/]+$", str(path)) for path in found)
        return sorted(int(match.group(1)) for match in names if match)

    def upload(self, folder: Path) -> None:
        """Copies a complete checkpoint; nothing is left to do when it is there already.

        Raises:
            RunError: it could not be copied.
        """
        target = f"{self._root}/{folder.name}"
        if self._tried("look up", lambda: self._files.exists(f"{target}/{MANIFEST}")):
            return
        names = sorted((p.name for p in folder.iterdir()), key=lambda name: (name == MANIFEST, name))
        for name in names:
            self._tried(
                f"write {name} to", lambda name=name: self._files.put_file(str(folder / name), f"{target}/{name}")
            )

    def download(self, step: int, run_dir: Path | str) -> Path:
        """Fetches a checkpoint into ``run_dir``; returns its folder there.

        Raises:
            RunError: it could not be fetched.
        """
        final, source = step_dir(run_dir, step), f"{self._root}/step_{step}"
        partial = final.with_name(f"{final.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in self._tried("list", lambda: self._files.ls(source, detail=False)):
            name = str(path).rsplit("/", 1)[-1]
            self._tried(
                f"read {name} from", lambda path=path, name=name: self._files.get_file(path, str(partial / name))
            )
        return partial.rename(final)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, its manifest first: what is half removed is never read."""
        source = f"{self._root}/step_{step}"
        if self._tried("look up", lambda: self._files.exists(f"{source}/{MANIFEST}")):
            self._tried("remove from", lambda: self._files.rm_file(f"{source}/{MANIFEST}"))
            self._tried("remove from", lambda: self._files.rm(source, recursive=True))

    def _tried(self, what: str, action: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:  # each kind of storage has errors of its own
                if attempt == ATTEMPTS:
                    text = f"cannot {what} {self.url}, tried {ATTEMPTS} times: {type(error).__name__}: {error}"
                    raise RunError(text) from error
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("not reached: the last attempt returns or raises")


def fetch_newer(url: str, run_dir: Path | str, newest: int | None) -> Path | None:
    """Fetches the newest checkpoint from ``url`` when it is newer than step ``newest`` of the run directory."""
    mirror = Mirror(url)
    steps = [step for step in mirror.steps() if newest is None or step > newest]
    return mirror.download(steps[-1], run_dir) if steps and not step_dir(run_dir, steps[-1]).exists() else None
