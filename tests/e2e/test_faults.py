"""Workers that die or hang, in a real run: the message names who, where and in which phase."""

from __future__ import annotations

import os
import shutil
import signal
import threading

import pytest

from benchmarks import faults, nodes
from megaverl.checkpoint.retention import newest_whole
from megaverl.checkpoint.train_state import begin_state
from megaverl.config.load import load_config
from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.trainer.preflight import prepare
from megaverl.trainer.resume import Saving, finish_save, save
from megaverl.trainer.run import Run
from megaverl.trainer.trainer import Trainer
from megaverl.workers.liveness import WorkersLost


@pytest.fixture
def run(task, tmp_path):
    """Two workers in TP 2, one of which the test harms; the phase limit is for what comes after the start."""
    started = Run(
        prepare(task.config("sft_tiny.yaml", tmp_path, "trainer.total_steps=1", "actor.layout.tp=2")), Console()
    )
    try:
        started.start()
        yield started
    finally:
        started.close()


def test_case_33_a_killed_worker_is_named_and_not_the_peer_that_waits_for_it(run, tmp_path):
    """Rank 0 is in a collective when rank 1 dies, and sees a broken connection first or at the same time."""
    pid = run.worker_info[1]["pid"]
    os.kill(pid, signal.SIGSTOP)  # rank 0 is certain to wait for it
    timer = threading.Timer(3.0, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(
        RunError, match=rf"rank 1 \(node [\d.]+, pid {pid}, actor\) died in phase export_hf: "
    ) as caught:
        run.workers.call("export_hf", str(tmp_path / "hf"))
    assert f"the end of {tmp_path.resolve() / 'logs' / 'rank_1.log'}" in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_case_33_a_stopped_worker_is_named_when_the_phase_is_over_time(run, tmp_path):
    pid = run.worker_info[1]["pid"]
    run.workers.spec.config.cluster.phase_timeout = 5.0
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RunError) as caught:
        run.workers.call("export_hf", str(tmp_path / "hf"))
    lines = str(caught.value).splitlines()
    assert "did not finish phase export_hf within 5 s" in lines[0]
    assert lines[1].startswith("  rank 1 (")
    assert lines[1].endswith("its process is stopped")


def test_case_33_a_worker_without_a_sign_of_life_ends_the_run_long_before_the_phase_does(run, tmp_path):
    """Both ranks wait in a collective for ever; the one that is stopped is told by its silence."""
    pid = run.worker_info[1]["pid"]
    run.workers.spec.config.cluster.heartbeat_timeout = 5.0
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkersLost) as caught:
        run.workers.call("export_hf", str(tmp_path / "hf"))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "1 worker(s) did not finish phase export_hf and gave no sign of life for 5 s (cluster.heartbeat_timeout):"
    )
    assert lines[1].startswith("  rank 1 (node ")
    assert lines[1].endswith("its process is stopped")


def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_says_so(run, tmp_path):
    run.step = 1
    save(run, {})
    finish_save(run)
    run.step = 2
    (tmp_path / "checkpoints" / "step_2.tmp").write_text("in the way")
    with pytest.raises(RunError, match=r"(?s)of step 2 could not be written.*step_1, and untouched"):
        save(run, {})
    (tmp_path / "checkpoints" / "step_2.tmp").unlink(missing_ok=True)
    shutil.move(tmp_path / "checkpoints", tmp_path / "away")  # storage that vanishes while it is written to
    begin_state(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints")
    run.step, run.saving = 3, Saving(3, {})
    run.workers.call("save_state", str(tmp_path), 3, {}, True)
    with pytest.raises(RunError, match=r"of step 3 could not be written"):
        finish_save(run)
    shutil.move(tmp_path / "away", tmp_path / "checkpoints")
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoints" / "step_1"


def test_case_33_a_run_restarts_after_a_killed_worker_and_ends_as_an_undisturbed_one(task, tmp_path):
    """Killed in the update of the second step, with one restart allowed."""
    words = [
        f"model.path={task.model}", f"data.train_files=[{task.rows['train']}]", f"reward.function.path={task.scorer}",
    ]  # fmt: skip
    config = load_config(
        faults.TINY, [*words, *faults.OPTIONS, "actor.layout.tp=2", f"trainer.run_dir={tmp_path / 'u'}"]
    )
    with Trainer(config) as trainer:
        trainer.train()
    right = nodes.rows_of(tmp_path / "u")
    outcome = faults.worker_case(words, tmp_path, "update_actor", 1, "kill -9", right)
    assert outcome.named, outcome.message
    assert outcome.same
