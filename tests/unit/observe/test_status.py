"""Where a run stands, as the driver keeps it and as others read it."""

from __future__ import annotations

import fcntl
import json
import math
import time

import pytest

from megaverl.cli import main
from megaverl.errors import RunError, UserError
from megaverl.observe.console import Console
from megaverl.observe.heartbeat import Heartbeat
from megaverl.observe.status import FILE, LOCK, StatusBoard, how_it_ended, read_status
from megaverl.trainer.signals import Stopped


@pytest.fixture
def running(tmp_path):
    """A run directory whose driver lives: the board, inside its context, and the folder."""
    with (tmp_path / LOCK).open("w") as lock, StatusBoard(tmp_path, every=0.01) as board:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield board, tmp_path


def wait_for(folder, condition):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            status = read_status(folder)
        except UserError:
            status = None
        if status is not None and condition(status):
            return status
        time.sleep(0.005)
    raise AssertionError(f"never came: {status}")


def test_phases_steps_and_numbers_reach_the_file(running):
    board, folder = running
    heartbeat = Heartbeat(Console(), board=board)
    heartbeat.step(3, 10)
    heartbeat.phase("generating")
    board.log({"critic/score/mean": 0.5, "actor/grad_norm": math.inf})
    status = wait_for(folder, lambda s: s.metrics)
    assert (status.state, status.step, status.total_steps, status.phase) == ("running", 3, 10, "generating")
    assert status.metrics == {"critic/score/mean": 0.5, "actor/grad_norm": math.inf}
    assert status.run_dir == str(folder)
    json.loads((folder / FILE).read_text(), parse_constant=pytest.fail)  # JSON has no Infinity


def test_the_last_phase_is_written_although_it_came_right_after_another(running):
    board, folder = running
    for name in ("one", "two", "three"):
        board.phase(name)
    wait_for(folder, lambda s: s.phase == "three")


def test_the_end_is_written_and_the_first_word_about_it_holds(tmp_path):
    with StatusBoard(tmp_path) as board:
        board.step(2, 5)
        board.finish(*how_it_ended(RunError("rank 3 died")))
        board.finish("finished")
    status = read_status(tmp_path)
    assert (status.state, status.error, status.step) == ("failed", "rank 3 died", 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), Stopped(15, "SIGTERM stopped the run")])
def test_a_run_that_was_asked_to_stop_has_not_failed(error):
    assert how_it_ended(error)[0] == "stopped"


def test_a_driver_that_is_gone_without_a_word_has_died(tmp_path):
    (tmp_path / LOCK).touch()
    with StatusBoard(tmp_path) as board:
        board.step(2, 5)
    assert read_status(tmp_path).state == "died"


def test_a_disk_that_refuses_does_not_end_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.write_text("a file, not a folder")
    with StatusBoard(folder) as board:
        board.phase("generating")


def test_a_run_that_never_started_writes_nothing(tmp_path):
    StatusBoard(tmp_path).finish("failed", "another run writes there now")
    assert not list(tmp_path.iterdir())


def test_the_command(running, capsys):
    board, folder = running
    board.step(7, 20)
    board.phase("updating the actor")
    board.log({"critic/score/mean": 0.25})
    wait_for(folder, lambda s: s.metrics)
    assert main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in ("running", "7/20", "updating the actor, for", "0.25"):
        assert part in out
    assert main(["status", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["step"]) == ("running", 7)
    assert document["seconds_since_progress"] >= 0


def test_the_command_tells_a_failed_run_by_its_exit_code_and_no_run_by_another(tmp_path, capsys):
    with StatusBoard(tmp_path) as board:
        board.finish("failed", "rank 3 died")
    assert main(["status", str(tmp_path)]) == 1
    assert "rank 3 died" in capsys.readouterr().out
    assert main(["status", str(tmp_path / "nothing")]) == 2
    assert "no run was started there" in capsys.readouterr().err
