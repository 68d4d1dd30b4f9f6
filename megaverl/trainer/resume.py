"""Checkpoints of a run: save when due, go on from the newest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.checkpoint.mirror import fetch_newer
from megaverl.checkpoint.retention import best_steps, newest_whole, prune, set_aside
from megaverl.checkpoint.train_state import (
    abandon_state,
    begin_state,
    commit_state,
    complete_steps,
    find_latest,
    load_shared,
    step_dir,
)
from megaverl.config.schema import Config, TrainerConfig
from megaverl.errors import Problems, RunError, UserError
from megaverl.trainer.signals import Stopped
from megaverl.workers.liveness import WorkersLost

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
        if config.mirror is not None:
            steps = complete_steps(config.run_dir)
            fetch_newer(config.mirror, config.run_dir, steps[-1] if steps else None)
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
    if run.mirroring is not None and folder.resolve() == step_dir(run.directory, run.step).resolve():
        run.mirroring.copy(folder, [])  # it may be that the run ended before it could be


@dataclass(frozen=True)
class Saving:
    """A checkpoint that the workers are writing.

    Attributes:
        details: what its manifest will say of the run.
    """

    step: int
    details: dict[str, Any]


def save_if_due(run: Run, metrics: Mapping[str, float] | None = None) -> None:
    """Saves every ``trainer.save_every`` steps, after the last one and when the run was asked to stop.

    Never when it is 0. A checkpoint that was being written is finished here as soon as all workers are done with it.

    Args:
        metrics: of the step, among them what ``trainer.keep_best`` compares.

    Raises:
        RunError: this checkpoint, or the one that was being written, could not be written.
    """
    every = run.config.trainer.save_every
    if run.mirroring is not None and (news := run.mirroring.news()) is not None:
        run.console.warn(f"the checkpoint is not copied to trainer.mirror: {news}")
    if run.saving is not None and all(run.workers.call("save_is_done")):
        finish_save(run)
    if every and (run.step % every == 0 or not run.goes_on):
        with run.timer.phase("save_checkpoint"):
            save(run, metrics or {})


def save(run: Run, metrics: Mapping[str, float]) -> None:
    """Has all ranks write a checkpoint in parallel; it counts only once its manifest is written (`finish_save`)."""
    finish_save(run)
    config, directory = run.config.trainer, run.directory.resolve()
    shared = {"step": run.step, "version": run.version, "sampler": run.prepared.sampler.state(), "kl_coef": run.kl.coef}
    details = {
        "project": config.project,
        "experiment": config.experiment,
        "trained": ["actor", "critic"] if run.prepared.critic else ["actor"],
        "models": models_of(run.config, critic=run.prepared.critic is not None),
        "score": score_of(metrics, config.best_metric),
    }
    run.saving = Saving(run.step, details)
    with _explained(run):
        begin_state(directory, run.step)
        run.workers.call("save_state", str(directory), run.step, shared, config.save_async)
    if not config.save_async:
        finish_save(run)


def finish_save(run: Run) -> None:
    """Waits for the checkpoint that is being written, if there is one, makes it complete and removes old ones.

    Raises:
        RunError: it could not be written.
    """
    saving, config, directory = run.saving, run.config.trainer, run.directory.resolve()
    if saving is None:
        return
    with _explained(run):
        files = [file for part in run.workers.call("saved_files") for file in part]
        commit_state(directory, saving.step, run.prepared.layout, files, saving.details)
    run.saving = None
    removed = prune(directory, config.keep_last, best_steps(directory, config.keep_best, config.best_mode))
    if run.mirroring is not None:
        run.mirroring.copy(step_dir(directory, saving.step), removed)


@contextmanager
def _explained(run: Run) -> Iterator[None]:
    """A save that fails says which checkpoint it was and which one is left; what it wrote is removed."""
    try:
        yield
    except WorkersLost:
        raise
    except (RunError, OSError) as error:
        step = run.saving.step if run.saving else run.step
        run.saving = None
        abandon_state(run.directory.resolve(), step)
        newest = find_latest(run.directory)
        left = f"the newest complete one is {newest}, and untouched" if newest else "the run has no other"
        raise RunError(
            f"the checkpoint of step {step} could not be written: {error}\n"
            f"    -> {left}; see that there is space and that the storage can be written to, then start the run again"
        ) from error


def score_of(metrics: Mapping[str, float], name: str | None) -> float | None:
    """What ``trainer.keep_best`` compares: ``metrics[name]``, or the mean of ``val-core/.../mean@N``."""
    if name is not None:
        return metrics.get(name)
    found = [value for key, value in metrics.items() if key.startswith("val-core/") and "/mean@" in key]
    return sum(found) / len(found) if found else None


def stopped(run: Run) -> Stopped:
    """The error that ends a run which was asked to stop, and says where it can go on."""
    signal = run.signals.received
    assert signal is not None
    if run.config.trainer.save_every:
        text = f"its checkpoint is written, and the same command goes on from it ({find_latest(run.directory)})"
    else:
        text = "nothing was saved, as trainer.save_every is 0"
    return Stopped(int(signal), f"{signal.name} stopped the run after step {run.step} of {run.total_steps}: {text}")
