"""Checkpoints of a run: save when due, go on from the newest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megaverl.checkpoint.retention import newest_whole, prune, set_aside
from megaverl.checkpoint.train_state import begin_state, commit_state, load_shared
from megaverl.config.schema import Config, TrainerConfig
from megaverl.errors import Problems, UserError

if TYPE_CHECKING:
    from megaverl.trainer.run import Run


def checkpoint_to_resume(config: TrainerConfig) -> Path | None:
    """The folder that ``trainer.resume`` means, or None for a fresh start.

    ``auto`` takes the newest checkpoint whose files are all what was written.

    Raises:
        UserError: the run has checkpoints and every one is damaged; names what is wrong with each.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        folder, damaged = newest_whole(config.run_dir)
        if folder is None and damaged:
            raise UserError([problem for found in damaged.values() for problem in found])
        return folder
    return Path(config.resume)


def models_of(config: Config, *, critic: bool) -> dict[str, dict[str, str]]:
    """Role -> the folder that it started from, and a fingerprint of config.json and the weights files' names and sizes.

    The weights themselves are not read: what else takes another model's place is of another architecture or type.
    """
    paths = {"actor": config.model.path} | ({"critic": config.critic.path or config.model.path} if critic else {})
    return {
        role: {"path": str(Path(path).resolve()), "files": _fingerprint(Path(path))} for role, path in paths.items()
    }


def check_models(saved: Mapping[str, Mapping[str, str]], config: Config, folder: Path, problems: Problems) -> None:
    """The run goes on with the models that it started with: a frozen reference is read from them anew.

    A folder that has moved, or a copy, is the same model.

    Args:
        saved: what `models_of` said when the checkpoint in ``folder`` was saved.
    """
    now = models_of(config, critic="critic" in saved)
    for role in saved.keys() & now.keys():
        before, here = saved[role], now[role]
        if before["files"] == here["files"]:
            continue
        key = "critic.path" if role == "critic" and config.critic.path else "model.path"
        same = before["path"] == here["path"]
        problems.add(
            "holds another model than when the run began"
            if same
            else f"is another model than {before['path']}, from which the run of {folder} began",
            where=f"{key}={here['path']}",
            fix="name the model that the run began with, or start anew with trainer.resume=never and another run_dir",
        )


def _fingerprint(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        if file.suffix in (".safetensors", ".bin"):
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
        elif file.name == "config.json":
            found.update(file.read_bytes())
    return found.hexdigest()


def resume(run: Run) -> None:
    """Has every worker take up its part of the checkpoint, and goes on at its step and data position."""
    config = run.config.trainer
    damaged = newest_whole(config.run_dir)[1] if config.resume == "auto" else {}
    folder = checkpoint_to_resume(config)
    if folder is None:
        return
    for bad, problems in damaged.items():
        aside = set_aside(bad)
        run.console.warn(f"{problems[0]}: the checkpoint before it is used, and this one is now {aside.name}")
    shared = load_shared(folder)
    run.workers.call("load_state", str(folder.resolve()))
    run.prepared.sampler.load_state(shared["sampler"])
    run.step = int(shared["step"])
    if run.kl.target is not None:
        run.kl.coef = float(shared["kl_coef"])
    # Versions count handoffs; the one made when the loop starts serves the loaded weights.
    run.version = int(shared["version"]) - 1
    run.console.note(f"goes on after step {run.step} from {folder}")


def save_if_due(run: Run) -> None:
    """Saves every ``trainer.save_every`` steps and after the last one; never when it is 0."""
    every = run.config.trainer.save_every
    if every and (run.step % every == 0 or run.step == run.total_steps):
        with run.timer.phase("save_checkpoint"):
            save(run)


def save(run: Run) -> Path:
    """Writes a checkpoint of the whole run, all ranks in parallel; it counts only once its manifest is written."""
    directory = run.directory.resolve()
    shared = {"step": run.step, "version": run.version, "sampler": run.prepared.sampler.state(), "kl_coef": run.kl.coef}
    begin_state(directory, run.step)
    files = run.workers.call("save_state", str(directory), run.step, shared)
    details = {
        "project": run.config.trainer.project,
        "experiment": run.config.trainer.experiment,
        "trained": ["actor", "critic"] if run.prepared.critic else ["actor"],
        "models": models_of(run.config, critic=run.prepared.critic is not None),
    }
    folder = commit_state(directory, run.step, run.prepared.layout, [f for part in files for f in part], details)
    prune(directory, run.config.trainer.keep_last)  # once the new one is whole, never before
    return folder
