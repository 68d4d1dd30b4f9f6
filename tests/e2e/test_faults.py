"""Workers that die or hang, in a real run: the message names who, where and in which phase."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.trainer.preflight import prepare
from megaverl.trainer.run import Run


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
