"""A worker that dies in the middle of a handoff."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megaverl.errors import RunError
from megaverl.observe.console import Console
from megaverl.rollout.engine import Sampling
from megaverl.trainer.preflight import prepare
from megaverl.trainer.run import Run
from megaverl.workers.rollout_role import PromptTask

GREEDY = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=2, seed=0)
TASK = PromptTask(0, [1, 2, 3], "megaverl/arithmetic", "1", {}, 0)


@pytest.fixture
def run(task, tmp_path):
    """Two workers that send weights to each other at every handoff."""
    layouts = "actor.layout.tp=2", "rollout.tp=1"
    started = Run(prepare(task.config("grpo_tiny.yaml", tmp_path, "trainer.total_steps=1", *layouts)), Console())
    try:
        started.start()
        yield started
    finally:
        started.close()


def test_case_33_a_worker_killed_in_a_handoff_is_named_and_no_engine_serves_the_half_of_it(run):
    import ray

    reports = run.workers.call("to_rollout", 0)
    assert all(report["handoff/bytes_received"] > 0 for report in reports)
    for name in ("train_weights", "train_peak", "rollout_weights"):
        assert all(report[f"memory/{name}"] > 0 for report in reports)
    run.workers.call("to_train")
    pid = run.worker_info[1]["pid"]
    os.kill(pid, signal.SIGSTOP)  # rank 0 is certain to be in the middle of the handoff, waiting for it
    threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RunError, match=rf"rank 1 \(node [\d.]+, pid {pid}, .*\) died in phase to_rollout: "):
        run.workers.call("to_rollout", 1)
    with pytest.raises(ray.exceptions.RayTaskError, match="the rollout engine is asleep"):
        ray.get(run.workers.ranks[0].generate.remote([TASK], GREEDY), timeout=60)
