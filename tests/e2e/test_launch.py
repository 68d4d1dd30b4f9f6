"""The launch scripts run for real, with the tiny model; the run is watched as an operator would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from megaverl.cli import main

LAUNCH = Path(__file__).parents[2] / "launch"
SECONDS = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def watch(port: int, process: subprocess.Popen) -> tuple[list[dict], str]:
    """All answers of /healthz that differ, and the last one of /metrics, until the process ends."""
    answers, metrics, end = [], "", time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            found = json.loads(urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).read())
            metrics = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:  # not yet, or not any more
            time.sleep(0.05)
            continue
        if not answers or (found["phase"], found["step"]) != (answers[-1]["phase"], answers[-1]["step"]):
            answers.append(found)
        time.sleep(0.01)
    return answers, metrics


def test_the_half_billion_script_trains_on_a_cpu_and_can_be_watched(task, tmp_path, capsys):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    port, log = free_port(), (tmp_path / "out").open("w")
    process = subprocess.Popen(
        [LAUNCH / "run_qwen_0.5b.sh", "trainer.total_steps=3", "cluster.device=cpu", "rollout.cpu_cache_gb=0.25",
         "data.max_prompt_length=64", "data.max_response_length=16", f"reward.function.path={task.scorer}",
         "trainer.val_before_train=false", "trainer.val_every=0", "cluster.object_store_gb=0.25",
         f"observe.health_port={port}"],
        env={**environment, "MODEL": str(task.model), "TRAIN": str(task.rows["train"]), "VAL": str(task.rows["val"]),
             "RUN": str(tmp_path / "run"), "GPUS": "2", "TP": "2", "BATCH": "8", "MINI_BATCH": "4", "SAMPLES": "2",
             "MICRO_TOKENS": "4096", "PYTHON": sys.executable},
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        answers, metrics = watch(port, process)
        assert process.wait(SECONDS) == 0, (tmp_path / "out").read_text()
    finally:
        process.kill()
        process.wait()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["layout"], summary["handoff_bytes"]) == (3, "tp2-pp1-dp1", 0)
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints" / "step_3" / "manifest.json").exists()

    assert answers[0]["status"] == "starting"
    assert {answer["step"] for answer in answers} >= {0, 1, 2}
    assert "starting the workers" in {answer["phase"] for answer in answers}
    assert "megaverl_critic_score_mean " in metrics
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["step"]) == ("finished", 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    for title in ("Reward", "KL", "Entropy", "Clip fraction", "Response length, tokens", "Seconds by phase"):
        assert f"<figcaption>{title}</figcaption>" in page
