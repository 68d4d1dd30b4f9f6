"""Which checkpoints of a run are whole, and which are kept."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from megaverl.checkpoint.train_state import check_contents, check_state, complete_steps, read_manifest, step_dir
from megaverl.errors import Problem, Problems

_checked: dict[Path, list[tuple[str, int, int]]] = {}
"""Checkpoints that this process has read and found whole, as they were then: reading one again tells nothing new."""


def _signature(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir())


def best_steps(run_dir: Path | str, count: int, mode: str) -> list[int]:
    """The steps of the ``count`` complete checkpoints with the best score in their manifest, the best first.

    Of equals the later one is better. Checkpoints without a score are none of them.

    Args:
        mode: ``max`` or ``min``.
    """
    if not count:
        return []
    sign = 1 if mode == "max" else -1
    found = []
    for step in complete_steps(run_dir):
        score = read_manifest(step_dir(run_dir, step), Problems()).get("details", {}).get("score")
        if score is not None:
            found.append((sign * score, step))
    return [step for _, step in sorted(found, reverse=True)[:count]]


def newest_whole(run_dir: Path | str) -> tuple[Path | None, dict[Path, list[Problem]]]:
    """The newest checkpoint whose files are all there and have the content that was written.

    Returns:
        Its folder (None when there is none), and by folder what is wrong with each newer one.
    """
    damaged: dict[Path, list[Problem]] = {}
    for step in reversed(complete_steps(run_dir)):
        folder, problems = step_dir(run_dir, step), Problems()
        manifest = check_state(folder, None, problems)
        if not problems.found and _checked.get(folder) != (seen := _signature(folder)):
            check_contents(folder, manifest, [entry["name"] for entry in manifest["files"]], problems)
            if not problems.found:
                _checked[folder] = seen
        if not problems.found:
            return folder, damaged
        damaged[folder] = problems.found
    return None, damaged


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint so that no run reads it, and a new one of its step can be written."""
    number = 0
    while (aside := folder.with_name(f"{folder.name}.damaged{f'.{number}' if number else ''}")).exists():
        number += 1
    return folder.rename(aside)


def prune(run_dir: Path | str, keep_last: int | None, keep: Collection[int] = ()) -> list[int]:
    """Removes all complete checkpoints but the ``keep_last`` newest and the steps in ``keep`` (the best ones).

    A checkpoint gets its temporary name first: one that is half removed is never read.

    Returns:
        The steps removed; none when ``keep_last`` is None.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise ValueError(f"the newest checkpoint is always kept, keep_last is {keep_last}")
    steps = [step for step in complete_steps(run_dir)[:-keep_last] if step not in keep]
    for step in steps:
        folder = step_dir(run_dir, step)
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder.rename(temporary))
    return steps
