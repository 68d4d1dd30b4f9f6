"""The launch scripts run for real, with the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"


def test_the_half_billion_script_trains_on_a_cpu(task, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [LAUNCH / "run_qwen_0.5b.sh", "trainer.total_steps=2", "cluster.device=cpu", "rollout.cpu_cache_gb=0.25",
         "data.max_prompt_length=64", "data.max_response_length=16", f"reward.function.path={task.scorer}",
         "trainer.val_before_train=false", "trainer.val_every=0", "cluster.object_store_gb=0.25"],
        env={**environment, "MODEL": str(task.model), "TRAIN": str(task.rows["train"]), "VAL": str(task.rows["val"]),
             "RUN": str(tmp_path / "run"), "GPUS": "2", "TP": "2", "BATCH": "8", "MINI_BATCH": "4", "SAMPLES": "2",
             "MICRO_TOKENS": "4096", "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["layout"], summary["handoff_bytes"]) == (2, "tp2-pp1-dp1", 0)
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "manifest.json").exists()
