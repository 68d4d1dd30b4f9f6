import os

import pytest

from megaverl.checkpoint.retention import best_steps, newest_whole, prune, set_aside
from megaverl.checkpoint.train_state import begin_state, commit_state, complete_steps, save_state, step_dir
from megaverl.config.load import load_config
from megaverl.errors import UserError
from megaverl.parallel.layout import Layout
from megaverl.trainer.resume import checkpoint_to_resume


def save(run, *steps):
    for step in steps:
        begin_state(run, step)
        commit_state(run, step, Layout(), save_state(run, step, 0, 1, {"step": step}, {"step": step}))


def truncate(folder):
    file = folder / "rank_00000.pt"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder):
    content = bytearray((folder / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "shared.pt").write_bytes(content)


def lose(folder):
    (folder / "rank_00000.pt").unlink()


def no_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [truncate, flip, lose, no_manifest])
def test_the_one_before_a_damaged_checkpoint_is_taken_and_the_damage_named(tmp_path, damage):
    save(tmp_path, 2, 4, 6)
    damage(step_dir(tmp_path, 6))
    damage(step_dir(tmp_path, 4))
    folder, damaged = newest_whole(tmp_path)
    assert folder == step_dir(tmp_path, 2)
    assert list(damaged) == [step_dir(tmp_path, 6), step_dir(tmp_path, 4)]
    assert all("step_6" in str(problem) for problem in damaged[step_dir(tmp_path, 6)])


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path):
    config = load_config(None, [f"trainer.run_dir={tmp_path}"]).trainer
    assert checkpoint_to_resume(config) is None
    save(tmp_path, 2, 4)
    assert checkpoint_to_resume(config) == step_dir(tmp_path, 4)
    for step in (2, 4):
        flip(step_dir(tmp_path, step))
    with pytest.raises(UserError, match=r"(?s)step_4.shared\.pt: damaged.*step_2.shared\.pt: damaged"):
        checkpoint_to_resume(config)


def test_a_damaged_checkpoint_is_kept_under_another_name(tmp_path):
    for number in range(3):
        save(tmp_path, 2)
        set_aside(step_dir(tmp_path, 2))
        assert len(os.listdir(tmp_path / "checkpoints")) == number + 1
    assert complete_steps(tmp_path) == []


def test_the_newest_and_the_best_are_kept(tmp_path):
    save(tmp_path, 2, 4, 6, 8, 10)
    assert prune(tmp_path, None) == []
    assert prune(tmp_path, 2, keep={4}) == [2, 6]
    assert complete_steps(tmp_path) == [4, 8, 10]
    assert prune(tmp_path, 5) == []
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_10", "step_4", "step_8"]
    with pytest.raises(ValueError, match="always kept"):
        prune(tmp_path, 0)


def test_a_checkpoint_is_read_once(tmp_path, monkeypatch):
    """Looking for the newest whole checkpoint again reads nothing, unless a file of it has changed."""
    from megaverl.checkpoint import train_state

    save(tmp_path, 2, 4)
    read, digest = [], train_state._sha256
    monkeypatch.setattr(train_state, "_sha256", lambda file: read.append(file.name) or digest(file))
    for _ in range(3):
        assert newest_whole(tmp_path)[0] == step_dir(tmp_path, 4)
    assert sorted(read) == ["rank_00000.pt", "shared.pt"]
    flip(step_dir(tmp_path, 4))
    assert newest_whole(tmp_path)[0] == step_dir(tmp_path, 2)


def test_the_best_are_kept_beside_the_newest(tmp_path):
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.7, 5: 0.9, 6: 0.1}
    for step, score in scores.items():
        begin_state(tmp_path, step)
        files = save_state(tmp_path, step, 0, 1, {"step": step}, {"step": step})
        commit_state(tmp_path, step, Layout(), files, {"score": score})
    assert best_steps(tmp_path, 3, "max") == [5, 2, 4]
    assert best_steps(tmp_path, 2, "min") == [6, 1]
    assert best_steps(tmp_path, 0, "max") == []
    assert prune(tmp_path, 1, best_steps(tmp_path, 2, "max")) == [1, 3, 4]
    assert complete_steps(tmp_path) == [2, 5, 6]
