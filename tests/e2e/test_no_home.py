"""A user without a home directory (a container's bare uid): every command works, and nothing is written there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NOWHERE = "/proc/nowhere"  # nobody can make a folder there, not even root
REPOSITORY = Path(__file__).parents[2]


def megaverl(*words: str) -> str:
    """Runs a command; its standard output."""
    environment = {**os.environ, "HOME": NOWHERE, "PYTHONPATH": str(REPOSITORY)}
    for name in ("XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "megaverl", *words], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_doctor_train_and_convert_without_a_home(task, tmp_path):
    found = json.loads(megaverl("doctor", "--json"))
    assert found
    run = tmp_path / "run"
    megaverl(
        *("train", str(REPOSITORY / "configs" / "yaml" / "grpo_tiny.yaml"), f"model.path={task.model}"),
        *(f"data.train_files=[{task.rows['train']}]", f"data.val_files=[{task.rows['val']}]"),
        *("actor.layout.tp=1", "cluster.workers_per_node=1", "cluster.device=cpu", "trainer.total_steps=1"),
        *(
            "trainer.val_before_train=false",
            "trainer.save_every=1",
            f"trainer.run_dir={run}",
            "trainer.export_dir=null",
        ),
        "trainer.loggers=[console,file,tensorboard]",
    )
    megaverl("convert", "to-hf", str(run / "checkpoints" / "step_1"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
