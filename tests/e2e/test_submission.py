"""A run submitted to a cluster as a Ray job. The cluster is one of this test's own, with own ports and processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/yaml/grpo_tiny.yaml"
START_SECONDS = 90


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **clean,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def dashboard():
    """The address of a cluster's dashboard; the cluster ends with the module."""
    gcs, dashboard, agent, grpc, metrics = free_ports(5)
    folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets below it
    head = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
         f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
         f"--dashboard-agent-grpc-port={grpc}", f"--metrics-export-port={metrics}", f"--temp-dir={folder}",
         "--num-cpus=3", "--object-store-memory=100000000"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard}"
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                urlopen(f"{address}/api/version", timeout=2).read()
                break
            except OSError:
                if time.monotonic() > end or head.poll() is not None:
                    pytest.fail("the cluster did not start")
                time.sleep(0.5)
        yield address
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        finally:
            if head.poll() is None:
                os.killpg(head.pid, signal.SIGKILL)


def test_a_submitted_run_trains_on_the_cluster_and_its_output_comes_back(task, tmp_path, dashboard):
    done = subprocess.run(
        [sys.executable, "-m", "megaverl", "train", RECIPE, f"model.path={task.model}",
         f"data.train_files=[{task.rows['train']}]", "data.val_files=[]", "trainer.val_every=0",
         f"reward.function.path={task.scorer}",
         "trainer.total_steps=1", "trainer.run_dir=run", "trainer.export_dir=null",
         "data.train_batch_size=4", "actor.layout.tp=1", "rollout.engine=hf",
         "trainer.val_before_train=false", "--submit"],
        env={**environment(), "RAY_ADDRESS": dashboard}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1 · reward" in done.stdout
    assert done.stderr.startswith("job megaverl-grpo_tiny-")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["layout"]) == (1, "tp1-pp1-dp2")


def test_a_submitted_run_that_fails_is_an_error_here_too(task, tmp_path, dashboard):
    done = subprocess.run(
        [sys.executable, "-m", "megaverl", "train", RECIPE, "model.path=nowhere", "--submit"],
        env={**environment(), "RAY_ADDRESS": dashboard}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere: there is no such folder" in done.stdout
